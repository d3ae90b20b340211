"""HardwareSpec: the measured numbers of one node. Pure data."""

from dataclasses import dataclass

from raymoe.errors import ConfigError

HOST_FIELDS = ("num_cores", "host_memory_bytes", "host_bytes_per_s", "host_flop_per_s")
DEVICE_FIELDS = (
    "gpu_memory_bytes",
    "gpu_bytes_per_s",
    "gpu_flop_per_s",
    "htod_bytes_per_s",
    "dtoh_bytes_per_s",
    "host_copy_bytes_per_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """What a node can do, as measured on it; presets estimate what would be measured.

    Rates are those that long runs sustain, not the peaks of a data sheet. The numbers of the GPU
    and its link are all zero on a node without one, and all positive otherwise.

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
        host_copy_bytes_per_s: Copies from pageable to pinned host memory, bytes copied per second.
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

    def __post_init__(self) -> None:
        for field in HOST_FIELDS:
            value = getattr(self, field)
            if not value > 0:
                raise ConfigError(f"HardwareSpec.{field} is {value!r}; it must be positive")
        device = {field: getattr(self, field) for field in DEVICE_FIELDS}
        if all(value == 0 for value in device.values()):
            return
        for field, value in device.items():
            if not value > 0:
                raise ConfigError(
                    f"HardwareSpec.{field} is {value!r}; on a node with a GPU all of "
                    f"{', '.join(DEVICE_FIELDS)} must be positive, without one all are 0"
                )

    @property
    def has_gpu(self) -> bool:
        """Whether the node has a GPU."""
        return self.gpu_memory_bytes > 0
