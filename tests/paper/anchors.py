"""Simulated decode steps beside published throughputs of the same policies.

The published rates are end to end: all generated tokens over the time of prefill and decode. The
simulated ones are of one decode step, at half of the generated tokens, with kernels at the rates of
`cost`. So the rates are above the published ones, and it is their ratio that is compared.
"""

from collections.abc import Callable
from dataclasses import dataclass

from raymoe.plan.cost import StepCost
from raymoe.plan.placement import layer_sizes
from raymoe.plan.work import MicroBatchShape, ModelWork
from raymoe.schedule.builders import build_cgopipe, build_flexgen_s4
from raymoe.schedule.graph import Schedule
from raymoe.schedule.program import StepForm
from raymoe.schedule.timeline import Timeline, simulate
from raymoe.specs.hardware import HardwareSpec, hardware_preset
from raymoe.specs.presets_models import model_preset
from tests.unit.plan.device_jobs import placed

MICRO_BATCH_SIZE, NUM_MICRO_BATCHES = 36, 14
PROMPT_TOKENS, GENERATED_TOKENS = 418, 128
BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One published throughput and the simulated decode step of the same schedule.

    Attributes:
        published_tokens_per_s: Generated tokens per second, end to end.
        num_rows: Sequences that decode in the step.
        timeline: Of the step, in steady state: the first layer is there, and loaded for the next.
    """

    published_tokens_per_s: float
    num_rows: int
    timeline: Timeline

    @property
    def tokens_per_s(self) -> float:
        """Simulated rate of decoding alone."""
        return self.num_rows / self.timeline.makespan_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """CGOPipe and FlexGen at one policy."""

    cgopipe: Anchor
    flexgen_s4: Anchor

    @property
    def published_ratio(self) -> float:
        """How much faster CGOPipe was."""
        return self.cgopipe.published_tokens_per_s / self.flexgen_s4.published_tokens_per_s

    @property
    def ratio(self) -> float:
        """How much faster CGOPipe is here."""
        return self.cgopipe.tokens_per_s / self.flexgen_s4.tokens_per_s


def moe_lightning_anchors(hardware: HardwareSpec | None = None) -> Anchors:
    """CGOPipe against FlexGen with the same policy: Mixtral-8x7B, 14 micro-batches of 36 rows.

    As published, what is not an expert stays on the device and all experts stream.

    Args:
        hardware: The T4 host of setting S1 by default.

    Source: MoE-Lightning (ASPLOS 2025), section 6.1, table 5 (MTBench, S1, generation length 128,
    prompts padded to 418 tokens).
    """
    node = hardware or hardware_preset("t4")
    return Anchors(
        cgopipe=_simulate(node, build_cgopipe, 30.12, on_cpu=True),
        flexgen_s4=_simulate(node, build_flexgen_s4, 16.816, on_cpu=False),
    )


def _simulate(
    node: HardwareSpec, build: Callable[[StepForm], Schedule], published: float, *, on_cpu: bool
) -> Anchor:
    model = model_preset("mixtral-8x7b")
    sizes = layer_sizes(model, BYTES_PER_ELEMENT)
    cut = placed(sizes, resident_bytes=sum(size.common for size in sizes))
    context = PROMPT_TOKENS + GENERATED_TOKENS // 2
    micro_batch = MicroBatchShape.decode(
        MICRO_BATCH_SIZE, context, cpu_attention_fraction=float(on_cpu)
    )
    form = StepForm(
        layers=cut.layers,
        num_micro_batches=NUM_MICRO_BATCHES,
        has_cpu_attention=on_cpu,
        has_device_attention=not on_cpu,
    )
    cost = StepCost(
        ModelWork.of(model, BYTES_PER_ELEMENT),
        node,
        micro_batches=(micro_batch,) * NUM_MICRO_BATCHES,
        layers=cut.layers,
    )
    return Anchor(
        published_tokens_per_s=published,
        num_rows=MICRO_BATCH_SIZE * NUM_MICRO_BATCHES,
        timeline=simulate(build(form), cost, own_streams=()),
    )
