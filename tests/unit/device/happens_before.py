"""Finds accesses to memory that nothing orders, by vector clocks of streams and host threads.

Every access must happen after the last write of the same memory, and a write after all reads: by
events, marks, queues, synchronisations or thread starts. Only the order that the program asked for
counts, not when things were done. A `Trace` notes what was done; `find_hazards` judges it, also as
if the program had not asked for some of its waits.

Source: Mattern, "Virtual time and global states of distributed systems", 1989; Flanagan and Freund,
"FastTrack: efficient and precise dynamic race detection", PLDI 2009.
"""

import threading
import weakref
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.schedule.graph import Task

GRAIN = 4  # bytes: accesses to different ones do not meet


@dataclass(eq=False, slots=True)
class Agent:
    """A stream or a host thread.

    Attributes:
        role: What it is called in kinds of waits, outside of tasks; its name by default.
        task: What a thread works on; None outside of tasks.
        submitting: The task that a thread is about to give to a lane.
        order: Stands for the order of what a stream was given: a thread that issues writes it.
    """

    name: str
    role: str = ""
    task: Task | None = None
    submitting: Task | None = None
    order: "Region | None" = None

    @property
    def label(self) -> str:
        return (self.role or self.name) if self.task is None else str(self.task.op)


@dataclass(eq=False, slots=True, frozen=True)
class Stamp:
    """A moment of an agent, for which others may wait."""

    agent: Agent
    label: str


class Wait(NamedTuple):
    """A kind of wait: operations of tasks, or what it is outside of tasks."""

    waited: str
    waiting: str


@dataclass(eq=False, slots=True)
class Region:
    """Memory that is allocated and freed in one piece.

    Attributes:
        home: The stream in whose order a device's memory is used again; None on the host.
    """

    begin: int
    end: int
    name: str
    home: Agent | None
    storage: weakref.ref[torch.UntypedStorage] | None = None
    is_freed: bool = False


