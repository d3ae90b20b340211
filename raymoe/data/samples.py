"""Several samples of a prompt as rows: one output row becomes one for each of its samples."""

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from raymoe.data.columns import CHOICES_COLUMN
from raymoe.errors import ConfigError

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


def explode_samples(table: pa.Table) -> pa.Table:
    """Return one row for each sample, those of a prompt side by side, in their order.

    For `Dataset.map_batches` after a `MoEGenerator` with ``has_choices=True``::

        ds = ds.map_batches(raymoe.explode_samples, batch_format="pyarrow", batch_size=None)

    All columns of the input are repeated for each sample, ids too; ``generated_text,
    generated_tokens, num_generated_tokens, finish_reason`` and ``logprobs`` (null where not asked
    for) are those of the sample. ``sample_index`` (int32) counts from 0 to ``num_samples`` - 1
    (int32); ``choices`` and ``generated_texts`` are gone. An error row stays one row.

    Ray's checkpoints want ids that are unique: write the rows before this, and explode what was
    written.

    Raises:
        ConfigError: The table has no samples, or has a column with a name of the new ones.
    """
    check_names(table.column_names)
    if CHOICES_COLUMN not in table.column_names:
        raise ConfigError(
            f"the table has no column {CHOICES_COLUMN!r}; set has_choices=True of MoEGenerator"
        )
    choices = table.column(CHOICES_COLUMN).combine_chunks()
    counts = pc.list_value_length(choices)
    if counts.null_count or (len(counts) and pc.min(counts).as_py() < 1):
        raise ConfigError(f"column {CHOICES_COLUMN!r} has a row without a sample")
    rows = pc.list_parent_indices(choices)
    samples = pc.list_flatten(choices)
    exploded = table.drop_columns(
        [name for name in (CHOICES_COLUMN, SAMPLES_COLUMN) if name in table.column_names]
    ).take(rows)
    for name, key in _OF_A_SAMPLE.items():
        exploded = _with_column(exploded, name, pc.struct_field(samples, key))
    firsts = pc.subtract(pc.cumulative_sum(counts), counts)
    indices = pc.subtract(pa.array(range(len(rows)), pa.int32()), firsts.take(rows))
    exploded = _with_column(exploded, INDEX_COLUMN, indices.cast(pa.int32()))
    return _with_column(exploded, COUNT_COLUMN, counts.take(rows).cast(pa.int32()))


def check_names(names: Collection[str], taken: Collection[str] = COLUMNS) -> None:
    """Refuse a table that has a column with a name of the new ones.

    Args:
        names: Of its columns.
        taken: `INPUT_MAY_NOT_HAVE` for a table that no `MoEGenerator` has seen yet.

    Raises:
        ConfigError: With the name.
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
