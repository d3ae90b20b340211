"""Names and shapes of the weights of a model, and the forms in which checkpoints store them.

*Canonical* names are those of transformers 5's modules with one entry per expert matrix:
`model.layers.3.mlp.experts.7.gate_proj.weight`. What a checkpoint stores may differ (tuples below,
read off `conversion_mapping.py` of transformers 5.23).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raymoe.errors import CheckpointError
from raymoe.specs.model import DenseSpec, LayerSpec, ModelSpec, MoeSpec

Shape = tuple[int, ...]

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_PARTS = ("gate_proj", "up_proj", "down_proj")
_MOE_MODULES = ("mlp", "block_sparse_moe")
# Per-expert matrices: gate, up, down.
_PER_EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True)
class Location:
    """Where a canonical weight lies in a checkpoint.

    Attributes:
        name: Stored tensor.
        expert: Index into its first dimension, where all experts are stored as one tensor.
        rows: Range of the following dimension, where gate and up are stored as one.
    """

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


def layer_prefix(i: int) -> str:
    """What the names of layer `i` begin with."""
    return f"model.layers.{i}."


def layer_weights(layer: LayerSpec, hidden_size: int) -> dict[str, Shape]:
    """Canonical names without the prefix of the layer, and shapes, of all weights of a layer."""
    return dict(_attention_weights(layer, hidden_size)) | dict(_ffn_weights(layer, hidden_size))


def model_weights(spec: ModelSpec) -> dict[str, Shape]:
    """Canonical names and shapes of all weights; a tied head has none of its own."""
    weights: dict[str, Shape] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for i, layer in enumerate(spec.layers):
        prefix = layer_prefix(i)
        for name, shape in layer_weights(layer, spec.hidden_size).items():
            weights[prefix + name] = shape
    weights[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        weights[HEAD] = (spec.vocab_size, spec.hidden_size)
    return weights


def locate_weights(
    spec: ModelSpec, stored: Mapping[str, Shape], files: Mapping[str, str]
) -> dict[str, Location]:
    """Find every canonical weight among the stored tensors.

    Args:
        spec: The model.
        stored: Name -> shape of every tensor of the checkpoint.
        files: Name -> file of every tensor, for messages.

    Raises:
        CheckpointError: A tensor is missing, has the wrong shape, or belongs to nothing.
    """
    return _Locator(spec, stored, files).locate()


class _Locator:
    """One search for the weights of a model among the tensors of a checkpoint."""

    def __init__(
        self, spec: ModelSpec, stored: Mapping[str, Shape], files: Mapping[str, str]
    ) -> None:
        self._spec, self._stored, self._files = spec, stored, files

    def locate(self) -> dict[str, Location]:
        """See `locate_weights`."""
        locations: dict[str, Location] = {}
        for name, shape in model_weights(self._spec).items():
            if ".mlp.experts." not in name:
                other = name.replace(".mlp.", ".block_sparse_moe.")
                locations[name] = self._checked(other if other in self._stored else name, shape)
        for i, layer in enumerate(self._spec.layers):
            if isinstance(layer.ffn, MoeSpec):
                locations |= self._experts(layer_prefix(i), layer.ffn)
        used = {location.name for location in locations.values()}
        extra = [name for name in self._stored.keys() - used if not self._is_redundant(name)]
        if extra:
            name = min(extra)
            raise CheckpointError(
                f"{self._files[name]}: tensor {name!r} belongs to nothing in a "
                f"{self._spec.model_type} of this configuration ({len(extra)} such tensors); "
                "is config.json of another checkpoint?"
            )
        return locations

    def _experts(self, prefix: str, moe: MoeSpec) -> dict[str, Location]:
        canonical = f"{prefix}mlp.experts."
        for module in _MOE_MODULES:
            stored = f"{prefix}{module}.experts."
            if f"{stored}gate_up_proj" in self._stored or f"{stored}down_proj" in self._stored:
                return self._fused(stored, canonical, moe)
            for parts in _PER_EXPERT:
                if any(f"{stored}0.{part}.weight" in self._stored for part in parts):
                    return self._separate(stored, canonical, moe, parts)
        raise CheckpointError(
            f"tensor '{canonical}0.gate_proj.weight' is missing, and so is every other form in "
            f"which experts are stored ('{prefix}block_sparse_moe.experts.0.w1.weight', "
            f"'{canonical}gate_up_proj')"
        )

    def _separate(
        self, stored: str, canonical: str, moe: MoeSpec, parts: tuple[str, ...]
    ) -> dict[str, Location]:
        locations = {}
        shapes = [shape for _, shape in _gated("", moe.expert_hidden, self._spec.hidden_size)]
        for expert in range(moe.num_experts):
            for part, stored_part, shape in zip(_PARTS, parts, shapes, strict=True):
                location = self._checked(f"{stored}{expert}.{stored_part}.weight", shape)
                locations[f"{canonical}{expert}.{part}.weight"] = location
        return locations

    def _fused(self, stored: str, canonical: str, moe: MoeSpec) -> dict[str, Location]:
        hidden, hidden_size = moe.expert_hidden, self._spec.hidden_size
        gate_up = self._checked(
            f"{stored}gate_up_proj", (moe.num_experts, 2 * hidden, hidden_size)
        ).name
        down = self._checked(f"{stored}down_proj", (moe.num_experts, hidden_size, hidden)).name
        locations = {}
        for expert in range(moe.num_experts):
            name = f"{canonical}{expert}."
            locations[f"{name}gate_proj.weight"] = Location(gate_up, expert, (0, hidden))
            locations[f"{name}up_proj.weight"] = Location(gate_up, expert, (hidden, 2 * hidden))
            locations[f"{name}down_proj.weight"] = Location(down, expert)
        return locations

    def _checked(self, name: str, shape: Shape) -> Location:
        if name not in self._stored:
            raise CheckpointError(f"tensor {name!r} of shape {list(shape)} is missing")
        if tuple(self._stored[name]) != shape:
            raise CheckpointError(
                f"{self._files[name]}: tensor {name!r} has shape {list(self._stored[name])}, "
                f"config.json says {list(shape)}"
            )
        return Location(name)

    def _is_redundant(self, name: str) -> bool:
        """Old checkpoints store the rope frequencies; tied ones may store the head twice."""
        is_tied_head = self._spec.tie_word_embeddings and name == HEAD
        return is_tied_head or name.endswith(".rotary_emb.inv_freq")


def _attention_weights(layer: LayerSpec, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    attention = layer.attention
    query, kv = attention.query_width, attention.kv_width
    yield "input_layernorm.weight", (hidden_size,)
    for part, width in (("q", query), ("k", kv), ("v", kv)):
        yield f"self_attn.{part}_proj.weight", (width, hidden_size)
        if attention.qkv_bias:
            yield f"self_attn.{part}_proj.bias", (width,)
    if attention.qk_norm != "none":
        is_full = attention.qk_norm == "full"
        yield "self_attn.q_norm.weight", (query if is_full else attention.head_dim,)
        yield "self_attn.k_norm.weight", (kv if is_full else attention.head_dim,)
    yield "self_attn.o_proj.weight", (hidden_size, query)
    if attention.output_bias:
        yield "self_attn.o_proj.bias", (hidden_size,)
    yield "post_attention_layernorm.weight", (hidden_size,)


def _ffn_weights(layer: LayerSpec, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    ffn = layer.ffn
    if isinstance(ffn, DenseSpec):
        yield from _gated("mlp.", ffn.hidden, hidden_size)
        if ffn.has_bias:
            yield "mlp.gate_proj.bias", (ffn.hidden,)
            yield "mlp.up_proj.bias", (ffn.hidden,)
            yield "mlp.down_proj.bias", (hidden_size,)
        return
    yield "mlp.gate.weight", (ffn.num_experts, hidden_size)
    for expert in range(ffn.num_experts):
        yield from _gated(f"mlp.experts.{expert}.", ffn.expert_hidden, hidden_size)
    if ffn.shared is not None:
        yield from _gated("mlp.shared_expert.", ffn.shared.hidden, hidden_size)
        if ffn.shared.is_gated:
            yield "mlp.shared_expert_gate.weight", (1, hidden_size)


def _gated(prefix: str, hidden: int, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}gate_proj.weight", (hidden, hidden_size)
    yield f"{prefix}up_proj.weight", (hidden, hidden_size)
    yield f"{prefix}down_proj.weight", (hidden_size, hidden)
