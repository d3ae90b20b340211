"""The parsers of one job: which they are, and what they make of a generated text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from raymoe.chat import reasoning, tool_calls
from raymoe.chat.tool_calls import ToolCall
from raymoe.errors import in_step


class Parts(NamedTuple):
    reasoning: str | None
    text: str
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParser:
    """Splits answers to chats; None for a parser leaves that part in the text."""

    reasoning: str | None = None
    tool_calls: str | None = None

    @classmethod
    def of(
        cls,
        template: str,
        reasoning_parser: str = "auto",
        tool_call_parser: str = "auto",
        has_tools: bool = False,
    ) -> Self:
        """Choose parsers.

        Args:
            template: The model's chat template, in which "auto" looks; "" if it has none.
            has_tools: Whether rows may have tools; without them "auto" finds no parser of calls.
        """
        reasoning.check_reasoning_parser(reasoning_parser)
        tool_calls.check_tool_call_parser(tool_call_parser)
        found = {
            "auto": reasoning.find_reasoning_parser(template),
            "none": None,
        }.get(reasoning_parser, reasoning_parser)
        called = {
            "auto": tool_calls.find_tool_call_parser(template) if has_tools else None,
            "none": None,
        }.get(tool_call_parser, tool_call_parser)
        return cls(reasoning=found, tool_calls=called)

    @property
    def needs_special_tokens(self) -> bool:
        return (
            self.reasoning in reasoning.NEEDS_SPECIAL_TOKENS
            or self.tool_calls in tool_calls.NEEDS_SPECIAL_TOKENS
        )

    def split(
        self,
        text: str,
        *,
        prompt_end: str,
        continued: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        is_constrained: bool = False,
    ) -> Parts:
        """Split one text. Calls are looked for only if the row has tools.

        Args:
            prompt_end: The end of the rendered prompt.
            continued: The assistant's message at its end that the text continues.
            is_constrained: Whether a schema or grammar said what the answer is.
        """
        thought: str | None = None
        calls: tuple[ToolCall, ...] = ()
        if self.reasoning is not None:
            with in_step("splitting off the reasoning"):
                is_open = reasoning.opens_reasoning(self.reasoning, prompt_end, continued)
                thought, text = reasoning.split_reasoning(
                    self.reasoning, text, is_open=is_open, is_constrained=is_constrained
                )
        if self.tool_calls is not None and tools:
            with in_step("finding tool calls"):
                text, calls = tool_calls.split_tool_calls(self.tool_calls, text, tools)
        return Parts(thought, text, calls)
