"""Escapes untrusted text from rows, models and other machines before it is shown.

Escape sequences could move a terminal's cursor, change its title, or write to the clipboard.
Characters that hide or reorder text can make a line say what it does not.
"""

import unicodedata

# Control characters, lone surrogates, line separators, and format characters such as bidirectional
# overrides (Unicode 16, sections 23.1 to 23.8).
_HARMFUL = frozenset({"Cc", "Cs", "Cf", "Zl", "Zp"})
_JOINERS = frozenset("\u200c\u200d")  # used by Persian, Hindi and emoji; they reorder nothing


def harmless(text: str, *, keep: str = "") -> str:
    r"""Replace what a terminal would obey by its escape in Python.

    Args:
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


MAX_LEVELS = 128  # of nested lists and objects
MAX_VALUES = 10_000_000  # shared parts count each time, because they are written each time

_CONTAINERS = (dict, list, tuple, frozenset)
_LEAVES = frozenset((int, float, str, bool, type(None)))  # most values: one look-up decides


def nesting_problem(value: object) -> str:
    """Return why recursion over a value is unsafe, or ""."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    num_values = 0
    for _ in range(MAX_LEVELS):
        deeper = []
        for container in level:
            num_values += len(container)
            if num_values > MAX_VALUES:
                return f"has more than {MAX_VALUES} values"
            items = container.values() if isinstance(container, dict) else container
            deeper += [
                item
                for item in items
                if type(item) not in _LEAVES and isinstance(item, _CONTAINERS)
            ]
        level = deeper
        if not level:
            return ""
    return f"is nested more than {MAX_LEVELS} levels deep"
