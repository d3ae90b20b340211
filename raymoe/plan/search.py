"""Find the sizes of a run with the shortest predicted job."""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import itemgetter

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.job import JobEstimate, estimate_job, job_steps, min_steps
from raymoe.plan.placement import Placement
from raymoe.plan.plan import DEFAULT_WORKLOAD, Plan
from raymoe.plan.policy import ON_THE_GPU_ALONE, SMALLER_ON_DEVICE, SMALLER_POLICY, Policy
from raymoe.plan.sizes import (
    AXES,
    WHOLE_LAYERS,
    JobOnNode,
    SearchPoint,
    SearchSpace,
    Sizes,
    finer,
)
from raymoe.plan.step import StepModel
from raymoe.plan.work import ModelWork, Repeated, StepLoad, duplicates
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.tensor_shards import shard_model
from raymoe.specs.workload import Workload
from raymoe.units import format_bytes

# The bound of equal steps is 0.91 of a job's time in the mean over random policies, and exceeds
# 1.01 of it in 3 of 100.
EVEN_SHARE = 0.97
# Detail of the jobs that walks simulate (`job_steps`). With all of it a search takes 2 to 5 times
# as long, for 0.3 to 2 % less time of a job.
WALK_DETAIL = 0.25
NUM_REFINED = 2  # ends of walks from which the search goes on with all of it
# Bits kept of batch and cache sizes: points that differ only in device use share job simulations.
SIZE_BITS = 7
# A walk continues only from points within this factor of the best job time. A factor of 1.1 needs
# 0.56 of the unlimited search time and 1.3 needs 0.63, for 0.06 and 0.04 % less throughput in the
# mean over 72 random jobs, 1.9 % at most.
DETOUR = 1.1
# A job is given up if the larger half of its steps exceed their lower bounds so much that with all
# like them it would take this much longer than the best.
LIKELY = 1.05
# Axes that a walk changes together. Expert launches for all micro-batches at once pay where more of
# attention is on the device: neither change alone does.
WALKED = (*((axis,) for axis in AXES), ("is_grouped", "cpu_attention_fraction"))
MIN_GAIN_FACTOR = 1.001  # walk the axes again only after a gain above this


def starts(job: JobOnNode) -> tuple[SearchPoint, ...]:
    """Starting points: VSLPipe, CGOPipe, large steps, module-based batching, resident weights.

    VSLPipe uses its own step size; module-based batching splits attention;
    the last point has few sequences and leaves the device to the weights. The order is by the
    results of walks over random jobs, best first.
    """
    return (
        SearchPoint(1.0, 2, False, 1, 1.0, job.balanced_tokens),
        SearchPoint(1.0, 8, False, 2, 1.0, 4096),
        SearchPoint(1.0, 8, False, 15, 1.0, 32768),
        SearchPoint(1.0, 4, True, 15, 0.6, 8192),
        SearchPoint(0.125, 1, False, 0, 0.7, 32768),
    )


HOST_START = SearchPoint(1.0, 1, False, 0, 1.0, 2048, steady_admission=False)
# On cores, take the smallest batch and step that reach this share of the best rate, as sequences
# take memory that others use too. Of those, batches of so many sequences or of all rows come first:
# with 75 instead of 300, for which the same was predicted, jobs of short rows ran 2 to 10 % longer.
GOOD_SIZE, MIN_HOST_SEQS = 0.995, 256


