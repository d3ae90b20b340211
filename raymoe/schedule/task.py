"""What a schedule is made of: resources, operations, buffers and tasks."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


class Resource(StrEnum):
    """A unit that runs one task at a time, in issue order."""

    GPU = "gpu"
    CPU = "cpu"
    HTOD = "htod"
    DTOH = "dtoh"
    HOST_COPY = "host_copy"


class Op(StrEnum):
    """The kind of work of a task.

    Computation: `embed` turns tokens into hidden states; `pre` is norm, QKV projection and
    rotation; `attn` appends to the KV cache and attends; `post` is the output projection,
    residual, norm and router; `experts` the feed-forward network, of experts or dense; `head` the
    final norm and the logits. Where attention is split, `gattn` is attention of the device's
    share and `append` puts its keys and values into the host KV cache.

    Transfers: `up` brings embedded tokens to the device, `qkv` queries, keys and values to the
    host, `hid` the CPU's attention output to the device, `kv` the KV blocks that the device's
    share reads. `w` loads one page of weights into its slot; `stage` copies it from pageable
    memory to the pinned staging ring before. `sync` is a device-wide wait of a baseline.

    A task's layer is the layer whose weights it loads or uses. Its part is the wave; the expert
    group for `experts`; the page for `w` and `stage`; 0 for `head`.
    """

    EMBED = "embed"
    UP = "up"
    PRE = "pre"
    QKV = "qkv"
    ATTN = "attn"
    KV = "kv"
    APPEND = "append"
    GATTN = "gattn"
    HID = "hid"
    POST = "post"
    EXPERTS = "experts"
    STAGE = "stage"
    W = "w"
    SYNC = "sync"
    HEAD = "head"


_CORES = frozenset({Resource.GPU, Resource.CPU})

RESOURCES_OF: Mapping[Op, frozenset[Resource]] = MappingProxyType(
    dict.fromkeys((Op.EMBED, Op.PRE, Op.ATTN, Op.POST, Op.EXPERTS, Op.HEAD), _CORES)
    | dict.fromkeys((Op.UP, Op.KV, Op.HID, Op.W), frozenset({Resource.HTOD}))
    | dict.fromkeys((Op.GATTN, Op.SYNC), frozenset({Resource.GPU}))
    | {
        Op.QKV: frozenset({Resource.DTOH}),
        Op.APPEND: frozenset({Resource.CPU}),
        Op.STAGE: frozenset({Resource.HOST_COPY}),
    }
)
"""The resources on which each operation can run."""


class Buffer(NamedTuple):
    """A named piece of memory; two tasks that use an equal buffer depend on each other.

    A tuple, because planning builds schedules by the hundred and looks up buffers all the time.
    """

    name: str
    key: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.key))}]" if self.key else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One unit of work: an operation on one layer and one part (see `Op`) of the pass.

    A task that updates a buffer in place names it in both `reads` and `writes`.
    """

    op: Op
    layer: int
    part: int
    resource: Resource
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}[{self.layer},{self.part}]"
