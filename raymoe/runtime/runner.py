"""StepRunner: one step of tokens through all layers, by a schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from raymoe.device.device import Device
from raymoe.device.lane import Mark
from raymoe.errors import CapacityError
from raymoe.kernels.paged_kv import CacheLayout, largest_layout
from raymoe.memory.kv_cache import KvCache, copy_states
from raymoe.model.decoder import Decoder, Projected, StagedStep
from raymoe.runtime.batch import InputBatch
from raymoe.runtime.bindings import (
    DeviceMemory,
    DeviceStep,
    StepRun,
    StepState,
    attention_batch,
    bind_cpu,
    bind_device,
    bind_in_place,
    poison_dead,
)
from raymoe.runtime.executor import LaneExecutor, SerialExecutor, calling
from raymoe.runtime.micro_batches import CutBatch, Division, cut_batch
from raymoe.schedule.builders import build_resident, load_first_layer, load_second_layer
from raymoe.schedule.graph import Op, Schedule, Task
from raymoe.schedule.program import Load, StepForm, loads_of_first_layer, next_first_slot


class StepRunner:
    """Runs steps of one model on the device `cpu`; holds nothing between steps."""

    def __init__(self, decoder: Decoder, cache: KvCache, schedule: Schedule) -> None:
        self._decoder, self._cache = decoder, cache
        self._executor = SerialExecutor(schedule, bind_cpu(decoder, cache))

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> StepRun:
        """Run one step."""
        self._decoder.reserve(batch.num_positions)
        self._cache.copy_states(batch.state_copies)
        attention = attention_batch(batch.sequences)
        state = StepState.of(batch, attention, self._decoder, torch.device("cpu"))
        return (yield from self._executor.stream(state))


Page = tuple[int, int, int]  # layer, page, slot


def _page(task: Task) -> Page:
    slot, _ = task.writes[0].key
    return task.layer, task.part, slot


Build = Callable[[StepForm], Schedule]
BeforeStep = Callable[[CutBatch, Schedule, int], None]
ChooseForm = Callable[[CutBatch], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How steps are ordered.

    Attributes:
        forms: Pages and number of micro-batches; the rest is set for each step. Forms differ in
            the experts that cores compute, and so in the pages that are loaded.
        build: The builder of the schedule.
        choose: The number of the form that suits a step best.
        loads_ahead: Whether the pages that a step loads first may come before it begins.
    """

    forms: tuple[StepForm, ...]
    build: Build
    division: Division
    choose: ChooseForm
    loads_ahead: bool


