"""The search for the policy of a node whose GPU does not hold the model.

Every candidate is a schedule of the family `waves` with its knobs, sized so that host and device
memory hold it, and judged by the seconds of the whole job: its passes, simulated. The papers' own
points lie in the same space (design, section 4.1).

The axes are walked one at a time from a few starting points, each to the best value while the
others stay, until no axis improves; what was simulated is remembered.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.device_memory import device_footprint, host_footprint, kv_block_bytes
from raymoe.plan.device_pass import DevicePass
from raymoe.plan.job import JobEstimate, estimate_job
from raymoe.plan.pages import LayerBytes, layer_sizes
from raymoe.plan.pass_times import PassTimes
from raymoe.plan.policy import PAGE_BYTES, DevicePolicy, Policy
from raymoe.plan.streaming import KV_BLOCK_TOKENS, StreamedPasses
from raymoe.plan.work import ModelWork
from raymoe.schedule.builders import CPU_ATTENTION_FRACTIONS, MOST_WAVES
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div

ENOUGH = 1.001  # an axis is walked again only if it gained more than this


@dataclass(frozen=True, slots=True, order=True)
class Knobs:
    """One point of the search.

    Attributes:
        batch_share: Live sequences as a share of the most that memory and workload allow, 0..1.
        num_waves: Waves of a pass.
        is_grouped: Whether the experts run once over all waves, instead of for each wave.
        look_ahead: Waves whose attention runs ahead.
        cpu_attention_fraction: Share of the decoding sequences for which the CPU attends.
        pass_tokens: Tokens of a pass.
    """

    batch_share: float
    num_waves: int
    is_grouped: bool
    look_ahead: int
    cpu_attention_fraction: float
    pass_tokens: int


NUM_AXES = len(fields(Knobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values of each axis: the fields of `Knobs`, in their order."""

    batch_share: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.125)
    num_waves: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    is_grouped: tuple[bool, ...] = (False, True)
    look_ahead: tuple[int, ...] = (1, 2, 15)
    cpu_attention_fraction: tuple[float, ...] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.2, 0.0)
    pass_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)

    def line(self, knobs: Knobs, axis: int) -> Iterator[Knobs]:
        """The points that differ from `knobs` in one of its fields alone."""
        name = fields(knobs)[axis].name
        for value in astuple(self)[axis]:
            yield replace(knobs, **{name: value})

    def points(self) -> Iterator[Knobs]:
        """All of them."""
        return itertools.starmap(Knobs, itertools.product(*astuple(self)))


