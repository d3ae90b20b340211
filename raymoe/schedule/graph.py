"""Schedule: tasks in issue order, with dependencies derived from the buffers they name."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from raymoe.errors import ScheduleError
from raymoe.schedule.checks import check_tasks
from raymoe.schedule.task import Buffer, Resource, Task
from raymoe.schedule.text import format_buffers, format_task, parse_buffers, parse_task


@dataclass(frozen=True)
class Schedule:
    """Tasks in issue order, and what each waits for.

    Attributes:
        name: The builder's name, such as "in_place".
        tasks: In issue order; each (op, layer, part) at most once.
        inputs: Buffers that hold data before the first task.

    Raises:
        ScheduleError: A task occurs twice, is on a lane that cannot run it, or reads a buffer
            that nobody wrote; shows the lanes.
    """

    name: str
    tasks: tuple[Task, ...]
    inputs: frozenset[Buffer] = frozenset()

    def __post_init__(self) -> None:
        check_tasks(self.name, self.tasks, self.inputs)

    @cached_property
    def dependencies(self) -> tuple[tuple[int, ...], ...]:
        """Of each task the indices of those that it waits for.

        A task waits for the last writer of what it reads, and for the last writer and all later
        readers of what it writes. Lanes run their tasks in issue order and dependencies point
        backwards, so in-order lanes cannot deadlock.
        """
        return _derive(self.tasks)

    @classmethod
    def from_text(cls, text: str) -> "Schedule":
        """Read the form that `to_text` writes; blank lines are skipped.

        Raises:
            ScheduleError: A line cannot be read, with its number; or the tasks are no schedule.
        """
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        name, inputs = _parse_header([line for _, line in lines[:2]])
        return cls(name, tuple(_parse_line(*line) for line in lines[2:]), inputs)

    def to_text(self) -> str:
        """The whole schedule: its name, its inputs, and one line a task in issue order."""
        inputs = sorted(self.inputs, key=lambda buffer: (buffer.name, buffer.key))
        lines = [f"schedule {self.name}", f"inputs {format_buffers(inputs)}".strip()]
        return "\n".join([*lines, *map(format_task, self.tasks)]) + "\n"

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


def _parse_header(lines: Sequence[str]) -> tuple[str, frozenset[Buffer]]:
    words = [line.split(maxsplit=1) for line in lines]
    if [line[0] for line in words] != ["schedule", "inputs"] or len(words[0]) < 2:
        raise ScheduleError(
            "the text of a schedule begins with a line 'schedule NAME' and a line 'inputs BUFFERS'"
        )
    return words[0][1].strip(), frozenset(parse_buffers(" ".join(words[1][1:])))


def _parse_line(number: int, line: str) -> Task:
    try:
        return parse_task(line)
    except ScheduleError as error:
        raise ScheduleError(f"line {number}: {error}") from error
