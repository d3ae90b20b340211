"""How the matrices of a layer's experts lie in device memory, and at which addresses.

Experts may lie in different buffers (resident ones here, streamed ones in a slot): a kernel takes
the address of each tensor of each expert from a table, and everything else, which is the same for
all of them, from a `MatrixLayout`. E experts, O outputs, I inputs, G groups of inputs.
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
from raymoe.specs.weight_format import (
    FP8_COLUMNS,
    FP8_ROWS,
    MXFP4_COLUMNS,
    Awq,
    Fp8Block,
    Fp8Channel,
    Gptq,
    Mxfp4,
    PackedInt4,
    WeightFormat,
)

Kind = Literal["plain", "int4", "e2m1", "e4m3"]
Zeros = Literal["none", "packed", "gptq", "awq"]

FIELDS = ("codes", "scales", "zeros", "order", "bias")  # of a matrix in the table of addresses
MAX_ALIGNMENT = 16  # bytes that one thread loads at once
_NIBBLES = 8  # in a word
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixLayout:
    """Everything about a matrix [O, I] but its addresses.

    Codes come in units: one element, or a word or byte with several neighbours of four bits.

    Attributes:
        kind: What number a code is.
        unit_inputs: Inputs whose codes are in one unit.
        unit_outputs: Outputs whose codes are in one unit; not more than one of both is above 1.
        code_strides: Units between neighbouring (units of) outputs, and of inputs.
        scales: Type of the scales; uint8 for exponents of two; None without scales.
        scale_strides: Elements between neighbouring blocks of outputs, and groups.
        group_size: Inputs that share a scale.
        block_rows: Outputs that share a scale.
        zeros: How zero points are packed: in words along the outputs, of GPTQ less one, of AWQ in
            an order of their own.
        zero_strides: Words between neighbouring words of outputs, and groups.
        has_order: Whether a table names the group of each input.
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

    @property
    def num_units(self) -> int:
        return -(-self.shape[1] // self.unit_inputs)


def layout_of(weights: Sequence[Weight]) -> MatrixLayout | None:
    """The layout that all these matrices have; None where they differ."""
    has_words = all(_has_whole_words(weight) for weight in weights)
    layouts = {_layout(weight, has_words=has_words) for weight in weights}
    return layouts.pop() if len(layouts) == 1 else None


def alignment_of(weights: Sequence[Weight]) -> int:
    """Bytes of which the addresses of all codes are multiples, at most 16."""
    return gcd(MAX_ALIGNMENT, *(_codes(weight).data_ptr() for weight in weights))


def addresses_of(weight: Weight, bias_O: Tensor | None) -> list[int]:
    """Where the tensors of a matrix lie, in the order of `FIELDS`; 0 for what it does not have."""
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


def _has_whole_words(weight: Weight) -> bool:
    codes = _codes(weight)
    rows_apart = codes.stride(0) * codes.element_size()
    return codes.data_ptr() % _WORD_BYTES == 0 and rows_apart % _WORD_BYTES == 0


def _layout(weight: Weight, *, has_words: bool) -> MatrixLayout:
    if isinstance(weight, StoredMatrix):
        if isinstance(weight.format, Mxfp4):
            return _mxfp4(weight, has_words=has_words)
        return _LAYOUTS[type(weight.format)](weight)
    outputs, inputs = weight.shape
    return MatrixLayout(
        kind="plain", shape=(outputs, inputs), unit=weight.dtype, code_strides=_strides(weight)
    )


def _fp8(matrix: StoredMatrix, *, group_size: int, block_rows: int) -> MatrixLayout:
    pieces = matrix.pieces
    return MatrixLayout(
        kind="e4m3",
        shape=matrix.shape,
        unit=torch.uint8,
        code_strides=_strides(pieces["codes"]),
        scales=pieces["scales"].dtype,
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
        unit=torch.int32,
        unit_inputs=_NIBBLES,
        code_strides=_strides(pieces["codes"]),
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


def _mxfp4(matrix: StoredMatrix, *, has_words: bool) -> MatrixLayout:
    codes_OGB, scales_OG = matrix.pieces["codes"], matrix.pieces["scales"]
    unit = torch.int32 if has_words else torch.uint8
    return MatrixLayout(
        kind="e2m1",
        shape=matrix.shape,
        unit=unit,
        unit_inputs=2 * unit.itemsize,
        code_strides=(codes_OGB.stride(0) // unit.itemsize, 1),
        scales=torch.uint8,
        scale_strides=_strides(scales_OG),
        group_size=MXFP4_COLUMNS,
    )


def _strides(matrix: Tensor) -> tuple[int, int]:
    first, second = matrix.stride()
    return first, second


_LAYOUTS: Mapping[type[WeightFormat], Callable[[StoredMatrix], MatrixLayout]] = {
    Fp8Block: partial(_fp8, group_size=FP8_COLUMNS, block_rows=FP8_ROWS),
    Fp8Channel: partial(_fp8, group_size=0, block_rows=1),
    PackedInt4: _packed_int4,
    Gptq: _gptq,
    Awq: _awq,
}


BUCKETS = (1, 16, 32, 64, 128, 256, 512, 1024)  # tokens per expert, at least

# A GPU multiplies tiles of 64 outputs and more with one and the same instruction: see
# `device_experts_kernels`.
_MIN_OUTPUTS, _MIN_ROWS, _MAX_ROWS, _MAX_ROWS_OF_TURING = 64, 16, 128, 32
# Capability. Triton once used those of Turing and Volta, and left it (3.9 says so in a remark).
TENSOR_CORES_SINCE = (8, 0)


class TileKey(NamedTuple):
    """What a choice depends on, beside the GPU."""

    format: str
    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """A tile and who computes it.

    Attributes:
        stages: Steps whose loads are under way at once.
    """

    outputs: int
    rows: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """The choices for one GPU.

    Attributes:
        capability: Of the GPU: (7, 5) is Turing, (8, 0) Ampere, (9, 0) Hopper.
        chosen: What was measured; everything else is `default_shape`.
    """

    capability: tuple[int, int]
    chosen: Mapping[TileKey, TileShape] = field(default_factory=lambda: MappingProxyType({}))

    def shape(self, layout: MatrixLayout, tokens_per_expert: float) -> TileShape:
        """The tile for a matrix and so many tokens."""
        key = key_of(layout, tokens_per_expert)
        found = self.chosen.get(key)
        return default_shape(key.bucket, self.capability) if found is None else found

    def to_json(self) -> list[dict[str, Any]]:
        return [{**key._asdict(), **asdict(shape)} for key, shape in self.chosen.items()]

    @classmethod
    def from_json(cls, capability: tuple[int, int], entries: object) -> "TileTable":
        """Read what `to_json` wrote.

        Raises:
            ConfigError: It is not that, or not a tile that the kernels can use; says which entry.
        """
        if not isinstance(entries, list):
            raise ConfigError(f"a list of tiles is expected, not {type(entries).__name__}")
        chosen = dict(map(_entry, entries))
        return cls(capability=capability, chosen=MappingProxyType(chosen))


def units_of_step(layout: MatrixLayout, *, has_tensor_cores: bool) -> int:
    """Units of codes that one step of a kernel reads of each output.

    Args:
        has_tensor_cores: Whether they multiply: then 64 to 128 bytes, as the memory gives at once.
            Otherwise a thread keeps all its operands of a step in registers: as few as may be.
    """
    if not has_tensor_cores:
        return 16
    if layout.unit_inputs > 1:
        return 16 if layout.unit_inputs == _NIBBLES else 32
    # A word of AWQ is read once for each of its outputs, and staged as often.
    return 32 if layout.unit_outputs > 1 else 64


def key_of(layout: MatrixLayout, tokens_per_expert: float) -> TileKey:
    bucket = max((size for size in BUCKETS if size <= tokens_per_expert), default=BUCKETS[0])
    unit = str(layout.unit).removeprefix("torch.")
    return TileKey(f"{layout.kind} {unit} {layout.unit_inputs}x{layout.unit_outputs}", bucket)


def default_shape(bucket: int, capability: tuple[int, int]) -> TileShape:
    """A tile where none was measured: as many rows as an expert usually has, 16 to 128.

    Triton multiplies on Turing without its tensor cores, out of registers: 16 or 32 rows.
    """
    is_turing = capability < TENSOR_CORES_SINCE
    rows = min(max(2 * bucket, _MIN_ROWS), _MAX_ROWS_OF_TURING if is_turing else _MAX_ROWS)
    return TileShape(
        outputs=_MIN_OUTPUTS,
        rows=rows,
        warps=8 if rows == _MAX_ROWS else 4,
        stages=2 if is_turing else 3,
    )


def candidate_shapes(bucket: int, capability: tuple[int, int]) -> list[TileShape]:
    default = default_shape(bucket, capability)
    stages = (default.stages,) if capability < TENSOR_CORES_SINCE else (2, 3, 4)
    others = [
        TileShape(outputs=outputs, rows=rows, warps=warps, stages=count)
        for outputs in (_MIN_OUTPUTS, 2 * _MIN_OUTPUTS)
        for rows in sorted({max(default.rows // 2, _MIN_ROWS), default.rows})
        for warps in (4, 8)
        for count in stages
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
    if not is_usable or shape.outputs < _MIN_OUTPUTS or shape.rows < _MIN_ROWS or shape.warps % 4:
        raise ConfigError(
            f"tile {entry!r}: outputs, rows and warps are powers of two, at least "
            f"{_MIN_OUTPUTS}, {_MIN_ROWS} and 4"
        )
    if type(shape.stages) is not int or shape.stages < 1:
        raise ConfigError(f"tile {entry!r}: stages is a number of at least 1")
    return key, shape


class ExpertMatrices(NamedTuple):
    """The weights of all experts of a layer, and their biases; E experts, H hidden, F wide.

    Attributes:
        are_reordered: Whether tables that name the group of each input (act-order) may name others
            than groups of neighbours do; without them they are not read.
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
        """Of gate and up, and of down; None where experts, or gate and up, are stored unlike."""
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
    """How our kernels compute experts.

    Attributes:
        dtype: Type of hidden states; stored weights are rounded to it.
        dot: Type in which the kernels multiply. The same, but float32 for bfloat16 on Turing, which
            has no product of it: exact, and slow (float16 suits Turing), and in the interpreter.
        tiles: How large the tiles are.
    """

    dtype: torch.dtype
    dot: torch.dtype
    tiles: TileTable

    @classmethod
    def on(cls, tiles: TileTable, dtype: torch.dtype) -> "Compute":
        """On the GPU that the tiles are for."""
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
