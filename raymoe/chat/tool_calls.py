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
    """A call of a function.

    Attributes:
        arguments: The JSON text of an object.
        id: What the model calls it; "" where its family gives calls no names.
    """

    name: str
    arguments: str
    id: str = ""


Types = Mapping[str, Mapping[str, Any]]  # the schema of the parameters of each function
Read = Callable[[str, Types], list[ToolCall]]


class _MalformedError(Exception):
    """A block that looks like a call and is none."""


def _call(name: object, arguments: object, call_id: object = "") -> ToolCall:
    if arguments is None:
        arguments = {}
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
    has_id = isinstance(call_id, str) and _encodes(call_id)
    return ToolCall(name.strip(), text, str(call_id).strip() if has_id else "")


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
    return [
        _call(one.get("name"), one.get("arguments", one.get("parameters")), one.get("id"))
        for one in calls
    ]


_PYTHON = {"True": True, "False": False, "None": None}  # as some templates write them
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null",
          list: "array", dict: "object"}  # fmt: skip


def _value(text: str, schema: Any, root: Any = None) -> Any:
    """Return the value that a text stands for, as far as a schema tells.

    Texts are written plainly, all else as JSON or as Python does. What may be both is no text, so
    that a null that templates write is read as one.

    Args:
        root: Where references of the schema lead.
    """
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else json.loads(text)
    except (ValueError, RecursionError):
        return text
    options = _options(schema, root, set())
    if options is None:
        return value
    kinds = {_KINDS[type(value)]} - {"string"}
    is_whole = isinstance(value, float) and value.is_integer()
    if kinds == {"integer"} or is_whole:
        kinds = {"integer", "number"}
    is_listed = any(type(one) is str and one == text for one in options.values)
    if is_listed or ("string" in options.kinds and not kinds & options.kinds):
        return text
    return value


class _Options(NamedTuple):
    """What a schema allows: types of values, and texts that it lists."""

    kinds: frozenset[str]
    values: tuple[Any, ...] = ()


def _options(schema: Any, root: Any, seen: set[str]) -> _Options | None:
    """Return what a schema allows, None where it does not say.

    Args:
        seen: References that were followed; each is followed once.
    """
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    given = schema.get("type")
    kinds = [given] if isinstance(given, str) else given
    reference = schema.get("$ref")
    if isinstance(values, list) and values:
        found = _Options(frozenset(_KINDS.get(type(value), "") for value in values), tuple(values))
    elif isinstance(kinds, list):
        found = _Options(frozenset(kind for kind in kinds if isinstance(kind, str)))
    elif isinstance(reference, str):
        if reference in seen:
            return None
        seen.add(reference)
        return _options(_target(reference, root), root, seen)
    else:
        return _options_of_all(schema, root, seen)
    return found._replace(kinds=found.kinds | {"null"}) if schema.get("nullable") else found


def _options_of_all(schema: Mapping[str, Any], root: Any, seen: set[str]) -> _Options | None:
    """Return what any of the parts of a union allows, or all parts of an allOf."""
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        if isinstance(parts, list):
            found = [one for part in parts if (one := _options(part, root, seen)) is not None]
            if not found or (name != "allOf" and len(found) < len(parts)):
                return None
            kinds = [one.kinds for one in found]
            values = tuple(value for one in found for value in one.values)
            joined = kinds[0].intersection if name == "allOf" else kinds[0].union
            return _Options(joined(*kinds), values)
    return None


