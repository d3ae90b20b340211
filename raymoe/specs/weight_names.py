"""Names and layouts under which the families store their weights.

`NAMINGS` lists what `save_pretrained` of transformers 5.23 writes and what published checkpoints
hold (read off `conversion_mapping.py` and the modelling classes; a test compares). Names are those
after a layer's prefix, with "{expert}" for the number of an expert.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from raymoe.errors import CheckpointError, UnsupportedModelError
from raymoe.specs.families.wrappers import MEDIA_TENSORS, WRAPPERS
from raymoe.specs.layer_weights import (
    ATTENTION_RESULT_NORM,
    EXPERTS,
    FFN_NORM,
    FFN_RESULT_NORM,
    HEAD,
    HEAD_BIAS,
    LABEL_HEAD,
    RECURRENT,
    Shape,
    layer_prefix,
    layer_weights,
)
from raymoe.specs.layers import LayerSpec, MoeSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import Piece, WeightFormat

EXPERT = "{expert}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A stored tensor that fuses weights or experts, or has another shape than its weight."""

    name: str  # stored name; without "{expert}" the tensor holds all experts, one after the other
    weights: tuple[str, ...]  # canonical names of the weights whose rows it holds
    is_interleaved: bool = False  # whether their rows alternate, instead of following one another
    is_transposed: bool = False  # whether matrices are stored [inputs, outputs]
    # Whether the first of two dimensions holds all experts, instead of a dimension of their own.
    is_folded: bool = False
    is_row: bool = False  # whether a vector is stored as [1, length]
    # Attribute of the layer's attention with the number of groups, usually heads: each group holds
    # its rows of all weights, one weight after the other. None: one group.
    groups: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    layers: str = "model.layers.{layer}."  # prefix of a layer, with "{layer}" for its number
    # Prefixes of canonical names -> prefixes of stored ones; the first match applies.
    renamed: Mapping[str, str] | None = None
    fused: tuple[Fused, ...] = ()
    unread: tuple[str, ...] = ()  # parts of the names of tensors that are stored but not used

    def rename(self, name: str) -> str:
        for ours, theirs in (self.renamed or {}).items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def without_prefix(self) -> "Naming":
        """The names that a class without a head (transformers' `AutoModel`) stores."""
        prefix = self.layers.partition(".")[0] + "."
        names = (self.renamed or {}).items()
        bare = {ours: theirs.removeprefix(prefix) for ours, theirs in names}
        return replace(
            self, layers=self.layers.removeprefix(prefix), renamed={**bare, "model.": ""}
        )

    def inside(self, layers: str, head: str) -> "Naming":
        """The names that a class which wraps the model stores, with these prefixes."""
        names = (self.renamed or {}).items()
        wrapped = {
            ours: layers + theirs.removeprefix("model.")
            for ours, theirs in names
            if ours.startswith("model.")
        }
        return replace(
            self,
            layers=layers + self.layers.removeprefix("model."),
            renamed={**(self.renamed or {}), **wrapped, "model.": layers, "lm_head.": head},
            unread=(*self.unread, *MEDIA_TENSORS),
        )


