"""The plan of a job that gives no hints is as good as one made with the length of every row.

The rows are those of the planner's review: lognormal lengths, each row with its own `max_tokens`,
which it reaches. They go through `map_batches_kwargs` as a dataset, with a tokenizer, and with the
published configuration of each model.
"""

import functools
import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
import ray.data

from raymoe.assets import demo_model_path
from raymoe.config import EngineConfig
from raymoe.data.sizing import map_batches_kwargs
from raymoe.data.workload import SAMPLED_ROWS, resized
from raymoe.plan.search import find_plan
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS
from raymoe.specs.workload import Workload

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray copies its own context
]

NODES = [("l4", "mixtral-8x7b"), ("a5000", "mixtral-8x7b"), ("a40", "qwen3-30b-a3b"),
         ("4090", "gpt-oss-120b"), ("l40s", "glm-4.5-air")]  # fmt: skip
LENGTHS = [(77, 256), (418, 128), (2048, 64), (1000, 1000), (300, 4)]
NUM_ROWS, SIGMA = 100_000, 0.7
OTHERS = ("tokenizer.json", "tokenizer_config.json")


def lengths_of(means, rows):
    """Lognormal lengths of rows, by their numbers."""
    pairs = []
    for mean in means:
        drawn = np.random.default_rng([mean, *means]).lognormal(0, SIGMA, NUM_ROWS)[rows]
        length = np.rint(mean * drawn / np.exp(SIGMA**2 / 2))
        pairs.append(np.clip(length, 3, 4 * mean).astype(int).tolist())
    return list(zip(*pairs, strict=True))


def make_rows(batch, means):
    pairs = lengths_of(means, batch["id"].to_numpy())
    return pa.table(
        {
            "prompt": ["x" * (prompt - 1) for prompt, _ in pairs],  # and the token of the start
            "sampling_params": [json.dumps({"max_tokens": most}) for _, most in pairs],
        }
    )


@functools.cache
def make_model(name, directory):
    path = directory / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODEL_PRESETS[name]))
    for other in OTHERS:
        shutil.copy(demo_model_path() / other, path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return functools.partial(make_model, directory=directory)


@pytest.mark.parametrize("means", LENGTHS)
@pytest.mark.parametrize(("node", "name"), NODES)
def test_a_job_without_hints_is_planned_as_with_all_lengths(local_ray, models, node, name, means):
    model, hardware = models(name), hardware_preset(node)
    ds = ray.data.range(NUM_ROWS, override_num_blocks=100).map_batches(
        make_rows, fn_kwargs={"means": means}, batch_format="pyarrow", udf_modifying_row_count=False
    )
    config = EngineConfig(hardware=hardware, device="emulated")
    kwargs = map_batches_kwargs(model, ds=ds, engine_config=config)
    planned_for = kwargs["fn_constructor_kwargs"]["engine_config"].workload
    pairs = lengths_of(means, np.arange(NUM_ROWS))
    assert planned_for.num_rows == NUM_ROWS
    assert sorted(planned_for.row_lengths) == sorted(pairs[:SAMPLED_ROWS])
    spec = ModelSpec.from_directory(model)
    exact = resized(Workload.of_rows(tuple(pairs[:: NUM_ROWS // 20_000])), NUM_ROWS)
    taken = [plan.estimate(exact).seconds for plan in plans_for(spec, hardware, planned_for, exact)]
    print(f"{node} {name} {means}: {taken[0] / taken[1]:.3f} of {taken[1]:.0f} s")  # noqa: T201
    assert taken[0] <= 1.05 * taken[1]


def plans_for(spec, hardware, *workloads):
    return [find_plan(spec, hardware, workload) for workload in workloads]
