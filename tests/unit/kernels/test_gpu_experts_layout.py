"""Tiles: what is chosen without a measurement, and what may be read from a file."""

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.kernels.gpu_experts_layout import (
    BUCKETS,
    MatrixLayout,
    TileKey,
    TileShape,
    TileTable,
    candidate_shapes,
    default_shape,
    key_of,
    units_of_step,
)

PLAIN = MatrixLayout(kind="plain", shape=(64, 64), unit=torch.float16, code_strides=(64, 1))
WORDS = MatrixLayout(
    kind="int4", shape=(64, 64), unit=torch.int16, unit_inputs=4, code_strides=(16, 1)
)
FP8 = MatrixLayout(
    kind="e4m3", shape=(64, 64), unit=torch.int16, unit_inputs=2, code_strides=(32, 1)
)
FLOAT32 = MatrixLayout(kind="plain", shape=(64, 64), unit=torch.float32, code_strides=(64, 1))
MEASURED = TileShape(outputs=128, rows=32, warps=8, stages=4)
CAPABILITIES = [(7, 5), (8, 0), (8, 9), (9, 0)]


def test_a_key_is_the_format_and_the_bucket_below() -> None:
    assert key_of(PLAIN, 0.1) == TileKey("plain float16 1x1", 1)
    assert key_of(PLAIN, 63.9).bucket == 32
    assert key_of(PLAIN, 1e6).bucket == BUCKETS[-1]
    assert key_of(WORDS, 64).format == "int4 int16 4x1"


def test_what_was_measured_goes_before_the_default() -> None:
    table = TileTable(capability=(8, 9), chosen={key_of(WORDS, 64): MEASURED})
    assert table.shape(WORDS, 100) == MEASURED
    assert table.shape(WORDS, 128) == default_shape(WORDS, 128, (8, 9))
    assert table.shape(PLAIN, 100) == default_shape(PLAIN, 64, (8, 9))


@pytest.mark.parametrize(
    ("layout", "bucket", "capability", "tile"),
    [
        (PLAIN, 1024, (7, 5), (64, 32, 4)),
        (PLAIN, 1024, (8, 0), (64, 128, 4)),
        (PLAIN, 1024, (8, 6), (64, 128, 8)),
        (WORDS, 1024, (8, 9), (64, 64, 4)),
        (FP8, 1024, (8, 9), (64, 64, 4)),
        (PLAIN, 128, (9, 0), (128, 128, 8)),
        (WORDS, 128, (9, 0), (128, 128, 8)),
        (FP8, 128, (9, 0), (64, 128, 4)),
        (FLOAT32, 1024, (9, 0), (64, 128, 8)),
        (WORDS, 1024, (12, 0), (64, 64, 4)),
        (WORDS, 64, (9, 0), (64, 64, 4)),
        (WORDS, 16, (9, 0), (64, 32, 4)),
        (PLAIN, 1, (8, 0), (64, 16, 4)),
    ],
)
def test_default_tiles_of_formats_and_cards(
    layout: MatrixLayout, bucket: int, capability: tuple[int, int], tile: tuple[int, int, int]
) -> None:
    shape = default_shape(layout, bucket, capability)
    assert (shape.outputs, shape.rows, shape.warps) == tile


def test_a_table_survives_a_file() -> None:
    table = TileTable(capability=(8, 9), chosen={key_of(WORDS, 64): MEASURED})
    assert TileTable.from_json((8, 9), table.to_json()) == table


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_candidate_may_be_written_and_read(bucket: int, capability: tuple[int, int]) -> None:
    shapes = candidate_shapes(WORDS, bucket, capability)
    assert shapes[0] == default_shape(WORDS, bucket, capability)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        table = TileTable(capability=capability, chosen={TileKey("x", bucket): shape})
        assert TileTable.from_json(capability, table.to_json()) == table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 24}, "powers of two"),
        ({"rows": 8}, "at least 64, 16 and 4"),
        ({"rows": 256}, "rows at most 128"),
        ({"outputs": 32}, "at least 64"),
        ({"warps": 2}, "and 4"),
        ({"stages": 0}, "stages"),
        ({"stages": "3"}, "stages"),
        ({"colour": 1}, "a tile has bucket, format"),
    ],
    ids=str,
)
def test_tiles_that_the_kernels_cannot_use_are_refused(
    change: dict[str, object], message: str
) -> None:
    (entry,) = TileTable(capability=(8, 0), chosen={TileKey("x", 1): MEASURED}).to_json()
    with pytest.raises(ConfigError, match=message):
        TileTable.from_json((8, 0), [entry | change])
    with pytest.raises(ConfigError, match="a list of tiles"):
        TileTable.from_json((8, 0), {})


def test_a_step_of_tensor_cores_reads_64_to_128_bytes_of_every_output() -> None:
    for layout in (PLAIN, WORDS, FP8):
        units = units_of_step(layout, has_tensor_cores=True)
        assert 64 <= units * layout.unit.itemsize <= 128
        assert units_of_step(layout, has_tensor_cores=False) == 16
