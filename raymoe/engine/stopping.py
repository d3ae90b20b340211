"""When is a row over? Stop strings are found in the text, also across the borders of tokens."""

from collections.abc import Callable, Sequence

from raymoe.errors import RaymoeError

DecodeAll = Callable[[Sequence[Sequence[int]]], Sequence[str | Exception]]

UNFINISHED = "�"  # what decoders write for bytes that are not yet a character


class DecodeError(RaymoeError):
    """The tokenizer cannot decode what the model generated."""


class StopStrings:
    """Looks for stop strings in the text of one sample, token by token.

    Text is decoded in a window that begins at a token border before the last new text: enough
    for characters of several tokens and for decoders that treat a first token differently, and
    its cost does not grow with the text. What is to decode is given away, so that rows of a step
    are decoded together.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._overlap = max(map(len, stop)) - 1
        self._tokens: list[int] = []
        self._window = 0  # first token that is decoded again
        self._settled = 0  # tokens whose text is in `_text`
        self._text = ""

    def push(self, token: int) -> tuple[list[int], list[int]]:
        """Add a token; returns what `find` wants decoded: the window without and with new text."""
        self._tokens.append(token)
        return self._tokens[self._window : self._settled], self._tokens[self._window :]

    def find(self, settled_text: str, decoded: str) -> str | None:
        """The text before the first stop string once there is one."""
        fresh = decoded[len(settled_text) :]
        visible = fresh.rstrip(UNFINISHED)
        if not visible:
            return None
        begin = max(0, len(self._text) - self._overlap)
        found = self._find(begin, visible)
        if found is not None:
            return found
        if visible == fresh:
            self._text += fresh
            self._window, self._settled = self._settled, len(self._tokens)
        return None

    def _find(self, begin: int, visible: str) -> str | None:
        text = self._text[begin:] + visible
        places = [place for place in map(text.find, self._stop) if place >= 0]
        return self._text[:begin] + text[: min(places)] if places else None
