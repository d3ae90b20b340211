"""Describes a model family as data.

A field of `config.json` is *used*, *ignored* (known not to change inference), *fixed* (accepted
only with the listed values) or unknown, which is refused. Names and defaults are those of the
configuration classes of transformers 5.23 (a test compares them).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from raymoe.specs.layers import GroupScore, QkNorm, Scoring
from raymoe.specs.rope import RopeRule

NormKind = Literal["rms", "layer"]
WindowedLayers = Literal["none", "all", "even", "even_below_max", "from_max"]
SparseLayers = Literal["all", "stepped", "after_leading", "listed", "ranged"]

# Training, bookkeeping and generation defaults: no effect on the forward computation.
IGNORED = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path
    add_cross_attention architectures attention_dropout attn_implementation attn_pdrop
    bad_words_ids begin_suppress_tokens bos_token_id cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping emb_pdrop embd_pdrop
    encoder_no_repeat_ngram_size experts_implementation exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    hidden_dropout id2label initializer_range label2id length_penalty max_length
    max_sequence_length min_length model_type name_or_path no_repeat_ngram_size num_beam_groups
    num_beams num_labels num_return_sequences output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix problem_type remove_invalid_values
    repetition_penalty resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef
    router_jitter_noise sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905 - seventy names read better as words
)

# Accepted only with the values that raymoe implements.
FIXED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "chunk_size_feed_forward": (0, None),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "is_decoder": (True, False, None),
    "is_encoder_decoder": (False, None),
    "mlp_bias": (False, None),
    "per_layer_config": (None, {}),
    "pretraining_tp": (1, None),
    "pruned_heads": (None, {}),
    "qkv_bias": (False, None),
    "sliding_window": (None,),
    "tie_last_hidden_states": (True, False, None),
    "use_sliding_window": (False, None),
}

# Checked against the layers, or read by `specs.quantization`.
READ_APART = frozenset({"layer_types", "quantization_config"})
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
class RouterRule:
    """The router of a family; strings name the field that holds the value."""

    scoring: Scoring = "softmax"
    renormalize: bool | str = True
    min_weight_sum: float | str = 0.0
    scale: float | str = 1.0
    has_bias: bool = False
    has_selection_bias: bool = False
    # How groups are compared, in families that have `n_group` and `topk_group`.
    group_score: GroupScore | None = None
    # Field, and its values with and without groups; None: always with groups.
    groups_switch: tuple[str, str, str] | None = None
    jitter: float | str = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRule:
    """The shared expert: hidden size is the field `hidden` times the field `count`."""

    hidden: str
    count: str | None = None
    is_gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRule:
    """The experts of a family; strings name fields of the configuration."""

    num_experts: str
    expert_hidden: str
    top_k: str = "num_experts_per_tok"
    router: RouterRule = field(default_factory=RouterRule)
    shared: SharedRule | None = None
    sparse_layers: SparseLayers = "all"  # which layers have experts; the others are dense
    has_bias: bool = False  # whether the projections of the experts have biases
    clamp: tuple[str, str] | None = None  # fields with gain and limit of the clamped product


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The properties of a model family; strings that name fields refer to `config.json`."""

    architecture: str  # class that `architectures` of the configuration must name
    # Used fields and the configuration class's values for missing ones.
    defaults: Mapping[str, object]
    # Whether checkpoints older than the transformers class name code of this architecture in
    # `auto_map`.
    was_published_with_code: bool = False
    published_architecture: str | None = None  # class name in such checkpoints, if it differs
    nested: tuple[str, ...] = ()  # objects whose fields are read as "object.field"
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of used fields
    # Fields without effect in this family, in addition to `IGNORED`.
    ignored: frozenset[str] = frozenset()
    # Accepted values of further fields, in addition to `FIXED`.
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    rope: RopeRule = field(default_factory=RopeRule)
    norm: NormKind = "rms"  # kind of the norms around attention and feed-forward network
    norm_eps: float | str = "rms_norm_eps"
    has_norm_bias: bool = False  # whether these norms have biases
    is_latent: bool = False  # whether attention is latent (MLA)
    # Field with the context length beyond which attention would be sparse, which is not
    # implemented: longer contexts are refused.
    context_limit: str | None = None
    full_layer_type: str = "full_attention"  # name in `layer_types` of a layer with full attention
    scale: str | None = None  # field with the factor of the attention scores
    qk_norm: QkNorm = "none"  # norm of queries and keys: none, per head, or over the full width
    qk_norm_switch: str | None = None  # field that enables that norm; None: always enabled
    is_norm_after_rope: bool = False
    needs_full_width: bool = False  # whether the full-width norm is as wide as the hidden state
    qkv_bias: str | None = None  # field that enables biases of the query, key and value projections
    output_bias: str | None = None  # field that enables the bias of the output projection
    # Field that enables biases of dense and shared feed-forward networks.
    mlp_bias: str | None = None
    head_bias: str | None = None  # field that enables the bias of the logits
    has_sinks: bool = False
    moe: MoeRule | None = None  # the experts; None for dense families
    # Which layers have a sliding window if `layer_types` is absent.
    windowed_layers: WindowedLayers = "none"
    is_window_switched: bool = False  # whether `use_sliding_window` enables the window
    has_layer_types: bool = False
    # Factors of embeddings and residual branches, and divisor of the logits, or the fields that
    # hold them.
    multipliers: tuple[float | str, ...] = (1.0, 1.0, 1.0)


def common_fields(**differences: object) -> dict[str, object]:
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
