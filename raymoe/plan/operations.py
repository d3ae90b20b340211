"""Operations of a decode step and the bytes that they read, for pictures of the roofline."""

from raymoe.plan.plan import Plan
from raymoe.plan.step import StepModel
from raymoe.plan.work import MicroBatchShape, ModelWork, Operation, StepLoad
from raymoe.schedule.graph import Op


def operations_of(plan: Plan) -> list[Operation]:
    """Operations of a plan's decode step, experts first; empty if no host memory is read."""
    load, steps = plan.decode_load, plan.steps
    if not steps.placement.is_in_place and not steps.placement.streamed_bytes:
        return []
    return [feed_forward(steps, load), attention(steps.work, load.decode_context)]


def feed_forward(steps: StepModel, load: StepLoad) -> Operation:
    """Experts, shared experts and dense networks of a step, all layers.

    Each launch reads the activated experts from the memory where it runs. On a device, the link
    brings the streamed weights, which are experts only if the device holds the rest.
    """
    layers, placement = steps.work.layers, steps.placement
    tasks = steps.schedule(load).tasks
    launches = sum(task.op is Op.EXPERTS for task in tasks) / len(layers)
    read = launches * sum(
        layer.common.num_bytes
        + layer.activated_experts(load.tokens / launches) * layer.expert.num_bytes
        for layer in layers
    )
    return Operation(
        name=f"FFN of {load.tokens:.0f} tokens",
        flop=load.tokens * sum(layer.ffn_token_flop for layer in layers),
        near_bytes=read,
        far_bytes=read if placement.is_in_place else placement.streamed_bytes,
    )


def attention(work: ModelWork, context: float) -> Operation:
    """Decode attention of one row with its KV on the host; a batch has the same intensity."""
    row = MicroBatchShape.decode(1, context).host
    layers = [layer.attention.of(row) for layer in work.layers]
    read = sum(layer.read_bytes for layer in layers)
    return Operation(
        name=f"attention at {context:.0f} tokens",
        flop=sum(layer.flop for layer in layers),
        near_bytes=read,
        far_bytes=read,
    )
