"""What decides a part of the GPU suite, and the name under which its result is kept."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Self

from raymoe.errors import RaymoeError
from raymoe.specs.files import from_plain

# Part of the key of a result: raise it when what is measured, or how, changes.
FORMAT = 1


class SkipPartError(RaymoeError):
    """A part that cannot be run here; says what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Which node, and how much of it.

    Attributes:
        device: "cuda" or "emulated".
        hardware: Preset whose pace the emulated device takes on; None on a GPU.
        device_memory_bytes: Cap; None for what is free.
        host_memory_bytes: Cap; None for what is available.
        num_threads: Cores; None for all.
    """

    device: str
    hardware: str | None = None
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    num_threads: int | None = None

    def to_json(self) -> str:
        """For `from_json`, on a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return from_plain(cls, json.loads(text), where="NodeSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings:
    """One shape, workload and contender on one node.

    Attributes:
        node: Which node.
        shape: Of `shapes.GPU_SHAPES`.
        num_layers: Of it, the first ones.
        workload: Of `workloads.GPU_WORKLOADS`.
        contender: Of `contenders.GPU_CONTENDERS`.
        limit_s: After which the part has failed.
        most_rows: No more rows than that, however fast.
    """

    node: NodeSettings
    shape: str
    num_layers: int
    workload: str
    contender: str
    limit_s: float
    most_rows: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.shape} {self.workload} {self.contender}"

    @property
    def file_name(self) -> str:
        """Of its pictures and its log, without what they end in."""
        return f"{self.shape}-{self.workload}-{self.contender}-{self.key[:8]}"

    @property
    def key(self) -> str:
        """The same for equal settings only."""
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """For `from_json`, on a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return from_plain(cls, json.loads(text), where="PartSettings")
