"""Finds tool calls in generated text, by the form that a model family's template defines."""

# ruff: noqa: RUF001 - marks of DeepSeek

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def _read_tagged(function: str, parameter: str) -> Read:
    """Return a reader of functions with tagged parameters.

    Both patterns have two groups: name and body, name and value.
    """
    functions, parameters = re.compile(function, re.DOTALL), re.compile(parameter, re.DOTALL)

    def read(text: str, types: Types) -> list[ToolCall]:
        found = list(functions.finditer(text))
        if not found or functions.sub("", text).strip():
            raise _MalformedError
        calls = []
        for one in found:
            name, body = one[1].strip(), one[2]
            if parameters.sub("", body).strip():
                raise _MalformedError
            schemas = types.get(name, {})
            values = {key.strip(): value for key, value in parameters.findall(body)}
            read_values = {key: _value(value, schemas.get(key)) for key, value in values.items()}
            calls.append(_call(name, read_values))
        return calls

    return read


def _read_dsml(text: str, _: Types) -> list[ToolCall]:
    """Read DeepSeek-V3.2's form, whose parameters say themselves whether they are strings."""
    invoke = r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>'
    functions = re.findall(invoke, text, re.DOTALL)
    pattern = r'<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>'
    if not functions or re.sub(invoke, "", text, flags=re.DOTALL).strip():
        raise _MalformedError
    calls = []
    for name, body in functions:
        values = {}
        if re.sub(pattern, "", body, flags=re.DOTALL).strip():
            raise _MalformedError
        for key, is_text, value in re.findall(pattern, body, re.DOTALL):
            values[key] = value if is_text == "true" else _value(value, None)
        calls.append(_call(name, values))
    return calls


def _read_pairs(pattern: str) -> Read:
    """Return a reader of name and JSON arguments, each pair as the pattern's two groups."""
    compiled = re.compile(pattern, re.DOTALL)

    def read(text: str, _: Types) -> list[ToolCall]:
        found = compiled.findall(text)
        if not found or compiled.sub("", text).strip():
            raise _MalformedError
        return [_call(name, arguments) for name, arguments in found]

    return read


def _read_mistral(text: str, types: Types) -> list[ToolCall]:
    return _read_json(text, types) if text.lstrip().startswith("[") else _mistral_pair(text, types)


@dataclass(frozen=True, slots=True)
class Form:
    """How a family writes calls.

    Attributes:
        block: Pattern of one block; its group is what `read` gets.
        marks: Texts that a template has that defines this form.
    """

    block: re.Pattern[str]
    read: Read
    marks: tuple[str, ...]


def _form(block: str, read: Read, *marks: str) -> Form:
    return Form(re.compile(block, re.DOTALL), read, marks)


_mistral_pair = _read_pairs(r"^\s*([^\[\{\s]+?)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?(\{.*\})\s*$")
_V3 = r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n```<｜tool▁call▁end｜>"
_V31 = r"<｜tool▁call▁begin｜>([^<]+)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>"
_KIMI = (
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([^:<]+):\d+\s*<\|tool_call_argument_begin\|>"
    r"(.*?)<\|tool_call_end\|>"
)
_CALLS_OF_DEEPSEEK = r"<｜tool▁calls▁begin｜>(.*?)<｜tool▁calls▁end｜>"
_CALL = r"<tool_call>(.*?)</tool_call>"
# In the order in which a template is searched: the first whose marks it all has.
FORMS = {
    "gpt_oss": _form(
        r"(?:<\|start\|>)?((?:assistant)?(?:[^<]*to=functions\.[^<]+<\|channel\|>\w+[^<]*"
        r"|<\|channel\|>\w+ to=functions\.[^<]+)(?:<\|constrain\|>\w+)?<\|message\|>"
        r"(?:(?!<\|(?:start|call|end)\|>).)*)(?:<\|call\|>|<\|end\|>|$|(?=<\|start\|>))",
        _read_pairs(r"^.*?to=functions\.([^\s<]+).*?<\|message\|>(.*)$"),
        "<|channel|>", "to=functions.",
    ),
    "deepseek_v32": _form(
        r"<｜DSML｜function_calls>(.*?)</｜DSML｜function_calls>", _read_dsml, "DSML", "invoke"
    ),
    "deepseek_v3": _form(_CALLS_OF_DEEPSEEK, _read_pairs(_V3), "<｜tool▁calls▁begin｜>", "```json"),
    "deepseek_v31": _form(_CALLS_OF_DEEPSEEK, _read_pairs(_V31), "<｜tool▁calls▁begin｜>"),
    "kimi_k2": _form(
        r"<\|tool_calls_section_begin\|>(.*?)<\|tool_calls_section_end\|>",
        _read_pairs(_KIMI), "<|tool_calls_section_begin|>",
    ),
    "minimax_m2": _form(
        r"<minimax:tool_call>(.*?)</minimax:tool_call>",
        _read_tagged(
            r'<invoke name="([^"]+)">(.*?)</invoke>', r'<parameter name="([^"]+)">(.*?)</parameter>'
        ),
        "minimax:tool_call",
    ),
    "glm45": _form(
        _CALL,
        _read_tagged(
            r"^([^<{]+)(.*)$", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
        ),
        "<arg_key>", "<tool_call>",
    ),
    "qwen3_coder": _form(
        _CALL,
        _read_tagged(
            r"<function=([^>]+)>(.*?)</function>",
            r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>",
        ),
        "<function=", "<tool_call>",
    ),
    "hermes": _form(_CALL, _read_json, "<tool_call>"),
    "mistral": _form(
        r"\[TOOL_CALLS\]((?:(?!\[TOOL_CALLS\]).)*)", _read_mistral, "[TOOL_CALLS]"
    ),
}  # fmt: skip
TOOL_CALL_PARSERS = tuple(FORMS)
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
    for block in form.block.finditer(text):
        try:
            calls += form.read(block[1], types)
        except _MalformedError:
            continue
        kept.append(text[end : block.start()])
        end = block.end()
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
