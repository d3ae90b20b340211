"""Durations for simulation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st

from raymoe.schedule.graph import Op, Task
from raymoe.schedule.program import StepForm


@dataclass(frozen=True)
class OpCost:
    """The same duration for every task of an operation; 0 for those not named."""

    seconds: Mapping[Op, float]

    def duration_s(self, task: Task) -> float:
        return self.seconds.get(task.op, 0.0)


@dataclass
class TaskCost:
    """A duration for every single task, drawn when it is first asked for."""

    data: st.DataObject
    seconds: dict[str, float] = field(default_factory=dict)

    def duration_s(self, task: Task) -> float:
        if str(task) not in self.seconds:
            self.seconds[str(task)] = self.data.draw(st.integers(0, 8))
        return self.seconds[str(task)]


# A decode step of Mixtral-8x7B, 36 sequences a micro-batch, on a T4 and its host: rough, in
# seconds.
T4_LIKE = OpCost(
    {
        Op.EMBED: 1e-4,
        Op.UP: 1e-4,
        Op.PRE: 4e-4,
        Op.QKV: 1e-4,
        Op.ATTN: 1.5e-3,
        Op.KV: 6e-3,
        Op.APPEND: 1e-4,
        Op.GATTN: 4e-4,
        Op.HID: 1e-4,
        Op.POST: 4e-4,
        Op.EXPERTS: 8e-3,
        Op.STAGE: 3e-3,
        Op.W: 5.4e-3,
        Op.HEAD: 5e-3,
    }
)


@st.composite
def link_bound_costs(draw: st.DrawFn, form: StepForm) -> OpCost:
    """Loading a layer takes at least as long as all of its other work, one after the other."""
    others = [op for op in Op if op not in (Op.W, Op.SYNC, Op.STAGE)]
    seconds = {op: draw(st.floats(0.0, 1.0)) for op in others}
    layer_s = form.num_micro_batches * sum(seconds.values())
    num_pages = min(pages.num_pages for pages in form.layers)
    seconds[Op.W] = draw(st.floats(1.0, 4.0)) * layer_s / num_pages
    return OpCost(seconds)
