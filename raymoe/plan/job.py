"""Job simulation: steps from queue to end, KV cache forecast and step times."""

import random
import sys
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf
from typing import Self

from raymoe.plan.policy import Policy
from raymoe.plan.work import Repeated, StepLoad, duplicates
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.workload import Workload

NEVER = sys.maxsize  # a step that no job reaches


@dataclass(slots=True)
class GrowingRows:
    """Sequences that each grow by one token per step."""

    count: int = 0
    offset: float = 0.0  # sum of their tokens, extrapolated back to step 0

    def tokens(self, step: int) -> float:
        return self.offset + self.count * step

    def add(self, count: int, offset: float) -> None:
        self.count += count
        self.offset += offset


class CacheForecast:
    """Tracks the KV tokens that sequences hold and the steps at which they end."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._ending: dict[int, GrowingRows] = {}  # by last step
        self._steps: list[int] = []  # last steps, ascending
        self._all = GrowingRows()
        self._maximum = 0.0  # tokens if every sequence had grown to its end
        self._full_step = NEVER  # step of the latest overflow; sequences that reach it follow
        self._at_full = GrowingRows()

    def hold(self, last: int, count: int, offset: float) -> None:
        """Add `count` sequences with this last step; a negative count removes them."""
        if last not in self._ending:
            self._ending[last] = GrowingRows()
            insort(self._steps, last)
        self._ending[last].add(count, offset)
        self._all.add(count, offset)
        self._maximum += offset + count * last
        if last >= self._full_step:
            self._at_full.add(count, offset)

    def end(self, step: int) -> GrowingRows:
        """Remove the sequences that end at this step; no live sequence may end earlier."""
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
    def spare(self) -> float:
        """Tokens left if every sequence had grown to its end at once."""
        return self._capacity - self._maximum

    @property
    def fits(self) -> bool:
        """Whether the cache never overflows; checks the step of the latest overflow first."""
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
            maximum -= ending.offset + ending.count * step
        return True


# Share of the cache by which rows that enter together may exceed those of a full cache later on.
BURST_SHARE = 0.01


class SteadyAdmission:
    """Limits the rows that enter a step to those that a full KV cache sustains.

    A row of p prompt and g generated tokens holds p + g/2 tokens for g steps. The cache offers its
    capacity in each step, so one row may enter for each mean (p + g/2) g tokens of it (MoE-Lens,
    equation 8). Rows of similar lengths that enter together also end together, and the cache is
    full only before they end. Rows that enter together drift apart by the differences of their
    lengths: as many may as stay, at every later step, within what rows of a full cache of these
    lengths would still hold then.

    Args:
        capacity_tokens: Tokens of the cache.
        max_prefill_chunk_tokens: Prompt tokens of a row in one step.
    """

    def __init__(self, capacity_tokens: float, max_prefill_chunk_tokens: float) -> None:
        self._capacity, self._chunk = capacity_tokens, max_prefill_chunk_tokens
        self._cost = 0.0  # steps of the whole cache that a row takes, in the mean
        self._credit = self._burst = inf  # such steps

    def expect(self, lengths: Iterable[tuple[float, float]], *, min_burst: float = 0.0) -> None:
        """Set what enters next, by (prompt, generated) tokens of typical rows.

        Args:
            min_burst: Rows that may enter together whatever their lengths.
        """
        rows = [(prompt, self._steps(prompt, generated)) for prompt, generated in lengths]
        area = sum(prompt * steps + steps * steps / 2 for prompt, steps in rows)
        self._cost = area / len(rows) / self._capacity
        self._burst = max(1.0, min_burst * self._cost, _burst(rows, BURST_SHARE * area))
        self._credit = min(self._credit, self._burst)

    def begin_step(self) -> None:
        self._credit = min(self._credit + 1.0, self._burst)

    @property
    def has_credit(self) -> bool:
        """Whether any row may enter now; `expect` changes nothing in that."""
        return self._credit > 0

    @property
    def num_rows(self) -> int:
        """Rows that may enter now."""
        return ceil(self._credit / self._cost) if self.has_credit else 0

    def enter(self, num_rows: int) -> None:
        self._credit = max(self._credit - num_rows * self._cost, -self._cost)

    def _steps(self, prompt: float, generated: float) -> float:
        return max(generated, 1.0) + ceil(prompt / self._chunk) - 1


def _burst(rows: list[tuple[float, float]], slack: float) -> float:
    """Steps' worth of rows that may enter together.

    Args:
        rows: Tokens of the prompt, and steps.
        slack: Token-steps by which these rows may exceed those of a full cache.
    """
    found = inf
    count = prompts = prompt_steps = squares = 0.0
    ranked = sorted(rows, key=lambda row: -row[1])
    for (prompt, steps), (_, following) in pairwise([*ranked, (0.0, 0.0)]):
        count, prompts = count + 1, prompts + prompt
        prompt_steps, squares = prompt_steps + prompt * steps, squares + steps * steps
        if following < steps:  # the rows so far are those that hold tokens after so many steps
            later = prompt_steps - prompts * steps + (squares - count * steps * steps) / 2
            found = min(found, (later + slack) / (prompts + count * steps))
    return found


Bracket = tuple[tuple[float, float], ...]
NO_CONTEXT: Bracket = ((0.0, 1.0),)


@dataclass
class StepTimes:
    """Seconds of any step up to a maximum size, interpolated between simulated loads."""

    seconds: Callable[[StepLoad], float]
    max_rows: float  # decoding sequences of the largest step
    max_prompt_tokens: float  # prompt tokens of the largest step
    contexts: tuple[float, ...]  # mean decode contexts to simulate, ascending
    prompt_chunk: float  # prompt tokens per sequence and step
    prompt_spread: float  # as `StepLoad.prompt_spread`
    _known: dict[tuple[float, float, float], float] = field(default_factory=dict)

    def __call__(self, load: StepLoad) -> float:
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
            self._known[key] = self.seconds(
                StepLoad(
                    decode_rows=rows,
                    decode_context=context,
                    prompt_tokens=prompt_tokens,
                    prompt_chunk=self.prompt_chunk,
                    prompt_spread=self.prompt_spread,
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


BATCHES = 3  # batches to simulate; later steps repeat those of the second
BUNDLES = 256  # bundles per batch; the rows of a bundle move together
MIN_BUNDLES = 8  # per batch: fewer represent differing rows poorly
STEPS = 256  # simulated steps per row; longer rows advance several tokens at once
MEAN_WASTE = KV_BLOCK_TOKENS // 2  # mean unused tokens of a last block


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEstimate:
    seconds: float
    num_steps: float
    prompt_tokens: float
    generated_tokens: float

    @classmethod
    def of(
        cls, workload: Workload, steps: Iterable[Repeated], seconds_of: Callable[[StepLoad], float]
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
        return self.generated_tokens / self.seconds


def estimate_job(
    workload: Workload, policy: Policy, seconds_of: Callable[[StepLoad], float]
) -> JobEstimate:
    """Simulate a job; `seconds_of` is called for a few distinct loads."""
    return JobEstimate.of(workload, duplicates(job_steps(workload, policy)), seconds_of)


def job_steps(workload: Workload, policy: Policy, *, detail: float = 1.0) -> list[Repeated]:
    """Loads and counts of a job's steps, independent of their duration.

    Args:
        detail: Bundles and steps that are simulated, as a share of `BUNDLES` and `STEPS`.
    """
    batch = min(policy.max_num_seqs, workload.num_rows)
    job = _Job(
        workload,
        policy,
        rows=max(1.0, batch / (detail * BUNDLES)),
        stride=ceil(workload.generated_tokens / (detail * STEPS)),
    )
    num_bundles = round(workload.num_rows / job.rows)
    each = max(MIN_BUNDLES, round(batch / job.rows))
    num_simulated = min(num_bundles, BATCHES * each)
    job.run(num_simulated)
    steps = [Repeated(load, float(job.stride)) for load in job.loads]
    if num_simulated == num_bundles:
        return steps
    steady = slice(job.ends[each - 1] + 1, job.ends[2 * each - 1] + 1)
    left = _tokens_of(workload) - sum(number * load.tokens for load, number in steps)
    more = left / sum(load.tokens for load, _ in steps[steady])
    steps[steady] = [Repeated(load, number + more) for load, number in steps[steady]]
    return steps


def _tokens_of(workload: Workload) -> float:
    prompts = workload.total_computed_prompt_tokens
    return prompts + workload.total_generated_tokens - workload.num_rows


def min_steps(workload: Workload, policy: Policy) -> Repeated:
    """The steps of a job if all were equal and as full as possible."""
    tokens, prompts = _tokens_of(workload), workload.total_computed_prompt_tokens
    decoded = tokens - prompts
    count = max(1.0, decoded / policy.max_num_seqs, tokens / policy.max_num_batched_tokens)
    load = StepLoad(
        decode_rows=decoded / count,
        decode_context=workload.prompt_tokens + workload.generated_tokens / 2,
        prompt_tokens=prompts / count,
        prompt_chunk=min(workload.computed_prompt_tokens, policy.max_prefill_chunk_tokens),
    )
    return Repeated(load, count)


@dataclass(slots=True)
class _Prompt:
    length: int
    generated: int
    left: float


def rows_of_bundles(workload: Workload, num_bundles: int) -> Sequence[tuple[int, int]]:
    """Lengths of the bundles of a job, in the order in which they enter; repeated as needed.

    With more rows than bundles, quantiles stand for them in an order that is the same for every
    job: plans for two samples of one dataset then differ by the samples alone.
    """
    rows = workload.row_lengths or (workload.lengths(0),)
    if len(rows) <= num_bundles:
        return rows
    ranked = sorted(rows, key=lambda row: row[::-1])
    picked = [ranked[int((i + 0.5) * len(rows) / num_bundles)] for i in range(num_bundles)]
    random.Random(0).shuffle(picked)
    return picked


class _Job:
    """Rows of a job from queue to end, at reduced scale.

    The rows of a bundle move together and one simulated step stands for `stride` steps. Counts here
    are per row of a bundle, in units of `stride` tokens.

    Attributes:
        ends: The step at which each bundle ended.
        loads: The load of each simulated step.
    """

    def __init__(self, workload: Workload, policy: Policy, *, rows: float, stride: int) -> None:
        self.rows, self.stride = rows, stride
        self._workload, self._policy = workload, policy
        self._shared = workload.shared_prompt_tokens / stride  # which no row holds alone
        self._max_live = round(policy.max_num_seqs / rows)
        # Like the engine, keep one block in 64 free for growth that the forecast missed.
        num_blocks = policy.num_kv_blocks - policy.num_kv_blocks // 64
        # One shared prefix is in the cache all the time; how many others are is not known.
        tokens = max(KV_BLOCK_TOKENS, num_blocks * KV_BLOCK_TOKENS - workload.shared_prompt_tokens)
        capacity = tokens / (rows * stride)
        self._cache = CacheForecast(capacity)
        self._admission: SteadyAdmission | None = None
        if policy.steady_admission:
            self._admission = SteadyAdmission(capacity, policy.max_prefill_chunk_tokens / stride)
        self._waiting_tokens = 0.0  # of the bundles that have not entered, at their ends
        self._num_entered = 0
        self._rows: Sequence[tuple[int, int]] = ()
        self._prompts: list[_Prompt] = []
        self._decoding = GrowingRows()
        self.ends: list[int] = []
        self.loads: list[StepLoad] = []

    def run(self, num_bundles: int) -> None:
        self._rows = rows_of_bundles(self._workload, num_bundles)
        if self._admission is not None:
            lengths = [self._lengths(i) for i in range(num_bundles)]
            self._waiting_tokens = sum(map(sum, lengths)) + num_bundles * self._waste
            typical = lengths[: len(self._rows)]
            self._admission.expect([(prompt + self._waste, tokens) for prompt, tokens in typical])
        while len(self.ends) < num_bundles:
            self._step(num_bundles)

    def _step(self, num_bundles: int) -> None:
        now, decoding = len(self.loads), self._decoding.count
        context = self._decoding.tokens(now) / decoding + self._shared if decoding else 0.0
        chunks, done = self._take_prompts(num_bundles)
        prompt_tokens = sum(take for take, _ in chunks)
        # The rest of a prompt attends to what was taken before: as if it came at once.
        pairs = sum(take * seen for take, seen in chunks)
        load = StepLoad(
            decode_rows=self.rows * decoding,
            decode_context=self.stride * context,
            prompt_tokens=self.rows * prompt_tokens,
            prompt_chunk=self.stride * prompt_tokens / len(chunks) if chunks else 1.0,
            prompt_spread=pairs * len(chunks) / prompt_tokens**2 if chunks else 1.0,
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

    def _take_prompts(self, num_bundles: int) -> tuple[list[tuple[float, float]], list[_Prompt]]:
        """Return the tokens taken, what they see twice over, and the prompts that are done."""
        budget = self._policy.max_num_batched_tokens / self.rows - self._decoding.count
        self._admit(num_bundles, budget - sum(prompt.left for prompt in self._prompts))
        longest = self._policy.max_prefill_chunk_tokens
        taken, chunks = 0.0, []
        for prompt in self._prompts:
            take = min(prompt.left, longest, budget - taken)
            if take <= 0:
                break
            prompt.left -= take
            taken += take
            length = min(prompt.length, longest / self.stride)
            chunks.append((take, length + 2 * self._shared))
        done = [prompt for prompt in self._prompts if not prompt.left]
        self._prompts = [prompt for prompt in self._prompts if prompt.left]
        return chunks, done

    def _admit(self, num_bundles: int, budget: float) -> None:
        if self._admission is not None:
            self._admission.begin_step()
        while budget > 0 and self._num_entered < num_bundles:
            live = self._decoding.count + len(self._prompts)
            # A lone bundle is always admitted.
            if live and (live >= self._max_live or not self._may_enter(num_bundles)):
                return
            prompt = self._next_prompt()
            self._hold(prompt, len(self.loads))
            if live and not self._cache.fits:
                self._hold(prompt, len(self.loads), -1)
                return
            self._prompts.append(prompt)
            self._num_entered += 1
            budget -= prompt.left
            self._waiting_tokens -= prompt.length + prompt.generated + self._waste
            if self._admission is not None:
                self._admission.enter(1)

    def _may_enter(self, num_bundles: int) -> bool:
        """Whether the rate lets a bundle in: always, once all that wait fit."""
        if self._admission is None or self._admission.num_rows:
            return True
        live = self._decoding.count + len(self._prompts)
        has_slots = live + num_bundles - self._num_entered <= self._max_live
        return has_slots and self._waiting_tokens <= self._cache.spare

    def _next_prompt(self) -> _Prompt:
        length, generated = self._lengths(self._num_entered)
        return _Prompt(length, generated, length)

    def _lengths(self, bundle: int) -> tuple[int, int]:
        prompt, generated = self._rows[bundle % len(self._rows)]
        computed = self._workload.computed(prompt)
        return max(1, round(computed / self.stride)), max(1, round(generated / self.stride))

    def _hold(self, prompt: _Prompt, step: int, sign: int = 1) -> None:
        """Reserve room for a bundle as if its prompt ended at this step; sign -1 releases it."""
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
