"""Tokenizers and chat templates in helper processes with limits; stop strings."""

import functools
import json
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from raymoe.engine.outputs import Int32s
from raymoe.engine.workers.process import WorkerProcess
from raymoe.errors import (
    CheckpointError,
    ConfigError,
    ExecutionError,
    RaymoeError,
    WorkerProcessError,
)
from raymoe.safe_text import nesting_problem
from raymoe.specs.files import check_small_files
from raymoe.units import GIB

UNFINISHED = "�"  # replacement character: decoders write it for incomplete characters


class DecodeError(RaymoeError):
    """The tokenizer cannot decode what the model generated."""


class StopStrings:
    """Looks for stop strings in the text of one sample, token by token.

    Text is decoded in a window that begins at a token border before the last new text: enough for
    characters of several tokens and for decoders that treat a first token differently, and the cost
    does not grow with the text. The caller decodes, so that rows of a step are decoded together.

    Args:
        min_tokens: A stop string counts if it ends after the text of so many tokens, as in vLLM.
        is_included: Whether texts end after their stop strings.
    """

    def __init__(
        self, stop: Sequence[str], min_tokens: int = 0, *, is_included: bool = False
    ) -> None:
        self._stop, self._min_tokens, self._is_included = stop, min_tokens, is_included
        self._first_end = 0  # characters of the text of these tokens
        self._answer = 0  # where the answer begins: after the reasoning and its line ends
        self._is_before_answer = False
        self._searched = 0  # characters
        self._overlap = max(map(len, stop)) - 1
        self._tokens: list[int] = []
        self._window = 0  # first token of the window
        self._num_decoded = 0  # tokens whose text is in `_text`
        self._text = ""

    def push(self, token: int) -> tuple[list[int], list[int]]:
        """Add a token; return the windows, without and with new text, to decode for `find`."""
        self._tokens.append(token)
        return self._tokens[self._window : self._num_decoded], self._tokens[self._window :]

    @property
    def text(self) -> str:
        """The text so far, in which nothing was found."""
        return self._text

    def find(self, stable_text: str, decoded: str, is_open: bool | None = False) -> str | None:
        """Return the text up to the first stop string, None while there is none.

        Args:
            is_open: Whether the text is in its reasoning, which has no stop strings, nor have line
                ends after it; None looks later, when that is known.
        """
        fresh = decoded[len(stable_text) :]
        visible = fresh.rstrip(UNFINISHED)
        end = len(self._text) + len(visible)
        if is_open:
            self._answer = self._searched = end
            self._is_before_answer = True
        elif is_open is False and self._is_before_answer:
            self._answer = end - len(visible.lstrip("\n"))
            self._is_before_answer = self._answer == end
        if not visible:
            return None
        if len(self._tokens) <= self._min_tokens:
            self._first_end = end
        elif is_open is False:
            found = self._find(max(0, self._searched - self._overlap), visible)
            if found is not None:
                return found
            self._searched = len(self._text)
        if visible == fresh:
            self._text += fresh
            self._window, self._num_decoded = self._num_decoded, len(self._tokens)
        return None

    def _find(self, begin: int, visible: str) -> str | None:
        text = self._text[begin:] + visible
        first = self._first_end - begin, self._answer - begin
        place = find_stop(text, self._stop, *first, is_included=self._is_included)
        return None if place is None else self._text[:begin] + text[:place]


def find_stop(
    text: str,
    stop: Sequence[str],
    first_end: int = 0,
    first_begin: int = 0,
    *,
    is_included: bool = False,
) -> int | None:
    """Return where the first stop string begins that ends after character `first_end`.

    Where it ends if it is included.
    """
    places = [text.find(one, max(0, first_begin, first_end - len(one) + 1)) for one in stop]
    found = [(place, len(one)) for place, one in zip(places, stop, strict=True) if place >= 0]
    if not found:
        return None
    place, length = min(found)
    return place + length * is_included


