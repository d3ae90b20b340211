"""Measured or estimated rates of a node."""

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

from raymoe.errors import CheckpointError, ConfigError, UnknownOptionError
from raymoe.specs.files import from_plain, parse_json_object, read_file, to_json, write_file
from raymoe.units import GB, GIB, TB


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured values over a size, interpolated on logarithmic axes and constant outside.

    A roofline consists of two straight lines on these axes, so the interpolation is exact where
    memory bandwidth limits (the rate grows with the rows) and where operations do (it is constant).
    """

    # Pairs of size and value, all positive, sizes ascending.
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("Curve.points is empty; a curve needs at least one point")
        for size, value in self.points:
            if not (0 < size < math.inf and 0 < value < math.inf):
                raise ConfigError(
                    f"Curve.points has ({size!r}, {value!r}); both must be positive and finite"
                )
        sizes = [size for size, _ in self.points]
        if any(later <= earlier for earlier, later in itertools.pairwise(sizes)):
            raise ConfigError(f"Curve.points has the sizes {sizes}; they must ascend")

    def at(self, size: float) -> float:
        index = bisect.bisect_right(self.points, size, key=lambda point: point[0])
        if index == 0 or index == len(self.points):
            return self.points[max(0, index - 1)][1]
        (left, low), (right, high) = self.points[index - 1 : index + 1]
        share = math.log(size / left) / math.log(right / left)
        return math.exp((1 - share) * math.log(low) + share * math.log(high))

    def scaled(self, factor: float) -> "Curve":
        return Curve(tuple((size, factor * value) for size, value in self.points))

    @property
    def highest(self) -> float:
        return max(value for _, value in self.points)


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
    """Rates of our kernels on the cores of a node, with bfloat16 weights and cache."""

    product_flop_per_s: Curve  # a projection over its rows; weights come from memory
    expert_flop_per_s: Curve  # the experts of a layer over rows per activated expert
    attention_bytes_per_s: Curve  # KV read by decode attention, over context tokens
    # Decode attention where enough heads share keys and values that operations limit.
    attention_flop_per_s: float
    attention_bytes_per_s_of_threads: Curve  # decode attention over the number of threads
    # Causal attention over prompt tokens; work above the diagonal is not counted.
    prefill_flop_per_s: Curve
    activation_bytes_per_s: float  # norms and rotations: activations read and written
    # Time of a task beyond its kernels, over the tokens of the step; None for a constant of the
    # cost model.
    task_overhead_s: Curve | None = None

    def __post_init__(self) -> None:
        _check_positive(self, ("attention_flop_per_s", "activation_bytes_per_s"))

    def scaled(self, factor: float) -> "HostCurves":
        """Rates of a share of the cores; the interpreter overhead per task stays the same."""
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
    """Rates of a GPU and its link, alone and concurrently, with 16-bit weights."""

    product_flop_per_s: Curve  # a projection over its rows
    expert_flop_per_s: Curve  # the experts of a layer over the rows of each
    pageable_htod_bytes_per_s: float
    pageable_dtoh_bytes_per_s: float
    duplex_htod_bytes_per_s: float  # pinned copies while others go the other way
    duplex_dtoh_bytes_per_s: float
    busy_htod_bytes_per_s: float  # pinned copies while the CPU attends on all cores
    busy_attention_bytes_per_s: float  # KV that the CPU reads meanwhile
    # None where nobody measured it, and formulas serve.
    expert_flop_per_s_of_8_bits: Curve | None = None  # with stored weights of 8 bits, and of 4
    expert_flop_per_s_of_4_bits: Curve | None = None
    attention_bytes_per_s: Curve | None = None  # KV read by decode attention, over context tokens
    # Causal attention over prompt tokens; work above the diagonal is not counted.
    prefill_flop_per_s: Curve | None = None
    tasks_per_s: float | None = None  # whose kernels have next to nothing to do
    state_bytes_per_s: float | None = None  # states read and written by a decode step

    def __post_init__(self) -> None:
        rates = [name for name in self.__slots__ if name.endswith("_bytes_per_s")]
        optional = ("attention_bytes_per_s", "state_bytes_per_s")
        _check_positive(self, [name for name in rates if name not in optional])
        for name in ("tasks_per_s", "state_bytes_per_s"):
            if getattr(self, name) is not None:
                _check_positive(self, (name,))


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """Sustained rates of a node, as measured on it; presets estimate them.

    GPU and link numbers are all zero on a node without a GPU, and all positive otherwise; with
    several GPUs they are per GPU. Measured nodes (`raymoe profile`) have curves; presets have none,
    and costs then follow formulas.

    Examples:
        >>> node = raymoe.HardwareSpec(
        ...     name="node",
        ...     num_cores=16,
        ...     host_memory_bytes=32 * 2**30,
        ...     host_bytes_per_s=200e9,
        ...     host_flop_per_s=2e12,
        ... )
        >>> node.has_gpu
        False

    Attributes:
        num_cores: Cores that may be used.
        host_memory_bytes: Host memory that may be used.
        host_bytes_per_s: Read bandwidth of host memory with all cores.
        host_flop_per_s: bfloat16 rate of all cores; the float32 rate without bfloat16 instructions.
        gpu_memory_bytes: Device memory that is free beside the context of CUDA.
        gpu_bytes_per_s: Read bandwidth of device memory.
        gpu_flop_per_s: Rate of large dense matrix products of 16-bit numbers.
        htod_bytes_per_s: Copies from pinned host memory to the device.
        dtoh_bytes_per_s: Copies from the device to pinned host memory.
        host_copy_bytes_per_s: Copies from pageable to pinned host memory, bytes copied per second;
            0 if unknown on a node without a GPU.
        peer_bytes_per_s: GPU to GPU, each way while both directions are busy; 0 if unknown, which
            assumes the slower direction of the link.
        device_curves: Only on a node with a GPU.
        task_overhead_s: Time of a task beyond its kernels, over the tokens of the step, on a node
            without host_curves; None for a constant of the cost model.
        has_bfloat16: Whether the GPU has products of bfloat16; without, models run in float16.
        expert_share_of_8_bits: Of `gpu_flop_per_s`, that of experts whose stored weights have 8
            bits and are decoded beside their products; used without curves.
        expert_share_of_4_bits: The same for 4 bits.
        measured_share: Lowest and highest throughput that was measured on such a GPU over what a
            plan with these rates predicts for the same policy; None if nothing is known, as of most
            presets, or if the rates were measured on the node.
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
    task_overhead_s: Curve | None = None
    has_bfloat16: bool = True
    expert_share_of_8_bits: float = 1.0
    expert_share_of_4_bits: float = 1.0
    measured_share: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        _check_positive(self, (*HOST_FIELDS, "expert_share_of_8_bits", "expert_share_of_4_bits"))
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
        return self.gpu_memory_bytes > 0

    @property
    def is_estimate(self) -> bool:
        """Whether the GPU's rates come from data sheets and papers, not from `raymoe profile`."""
        return self.has_gpu and self.device_curves is None

    def without_gpu(self) -> Self:
        return replace(
            self,
            gpu_memory_bytes=0,
            gpu_bytes_per_s=0.0,
            gpu_flop_per_s=0.0,
            htod_bytes_per_s=0.0,
            dtoh_bytes_per_s=0.0,
            peer_bytes_per_s=0.0,
            device_curves=None,
            has_bfloat16=True,
            expert_share_of_8_bits=1.0,
            expert_share_of_4_bits=1.0,
            measured_share=None,
        )

    def share(self, count: int) -> "HardwareSpec":
        """One of `count` equal shares: a GPU with its link, part of the host, at least one core."""
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
        """This host with the GPU and link of `other`, and `gpu_memory_bytes` of device memory."""
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
            has_bfloat16=other.has_bfloat16,
            expert_share_of_8_bits=other.expert_share_of_8_bits,
            expert_share_of_4_bits=other.expert_share_of_4_bits,
            measured_share=other.measured_share,
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read what `to_file` wrote, with defaults; ConfigError names the file and the field."""
        content = read_file(Path(path), what="hardware file")
        try:
            return from_plain(
                cls, parse_json_object(content, where="content"), where="HardwareSpec"
            )
        except (CheckpointError, ConfigError) as error:
            raise ConfigError(f"hardware file {path}: {error}") from error

    def to_file(self, path: str | Path) -> None:
        write_file(Path(path), to_json(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNode:
    """Rates that were measured on a machine, for engines on that one and on others like it.

    The driver of a job hands them to its actors. An engine on another machine measures its own.

    Attributes:
        machine: Processor, number of threads, memory and GPU, as `raymoe profile` names its file.
    """

    machine: str
    hardware: HardwareSpec


def _check_positive(spec: object, fields: Iterable[str]) -> None:
    for field in fields:
        value = getattr(spec, field)
        if not 0 < value < math.inf:
            raise ConfigError(
                f"{type(spec).__name__}.{field} is {value!r}; it must be positive and finite"
            )


USABLE_FRACTION = 0.85  # of host memory: Ray kills processes of a node that is 95 % full
GPU_READ_FRACTION = 0.75
GPU_PRODUCT_FRACTION = 0.65  # of the peak
# Of our kernels in bfloat16 with 256 rows of each expert or more, measured on an H200.
HOPPER_PRODUCT_FRACTION = 0.52


AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities


class ExpertShares(NamedTuple):
    """Rates of experts with stored weights of 8 and 4 bits over that of 16 bits."""

    of_8_bits: float
    of_4_bits: float


def expert_shares(capability: tuple[int, int]) -> ExpertShares:
    """The shares of our kernels' default tiles on a GPU of a compute capability.

    From 8.0 on the mean of two bounds counted from machine code, of one group of warps alone and of
    several at best, over that of 16 bits. From 9.0 on what an H200 measured with earlier kernels,
    0.52 and 0.25, times most of what these counts gained since. `bench/RESULTS.md`, "On a GPU".
    """
    if capability >= HOPPER:
        return ExpertShares(0.75, 0.35)
    if capability >= (8, 6):
        return ExpertShares(0.9, 0.9)
    if capability >= AMPERE:
        return ExpertShares(0.85, 0.85)
    return ExpertShares(0.7, 0.7)  # decoded for torch's products where rows are many


NUM_COPIES = 3


@dataclass(frozen=True, slots=True)
class _Host:
    cores: int
    memory_gib: int
    gb_per_s: float
    tflop_per_s: float


@dataclass(frozen=True, slots=True)
class _Gpu:
    memory_gib: float
    gb_per_s: float
    tflop_per_s: float
    link_gb_per_s: float
    capability: tuple[int, int]
    measured_share: tuple[float, float] | None = None


def _node(name: str, host: _Host, gpu: _Gpu) -> HardwareSpec:
    shares = expert_shares(gpu.capability)
    return HardwareSpec(
        name=name,
        num_cores=host.cores,
        host_memory_bytes=int(USABLE_FRACTION * host.memory_gib * GIB),
        host_bytes_per_s=host.gb_per_s * GB,
        host_flop_per_s=host.tflop_per_s * TB,
        gpu_memory_bytes=int(gpu.memory_gib * GIB),
        gpu_bytes_per_s=GPU_READ_FRACTION * gpu.gb_per_s * GB,
        gpu_flop_per_s=gpu.tflop_per_s * TB,
        htod_bytes_per_s=gpu.link_gb_per_s * GB,
        dtoh_bytes_per_s=gpu.link_gb_per_s * GB,
        host_copy_bytes_per_s=host.gb_per_s * GB / NUM_COPIES,
        has_bfloat16=gpu.capability >= AMPERE,
        expert_share_of_8_bits=shares.of_8_bits,
        expert_share_of_4_bits=shares.of_4_bits,
        measured_share=gpu.measured_share,
    )


_PCIE4, _PCIE5 = 24.3, 48.6
_A6000, _L40S, _A100 = (GPU_PRODUCT_FRACTION * peak for peak in (155, 362, 312))
_HOPPER = HOPPER_PRODUCT_FRACTION * 989
# Published throughput of MoE-Lightning (its files of settings S1 and S2) over a simulation of its
# policies with these rates: its prefill is slow, and link and products of the T4 are guesses.
_T4_SHARE, _L4_SHARE = (0.34, 0.55), (0.59, 0.97)
_NODES = (
    _node("t4", _Host(24, 192, 100.0, 0.8), _Gpu(14.6, 320.0, 25.0, 12.35, (7, 5), _T4_SHARE)),
    _node("l4", _Host(24, 192, 81.6, 1.6), _Gpu(22.5, 300.0, 60.0, 12.35, (8, 9), _L4_SHARE)),
    _node("a10", _Host(32, 256, 150.0, 2.9), _Gpu(22.5, 600.0, 65.0, _PCIE4, (8, 6))),
    _node("a5000", _Host(28, 512, 150.0, 2.5), _Gpu(24.0, 768.0, 72.0, _PCIE4, (8, 6))),
    _node("a6000", _Host(16, 480, 150.0, 1.5), _Gpu(48.0, 768.0, _A6000, _PCIE4, (8, 6))),
    _node("a40", _Host(40, 375, 150.0, 5.9), _Gpu(45.0, 696.0, 97.0, 19.5, (8, 6))),
    _node("4090", _Host(32, 512, 200.0, 3.3), _Gpu(24.0, 1008.0, 140.0, _PCIE4, (8, 9))),
    _node("l40s", _Host(32, 512, 150.0, 2.7), _Gpu(45.0, 864.0, _L40S, _PCIE4, (8, 9))),
    _node("a100", _Host(24, 220, 56.0, 1.9), _Gpu(80.0, 2039.0, _A100, _PCIE4, (8, 0))),
    _node("h100", _Host(40, 320, 140.0, 6.1), _Gpu(79.6, 3350.0, _HOPPER, _PCIE5, (9, 0))),
    _node("h200", _Host(12, 231, 56.0, 1.5), _Gpu(140.4, 4800.0, _HOPPER, _PCIE5, (9, 0))),
)
HARDWARE_PRESETS: Mapping[str, HardwareSpec] = {node.name: node for node in _NODES}


# In names of what has only a part of a card's rates, or others.
_PARTS = {"mig", "laptop", "mobile", "max", "ada", "pcie", "nvl", "40gb", "d"}
_SHARES = re.compile(r"\d+[qabc]")  # of a card that several virtual machines share: A40-48Q


def preset_of_gpu(name: str) -> HardwareSpec | None:
    """The preset of the card that a driver calls so, such as "NVIDIA A10G"; None if none is.

    Cloud variants (A10G, T4G) count as the card. Parts of a card (MIG, virtual GPUs), cards for
    laptops, the Ada generation of workstation cards, and forms with less power or memory than the
    one whose rates the preset has (PCIe, NVL, 40 GB) do not.
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    if _PARTS & {*words} or any(map(_SHARES.fullmatch, words)):
        return None
    names = (name for word in words for name in (word, word.removesuffix("g")))
    return next((HARDWARE_PRESETS[name] for name in names if name in HARDWARE_PRESETS), None)


