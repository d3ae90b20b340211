"""Pictures of a plan: its node's rooflines, and throughput over host memory.

After MoE-Lightning (ASPLOS 2025), figures 1, 4 and 5, and MoE-Lens (2025), figure 3.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.device_step import DeviceStep
from raymoe.plan.draw import (
    Curve,
    CurvePoint,
    draw_host_roofline,
    draw_roofline,
    draw_throughput,
)
from raymoe.plan.papers.hrm import Hierarchy, Level, Operation, place
from raymoe.plan.papers.policies import PaperPolicies
from raymoe.plan.plan import RESOURCE_NAMES, Plan
from raymoe.plan.policy import Policy
from raymoe.plan.search import HostStep, find_plan
from raymoe.plan.work import ModelWork, StepLoad
from raymoe.schedule.graph import Op
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec

PlanOn = Callable[[HardwareSpec], Plan]
"""Plans one job on any node."""

STEPS = 4  # sizes of host memory from the weights to the node's, and again to twice that
PAPERS: Mapping[str, tuple[str, Callable[[PaperPolicies], Policy]]] = {
    "cgopipe": ("CGOPipe, policy of MoE-Lightning", PaperPolicies.cgopipe),
    "vslpipe": ("VSLPipe, policy of MoE-Lens", PaperPolicies.vslpipe),
}


def roofline_picture(plan: Plan, steps: DeviceStep) -> str:
    load = plan.decode_load
    return draw_operations(
        plan.hardware,
        [feed_forward(steps, load), attention(steps.work, load.decode_context)],
        title=f"{plan.model_name} on {plan.hardware.name}, decoding by schedule {plan.schedule}",
    )


def operations_of(plan: Plan) -> list[Operation]:
    """Operations of a plan's decode step, experts first; empty if no host memory is read."""
    load, steps = plan.decode_load, plan.steps
    if isinstance(steps, HostStep):
        return [host_feed_forward(steps.work, load), attention(steps.work, load.decode_context)]
    if isinstance(steps, DeviceStep) and steps.steps.cut.streamed_bytes:
        return [feed_forward(steps, load), attention(steps.work, load.decode_context)]
    return []


def draw_operations(node: HardwareSpec, operations: Sequence[Operation], *, title: str) -> str:
    """Draw a node's roofs with operations below them; the first operation is highlighted."""
    if not node.has_gpu:
        host = Level(node.host_flop_per_s, node.host_bytes_per_s)
        return draw_host_roofline(host, operations, title=title)
    hierarchy = Hierarchy.of(node)
    first, *others = (place(hierarchy, operation) for operation in operations)
    return draw_roofline(hierarchy, first, others, title=title)


def feed_forward(steps: DeviceStep, load: StepLoad) -> Operation:
    """Experts, shared experts and dense networks of a step, all layers.

    Each launch reads the activated experts from device memory; the link brings the streamed
    weights, which are experts only if the device holds the rest.
    """
    layers = steps.work.layers
    tasks = steps.schedule(load).tasks
    launches = sum(task.op is Op.EXPERTS for task in tasks) / len(layers)
    read = sum(
        layer.common.num_bytes
        + layer.activated_experts(load.tokens / launches) * layer.expert.num_bytes
        for layer in layers
    )
    return Operation(
        name=f"FFN of {load.tokens:.0f} tokens",
        flop=load.tokens * sum(layer.ffn_token_flop for layer in layers),
        near_bytes=launches * read,
        far_bytes=steps.steps.cut.streamed_bytes,
    )


def host_feed_forward(work: ModelWork, load: StepLoad) -> Operation:
    """Like `feed_forward`, for a CPU that computes everything in one launch per layer."""
    read = sum(
        layer.common.num_bytes + layer.activated_experts(load.tokens) * layer.expert.num_bytes
        for layer in work.layers
    )
    return Operation(
        name=f"FFN of {load.tokens:.0f} tokens",
        flop=load.tokens * sum(layer.ffn_token_flop for layer in work.layers),
        near_bytes=read,
        far_bytes=read,
    )


def attention(work: ModelWork, context: float) -> Operation:
    """Decode attention of one row with its KV on the host; a batch has the same intensity."""
    kv_bytes = context * work.kv_token_bytes
    return Operation(
        name=f"attention at {context:.0f} tokens",
        flop=context * work.pair_flop,
        near_bytes=kv_bytes,
        far_bytes=kv_bytes,
    )


def throughput_picture(plan: Plan, model: ModelSpec, plan_on: PlanOn) -> str:
    """Throughput over host memory, next to the papers' policies by the same cost model."""
    own, weight_bytes = plan.hardware, dict(plan.footprint.parts).get("weights", 0)
    nodes = [
        replace(own, host_memory_bytes=memory)
        for memory in _memories(weight_bytes, own.host_memory_bytes)
    ]

    def choose(node: HardwareSpec) -> Plan:
        return plan if node == own else plan_on(node)

    curves = [Curve(name="raymoe", points=tuple(_points(nodes, choose, has_bound=True)))]
    if own.has_gpu:
        curves += [_paper_curve(plan, model, schedule, nodes) for schedule in PAPERS]
    return draw_throughput(
        [curve for curve in curves if curve.points],
        title=f"{plan.model_name} on {own.name}, {plan.workload.num_rows:,} rows of "
        f"{plan.workload.prompt_tokens:,} + {plan.workload.generated_tokens:,} tokens",
        weight_bytes=weight_bytes,
        chosen=_point(plan),
    )


def _paper_curve(
    plan: Plan, model: ModelSpec, schedule: str, nodes: Iterable[HardwareSpec]
) -> Curve:
    name, choose = PAPERS[schedule]

    def plan_on(node: HardwareSpec) -> Plan:
        try:
            policy = choose(PaperPolicies(model, node, plan.workload))
        except ConfigError as error:  # the paper has no formula for such a job
            raise InfeasiblePlanError(str(error)) from error
        return find_plan(model, node, plan.workload, schedule=schedule, policy=policy)

    return Curve(name=name, points=tuple(_points(nodes, plan_on)))


def _memories(weight_bytes: int, own_bytes: int) -> Iterator[int]:
    for step in range(1, STEPS):
        yield weight_bytes + (own_bytes - weight_bytes) * step // STEPS
    for step in range(STEPS + 1):
        yield own_bytes + own_bytes * step // STEPS


def _points(
    nodes: Iterable[HardwareSpec], plan_on: PlanOn, *, has_bound: bool = False
) -> Iterator[CurvePoint]:
    for node in nodes:
        with suppress(InfeasiblePlanError):
            plan = plan_on(node)
            yield _point(plan, RESOURCE_NAMES[plan.bound] if has_bound else "")


def _point(plan: Plan, bound: str = "") -> CurvePoint:
    return CurvePoint(
        host_memory_bytes=plan.hardware.host_memory_bytes,
        tokens_per_s=plan.tokens_per_s,
        bound=bound,
    )
