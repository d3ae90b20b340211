"""Nodes by name: what planning and emulation take where the machine is not at hand.

Every number is an estimate of what a measurement would give.

GPU and link:

- Device memory: what the driver reports. Its bandwidth: 0.75 of the data sheet, because the expert
  kernel of MoE-Lightning (figure 9) reads 217 to 231 of the 300 GB/s of an L4.
- Matrix products: where nothing better is known 0.65 of the dense 16-bit rate of the data sheet,
  because MoE-Lens' profiled A40 (section 6.3) comes to 97 of 150 TFLOP/s and the prefill of MoE-Gen
  on an A5000 (2790 tokens/s of Mixtral-8x7B) to 72 of 111. T4, L4 and A10 are held back further by
  70, 72 and 150 W: 25, 60 and 65 TFLOP/s are guesses, as is 140 for a 4090.
- Link from pinned memory: 12.35 GB/s measured on the L4 host (MoE-Lightning, figure 9), 19.5 on the
  A40 host (MoE-Lens, section 8.1), 24.3 on the A5000 host (from the long contexts of MoE-Gen, table
  8), which stands for PCIe 4 elsewhere and, twice, for PCIe 5. T4: as the L4. The way back is not
  published and taken as equal.

Host:

- Memory: 0.85 of what is installed, as the engine takes of a node it measures. Its bandwidth: 0.73
  of the data sheet where not published, as the measured 150 of 204.8 GB/s of MoE-Lens' socket.
- Copies from pageable to pinned memory: a third of the read bandwidth, since a copy reads its
  source, reads what it will overwrite, and writes.
- Cores: 32 operations per cycle with AVX2, 64 with AVX-512, where no rate is published.

Usual hosts:

- t4: MoE-Lightning S1, Xeon 2.3 GHz, 24 cores, 192 GB; 0.8 TFLOP/s of its optimizer, 100 GB/s the
  default of its script.
- l4: MoE-Lightning S2, Xeon 2.2 GHz, 24 cores, 192 GB; 76 GiB/s and 1.6 TFLOP/s of its optimizer.
- a10: EPYC 7R32, 32 cores, 256 GB (AWS g5.16xlarge); 150 GB/s is a guess.
- a5000: MoE-Gen C2, EPYC 7453, 28 cores, 512 GB in eight channels of DDR4-3200.
- a6000: MoE-Gen C3, EPYC 7313P, 16 cores, 480 GB in eight channels of DDR4-3200.
- a40: MoE-Lens, one of two Xeon 8380, 40 cores, half of 750 GB; 150 GB/s measured.
- 4090: a workstation with 32 cores and 512 GB; all of its host is a guess.
- l40s: EPYC 7R13, 32 cores, 512 GB (AWS g6e.16xlarge); 150 GB/s is a guess.
- a100: 24 of 64 cores of an EPYC 7V13, 220 GB (Azure NC24ads A100 v4) and that share of its memory.
- h100: 40 of 96 cores of an EPYC 9V84, 320 GB (Azure NC40ads H100 v5) and that share.
- h200: an eighth of a server with two Xeon 8480C and 1850 GB (Azure ND96isr H200 v5).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raymoe.errors import UnknownOptionError
from raymoe.specs.hardware import HardwareSpec
from raymoe.units import GB, GIB, TB

USABLE_FRACTION = 0.85
GPU_READ_FRACTION = 0.75
GPU_PRODUCT_FRACTION = 0.65
COPY_PASSES = 3


@dataclass(frozen=True, slots=True)
class _Host:
    """Cores, installed GiB, GB/s read, 10^12 operations/s."""

    cores: int
    memory_gib: int
    gb_per_s: float
    tflop_per_s: float


@dataclass(frozen=True, slots=True)
class _Gpu:
    """GiB, GB/s of the data sheet, 10^12 operations/s sustained, GB/s of the link."""

    memory_gib: float
    gb_per_s: float
    tflop_per_s: float
    link_gb_per_s: float


def _node(name: str, host: _Host, gpu: _Gpu) -> HardwareSpec:
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
        host_copy_bytes_per_s=host.gb_per_s * GB / COPY_PASSES,
    )


_PCIE4, _PCIE5 = 24.3, 48.6
_A6000, _L40S, _A100, _HOPPER = (GPU_PRODUCT_FRACTION * peak for peak in (155, 362, 312, 989))
_NODES = (
    _node("t4", _Host(24, 192, 100.0, 0.8), _Gpu(15.0, 320.0, 25.0, 12.35)),
    _node("l4", _Host(24, 192, 81.6, 1.6), _Gpu(22.5, 300.0, 60.0, 12.35)),
    _node("a10", _Host(32, 256, 150.0, 2.9), _Gpu(22.5, 600.0, 65.0, _PCIE4)),
    _node("a5000", _Host(28, 512, 150.0, 2.5), _Gpu(24.0, 768.0, 72.0, _PCIE4)),
    _node("a6000", _Host(16, 480, 150.0, 1.5), _Gpu(48.0, 768.0, _A6000, _PCIE4)),
    _node("a40", _Host(40, 375, 150.0, 5.9), _Gpu(45.0, 696.0, 97.0, 19.5)),
    _node("4090", _Host(32, 512, 200.0, 3.3), _Gpu(24.0, 1008.0, 140.0, _PCIE4)),
    _node("l40s", _Host(32, 512, 150.0, 2.7), _Gpu(45.0, 864.0, _L40S, _PCIE4)),
    _node("a100", _Host(24, 220, 56.0, 1.9), _Gpu(80.0, 2039.0, _A100, _PCIE4)),
    _node("h100", _Host(40, 320, 140.0, 6.1), _Gpu(79.6, 3350.0, _HOPPER, _PCIE5)),
    _node("h200", _Host(12, 231, 56.0, 1.5), _Gpu(140.4, 4800.0, _HOPPER, _PCIE5)),
)
HARDWARE_PRESETS: Mapping[str, HardwareSpec] = {node.name: node for node in _NODES}


def is_hardware_file(text: str) -> bool:
    """Whether a user means a file and not a preset: a path, or a name that ends in .json."""
    return text.endswith(".json") or Path(text).name != text


def find_hardware(text: str) -> HardwareSpec:
    """The node in a file that `raymoe profile` wrote, or the preset of this name.

    Raises:
        ConfigError: As for `HardwareSpec.from_file` and `hardware_preset`.
    """
    return HardwareSpec.from_file(text) if is_hardware_file(text) else hardware_preset(text)


def hardware_preset(name: str) -> HardwareSpec:
    """The node of this name, in any case of letters.

    Raises:
        UnknownOptionError: There is none; names the nearest.
    """
    if name.lower() not in HARDWARE_PRESETS:
        raise UnknownOptionError(name, HARDWARE_PRESETS, "hardware preset")
    return HARDWARE_PRESETS[name.lower()]
