"""Conversion of generations to Arrow columns with a fixed schema."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raymoe.chat.parser import ChatParser
from raymoe.config import SamplingParams
from raymoe.data.batches import with_columns
from raymoe.engine.outputs import Generation, TokenLogprob
from raymoe.errors import ConfigError, in_step
from raymoe.output_schema import OutputSchema, ValueType

ERROR_COLUMN = "__inference_error__"
CHOICES_COLUMN = "choices"
NO_PARSER = ChatParser()

_CANDIDATE = [("token_id", pa.int32()), ("logprob", pa.float32())]
_LOGPROBS = pa.list_(pa.struct([*_CANDIDATE, ("top", pa.list_(pa.struct(_CANDIDATE)))]))
_FIELDS = (
    pa.field("generated_text", pa.string()),
    pa.field("generated_tokens", pa.list_(pa.int32())),
    pa.field("num_input_tokens", pa.int32()),
    pa.field("num_cached_tokens", pa.int32()),
    pa.field("num_generated_tokens", pa.int32()),
    pa.field("finish_reason", pa.string()),
    pa.field(ERROR_COLUMN, pa.string()),
)
_CHOICE = [
    ("text", pa.string()),
    ("token_ids", pa.list_(pa.int32())),
    ("finish_reason", pa.string()),
    ("num_generated_tokens", pa.int32()),
    ("logprobs", _LOGPROBS),
]
REASONING_COLUMN, CALLS_COLUMN = "reasoning_text", "tool_calls"
PARSED_COLUMN, PARSED_ERROR_COLUMN = "parsed", "parsed_error"
BYTES_COLUMN = "token_bytes"
_BYTES = pa.list_(pa.struct([("token_id", pa.int32()), ("bytes", pa.binary())]))
REQUEST_COLUMN = "__request__"
_RANKED = pa.struct([
    ("token_id", pa.int32()), ("logprob", pa.float32()), ("rank", pa.int32()),
    ("decoded_token", pa.string()),
])  # fmt: skip
_METRICS = pa.struct([
    ("num_generation_tokens", pa.int32()), ("arrival_time", pa.float64()),
    ("queued_ts", pa.float64()), ("last_token_ts", pa.float64()),
])  # fmt: skip
_REQUEST = [
    ("request_id", pa.int64()), ("batch_uuid", pa.string()), ("prompt", pa.string()),
    ("prompt_token_ids", pa.list_(pa.int32())), ("params", pa.string()),
    ("time_taken_llm", pa.float64()), ("metrics", _METRICS),
    ("logprobs", pa.list_(pa.list_(_RANKED))), ("prompt_logprobs", pa.list_(pa.list_(_RANKED))),
]  # fmt: skip
REQUEST_NAMES = tuple(name for name, _ in _REQUEST)
REQUEST_FIELD = pa.field(REQUEST_COLUMN, pa.struct(_REQUEST))
_CALLS = pa.list_(pa.struct([(name, pa.string()) for name in ("name", "arguments", "id")]))
_SCALARS = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "null": pa.null(),
}


def arrow_type(of: ValueType) -> pa.DataType:
    """Return the type of a column of such values."""
    if of.item is not None:
        return pa.list_(pa.field("item", arrow_type(of.item), nullable=of.item.is_nullable))
    if of.kind == "object":
        return pa.struct(
            [pa.field(name, arrow_type(one), nullable=one.is_nullable) for name, one in of.fields]
        )
    return _SCALARS[of.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputColumns:
    """The output columns; they depend on the operator's parameters, not on rows.

    Attributes:
        prefix: Put before the name of each field.
    """

    fields: tuple[pa.Field, ...]
    prefix: str = ""

    @classmethod
    def of(
        cls,
        defaults: SamplingParams,
        *,
        has_choices: bool = False,
        has_token_bytes: bool = False,
        has_request: bool = False,
        parser: ChatParser = NO_PARSER,
        schema: OutputSchema | None = None,
        prefix: str = "",
    ) -> "OutputColumns":
        parts = [(REASONING_COLUMN, pa.string())] if parser.reasoning is not None else []
        parts += [(CALLS_COLUMN, _CALLS)] if parser.tool_calls is not None else []
        if schema is not None:
            parts += [(PARSED_COLUMN, arrow_type(schema.root)), (PARSED_ERROR_COLUMN, pa.string())]
        fields = [*_FIELDS, *(pa.field(name, kind) for name, kind in parts)]
        if has_choices:
            fields.append(pa.field(CHOICES_COLUMN, pa.list_(pa.struct([*_CHOICE, *parts]))))
        if has_token_bytes:
            fields.append(pa.field(BYTES_COLUMN, _BYTES))
        if defaults.n > 1:
            fields.append(pa.field("generated_texts", pa.list_(pa.string())))
        if defaults.logprobs is not None:
            fields.append(pa.field("logprobs", _LOGPROBS))
        if defaults.prompt_logprobs is not None:
            fields.append(pa.field("prompt_logprobs", _LOGPROBS))
        if has_request:
            fields.append(REQUEST_FIELD)
        return cls(fields=tuple(fields), prefix=prefix)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.prefix + field.name for field in self.fields)

    def check_names(self, names: Collection[str]) -> None:
        """Refuse a table that already has one of these columns."""
        taken = sorted(self.names & set(names))
        if taken:
            raise ConfigError(
                f"the input has columns with the names of output columns: {', '.join(taken)}; "
                "rename or drop them, or set column_prefix for this generator's columns"
            )

    def append(
        self, batch: Any, generations: Sequence[Generation]
    ) -> tuple[Any, Sequence[Generation]]:
        """Return the batch with the columns, and the generations that are in them.

        A generation that a column cannot hold, such as one with a lone surrogate in its text, is
        replaced by an error that names the column.
        """
        try:
            arrays = [_array(field, generations) for field in self.fields]
        except Exception:
            generations = [self._fitting(generation) for generation in generations]
            arrays = [_array(field, generations) for field in self.fields]
        names = [self.prefix + field.name for field in self.fields]
        return with_columns(batch, dict(zip(names, arrays, strict=True))), generations

    def _fitting(self, generation: Generation) -> Generation:
        num_input_tokens = 0
        try:
            for field in self.fields:
                with in_step(f"filling the column {self.prefix + field.name!r}"):
                    _array(field, [generation])
                if field.name == "num_input_tokens":
                    num_input_tokens = generation.num_input_tokens
        except Exception as error:
            return Generation.from_error(error, num_input_tokens)
        return generation


def _array(field: pa.Field, generations: Sequence[Generation]) -> pa.Array:
    read = _CELLS.get(field.name) or _value_cell(field.name)
    return pa.array([read(generation) for generation in generations], type=field.type)


def logprob_tokens(generation: Generation) -> set[int]:
    """The tokens of all log probabilities of generated tokens."""
    entries = [e for sample in generation.outputs for e in sample.logprobs or ()]
    best = {token for entry in entries for token, _ in entry.top}
    return best | {entry.token_id for entry in entries}


def with_token_bytes(generation: Generation, token_bytes: Mapping[int, bytes]) -> Generation:
    """Return the generation with the cell of `BYTES_COLUMN`."""
    wanted = sorted(logprob_tokens(generation) & token_bytes.keys())
    cell = [{"token_id": token, "bytes": token_bytes[token]} for token in wanted]
    values = {**(generation.values or {}), BYTES_COLUMN: cell}
    return dataclasses.replace(generation, values=values)


def _logprob_cells(
    logprobs: Sequence[TokenLogprob | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Return a struct for each token; None if there is none, as for a prompt's first token."""
    if logprobs is None:
        return None
    return [None if one is None else _logprob_cell(one) for one in logprobs]


