"""The elements of a schedule: resources, operations, buffers and tasks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from raymoe.errors import ScheduleError


class Resource(StrEnum):
    """A unit that runs tasks; the link to the device serves the streams of `OWN_STREAMS` too."""

    GPU = "gpu"
    CPU = "cpu"
    HTOD = "htod"
    DTOH = "dtoh"
    HOST_COPY = "host_copy"


class Op(StrEnum):
    """The kind of work of a task.

    Computation: `embed` turns tokens into hidden states; `pre` is norm, QKV projection and
    rotation; `attn` appends to the KV cache and attends; `post` is output projection, residual,
    norm and router; `experts` is the feed-forward network, of experts or dense; `head` is the final
    norm and the logits. If attention is split, `gattn` attends for the device's share and `append`
    writes its keys and values to the host KV cache. `cexperts` is the host's share of the experts.

    Transfers: `up` sends embedded tokens to the device, `qkv` sends queries, keys and values to the
    host, `hid` sends the CPU's attention output to the device, `kv` sends the KV blocks that the
    device's share reads. `rows` sends the input of the host's experts, `sums` returns what they
    add to each token. `w` loads one page of weights into its slot; `stage` first copies it from
    pageable memory to the pinned staging ring. `sync` is a device-wide wait of a baseline.

    A task's layer is the layer whose weights it loads or uses. Its part is the micro-batch; the
    page for `w` and `stage`; 0 for `head`. Several micro-batches may share a launch of `experts`,
    whose part is launch * groups + group where the layer's experts are in groups, else the launch.
    The part of `rows`, `cexperts` and `sums` is the launch.
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
    ROWS = "rows"
    CEXPERTS = "cexperts"
    SUMS = "sums"
    EXPERTS = "experts"
    STAGE = "stage"
    W = "w"
    SYNC = "sync"
    HEAD = "head"


_CORES = frozenset({Resource.GPU, Resource.CPU})

RESOURCES_OF: Mapping[Op, frozenset[Resource]] = MappingProxyType(
    dict.fromkeys((Op.EMBED, Op.PRE, Op.ATTN, Op.POST, Op.EXPERTS, Op.HEAD), _CORES)
    | dict.fromkeys((Op.UP, Op.KV, Op.HID, Op.SUMS, Op.W), frozenset({Resource.HTOD}))
    | dict.fromkeys((Op.GATTN, Op.SYNC), frozenset({Resource.GPU}))
    | {
        Op.QKV: frozenset({Resource.DTOH}),
        Op.ROWS: frozenset({Resource.DTOH}),
        Op.APPEND: frozenset({Resource.CPU}),
        Op.CEXPERTS: frozenset({Resource.CPU}),
        Op.STAGE: frozenset({Resource.HOST_COPY}),
    }
)
"""Resources that can run each operation."""


OWN_STREAMS = frozenset({Op.W, Op.KV})
"""Copies with a stream of their own, so that those which wait for a computation hold none back."""


class Buffer(NamedTuple):
    """A named piece of memory, a tuple for speed; tasks with equal buffers depend on each other."""

    name: str
    key: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.key))}]" if self.key else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One operation on a layer and part (`Op`); in-place updates both read and write a buffer."""

    op: Op
    layer: int
    part: int
    resource: Resource
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()

    @property
    def lane(self) -> "Op | Resource":
        """Where it queues: the tasks of a lane run in issue order."""
        return self.op if self.op in OWN_STREAMS else self.resource

    def __str__(self) -> str:
        return f"{self.op}[{self.layer},{self.part}]"