@dataclass
class Search:
    """Finds the sizes of a schedule with the shortest simulated job."""

    sizes: Sizes
    detail: float = WALK_DETAIL
    _ends: dict[SearchPoint, "Candidate"] = field(default_factory=dict)  # of walks
    _points: dict[SearchPoint, "Candidate | None"] = field(default_factory=dict)
    _jobs: dict[Policy, list[Repeated]] = field(default_factory=dict)

    def best(
        self, grid: SearchSpace | None = None, limit_s: float = math.inf
    ) -> "Candidate | None":
        """The fastest candidate that fits.

        Where weights stream, walk with whole layers, a ring, experts on the cores, and states on
        the device.

        Args:
            limit_s: Candidates of cores alone that take longer are not looked for.
        """
        space = grid or SearchSpace.of(self.sizes.job, self.sizes.schedule)
        if self.sizes.schedule == "resident":
            return self._best_resident(space)
        if self.sizes.schedule == "in_place":
            return self._best_in_place(space, limit_s)
        everything = space
        grid = replace(everything, cpu_experts_fraction=(0.0,))
        whole = replace(grid, slot_layers=(WHOLE_LAYERS,))
        best: Candidate | None = None
        for start in starts(self.sizes.job):
            best = self._better(best, start, whole)
        if self.sizes.has_ring:
            others = starts(self.sizes.job)
            for start in (best.search_point, others[0]) if best else others:
                ring = replace(start, slot_layers=min(grid.slot_layers))
                best = self._better(best, ring, grid)
                if best and best.search_point.slot_layers == WHOLE_LAYERS:
                    break
            else:  # only a ring fits: one of a whole layer too, with module-based batching
                best = self._better(best, replace(others[3], slot_layers=1.0), grid)
        has_experts = any(layer.num_experts for layer in self.sizes.job.work.kinds)
        if best and self.sizes.has_ring and has_experts:
            fraction = max(everything.cpu_experts_fraction)
            on_cores = replace(best.search_point, cpu_experts_fraction=fraction)
            best = self._better(best, on_cores, everything)
        if True in everything.states_on_device:
            first = starts(self.sizes.job)[0]
            for start in (best.search_point, first) if best else (first,):
                with_states = replace(start, states_on_device=True)
                best = self._better(best, with_states, everything)
        in_detail = Search(self.sizes, detail=1.0)
        ends = sorted(self._ends.values(), key=_seconds)[:NUM_REFINED]
        refined = [in_detail.refined(end.search_point) for end in ends]
        return min(filter(None, refined), key=_seconds, default=None)

    def _best_resident(self, grid: SearchSpace) -> "Candidate | None":
        """The fastest of all points, then with rows at a steady rate if that is faster."""
        full, as_room = Search(self.sizes, detail=1.0), replace(grid, steady_admission=(False,))
        found = filter(None, map(full.candidate, as_room.points()))
        best = min(found, key=_seconds, default=None)
        if best is None:
            return None
        steady = full.candidate(replace(best.search_point, steady_admission=True))
        return min(filter(None, (best, steady)), key=_seconds)

    def _best_in_place(self, grid: SearchSpace, limit_s: float) -> "Candidate | None":
        """The fewest sequences, then tokens, that are about as fast as any.

        More take memory of the host, which others use too.
        """
        end = self._walk(HOST_START, grid, limit_s)
        if end is None:
            return None
        full = Search(self.sizes, detail=1.0)
        best = full.candidate(end.search_point)
        for axis in ("batch_share", "max_num_batched_tokens"):
            assert best is not None
            limit_s = best.seconds / GOOD_SIZE
            points = sorted(grid.around(best.search_point, axis))
            found = filter(None, (full.faster(point, limit_s) for point in points))
            best = next(filter(_has_enough, found), best)
        return best

    def _better(
        self, best: "Candidate | None", start: SearchPoint, grid: SearchSpace
    ) -> "Candidate | None":
        end = self._walk(start, grid, DETOUR * best.seconds if best else math.inf)
        if end is not None:
            self._ends[end.search_point] = end
        return min(filter(None, (best, end)), key=_seconds, default=None)

    def faster(self, search_point: SearchPoint, limit_s: float = math.inf) -> "Candidate | None":
        """The candidate at a point if it fits and its job takes less than the limit."""
        candidate = self.candidate(self.sizes.fixed(search_point))
        return candidate if candidate and candidate.beats(limit_s) else None

    def in_full(self, search_point: SearchPoint) -> "Candidate | None":
        """The candidate with exact sizes instead of rounded ones; None if it does not fit."""
        placement = self.sizes.placement(search_point)
        return None if placement is None else Candidate(search_point, placement, self)

    def steps_of_job(self, policy: Policy) -> list[Repeated]:
        """Steps of the job; they do not depend on the device policy."""
        workload = self.sizes.job.workload
        chunk = min(policy.max_prefill_chunk_tokens, workload.longest_prompt_tokens)
        key = replace(policy, max_prefill_chunk_tokens=chunk, device=None)
        if key not in self._jobs:
            self._jobs[key] = duplicates(job_steps(workload, key, detail=self.detail))
        return self._jobs[key]

    def candidate(self, search_point: SearchPoint) -> "Candidate | None":
        """The candidate at a point normalised by `Sizes.fixed`; None if it does not fit."""
        if search_point not in self._points:
            placement = self.sizes.placement(search_point, size_bits=SIZE_BITS)
            self._points[search_point] = (
                None if placement is None else Candidate(search_point, placement, self)
            )
        return self._points[search_point]

    def refined(self, start: SearchPoint) -> "Candidate | None":
        """The best point near the end of a walk, with exact sizes where these are faster."""
        end, before = self.faster(start), None
        while end and (before is None or before.seconds >= MIN_GAIN_FACTOR * end.seconds):
            before = end
            for search_point in finer(before.search_point):
                end = self.faster(search_point, end.seconds) or end
        in_full = self.in_full(end.search_point) if end else None
        return min(filter(None, (end, in_full)), key=_seconds, default=None)

    def _walk(self, start: SearchPoint, grid: SearchSpace, max_s: float) -> "Candidate | None":
        best = self.faster(start, max_s)
        while True:
            before = best
            for axes in WALKED:
                for search_point in grid.around(best.search_point if best else start, *axes):
                    best = self.faster(search_point, best.seconds if best else max_s) or best
            if best is None or (before and before.seconds < MIN_GAIN_FACTOR * best.seconds):
                return best


