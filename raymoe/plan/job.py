"""The passes of a whole job, admitted and refilled as the engine does it, with their seconds.

A miniature of the engine's pass scheduler (MoE-Lens, section 6.2, extended): every pass holds a
token of each sequence that decodes and prompt tokens up to the budget; rows join while the KV
cache would not overflow before others end.

Assumptions: lengths are known (the engine forecasts them) and nothing is preempted. Where there are
many rows, a few of like length move as one, and where rows are long, a few passes count as one. A
job of many batches is simulated until its rate is steady and then extended.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from raymoe.plan.load import PassLoad
from raymoe.plan.policy import Policy
from raymoe.plan.streaming import KV_BLOCK_TOKENS
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div

BATCHES = 3  # that are simulated; beyond, every batch takes as long as the second
BUNDLES = 128  # of a batch: rows that move as one
STEPS = 256  # of a row: passes beyond that count several as one
MEAN_WASTE = KV_BLOCK_TOKENS // 2  # tokens that a last block could still take
MOST_ADMISSIONS = 256  # of one pass, as in the engine


class Passes(NamedTuple):
    """Passes of one load, and how many they are; a mean may be a fraction."""

    load: PassLoad
    number: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEstimate:
    """What a job will take.

    Attributes:
        seconds: From the first pass to the last row.
        num_passes: Passes.
        prompt_tokens: Of all rows.
        generated_tokens: Of all rows.
    """

    seconds: float
    num_passes: float
    prompt_tokens: float
    generated_tokens: float

    @classmethod
    def of(
        cls, workload: Workload, passes: Iterable[Passes], seconds_of: Callable[[PassLoad], float]
    ) -> Self:
        """Add up passes of a job."""
        passes = list(passes)
        return cls(
            seconds=sum(count * seconds_of(load) for load, count in passes),
            num_passes=sum(count for _, count in passes),
            prompt_tokens=workload.total_prompt_tokens,
            generated_tokens=workload.total_generated_tokens,
        )

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the whole job."""
        return self.generated_tokens / self.seconds


def estimate_job(
    workload: Workload, policy: Policy, seconds_of: Callable[[PassLoad], float]
) -> JobEstimate:
    """Run a job on paper.

    Args:
        workload: Its rows.
        policy: Sizes of passes and of the KV cache.
        seconds_of: How long a pass takes.
    """
    return JobEstimate.of(workload, job_passes(workload, policy), seconds_of)


