"""Splits generated text into reasoning and answer, by the markers of a model family."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from raymoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Markers:
    """What stands before and after reasoning, and around an answer."""

    begin: str
    end: str
    answer: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ReasoningStart:
    """Where generated text begins, with regard to its reasoning.

    Attributes:
        begin: What reasoning begins with.
        ends: What comes before the answer, in this order, with anything in between.
        is_open: Whether the text begins within reasoning; None where the text says so itself.
    """

    begin: str
    ends: tuple[str, ...]
    is_open: bool | None

    def hides_from(self, stop: Sequence[str]) -> bool:
        """Whether stop strings wait for the answer: who stops at an end wants none."""
        return not any(end in one for one in stop for end in self.ends)


MARKERS = {
    "think": Markers("<think>", "</think>"),  # Qwen3, DeepSeek, GLM, MiniMax, Kimi
    "hunyuan": Markers("<think>", "</think>", ("<answer>", "</answer>")),
    "mistral": Markers("[THINK]", "[/THINK]"),
    "seed_oss": Markers("<seed:think>", "</seed:think>"),
}
HARMONY = "gpt_oss"
REASONING_PARSERS = (*MARKERS, HARMONY)
# Their markers are special tokens, which texts usually leave out.
NEEDS_SPECIAL_TOKENS = frozenset({"mistral", HARMONY})
# In between models write `<|constrain|>json` in several ways, or nothing.
_FINAL = ("<|channel|>final", "<|message|>")

_END_OF_MESSAGE = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)")
_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?(?P<to>[^<]*)<\|channel\|>(?P<channel>\w+)(?P<more>.*)",
    re.DOTALL,
)


def find_reasoning_parser(template: str) -> str | None:
    """Return the parser of the family that a chat template is of, None if it has no reasoning."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    found = [name for name, one in MARKERS.items() if one.end in template]
    if "hunyuan" in found and not ("<answer>" in template and "</answer>" in template):
        found.remove("hunyuan")
    return found[-1] if found else None


def shortest_name(name: str, template: str) -> str:
    """Return "auto" for the parser that the template leads to anyway, else the name."""
    return "auto" if name == (find_reasoning_parser(template) or "none") else name


def check_reasoning_parser(name: str) -> None:
    if name not in ("auto", "none", *REASONING_PARSERS):
        known = ", ".join(("auto", "none", *REASONING_PARSERS))
        raise ConfigError(f"reasoning_parser is {name!r}; it takes one of {known}")


def opens_reasoning(parser: str, prompt: str, continued: str = "") -> bool | None:
    """Return whether generated text begins within reasoning.

    False means that the prompt has ended the reasoning, as templates do with thinking disabled;
    None that the text itself says.

    Args:
        prompt: The rendered prompt, or its end.
        continued: The assistant's message at its end that the model continues.
    """
    if parser == HARMONY:
        return None
    markers, end = MARKERS[parser], prompt.rstrip()
    if end.endswith(markers.begin):
        return True
    begun, ended = continued.rfind(markers.begin), continued.rfind(markers.end)
    if end.endswith(markers.end) or ended > begun:
        return False
    return True if begun > ended else None


def start_of_text(parser: str, prompt: str, continued: str = "") -> ReasoningStart | None:
    """Return how a text begins; None for an answer, as the prompt has ended the reasoning.

    Args:
        prompt: As for `opens_reasoning`; so is `continued`.
    """
    is_open = opens_reasoning(parser, prompt, continued)
    return None if is_open is False else _start(parser, is_open)


def find_answer(parser: str, text: str, *, is_open: bool | None, stop: Sequence[str]) -> int | None:
    """Return from where on stop strings count in a text; None if not yet.

    Args:
        text: With special tokens.
        is_open: As for `split_reasoning`.
    """
    if is_open is False:
        return 0
    start = _start(parser, is_open)
    if not start.hides_from(stop) or not (is_open or text.lstrip().startswith(start.begin)):
        return 0
    place = 0
    for end in start.ends:
        found = text.find(end, place)
        if found < 0:
            return None
        place = found + len(end)
    return len(text) - len(text[place:].lstrip("\n"))


def _start(parser: str, is_open: bool | None) -> ReasoningStart:
    if parser == HARMONY:
        return ReasoningStart("<|channel|>", _FINAL, is_open)
    return ReasoningStart(MARKERS[parser].begin, (MARKERS[parser].end,), is_open)


def split_reasoning(
    parser: str, text: str, *, is_open: bool | None = None, is_constrained: bool = False
) -> tuple[str | None, str]:
    """Return reasoning and answer; reasoning is None where the text has none.

    Reasoning that the token limit has cut has no end marker: all text after its begin is reasoning.
    Line ends next to the markers belong to neither.

    Args:
        is_open: See `opens_reasoning`.
        is_constrained: Whether a schema or grammar said what the answer is: then the end of
            reasoning alone, which it may have within, counts only where reasoning was open.
    """
    if parser == HARMONY:
        return _split_harmony(text)
    markers = MARKERS[parser]
    begins = text.lstrip().startswith(markers.begin)
    if is_open is False or (is_constrained and not (is_open or begins)):
        reasoning, answer = None, text
    else:
        reasoning, answer = _split(markers, text, is_open)
    if markers.answer is not None:
        answer = _inner_answer(answer, *markers.answer)
    return reasoning, answer


def _split(markers: Markers, text: str, is_open: bool | None) -> tuple[str | None, str]:
    begins = text.lstrip().startswith(markers.begin)
    body = text.lstrip()[len(markers.begin) :] if begins else text
    reasoning, end, answer = body.partition(markers.end)
    # An end alone counts: some templates open reasoning where the prompt's end does not show it.
    if not (begins or is_open) and (not end or markers.begin in reasoning):
        return None, text
    return reasoning.strip("\n"), answer.lstrip("\n")


def _inner_answer(text: str, begin: str, end: str) -> str:
    inner = text.strip()
    if not inner.startswith(begin):
        return text
    return inner.removeprefix(begin).removesuffix(end).strip("\n")


def _split_harmony(text: str) -> tuple[str | None, str]:
    """Split messages by channel; messages to tools stay as they are for the parser of calls."""
    reasoning, answer, begin = [], [], 0
    while begin < len(text):
        found = _END_OF_MESSAGE.search(text, begin + 1)
        stop, end = (len(text), len(text)) if found is None else found.span()
        header, mark, content = text[begin:stop].partition("<|message|>")
        match = _HEADER.fullmatch(header) if mark else None
        if match is None or "to=" in match["to"] + match["more"]:
            answer.append(text[begin:end])
        elif match["channel"] == "analysis":
            reasoning.append(content)
        else:
            answer.append(content)
        begin = end
    shown = [part for part in answer if part]
    return "\n".join(reasoning) if reasoning else None, "\n".join(shown)
