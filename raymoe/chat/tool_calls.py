"""Finds tool calls in generated text, by the form that a model family's template defines.

Texts come from models, in any length: each is read once, from begin to end.
"""

# ruff: noqa: RUF001 - marks of DeepSeek

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raymoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


Types = Mapping[str, Mapping[str, Any]]  # schemas of parameters, by function and parameter
Read = Callable[[str, Types], list[ToolCall]]


class _MalformedError(Exception):
    """A block that looks like a call and is none."""


def _call(name: object, arguments: object) -> ToolCall:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise _MalformedError from error
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise _MalformedError
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        if not _encodes(text):  # lone surrogates, which JSON holds as escapes only
            text = json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise _MalformedError from error
    if not _encodes(name):
        raise _MalformedError
    return ToolCall(name.strip(), text)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_json(text: str, _: Types) -> list[ToolCall]:
    """Read one or more objects with name and arguments."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _MalformedError from error
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(one, dict) for one in calls):
        raise _MalformedError
    return [_call(one.get("name"), one.get("arguments", one.get("parameters"))) for one in calls]


def _value(text: str, schema: Any) -> Any:
    """Read a parameter that is plain text if its schema says so, and JSON otherwise."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_SPACES = re.compile(r"\s*")


class _Reader:
    """Reads a text once from its begin to its end; what is not as expected is malformed."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0

    def at_end(self) -> bool:
        """Skip white space; return whether it was all that is left."""
        found = _SPACES.match(self._text, self._place)
        self._place = self._place if found is None else found.end()
        return self._place == len(self._text)

    def take(self, mark: str) -> bool:
        """Skip a mark if it comes next."""
        is_next = self._text.startswith(mark, self._place)
        self._place += len(mark) if is_next else 0
        return is_next

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            raise _MalformedError

    def until(self, mark: str) -> str:
        """Return what comes before a mark, and skip both."""
        end = self._text.find(mark, self._place)
        if end < 0:
            raise _MalformedError
        text, self._place = self._text[self._place : end], end + len(mark)
        return text

    def rest(self) -> str:
        return self._text[self._place :]


def _read_calls(read_one: Callable[[_Reader, Types], ToolCall]) -> Read:
    """Return a reader of one or more calls with nothing but white space around them."""

    def read(text: str, types: Types) -> list[ToolCall]:
        reader, calls = _Reader(text), []
        while not reader.at_end():
            calls.append(read_one(reader, types))
        if not calls:
            raise _MalformedError
        return calls

    return read


Tag = tuple[str, str]  # what comes before a name, and the end tag


def _tagged(function: Tag, parameter: Tag, after_name: str, *, has_lines: bool) -> Read:
    """Return a reader of functions with tagged parameters, such as "<function=" name ">".

    Args:
        has_lines: Whether values stand on lines of their own.
    """

    def read_one(reader: _Reader, types: Types) -> ToolCall:
        name = _tag_name(reader, function, after_name)
        body, values = _Reader(reader.until(function[1])), {}
        schemas = types.get(name, {})
        while not body.at_end():
            key = _tag_name(body, parameter, after_name)
            value = body.until(parameter[1])
            if has_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            values[key] = _value(value, schemas.get(key))
        return _call(name, values)

    return _read_calls(read_one)


def _tag_name(reader: _Reader, tag: Tag, after: str) -> str:
    reader.expect(tag[0])
    name = reader.until(after[0])
    reader.expect(after[1:])
    if not name:
        raise _MalformedError
    return name.strip()


def _read_glm(text: str, types: Types) -> list[ToolCall]:
    """Read a name with keys and values after it."""
    name = text.partition("<")[0]
    reader, values = _Reader(text.removeprefix(name)), {}
    if "{" in name:
        raise _MalformedError
    schemas = types.get(name.strip(), {})
    while not reader.at_end():
        reader.expect("<arg_key>")
        key = reader.until("</arg_key>").strip()
        if reader.at_end():
            raise _MalformedError
        reader.expect("<arg_value>")
        values[key] = _value(reader.until("</arg_value>"), schemas.get(key))
    return [_call(name, values)]


def _read_dsml(reader: _Reader, _: Types) -> ToolCall:
    """Read DeepSeek-V3.2's form, whose parameters say themselves whether they are strings."""
    name = _tag_name(reader, ('<｜DSML｜invoke name="', ""), '">')
    body, values = _Reader(reader.until("</｜DSML｜invoke>")), {}
    while not body.at_end():
        body.expect('<｜DSML｜parameter name="')
        key = body.until('"')
        is_text = body.take(' string="true">')
        if not key or not (is_text or body.take(' string="false">')):
            raise _MalformedError
        value = body.until("</｜DSML｜parameter>")
        values[key] = value if is_text else _value(value, None)
    return _call(name, values)


