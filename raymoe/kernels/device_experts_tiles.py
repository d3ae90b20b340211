"""How large the tiles of the expert kernels are on a GPU: measured once and kept, or a default.

A choice is keyed by the stored format and by how many tokens an expert has on average. Everything
that the order of a token's sums depends on is fixed by the format alone (`units_of_step`), so that
its bits do not depend on the choice.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from raymoe.errors import ConfigError
from raymoe.kernels.device_experts_layout import MatrixLayout

BUCKETS = (1, 16, 32, 64, 128, 256, 512, 1024)  # tokens per expert, at least

# A GPU multiplies tiles of 64 outputs and more with one and the same instruction: see
# `device_experts_kernels`.
_MIN_OUTPUTS, _MIN_ROWS, _MAX_ROWS, _MAX_ROWS_OF_TURING = 64, 16, 128, 32
# Capability. Triton once used those of Turing and Volta, and left it (3.9 says so in a remark).
TENSOR_CORES_SINCE = (8, 0)
_NIBBLES = 8  # in a word


class TileKey(NamedTuple):
    """What a choice depends on, beside the GPU."""

    format: str
    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """A tile and who computes it.

    Attributes:
        outputs: Of the weights.
        rows: Of tokens.
        warps: Of a program.
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
        """The measured choices, for `from_json`."""
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
        layout: Of the matrix.
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
    """The key of a choice."""
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
    """Tiles worth measuring, the default first."""
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
