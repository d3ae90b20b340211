"""Options of structured output (`SamplingParams.structured_outputs`)."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from raymoe.errors import ConfigError, UnknownOptionError
from raymoe.safe_text import nesting_problem
from raymoe.vllm_names import structure_options

MAX_CHARACTERS = 1 << 18
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The constraint on generated text, exactly one kind; names are vLLM's.

    Attributes:
        json: JSON text of a JSON schema.
        regex: A regular expression that the whole text matches.
        choice: Allowed texts.
        grammar: EBNF with rules ``name ::= ...`` of which one is `root`, or Lark with `start`.
        json_object: Any JSON object.
        disable_any_whitespace: JSON without white space; otherwise up to 32 characters of it
            between two parts.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    @classmethod
    def of(cls, value: object) -> Self:
        """Options from a mapping or its JSON text; ConfigError unless exactly one kind is valid."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = _parsed("structured_outputs", value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"structured_outputs is a {type(value).__name__}, not a mapping")
        value = structure_options(value)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in value:
            if name not in known:
                raise UnknownOptionError(str(name)[:80], known, "structured_outputs option")
        given = {name: option for name, option in value.items() if option is not None}
        forms = [name for name in KINDS if given.get(name, False) is not False]
        if len(forms) != 1:
            found = " and ".join(forms) or "none"
            raise ConfigError(f"structured_outputs has {found}; it takes one of {', '.join(KINDS)}")
        return cls(**{name: _CHECKS[name](option) for name, option in given.items()})

    @property
    def kind(self) -> str:
        """The member of `KINDS` that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def digest(self) -> str:
        """A hash that is the same for equal options in every process."""
        text = json.dumps(dataclasses.asdict(self))
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _parsed(name: str, text: str) -> Any:
    _limited(name, len(text))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error


def _limited(name: str, size: int) -> None:
    if size > MAX_CHARACTERS:
        raise ConfigError(f"{name} has {size} characters; at most {MAX_CHARACTERS} are allowed")


def _schema(value: object) -> str:
    """Canonical text of a JSON schema: a mapping or its JSON text."""
    if isinstance(value, str):
        value = _parsed("structured_outputs.json", value)
    if not isinstance(value, (Mapping, bool)):
        kind = type(value).__name__
        raise ConfigError(f"structured_outputs.json is a {kind}; it takes a JSON schema")
    problem = nesting_problem(value)
    if problem:
        raise ConfigError(f"structured_outputs.json {problem}")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"structured_outputs.json cannot be written as JSON: {error}") from error
    _limited("structured_outputs.json", len(text))
    return text


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} is {value!r:.60}; it takes text")
    _limited(name, len(value))
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{name} is not valid Unicode: {error.reason}") from error
    return value


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(f"structured_outputs.choice is {value!r:.60}; it takes a list of texts")
    texts = tuple(_text("structured_outputs.choice entry", entry) for entry in value)
    if not texts:
        raise ConfigError("structured_outputs.choice is empty; it takes at least one text")
    _limited("structured_outputs.choice", sum(map(len, texts)))
    return texts


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"structured_outputs.{name} is {value!r:.60}; it takes true or false")
    return value


_CHECKS: dict[str, Callable[[object], Any]] = {
    "json": _schema,
    "regex": lambda value: _text("structured_outputs.regex", value),
    "choice": _choices,
    "grammar": lambda value: _text("structured_outputs.grammar", value),
    "json_object": lambda value: _flag("json_object", value) or None,
    "disable_any_whitespace": lambda value: _flag("disable_any_whitespace", value),
}
