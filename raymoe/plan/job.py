"""CacheForecast: whether the sequences of a job on paper will ever overflow the KV cache."""

import sys
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, Self

from raymoe.plan.device_step import KV_BLOCK_TOKENS
from raymoe.plan.policy import Policy
from raymoe.plan.work import StepLoad, Steps, duplicates
from raymoe.schedule.graph import Schedule
from raymoe.schedule.timeline import Timeline
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div

NEVER = sys.maxsize  # a step that no job reaches


@dataclass(slots=True)
class GrowingRows:
    """Sequences that grow by a token a step.

    Attributes:
        offset: Sum of the tokens they would have had at step 0.
    """

    count: int = 0
    offset: float = 0.0

    def tokens(self, step: int) -> float:
        return self.offset + self.count * step

    def add(self, count: int, offset: float) -> None:
        self.count += count
        self.offset += offset


class CacheForecast:
    """Who holds tokens of the KV cache, and until when."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._ending: dict[int, GrowingRows] = {}  # by their last step
        self._steps: list[int] = []  # those last steps, in order
        self._all = GrowingRows()
        self._maximum = 0.0  # what all would hold if each had grown to its end
        self._full_step = NEVER  # the one that overflowed last time, and who runs that long
        self._at_full = GrowingRows()

    def hold(self, last: int, count: int, offset: float) -> None:
        """Sequences with this last step; a negative count takes them out."""
        if last not in self._ending:
            self._ending[last] = GrowingRows()
            insort(self._steps, last)
        self._ending[last].add(count, offset)
        self._all.add(count, offset)
        self._maximum += offset + count * last
        if last >= self._full_step:
            self._at_full.add(count, offset)

    def end(self, step: int) -> GrowingRows:
        """Take out those whose last step this is, none of which is earlier."""
        if step not in self._ending:
            return GrowingRows()
        self._steps.remove(step)
        ended = self._ending.pop(step)
        self._all.add(-ended.count, -ended.offset)
        self._maximum -= ended.tokens(step)
        if step == self._full_step:
            self._full_step, self._at_full = NEVER, GrowingRows()
        return ended

    @property
    def fits(self) -> bool:
        """Whether it never overflows: as sequences end, those that run longer have grown.

        Asks where it overflowed last time, and then looks ahead until all that are left would fit
        if each had grown to its end.
        """
        if self._at_full.tokens(self._full_step) > self._capacity:
            return False
        count, offset, maximum = self._all.count, self._all.offset, self._maximum
        for step in self._steps:
            if maximum <= self._capacity:
                return True
            if offset + count * step > self._capacity:
                self._full_step, self._at_full = step, GrowingRows(count, offset)
                return False
            ending = self._ending[step]
            count -= ending.count
            offset -= ending.offset
            maximum -= ending.tokens(step)
        return True


class StepModel(Protocol):
    """Knows the steps of a model on a node."""

    def schedule(self, load: StepLoad) -> Schedule:
        """The schedule of a step."""

    def timeline(self, load: StepLoad) -> Timeline:
        """The predicted timeline of a step."""

    def seconds(self, load: StepLoad) -> float:
        """Its length."""


Bracket = tuple[tuple[float, float], ...]
NO_CONTEXT: Bracket = ((0.0, 1.0),)


@dataclass
class StepTimes:
    """Seconds of any step up to a largest one, interpolated between loads that are simulated.

    Attributes:
        max_rows: Decoding sequences of the largest step.
        max_prompt_tokens: Prompt tokens of the largest step.
        contexts: Mean contexts of the decoding sequences at which steps are simulated, ascending.
        prompt_chunk: Prompt tokens of one sequence.
    """

    model: StepModel
    max_rows: float
    max_prompt_tokens: float
    contexts: tuple[float, ...]
    prompt_chunk: float
    _known: dict[tuple[float, float, float], float] = field(default_factory=dict)

    def __call__(self, load: StepLoad) -> float:
        """Seconds of a step: linear in rows, context and prompt tokens between the nodes."""
        prompts = _bracket(load.prompt_tokens, _nodes(self.max_prompt_tokens))
        contexts = _bracket(load.decode_context, self.contexts) if load.decode_rows else NO_CONTEXT
        return sum(
            rows_share * context_share * prompts_share * self._node(rows, context, prompt_tokens)
            for rows, rows_share in _bracket(load.decode_rows, _nodes(self.max_rows))
            for context, context_share in contexts
            for prompt_tokens, prompts_share in prompts
        )

    def _node(self, rows: float, context: float, prompt_tokens: float) -> float:
        key = (rows, context if rows else 0.0, prompt_tokens)
        if key not in self._known:
            self._known[key] = self.model.seconds(
                StepLoad(
                    decode_rows=rows,
                    decode_context=context,
                    prompt_tokens=prompt_tokens,
                    prompt_chunk=self.prompt_chunk,
                )
            )
        return self._known[key]


def _nodes(maximum: float) -> tuple[float, ...]:
    return (0.0, min(1.0, maximum), maximum / 4, maximum / 2, maximum)


def _bracket(value: float, nodes: Sequence[float]) -> Bracket:
    for low, high in pairwise(nodes):
        if value <= high and high > low:
            share = max(0.0, (value - low) / (high - low))
            both = ((low, 1.0 - share), (high, share))
            return tuple(end for end in both if end[1])
    return ((nodes[-1], 1.0),)


BATCHES = 3  # that are simulated; beyond, steps are as those of the second
BUNDLES = 256  # of a batch: rows that move as one
MIN_BUNDLES = 8  # that count as a batch: fewer tell little of rows that differ
STEPS = 256  # of a row: passes beyond that count several as one
MEAN_WASTE = KV_BLOCK_TOKENS // 2  # tokens that a last block could still take


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEstimate:
    """What a job will take.

    Attributes:
        seconds: From the first step to the last row.
    """

    seconds: float
    num_steps: float
    prompt_tokens: float
    generated_tokens: float

    @classmethod
    def of(
        cls, workload: Workload, steps: Iterable[Steps], seconds_of: Callable[[StepLoad], float]
    ) -> Self:
        steps = list(steps)
        return cls(
            seconds=sum(count * seconds_of(load) for load, count in steps),
            num_steps=sum(count for _, count in steps),
            prompt_tokens=workload.total_prompt_tokens,
            generated_tokens=workload.total_generated_tokens,
        )

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the whole job."""
        return self.generated_tokens / self.seconds


