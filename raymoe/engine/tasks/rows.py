"""Rows of the tasks score, classify and embed: options, tokens, and what becomes of the parts."""

import dataclasses
import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from raymoe.engine.outputs import Generation, Int32s
from raymoe.engine.tasks.reading import POOLINGS, Found
from raymoe.engine.tokenizer import Prompt, Room, Text, Tokenizer
from raymoe.errors import ConfigError, ExecutionError, UnknownOptionError
from raymoe.specs.workload import TASKS

NORMALIZATIONS = ("sum", "tokens")
CONTINUATION_COLUMN = "continuation"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What is computed of each row instead of a text.

    Attributes:
        task: "score": log probability of a continuation. "classify": probabilities of labels.
            "embed": a vector.
        token_logprobs: (score) Return the log probability of each token too.
        stride: (score) Tokens by which the windows of a document that is longer than the context
            advance; None is one less than the context. Each token is scored once.
        labels: (classify) Texts that are scored as continuations of each prompt. Without them and
            without labels in a row, the model's classification head answers.
        normalize: (classify) "sum" compares the log probabilities of whole labels, "tokens" the
            means of their tokens. (embed) Whether vectors have length 1, as by default.
        pooling: (embed) "last", "mean" or "cls", the first token.
        dimensions: (embed) Keep this many leading components, before vectors are normalised.
        continuation_column: (score) Column of the operator's tables with what is scored after the
            prompt. A row without a prompt is a document.
        labels_column: (classify) Column with labels of a row, instead of those of the job.
    """

    task: str
    token_logprobs: bool = False
    stride: int | None = None
    labels: Sequence[str] | None = None
    normalize: bool | str | None = None
    pooling: str = "last"
    dimensions: int | None = None
    continuation_column: str = CONTINUATION_COLUMN
    labels_column: str = "labels"

    def __post_init__(self) -> None:
        if self.task not in TASKS[1:]:
            raise ConfigError(f"task is {self.task!r:.60}; it must be one of {', '.join(TASKS)}")
        for name in _OPTIONS_OF.keys() - {self.task}:
            self._refuse_others(_OPTIONS_OF[name] - _OPTIONS_OF[self.task])
        if self.pooling not in POOLINGS:
            raise ConfigError(f"pooling is {self.pooling!r:.60}; it takes {', '.join(POOLINGS)}")
        for name in ("stride", "dimensions"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} is {value!r:.60}; it takes a whole number from 1")
        known = NORMALIZATIONS if self.task == "classify" else (True, False)
        if self.normalize is None:
            object.__setattr__(self, "normalize", known[0])
        if self.normalize not in known or isinstance(self.normalize, int) != (known[0] is True):
            shown = ", ".join(map(str, known))
            raise ConfigError(f"normalize is {self.normalize!r:.60}; {self.task} takes {shown}")
        if not isinstance(self.token_logprobs, bool):
            raise ConfigError(f"token_logprobs is {self.token_logprobs!r:.60}; it takes a boolean")
        if self.labels is not None:
            object.__setattr__(self, "labels", check_labels(self.labels))

    @property
    def columns(self) -> list[str]:
        """Columns of a table that a row's answer depends on, besides its prompt."""
        names = {"score": [self.continuation_column], "classify": [self.labels_column]}
        return names.get(self.task, [])

    def _refuse_others(self, names: set[str]) -> None:
        for name in sorted(names):
            if getattr(self, name) != _DEFAULTS[name]:
                raise ConfigError(f"{name} has no meaning for the task {self.task!r}; leave it out")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Options from a mapping; unknown keys are errors, None means "not given"."""
        for name in options:
            if name not in _DEFAULTS:
                raise UnknownOptionError(str(name), _DEFAULTS, "task option")
        return cls(**{name: value for name, value in options.items() if value is not None})


_DEFAULTS = {one.name: one.default for one in dataclasses.fields(TaskOptions)}
_OPTIONS_OF = {
    "score": {"token_logprobs", "stride", "continuation_column"},
    "classify": {"labels", "normalize", "labels_column"},
    "embed": {"normalize", "pooling", "dimensions"},
}


MAX_LABELS, MAX_LABEL_CHARACTERS = 1024, 4096
MAX_ROW_TOKENS = 1 << 25  # of all sequences of a row: 128 MiB
MAX_WINDOWS = 1 << 16  # of a document


def check_labels(labels: object) -> tuple[str, ...]:
    """Two or more different texts, not too many or too long; raises ConfigError for others."""
    if isinstance(labels, str | bytes) or not isinstance(labels, Sequence):
        raise ConfigError(f"labels is {labels!r:.60}; it takes a list of texts")
    if len(labels) > MAX_LABELS:
        raise ConfigError(f"labels has {len(labels)} texts; it takes at most {MAX_LABELS}")
    for label in labels:
        if isinstance(label, str) and len(label) > MAX_LABEL_CHARACTERS:
            raise ConfigError(
                f"labels has a text of {len(label)} characters, {label!r:.40}...; each takes at "
                f"most {MAX_LABEL_CHARACTERS}"
            )
    if not all(isinstance(label, str) and label for label in labels):
        raise ConfigError(f"labels is {list(labels)!r:.60}; each takes a text that is not empty")
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise ConfigError(f"labels is {list(labels)!r:.60}; it takes two or more different texts")
    for label in labels:
        try:
            label.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"labels has {label!r:.60}, which is not valid Unicode") from error
    return tuple(labels)


def is_empty(prompt: object) -> bool:
    """Whether there is no prompt: None, or a text, list or array of length 0."""
    if isinstance(prompt, np.ndarray):
        return prompt.size == 0
    return prompt is None or (isinstance(prompt, str | bytes | list | tuple) and not prompt)


def check_head(options: TaskOptions | None, head: str) -> None:
    """Refuse a task that the loaded head cannot do; None generates."""
    if options is None or options.task == "score" or options.labels:
        needed: tuple[str, ...] = ("lm",)
    else:
        needed = ("none",) if options.task == "embed" else ("labels", "lm")
    if head in needed:
        return
    task = "generate" if options is None else options.task
    reason = {
        "none": "was loaded without a head, which only embeds",
        "labels": "has a classification head, which only classifies, without labels of the job",
        "lm": "was loaded with its head; to embed, set head='none' of EngineConfig",
    }[head]
    raise ConfigError(f"the task is {task!r}, but the model {reason}")


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A prompt, and the texts or token ids that are scored after it."""

    prompt: Prompt | None
    continuations: Sequence[str | Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.continuations, str | bytes):  # else each letter would be one
            raise ConfigError(f"continuations is {self.continuations!r:.60}; it takes a list")


