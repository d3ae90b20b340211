"""Chat messages to the text that the model was trained on, within limits of time and size."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymoe.engine.worker_process import WorkerProcess
from raymoe.errors import ConfigError
from raymoe.safe_text import nesting_problem

WORKER = Path(__file__).with_name("chat_worker.py")
LOAD_LIMIT_S = 60.0  # of CPU time
RENDER_LIMIT_S = 5.0  # of CPU time
MAX_CHARACTERS = 8_000_000
MAX_MEMORY_BYTES = 1 << 30
MAX_MESSAGES = 10_000
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own: marks where to go on


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and the tools that they may call.

    Attributes:
        messages: Each with role and content.
        tools: In OpenAI's form; () for none.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


class ChatTemplate:
    """Renders chats in a process of its own, one at a time. Thread-safe.

    Args:
        source: The jinja2 text.
        variables: Special tokens and whatever else the template may use.
    """

    def __init__(
        self, source: str, variables: Mapping[str, Any], render_limit_s: float = RENDER_LIMIT_S
    ) -> None:
        self._variables, self._limit_s = dict(variables), render_limit_s
        self._worker = WorkerProcess(
            WORKER,
            {"template": source, "max_characters": MAX_CHARACTERS},
            what="the chat template",
            load_cpu_s=LOAD_LIMIT_S,
            memory_bytes=MAX_MEMORY_BYTES,
        )

    def render(self, messages: object, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Text of a chat: the final assistant message is continued, any other one is answered.

        Args:
            messages: A list of mappings with role and content.
            tools: What the messages may call.

        Raises:
            ConfigError: The messages are broken, the template refuses them or exceeds a limit.
            WorkerProcessError: The process was ended from outside.
        """
        chat = check_messages(messages)
        _check_nesting("tools", tools)
        is_continued = chat[-1]["role"] == "assistant"
        if is_continued:
            chat[-1] = chat[-1] | {"content": chat[-1].get("content", "") + CONTINUE_TAG}
        request = self._variables | {
            "messages": chat,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": not is_continued,
        }
        text = self._ask(request)
        if tools and text == self._ask(request | {"tools": None}):
            raise ConfigError("the model's chat template takes no tools; leave them out")
        return _before_tag(text) if is_continued else text

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def _ask(self, variables: dict[str, Any]) -> str:
        answer, _ = self._worker.ask(variables, cpu_s=self._limit_s)
        return str(answer["text"])


def _before_tag(text: str) -> str:
    tag = CONTINUE_TAG.strip()
    place = text.rfind(tag)
    if place < 0:
        raise ConfigError("the chat template does not show the final assistant message")
    is_spaced = text.startswith(CONTINUE_TAG, place)
    return text[:place] if is_spaced else text[:place].rstrip()


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as templates take them: null keys dropped, text parts joined.

    Raises:
        ConfigError: Names the message and what is wrong with it.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages is a {type(messages).__name__}; it takes a list of messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise ConfigError(f"messages has {len(messages)} entries; it takes 1 to {MAX_MESSAGES}")
    _check_nesting("messages", messages)
    chat = [_check_message(index, message) for index, message in enumerate(messages)]
    try:
        json.dumps(chat, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"messages are not valid Unicode: {error.reason}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"messages cannot be written as JSON: {error}") from error
    return chat


def _check_message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} is a {type(message).__name__}; it takes role and content")
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"{where} has role {role!r:.60}; it takes a name such as 'user'")
    if fields.get("tool_calls") == []:  # as tables have it in messages without any
        del fields["tool_calls"]
    if "tool_calls" in fields:
        fields["tool_calls"] = _check_tool_calls(where, fields["tool_calls"])
    content = fields.get("content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        fields["content"] = content = "".join(_part_text(where, part) for part in content)
    if content is None and "tool_calls" in fields and role == "assistant":
        return fields
    if not isinstance(content, str):
        raise ConfigError(f"{where} has content {content!r:.60}; it takes text")
    return fields


def _check_tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    """Tool calls with arguments as values: OpenAI writes them as text, templates as JSON."""
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise ConfigError(f"{where} has tool_calls {calls!r:.60}; it takes a list")
    checked = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ConfigError(f"{where} has a tool call {call!r:.60}; it takes a function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{where} has tool arguments that are not JSON: {error}"
                ) from error
            _check_nesting(f"{where}: the value of tool arguments", arguments)
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _check_nesting(what: str, value: object) -> None:
    problem = nesting_problem(value)
    if problem:
        raise ConfigError(f"{what} {problem}")


def _part_text(where: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ConfigError(f"{where} has a content part that is not text; only text is supported")