def estimate_job(
    workload: Workload, policy: Policy, seconds_of: Callable[[StepLoad], float]
) -> JobEstimate:
    """Run a job on paper.

    Args:
        policy: Sizes of steps and of the KV cache.
        seconds_of: How long a step takes; asked for a few loads.
    """
    return JobEstimate.of(workload, duplicates(job_steps(workload, policy)), seconds_of)


def job_steps(workload: Workload, policy: Policy) -> list[Steps]:
    """The steps of a job, whatever they take."""
    batch = min(policy.batch_size, workload.num_rows)
    job = _Job(
        workload,
        policy,
        rows=max(1.0, batch / BUNDLES),
        stride=ceil_div(workload.generated_tokens, STEPS),
    )
    num_bundles = round(workload.num_rows / job.rows)
    each = max(MIN_BUNDLES, round(batch / job.rows))
    num_simulated = min(num_bundles, BATCHES * each)
    job.run(num_simulated)
    steps = [Steps(load, float(job.stride)) for load in job.loads]
    if num_simulated == num_bundles:
        return steps
    steady = slice(job.ends[each - 1] + 1, job.ends[2 * each - 1] + 1)
    left = _tokens_of(workload) - sum(number * load.tokens for load, number in steps)
    more = left / sum(load.tokens for load, _ in steps[steady])
    steps[steady] = [Steps(load, number + more) for load, number in steps[steady]]
    return steps


def _tokens_of(workload: Workload) -> float:
    return workload.total_prompt_tokens + workload.total_generated_tokens - workload.num_rows


def min_steps(workload: Workload, policy: Policy) -> Steps:
    """The steps of a job if all were the same and as full as they can be."""
    tokens, prompts = _tokens_of(workload), workload.total_prompt_tokens
    decoded = tokens - prompts
    count = max(1.0, decoded / policy.batch_size, tokens / policy.max_num_batched_tokens)
    load = StepLoad(
        decode_rows=decoded / count,
        decode_context=workload.prompt_tokens + workload.generated_tokens / 2,
        prompt_tokens=prompts / count,
        prompt_chunk=min(workload.prompt_tokens, policy.max_prefill_chunk_tokens),
    )
    return Steps(load, count)


@dataclass(slots=True)
class _Prompt:
    length: int
    generated: int
    left: float