def _target(reference: str, root: Any) -> Any:
    """Return the part of a schema that a reference within it names; None where there is none."""
    if not reference.startswith("#"):
        return None
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of the parameters of a function, by name."""
    schema: Any = function
    if isinstance(schema.get("$ref"), str) and "properties" not in schema:
        schema = _target(schema["$ref"], function)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


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

    def until_any(self, marks: re.Pattern[str]) -> str:
        """Return what comes before the first of the marks, one of which is the end."""
        found = marks.search(self._text, self._place)
        assert found is not None
        begin, self._place = self._place, found.start()
        return self._text[begin : self._place]

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
        root = types.get(name, {})
        edge = _edge_of_value(parameter, after_name, root)
        while not body.at_end():
            key = _tag_name(body, parameter, after_name)
            value = body.until_any(edge)
            has_end = body.take(parameter[1])
            if has_lines:
                value = value.removeprefix("\n")
            if has_lines or not has_end:
                value = value.removesuffix("\n")
            values[key] = _value(value, _parameters(root).get(key), root)
        return _call(name, values)

    return _read_calls(read_one)


def _edge_of_value(tag: Tag, after: str, function: Mapping[str, Any]) -> re.Pattern[str]:
    """Return what follows a value: its end tag, or without it the next parameter or the end.

    Only the name of a parameter makes a tag: others are text that looks like one.
    """
    names = "|".join(map(re.escape, _parameters(function)))
    begin = f"|{re.escape(tag[0])}(?:{names}){re.escape(after)}" if names else ""
    return re.compile(f"{re.escape(tag[1])}{begin}|\\Z")


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
    root = types.get(name.strip(), {})
    while not reader.at_end():
        reader.expect("<arg_key>")
        key = reader.until("</arg_key>").strip()
        if reader.at_end():
            raise _MalformedError
        reader.expect("<arg_value>")
        values[key] = _value(reader.until("</arg_value>"), _parameters(root).get(key), root)
    return [_call(name, values)]


def _read_dsml(reader: _Reader, _: Types) -> ToolCall:
    """Read DeepSeek-V3.2's and V4's form, whose parameters say whether they are strings."""
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
    head = reader.until("<|tool_call_argument_begin|>").strip()
    name, number = head.removeprefix("functions.").partition(":")[::2]
    if "<" in name or not number.isdecimal():
        raise _MalformedError
    return _call(name, reader.until("<|tool_call_end|>"), head)


def _read_mistral(text: str, types: Types) -> list[ToolCall]:
    """Read a list of objects, or a name, an optional id and arguments."""
    text = text.strip()
    if text.startswith("["):
        return _read_json(text, types)
    head, brace, arguments = text.partition("{")
    name = head.partition("[")[0]
    reader, call_id = _Reader(head.removeprefix(name)), ""
    if reader.take("[CALL_ID]") and "[" in reader.rest():
        call_id = reader.until("[")
        reader.expect("ARGS]")
    elif "[" in reader.rest():
        reader.expect("[ARGS]")
    if len(name.split()) != 1 or not brace:
        raise _MalformedError
    return [_call(name, brace + arguments, call_id)]


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


def _between(*frames: Tag) -> Blocks:
    """Return what finds texts between marks."""
    ends, begins = dict(frames), re.compile("|".join(re.escape(begin) for begin, _ in frames))

    def find(text: str) -> Iterator[_Block]:
        place = 0
        without_end = set[str]()
        while (begin := begins.search(text, place)) is not None:
            end = ends[begin[0]]
            last = -1 if end in without_end else text.find(end, begin.end())
            if last < 0:  # no later begin of this kind has an end either
                without_end.add(end)
                place = begin.end()
                continue
            place = last + len(end)
            yield _Block(begin.start(), place, text[begin.end() : last])
            again = text.rfind(begin[0], begin.end(), last)
            if again >= 0:  # the first begin may be one that the answer only speaks of
                yield _Block(again, place, text[again + len(begin[0]) : last])

    return find


def _without_frame(call: Tag, *frames: Tag) -> Blocks:
    """Return what finds calls whose frame is not there, or only its begin or its end.

    Args:
        call: What a call begins and ends with.
    """
    begins = "|".join(re.escape(begin) for begin, _ in frames)
    ends = "|".join(re.escape(end) for _, end in frames)
    first = re.compile(rf"(?:(?:{begins})\s*)?(?={re.escape(call[0])})")
    last = re.compile(rf"\s*(?:{ends})")

    def find(text: str) -> Iterator[_Block]:
        place = 0
        while (begin := first.search(text, place)) is not None:
            end = text.find(call[1], begin.end())
            if end < 0:
                return
            end += len(call[1])
            after = last.match(text, end)
            place = end if after is None else after.end()
            yield _Block(begin.start(), place, text[begin.end() : end])

    return find


def _json_without_frame(begin: str) -> Blocks:
    """Return what finds a text that is nothing but JSON, or ends in it after this mark."""

    def find(text: str) -> Iterator[_Block]:
        place = text.rfind(begin)
        content = text if place < 0 else text[place + len(begin) :]
        if content.strip()[:1] in {"{", "["}:
            yield _Block(max(0, place), len(text), content)

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
        bare: Finds what models write when they leave out a frame. It counts as calls where all
            names are those of the row's tools.
    """

    blocks: Blocks
    read: Read
    marks: tuple[str, ...]
    bare: Blocks | None = None


