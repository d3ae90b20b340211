"""Renders chats in a helper process: a role of `framed_worker`.

A template is untrusted text from a model repository. transformers renders it, so that the text is
its own; its sandbox protects Python, and this process protects the engine. Where transformers would
leave out the text of a message or write it as Python writes lists, the chat is refused.
"""

import functools
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.utils
from transformers.utils import chat_template_utils

Message = dict[str, Any]
Frame = tuple[Message, bytes]
Answer = Callable[[Message, bytes], Frame]
Templates = str | dict[str, str]

SAFE_GLOBALS = runpy.run_path(str(Path(__file__).with_name("sandbox.py")))["GLOBALS"]
MAX_REASON_CHARACTERS = 1000


class RefusedError(Exception):
    """The template cannot show this chat; the text follows on "the chat template"."""


def choose_template(templates: Templates, *, has_tools: bool) -> str:
    """Choose as `get_chat_template` of transformers."""
    if isinstance(templates, str):
        return templates
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name not in templates:
        raise RefusedError(f"has the names {', '.join(sorted(templates))}, none of them 'default'")
    return templates[name]


@functools.lru_cache
def environment_of(source: str) -> jinja2.Environment:
    """Return the environment in which transformers renders a template, made safe if it is old."""
    template: jinja2.Template = chat_template_utils._compile_jinja_template(source)  # noqa: SLF001
    environment = template.environment
    if environment.globals["namespace"] is jinja2.utils.Namespace:
        environment.globals |= SAFE_GLOBALS
    return environment


@functools.lru_cache
def reads_tools(source: str) -> bool:
    return "tools" in jinja2.meta.find_undeclared_variables(environment_of(source).parse(source))


def render(source: str, request: Message, max_characters: int) -> str:
    """Return what transformers renders of a request.

    It has `messages`, `tools` (a list or None), `variables` of the template, and transformers'
    `add_generation_prompt` and `continue_final_message`. Raises what transformers and the template
    raise, or `RefusedError`.
    """
    environment_of(source)
    if request["tools"] is not None and not reads_tools(source):
        raise RefusedError("takes no tools; leave them out")
    draw = functools.partial(_render_arguments, source, request)
    messages = request["messages"]
    try:
        text = draw(messages)
    except (TypeError, jinja2.UndefinedError) as error:
        if not any(isinstance(message.get("content"), list) for message in messages):
            raise
        raise RefusedError(f"failed: {error}; it may take content only as text") from error
    if len(text) > max_characters:
        raise RefusedError(f"wrote more than {max_characters} characters")
    _check_parts(text, messages, is_continued=request["continue_final_message"])
    _check_contents(text, messages, draw)
    cleaned = [_without_empty_calls(message) for message in messages]
    if cleaned != messages and draw(cleaned) != text:
        raise RefusedError("reads an empty list of tool_calls as calls; leave tool_calls out")
    return text


def _render_arguments(source: str, request: Message, messages: list[Message]) -> str:
    """Render a chat whose tool calls may have arguments as JSON text.

    Templates are written for their values, which transformers' own server gives them too. A
    template that fails with values, or writes them as Python does, takes the text.
    """
    valued = [_with_values(message) for message in messages]
    if valued == messages:
        return _render(source, request, messages)
    try:
        text = _render(source, request, valued)
    except Exception:
        return _render(source, request, messages)
    return _render(source, request, messages) if _has_python(text, valued) else text


def _render(source: str, request: Message, messages: list[Message]) -> str:
    texts, _ = chat_template_utils.render_jinja_template(
        conversations=[messages],
        chat_template=source,
        tools=request["tools"],
        add_generation_prompt=request["add_generation_prompt"],
        continue_final_message=request["continue_final_message"],
        **request["variables"],
    )
    return str(texts[0])


def _with_values(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls", ()):
        given = call["function"]["arguments"]
        value = json.loads(given) if isinstance(given, str) else given
        calls.append(call | {"function": call["function"] | {"arguments": value}})
    return message | {"tool_calls": calls} if calls else message


def _has_python(text: str, messages: list[Message]) -> bool:
    """Whether arguments are in a text as Python writes them, more often than messages have them."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    values = [call["function"]["arguments"] for call in calls]
    written = {str(value) for value in values if str(value) != json.dumps(value)}
    given = "\n".join(piece for message in messages for piece in _pieces(message))
    return any(text.count(one) > given.count(one) for one in written)


def _pieces(message: Message) -> list[str]:
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _check_parts(text: str, messages: list[Message], *, is_continued: bool) -> None:
    """Refuse a text with parts as Python writes them."""
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list) or not content:
            continue
        written = str(content[0])
        if is_continued and message is messages[-1]:  # the prompt ends within
            written = written[: written.find("'text': ") + len("'text': '")]
        if written in text:
            raise RefusedError("takes content only as text, not in parts")


def _check_contents(
    text: str, messages: list[Message], draw: Callable[[list[Message]], str]
) -> None:
    """Refuse content that the template would show in its other form, text or parts."""
    hidden = _hidden(text, messages)
    if not hidden:
        return
    swapped = [_swapped(one) if i in hidden else one for i, one in enumerate(messages)]
    try:
        shown = sorted(hidden - _hidden(draw(swapped), messages))
    except Exception:
        return  # it takes the given form only
    if shown:
        is_text = isinstance(messages[shown[0]]["content"], str)
        form = 'in parts, such as [{"type": "text", "text": ...}]' if is_text else "as text"
        raise RefusedError(f"shows the content of messages[{shown[0]}] only {form}; give it so")


def _hidden(text: str, messages: list[Message]) -> set[int]:
    """Return which messages have text that a rendered text has not.

    Those of assistants that are text are not looked at: templates cut reasoning.
    """
    hidden, place = set(), 0
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and isinstance(message.get("content"), str):
            continue
        for piece in map(str.strip, _pieces(message)):
            found = text.find(piece, place)
            found = text.find(piece) if found < 0 else found
            if found < 0:
                hidden.add(index)
            else:
                place = found
    return hidden


def _swapped(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": [{"type": "text", "text": content}]}
    return message | {"content": "".join(part["text"] for part in content)}


def _without_empty_calls(message: Message) -> Message:
    if message.get("tool_calls") != []:
        return message
    return {name: value for name, value in message.items() if name != "tool_calls"}


def start(settings: Message, _: bytes) -> tuple[Frame, Answer]:
    """Return the function that renders one chat with a template, or with one of several by name."""
    templates, limit = settings["templates"], settings["max_characters"]

    def answer(request: Message, _: bytes) -> Frame:
        try:
            source = choose_template(templates, has_tools=request["tools"] is not None)
            return {"text": render(source, request, limit)}, b""
        except RefusedError as error:
            return {"refused": str(error)[:MAX_REASON_CHARACTERS]}, b""

    return ({}, b""), answer
