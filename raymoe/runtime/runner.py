"""ModelRunner: one step of tokens through all layers, by a schedule."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from raymoe.device.device import Device
from raymoe.device.lane import call_all
from raymoe.model.decoder import Decoder
from raymoe.runtime.batch import InputBatch
from raymoe.runtime.executor import Run
from raymoe.runtime.micro_batches import CutBatch
from raymoe.schedule.graph import Schedule
from raymoe.schedule.timeline import Timeline

# Called with each step, its schedule and the number of its form before it runs.
BeforeStep = Callable[[CutBatch, Schedule, int], None]


class PlacedModel(Protocol):
    """A model and its KV cache where they are, and the schedules by which it runs."""

    @property
    def decoder(self) -> Decoder:
        """The model, for what is in no layer."""

    def begin(self, batch: InputBatch) -> tuple[Tensor, Run[Any]]:
        """Run a step until its hidden rows are there, [R, H]; other tasks may still run.

        Raises:
            CapacityError: A micro-batch is larger than its buffers.
            ExecutionError: A task failed.
        """


class ModelRunner:
    """Runs steps of one model.

    Attributes:
        last_timeline: When each task of the latest step ran; its logits are part of `head`.
    """

    def __init__(
        self, placed: PlacedModel, device: Device, closers: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Run nothing yet.

        Args:
            device: Where the model computes.
            closers: What gives its memory back, in this order.
        """
        self._placed, self._device, self._closers = placed, device, closers
        self._logits_s = 0.0  # of the latest step
        self.last_timeline = Timeline("no step", ())

    @contextmanager
    def run(self, batch: InputBatch) -> Iterator[Tensor]:
        """Run one step: in the context, its hidden rows, [R, H], are there for `compute_logits`.

        What the calling thread launches there runs after them, in the same stream of a device.
        The context ends when no task runs any more.

        Raises:
            CapacityError: A micro-batch is larger than its buffers.
            ExecutionError: A task failed; names it.
        """
        with torch.inference_mode():
            hidden_RH, run = self._placed.begin(batch)
            self._logits_s = 0.0
            try:
                with self._device.computing():
                    yield hidden_RH
                self.last_timeline = run.finish(self._logits_s)
            except BaseException:
                run.cancel()
                raise

    def compute_logits(self, hidden_RH: Tensor) -> Tensor:
        """Return the logits, [R, V], of some of the hidden rows of a step, within its context."""
        start_s = time.perf_counter()
        logits_RV = self._device.compute(partial(self._placed.decoder.logits, hidden_RH))
        self._logits_s += time.perf_counter() - start_s
        return logits_RV

    def time(self, batch: InputBatch) -> Timeline:
        """Run one step and drop its logits; returns when each task ran."""
        with self.run(batch) as hidden_RH:
            self.compute_logits(hidden_RH)
        return self.last_timeline

    def interrupt(self) -> None:
        """Do nothing: no step here waits for another process."""

    def close(self) -> None:
        """Give memory back; called once, when no step runs any more."""
        call_all(self._closers)
