"""When does an idle engine start? When it has enough rows, or no more can come soon."""

import time


class StartRule:
    """Holds back the first pass of an idle engine until waiting longer is pointless.

    That is: a full pool of rows waits, or all callers are inside (so none can bring more), or a
    caller said that it has no more, or the first row has waited `linger_s`. The owner's lock
    guards it.

    Args:
        pool_rows: Rows that fill the engine.
        linger_s: Longest wait.
        expected_calls: How many callers there are; None if unknown.
    """

    def __init__(self, pool_rows: int, linger_s: float, expected_calls: int | None) -> None:
        self.expected_calls = expected_calls
        self.num_calls_inside = 0
        self._pool_rows, self._linger_s = pool_rows, linger_s
        self._first_row_s: float | None = None
        self._is_hurried = False

    def hurry(self) -> None:
        """Start with the rows that are there."""
        self._is_hurried = True

    def row_came(self) -> None:
        """Note that a row waits."""
        if self._first_row_s is None:
            self._first_row_s = time.monotonic()

    def started(self) -> None:
        """Note that the engine runs; the next idle time begins anew."""
        self._first_row_s, self._is_hurried = None, False

    def wait_s(self, num_rows: int) -> float | None:
        """Seconds to wait with this many rows: 0 is start now, None is until something comes."""
        if num_rows == 0 or self._first_row_s is None:
            return None
        expected = self.expected_calls
        all_inside = expected is not None and self.num_calls_inside >= expected
        if self._is_hurried or all_inside or num_rows >= self._pool_rows:
            return 0.0
        return max(0.0, self._first_row_s + self._linger_s - time.monotonic())