def _read_v3(reader: _Reader, _: Types) -> ToolCall:
    reader.expect("<｜tool▁call▁begin｜>function<｜tool▁sep｜>")
    name = reader.until("\n")
    reader.expect("```json\n")
    return _call(name, reader.until("\n```<｜tool▁call▁end｜>"))


def _read_v31(reader: _Reader, _: Types) -> ToolCall:
    reader.expect("<｜tool▁call▁begin｜>")
    name, arguments = reader.until("<｜tool▁sep｜>"), reader.until("<｜tool▁call▁end｜>")
    if "<" in name:
        raise _MalformedError
    return _call(name, arguments)


def _read_kimi(reader: _Reader, _: Types) -> ToolCall:
    reader.expect("<|tool_call_begin|>")
    head = reader.until("<|tool_call_argument_begin|>").strip().removeprefix("functions.")
    name, number = head.partition(":")[::2]
    if "<" in name or not number.isdecimal():
        raise _MalformedError
    return _call(name, reader.until("<|tool_call_end|>"))


def _read_mistral(text: str, types: Types) -> list[ToolCall]:
    """Read a list of objects, or a name, an optional id and arguments."""
    text = text.strip()
    if text.startswith("["):
        return _read_json(text, types)
    head, brace, arguments = text.partition("{")
    name = head.partition("[")[0]
    reader = _Reader(head.removeprefix(name))
    if reader.take("[CALL_ID]") and "[" in reader.rest():
        reader.until("[")
        reader.expect("ARGS]")
    elif "[" in reader.rest():
        reader.expect("[ARGS]")
    if len(name.split()) != 1 or not brace:
        raise _MalformedError
    return [_call(name, brace + arguments)]


def _read_harmony(text: str, _: Types) -> list[ToolCall]:
    header, arguments = text.partition("<|message|>")[::2]
    if not arguments.strip():
        raise _MalformedError  # cut before its arguments, which are {} where there are none
    words = header.partition(_RECIPIENT)[2].partition("<")[0].split(maxsplit=1)
    return [_call(words[0] if words else "", arguments)]


class _Block(NamedTuple):
    begin: int
    end: int
    content: str


Blocks = Callable[[str], Iterator[_Block]]


def _between(begin: str, end: str) -> Blocks:
    def find(text: str) -> Iterator[_Block]:
        place = 0
        while (first := text.find(begin, place)) >= 0:
            inner = first + len(begin)
            last = text.find(end, inner)
            if last < 0:
                return  # no later begin has an end either
            place = last + len(end)
            yield _Block(first, place, text[inner:last])

    return find


def _mistral_blocks(text: str) -> Iterator[_Block]:
    mark = "[TOOL_CALLS]"
    lead, *contents = text.split(mark)
    begin = len(lead)
    for content in contents:
        end = begin + len(mark) + len(content)
        yield _Block(begin, end, content)
        begin = end


_START, _CHANNEL, _RECIPIENT = "<|start|>", "<|channel|>", "to=functions."
_EDGE = re.compile(r"<\|(?:start|end|call)\|>|\Z")


