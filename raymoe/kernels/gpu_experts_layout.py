"""Layouts and addresses of expert matrices in device memory, and tile sizes of their kernels.

Experts may lie in different buffers (resident ones, or streamed ones in a slot). A kernel reads the
addresses of each expert's tensors from a table; all else is the same for every expert and is in a
`MatrixLayout`. E experts, O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from math import gcd
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, Weight
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_experts import Biases
from raymoe.kernels.triton_support import TENSOR_CORES_SINCE, shared_memory_kib
from raymoe.specs.hardware import AMPERE
from raymoe.specs.layers import MAX_TILE_ROWS
from raymoe.specs.weight_format import (
    FP8_COLUMNS,
    FP8_ROWS,
    MXFP4_COLUMNS,
    MXFP8_COLUMNS,
    NVFP4_COLUMNS,
    Awq,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Gptq,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)

Kind = Literal["plain", "int4", "e2m1", "e4m3"]
Zeros = Literal["none", "packed", "gptq", "awq"]
TensorScale = Literal["none", "multiplies", "divides"]

# Order of the address table.
FIELDS = ("codes", "scales", "zeros", "order", "bias", "tensor_scale")
MAX_ALIGNMENT = 16  # bytes that one thread loads at once
_NIBBLES = 8
_STEP_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixLayout:
    """The layout of a matrix [O, I].

    A unit is one element, or a word or byte that holds several neighbouring four-bit codes.

    Attributes:
        kind: Number format of a code.
        unit_inputs: Inputs whose codes share a unit.
        unit_outputs: Outputs whose codes share a unit; at most one of both is above 1.
        code_strides: Strides between outputs (or units of outputs) and between inputs, in units.
        scales: Type of the scales; uint8 for exponents of two; None without scales.
        scale_strides: Strides between blocks of outputs and between groups, in elements.
        group_size: Inputs that share a scale.
        block_rows: Outputs that share a scale.
        zeros: Packing of zero points in words along the outputs: GPTQ stores them less one, AWQ in
            its own order.
        zero_strides: Strides between words of outputs and between groups, in words.
        has_order: Whether a table names the group of each input (act-order).
        tensor_scale: What a float32 scale of the whole matrix does to the other scales.
        has_scale_pairs: Whether scales of one byte lie so that two neighbours are one aligned word.
    """

    kind: Kind
    shape: tuple[int, int]
    unit: torch.dtype
    unit_inputs: int = 1
    unit_outputs: int = 1
    code_strides: tuple[int, int]
    scales: torch.dtype | None = None
    scale_strides: tuple[int, int] = (0, 0)
    group_size: int = 0
    block_rows: int = 1
    zeros: Zeros = "none"
    zero_strides: tuple[int, int] = (0, 0)
    has_order: bool = False
    tensor_scale: TensorScale = "none"
    has_scale_pairs: bool = False

    @property
    def num_units(self) -> int:
        return -(-self.shape[1] // self.unit_inputs)


def layout_of(weights: Sequence[Weight]) -> MatrixLayout | None:
    stored = [weight for weight in weights if isinstance(weight, StoredMatrix)]
    layouts = {
        _layout(
            weight,
            has_even_codes=all(_is_even(each.pieces["codes"]) for each in stored),
            has_even_scales=all(_is_even(each.pieces["scales"]) for each in stored),
        )
        for weight in weights
    }
    return layouts.pop() if len(layouts) == 1 else None


def alignment_of(weights: Sequence[Weight]) -> int:
    """Return the common alignment of the addresses of all codes in bytes, at most 16."""
    return gcd(MAX_ALIGNMENT, *(_codes(weight).data_ptr() for weight in weights))


def addresses_of(weight: Weight, bias_O: Tensor | None) -> list[int]:
    """Return the addresses of a matrix's tensors in the order of `FIELDS`; 0 for absent ones."""
    tensors: dict[str, Tensor] = {}
    if isinstance(weight, StoredMatrix):
        tensors.update(weight.pieces)
    else:
        tensors["codes"] = weight
    if bias_O is not None:
        tensors["bias"] = bias_O
    return [tensors[name].data_ptr() if name in tensors else 0 for name in FIELDS]


def _codes(weight: Weight) -> Tensor:
    return weight.pieces["codes"] if isinstance(weight, StoredMatrix) else weight


def _is_even(matrix: Tensor) -> bool:
    """Whether each pair of neighbouring bytes of a row is an aligned word of 16 bits."""
    rows_apart = matrix.stride(0) * matrix.element_size()
    is_dense = matrix.stride(-1) == 1 and matrix.shape[-1] * matrix.element_size() % 2 == 0
    return is_dense and matrix.data_ptr() % 2 == 0 and rows_apart % 2 == 0


