"""Predicted beside measured, pass by pass, and what the difference teaches."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from raymoe.engine.sequence import Pass
from raymoe.plan.load import PassLoad
from raymoe.schedule.critical import report_line
from raymoe.schedule.task import Resource
from raymoe.schedule.timeline import Timeline

LEARNING_RATE = 0.1  # weight of the latest pass in the correction of its kind


class PassKind(StrEnum):
    """What is in a pass; costs of each kind err in their own way."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"

    @classmethod
    def of(cls, load: PassLoad) -> "PassKind":
        """The kind of a load."""
        if not load.prompt_tokens:
            return cls.DECODE
        return cls.MIXED if load.decode_rows else cls.PREFILL


@dataclass(slots=True)
class Correction:
    """Predicts passes by a cost model times the ratio that was measured so far.

    Attributes:
        seconds_of: The cost model's prediction of a pass.
    """

    seconds_of: Callable[[PassLoad], float]
    _ratios: dict[PassKind, float]

    def __init__(self, seconds_of: Callable[[PassLoad], float]) -> None:
        self.seconds_of, self._ratios = seconds_of, {}

    def __call__(self, load: PassLoad) -> float:
        """Seconds of a pass."""
        return self.seconds_of(load) * self._ratios.get(PassKind.of(load), 1.0)

    @property
    def ratios(self) -> dict[PassKind, float]:
        """Measured over predicted of each kind of pass that was seen; recent passes count most."""
        return dict(self._ratios)

    def learn(self, load: PassLoad, measured_s: float) -> None:
        """Take the length of a pass into account."""
        predicted_s = self.seconds_of(load)
        if predicted_s <= 0:
            return
        kind, ratio = PassKind.of(load), measured_s / predicted_s
        before = self._ratios.get(kind, ratio)
        self._ratios[kind] = before + LEARNING_RATE * (ratio - before)


class Accuracy:
    """Adds up the passes of a run. The engine thread owns it.

    Attributes:
        correction: Learns from every pass.
    """

    def __init__(self, correction: Correction) -> None:
        self.correction = correction
        self.restart()

    def restart(self) -> None:
        """Begin a new run; what was learnt stays."""
        self.num_passes = 0
        self.predicted_s = self.measured_s = self._link_s = 0.0

    def record(self, done: Pass, measured: Timeline) -> None:
        """Count a pass."""
        load, measured_s = load_of(done), measured.makespan_s
        self.num_passes += 1
        self.predicted_s += self.correction.seconds_of(load)
        self.measured_s += measured_s
        self._link_s += measured.busy_s(Resource.HTOD)
        self.correction.learn(load, measured_s)

    def line(self) -> str:
        """The line of a report."""
        busy = self._link_s / self.measured_s if self.measured_s else 0.0
        return report_line(self.predicted_s, self.measured_s, busy)


def load_of(done: Pass) -> PassLoad:
    """A pass in the numbers that predictions depend on; one new token counts as decoding."""
    takes, contexts = done.takes, done.context_tokens
    is_decode = takes == 1
    decoding, chunks = int(np.count_nonzero(is_decode)), takes[~is_decode]
    return PassLoad(
        decode_rows=decoding,
        decode_context=float(contexts[is_decode].mean()) if decoding else 0.0,
        prompt_tokens=int(chunks.sum()),
        prompt_chunk=float(chunks.mean()) if len(chunks) else 1.0,
    )
