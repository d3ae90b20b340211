"""Tiles are measured on a GPU, kept for it, and read again."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from raymoe.device.cuda_api import TorchCuda
from raymoe.errors import CapacityError, ConfigError
from raymoe.kernels.cpu_experts import Experts
from raymoe.kernels.gpu_experts_layout import (
    TileKey,
    TileShape,
    TileTable,
    candidate_shapes,
    default_shape,
)
from raymoe.measure.gpu import seconds_on_stream
from raymoe.measure.kept import Gpu, load_tiles, store_tiles
from raymoe.measure.tiles import measure_tiles
from raymoe.model.device_experts import make_device_experts
from raymoe.specs.weight_format import Mxfp4
from tests.unit.kernels.expert_cases import ExpertCase

L4 = Gpu(name="NVIDIA L4", capability=(8, 9))
SHAPE = TileShape(outputs=128, rows=32, warps=8, stages=4)
TABLE = TileTable(capability=(8, 9), chosen={TileKey("plain float16 1x1", 64): SHAPE})


def test_what_is_kept_comes_back_for_the_same_gpu(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    assert load_tiles(directory, L4) == TileTable(capability=(8, 9))
    path = store_tiles(directory, L4, TABLE)
    assert load_tiles(directory, L4) == TABLE
    assert [*directory.iterdir()] == [path]
    assert path.name.startswith("tiles-nvidia-l4-")
    assert not load_tiles(directory, Gpu(name="NVIDIA L40", capability=(8, 9))).chosen


@pytest.mark.parametrize("text", ["{", "{}", '[{"format": 1}]'])
def test_a_damaged_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    store_tiles(tmp_path, L4, TABLE).write_text(text)
    with pytest.raises(ConfigError, match=r"tiles-nvidia-l4-.*remove it"):
        load_tiles(tmp_path, L4)


class Recorded:
    """Experts that note which tile they have; tiles of 128 outputs do not fit."""

    def __init__(self, tiles: TileTable, case: ExpertCase, calls: list[tuple[TileShape, float]]):
        self._layouts, self._tiles, self._calls = case.matrices.layouts(), tiles, calls

    def __call__(self, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        mean = ids_TK.numel() / 3
        (shape,) = {self._tiles.shape(layout, mean) for layout in self._layouts}
        counts = torch.bincount(ids_TK.flatten(), minlength=3)
        assert counts.max() - counts.min() <= 1
        if shape.outputs == 128:
            raise CapacityError("too large")
        self._calls.append((shape, mean))
        return hidden_TH


def test_the_fastest_tile_that_fits_is_chosen_for_each_bucket() -> None:
    case, calls = ExpertCase(stored=Mxfp4(), hidden=64, wide=32), []
    layout = case.matrices.layouts()[0]
    fastest = {1: candidate_shapes(layout, 1, (8, 9))[3]}
    fastest[64] = candidate_shapes(layout, 64, (8, 9))[2]

    def time_call(call: object) -> float:
        call()
        shape, mean = calls[-1]
        return 0.5 if shape == fastest[1 if mean < 16 else 64] else 1.0

    table = measure_tiles(
        TABLE,
        case.matrices,
        hidden=lambda count: torch.zeros(count, 64),
        top_k=2,
        make=lambda tiles: Recorded(tiles, case, calls),
        time_call=time_call,
        buckets=(1, 64),
    )
    gate_up, down = case.matrices.layouts()
    for layout in (gate_up, down):
        assert table.shape(layout, 1) == fastest[1]
        assert table.shape(layout, 64) == fastest[64]
        assert table.shape(layout, 16) == default_shape(layout, 16, (8, 9))
    assert TABLE.chosen.items() <= table.chosen.items()
    assert all(shape.outputs == 64 for shape, _ in calls)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_measures_tiles_that_give_the_same_tokens(tmp_path: Path) -> None:
    case = ExpertCase(device="cuda", hidden=256, wide=128, num_tokens=64)
    gpu, api = Gpu.current(), TorchCuda(0)

    def make(tiles: TileTable) -> Experts:
        return make_device_experts(case.matrices, activation="silu", dtype=case.dtype, tiles=tiles)

    stream = api.new_stream()
    api.wait_stream(torch.cuda.current_stream())
    table = measure_tiles(
        load_tiles(tmp_path, gpu),
        case.matrices,
        hidden=lambda count: torch.randn(count, 256, device="cuda", dtype=case.dtype),
        top_k=2,
        make=make,
        time_call=lambda call: seconds_on_stream(api, stream, [call], 0.02),
        buckets=(16,),
    )
    store_tiles(tmp_path, gpu, table)
    assert load_tiles(tmp_path, gpu) == table
    usual = make(TileTable(capability=gpu.capability))
    assert torch.equal(make(table)(*case.inputs), usual(*case.inputs))
