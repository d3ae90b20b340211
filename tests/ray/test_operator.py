"""The operator in a real Ray: every row once, whatever is in it and whatever happens."""

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data

from raymoe.config import EngineConfig
from raymoe.data.cluster import _plan_of
from raymoe.data.generator import MoEGenerator
from raymoe.data.sizing import configure_data_context, map_batches_kwargs
from raymoe.engine.engine import Engine
from raymoe.errors import InfeasiblePlanError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray copies its own context
]

ROWS_PER_BLOCK = 64
PARAMS = {"max_tokens": 4, "temperature": 0.0}
CONFIG = EngineConfig(host_memory_bytes=3 * 2**30, num_threads=1, dtype="float32")
USER = {"role": "user", "content": "hello"}
WITHOUT_ROLE = json.dumps([{"content": "hello"}])

# One row in a hundred of each kind: prompt, messages, parameters, and what its error must say.
BAD_ROWS = {
    7: (None, None, None, "column 'prompt' is null"),
    11: (b"", None, None, "column 'prompt' is empty"),
    17: (b"caf\xe9 au lait", None, None, "column 'prompt' is not UTF-8"),
    23: (b"long " * 300, None, None, "column 'prompt': the prompt has 1501 tokens"),
    29: (b"a", json.dumps([USER]), None, "column 'messages' has messages"),
    31: (None, WITHOUT_ROLE, None, "column 'messages' message 0 has the role None"),
    37: (None, '[{"role": "user"', None, "column 'messages' is not JSON"),
    41: (b"a", None, '{"max_token": 4}', "did you mean 'max_tokens'?"),
    43: (b"a", None, '{"max_tokens": "four"}', "column 'sampling_params' has max_tokens is 'four'"),
    47: (b"a", None, '{"temperature": -1}', "column 'sampling_params' has temperature is -1"),
    53: (b"a", None, '{"max_tokens": 1e300}', "column 'sampling_params' has max_tokens is 1e+300"),
    59: (b"a", None, '{"logit_bias": {"100000": 1}}', "column 'sampling_params': logit_bias"),
    61: (b"a", None, "{", "column 'sampling_params' is not JSON"),
}


def write_rows(path, num_rows):
    cells = [
        BAD_ROWS.get(index % 100, (f"row {index}".encode(), None, None, ""))
        for index in range(num_rows)
    ]
    prompts = pa.array([prompt for prompt, *_ in cells], pa.binary())
    offsets, data = prompts.buffers()[1:]
    text = pa.Array.from_buffers(pa.string(), num_rows, [prompts.buffers()[0], offsets, data])
    table = pa.table(
        {
            "id": pa.array(range(num_rows), pa.int64()),
            "prompt": text,
            "messages": pa.array([messages for _, messages, _, _ in cells], pa.string()),
            "sampling_params": pa.array([params for _, _, params, _ in cells], pa.string()),
        }
    )
    pq.write_table(table, path)
    return str(path)


def generated(path, model, *, num_actors=2, engine_config=CONFIG, **options):
    arguments = map_batches_kwargs(
        model,
        num_actors=num_actors,
        batch_size=16,
        rows_in_flight=256,
        sampling_params=PARAMS,
        id_column="id",
        engine_config=engine_config,
        **options,
    )
    dataset = ray.data.read_parquet(path).repartition(target_num_rows_per_block=ROWS_PER_BLOCK)
    return dataset.map_batches(MoEGenerator, **arguments).iter_batches(
        batch_size=None, batch_format="pyarrow", prefetch_batches=0
    )


def check(tables, num_rows):
    """Every id once; good rows have tokens, bad ones the error of their kind."""
    table = pa.concat_tables(tables)
    ids = table.column("id").to_pylist()
    assert sorted(ids) == list(range(num_rows))
    errors = table.column("__inference_error__").to_pylist()
    reasons = table.column("finish_reason").to_pylist()
    counts = table.column("num_generated_tokens").to_pylist()
    for row_id, error, reason, count in zip(ids, errors, reasons, counts, strict=True):
        expected = BAD_ROWS.get(row_id % 100, (None, None, None, ""))[3]
        assert (expected in error) if expected else (error == "")
        assert (reason == "error") == bool(expected)
        assert bool(count) != bool(expected)
    return table


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [400, 10_000])
def test_every_row_comes_out_once_and_bad_rows_say_why(local_ray, tiny_model, tmp_path, num_rows):
    path = write_rows(tmp_path / "rows.parquet", num_rows)
    tables = list(generated(path, tiny_model))
    check(tables, num_rows)
    assert len({str(table.schema) for table in tables}) == 1


@pytest.mark.parametrize(
    ("num_rows", "num_actors"), [(800, 1), pytest.param(10_000, 2, marks=pytest.mark.slow)]
)
def test_a_killed_actor_loses_no_row(local_ray, tiny_model, tmp_path, num_rows, num_actors):
    path = write_rows(tmp_path / "rows.parquet", num_rows)
    tables = []
    killed = []
    for table in generated(path, tiny_model, num_actors=num_actors):
        tables.append(table)
        if not killed and sum(table.num_rows for table in tables) > num_rows // 8:
            killed = actors()[:1]
            killed[0].kill()
    assert len(killed) == 1
    check(tables, num_rows)


