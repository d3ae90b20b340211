"""What comes back? Generations to Arrow columns, always with the same schema."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raymoe.config import SamplingParams
from raymoe.engine.generation import Generation, TokenLogprob
from raymoe.errors import ConfigError

ERROR_COLUMN = "__inference_error__"
CHOICES_COLUMN = "choices"

_CANDIDATE = [("token_id", pa.int32()), ("logprob", pa.float32())]
_LOGPROBS = pa.list_(pa.struct([*_CANDIDATE, ("top", pa.list_(pa.struct(_CANDIDATE)))]))
_FIELDS = (
    pa.field("generated_text", pa.string()),
    pa.field("generated_tokens", pa.list_(pa.int32())),
    pa.field("num_input_tokens", pa.int32()),
    pa.field("num_generated_tokens", pa.int32()),
    pa.field("finish_reason", pa.string()),
    pa.field(ERROR_COLUMN, pa.string()),
)
_CHOICES = pa.list_(
    pa.struct(
        [
            ("text", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("finish_reason", pa.string()),
            ("num_generated_tokens", pa.int32()),
            ("logprobs", _LOGPROBS),
        ]
    )
)
OUTPUT_COLUMNS = tuple(field.name for field in _FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputColumns:
    """The columns that are added to a table; decided by the operator's parameters, not by rows."""

    fields: tuple[pa.Field, ...]

    @classmethod
    def of(cls, defaults: SamplingParams, *, has_choices: bool = False) -> "OutputColumns":
        """Return the fixed columns and those that the parameters turn on."""
        fields = list(_FIELDS)
        if has_choices:
            fields.append(pa.field(CHOICES_COLUMN, _CHOICES))
        if defaults.n > 1:
            fields.append(pa.field("generated_texts", pa.list_(pa.string())))
        if defaults.logprobs is not None:
            fields.append(pa.field("logprobs", _LOGPROBS))
        if defaults.prompt_logprobs is not None:
            fields.append(pa.field("prompt_logprobs", _LOGPROBS))
        return cls(fields=tuple(fields))

    def check_schema(self, schema: pa.Schema) -> None:
        """Refuse a table that already has one of these columns.

        Raises:
            ConfigError: With the names of the columns.
        """
        taken = sorted(set(schema.names) & {field.name for field in self.fields})
        if taken:
            raise ConfigError(
                f"the input has columns with the names of output columns: {', '.join(taken)}; "
                "rename or drop them before map_batches"
            )

    def append(self, table: pa.Table, generations: Sequence[Generation]) -> pa.Table:
        """Return the table with one more cell in each output column for each of its rows."""
        for field in self.fields:
            cells = [_CELLS[field.name](generation) for generation in generations]
            table = table.append_column(field, pa.array(cells, type=field.type))
        return table


def _logprob_cells(
    logprobs: Sequence[TokenLogprob | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Return a struct for each token; None where there is none, as for a prompt's first token."""
    if logprobs is None:
        return None
    return [None if one is None else _logprob_cell(one) for one in logprobs]


def _logprob_cell(one: TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in one.top]
    return {"token_id": one.token_id, "logprob": one.logprob, "top": top}


def _choice_cell(one: Generation) -> dict[str, Any]:
    return {
        "text": one.text,
        "token_ids": list(one.token_ids),
        "finish_reason": one.finish_reason,
        "num_generated_tokens": one.num_generated_tokens,
        "logprobs": _logprob_cells(one.logprobs),
    }


_CELLS: dict[str, Callable[[Generation], Any]] = {
    "generated_text": lambda one: one.text,
    "generated_tokens": lambda one: list(one.token_ids),
    "num_input_tokens": lambda one: one.num_input_tokens,
    "num_generated_tokens": lambda one: one.num_generated_tokens,
    "finish_reason": lambda one: one.finish_reason,
    ERROR_COLUMN: lambda one: one.error,
    CHOICES_COLUMN: lambda one: [_choice_cell(sample) for sample in (one, *one.others)],
    "generated_texts": lambda one: [one.text, *(other.text for other in one.others)],
    "logprobs": lambda one: _logprob_cells(one.logprobs),
    "prompt_logprobs": lambda one: _logprob_cells(one.prompt_logprobs),
}
