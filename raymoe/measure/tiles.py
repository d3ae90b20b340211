"""Measure which tile shapes are fastest for the expert kernels on a GPU, and store them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, Weight, on_device
from raymoe.device.cuda_api import CudaApi, EventT, StreamT
from raymoe.errors import CapacityError, ConfigError
from raymoe.kernels.cpu_experts import Experts
from raymoe.kernels.gpu_experts_layout import (
    BUCKETS,
    ExpertMatrices,
    TileKey,
    TileShape,
    TileTable,
    balanced_routing,
    candidate_shapes,
    key_of,
)
from raymoe.kernels.triton_support import OLDEST_CAPABILITY, TENSOR_CORES_SINCE
from raymoe.measure.gpu import StreamRun, seconds_on_stream
from raymoe.memory.weights import DummyWeights
from raymoe.model.device_experts import (
    MAX_SMALL_BATCH_TOKENS,
    grouped_experts_are_used,
    make_device_experts,
)
from raymoe.model.loading import PagedLoader, clamp_of
from raymoe.specs.layer_weights import layer_prefix
from raymoe.specs.layers import projections_of
from raymoe.specs.model import ModelSpec, MoeSpec
from raymoe.specs.weight_format import WeightFormat
from raymoe.specs.weight_names import model_weights
from raymoe.units import ceil_div

MakeExperts = Callable[[TileTable], Experts]
TimeCall = Callable[[Callable[[], Tensor]], float]


def measure_tiles(
    tiles: TileTable,
    matrices: ExpertMatrices,
    *,
    hidden: Callable[[int], Tensor],
    top_k: int,
    make: MakeExperts,
    time_call: TimeCall,
    buckets: Iterable[int] = BUCKETS,
) -> TileTable:
    """Measure all candidates for the formats of these matrices; other formats' tiles stay.

    `hidden` makes hidden states for a number of tokens, `make` experts with given tiles.
    """
    layouts = matrices.layouts()
    assert layouts is not None, "the matrices of a layer's experts are stored the same"
    chosen = dict(tiles.chosen)
    for bucket in buckets:
        hidden_TH = hidden(ceil_div(bucket * matrices.num_experts, top_k))
        routing = balanced_routing(len(hidden_TH), matrices.num_experts, top_k, hidden_TH.device)
        keys = {key_of(layout, bucket) for layout in layouts}
        seconds: dict[TileShape, float] = {}
        for shape in candidate_shapes(layouts[0], bucket, tiles.capability):
            experts = make(_with(tiles, dict.fromkeys(keys, shape)))
            try:
                seconds[shape] = time_call(partial(experts, hidden_TH, *routing))
            except CapacityError:
                continue  # the tile is too large for this GPU
        if seconds:
            chosen |= dict.fromkeys(keys, min(seconds, key=seconds.__getitem__))
    return replace(tiles, chosen=MappingProxyType(chosen))


def _with(tiles: TileTable, shapes: Mapping[TileKey, TileShape]) -> TileTable:
    return replace(tiles, chosen=MappingProxyType({**tiles.chosen, **shapes}))


SECONDS = 0.05  # per tile
WEIGHT_SHARE = 0.5  # share of free device memory; the rest is for rows and their products


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTiles:
    format_name: str
    tokens_per_expert: int
    shape: TileShape
    usual_s: float  # seconds of a layer with the default tile
    best_s: float
    tiles: TileTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """As many experts of a layer as fit on the device."""

    moe: MoeSpec  # the layer's numbers, with as many experts as there are matrices
    input_size: int  # of an expert
    dtype: torch.dtype
    matrices: ExpertMatrices  # random, in the model's storage format

    @classmethod
    def each(
        cls, spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_bytes: float
    ) -> Iterator["ExpertLayer"]:
        """The first layer with experts of every format, as many as fit in `max_bytes`, in turn.

        Raises:
            ConfigError: The model has no experts, or too few of them fit.
        """
        first: dict[tuple[WeightFormat | None, ...], int] = {}
        for i, layer in enumerate(spec.layers):
            if isinstance(layer.ffn, MoeSpec):
                first.setdefault(_formats(spec, i, layer.ffn), i)
        if not first:
            raise ConfigError(f"{spec.name} has no experts; there are no tiles to measure")
        weights = DummyWeights(spec, dtype)
        for i in first.values():
            yield cls._of(spec, i, weights, device=device, max_bytes=max_bytes)

    @classmethod
    def _of(
        cls,
        spec: ModelSpec,
        i: int,
        weights: DummyWeights,
        *,
        device: torch.device,
        max_bytes: float,
    ) -> "ExpertLayer":
        moe = spec.layers[i].ffn
        assert isinstance(moe, MoeSpec)
        size = sum(_num_bytes(weights(name)) for name in _expert_names(i, moe))
        fitting = int(max_bytes // size)
        if fitting < moe.top_k:
            raise ConfigError(
                f"the GPU has room for {fitting} experts of {spec.name}, and a token uses "
                f"{moe.top_k}; take a GPU with more memory"
            )
        moe = replace(moe, num_experts=min(moe.num_experts, fitting))
        view = cache(lambda name: on_device(weights(name), device))
        loader = PagedLoader(view, weights, weights.dtype, device)
        return cls(
            moe=moe,
            input_size=moe.input_size(spec.hidden_size),
            dtype=weights.dtype,
            matrices=loader.expert_matrices(_experts_prefix(i), moe),
        )

    @property
    def format_name(self) -> str:
        first = self.matrices.gate_EFH[0]
        if isinstance(first, StoredMatrix):
            return first.format.name
        return str(self.dtype).removeprefix("torch.")

    def check_kernels(self) -> None:
        """Raise ConfigError if the kernels do not support activation, storage format or GPU."""
        moe = self.moe
        if not grouped_experts_are_used(self.matrices, moe.activation, self.dtype, clamp_of(moe)):
            raise ConfigError(
                "raymoe's GPU kernels do not compute these experts: they need Triton, a GPU of "
                f"capability {'.'.join(map(str, OLDEST_CAPABILITY))} or newer, silu or the clamped "
                f"product (here {moe.activation}), and all experts of a layer stored the same"
            )

    def buckets(self, capability: tuple[int, int]) -> tuple[int, ...]:
        """Tokens per expert for which a GPU uses the kernels (`DispatchByBatchSize`)."""
        is_turing = capability < TENSOR_CORES_SINCE and self.dtype == torch.float16
        return tuple(
            bucket for bucket in BUCKETS if bucket <= MAX_SMALL_BATCH_TOKENS or not is_turing
        )


def measure_layer(
    layer: ExpertLayer, tiles: TileTable, time_call: TimeCall, *, is_again: bool = False
) -> Iterator[BucketTiles]:
    """Measure a layer's tiles, stored ones only if `is_again`; yields per number of tokens."""
    layouts = layer.matrices.layouts()
    assert layouts is not None, "the matrices of a layer's experts are stored the same"
    for bucket in layer.buckets(tiles.capability):
        if not is_again and all(key_of(layout, bucket) in tiles.chosen for layout in layouts):
            continue
        seconds: list[float] = []
        tiles = measure_tiles(
            tiles,
            layer.matrices,
            hidden=partial(_hidden, layer),
            top_k=layer.moe.top_k,
            make=lambda known: make_device_experts(
                layer.matrices,
                activation=layer.moe.activation,
                dtype=layer.dtype,
                clamp=clamp_of(layer.moe),
                tiles=known,
            ),
            time_call=_noting(time_call, seconds),
            buckets=(bucket,),
        )
        if seconds:
            yield BucketTiles(
                format_name=layer.format_name,
                tokens_per_expert=bucket,
                shape=tiles.shape(layouts[0], bucket),
                usual_s=seconds[0],  # the default tile is the first candidate
                best_s=min(seconds),
                tiles=tiles,
            )


