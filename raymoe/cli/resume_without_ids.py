"""Resume without ids: rows of an output are found among those of the input by their cells.

A row of the output is one of the input that has the same cells, or, where others than those that
its answer depends on have been edited, the same prompt and parameters. Of equal rows as many are
written as the output has of them.
"""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raymoe.cli.resume import Counts
from raymoe.cli.sources import Flags, Source
from raymoe.cli.writers import StaleInOrder, TableLines, Writer
from raymoe.data.prompt_template import INPUT_ERROR_COLUMN
from raymoe.data.rows import content_digest, own_error
from raymoe.errors import TEMPORARY_ERRORS

DIGEST = "S24"  # what `content_digest` returns

_OF_A_LINE = re.compile(r", line \d+\)$")  # the place that readers give to a line they cannot read

Digests = npt.NDArray[np.bytes_]


@dataclass(frozen=True, kw_only=True)
class WrittenRows:
    """Rows of the input that are already in the output.

    Attributes:
        is_written: Of all rows of the input.
        stale: Rows of the output that have to go.
        num_failed: Of them, those that ended by something outside of them.
        num_again: Of them, those that are equal to rows that are missing: which samples these get
            is known only where all of them come again.
        num_unknown: Rows of the output that are like none of the input; they stay.
        counts: Of all rows of the output, stale ones too.
    """

    is_written: Flags
    stale: StaleInOrder
    num_failed: int
    num_again: int
    num_unknown: int
    counts: Counts

    @property
    def num_rows(self) -> int:
        return int(self.is_written.sum())


class _Rows:
    """Digests of rows: of cells and error, of cells, of what the answer depends on.

    As bytes one behind the other, because there may be millions.

    Attributes:
        broken: In the place of the digests of a line that could not be read: its error alone tells.
    """

    def __init__(self, broken: str) -> None:
        self.broken = broken.center(24, "-")
        self._digests = bytearray(), bytearray(), bytearray()

    def add(self, digest: str, cells: str, error: str) -> None:
        of_all = (content_digest([cells, error]), cells, digest)
        if _OF_A_LINE.search(error):
            of_all = (of_all[0], self.broken, self.broken)
        for digests, one in zip(self._digests, of_all, strict=True):
            digests.extend(one.encode())

    @property
    def levels(self) -> list[Digests]:
        return [np.frombuffer(digests, DIGEST) for digests in self._digests]


def find_written_rows(
    source: Source,
    writer: Writer,
    columns: Sequence[str],
    *,
    is_sampled: bool,
    retries_errors: bool = False,
) -> WrittenRows:
    """Read the output of a former run, and find its rows in the input.

    Args:
        columns: What the answer of a row depends on.
        is_sampled: Whether equal rows may have different answers.
        retries_errors: Rows with any error count as failed.
    """
    counts, rows = Counts(), _Rows("output")
    temporary = "" if retries_errors else TEMPORARY_ERRORS
    row_of = array("q")  # of each line of the output: samples are one row
    failed = bytearray()
    for line in counts.see(writer, None):
        if not (writer.has_samples and line.sample and failed):
            rows.add(line.digest, line.cells, line.error)
            failed.append(bool(line.error) and line.error.startswith(temporary))
        row_of.append(len(failed) - 1)
    inputs, outputs = _input_rows(source, columns).levels, rows.levels
    has_failed = np.frombuffer(failed, bool)
    is_written, is_known = _match(inputs, outputs, has_failed)
    again = np.zeros(len(has_failed), bool)
    if is_sampled:
        content = inputs[-1]
        is_partial = np.isin(content, content[~is_written])
        again = is_known & np.isin(outputs[-1], content[is_partial & is_written])
        is_written &= ~is_partial
    is_unknown = ~is_known & ~has_failed
    # A part that a killed run wrote late is there twice; lines that were broken are whole, or gone.
    is_gone = outputs[-1] == rows.broken.encode()
    is_stale = is_unknown & (np.isin(outputs[-1], inputs[-1]) | is_gone)
    stale = has_failed | again | is_stale
    return WrittenRows(
        is_written=is_written,
        stale=StaleInOrder(stale[np.frombuffer(row_of, np.int64)]),
        num_failed=int(has_failed.sum()),
        num_again=int(again.sum()),
        num_unknown=int((is_unknown & ~is_stale).sum()),
        counts=counts,
    )


def _input_rows(source: Source, columns: Sequence[str]) -> _Rows:
    names, rows = tuple(source.schema.names), _Rows("input")
    lines = TableLines(source.json_columns, content_columns=tuple(columns), cell_columns=names)
    for table in source.tables([*names, INPUT_ERROR_COLUMN]):
        for record in lines.of(table):
            error = record.get(INPUT_ERROR_COLUMN)
            error = own_error(error) if error else ""
            rows.add(lines.digest(record), lines.cells_digest(record), error)
    return rows


def _match(
    inputs: Sequence[Digests], outputs: Sequence[Digests], has_failed: Flags
) -> tuple[Flags, Flags]:
    """Return which rows of the input are written, and which of the output are of the input."""
    is_written = np.zeros(len(inputs[0]), bool)
    is_known = np.zeros(len(outputs[0]), bool)
    for of_input, of_output in zip(inputs, outputs, strict=True):
        missing, free = np.flatnonzero(~is_written), np.flatnonzero(~is_known & ~has_failed)
        is_written[missing] = first_of(of_input[missing], of_output[free])
        is_known[free] = first_of(of_output[free], of_input[missing])
    return is_written, is_known


def first_of(rows: Digests, others: Digests) -> Flags:
    """Return which rows `others` has too; of equal ones the first, as many as it has."""
    found = np.zeros(len(rows), bool)
    if not (len(rows) and len(others)):
        return found
    values, counts = np.unique(others, return_counts=True)
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    begins = np.flatnonzero(is_first)
    number = np.arange(len(rows)) - begins[np.cumsum(is_first) - 1]  # among equal ones
    at = np.minimum(np.searchsorted(values, ordered), len(values) - 1)
    found[order] = (values[at] == ordered) & (number < counts[at])
    return found
