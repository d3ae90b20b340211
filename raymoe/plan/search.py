"""Find the sizes of a run with the shortest predicted job."""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.cost import StepCost
from raymoe.plan.device_search import DeviceJob, DeviceSearch, DeviceSizes, SearchSpace
from raymoe.plan.device_step import (
    KV_BLOCK_TOKENS,
    RUNTIME_BYTES,
    DeviceStep,
    StreamedSteps,
    blocks_of,
    cache_bytes,
    device_footprint,
    host_footprint,
    kv_block_bytes,
    logit_bytes,
    resident_footprint,
    resident_host_footprint,
)
from raymoe.plan.job import estimate_job
from raymoe.plan.plan import DEFAULT_WORKLOAD, Plan, predict_job
from raymoe.plan.policy import (
    SHORTER_ROWS,
    SMALLER_POLICY,
    Footprint,
    Policy,
    host_advice,
    max_sequences,
    num_state_slots,
)
from raymoe.plan.work import ModelWork, Operation, StepLoad
from raymoe.schedule.builders import build_in_place, build_resident
from raymoe.schedule.graph import Op, Schedule
from raymoe.schedule.timeline import Timeline, simulate
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec, MoeSpec
from raymoe.specs.tensor_shards import shard_model
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div


class ResidentStep:
    def __init__(self, work: ModelWork, hardware: HardwareSpec) -> None:
        self._work, self._hardware = work, hardware
        self._schedule = build_resident(len(work.layers))

    def schedule(self, load: StepLoad) -> Schedule:
        del load
        return self._schedule

    def timeline(self, load: StepLoad) -> Timeline:
        micro_batches = load.micro_batches(1, cpu_attention_fraction=0.0)
        return simulate(self._schedule, StepCost(self._work, self._hardware, micro_batches))

    def seconds(self, load: StepLoad) -> float:
        return self.timeline(load).makespan_s if load.tokens else 0.0


@dataclass(frozen=True, slots=True)
class ResidentSearch:
    job: DeviceJob

    def best(self, grid: SearchSpace | None = None) -> Policy | None:
        grid = grid or SearchSpace()
        if self.policy(min(grid.max_num_batched_tokens), min(grid.batch_share)) is None:
            return None
        sizes = itertools.product(grid.max_num_batched_tokens, grid.batch_share)
        fitting = [policy for policy in itertools.starmap(self.policy, sizes) if policy is not None]
        best = min(fitting, key=self.seconds, default=None)
        return best and _with_admission(best, self.seconds)

    def seconds(self, policy: Policy) -> float:
        steps = ResidentStep(self.job.work, self.job.hardware)
        return estimate_job(self.job.workload, policy, steps.seconds).seconds

    def policy(self, max_num_batched_tokens: int, batch_share: float) -> Policy | None:
        job = self.job
        bare = Policy(
            max_num_seqs=1,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk_tokens=max_num_batched_tokens,
            num_kv_blocks=1,
        )
        smallest = self.footprint(bare)
        free = job.hardware.gpu_memory_bytes - smallest.total + smallest.bytes_of("KV cache")
        num_blocks = job.num_blocks(free)
        max_num_seqs = min(job.max_num_seqs(num_blocks, batch_share), max_num_batched_tokens)
        if job.work.state_bytes:
            max_num_seqs = min(max_num_seqs, job.max_states(free, num_blocks))
        if max_num_seqs < 1:
            return None
        useful = job.useful_blocks(num_blocks, max_num_seqs)
        return replace(bare, max_num_seqs=max_num_seqs, num_kv_blocks=useful)

    def footprint(self, policy: Policy) -> Footprint:
        return resident_footprint(self.job.model, self.job.work, policy)

    def refuse(self) -> NoReturn:
        """Raise InfeasiblePlanError with the needs of the smallest policy."""
        tokens = min(SearchSpace().max_num_batched_tokens)
        smallest = Policy(
            max_num_seqs=1,
            max_num_batched_tokens=tokens,
            max_prefill_chunk_tokens=tokens,
            num_kv_blocks=self.job.min_blocks,
        )
        self.check(smallest)
        raise InfeasiblePlanError(
            f"{self.job.model.name} fits {self.job.hardware.name}, but no policy does"
        )

    def check(self, policy: Policy) -> None:
        self.footprint(policy).check_fits(
            self.job.hardware.gpu_memory_bytes,
            what=f"{self.job.model.name} on the GPU alone",
            advice="Let the weights stream (schedule 'auto'), or choose a larger GPU.",
        )