def time_on(api: CudaApi[StreamT, EventT], stream: StreamT) -> TimeCall:
    """Times calls on the stream on which their data was made; the first call compiles."""

    def time_call(call: Callable[[], Tensor]) -> float:
        StreamRun(api, stream, [call]).seconds()
        return seconds_on_stream(api, stream, [call], SECONDS)

    return time_call


def _noting(time_call: TimeCall, seconds: list[float]) -> TimeCall:
    def timed(call: Callable[[], Tensor]) -> float:
        seconds.append(time_call(call))
        return seconds[-1]

    return timed


def _experts_prefix(i: int) -> str:
    return f"{layer_prefix(i)}mlp.experts."


def _expert_names(i: int, moe: MoeSpec) -> list[str]:
    """The matrices of the first expert of a layer."""
    parts = dict.fromkeys(projections_of(moe.activation))
    return [f"{_experts_prefix(i)}0.{part}_proj.weight" for part in parts]


def _formats(spec: ModelSpec, i: int, moe: MoeSpec) -> tuple[WeightFormat | None, ...]:
    shapes = model_weights(spec)
    return tuple(spec.format_of(name, shapes[name]) for name in _expert_names(i, moe))


def _hidden(layer: ExpertLayer, num_tokens: int) -> Tensor:
    size = (num_tokens, layer.input_size)
    return torch.randn(size, dtype=layer.dtype, device=layer.matrices.device)


def _num_bytes(weight: Weight) -> int:
    if isinstance(weight, StoredMatrix):
        return sum(piece.nbytes for piece in weight.pieces.values())
    return weight.nbytes