class Instance(NamedTuple):
    """What a provider publishes of an instance; rates per core are those of the GPU's preset."""

    num_vcpus: int
    memory_gib: int
    gpu: str
    num_gpus: int


INSTANCES: Mapping[str, Instance] = {
    f"{family}.{size}xlarge".replace(".1x", ".x", size == 1): Instance(
        4 * size, size * gib_of_four, gpu, num_gpus
    )
    for family, gpu, gib_of_four in (("g4dn", "t4", 16), ("g5", "a10", 16), ("g6", "l4", 16),
                                     ("g6e", "l40s", 32))
    for size, num_gpus in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (12, 4), (24, 4), (48, 8))
    if family != "g4dn" or size <= 16
} | {
    "gr6.4xlarge": Instance(16, 128, "l4", 1),
    "gr6.8xlarge": Instance(32, 256, "l4", 1),
} | {
    f"g2-standard-{cpus}": Instance(cpus, 4 * cpus, "l4", num_gpus)
    for cpus, num_gpus in ((4, 1), (8, 1), (12, 1), (16, 1), (32, 1), (24, 2), (48, 4), (96, 8))
} | {
    f"a2-ultragpu-{count}g": Instance(12 * count, 170 * count, "a100", count)
    for count in (1, 2, 4, 8)
} | {
    "a3-highgpu-1g": Instance(26, 234, "h100", 1),
    "a3-highgpu-8g": Instance(208, 1872, "h100", 8),
    "p4de.24xlarge": Instance(96, 1152, "a100", 8),
    "p5.48xlarge": Instance(192, 2048, "h100", 8),
    "p5e.48xlarge": Instance(192, 2048, "h200", 8),
}  # fmt: skip