def namings_of(model_type: str, wrapper: str | None = None) -> tuple[Naming, ...]:
    """Ways to store a family: its own first, then the common ones, each without a prefix too."""
    own = NAMINGS.get(model_type, ())
    in_one = [replace(naming, fused=_IN_ONE.fused) for naming in own if not naming.fused]
    namings = (*own, _CANONICAL, *in_one, _IN_ONE)
    if wrapper is not None:
        prefixes = WRAPPERS[wrapper].prefixes
        return tuple(naming.inside(*prefix) for prefix in prefixes for naming in namings)
    return (*namings, *(naming.without_prefix() for naming in namings))


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
_QKV = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
_SEVERAL_SHARED = Naming(renamed={"mlp.shared_expert.": "mlp.shared_experts."})
_HUNYUAN = Naming(
    renamed={
        "mlp.gate.": "mlp.gate.wg.",
        "mlp.shared_expert.": "mlp.shared_mlp.",
        "self_attn.q_norm.": "self_attn.query_layernorm.",
        "self_attn.k_norm.": "self_attn.key_layernorm.",
    }
)
_GRANITE_ROUTER = {"mlp.gate.": "block_sparse_moe.router.layer."}
_GRANITE = Naming(
    renamed=_GRANITE_ROUTER,
    fused=(
        Fused(
            name="block_sparse_moe.input_linear.weight",
            weights=_experts("weight", "gate", "up"),
        ),
        Fused(name="block_sparse_moe.output_linear.weight", weights=_experts("weight", "down")),
    ),
)
_GRANITE_SHARED = Naming(
    renamed={**_GRANITE_ROUTER, "mlp.shared_expert.down_proj.": "shared_mlp.output_linear."},
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

NAMINGS: Mapping[str, tuple[Naming, ...]] = {
    "qwen3_next": (_QWEN3_NEXT, replace(_QWEN3_NEXT, fused=_QWEN3_NEXT.fused + _IN_ONE.fused)),
    "qwen3_5_moe_text": (_QWEN3_5, replace(_QWEN3_5, fused=_QWEN3_5.fused + _IN_ONE.fused)),
    "mimo_v2_flash": (Naming(renamed={"self_attn.sinks": "self_attn.attention_sink_bias"}),),
    "minimax_m3_vl_text": (
        Naming(
            renamed={
                **_MIXTRAL_EXPERTS,
                "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
                "mlp.gate.": "block_sparse_moe.gate.",
                "mlp.shared_expert.": "block_sparse_moe.shared_experts.",
            },
            unread=(".self_attn.index_", ".self_attn.indexer."),
        ),
        replace(
            _SEVERAL_SHARED,
            fused=(
                *_IN_ONE.fused,
                *(
                    Fused(
                        name=f"mlp.{stored}gate_up_proj.weight",
                        weights=tuple(f"mlp.{ours}{part}_proj.weight" for part in ("gate", "up")),
                    )
                    for ours, stored in (("", ""), ("shared_expert.", "shared_experts."))
                ),
            ),
        ),
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
        Naming(
            renamed={
                "mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias",
                "mlp.shared_expert.": "mlp.shared_experts.",
            }
        ),
    ),
    "laguna": (
        Naming(renamed={"mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias"}),
    ),
    "cohere2_moe": (_SEVERAL_SHARED,),
    "mixtral": (_MIXTRAL,),
    "flex_olmo": (Naming(renamed=RESULT_NORMS),),
    "olmo3": (Naming(renamed=RESULT_NORMS),),
    "gemma3_text": (Naming(renamed=RESULT_NORMS),),
    "gemma4_text": (
        _GEMMA4,
        Naming(renamed={EXPERTS: "experts.", **(_GEMMA4.renamed or {})}),
    ),
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
    "mistral4": (_SEVERAL_SHARED,),
    "glm4v_moe_text": (_SEVERAL_SHARED,),
    "qwen3_vl_moe_text": (_TRANSPOSED,),
    "solar_open": (_SEVERAL_SHARED,),
    "hy_v3": (_HY_V3, _SEVERAL_SHARED),
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
    "hunyuan_v1_moe": (_HUNYUAN,),
    "granitemoe": (_GRANITE,),
    "granitemoeshared": (_GRANITE_SHARED,),
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
}


_EXPERT_NUMBER = re.compile(rf"(?<=^{re.escape(EXPERTS)})\d+(?=\.)")
_LAYER = re.compile(r"(?:\w+\.)*layers\.(\d+)\.")
# Tensors that predict a second token: layers that hold such a matrix (DeepSeek-V3, GLM), or modules
# whose names begin like this (ERNIE, MiMo, EXAONE).
_PREDICTOR_MARK = "eh_proj.weight"
_PREDICTORS = ("model.mtp_", "mtp.", "model.mtp.")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a canonical weight is in a checkpoint; fields apply in order."""

    name: str
    shape: Shape | None = None  # shape to read it in, if it differs from the stored one
    expert: int | None = None  # index into the first dimension, if all experts are in one tensor
    is_transposed: bool = False  # whether the matrix is stored [inputs, outputs]
    # First, end and step of its rows, if several weights are in one tensor.
    rows: tuple[int, int, int] | None = None
    num_groups: int = 1  # equal parts of the tensor, in each of which it has such rows
    # Format and shape of a weight stored in several tensors, named `name` without ".weight" plus
    # the format's suffixes.
    quantised: tuple[WeightFormat, tuple[int, int]] | None = None

    def pieces(self) -> dict[str, Piece]:
        """Stored tensors of a quantised weight by name; shapes are per expert."""
        if self.quantised is None:
            return {}
        stored, shape = self.quantised
        module = self.name.removesuffix(".weight")
        return {module + piece.suffix: piece for piece in _pieces(stored, shape)}

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self.pieces()) or (self.name,)


@lru_cache
def _pieces(stored: WeightFormat, shape: tuple[int, int]) -> tuple[Piece, ...]:
    return stored.pieces(*shape)


def model_weights(spec: ModelSpec) -> dict[str, Shape]:
    weights = spec.outer_weights()
    for i, layer in enumerate(spec.layers):
        for name, shape in layer_weights(layer, spec.hidden_size).items():
            weights[layer_prefix(i) + name] = shape
    return weights


def locate_weights(
    spec: ModelSpec, stored: Mapping[str, Shape], files: Mapping[str, str]
) -> dict[str, Location]:
    """Find every canonical weight among the stored tensors (name -> shape).

    Messages name the tensor's file. Raises CheckpointError if a tensor is missing, unknown, or has
    the wrong shape.
    """
    best: dict[str, _Place] = {}
    missing: list[str] = []
    fewest: tuple[int, int] | None = None
    for naming in namings_of(spec.model_type, spec.wrapper):
        places = dict(_places(spec, naming))
        absent = [name for name, place in places.items() if place.absent(stored)]
        num_wrong = sum(place.has_other_shape(stored) for place in places.values())
        if fewest is None or (len(absent), num_wrong) < fewest:
            best, missing, fewest = places, absent, (len(absent), num_wrong)
        if fewest == (0, 0):
            break
    if missing:
        raise CheckpointError(_explain_missing(spec, missing[0], best[missing[0]], stored))
    _check_shapes(best.values(), stored, files)
    for place in best.values():
        _check_cut(place.location)
    used = {name for place in best.values() for name in place.shapes}
    _check_for_others(spec, used, stored, files)
    return {name: place.location for name, place in best.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    location: Location
    shapes: Mapping[str, Shape]

    def absent(self, stored: Collection[str]) -> str | None:
        return next((name for name in self.shapes if name not in stored), None)

    def has_other_shape(self, stored: Mapping[str, Shape]) -> bool:
        return any(tuple(stored.get(name, shape)) != shape for name, shape in self.shapes.items())


def _places(spec: ModelSpec, naming: Naming) -> Iterator[tuple[str, _Place]]:
    for name, shape in spec.outer_weights().items():
        is_label_head = name == HEAD and spec.head == "labels"
        stored = LABEL_HEAD if is_label_head else naming.rename(name)
        form = None if is_label_head else spec.format_of(name, shape)
        yield name, _plain_or_quantised(Location(stored), shape, form)
    for i, layer in enumerate(spec.layers):
        weights = layer_weights(layer, spec.hidden_size)
        prefix = naming.layers.format(layer=i)
        names = _LayerNames(naming, prefix, weights, layer)
        for name, shape in weights.items():
            canonical = layer_prefix(i) + name
            yield canonical, names.place(name, spec.format_of(canonical, shape))


class _LayerNames:
    def __init__(
        self,
        naming: Naming,
        prefix: str,
        weights: Mapping[str, Shape],
        layer: LayerSpec,
    ) -> None:
        self._naming, self._prefix, self._weights = naming, prefix, weights
        self._attention = layer.attention
        self._num_experts = layer.ffn.num_experts if isinstance(layer.ffn, MoeSpec) else 0
        self._fused = {name: tensor for tensor in naming.fused for name in tensor.weights}

    def place(self, name: str, quantised: WeightFormat | None) -> _Place:
        number = _EXPERT_NUMBER.search(name)
        general = name if number is None else _EXPERT_NUMBER.sub(EXPERT, name)
        tensor = self._fused.get(general)
        if tensor is not None:
            expert = None if number is None else number[0]
            return self._in_fused(tensor, general, expert, quantised)
        stored = self._naming.rename(general)
        if number is not None:
            stored = stored.replace(EXPERT, number[0])
        location = Location(self._prefix + stored)
        return _plain_or_quantised(location, self._weights[name], quantised)

    def _in_fused(
        self, tensor: Fused, general: str, expert: str | None, quantised: WeightFormat | None
    ) -> _Place:
        shapes = [self._weights[name.replace(EXPERT, expert or "")] for name in tensor.weights]
        index, count = tensor.weights.index(general), len(tensor.weights)
        begin, total = sum(shape[0] for shape in shapes[:index]), sum(shape[0] for shape in shapes)
        rows, num_groups = None, 1
        if tensor.groups is not None:
            num_groups = getattr(self._attention, tensor.groups)
        if count > 1:
            end = begin + shapes[index][0]
            rows = (index, total, count) if tensor.is_interleaved else (begin, end, 1)
            rows = (rows[0] // num_groups, rows[1] // num_groups, rows[2])
        location = Location(
            self._prefix + tensor.name,
            expert=None if expert is None else int(expert),
            rows=rows,
            num_groups=num_groups,
        )
        whole = (total, *shapes[0][1:])
        if quantised is not None:
            return self._quantised(location, whole, quantised)
        return self._in_one(tensor, location, whole)

    def _in_one(self, tensor: Fused, location: Location, whole: Shape) -> _Place:
        """Locate a weight in a fused tensor; `whole` is that tensor's shape per expert."""
        shape = stored_shape = whole[:: -1 if tensor.is_transposed else 1]
        if location.expert is not None:
            shape = stored_shape = (self._num_experts, *shape)
        if tensor.is_folded:
            stored_shape = (shape[0] * shape[1], *shape[2:])
        elif tensor.is_row:
            stored_shape = (1, *shape)
        location = replace(
            location,
            shape=None if shape == stored_shape else shape,
            is_transposed=tensor.is_transposed,
        )
        return _Place(location, {location.name: stored_shape})

    def _quantised(self, location: Location, whole: Shape, quantised: WeightFormat) -> _Place:
        place = _plain_or_quantised(location, whole, quantised)
        if location.expert is None:
            return place
        shapes = {name: (self._num_experts, *shape) for name, shape in place.shapes.items()}
        return replace(place, shapes=shapes)


def _plain_or_quantised(location: Location, shape: Shape, quantised: WeightFormat | None) -> _Place:
    if quantised is None:
        return _Place(location, {location.name: shape})
    location = replace(location, quantised=(quantised, (shape[0], shape[1])))
    try:
        pieces = location.pieces()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"tensor {location.name!r}: {error}") from error
    return _Place(location, {name: piece.shape for name, piece in pieces.items()})