# CGOPipe, VSLPipe, and module-based batching with its split attention (design, section 4.1).
STARTS = (
    Knobs(1.0, 8, False, 2, 1.0, 4096),
    Knobs(1.0, 2, False, 1, 1.0, 8192),
    Knobs(1.0, 4, True, 15, 0.6, 8192),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy that fits, and what the job takes with it."""

    knobs: Knobs
    passes: StreamedPasses
    job: JobEstimate


@dataclass
class DeviceSearch:
    """Judges points of the space for one job.

    Attributes:
        model: The model.
        work: The same in numbers.
        hardware: The node.
        workload: The job.
        max_context_tokens: Longest sequence.
        page_bytes: Largest page of weights.
        schedule: "waves", or a schedule whose paper fixes some of the knobs.
    """

    model: ModelSpec
    work: ModelWork
    hardware: HardwareSpec
    workload: Workload
    max_context_tokens: int
    page_bytes: int = PAGE_BYTES
    schedule: str = "waves"
    _judged: dict[Knobs, Candidate | None] = field(default_factory=dict)

    def best(self, grid: Grid | None = None, starts: Iterable[Knobs] = STARTS) -> Candidate:
        """Walk the axes from each start.

        Raises:
            InfeasiblePlanError: Nothing fits; shows what the smallest policy needs.
        """
        grid = grid or Grid()
        found = [end for start in starts if (end := self._walk(start, grid)) is not None]
        if not found:
            self.check_smallest()
            raise InfeasiblePlanError(
                f"{self.model.name} on {self.hardware.name}: one sequence fits, but no policy does"
            )
        return min(found, key=lambda candidate: candidate.job.seconds)

    def judge(self, knobs: Knobs, limit_s: float = math.inf) -> Candidate | None:
        """The candidate at a point; None where it does not fit, or takes longer than the limit.

        Args:
            knobs: The point.
            limit_s: Candidates that cannot be faster are not simulated.
        """
        knobs = self._fixed(knobs)
        if knobs not in self._judged:
            passes = self.passes(knobs)
            if passes is not None and self.least_s(passes) >= limit_s:
                return None
            self._judged[knobs] = None if passes is None else self._candidate(knobs, passes)
        return self._judged[knobs]

    def least_s(self, passes: StreamedPasses) -> float:
        """Seconds that no schedule can beat: what the link, the GPU or the CPU has to do at least.

        Weights travel once a pass, and a pass generates a token of each live sequence at most.
        """
        work, hardware, workload = self.work, self.hardware, self.workload
        generated, prompts = workload.total_generated_tokens, workload.total_prompt_tokens
        contexts = generated * (workload.prompt_tokens + workload.generated_tokens / 2)
        kv_bytes, fraction = contexts * work.kv_token_bytes, passes.cpu_attention_fraction
        num_passes = generated / passes.policy.batch_size
        link_bytes = num_passes * passes.cut.streamed_bytes + (1 - fraction) * kv_bytes
        flop = work.token_flop * (generated + prompts) + work.head_flop * generated
        return max(
            link_bytes / hardware.htod_bytes_per_s,
            flop / hardware.gpu_flop_per_s,
            fraction * kv_bytes / hardware.host_bytes_per_s,
        )

    def passes(self, knobs: Knobs) -> StreamedPasses | None:
        """Sizes of a point: the KV cache takes what the host has left, weights that of the device.

        None where not even one sequence, or no slot for the weights, fits.
        """
        least = self._sized(knobs, batch_size=1, num_kv_blocks=1, resident_bytes=0)
        free = self.hardware.host_memory_bytes - host_footprint(self.model, self.work, least).total
        num_blocks = free // kv_block_bytes(self.work)
        batch_size = self._batch_size(knobs, num_blocks)
        if batch_size < 1 or num_blocks < self._blocks(self.max_context_tokens):
            return None
        num_blocks = min(num_blocks, batch_size * self._blocks(self._roomy_tokens))
        resident = 0
        for _ in range(3):  # resident weights make the slots smaller, which makes room for more
            sized = self._sized(knobs, batch_size, num_blocks, resident)
            spare = self.hardware.gpu_memory_bytes
            spare -= device_footprint(self.model, self.work, sized).total
            if spare < 0:
                break
            resident += spare
        sized = self._sized(knobs, batch_size, num_blocks, resident)
        while resident and self._overflows(sized):
            resident = resident * 9 // 10
            sized = self._sized(knobs, batch_size, num_blocks, resident)
        return None if self._overflows(sized) else sized

    def check_smallest(self) -> None:
        """Raise what the smallest policy needs, where that is too much.

        Raises:
            InfeasiblePlanError: With the table of the memory that does not hold it.
        """
        knobs = Knobs(1.0, 1, False, 0, 1.0, 256)
        blocks = self._blocks(self.max_context_tokens)
        sized = self._sized(knobs, batch_size=1, num_kv_blocks=blocks, resident_bytes=0)
        what = f"{self.model.name} with one sequence"
        host_footprint(self.model, self.work, sized).check_fits(
            self.hardware.host_memory_bytes,
            what=what,
            advice="Choose a node with more host memory, shorter sequences (max_context_tokens), "
            "or weights in fewer bits.",
        )
        device_footprint(self.model, self.work, sized).check_fits(
            self.hardware.gpu_memory_bytes,
            what=what,
            advice="Two layers must fit on the device; choose a larger one, or weights in fewer "
            "bits.",
        )

    def _fixed(self, knobs: Knobs) -> Knobs:
        """The point with what the schedule fixes."""
        fraction = CPU_ATTENTION_FRACTIONS.get(self.schedule, knobs.cpu_attention_fraction)
        num_waves = min(knobs.num_waves, MOST_WAVES.get(self.schedule, knobs.num_waves))
        knobs = replace(knobs, cpu_attention_fraction=fraction, num_waves=num_waves)
        if self.schedule == "waves":
            return knobs
        return replace(knobs, is_grouped=False, look_ahead=0)

    @cached_property
    def _sizes(self) -> tuple[LayerBytes, ...]:
        return layer_sizes(self.model, self.work.bytes_per_element)

    @property
    def _roomy_tokens(self) -> int:
        """Tokens per sequence beyond which a larger cache would mostly stay empty."""
        return min(self.max_context_tokens, 2 * self.workload.context_tokens)

    def _batch_size(self, knobs: Knobs, num_blocks: int) -> int:
        """Sequences whose KV fits on average: those that join later are shorter."""
        workload = self.workload
        mean = workload.prompt_tokens + workload.generated_tokens // 2
        most = min(workload.num_rows, num_blocks // (self._blocks(mean) or 1))
        return min(int(most * knobs.batch_share), knobs.pass_tokens)

    def _candidate(self, knobs: Knobs, passes: StreamedPasses) -> Candidate:
        workload, policy = self.workload, passes.policy
        times = PassTimes(
            DevicePass(self.work, self.hardware, passes),
            most_rows=policy.batch_size,
            most_prompt_tokens=policy.pass_tokens,
            contexts=(workload.prompt_tokens, workload.context_tokens),
            prompt_chunk=min(workload.prompt_tokens, policy.prefill_chunk_tokens),
        )
        return Candidate(knobs=knobs, passes=passes, job=estimate_job(workload, policy, times))

    def _walk(self, start: Knobs, grid: Grid) -> Candidate | None:
        best = self.judge(start)
        while True:
            before = best
            for axis in range(NUM_AXES):
                around = best.knobs if best else start
                for knobs in grid.line(around, axis):
                    candidate = self.judge(knobs, best.job.seconds if best else math.inf)
                    if candidate and (best is None or candidate.job.seconds < best.job.seconds):
                        best = candidate
            if best is None or (before and before.job.seconds < ENOUGH * best.job.seconds):
                return best

    def _sized(
        self, knobs: Knobs, batch_size: int, num_kv_blocks: int, resident_bytes: int
    ) -> StreamedPasses:
        num_waves = min(knobs.num_waves, batch_size)
        policy = Policy(
            batch_size=batch_size,
            pass_tokens=knobs.pass_tokens,
            prefill_chunk_tokens=max(1, ceil_div(knobs.pass_tokens, num_waves)),
            num_kv_blocks=num_kv_blocks,
            device=DevicePolicy(
                num_waves=num_waves,
                waves_per_group=num_waves if knobs.is_grouped else 1,
                look_ahead=min(knobs.look_ahead, num_waves - 1),
                cpu_attention_fraction=knobs.cpu_attention_fraction,
                page_bytes=self.page_bytes,
                resident_bytes=resident_bytes,
                staged_blocks=self._staged_blocks(knobs, batch_size, num_waves),
            ),
        )
        return StreamedPasses.of_layers(self._sizes, self.schedule, policy)

    def _staged_blocks(self, knobs: Knobs, batch_size: int, num_waves: int) -> int:
        """Room for the device's share of a wave: decoding sequences, and the prompts of a wave."""
        rows = ceil_div(batch_size, num_waves)
        decoding = (1 - knobs.cpu_attention_fraction) * rows
        prompts = ceil_div(2 * knobs.pass_tokens, num_waves * KV_BLOCK_TOKENS)
        return int(decoding * self._blocks(self.workload.context_tokens)) + prompts + rows

    def _overflows(self, passes: StreamedPasses) -> bool:
        host = host_footprint(self.model, self.work, passes).total
        device = device_footprint(self.model, self.work, passes).total
        return host > self.hardware.host_memory_bytes or device > self.hardware.gpu_memory_bytes

    @staticmethod
    def _blocks(tokens: int) -> int:
        return ceil_div(tokens, KV_BLOCK_TOKENS)