@pytest.mark.slow
def test_an_actor_whose_rank_is_killed_loses_no_row_and_leaves_no_rank(
    local_ray, tiny_model, tmp_path
):
    path = write_rows(tmp_path / "rows.parquet", 2000)
    config = dataclasses.replace(
        CONFIG, device="emulated", schedule="cgopipe", tensor_parallel_size=2
    )
    tables, killed = [], []
    for table in generated(path, tiny_model, num_actors=1, engine_config=config):
        tables.append(table)
        if not killed and sum(table.num_rows for table in tables) > 250:
            killed = processes("engine.ranks")
            assert len(killed) == 1
            killed[0].kill()
    found = check(tables, 2000).sort_by("id")
    assert len(killed) == 1
    _, alive = psutil.wait_procs(processes("engine.ranks"), timeout=30)
    assert alive == []
    with Engine.from_pretrained(tiny_model, CONFIG) as engine:
        (alone,) = engine.generate(["row 1999"], PARAMS)
        assert found.column("generated_tokens")[1999].as_py() == list(alone.token_ids)


def actors():
    """The processes of the operator's actors."""
    return processes("MoEGenerator")


def processes(name):
    """Those below this one with this name in their command, and alive."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command either
            if any(name in arg for arg in child.cmdline()):
                found.append(child)
    return found


@pytest.mark.slow
def test_rows_keep_their_order_when_asked(preserve_order, tiny_model, tmp_path):
    path = write_rows(tmp_path / "rows.parquet", 500)
    table = check(list(generated(path, tiny_model)), 500)
    assert table.column("id").to_pylist() == list(range(500))


@pytest.mark.slow
def test_rows_get_the_tokens_that_the_engine_gives_without_ray(local_ray, tiny_model, tmp_path):
    path = write_rows(tmp_path / "rows.parquet", 100)
    table = check(list(generated(path, tiny_model, num_actors=1)), 100).sort_by("id")
    with Engine.from_pretrained(tiny_model, CONFIG) as engine:
        for index in (0, 1, 2, 50, 98):
            (alone,) = engine.generate([f"row {index}"], PARAMS)
            row = table.slice(index, 1).to_pylist()[0]
            assert row["generated_tokens"] == list(alone.token_ids)
            assert row["generated_text"] == alone.text
            assert row["num_input_tokens"] == alone.num_input_tokens


@pytest.mark.slow
def test_a_wrong_column_name_fails_the_job_and_says_which_there_are(
    local_ray, tiny_model, tmp_path
):
    path = write_rows(tmp_path / "rows.parquet", 64)
    with pytest.raises(ray.exceptions.RayTaskError, match="neither column 'question' nor 'chat'"):
        list(
            generated(
                path, tiny_model, num_actors=1, prompt_column="question", messages_column="chat"
            )
        )


def two_generators(path, model, **options):
    """One that writes and one that judges what was written, with reads and maps around."""
    dataset = ray.data.read_parquet(path).repartition(target_num_rows_per_block=16, strict=True)
    configure_data_context(context=dataset.context)
    for column in ("prompt", "generated_text"):
        arguments = map_batches_kwargs(
            model, sampling_params=PARAMS, id_column="id", **{"engine_config": CONFIG, **options}
        )
        dataset = dataset.map_batches(as_prompt, fn_args=[column], batch_format="pyarrow")
        dataset = dataset.map_batches(MoEGenerator, **arguments)
    return dataset


def as_prompt(table, column):
    return table.select(["id", column]).rename_columns(["id", "prompt"])


def test_the_driver_finds_the_plan_of_a_pipeline_in_its_stage(local_ray, tiny_model):
    dataset = ray.data.from_items([{"prompt": "a"}] * 8)
    arguments = map_batches_kwargs(tiny_model, ds=dataset, engine_config=CONFIG)
    stage = dataset.map_batches(MoEGenerator, **arguments)._logical_plan.dag
    assert _plan_of(SimpleNamespace(_logical_operators=[stage])) is arguments.plan is not None


@pytest.mark.slow
def test_two_generators_of_one_pipeline_end_with_the_defaults(local_ray, tiny_model, tmp_path):
    path = write_rows(tmp_path / "rows.parquet", 200)
    judged = two_generators(path, tiny_model, engine_config=None).take_all()
    assert sorted(row["id"] for row in judged) == list(range(200))


def test_two_generators_without_room_for_both_are_refused_at_once(local_ray, tiny_model, tmp_path):
    path = write_rows(tmp_path / "rows.parquet", 20)
    memory = int(0.6 * ray.cluster_resources()["memory"])
    with pytest.raises(InfeasiblePlanError, match=r"GiB of memory.*num_generators"):
        two_generators(path, tiny_model, memory=memory).take_all()
    with pytest.raises(InfeasiblePlanError, match=r"no room for .* needs 1 CPU"):
        two_generators(path, tiny_model, num_cpus=1).take_all()