def _explain_missing(spec: ModelSpec, name: str, best: _Place, stored: Collection[str]) -> str:
    absent = best.absent(stored)
    assert absent is not None
    message = f"tensor {absent!r} of shape {list(best.shapes[absent])} is missing"
    if best.location.quantised is not None:
        form, (rows, columns) = best.location.quantised
        tensors = ", ".join(map(repr, best.shapes))
        return f"{message}; a matrix of {rows} x {columns} is stored as {form.name}: {tensors}"
    places = (
        dict(_places(spec, naming))[name] for naming in namings_of(spec.model_type, spec.wrapper)
    )
    others = {place.location.name for place in places} - {best.location.name}
    if others:
        message += f", and so are its other names: {', '.join(map(repr, sorted(others)))}"
    return message


def _check_shapes(
    places: Iterable[_Place], stored: Mapping[str, Shape], files: Mapping[str, str]
) -> None:
    for name, shape in (item for place in places for item in place.shapes.items()):
        is_one_element = shape == (1,) and stored[name] == ()
        if tuple(stored[name]) != shape and not is_one_element:
            raise CheckpointError(
                f"{files[name]}: tensor {name!r} has shape {list(stored[name])}, "
                f"config.json says {list(shape)}"
            )


def _check_cut(location: Location) -> None:
    if location.rows is None:
        return
    begin, _, step = location.rows
    for name, piece in location.pieces().items():
        is_cut = begin % piece.rows > 0 or (step > 1 and piece.rows > 1)
        if piece.row_axis is not None and is_cut:
            raise UnsupportedModelError(
                f"tensor {name!r} has one entry for {piece.rows} rows, and the weights that it "
                f"holds are divided at row {begin} in steps of {step}"
            )


