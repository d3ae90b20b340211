"""The workload of a job: how many rows, and how long, so that the plan is that of the job."""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray

from raymoe.data.rows import Prompt, RowReader, RowRequest, as_text
from raymoe.data.tasks import TaskReader
from raymoe.download.models import find_files
from raymoe.engine.outputs import Int32s
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import RaymoeError
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div

if TYPE_CHECKING:
    from ray.data import Dataset

SAMPLED_ROWS = 2048
MANY_ROWS = 100_000  # what a dataset of unknown size counts as

logger = logging.getLogger(__name__)
_NO_TOKENS: Int32s = np.array([], np.int32)


def find_workload(
    ds: "Dataset",
    model_source: str | Path,
    reader: RowReader | TaskReader,
    calls_per_row: int = 1,
) -> Workload | None:
    """Return the rows of a dataset as far as that is cheap, else None.

    The first rows are read, through stages of tasks if there are any. A stage of actors, such as
    another generator, is not run for it.

    Raises:
        ConfigError: The rows lack a column that the reader needs.
    """
    dag = ds._logical_plan.dag  # noqa: SLF001 - Ray has no public way; its versions are pinned
    if any(_has_actors(operator) for operator in dag.post_order_iter()):
        logger.info("the rows that come from another stage of actors are not known: the plan is "
                    "that of a typical job; give a workload for a better one")  # fmt: skip
        return None
    tables = ray.get(ds.limit(SAMPLED_ROWS).to_arrow_refs())
    tables = [table for table in tables if table.num_rows]
    if not tables:
        return None
    sample = pa.concat_tables(tables, promote_options="permissive")
    num_rows = sample.num_rows if sample.num_rows < SAMPLED_ROWS else _count(ds)
    reader.check_schema(sample.schema)  # in the user's words, before an actor starts
    return workload_of(sample, num_rows, model_source, reader, calls_per_row)


def _count(ds: "Dataset") -> int:
    """Return the rows of a dataset by what Ray knows, or by the footers of its Parquet files."""
    dag = ds._logical_plan.dag  # noqa: SLF001 - as above
    is_parquet = str(getattr(dag, "datasource_name", "")).startswith("Parquet")
    return (ds.count() if is_parquet else ds._meta_count()) or MANY_ROWS  # noqa: SLF001 - as above


def find_columns(ds: "Dataset") -> list[str] | None:
    """Return the names of a dataset's columns as far as that is cheap, else None.

    One row is made for it if need be, but no stage of actors is run.
    """
    schema = ds.schema(fetch_if_missing=False)
    dag = ds._logical_plan.dag  # noqa: SLF001 - as above
    if schema is None and not any(_has_actors(operator) for operator in dag.post_order_iter()):
        schema = ds.limit(1).schema()
    return None if schema is None else list(schema.names)


def _has_actors(operator: Any) -> bool:
    return isinstance(getattr(operator, "fn", None), type)