def _logprob_cell(one: TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in one.top]
    return {"token_id": one.token_id, "logprob": one.logprob, "top": top}


def _parsed_error(one: Generation) -> str | None:
    """Why there is no value; rows that were refused before have no answer to read."""
    return one.parsed_error or one.error or None


def _choice_cell(one: Generation) -> dict[str, Any]:
    return {
        "text": one.text,
        "token_ids": list(one.token_ids),
        "finish_reason": one.finish_reason,
        "num_generated_tokens": one.num_generated_tokens,
        "logprobs": _logprob_cells(one.logprobs),
        REASONING_COLUMN: one.reasoning,
        CALLS_COLUMN: _call_cells(one),
        PARSED_COLUMN: one.parsed,
        PARSED_ERROR_COLUMN: _parsed_error(one),
    }


def _value_cell(name: str) -> Callable[[Generation], Any]:
    return lambda one: (one.values or {}).get(name)


def _call_cells(one: Generation) -> list[dict[str, str | None]]:
    return [
        {"name": call.name, "arguments": call.arguments, "id": call.id or None}
        for call in one.tool_calls
    ]


_CELLS: dict[str, Callable[[Generation], Any]] = {
    "generated_text": lambda one: one.text,
    "generated_tokens": lambda one: list(one.token_ids),
    "num_input_tokens": lambda one: one.num_input_tokens,
    "num_cached_tokens": lambda one: one.num_cached_tokens,
    "num_generated_tokens": lambda one: one.num_tokens_of_outputs,
    "finish_reason": lambda one: one.finish_reason,
    ERROR_COLUMN: lambda one: one.error,
    REASONING_COLUMN: lambda one: one.reasoning,
    CALLS_COLUMN: _call_cells,
    PARSED_COLUMN: lambda one: one.parsed,
    PARSED_ERROR_COLUMN: _parsed_error,
    CHOICES_COLUMN: lambda one: [_choice_cell(sample) for sample in one.outputs],
    "generated_texts": lambda one: [sample.text for sample in one.outputs],
    "logprobs": lambda one: _logprob_cells(one.logprobs),
    "prompt_logprobs": lambda one: _logprob_cells(one.prompt_logprobs),
}


