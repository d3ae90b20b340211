"""WeightFormat: how one matrix is stored, and the bytes that takes, scales included."""

from collections.abc import Mapping
from dataclasses import dataclass

from raymoe.errors import UnsupportedModelError
from raymoe.units import ceil_div

_WORD_BITS = 32  # elements of fewer bits than a byte are packed in words of integers


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """Storage of a matrix [rows, columns] = [outputs, inputs].

    Attributes:
        name: For people and for the codec.
        bits: Of an element.
        block: Rows and columns that share a scale, 0 for all of them; None without scales.
        scale_bits: Of a scale.
        has_zero_points: Whether each block also has a zero point of `bits` bits.
        column_bits: Of the index that says to which group each column belongs.
        fixed_bytes: Of what is stored once for the matrix.
    """

    name: str
    bits: int
    block: tuple[int, int] | None = None
    scale_bits: int = 0
    has_zero_points: bool = False
    column_bits: int = 0
    fixed_bytes: int = 0

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix with its scales.

        Raises:
            UnsupportedModelError: Groups of columns do not divide the columns.
        """
        if self.block is None:
            return rows * columns * self.bits // 8
        block_rows, block_columns = self.block[0] or rows, self.block[1] or columns
        is_packed = self.bits < 8
        if is_packed and columns % block_columns:
            raise UnsupportedModelError(
                f"a matrix of {rows} x {columns} cannot be stored as {self.name}: groups of "
                f"{block_columns} do not divide {columns} columns"
            )
        num_groups = ceil_div(columns, block_columns)
        num_scales = ceil_div(rows, block_rows) * num_groups
        bits = rows * self._line_bits(columns) + num_scales * self.scale_bits
        bits += self.has_zero_points * num_groups * self._line_bits(rows)
        return (bits + columns * self.column_bits) // 8 + self.fixed_bytes

    def _line_bits(self, count: int) -> int:
        """Bits of so many neighbouring elements."""
        word = _WORD_BITS if self.bits < 8 else 8
        return word * ceil_div(count * self.bits, word)


PLAIN_FORMATS: Mapping[str, WeightFormat] = {
    "float32": WeightFormat(name="float32", bits=32),
    "float16": WeightFormat(name="float16", bits=16),
    "bfloat16": WeightFormat(name="bfloat16", bits=16),
}
# DeepSeek-V3 (arXiv 2412.19437), section 3.3: one float32 for each tile of 128 x 128.
FP8_BLOCK = WeightFormat(name="fp8_block", bits=8, block=(128, 128), scale_bits=32)
# Open Compute Project, Microscaling Formats 1.0, section 5: one E8M0 for 32 elements in a row.
MXFP4 = WeightFormat(name="mxfp4", bits=4, block=(1, 32), scale_bits=8)


def fp8_channel(scale_bits: int) -> WeightFormat:
    """FP8 with one scale for each row, float32 or of the type of the model."""
    return WeightFormat(name="fp8_channel", bits=8, block=(1, 0), scale_bits=scale_bits)


def int4_group(
    group_size: int,
    *,
    has_zero_points: bool = False,
    column_bits: int = 0,
    fixed_bytes: int = 0,
) -> WeightFormat:
    """INT4 in words of eight, one 16-bit scale for each group of columns of a row.

    Args:
        group_size: Columns that share a scale; 0 for whole rows.
        has_zero_points: Whether groups have zero points, packed like the elements.
        column_bits: 32 where each column names its group (act-order).
        fixed_bytes: Of what is stored once for a matrix, such as its shape.
    """
    return WeightFormat(
        name="int4_group",
        bits=4,
        block=(1, group_size),
        scale_bits=16,
        has_zero_points=has_zero_points,
        column_bits=column_bits,
        fixed_bytes=fixed_bytes,
    )
