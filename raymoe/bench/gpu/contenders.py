"""Who runs in the GPU suite: our engine by several schedules and policies, and accelerate."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.papers.policies import PaperPolicies
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy
from raymoe.plan.search import find_plan
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload

ACCELERATE = "accelerate"
PLANNER = "planner"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleContender:
    """Our engine by one schedule.

    Attributes:
        schedule: Its name, or "auto".
        paper: Whose policy it has.
        choose: That policy; None for our planner's.
    """

    schedule: str
    paper: str = PLANNER
    choose: Callable[[PaperPolicies], Policy] | None = None

    def plan(self, model: ModelSpec, node: HardwareSpec, workload: Workload) -> tuple[Plan, str]:
        """The plan of a job, and whose policy that is.

        Where the paper has no policy for the model or the node, our planner chooses one for the
        paper's schedule, and the name says so.

        Raises:
            InfeasiblePlanError: Nothing fits.
        """
        policy, source = None, self.paper
        if self.choose is not None:
            try:
                policy = self.choose(PaperPolicies(model, node, workload))
            except (ConfigError, InfeasiblePlanError) as error:
                reason = str(error).splitlines()[0]
                source = f"{PLANNER}; {self.paper} has none: {reason}"
        plan = find_plan(
            model,
            node,
            workload,
            schedule=self.schedule,
            policy=policy,
            max_context_tokens=longest_row(workload),
        )
        return plan, source


SCHEDULES: Mapping[str, ScheduleContender] = {
    "raymoe": ScheduleContender(schedule="auto"),
    "cgopipe": ScheduleContender(
        schedule="cgopipe", paper="MoE-Lightning", choose=PaperPolicies.cgopipe
    ),
    "vslpipe": ScheduleContender(
        schedule="vslpipe", paper="MoE-Lens", choose=PaperPolicies.vslpipe
    ),
    "module_batching": ScheduleContender(
        schedule="module_batching", paper="MoE-Gen", choose=PaperPolicies.module_batching
    ),
    "flexgen_s3": ScheduleContender(
        schedule="flexgen_s3", paper="MoE-Lightning", choose=PaperPolicies.flexgen_s3
    ),
    "flexgen_s4": ScheduleContender(
        schedule="flexgen_s4", paper="MoE-Lightning", choose=PaperPolicies.flexgen_s4
    ),
    "layer_by_layer": ScheduleContender(
        schedule="layer_by_layer", paper="ZeRO-Inference", choose=PaperPolicies.layer_by_layer
    ),
}
GPU_CONTENDERS = (*SCHEDULES, ACCELERATE)


def longest_row(workload: Workload) -> int:
    """Tokens of the longest row at its end."""
    return max(prompt + generated for prompt, generated in workload.row_lengths)
