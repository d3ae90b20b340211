"""HardwareSpec: the measured numbers of one node. Pure data."""

from dataclasses import dataclass

from raymoe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """What a node can do, as measured on it or taken from its data sheet.

    Attributes:
        name: For messages.
        num_cores: Cores that may be used.
        host_memory_bytes: Host memory that may be used.
        host_bytes_per_s: Read bandwidth of host memory with all cores.
        host_flop_per_s: bfloat16 rate of all cores; the float32 rate where the cores have no
            bfloat16 instructions.
    """

    name: str
    num_cores: int
    host_memory_bytes: int
    host_bytes_per_s: float
    host_flop_per_s: float

    def __post_init__(self) -> None:
        for field in ("num_cores", "host_memory_bytes", "host_bytes_per_s", "host_flop_per_s"):
            value = getattr(self, field)
            if not value > 0:
                raise ConfigError(f"HardwareSpec.{field} is {value!r}; it must be positive")
