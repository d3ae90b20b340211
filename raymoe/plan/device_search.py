"""The space that is searched for a node whose GPU does not hold the model."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import NoReturn

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.device_pass import (
    KV_BLOCK_TOKENS,
    DeviceJob,
    DevicePass,
    StreamedPasses,
    blocks_of,
    device_footprint,
    host_footprint,
    kv_block_bytes,
    weight_slots_bytes,
)
from raymoe.plan.job import JobEstimate, fewest_passes, job_passes
from raymoe.plan.pages import LayerBytes, layer_sizes
from raymoe.plan.policy import PAGE_BYTES, DevicePolicy, Policy
from raymoe.plan.work import Passes, PassLoad, alike
from raymoe.schedule.builders import CPU_ATTENTION_FRACTIONS, MOST_WAVES
from raymoe.units import ceil_div


@dataclass(frozen=True, slots=True, order=True)
class Knobs:
    """One point of the search.

    Attributes:
        batch_share: Live sequences as a share of the most that memory and workload allow, 0..1.
        is_grouped: Whether the experts run once over all waves, instead of for each wave.
        look_ahead: Waves whose attention runs ahead.
        cpu_attention_fraction: Share of the decoding sequences for which the CPU attends.
    """

    batch_share: float
    num_waves: int
    is_grouped: bool
    look_ahead: int
    cpu_attention_fraction: float
    pass_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values of each axis: the fields of `Knobs`, in their order."""

    batch_share: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.125)
    num_waves: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    is_grouped: tuple[bool, ...] = (False, True)
    look_ahead: tuple[int, ...] = (1, 2, 15)
    cpu_attention_fraction: tuple[float, ...] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.2, 0.0)
    pass_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)

    def around(self, knobs: Knobs, *names: str) -> Iterator[Knobs]:
        """The points that differ from `knobs` in these fields alone."""
        axes = [getattr(self, name) for name in names]
        for values in itertools.product(*axes):
            yield replace(knobs, **dict(zip(names, values, strict=True)))

    def points(self) -> Iterator[Knobs]:
        return itertools.starmap(Knobs, itertools.product(*astuple(self)))


AXES = tuple(axis.name for axis in fields(Knobs))
LEAST_CHUNK = 1024  # tokens of a prompt in a pass, for rows that are longer than those planned for


