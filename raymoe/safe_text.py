"""Text from rows, models and other machines, made harmless for those who show it.

A terminal obeys what it is sent: escape sequences in a row's text could move the cursor, change the
title, or write to the clipboard. And characters that hide or reorder text can make a line say what
it does not. Here they become visible.
"""

import unicodedata

# Control characters, lone surrogates, separators of lines, and format characters such as
# bidirectional overrides (Unicode 16, sections 23.1 to 23.8).
_HARMFUL = frozenset({"Cc", "Cs", "Cf", "Zl", "Zp"})
_JOINERS = frozenset("\u200c\u200d")  # of Persian, Hindi and emoji: they move nothing


def harmless(text: str, *, keep: str = "") -> str:
    r"""Replace what a terminal would obey by its escape in Python.

    Args:
        text: From anywhere.
        keep: Control characters that stay, such as the line breaks of our own tables.

    >>> harmless("\x1b[2J done")
    '\\x1b[2J done'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in keep or not _is_harmful(one) else _escape(one) for one in text)


def _escape(one: str) -> str:
    return ascii(one)[1:-1]


def _is_harmful(one: str) -> bool:
    return unicodedata.category(one) in _HARMFUL and one not in _JOINERS
