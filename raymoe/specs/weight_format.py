"""Quantised weight formats: stored tensors, their safetensors (0.8) types and bytes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from raymoe.errors import UnsupportedModelError
from raymoe.units import ceil_div

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


HALVES = ("F16", "BF16")
_NIBBLES = 8  # 4-bit elements in a 32-bit word
FP8_ROWS = FP8_COLUMNS = 128
MXFP4_COLUMNS = MXFP8_COLUMNS = 32
NVFP4_COLUMNS = 16
# Names of scales beside `.weight`: FP8 of transformers, of vLLM, and of DeepSeek-V4.
SCALES_SUFFIXES = (".weight_scale_inv", ".weight_scale", ".scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    name: str  # name for the codec
    suffix: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # accepted types, all of one width; kept as stored
    # Accepted narrower types, converted exactly to the first of `dtypes`.
    widened: tuple[str, ...] = ()
    row_axis: int | None = 0  # axis of the outputs of the matrix; None if it belongs to all of them
    rows: int = 1  # outputs per entry of that axis
    # Axis of the inputs of the matrix; None if it belongs to all of them.
    column_axis: int | None = None
    columns: int = 1  # inputs per entry of that axis
    is_repeated: bool = False  # whether one element is stored, in place of this many

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (1,) if self.is_repeated else self.shape

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtypes[0]]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


class WeightFormat(ABC):
    """A storage format of matrices; instances are plain data and can be compared."""

    name: str

    @abstractmethod
    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        """The stored tensors of a matrix; UnsupportedModelError if its shape does not fit."""

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix with its scales; errors as for `pieces`."""
        return sum(piece.num_bytes for piece in self.pieces(rows, columns))


@dataclass(frozen=True, slots=True)
class PlainFormat(WeightFormat):
    name: str
    dtype: str

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        return (_codes(rows, columns, self.dtype),)


@dataclass(frozen=True, slots=True)
class Fp8Block(WeightFormat):
    """FP8 with one scale per 128 x 128 tile, kept as float32.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3; `FineGrainedFP8Config` of transformers;
    "float-quantized" with strategy "block" of compressed-tensors 0.20.
    """

    scales_suffix: str = ".weight_scale_inv"
    name: str = "fp8_block"

    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        scales = (ceil_div(rows, FP8_ROWS), ceil_div(columns, FP8_COLUMNS))
        return (
            _codes(rows, columns, "F8_E4M3"),
            Piece(
                name="scales",
                suffix=self.scales_suffix,
                shape=scales,
                dtypes=("F32",),
                widened=(*HALVES, "F8_E8M0"),
                rows=FP8_ROWS,
                column_axis=1,
                columns=FP8_COLUMNS,
            ),
        )


@dataclass(frozen=True, slots=True)
class Fp8Channel(WeightFormat):
    """FP8 with one scale per row, kept as float32.

    Source: "float-quantized" with strategy "channel" of compressed-tensors 0.20; `FbgemmFp8Config`
    of transformers.
    """

    name: str = "fp8_channel"

    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        return (
            _codes(rows, columns, "F8_E4M3"),
            _row_scales(rows),
        )


@dataclass(frozen=True, slots=True)
class Fp8Tensor(WeightFormat):
    """FP8 with one scale for the matrix, kept as a float32 for each row.

    Source: `FineGrainedFP8Config` of transformers without `weight_block_size`, AutoFP8 0.1 (which
    names the scales `.weight_scale`), "float-quantized" with strategy "tensor" of
    compressed-tensors 0.20, FP8 of modelopt 0.47.
    """

    scales_suffix: str = ".weight_scale"
    name: str = "fp8_tensor"

    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        return (
            _codes(rows, columns, "F8_E4M3"),
            _row_scales(rows, self.scales_suffix, is_repeated=True),
        )


@dataclass(frozen=True, slots=True)
class Int8Channel(WeightFormat):
    """Signed int8 with one scale per row, kept as float32, for products with inputs in int8.

    Source: "int-quantized" with strategy "channel" of compressed-tensors 0.20.

    Attributes:
        is_rotated: Of matrices that are quantised while they are loaded, never of a checkpoint:
            they, and the inputs of their products, are multiplied by Hadamard matrices before.
    """

    is_rotated: bool = False
    name: str = "int8_channel"

    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        return (
            _codes(rows, columns, "I8"),
            _row_scales(rows),
        )


