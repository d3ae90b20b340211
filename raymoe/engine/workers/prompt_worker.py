"""Renders prompts from the columns of rows in a helper process: a role of `framed_worker`.

The template is the user's, cells are never more than its data. The sandbox and the limits of this
process are those of chat templates, so that a template from elsewhere costs a row at most.
"""

import functools
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]
Frame = tuple[Message, bytes]
Answer = Callable[[Message, bytes], Frame]

GLOBALS = runpy.run_path(str(Path(__file__).with_name("sandbox.py")))["GLOBALS"]
ROW = "row"  # all columns, for names that Jinja cannot write
MAX_REASON_CHARACTERS = 1000


class NullCell(jinja2.StrictUndefined):
    """A cell without a value: false, `none`, not defined, and an error where its text is needed."""

    def __bool__(self) -> bool:  # type: ignore[override]  # that of jinja2 never returns
        return False

    def __eq__(self, other: object) -> bool:  # type: ignore[override]  # as above
        return other is None or isinstance(other, NullCell)

    def __ne__(self, other: object) -> bool:  # type: ignore[override]  # as above
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]  # as above
        return 0


def with_nulls(value: Any, name: str) -> Any:
    """Return a cell with its nulls, also those inside of it, as what names itself in errors."""
    if value is None:
        return NullCell(hint=f"{name} is null", name=name)
    if isinstance(value, dict):
        return {key: with_nulls(one, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [with_nulls(one, f"{name}[{index}]") for index, one in enumerate(value)]
    return value


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Write JSON as in chat templates, without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=_null)


def _null(value: object) -> None:
    if not isinstance(value, NullCell):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _written(value: Any) -> Any:
    """Refuse to write what has no value, such as the result of `get`."""
    if value is None:
        raise jinja2.UndefinedError("an expression that is written gives none")
    return value


def _is_none(value: object) -> bool:
    return value is None or isinstance(value, NullCell)


def make_environment() -> jinja2.Environment:
    """Return an environment whose white space and filters are those of chat templates."""
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        finalize=_written,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.globals |= GLOBALS
    del environment.globals["lipsum"]
    del environment.filters["random"]  # the same row gives the same prompt, in every run
    environment.filters["tojson"] = to_json
    environment.tests["none"] = _is_none
    return environment


def names_of(source: str) -> Message:
    """Return the names that a template reads: plain ones, keys of `row`, and if it reads all."""
    plain = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    plain.globals.clear()  # a column may have the name of a global
    plain.filters = make_environment().filters
    tree = plain.parse(source)
    keys, places = set(), set()
    for item in tree.find_all(nodes.Getitem):
        is_row = isinstance(item.node, nodes.Name) and item.node.name == ROW
        if is_row and isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, str):
            keys.add(item.arg.value)
            places.add(id(item.node))
    rows = [name for name in tree.find_all(nodes.Name) if name.name == ROW]
    names = jinja2.meta.find_undeclared_variables(tree)
    return {
        "names": sorted(names - {ROW}),
        "keys": sorted(keys),
        "reads_row": ROW in names,
        "reads_all": ROW in names and any(id(name) not in places for name in rows),
        "globals": sorted(make_environment().globals),
    }


def render_row(templates: dict[str, jinja2.Template], row: Message, limit: int) -> Message:
    """Return the text of each template for a row, or why there is none."""
    cells = {name: with_nulls(cell, f"column {name!r}") for name, cell in row.items()}
    texts = {}
    for name, template in templates.items():
        try:
            texts[name] = template.render({ROW: cells, **cells})
        except jinja2.UndefinedError as error:
            return _failed(name, str(error))
        except Exception as error:
            return _failed(name, f"{type(error).__name__}: {error}")
        if len(texts[name]) > limit:
            return _failed(name, f"it has more than {limit} characters")
    return {"texts": texts}


def _failed(name: str, reason: str) -> Message:
    return {"failed": name, "reason": reason[:MAX_REASON_CHARACTERS]}


def start(settings: Message, _: bytes) -> tuple[Frame, Answer]:
    """Return the function that says what templates read, or renders rows with them."""
    environment, limit = make_environment(), settings["max_characters"]
    compiled = functools.lru_cache(maxsize=64)(environment.from_string)

    def answer(request: Message, _: bytes) -> Frame:
        sources = request["templates"]
        if "rows" not in request:
            return {name: _facts(source) for name, source in sources.items()}, b""
        templates = {name: compiled(source) for name, source in sources.items()}
        return {"rows": [render_row(templates, row, limit) for row in request["rows"]]}, b""

    return ({}, b""), answer


def _facts(source: str) -> Message:
    try:
        return names_of(source)
    except jinja2.TemplateSyntaxError as error:
        return {"problem": f"line {error.lineno}: {error.message}"}
