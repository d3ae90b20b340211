"""Search for a policy on a node whose GPU does not hold the model."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from math import ceil, log2
from operator import itemgetter
from typing import NoReturn, Self

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.device_step import (
    KV_BLOCK_TOKENS,
    DeviceStep,
    StreamedSteps,
    blocks_of,
    device_footprint,
    host_footprint,
    kv_block_bytes,
)
from raymoe.plan.job import JobEstimate, job_steps, min_steps
from raymoe.plan.pages import LayerBytes, layer_sizes, slots_bytes
from raymoe.plan.policy import (
    FEWER_BITS,
    MIN_SNAPSHOTS,
    PAGE_BYTES,
    SEQUENCES_PER_SNAPSHOT,
    SHORTER_ROWS,
    DevicePolicy,
    Policy,
    host_advice,
    max_sequences,
)
from raymoe.plan.work import ModelWork, StepLoad, Steps, duplicates
from raymoe.schedule.builders import CPU_ATTENTION_FRACTIONS, MAX_MICRO_BATCHES, RING_SCHEDULES
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div

WHOLE_LAYERS = 2.0
EXPERT_GROUPS = 8  # of a layer, in rings


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJob:
    model: ModelSpec
    work: ModelWork
    hardware: HardwareSpec
    workload: Workload
    max_model_len: int

    def num_blocks(self, num_bytes: int, *, with_states: bool = True) -> int:
        """KV blocks for which there is room, with the states of the rows whose KV is in them.

        Of the states there are snapshots too. The longest row has room if it would be alone: it
        takes more blocks than come with the states of many others.
        """
        state_bytes, block_bytes = self.work.state_bytes, kv_block_bytes(self.work)
        if not state_bytes or not with_states:
            return num_bytes // block_bytes
        longest = min(self.min_blocks, (num_bytes - state_bytes) // block_bytes)
        num_bytes = max(0, num_bytes - MIN_SNAPSHOTS * state_bytes)
        of_row = state_bytes + ceil_div(state_bytes, SEQUENCES_PER_SNAPSHOT)
        states = ceil_div(of_row * KV_BLOCK_TOKENS, self._mean_tokens)
        return max(longest, num_bytes // (block_bytes + states))

    def max_states(self, num_bytes: int, num_blocks: int) -> int:
        """Sequences whose states have room next to so many KV blocks."""
        left = num_bytes - num_blocks * kv_block_bytes(self.work)
        return max_sequences(left, 0, self.work.state_bytes)

    @property
    def _mean_tokens(self) -> int:
        workload = self.workload
        held = workload.computed_prompt_tokens + workload.generated_tokens // 2
        return held + KV_BLOCK_TOKENS // 2

    def max_num_seqs(self, num_blocks: int, share: float) -> int:
        """At most `share` of those whose KV fits at mean length; 0 if the longest does not fit."""
        if num_blocks < self.min_blocks:
            return 0
        num_rows = self.workload.num_rows
        if self.work.state_bytes:
            share = min(share, 1.0)  # `num_blocks` left no room for more states
        live = max(1, num_blocks * KV_BLOCK_TOKENS // self._mean_tokens)
        return min(num_rows, ceil(share * min(num_rows, live)))

    @property
    def balanced_tokens(self) -> int:
        """Tokens per step at which the GPU takes as long as the link (n_real of MoE-Lens, 6.3)."""
        step_s = self.work.all_weight_bytes / self.hardware.htod_bytes_per_s
        return max(1, int(step_s * self.hardware.gpu_flop_per_s / self.work.token_flop))

    def useful_blocks(self, num_blocks: int, max_num_seqs: int) -> int:
        """Cap blocks at what `max_num_seqs` sequences could fill."""
        roomy = min(self.max_model_len, 2 * self.workload.context_tokens)
        return min(num_blocks, max(self.min_blocks, max_num_seqs * blocks_of(roomy)))

    @property
    def min_blocks(self) -> int:
        return blocks_of(self.max_model_len)


@dataclass(frozen=True, slots=True, order=True)
class SearchPoint:
    # Live sequences over those whose KV fits at mean length; above 1, admission limits them by its
    # forecast of the cache.
    batch_share: float
    num_micro_batches: int
    is_grouped: bool  # whether one expert launch covers all micro-batches of a step
    look_ahead: int  # micro-batches whose attention runs ahead of the experts
    cpu_attention_fraction: float  # share of the decoding sequences that attend on the CPU
    max_num_batched_tokens: int
    # Layers of streamed weights that the device holds at once: two whole ones, or a ring of groups
    # of experts.
    slot_layers: float = WHOLE_LAYERS
    steady_admission: bool = True
    # Share of the streamed experts that cores compute, in steps for which that is faster.
    cpu_experts_fraction: float = 0.0
    states_on_device: bool = False  # of models whose layers keep states


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Values of each axis, in the field order of `SearchPoint`."""

    batch_share: tuple[float, ...] = (2.0, 1.0, 0.5, 0.25, 0.125)
    num_micro_batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    is_grouped: tuple[bool, ...] = (False, True)
    look_ahead: tuple[int, ...] = (1, 2, 15)
    cpu_attention_fraction: tuple[float, ...] = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
    max_num_batched_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    slot_layers: tuple[float, ...] = (WHOLE_LAYERS, 1.0, 0.5, 0.25)
    steady_admission: tuple[bool, ...] = (True, False)
    cpu_experts_fraction: tuple[float, ...] = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
    states_on_device: tuple[bool, ...] = (False,)

    @classmethod
    def of(cls, job: DeviceJob) -> Self:
        """Tokens of a step by octaves up to the balance of GPU and link, or all that the job has.

        More tokens than at the balance make steps longer and rows wait, and nothing faster.
        """
        workload = job.workload
        useful = workload.total_computed_prompt_tokens + workload.num_rows
        num_octaves = ceil(log2(max(1.0, min(useful, 4 * job.balanced_tokens) / MIN_TOKENS)))
        tokens = tuple(MIN_TOKENS << octave for octave in range(num_octaves + 1))
        has_states = job.work.state_bytes > 0
        return cls(
            max_num_batched_tokens=tokens,
            states_on_device=(False, True) if has_states else (False,),
        )

    def around(self, search_point: SearchPoint, *names: str) -> Iterator[SearchPoint]:
        axes = [getattr(self, name) for name in names]
        for values in itertools.product(*axes):
            yield replace(search_point, **dict(zip(names, values, strict=True)))

    def points(self) -> Iterator[SearchPoint]:
        return itertools.starmap(SearchPoint, itertools.product(*astuple(self)))