def job_passes(workload: Workload, policy: Policy, *, most_steps: int = STEPS) -> list[Passes]:
    """The passes of a job, whatever they take.

    Args:
        workload: Its rows.
        policy: Sizes of passes and of the KV cache.
        most_steps: In how many steps a row generates its tokens; fewer are faster and coarser.
    """
    batch = min(policy.batch_size, workload.num_rows)
    bundle = max(1, batch // BUNDLES)
    num_bundles = min(workload.num_rows, BATCHES * batch) // bundle
    stride = ceil_div(workload.generated_tokens, most_steps)
    job = _Job(workload, policy, num_bundles, bundle=bundle, stride=stride)
    while len(job.ends) < num_bundles:
        job.step()
    num_more, each = workload.num_rows / bundle - num_bundles, num_bundles // BATCHES
    if num_more < 1:
        times = 1 + num_more / num_bundles
        return [Passes(load, stride * times) for load in job.loads]
    steady = range(job.ends[each - 1] + 1, job.ends[2 * each - 1] + 1)
    return [
        Passes(load, stride * (1 + (step in steady) * num_more / each))
        for step, load in enumerate(job.loads)
    ]


@dataclass(slots=True)
class _Rows:
    """Sequences that grow by a token a step.

    Attributes:
        count: How many.
        offset: Sum of the tokens they would have had at step 0.
    """

    count: int = 0
    offset: float = 0.0

    def tokens(self, step: int) -> float:
        """Their tokens at a step."""
        return self.offset + self.count * step

    def add(self, count: int, offset: float) -> None:
        """Some more; or fewer."""
        self.count += count
        self.offset += offset


class _Cache:
    """Who holds tokens of the KV cache, and until when."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._ending: dict[int, _Rows] = {}  # by their last step
        self._most = 0.0  # what all would hold if each had grown to its end

    def hold(self, last: int, count: int, offset: float) -> None:
        """Sequences with this last step; a negative count takes them out."""
        self._ending.setdefault(last, _Rows()).add(count, offset)
        self._most += offset + count * last

    def end(self, step: int) -> _Rows:
        """Take out those whose last step this is."""
        ended = self._ending.pop(step, _Rows())
        self._most -= ended.tokens(step)
        return ended

    @property
    def fits(self) -> bool:
        """Whether it never overflows: as sequences end, those that run longer have grown."""
        if self._most <= self._capacity:
            return True
        running = _Rows()
        for step in sorted(self._ending, reverse=True):
            ending = self._ending[step]
            running.add(ending.count, ending.offset)
            if running.tokens(step) > self._capacity:
                return False
        return True


@dataclass(slots=True)
class _Prompt:
    """A bundle whose prompt is being computed."""

    length: int
    generated: int
    left: int


class _Job:
    """Bundles of rows from the queue to their end.

    With a stride, a step is so many passes and all tokens are counted in so many.
    """

    def __init__(
        self, workload: Workload, policy: Policy, num_bundles: int, *, bundle: int, stride: int
    ) -> None:
        self._workload, self._policy = workload, policy
        self._num_bundles, self._bundle, self._stride = num_bundles, bundle, stride
        # As in the engine, one block of 64 stays free for growth that no forecast saw.
        num_blocks = policy.num_kv_blocks - policy.num_kv_blocks // 64
        self._cache = _Cache(num_blocks * KV_BLOCK_TOKENS / stride)
        self._waste = bundle * MEAN_WASTE / stride
        self._num_entered = 0
        self._prompts: list[_Prompt] = []
        self._decoding = _Rows()
        self.ends: list[int] = []  # the step with which each bundle ended
        self.loads: list[PassLoad] = []  # of each step

    def step(self) -> None:
        """One pass, or as many as the stride."""
        now, rows = len(self.loads), self._decoding.count
        context = self._decoding.tokens(now)
        prompt_tokens, num_chunks, done = self._take_prompts()
        load = PassLoad(
            decode_rows=rows,
            decode_context=self._stride * context / rows if rows else 0.0,
            prompt_tokens=prompt_tokens,
            prompt_chunk=self._stride * prompt_tokens / num_chunks if num_chunks else 1.0,
        )
        self._end(now)
        for prompt in done:
            self._begin_decoding(prompt, now)
        for prompt in self._prompts:
            self._hold(prompt, now, -1)
            self._hold(prompt, now + 1)
        self.loads.append(load)

    def _take_prompts(self) -> tuple[int, int, list[_Prompt]]:
        """Prompt tokens of this step, chunks that they come in, and prompts that end."""
        budget = self._policy.pass_tokens - self._decoding.count
        self._admit(budget - sum(prompt.left for prompt in self._prompts))
        chunk = self._policy.prefill_chunk_tokens * self._bundle
        taken, num_chunks = 0, 0
        for prompt in self._prompts:
            take = min(prompt.left, chunk, budget - taken)
            if take <= 0:
                break
            prompt.left -= take
            taken += take
            num_chunks += self._bundle
        done = [prompt for prompt in self._prompts if not prompt.left]
        self._prompts = [prompt for prompt in self._prompts if prompt.left]
        return taken, num_chunks, done

    def _admit(self, budget: int) -> None:
        for _ in range(self._stride * MOST_ADMISSIONS):
            if budget <= 0 or self._num_entered == self._num_bundles:
                return
            live = self._decoding.count + self._bundle * (len(self._prompts) + 1)
            prompt = self._next_prompt()
            self._hold(prompt, len(self.loads))
            is_over = live > self._policy.batch_size or not self._cache.fits
            if is_over and live > self._bundle:  # alone, a bundle is let in whatever it needs
                self._hold(prompt, len(self.loads), -1)
                return
            self._prompts.append(prompt)
            self._num_entered += 1
            budget -= prompt.left

    def _next_prompt(self) -> _Prompt:
        length, generated = (
            max(1, round(tokens / self._stride))
            for tokens in self._workload.lengths(self._num_entered)
        )
        return _Prompt(length, generated, length * self._bundle)

    def _hold(self, prompt: _Prompt, step: int, sign: int = 1) -> None:
        """Room for a bundle as if its prompt ended with this step; sign -1 takes it back."""
        offset = self._bundle * (prompt.length - step) + self._waste
        self._cache.hold(step + prompt.generated, sign * self._bundle, sign * offset)

    def _begin_decoding(self, prompt: _Prompt, now: int) -> None:
        """The step that ended the prompt gave the first token; each later one gives another."""
        count = self._bundle
        self._hold(prompt, now, -1)
        if prompt.generated == 1:
            self.ends.append(now)
            return
        offset = count * (prompt.length - now)
        self._cache.hold(now + prompt.generated - 1, count, offset + self._waste)
        self._decoding.add(count, offset)

    def _end(self, now: int) -> None:
        ended = self._cache.end(now)
        num_bundles = ended.count // self._bundle
        self._decoding.add(-ended.count, num_bundles * self._waste - ended.offset)
        self.ends += [now] * num_bundles