CHAT_WORKER = Path(__file__).parent / "workers" / "chat_worker.py"
CHAT_LOAD_LIMIT_S = 60.0  # CPU time
RENDER_LIMIT_S = 5.0  # CPU time
MAX_CHARACTERS = 8_000_000
CHAT_MAX_MEMORY_BYTES = 1 << 30
MAX_MESSAGES = 10_000

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
WITHOUT_CONTENT = ("tool_calls", *REASONING_FIELDS)  # what an assistant may give instead
RESERVED_KWARGS = frozenset(
    ("self", "messages", "conversation", "conversations", "tools", "tokenize", "chat_template",
     "return_dict", "padding", "return_tensors", "return_assistant_tokens_mask", "truncation",
     "max_length", "tokenizer_kwargs", "sanitize_control_tokens")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, the tools that they may call in OpenAI's format, and arguments of the template.

    Attributes:
        tools: Without any, the template gets none.
        template_kwargs: Such as ``enable_thinking``; also ``add_generation_prompt`` and
            ``continue_final_message``, as `apply_chat_template` of transformers has them.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def continued_text(prompt: object) -> str:
    """Return the assistant's message at the end of a chat; "" if there is none, or in parts."""
    messages = prompt.messages if isinstance(prompt, Chat) else prompt
    last = messages[-1] if isinstance(messages, Sequence) and len(messages) else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return ""
    content = last.get("content")
    return content if isinstance(content, str) else ""


class ChatTemplate:
    """Renders chats as transformers does, in a helper process, one at a time. Thread-safe.

    Args:
        source: The template, or several by name: rows with tools take "tool_use", others "default".
        variables: Special tokens and other variables of the template.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        variables: Mapping[str, Any],
        render_limit_s: float = RENDER_LIMIT_S,
    ) -> None:
        self._variables, self._limit_s = dict(variables), render_limit_s
        self._worker = WorkerProcess(
            CHAT_WORKER,
            {"templates": source, "max_characters": MAX_CHARACTERS},
            what="the chat template",
            load_cpu_s=CHAT_LOAD_LIMIT_S,
            memory_bytes=CHAT_MAX_MEMORY_BYTES,
        )

    def render(
        self,
        messages: object,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a chat: a final assistant message is continued, any other one is answered.

        ``continue_final_message`` and ``add_generation_prompt`` among `template_kwargs` say
        otherwise.

        Raises:
            ConfigError: The messages are malformed, the template refuses them or exceeds a limit.
            WorkerProcessError: The process was killed from outside.
        """
        chat = check_messages(messages)
        _check_plain("tools", tools)
        kwargs = check_template_kwargs(template_kwargs or {})
        is_assistant = chat[-1]["role"] == "assistant"
        is_continued = kwargs.pop("continue_final_message", is_assistant)
        is_answered = kwargs.pop("add_generation_prompt", not is_continued)
        if is_continued and not is_assistant:
            raise ConfigError("continue_final_message needs a final message of the assistant")
        if is_continued and is_answered:
            raise ConfigError("continue_final_message and add_generation_prompt exclude each other")
        request = {
            "messages": chat,
            "tools": list(tools) or None,
            "variables": self._variables | kwargs,
            "continue_final_message": is_continued,
            "add_generation_prompt": is_answered,
        }
        answer, _ = self._worker.ask(request, cpu_s=self._limit_s)
        if "refused" in answer:
            raise ConfigError(f"the chat template {answer['refused']}")
        return str(answer["text"])

    def close(self) -> None:
        self._worker.close()


def check_template_kwargs(given: object) -> dict[str, Any]:
    """Return arguments of a chat template; raises ConfigError for names that are taken."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"chat_template_kwargs is {given!r:.60}; it maps names to values")
    reserved = sorted(RESERVED_KWARGS & given.keys())
    if reserved:
        raise ConfigError(f"chat_template_kwargs has {', '.join(reserved)}, which rows and options "
                          "of raymoe set; leave it out")  # fmt: skip
    for name in ("continue_final_message", "add_generation_prompt"):
        if not isinstance(given.get(name, True), bool):
            raise ConfigError(f"{name} is {given[name]!r:.60}; it takes true or false")
    _check_plain("chat_template_kwargs", dict(given))
    return dict(given)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Check messages for templates; drop null keys and name reasoning, as transformers does."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages is a {type(messages).__name__}; it takes a list of messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise ConfigError(f"messages has {len(messages)} entries; it takes 1 to {MAX_MESSAGES}")
    _check_nesting("messages", messages)
    chat = [_check_message(index, message) for index, message in enumerate(messages)]
    _check_plain("messages", chat)
    return chat


def _check_plain(what: str, value: object) -> None:
    _check_nesting(what, value)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what}: not valid Unicode: {error.reason}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} cannot be written as JSON: {error}") from error


def _check_message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} is a {type(message).__name__}; it takes role and content")
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"{where} has role {role!r:.60}; it takes a name such as 'user'")
    if "tool_calls" in fields:
        fields["tool_calls"] = _checked_calls(where, fields["tool_calls"])
    content = fields.get("content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        for part in content:
            _check_part(where, part)
        return _name_reasoning(fields | {"content": [*content]})
    says_more = role == "assistant" and any(fields.get(name) for name in WITHOUT_CONTENT)
    if not isinstance(content, str) and not (content is None and says_more):
        raise ConfigError(f"{where} has content {content!r:.60}; it takes text")
    return _name_reasoning(fields)


def _name_reasoning(fields: dict[str, Any]) -> dict[str, Any]:
    """Give reasoning the names that templates read; gpt-oss reads `thinking`, most the other."""
    text = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    return fields if text is None else {"thinking": text} | fields | {"reasoning_content": text}


def _checked_calls(where: str, calls: object) -> list[dict[str, Any]]:
    """Return calls that all have arguments, which APIs and models leave out if there are none."""
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise ConfigError(f"{where} has tool_calls {calls!r:.60}; it takes a list")
    checked = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ConfigError(f"{where} has a tool call {call!r:.60}; it takes a function")
        given = function.get("arguments")
        arguments = "{}" if given is None or given == "" else given
        checked.append({**call, "function": {**function, "arguments": arguments}})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{where} has tool arguments that are not JSON: {error}"
                ) from error
            _check_nesting(f"{where}: the value of tool arguments", arguments)
    return checked


def _check_nesting(what: str, value: object) -> None:
    problem = nesting_problem(value)
    if problem:
        raise ConfigError(f"{what} {problem}")


def _check_part(where: str, part: object) -> None:
    if (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ):
        return
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ConfigError(f"{where} has a content part of type {kind!r:.40}; only text is supported")


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# Files that transformers may open when it loads a tokenizer.
TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
TOKENIZER_WORKER = Path(__file__).parent / "workers" / "tokenizer_worker.py"
TOKENIZER_LOAD_LIMIT_S = 300.0  # CPU time
TOKENIZER_MAX_MEMORY_BYTES = 4 * GIB  # 12 MB of text in one piece need 2 GiB
# CPU time of a request: ten times what a slow machine needs.
REQUEST_LIMIT_S, LIMIT_S_PER_BYTE, LIMIT_S_PER_TOKEN = 5.0, 20e-6, 1e-4
MAX_BATCH = 256  # texts
# A queued request waits for at most one such request: characters to encode, tokens to decode.
MAX_PIECE_CHARACTERS, MAX_BATCH_CHARACTERS, MAX_BATCH_TOKENS = 1 << 16, 1 << 17, 1 << 16
# Of a token whose tokenizer has no bound: what is longer on average is refused or cut unread.
MAX_TOKEN_BYTES = 1024
SHARED_CHARACTERS = 2048  # a longer prompt is encoded once for all that may follow it
JOINT = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")  # see `Codec._find_joint` in the worker
Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | Chat
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much of a prompt is needed.

    Attributes:
        max_tokens: None needs all tokens.
        on_too_long: As in `EngineConfig`: which end is needed.
    """

    max_tokens: int | None = None
    on_too_long: str = "error"


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt that must be encoded.

    Attributes:
        has_special: Adds the tokenizer's special tokens (BOS).
        splits_special: Special tokens in the text are encoded as ordinary text.
    """

    text: str
    has_special: bool
    room: Room
    splits_special: bool = False

    @property
    def is_long(self) -> bool:
        return len(self.text) > MAX_PIECE_CHARACTERS


class Tokenizer:
    """Encodes prompts of any kind and decodes generated tokens. Thread-safe.

    Two processes, one for encoding and one for decoding, so that neither waits for the other. A
    text that makes one panic, exceed its memory or time out is an error of its row.

    Args:
        directory: Model directory. Without a tokenizer in it, prompts must be token ids and text
            stays empty.
        vocab_size: Exclusive upper bound of token ids.
        split_special_tokens: As in `EngineConfig`.
    """

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        media_tokens: Sequence[tuple[int, str]] = (),
        *,
        split_special_tokens: bool = False,
    ) -> None:
        """`media_tokens` have no embedding of text: id, and name of the field with it."""
        self.directory = directory
        self._media_tokens = tuple(media_tokens)
        self._vocab_size, self._splits_special = vocab_size, split_special_tokens
        self._lock = threading.Lock()
        self._facts: dict[str, Any] | None = None
        self._encoder: WorkerProcess | None = None
        self._decoder: WorkerProcess | None = None
        self._chat: ChatTemplate | None = None
        self._bytes: dict[int, bytes | None] = {}  # of tokens that were asked for
        if any((directory / name).exists() for name in TOKENIZER_FILES):
            check_small_files(directory, TEXT_SUFFIXES)
            self._encoder = self._worker(wants_facts=True)
            self._encoder.start()

    @property
    def is_present(self) -> bool:
        return self._encoder is not None

    def load(self) -> None:
        """Wait until the tokenizer is loaded.

        Raises:
            CheckpointError: It cannot be.
            WorkerProcessError: Its process was ended from outside, again and again.
        """
        with self._lock:
            if self._facts is not None or self._encoder is None:
                return
            try:
                facts, backend = self._encoder.load()
            except ConfigError as error:
                raise CheckpointError(
                    f"the tokenizer in {self.directory} cannot be loaded: {error}"
                ) from error
            self._decoder = self._worker(backend)
            self._decoder.start()
            if facts["chat_template"]:
                self._chat = ChatTemplate(facts["chat_template"], facts["special_tokens"])
            self._facts = facts

    def special_token_ids(self) -> Mapping[str, int]:
        """Ids of the special tokens, which texts are decoded without, by their text."""
        self.load()
        ids: Mapping[str, int] = (self._facts or {}).get("special_token_ids", {})
        return ids

    def read(self, prompt: object, room: Room) -> Text | Int32s:
        """Return a prompt as token ids, or as the text to encode; chats are rendered.

        Text gets the tokenizer's special tokens (BOS); a chat only those of its template.
        """
        if prompt is None:
            raise ConfigError("the prompt is null")
        if isinstance(prompt, str):
            return self._check_text(Text(prompt, True, room, self._splits_special))
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if isinstance(prompt, Chat):
            if self._splits_special:
                self._refuse_special(prompt)
            return self._check_text(Text(self._render(prompt), False, room))
        if isinstance(prompt, (bytes, dict)) or not isinstance(prompt, Sequence):
            kind = type(prompt).__name__
            raise ConfigError(f"the prompt is a {kind}; it takes text, token ids or messages")
        if len(prompt) == 0:
            raise ConfigError("the prompt is empty")
        if isinstance(prompt[0], dict):
            return self.read(Chat(prompt), room)
        return self._check_ids(prompt)

    def encode(self, prompt: object) -> Int32s:
        text = self.read(prompt, Room())
        return value_or_raise(self.encode_all([text])[0]) if isinstance(text, Text) else text

    def encode_all(self, texts: Sequence[Text]) -> list[Int32s | Exception]:
        """Return token ids of each text, or its error; those that exceed a room are cut to it.

        What the tokenizer adds around a text is never cut off, as in transformers: vectors and
        answers depend on it.
        """
        self.load()
        results: list[Int32s | Exception] = [ConfigError("the prompt has no tokens")] * len(texts)
        short = [index for index, text in enumerate(texts) if not text.is_long]
        for batch in split_batches(
            short, [len(texts[i].text) for i in short], MAX_BATCH_CHARACTERS
        ):
            found = _try_all([texts[index] for index in batch], self._encode_batch)
            for index, result in zip(batch, found, strict=True):
                results[index] = result
        for index, text in enumerate(texts):
            if text.is_long:
                results[index] = _result(self._encode_long, text)
        return [
            _result(self._checked_and_cut, ids, text)
            for ids, text in zip(results, texts, strict=True)
        ]

    def fit(self, tokens: Int32s, room: Room, *, has_special: bool, has_end: bool = True) -> Int32s:
        """Cut the tokens of a text to a room that truncates.

        Args:
            has_special: Whether the tokenizer's own tokens are around them; they stay.
            has_end: Whether those after the text are among them.

        Raises:
            ConfigError: The room has no place for a token of the text.
        """
        if room.max_tokens is None or len(tokens) <= room.max_tokens or room.on_too_long == "error":
            return tokens
        prefix, suffix = self._ends(has_special=has_special)
        suffix = suffix if has_end else suffix[:0]
        num_kept = room.max_tokens - len(prefix) - len(suffix)
        if num_kept < 1:
            raise ConfigError(
                f"the tokenizer adds {len(prefix) + len(suffix)} tokens to a text, and only "
                f"{room.max_tokens} of the prompt may stay: raise max_model_len"
            )
        body = tokens[len(prefix) : len(tokens) - len(suffix)]
        body = body[-num_kept:] if room.on_too_long == "truncate_left" else body[:num_kept]
        return np.concatenate([prefix, body, suffix])

    def without_end(self, tokens: Int32s, *, has_special: bool) -> Int32s:
        """Return the tokens of a text that goes on: without what the tokenizer adds after it."""
        _, suffix = self._ends(has_special=has_special)
        return tokens[: len(tokens) - len(suffix)]

    def _ends(self, *, has_special: bool) -> tuple[Int32s, Int32s]:
        """What the tokenizer adds before and after a text."""
        ends: list[list[int]] = [[], []]
        if has_special:
            assert self._facts is not None
            ends = [self._facts["prefix"], self._facts["suffix"]]
        return np.asarray(ends[0], np.int32), np.asarray(ends[1], np.int32)

    def _checked_and_cut(self, result: Int32s | Exception, text: Text) -> Int32s:
        return self.fit(self._check_tokens(result), text.room, has_special=text.has_special)

    def cut(self, text: Text) -> tuple[Text, str] | None:
        """Cut a long text near its end where a token border is certain, whatever is appended.

        Returns the begin, to be encoded once, and what is encoded together with what is appended;
        `join` joins the tokens. None for short texts, and where no border is certain.
        """
        self.load()
        joint = None if self._facts is None else self._facts["joint"]
        begin = len(text.text) - SHARED_CHARACTERS
        if joint is None or text.splits_special or begin <= 0:
            return None
        places = [*JOINT.finditer(text.text, begin)]
        if not places:
            return None
        head = Text(text.text[: places[-1].start()], False, text.room)
        return head, joint + text.text[places[-1].end() :]

    def join(self, head: Int32s, tail: Int32s, *, has_special: bool) -> Int32s:
        """Return the tokens of a text that was cut."""
        prefix, suffix = self._ends(has_special=has_special)
        return np.concatenate([prefix, head, tail, suffix])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids without special tokens.

        Raises:
            DecodeError: The tokenizer does not know them.
            WorkerProcessError: The process was killed from outside.
        """
        return value_or_raise(self.decode_all([token_ids])[0])

    def decode_all(self, sequences: Sequence[Sequence[int]]) -> list[str | Exception]:
        """Decode each sequence without special tokens, or return its error."""
        return self._decode_all(sequences, keeps_special=False)

    def decode_marked(self, sequences: Sequence[Sequence[int]]) -> list[str | Exception]:
        """Decode each sequence with its special tokens, or return its error."""
        return self._decode_all(sequences, keeps_special=True)

    def _decode_all(
        self, sequences: Sequence[Sequence[int]], *, keeps_special: bool
    ) -> list[str | Exception]:
        if not self.is_present:
            return [""] * len(sequences)
        self.load()
        results: list[str | Exception] = []
        every = [*range(len(sequences))]
        decode = functools.partial(self._decode_batch, keeps_special=keeps_special)
        for batch in split_batches(every, [*map(len, sequences)], MAX_BATCH_TOKENS):
            results += _try_all([sequences[index] for index in batch], decode)
        return results

    def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        """Return the bytes of text that tokens stand for; those that are not known are left out.

        Raises:
            DecodeError: The tokenizer exceeds its limits.
            WorkerProcessError: The process was killed from outside.
        """
        if not self.is_present:
            return {}
        self.load()
        missing = sorted({*token_ids} - self._bytes.keys())
        for batch in split_batches(missing, [1] * len(missing), MAX_BATCH_TOKENS):
            self._bytes |= self._read_bytes(batch)
        found = {token: self._bytes[token] for token in token_ids}
        return {token: data for token, data in found.items() if data is not None}

    def _read_bytes(self, token_ids: Sequence[int]) -> dict[int, bytes | None]:
        assert self._decoder is not None
        cpu_s = REQUEST_LIMIT_S + LIMIT_S_PER_TOKEN * len(token_ids)
        try:
            answer, _ = self._decoder.ask(
                {"wants_bytes": True}, np.asarray(token_ids, np.int32).tobytes(), cpu_s=cpu_s
            )
        except ConfigError as error:
            raise DecodeError(f"the bytes of tokens cannot be read: {error}") from error
        data = [None if text is None else bytes.fromhex(text) for text in answer["bytes"]]
        return dict(zip(token_ids, data, strict=True))

    def close(self) -> None:
        if self._encoder is not None:
            self._encoder.close()  # also ends `load`
        with self._lock:
            for part in (self._decoder, self._chat):
                if part is not None:
                    part.close()

    def _worker(self, backend: bytes = b"", *, wants_facts: bool = False) -> WorkerProcess:
        return WorkerProcess(
            TOKENIZER_WORKER,
            {"directory": str(self.directory), "wants_facts": wants_facts},
            backend,
            what="the tokenizer",
            load_cpu_s=TOKENIZER_LOAD_LIMIT_S,
            memory_bytes=TOKENIZER_MAX_MEMORY_BYTES,
        )

    def _render(self, chat: Chat) -> str:
        self.load()
        if self._chat is None:
            raise ConfigError("the model has no chat template; give prompts as text instead")
        return self._chat.render(chat.messages, chat.tools, chat.template_kwargs)

    def _refuse_special(self, chat: Chat) -> None:
        """Refuse special tokens in messages: rendered, they cannot be told from the template's."""
        special = self.special_token_ids()
        parts: list[object] = [[*chat.messages], [*chat.tools], dict(chat.template_kwargs)]
        while parts:
            part = parts.pop()
            if isinstance(part, str):
                found = next((token for token in special if token in part), None)
                if found is not None:
                    raise ConfigError(
                        f"the messages have the special token {found!r:.40}, which "
                        "split_special_tokens forbids in them: remove it from the row"
                    )
            elif isinstance(part, Mapping):
                parts += [*part.keys(), *part.values()]
            elif isinstance(part, Sequence) and not isinstance(part, bytes):
                parts += part

    def _own_code(self) -> str:
        """A note on a vocabulary that only code of the repository reads."""
        found = min((path.name for path in self.directory.glob("*tiktoken*")), default=None)
        if found is None:
            return ""
        return (
            f" of transformers ({found} needs the repository's own code, which is never run; add "
            "a tokenizer.json)"
        )

    def _check_text(self, text: Text) -> Text:
        if not self.is_present:
            raise ConfigError(
                f"the model directory has no tokenizer{self._own_code()}; give prompts as token ids"
            )
        if not text.text:
            raise ConfigError("the prompt is empty")
        try:
            num_bytes = len(text.text.encode())
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the prompt is not valid Unicode: {error.reason} at character {error.start}"
            ) from error
        self.load()
        assert self._facts is not None
        longest, room = self._facts["longest_token_bytes"], text.room
        if room.max_tokens is None or room.on_too_long != "error":
            return text
        longest = longest or MAX_TOKEN_BYTES
        if num_bytes > room.max_tokens * longest:
            raise ConfigError(
                f"the prompt has {num_bytes} bytes; at most {room.max_tokens} tokens of up to "
                f"{longest} bytes fit the context with one generated: shorten it or set on_too_long"
            )
        return text

    def _check_ids(self, token_ids: Sequence[Any]) -> Int32s:
        for index, token in enumerate(token_ids):
            if type(token) is not int:
                raise ConfigError(f"prompt token {index} is {token!r:.60}; it takes whole numbers")
            if not 0 <= token < self._vocab_size:
                raise ConfigError(
                    f"prompt token {index} is {token!r:.60}; the vocabulary has ids "
                    f"0 to {self._vocab_size - 1}"
                )
        return self._refuse_media(np.asarray(token_ids, np.int32))

    def _check_tokens(self, result: Int32s | Exception) -> Int32s:
        token_ids = value_or_raise(result)
        if not len(token_ids):
            raise ConfigError("the prompt has no tokens")
        if token_ids.max() >= self._vocab_size:
            return self._check_ids(token_ids.tolist())  # raises with the invalid id
        return self._refuse_media(token_ids)

    def _refuse_media(self, token_ids: Int32s) -> Int32s:
        for token, name in self._media_tokens:
            found = np.flatnonzero(token_ids == token)
            if len(found):
                raise ConfigError(
                    f"prompt token {found[0]} is {token}, the {name} of this model; only text is "
                    "supported: leave images, videos and sound out of the row"
                )
        return token_ids

    def _encode_batch(self, texts: Sequence[Text], num_tries: int) -> list[Int32s | Exception]:
        assert self._encoder is not None
        data = [text.text.encode() for text in texts]
        num_bytes = [*map(len, data)]
        answer, ids = self._encoder.ask(
            {
                "num_bytes": num_bytes,
                "has_special": [text.has_special for text in texts],
                "splits_special": [text.splits_special for text in texts],
            },
            b"".join(data),
            cpu_s=REQUEST_LIMIT_S + LIMIT_S_PER_BYTE * sum(num_bytes),
            num_tries=num_tries,
        )
        ends = np.cumsum(answer["counts"])[:-1]
        results: list[Int32s | Exception] = [*np.split(np.frombuffer(ids, np.int32), ends)]
        for index, reason in answer["errors"].items():
            results[int(index)] = ConfigError(f"the prompt cannot be tokenized: {reason}")
        return results

    def _encode_long(self, text: Text) -> Int32s:
        assert self._facts is not None
        joint, room = self._facts["joint"], text.room
        if text.splits_special:  # the joint was found with special tokens
            joint = None
        is_reversed = room.on_too_long == "truncate_left"
        if joint is None and room.max_tokens is not None:  # in one piece, so not more than needed
            longest = self._facts["longest_token_bytes"] or MAX_TOKEN_BYTES
            kept = 2 * longest * (room.max_tokens + 1)
            text = replace(text, text=text.text[-kept:] if is_reversed else text.text[:kept])
        pieces = [text.text] if joint is None else [*_pieces(text.text, joint)]
        if len(pieces) == 1:
            return value_or_raise(_try_all([text], self._encode_batch)[0])
        ends = self._ends(has_special=text.has_special)
        found = [ends[is_reversed]]
        needed = np.inf if room.max_tokens is None else room.max_tokens
        for piece in reversed(pieces) if is_reversed else pieces:
            part = Text(piece, False, room)
            found.append(value_or_raise(_try_all([part], self._encode_batch)[0]))
            needed -= len(found[-1])
            if needed < 0 and room.on_too_long == "error":
                raise ConfigError(
                    f"the prompt has more than {room.max_tokens} tokens, which is all that fits "
                    "the context with one generated: shorten it or set on_too_long"
                )
            if needed < 0:
                break
        found.append(ends[not is_reversed])
        return np.concatenate(found[::-1] if is_reversed else found)

    def _decode_batch(
        self, sequences: Sequence[Sequence[int]], num_tries: int, *, keeps_special: bool
    ) -> list[str | Exception]:
        assert self._decoder is not None
        counts = [*map(len, sequences)]
        ids = np.concatenate([np.asarray(sequence, np.int32) for sequence in sequences])
        cpu_s = REQUEST_LIMIT_S + LIMIT_S_PER_TOKEN * len(ids)
        try:
            answer, _ = self._decoder.ask(
                {"counts": counts, "keeps_special": keeps_special},
                ids.tobytes(),
                cpu_s=cpu_s,
                num_tries=num_tries,
            )
        except ConfigError as error:
            raise DecodeError(f"generated tokens cannot be decoded: {error}") from error
        results: list[str | Exception] = [*answer["texts"]]
        for index, reason in answer["errors"].items():
            results[int(index)] = DecodeError(f"generated tokens cannot be decoded: {reason}")
        return results


