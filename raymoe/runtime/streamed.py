"""Where weights stream: which schedule a step gets, and which slot is filled between steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from raymoe.device.device import Device
from raymoe.device.lane import Mark
from raymoe.model.decoder import Decoder
from raymoe.runtime.batch import InputBatch
from raymoe.runtime.executor import Executor, Run
from raymoe.runtime.micro_batches import CutBatch, Division, cut_batch
from raymoe.runtime.operations import StreamedMemory, StreamedState
from raymoe.runtime.runner import BeforeStep
from raymoe.schedule.builders import load_first_layer, load_second_layer
from raymoe.schedule.graph import Op, Schedule, Task
from raymoe.schedule.program import Load, StepForm, loads_of_first_layer, next_first_slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedules:
    """How steps are ordered.

    Attributes:
        forms: Pages and number of micro-batches; the rest is set for each step. Forms differ in
            the experts that cores compute, and so in the pages that are loaded.
        build: The builder of the schedule.
        planned: The number of the form that was planned.
        choose: That of the form that suits a step best; None if it is always the planned one.
        loads_ahead: Whether the pages that a step loads first may come before it begins.
    """

    forms: tuple[StepForm, ...]
    build: Callable[[StepForm], Schedule]
    division: Division
    planned: int
    choose: Callable[[CutBatch], int] | None
    loads_ahead: bool


Page = tuple[int, int, int]  # layer, page, slot
# Number of the form, whether host and device attend, the slot of the first streamed layer.
Key = tuple[int, bool, bool, int]


def _page(task: Task) -> Page:
    slot, _ = task.writes[0].key
    return task.layer, task.part, slot


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A form with its executor.

    Attributes:
        finds: What must be loaded when the step begins.
        leaves: What it has loaded for the next one, whose first slot is `next_first_slot`.
    """

    form: StepForm
    executor: Executor[StreamedState]
    finds: frozenset[Load]
    leaves: frozenset[Load]
    next_first_slot: int


class Streamed:
    """A model whose weights stream to a device, micro-batch by micro-batch.

    Between steps it keeps which slot is filled, and pages on their way.
    """

    def __init__(
        self,
        memory: StreamedMemory,
        schedules: Schedules,
        device: Device,
        before_step: BeforeStep | None = None,
    ) -> None:
        """Run nothing yet.

        Args:
            device: On whose lanes steps run.
            before_step: Called with each step, its schedule and the number of its form before it
                runs.
        """
        self._memory, self._schedules, self._device = memory, schedules, device
        self._bindings, self._before_step = memory.bindings, before_step
        self._prepared: dict[Key, _Prepared] = {}
        self._first_slot = 0
        self._loaded: frozenset[Load] = frozenset()  # of the first streamed layer
        self._second: dict[Key, tuple[Executor[StreamedState], dict[Page, int]]] = {}
        self._ahead: dict[Page, Mark] = {}  # pages of the second layer, on their way

    @property
    def decoder(self) -> Decoder:
        """The model, for what is in no layer."""
        return self._memory.decoders[0]

    def begin(self, batch: InputBatch) -> tuple[Tensor, Run[StreamedState]]:
        """Run a step until its hidden rows are there; pages for the next one may be on their way.

        Raises:
            CapacityError: A micro-batch is larger than its buffers.
            ExecutionError: A task failed.
        """
        cut = self._cut(batch)
        key = self._key(cut)
        prepared = self._of(key)
        state = self._memory.prepare(cut, prepared.form)
        self._device.synchronize()
        if self._before_step is not None:
            self._before_step(cut, prepared.executor.schedule, key[0])
        if not self._loaded >= prepared.finds:
            # At the beginning, or after a step in which the cores computed more.
            self._executor(load_first_layer(prepared.form)).run(state)
        run = prepared.executor.start(state, self._started(key), until=Op.HEAD)
        self._first_slot, self._loaded = prepared.next_first_slot, prepared.leaves
        try:
            if self._schedules.loads_ahead:
                self._load_ahead((*key[:3], self._first_slot), state)
        except BaseException:
            run.cancel()
            raise
        assert state.wanted_RH is not None
        return state.wanted_RH, run

    def _cut(self, batch: InputBatch) -> CutBatch:
        schedules = self._schedules
        return cut_batch(batch, schedules.forms[0].num_micro_batches, schedules.division)

    def _key(self, cut: CutBatch) -> Key:
        choose, number = self._schedules.choose, self._schedules.planned
        if choose is not None:
            number = choose(cut)
        return number, cut.has_cpu_attention, cut.has_device_attention, self._first_slot

    def _of(self, key: Key) -> _Prepared:
        if key not in self._prepared:
            number, has_cpu_attention, has_device_attention, first_slot = key
            form = replace(
                self._schedules.forms[number],
                has_cpu_attention=has_cpu_attention,
                has_device_attention=has_device_attention,
                first_slot=first_slot,
            )
            following = replace(form, first_slot=next_first_slot(form))
            self._prepared[key] = _Prepared(
                form,
                self._executor(self._schedules.build(form)),
                frozenset(loads_of_first_layer(form)),
                frozenset(loads_of_first_layer(following)),
                following.first_slot,
            )
        return self._prepared[key]

    def _executor(self, schedule: Schedule) -> Executor[StreamedState]:
        return Executor(
            schedule,
            self._bindings,
            self._device.lanes,
            on_dead=self._memory.on_dead,
            traffic=self._device.traffic,
        )

    def _load_ahead(self, following: Key, state: StreamedState) -> None:
        """Let the link go on with the next step while the host chooses tokens and prepares it.

        The slot of its second layer is free once there are hidden rows.
        """
        executor, places = self._loads_of_second_layer(following)
        self._ahead = dict(zip(places, executor.start(state).marks, strict=True))

    def _started(self, key: Key) -> dict[int, Mark]:
        """What of a step is on its way, by its place in the schedule."""
        ahead, self._ahead = self._ahead, {}
        if not ahead:
            return {}
        _, places = self._loads_of_second_layer(key)
        is_ahead = [page in ahead for page in places]
        if is_ahead != sorted(is_ahead, reverse=True):
            # The cores compute fewer experts than in the step before, and pages between those that
            # are on their way are missing. Readers wait for the last of their pages only.
            for mark in ahead.values():
                mark.wait()
            return {}
        return {index: ahead[page] for page, index in places.items() if page in ahead}

    def _loads_of_second_layer(self, key: Key) -> tuple[Executor[StreamedState], dict[Page, int]]:
        """What loads it alone, and the place of each page in the schedule of a step."""
        if key not in self._second:
            prepared = self._of(key)
            schedule, alone = prepared.executor.schedule, load_second_layer(prepared.form)
            places = [i for i, task in enumerate(schedule.tasks) if task.op is Op.W]
            pages = {_page(schedule.tasks[i]): i for i in places[: len(alone.tasks)]}
            assert list(pages) == list(map(_page, alone.tasks)), "a step loads other pages first"
            self._second[key] = self._executor(alone), pages
        return self._second[key]
