"""What `raymoe generate` and Python both take has the same default in both."""

import dataclasses
import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest

from raymoe.cli import generate
from raymoe.cli.pipeline import Job
from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.generator import MoEGenerator
from raymoe.data.sizing import configure_data_context, map_batches_kwargs
from raymoe.engine.engine import Engine
from raymoe.engine.request import DEFAULT_PARAMS

SEEDS = {"seed"}  # of rows in SamplingParams, of the engine elsewhere
TO_SAY = {"journal_dir", "status_dir"}  # beside the output, which Python does not know


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Parameters that have a default."""
    parameters = inspect.signature(function).parameters
    return {
        name: each.default
        for name, each in parameters.items()
        if each.default is not inspect.Parameter.empty
    }


def fields_of(record: Any) -> dict[str, Any]:
    """The same of a record, by what its constructor makes of them."""
    made = record()
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(record)}


def typed() -> dict[str, Any]:
    """Options of the command by their names in Python; JSON as what it says."""
    renamed = {"samples_as_rows": "has_choices", "host_memory": "host_memory_bytes",
               "device_memory": "device_memory_bytes"}  # fmt: skip
    given = defaults_of(generate.run)
    for name in ("chat_template_kwargs", "task_options", "sampling_params"):
        given[name] = json.loads(given[name])
    return {renamed.get(name, name): value for name, value in given.items()}


@pytest.mark.parametrize(
    ("names", "at_least"),
    [
        (fields_of(SamplingParams), {"max_tokens", "temperature", "top_p", "top_k", "ignore_eos"}),
        (
            fields_of(EngineConfig),
            {"dtype", "device", "num_threads", "max_model_len", "on_too_long",
             "host_memory_bytes", "tensor_parallel_size", "split_special_tokens"},
        ),
        (
            # Those of the engine, such as on_too_long, are None here where the engine's count.
            {name: value for name, value in defaults_of(MoEGenerator).items()
             if name not in fields_of(EngineConfig)},
            {"prompt_column", "messages_column", "id_column", "tools_column", "has_choices"},
        ),
        (defaults_of(map_batches_kwargs), {"num_actors", "batch_size"}),
        (defaults_of(configure_data_context), {"preserve_order"}),
    ],
    ids=["SamplingParams", "EngineConfig", "MoEGenerator", "map_batches_kwargs", "DataContext"],
)  # fmt: skip
def test_the_command_has_the_defaults_of_python(names: dict[str, Any], at_least: set[str]) -> None:
    given = typed()
    common = given.keys() & names.keys() - TO_SAY
    assert common >= at_least
    if "max_tokens" in names:
        common -= SEEDS
    elif "dtype" in names:
        assert given["seed"] == names["seed"]
    # No seed of an operator, no template keys and so on mean those of the engine, and none.
    different = {
        name: (given[name], names[name])
        for name in common
        if (given[name] or None) != (names[name] or None)
    }
    assert different == {}


def test_a_job_of_the_command_has_the_defaults_of_the_operator() -> None:
    fields = dataclasses.fields(Job)
    job = {one.name: one.default for one in fields if one.default is not dataclasses.MISSING}
    others = defaults_of(map_batches_kwargs)
    common = job.keys() & others.keys()
    assert common >= {"num_actors", "batch_size", "rows_in_flight"}
    assert {name: job[name] for name in common} == {name: others[name] for name in common}


def test_an_engine_and_an_operator_without_parameters_use_those_of_the_class() -> None:
    assert SamplingParams() == DEFAULT_PARAMS
    for function in (Engine.generate, Engine.submit, MoEGenerator):
        assert defaults_of(function)["sampling_params"] is None
    assert defaults_of(Engine.from_pretrained)["config"] is None
    assert defaults_of(MoEGenerator)["engine_config"] is None
