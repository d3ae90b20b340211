"""Random schedules whose tasks leave a fingerprint of all that they read in all that they write."""

import random
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from raymoe.runtime.executor import Bindings, Executor
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task

OP_OF = {
    Resource.GPU: Op.POST,
    Resource.CPU: Op.ATTN,
    Resource.HTOD: Op.W,
    Resource.DTOH: Op.QKV,
    Resource.HOST_COPY: Op.STAGE,
}
POISON = 0xDEAD


@dataclass
class Memory:
    """What the buffers hold, and what each task made of what it read."""

    buffers: dict[Buffer, int]
    results: dict[str, int] = field(default_factory=dict)


Pause = Callable[[Task], None]


def random_schedule(seed: int, *, num_tasks: int = 24, num_buffers: int = 6) -> Schedule:
    """Random tasks on all five lanes over few buffers, so that they get in each other's way."""
    dice = random.Random(seed)
    buffers = [Buffer("buffer", (number,)) for number in range(num_buffers)]
    tasks = []
    for index in range(num_tasks):
        resource = dice.choice(list(Resource))
        reads = dice.sample(buffers, dice.randint(0, 2))
        writes = dice.sample(buffers, dice.randint(1, 2))
        tasks.append(
            Task(
                op=OP_OF[resource],
                layer=index,
                part=0,
                resource=resource,
                reads=tuple(reads),
                writes=tuple(writes),
            )
        )
    return Schedule(f"random {seed}", tuple(tasks), frozenset(buffers))


def new_memory(schedule: Schedule) -> Memory:
    return Memory({buffer: digest(buffer) for buffer in schedule.inputs})


def digest(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def work(task: Task, memory: Memory, pause: Pause = lambda _task: None) -> None:
    """Read, wait a little, write: whoever interferes in between spoils a fingerprint."""
    result = digest(str(task), [memory.buffers[buffer] for buffer in task.reads])
    pause(task)
    memory.results[str(task)] = result
    for buffer in task.writes:
        memory.buffers[buffer] = digest(result, buffer)


def bindings(pause: Pause = lambda _task: None) -> Bindings[Memory]:
    return dict.fromkeys(Op, lambda task, memory: work(task, memory, pause))


def serial_result(schedule: Schedule) -> Memory:
    memory = new_memory(schedule)
    Executor(schedule, bindings()).run(memory)
    return memory


class Pauses:
    """Blocks some tasks between reading and writing for a random moment."""

    def __init__(self, seed: int, *, probability: float = 0.3, longest_s: float = 5e-4) -> None:
        self._dice = random.Random(seed)
        self._probability = probability
        self._longest_s = longest_s

    def __call__(self, task: Task) -> None:
        if self._dice.random() < self._probability:
            threading.Event().wait(self._dice.random() * self._longest_s)


def without(schedule: Schedule, before: int, after: int) -> Schedule:
    """The same schedule where task `after` no longer waits for task `before`."""
    copy = Schedule(schedule.name, schedule.tasks, schedule.inputs)
    dependencies = [
        tuple(wait for wait in waits if (wait, index) != (before, after))
        for index, waits in enumerate(schedule.dependencies)
    ]
    vars(copy)["dependencies"] = tuple(dependencies)
    return copy


def ancestors(schedule: Schedule, index: int) -> set[int]:
    """All tasks that must end before task `index` starts, the order of lanes included."""
    found: set[int] = set()
    todo = [index]
    while todo:
        later = todo.pop()
        resource = schedule.tasks[later].resource
        in_lane = [k for k in range(later) if schedule.tasks[k].resource is resource][-1:]
        for earlier in (*schedule.dependencies[later], *in_lane):
            if earlier not in found:
                found.add(earlier)
                todo.append(earlier)
    return found


@dataclass(frozen=True)
class Edge:
    """Task `after` waits for task `before`, for the reasons `kinds`: "raw", "waw", "war"."""

    before: int
    after: int
    kinds: frozenset[str]
    is_visible: bool  # someone reads what `after` writes, or it is what remains at the end


def edges(schedule: Schedule) -> list[Edge]:
    """Every wait of a schedule and its reasons, from the buffers, not from `dependencies`."""
    kinds: dict[tuple[int, int], set[str]] = {}
    visible: set[tuple[int, int]] = set()
    for buffer in schedule.inputs:
        writer: int | None = None
        readers: list[int] = []
        for index, task in enumerate(schedule.tasks):
            if buffer in task.reads:
                if writer is not None:
                    kinds.setdefault((writer, index), set()).add("raw")
                readers.append(index)
            if buffer in task.writes:
                for reader in readers:
                    kinds.setdefault((reader, index), set()).add("war")
                if writer is not None:
                    kinds.setdefault((writer, index), set()).add("waw")
                    if _is_seen(schedule, buffer, index):
                        visible.add((writer, index))
                writer, readers = index, []
    return [
        Edge(before, after, frozenset(names), (before, after) in visible)
        for (before, after), names in kinds.items()
        if before != after
    ]


def _is_seen(schedule: Schedule, buffer: Buffer, index: int) -> bool:
    for task in schedule.tasks[index + 1 :]:
        if buffer in task.reads:
            return True
        if buffer in task.writes:
            return False
    return True


def inverted_order(schedule: Schedule, edge: Edge) -> list[int]:
    """Task `after` as early as the remaining waits allow, task `before` right behind it."""
    cut = without(schedule, edge.before, edge.after)
    first = ancestors(cut, edge.before) | ancestors(cut, edge.after)
    head = [*sorted(first), edge.after, edge.before]
    return [*head, *sorted(set(range(len(schedule.tasks))) - set(head))]


def random_order(schedule: Schedule, dice: random.Random) -> list[int]:
    """Any order that the dependencies and the order of the lanes allow."""
    lanes = [
        [index for index, task in enumerate(schedule.tasks) if task.resource is resource]
        for resource in schedule.resources
    ]
    order: list[int] = []
    while any(lanes):
        ready = [lane for lane in lanes if lane and _is_ready(schedule, lane[0], order)]
        order.append(dice.choice(ready).pop(0))
    return order


def _is_ready(schedule: Schedule, index: int, done: Iterable[int]) -> bool:
    return set(schedule.dependencies[index]) <= set(done)
