"""Checks answers against a JSON schema in a helper process: a role of `framed_worker`.

The schema and its patterns are the user's, the answers a model's: together they may need any time.
Patterns mean what they mean in constraints, and llguidance matches them in linear time.
"""

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from jsonschema.exceptions import ValidationError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, extend, validator_for
from llguidance import LLMatcher, LLTokenizer
from referencing import Registry

sys.path.append(str(Path(__file__).resolve().parents[3]))  # where the client found the package
from raymoe.engine.grammar_source import exact_schema

Message = dict[str, Any]
Frame = tuple[Message, bytes]
Answer = Callable[[Message, bytes], Frame]

MAX_MESSAGE = 300  # characters of a validator's message, which may quote the whole answer


@functools.cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


@functools.lru_cache(256)
def _compiled(pattern: str) -> LLMatcher:
    schema = {"type": "string", "pattern": pattern}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False))
    matcher = LLMatcher(_bytes(), grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def matches(pattern: str, text: str) -> bool:
    """Return whether a text has what a pattern of an `exact_schema` says."""
    matcher = _compiled(pattern).deep_copy()
    tokens = list(json.dumps(text, ensure_ascii=False).encode(errors="surrogatepass"))
    is_read = matcher.try_consume_tokens(tokens) == len(tokens)
    return bool(is_read and matcher.is_accepting())


def _pattern(
    validator: Validator, pattern: str, value: Any, _schema: Any
) -> Iterator[ValidationError]:
    if validator.is_type(value, "string") and not matches(pattern, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _multiple_of(
    validator: Validator, divisor: float, value: Any, _schema: Any
) -> Iterator[ValidationError]:
    """Check the decimal numbers that were written; as floats, 0.29 is no multiple of 0.01."""
    is_finite = validator.is_type(value, "number") and abs(value) < math.inf
    if is_finite and Fraction(str(value)) % Fraction(str(divisor)):
        yield ValidationError(f"{value} is not a multiple of {divisor}")


def make_validator(text: str) -> Validator:
    """Return what checks values against a schema as constraints have it.

    Raises:
        ConfigError: No constraint could be that schema.
    """
    schema = json.loads(exact_schema(text))
    keywords = {"multipleOf": _multiple_of, "pattern": _pattern}
    kind = extend(validator_for(schema, Draft202012Validator), keywords)
    return kind(schema, registry=Registry())  # jsonschema's own fetches what a $ref names


def problem(validator: Validator, text: str) -> str:
    """Return where the value of a JSON text is not valid, and why; "" if it is."""
    error = best_match(validator.iter_errors(json.loads(text)))
    return "" if error is None else f"{error.json_path}: {error.message:.{MAX_MESSAGE}}"


def start(settings: Message, _: bytes) -> tuple[Frame, Answer]:
    """Return the function that answers {"text"} by {"problem"}, "" if the text is valid."""
    validator = make_validator(settings["schema"])

    def answer(request: Message, _: bytes) -> Frame:
        return {"problem": problem(validator, request["text"])}, b""

    return ({}, b""), answer
