"""An engine that only waits: every step takes as long as a plan says, and nothing is computed.

Intake, pool, scheduler, KV blocks, sampling, decoding, journal and operator are the real ones; what
is replaced is the arithmetic of a step. So many nodes fit on one small machine, and what is left to
measure is everything around the GPU.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from raymoe.engine.accuracy import load_of_scheduled_tokens
from raymoe.engine.load import EngineParts
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import ConfigError
from raymoe.plan.footprint import LOGIT_CHUNK_ROWS
from raymoe.plan.job import StepTimes
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy
from raymoe.plan.work import StepLoad
from raymoe.runtime.batch import InputBatch
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.schedule.timeline import Span, Timeline
from raymoe.specs.model import ModelSpec

_STEP = Task(op=Op.EXPERTS, layer=0, part=0, resource=Resource.GPU)  # all of it
_TOKEN = 97  # that always follows; an ordinary one of every vocabulary here


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingModel:
    """What a waiting engine stands for; small enough to be sent to every actor.

    Attributes:
        policy: Sizes of steps and of the KV cache.
        times: Seconds of any step, all of its nodes known.
        speedup: Steps are so many times shorter than predicted.
        max_model_len: Of any sequence.
    """

    policy: Policy
    times: StepTimes
    speedup: float
    max_model_len: int

    @classmethod
    def of(cls, plan: Plan, *, speedup: float) -> "WaitingModel":
        """Take the policy and the step times of a plan.

        Raises:
            ConfigError: The speed-up is not positive.
        """
        if not speedup > 0:
            raise ConfigError(f"the speed-up is {speedup!r}; it must be positive")
        times = plan.step_times()
        rows = (0.0, 1.0, times.max_rows / 4, times.max_rows / 2, times.max_rows)
        maximum = times.max_prompt_tokens
        prompts = (0.0, 1.0, maximum / 4, maximum / 2, maximum)
        for row, context, prompt in itertools.product(rows, times.contexts, prompts):
            times(StepLoad(decode_rows=row, decode_context=context, prompt_tokens=prompt))
        workload = plan.workload
        return cls(
            policy=plan.policy,
            times=times,
            speedup=speedup,
            max_model_len=2 * workload.context_tokens,
        )

    def seconds(self, load: StepLoad) -> float:
        """What a step takes here."""
        return self.times(load) / self.speedup


class WaitingRunner:
    """Runs passes by waiting; every row's next token is the same.

    Args:
        model: How long they take.
        vocab_size: Of the logits.
        on_step: Called after each with the number of tokens that it gave.
    """

    def __init__(
        self, model: WaitingModel, vocab_size: int, on_step: Callable[[int], None] | None = None
    ) -> None:
        self._model, self._on_step = model, on_step
        self.last_timeline = Timeline("waiting", ())
        self._logits_CV = torch.zeros(LOGIT_CHUNK_ROWS, vocab_size)
        self._logits_CV[:, _TOKEN] = 1.0

    @contextmanager
    def run(self, batch: InputBatch) -> Iterator[Tensor]:
        """Give rows of made-up logits, and end when the step would be over."""
        begin_s = time.perf_counter()
        sequences = batch.sequences
        num_scheduled_tokens = np.diff(sequences.query_start)
        load = load_of_scheduled_tokens(num_scheduled_tokens, sequences.context_tokens)
        num_rows = len(batch.logit_rows)
        yield torch.empty(num_rows, 0)
        seconds = self._model.seconds(load)
        time.sleep(max(0.0, begin_s + seconds - time.perf_counter()))
        elapsed_s = time.perf_counter() - begin_s
        if self._on_step is not None:
            self._on_step(num_rows)
        self.last_timeline = Timeline("waiting", (Span(_STEP, 0.0, elapsed_s),))

    def compute_logits(self, hidden_RH: Tensor) -> Tensor:
        """The same for every row; at most `LOGIT_CHUNK_ROWS`."""
        return self._logits_CV[: len(hidden_RH)]

    def interrupt(self) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to give back."""


def waiting_parts(
    model: WaitingModel, directory: Path, on_step: Callable[[int], None] | None = None
) -> EngineParts:
    """Parts of an engine that waits; the directory has a tokenizer and its vocabulary."""
    spec = ModelSpec.from_directory(directory)
    return EngineParts(
        runner=WaitingRunner(model, spec.vocab_size, on_step),
        policy=model.policy,
        tokenizer=Tokenizer(directory, spec.vocab_size),
        vocab_size=spec.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=(),
        num_threads=1,
        num_torch_threads=1,
    )
