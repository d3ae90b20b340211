"""The passes of a whole job, admitted and refilled as the engine does it, with their seconds.

A miniature of the engine's pass scheduler (MoE-Lens, section 6.2, extended): every pass holds a
token of each sequence that decodes and prompt tokens up to the budget; rows join while the KV
cache would not overflow before others end.

Assumptions: lengths are known (the engine forecasts them) and nothing is preempted. Where there are
many rows, a few of like length move as one, and where rows are long, a few passes count as one. A
job of many batches is simulated until it is steady, and goes on with such passes until all tokens
are computed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from raymoe.plan.cache_forecast import CacheForecast, GrowingRows
from raymoe.plan.load import Passes, PassLoad, alike
from raymoe.plan.policy import Policy
from raymoe.plan.streaming import KV_BLOCK_TOKENS
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div

BATCHES = 3  # that are simulated; beyond, passes are as those of the second
BUNDLES = 256  # of a batch: rows that move as one
LEAST_BUNDLES = 8  # that count as a batch: fewer tell little of rows that differ
STEPS = 256  # of a row: passes beyond that count several as one
MEAN_WASTE = KV_BLOCK_TOKENS // 2  # tokens that a last block could still take


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
        seconds_of: How long a pass takes; asked for a few loads.
    """
    return JobEstimate.of(workload, alike(job_passes(workload, policy)), seconds_of)


def job_passes(workload: Workload, policy: Policy) -> list[Passes]:
    """The passes of a job, whatever they take."""
    batch = min(policy.batch_size, workload.num_rows)
    job = _Job(
        workload,
        policy,
        rows=max(1.0, batch / BUNDLES),
        stride=ceil_div(workload.generated_tokens, STEPS),
    )
    num_bundles = round(workload.num_rows / job.rows)
    each = max(LEAST_BUNDLES, round(batch / job.rows))
    num_simulated = min(num_bundles, BATCHES * each)
    job.run(num_simulated)
    passes = [Passes(load, float(job.stride)) for load in job.loads]
    if num_simulated == num_bundles:
        return passes
    steady = slice(job.ends[each - 1] + 1, job.ends[2 * each - 1] + 1)
    left = _tokens_of(workload) - sum(number * load.tokens for load, number in passes)
    more = left / sum(load.tokens for load, _ in passes[steady])
    passes[steady] = [Passes(load, number + more) for load, number in passes[steady]]
    return passes


def _tokens_of(workload: Workload) -> float:
    """Tokens that are computed: the last one of a row is not."""
    return workload.total_prompt_tokens + workload.total_generated_tokens - workload.num_rows


def fewest_passes(workload: Workload, policy: Policy) -> Passes:
    """The passes of a job if all were alike and as full as they can be."""
    tokens, prompts = _tokens_of(workload), workload.total_prompt_tokens
    decoded = tokens - prompts
    count = max(1.0, decoded / policy.batch_size, tokens / policy.pass_tokens)
    load = PassLoad(
        decode_rows=decoded / count,
        decode_context=workload.prompt_tokens + workload.generated_tokens / 2,
        prompt_tokens=prompts / count,
        prompt_chunk=min(workload.prompt_tokens, policy.prefill_chunk_tokens),
    )
    return Passes(load, count)


@dataclass(slots=True)
class _Prompt:
    """A bundle whose prompt is being computed: tokens of each of its rows."""

    length: int
    generated: int
    left: float


class _Job:
    """The rows of a job from the queue to their end, in a smaller scale.

    A bundle of rows moves as one and a step is as many passes as the stride, so all that is counted
    here is of one row of a bundle, and in as many tokens as the stride.

    Attributes:
        rows: Of a bundle; may be a fraction.
        stride: Passes of a step.
        ends: The step with which each bundle ended.
        loads: The load of the passes of each step.
    """

    def __init__(self, workload: Workload, policy: Policy, *, rows: float, stride: int) -> None:
        self.rows, self.stride = rows, stride
        self._workload, self._policy = workload, policy
        self._most_live = round(policy.batch_size / rows)
        # As in the engine, one block of 64 stays free for growth that no forecast saw.
        num_blocks = policy.num_kv_blocks - policy.num_kv_blocks // 64
        self._cache = CacheForecast(num_blocks * KV_BLOCK_TOKENS / (rows * stride))
        self._num_entered = 0
        self._prompts: list[_Prompt] = []
        self._decoding = GrowingRows()
        self.ends: list[int] = []
        self.loads: list[PassLoad] = []

    def run(self, num_bundles: int) -> None:
        """From the first step to the end of the last bundle."""
        while len(self.ends) < num_bundles:
            self._step(num_bundles)

    def _step(self, num_bundles: int) -> None:
        now, decoding = len(self.loads), self._decoding.count
        context = self._decoding.tokens(now) / decoding if decoding else 0.0
        prompt_tokens, num_chunks, done = self._take_prompts(num_bundles)
        load = PassLoad(
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
        """Prompt tokens of this step, chunks that they come in, and prompts that end."""
        budget = self._policy.pass_tokens / self.rows - self._decoding.count
        self._admit(num_bundles, budget - sum(prompt.left for prompt in self._prompts))
        taken, num_chunks = 0.0, 0
        for prompt in self._prompts:
            take = min(prompt.left, self._policy.prefill_chunk_tokens, budget - taken)
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
            if live and live >= self._most_live:  # alone, a bundle is let in whatever it needs
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
        """The step that ended the prompt gave the first token; each later one gives another."""
        now = len(self.loads)
        self._hold(prompt, now, -1)
        if prompt.generated == 1:
            self.ends.append(now)
            return
        offset = prompt.length - now
        self._cache.hold(now + prompt.generated - 1, 1, offset + self._waste)
        self._decoding.add(1, offset)
