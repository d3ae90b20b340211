"""Requests: from what a caller gives to tokens, limits, parameters and a key."""

import dataclasses
import functools
import hashlib
import itertools
import numbers
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from raymoe.chat.reasoning import ReasoningStart, find_reasoning_parser, start_of_text
from raymoe.config import MAX_SAMPLES, EngineConfig, SamplingParams
from raymoe.engine.grammars import check_present
from raymoe.engine.outputs import Generation, Int32s, TokenLogprob
from raymoe.engine.reasoning_state import ReasoningState
from raymoe.engine.tasks.reading import Found, Reading
from raymoe.engine.tasks.rows import EncodedRow, RowEncoder, TaskOptions, TaskRow
from raymoe.engine.tokenizer import (
    MAX_BATCH,
    Room,
    StopStrings,
    Text,
    Tokenizer,
    continued_text,
    value_or_raise,
)
from raymoe.errors import ConfigError
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.memory.prefixes import prefix_keys
from raymoe.runtime.batch import blocks_of_tokens
from raymoe.specs.files import read_chat_template


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One row: its prompt, its parameters, and the future that its samples resolve.

    Attributes:
        params: How its tokens are chosen.
        max_tokens_total: Prompt and generated tokens at which a sample is over.
        future: Resolved when all samples are finished.
        reading: What is read off its prompt instead of generating after it; None generates.
        order: Order of arrival among requests.
        call: What submitted it, and may drop it with its other rows.
        prefix_keys: Of the prompt's full blocks; None until the scheduler needs them.
        prompt_end: The last characters of a rendered chat; "" for other prompts.
        reasoning: How its text begins, where the constraint or stop strings wait for an answer.
        reasoning_token: What begins reasoning, if it is one token.
        bad_words: Tokens of words that are not generated.
        undecoded: Token ids whose text is still missing in `finished`, by index.
    """

    prompt: Int32s
    params: SamplingParams
    max_tokens_total: int
    seed: int
    row_key: int
    future: Future[Generation]
    reading: Reading | None = None
    order: int = 0
    call: object = None
    prompt_end: str = ""
    reasoning: ReasoningStart | None = None
    reasoning_token: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    prefix_keys: tuple[bytes, ...] | None = None
    samples: list["Sample"] = field(default_factory=list)
    finished: list[Generation | None] = field(default_factory=list)
    undecoded: dict[int, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.samples = [Sample(request=self, index=index) for index in range(self.params.n)]
        self.finished = [None] * self.params.n

    @property
    def generation(self) -> Generation:
        first, *others = [entry for entry in self.finished if entry is not None]
        return dataclasses.replace(first, others=tuple(others), prompt_end=self.prompt_end)


@dataclass(slots=True, eq=False, kw_only=True)
class Sample:
    """One sequence of a request, from its first admission to its end.

    Attributes:
        index: 0 to n - 1.
        slot: Where it lives; -1 while it waits.
        tokens: What is known while it waits; None means just the prompt.
        num_cached_tokens: Prompt tokens whose KV was shared at the last admission.
        snapshot_blocks: Lengths of its prompt, in blocks, after which its state is kept for others.
        prompt_logprobs: Of the prompt's tokens, when asked for; complete or being collected.
        stop_strings: Looks for stop strings, when there are any.
        reasoning: Whether it is in its reasoning, where that matters.
        answer_index: Of its generated tokens, the first of its answer.
        is_restarted: Whether it computes all its KV again, as for a longer prompt.
        found: What was read off the prompt so far, where it has a `reading`.
    """

    request: Request
    index: int
    slot: int = -1
    tokens: Int32s | None = None
    num_cached_tokens: int = 0
    snapshot_blocks: tuple[int, ...] = ()
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    stop_strings: StopStrings | None = None
    reasoning: ReasoningState | None = None
    answer_index: int = 0
    is_restarted: bool = False
    found: Found | None = None

    @property
    def arrival(self) -> int:
        return self.request.order * MAX_SAMPLES + self.index

    @property
    def known(self) -> Int32s:
        """Tokens to compute at admission: the prompt, and what was generated before."""
        return self.request.prompt if self.tokens is None else self.tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def is_constrained(self) -> bool:
        """Whether its next token follows `structured_outputs`."""
        has_form = self.request.params.structured_outputs_params is not None
        return has_form and (self.reasoning is None or not self.reasoning.is_open)

    @property
    def has_fixed_length(self) -> bool:
        """Whether nothing but the limit ends this sample."""
        params = self.request.params
        if self.request.reading is not None:
            return True
        return params.ignore_eos and not params.stop_strings and not params.stop_token_ids

    @property
    def logit_positions(self) -> tuple[int, int]:
        """Begin and end of the prompt's positions whose logits are wanted besides the last one's.

        KV of tokens before the begin may be shared with other sequences.
        """
        num_tokens = self.num_prompt_tokens
        if self.request.reading is not None:
            return self.request.reading.logit_positions(num_tokens)
        return (0 if self.wants_prompt_logits else num_tokens), num_tokens

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log probabilities of the prompt are still missing."""
        wanted = self.index == 0 and self.request.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs or ()) < self.num_prompt_tokens