def _with_admission(policy: Policy, seconds: Callable[[Policy], float]) -> Policy:
    """The policy, or with rows at the steady rate where that is faster."""
    return min((policy, replace(policy, steady_admission=True)), key=seconds)


MAX_NUM_BATCHED_TOKENS = (512, 1024, 2048, 4096, 8192)
BATCH_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
# Choose the smallest size within this factor of the best rate: more tokens per step cost megabytes,
# more sequences cost gigabytes of KV cache.
GOOD_STEP, GOOD_BATCH = 0.995, 0.98


class HostStep:
    def __init__(self, work: ModelWork, hardware: HardwareSpec) -> None:
        self.work, self._hardware = work, hardware
        self._schedule = build_in_place(len(work.layers))

    def schedule(self, load: StepLoad) -> Schedule:
        del load
        return self._schedule

    def timeline(self, load: StepLoad) -> Timeline:
        micro_batches = load.micro_batches(1, 1.0, has_prompts_on_host=True)
        return simulate(self._schedule, StepCost(self.work, self._hardware, micro_batches))

    def seconds(self, load: StepLoad) -> float:
        return self.timeline(load).makespan_s if load.tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSearch:
    model: ModelSpec
    work: ModelWork
    hardware: HardwareSpec
    workload: Workload
    weight_bytes: int  # all weights in kernel form, mapped or packed
    max_model_len: int

    def footprint(self, policy: Policy) -> Footprint:
        tokens = policy.max_num_batched_tokens
        return self._footprint(tokens, cache_bytes(self.work, policy))

    def best(self) -> Policy:
        """The smallest sizes that are about as fast as any; InfeasiblePlanError if none fit."""
        steps, workload = HostStep(self.work, self.hardware), self.workload

        def rate(load: StepLoad) -> float:
            return load.tokens / steps.seconds(load)

        step_rates = [rate(self._prefill(tokens)) for tokens in MAX_NUM_BATCHED_TOKENS]
        max_num_batched_tokens = _smallest_good(MAX_NUM_BATCHED_TOKENS, step_rates, GOOD_STEP)
        longest = ceil_div(self.max_model_len, KV_BLOCK_TOKENS)
        smallest = longest * kv_block_bytes(self.work) + self.work.state_bytes
        floor = self._footprint(max_num_batched_tokens, smallest)
        self.check(floor, f"{self.model.name} with one sequence", SHORTER_ROWS)
        free = self.hardware.host_memory_bytes - floor.total + floor.bytes_of("KV cache")
        block_bytes, row_blocks = kv_block_bytes(self.work), blocks_of(workload.held_tokens)
        maximum = max(1, max_sequences(free, row_blocks * block_bytes, self.work.state_bytes))
        sizes = [size for size in BATCH_SIZES if size <= min(maximum, max_num_batched_tokens)] or [
            maximum
        ]
        batch_rates = [rate(self._decode(size)) for size in sizes]
        batch = _smallest_good(sizes, batch_rates, GOOD_BATCH)
        roomy = min(self.max_model_len, 2 * workload.context_tokens)
        blocks = (free - num_state_slots(batch) * self.work.state_bytes) // block_bytes
        chosen = Policy(
            max_num_seqs=batch,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk_tokens=max_num_batched_tokens,
            num_kv_blocks=min(blocks, max(longest, batch * ceil_div(roomy, KV_BLOCK_TOKENS))),
        )

        def seconds(policy: Policy) -> float:
            return predict_job(workload, policy, steps).seconds

        return _with_admission(chosen, seconds)

    def check(self, footprint: Footprint, what: str, advice: str) -> None:
        memory_bytes = self.hardware.host_memory_bytes
        footprint.check_fits(
            memory_bytes, what=what, advice=host_advice(footprint, memory_bytes, advice)
        )

    def _footprint(self, max_num_batched_tokens: int, num_cache_bytes: int) -> Footprint:
        return Footprint(
            memory="host memory",
            parts=(
                ("weights", self.weight_bytes),
                ("KV cache", num_cache_bytes),
                (
                    "activations",
                    max_num_batched_tokens * self._token_bytes() + logit_bytes(self.model),
                ),
                ("runtime", RUNTIME_BYTES),
            ),
        )

    def _token_bytes(self) -> int:
        hidden, widest = self.model.hidden_size, 0
        for layer in self.model.layers:
            attention, ffn = layer.attention, layer.ffn
            width = attention.working_width
            if isinstance(ffn, MoeSpec):
                width += ffn.top_k * (ffn.expert_hidden + ffn.input_size(hidden))
            else:
                width += 2 * ffn.hidden
            widest = max(widest, width)
        return self.work.bytes_per_element * (widest + 5 * hidden)

    def _prefill(self, max_num_batched_tokens: int) -> StepLoad:
        return StepLoad.of_prompts(self.workload, max_num_batched_tokens, max_num_batched_tokens)

    def _decode(self, max_num_seqs: int) -> StepLoad:
        context = self.workload.prompt_tokens + self.workload.generated_tokens / 2
        return StepLoad(decode_rows=max_num_seqs, decode_context=context)


