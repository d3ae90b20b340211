"""One local Ray for all tests of this directory, and one tiny model."""

import logging
import os
from pathlib import Path

import pytest
import ray
import ray.data

import raymoe
from tests.local_ray import LOCAL_RAY
from tests.tiny import make_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def local_ray():
    # Workers must find the same raymoe as this process, and the tests.
    places = [Path(raymoe.__file__).parents[1], Path(__file__).parents[2]]
    path = os.pathsep.join(dict.fromkeys(map(str, places)))
    ray.init(
        "local",
        **LOCAL_RAY,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    environment, settings = _environment(), context.copy()
    yield
    ray.shutdown()
    assert _environment() == environment
    assert context == settings  # jobs change the contexts of their own datasets alone


def _environment():
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture
def preserve_order(local_ray):
    options = ray.data.DataContext.get_current().execution_options
    options.preserve_order = True
    yield
    options.preserve_order = False