@dataclass(frozen=True)
class Candidate:
    """A policy that fits; the job is simulated only as far as comparisons need."""

    search_point: SearchPoint
    placement: Placement
    search: Search

    @cached_property
    def even_s(self) -> float:
        """Approximate lower bound: all steps equal, each as long as its busiest lane."""
        load, count = min_steps(self.search.sizes.job.workload, self.placement.policy)
        return count * self._model.min_s(load)

    @cached_property
    def min_s(self) -> float:
        """Lower bound for any task order: the busiest lane of each step."""
        return sum(self._min_s)

    @cached_property
    def job(self) -> JobEstimate:
        return JobEstimate.of(self.search.sizes.job.workload, self._job_steps, self._seconds_of)

    @property
    def seconds(self) -> float:
        return self.job.seconds

    def beats(self, limit_s: float) -> bool:
        """Whether the job takes less; stops simulating once the remaining steps cannot help."""
        if EVEN_SHARE * self.even_s >= limit_s or self.min_s >= limit_s:
            return False
        seconds, simulated_s, of_these_s = self.min_s, 0.0, 0.0
        steps = zip(self._min_s, self._job_steps, strict=True)
        for min_s, (load, count) in sorted(steps, key=itemgetter(0), reverse=True):
            step_s = count * self._seconds_of(load)
            seconds += step_s - min_s
            simulated_s += step_s
            of_these_s += min_s
            if seconds >= limit_s:
                return False
            expected_s = self.min_s * simulated_s / of_these_s
            if of_these_s > self.min_s / 2 and expected_s > LIKELY * limit_s:
                return False
        return True

    @cached_property
    def _job_steps(self) -> list[Repeated]:
        return self.search.steps_of_job(self.placement.policy)

    @cached_property
    def _min_s(self) -> list[float]:
        return [count * self._model.min_s(load) for load, count in self._job_steps]

    @cached_property
    def _seconds_of(self) -> Callable[[StepLoad], float]:
        return lru_cache(maxsize=None)(self._model.seconds)

    @cached_property
    def _model(self) -> StepModel:
        job = self.search.sizes.job
        return StepModel(job.work, job.hardware, self.placement)


