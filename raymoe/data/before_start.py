"""What the driver checks and prepares when a pipeline starts, before its actors load anything.

`Dataset.map_batches` takes a class and its arguments as they are, so that a wrong one would be
found in an actor, after Ray has started it, once for each of its attempts.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.exceptions import UserCodeException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymoe.config import as_sampling_params
from raymoe.data.generator import MoEGenerator, check_arguments, check_options, output_columns
from raymoe.data.occurrences import KEY, JobOccurrences
from raymoe.data.rows import SAMPLING_COLUMN
from raymoe.data.tasks import read_task_of, reader_of
from raymoe.data.tracing import KEY as OPERATOR_KEY
from raymoe.data.tracing import JobSpan
from raymoe.errors import RaymoeError

# Logical operators of Ray Data whose rows have the columns of their input.
_KEEP_COLUMNS = frozenset(
    ("Filter", "Limit", "RandomShuffle", "RandomizeBlocks", "Repartition", "Sort",
     "StreamingRepartition")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownColumns:
    """Columns that rows have for sure.

    Attributes:
        is_complete: Whether they have no others.
    """

    names: tuple[str, ...]
    is_complete: bool


def known_columns(operator: Any) -> KnownColumns:
    """Return the columns behind a logical operator of Ray Data; nothing is run for it.

    Those are the columns of the input and of generators, up to the last stage whose function may
    return anything.
    """
    schema = operator.infer_schema()
    if schema is not None:
        return KnownColumns(names=tuple(schema.names), is_complete=True)
    options = generator_options(operator)
    if options is not None:
        before = known_columns(operator.input_dependencies[0])
        added = sorted(output_columns(options["model_source"], options).names)
        is_complete = before.is_complete and options.get("rollout") is None
        return KnownColumns(names=(*before.names, *added), is_complete=is_complete)
    if type(operator).__name__ in _KEEP_COLUMNS:
        return known_columns(operator.input_dependencies[0])
    return KnownColumns(names=(), is_complete=False)


def is_generator(operator: Any) -> bool:
    """Whether a logical operator of Ray Data is a stage of `MoEGenerator` or a subclass."""
    fn = getattr(operator, "fn", None)
    return isinstance(fn, type) and issubclass(fn, MoEGenerator)


def named_options(operator: Any) -> dict[str, Any] | None:
    """Return the arguments of a stage's generator that have names; None for other stages.

    A subclass with its own ``__init__`` may have others besides, and add some of `MoEGenerator`.
    """
    return dict(operator.fn_constructor_kwargs or {}) if is_generator(operator) else None


def generator_options(operator: Any) -> dict[str, Any] | None:
    """Return all arguments of a stage's `MoEGenerator` by name; None for other stages.

    Also for a subclass with its own ``__init__``, which may give it any.

    Raises:
        ConfigError: An argument that `MoEGenerator` does not have, or that is missing.
    """
    if not is_generator(operator) or operator.fn.__init__ is not MoEGenerator.__init__:
        return None
    return check_arguments(operator.fn_constructor_args or (), operator.fn_constructor_kwargs or {})


def check_rows(operator: Any, model_source: str | Path, options: Mapping[str, Any]) -> KnownColumns:
    """Refuse a `MoEGenerator` behind a logical operator whose rows it could not take.

    Raises:
        ConfigError: They lack a column that it reads, or have one that it adds.
    """
    columns = known_columns(operator)
    output_columns(model_source, options).check_names(columns.names)
    if columns.is_complete:
        reader_of(options).check_columns(columns.names)
    return columns


class PrepareGenerators(ExecutionCallback):  # type: ignore[misc]  # Ray has no types here
    """Refuses generators that cannot work; tells others where they are, and counts equal rows."""

    def __init__(self) -> None:
        self._counter: Any = None
        self._span: JobSpan | None = None

    def before_execution_starts(self, executor: Any) -> None:
        # These are private in Ray, which has no public equivalent; its versions are pinned.
        try:
            found = [
                (stage, operator, _check(logical))
                for stage, operator in enumerate(executor._topology)  # noqa: SLF001
                for logical in operator._logical_operators  # noqa: SLF001
                if is_generator(logical)
            ]
        except RaymoeError as error:
            raise as_users_error(error) from None
        if not found:
            return
        dataset = executor._dataset_id  # noqa: SLF001
        self._span = JobSpan(dataset)
        for stage, operator, has_equal_rows in found:
            name = executor._get_operator_id(operator, stage)  # noqa: SLF001
            arguments: dict[str, Any] = {OPERATOR_KEY: (dataset, name, self._span.headers)}
            if has_equal_rows:
                arguments[KEY] = self._start_counter(), stage
            operator.add_map_task_kwargs_fn(functools.partial(dict, arguments))

    def after_execution_succeeds(self, executor: Any) -> None:  # noqa: ARG002 - Ray's interface
        self._end(None)

    def after_execution_fails(self, executor: Any, error: Exception) -> None:  # noqa: ARG002
        self._end(error)

    def _start_counter(self) -> Any:
        if self._counter is None:
            here = ray.get_runtime_context().get_node_id()  # it ends with the driver, not before
            self._counter = (
                ray.remote(num_cpus=0)(JobOccurrences)
                .options(scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False))
                .remote()
            )
        return self._counter

    def _end(self, error: Exception | None) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            ray.kill(counter)
        if self._span is not None:
            self._span.end(error)


def _check(operator: Any) -> bool:
    """Refuse a generator that cannot work; returns whether it may have equal rows to count."""
    options = generator_options(operator)
    if options is None:
        return True  # nobody knows here
    given = {name: value for name, value in options.items() if name != "model_source"}
    check_options(options["model_source"], given)
    columns = check_rows(operator.input_dependencies[0], options["model_source"], given)
    return _may_have_equal_samples(options, columns)


def _may_have_equal_samples(options: Mapping[str, Any], columns: KnownColumns) -> bool:
    """Whether rows are sampled by their prompt alone, so that equal ones must be told apart."""
    if options.get("id_column") is not None or read_task_of(options) is not None:
        return False
    if options.get("rollout") is not None:
        return True
    may_ask = SAMPLING_COLUMN in columns.names or not columns.is_complete
    return may_ask or not as_sampling_params(options.get("sampling_params")).is_greedy


def as_users_error(error: RaymoeError) -> RaymoeError:
    """Return the error such that Ray Data shows it as the user's, not as a fault of Ray's.

    It keeps its type for `except`. For others Ray Data prints its own stack, and asks to report it.
    """
    kind = type(error)
    if not isinstance(error, UserCodeException):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        error.__class__ = type(kind.__name__, (kind, UserCodeException), names)
    return error