def _pieces(text: str, joint: str) -> Iterator[str]:
    """Cut a text at places where token borders are certain."""
    begin, lead = 0, ""
    while found := JOINT.search(text, begin + MAX_PIECE_CHARACTERS):
        yield lead + text[begin : found.start()]
        begin, lead = found.end(), joint
    yield lead + text[begin:]


def split_batches(
    items: Sequence[ItemT], sizes: Sequence[int], max_size: int
) -> Iterator[list[ItemT]]:
    """Yield neighbours together, as many as a process of ours takes in one request.

    Args:
        max_size: The sum of their sizes; one that is larger comes alone.
    """
    batch: list[ItemT] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and (len(batch) == MAX_BATCH or total + size > max_size):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def _try_all(
    items: Sequence[ItemT], work: Callable[[Sequence[ItemT], int], list[ResultT | Exception]]
) -> list[ResultT | Exception]:
    """Process all items at once; if that ends the process, process each alone."""
    if len(items) > 1:
        try:
            return work(items, 1)
        except (ConfigError, DecodeError, WorkerProcessError):
            pass  # each raises its own
    return [_result(_one, work, item) for item in items]


def _one(work: Callable[[Sequence[ItemT], int], list[ResultT | Exception]], item: ItemT) -> ResultT:
    return value_or_raise(work([item], 2)[0])


def _result(work: Callable[..., ResultT], *args: Any) -> ResultT | Exception:
    try:
        return work(*args)
    except ExecutionError:  # it was closed, which is no row's fault
        raise
    except Exception as error:
        return error


def value_or_raise(result: ResultT | Exception) -> ResultT:
    if isinstance(result, Exception):
        raise result
    return result
