"""PassRunner: one pass of tokens through all layers, by a schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raymoe.device.device import Device
from raymoe.errors import CapacityError
from raymoe.kernels.paged_kv import CacheLayout
from raymoe.memory.kv_cache import KvCache
from raymoe.model.decoder import Decoder, Projected
from raymoe.runtime.bindings import (
    DeviceInputs,
    DeviceMemory,
    DevicePass,
    PassInputs,
    PassState,
    bind_cpu,
    bind_device,
    bind_in_place,
    poison_dead,
)
from raymoe.runtime.executor import LaneExecutor, SerialExecutor
from raymoe.runtime.micro_batches import CutPass, Division, cut_pass
from raymoe.schedule.builders import build_resident, load_first_layer
from raymoe.schedule.graph import Schedule
from raymoe.schedule.program import PassForm, next_first_slot
from raymoe.schedule.timeline import Timeline


class PassRunner:
    """Runs passes of one model on the device `cpu`; holds nothing between passes."""

    def __init__(self, decoder: Decoder, cache: KvCache, schedule: Schedule) -> None:
        self._decoder = decoder
        self._executor = SerialExecutor(schedule, bind_cpu(decoder, cache))

    @torch.inference_mode()
    def run(self, inputs: PassInputs) -> Timeline:
        """Run one pass; `inputs.on_logits` receives the logits. Returns what was measured."""
        self._decoder.reserve(inputs.num_positions)
        return self._executor.run(PassState(inputs))


Build = Callable[[PassForm], Schedule]
BeforePass = Callable[[CutPass, Schedule], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How passes are ordered.

    Attributes:
        form: Pages and number of waves; who attends and the first slot are set for each pass.
        build: The builder of the schedule.
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
        device: Device,
        *,
        before_pass: BeforePass | None = None,
    ) -> None:
        """Bind the schedules of `passes`.

        Args:
            device: On whose lanes they run.
            before_pass: Called with each pass and its schedule before it runs.
        """
        self._memory, self._passes, self._device = memory, passes, device
        self._bindings = bind_device(memory)
        self._on_dead = None if device.poison is None else poison_dead(device.poison)
        self._before_pass = before_pass
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
        state = self._state(inputs, cut, form.first_slot)
        if self._first_slot is None:
            self._new_executor(load_first_layer(form)).run(state)
        executor = self._executor(form)
        if self._before_pass is not None:
            self._before_pass(cut, executor.schedule)
        timeline = executor.run(state)
        self._first_slot = next_first_slot(form)
        return timeline

    def schedule_of(self, inputs: PassInputs) -> Schedule:
        """The schedule by which `run` would run this pass next."""
        return self._executor(self._form_of(self._cut(inputs))).schedule

    def _state(self, inputs: PassInputs, cut: CutPass, first_slot: int) -> DevicePass:
        for decoder in self._memory.decoders:
            decoder.reserve(inputs.num_positions)
        on_device = DeviceInputs.of(inputs, cut, self._memory, self._device.torch_device)
        self._device.settle()
        return DevicePass(inputs, cut, first_slot, on_device)

    def _executor(self, form: PassForm) -> LaneExecutor[DevicePass]:
        if form not in self._executors:
            self._executors[form] = self._new_executor(self._passes.build(form))
        return self._executors[form]

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
        return LaneExecutor(schedule, self._bindings, self._device.lanes, on_dead=self._on_dead)

    def _check_room(self, cut: CutPass) -> None:
        room = self._memory.device.ring[0].num_tokens
        if cut.most_tokens > room:
            raise CapacityError(
                f"a wave has {cut.most_tokens} tokens, the device has room for {room}; reduce "
                "prefill_chunk_tokens or pass_tokens, or use more waves"
            )


ALL_ON_DEVICE = Division(cpu_attention_fraction=0.0, staged_blocks=1 << 62)


class ResidentPassRunner:
    """Runs passes on the GPU lane of one device; only tokens and logits travel."""

    def __init__(
        self,
        decoder: Decoder,
        cache: Sequence[Tensor],
        layout: CacheLayout,
        device: Device,
        *,
        before_pass: BeforePass | None = None,
    ) -> None:
        """Bind the schedule.

        Args:
            decoder: Its weights are on the device.
            cache: KV blocks of each layer, on the device.
            device: On whose lane the passes run.
            before_pass: Called with each pass, as one wave, and its schedule before it runs.
        """
        self._decoder, self._layout, self._device = decoder, layout, device
        self._before_pass = before_pass

        def attend(layer: int, projected: Projected, state: PassState) -> Tensor:
            assert state.paged is not None
            return decoder.attend_staged(layer, projected, cache[layer], state.paged)

        self._executor = LaneExecutor(
            build_resident(decoder.spec.num_layers),
            bind_in_place(decoder, attend),
            device.lanes,
        )

    @torch.inference_mode()
    def run(self, inputs: PassInputs) -> Timeline:
        """Run one pass; `inputs.on_logits` receives the logits. Returns what was measured.

        Raises:
            ExecutionError: A task failed.
        """
        self._decoder.reserve(inputs.num_positions)
        state = self._state(inputs)
        self._device.settle()
        if self._before_pass is not None:
            self._before_pass(cut_pass(inputs.attention, 1, ALL_ON_DEVICE), self._executor.schedule)
        return self._executor.run(state)

    def _state(self, inputs: PassInputs) -> PassState:
        target = self._device.torch_device
        on_device = replace(
            inputs,
            token_ids=inputs.token_ids.to(target),
            positions=inputs.positions.to(target),
            logit_rows=inputs.logit_rows.to(target),
            prompt_tokens=None if inputs.prompt_tokens is None else inputs.prompt_tokens.to(target),
        )
        batch = self._decoder.staged_batch(inputs.attention, self._layout, target)
        return PassState(on_device, batch)
