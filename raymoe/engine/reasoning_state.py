"""Whether a sample is still in its reasoning, where schemas, grammars and stop strings wait."""

from raymoe.chat.reasoning import ReasoningStart
from raymoe.engine.tokenizer import StopStrings


class ReasoningState:
    """Follows the text of one sample, special tokens included, token by token.

    Attributes:
        is_open: Whether the text is in the reasoning; None until it says so.
    """

    def __init__(self, start: ReasoningStart) -> None:
        self.is_open = start.is_open
        self._begin = start.begin
        self._end, *self._later_ends = (StopStrings([end]) for end in start.ends)

    def push(self, token: int) -> tuple[list[int], list[int]]:
        """As `StopStrings.push`."""
        return self._end.push(token)

    def find(self, stable_text: str, decoded: str) -> None:
        """Read the text of a token."""
        has_ended = self._end.find(stable_text, decoded) is not None
        if has_ended and self._later_ends:
            self.is_open, self._end = True, self._later_ends.pop(0)
        elif has_ended:
            self.is_open = False
        elif self.is_open is None:
            lead = self._end.text.lstrip()
            if lead.startswith(self._begin):
                self.is_open = True
            elif not self._begin.startswith(lead):
                self.is_open = False
