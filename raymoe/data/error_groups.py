"""Errors of rows by what they say: how many rows, with the ranges of the numbers in them."""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from raymoe.errors import ConfigError

MAX_GROUPS = 24
MAX_CHARACTERS = 1000  # of an error
OTHER = "other errors"
HIDDEN = "'...'"

_NUMBER, _QUOTE = "\x01", "\x02"  # places in a template
# What is in quotes may be of a cell, except after these words. A text that was cut has no end.
_QUOTED = re.compile(
    r"(?<!\w)(?<!column )(?<!such as )"
    r"""(?:'(?:[^'\\]|\\.)*'(?!\w)|"(?:[^"\\]|\\.)*"(?!\w)|['"].*$)""",
    re.DOTALL,
)
_NUMERAL = re.compile(r"(?<![\w.,])-?\d{1,300}(?:,\d{3})*(?:\.\d+)?(?!\w)", re.ASCII)
_PLACES = re.compile(f"[{_NUMBER}{_QUOTE}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorGroup:
    """Rows whose errors differ in numbers and in quoted text only.

    Attributes:
        template: The error, with a character in the place of each number and quoted text.
        numbers: The lowest and the highest in each place, as they were written.
        quotes: The first text in each place, and whether there are others. Parts of cells.
    """

    num_rows: int
    template: str
    numbers: tuple[tuple[str, str], ...] = ()
    quotes: tuple[tuple[str, bool], ...] = ()

    def __post_init__(self) -> None:
        for number in (one for pair in self.numbers for one in pair):
            if not _NUMERAL.fullmatch(number):
                raise ConfigError(f"{number!r:.100} is no number of an error")

    @classmethod
    def of(cls, error: str) -> "ErrorGroup":
        """Return the group of one row."""
        if len(error) > MAX_CHARACTERS:
            error = f"{error[: MAX_CHARACTERS - 3]}..."
        error = _PLACES.sub("?", error)
        quotes, texts = _QUOTED.findall(error), _QUOTED.sub(_QUOTE, error)
        numbers, template = _NUMERAL.findall(texts), _NUMERAL.sub(_NUMBER, texts)
        return cls(
            num_rows=1,
            template=template,
            numbers=tuple((one, one) for one in numbers),
            quotes=tuple((one, False) for one in quotes),
        )

    def join(self, other: "ErrorGroup") -> "ErrorGroup":
        """Return the rows of two groups with the same template as one."""
        numbers = [
            (min(ours[0], theirs[0], key=_value), max(ours[1], theirs[1], key=_value))
            for ours, theirs in zip(self.numbers, other.numbers, strict=False)
        ]
        quotes = [
            (text, varies or others_vary or text != other_text)
            for (text, varies), (other_text, others_vary) in zip(
                self.quotes, other.quotes, strict=False
            )
        ]
        return dataclasses.replace(
            self,
            num_rows=self.num_rows + other.num_rows,
            numbers=tuple(numbers),
            quotes=tuple(quotes),
        )

    def text(self, *, has_quotes: bool = True) -> str:
        """Return what the errors say, a number that varies as its range.

        Args:
            has_quotes: Otherwise `HIDDEN` is in the place of each text that may be of a cell.
        """
        numbers, quotes = iter(self.numbers), iter(self.quotes)

        def fill(place: re.Match[str]) -> str:
            if place[0] == _NUMBER:
                low, high = next(numbers, ("?", "?"))
                return low if low == high else f"{low} to {high}"
            text, varies = next(quotes, (HIDDEN, False))
            if not has_quotes:
                return HIDDEN
            return f"{text} and others" if varies else text

        return _PLACES.sub(fill, self.template)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


class ErrorGroups:
    """Groups of errors, in a fixed amount of memory."""

    def __init__(self, groups: Iterable[ErrorGroup] = ()) -> None:
        self._groups: dict[str, ErrorGroup] = {}
        self.update(groups)

    def add(self, errors: Iterable[str]) -> list[bool]:
        """Count rows by their errors; returns which of them are the first of a group."""
        return self.update(map(ErrorGroup.of, errors))

    def update(self, groups: Iterable[ErrorGroup]) -> list[bool]:
        """Count the rows of other groups; returns which of them are new here."""
        is_new = []
        for one in groups:
            is_full = one.template not in self._groups and len(self._groups) >= MAX_GROUPS
            group = ErrorGroup(num_rows=one.num_rows, template=OTHER) if is_full else one
            known = self._groups.get(group.template)
            self._groups[group.template] = group if known is None else known.join(group)
            is_new.append(known is None)
        return is_new

    def groups(self) -> tuple[ErrorGroup, ...]:
        """Return all groups, that with the most rows first."""
        found = list(self._groups.values())  # at once: another thread may add
        ordered = sorted(found, key=lambda one: (-one.num_rows, one.template))
        return tuple(ordered)