class _Job:
    """The rows of a job from the queue to their end, in a smaller scale.

    A bundle of rows moves as one and a step is as many steps as the stride, so all that is counted
    here is of one row of a bundle, and in as many tokens as the stride.

    Attributes:
        ends: The step with which each bundle ended.
        loads: The load of the steps of each step.
    """

    def __init__(self, workload: Workload, policy: Policy, *, rows: float, stride: int) -> None:
        self.rows, self.stride = rows, stride
        self._workload, self._policy = workload, policy
        self._max_live = round(policy.batch_size / rows)
        # As in the engine, one block of 64 stays free for growth that no forecast saw.
        num_blocks = policy.num_kv_blocks - policy.num_kv_blocks // 64
        self._cache = CacheForecast(num_blocks * KV_BLOCK_TOKENS / (rows * stride))
        self._num_entered = 0
        self._prompts: list[_Prompt] = []
        self._decoding = GrowingRows()
        self.ends: list[int] = []
        self.loads: list[StepLoad] = []

    def run(self, num_bundles: int) -> None:
        while len(self.ends) < num_bundles:
            self._step(num_bundles)

    def _step(self, num_bundles: int) -> None:
        now, decoding = len(self.loads), self._decoding.count
        context = self._decoding.tokens(now) / decoding if decoding else 0.0
        prompt_tokens, num_chunks, done = self._take_prompts(num_bundles)
        load = StepLoad(
            decode_rows=self.rows * decoding,
            decode_context=self.stride * context,
            prompt_tokens=self.rows * prompt_tokens,
            prompt_chunk=self.stride * prompt_tokens / num_chunks if num_chunks else 1.0,
        )
        ended = self._cache.end(now)
        self._decoding.add(-ended.count, ended.count * self._waste - ended.offset)
        self.ends += [now] * ended.count
        for prompt in done:
            self._begin_decoding(prompt)
        for prompt in self._prompts:
            self._hold(prompt, now, -1)
            self._hold(prompt, now + 1)
        self.loads.append(load)

    @property
    def _waste(self) -> float:
        return MEAN_WASTE / self.stride

    def _take_prompts(self, num_bundles: int) -> tuple[float, int, list[_Prompt]]:
        budget = self._policy.max_num_batched_tokens / self.rows - self._decoding.count
        self._admit(num_bundles, budget - sum(prompt.left for prompt in self._prompts))
        taken, num_chunks = 0.0, 0
        for prompt in self._prompts:
            take = min(prompt.left, self._policy.max_prefill_chunk_tokens, budget - taken)
            if take <= 0:
                break
            prompt.left -= take
            taken += take
            num_chunks += 1
        done = [prompt for prompt in self._prompts if not prompt.left]
        self._prompts = [prompt for prompt in self._prompts if prompt.left]
        return taken, num_chunks, done

    def _admit(self, num_bundles: int, budget: float) -> None:
        while budget > 0 and self._num_entered < num_bundles:
            live = self._decoding.count + len(self._prompts)
            if live and live >= self._max_live:  # alone, a bundle is let in whatever it needs
                return
            prompt = self._next_prompt(num_bundles)
            self._hold(prompt, len(self.loads))
            if live and not self._cache.fits:
                self._hold(prompt, len(self.loads), -1)
                return
            self._prompts.append(prompt)
            self._num_entered += 1
            budget -= prompt.left

    def _next_prompt(self, num_bundles: int) -> _Prompt:
        length, generated = (
            max(1, round(tokens / self.stride))
            for tokens in self._workload.lengths(self._next_row(num_bundles))
        )
        return _Prompt(length, generated, length)

    def _next_row(self, num_bundles: int) -> int:
        """The row that the next bundle is like: each in turn, or a few from all over them."""
        few = min(1.0, num_bundles / max(1, len(self._workload.row_lengths)))
        return int(self._num_entered / few)

    def _hold(self, prompt: _Prompt, step: int, sign: int = 1) -> None:
        """Room for a bundle as if its prompt ended with this step; sign -1 takes it back."""
        offset = prompt.length - step + self._waste
        self._cache.hold(step + prompt.generated, sign, sign * offset)

    def _begin_decoding(self, prompt: _Prompt) -> None:
        now = len(self.loads)
        self._hold(prompt, now, -1)
        if prompt.generated == 1:
            self.ends.append(now)
            return
        offset = prompt.length - now
        self._cache.hold(now + prompt.generated - 1, 1, offset + self._waste)
        self._decoding.add(1, offset)