def _harmony_blocks(text: str) -> Iterator[_Block]:
    """Find messages to functions; the recipient stands before or after the channel."""
    begin, is_started = 0, False
    for edge in _EDGE.finditer(text):
        message = text[begin : edge.start()]
        header, mark, _ = message.partition("<|message|>")
        recipient = header.find(_RECIPIENT)
        if mark and recipient >= 0 and _CHANNEL in header:
            lead = header.rfind(_CHANNEL, 0, recipient)
            if lead < 0:
                lead = header.rfind("<", 0, recipient) + 1
            lead -= len("assistant") * header.endswith("assistant", 0, lead)
            first = begin + lead - (len(_START) if is_started and not lead else 0)
            end = edge.start() if edge[0] == _START else edge.end()
            yield _Block(first, end, message[lead:])
        begin, is_started = edge.end(), edge[0] == _START


@dataclass(frozen=True, slots=True)
class Form:
    """How a family writes calls.

    Attributes:
        blocks: Finds blocks of calls; the content of each is what `read` gets.
        marks: Texts that a template has that defines this form.
    """

    blocks: Blocks
    read: Read
    marks: tuple[str, ...]


def _form(blocks: Blocks, read: Read, *marks: str) -> Form:
    return Form(blocks, read, marks)


_CALLS_OF_DEEPSEEK = _between("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = _between("<tool_call>", "</tool_call>")
# In the order in which a template is searched: the first whose marks it all has.
FORMS = {
    "gpt_oss": _form(_harmony_blocks, _read_harmony, _CHANNEL, _RECIPIENT),
    "deepseek_v32": _form(
        _between("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        _read_calls(_read_dsml), "DSML", "invoke",
    ),
    "deepseek_v3": _form(
        _CALLS_OF_DEEPSEEK, _read_calls(_read_v3), "<｜tool▁calls▁begin｜>", "```json"
    ),
    "deepseek_v31": _form(_CALLS_OF_DEEPSEEK, _read_calls(_read_v31), "<｜tool▁calls▁begin｜>"),
    "kimi_k2": _form(
        _between("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        _read_calls(_read_kimi), "<|tool_calls_section_begin|>",
    ),
    "minimax_m2": _form(
        _between("<minimax:tool_call>", "</minimax:tool_call>"),
        _tagged(
            ('<invoke name="', "</invoke>"), ('<parameter name="', "</parameter>"),
            '">', has_lines=False,
        ),
        "minimax:tool_call",
    ),
    "glm45": _form(_CALL, _read_glm, "<arg_key>", "<tool_call>"),
    "qwen3_coder": _form(
        _CALL,
        _tagged(
            ("<function=", "</function>"), ("<parameter=", "</parameter>"), ">", has_lines=True
        ),
        "<function=", "<tool_call>",
    ),
    "hermes": _form(_CALL, _read_json, "<tool_call>"),
    "mistral": _form(_mistral_blocks, _read_mistral, "[TOOL_CALLS]"),
}  # fmt: skip
# Their marks are special tokens, which texts usually leave out.
NEEDS_SPECIAL_TOKENS = frozenset({"mistral", "gpt_oss", "kimi_k2"})


def find_tool_call_parser(template: str) -> str | None:
    """Return the parser of the form that a chat template defines, None if it defines none."""
    for name, form in FORMS.items():
        if all(mark in template for mark in form.marks):
            return name
    return None


def check_tool_call_parser(name: str) -> None:
    if name not in ("auto", "none", *FORMS):
        known = ", ".join(("auto", "none", *FORMS))
        raise ConfigError(f"tool_call_parser is {name!r}; it takes one of {known}")


def split_tool_calls(
    parser: str, text: str, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text without its calls, and the calls. A malformed call stays text.

    Args:
        tools: In OpenAI's format. Forms whose values have no types take them from the schemas.
    """
    form, types = FORMS[parser], _types(tools)
    calls: list[ToolCall] = []
    kept, end = [], 0
    for block in form.blocks(text):
        try:
            calls += form.read(block.content, types)
        except _MalformedError:
            continue
        kept.append(text[end : block.begin])
        end = block.end
    kept.append(text[end:])
    if not calls:
        return text, ()
    return "\n".join(part for part in (one.strip() for one in kept) if part), tuple(calls)


def _types(tools: Sequence[Mapping[str, Any]]) -> Types:
    types: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(function, Mapping) and isinstance(properties, Mapping):
            types[str(function.get("name"))] = properties
    return types
