"""Prices of the steps that run: which experts the cores compute, and how long a device takes."""

from collections.abc import Callable

import numpy as np

from raymoe.device.emulated import EmulatedDevice
from raymoe.plan.cost import StepCost
from raymoe.plan.placement import Placement
from raymoe.plan.step import StepModel
from raymoe.plan.work import MicroBatchShape, ModelWork, StepLoad
from raymoe.runtime.batch import Sequences
from raymoe.runtime.micro_batches import CutBatch, MicroBatch
from raymoe.schedule.graph import Schedule
from raymoe.schedule.placement import LayerPlacement
from raymoe.specs.attention.work import AttentionShape
from raymoe.specs.hardware import HardwareSpec


def split_choice(
    work: ModelWork, hardware: HardwareSpec, placement: Placement
) -> Callable[[CutBatch], int] | None:
    """Choose how much of the experts the cores compute in a step, by its predicted time.

    Steps of about the same size get the same answer. None if there is nothing to choose, or to
    choose by.
    """
    if len(placement.splits) == 1 or not hardware.has_gpu:
        return None
    priced, found = StepModel(work, hardware, placement), dict[StepLoad, int]()

    def choose(cut: CutBatch) -> int:
        load = _rounded_load(cut)
        if load not in found:
            found[load] = priced.splits.index(priced.split(load))
        return found[load]

    return choose


def _rounded_load(cut: CutBatch) -> StepLoad:
    shapes = [micro_batch_shape(micro_batch) for micro_batch in cut.micro_batches]
    total = sum(shapes[1:], start=shapes[0])
    shares = (total.host, total.device)
    decode_rows = sum(share.decode_rows for share in shares)
    prompts = total.logit_rows - decode_rows
    prompt_tokens = total.tokens - decode_rows
    return StepLoad(
        decode_rows=_rounded(decode_rows),
        decode_context=_rounded(sum(share.pairs for share in shares) / max(1, decode_rows)),
        prompt_tokens=_rounded(prompt_tokens),
        prompt_chunk=_rounded(prompt_tokens / max(1, prompts)) or 1.0,
    )


SIZE_BITS = 3  # leading bits of a step's sizes that tell steps apart


def _rounded(value: float) -> float:
    shift = max(0, int(value).bit_length() - SIZE_BITS)
    return float(int(value) >> shift << shift)


class EmulatedTiming:
    """Sets the cost model of a device before each step."""

    def __init__(
        self,
        device: EmulatedDevice,
        work: ModelWork,
        hardware: HardwareSpec,
        splits: tuple[tuple[LayerPlacement, ...], ...],
    ) -> None:
        """Price steps of a model.

        Args:
            work: The model whose costs are taken.
            hardware: On which it would run.
            splits: Its layers by form of a step.
        """
        self._device, self._work, self._hardware = device, work, hardware
        self._splits = splits

    def __call__(self, cut: CutBatch, schedule: Schedule, form: int) -> None:
        """Take the costs of this step from here on."""
        self._device.cost = StepCost.of_schedule(
            schedule,
            self._work,
            self._hardware,
            micro_batches=tuple(
                micro_batch_shape(micro_batch) for micro_batch in cut.micro_batches
            ),
            layers=self._splits[form],
        )


def micro_batch_shape(micro_batch: MicroBatch) -> MicroBatchShape:
    """A micro-batch in the numbers that costs depend on; every sequence gets logits."""
    host, device = micro_batch.host, micro_batch.device
    return MicroBatchShape(
        host=_attention_shape(host),
        device=_attention_shape(device),
        logit_rows=len(host) + len(device),
    )


def _attention_shape(sequences: Sequences) -> AttentionShape:
    num_scheduled_tokens = sequences.num_scheduled_tokens
    contexts = sequences.context_tokens.astype(np.int64)
    pairs = (
        num_scheduled_tokens * (contexts - num_scheduled_tokens)
        + num_scheduled_tokens * (num_scheduled_tokens + 1) // 2
    )
    is_decode = num_scheduled_tokens == 1
    return AttentionShape(
        rows=int(num_scheduled_tokens.sum()),
        decode_rows=int(is_decode.sum()),
        pairs=int(pairs[is_decode].sum()),
        prompt_pairs=int(pairs[~is_decode].sum()),
        context_tokens=int(contexts.sum()),
    )
