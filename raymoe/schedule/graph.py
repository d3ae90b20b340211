"""Schedule: tasks in issue order, with dependencies derived from the buffers they name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raymoe.errors import ScheduleError
from raymoe.schedule.task import Buffer, Resource, Task


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tasks in issue order; `dependencies[j]` are the indices of the tasks that task j waits for.

    A task waits for the last writer of what it reads, and for the last writer and all later
    readers of what it writes. Lanes run their tasks in issue order and dependencies point
    backwards, so in-order lanes cannot deadlock.

    Attributes:
        name: The builder's name, such as "in_place".
        tasks: In issue order; each (op, layer, part) at most once.
        inputs: Buffers that hold data before the first task.
        dependencies: Derived; do not pass them.

    Raises:
        ScheduleError: A task occurs twice or reads a buffer that nobody wrote.
    """

    name: str
    tasks: tuple[Task, ...]
    inputs: frozenset[Buffer] = frozenset()
    dependencies: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_unique(self.name, self.tasks)
        object.__setattr__(self, "dependencies", _derive(self.name, self.tasks, self.inputs))

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The resources in use, in the order of the enumeration."""
        used = {task.resource for task in self.tasks}
        return tuple(resource for resource in Resource if resource in used)

    def __str__(self) -> str:
        width = max((len(resource) for resource in self.resources), default=0)
        return "\n".join(
            f"{resource:<{width}}: "
            + " ".join(str(task) for task in self.tasks if task.resource is resource)
            for resource in self.resources
        )


def _check_unique(name: str, tasks: Sequence[Task]) -> None:
    seen: set[str] = set()
    for task in tasks:
        if str(task) in seen:
            raise ScheduleError(f"schedule {name!r}: task {task} occurs twice")
        seen.add(str(task))


def _derive(
    name: str, tasks: Sequence[Task], inputs: Iterable[Buffer]
) -> tuple[tuple[int, ...], ...]:
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    known = set(inputs)
    dependencies: list[tuple[int, ...]] = []
    for index, task in enumerate(tasks):
        waits: set[int] = set()
        for buffer in task.reads:
            if buffer not in known:
                raise ScheduleError(
                    f"schedule {name!r}: task {task} on lane {task.resource} reads {buffer}, "
                    "which no earlier task writes and which is not an input"
                )
            if buffer in writer:
                waits.add(writer[buffer])
        for buffer in task.writes:
            waits.update(readers.pop(buffer, ()))
            if buffer in writer:
                waits.add(writer[buffer])
        for buffer in task.reads:
            readers.setdefault(buffer, []).append(index)
        for buffer in task.writes:
            writer[buffer] = index
            known.add(buffer)
        dependencies.append(tuple(sorted(waits - {index})))
    return tuple(dependencies)
