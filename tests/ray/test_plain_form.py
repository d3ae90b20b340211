"""`map_batches` with `MoEGenerator` as Ray's own arguments and defaults have it."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pytest
import ray
import ray.data
from ray.exceptions import UserCodeException

import raymoe
from raymoe.errors import ConfigError, UnknownOptionError
from tests.ray.broken import Marked

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
]
OPTIONS = {
    "sampling_params": {"max_tokens": 4},
    "engine_config": {"host_memory_bytes": 3 * 2**30, "num_threads": 1, "dtype": "float32"},
}


def plain(ds, model, options=None, *, operator=raymoe.MoEGenerator, **kwargs):
    constructor = {"model_source": str(model), **OPTIONS, **(options or {})}
    kwargs = {"concurrency": 1, **kwargs}
    raymoe.configure_data_context(context=ds.context)  # has generators checked before they start
    return ds.map_batches(operator, fn_constructor_kwargs=constructor, **kwargs)


@pytest.mark.slow
def test_rays_own_defaults_are_enough_and_equal_prompts_get_samples_of_their_own(
    local_ray, tiny_model
):
    rows = [{"prompt": "same", "n": i, "tags": ["a"] * (i % 3)} for i in range(8)]
    out = plain(ray.data.from_items(rows), tiny_model).take_all()
    assert sorted(row["n"] for row in out) == list(range(8))
    assert {row["__inference_error__"] for row in out} == {""}
    assert all(list(row["tags"]) == ["a"] * (row["n"] % 3) for row in out)
    assert len({tuple(row["generated_tokens"]) for row in out}) == 8


FIRST = "a name that is misspelt"
WRONG = {
    FIRST: ({"sampling_param": {}}, UnknownOptionError, "'sampling_params'?"),
    "a field of another option": ({"max_tokens": 3}, ConfigError, "give sampling_params={'max_"),
    "a value": ({"sampling_params": {"top_p": 7}}, ConfigError, "top_p is 7"),
    "a token": (
        {"sampling_params": {"stop_token_ids": [10**6]}},
        ConfigError,
        "the vocabulary has",
    ),
    "a column": ({"prompt_column": "question"}, ConfigError, "the rows have 'prompt'; set prompt_"),
}


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        pytest.param(*wrong, id=name, marks=() if name == FIRST else pytest.mark.slow)
        for name, wrong in WRONG.items()
    ],
)
def test_a_wrong_argument_is_named_before_an_actor_loads(
    local_ray, tiny_model, options, kind, message
):
    ds = ray.data.from_items([{"prompt": "a"}])
    with pytest.raises(kind, match=message.replace("?", r"\?")) as caught:
        plain(ds, tiny_model, options).take_all()
    assert isinstance(caught.value, UserCodeException)  # which Ray Data shows as the user's
    assert "Actor" not in str(caught.value)


def test_a_missing_model_and_a_column_that_no_stage_makes_are_named(local_ray, tiny_model):
    ds = ray.data.from_items([{"prompt": "a"}])
    raymoe.configure_data_context(context=ds.context)
    with pytest.raises(ConfigError, match="no model_source; give a local model directory"):
        ds.map_batches(raymoe.MoEGenerator, concurrency=1).take_all()
    first = plain(ds, tiny_model)
    second = {"column_prefix": "judge_", "prompt_column": "verdict"}
    with pytest.raises(ConfigError, match=r"neither column 'verdict'.*'generated_text'"):
        plain(first, tiny_model, second).take_all()
    with pytest.raises(ConfigError, match=r"neither column 'verdict'.*'generated_text'"):
        raymoe.generate(first, tiny_model, **second)
    with pytest.raises(ConfigError, match="names of output columns"):
        plain(first, tiny_model).take_all()


FORMS = {
    "numpy": {"batch_format": "numpy", "batch_size": 1},
    "pandas": {"batch_format": "pandas", "batch_size": None},
    "pyarrow": {"batch_format": "pyarrow", "batch_size": 3},
    "the block's own": {"batch_format": None},
    "a pool": {
        "concurrency": None,
        "compute": ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=4),
        "batch_size": 2,
        "num_cpus": 0.5,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", FORMS.values(), ids=FORMS)
def test_every_format_and_pool_answers_every_row_in_its_own_format(local_ray, tiny_model, kwargs):
    cells = {
        "prompt": ["one", None, "three", "", "one", "one", "two", "two"],
        "messages": [None, [{"role": "user", "content": "hi"}], *[None] * 6],
        "sampling_params": [{"max_tokens": 2}, *[None] * 7],
        "number": [1, None, 3, 4, 5, 6, 7, 8],
        "nested": [[{"a": [1, 2]}], [], None, [], [], [], [], []],
    }
    table = pa.table(cells)
    ds = ray.data.from_arrow([table.slice(0, 3), table.slice(3)])
    out = {row["number"]: row for row in plain(ds, tiny_model, **kwargs).take_all()}
    number = {None if key is None or np.isnan(key) else int(key): row for key, row in out.items()}
    assert number.keys() == set(cells["number"])
    errors = {key: row["__inference_error__"] for key, row in number.items()}
    assert "is empty" in errors.pop(4)
    assert set(errors.values()) == {""}
    assert number[1]["num_generated_tokens"] == 2
    assert number[None]["num_input_tokens"] > 5  # the rendered chat
    samples = [tuple(number[n]["generated_tokens"]) for n in (1, 5, 6, 7, 8)]
    assert len(set(samples)) == 5


@pytest.mark.slow
def test_frames_keep_their_types(local_ray, tiny_model):
    frame = pd.DataFrame({"prompt": ["a", "b"], "x": [1.5, 2.5], "s": [{"k": 1}, {"k": 2}]})
    batch = plain(ray.data.from_pandas(frame), tiny_model, batch_format="pandas").to_pandas()
    assert batch["x"].tolist() == [1.5, 2.5]
    assert [cell["k"] for cell in batch["s"]] == [1, 2]
    assert batch["num_generated_tokens"].tolist() == [4, 4]


SCRIPT = """
import sys, ray, raymoe
ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=150 * 2**20)
ds = ray.data.from_items([{"prompt": str(i)} for i in range(12)])
options = {"model_source": sys.argv[1], "sampling_params": {"max_tokens": 2}}
rows = ds.map_batches(raymoe.MoEGenerator, fn_constructor_kwargs=options, concurrency=1).take_all()
assert len(rows) == 12
import subprocess
subprocess.run([sys.executable, "-c", sys.argv[2]], check=True)
"""
WITHOUT_RAYMOE = """
import sys
sys.modules["raymoe"] = None
import ray
ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20)
assert ray.data.range(3).map(dict).count() == 3
"""


@pytest.mark.slow
def test_the_advice_of_an_actor_reaches_the_user_and_its_children_need_no_raymoe(tiny_model):
    """In a process of its own: whether the logs of workers are shown is said where Ray starts."""
    places = [Path(raymoe.__file__).parents[1], Path(__file__).parents[2]]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_model), WITHOUT_RAYMOE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout + done.stderr).count("rows come 1 at a time, one call after another") == 1


@pytest.mark.slow
def test_equal_rows_of_two_actors_share_no_sample_through_a_kill_and_a_resume(
    local_ray, tiny_model, tmp_path
):
    rows = [{"prompt": f"row {i % 10}", "n": i} for i in range(200)]
    options = {"sampling_params": {"max_tokens": 12}, "journal_dir": str(tmp_path)}
    pool = ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=2)

    def run(batch_size, *, kills):
        ds = ray.data.from_items(rows, override_num_blocks=10)
        out, kwargs = [], {"compute": pool, "concurrency": None, "batch_size": batch_size}
        for row in plain(ds, tiny_model, options, **kwargs).iter_rows():
            if kills and not out:
                kill_an_actor()
            out.append(row)
        assert sorted(row["n"] for row in out) == list(range(200))
        return sorted((row["prompt"], tuple(row["generated_tokens"])) for row in out)

    whole = run(5, kills=False)
    assert len(set(whole)) == 200
    files = sum(path.stat().st_size for path in tmp_path.glob("rows-*"))
    assert run(20, kills=False) == whole
    assert sum(path.stat().st_size for path in tmp_path.glob("rows-*")) == files  # all were found
    for path in tmp_path.glob("rows-*"):
        path.unlink()
    assert run(5, kills=True) == whole


@pytest.mark.slow
def test_equal_rows_of_a_subclass_with_arguments_of_its_own_share_no_sample(local_ray, tiny_model):
    ds = ray.data.from_items([{"prompt": f"row {i % 4}"} for i in range(80)], override_num_blocks=8)
    pool = ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=2)
    options = {"sampling_params": {"max_tokens": 12}, "num_marks": 2}
    kwargs = {"operator": Marked, "compute": pool, "concurrency": None, "batch_size": 10}
    rows = plain(ds, tiny_model, options, **kwargs).take_all()
    assert len({(row["prompt"], tuple(row["generated_tokens"])) for row in rows}) == 80
    assert len({row["process"] for row in rows}) == 2


def kill_an_actor():
    """End the process of one actor that generates."""
    names = [process for process in psutil.Process().children(recursive=True) if is_actor(process)]
    names[0].kill()


def is_actor(process):
    with contextlib.suppress(psutil.Error):
        return "MapWorker(MapBatches(MoEGenerator))" in " ".join(process.cmdline())
    return False
