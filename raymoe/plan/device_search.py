"""The search for the policy of a node whose GPU does not hold the model.

Every candidate is a schedule of the family `waves` with its knobs, sized so that host and device
memory hold it, and judged by the seconds of the whole job: its passes, simulated. The papers' own
points lie in the same space (design, section 4.1).

The axes are walked one at a time from a few starting points, each to the best value while the
others stay, until no axis improves. A point that its busiest lane alone makes too slow is not
simulated.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from raymoe.plan.device_job import DeviceJob
from raymoe.plan.device_pass import DevicePass
from raymoe.plan.device_sizes import DeviceSizes
from raymoe.plan.job import JobEstimate, fewest_passes, job_passes
from raymoe.plan.knobs import AXES, Grid, Knobs
from raymoe.plan.load import Passes, PassLoad, alike
from raymoe.plan.policy import Policy
from raymoe.plan.streaming import StreamedPasses

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
        """Where a walk ends that never stands on a point slower than `most_s`."""
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
        """The whole job, its passes simulated."""
        return JobEstimate.of(self.search.sizes.job.workload, self._job_passes, self._seconds_of)

    @property
    def seconds(self) -> float:
        """Of the whole job."""
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
        """Of all passes of one load together."""
        return [count * self._model.least_s(load) for load, count in self._job_passes]

    @cached_property
    def _seconds_of(self) -> Callable[[PassLoad], float]:
        return lru_cache(maxsize=None)(self._model.seconds)

    @cached_property
    def _model(self) -> DevicePass:
        return DevicePass(self.search.sizes.job.work, self.search.sizes.job.hardware, self.passes)
