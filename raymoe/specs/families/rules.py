"""Describes a model family as data.

A field of `config.json` is *used*, *ignored* (known not to change inference), *fixed* (accepted
only with the listed values) or unknown, which is refused.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from raymoe.specs.attention.grouped import QkNorm
from raymoe.specs.attention.kind import GateActivation
from raymoe.specs.attention.recurrent import RecurrentKind
from raymoe.specs.layers import GroupScore, NormKind, NormLayout, Scoring
from raymoe.specs.rope import RopeRule
from raymoe.specs.streams import StreamMerge

WindowedLayers = Literal[
    "none", "all", "even", "even_below_max", "from_max", "all_but_nth", "named"
]
SinkLayers = Literal["none", "all", "windowed"]
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
    output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16
    use_cache
    """.split()  # noqa: SIM905 - seventy names read better as words
)

# Accepted only with the values that raymoe implements.
FIXED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "chunk_size_feed_forward": (0, None),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "is_causal": (True, None),
    "is_decoder": (True, False, None),
    "is_encoder_decoder": (False, None),
    "mlp_bias": (False, None),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "qkv_bias": (False, None),
    "sliding_window": (None,),
    "tie_last_hidden_states": (True, False, None),
    "use_sliding_window": (False, None),
}

# Checked against the layers, or read by `specs.quantization`.
READ_APART = frozenset({"expert_dtype", "layer_types", "quantization_config"})
ROPE_FIELDS = frozenset(
    {
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
    }
)


