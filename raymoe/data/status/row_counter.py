"""How many rows, and what was wrong with some? Counted batch by batch, by many threads."""

import re
import threading
from collections import Counter
from collections.abc import Collection, Sequence

from raymoe.data.status.record import RowCounts
from raymoe.engine.generation import Generation

MAX_KINDS = 24
MAX_MESSAGES = 20
MAX_MESSAGE_CHARACTERS = 400
OTHER = "other"

_KIND = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)


class RowCounter:
    """Sums over the rows that an operator answered. Thread-safe, and of fixed size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = self._found = self._input_tokens = self._generated_tokens = 0
        self._errors: Counter[str] = Counter()
        self._messages: list[str] = []

    def add(self, generations: Sequence[Generation], num_found: int = 0) -> None:
        """Count the rows of one batch.

        Args:
            generations: One of each row.
            num_found: Of them, those that a journal had.
        """
        input_tokens = sum(one.num_input_tokens for one in generations)
        generated_tokens = sum(
            sample.num_generated_tokens for one in generations for sample in (one, *one.others)
        )
        errors = [one.error for one in generations if one.error]
        with self._lock:
            self._rows += len(generations)
            self._found += num_found
            self._input_tokens += input_tokens
            self._generated_tokens += generated_tokens
            for error in errors:
                self._errors[error_kind(error, self._errors)] += 1
                message = error[:MAX_MESSAGE_CHARACTERS]
                if len(self._messages) < MAX_MESSAGES and message not in self._messages:
                    self._messages.append(message)

    def counts(self) -> RowCounts:
        """The sums so far."""
        with self._lock:
            return RowCounts(
                num_rows=self._rows,
                num_error_rows=self._errors.total(),
                num_found_rows=self._found,
                num_input_tokens=self._input_tokens,
                num_generated_tokens=self._generated_tokens,
                errors=tuple(self._errors.most_common()),
                messages=tuple(self._messages),
            )


def error_kind(error: str, known: Collection[str] = ()) -> str:
    """The type of an error; text of a user's own error column has none.

    Args:
        error: "Type: message".
        known: Kinds that there are already; beyond `MAX_KINDS` there are no more.
    """
    kind = error.partition(":")[0]
    has_place = kind in known or len(known) < MAX_KINDS
    return kind if has_place and _KIND.fullmatch(kind) else OTHER
