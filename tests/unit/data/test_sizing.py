"""The arguments of map_batches."""

import inspect

import pytest
import ray.data

from raymoe.data.sizing import Cluster, map_batches_kwargs
from raymoe.errors import ConfigError


def test_rows_in_flight_become_calls_of_small_batches():
    kwargs = map_batches_kwargs("m", rows_in_flight=1000, batch_size=16, num_actors=3)
    compute = kwargs["compute"]
    assert compute.max_concurrent_calls_per_actor == 63
    assert 63 * 1.25 <= compute.max_tasks_in_flight_per_actor < 63 * 1.25 + 1
    assert (compute.min_size, compute.max_size) == (3, 3)
    assert kwargs["fn_constructor_kwargs"]["max_concurrent_calls"] == 63


def test_calls_stay_below_the_limit_of_dispatch():
    kwargs = map_batches_kwargs("m", rows_in_flight=10**6, batch_size=16)
    assert kwargs["compute"].max_concurrent_calls_per_actor == 256


def test_calls_hold_more_rows_where_there_would_be_too_many_calls():
    assert map_batches_kwargs("m", rows_in_flight=2000)["batch_size"] == 16
    kwargs = map_batches_kwargs("m", rows_in_flight=21_760)
    assert kwargs["batch_size"] == 85
    assert kwargs["compute"].max_concurrent_calls_per_actor == 256
    assert map_batches_kwargs("m", rows_in_flight=21_760, batch_size=16)["batch_size"] == 16


def test_all_arguments_are_named_ones_of_map_batches():
    names = inspect.signature(ray.data.Dataset.map_batches).parameters
    kwargs = map_batches_kwargs("m", sampling_params={"max_tokens": 3}, id_column="id")
    assert set(kwargs) <= set(names)
    assert kwargs["batch_format"] == "pyarrow"
    assert kwargs["fn_constructor_kwargs"]["id_column"] == "id"
    assert not {"concurrency", "ray_remote_args_fn"} & set(kwargs)


@pytest.mark.parametrize(
    ("num_cpus", "num_nodes", "num_actors", "expected"),
    [(2, 1, 1, 1), (2, 1, 2, 0.5), (1, 1, 1, 0.5), (16, 1, 1, 15), (16, 1, 4, 3), (32, 4, 4, 7)],
)
def test_actors_leave_a_cpu_of_each_node_to_the_reads(num_cpus, num_nodes, num_actors, expected):
    cluster = Cluster(num_cpus=num_cpus, num_nodes=num_nodes, num_gpus=0)
    assert cluster.cpus_for(num_actors) == expected


@pytest.mark.parametrize("field", ["num_actors", "rows_in_flight", "batch_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_sizes_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        map_batches_kwargs("m", **{field: value})