def _smallest_good(sizes: Sequence[int], rates: Sequence[float], share: float) -> int:
    minimum = share * max(rates)
    return next(size for size, rate in zip(sizes, rates, strict=True) if rate >= minimum)


def find_plan(  # noqa: PLR0913 - the options of one decision
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload | None = None,
    *,
    schedule: str = "auto",
    policy: Policy | None = None,
    bytes_per_element: int = 2,
    kv_bytes_per_element: int | None = None,
    weight_bytes: int | None = None,
    max_model_len: int | None = None,
    tensor_parallel_size: int = 1,
    may_leave_gpu_idle: bool = True,
) -> Plan:
    """Choose a policy, or check the given one, and predict the job.

    Args:
        hardware: The node, with the host memory that may be used.
        workload: Rows to plan for; None assumes `DEFAULT_WORKLOAD`.
        schedule: A schedule for a node with a GPU; "auto" chooses, "in_place" leaves the GPU idle.
        weight_bytes: Exact bytes of all weights in the form that the CPU's kernels read; None
            estimates.
        max_model_len: Longest sequence; the model's by default.
        tensor_parallel_size: GPUs that share each step, each with its own link and part of the
            host; the plan is that of one rank (MoE-Lightning, section 4.3).
        may_leave_gpu_idle: Whether schedule "auto" without a policy may choose "in_place" where the
            cores alone finish the job earlier than with the GPU.

    Raises:
        ConfigError: The model cannot be divided between so many GPUs, or the node has none.
        InfeasiblePlanError: The plan needs more memory than there is; includes the table.
    """
    model, hardware = of_one_rank(model, hardware, tensor_parallel_size)
    workload = workload or DEFAULT_WORKLOAD
    work = ModelWork.of(model, bytes_per_element, kv_element_bytes=kv_bytes_per_element)
    context = min(max_model_len or model.max_model_len, model.max_model_len)
    host = HostSearch(
        model=model,
        work=work,
        hardware=hardware.without_gpu(),
        workload=workload,
        weight_bytes=weight_bytes or model.weight_bytes(bytes_per_element),
        max_model_len=context,
    )
    if not hardware.has_gpu or schedule == "in_place":
        return _plan_host(host, policy)
    job = DeviceJob(
        model=model, work=work, hardware=hardware, workload=workload, max_model_len=context
    )
    if policy is None:
        may_leave_gpu_idle &= schedule == "auto" and tensor_parallel_size == 1
        return _choose(job, schedule, host if may_leave_gpu_idle else None)
    if schedule == "resident":
        return _plan_resident(ResidentSearch(job), policy)
    name = "micro_batches" if schedule == "auto" else schedule
    return _plan_streamed(job, StreamedSteps.of(model, name, policy, bytes_per_element))


def of_one_rank(
    model: ModelSpec, hardware: HardwareSpec, num_ranks: int
) -> tuple[ModelSpec, HardwareSpec]:
    """One rank's share of model and node; raises ConfigError if they cannot be divided."""
    if num_ranks > 1 and not hardware.has_gpu:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but {hardware.name} has no GPU; leave it out"
        )
    return shard_model(model, num_ranks), hardware.share(num_ranks)