def _has_enough(candidate: Candidate) -> bool:
    """Whether a batch of cores is large, or all rows."""
    max_num_seqs = candidate.placement.policy.max_num_seqs
    return max_num_seqs >= MIN_HOST_SEQS or candidate.search_point.batch_share >= 1


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds


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
    model = model.within(max_model_len)
    model, hardware = of_one_rank(model, hardware, tensor_parallel_size)
    workload = workload or DEFAULT_WORKLOAD
    work = ModelWork.of(model, bytes_per_element, kv_element_bytes=kv_bytes_per_element)
    context = min(max_model_len or model.max_model_len, model.max_model_len)
    job = JobOnNode(
        model=model,
        work=work,
        hardware=hardware,
        workload=workload,
        max_model_len=context,
        weight_bytes=weight_bytes,
    )
    if not hardware.has_gpu or schedule == "in_place":
        job, schedule = replace(job, hardware=hardware.without_gpu()), "in_place"
    try:
        if policy is not None:
            name = "micro_batches" if schedule == "auto" else schedule
            return _plan(job, Placement.of(model, name, policy, bytes_per_element))
        if schedule != "auto":
            return _fastest(job, (schedule,))
        on_gpu = ("resident", "micro_batches")
        if may_leave_gpu_idle and tensor_parallel_size == 1:
            return _choose(job, on_gpu)
        return _fastest(job, on_gpu)
    except InfeasiblePlanError as error:
        raise _with_decoded(error, model, bytes_per_element) from error


def _with_decoded(
    error: InfeasiblePlanError, model: ModelSpec, bytes_per_element: int
) -> InfeasiblePlanError:
    """The error with what an adapter has of it: quantised matrices that it changes are decoded."""
    quantization = model.quantization
    if quantization is None or not quantization.merged:
        return error
    stored = replace(model, quantization=replace(quantization, merged=frozenset()))
    held = [each.weight_bytes(bytes_per_element) for each in (model, stored)]
    return InfeasiblePlanError(
        f"{error}\nThe adapter changes matrices in {quantization.name}, which are held decoded: "
        f"{format_bytes(held[0])} of weights, {format_bytes(held[1])} without it. Take an adapter "
        "of fewer matrices, or a model that was quantised with the adapter merged."
    )


def of_one_rank(
    model: ModelSpec, hardware: HardwareSpec, num_ranks: int
) -> tuple[ModelSpec, HardwareSpec]:
    """One rank's share of model and node; raises ConfigError if they cannot be divided."""
    if num_ranks > 1 and not hardware.has_gpu:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but {hardware.name} has no GPU; leave it out"
        )
    return shard_model(model, num_ranks), hardware.share(num_ranks)


def _choose(job: JobOnNode, schedules: tuple[str, ...]) -> Plan:
    """The plan with the GPU, or that of the cores alone if that is faster or the only one."""
    on_gpu: Plan | InfeasiblePlanError
    try:
        on_gpu = _fastest(job, schedules)
    except InfeasiblePlanError as error:
        on_gpu = error
    alone = Search(Sizes(replace(job, hardware=job.hardware.without_gpu()), "in_place"))
    limit_s = on_gpu.job.seconds if isinstance(on_gpu, Plan) else math.inf
    found = alone.best(limit_s=limit_s)
    if found is None:
        if isinstance(on_gpu, Plan):
            return on_gpu
        raise on_gpu
    in_place = _plan(alone.sizes.job, found.placement)
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


def _fastest(job: JobOnNode, schedules: tuple[str, ...]) -> Plan:
    """The fastest plan of these schedules; refuses with the needs of the last if none fits."""
    plans, sizes = [], Sizes(job)
    for schedule in schedules:
        sizes = Sizes(job, schedule)
        with _collection_paused():
            found = Search(sizes).best()
        if found is not None:
            plans.append(_plan(job, found.placement))
    if not plans:
        sizes.refuse()
    return min(plans, key=lambda plan: plan.job.seconds)


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan(job: JobOnNode, placement: Placement) -> Plan:
    """The plan of a placement; InfeasiblePlanError if it does not fit."""
    what, on_device = job.model.name, SMALLER_ON_DEVICE
    if placement.is_resident:
        what, on_device = f"{what} on the GPU alone", ON_THE_GPU_ALONE
    job.check_fits(placement, what=what, on_host=SMALLER_POLICY, on_device=on_device)
    steps = StepModel(job.work, job.hardware, placement)
    return Plan(
        model_name=job.model.name,
        hardware=job.hardware,
        workload=job.workload,
        footprint=job.host_footprint(placement),
        device_footprint=None if placement.is_in_place else job.device_footprint(placement),
        steps=steps,
        job=estimate_job(job.workload, placement.policy, steps.seconds),
        num_ranks=job.model.num_shards,
    )
