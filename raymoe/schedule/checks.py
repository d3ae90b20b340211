"""Refuse a list of tasks that is no schedule, and show where it goes wrong."""

from collections.abc import Iterable, Sequence

from raymoe.errors import ScheduleError
from raymoe.schedule.task import RESOURCES_OF, Buffer, Op, Resource, Task

SHOWN_TASKS = 4  # of each lane, in the excerpt of an error
SHOWN_BUFFERS = 6


def check_tasks(name: str, tasks: Sequence[Task], inputs: Iterable[Buffer]) -> None:
    """Check the tasks of the schedule `name`, in issue order.

    Raises:
        ScheduleError: A task is on a lane that cannot run its operation, occurs twice, or reads a
            buffer that nobody wrote before. Shows what was issued on every lane until then.
    """
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
    alike = sorted(other.key for other in known if other.name == buffer.name)
    if not alike:
        return f"no buffer is called {buffer.name!r} so far"
    shown = ", ".join(str(Buffer(buffer.name, key)) for key in alike[:SHOWN_BUFFERS])
    return f"so far there is {shown}" + (", ..." if len(alike) > SHOWN_BUFFERS else "")