def _form(blocks: Blocks, read: Read, *marks: str, bare: Blocks | None = None) -> Form:
    return Form(blocks, read, marks, bare)


_DSML = tuple(
    (f"<｜DSML｜{name}>", f"</｜DSML｜{name}>") for name in ("function_calls", "tool_calls")
)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_BARE = _without_frame(("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), _DEEPSEEK)
_KIMI = tuple(
    (f"<|{name}_section_begin|>", f"<|{name}_section_end|>") for name in ("tool_calls", "tool_call")
)
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
# In the order in which a template is searched: the first whose marks it all has.
FORMS = {
    "gpt_oss": _form(_harmony_blocks, _read_harmony, _CHANNEL, _RECIPIENT),
    "deepseek_v32": _form(
        _between(*_DSML), _read_calls(_read_dsml), "DSML", "invoke",
        bare=_without_frame(("<｜DSML｜invoke ", "</｜DSML｜invoke>"), *_DSML),
    ),
    "deepseek_v3": _form(
        _between(_DEEPSEEK), _read_calls(_read_v3), _DEEPSEEK[0], "```json", bare=_DEEPSEEK_BARE
    ),
    "deepseek_v31": _form(
        _between(_DEEPSEEK), _read_calls(_read_v31), _DEEPSEEK[0], bare=_DEEPSEEK_BARE
    ),
    "kimi_k2": _form(
        _between(*_KIMI), _read_calls(_read_kimi), _KIMI[0][0],
        bare=_without_frame(("<|tool_call_begin|>", "<|tool_call_end|>"), *_KIMI),
    ),
    "minimax_m2": _form(
        _between(_MINIMAX),
        _tagged(
            ('<invoke name="', "</invoke>"), ('<parameter name="', "</parameter>"),
            '">', has_lines=False,
        ),
        "minimax:tool_call", bare=_without_frame(("<invoke ", "</invoke>"), _MINIMAX),
    ),
    "glm45": _form(_between(_TOOL_CALL), _read_glm, "<arg_key>", "<tool_call>"),
    "qwen3_coder": _form(
        _between(_TOOL_CALL),
        _tagged(
            ("<function=", "</function>"), ("<parameter=", "</parameter>"), ">", has_lines=True
        ),
        "<function=", "<tool_call>", bare=_without_frame(("<function=", "</function>"), _TOOL_CALL),
    ),
    "hermes": _form(
        _between(_TOOL_CALL), _read_json, "<tool_call>", bare=_json_without_frame("<tool_call>")
    ),
    "mistral": _form(
        _mistral_blocks, _read_mistral, "[TOOL_CALLS]", bare=_json_without_frame("[TOOL_CALLS]")
    ),
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
    parts = [*_split(form.blocks, form.read, text, types)]
    if form.bare is not None and types:
        parts = [
            inner
            for part in parts
            for inner in (
                _split(form.bare, form.read, part, types, has_known_names=True)
                if isinstance(part, str)
                else [part]
            )
        ]
    calls = [call for part in parts if not isinstance(part, str) for call in part]
    if not calls:
        return text, ()
    kept = [part.strip() for part in parts if isinstance(part, str)]
    return "\n".join(part for part in kept if part), tuple(calls)


def _split(
    blocks: Blocks, read: Read, text: str, types: Types, *, has_known_names: bool = False
) -> Iterator[str | list[ToolCall]]:
    """Yield the calls of each block, and the texts around them."""
    end = 0
    for block in blocks(text):
        if block.begin < end:
            continue
        try:
            found = read(block.content, types)
        except _MalformedError:
            continue
        if has_known_names and not all(call.name in types for call in found):
            continue
        yield text[end : block.begin]
        yield found
        end = block.end
    yield text[end:]


def _types(tools: Sequence[Mapping[str, Any]]) -> Types:
    types: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping):
            parameters = function.get("parameters")
            types[str(function.get("name"))] = parameters if isinstance(parameters, Mapping) else {}
    return types