def _choose(job: DeviceJob, schedule: str, host: HostSearch | None) -> Plan:
    """The plan with the GPU, or that of the cores alone if that is faster or the only one."""
    if host is None:
        return _choose_on_gpu(job, schedule)
    on_gpu: Plan | InfeasiblePlanError
    try:
        on_gpu = _choose_on_gpu(job, schedule)
    except InfeasiblePlanError as error:
        on_gpu = error
    try:
        in_place = _plan_host(host, None)
    except InfeasiblePlanError:
        if isinstance(on_gpu, Plan):
            return on_gpu
        raise on_gpu from None
    if not isinstance(on_gpu, Plan):
        reason = str(on_gpu).splitlines()[0].rstrip(":")
        return replace(in_place, note=f"the GPU stays idle: {reason}")
    if on_gpu.job.seconds <= in_place.job.seconds:
        return on_gpu
    note = (
        f"the GPU stays idle: with it {on_gpu.tokens_per_s:,.3g} tokens/s are predicted "
        f"(schedule {on_gpu.schedule}), with the cores alone {in_place.tokens_per_s:,.3g}"
    )
    return replace(in_place, note=note)


def _choose_on_gpu(job: DeviceJob, schedule: str) -> Plan:
    """The faster of resident and streamed weights, where the schedule allows both."""
    found: list[Plan] = []
    if schedule in {"auto", "resident"}:
        search = ResidentSearch(job)
        policy = search.best()
        if policy is not None:
            found.append(_plan_resident(search, policy))
        elif schedule == "resident":
            search.refuse()
    if schedule != "resident":
        sizes = DeviceSizes(job, schedule="micro_batches" if schedule == "auto" else schedule)
        with _collection_paused():
            best = DeviceSearch(sizes).best()
        if best is not None:
            found.append(_plan_streamed(job, best.steps))
        elif not found:
            sizes.refuse()
    return min(found, key=lambda plan: plan.job.seconds)


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan_host(search: HostSearch, policy: Policy | None) -> Plan:
    chosen = policy or search.best()
    footprint = search.footprint(chosen)
    search.check(footprint, search.model.name, SMALLER_POLICY)
    steps = HostStep(search.work, search.hardware)
    return Plan(
        model_name=search.model.name,
        hardware=search.hardware,
        workload=search.workload,
        schedule="in_place",
        policy=chosen,
        footprint=footprint,
        device_footprint=None,
        steps=steps,
        job=predict_job(search.workload, chosen, steps),
    )


def _plan_resident(search: ResidentSearch, policy: Policy) -> Plan:
    job, steps = search.job, ResidentStep(search.job.work, search.job.hardware)
    search.check(policy)
    return Plan(
        model_name=job.model.name,
        hardware=job.hardware,
        workload=job.workload,
        schedule="resident",
        policy=policy,
        footprint=resident_host_footprint(job.model),
        device_footprint=search.footprint(policy),
        steps=steps,
        job=predict_job(job.workload, policy, steps),
        num_ranks=job.model.num_shards,
    )


def _plan_streamed(job: DeviceJob, steps: StreamedSteps) -> Plan:
    on_host = host_footprint(job.model, job.work, steps)
    on_device = device_footprint(job.model, job.work, steps)
    on_host.check_fits(
        job.hardware.host_memory_bytes,
        what=job.model.name,
        advice=host_advice(on_host, job.hardware.host_memory_bytes, SMALLER_POLICY),
    )
    on_device.check_fits(
        job.hardware.gpu_memory_bytes,
        what=job.model.name,
        advice="Reduce resident_bytes, max_num_batched_tokens or staged_blocks of the policy, give "
        "it more micro-batches, or leave the policy out.",
    )
    device_steps = DeviceStep(job.work, job.hardware, steps)
    return Plan(
        model_name=job.model.name,
        hardware=job.hardware,
        workload=job.workload,
        schedule=steps.schedule,
        policy=steps.policy,
        footprint=on_host,
        device_footprint=on_device,
        steps=device_steps,
        job=predict_job(job.workload, steps.policy, device_steps),
        num_ranks=job.model.num_shards,
    )


def operations_of(plan: Plan) -> list[Operation]:
    """Operations of a plan's decode step, experts first; empty if no host memory is read."""
    load, steps = plan.decode_load, plan.steps
    if isinstance(steps, HostStep):
        return [host_feed_forward(steps.work, load), attention(steps.work, load.decode_context)]
    if isinstance(steps, DeviceStep) and steps.steps.cut.streamed_bytes:
        return [feed_forward(steps, load), attention(steps.work, load.decode_context)]
    return []


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
