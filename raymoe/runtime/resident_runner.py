"""ResidentPassRunner: passes of a model that lies on the device with its KV cache, all of it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from raymoe.device.device import Device
from raymoe.kernels.paged_kv import CacheLayout
from raymoe.model.decoder import Decoder, Projected
from raymoe.runtime.bindings import PassInputs, PassState, bind_in_place
from raymoe.runtime.device_runner import BeforePass
from raymoe.runtime.executor import LaneExecutor
from raymoe.runtime.waves import Division, cut_pass
from raymoe.schedule.builders import build_resident
from raymoe.schedule.timeline import Timeline

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
            layout: Of the cache.
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
        """The pass with its tensors on the device."""
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