class DeviceStepRunner:
    """Runs steps on the lanes of one device; between steps it keeps which slot is filled."""

    def __init__(
        self,
        memory: DeviceMemory,
        steps: Steps,
        device: Device,
        *,
        before_step: BeforeStep | None = None,
    ) -> None:
        """Bind the schedules of `steps`.

        Args:
            device: On whose lanes they run.
            before_step: Called with each step, its schedule and the number of its form before it
                runs.
        """
        self._memory, self._steps, self._device = memory, steps, device
        self._bindings = bind_device(memory)
        self._on_dead = None if device.poison is None else poison_dead(device.poison)
        self._before_step = before_step
        self._executors: dict[StepForm, LaneExecutor[DeviceStep]] = {}
        self._first_slot = 0
        self._loaded: frozenset[Load] = frozenset()  # of the first streamed layer
        self._second: dict[StepForm, tuple[LaneExecutor[DeviceStep], dict[Page, int]]] = {}
        self._ahead: dict[Page, Mark] = {}  # pages of the second layer, on their way

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> StepRun:
        """Run one step.

        Raises:
            CapacityError: A micro-batch is larger than its buffers.
            ExecutionError: A task failed.
        """
        cut = self._cut(batch)
        self._check_room(cut)
        number = self._steps.choose(cut)
        form = self._form_of(cut, number)
        self._copy_states(batch.state_copies)
        state = self._state(cut, form)
        executor = self._executor(form)
        if self._before_step is not None:
            self._before_step(cut, executor.schedule, number)
        if not self._loaded.issuperset(loads_of_first_layer(form)):
            # At the beginning, or after a step in which the cores computed more.
            self._new_executor(load_first_layer(form)).run(state)
        next_form = replace(form, first_slot=next_first_slot(form))
        stream = executor.stream(state, self._started(form))
        timeline = yield from calling(stream, partial(self._load_ahead, next_form, state))
        self._first_slot = next_form.first_slot
        self._loaded = frozenset(loads_of_first_layer(next_form))
        return timeline

    def _load_ahead(self, form: StepForm, state: DeviceStep) -> None:
        """Let the link go on with the next step while the host chooses tokens and prepares it.

        The slot of its second layer is free once there are logits.
        """
        if self._steps.loads_ahead and not self._ahead:
            executor, places = self._loads_of_second_layer(form)
            self._ahead = dict(zip(places, executor.start(state), strict=True))

    def _started(self, form: StepForm) -> dict[int, Mark]:
        """What of a step is on its way, by its place in the schedule."""
        ahead, self._ahead = self._ahead, {}
        if not ahead:
            return {}
        _, places = self._loads_of_second_layer(form)
        is_ahead = [page in ahead for page in places]
        if is_ahead != sorted(is_ahead, reverse=True):
            # The cores compute fewer experts than in the step before, and pages between those that
            # are on their way are missing. Readers wait for the last of their pages only.
            for mark in ahead.values():
                mark.wait()
            return {}
        return {index: ahead[page] for page, index in places.items() if page in ahead}

    def _loads_of_second_layer(
        self, form: StepForm
    ) -> tuple[LaneExecutor[DeviceStep], dict[Page, int]]:
        """What loads it alone, and the place of each page in the schedule of a step."""
        if form not in self._second:
            schedule, alone = self._executor(form).schedule, load_second_layer(form)
            places = [i for i, task in enumerate(schedule.tasks) if task.op is Op.W]
            pages = {_page(schedule.tasks[i]): i for i in places[: len(alone.tasks)]}
            assert list(pages) == list(map(_page, alone.tasks)), "a step loads other pages first"
            self._second[form] = self._new_executor(alone), pages
        return self._second[form]

    def schedule_of(self, batch: InputBatch) -> Schedule:
        """The schedule by which `run` would run this step next."""
        cut = self._cut(batch)
        return self._executor(self._form_of(cut, self._steps.choose(cut))).schedule

    def _state(self, cut: CutBatch, form: StepForm) -> DeviceStep:
        for decoder in self._memory.decoders:
            decoder.reserve(cut.batch.num_positions)
        state = DeviceStep.of(cut, form, self._memory, self._device.torch_device)
        self._device.synchronize()
        return state

    def _copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        memory = self._memory
        memory.cache.copy_states(copies)
        copy_states(memory.states, memory.cache.layouts, copies)

    def _executor(self, form: StepForm) -> LaneExecutor[DeviceStep]:
        if form not in self._executors:
            self._executors[form] = self._new_executor(self._steps.build(form))
        return self._executors[form]

    def _cut(self, batch: InputBatch) -> CutBatch:
        return cut_batch(batch, self._steps.forms[0].num_micro_batches, self._steps.division)

    def _form_of(self, cut: CutBatch, number: int) -> StepForm:
        return replace(
            self._steps.forms[number],
            has_cpu_attention=cut.has_cpu_attention,
            has_device_attention=cut.has_device_attention,
            first_slot=self._first_slot,
        )

    def _new_executor(self, schedule: Schedule) -> LaneExecutor[DeviceStep]:
        return LaneExecutor(
            schedule,
            self._bindings,
            self._device.lanes,
            on_dead=self._on_dead,
            traffic=self._device.traffic,
        )

    def _check_room(self, cut: CutBatch) -> None:
        room = self._memory.device.ring[0].num_tokens
        if cut.max_tokens > room:
            raise CapacityError(
                f"a micro-batch has {cut.max_tokens} tokens, the device has room for {room}; "
                "reduce max_prefill_chunk_tokens or max_num_batched_tokens, or use more "
                "micro-batches"
            )


ALL_ON_DEVICE = Division(cpu_attention_fraction=0.0, staged_blocks=1 << 62)


class ResidentStepRunner:
    """Runs steps on the GPU lane of one device; only tokens and logits travel."""

    def __init__(
        self,
        decoder: Decoder,
        cache: Sequence[Tensor],
        layouts: Sequence[CacheLayout],
        device: Device,
        *,
        before_step: BeforeStep | None = None,
    ) -> None:
        """Bind the schedule.

        Args:
            decoder: Its weights are on the device.
            cache: KV blocks or states of each layer, on the device.
            device: On whose lane the steps run.
            before_step: Called with each step, as one micro-batch, and its schedule before it runs.
        """
        self._decoder, self._device = decoder, device
        self._cache, self._layouts = cache, layouts
        self._layout = largest_layout(layouts)
        self._before_step = before_step

        def attend(layer: int, projected: Projected, state: StepState) -> Tensor:
            assert isinstance(state.attention, StagedStep)
            return decoder.attend_staged(layer, projected, cache[layer], state.attention)

        self._executor = LaneExecutor(
            build_resident(decoder.spec.num_layers),
            bind_in_place(decoder, attend),
            device.lanes,
        )

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> StepRun:
        """Run one step.

        Raises:
            ExecutionError: A task failed.
        """
        self._decoder.reserve(batch.num_positions)
        copy_states(self._cache, self._layouts, batch.state_copies)
        state = self._state(batch)
        self._device.synchronize()
        if self._before_step is not None:
            cut = cut_batch(batch, 1, ALL_ON_DEVICE)
            self._before_step(cut, self._executor.schedule, 0)
        return (yield from self._executor.stream(state))

    def _state(self, batch: InputBatch) -> StepState:
        sequences, target = attention_batch(batch.sequences), self._device.torch_device
        staged = self._decoder.staged_batch(sequences, self._layout, target, with_states=sequences)
        return StepState.of(batch, staged, self._decoder, target)
