"""Lanes without threads: they collect the tasks and run them in an order given beforehand."""

from collections.abc import Mapping, Sequence

from raymoe.device.lane import Call, Mark
from raymoe.schedule.graph import Resource, Task


class OrderNotAllowed(Exception):  # noqa: N818 - as Cancelled
    """The script runs a task before a mark that the executor told it to wait for."""


class ScriptedMark:
    start_s = end_s = 0.0

    def __init__(self, script: "Script") -> None:
        self._script = script
        self.is_done = False

    def wait(self) -> None:
        self._script.play()
        if not self.is_done:
            raise OrderNotAllowed


class Script:
    """Owns the lanes; whoever waits for a mark starts the play.

    The order of submission within a lane is kept by the order that is given, as lanes promise.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._entries: list[tuple[Resource, Call, Sequence[Mark], ScriptedMark]] = []
        self._has_played = False
        self.broken: OrderNotAllowed | None = None
        self.lanes: Mapping[Resource, ScriptedLane] = {
            resource: ScriptedLane(resource, self) for resource in Resource
        }

    def submit(self, resource: Resource, call: Call, after: Sequence[Mark]) -> ScriptedMark:
        mark = ScriptedMark(self)
        self._entries.append((resource, call, after, mark))
        return mark

    def play(self) -> None:
        if self._has_played:
            return
        self._has_played = True
        for index in self._order:
            resource, call, after, mark = self._entries[index]
            before_it = [entry[3] for entry in self._entries[:index] if entry[0] is resource]
            if not all(earlier.is_done for earlier in (*after, *before_it)):
                self.broken = OrderNotAllowed(f"task {index} of {resource}")
                raise self.broken
            call()
            mark.is_done = True


class ScriptedLane:
    is_synchronous = True

    def __init__(self, resource: Resource, script: Script) -> None:
        self.resource = resource
        self._script = script

    def submit(self, task: Task, call: Call, after: Sequence[Mark]) -> ScriptedMark:
        return self._script.submit(self.resource, call, after)

    def close(self) -> None:
        """Nothing to end."""