Part = tuple[Int32s, Int32s | None, str]  # tokens to compute, targets of the last ones, pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """The sequences of a row.

    Attributes:
        labels: What each part scores, where the row is one of `classify` by labels.
    """

    parts: list[Part]
    num_input_tokens: int
    labels: tuple[str, ...] | None = None

    def sequences(self) -> list[Int32s]:
        return [part[0] for part in self.parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pieces:
    """What is encoded of a row.

    Attributes:
        tails: Each sequence, or its end where there is a head.
        head: What all sequences begin with, to be encoded once.
        has_special: Whether the sequences get the tokenizer's special tokens.
    """

    tails: Sequence[Text | Int32s]
    head: Text | None = None
    has_special: bool = False

    @property
    def all(self) -> list[Text | Int32s]:
        return [*self.tails] if self.head is None else [self.head, *self.tails]


class RowEncoder:
    """Tokenizes rows.

    A continuation's tokens are those of prompt and continuation together, after as many as the
    prompt alone has, as in lm-evaluation-harness; spaces at the end of the prompt count to the
    continuation.
    """

    def __init__(
        self, tokenizer: Tokenizer, options: TaskOptions, max_tokens: int, head: str
    ) -> None:
        self._tokenizer, self._options, self._max_tokens = tokenizer, options, max_tokens
        self._head = head
        if options.stride is not None and options.stride >= max_tokens:
            raise ConfigError(
                f"stride is {options.stride}; it must be less than the context of {max_tokens} "
                "tokens, so that each window predicts its first new token from the one before"
            )

    def encode(self, rows: Sequence[TaskRow], *, truncates: str) -> list[EncodedRow | Exception]:
        read: list[_Pieces | Exception] = []
        for row in rows:
            try:
                read.append(self._read(row, truncates))
            except Exception as error:  # whatever is wrong with a row is the row's error
                read.append(error)
        every = [piece for one in read if isinstance(one, _Pieces) for piece in one.all]
        texts = {piece for piece in every if isinstance(piece, Text)}
        ordered = sorted(texts, key=lambda text: len(text.text))
        tokens = dict(zip(ordered, self._tokens(ordered), strict=True))
        encoded: list[EncodedRow | Exception] = []
        for row, one in zip(rows, read, strict=True):
            try:
                if isinstance(one, Exception):
                    raise one
                found = self._found(one, tokens)
                encoded.append(self._encode(row, found, truncates, has_special=one.has_special))
            except Exception as error:
                encoded.append(error)
        return encoded

    def _tokens(self, texts: Sequence[Text]) -> list[Int32s | Exception]:
        try:
            return self._tokenizer.encode_all(texts)
        except ExecutionError:  # it was closed, which is no row's fault
            raise
        except Exception as error:
            if len(texts) <= 1:
                return [error] * len(texts)
        return [one for text in texts for one in self._tokens([text])]

    def _found(
        self, pieces: "_Pieces", tokens: Mapping[Text, Int32s | Exception]
    ) -> Iterator[Int32s]:
        """Yield the tokens of each sequence, one at a time: together they may be long."""

        def of(piece: Text | Int32s) -> Int32s:
            return _value(tokens[piece] if isinstance(piece, Text) else piece)

        head = None if pieces.head is None else of(pieces.head)
        for tail in pieces.tails:
            if head is None:
                yield of(tail)
            else:
                yield self._tokenizer.join(head, of(tail), has_special=pieces.has_special)

    def _read(self, row: TaskRow, truncates: str) -> "_Pieces":
        """The prompt, then the prompt with each continuation; documents stand alone."""
        if self._options.task == "classify" and self._head == "lm" and row.continuations is None:
            raise ConfigError("the row has no labels, and the model has no classification head")
        if self._options.task == "classify" and self._head == "labels" and row.continuations:
            raise ConfigError("the row has labels, but the model's classification head has its own")
        if row.continuations is None:
            room = Room(max_tokens=self._max_tokens, on_too_long=truncates)
            return _Pieces(tails=[self._tokenizer.read(row.prompt, room)])
        if is_empty(row.prompt):
            if self._options.task == "classify":
                raise ConfigError("the prompt is empty")
            return _Pieces(tails=[self._tokenizer.read(one, Room()) for one in row.continuations])
        # Only the left of a prompt can be cut: what follows it is scored.
        how = truncates if truncates == "truncate_left" else "error"
        room = Room(max_tokens=self._max_tokens, on_too_long=how)
        prompt, lead = self._tokenizer.read(row.prompt, room), ""
        if isinstance(prompt, Text) and (kept := prompt.text.rstrip()):
            lead = prompt.text[len(kept) :]
            prompt = dataclasses.replace(prompt, text=kept)
        texts = [one for one in row.continuations if isinstance(one, str) and one]
        is_cut = isinstance(prompt, Text) and len(texts) == len(row.continuations)
        found = self._tokenizer.cut(prompt) if is_cut and isinstance(prompt, Text) else None
        if found is not None and isinstance(prompt, Text):
            tails = [
                Text(found[1] + end, False, Room()) for end in ("", *(lead + t for t in texts))
            ]
            return _Pieces(tails=tails, head=found[0], has_special=prompt.has_special)
        whole = prompt if isinstance(prompt, Text) else None
        if whole is not None and len(whole.text) * len(row.continuations) > MAX_ROW_TOKENS:
            raise _too_many_tokens(len(row.continuations), f"{len(whole.text)} characters")
        if whole is not None:
            prompt = dataclasses.replace(whole, room=Room())
        return _Pieces(
            tails=[prompt, *(self._join(prompt, lead, one) for one in row.continuations)],
            has_special=whole is not None and whole.has_special,
        )

    def _join(self, prompt: Text | Int32s, lead: str, one: str | Sequence[int]) -> Text | Int32s:
        if isinstance(one, str):
            if not one:
                raise ConfigError("the continuation is empty")
            if isinstance(prompt, Text):
                joined = dataclasses.replace(prompt, text=prompt.text + lead + one)
                return self._tokenizer.read(joined.text, Room()) if prompt.has_special else joined
            text = self._tokenizer.read(one, Room())
            assert isinstance(text, Text)
            (added,) = self._tokenizer.encode_all([dataclasses.replace(text, has_special=False)])
            return np.concatenate([prompt, _value(added)])
        ids = self._tokenizer.read(one, Room())
        assert not isinstance(ids, Text)
        if isinstance(prompt, Text):
            text = dataclasses.replace(prompt, text=prompt.text + lead)
            prompt = self._tokenizer.without_end(
                _value(self._tokenizer.encode_all([text])[0]), has_special=text.has_special
            )
        return np.concatenate([prompt, ids])

    def _encode(
        self, row: TaskRow, found: Iterator[Int32s], truncates: str, *, has_special: bool
    ) -> EncodedRow:
        first = next(found)
        if row.continuations is None:
            tokens = self._fit(first, truncates)
            pooling = self._options.pooling
            return EncodedRow(parts=[(tokens, None, pooling)], num_input_tokens=len(tokens))
        if is_empty(row.prompt):  # a document
            return EncodedRow(parts=self._windows(first), num_input_tokens=len(first))
        first = self._tokenizer.without_end(first, has_special=has_special)
        num_tokens = min(len(first), self._max_tokens) * len(row.continuations)
        if num_tokens > MAX_ROW_TOKENS:
            raise _too_many_tokens(len(row.continuations), f"{len(first)} tokens")
        parts: list[Part] = []
        for tokens, one in zip(found, row.continuations, strict=True):
            whole = tokens
            if isinstance(one, str):
                whole = self._tokenizer.without_end(tokens, has_special=has_special)
            num_targets = len(whole) - (
                len(first) if isinstance(one, str) else len(whole) - len(one)
            )
            if num_targets < 1:
                raise ConfigError(
                    f"the continuation {one!r:.60} has no tokens of its own after the prompt"
                )
            num_targets = min(num_targets, len(whole) - 1)
            targets, fitted = whole[-num_targets:], whole
            if truncates == "truncate_left":
                room = Room(max_tokens=self._max_tokens + 1, on_too_long=truncates)
                fitted = self._tokenizer.fit(whole, room, has_special=has_special, has_end=False)
            is_whole = num_targets < len(fitted) and np.array_equal(fitted[-num_targets:], targets)
            if len(fitted) > self._max_tokens + 1 or not is_whole:
                raise ConfigError(
                    f"prompt and continuation have {len(whole)} tokens ({num_targets} of the "
                    f"continuation); at most {self._max_tokens + 1} fit the context: shorten them, "
                    "set on_too_long='truncate_left', or score a document without a prompt"
                )
            parts.append((fitted[:-1], targets, "last"))
        labels = None
        if self._options.task == "classify":
            labels = tuple(str(one) for one in row.continuations)
        longest = max(len(tokens) for tokens, _, _ in parts) + 1
        num_input = min(len(first), self._max_tokens) if labels else longest
        return EncodedRow(parts=parts, num_input_tokens=num_input, labels=labels)

    def _fit(self, tokens: Int32s, truncates: str) -> Int32s:
        if len(tokens) <= self._max_tokens:
            return tokens
        if truncates == "error":
            raise ConfigError(
                f"the prompt has {len(tokens)} tokens; at most {self._max_tokens} fit the context: "
                "shorten it or set on_too_long"
            )
        is_left = truncates == "truncate_left"
        return tokens[-self._max_tokens :] if is_left else tokens[: self._max_tokens]

    def _windows(self, document: Int32s) -> list[Part]:
        if len(document) < 2:
            raise ConfigError(
                "the document has one token and nothing before it that could predict it"
            )
        length, stride = self._max_tokens, self._options.stride or max(1, self._max_tokens - 1)
        if len(document) > stride * MAX_WINDOWS:
            raise ConfigError(
                f"the document has {len(document)} tokens, which is more than {MAX_WINDOWS} "
                f"windows that are {stride} tokens apart: raise stride, or cut the document"
            )
        parts: list[Part] = []
        scored = 1  # nothing predicts the first token
        for begin in range(0, len(document), stride):
            end = min(begin + length, len(document))
            parts.append((document[begin : end - 1], document[scored:end], "last"))
            scored = end
            if end == len(document):
                break
        return parts


class RowAnswers:
    """Makes the answer of a row of what was found in its parts."""

    def __init__(
        self, options: TaskOptions, labels: Sequence[str], *, is_multi: bool = False
    ) -> None:
        self._options, self._labels, self._is_multi = options, tuple(labels), is_multi

    def join(self, row: EncodedRow, parts: Sequence[Future[Generation]]) -> Future[Generation]:
        """A future that is resolved with the last of the parts."""
        joined: Future[Generation] = Future()
        joined.set_running_or_notify_cancel()
        lock, missing = threading.Lock(), [len(parts)]

        def done(_part: Future[Generation]) -> None:
            with lock:
                missing[0] -= 1
                is_last = not missing[0]
            if is_last:
                self._resolve(row, parts, joined)

        for part in parts:
            part.add_done_callback(functools.partial(done))
        return joined

    def _resolve(
        self, row: EncodedRow, parts: Sequence[Future[Generation]], joined: Future[Generation]
    ) -> None:
        error = next((part.exception() for part in parts if part.exception() is not None), None)
        if error is not None:  # the engine failed, not the row
            joined.set_exception(error)
            return
        try:
            answer = self._answer(row, [part.result() for part in parts])
        except Exception as problem:
            answer = Generation.from_error(problem, row.num_input_tokens)
        joined.set_result(answer)

    def _answer(self, row: EncodedRow, parts: Sequence[Generation]) -> Generation:
        bad = next((part for part in parts if part.error), None)
        if bad is not None:
            return dataclasses.replace(bad, num_input_tokens=row.num_input_tokens)
        found: list[Found] = [part.values["found"] for part in parts if part.values is not None]
        if self._options.task == "score":
            values = self._score(found)
        elif self._options.task == "embed":
            values = {"embedding": self._embed(found[0])}
        else:
            values = self._classify(row, found)
        return Generation(
            num_input_tokens=row.num_input_tokens,
            num_cached_tokens=sum(part.num_cached_tokens for part in parts),
            values=values,
        )

    def _score(self, found: Sequence[Found]) -> dict[str, Any]:
        logprobs = np.concatenate([one.logprobs for one in found])
        total, count = float(logprobs.sum(dtype=np.float64)), len(logprobs)
        mean = total / count
        values = {
            "logprob": total,
            "mean_logprob": mean,
            "num_scored_tokens": count,
            "perplexity": math.exp(-mean) if mean > -700 else math.inf,
            "is_greedy": all(bool(one.is_greedy.all()) for one in found),
        }
        return values | {"token_logprobs": logprobs} if self._options.token_logprobs else values

    def _embed(self, found: Found) -> Any:
        vector = found.pooled()
        dimensions = self._options.dimensions
        if dimensions is not None:
            if dimensions > len(vector):
                raise ConfigError(
                    f"dimensions is {dimensions}; the model's vectors have {len(vector)}"
                )
            vector = vector[:dimensions]
        if self._options.normalize:
            vector = vector / np.float32(max(float(np.linalg.norm(vector)), 1e-12))
        return vector

    def _classify(self, row: EncodedRow, found: Sequence[Found]) -> dict[str, Any]:
        labels = row.labels
        if labels is None:
            labels, scores = self._labels, found[0].pooled().astype(np.float64)
        else:
            is_mean = self._options.normalize == "tokens"
            scores = np.array([(np.mean if is_mean else np.sum)(one.logprobs, dtype=np.float64)
                               for one in found])  # fmt: skip
        if row.labels is None and (self._is_multi or len(labels) == 1):
            probabilities = 1.0 / (1.0 + np.exp(-scores))
        else:
            shifted = np.exp(scores - scores.max())
            probabilities = shifted / shifted.sum()
        best = int(probabilities.argmax())
        return {
            "label": labels[best],
            "label_probability": float(probabilities[best]),
            "label_probabilities": [
                {"label": label, "probability": float(probability)}
                for label, probability in zip(labels, probabilities, strict=True)
            ],
        }


def _too_many_tokens(count: int, prompt: str) -> ConfigError:
    return ConfigError(
        f"the row has {count} labels or continuations after a prompt of {prompt}; all of them "
        f"together may have {MAX_ROW_TOKENS}: shorten the prompt, or score fewer"
    )


def _value(result: Int32s | Exception) -> Int32s:
    if isinstance(result, Exception):
        raise result
    return result
