"""Names and layouts under which the families store their weights.

`NAMINGS` lists what `save_pretrained` of transformers 5.23 writes and what published checkpoints
hold (read off `conversion_mapping.py` and the modelling classes; a test compares). Names are those
after a layer's prefix, with "{expert}" for the number of an expert.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from raymoe.specs.attention.ngrams import (
    MAX_TABLE_TENSORS,
    NGRAM_MULTIPLIERS,
    NGRAM_OFFSETS,
    NGRAM_SCALE,
    NGRAM_SIZES,
    NGRAM_TABLE,
    NGRAMS,
)
from raymoe.specs.attention.recurrent import RECURRENT
from raymoe.specs.families.wrappers import MEDIA_TENSORS, WRAPPERS
from raymoe.specs.layer_weights import (
    ATTENTION_RESULT_NORM,
    EXPERTS,
    FFN_NORM,
    FFN_RESULT_NORM,
    INPUT_NORM,
    LATENT_IN,
    LATENT_OUT,
    MERGE,
)

EXPERT = "{expert}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A stored tensor that fuses weights or experts, or has another shape than its weight."""

    name: str  # stored name; without "{expert}" the tensor holds all experts, one after the other
    # Canonical names of the weights whose rows it holds; a layer may lack the last of them.
    weights: tuple[str, ...]
    is_interleaved: bool = False  # whether their rows alternate, instead of following one another
    is_transposed: bool = False  # whether matrices are stored [inputs, outputs]
    # Whether the first of two dimensions holds all experts, instead of a dimension of their own.
    is_folded: bool = False
    # Shape in which a vector is stored, with -1 for its length.
    shape: tuple[int, ...] | None = None
    # Attribute of the layer's attention with the number of groups, usually heads: each group holds
    # its rows of all weights, one weight after the other. None: one group.
    groups: str | None = None
    # Whether the groups are those of the layer with the fewest KV heads, in every layer.
    has_fewest_groups: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    layers: str = "model.layers.{layer}."  # prefix of a layer, with "{layer}" for its number
    # Prefixes of canonical names -> prefixes of stored ones; the first match applies.
    renamed: Mapping[str, str] | None = None
    fused: tuple[Fused, ...] = ()
    # Whether the networks of layers are stored as layers of their own, with the next number.
    numbers_networks: bool = False
    unread: tuple[str, ...] = ()  # parts of the names of tensors that are stored but not used
    # Canonical names of weights that are not stored: all of it is zero, or one.
    zeros: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()

    @property
    def root(self) -> str:
        """Prefix of all weights but those of a head."""
        return self.layers.partition(".")[0] + "."

    def rename(self, name: str) -> str:
        for ours, theirs in (self.renamed or {}).items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def module_of(self, name: str) -> str:
        """Stored name of the module of a matrix, after a layer's prefix as `name`."""
        fused = (tensor.name for tensor in self.fused if name in tensor.weights)
        return next(fused, self.rename(name)).removesuffix(".weight")

    def under(self, root: str, head: str) -> "Naming":
        """The names of these weights below other prefixes: of the model itself and of its head."""
        own = self.root
        names = {"model.": own, "lm_head.": "lm_head.", **(self.renamed or {})}
        moved = {
            ours: root + theirs.removeprefix(own) if ours.startswith("model.") else theirs
            for ours, theirs in names.items()
        }
        moved["lm_head."] = head + moved["lm_head."]
        # The shorter name of two that begin a name comes last.
        moved = dict(sorted(moved.items(), key=lambda item: item[0] == "model."))
        return replace(self, layers=root + self.layers.removeprefix(own), renamed=moved)


# Prefixes of the model and of its head that `from_pretrained` finds: it adds and removes the one
# that `AutoModel` leaves out, and knows the places of text models in older wrappers.
_TEXT_PREFIXES = (("", ""), ("{root}{root}", "{root}"))
_WRAPPED_PREFIXES = (
    ("model.language_model.", ""),
    ("language_model.model.", "language_model."),
    ("language_model.", "model."),
    ("model.language_model.model.", "model.language_model."),
    ("model.", ""),
)


@lru_cache
def namings_of(
    model_type: str, wrapper: str | None = None, *, is_own: bool = False
) -> tuple[Naming, ...]:
    """Ways to store a family: its own first, then the common ones, below each known prefix.

    Args:
        model_type: The family.
        wrapper: The model that it is a part of.
        is_own: Leave out the common ones.
    """
    own = NAMINGS.get(model_type, ())
    in_one = [naming for naming in map(_with_experts_in_one, own) if naming not in own]
    namings = (*own, _CANONICAL, *in_one, _IN_ONE)
    # Where networks have numbers, the common names have no place for them.
    if is_own or any(naming.numbers_networks for naming in own):
        namings = own
    if wrapper is not None:
        namings = tuple(
            replace(
                naming,
                layers=naming.layers.replace("layers.", layers),
                unread=(*naming.unread, *MEDIA_TENSORS),
            )
            for layers in WRAPPERS[wrapper].layers
            for naming in namings
        )
    prefixes = dict.fromkeys(_prefixes(model_type, wrapper))
    return tuple(
        naming.under(*(text.format(root=naming.root) for text in prefix))
        for prefix in prefixes
        for naming in namings
    )