def _layout(weight: Weight, *, has_even_codes: bool, has_even_scales: bool) -> MatrixLayout:
    if isinstance(weight, StoredMatrix):
        layout = _LAYOUTS[type(weight.format)](weight)
        if layout.unit == torch.uint8 and has_even_codes:
            layout = _in_words(layout)
        is_byte = layout.scales is not None and layout.scales.itemsize == 1
        return replace(layout, has_scale_pairs=is_byte and has_even_scales)
    outputs, inputs = weight.shape
    return MatrixLayout(
        kind="plain", shape=(outputs, inputs), unit=weight.dtype, code_strides=_strides(weight)
    )


def _in_words(layout: MatrixLayout) -> MatrixLayout:
    """The same bytes with units of 16 bits, which `gpu_codes` decodes in pairs."""
    return replace(
        layout,
        unit=torch.int16,
        unit_inputs=2 * layout.unit_inputs,
        code_strides=(layout.code_strides[0] // 2, 1),
    )


def _fp8(matrix: StoredMatrix, *, group_size: int, block_rows: int) -> MatrixLayout:
    pieces = matrix.pieces
    return MatrixLayout(
        kind="e4m3",
        shape=matrix.shape,
        unit=torch.uint8,
        code_strides=_strides(pieces["codes"]),
        scales=_scale_type(pieces["scales"]),
        scale_strides=_strides(pieces["scales"]),
        group_size=group_size or matrix.shape[1],
        block_rows=block_rows,
    )


def _packed_int4(matrix: StoredMatrix) -> MatrixLayout:
    pieces = matrix.pieces
    scales_OG, has_zeros = pieces["scales"], "zeros" in pieces
    return MatrixLayout(
        kind="int4",
        shape=matrix.shape,
        unit=torch.uint8,
        unit_inputs=2,
        code_strides=(pieces["codes"].stride(0) * pieces["codes"].itemsize, 1),
        scales=scales_OG.dtype,
        scale_strides=_strides(scales_OG),
        group_size=matrix.shape[1] // scales_OG.shape[1],
        zeros="packed" if has_zeros else "none",
        zero_strides=_strides(pieces["zeros"]) if has_zeros else (0, 0),
        has_order="order" in pieces,
    )


def _gptq(matrix: StoredMatrix) -> MatrixLayout:
    pieces = matrix.pieces
    return MatrixLayout(
        kind="int4",
        shape=matrix.shape,
        unit=torch.int32,
        unit_inputs=_NIBBLES,
        code_strides=_strides(pieces["codes"])[::-1],
        scales=pieces["scales"].dtype,
        scale_strides=_strides(pieces["scales"])[::-1],
        group_size=matrix.shape[1] // len(pieces["scales"]),
        zeros="gptq",
        zero_strides=_strides(pieces["zeros"])[::-1],
        has_order="order" in pieces,
    )


def _awq(matrix: StoredMatrix) -> MatrixLayout:
    pieces = matrix.pieces
    return MatrixLayout(
        kind="int4",
        shape=matrix.shape,
        unit=torch.int32,
        unit_outputs=_NIBBLES,
        code_strides=_strides(pieces["codes"])[::-1],
        scales=pieces["scales"].dtype,
        scale_strides=_strides(pieces["scales"])[::-1],
        group_size=matrix.shape[1] // len(pieces["scales"]),
        zeros="awq",
        zero_strides=_strides(pieces["zeros"])[::-1],
    )


def _fp4(matrix: StoredMatrix) -> MatrixLayout:
    stored, scales_OG = matrix.format, matrix.pieces["scales"]
    tensor_scale: TensorScale = "none"
    if isinstance(stored, Nvfp4):
        tensor_scale = "divides" if stored.is_divided else "multiplies"
    return MatrixLayout(
        kind="e2m1",
        shape=matrix.shape,
        unit=torch.uint8,
        unit_inputs=2,
        code_strides=(matrix.pieces["codes"].stride(0), 1),
        scales=_scale_type(scales_OG),
        scale_strides=_strides(scales_OG),
        group_size=MXFP4_COLUMNS if isinstance(stored, Mxfp4) else NVFP4_COLUMNS,
        tensor_scale=tensor_scale,
    )


def _scale_type(scales: Tensor) -> torch.dtype:
    return torch.uint8 if scales.dtype == torch.float8_e8m0fnu else scales.dtype


def _strides(matrix: Tensor) -> tuple[int, int]:
    first, second = matrix.stride()
    return first, second


_LAYOUTS: Mapping[type[WeightFormat], Callable[[StoredMatrix], MatrixLayout]] = {
    Fp8Block: partial(_fp8, group_size=FP8_COLUMNS, block_rows=FP8_ROWS),
    Fp8Channel: partial(_fp8, group_size=0, block_rows=1),
    Fp8Tensor: partial(_fp8, group_size=0, block_rows=1),
    Mxfp8: partial(_fp8, group_size=MXFP8_COLUMNS, block_rows=1),
    Mxfp4: _fp4,
    Nvfp4: _fp4,
    PackedInt4: _packed_int4,
    Gptq: _gptq,
    Awq: _awq,
}


BUCKETS = (1, 16, 32, 64, 128, 256, 512, 1024)  # lower bounds of tokens per expert

# A GPU multiplies all tiles of at least 64 outputs with the same instruction.
_MIN_OUTPUTS, _MIN_ROWS, _MAX_ROWS_OF_TURING = 64, 16, 32
_LARGE_TILES_FROM_KIB = 228  # of shared memory of a multiprocessor


class TileKey(NamedTuple):
    """Key of a measured tile."""

    format: str
    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """Sizes of a tile and its launch parameters.

    Attributes:
        outputs: Of gate and of up each. On tensor cores, a tile of down has twice as many: as many
            sums, and as many weights for each input that is read.
        rows: Tokens of one expert.
        warps: Of a program.
        stages: Triton's `num_stages`.
    """

    outputs: int
    rows: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """Tile shapes for one GPU.

    Attributes:
        capability: Compute capability: (7, 5) is Turing, (8, 0) Ampere, (9, 0) Hopper.
        chosen: Measured shapes; other keys use `default_shape`.
    """

    capability: tuple[int, int]
    chosen: Mapping[TileKey, TileShape] = field(default_factory=lambda: MappingProxyType({}))

    def shape(self, layout: MatrixLayout, tokens_per_expert: float) -> TileShape:
        key = key_of(layout, tokens_per_expert)
        found = self.chosen.get(key)
        return default_shape(layout, key.bucket, self.capability) if found is None else found

    def to_json(self) -> list[dict[str, Any]]:
        return [{**key._asdict(), **asdict(shape)} for key, shape in self.chosen.items()]

    @classmethod
    def from_json(cls, capability: tuple[int, int], entries: object) -> "TileTable":
        if not isinstance(entries, list):
            raise ConfigError(f"a list of tiles is expected, not {type(entries).__name__}")
        chosen = dict(map(_entry, entries))
        return cls(capability=capability, chosen=MappingProxyType(chosen))


def units_of_step(layout: MatrixLayout, *, has_tensor_cores: bool) -> int:
    """Return how many units of codes of each output one step of a kernel reads.

    With tensor cores a step reads 64 bytes of codes of each output, the size of two sectors of
    memory, or 128 bytes of 16-bit weights. Without them a thread keeps all operands of a step in
    registers, so steps are as small as possible.
    """
    if not has_tensor_cores:
        return 16
    if layout.unit_outputs > 1:
        return 32  # a word of AWQ is loaded once per output that it holds, and staged as often
    return 64 if layout.kind == "plain" else _STEP_BYTES // layout.unit.itemsize


def key_of(layout: MatrixLayout, tokens_per_expert: float) -> TileKey:
    bucket = max((size for size in BUCKETS if size <= tokens_per_expert), default=BUCKETS[0])
    unit = str(layout.unit).removeprefix("torch.")
    return TileKey(f"{layout.kind} {unit} {layout.unit_inputs}x{layout.unit_outputs}", bucket)


def default_shape(layout: MatrixLayout, bucket: int, capability: tuple[int, int]) -> TileShape:
    """Return the tile for keys without a measurement.

    From 64 rows on it depends on format and card, by counts of machine code and rates of an H200:
    `bench/RESULTS.md`, "On a GPU".
    """
    rows = _rows(bucket, capability)
    shape = TileShape(outputs=_MIN_OUTPUTS, rows=rows, warps=4, stages=3)
    if capability < TENSOR_CORES_SINCE:
        return replace(shape, stages=2)
    if rows < MAX_TILE_ROWS:
        return shape
    if layout.unit == torch.float32:
        return replace(shape, warps=8)
    if shared_memory_kib(capability) >= _LARGE_TILES_FROM_KIB:
        return shape if layout.kind == "e4m3" else replace(shape, outputs=128, warps=8)
    if layout.kind != "plain":
        return replace(shape, rows=rows // 2)
    return shape if capability == AMPERE else replace(shape, warps=8)


def _rows(bucket: int, capability: tuple[int, int]) -> int:
    """About the tokens of an expert: twice the bucket's lower bound up to 64, then that bound."""
    if capability < TENSOR_CORES_SINCE:
        return min(max(2 * bucket, _MIN_ROWS), _MAX_ROWS_OF_TURING)
    return max(min(2 * bucket, 64), min(bucket, MAX_TILE_ROWS), _MIN_ROWS)


def candidate_shapes(
    layout: MatrixLayout, bucket: int, capability: tuple[int, int]
) -> list[TileShape]:
    default, rows = default_shape(layout, bucket, capability), _rows(bucket, capability)
    stages = (default.stages,) if capability < TENSOR_CORES_SINCE else (2, 3, 4)
    others = [
        TileShape(outputs=outputs, rows=count, warps=warps, stages=depth)
        for outputs in (_MIN_OUTPUTS, 2 * _MIN_OUTPUTS)
        for count in sorted({max(rows // 2, _MIN_ROWS), rows})
        for warps in (4, 8)
        for depth in stages
    ]
    return [default, *(shape for shape in others if shape != default)]


def _entry(entry: object) -> tuple[TileKey, TileShape]:
    names = {*TileKey._fields, *TileShape.__dataclass_fields__}
    if not isinstance(entry, dict) or set(entry) != names:
        raise ConfigError(f"a tile has {', '.join(sorted(names))}; found {entry!r}")
    key = TileKey(entry["format"], entry["bucket"])
    shape = TileShape(**{name: entry[name] for name in TileShape.__dataclass_fields__})
    sizes = (shape.outputs, shape.rows, shape.warps)
    is_usable = all(type(size) is int and size > 0 and size & (size - 1) == 0 for size in sizes)
    has_rows = _MIN_ROWS <= shape.rows <= MAX_TILE_ROWS
    if not is_usable or shape.outputs < _MIN_OUTPUTS or not has_rows or shape.warps % 4:
        raise ConfigError(
            f"tile {entry!r}: outputs, rows and warps are powers of two, at least "
            f"{_MIN_OUTPUTS}, {_MIN_ROWS} and 4, rows at most {MAX_TILE_ROWS}"
        )
    if type(shape.stages) is not int or shape.stages < 1:
        raise ConfigError(f"tile {entry!r}: stages is a number of at least 1")
    return key, shape


class ExpertMatrices(NamedTuple):
    """The weights and biases of all experts of a layer.

    E experts, H hidden size, F intermediate size. `are_reordered` says whether group tables
    (act-order) may put inputs that are not neighbours in a group; if not, the tables are ignored.
    """

    gate_EFH: Sequence[Weight]
    up_EFH: Sequence[Weight]
    down_EHF: Sequence[Weight]
    biases: Sequence[Biases] | None = None
    are_reordered: bool = True

    @property
    def num_experts(self) -> int:
        return len(self.gate_EFH)

    def of_expert(self, expert: int) -> list[tuple[Weight, Tensor | None]]:
        weights = (self.gate_EFH[expert], self.up_EFH[expert], self.down_EHF[expert])
        if self.biases is None:
            return [(weight, None) for weight in weights]
        return list(zip(weights, self.biases[expert], strict=True))

    @property
    def device(self) -> torch.device:
        first = self.gate_EFH[0]
        return first.pieces["codes"].device if isinstance(first, StoredMatrix) else first.device

    def layouts(self) -> tuple[MatrixLayout, MatrixLayout] | None:
        """The layouts of gate and up, and of down; None if experts or gate and up differ."""
        found = layout_of([*chain(self.gate_EFH, self.up_EFH)]), layout_of([*self.down_EHF])
        if found[0] is None or found[1] is None:
            return None
        gate_up, down = (
            replace(layout, has_order=layout.has_order and self.are_reordered)
            for layout in (found[0], found[1])
        )
        return gate_up, down


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Types and tiles of the expert kernels.

    Attributes:
        dtype: Type of hidden states; stored weights are rounded to it.
        dot: Type of the products. Equal to `dtype`, except float32 for bfloat16 on Turing, which
            has no bfloat16 product (exact but slow; float16 suits Turing), and in the interpreter.
    """

    dtype: torch.dtype
    dot: torch.dtype
    tiles: TileTable

    @classmethod
    def on(cls, tiles: TileTable, dtype: torch.dtype) -> "Compute":
        has_dot = dtype != torch.bfloat16 or tiles.capability >= TENSOR_CORES_SINCE
        return cls(dtype=dtype, dot=dtype if has_dot else torch.float32, tiles=tiles)

    @property
    def has_tensor_cores(self) -> bool:
        return self.dot != torch.float32 and self.tiles.capability >= TENSOR_CORES_SINCE


def balanced_routing(
    num_tokens: int, num_experts: int, top_k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Experts in turn, with equal weights: ids int32 and weights float32, [T, K]."""
    rows_R = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device)
    ids_TK = (rows_R % num_experts).view(num_tokens, top_k)
    return ids_TK, torch.full(ids_TK.shape, 1 / top_k, device=device)