INDEX_COLUMN, COUNT_COLUMN = "sample_index", "num_samples"
SAMPLES_COLUMN = "generated_texts"
COLUMNS = (INDEX_COLUMN, COUNT_COLUMN)
INPUT_MAY_NOT_HAVE = (*COLUMNS, SAMPLES_COLUMN, "logprobs")

# Columns of a row that each sample has of its own, and their names within a choice.
_OF_A_SAMPLE = {
    "generated_text": "text",
    "generated_tokens": "token_ids",
    "num_generated_tokens": "num_generated_tokens",
    "finish_reason": "finish_reason",
    "logprobs": "logprobs",
}
_PARTS_OF_A_SAMPLE = (REASONING_COLUMN, CALLS_COLUMN, PARSED_COLUMN, PARSED_ERROR_COLUMN)


def explode_samples(table: pa.Table, column_prefix: str = "") -> pa.Table:
    """Return one row for each sample; samples of a prompt are adjacent and in order.

    For `Dataset.map_batches` after a `MoEGenerator` with ``has_choices=True``.

    All columns of the input are repeated for each sample, ids too; ``generated_text,
    generated_tokens, num_generated_tokens, finish_reason`` and ``logprobs`` (null if not requested)
    are those of the sample. ``sample_index`` (int32) counts from 0 to ``num_samples`` - 1 (int32);
    ``choices`` and ``generated_texts`` are dropped. An error row stays one row.

    Ray's checkpoints need unique ids: write the rows first, and explode what was written.

    Examples:
        >>> ds = ray.data.from_items([{"prompt": "date: 5 March 2024 ->"}])
        >>> ds = raymoe.generate(ds, raymoe.demo_model_path(), n=2, has_choices=True)
        >>> ds = ds.map_batches(raymoe.explode_samples, batch_format="pyarrow", batch_size=None)
        >>> sorted(row["sample_index"] for row in ds.take_all())
        [0, 1]

    Args:
        column_prefix: That of the `MoEGenerator`; it precedes all names above.

    Raises:
        ConfigError: The table has no samples, or a column with a new name.
    """
    prefix, source = column_prefix, column_prefix + CHOICES_COLUMN
    check_names(table.column_names, [prefix + name for name in COLUMNS])
    if source not in table.column_names:
        raise ConfigError(
            f"the table has no column {source!r}; set has_choices=True of MoEGenerator"
        )
    choices = table.column(source).combine_chunks()
    counts = pc.list_value_length(choices)
    if counts.null_count or (len(counts) and pc.min(counts).as_py() < 1):
        raise ConfigError(f"column {source!r} has a row without a sample")
    rows = pc.list_parent_indices(choices)
    samples = pc.list_flatten(choices)
    exploded = table.drop_columns(
        [name for name in (source, prefix + SAMPLES_COLUMN) if name in table.column_names]
    ).take(rows)
    for name, key in _OF_A_SAMPLE.items():
        exploded = _with_column(exploded, prefix + name, pc.struct_field(samples, key))
    for name in _PARTS_OF_A_SAMPLE:
        if prefix + name in exploded.column_names:
            exploded = _with_column(exploded, prefix + name, pc.struct_field(samples, name))
    firsts = pc.subtract(pc.cumulative_sum(counts), counts)
    indices = pc.subtract(pa.array(range(len(rows)), pa.int32()), firsts.take(rows))
    exploded = _with_column(exploded, prefix + INDEX_COLUMN, indices.cast(pa.int32()))
    return _with_column(exploded, prefix + COUNT_COLUMN, counts.take(rows).cast(pa.int32()))


def check_names(names: Collection[str], taken: Collection[str] = COLUMNS) -> None:
    """Refuse a table that has a column with one of the new names.

    `taken` is `INPUT_MAY_NOT_HAVE` for a table that no `MoEGenerator` has processed.
    """
    for name in taken:
        if name in names:
            raise ConfigError(
                f"the input has a column {name!r}, as samples in rows of their own get; rename it"
            )


def _with_column(table: pa.Table, name: str, cells: pa.Array) -> pa.Table:
    if name not in table.column_names:
        return table.append_column(name, cells)
    return table.set_column(table.column_names.index(name), name, cells)