def _with_experts_in_one(naming: Naming) -> Naming:
    """This naming with all experts in one tensor, as modules of transformers 5 hold them.

    One whose matrices are stored transposed stays: only their shapes would tell both apart.
    """
    if any(tensor.is_transposed for tensor in naming.fused):
        return naming
    module = naming.rename(f"{EXPERTS}{EXPERT}.up_proj.weight").partition(EXPERT)[0]
    others = (tensor for tensor in naming.fused if _EXPERT not in tensor.weights[0])
    in_one = (
        replace(tensor, name=module + tensor.name.removeprefix(EXPERTS)) for tensor in _IN_ONE.fused
    )
    return replace(naming, fused=(*others, *in_one))


def _prefixes(model_type: str, wrapper: str | None) -> Iterator[tuple[str, str]]:
    if wrapper is not None:
        yield from WRAPPERS[wrapper].prefixes
    else:
        yield "{root}", ""
    if wrapper is not None or any(model_type in one.texts for one in WRAPPERS.values()):
        yield from _WRAPPED_PREFIXES
    yield from _TEXT_PREFIXES


_EXPERT = f"mlp.experts.{EXPERT}."
_MIXTRAL_EXPERTS = {
    f"{_EXPERT}gate_proj.": f"block_sparse_moe.experts.{EXPERT}.w1.",
    f"{_EXPERT}up_proj.": f"block_sparse_moe.experts.{EXPERT}.w3.",
    f"{_EXPERT}down_proj.": f"block_sparse_moe.experts.{EXPERT}.w2.",
}


def _experts(leaf: str, *parts: str) -> tuple[str, ...]:
    return tuple(f"{_EXPERT}{part}_proj.{leaf}" for part in parts)


