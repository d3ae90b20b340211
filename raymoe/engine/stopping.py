"""When is a row over? Stop strings are found in the text, also across the borders of tokens."""

from collections.abc import Callable, Sequence

from raymoe.errors import RaymoeError

Decode = Callable[[Sequence[int]], str]

UNFINISHED = "�"  # what decoders write for bytes that are not yet a character


class DecodeError(RaymoeError):
    """The tokenizer cannot decode what the model generated."""


class StopStrings:
    """Decodes the tokens of one sample as they come and looks for stop strings.

    Text is decoded in a window that begins at a token border before the last new text: enough
    for characters of several tokens and for decoders that treat a first token differently, and
    its cost does not grow with the text.
    """

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop, self._decode = stop, decode
        self._overlap = max(map(len, stop)) - 1
        self._tokens: list[int] = []
        self._window = 0  # first token that is decoded again
        self._settled = 0  # tokens whose text is in `_text`
        self._settled_text = ""  # decoded tokens from `_window` to `_settled`
        self._text = ""

    def push(self, token: int) -> str | None:
        """Add a token; returns the text before the first stop string once there is one."""
        self._tokens.append(token)
        decoded = self._decode(self._tokens[self._window :])
        fresh = decoded[len(self._settled_text) :]
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
            self._settled_text = self._decode(self._tokens[self._window :])
        return None

    def _find(self, begin: int, visible: str) -> str | None:
        text = self._text[begin:] + visible
        places = [place for place in map(text.find, self._stop) if place >= 0]
        return self._text[:begin] + text[: min(places)] if places else None
