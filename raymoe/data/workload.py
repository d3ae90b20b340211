"""The workload of a job: how many rows, and how long, so that the plan is that of the job."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray

from raymoe.data.rows import RowReader, RowRequest
from raymoe.data.tasks import TaskReader
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import RaymoeError
from raymoe.specs.files import local_model
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload

if TYPE_CHECKING:
    from ray.data import Dataset

SAMPLED_ROWS = 2048
MANY_ROWS = 100_000  # what a dataset of unknown size counts as

logger = logging.getLogger(__name__)


def find_workload(
    ds: "Dataset", model_source: str | Path, reader: RowReader | TaskReader
) -> Workload | None:
    """Return the rows of a dataset as far as that is cheap, else None.

    The first rows are read, through stages of tasks if there are any. A stage of actors, such as
    another generator, is not run for it. The number of rows comes from what Ray knows.
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
    num_rows = ds._meta_count() or MANY_ROWS  # noqa: SLF001 - as above
    sample = pa.concat_tables(tables, promote_options="permissive")
    return workload_of(sample, num_rows, model_source, reader)


def _has_actors(operator: Any) -> bool:
    return isinstance(getattr(operator, "fn", None), type)


def workload_of(
    sample: pa.Table, num_rows: int, model_source: str | Path, reader: RowReader | TaskReader
) -> Workload | None:
    """Return the workload of `num_rows` rows that are like those of the sample.

    Rows generate at most their `max_tokens`; how many end earlier is not known. What a task scores
    after a prompt counts to it. None if the model is not on this machine, or no row of the sample
    can be generated.
    """
    directory = local_model(model_source)
    if directory is None:
        return None
    max_model_len = ModelSpec.from_directory(directory).max_model_len
    requests = [request for request in reader.read(sample) if request.prompt is not None]
    pairs = []
    for request, prompt_tokens in zip(requests, _lengths(requests, directory), strict=True):
        if prompt_tokens:
            limit = max(1, max_model_len - prompt_tokens)
            generated = min(request.sampling_params.max_tokens, limit)
            pairs += [(min(prompt_tokens, max_model_len), generated)] * request.sampling_params.n
    if not pairs:
        return None
    each = len(pairs) / max(1, len(requests))
    return resized(Workload.of_rows(tuple(pairs)), round(num_rows * each))


def resized(workload: Workload, num_rows: int) -> Workload:
    """Return the workload of another number of rows of the same lengths."""
    return Workload(
        num_rows=max(1, num_rows),
        prompt_tokens=workload.prompt_tokens,
        generated_tokens=workload.generated_tokens,
        row_lengths=workload.row_lengths,
    )


def describe(workload: Workload) -> str:
    """Return rows and lengths as text."""
    pairs = workload.row_lengths or ((workload.prompt_tokens, workload.generated_tokens),)
    prompts, generated = np.array(pairs).T
    return (
        f"{workload.num_rows:,} rows; prompts of {prompts.mean():,.0f} tokens on average "
        f"(99 % at most {np.percentile(prompts, 99):,.0f}), at most {generated.mean():,.0f} "
        "generated for each"
    )


def _lengths(requests: Sequence[RowRequest], directory: Path) -> Iterable[int]:
    """Return the tokens of each prompt; 0 for one that cannot be encoded."""
    texts = [(request.prompt, *(request.continuations or ())) for request in requests]
    lengths = [[_num_ids(text) for text in row] for row in texts]
    if any(None in row for row in lengths):
        tokenizer = Tokenizer(directory, ModelSpec.from_directory(directory).vocab_size)
        try:
            for row, found in zip(texts, lengths, strict=True):
                for index, text in enumerate(row):
                    if found[index] is None:
                        found[index] = _encoded_length(tokenizer, text)
        finally:
            tokenizer.close()
    return [sum(length or 0 for length in row) for row in lengths]


def _num_ids(prompt: object) -> int | None:
    """Return the length of token ids; the empty prompt of a document has none."""
    is_ids = isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int))
    return len(prompt) if is_ids and isinstance(prompt, list) else None


def _encoded_length(tokenizer: Tokenizer, prompt: object) -> int:
    try:
        return len(tokenizer.encode(prompt))
    except RaymoeError:  # becomes an error row
        return 0