@dataclass(frozen=True, slots=True)
class PackedInt4(WeightFormat):
    """INT4, eight neighbours of a row per word, one 16-bit scale per group of columns.

    Source: "pack-quantized" of compressed-tensors 0.20.
    """

    group_size: int  # columns of a group; 0 for whole rows
    # Whether groups have zero points, eight neighbours of a column per word.
    has_zero_points: bool = False
    has_order: bool = False  # whether each column names its group (act-order)
    name: str = "int4_packed"

    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        groups = _num_groups(self.name, rows, columns, self.group_size)
        found = [
            Piece(
                name="codes",
                suffix=".weight_packed",
                shape=(rows, ceil_div(columns, _NIBBLES)),
                dtypes=("I32",),
                column_axis=1,
                columns=_NIBBLES,
            ),
            Piece(
                name="scales",
                suffix=".weight_scale",
                shape=(rows, groups),
                dtypes=HALVES,
                column_axis=1 if self.group_size else None,
                columns=self.group_size or 1,
            ),
        ]
        if self.has_zero_points:
            found.append(
                Piece(
                    name="zeros",
                    suffix=".weight_zero_point",
                    shape=(ceil_div(rows, _NIBBLES), groups),
                    dtypes=("I32",),
                    rows=_NIBBLES,
                    column_axis=1 if self.group_size else None,
                    columns=self.group_size or 1,
                )
            )
        if self.has_order:
            found.append(_order(".weight_g_idx", columns))
        shape = Piece(
            name="shape",
            suffix=".weight_shape",
            shape=(2,),
            dtypes=("I64",),
            widened=("I32",),
            row_axis=None,
        )
        return (*found, shape)