def _check_for_others(
    spec: ModelSpec, used: set[str], stored: Mapping[str, Shape], files: Mapping[str, str]
) -> None:
    extra = [name for name in stored.keys() - used if not _is_redundant(spec, name, stored)]
    if extra:
        name = min(extra)
        raise CheckpointError(
            f"{files[name]}: tensor {name!r} belongs to nothing in a {spec.model_type} of this "
            f"configuration ({len(extra)} such tensors); is config.json of another checkpoint?"
        )


def _is_redundant(spec: ModelSpec, name: str, stored: Mapping[str, Shape]) -> bool:
    """Whether a stored tensor is not used.

    Old checkpoints store rope frequencies; tied ones may store the head twice; layers that predict
    a second token follow the last one or are separate modules; some families store the indexer for
    contexts that are refused.
    """
    unread = () if spec.quantization is None else spec.quantization.unread
    if name.startswith(_PREDICTORS) or name.endswith((".rotary_emb.inv_freq", *unread)):
        return True
    namings = namings_of(spec.model_type, spec.wrapper)
    if any(part in name for naming in namings for part in naming.unread):
        return True
    layer = _LAYER.match(name)
    if layer is not None and int(layer[1]) >= spec.num_layers:
        return layer[0] + _PREDICTOR_MARK in stored
    if spec.head == "lm":
        return spec.tie_word_embeddings and name == HEAD
    return name in (HEAD, HEAD_BIAS, LABEL_HEAD)
