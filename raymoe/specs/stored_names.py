"""Under which names, and in which form, the families store their weights.

One table, `NAMINGS`: what `save_pretrained` of transformers 5.23 writes and what the published
checkpoints hold (read off `conversion_mapping.py` and the modelling classes; a test compares).
Names are those below the prefix of a layer, with "{expert}" for the number of an expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

EXPERT = "{expert}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A stored tensor that holds several weights, or those of all experts, or is shaped otherwise.

    Attributes:
        name: Of the tensor; without "{expert}" it holds all experts, one after the other.
        weights: Canonical names of the weights whose rows lie in it.
        is_interleaved: Whether their rows take turns, instead of following one another.
        is_transposed: Whether matrices are stored [inputs, outputs].
        is_folded: Whether the experts follow one another in the first of two dimensions, instead
            of having a dimension of their own.
        is_row: Whether a vector is stored as [1, length].
    """

    name: str
    weights: tuple[str, ...]
    is_interleaved: bool = False
    is_transposed: bool = False
    is_folded: bool = False
    is_row: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """One way to store a model.

    Attributes:
        layers: Prefix of a layer, with "{layer}" for its number.
        renamed: Begins of canonical names -> begins of stored ones; the first that fits counts.
        fused: Tensors that hold more than one weight.
        unread: Parts of the names of tensors that are stored and not computed.
    """

    layers: str = "model.layers.{layer}."
    renamed: Mapping[str, str] | None = None
    fused: tuple[Fused, ...] = ()
    unread: tuple[str, ...] = ()

    def rename(self, name: str) -> str:
        """The stored name of a canonical one; both without the prefix of their layer."""
        for ours, theirs in (self.renamed or {}).items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name


def namings_of(model_type: str) -> tuple[Naming, ...]:
    """The ways in which a family is stored: its own, then those that all have in common."""
    return (*NAMINGS.get(model_type, ()), _CANONICAL, _IN_ONE)


_EXPERT = f"mlp.experts.{EXPERT}."
_MIXTRAL_EXPERTS = {
    f"{_EXPERT}gate_proj.": f"block_sparse_moe.experts.{EXPERT}.w1.",
    f"{_EXPERT}up_proj.": f"block_sparse_moe.experts.{EXPERT}.w3.",
    f"{_EXPERT}down_proj.": f"block_sparse_moe.experts.{EXPERT}.w2.",
}


def _experts(leaf: str, *parts: str) -> tuple[str, ...]:
    return tuple(f"{_EXPERT}{part}_proj.{leaf}" for part in parts)


_CANONICAL = Naming()
# What transformers 5 holds in memory, and writes where it is asked not to convert.
_IN_ONE = Naming(
    fused=(
        Fused(name="mlp.experts.gate_up_proj", weights=_experts("weight", "gate", "up")),
        Fused(name="mlp.experts.down_proj", weights=_experts("weight", "down")),
    )
)
_MIXTRAL = Naming(renamed={**_MIXTRAL_EXPERTS, "mlp.": "block_sparse_moe."})
_SEVERAL_SHARED = Naming(renamed={"mlp.shared_expert.": "mlp.shared_experts."})
_INDEXED = replace(_SEVERAL_SHARED, unread=(".self_attn.indexer.",))

NAMINGS: Mapping[str, tuple[Naming, ...]] = {
    "mixtral": (_MIXTRAL,),
    "minimax_m2": (
        Naming(
            renamed={
                **_MIXTRAL_EXPERTS,
                "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
                "mlp.": "block_sparse_moe.",
            }
        ),
    ),
    "phimoe": (_MIXTRAL,),
    "deepseek_v2": (_SEVERAL_SHARED,),
    "deepseek_v3": (_SEVERAL_SHARED,),
    "deepseek_v32": (_INDEXED,),
    "glm_moe_dsa": (_INDEXED,),
    "glm4_moe": (_SEVERAL_SHARED,),
    "glm4_moe_lite": (_SEVERAL_SHARED,),
    "dots1": (_SEVERAL_SHARED,),
    "ernie4_5_moe": (
        Naming(
            renamed={"mlp.shared_expert.": "mlp.shared_experts."},
            fused=(
                Fused(
                    name="mlp.moe_statics.e_score_correction_bias",
                    weights=("mlp.gate.e_score_correction_bias",),
                    is_row=True,
                ),
            ),
        ),
    ),
    "hunyuan_v1_moe": (
        Naming(
            renamed={
                "mlp.gate.": "mlp.gate.wg.",
                "mlp.shared_expert.": "mlp.shared_mlp.",
                "self_attn.q_norm.": "self_attn.query_layernorm.",
                "self_attn.k_norm.": "self_attn.key_layernorm.",
            }
        ),
    ),
    "granitemoe": (
        Naming(
            renamed={"mlp.gate.": "block_sparse_moe.router.layer."},
            fused=(
                Fused(
                    name="block_sparse_moe.input_linear.weight",
                    weights=_experts("weight", "gate", "up"),
                ),
                Fused(
                    name="block_sparse_moe.output_linear.weight",
                    weights=_experts("weight", "down"),
                ),
            ),
        ),
    ),
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
                    weights=tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
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
}