# A name of a field of `config.json`.
FieldName = Annotated[str, "field"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """The router of a family."""

    scoring: Scoring = "softmax"
    # Field with "softmax" or "sigmoid"; a softmax is that of the chosen logits alone.
    scoring_field: FieldName | None = None
    logit_softcap: FieldName | None = None
    renormalize: bool | FieldName = True
    min_weight_sum: float | FieldName = 0.0
    added_weight_sum: float = 0.0
    scale: float | FieldName = 1.0
    has_bias: bool = False
    has_selection_bias: bool | FieldName = False
    chooses_by_logits: bool = False  # as in `RouterSpec`
    # How groups are compared, in families that have `n_group` and `topk_group`.
    group_score: GroupScore | None = None
    # Field that says whether there are groups, as in DeepSeek-V2; None: there always are.
    groups_switch: FieldName | None = None
    jitter: float | FieldName = 0.0
    has_input_norm: bool = False  # this and the next two as in `RouterSpec`
    has_expert_scales: bool = False
    scales_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRule:
    """The shared expert: hidden size is the field `hidden` times the field `count`."""

    hidden: FieldName
    count: FieldName | None = None
    is_gated: bool = False
    # Field that says whether its output and that of the experts are added ("sum") or averaged.
    combination: FieldName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampRule:
    """Limits of gated products, as in `ClampSpec`."""

    limit: FieldName  # a number, or a list with one for each layer; null and 0 are no limit
    gain: float | FieldName = 1.0
    offset: float = 1.0
    # Whether the limit is one of the activation's result instead of its argument.
    is_after_activation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRule:
    """The experts of a family."""

    num_experts: FieldName
    switch: FieldName | None = None  # whether there are experts; None: there are
    has_branch_norms: bool = False  # as in `MoeSpec`
    expert_hidden: FieldName
    top_k: FieldName = "num_experts_per_tok"
    router: RouterRule = field(default_factory=RouterRule)
    shared: SharedRule | None = None
    sparse_layers: SparseLayers = "all"  # which layers have experts; the others are dense
    # Field that marks layers with experts by 1 where `mlp_layer_types` is absent.
    sparse_list: FieldName | None = None
    has_bias: bool = False  # whether the projections of the experts have biases
    clamp: ClampRule | None = None  # of the experts
    latent_size: FieldName | None = None  # as in `MoeSpec`; null is none


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentRule:
    """The layers of a family that keep a state per sequence, as in `RecurrentSpec`."""

    kind: RecurrentKind
    layer_type: str  # name of such layers in `layer_types`
    num_key_heads: int | FieldName
    num_heads: int | FieldName
    key_dim: int | FieldName
    value_dim: FieldName
    conv_width: FieldName
    conv_bias: bool | FieldName = False
    bias: bool | FieldName = False  # whether the projections have biases
    activation: FieldName = "hidden_act"  # of the convolution
    latent_width: FieldName | None = None
    decay_bound: FieldName | None = None  # null is none
    # Field with the activation of the output's gate; null: that of the convolution.
    gate: FieldName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsRule:
    """The streams of a family's hidden state, as in `StreamsSpec`."""

    count: FieldName = "hc_mult"
    eps: FieldName = "hc_eps"
    sinkhorn_iterations: FieldName | None = "hc_sinkhorn_iters"  # None: there is no matrix
    magnitude: float | FieldName = 2.0
    merge: StreamMerge = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedStreamsRule:
    """The streams of a family's hidden state, as in `GatedStreamsSpec`."""

    count: FieldName = "hc_count"
    latent_width: FieldName = "hc_lowrank"


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramRule:
    """The layers that add embeddings of n-grams, as in `NgramSpec`."""

    layers: FieldName = "ple_layer_ids"  # list of the layers that follow them, counted from 1
    width: FieldName = "ple_embed_dim"
    conv_width: FieldName = "ple_conv_kernel_size"
    longest: FieldName = "ngram_size"
    hashes: FieldName = "heads_per_ngram"  # of n-grams of each length
    rows: FieldName = "ngram_vocab_size_base"  # sizes are the primes from this on
    multiple: FieldName = "make_ngram_vocab_size_divisible_by"  # that the table has as rows
    seed: FieldName = "seed"
    tensors: FieldName = "split_ngram_parts"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingRule:
    """Which layers take the choice of the layer before them.

    The field `types` has "full" or "shared" for each layer. If it is null, `pattern` has F or S for
    each; without that, every `step`-th layer is full, counted from the one before `offset` on, and
    those before it.
    """

    types: FieldName = "indexer_types"
    pattern: FieldName = "index_topk_pattern"
    step: FieldName = "index_topk_freq"
    offset: FieldName = "index_skip_topk_offset"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerRule:
    """The indexer of a family with latent attention, as in `IndexerSpec`."""

    is_interleaved: bool
    rotates_end: bool = False
    key_norm_eps: float | FieldName = 1e-6
    num_heads: FieldName = "index_n_heads"
    head_dim: FieldName = "index_head_dim"
    top_k: FieldName = "index_topk"
    sharing: SharingRule | None = None  # None: every layer chooses
    pool: FieldName | None = None  # tokens of an entry; None: they are chosen one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexerRule:
    """The layers of a family that choose blocks of positions, as in `BlockIndexerSpec`.

    Layers are named in `layer_types`; where that is absent, `marks` has a number for each.
    """

    layer_type: str
    marks: FieldName
    num_heads: FieldName = "index_n_heads"
    head_dim: FieldName = "index_head_dim"
    block_tokens: FieldName = "index_block_size"
    top_k: FieldName = "index_topk_blocks"
    num_local: FieldName = "index_local_blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledIndexerRule:
    """The indexer of all layers with attention in a family, as in `PooledIndexerSpec`."""

    num_heads: FieldName = "indexer_n_heads"
    num_key_heads: FieldName = "indexer_kv_heads"
    head_dim: FieldName = "indexer_head_dim"
    block_tokens: FieldName = "indexer_compress_ratio"
    chosen_tokens: FieldName = "indexer_budget"  # of whole blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureRule:
    """The scale of queries in layers without a window, as in `Temperature`; null is none."""

    beta: FieldName
    period: FieldName


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIndexerRule:
    """The indexer of entries in a family, as in `EntryIndexerSpec`."""

    num_heads: FieldName = "index_n_heads"
    head_dim: FieldName = "index_head_dim"
    top_k: FieldName = "index_topk"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedRule:
    """Attention to compressed entries in a family, as in `CompressedAttentionSpec`."""

    rope_head_dim: FieldName = "qk_rope_head_dim"
    q_lora_rank: FieldName = "q_lora_rank"
    window: FieldName = "sliding_window"
    ratios: FieldName = "compress_rates"  # an object with the ratio of each kind of layer
    num_groups: FieldName = "o_groups"
    group_rank: FieldName = "o_lora_rank"
    indexer: EntryIndexerRule = field(default_factory=EntryIndexerRule)  # of overlapping entries
    networks: FieldName = "mlp_layer_types"  # layers whose experts token ids choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The properties of a model family.

    Fields of `config.json` that an attribute names are in use, and so are those that the kinds of
    its layers imply (`used_fields`). Other names of fields and values of missing ones are those of
    transformers' configuration class (`specs.class_defaults`).
    """

    architecture: str  # class that `architectures` of the configuration must name
    # Whether checkpoints older than the transformers class name code of this architecture in
    # `auto_map`.
    was_published_with_code: bool = False
    # Class names in such checkpoints, if they differ.
    published_architectures: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()  # objects whose fields are read as "object.field"
    # Further other names of used fields.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Values of missing fields that the class computes or does not have.
    defaults: Mapping[str, object] = field(default_factory=dict)
    # Fields without effect in this family, in addition to `IGNORED`.
    ignored: frozenset[str] = frozenset()
    # Accepted values of further fields, in addition to `FIXED`.
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    rope: RopeRule = field(default_factory=RopeRule)
    rope_fields: tuple[FieldName, ...] = ()  # fields of the rope, in addition to `ROPE_FIELDS`
    activation: str | None = None  # whatever `hidden_act` says
    norm: NormKind = "rms"  # kind of all norms but those of latents
    # Where layers have norms of the hidden state, and those with experts if they differ.
    norms: NormLayout = field(default_factory=NormLayout)
    sparse_norms: NormLayout | None = None
    norm_eps: float | FieldName = "rms_norm_eps"
    rms_norm_eps: FieldName | None = None  # if it is set, these norms are RMS norms with it
    is_parallel: bool = False  # as in `LayerSpec`
    has_norm_bias: bool = False  # whether these norms have biases
    is_latent: bool = False  # whether attention is latent (MLA)
    # Epsilon of the norms of latents; None: that of most classes, which read no field for it.
    latent_norm_eps: FieldName | None = None
    streams: StreamsRule | GatedStreamsRule | None = None  # None: the hidden state is one stream
    ngrams: NgramRule | None = None
    indexer: IndexerRule | None = None  # what selects positions in long contexts
    blocks: BlockIndexerRule | PooledIndexerRule | None = None  # what selects blocks of them
    recurrent: RecurrentRule | None = None  # layers with a state instead of a KV cache
    compressed: CompressedRule | None = None  # attention of all layers to compressed entries
    # Names in `layer_types` of layers with full attention.
    full_layer_types: tuple[str, ...] = ("full_attention",)
    scale: float | FieldName | None = None  # factor of the attention scores
    scale_divisor: FieldName | None = None  # the factor is its root's inverse; null: head_dim
    clip: FieldName | None = None  # bound of queries, keys and values
    qk_norm: QkNorm = "none"  # norm of queries and keys
    qk_norm_switch: FieldName | None = None  # enables that norm; None: always enabled
    norms_full_layers: bool = True  # whether layers without a window have that norm
    norms_values: bool = False  # as in `AttentionSpec`
    # Of layers without a window: dimensions of a head, KV heads, and whether values are keys. The
    # object `per_layer_config` takes precedence for the first two.
    full_head_dim: FieldName | None = None
    full_kv_heads: FieldName | None = None
    full_values_are_keys: bool | FieldName = False
    is_norm_after_rope: bool = False
    needs_full_width: bool = False  # whether the full-width norm is as wide as the hidden state
    # Whether the query, key and value projections have biases.
    qkv_bias: bool | FieldName = False
    output_bias: bool | FieldName = False  # whether the output projection has a bias
    mlp_bias: bool | FieldName = False  # whether dense and shared networks have biases
    head_bias: bool | FieldName = False  # whether the logits have a bias
    has_float_head: bool = False  # as in `ModelSpec`
    sinks: SinkLayers = "none"  # which layers have them
    value_head_dim: FieldName | None = None  # dimensions of a value, if not those of a key
    value_scale: FieldName | None = None  # factor of the values
    gate: GateActivation | None = None  # activation of the gate of attention's output
    gate_bias: bool | FieldName = False
    # Whether that is a factor for each head, instead of one for each element; or a field with
    # "per-head" or "per-element".
    gate_granularity: bool | FieldName = False
    heads_by_layer: FieldName | None = None  # list of query heads of each layer
    windowed_heads: FieldName | None = None  # query heads of layers with a window
    windowed_kv_heads: FieldName | None = None  # KV heads of layers with a window, if they differ
    # Field that is set where queries, keys and values are stored in equal groups, each of which is
    # quantised by itself.
    grouped_qkv: FieldName | None = None
    clamp: ClampRule | None = None  # of dense networks and shared experts
    dense_hidden: FieldName = "intermediate_size"  # if not set, `intermediate_size` is
    moe: MoeRule | None = None  # the experts; None for dense families
    layers_without_network: FieldName | None = None  # field with a list of such layers
    # Which layers have a sliding window if `layer_types` is absent.
    windowed_layers: WindowedLayers = "none"
    # Whether windows are chunks, which begin at multiples of their length.
    has_chunks: bool = False
    temperature: TemperatureRule | None = None
    is_window_switched: bool = False  # whether `use_sliding_window` enables the window
    # Step of the leading dense layers, which are counted apart.
    dense_window_step: FieldName | None = None
    window_step: int | FieldName = 0  # "all_but_nth": every n-th layer has full attention
    starts_with_full_layer: bool = False  # "all_but_nth": the first layer has full attention too
    ends_with_full_layer: bool = False  # whether the last layer has full attention in any case
    has_layer_types: bool = False
    # Factors of embeddings and residual branches, and divisor of the logits.
    multipliers: tuple[float | FieldName, ...] = (1.0, 1.0, 1.0)
    # Whether embeddings are multiplied by the root of the hidden size.
    scales_embedding: bool | FieldName = False
    rounds_embedding_scale: bool = False  # whether that root is rounded to the type first
    logit_scale: FieldName | None = None  # factor of the logits, in place of a divisor
    logit_softcap: FieldName | None = None  # bound of the logits, by a tanh; null is none
    has_layer_scalars: bool = False
    # As in `Quantization`, where other names than those of most families exist.
    module_names: tuple[tuple[str, str], ...] = ()


_OF_ALL = frozenset(
    {
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "tie_word_embeddings",
        "vocab_size",
    }
)
_LATENT = frozenset(
    {
        "kv_lora_rank",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    }
)
_SPARSE: Mapping[SparseLayers, tuple[str, ...]] = {
    "all": (),
    "stepped": ("decoder_sparse_step", "mlp_only_layers"),
    "after_leading": ("first_k_dense_replace",),
    "listed": ("first_k_dense_replace", "mlp_layer_types"),
    "ranged": ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
}


def used_fields(family: Family) -> frozenset[str]:
    """Names of the fields that decide what a model of this family computes, except the rope's."""
    used = _OF_ALL | set(_named(family))
    if family.is_latent:
        used |= _LATENT
    if family.windowed_layers != "none":
        used |= {"sliding_window"}
    if family.windowed_layers in {"from_max", "even_below_max"}:
        used |= {"max_window_layers"}
    rope = family.rope
    by_layer = (rope.rotated_layers, rope.thetas_by_layer)
    named = (rope.rotates_full_layers, rope.rotates_dense_layers, rope.windowed_theta)
    for name in (*named, *by_layer):
        used |= {name} if isinstance(name, str) else set()
    if family.full_head_dim is not None:
        used |= {"per_layer_config"}
    if family.is_window_switched:
        used |= {"use_sliding_window"}
    if family.moe is not None:
        used |= set(_SPARSE[family.moe.sparse_layers])
        if family.moe.router.group_score is not None:
            used |= {"n_group", "topk_group"}
    return used


def _named(rule: object) -> Iterator[str]:
    """The fields that the attributes of a rule and of the rules in it name."""
    for attribute in dataclasses.fields(rule):  # type: ignore[arg-type]
        value = getattr(rule, attribute.name)
        if dataclasses.is_dataclass(value):
            yield from _named(value)
        elif _may_name(attribute.type):
            items = value if isinstance(value, tuple) else (value,)
            yield from (item for item in items if isinstance(item, str))


def _may_name(annotation: object) -> bool:
    return annotation == FieldName or any(map(_may_name, get_args(annotation)))


# Fields of router training and of layers that predict a second token.
TRAINING_FIELDS = frozenset(
    {"aux_loss_alpha", "ep_size", "num_mtp_layers", "num_nextn_predict_layers", "seq_aux"}
)
NOAUX_TC = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
# DeepSeek-V3 adds 1e-20 to the sum of the weights; a floor differs only for sums below that.
SIGMOID = RouterRule(
    scoring="sigmoid",
    renormalize="norm_topk_prob",
    min_weight_sum=1e-20,
    scale="routed_scaling_factor",
    has_selection_bias=True,
    group_score="top2_sum",
)
SHARED = SharedRule(hidden="moe_intermediate_size", count="n_shared_experts")
SIGMOID_EXPERTS = MoeRule(
    num_experts="n_routed_experts",
    expert_hidden="moe_intermediate_size",
    router=SIGMOID,
    shared=SHARED,
    sparse_layers="after_leading",
)


def mistral_yarn(theta: float, factor: float, original: int) -> Mapping[str, object]:
    """Rope parameters that transformers' classes put where a configuration has none."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
