"""Tensor parallelism: the part of a model that each rank holds.

Every rank computes all layers for all tokens with some of the attention heads and their KV, and
some of the hidden columns of every network; an all-reduce sums the ranks' results twice per layer.

| weights | division |
| --- | --- |
| queries, up-projection of a latent; sinks | by heads |
| keys, values | by KV heads; ranks share one if there are more ranks than heads |
| norms of queries and keys over all heads | by heads; their squares are all-reduced too |
| output projection of attention | its inputs, by heads |
| gate and up of experts, shared experts and dense networks | their outputs |
| down of these | its inputs |
| biases after an all-reduce (output projection, down) | not; the first rank adds them |
| norms, router, its gates, latents, embedding, head | not; each rank has them |

Source: Megatron-LM (arXiv 1909.08053), section 3; MoE-Lightning (ASPLOS 2025), section 4.3.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from raymoe.errors import ConfigError
from raymoe.specs.layer_weights import (
    attention_weights,
    common_weights,
    expert_weights,
    layer_prefix,
)
from raymoe.specs.layers import DenseSpec, LayerSpec, MoeSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import Piece
from raymoe.specs.weights import Shape, Weight

_ADDED_ONCE = ("o_proj.bias", "down_proj.bias")


class Cut(NamedTuple):
    axis: int | None = None  # the divided axis; None if the rank has all of it
    begin: int = 0
    end: int = 0
    is_zero: bool = False  # whether another rank adds this weight, so that it is zero here


def shard_model(model: ModelSpec, count: int) -> ModelSpec:
    """The equal part of each of `count` ranks; raises ConfigError if sizes are not divisible."""
    if count == 1:
        return model
    assert model.num_shards == 1, "a part of a model cannot be divided again"
    if model.has_states:
        raise ConfigError(
            f"tensor_parallel_size is {count}, but {model.name} has layers that keep states, which "
            "are not divided between GPUs; use one engine for each GPU"
        )
    layers = tuple(_Divided(model, i, count).layer() for i in range(model.num_layers))
    part = replace(model, layers=layers, num_shards=count)
    for i in range(model.num_layers):
        _check_groups(model, part, i)
    return part


def cut_of(name: str, whole: Shape, part: Shape, *, rank: int, count: int) -> Cut:
    """A rank's part of a weight, from its shape in the model and in `shard_model` of it."""
    if name.endswith(_ADDED_ONCE):
        return Cut(is_zero=rank > 0)
    axis = next((axis for axis, size in enumerate(whole) if part[axis] != size), None)
    if axis is None:
        return Cut()
    # With fewer KV heads than ranks, neighbouring ranks have the KV head that their queries read.
    index = rank * (whole[axis] // part[axis]) // count
    return Cut(axis, index * part[axis], (index + 1) * part[axis])


class _Divided:
    def __init__(self, model: ModelSpec, i: int, count: int) -> None:
        self._spec, self.count = model.layers[i], count
        self._where = f"{model.name}, layer {i}"

    def layer(self) -> LayerSpec:
        ffn = self._spec.ffn
        return replace(
            self._spec,
            attention=self._spec.attention.shard(self),
            ffn=self._dense(ffn) if isinstance(ffn, DenseSpec) else self._moe(ffn),
        )

    def _dense(self, dense: DenseSpec) -> DenseSpec:
        return replace(
            dense, hidden=self.share("columns in its feed-forward network", dense.hidden)
        )

    def _moe(self, moe: MoeSpec) -> MoeSpec:
        shared = moe.shared
        if shared is not None:
            hidden = self.share("columns in its shared expert", shared.hidden)
            shared = replace(shared, hidden=hidden)
        hidden = self.share("columns in an expert", moe.expert_hidden)
        return replace(moe, expert_hidden=hidden, shared=shared)

    def share(self, what: str, number: int) -> int:
        if number % self.count:
            raise ConfigError(
                f"{self._where} has {number} {what}; tensor_parallel_size {self.count} does not "
                "divide them"
            )
        return number // self.count


def _check_groups(model: ModelSpec, part: ModelSpec, i: int) -> None:
    weights = zip(_weights(model, i), _weights(part, i), strict=True)
    for (name, whole, *_), (_, shape, *_) in weights:
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


def _weights(model: ModelSpec, i: int) -> Iterator[Weight]:
    layer, hidden_size = model.layers[i], model.hidden_size
    yield from attention_weights(layer, hidden_size)
    yield from common_weights(layer, hidden_size)
    if layer.moe is not None:
        yield from expert_weights(layer.moe, hidden_size)
