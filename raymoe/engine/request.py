"""A row inside the engine: one Python object per row and per sample, none per token."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from raymoe.config import MAX_SAMPLES, SamplingParams
from raymoe.engine.generation import Generation, TokenLogprob
from raymoe.engine.sequence import Int32s
from raymoe.engine.stopping import StopStrings


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One row: its prompt, its parameters, and the future that its samples resolve.

    Attributes:
        prompt: Token ids.
        params: How its tokens are chosen.
        limit_tokens: Prompt and generated tokens at which a sample is over.
        seed: Of the random numbers.
        row_key: Of the random numbers; 63 bits.
        future: Resolved when all samples are finished.
        order: Order of arrival among requests.
        prefix_keys: Of the prompt's full blocks; None until the scheduler needs them.
        samples: Its sequences.
        finished: Their answers, by index.
        undecoded: Token ids whose text is still missing in `finished`, by index.
    """

    prompt: Int32s
    params: SamplingParams
    limit_tokens: int
    seed: int
    row_key: int
    future: Future[Generation]
    order: int = 0
    prefix_keys: tuple[bytes, ...] | None = None
    samples: list["Sample"] = field(default_factory=list)
    finished: list[Generation | None] = field(default_factory=list)
    undecoded: dict[int, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.samples = [Sample(request=self, index=index) for index in range(self.params.n)]
        self.finished = [None] * self.params.n

    @property
    def generation(self) -> Generation:
        """The answer, once all samples are over."""
        first, *others = [entry for entry in self.finished if entry is not None]
        return dataclasses.replace(first, others=tuple(others))


@dataclass(slots=True, eq=False, kw_only=True)
class Sample:
    """One sequence of a request, from its first admission to its end.

    Attributes:
        index: 0 to n - 1.
        slot: Where it lives; -1 while it waits.
        tokens: What is known while it waits; None means just the prompt.
        num_cached_tokens: Prompt tokens whose KV was shared at the last admission.
        logprobs: Of the generated tokens, when asked for.
        prompt_logprobs: Of the prompt's tokens, when asked for; complete or being collected.
        stop_strings: Looks for stop strings, when there are any.
    """

    request: Request
    index: int
    slot: int = -1
    tokens: Int32s | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    stop_strings: StopStrings | None = None

    @property
    def arrival(self) -> int:
        """Order among all sequences."""
        return self.request.order * MAX_SAMPLES + self.index

    @property
    def known(self) -> Int32s:
        """Tokens to compute at admission: the prompt, and what was generated before."""
        return self.request.prompt if self.tokens is None else self.tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def has_fixed_length(self) -> bool:
        """Whether nothing but the limit ends this sample."""
        params = self.request.params
        return params.ignore_eos and not params.stop_strings and not params.stop_token_ids

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log probabilities of the prompt are still missing."""
        wanted = self.index == 0 and self.request.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs or ()) < self.num_prompt_tokens