def workload_of(  # noqa: PLR0917 - a sample, and what it is of
    sample: pa.Table,
    num_rows: int,
    model_source: str | Path,
    reader: RowReader | TaskReader,
    calls_per_row: int = 1,
) -> Workload | None:
    """Return the workload of `num_rows` rows that are like those of the sample.

    Each call of a rollout counts as a row. The first one asks what is in the row, and each further
    one what the one before asked and was answered.

    Rows generate at most their `max_tokens`; how many end earlier is not known. What a task scores
    after a prompt counts to it. None if the model is not on this machine, or no row of the sample
    can be generated.
    """
    from raymoe.engine.request import num_shared_tokens  # noqa: PLC0415 - loads torch

    directory = find_files(model_source)
    if directory is None:
        return None
    max_model_len = ModelSpec.from_directory(directory).max_model_len
    sample = sample.slice(0, max(1, SAMPLED_ROWS // calls_per_row))
    requests = [_as_asked(one) for one in reader.read(sample) if not one.error]
    pairs, prompts, num_found = [], [], 0
    for request, (prompt, num_more) in zip(requests, _tokens(requests, directory), strict=True):
        of_row = _lengths(request, (len(prompt), num_more), max_model_len, reader)
        prompts += [prompt] * len(of_row)
        for length, num_generated in of_row:
            turns = range(length, length + calls_per_row * num_generated, num_generated)
            lengths = [min(tokens, max(length, max_model_len - 1)) for tokens in turns]
            pairs += [(tokens, num_generated) for tokens in lengths]
            num_found += sum(_in_blocks(tokens) for tokens in lengths[:-1])
    if not pairs:
        return None
    each = len(pairs) / max(1, len(requests))
    num_found += num_shared_tokens(prompts)
    workload = Workload.of_rows(tuple(pairs), num_found / len(pairs))
    generates = not isinstance(reader, TaskReader)
    return replace(workload, num_rows=max(1, round(num_rows * each)), generates=generates)


def _as_asked(request: RowRequest) -> RowRequest:
    """Return a row with what its rollout may ask first: its messages or prompt, or all of it."""
    if request.cells is None:
        return request
    given: Prompt | None = request.cells.get("messages") or request.cells.get("prompt")
    return replace(request, prompt=given or json.dumps(request.cells, default=as_text))


def _in_blocks(num_tokens: int) -> int:
    return num_tokens - num_tokens % KV_BLOCK_TOKENS


def _lengths(
    request: RowRequest,
    num_tokens: tuple[int, int],
    longest: int,
    reader: RowReader | TaskReader,
) -> list[tuple[int, int]]:
    """Return tokens to read and to generate of each sequence of a row; none of an error row.

    Args:
        num_tokens: Of the prompt, and of what is scored after it.
        longest: Tokens that the model takes.
    """
    prompt_tokens, tokens = num_tokens[0], sum(num_tokens)
    if not tokens:
        return []
    if isinstance(reader, TaskReader):  # whatever the rows say of sampling
        is_document = not prompt_tokens
        sizes = _windows(tokens, longest, reader.options.stride) if is_document else [tokens]
        return [(min(size, longest), 1) for size in sizes]
    params = request.sampling_params
    tokens = min(tokens, longest)
    return [(tokens, min(params.max_tokens, max(1, longest - tokens)))] * params.n


def _windows(tokens: int, longest: int, stride: int | None) -> list[int]:
    """Return the tokens of each window in which a document is scored."""
    step = min(stride or longest, max(1, longest - 1))
    num_more = max(0, ceil_div(tokens - longest, step))
    return [longest] * num_more + [tokens - num_more * step]


def resized(workload: Workload, num_rows: int) -> Workload:
    """Return the workload of another number of rows of the same lengths."""
    return replace(workload, num_rows=max(1, num_rows))


def describe(workload: Workload) -> str:
    """Return rows and lengths as text."""
    pairs = workload.row_lengths or ((workload.prompt_tokens, workload.generated_tokens),)
    prompts, generated = np.array(pairs).T
    shared = workload.shared_prompt_tokens
    found = f", of which {shared:,} are those of an earlier row" if shared else ""
    ends = f", at most {generated.mean():,.0f} generated for each" if workload.generates else ""
    return (
        f"{workload.num_rows:,} rows; prompts of {prompts.mean():,.0f} tokens on average "
        f"(99 % at most {np.percentile(prompts, 99):,.0f}){found}{ends}"
    )


def _tokens(requests: Sequence[RowRequest], directory: Path) -> Iterable[tuple[Int32s, int]]:
    """Return the tokens of each prompt, and how many its continuations have.

    What cannot be encoded has none.
    """
    texts = [(request.prompt, *(request.continuations or ())) for request in requests]
    rows = [[_as_ids(text) for text in row] for row in texts]
    if any(ids is None for row in rows for ids in row):
        tokenizer = Tokenizer(directory, ModelSpec.from_directory(directory).vocab_size)
        try:
            for row, found in zip(texts, rows, strict=True):
                for index, text in enumerate(row):
                    if found[index] is None:
                        found[index] = _encoded(tokenizer, text)
        finally:
            tokenizer.close()
    return [
        (
            _NO_TOKENS if row[0] is None else row[0],
            sum(len(ids) for ids in row[1:] if ids is not None),
        )
        for row in rows
    ]


def _as_ids(prompt: object) -> Int32s | None:
    """Return token ids as they are; the empty prompt of a document has none."""
    is_ids = isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int))
    return np.array(prompt, np.int32) if is_ids else None


def _encoded(tokenizer: Tokenizer, prompt: object) -> Int32s:
    try:
        return np.asarray(tokenizer.encode(prompt), np.int32)
    except RaymoeError:  # becomes an error row
        return _NO_TOKENS