def _instance(name: str) -> HardwareSpec:
    num_vcpus, memory_gib, gpu, num_gpus = INSTANCES[name]
    preset, cores = HARDWARE_PRESETS[gpu], max(1, num_vcpus // 2)  # two vCPUs are one core
    factor = cores / preset.num_cores
    return replace(
        preset,
        name=f"{name} ({num_gpus} x {gpu})",
        num_cores=cores,
        host_memory_bytes=int(USABLE_FRACTION * memory_gib * GIB),
        host_bytes_per_s=factor * preset.host_bytes_per_s,
        host_flop_per_s=factor * preset.host_flop_per_s,
        host_copy_bytes_per_s=factor * preset.host_copy_bytes_per_s,
    )


HARDWARE_INSTANCES: Mapping[str, HardwareSpec] = {name: _instance(name) for name in INSTANCES}


def is_hardware_file(text: str) -> bool:
    return text.endswith(".json") or Path(text).name != text


def find_hardware(text: str) -> HardwareSpec:
    """The node in a profile file (a path or *.json), or else the preset of this name."""
    return HardwareSpec.from_file(text) if is_hardware_file(text) else hardware_preset(text)


def hardware_preset(name: str) -> HardwareSpec:
    """The GPU or cloud instance of this name; raises UnknownOptionError with suggestions."""
    known = {**HARDWARE_PRESETS, **HARDWARE_INSTANCES}
    if name.lower() not in known:
        raise UnknownOptionError(name, known, "hardware preset")
    return known[name.lower()]
