"""The text form of buffers and tasks: one line a task, `op[layer,part] lane: reads -> writes`."""

import re
from collections.abc import Iterable

from raymoe.errors import ScheduleError
from raymoe.schedule.task import Buffer, Op, Resource, Task

_BUFFER = re.compile(r"([A-Za-z_]\w*)(?:\[(\d+(?:,\d+)*)\])?")
_TASK = re.compile(r"(\w+)\[(\d+),(\d+)\] (\w+):(.*)->(.*)")


def format_buffers(buffers: Iterable[Buffer]) -> str:
    """Buffers with a space between them."""
    return " ".join(map(str, buffers))


def format_task(task: Task) -> str:
    """A task with what it reads and writes, such as `qkv[0,1] dtoh: qkv[1] -> host_qkv[1]`."""
    reads = f" {format_buffers(task.reads)}" if task.reads else ""
    writes = f" {format_buffers(task.writes)}" if task.writes else ""
    return f"{task} {task.resource}:{reads} ->{writes}"


def parse_buffers(text: str) -> tuple[Buffer, ...]:
    """The reverse of `format_buffers`.

    Raises:
        ScheduleError: A word is not a buffer.
    """
    return tuple(_parse_buffer(word) for word in text.split())


def parse_task(text: str) -> Task:
    """The reverse of `format_task`.

    Raises:
        ScheduleError: The line has another form, or an operation or a lane does not exist.
    """
    match = _TASK.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"{text!r} is not a task; expected 'op[layer,part] lane: reads -> writes'"
        )
    op, layer, part, resource, reads, writes = match.groups()
    if op not in list(Op):
        raise ScheduleError(f"{text!r}: no operation is called {op!r}; known: {', '.join(Op)}")
    if resource not in list(Resource):
        known = ", ".join(Resource)
        raise ScheduleError(f"{text!r}: no lane is called {resource!r}; known: {known}")
    return Task(
        op=Op(op),
        layer=int(layer),
        part=int(part),
        resource=Resource(resource),
        reads=parse_buffers(reads),
        writes=parse_buffers(writes),
    )


def _parse_buffer(word: str) -> Buffer:
    match = _BUFFER.fullmatch(word)
    if match is None:
        raise ScheduleError(f"{word!r} is not a buffer; expected 'name' or 'name[1,2]'")
    name, key = match.groups()
    return Buffer(name, tuple(map(int, key.split(","))) if key else ())
