"""The pace of an emulated device: what each pass would cost on other hardware."""

import numpy as np

from raymoe.device.emulated import EmulatedDevice
from raymoe.plan.device_cost import DeviceCost
from raymoe.plan.pages import PageCut
from raymoe.plan.wave import WaveShape
from raymoe.plan.work import ModelWork
from raymoe.runtime.waves import CutPass, Wave
from raymoe.schedule.graph import Schedule
from raymoe.specs.hardware import HardwareSpec


class Pace:
    """Sets the cost model of a device before each pass."""

    def __init__(
        self, device: EmulatedDevice, work: ModelWork, hardware: HardwareSpec, cut: PageCut
    ) -> None:
        self._device, self._work, self._hardware, self._cut = device, work, hardware, cut

    def __call__(self, cut: CutPass, schedule: Schedule) -> None:
        """Take the costs of this pass from here on."""
        self._device.cost = DeviceCost.of_schedule(
            schedule,
            self._work,
            self._hardware,
            waves=tuple(wave_shape(wave) for wave in cut.waves),
            page_bytes=self._cut.page_bytes,
        )


def wave_shape(wave: Wave) -> WaveShape:
    """A wave in the numbers that costs depend on; every sequence gets logits."""
    batches = (wave.host.batch, wave.device.batch)
    takes = np.concatenate([np.diff(batch.query_start.numpy()) for batch in batches])
    contexts = np.concatenate([batch.context_tokens.numpy() for batch in batches])
    is_decode = takes == 1
    decoding = int(is_decode.sum())
    on_host = int(is_decode[: len(wave.host.batch.context_tokens)].sum())
    chunks, ends = takes[~is_decode].astype(np.int64), contexts[~is_decode].astype(np.int64)
    return WaveShape(
        decode_rows=decoding,
        decode_context_tokens=int(contexts[is_decode].sum()),
        prefill_tokens=int(chunks.sum()),
        prefill_pairs=int((chunks * (ends - chunks) + chunks * (chunks + 1) // 2).sum()),
        logit_rows=len(takes),
        cpu_attention_fraction=on_host / decoding if decoding else 1.0,
    )