@dataclass(frozen=True, slots=True)
class Gptq(WeightFormat):
    """INT4, eight neighbours of a column per word; zero points are stored minus one.

    Each column names its group, in order or not (act-order), except in files of AutoRound.
    `group_size` is in columns; 0 for whole rows. Source: checkpoint_format "gptq" of GPTQModel 7.7;
    packing_format "auto_round:auto_gptq" of AutoRound 0.10.
    """

    group_size: int
    has_order: bool = True
    name: str = "gptq"

    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        groups = _num_groups(self.name, rows, columns, self.group_size)
        _check_words(self.name, rows, columns, rows=rows, columns=columns)
        return (
            Piece(
                name="codes",
                suffix=".qweight",
                shape=(columns // _NIBBLES, rows),
                dtypes=("I32",),
                row_axis=1,
                column_axis=0,
                columns=_NIBBLES,
            ),
            *_column_groups(groups, rows, self.group_size),
            *((_order(".g_idx", columns),) if self.has_order else ()),
        )


@dataclass(frozen=True, slots=True)
class Awq(WeightFormat):
    """INT4 with zero points, eight rows of a column per word in AWQ's own order.

    `group_size` is in columns; 0 for whole rows. Source: version "gemm" of AutoAWQ 0.2.9.
    """

    group_size: int
    name: str = "awq"

    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        groups = _num_groups(self.name, rows, columns, self.group_size)
        _check_words(self.name, rows, columns, rows=rows)
        return (
            Piece(
                name="codes",
                suffix=".qweight",
                shape=(columns, rows // _NIBBLES),
                dtypes=("I32",),
                row_axis=1,
                rows=_NIBBLES,
                column_axis=0,
            ),
            *_column_groups(groups, rows, self.group_size),
        )


@dataclass(frozen=True, slots=True)
class Mxfp4(WeightFormat):
    """E2M1, two neighbours of a row per byte, one E8M0 scale per 32 columns.

    gpt-oss stores blocks of 32 columns, `_blocks` and `_scales`; models whose other matrices are
    FP8 store whole rows, `.weight`, and name scales as one of `SCALES_SUFFIXES`.

    Source: OCP Microscaling Formats 1.0, section 5; `Mxfp4Config` of transformers (gpt-oss);
    "mxfp4-pack-quantized" of compressed-tensors 0.20.
    """

    scales_suffix: str = "_scales"
    codes_suffix: str = ".weight"  # of whole rows
    name: str = "mxfp4"

    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        groups = _num_groups(self.name, rows, columns, MXFP4_COLUMNS)
        has_blocks = self.scales_suffix == "_scales"
        return (
            Piece(
                name="codes",
                suffix="_blocks" if has_blocks else self.codes_suffix,
                shape=(rows, groups, MXFP4_COLUMNS // 2) if has_blocks else (rows, columns // 2),
                dtypes=("U8", "I8"),
                column_axis=1,
                columns=MXFP4_COLUMNS if has_blocks else 2,
            ),
            Piece(
                name="scales",
                suffix=self.scales_suffix,
                shape=(rows, groups),
                dtypes=("U8", "F8_E8M0"),
                column_axis=1,
                columns=MXFP4_COLUMNS,
            ),
        )


@dataclass(frozen=True, slots=True)
class Mxfp8(WeightFormat):
    """FP8 (E4M3), one E8M0 scale per 32 columns.

    Source: OCP Microscaling Formats 1.0, section 5; "mxfp8-quantized" of compressed-tensors 0.20
    and MXFP8 of modelopt 0.47, which name the scales `.weight_scale`; `.weight_scale_inv` in
    checkpoints of MiniMax.
    """

    scales_suffix: str = ".weight_scale"
    name: str = "mxfp8"

    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        groups = _num_groups(self.name, rows, columns, MXFP8_COLUMNS)
        return (
            _codes(rows, columns, "F8_E4M3"),
            Piece(
                name="scales",
                suffix=self.scales_suffix,
                shape=(rows, groups),
                dtypes=("U8", "F8_E8M0"),
                column_axis=1,
                columns=MXFP8_COLUMNS,
            ),
        )


@dataclass(frozen=True, slots=True)
class Nvfp4(WeightFormat):
    """E2M1, two neighbours of a row per byte, one E4M3 scale per 16 columns, one of the matrix.

    The scale of the matrix multiplies the others in checkpoints of modelopt, and divides them in
    those of compressed-tensors. Source: `NVFP4QTensor` of modelopt 0.47; "nvfp4-pack-quantized" of
    compressed-tensors 0.20.
    """

    is_divided: bool = False  # the layout of compressed-tensors
    name: str = "nvfp4"

    def pieces(self, rows: int, columns: int) -> tuple[Piece, ...]:
        groups = _num_groups(self.name, rows, columns, NVFP4_COLUMNS)
        codes, tensor_scale = (
            (".weight_packed", ".weight_global_scale")
            if self.is_divided
            else (".weight", ".weight_scale_2")
        )
        return (
            Piece(
                name="codes",
                suffix=codes,
                shape=(rows, columns // 2),
                dtypes=("U8",),
                column_axis=1,
                columns=2,
            ),
            Piece(
                name="scales",
                suffix=".weight_scale",
                shape=(rows, groups),
                dtypes=("F8_E4M3",),
                column_axis=1,
                columns=NVFP4_COLUMNS,
            ),
            Piece(
                name="tensor_scale",
                suffix=tensor_scale,
                shape=(1,),
                dtypes=("F32",),
                row_axis=None,
            ),
        )


PLAIN_FORMATS: Mapping[str, PlainFormat] = {
    "float32": PlainFormat("float32", "F32"),
    "float16": PlainFormat("float16", "F16"),
    "bfloat16": PlainFormat("bfloat16", "BF16"),
}
BFLOAT16_BYTES = PLAIN_FORMATS["bfloat16"].item_bytes
# Bytes of an element of the KV cache. Those of a byte have factors besides.
KV_ITEM_BYTES: Mapping[str, int] = {
    **{name: plain.item_bytes for name, plain in PLAIN_FORMATS.items()},
    "int8": 1,
}
KV_SCALE_BYTES = 4


def _codes(rows: int, columns: int, dtype: str) -> Piece:
    return Piece(
        name="codes", suffix=".weight", shape=(rows, columns), dtypes=(dtype,), column_axis=1
    )


def _row_scales(rows: int, suffix: str = ".weight_scale", *, is_repeated: bool = False) -> Piece:
    return Piece(
        name="scales", suffix=suffix, shape=(rows, 1), dtypes=("F32",), widened=HALVES,
        is_repeated=is_repeated,
    )  # fmt: skip


def _column_groups(groups: int, rows: int, size: int) -> tuple[Piece, Piece]:
    """Zero points and scales of GPTQ and AWQ, by group and row; size 0 is one group per row."""
    return (
        Piece(
            name="zeros",
            suffix=".qzeros",
            shape=(groups, rows // _NIBBLES),
            dtypes=("I32",),
            row_axis=1,
            rows=_NIBBLES,
            column_axis=0 if size else None,
            columns=size or 1,
        ),
        Piece(
            name="scales",
            suffix=".scales",
            shape=(groups, rows),
            dtypes=HALVES,
            row_axis=1,
            column_axis=0 if size else None,
            columns=size or 1,
        ),
    )


def _order(suffix: str, columns: int) -> Piece:
    return Piece(
        name="order",
        suffix=suffix,
        shape=(columns,),
        dtypes=("I32",),
        row_axis=None,
        column_axis=0,
    )


def _num_groups(name: str, rows: int, columns: int, group_size: int) -> int:
    size = group_size or columns
    if columns % size:
        _refuse(name, rows, columns, f"groups of {size} do not divide {columns} columns")
    return columns // size


def _check_words(name: str, num_rows: int, num_columns: int, **counts: int) -> None:
    for what, count in counts.items():
        if count % _NIBBLES:
            _refuse(name, num_rows, num_columns, f"words of 8 do not divide {count} {what}")


def _refuse(name: str, rows: int, columns: int, why: str) -> NoReturn:
    raise UnsupportedModelError(f"a matrix of {rows} x {columns} cannot be stored as {name}: {why}")