@dataclass(frozen=True)
class DeviceSizes:
    """Sizes the passes of one job.

    Attributes:
        schedule: "waves", or a schedule whose paper fixes some of the knobs.
    """

    job: DeviceJob
    schedule: str = "waves"
    page_bytes: int = PAGE_BYTES

    def fixed(self, knobs: Knobs) -> Knobs:
        """The point with what the schedule fixes, and what means the same in one form."""
        fraction = CPU_ATTENTION_FRACTIONS.get(self.schedule, knobs.cpu_attention_fraction)
        num_waves = min(knobs.num_waves, MOST_WAVES.get(self.schedule, knobs.num_waves))
        is_waves = self.schedule == "waves"
        return replace(
            knobs,
            cpu_attention_fraction=fraction,
            num_waves=num_waves,
            is_grouped=is_waves and num_waves > 1 and knobs.is_grouped,
            look_ahead=min(knobs.look_ahead, num_waves - 1) if is_waves else 0,
        )

    def passes(self, knobs: Knobs, *, size_bits: int | None = None) -> StreamedPasses | None:
        """Sizes of a point: the KV cache takes what the host has left, weights that of the device.

        What stays on the device leaves the host to the cache, a larger batch leaves less of the
        device to what stays; the second round starts from what the first one leaves at least.

        None where not even one sequence, or no slot for the weights, fits.

        Args:
            size_bits: Leading bits of batch and cache that are kept, the rest rounded down, so that
                points that are close have the same; all by default.
        """
        sized = self.sized(knobs, batch_size=1, num_kv_blocks=1)
        filled = self._filled(sized)
        for _ in range(2):
            if filled is None:
                return None
            num_blocks = self._free_blocks(filled)
            if size_bits is not None and num_blocks > self.job.least_blocks:
                num_blocks = max(self.job.least_blocks, _leading_bits(num_blocks, size_bits))
            batch_size = self._batch_size(num_blocks, knobs, size_bits)
            if batch_size < 1:
                return None
            num_blocks = self.job.useful_blocks(num_blocks, batch_size)
            before, sized = (
                sized,
                self.sized(knobs, batch_size=batch_size, num_kv_blocks=num_blocks),
            )
            if sized.policy != before.policy:
                filled = self._filled(sized)
        return filled if filled and self._free_blocks(filled) >= num_blocks else None

    def sized(self, knobs: Knobs, *, batch_size: int, num_kv_blocks: int) -> StreamedPasses:
        """The passes of a point with nothing resident, whether or not they fit."""
        num_waves = min(knobs.num_waves, batch_size)
        policy = Policy(
            batch_size=batch_size,
            pass_tokens=knobs.pass_tokens,
            prefill_chunk_tokens=min(ceil_div(knobs.pass_tokens, num_waves), self._longest_chunk),
            num_kv_blocks=num_kv_blocks,
            device=DevicePolicy(
                num_waves=num_waves,
                waves_per_group=num_waves if knobs.is_grouped else 1,
                look_ahead=min(knobs.look_ahead, num_waves - 1),
                cpu_attention_fraction=knobs.cpu_attention_fraction,
                page_bytes=self.page_bytes,
                staged_blocks=self._staged_blocks(knobs, batch_size, num_waves),
            ),
        )
        return StreamedPasses.of_layers(self._layers, self.schedule, policy)

    def refuse(self) -> NoReturn:
        """Say what the smallest policy needs, where no policy fits.

        Raises:
            InfeasiblePlanError: With the table of the memory that does not hold it.
        """
        knobs = Knobs(1.0, 1, False, 0, 1.0, min(Grid().pass_tokens))
        bare = self.sized(knobs, batch_size=1, num_kv_blocks=self.job.least_blocks)
        sized = self._filled(bare) or bare
        what = f"{self.job.model.name} with one sequence"
        host_footprint(self.job.model, self.job.work, sized).check_fits(
            self.job.hardware.host_memory_bytes,
            what=what,
            advice="Choose a node with more host memory, shorter sequences (max_context_tokens; "
            "--max-context), or weights in fewer bits.",
        )
        device_footprint(self.job.model, self.job.work, sized).check_fits(
            self.job.hardware.gpu_memory_bytes,
            what=what,
            advice="Two layers must fit on the device; choose a larger one, or weights in fewer "
            "bits.",
        )
        raise InfeasiblePlanError(f"{what} fits {self.job.hardware.name}, but no policy does")

    def _filled(self, passes: StreamedPasses) -> StreamedPasses | None:
        spare = self.job.hardware.gpu_memory_bytes
        spare -= device_footprint(self.job.model, self.job.work, passes).total
        if spare < 0:
            return None
        filled, resident_bytes = passes, -1
        for _ in range(3):  # what stays makes the slots smaller, which makes room for more
            before = resident_bytes
            shrunk = weight_slots_bytes(passes.cut) - weight_slots_bytes(filled.cut)
            resident_bytes = spare + shrunk
            if resident_bytes == before:
                break
            filled = self._with_resident(passes, resident_bytes)
        return filled

    def _batch_size(self, num_blocks: int, knobs: Knobs, size_bits: int | None) -> int:
        batch_size = min(self.job.batch_size(num_blocks, knobs.batch_share), knobs.pass_tokens)
        if batch_size < 1 or size_bits is None:
            return batch_size
        num_rows = self.job.workload.num_rows
        num_batches = ceil_div(num_rows, batch_size)
        least = ceil_div(num_rows, num_batches + (num_batches >> (size_bits - 1)))
        return max(least, _leading_bits(batch_size, size_bits))

    def _with_resident(self, passes: StreamedPasses, resident_bytes: int) -> StreamedPasses:
        device = replace(passes.device, resident_bytes=resident_bytes)
        policy = replace(passes.policy, device=device)
        return StreamedPasses.of_layers(self._layers, self.schedule, policy)

    def _free_blocks(self, passes: StreamedPasses) -> int:
        bare = host_footprint(self.job.model, self.job.work, passes)
        free = self.job.hardware.host_memory_bytes - bare.total + bare.bytes_of("KV cache")
        return free // kv_block_bytes(self.job.work)

    @property
    def _longest_chunk(self) -> int:
        """Of a prompt: whole prompts where they are short, as the largest wave has one to spare."""
        return max(LEAST_CHUNK, self.job.workload.longest_prompt_tokens)

    def _staged_blocks(self, knobs: Knobs, batch_size: int, num_waves: int) -> int:
        rows = ceil_div(batch_size, num_waves)
        decoding = (1 - knobs.cpu_attention_fraction) * rows
        prompts = ceil_div(2 * knobs.pass_tokens, num_waves * KV_BLOCK_TOKENS)
        return int(decoding * blocks_of(self.job.workload.context_tokens)) + prompts + rows

    @cached_property
    def _layers(self) -> tuple[LayerBytes, ...]:
        return layer_sizes(self.job.model, self.job.work.bytes_per_element)


def _leading_bits(value: int, count: int) -> int:
    shift = max(0, value.bit_length() - count)
    return value >> shift << shift


# Passes that are all alike take 0.91 of the time of a job in the mean over random policies, and up
# to 1.01 of it in all but 3 of 100.
EVEN_SHARE = 0.97
# Of batch and cache while searching: points that use the device otherwise share their jobs.
SIZE_BITS = 7
# Walks stay where a job takes less than this times the best one so far. A search with 1.1 takes
# 0.56 of the time of one without, and 0.63 with 1.3, for 0.06 and 0.04 % of the throughput in the
# mean over 72 random jobs and 1.9 % at most.
DETOUR = 1.2
ENOUGH = 1.001  # the axes are walked again only if that gained more than this