class Span(NamedTuple):
    """Some grains of a region."""

    region: Region
    grains: slice

    @classmethod
    def of(cls, region: Region, begin: int, end: int) -> "Span":
        first = region.begin
        return cls(region, slice((begin - first) // GRAIN, -(-(end - first) // GRAIN)))


class Stamped(NamedTuple):
    stamp: Stamp


class Waited(NamedTuple):
    """What an agent does next comes after a moment."""

    agent: Agent
    stamp: Stamp
    kind: Wait


class Issued(NamedTuple):
    """What a stream does next comes after what a thread has done."""

    stream: Agent
    access: "Access"


class Access(NamedTuple):
    agent: Agent
    task: Task | None
    operation: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()

    def __str__(self) -> str:
        task = "" if self.task is None else f" of {self.task}"
        return f"{self.operation}{task} on {self.agent.name}"

    @property
    def label(self) -> str:
        return self.operation if self.task is None else str(self.task.op)


class Freed(NamedTuple):
    region: Region
    access: Access


def _order_of(stream: Agent) -> Span:
    if stream.order is None:
        stream.order = Region(0, GRAIN, "the order of work", None)
    return Span(stream.order, slice(0, 1))


Event = Stamped | Waited | Issued | Access | Freed


class Trace:
    """What agents did, in the order in which it was done. Thread-safe."""

    def __init__(self, current: Callable[[], Agent]) -> None:
        """`current` returns the agent of the calling thread."""
        self.events: list[Event | None] = [None]  # so that 0 is no place of an event
        self.lock = threading.RLock()
        self._current = current
        self._is_over = False
        self._regions: dict[int, Region] = {}
        self._begins: list[int] = []

    def end(self) -> None:
        """Note nothing any more: memory may be freed later, by anyone."""
        self._is_over = True

    def stamp(self, agent: Agent, label: str | None = None) -> Stamp:
        stamp = Stamp(agent, label or agent.label)
        self.events.append(Stamped(stamp))
        return stamp

    def wait(self, agent: Agent, stamp: Stamp, waiting: str | None = None) -> None:
        """Let an agent go on only after a moment.

        Args:
            waiting: Who asked for it; the agent itself by default.
        """
        self.events.append(Waited(agent, stamp, Wait(stamp.label, waiting or agent.label)))

    def issue(self, stream: Agent) -> None:
        """Give a stream something to do, from the calling thread."""
        thread = self._current()
        access = Access(thread, thread.task, "issue", (), (_order_of(stream),))
        self.events.append(Issued(stream, access))

    def synchronize(self, stream: Agent) -> None:
        """Let the calling thread go on only after what it knows that a stream was given."""
        with self.lock:
            thread = self._current()
            order = (_order_of(stream),)
            self.events.append(Access(thread, thread.task, "synchronize", order))
            self.wait(thread, self.stamp(stream))

    def access(
        self, agent: Agent, operation: str, reads: Iterable[Span], writes: Iterable[Span]
    ) -> None:
        """Note what an agent does next, for the task of the calling thread."""
        task = self._current().task
        self.events.append(Access(agent, task, operation, tuple(reads), tuple(writes)))

    def waits(self) -> Counter[Wait]:
        """How often the program waited, by kind."""
        return Counter(event.kind for event in self.events if isinstance(event, Waited))

    def place(self, tensor: Tensor, name: str, home: Agent | None) -> Region:
        """Name the whole memory of a tensor, until it is freed."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        with self.lock:
            region = Region(begin, begin + storage.nbytes(), name, home)
            region.storage = weakref.ref(storage, lambda _: self._on_freed(region))
            self._forget_freed(region)
            if begin not in self._regions:
                insort(self._begins, begin)
            self._regions[begin] = region
            return region

    def region_of(self, tensor: Tensor) -> Region:
        """The memory of a tensor with elements; what nobody has named is the host's."""
        storage = tensor.untyped_storage()
        with self.lock:
            region = self._regions.get(storage.data_ptr())
            if region is None or region.is_freed or region.end < region.begin + storage.nbytes():
                return self.place(tensor, "host memory", None)
            return region

    def span_of(self, tensor: Tensor) -> Span:
        """From the first element of a tensor to its last."""
        steps = (
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        begin, num_bytes = tensor.data_ptr(), (1 + sum(steps)) * tensor.element_size()
        return Span.of(self.region_of(tensor), begin, begin + num_bytes)

    def span_at(self, address: int, num_bytes: int) -> Span:
        """Memory of some tensor, which may be gone."""
        end = address + num_bytes
        with self.lock:
            for begin in reversed(self._begins[: bisect_right(self._begins, address)]):
                if end <= self._regions[begin].end:
                    return Span.of(self._regions[begin], address, end)
        raise AssertionError(f"nobody knows the {num_bytes} bytes at {address:#x}")

    def _on_freed(self, region: Region) -> None:
        # In whatever thread lets go of the memory, in the midst of anything.
        region.is_freed = True
        if not self._is_over:
            agent = self._current()
            self.events.append(Freed(region, Access(agent, agent.task, "free")))

    def _forget_freed(self, new: Region) -> None:
        """Forget memory of which some is used again."""
        for place in range(bisect_right(self._begins, new.end - 1) - 1, -1, -1):
            region = self._regions[self._begins[place]]
            if region.end <= new.begin:
                break
            if region.is_freed:
                del self._regions[self._begins.pop(place)]


class Hazard(NamedTuple):
    """Two accesses that nothing orders; the second was made later."""

    kind: str
    memory: str
    first: Access
    second: Access

    def __str__(self) -> str:
        return f"{self.kind} in {self.memory}: {self.second}, and before it {self.first}"

    @property
    def labels(self) -> tuple[str, str]:
        """Operations of the tasks, or what was done outside of tasks."""
        return self.first.label, self.second.label


def asked_for(_wait: Wait) -> bool:
    return False


def find_hazards(trace: Trace, overlooks: Callable[[Wait], bool] = asked_for) -> list[Hazard]:
    """Return one hazard of each kind, in the order in which they were met.

    Args:
        overlooks: Whether waits of a kind count as if the program had not asked for them.
    """
    judge = _Judge(trace.events, overlooks)
    for place, event in enumerate(trace.events):
        judge.judge(place, event)
    return list(judge.hazards.values())


Clock = dict[Agent, int]
Places = npt.NDArray[np.int32]


@dataclass(eq=False)
class _Shadow:
    """Of each grain, the place of the last write, and of the last read of each agent since."""

    num_grains: int
    written: Places = field(init=False)
    read: dict[Agent, Places] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.written = np.zeros(self.num_grains, np.int32)

    def read_by(self, agent: Agent) -> Places:
        if agent not in self.read:
            self.read[agent] = np.zeros(self.num_grains, np.int32)
        return self.read[agent]


class _Judge:
    """A clock tells of each agent the last event that comes before what its owner does next."""

    def __init__(self, events: list[Event | None], overlooks: Callable[[Wait], bool]) -> None:
        self.hazards: dict[tuple[object, ...], Hazard] = {}
        self._events, self._overlooks = events, overlooks
        self._clocks: dict[Agent, Clock] = {}
        self._stamped: dict[Stamp, Clock] = {}
        self._memory: dict[Region, _Shadow] = {}
        self._freed: dict[Region, Access] = {}

    def judge(self, place: int, event: Event | None) -> None:
        match event:
            case Stamped(stamp):
                self._stamped[stamp] = dict(self._clock(stamp.agent))
            case Waited(agent, stamp, kind):
                if not self._overlooks(kind):
                    _learn(self._clock(agent), self._stamped[stamp])
            case Issued(stream, access):
                self._access(place, access)
                _learn(self._clock(stream), self._clock(access.agent))
            case Freed(region, access):
                self._free(region, access)
            case Access():
                self._access(place, event)

    def _clock(self, agent: Agent) -> Clock:
        return self._clocks.setdefault(agent, {})

    def _shadow(self, region: Region) -> _Shadow:
        if region not in self._memory:
            self._memory[region] = _Shadow(-(-(region.end - region.begin) // GRAIN))
        return self._memory[region]

    def _access(self, place: int, access: Access) -> None:
        clock = self._clock(access.agent)
        clock[access.agent] = place
        for region, _ in (*access.reads, *access.writes):
            if region in self._freed:
                self._report("use after free", region, self._freed[region], access)
        for region, grains in access.reads:
            shadow = self._shadow(region)
            self._check("read after write", region, shadow.written[grains], clock, access)
            shadow.read_by(access.agent)[grains] = place
        for region, grains in access.writes:
            shadow = self._shadow(region)
            self._check_write(Span(region, grains), clock, access)
            shadow.written[grains] = place
            for read in shadow.read.values():
                read[grains] = 0

    def _check_write(self, span: Span, clock: Clock, access: Access) -> None:
        region, grains = span
        shadow = self._shadow(region)
        self._check("write after write", region, shadow.written[grains], clock, access)
        for read in shadow.read.values():
            self._check("write after read", region, read[grains], clock, access)

    def _free(self, region: Region, access: Access) -> None:
        """Whoever gets the memory next writes to it, in the order of the stream that owned it."""
        clock = dict(self._clock(access.agent))
        if region.home is not None:
            _learn(clock, self._clock(region.home))
        self._check_write(Span(region, slice(None)), clock, access)
        self._memory.pop(region, None)
        self._freed[region] = access

    def _check(
        self, kind: str, region: Region, places: Places, clock: Clock, access: Access
    ) -> None:
        if not len(places):
            return
        is_same = (places == places[0]).all()
        for place in places[:1] if is_same else np.unique(places):
            event = self._events[place]
            before = event.access if isinstance(event, Issued) else event
            if isinstance(before, Access) and clock.get(before.agent, 0) < place:
                self._report(kind, region, before, access)

    def _report(self, kind: str, region: Region, before: Access, access: Access) -> None:
        key = kind, region.name, before.agent, before.label, access.agent, access.label
        self.hazards.setdefault(key, Hazard(kind, region.name, before, access))


def _learn(clock: Clock, other: Clock) -> None:
    for agent, place in other.items():
        if place > clock.get(agent, 0):
            clock[agent] = place
