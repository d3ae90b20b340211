from dataclasses import dataclass
from functools import cached_property
from html import escape

from raymoe.plan.job import JobEstimate, StepTimes, estimate_job
from raymoe.plan.policy import DevicePolicy, Footprint, Policy
from raymoe.plan.step import StepModel
from raymoe.plan.work import StepLoad
from raymoe.schedule.graph import Resource
from raymoe.schedule.timeline import Timeline, bound_by
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.workload import Workload
from raymoe.units import format_bytes, format_seconds

DEFAULT_WORKLOAD = Workload(num_rows=2048, prompt_tokens=256, generated_tokens=128)
RESOURCE_NAMES = {
    Resource.GPU: "the GPU",
    Resource.CPU: "the CPU and its memory",
    Resource.HTOD: "the link to the device",
    Resource.DTOH: "the link to the host",
    Resource.HOST_COPY: "copies into the staging ring",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """A policy with its memory footprint and predicted throughput.

    Examples:
        >>> plan = raymoe.find_plan(model, node, job)
        >>> plan.schedule, plan.cost_per_million_tokens(price_per_hour=2.0) > 0
        ('in_place', True)
        >>> print(plan.describe())  # doctest: +ELLIPSIS
        demo_model on node (16 cores, 32.00 GiB)
        ...

    Attributes:
        hardware: One rank's share of the node.
        footprint: Host memory of one rank.
        device_footprint: Device memory of one rank; None on a node without a GPU.
        num_ranks: Tensor-parallel GPUs.
        note: Why the GPU of the node stays idle; empty if it does not, or if there is none.
    """

    model_name: str
    hardware: HardwareSpec
    workload: Workload
    footprint: Footprint
    device_footprint: Footprint | None
    steps: StepModel
    job: JobEstimate
    num_ranks: int = 1
    note: str = ""

    @property
    def schedule(self) -> str:
        return self.steps.placement.schedule

    @property
    def policy(self) -> Policy:
        return self.steps.placement.policy

    @property
    def host_bytes(self) -> int:
        return self.num_ranks * self.footprint.total

    @property
    def decode_load(self) -> StepLoad:
        """A step in which all sequences decode, half way through their rows."""
        workload = self.workload
        context = workload.prompt_tokens + workload.generated_tokens / 2
        return StepLoad(decode_rows=self.policy.max_num_seqs, decode_context=context)

    @property
    def prefill_load(self) -> StepLoad:
        policy = self.policy
        return StepLoad.of_prompts(
            self.workload, policy.max_num_batched_tokens, policy.max_prefill_chunk_tokens
        )

    @cached_property
    def decode(self) -> Timeline:
        return self.steps.timeline(self.decode_load)

    @property
    def bound(self) -> Resource:
        return bound_by(self.steps.schedule(self.decode_load), self.decode)

    @property
    def job_bound(self) -> Resource:
        """The bound of a full step: of decoding, or of prompts where nothing is generated."""
        return self.bound if self.workload.generates else self.prompt_bound

    @property
    def prompt_bound(self) -> Resource:
        """The bound of a step full of prompts."""
        load = self.prefill_load
        return bound_by(self.steps.schedule(load), self.steps.timeline(load))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Predicted prompt tokens per second of steps full of prompts."""
        return self.policy.max_num_batched_tokens / self.steps.seconds(self.prefill_load)

    @property
    def decode_tokens_per_s(self) -> float:
        """Predicted generated tokens per second while all sequences decode."""
        return self.policy.max_num_seqs / self.steps.seconds(self.decode_load)

    @property
    def tokens_per_s(self) -> float:
        """Predicted generated tokens per second of the whole job."""
        return self.job.tokens_per_s

    @property
    def rate(self) -> float:
        """Predicted tokens per second of the whole job: generated, or read where none are."""
        if self.workload.generates:
            return self.tokens_per_s
        return self.workload.total_prompt_tokens / self.job.seconds

    @property
    def weight_bytes(self) -> int:
        """Weights of one rank, in host and device memory."""
        device = () if self.device_footprint is None else self.device_footprint.parts
        parts = (*self.footprint.parts, *device)
        return sum(size for purpose, size in parts if purpose.startswith(("weights", "tables")))

    def step_times(
        self, workload: Workload | None = None, policy: Policy | None = None
    ) -> StepTimes:
        """Seconds of any step, interpolated between simulated steps.

        Args:
            workload: Rows, and sizes of the largest steps; None takes those of the plan.
        """
        workload, policy = workload or self.workload, policy or self.policy
        longest = max((sum(lengths) for lengths in workload.row_lengths), default=0)
        longest = max(longest, workload.context_tokens)
        return StepTimes(
            self.steps.seconds,
            max_rows=min(policy.max_num_seqs, workload.num_rows),
            max_prompt_tokens=policy.max_num_batched_tokens,
            contexts=(1.0, longest / 4, longest / 2, longest),
            prompt_chunk=min(workload.computed_prompt_tokens, policy.max_prefill_chunk_tokens),
            prompt_spread=workload.prompt_spread(policy.max_prefill_chunk_tokens),
        )

    def estimate(self, workload: Workload, policy: Policy | None = None) -> JobEstimate:
        """What other rows take, or other sizes with the steps of this plan."""
        return estimate_job(workload, policy or self.policy, self.steps.seconds)

    def cost_per_million_tokens(self, price_per_hour: float) -> float:
        """Cost of a million of the tokens that `rate` counts."""
        return price_per_hour / 3600 / self.rate * 1e6

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.model_name} on {self.hardware.name}: schedule {self.schedule}, "
            f"{self.policy.max_num_seqs:,} sequences, {self.tokens_per_s:,.1f} tokens/s predicted>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<pre>{escape(self.describe())}</pre>"

    def describe(self) -> str:
        policy, workload, hardware = self.policy, self.workload, self.hardware
        lines = [
            f"{self.model_name} on {hardware.name} ({hardware.num_cores} cores, "
            f"{format_bytes(hardware.host_memory_bytes)})",
            *self._describe_ranks(),
            f"policy: schedule {self.schedule}, batch {policy.max_num_seqs} sequences, "
            f"{policy.max_num_batched_tokens} tokens per step, {policy.num_kv_blocks} KV blocks of "
            f"{KV_BLOCK_TOKENS} tokens{self._describe_windows()}",
            *self._describe_device(),
            *([self.note] if self.note else []),
            f"host memory:\n{self.footprint.table()}",
        ]
        if self.device_footprint is not None:
            lines.append(f"device memory:\n{self.device_footprint.table()}")
        lines.append(
            f"predicted: prefill {self.prefill_tokens_per_s:.0f} tokens/s, "
            f"decode {self.decode_tokens_per_s:.0f} tokens/s (bound by "
            f"{RESOURCE_NAMES[self.bound]}), end to end {self.tokens_per_s:.0f} generated "
            f"tokens/s at {workload.prompt_tokens} + {workload.generated_tokens} tokens; "
            f"{workload.num_rows} rows in {format_seconds(self.job.seconds)}"
        )
        return "\n".join(lines)

    def _describe_windows(self) -> str:
        window = self.steps.work.window
        num_blocks = self.policy.num_window_blocks(window)
        return f", {num_blocks} in layers with a window of {window}" if num_blocks else ""

    def _describe_ranks(self) -> list[str]:
        if self.num_ranks == 1:
            return []
        return [f"tensor parallel: {self.num_ranks} GPUs share each step; sizes are of one of them"]

    def _describe_device(self) -> list[str]:
        device = self.policy.device
        if device is None:
            return []
        return [
            f"device: {device.num_micro_batches} micro-batches, "
            f"experts over {device.micro_batches_per_group} of them, "
            f"attention {device.look_ahead} ahead, "
            f"{100 * device.cpu_attention_fraction:.0f} % of it on the CPU, "
            f"{_host_experts(device)}"
            f"{'states on the GPU, ' if device.states_on_device else ''}"
            f"{format_bytes(device.resident_bytes)} of weights resident, pages of "
            f"{format_bytes(device.page_bytes)}{_ring(device)}"
        ]


def _host_experts(device: DevicePolicy) -> str:
    if not device.cpu_experts_fraction:
        return ""
    return f"{100 * device.cpu_experts_fraction:.0f} % of streamed experts on the CPU, "


def _ring(device: DevicePolicy) -> str:
    if device.expert_groups == 1:
        return ""
    return f" in a ring of {device.ring_slots} of {device.expert_groups} expert groups"
