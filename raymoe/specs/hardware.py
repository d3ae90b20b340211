"""HardwareSpec: the measured numbers of one node. Pure data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from raymoe.errors import CheckpointError, ConfigError
from raymoe.specs.curve import Curve
from raymoe.specs.files import parse_json_object
from raymoe.specs.plain_data import from_plain, to_json

HOST_FIELDS = ("num_cores", "host_memory_bytes", "host_bytes_per_s", "host_flop_per_s")
DEVICE_FIELDS = (
    "gpu_memory_bytes",
    "gpu_bytes_per_s",
    "gpu_flop_per_s",
    "htod_bytes_per_s",
    "dtoh_bytes_per_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCurves:
    """What our kernels reach on the cores of a node, with bfloat16 weights and cache.

    Attributes:
        product_flop_per_s: A projection over its rows; weights come from memory.
        expert_flop_per_s: The experts of a layer over rows for each expert that has any.
        attention_bytes_per_s: Decode attention over context tokens: KV read.
        attention_flop_per_s: Decode attention where so many heads share their keys and values that
            operations bind.
        attention_bytes_per_s_of_threads: Decode attention over the number of threads.
        prefill_flop_per_s: Causal attention of whole prompts over their tokens; what lies above
            the diagonal is not counted.
        activation_bytes_per_s: Norms and rotations: activations read and written.
        task_overhead_s: What a task of a pass takes beyond its kernels, over the tokens of the
            pass; None for a constant of the cost model.
    """

    product_flop_per_s: Curve
    expert_flop_per_s: Curve
    attention_bytes_per_s: Curve
    attention_flop_per_s: float
    attention_bytes_per_s_of_threads: Curve
    prefill_flop_per_s: Curve
    activation_bytes_per_s: float
    task_overhead_s: Curve | None = None

    def __post_init__(self) -> None:
        _check_positive(self, ("attention_flop_per_s", "activation_bytes_per_s"))

    def scaled(self, factor: float) -> "HostCurves":
        """What a share of the cores reaches; a task waits as long for the interpreter."""
        return replace(
            self,
            product_flop_per_s=self.product_flop_per_s.scaled(factor),
            expert_flop_per_s=self.expert_flop_per_s.scaled(factor),
            attention_bytes_per_s=self.attention_bytes_per_s.scaled(factor),
            attention_flop_per_s=self.attention_flop_per_s * factor,
            prefill_flop_per_s=self.prefill_flop_per_s.scaled(factor),
            activation_bytes_per_s=self.activation_bytes_per_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCurves:
    """What a GPU and its link reach, alone and beside each other, with 16-bit weights.

    Attributes:
        product_flop_per_s: A projection over its rows.
        expert_flop_per_s: One expert over its rows.
        pageable_htod_bytes_per_s: Copies from ordinary host memory to the device.
        pageable_dtoh_bytes_per_s: Copies from the device to ordinary host memory.
        duplex_htod_bytes_per_s: Copies from pinned memory while others go the other way.
        duplex_dtoh_bytes_per_s: Those others.
        busy_htod_bytes_per_s: Copies from pinned memory while the CPU attends on all cores.
        busy_attention_bytes_per_s: KV that the CPU then reads.
    """

    product_flop_per_s: Curve
    expert_flop_per_s: Curve
    pageable_htod_bytes_per_s: float
    pageable_dtoh_bytes_per_s: float
    duplex_htod_bytes_per_s: float
    duplex_dtoh_bytes_per_s: float
    busy_htod_bytes_per_s: float
    busy_attention_bytes_per_s: float

    def __post_init__(self) -> None:
        _check_positive(self, [name for name in self.__slots__ if name.endswith("_bytes_per_s")])


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """What a node can do, as measured on it; presets estimate what would be measured.

    Rates are those that long runs sustain, not the peaks of a data sheet. The numbers of the GPU
    and its link are all zero on a node without one, and all positive otherwise; where a node has
    several GPUs, they are those of one. Curves are there
    where the node was measured (`raymoe profile`); presets have none, and costs are then formulas.

    Attributes:
        name: For messages.
        num_cores: Cores that may be used.
        host_memory_bytes: Host memory that may be used.
        host_bytes_per_s: Read bandwidth of host memory with all cores.
        host_flop_per_s: bfloat16 rate of all cores; the float32 rate where the cores have no
            bfloat16 instructions.
        gpu_memory_bytes: Device memory that the driver reports.
        gpu_bytes_per_s: Read bandwidth of device memory.
        gpu_flop_per_s: Rate of large dense matrix products of 16-bit numbers.
        htod_bytes_per_s: Copies from pinned host memory to the device.
        dtoh_bytes_per_s: Copies from the device to pinned host memory.
        host_copy_bytes_per_s: Copies from pageable to pinned host memory, bytes copied per second;
            0 where that is not known and there is no GPU.
        peer_bytes_per_s: What a GPU sends to another one of the node while it receives as much; 0
            where that is not known: the slower direction of its link.
        host_curves: Of the cores.
        device_curves: Of the GPU and its link; only on a node with one.
    """

    name: str
    num_cores: int
    host_memory_bytes: int
    host_bytes_per_s: float
    host_flop_per_s: float
    gpu_memory_bytes: int = 0
    gpu_bytes_per_s: float = 0.0
    gpu_flop_per_s: float = 0.0
    htod_bytes_per_s: float = 0.0
    dtoh_bytes_per_s: float = 0.0
    host_copy_bytes_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    host_curves: HostCurves | None = None
    device_curves: DeviceCurves | None = None

    def __post_init__(self) -> None:
        _check_positive(self, HOST_FIELDS)
        for field in ("host_copy_bytes_per_s", "peer_bytes_per_s"):
            if getattr(self, field) != 0:
                _check_positive(self, [field])
        if all(getattr(self, field) == 0 for field in DEVICE_FIELDS):
            if self.device_curves is not None:
                raise ConfigError("HardwareSpec.device_curves is given, but there is no GPU")
            return
        needed = (*DEVICE_FIELDS, "host_copy_bytes_per_s")
        for field in needed:
            if not getattr(self, field) > 0:
                raise ConfigError(
                    f"HardwareSpec.{field} is {getattr(self, field)!r}; on a node with a GPU all "
                    f"of {', '.join(needed)} must be positive, without one those of the GPU are 0"
                )

    @property
    def has_gpu(self) -> bool:
        """Whether the node has a GPU."""
        return self.gpu_memory_bytes > 0

    def without_gpu(self) -> Self:
        """The same host on its own."""
        return replace(
            self,
            gpu_memory_bytes=0,
            gpu_bytes_per_s=0.0,
            gpu_flop_per_s=0.0,
            htod_bytes_per_s=0.0,
            dtoh_bytes_per_s=0.0,
            peer_bytes_per_s=0.0,
            device_curves=None,
        )

    def share(self, count: int) -> "HardwareSpec":
        """What one of `count` equal users of the node has: a GPU with its link, a part of the host.

        At least one core, which it may have to share.
        """
        if count == 1:
            return self
        curves = self.device_curves
        if curves is not None:
            busy = curves.busy_attention_bytes_per_s / count
            curves = replace(curves, busy_attention_bytes_per_s=busy)
        return replace(
            self,
            name=f"1/{count} of {self.name}",
            num_cores=max(1, self.num_cores // count),
            host_memory_bytes=self.host_memory_bytes // count,
            host_bytes_per_s=self.host_bytes_per_s / count,
            host_flop_per_s=self.host_flop_per_s / count,
            host_copy_bytes_per_s=self.host_copy_bytes_per_s / count,
            host_curves=self.host_curves and self.host_curves.scaled(1 / count),
            device_curves=curves,
        )

    def with_gpu_of(self, other: "HardwareSpec", gpu_memory_bytes: int) -> Self:
        """This host with the GPU and the link of another node.

        Args:
            other: A node with a GPU.
            gpu_memory_bytes: How much memory that GPU has here.
        """
        return replace(
            self,
            gpu_memory_bytes=gpu_memory_bytes,
            gpu_bytes_per_s=other.gpu_bytes_per_s,
            gpu_flop_per_s=other.gpu_flop_per_s,
            htod_bytes_per_s=other.htod_bytes_per_s,
            dtoh_bytes_per_s=other.dtoh_bytes_per_s,
            peer_bytes_per_s=other.peer_bytes_per_s,
            host_copy_bytes_per_s=self.host_copy_bytes_per_s or other.host_copy_bytes_per_s,
            device_curves=other.device_curves,
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read what `to_file` wrote; fields that have a default may be left out.

        Raises:
            ConfigError: The file cannot be read, is not JSON, or a field is missing, unknown, or
                has a value that makes no sense; names file and field.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"hardware file {path}: cannot be read ({error.strerror})") from error
        try:
            return from_plain(
                cls, parse_json_object(content, where="content"), where="HardwareSpec"
            )
        except (CheckpointError, ConfigError) as error:
            raise ConfigError(f"hardware file {path}: {error}") from error

    def to_file(self, path: str | Path) -> None:
        """Write this node as JSON.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_text(to_json(self))


def _check_positive(spec: object, fields: Iterable[str]) -> None:
    for field in fields:
        value = getattr(spec, field)
        if not 0 < value < math.inf:
            raise ConfigError(
                f"{type(spec).__name__}.{field} is {value!r}; it must be positive and finite"
            )