AXES = tuple(axis.name for axis in fields(SearchPoint))
MIN_TOKENS = 1024


def finer(at: SearchPoint) -> Iterator[SearchPoint]:
    """Points between those of the grid: sizes by thirds of octaves, 5 % of the rows."""
    for power in (1, -1, 2, -2):
        factor = 2 ** (power / 3)
        yield replace(at, batch_share=factor * at.batch_share)
        yield replace(at, max_num_batched_tokens=round(factor * at.max_num_batched_tokens))
    for step in (1, -1):
        yield replace(at, num_micro_batches=max(1, at.num_micro_batches + step))
        yield replace(at, look_ahead=max(0, at.look_ahead + step))
    for more in (0.1, 0.05, -0.05, -0.1):
        fraction = min(1.0, max(0.0, round(at.cpu_attention_fraction + more, 2)))
        yield replace(at, cpu_attention_fraction=fraction)


MIN_CHUNK = 1024  # least prefill chunk, for prompts longer than those planned for


@dataclass(frozen=True)
class DeviceSizes:
    job: DeviceJob
    schedule: str = "micro_batches"
    page_bytes: int = PAGE_BYTES

    def fixed(self, search_point: SearchPoint) -> SearchPoint:
        """Apply the settings the schedule fixes, and normalise equivalent points to one form."""
        fraction = CPU_ATTENTION_FRACTIONS.get(self.schedule, search_point.cpu_attention_fraction)
        states_on_device = search_point.states_on_device and self.job.work.state_bytes > 0
        if self.job.work.state_bytes and not states_on_device:
            fraction = 1.0  # the host has the states, and attends for all
        num_micro_batches = min(
            search_point.num_micro_batches,
            MAX_MICRO_BATCHES.get(self.schedule, search_point.num_micro_batches),
        )
        is_micro_batches = self.schedule == "micro_batches"
        return replace(
            search_point,
            cpu_attention_fraction=fraction,
            num_micro_batches=num_micro_batches,
            is_grouped=is_micro_batches and num_micro_batches > 1 and search_point.is_grouped,
            look_ahead=min(search_point.look_ahead, num_micro_batches - 1)
            if is_micro_batches
            else 0,
            slot_layers=search_point.slot_layers if self.has_ring else WHOLE_LAYERS,
            cpu_experts_fraction=search_point.cpu_experts_fraction if self.has_ring else 0.0,
            states_on_device=states_on_device,
        )

    def steps(
        self, search_point: SearchPoint, *, size_bits: int | None = None
    ) -> StreamedSteps | None:
        """Size a point: KV cache fills the rest of host memory, resident weights the device.

        Resident weights free host memory for the cache, and a larger batch leaves less device
        memory for resident weights; a second round starts from the first one's lower bound. Returns
        None where one sequence or the weight slots do not fit. `size_bits` rounds batch and cache
        sizes down to so many leading bits, so that nearby points get equal sizes.
        """
        sized = self.sized(search_point, max_num_seqs=1, num_kv_blocks=1)
        filled = self._filled(sized)
        for _ in range(2):
            if filled is None:
                return None
            free = self._free_bytes(filled)
            num_blocks = self.job.num_blocks(free, with_states=not search_point.states_on_device)
            if size_bits is not None and num_blocks > self.job.min_blocks:
                num_blocks = max(self.job.min_blocks, _leading_bits(num_blocks, size_bits))
            max_num_seqs = self._batch_size(num_blocks, search_point, size_bits)
            if search_point.states_on_device:
                room = self._max_states(search_point)
                max_num_seqs = min(max_num_seqs, ceil(min(1.0, search_point.batch_share) * room))
            elif self.job.work.state_bytes:
                max_num_seqs = min(max_num_seqs, self.job.max_states(free, num_blocks))
            if max_num_seqs < 1:
                return None
            num_blocks = self.job.useful_blocks(num_blocks, max_num_seqs)
            before, sized = (
                sized,
                self.sized(search_point, max_num_seqs=max_num_seqs, num_kv_blocks=num_blocks),
            )
            if sized.policy != before.policy:
                filled = self._filled(sized)
        if filled is None:
            return None
        needs = host_footprint(self.job.model, self.job.work, filled).total
        return filled if needs <= self.job.hardware.host_memory_bytes else None

    def sized(
        self, search_point: SearchPoint, *, max_num_seqs: int, num_kv_blocks: int
    ) -> StreamedSteps:
        """The steps of a point without resident weights, whether or not they fit."""
        num_micro_batches = min(search_point.num_micro_batches, max_num_seqs)
        has_ring = search_point.slot_layers != WHOLE_LAYERS
        policy = Policy(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=search_point.max_num_batched_tokens,
            max_prefill_chunk_tokens=min(
                ceil_div(search_point.max_num_batched_tokens, num_micro_batches),
                self._longest_chunk,
            ),
            num_kv_blocks=num_kv_blocks,
            steady_admission=search_point.steady_admission,
            device=DevicePolicy(
                num_micro_batches=num_micro_batches,
                micro_batches_per_group=num_micro_batches if search_point.is_grouped else 1,
                look_ahead=min(search_point.look_ahead, num_micro_batches - 1),
                cpu_attention_fraction=search_point.cpu_attention_fraction,
                cpu_experts_fraction=search_point.cpu_experts_fraction,
                page_bytes=self.page_bytes,
                staged_blocks=self._staged_blocks(search_point, max_num_seqs, num_micro_batches),
                states_on_device=search_point.states_on_device,
                expert_groups=EXPERT_GROUPS if has_ring else 1,
                ring_slots=round(EXPERT_GROUPS * search_point.slot_layers) if has_ring else 2,
            ),
        )
        return StreamedSteps.of_layers(self._layers, self.schedule, policy)

    def refuse(self) -> NoReturn:
        """Raise InfeasiblePlanError with the needs of the smallest policy."""
        grid = SearchSpace()
        search_point = self.fixed(
            SearchPoint(
                1.0, 1, False, 0, 1.0, min(grid.max_num_batched_tokens), min(grid.slot_layers)
            )
        )
        bare = self.sized(search_point, max_num_seqs=1, num_kv_blocks=self.job.min_blocks)
        sized = self._filled(bare) or bare
        what = f"{self.job.model.name} with one sequence"
        on_host = host_footprint(self.job.model, self.job.work, sized)
        memory_bytes = self.job.hardware.host_memory_bytes
        on_host.check_fits(
            memory_bytes, what=what, advice=host_advice(on_host, memory_bytes, SHORTER_ROWS)
        )
        device_footprint(self.job.model, self.job.work, sized).check_fits(
            self.job.hardware.gpu_memory_bytes,
            what=what,
            advice=f"{self._min_slots} must fit on the device; choose a larger one, or "
            f"{FEWER_BITS}.",
        )
        raise InfeasiblePlanError(f"{what} fits {self.job.hardware.name}, but no policy does")

    def _filled(self, steps: StreamedSteps) -> StreamedSteps | None:
        spare = self.job.hardware.gpu_memory_bytes
        spare -= device_footprint(self.job.model, self.job.work, steps).total
        if spare < 0:
            return None
        device, slots = steps.device, steps.cut.slots_bytes
        resident_bytes = -1
        for _ in range(3):  # resident weights shrink the slots, which makes room for more
            before = resident_bytes
            resident_bytes = spare + steps.cut.slots_bytes - slots
            if resident_bytes == before:
                break
            slots = slots_bytes(
                self._layers,
                resident_bytes,
                num_groups=device.expert_groups,
                ring_slots=min(device.ring_slots, device.expert_groups),
            )
        return self._with_resident(steps, resident_bytes)

    def _max_states(self, search_point: SearchPoint) -> int:
        """Sequences whose states the device has room for next to the weight slots."""
        one = self.sized(search_point, max_num_seqs=1, num_kv_blocks=1)
        needs = device_footprint(self.job.model, self.job.work, one)
        free = self.job.hardware.gpu_memory_bytes - needs.total + needs.bytes_of("states")
        return max_sequences(free, 0, self.job.work.state_bytes)

    def _batch_size(self, num_blocks: int, search_point: SearchPoint, size_bits: int | None) -> int:
        max_num_seqs = min(
            self.job.max_num_seqs(num_blocks, search_point.batch_share),
            search_point.max_num_batched_tokens,
        )
        if max_num_seqs < 1 or size_bits is None:
            return max_num_seqs
        num_rows = self.job.workload.num_rows
        num_batches = ceil_div(num_rows, max_num_seqs)
        minimum = ceil_div(num_rows, num_batches + (num_batches >> (size_bits - 1)))
        return max(minimum, _leading_bits(max_num_seqs, size_bits))

    def _with_resident(self, steps: StreamedSteps, resident_bytes: int) -> StreamedSteps:
        device = replace(steps.device, resident_bytes=resident_bytes)
        policy = replace(steps.policy, device=device)
        return StreamedSteps.of_layers(self._layers, self.schedule, policy)

    def _free_bytes(self, steps: StreamedSteps) -> int:
        """Host memory beside all but KV and states."""
        bare = host_footprint(self.job.model, self.job.work, steps)
        return self.job.hardware.host_memory_bytes - bare.total + bare.bytes_of("KV cache")

    @property
    def _longest_chunk(self) -> int:
        return max(MIN_CHUNK, self.job.workload.longest_prompt_tokens)

    def _staged_blocks(
        self, search_point: SearchPoint, max_num_seqs: int, num_micro_batches: int
    ) -> int:
        if self.job.work.state_bytes and not search_point.states_on_device:
            return 0
        rows = ceil_div(max_num_seqs, num_micro_batches)
        decoding = (1 - search_point.cpu_attention_fraction) * rows
        prompts = ceil_div(
            2 * search_point.max_num_batched_tokens, num_micro_batches * KV_BLOCK_TOKENS
        )
        return int(decoding * blocks_of(self.job.workload.context_tokens)) + prompts + rows

    @property
    def has_ring(self) -> bool:
        return self.schedule in RING_SCHEDULES

    @property
    def _min_slots(self) -> str:
        return "A quarter of a layer's experts" if self.has_ring else "Two layers"

    @cached_property
    def _layers(self) -> tuple[LayerBytes, ...]:
        return layer_sizes(self.job.model, self.job.work.bytes_per_element)


