"""The pace of an emulated device: what each pass would cost on other hardware."""

import numpy as np

from raymoe.device.emulated import EmulatedDevice
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.plan.device_cost import DeviceCost
from raymoe.plan.work import AttentionShape, ModelWork, WaveShape
from raymoe.runtime.waves import CutPass, Wave
from raymoe.schedule.graph import Schedule
from raymoe.specs.hardware import HardwareSpec


class Pace:
    """Sets the cost model of a device before each pass."""

    def __init__(
        self,
        device: EmulatedDevice,
        work: ModelWork,
        hardware: HardwareSpec,
        page_bytes: tuple[tuple[int, ...], ...],
    ) -> None:
        """Price passes of a model.

        Args:
            device: What is paced.
            work: The model whose costs are taken.
            hardware: On which it would run.
            page_bytes: Of each layer, the bytes of each page that streams.
        """
        self._device, self._work, self._hardware = device, work, hardware
        self._page_bytes = page_bytes

    def __call__(self, cut: CutPass, schedule: Schedule) -> None:
        """Take the costs of this pass from here on."""
        self._device.cost = DeviceCost.of_schedule(
            schedule,
            self._work,
            self._hardware,
            waves=tuple(wave_shape(wave) for wave in cut.waves),
            page_bytes=self._page_bytes,
        )


def wave_shape(wave: Wave) -> WaveShape:
    """A wave in the numbers that costs depend on; every sequence gets logits."""
    host, device = wave.host.batch, wave.device.batch
    return WaveShape(
        host=_attention_shape(host),
        device=_attention_shape(device),
        logit_rows=len(host.context_tokens) + len(device.context_tokens),
    )


def _attention_shape(batch: AttentionBatch) -> AttentionShape:
    takes = np.diff(batch.query_start.numpy()).astype(np.int64)
    contexts = batch.context_tokens.numpy().astype(np.int64)
    pairs = takes * (contexts - takes) + takes * (takes + 1) // 2
    is_decode = takes == 1
    return AttentionShape(
        rows=int(takes.sum()),
        decode_rows=int(is_decode.sum()),
        pairs=int(pairs[is_decode].sum()),
        prompt_pairs=int(pairs[~is_decode].sum()),
        context_tokens=int(contexts.sum()),
    )
