"""How many rows, and what was wrong with some? Counted batch by batch, by many threads."""

import re
import threading
from collections import Counter
from collections.abc import Sequence

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
                self._errors[self._kind(error)] += 1
                if len(self._messages) < MAX_MESSAGES:
                    self._messages.append(error[:MAX_MESSAGE_CHARACTERS])

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

    def _kind(self, error: str) -> str:
        """The type of an error; text of a user's own error column has none."""
        kind = error.partition(":")[0]
        is_known = kind in self._errors or len(self._errors) < MAX_KINDS
        return kind if is_known and _KIND.fullmatch(kind) else OTHER
