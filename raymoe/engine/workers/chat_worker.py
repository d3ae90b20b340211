"""Renders chat templates in a helper process: a role of `framed_worker`.

A template is untrusted text from a model repository. The sandbox protects Python, the process
protects the engine. The environment (filters, globals, tags) is that of transformers, so that
templates render the same text.
"""

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

Frame = tuple[dict[str, Any], bytes]
Answer = Callable[[dict[str, Any], bytes], Frame]


class TooLargeError(Exception):
    """The template wrote more than its limit."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class SafeNamespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore."""

    # As in jinja2: `self` may be a key too.
    def __init__(*args: Any, **kwargs: Any) -> None:
        names = dict(*args[1:], **kwargs)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class SafeDict:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _to_json(  # noqa: PLR0917 - the filter's signature in transformers
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def make_environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": SafeDict(),
        "namespace": SafeNamespace,
    }
    return environment


def reads_parts(tree: jinja2.nodes.Template) -> bool:
    """Whether a template reads the parts of a content, and nowhere asks if it is a string."""
    if any(test.name == "string" for test in tree.find_all(jinja2.nodes.Test)):
        return False
    read = [loop.iter for loop in tree.find_all(jinja2.nodes.For)]
    read += [
        item.node
        for item in tree.find_all(jinja2.nodes.Getitem)
        if isinstance(item.arg, jinja2.nodes.Const) and isinstance(item.arg.value, int)
    ]
    return any(map(_is_content, read))


def _is_content(node: jinja2.nodes.Node) -> bool:
    match node:
        case jinja2.nodes.Getattr(attr="content") | jinja2.nodes.Name(name="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case _:
            return False


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}


def render(template: jinja2.Template, variables: dict[str, Any], max_characters: int) -> str:
    """Render one chat; raises `TooLargeError` beyond `max_characters`."""
    pieces, size = [], 0
    for piece in template.generate(**variables):
        size += len(piece)
        if size > max_characters:
            raise TooLargeError(f"the template wrote more than {max_characters} characters")
        pieces.append(piece)
    return "".join(pieces)


def start(settings: dict[str, Any], _: bytes) -> tuple[Frame, Answer]:
    """Compile a template; return the function that renders one chat."""
    environment = make_environment()
    source, limit = settings["template"], settings["max_characters"]
    template, is_in_parts = environment.from_string(source), reads_parts(environment.parse(source))

    def answer(variables: dict[str, Any], _: bytes) -> Frame:
        if is_in_parts:
            variables |= {"messages": [_in_parts(message) for message in variables["messages"]]}
        return {"text": render(template, variables, limit)}, b""

    return ({}, b""), answer
