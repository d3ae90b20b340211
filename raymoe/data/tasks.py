"""Tasks besides generation in the operator: their rows and their columns."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raymoe.data.columns import ERROR_COLUMN, REQUEST_FIELD, OutputColumns
from raymoe.data.rows import (
    BadCell,
    RowError,
    RowReader,
    RowRequest,
    parse_json,
    read_cells,
    read_prompt,
    refuse_bad_cell,
    row_key,
    shown,
)
from raymoe.engine.tasks.rows import TaskOptions, check_labels, is_empty
from raymoe.errors import ConfigError, describe

_PROBABILITIES = pa.list_(pa.struct([("label", pa.string()), ("probability", pa.float32())]))
_FIELDS = {
    "score": (
        pa.field("logprob", pa.float64()),
        pa.field("mean_logprob", pa.float64()),
        pa.field("num_scored_tokens", pa.int32()),
        pa.field("perplexity", pa.float64()),
        pa.field("is_greedy", pa.bool_()),
    ),
    "classify": (
        pa.field("label", pa.string()),
        pa.field("label_probability", pa.float32()),
        pa.field("label_probabilities", _PROBABILITIES),
    ),
    "embed": (pa.field("embedding", pa.list_(pa.float32())),),
}
_COMMON = (
    pa.field("num_input_tokens", pa.int32()),
    pa.field("num_cached_tokens", pa.int32()),
    pa.field(ERROR_COLUMN, pa.string()),
)


def read_task(task: str, options: Mapping[str, Any] | None) -> TaskOptions | None:
    """The options of a task; None for generation, which has none."""
    if task == "generate":
        if options:
            raise ConfigError("task_options belong to the tasks score, classify and embed")
        return None
    return TaskOptions.from_dict({**(options or {}), "task": task})


def read_task_of(options: Mapping[str, Any]) -> TaskOptions | None:
    """The task of a `MoEGenerator` with these options."""
    return read_task(options.get("task", "generate"), options.get("task_options"))


def task_fields(options: TaskOptions, *, has_request: bool = False) -> tuple[pa.Field, ...]:
    fields = [*_FIELDS[options.task]]
    if options.token_logprobs:
        fields.append(pa.field("token_logprobs", pa.list_(pa.float32())))
    return (*fields, *_COMMON, *((REQUEST_FIELD,) if has_request else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReader:
    """Converts tables to requests of a task.

    Attributes:
        rows: Reads prompts or messages, ids and errors.
    """

    rows: RowReader
    options: TaskOptions

    def check_schema(self, schema: pa.Schema) -> None:
        self.check_columns(schema.names)

    def check_columns(self, names: Sequence[str]) -> None:
        """Refuse rows without what the task reads; see `RowReader.check_columns`."""
        if self.options.task != "score":
            self.rows.check_columns(names)
            return
        if self.options.continuation_column not in names:
            have = ", ".join(map(repr, names)) or "no columns"
            raise ConfigError(
                f"no column {self.options.continuation_column!r}; the rows have {have}, "
                "and the task 'score' needs the text that is scored"
            )

    def read(self, table: Any) -> list[RowRequest]:
        """Return one request for each row, in order; never raises for a row."""
        requests = self.rows.read(table)
        if self.options.task == "score":
            requests = self._read_scores(table, requests)
        if self.options.task == "classify":
            cells = read_cells(table, self.options.labels_column)
            requests = [
                self._with_labels(request, cell)
                for request, cell in zip(requests, cells, strict=True)
            ]
        return requests

    def _read_scores(self, table: Any, requests: Sequence[RowRequest]) -> list[RowRequest]:
        columns = (
            read_cells(table, self.options.continuation_column),
            read_cells(table, self.rows.prompt_column),
            read_cells(table, self.rows.messages_column),
            read_cells(table, self.rows.id_column),
            read_cells(table, self.rows.error_column),
        )
        read = []
        for request, *cells in zip(requests, *columns, strict=True):
            continuation, prompt, messages, row_id, problem = cells
            is_document = messages is None and is_empty(prompt)
            if is_document and not problem and not isinstance(row_id, BadCell):
                request = RowRequest(  # noqa: PLW2901 - the same row, which is a document
                    prompt=[], sampling_params=request.sampling_params,
                    column=self.options.continuation_column, row_id=row_id,
                    row_key=row_key(row_id),
                )  # fmt: skip
            read.append(self._with_continuation(request, continuation))
        return read

    def _with_continuation(self, request: RowRequest, cell: Any) -> RowRequest:
        if request.error:
            return request
        column = self.options.continuation_column
        try:
            if cell is None:
                raise RowError("ValueError", column, "is null")
            return dataclasses.replace(request, continuations=(read_prompt(cell, column),))
        except Exception as error:  # whatever is in a cell is the row's error
            text = str(error) if isinstance(error, RowError) else describe(error)
            return dataclasses.replace(request, prompt=None, error=text)

    def _with_labels(self, request: RowRequest, cell: Any) -> RowRequest:
        labels = self.options.labels
        if request.error:
            return request
        try:
            refuse_bad_cell(cell, self.options.labels_column)
            if isinstance(cell, str):
                cell = parse_json(cell, self.options.labels_column)
            try:
                labels = labels if cell is None else check_labels(cell)
            except ConfigError as error:
                reason = f"cannot be used: {shown(str(error), 200)}"
                raise RowError("ConfigError", self.options.labels_column, reason) from error
        except Exception as error:  # whatever is in a cell is the row's error
            text = str(error) if isinstance(error, RowError) else describe(error)
            return dataclasses.replace(request, prompt=None, error=text)
        chosen = None if labels is None else tuple(labels)
        return dataclasses.replace(request, continuations=chosen)


def reader_of(options: Mapping[str, Any]) -> RowReader | TaskReader:
    """What reads the rows of a `MoEGenerator` with these options."""
    task = read_task_of(options)
    if task is None:
        return RowReader.of_options(options)
    return TaskReader(rows=RowReader.of_options(options, max_tokens=1), options=task)


def reader_and_columns(
    rows: RowReader, task: TaskOptions | None, prefix: str
) -> tuple[RowReader | TaskReader, OutputColumns]:
    """What reads the rows of an operator, and the columns that it adds."""
    if task is None:
        return rows, OutputColumns.of(
            rows.defaults,
            has_choices=rows.has_choices,
            has_request=rows.has_request,
            prefix=prefix,
        )
    columns = OutputColumns(fields=task_fields(task, has_request=rows.has_request), prefix=prefix)
    return TaskReader(rows=rows, options=task), columns
