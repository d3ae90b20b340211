"""The process that renders chat templates: run as a script, with the standard library and jinja2.

A template is text from a model repository. The sandbox keeps it from Python; this process keeps it
from the engine: its memory is limited here, its time by the parent, who ends it. The environment
(filters, globals, tags) is that of transformers, so that the same template renders the same text.

Protocol: frames of a 4-byte length and JSON. The first holds the template and its limits; then
one for each chat, answered by {"text": ...} or {"error": ...}.
"""

import datetime
import json
import resource
import struct
import sys
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

HEADER = struct.Struct("<I")


class TooLargeError(Exception):
    """The template wrote more than it may."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Replace the tag by its body."""
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
    """`dict(...)` without access to the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """A dictionary."""
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


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template in the environment of transformers."""
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
    return environment.from_string(source)


def render(template: jinja2.Template, variables: dict[str, Any], max_characters: int) -> str:
    """Render one chat.

    Raises:
        TooLargeError: More than `max_characters` were written.
    """
    pieces, size = [], 0
    for piece in template.generate(**variables):
        size += len(piece)
        if size > max_characters:
            raise TooLargeError(f"the template wrote more than {max_characters} characters")
        pieces.append(piece)
    return "".join(pieces)


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message, None at the end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return dict(json.loads(stream.read(HEADER.unpack(header)[0])))


def write_frame(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Send one message."""
    payload = json.dumps(message).encode()
    stream.write(HEADER.pack(len(payload)) + payload)
    stream.flush()


def _answer(template: jinja2.Template, request: dict[str, Any], limit: int) -> dict[str, Any]:
    try:
        return {"text": render(template, request, limit)}
    except MemoryError:
        return {"error": "the template needs more memory than it may have"}
    except Exception as error:  # a template may raise anything
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def main() -> None:
    """Serve until the parent closes the pipe."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    settings = read_frame(stdin)
    if settings is None:
        return
    limit = settings["max_memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        template = compile_template(settings["template"])
    except Exception as error:  # a template may be anything
        write_frame(stdout, {"error": f"{type(error).__name__}: {error}"[:1000]})
        return
    write_frame(stdout, {"text": ""})
    while (request := read_frame(stdin)) is not None:
        write_frame(stdout, _answer(template, request, settings["max_characters"]))


if __name__ == "__main__":
    main()
