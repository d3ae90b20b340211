"""DevicePassRunner: passes of a model whose weights stream to a device, by any schedule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raymoe.device.lane import Lane
from raymoe.errors import CapacityError
from raymoe.runtime.bindings import PassInputs
from raymoe.runtime.device_bindings import DeviceMemory, DevicePass, bind_device, poison_dead
from raymoe.runtime.executor import LaneExecutor
from raymoe.runtime.waves import CutPass, Division, cut_pass
from raymoe.schedule.builders.first_layer import load_first_layer
from raymoe.schedule.builders.shape import PassForm, next_first_slot
from raymoe.schedule.graph import Schedule
from raymoe.schedule.task import Resource
from raymoe.schedule.timeline import Timeline

Build = Callable[[PassForm], Schedule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How passes are ordered.

    Attributes:
        form: Pages and number of waves; who attends and the first slot are set for each pass.
        build: The builder of the schedule.
        division: Who attends for what.
    """

    form: PassForm
    build: Build
    division: Division


class DevicePassRunner:
    """Runs passes on the lanes of one device; between passes it keeps which slot is filled."""

    def __init__(
        self,
        memory: DeviceMemory,
        passes: Passes,
        lanes: Mapping[Resource, Lane],
        *,
        poison: Callable[[Tensor], None] | None = None,
        before_pass: Callable[[CutPass, Schedule], None] | None = None,
    ) -> None:
        """Bind the schedules of `passes`.

        Args:
            memory: What they work on.
            passes: How they are ordered.
            lanes: Of the device.
            poison: Called with device memory as soon as nobody will read it any more.
            before_pass: Called with each pass and its schedule before it runs.
        """
        self._memory, self._passes, self._lanes = memory, passes, lanes
        self._bindings = bind_device(memory)
        self._on_dead = None if poison is None else poison_dead(poison)
        self._before_pass = before_pass
        self._schedules: dict[PassForm, Schedule] = {}
        self._executors: dict[PassForm, LaneExecutor[DevicePass]] = {}
        self._first_slot: int | None = None  # not loaded yet

    @torch.inference_mode()
    def run(self, inputs: PassInputs) -> Timeline:
        """Run one pass; `inputs.on_logits` receives the logits. Returns what was measured.

        Raises:
            CapacityError: A wave is larger than its buffers.
            ExecutionError: A task failed.
        """
        cut = self._cut(inputs)
        self._check_room(cut)
        form = self._form_of(cut)
        state = DevicePass(inputs, cut, form.first_slot)
        if self._first_slot is None:
            self._new_executor(load_first_layer(form)).run(state)
        if form not in self._executors:
            self._schedules[form] = self._passes.build(form)
            self._executors[form] = self._new_executor(self._schedules[form])
        if self._before_pass is not None:
            self._before_pass(cut, self._schedules[form])
        timeline = self._executors[form].run(state)
        self._first_slot = next_first_slot(form)
        return timeline

    def schedule_of(self, inputs: PassInputs) -> Schedule:
        """The schedule by which `run` would run this pass next."""
        return self._passes.build(self._form_of(self._cut(inputs)))

    def _cut(self, inputs: PassInputs) -> CutPass:
        return cut_pass(inputs.attention, self._passes.form.num_waves, self._passes.division)

    def _form_of(self, cut: CutPass) -> PassForm:
        return replace(
            self._passes.form,
            has_cpu_attention=cut.has_cpu_attention,
            has_device_attention=cut.has_device_attention,
            first_slot=self._first_slot or 0,
        )

    def _new_executor(self, schedule: Schedule) -> LaneExecutor[DevicePass]:
        return LaneExecutor(schedule, self._bindings, self._lanes, on_dead=self._on_dead)

    def _check_room(self, cut: CutPass) -> None:
        room = self._memory.device.ring[0].num_tokens
        if cut.most_tokens > room:
            raise CapacityError(
                f"a wave has {cut.most_tokens} tokens, the device has room for {room}; reduce "
                "prefill_chunk_tokens or pass_tokens, or use more waves"
            )
