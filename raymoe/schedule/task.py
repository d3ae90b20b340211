"""What a schedule is made of: resources, operations, buffers and tasks."""

from dataclasses import dataclass
from enum import StrEnum


class Resource(StrEnum):
    """A unit that runs one task at a time, in issue order."""

    GPU = "gpu"
    CPU = "cpu"
    HTOD = "htod"
    DTOH = "dtoh"
    HOST_COPY = "host_copy"


class Op(StrEnum):
    """The kind of work of a task.

    `embed` turns tokens into hidden states; `pre` is norm, QKV projection and rotation; `attn`
    appends to the KV cache and attends; `post` is the output projection, residual, norm and
    router; `experts` the feed-forward network, of experts or dense; `head` the final norm and the
    logits.
    """

    EMBED = "embed"
    PRE = "pre"
    ATTN = "attn"
    POST = "post"
    EXPERTS = "experts"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named piece of memory; two tasks that use an equal buffer depend on each other."""

    name: str
    key: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.key))}]" if self.key else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One unit of work: an operation on one layer and one part (a wave) of the pass.

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
