"""Tensor parallelism: which part of a model one of several ranks has.

Every rank goes through all layers with all tokens. It has some of the attention heads, with their
KV, and some of the hidden columns of every network: what it adds to the hidden state is a term of
a sum over the ranks, taken twice in a layer.

| weights | are cut |
| --- | --- |
| queries, and what unfolds a latent; sinks | by heads |
| keys, values | by KV heads; ranks share one where there are fewer heads than ranks |
| norms of queries and keys over all heads | by heads; their squares are a sum over the ranks too |
| output projection of attention | its inputs, by heads |
| gate and up of experts, shared experts and dense networks | their outputs |
| down of these | its inputs |
| biases behind a sum (output projection, down) | not; the first rank adds them |
| norms, router, its gates, latents, embedding, head | not; each rank has them |

Source: Megatron-LM (arXiv 1909.08053), section 3; MoE-Lightning (ASPLOS 2025), section 4.3.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from raymoe.errors import ConfigError
from raymoe.specs.layer_weights import (
    Shape,
    attention_weights,
    common_weights,
    expert_weights,
    layer_prefix,
)
from raymoe.specs.layers import (
    AttentionSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    MoeSpec,
)
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import Piece

_ADDED_ONCE = ("o_proj.bias", "down_proj.bias")


class Cut(NamedTuple):
    """The part of a weight that a rank has.

    Attributes:
        axis: Which is cut; None where the rank has all of it.
        begin: First index of that axis.
        is_zero: Whether another rank adds it, so that here it is zero.
    """

    axis: int | None = None
    begin: int = 0
    end: int = 0
    is_zero: bool = False


def shard_model(model: ModelSpec, count: int) -> ModelSpec:
    """The part of a model that each of `count` ranks has; sizes are the same for all of them.

    Raises:
        ConfigError: Heads, hidden columns or the groups of quantised weights cannot be divided so.
    """
    if count == 1:
        return model
    assert model.num_shards == 1, "a part of a model cannot be divided again"
    layers = tuple(_Divided(model, i, count).layer() for i in range(model.num_layers))
    part = replace(model, layers=layers, num_shards=count)
    for i in range(model.num_layers):
        _check_groups(model, part, i)
    return part


def cut_of(name: str, whole: Shape, part: Shape, *, rank: int, count: int) -> Cut:
    """Which part of a weight a rank has.

    Args:
        whole: Its shape in the model.
        part: Its shape in `shard_model` of it.
    """
    if name.endswith(_ADDED_ONCE):
        return Cut(is_zero=rank > 0)
    axis = next((axis for axis, size in enumerate(whole) if part[axis] != size), None)
    if axis is None:
        return Cut()
    # Fewer parts than ranks: neighbouring ranks, whose queries read it, have the same KV head.
    index = rank * (whole[axis] // part[axis]) // count
    return Cut(axis, index * part[axis], (index + 1) * part[axis])


class _Divided:
    def __init__(self, model: ModelSpec, i: int, count: int) -> None:
        self._spec, self._count = model.layers[i], count
        self._where = f"{model.name}, layer {i}"

    def layer(self) -> LayerSpec:
        ffn = self._spec.ffn
        return replace(
            self._spec,
            attention=self._attention(self._spec.attention),
            ffn=self._dense(ffn) if isinstance(ffn, DenseSpec) else self._moe(ffn),
        )

    def _attention(
        self, attention: AttentionSpec | LatentAttentionSpec
    ) -> AttentionSpec | LatentAttentionSpec:
        num_heads = self._share("attention heads", attention.num_heads)
        if isinstance(attention, LatentAttentionSpec):
            return replace(attention, num_heads=num_heads)
        num_kv_heads = 1  # which several ranks may have
        if self._count % attention.num_kv_heads:
            num_kv_heads = self._share("KV heads", attention.num_kv_heads)
        return replace(attention, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def _dense(self, dense: DenseSpec) -> DenseSpec:
        return replace(dense, hidden=self._share("columns of the network", dense.hidden))

    def _moe(self, moe: MoeSpec) -> MoeSpec:
        shared = moe.shared
        if shared is not None:
            hidden = self._share("columns of the shared expert", shared.hidden)
            shared = replace(shared, hidden=hidden)
        hidden = self._share("columns of an expert", moe.expert_hidden)
        return replace(moe, expert_hidden=hidden, shared=shared)

    def _share(self, what: str, number: int) -> int:
        if number % self._count:
            raise ConfigError(
                f"{self._where} has {number} {what}; tensor_parallel_size {self._count} does not "
                "divide them"
            )
        return number // self._count


def _check_groups(model: ModelSpec, part: ModelSpec, i: int) -> None:
    weights = zip(_weights(model, i), _weights(part, i), strict=True)
    for (name, whole), (_, shape) in weights:
        stored = model.format_of(layer_prefix(i) + name, whole)
        if stored is None:
            continue
        cut = cut_of(name, whole, shape, rank=0, count=part.num_shards)
        for piece in stored.pieces(*whole):
            size = _entry_size(piece, cut.axis)
            if cut.axis is not None and shape[cut.axis] % size:
                what = ("rows", "columns")[cut.axis]
                raise ConfigError(
                    f"{model.name}: {layer_prefix(i)}{name} is stored as {stored.name}, in groups "
                    f"of {size} {what} (of {piece.name}); tensor_parallel_size {part.num_shards} "
                    f"gives a rank {shape[cut.axis]} of {whole[cut.axis]}, which is not a multiple"
                )


def _entry_size(piece: Piece, axis: int | None) -> int:
    return piece.rows if axis == 0 else piece.columns


def _weights(model: ModelSpec, i: int) -> Iterator[tuple[str, Shape]]:
    layer, hidden_size = model.layers[i], model.hidden_size
    yield from attention_weights(layer, hidden_size)
    yield from common_weights(layer, hidden_size)
    if isinstance(layer.ffn, MoeSpec):
        yield from expert_weights(layer.ffn, hidden_size)