def _leading_bits(value: int, count: int) -> int:
    shift = max(0, value.bit_length() - count)
    return value >> shift << shift


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
MIN_GAIN_FACTOR = 1.001  # walk the axes again only after a gain above this


def starts(job: DeviceJob) -> tuple[SearchPoint, ...]:
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


@dataclass
class DeviceSearch:
    sizes: DeviceSizes
    detail: float = WALK_DETAIL
    _ends: dict[SearchPoint, "Candidate"] = field(default_factory=dict)  # of walks
    _points: dict[SearchPoint, "Candidate | None"] = field(default_factory=dict)
    _jobs: dict[Policy, list[Steps]] = field(default_factory=dict)

    def best(self, grid: SearchSpace | None = None) -> "Candidate | None":
        """Walk with whole layers, a ring, experts on the cores, and states on the device."""
        everything = grid or SearchSpace.of(self.sizes.job)
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
        in_detail = DeviceSearch(self.sizes, detail=1.0)
        ends = sorted(self._ends.values(), key=_seconds)[:NUM_REFINED]
        refined = [in_detail.refined(end.search_point) for end in ends]
        return min(filter(None, refined), key=_seconds, default=None)

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
        steps = self.sizes.steps(search_point)
        return None if steps is None else Candidate(search_point, steps, self)

    def steps_of_job(self, policy: Policy) -> list[Steps]:
        """Steps of the job; they do not depend on the device policy."""
        workload = self.sizes.job.workload
        chunk = min(policy.max_prefill_chunk_tokens, workload.longest_prompt_tokens)
        key = replace(policy, max_prefill_chunk_tokens=chunk, device=None)
        if key not in self._jobs:
            self._jobs[key] = duplicates(job_steps(workload, key, detail=self.detail))
        return self._jobs[key]

    def candidate(self, search_point: SearchPoint) -> "Candidate | None":
        """The candidate at a point normalised by `DeviceSizes.fixed`; None if it does not fit."""
        if search_point not in self._points:
            steps = self.sizes.steps(search_point, size_bits=SIZE_BITS)
            self._points[search_point] = (
                None if steps is None else Candidate(search_point, steps, self)
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
            for axis in AXES:
                for search_point in grid.around(best.search_point if best else start, axis):
                    best = self.faster(search_point, best.seconds if best else max_s) or best
            if best is None or (before and before.seconds < MIN_GAIN_FACTOR * best.seconds):
                return best


@dataclass(frozen=True)
class Candidate:
    """A policy that fits; the job is simulated only as far as comparisons need."""

    search_point: SearchPoint
    steps: StreamedSteps
    search: DeviceSearch

    @cached_property
    def even_s(self) -> float:
        """Approximate lower bound: all steps equal, each as long as its busiest lane."""
        load, count = min_steps(self.search.sizes.job.workload, self.steps.policy)
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
    def _job_steps(self) -> list[Steps]:
        return self.search.steps_of_job(self.steps.policy)

    @cached_property
    def _min_s(self) -> list[float]:
        return [count * self._model.min_s(load) for load, count in self._job_steps]

    @cached_property
    def _seconds_of(self) -> Callable[[StepLoad], float]:
        return lru_cache(maxsize=None)(self._model.seconds)

    @cached_property
    def _model(self) -> DeviceStep:
        return DeviceStep(self.search.sizes.job.work, self.search.sizes.job.hardware, self.steps)


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds
