"""The passes of a whole job, admitted and refilled as the engine does it, with their seconds.

A miniature of the engine's pass scheduler (MoE-Lens, section 6.2, extended): every pass holds a
token of each sequence that decodes and prompt tokens up to the budget; rows join while the KV
cache would not overflow before others end.

Assumptions: lengths are known (the engine forecasts them) and nothing is preempted. Where there are
many rows, a few of like length move as one. A job of many batches is simulated until its rate is
steady and then extended.
"""

from collections.abc import Callable
from dataclasses import dataclass

from raymoe.plan.load import PassLoad
from raymoe.plan.policy import Policy
from raymoe.plan.streaming import KV_BLOCK_TOKENS
from raymoe.specs.workload import Workload

BATCHES = 3  # that are simulated; beyond, every batch takes as long as the second
BUNDLES = 128  # of a batch: rows that move as one
MEAN_WASTE = KV_BLOCK_TOKENS // 2  # tokens that a last block could still take
MOST_ADMISSIONS = 256  # of one pass, as in the engine


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
    batch = min(policy.batch_size, workload.num_rows)
    bundle = max(1, batch // BUNDLES)
    num_bundles = min(workload.num_rows, BATCHES * batch) // bundle
    job = _Job(workload, policy, num_bundles, bundle)
    while job.num_finished < num_bundles:
        job.step(seconds_of)
    num_more = workload.num_rows / bundle - num_bundles
    bundle_s = job.steady_s(num_bundles // BATCHES) if num_more >= 1 else job.now_s / num_bundles
    return JobEstimate(
        seconds=job.now_s + num_more * bundle_s,
        num_passes=job.num_passes * (1 + num_more * bundle_s / job.now_s),
        prompt_tokens=workload.total_prompt_tokens,
        generated_tokens=workload.total_generated_tokens,
    )


@dataclass(slots=True)
class _Ending:
    """Sequences that end with the same pass.

    Attributes:
        count: How many.
        offset: Sum of the tokens they would have had at pass 0, growing by one a pass.
    """

    count: int = 0
    offset: int = 0

    def tokens(self, number: int) -> int:
        """Their tokens at a pass."""
        return self.offset + self.count * number

    def add(self, count: int, tokens: int, number: int) -> None:
        """Sequences that have so many tokens each at a pass."""
        self.count += count
        self.offset += count * (tokens - number)


@dataclass(slots=True)
class _Prompt:
    """A bundle whose prompt is being computed."""

    length: int
    generated: int
    left: int


class _Job:
    """Bundles of rows from the queue to their end."""

    def __init__(self, workload: Workload, policy: Policy, num_bundles: int, bundle: int) -> None:
        self._workload, self._policy = workload, policy
        self._num_bundles, self._bundle = num_bundles, bundle
        # As in the engine, one block of 64 stays free for growth that no forecast saw.
        self._capacity = (policy.num_kv_blocks - policy.num_kv_blocks // 64) * KV_BLOCK_TOKENS
        self._num_entered = 0
        self._prompts: list[_Prompt] = []
        self._endings: dict[int, _Ending] = {}
        self._num_decoding = 0
        self._end_s: list[float] = []  # when each bundle ended
        self.num_passes = 0
        self.now_s = 0.0

    @property
    def num_finished(self) -> int:
        """Bundles that have ended."""
        return len(self._end_s)

    def step(self, seconds_of: Callable[[PassLoad], float]) -> None:
        """One pass."""
        number, decoding = self.num_passes, self._num_decoding
        context = sum(ending.tokens(number) for ending in self._endings.values())
        prompt_tokens, num_chunks, done = self._take_prompts()
        self.now_s += seconds_of(
            PassLoad(
                decode_rows=decoding,
                decode_context=context / decoding if decoding else 0.0,
                prompt_tokens=prompt_tokens,
                prompt_chunk=prompt_tokens / num_chunks if num_chunks else 1.0,
            )
        )
        self.num_passes += 1
        ended = self._endings.pop(number, _Ending()).count
        self._num_decoding -= ended
        self._finish(ended // self._bundle)
        for prompt in done:
            self._begin_decoding(prompt)

    def steady_s(self, batch: int) -> float:
        """Seconds of a bundle while the second batch of bundles ended."""
        return (self._end_s[2 * batch - 1] - self._end_s[batch - 1]) / batch

    def _take_prompts(self) -> tuple[int, int, list[_Prompt]]:
        """Prompt tokens of this pass, chunks that they come in, and prompts that end."""
        budget = self._policy.pass_tokens - self._num_decoding
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
        profile = self._profile()
        for _ in range(MOST_ADMISSIONS):
            live = self._num_decoding + self._bundle * (len(self._prompts) + 1)
            is_idle = live == self._bundle
            if budget <= 0 or self._num_entered == self._num_bundles:
                return
            length, generated = self._workload.lengths(self._num_entered)
            self._enter(profile, length, generated)
            is_over = live > self._policy.batch_size or not self._fits(profile)
            if is_over and not is_idle:
                return
            left = length * self._bundle
            self._prompts.append(_Prompt(length, generated, left))
            self._num_entered += 1
            budget -= left

    def _profile(self) -> dict[int, _Ending]:
        """What the cache holds from now on if nobody joins, with the waste of last blocks."""
        profile = {
            number: _Ending(ending.count, ending.offset + ending.count * MEAN_WASTE)
            for number, ending in self._endings.items()
        }
        for prompt in self._prompts:
            self._enter(profile, prompt.length, prompt.generated)
        return profile

    def _enter(self, profile: dict[int, _Ending], length: int, generated: int) -> None:
        end = profile.setdefault(self.num_passes + generated, _Ending())
        end.add(self._bundle, length + MEAN_WASTE, self.num_passes)

    def _fits(self, profile: dict[int, _Ending]) -> bool:
        """Whether the cache never overflows: as sequences end, those that run longer have grown."""
        if sum(ending.tokens(number) for number, ending in profile.items()) <= self._capacity:
            return True
        running = _Ending()
        for number in sorted(profile, reverse=True):
            running.count += profile[number].count
            running.offset += profile[number].offset
            if running.tokens(number) > self._capacity:
                return False
        return True

    def _begin_decoding(self, prompt: _Prompt) -> None:
        """The pass that ended the prompt gave the first token; each later one gives another."""
        if prompt.generated == 1:
            self._finish(1)
            return
        last = self.num_passes + prompt.generated - 2
        ending = self._endings.setdefault(last, _Ending())
        ending.add(self._bundle, prompt.length + 1, self.num_passes)
        self._num_decoding += self._bundle

    def _finish(self, num_bundles: int) -> None:
        self._end_s += [self.now_s] * num_bundles