def starts(job: DeviceJob) -> tuple[Knobs, ...]:
    """Where walks begin.

    VSLPipe with its own size of a pass, CGOPipe, large passes in many waves, module-based batching
    with its split attention (design, section 4.1), and few sequences that leave the device to the
    weights. Those from which walks end best over random jobs come first.
    """
    return (
        Knobs(1.0, 2, False, 1, 1.0, job.balanced_tokens),
        Knobs(1.0, 8, False, 2, 1.0, 4096),
        Knobs(1.0, 8, False, 15, 1.0, 32768),
        Knobs(1.0, 4, True, 15, 0.6, 8192),
        Knobs(0.125, 1, False, 0, 0.7, 32768),
    )


@dataclass
class DeviceSearch:
    """Judges points of the space for one job."""

    sizes: DeviceSizes
    _points: dict[Knobs, "Candidate | None"] = field(default_factory=dict)
    _jobs: dict[Policy, list[Passes]] = field(default_factory=dict)

    def best(self, grid: Grid | None = None) -> "Candidate | None":
        """Walk the axes from each start; None where nothing fits."""
        grid = grid or Grid()
        best: Candidate | None = None
        for start in starts(self.sizes.job):
            end = self._walk(start, grid, DETOUR * best.seconds if best else math.inf)
            best = min(filter(None, (best, end)), key=lambda each: each.seconds, default=None)
        in_full = self.in_full(best.knobs) if best else None
        return min(filter(None, (best, in_full)), key=lambda each: each.seconds, default=None)

    def faster(self, knobs: Knobs, limit_s: float = math.inf) -> "Candidate | None":
        """The candidate at a point, if it fits and takes less than the limit."""
        candidate = self.candidate(self.sizes.fixed(knobs))
        return candidate if candidate and candidate.beats(limit_s) else None

    def in_full(self, knobs: Knobs) -> "Candidate | None":
        """The candidate at a point with sizes that are not rounded; None where it does not fit."""
        passes = self.sizes.passes(knobs)
        return None if passes is None else Candidate(knobs, passes, self)

    def passes_of_job(self, policy: Policy) -> list[Passes]:
        """The passes of the job with a policy; how the device is used makes no difference."""
        workload = self.sizes.job.workload
        chunk = min(policy.prefill_chunk_tokens, workload.longest_prompt_tokens)
        key = replace(policy, prefill_chunk_tokens=chunk, device=None)
        if key not in self._jobs:
            self._jobs[key] = alike(job_passes(workload, key))
        return self._jobs[key]

    def candidate(self, knobs: Knobs) -> "Candidate | None":
        """The candidate at a point as `DeviceSizes.fixed` has it; None where it does not fit."""
        if knobs not in self._points:
            passes = self.sizes.passes(knobs, size_bits=SIZE_BITS)
            self._points[knobs] = None if passes is None else Candidate(knobs, passes, self)
        return self._points[knobs]

    def _walk(self, start: Knobs, grid: Grid, most_s: float) -> "Candidate | None":
        best = self.faster(start, most_s)
        while True:
            before = best
            for axis in AXES:
                for knobs in grid.around(best.knobs if best else start, axis):
                    best = self.faster(knobs, best.seconds if best else most_s) or best
            if best is None or (before and before.seconds < ENOUGH * best.seconds):
                return best


@dataclass(frozen=True)
class Candidate:
    """A policy that fits; what the job takes with it is found out as far as asked for."""

    knobs: Knobs
    passes: StreamedPasses
    search: DeviceSearch

    @cached_property
    def even_s(self) -> float:
        """About the least that the job can take: all passes alike, by their busiest lane."""
        load, count = fewest_passes(self.search.sizes.job.workload, self.passes.policy)
        return count * self._model.least_s(load)

    @cached_property
    def least_s(self) -> float:
        """Seconds that no order of the tasks can beat: the busiest lane of each pass."""
        return sum(self._least_s)

    @cached_property
    def job(self) -> JobEstimate:
        return JobEstimate.of(self.search.sizes.job.workload, self._job_passes, self._seconds_of)

    @property
    def seconds(self) -> float:
        return self.job.seconds

    def beats(self, limit_s: float) -> bool:
        """Whether the job takes less; passes are simulated until the rest cannot save it."""
        if EVEN_SHARE * self.even_s >= limit_s or self.least_s >= limit_s:
            return False
        seconds = self.least_s
        for (load, count), least_s in zip(self._job_passes, self._least_s, strict=True):
            seconds += count * self._seconds_of(load) - least_s
            if seconds >= limit_s:
                return False
        return True

    @cached_property
    def _job_passes(self) -> list[Passes]:
        return self.search.passes_of_job(self.passes.policy)

    @cached_property
    def _least_s(self) -> list[float]:
        return [count * self._model.least_s(load) for load, count in self._job_passes]

    @cached_property
    def _seconds_of(self) -> Callable[[PassLoad], float]:
        return lru_cache(maxsize=None)(self._model.seconds)

    @cached_property
    def _model(self) -> DevicePass:
        return DevicePass(self.search.sizes.job.work, self.search.sizes.job.hardware, self.passes)
