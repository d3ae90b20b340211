"""What ray.data.llm says of the request of a row: a column, and Ray's names for what is in it."""

import dataclasses
import itertools
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from raymoe.data.columns import REQUEST_COLUMN, REQUEST_NAMES, logprob_tokens
from raymoe.data.job_rows import Submit
from raymoe.data.rows import RowRequest
from raymoe.engine.outputs import Generation, TokenLogprob
from raymoe.engine.tasks.rows import TaskOptions
from raymoe.errors import ExecutionError, in_step

if TYPE_CHECKING:
    from raymoe.engine.engine import Engine

TIMES = "times"  # of a row, among the values of its generation
_NO_TEXT = {"generated_text": "", "generated_tokens": [], "num_generated_tokens": 0}
MAX_PROMPT_OF_ERROR = 500  # characters, as in Ray


def timed(submit: Submit) -> Submit:
    """Return what also notes when rows were submitted and when they were finished."""

    def submit_timed(requests: Sequence[RowRequest]) -> list[Future[Generation]]:
        begin = (time.time(), time.monotonic())
        return [_with_times(future, begin) for future in submit(requests)]

    return submit_timed


def _with_times(future: Future[Generation], begin: tuple[float, float]) -> Future[Generation]:
    noted: Future[Generation] = Future()

    def end(done: Future[Generation]) -> None:
        error = done.exception()
        if error is not None:
            noted.set_exception(error)
        else:
            noted.set_result(_with_value(done.result(), TIMES, [*begin, time.monotonic()]))

    future.add_done_callback(end)
    return noted


def _with_value(generation: Generation, name: str, value: Any) -> Generation:
    return dataclasses.replace(generation, values={**(generation.values or {}), name: value})


class RequestCells:
    """Makes the cells of `REQUEST_COLUMN`; its ids count the rows of an operator."""

    def __init__(self, task: TaskOptions | None) -> None:
        self._task, self._ids = task, itertools.count()

    def add(
        self, engine: "Engine", requests: Sequence[RowRequest], generations: Sequence[Generation]
    ) -> list[Generation]:
        """Return generations with their cells; what fails for a row is its error."""
        return self._add(engine, [*zip(requests, generations, strict=True)], uuid.uuid4().hex)

    def _add(
        self, engine: "Engine", rows: Sequence[tuple[RowRequest, Generation]], batch: str
    ) -> list[Generation]:
        try:
            with in_step("describing the request"):
                good = [row for row, generation in rows if not generation.error]
                prompts = iter(engine.read_prompts(
                    [row.prompt for row in good], [row.sampling_params for row in good]
                ))  # fmt: skip
                wanted = {token for _, one in rows for token in _tokens(one)}
                texts = {
                    token: data.decode(errors="replace")
                    for token, data in (engine.token_bytes(wanted) if wanted else {}).items()
                }
        except ExecutionError:  # the engine was closed, which is no row's fault
            raise
        except Exception as error:
            if len(rows) > 1:
                return [one for row in rows for one in self._add(engine, [row], batch)]
            ((row, generation),) = rows
            return [self._failed(row, Generation.from_error(error, generation.num_input_tokens),
                                 batch)]  # fmt: skip
        return [
            self._failed(row, generation, batch)
            if generation.error
            else self._described(row, generation, batch, next(prompts), texts)
            for row, generation in rows
        ]

    def _described(  # noqa: PLR0917 - what is in a cell
        self, row: RowRequest, generation: Generation, batch: str, prompt: tuple[str, Any],
        texts: Mapping[int, str],
    ) -> Generation:  # fmt: skip
        arrival, begin, end = (generation.values or {}).get(TIMES) or (0.0, 0.0, 0.0)
        metrics = {"num_generation_tokens": generation.num_generated_tokens,
                   "arrival_time": arrival, "queued_ts": begin, "last_token_ts": end}  # fmt: skip
        cell = {
            "request_id": next(self._ids),
            "batch_uuid": batch,
            "prompt": prompt[0],
            "prompt_token_ids": prompt[1],
            "params": str(self._task or row.sampling_params),
            "time_taken_llm": end - begin,
            "metrics": metrics,
            "logprobs": _logprob_cells(generation.logprobs, texts),
            "prompt_logprobs": _logprob_cells(generation.prompt_logprobs, texts),
        }
        return _with_value(generation, REQUEST_COLUMN, cell)

    @staticmethod
    def _failed(row: RowRequest, generation: Generation, batch: str) -> Generation:
        prompt = row.prompt if isinstance(row.prompt, str) else ""
        cell = {
            "request_id": -1, "batch_uuid": batch, "prompt": prompt[:MAX_PROMPT_OF_ERROR],
            "params": "", "time_taken_llm": -1.0,
        }  # fmt: skip
        return _with_value(generation, REQUEST_COLUMN, cell)


def _tokens(generation: Generation) -> Iterable[int]:
    prompt = [one for one in generation.prompt_logprobs or () if one is not None]
    best = {token for one in prompt for token, _ in one.top}
    return logprob_tokens(generation) | best | {one.token_id for one in prompt}


def _logprob_cells(
    logprobs: Sequence[TokenLogprob | None] | None, texts: Mapping[int, str]
) -> list[list[dict[str, Any]] | None] | None:
    """Return for each token, None for a prompt's first, its candidates: it, then the best."""
    if logprobs is None:
        return None
    return [None if one is None else _candidates(one, texts) for one in logprobs]


def _candidates(one: TokenLogprob, texts: Mapping[int, str]) -> list[dict[str, Any]]:
    ranks = {token: rank for rank, (token, _) in enumerate(one.top, 1)}
    each = {one.token_id: one.logprob} | dict(one.top)
    return [
        {
            "token_id": token,
            "logprob": logprob,
            "rank": ranks.get(token),
            "decoded_token": texts.get(token),
        }
        for token, logprob in each.items()
    ]


class Metrics(dict[str, Any]):
    """Those of vLLM that are taken here; names the others where they are asked for."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name!r} is not among the metrics of a row, as raymoe takes no time of "
                       f"single tokens; there are {', '.join(self)}")  # fmt: skip


def as_in_ray(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a row with the columns that ray.data.llm has, instead of `REQUEST_COLUMN`."""
    cell = row[prefix + REQUEST_COLUMN] or {}
    request: dict[str, Any] = {name: cell.get(name) for name in REQUEST_NAMES}
    if request["metrics"] is not None:
        request["metrics"] = Metrics(request["metrics"])
    for name in ("logprobs", "prompt_logprobs"):
        if request[name] is not None:
            request[name] = [None if one is None else _by_token(one) for one in request[name]]
    request["prompt"] = request["prompt"] or row.get("prompt") or ""  # beside token ids
    request["embeddings"] = _embeddings(row, prefix)
    found = {name: cell for name, cell in row.items() if name != prefix + REQUEST_COLUMN}
    texts = {prefix + name: cell for name, cell in _NO_TEXT.items()}
    return texts | found | {prefix + name: cell for name, cell in request.items()}


def _embeddings(row: Mapping[str, Any], prefix: str) -> list[float] | None:
    """Return a row's vector, or the probabilities of its classes."""
    classes = row.get(f"{prefix}label_probabilities")
    if classes is not None:
        return [one["probability"] for one in classes]
    return row.get(f"{prefix}embedding")


def _by_token(candidates: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        one["token_id"]: {name: cell for name, cell in one.items() if name != "token_id"}
        for one in candidates
    }