def num_shared_tokens(prompts: Iterable[Int32s]) -> int:
    """Count the tokens that rows of these prompts find in a KV cache that keeps every prefix."""
    known, num_blocks = set[bytes](), 0
    for prompt in prompts:
        keys = prefix_keys(prompt)
        num_blocks += next((i for i, key in enumerate(keys) if key not in known), len(keys))
        known.update(keys)
    return num_blocks * BLOCK_TOKENS


DEFAULT_PARAMS = SamplingParams()
PROMPT_END_CHARACTERS = 32  # enough for a marker of reasoning
MIN_SPECIAL_CHARACTERS = 3  # shorter ones may be ordinary parts of stop strings
MAX_WORD_LISTS = 1024  # whose tokens are kept
MAX_ROW_LOGPROBS = 1 << 20  # 128 MiB of entries


@dataclass(frozen=True, slots=True)
class _Row:
    index: int
    prompt: Text | Int32s
    params: SamplingParams
    key: object
    occurrence: int | None
    continued: str = ""  # the assistant's message that a chat continues


class InputProcessor:
    """Builds requests.

    Args:
        max_model_len: Prompt and generated tokens of a row.
        has_eos: Whether the model has a token that ends a text.
        config: Says what happens to long prompts, and the seed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        num_kv_blocks: int,
        has_eos: bool,
        config: EngineConfig,
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._max_context_tokens, self._num_kv_blocks = max_model_len, num_kv_blocks
        self._has_eos = has_eos
        self._on_too_long, self._seed = config.on_too_long, config.seed
        self.reasoning_parser = find_reasoning_parser(read_chat_template(tokenizer.directory))
        self._reasoning_tokens: dict[str, int | None] = {}
        self._encode_words = functools.lru_cache(MAX_WORD_LISTS)(self._encode_words_once)

    def build(self, prompt: object, params: object, row_key: object) -> Request:
        """A request for one row.

        Raises:
            ConfigError: The prompt or the parameters cannot be used; says why.
        """
        ((_, built),) = self.build_all([prompt], [params], [row_key], [None])
        if isinstance(built, Exception):
            raise built
        return built

    def build_all(
        self,
        prompts: Sequence[object],
        params: Sequence[object],
        row_keys: Sequence[object],
        occurrences: Sequence[int | None],
    ) -> Iterator[tuple[int, Request | Exception]]:
        """Requests, or why there is none, with their indexes; those with long texts come last.

        Args:
            occurrences: How many rows equal to each there were before it, of rows without a key;
                None counts those of this call.
        """
        waiting: list[_Row] = []
        long: list[_Row] = []
        seen: Counter[int] = Counter()
        for index, row in enumerate(zip(prompts, params, row_keys, occurrences, strict=True)):
            try:
                read = self._read(index, *row)
            except Exception as error:  # whatever is wrong with a row is the row's error
                yield index, error
                continue
            is_long = isinstance(read.prompt, Text) and read.prompt.is_long
            (long if is_long else waiting).append(read)
            if len(waiting) == MAX_BATCH:
                yield from self._encode(waiting, seen)
                waiting = []
        yield from self._encode(waiting, seen)
        for late in long:
            yield from self._encode([late], seen)

    def read_prompts(
        self, prompts: Sequence[object], params: Sequence[object]
    ) -> list[tuple[str, list[int]]]:
        """Text of prompts ("" for token ids) and their tokens, as `build_all` has them.

        Raises:
            ConfigError: One of them cannot be used.
        """
        rows = [self._read(0, *row, None, None) for row in zip(prompts, params, strict=True)]
        texts = [row.prompt for row in rows if isinstance(row.prompt, Text)]
        encoded = iter([*map(value_or_raise, self._tokenizer.encode_all(texts))])
        return [
            (row.prompt.text, next(encoded).tolist())
            if isinstance(row.prompt, Text)
            else ("", self._fit(row.prompt, row.params.max_tokens).tolist())
            for row in rows
        ]

    def encode_rows(
        self, rows: Sequence[TaskRow], options: TaskOptions, head: str
    ) -> Iterator[tuple[int, EncodedRow | Exception]]:
        """Tokens of rows of a task, cut into parts that fit the context, or why there are none."""
        for begin in range(0, len(rows), MAX_BATCH):
            chunk = rows[begin : begin + MAX_BATCH]
            encoder = RowEncoder(self._tokenizer, options, self._max_context_tokens, head)
            encoded = encoder.encode(chunk, truncates=self._on_too_long)
            for i, row in enumerate(encoded):
                longest = 0 if isinstance(row, Exception) else max(map(len, row.sequences()))
                needed = blocks_of_tokens(longest)
                if needed > self._num_kv_blocks:
                    encoded[i] = ConfigError(
                        f"the row has {longest} tokens, which is {needed} KV blocks of "
                        f"{BLOCK_TOKENS} tokens; the cache has {self._num_kv_blocks}: shorten it, "
                        "or give the engine more host memory"
                    )
            yield from zip(range(begin, begin + len(chunk)), encoded, strict=True)

    def build_read(self, tokens: Int32s, targets: Int32s | None, pooling: str) -> Request:
        """A request that only reads a prompt of these tokens."""
        reading = Reading(pooling=pooling, targets=targets)
        return Request(
            prompt=tokens, params=DEFAULT_PARAMS, max_tokens_total=len(tokens), seed=0, row_key=0,
            future=Future(), reading=reading,
        )  # fmt: skip

    def _read(  # noqa: PLR0917 - a row
        self, index: int, prompt: object, params: object, row_key: object, occurrence: int | None
    ) -> "_Row":
        checked = self.check_params(params)
        room = Room(max_tokens=self._room(checked.max_tokens), on_too_long=self._on_too_long)
        continued = continued_text(prompt)
        text = self._tokenizer.read(prompt, room)
        return _Row(index, text, checked, row_key, occurrence, continued)

    def _encode(
        self, rows: Sequence["_Row"], seen: Counter[int]
    ) -> Iterator[tuple[int, Request | Exception]]:
        texts = [row.prompt for row in rows if isinstance(row.prompt, Text)]
        encoded: Iterator[Int32s | Exception]
        try:
            encoded = iter(self._tokenizer.encode_all(texts))
        except Exception as error:
            encoded = itertools.repeat(error)
        for row in rows:
            tokens = next(encoded) if isinstance(row.prompt, Text) else row.prompt
            try:
                yield (
                    row.index,
                    tokens if isinstance(tokens, Exception) else self._build(row, tokens, seen),
                )
            except Exception as error:
                yield row.index, error

    def _build(self, row: "_Row", tokens: Int32s, seen: Counter[int]) -> Request:
        checked = row.params
        tokens = self._fit(tokens, checked.max_tokens)
        limit = min(len(tokens) + checked.max_tokens, self._max_context_tokens)
        self._check_fits_cache(len(tokens), limit)
        _check_num_logprobs(checked, len(tokens), limit)
        reasoning, reasoning_token = self._reasoning(row)
        return Request(
            prompt=tokens,
            params=checked,
            max_tokens_total=limit,
            seed=self._seed if checked.seed is None else checked.seed,
            row_key=self._key_of(row, tokens, seen),
            future=Future(),
            prompt_end=_chat_end(row.prompt),
            reasoning=reasoning,
            reasoning_token=reasoning_token,
            bad_words=self._encode_words(tuple(checked.bad_words)) if checked.bad_words else (),
        )

    def _reasoning(self, row: "_Row") -> tuple[ReasoningStart | None, int | None]:
        """How the text of a row begins, if its constraint or stop strings must not see reasoning.

        And the token that begins it. A constrained text that cannot say it by one token is an
        answer from its first token on.
        """
        prompt_end, params = _chat_end(row.prompt), row.params
        form = params.structured_outputs_params
        if not prompt_end or not self.reasoning_parser or not (form or params.stop_strings):
            return None, None
        start = start_of_text(self.reasoning_parser, prompt_end, row.continued)
        if start is None or (form is None and not start.hides_from(params.stop_strings)):
            return None, None
        if form is None or start.is_open:
            return start, None
        token = self._reasoning_token(start.begin)
        return (None if token is None else start), token

    def _encode_words_once(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of words with and without a space before them, as vLLM has them."""
        variants = [(word, f" {word.lstrip()}") for word in words]
        texts = [Text(text, False, Room()) for pair in variants for text in pair]
        encoded = iter([*map(value_or_raise, self._tokenizer.encode_all(texts))])
        found = []
        for word, spaced in zip(encoded, encoded, strict=True):
            found.append(tuple(word.tolist()))
            # With a space it counts where it is another word of as many tokens.
            if len(word) == len(spaced) and word[0] != spaced[0]:
                found.append(tuple(spaced.tolist()))
        return tuple(found)

    def _reasoning_token(self, begin: str) -> int | None:
        if begin not in self._reasoning_tokens:
            tokens = self._tokenizer.encode_all([Text(begin, False, Room())])[0]
            if isinstance(tokens, Exception):  # an id that the model lacks, say
                tokens = np.empty(0, np.int32)
            self._reasoning_tokens[begin] = int(tokens[0]) if len(tokens) == 1 else None
        return self._reasoning_tokens[begin]

    def _key_of(self, row: "_Row", tokens: Int32s, seen: Counter[int]) -> int:
        if row.key is not None:
            return hash_key(row.key)
        first, occurrence = _hash_row(tokens, row.params), row.occurrence
        if occurrence is None:
            occurrence = seen[first]
            seen[first] += 1
        return _hash(f"{first} {occurrence}".encode()) if occurrence else first

    def check_params(self, params: object) -> SamplingParams:
        """Return parameters as a row has them; refuses those that the model cannot have."""
        if params is None:
            return DEFAULT_PARAMS
        if isinstance(params, Mapping):
            params = SamplingParams.from_dict(params)
        if not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise ConfigError(f"sampling_params is a {kind}; it takes SamplingParams or a mapping")
        if params.stop_strings:
            params = self._with_stop_tokens(params)
        if params.structured_outputs_params is not None:
            self._check_can_have_form()
        if params.bad_words and not self._tokenizer.is_present:
            raise ConfigError("bad_words need a tokenizer, which the model directory lacks")
        params.check_tokens(self._vocab_size)
        return params

    def _with_stop_tokens(self, params: SamplingParams) -> SamplingParams:
        """Let stop strings that are special tokens, which no text has, end rows as tokens."""
        if not self._tokenizer.is_present:
            raise ConfigError("stop strings need a tokenizer, which the model directory lacks")
        special = self._tokenizer.special_token_ids()
        for stop in params.stop_strings:
            for text, token in special.items() if params.skip_special_tokens else ():
                if len(text) >= MIN_SPECIAL_CHARACTERS and text in stop and text != stop:
                    raise ConfigError(
                        f"stop has {stop!r:.60} with the special token {text!r:.40}, which is not "
                        f"in the text; give it alone, or stop_token_ids [{token}]"
                    )
        ids = [special[stop] for stop in params.stop_strings if stop in special]
        known = [*(params.stop_token_ids or ())]
        added = [token for token in ids if token not in known]
        return dataclasses.replace(params, stop_token_ids=[*known, *added]) if added else params

    def _check_can_have_form(self) -> None:
        check_present()
        if not (self._tokenizer.is_present and self._has_eos):
            raise ConfigError(
                "structured_outputs need a tokenizer and an EOS token, which the model lacks"
            )

    def _room(self, max_tokens: int) -> int:
        context = self._max_context_tokens
        if self._on_too_long == "error":
            return context - 1
        # Room for what is generated, but never less than half of the context for the prompt.
        return max(context - max_tokens, context // 2, 1)

    def _fit(self, tokens: Int32s, max_tokens: int) -> Int32s:
        length, room = len(tokens), self._room(max_tokens)
        if length <= room:
            return tokens
        if self._on_too_long == "error":
            raise ConfigError(
                f"the prompt has {length} tokens; at most {room} fit the context of {room + 1} "
                "tokens with one generated: shorten it or set on_too_long"
            )
        return tokens[-room:] if self._on_too_long == "truncate_left" else tokens[:room]

    def _check_fits_cache(self, num_prompt_tokens: int, limit: int) -> None:
        # The last generated token is never computed, so it needs no room.
        needed = blocks_of_tokens(max(limit - 1, num_prompt_tokens))
        if needed > self._num_kv_blocks:
            raise ConfigError(
                f"the row may need {limit} tokens ({num_prompt_tokens} of the prompt), which is "
                f"{needed} KV blocks of {BLOCK_TOKENS} tokens; the cache has "
                f"{self._num_kv_blocks}: reduce max_tokens, shorten the prompt, or give the "
                "engine more host memory"
            )


def _chat_end(prompt: Text | Int32s) -> str:
    if not isinstance(prompt, Text) or prompt.has_special:
        return ""
    return prompt.text[-PROMPT_END_CHARACTERS:]


def _check_num_logprobs(params: SamplingParams, num_prompt_tokens: int, limit: int) -> None:
    """Bound what a row holds in memory: an entry takes a hundred times what its token takes."""
    count = 0
    if params.logprobs is not None:
        count += params.n * (limit - num_prompt_tokens) * (1 + params.logprobs)
    if params.prompt_logprobs is not None:
        count += num_prompt_tokens * (1 + params.prompt_logprobs)
    if count > MAX_ROW_LOGPROBS:
        raise ConfigError(
            f"the row may need {count} log probabilities; at most {MAX_ROW_LOGPROBS} are allowed: "
            "reduce logprobs, prompt_logprobs, n or max_tokens"
        )


def hash_key(value: object) -> int:
    """63 bits of a row key: equal for equal values, whatever their integer or string type."""
    if isinstance(value, numbers.Integral):
        text = f"i{int(value)}"
    elif isinstance(value, str):
        text = f"s{value}"
    elif isinstance(value, bytes):
        text = f"b{value.hex()}"
    else:
        text = f"r{value!r}"
    return _hash(text.encode("utf-8", "surrogatepass"))


# Added after the first journals: where they are at their defaults, rows keep their keys.
_LATER = ("bad_words", "allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens")


def _hash_row(tokens: Int32s, params: SamplingParams) -> int:
    fields = dataclasses.asdict(params)
    fields["logit_bias"] = sorted((params.logit_bias or {}).items())
    for name in _LATER:
        if fields[name] == getattr(DEFAULT_PARAMS, name):
            del fields[name]
    return _hash(np.ascontiguousarray(tokens, "<i4").tobytes() + repr(fields).encode())


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