# Where results of attention are normed, their norm has the name that others give the next one.
RESULT_NORMS = {
    "attention_result_norm.": "post_attention_layernorm.",
    "post_attention_layernorm.": "pre_feedforward_layernorm.",
    "ffn_result_norm.": "post_feedforward_layernorm.",
}
_CANONICAL = Naming()
# Layout of transformers 5 in memory; also written if asked not to convert.
_IN_ONE = Naming(
    fused=(
        Fused(name="mlp.experts.gate_up_proj", weights=_experts("weight", "gate", "up")),
        Fused(name="mlp.experts.down_proj", weights=_experts("weight", "down")),
    )
)
_MIXTRAL = Naming(renamed={**_MIXTRAL_EXPERTS, "mlp.": "block_sparse_moe."})
# Modules renamed, matrices not, as some tools save.
_IN_MLP = (
    Naming(
        renamed={
            ours: theirs.replace("block_sparse_moe.", "mlp.")
            for ours, theirs in _MIXTRAL_EXPERTS.items()
        }
    ),
)
_QKV = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
_SHARED = {"mlp.shared_expert.": "mlp.shared_experts."}
_SEVERAL_SHARED = Naming(renamed=_SHARED)
_BESIDE_ROUTER = {"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"}
_ERNIE_BIAS = Fused(
    name="mlp.moe_statics.e_score_correction_bias",
    weights=("mlp.gate.e_score_correction_bias",),
    shape=(1, -1),
)
_ERNIE = replace(_SEVERAL_SHARED, fused=(_ERNIE_BIAS,))
_ERNIE_MODULES = replace(
    _SEVERAL_SHARED,
    fused=(replace(_ERNIE_BIAS, name="mlp.gate.moe_statics.e_score_correction_bias"),),
)
_HUNYUAN = Naming(
    renamed={
        "mlp.gate.": "mlp.gate.wg.",
        "mlp.shared_expert.": "mlp.shared_mlp.",
        "self_attn.q_norm.": "self_attn.query_layernorm.",
        "self_attn.k_norm.": "self_attn.key_layernorm.",
    }
)
_GRANITE_ROUTER = {"mlp.gate.": "block_sparse_moe.router.layer."}
_GRANITE_MODULES = Naming(renamed={"mlp.gate.": "block_sparse_moe.router."})
_GRANITE = Naming(
    renamed={**_GRANITE_ROUTER, EXPERTS: "block_sparse_moe.experts."},
    fused=(
        Fused(
            name="block_sparse_moe.input_linear.weight",
            weights=_experts("weight", "gate", "up"),
        ),
        Fused(name="block_sparse_moe.output_linear.weight", weights=_experts("weight", "down")),
    ),
)
_GRANITE_SHARED = Naming(
    renamed={
        **(_GRANITE.renamed or {}),
        "mlp.shared_expert.down_proj.": "shared_mlp.output_linear.",
    },
    fused=(
        *_GRANITE.fused,
        Fused(
            name="shared_mlp.input_linear.weight",
            weights=tuple(f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up")),
        ),
    ),
)
_HY_V3 = Naming(
    renamed={
        "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        "mlp.gate.": "mlp.router.gate.",
        "mlp.shared_expert.": "mlp.shared_mlp.",
    }
)
_GEMMA4 = Naming(
    renamed={
        **RESULT_NORMS,
        "mlp.shared_expert.": "mlp.",
        "mlp.shared_result_norm.": "post_feedforward_layernorm_1.",
        "mlp.experts_input_norm.": "pre_feedforward_layernorm_2.",
        "mlp.experts_result_norm.": "post_feedforward_layernorm_2.",
        "mlp.gate.weight": "router.proj.weight",
        "mlp.gate.input_norm.weight": "router.scale",
        "mlp.gate.expert_scales": "router.per_expert_scale",
    },
    fused=(
        Fused(name="experts.gate_up_proj", weights=_experts("weight", "gate", "up")),
        Fused(name="experts.down_proj", weights=_experts("weight", "down")),
    ),
)
_TRANSPOSED = Naming(
    fused=tuple(replace(tensor, is_transposed=True) for tensor in _IN_ONE.fused),
)
_LLAMA4 = Naming(renamed={"mlp.gate.": "feed_forward.router.", "mlp.": "feed_forward."})
_INDEXED = replace(_SEVERAL_SHARED, unread=(".self_attn.indexer.",))

_DELTA = {
    "linear_attn.g_proj.": "linear_attn.in_proj_z.",
    "linear_attn.a_proj.": "linear_attn.in_proj_a.",
    "linear_attn.b_proj.": "linear_attn.in_proj_b.",
    "linear_attn.o_proj.": "linear_attn.out_proj.",
}


def _recurrent(leaf: str, *parts: str) -> tuple[str, ...]:
    return tuple(f"{RECURRENT}{part}.{leaf}" for part in parts)


_CONV = Fused(
    name="linear_attn.conv1d.weight", weights=_recurrent("weight", "q_conv", "k_conv", "v_conv")
)
_GATED_QUERY = Fused(
    name="self_attn.q_proj.weight",
    weights=("self_attn.q_proj.weight", "self_attn.g_proj.weight"),
    groups="num_heads",
)
_GATED_QUERY_BIAS = Fused(
    name="self_attn.q_proj.bias",
    weights=("self_attn.q_proj.bias", "self_attn.g_proj.bias"),
    groups="num_heads",
)
_QWEN3_5 = Naming(
    renamed=_DELTA,
    fused=(
        _CONV,
        _GATED_QUERY,
        _GATED_QUERY_BIAS,
        Fused(
            name="linear_attn.in_proj_qkv.weight",
            weights=_recurrent("weight", "q_proj", "k_proj", "v_proj"),
        ),
    ),
)
_QWEN3_NEXT = Naming(
    renamed=_DELTA,
    fused=(
        _CONV,
        _GATED_QUERY,
        _GATED_QUERY_BIAS,
        Fused(
            name="linear_attn.in_proj_qkvz.weight",
            weights=_recurrent("weight", "q_proj", "k_proj", "v_proj", "g_proj"),
            groups="num_key_heads",
        ),
        Fused(
            name="linear_attn.in_proj_ba.weight",
            weights=_recurrent("weight", "b_proj", "a_proj"),
            groups="num_key_heads",
        ),
    ),
)

_MIXER_PARTS = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
_MIXER_MODULES = {
    "attention_mixer": "attn_hyper_connection",
    "ffn_mixer": "mlp_hyper_connection",
    MERGE: "model.hyper_connection_mixer",
}
_HASHES = "ple.ple_embedding."
_QWEN4 = replace(
    _QWEN3_5,
    renamed={
        **_DELTA,
        **{
            f"{ours}.{part}.": f"{theirs}.{stored}."
            for ours, theirs in _MIXER_MODULES.items()
            for part, stored in _MIXER_PARTS.items()
        },
        "self_attn.indexer.q_norm.": "self_attn.indexer.q_layernorm.",
        "self_attn.indexer.k_norm.": "self_attn.indexer.k_layernorm.",
        NGRAM_SCALE: f"{_HASHES}ngram_embedding.weight_scale",
        NGRAM_MULTIPLIERS: f"{_HASHES}layer_multipliers",
        NGRAM_SIZES: f"{_HASHES}ngram_heads_vocab_sizes",
        NGRAM_OFFSETS: f"{_HASHES}ngram_heads_offsets",
        **{
            f"{NGRAMS}{part}.": f"ple.{stored}."
            for part, stored in (
                ("k_proj", "key_proj"),
                ("v_proj", "value_proj"),
                ("k_norm", "norm_key"),
                ("q_norm", "norm_query"),
                ("conv_norm", "norm_conv"),
                ("conv", "conv1d"),
            )
        },
    },
    fused=(
        *_QWEN3_5.fused,
        Fused(
            name="self_attn.indexer.index_qk_proj.weight",
            weights=tuple(f"self_attn.indexer.{part}_proj.weight" for part in "qk"),
        ),
    ),
    unread=(".self_attn.indexer.",),
)
_QWEN4_TENSORS = replace(
    _QWEN4,
    fused=(
        *_QWEN4.fused,
        *(
            Fused(
                name=f"{_HASHES}ngram_embedding.shard_{number}.weight",
                weights=(f"{NGRAM_TABLE}{number}",),
            )
            for number in range(MAX_TABLE_TENSORS)
        ),
    ),
)
# As modules hold it.
_QWEN4_TABLE = replace(
    _QWEN4,
    fused=(
        *_QWEN4.fused,
        Fused(
            name=f"{_HASHES}ngram_embedding.weight",
            weights=tuple(f"{NGRAM_TABLE}{number}" for number in range(MAX_TABLE_TENSORS)),
        ),
    ),
    ones=(NGRAM_SCALE,),
)

_MAMBA_PARTS = ("g", "v", "k", "q", "a")


def _mamba(module: str) -> tuple[Fused, ...]:
    """Tensors of a Mamba-2 layer in the module of this name."""
    return tuple(
        Fused(name=f"{module}.{name}.{leaf}", weights=_recurrent(leaf, *parts))
        for leaf in ("weight", "bias")
        for name, parts in (
            ("in_proj", [f"{part}_proj" for part in _MAMBA_PARTS]),
            ("conv1d", ["v_conv", "k_conv", "q_conv"]),
        )
    )


_GRANITE_HYBRID = Naming(
    renamed={
        **(_GRANITE_SHARED.renamed or {}),
        "mlp.down_proj.": "shared_mlp.output_linear.",
        "linear_attn.o_proj.": "mamba.out_proj.",
        RECURRENT: "mamba.",
    },
    fused=(
        *_GRANITE_SHARED.fused,
        *_mamba("mamba"),
        Fused(
            name="shared_mlp.input_linear.weight",
            weights=("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ),
    ),
)


def _nemotron(model: str, fused: tuple[Fused, ...] = ()) -> Naming:
    return Naming(
        layers=f"{model}.layers.{{layer}}.",
        renamed={
            "model.embed_tokens.": f"{model}.embeddings.",
            "model.norm.": f"{model}.norm_f.",
            f"{INPUT_NORM}.": "norm.",
            f"{FFN_NORM}.": "norm.",
            "mlp.shared_expert.": "mixer.shared_experts.",
            f"{LATENT_IN}.": "mixer.fc1_latent_proj.",
            f"{LATENT_OUT}.": "mixer.fc2_latent_proj.",
            "mlp.": "mixer.",
            "self_attn.": "mixer.",
            "linear_attn.o_proj.": "mixer.out_proj.",
            RECURRENT: "mixer.",
        },
        fused=(*_mamba("mixer"), *fused),
        numbers_networks=True,
    )


_NEMOTRON_IN_ONE = tuple(
    Fused(name=f"mixer.experts.{part}_proj", weights=_experts("weight", part))
    for part in ("up", "down")
)

_KIMI_ATTENTION = {
    "linear_attn.norm.": "self_attn.o_norm.",
    **{f"linear_attn.{part}_conv.": f"self_attn.{part}_conv1d." for part in "qkv"},
    RECURRENT: "self_attn.",
}
_KIMI_DECAY = Fused(name="self_attn.A_log", weights=("linear_attn.A_log",), shape=(1, 1, -1, 1))
_KIMI_IN_ONE = Naming(
    renamed={
        "mlp.shared_expert.": "mlp.shared_experts.",
        "linear_attn.f_": "self_attn.forget_gate.f_",
        "linear_attn.dt_bias": "self_attn.forget_gate.dt_bias",
        **_KIMI_ATTENTION,
    },
    fused=(
        replace(_KIMI_DECAY, name="self_attn.forget_gate.A_log"),
        replace(_CONV, name="self_attn.conv1d.weight"),
        *_IN_ONE.fused,
    ),
)
_KIMI = Naming(
    renamed={
        **_MIXTRAL_EXPERTS,
        "mlp.gate.": "block_sparse_moe.gate.",
        "mlp.shared_expert.": "block_sparse_moe.shared_experts.",
        **_KIMI_ATTENTION,
    },
    fused=(_KIMI_DECAY,),
)
# What transformers 5.24 saves: it gives dense networks the name of those with experts too.
_KIMI_SAVED = replace(_KIMI, renamed={**(_KIMI.renamed or {}), "mlp.": "block_sparse_moe."})


def _bailing(attention: str, *, as_modules: bool) -> Naming:
    """Names with this module of both kinds of attention: those of transformers' modules, or not."""
    gate, output = ("forget_gate.", "o_proj") if as_modules else ("", "dense")
    outer = {
        "model.embed_tokens.": "model.word_embeddings.",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
    }
    conv = replace(_CONV, name=f"{attention}.conv1d.weight")
    return Naming(
        renamed={
            "linear_attn.a_proj.": f"{attention}.{gate}f_proj.",
            "linear_attn.dt_bias": f"{attention}.{gate}dt_bias",
            "linear_attn.A_log": f"{attention}.{gate}A_log",
            "linear_attn.norm.": f"{attention}.o_norm.",
            **{f"linear_attn.{part}_conv.": f"{attention}.{part}_conv1d." for part in "qkv"},
            "linear_attn.o_proj.": f"{attention}.{output}.",
            RECURRENT: f"{attention}.",
            "self_attn.o_proj.": f"{attention}.{output}.",
            "self_attn.": f"{attention}.",
            "mlp.shared_expert.": "mlp.shared_experts.",
            **({} if as_modules else outer),
        },
        fused=(conv, *_IN_ONE.fused) if as_modules else (),
    )


# What transformers 5.24 saves: it gives linear attention's output the name of the other one's.
_BAILING_SAVED = _bailing("attention", as_modules=False)
_BAILING = replace(
    _BAILING_SAVED,
    renamed={**(_BAILING_SAVED.renamed or {}), "linear_attn.o_proj.": "attention.o_proj."},
)
_BAILING_OTHERS = (
    _bailing("self_attn", as_modules=True),
    _bailing("attention", as_modules=True),
    _bailing("self_attn", as_modules=False),
)


def _mixers(fn: str, network: str = "ffn") -> dict[str, str]:
    """Names of the weights of mixers, from that of the matrix with "{}" for the block."""
    return {
        f"{ours}_mixer.{leaf}": fn.format(theirs).removesuffix("fn") + stored
        for ours, theirs in (("attention", "attn"), ("ffn", network))
        for leaf, stored in (("weight", "fn"), ("base", "base"), ("scale", "scale"))
    }


_POOLED_KEYS = {
    "self_attn.indexer.pool_gate.weight": "self_attn.indexer.index_kpool_compress_gate",
    "self_attn.indexer.pool_bias": "self_attn.indexer.index_kpool_compress_ape",
}
_GLM5_NEXT = Naming(
    renamed={**_SHARED, **_mixers("hc_{}_fn"), **_KIMI_ATTENTION, **_POOLED_KEYS},
    unread=(".self_attn.indexer.",),
)
_GLM5_NEXT_MODULES = Naming(
    renamed={
        "linear_attn.A_log": "self_attn.forget_gate.A_log",
        **_mixers("{}_hc.fn"),
        **_POOLED_KEYS,
        **(_KIMI_IN_ONE.renamed or {}),
    },
    fused=_KIMI_IN_ONE.fused[1:],
    unread=_GLM5_NEXT.unread,
)


def _v4_merge(prefix: str) -> dict[str, str]:
    leaves = {"weight": "fn", "base": "base", "scale": "scale"}
    return {f"model.merge_mixer.{ours}": f"model.{prefix}{leaves[ours]}" for ours in leaves}


_V4_UNREAD = (".indexer.",)
_V4 = Naming(
    renamed={
        "model.embed_tokens.": "model.embed.",
        "lm_head.": "head.",
        **_v4_merge("hc_head_"),
        **_mixers("hc_{}_fn"),
        f"{INPUT_NORM}.": "attn_norm.",
        f"{FFN_NORM}.": "ffn_norm.",
        "self_attn.q_a_proj.": "attn.wq_a.",
        "self_attn.q_a_norm.": "attn.q_norm.",
        "self_attn.q_b_proj.": "attn.wq_b.",
        "self_attn.kv_proj.": "attn.wkv.",
        "self_attn.o_a_proj.": "attn.wo_a.",
        "self_attn.o_proj.": "attn.wo_b.",
        "self_attn.sinks": "attn.attn_sink",
        "self_attn.indexer.kv_proj.": "attn.indexer.compressor.wkv.",
        "self_attn.indexer.gate_proj.": "attn.indexer.compressor.wgate.",
        "self_attn.indexer.kv_norm.": "attn.indexer.compressor.norm.",
        "self_attn.indexer.position_bias": "attn.indexer.compressor.ape",
        "self_attn.compressor.kv_proj.": "attn.compressor.wkv.",
        "self_attn.compressor.gate_proj.": "attn.compressor.wgate.",
        "self_attn.compressor.kv_norm.": "attn.compressor.norm.",
        "self_attn.compressor.position_bias": "attn.compressor.ape",
        "self_attn.": "attn.",
        "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
        **{
            f"mlp.{ours}{part}_proj.": f"ffn.{theirs}w{number}."
            for ours, theirs in (
                (f"experts.{EXPERT}.", f"experts.{EXPERT}."),
                ("shared_expert.", "shared_experts."),
            )
            for part, number in (("gate", 1), ("down", 2), ("up", 3))
        },
        "mlp.": "ffn.",
    },
    unread=_V4_UNREAD,
)
# What transformers 5.24 saves: some of its own names, and one norm without its first word.
_V4_SAVED = replace(
    _V4,
    renamed={
        "self_attn.kv_norm.": "attn.norm.",
        **(_V4.renamed or {}),
        "model.embed_tokens.": "model.embed_tokens.",
        **_v4_merge("hc_head.hc_"),
    },
)
_V4_MODULES = Naming(
    renamed={
        **_SHARED,
        **_v4_merge("hc_head.hc_"),
        **_mixers("{}_hc.fn"),
        "self_attn.o_proj.": "self_attn.o_b_proj.",
        "self_attn.indexer.wq_b.": "self_attn.compressor.indexer.q_b_proj.",
        "self_attn.indexer.weights_proj.": "self_attn.compressor.indexer.scorer.weights_proj.",
        "self_attn.indexer.": "self_attn.compressor.indexer.",
    },
    unread=_V4_UNREAD,
)


def _hy_v4(mixers: str, merge: str) -> Naming:
    """Names of Hy4, with these of the matrices of mixers and of the last sum."""
    return Naming(
        renamed={
            **_SHARED,
            **_mixers(mixers, network="mlp"),
            **_v4_merge(merge),
            "self_attn.g_proj.": "self_attn.linear_gate.",
            "self_attn.sinks": "self_attn.learnable_sink_param",
        }
    )


_HY_V4 = _hy_v4("hc_{}_layer.hc_pre.hc_fn", "hc_head.hc_head_")
# What transformers 5.24 saves: one part at another place, and every gate by one name.
_HY_V4_SAVED = _hy_v4("hc_pre.hc_{}_layer.hc_fn", "hc_pre.hc_head.hc_head_")
_HY_V4_SAVED = replace(
    _HY_V4_SAVED,
    renamed={
        "mlp.shared_expert.gate_proj.": "mlp.shared_experts.linear_gate.",
        "mlp.gate_proj.": "mlp.linear_gate.",
        **(_HY_V4_SAVED.renamed or {}),
    },
)
_HY_V4_MODULES = Naming(
    renamed={
        **_SHARED,
        **_mixers("{}_hc.fn"),
        **_v4_merge("hc_head.hc_"),
        "self_attn.g_proj.": "self_attn.gate_proj.",
    }
)
_HY_V4_NAMINGS = (
    _HY_V4,
    _HY_V4_SAVED,
    _hy_v4("hc_{}_layer.hc_fn", "hc_head.hc_pre.hc_head_"),
    _HY_V4_MODULES,
)

_LFM2 = Naming(
    renamed={
        "model.norm.": "model.embedding_norm.",
        f"{INPUT_NORM}.": "operator_norm.",
        f"{FFN_NORM}.": "ffn_norm.",
        "self_attn.q_norm.": "self_attn.q_layernorm.",
        "self_attn.k_norm.": "self_attn.k_layernorm.",
        "self_attn.o_proj.": "self_attn.out_proj.",
        "linear_attn.o_proj.": "conv.out_proj.",
        "linear_attn.v_conv.": "conv.conv.",
        "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
        **{
            f"mlp.{expert}{ours}": f"feed_forward.{expert}{theirs}"
            for expert in ("", f"experts.{EXPERT}.")
            for ours, theirs in (("gate_proj.", "w1."), ("up_proj.", "w3."), ("down_proj.", "w2."))
        },
        "mlp.": "feed_forward.",
    },
    fused=tuple(
        Fused(name=f"conv.in_proj.{leaf}", weights=_recurrent(leaf, "b_proj", "g_proj", "v_proj"))
        for leaf in ("weight", "bias")
    ),
)

_LFM3 = replace(
    _LFM2,
    renamed={
        **{
            ours: theirs
            for ours, theirs in (_LFM2.renamed or {}).items()
            if not ours.startswith("self_attn.")
        },
        "attention_result_norm.": "post_operator_norm.",
        "ffn_result_norm.": "post_ffn_norm.",
    },
)

_MINIMAX_BIAS = {"mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias"}
_MINIMAX_M2 = Naming(renamed={**_MIXTRAL_EXPERTS, **_MINIMAX_BIAS, "mlp.": "block_sparse_moe."})
_MINIMAX_M3_MODULE = {
    "mlp.gate.": "block_sparse_moe.gate.",
    "mlp.shared_expert.": "block_sparse_moe.shared_experts.",
}
_MINIMAX_M3_INDEXER = {"self_attn.indexer.": "self_attn.index_"}
_MINIMAX_M3 = Naming(
    renamed={
        **_MIXTRAL_EXPERTS,
        **_MINIMAX_BIAS,
        **_MINIMAX_M3_MODULE,
        **_MINIMAX_M3_INDEXER,
    },
    unread=(".self_attn.index_", ".self_attn.indexer."),
)


def _gate_and_up(stored: str, ours: str) -> Fused:
    """A dense network or shared expert with gate and up in one tensor."""
    weights = tuple(f"{ours}{part}_proj.weight" for part in ("gate", "up"))
    return Fused(name=f"{stored}gate_up_proj.weight", weights=weights)


_MINIMAX_M3_MODULES = replace(
    _SEVERAL_SHARED,
    fused=(
        *_IN_ONE.fused,
        _gate_and_up("mlp.", "mlp."),
        _gate_and_up("mlp.shared_experts.", "mlp.shared_expert."),
    ),
)
_MINIMAX_M3_MIXED = Naming(
    renamed=_MINIMAX_M3_MODULE,
    fused=(_gate_and_up("block_sparse_moe.shared_experts.", "mlp.shared_expert."),),
)

_KOLIBRI_MODULES = Naming(
    renamed={
        **_SHARED,
        ATTENTION_RESULT_NORM: "post_self_attn_layernorm",
        FFN_RESULT_NORM: "post_mlp_layernorm",
    }
)
_KOLIBRI = Naming(
    renamed={
        **_SHARED,
        "mlp.gate.e_score_correction_bias": "moe.router.expert_bias",
        ATTENTION_RESULT_NORM: "post_attn_norm",
        FFN_RESULT_NORM: "post_ffn_norm",
    }
)
_GRANITE_SWA = Naming(
    renamed={
        **(_GRANITE_SHARED.renamed or {}),
        "mlp.gate.": "block_sparse_moe.router.",
    },
    fused=(
        *(
            replace(one, name=f"block_sparse_moe.{one.name.removeprefix('mlp.')}")
            for one in _IN_ONE.fused
        ),
        _GRANITE_SHARED.fused[-1],
    ),
)


def _sarvam(attention: str) -> Naming:
    """Names of Sarvam-30B, with this name of the module of attention."""
    return Naming(
        renamed={
            **_SHARED,
            "model.embed_tokens.": "model.word_embeddings.",
            "self_attn.o_proj.": f"{attention}.dense.",
            "self_attn.q_norm.": f"{attention}.query_layernorm.",
            "self_attn.k_norm.": f"{attention}.key_layernorm.",
            "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
        },
        fused=tuple(
            Fused(
                name=f"{attention}.query_key_value.{leaf}",
                weights=tuple(f"self_attn.{part}_proj.{leaf}" for part in "qkv"),
            )
            for leaf in ("weight", "bias")
        ),
    )


# Dense layers store the norm as well, which transformers does not read there.
_AXK1 = Naming(
    renamed={**_SHARED, FFN_RESULT_NORM: "post_mlp_layernorm"}, unread=(".post_mlp_layernorm.",)
)
_AXK1_MODULES = Naming(renamed={**_SHARED, FFN_RESULT_NORM: "mlp.post_mlp_layernorm"})


_MIMO = Naming(renamed={"self_attn.sinks": "self_attn.attention_sink_bias"})
_MIMO_QKV = (
    Fused(
        name="self_attn.qkv_proj.weight",
        weights=tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
        has_fewest_groups=True,
    ),
)
_MIMO_MEDIA = ("visual.", "audio_encoder.", "speech_embeddings.")


def _without_bias(naming: Naming) -> Naming:
    """The names where the bias of the choice is not stored."""
    return replace(naming, zeros=("mlp.gate.e_score_correction_bias",))


NAMINGS: Mapping[str, tuple[Naming, ...]] = {
    "qwen3_next": (_QWEN3_NEXT,),
    "qwen3_5_moe_text": (_QWEN3_5,),
    "qwen4_exp_text": (_QWEN4_TENSORS, replace(_QWEN4_TENSORS, ones=(NGRAM_SCALE,)), _QWEN4_TABLE),
    "nemotron_h": (
        _nemotron("backbone"),
        _nemotron("model"),
        _nemotron("model", _NEMOTRON_IN_ONE),
        _nemotron("backbone", _NEMOTRON_IN_ONE),
    ),
    "kimi_linear": (_KIMI, _KIMI_SAVED, _KIMI_IN_ONE, *_IN_MLP),
    "bailing_hybrid": (
        _BAILING,
        _BAILING_SAVED,
        replace(_BAILING, fused=(replace(_KIMI_DECAY, name="attention.A_log"),)),
        *_BAILING_OTHERS,
    ),
    "glm5_next_text": (_GLM5_NEXT, _GLM5_NEXT_MODULES),
    "deepseek_v4": (_V4, _V4_SAVED, _V4_MODULES),
    "hy_v4": _HY_V4_NAMINGS,
    "hy_v4_vl_text": _HY_V4_NAMINGS,
    "lfm2_moe": (_LFM2,),
    "mimo_v2_flash": (_MIMO, replace(_MIMO, fused=_MIMO_QKV, unread=_MIMO_MEDIA)),
    "minimax_m3_vl_text": (
        _MINIMAX_M3,
        _MINIMAX_M3_MODULES,
        _MINIMAX_M3_MIXED,
        _SEVERAL_SHARED,
        *_IN_MLP,
    ),
    "afmoe": (
        Naming(
            renamed={
                "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
                "mlp.gate.": "mlp.router.gate.",
                "mlp.shared_expert.": "mlp.shared_experts.",
                "self_attn.g_proj.": "self_attn.gate_proj.",
                FFN_NORM: "pre_mlp_layernorm",
                ATTENTION_RESULT_NORM: "post_attention_layernorm",
                FFN_RESULT_NORM: "post_mlp_layernorm",
            }
        ),
    ),
    "step3p5": (
        Naming(
            renamed={
                "mlp.gate.e_score_correction_bias": "moe.router_bias",
                "mlp.gate.": "moe.gate.",
                "mlp.shared_expert.": "share_expert.",
            },
            fused=tuple(
                Fused(name=f"moe.{part}_proj.weight", weights=_experts("weight", part))
                for part in ("gate", "up", "down")
            ),
        ),
        _SEVERAL_SHARED,
    ),
    "llama4_text": (
        replace(
            _LLAMA4,
            fused=tuple(
                Fused(
                    name=f"feed_forward.experts.{name}",
                    weights=_experts("weight", *parts),
                    is_transposed=True,
                )
                for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
            ),
        ),
        _LLAMA4,
    ),
    "exaone_moe": (
        Naming(renamed={**_BESIDE_ROUTER, **_SHARED}),
        _SEVERAL_SHARED,
    ),
    "laguna": (
        Naming(renamed={"mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias"}),
        _SEVERAL_SHARED,
    ),
    "cohere2_moe": (_SEVERAL_SHARED,),
    "mixtral": (_MIXTRAL, *_IN_MLP),
    "flex_olmo": (Naming(renamed=RESULT_NORMS),),
    "olmo3": (Naming(renamed=RESULT_NORMS),),
    "gemma3_text": (Naming(renamed=RESULT_NORMS),),
    "gemma4_text": (
        _GEMMA4,
        Naming(renamed={EXPERTS: "experts.", **(_GEMMA4.renamed or {})}),
    ),
    "minimax_m2": (_MINIMAX_M2, Naming(renamed=_BESIDE_ROUTER), *_IN_MLP),
    "phimoe": (
        _MIXTRAL,
        Naming(renamed={"mlp.gate.": "mlp.router."}),
        Naming(renamed={"mlp.gate.": "block_sparse_moe.router."}),
        *_IN_MLP,
    ),
    "deepseek_v2": (_SEVERAL_SHARED,),
    "deepseek_v3": (_SEVERAL_SHARED,),
    "deepseek_v32": (_INDEXED,),
    "glm_moe_dsa": (_INDEXED,),
    "glm4_moe": (_SEVERAL_SHARED,),
    "glm4_moe_lite": (_SEVERAL_SHARED,),
    "dots1": (_SEVERAL_SHARED,),
    "mistral4": (_SEVERAL_SHARED,),
    "glm4v_moe_text": (_SEVERAL_SHARED,),
    "qwen3_vl_moe_text": (_TRANSPOSED,),
    "solar_open": (_SEVERAL_SHARED,),
    "hy_v3": (_HY_V3, Naming(renamed={**_BESIDE_ROUTER, **_SHARED})),
    "phi3": (
        Naming(
            fused=(
                Fused(name="self_attn.qkv_proj.weight", weights=_QKV),
                Fused(
                    name="mlp.gate_up_proj.weight",
                    weights=("mlp.gate_proj.weight", "mlp.up_proj.weight"),
                ),
            )
        ),
    ),
    "ernie4_5_moe": (_ERNIE, _ERNIE_MODULES),
    "hunyuan_v1_moe": (_HUNYUAN,),
    "granitemoe": (_GRANITE, _GRANITE_MODULES),
    "granitemoeshared": (_GRANITE_SHARED, _GRANITE_MODULES),
    "granitemoehybrid": (_GRANITE_HYBRID, _GRANITE_MODULES),
    "gpt_oss": (
        Naming(
            renamed={"mlp.gate.": "mlp.router."},
            fused=(
                Fused(
                    name="mlp.experts.gate_up_proj",
                    weights=_experts("weight", "gate", "up"),
                    is_interleaved=True,
                    is_transposed=True,
                ),
                Fused(
                    name="mlp.experts.gate_up_proj_bias",
                    weights=_experts("bias", "gate", "up"),
                    is_interleaved=True,
                ),
                Fused(
                    name="mlp.experts.down_proj",
                    weights=_experts("weight", "down"),
                    is_transposed=True,
                ),
                Fused(name="mlp.experts.down_proj_bias", weights=_experts("bias", "down")),
            ),
        ),
    ),
    "dbrx": (
        Naming(
            layers="transformer.blocks.{layer}.",
            renamed={
                "model.embed_tokens.": "transformer.wte.",
                "model.norm.": "transformer.norm_f.",
                "input_layernorm.": "norm_attn_norm.norm_1.",
                "post_attention_layernorm.": "norm_attn_norm.norm_2.",
                "self_attn.o_proj.": "norm_attn_norm.attn.out_proj.",
                "mlp.gate.": "ffn.router.layer.",
            },
            fused=(
                Fused(
                    name="norm_attn_norm.attn.Wqkv.weight",
                    weights=_QKV,
                ),
                Fused(
                    name="ffn.experts.mlp.w1", weights=_experts("weight", "gate"), is_folded=True
                ),
                Fused(name="ffn.experts.mlp.v1", weights=_experts("weight", "up"), is_folded=True),
                Fused(
                    name="ffn.experts.mlp.w2",
                    weights=_experts("weight", "down"),
                    is_transposed=True,
                    is_folded=True,
                ),
            ),
        ),
    ),
    "qwen3_5_text": (_QWEN3_5,),
    "glm4": (
        Naming(
            renamed={
                "attention_result_norm.": "post_self_attn_layernorm.",
                "ffn_result_norm.": "post_mlp_layernorm.",
            },
            fused=(_gate_and_up("mlp.", "mlp."),),
        ),
    ),
    "olmo2": (Naming(renamed=RESULT_NORMS),),
    "exaone4": (Naming(renamed=RESULT_NORMS),),
    "hunyuan_v1_dense": (_HUNYUAN,),
    "lfm2": (_LFM2,),
    "lfm3": (
        replace(_LFM3, renamed={**(_LFM3.renamed or {}), "self_attn.g_": "self_attn.gate_"}),
        _LFM3,
    ),
    "kolibri1": (_KOLIBRI, _KOLIBRI_MODULES),
    "flint": (Naming(renamed={"self_attn.sinks": "self_attn.softmax_offset"}),),
    "granitemoe_swa": (_GRANITE_SWA, _GRANITE_SHARED),
    "sarvam_moe": (
        _sarvam("attention"),
        _sarvam("self_attn"),
        Naming(renamed={"self_attn.": "attention."}),
        _SEVERAL_SHARED,
    ),
    "sarvam_mla": (_SEVERAL_SHARED,),
    "axk1": (_AXK1, _AXK1_MODULES, _without_bias(_AXK1), _without_bias(_AXK1_MODULES)),
}