@dataclass(frozen=True)
class Schedule:
    """Tasks in issue order; an invalid order raises ScheduleError, which shows the lanes.

    Examples:
        >>> plan = raymoe.find_plan(model, node)
        >>> schedule = plan.steps.schedule(plan.decode_load)
        >>> schedule.name, schedule.tasks[0].op.value, schedule.tasks[-1].op.value
        ('in_place', 'embed', 'head')
    """

    name: str  # the builder's name, such as "in_place"
    tasks: tuple[Task, ...]  # in issue order; each (op, layer, part) at most once
    inputs: frozenset[Buffer] = frozenset()  # buffers that hold data before the first task

    def __post_init__(self) -> None:
        check_tasks(self.name, self.tasks, self.inputs)

    @cached_property
    def dependencies(self) -> tuple[tuple[int, ...], ...]:
        """For each task, the indices of the tasks it waits for.

        A task waits for the last writer of what it reads, and for the last writer and all later
        readers of what it writes. Lanes run their tasks in issue order and dependencies point
        backwards, so in-order lanes cannot deadlock.
        """
        return _derive(self.tasks)

    @property
    def resources(self) -> tuple[Resource, ...]:
        used = {task.resource for task in self.tasks}
        return tuple(resource for resource in Resource if resource in used)

    def __str__(self) -> str:
        width = max((len(resource) for resource in self.resources), default=0)
        return "\n".join(
            f"{resource:<{width}}: "
            + " ".join(str(task) for task in self.tasks if task.resource is resource)
            for resource in self.resources
        )


def _derive(tasks: Sequence[Task]) -> tuple[tuple[int, ...], ...]:
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    dependencies: list[tuple[int, ...]] = []
    for index, task in enumerate(tasks):
        waits = {writer.get(buffer, index) for buffer in (*task.reads, *task.writes)}
        for buffer in task.writes:
            waits.update(readers.pop(buffer, ()))
        for buffer in task.reads:
            readers.setdefault(buffer, []).append(index)
        for buffer in task.writes:
            writer[buffer] = index
        waits.discard(index)
        dependencies.append(tuple(sorted(waits)))
    return tuple(dependencies)


SHOWN_TASKS = 4  # per lane, in the excerpt of an error
SHOWN_BUFFERS = 6


def check_tasks(name: str, tasks: Sequence[Task], inputs: Iterable[Buffer]) -> None:
    """Raise ScheduleError as `Schedule` does, with what was issued on every lane before."""
    known = set(inputs)
    seen: set[tuple[Op, int, int]] = set()
    for index, task in enumerate(tasks):
        if task.resource not in RESOURCES_OF[task.op]:
            lanes = " or ".join(sorted(RESOURCES_OF[task.op]))
            what = f"cannot run there; {task.op} runs on {lanes}"
            raise _violation(name, tasks, index, what)
        if (task.op, task.layer, task.part) in seen:
            raise _violation(name, tasks, index, "occurs twice")
        seen.add((task.op, task.layer, task.part))
        for buffer in task.reads:
            if buffer not in known:
                hint = _hint(buffer, tasks[index + 1 :], known)
                what = (
                    f"reads {buffer}, which no earlier task writes and which is not an input; "
                    f"{hint}"
                )
                raise _violation(name, tasks, index, what)
        known.update(task.writes)


def _violation(name: str, tasks: Sequence[Task], index: int, what: str) -> ScheduleError:
    task = tasks[index]
    return ScheduleError(
        f"schedule {name!r}: task {task} on lane {task.resource} {what}\n"
        f"issued until then (task {index + 1} of {len(tasks)} is marked):\n"
        + "\n".join(_excerpt(tasks, index))
    )


def _excerpt(tasks: Sequence[Task], index: int) -> list[str]:
    lines = []
    for resource in Resource:
        issued = [place for place in range(index + 1) if tasks[place].resource is resource]
        if issued:
            dots = ["..."] if len(issued) > SHOWN_TASKS else []
            names = [
                f">{tasks[place]}<" if place == index else str(tasks[place])
                for place in issued[-SHOWN_TASKS:]
            ]
            lines.append(f"  {resource}: {' '.join(dots + names)}")
    return lines


def _hint(buffer: Buffer, later: Sequence[Task], known: Iterable[Buffer]) -> str:
    for task in later:
        if buffer in task.writes:
            return f"{task} on lane {task.resource} writes it, but is issued later"
    duplicates = sorted(other.key for other in known if other.name == buffer.name)
    if not duplicates:
        return f"no buffer is called {buffer.name!r} so far"
    shown = ", ".join(str(Buffer(buffer.name, key)) for key in duplicates[:SHOWN_BUFFERS])
    return f"so far there is {shown}" + (", ..." if len(duplicates) > SHOWN_BUFFERS else "")
