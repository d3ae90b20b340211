"""The supported model families, as data: fields of `config.json`, defaults and differences.

Defaults are those of the configuration classes of transformers 5.23 (a test compares them). A field
is *used*, *ignored* (known not to change inference), *fixed* (accepted only with the values named)
or unknown, which is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

QkNorm = Literal["none", "head", "full"]
WindowedLayers = Literal["none", "all", "even_below_max", "from_max"]

# Training, bookkeeping and generation defaults: no effect on the mathematics of a forward pass.
IGNORED = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention
    architectures attention_dropout attn_implementation bad_words_ids begin_suppress_tokens
    bos_token_id cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size experts_implementation
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing hidden_dropout id2label initializer_range label2id length_penalty
    max_length max_sequence_length min_length model_type name_or_path no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix problem_type remove_invalid_values
    repetition_penalty resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef
    router_jitter_noise sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905 - seventy names read better as words
)

# Accepted only where they mean what raymoe does anyway.
FIXED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "chunk_size_feed_forward": (0, None),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "is_decoder": (True, False, None),
    "is_encoder_decoder": (False, None),
    "layer_types": (None,),
    "mlp_bias": (False, None),
    "per_layer_config": (None, {}),
    "pretraining_tp": (1, None),
    "pruned_heads": (None, {}),
    "qkv_bias": (False, None),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "tie_last_hidden_states": (True, False, None),
    "use_sliding_window": (False, None),
}

ROPE_FIELDS = frozenset(
    {
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What tells one family from the others.

    Attributes:
        architecture: Class that `architectures` of the configuration must name.
        defaults: Used fields, and what the configuration class takes where one is missing.
        aliases: Other names of used fields.
        ignored: Fields without effect in this family, beyond `IGNORED`.
        default_theta: Base of the rope where the configuration names none.
        is_rope_partial: Whether `partial_rotary_factor` is honoured by transformers.
        qk_norm: Norm of queries and keys: none, per head, or over the full width.
        qkv_bias: Field that switches biases of the query, key and value projections.
        output_bias: Field that switches the bias of the output projection.
        mlp_bias: Field that switches biases of dense feed-forward layers.
        num_experts: Field with the number of experts; None for dense families.
        expert_hidden: Field with the hidden size of an expert.
        renormalize: Field that switches renormalisation of the chosen weights; None: always.
        shared_hidden: Field with the hidden size of the shared expert, which has a gate.
        windowed_layers: Which layers slide where no `layer_types` say so.
        is_window_switched: Whether `use_sliding_window` switches the window.
        has_layer_types: Whether transformers reads `layer_types`.
    """

    architecture: str
    defaults: Mapping[str, object]
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    default_theta: float = 10_000.0
    is_rope_partial: bool = False
    qk_norm: QkNorm = "none"
    qkv_bias: str | None = None
    output_bias: str | None = None
    mlp_bias: str | None = None
    num_experts: str | None = None
    expert_hidden: str | None = None
    renormalize: str | None = None
    shared_hidden: str | None = None
    windowed_layers: WindowedLayers = "none"
    is_window_switched: bool = False
    has_layer_types: bool = False


def _fields(**differences: object) -> dict[str, object]:
    """Fields that every family uses, with the most common defaults."""
    common: dict[str, object] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    return common | differences


_QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}

FAMILIES: Mapping[str, Family] = {
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults=_fields(
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            eos_token_id=2,
            sliding_window=None,
            num_experts_per_tok=2,
            num_local_experts=8,
        ),
        aliases={"num_experts": "num_local_experts"},
        default_theta=1_000_000.0,
        num_experts="num_local_experts",
        expert_hidden="intermediate_size",
        windowed_layers="all",
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        defaults=_fields(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            qkv_bias=True,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts_per_tok=4,
            num_experts=60,
            max_window_layers=28,
            layer_types=None,
            **_QWEN_MOE,
            **_QWEN_WINDOW,
        ),
        aliases={"num_local_experts": "num_experts"},
        qkv_bias="qkv_bias",
        num_experts="num_experts",
        expert_hidden="moe_intermediate_size",
        renormalize="norm_topk_prob",
        shared_hidden="shared_expert_intermediate_size",
        windowed_layers="even_below_max",
        is_window_switched=True,
        has_layer_types=True,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        defaults=_fields(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=24,
            num_key_value_heads=4,
            attention_bias=False,
            moe_intermediate_size=768,
            num_experts_per_tok=8,
            num_experts=128,
            **_QWEN_MOE,
            **_QWEN_WINDOW,
        ),
        aliases={"num_local_experts": "num_experts"},
        ignored=frozenset({"max_window_layers"}),
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        num_experts="num_experts",
        expert_hidden="moe_intermediate_size",
        renormalize="norm_topk_prob",
        windowed_layers="all",
        is_window_switched=True,
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        defaults=_fields(
            vocab_size=50304,
            hidden_size=2048,
            intermediate_size=2048,
            num_hidden_layers=16,
            num_attention_heads=16,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            eos_token_id=50279,
            attention_bias=False,
            clip_qkv=None,
            num_experts_per_tok=8,
            num_experts=64,
            norm_topk_prob=False,
        ),
        aliases={"num_local_experts": "num_experts"},
        qk_norm="full",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        num_experts="num_experts",
        expert_hidden="intermediate_size",
        renormalize="norm_topk_prob",
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults=_fields(
            intermediate_size=11008,
            max_position_embeddings=2048,
            eos_token_id=2,
            attention_bias=False,
            mlp_bias=False,
        ),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults=_fields(
            vocab_size=151936,
            intermediate_size=22016,
            num_key_value_heads=32,
            head_dim=128,
            attention_bias=False,
            max_window_layers=28,
            layer_types=None,
            **_QWEN_WINDOW,
        ),
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windowed_layers="from_max",
        is_window_switched=True,
        has_layer_types=True,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults=_fields(
            num_key_value_heads=8,
            max_position_embeddings=131072,
            eos_token_id=2,
            sliding_window=4096,
        ),
        windowed_layers="all",
    ),
}
