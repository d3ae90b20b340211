"""What the passes of a run moved, and one that stands for those in which all rows decode."""

from dataclasses import dataclass, field

from raymoe.bench.passes import PassKind, shape_of
from raymoe.engine.core import Runner
from raymoe.plan.work import PassLoad
from raymoe.runtime.bindings import PassInputs
from raymoe.schedule.graph import Op
from raymoe.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True)
class SteadyPass:
    """A pass of nothing but decoding rows."""

    load: PassLoad
    measured: Timeline


@dataclass(slots=True)
class RunRecorder:
    """A runner that passes everything on to another and keeps what came of it.

    Attributes:
        runner: The other one.
        page_s: Seconds in which pages of weights were copied.
        num_passes: Passes.
        steady: Of the decoding passes with the most rows, the last.
    """

    runner: Runner
    page_s: float = 0.0
    num_passes: int = 0
    steady: SteadyPass | None = field(default=None)

    def restart(self) -> None:
        """Forget what was recorded."""
        self.page_s, self.num_passes, self.steady = 0.0, 0, None

    def run(self, inputs: PassInputs) -> Timeline:
        """See `Runner`."""
        timeline = self.runner.run(inputs)
        self.num_passes += 1
        self.page_s += timeline.seconds_by_op().get(Op.W, 0.0)
        shape = shape_of(inputs)
        most = self.steady.load.decode_rows if self.steady else 1
        if PassKind.of(shape) is PassKind.DECODE and shape.tokens >= most:
            context = shape.context_tokens / shape.tokens
            load = PassLoad(decode_rows=shape.tokens, decode_context=context)
            self.steady = SteadyPass(load, timeline)
        return timeline
