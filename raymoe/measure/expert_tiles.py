"""Which tiles the kernels for experts are fastest with on a GPU: measured, kept, read again."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from raymoe.errors import CapacityError, ConfigError
from raymoe.kernels.cpu_experts import Experts
from raymoe.kernels.device_experts_choice import ExpertMatrices
from raymoe.kernels.device_experts_tiles import (
    BUCKETS,
    TileKey,
    TileShape,
    TileTable,
    candidate_shapes,
    key_of,
)
from raymoe.measure.machine import keep, kept_name
from raymoe.units import ceil_div

# Part of the name of a file: raise it when the kernels change so that old choices mislead.
FORMAT = 1

MakeExperts = Callable[[TileTable], Experts]
TimeCall = Callable[[Callable[[], Tensor]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What the choice of tiles depends on."""

    name: str
    capability: tuple[int, int]

    @classmethod
    def current(cls, index: int = 0) -> "Gpu":
        """The CUDA device `index`."""
        return cls(
            name=torch.cuda.get_device_name(index),
            capability=torch.cuda.get_device_capability(index),
        )

    @property
    def file_name(self) -> str:
        """Of the kept choices."""
        return kept_name(f"tiles {self.name}", repr((FORMAT, self.name, self.capability)))


def load_tiles(directory: Path, gpu: Gpu) -> TileTable:
    """What `store_tiles` kept for this GPU; the usual tiles where it kept nothing.

    Raises:
        ConfigError: The file is damaged; names it.
    """
    path = directory / gpu.file_name
    if not path.exists():
        return TileTable(capability=gpu.capability)
    try:
        return TileTable.from_json(gpu.capability, json.loads(path.read_text()))
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}; remove it") from error


def store_tiles(directory: Path, gpu: Gpu, tiles: TileTable) -> Path:
    """Keep the choices for this GPU, in place of what was kept; returns the file.

    Raises:
        OSError: The directory cannot be written.
    """
    path = directory / gpu.file_name
    keep(path, lambda written: written.write_text(json.dumps(tiles.to_json(), indent=1) + "\n"))
    return path


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
    """Measure all candidates for the formats of these matrices.

    Args:
        tiles: What is known already; other formats stay.
        matrices: Of a layer, on the device.
        hidden: Number of tokens -> hidden states.
        top_k: Experts of a token.
        make: Experts of these matrices that use given tiles.
        time_call: Seconds of a call.
        buckets: Tokens per expert.
    """
    layouts = matrices.layouts()
    assert layouts is not None, "the matrices of a layer's experts are stored alike"
    chosen = dict(tiles.chosen)
    for bucket in buckets:
        hidden_TH = hidden(ceil_div(bucket * matrices.num_experts, top_k))
        routing = balanced_routing(len(hidden_TH), matrices.num_experts, top_k, hidden_TH.device)
        keys = {key_of(layout, bucket) for layout in layouts}
        seconds: dict[TileShape, float] = {}
        for shape in candidate_shapes(bucket, tiles.capability):
            experts = make(_with(tiles, dict.fromkeys(keys, shape)))
            try:
                seconds[shape] = time_call(partial(experts, hidden_TH, *routing))
            except CapacityError:
                continue  # too large a tile for this GPU
        if seconds:
            chosen |= dict.fromkeys(keys, min(seconds, key=seconds.__getitem__))
    return replace(tiles, chosen=MappingProxyType(chosen))


def _with(tiles: TileTable, shapes: Mapping[TileKey, TileShape]) -> TileTable:
    return replace(tiles, chosen=MappingProxyType({**tiles.chosen, **shapes}))


def balanced_routing(
    num_tokens: int, num_experts: int, top_k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Experts in turn, with equal weights: ids int32 and weights float32, [T, K]."""
    rows_R = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device)
    ids_TK = (rows_R % num_experts).view(num_tokens, top_k)
    return ids_TK, torch.full(ids_TK.shape, 1 / top_k, device=device)
