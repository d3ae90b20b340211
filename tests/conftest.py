"""Tests import each other's helpers as `tests.…` and the installed raymoe, not the source tree."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# At the end: the source tree has no compiled module and must not hide the installed package.
sys.path.append(str(Path(__file__).parent.parent))
# Read when the hub's library is imported; the names of models that tests give exist nowhere.
os.environ["HF_HUB_OFFLINE"] = "1"

from tests import triton_mode

triton_mode.choose()


def pytest_configure(config: pytest.Config) -> None:
    # A busy machine is no failure: no test asserts on the clock.
    settings.register_profile("raymoe", deadline=None)
    settings.load_profile("raymoe")
    # A Ray that a test killed, or somebody else's, leaves the file of the current cluster behind.
    os.environ["RAY_ADDRESS"] = "local"
    # As the command has them, which tests run in this process too.
    os.environ |= {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_USAGE_STATS_ENABLED": "0"}
    # Files in their order: those that wait for Ray come early and do not end the run alone.
    config.option.loadscopereorder = False
    if not hasattr(config, "workerinput"):  # what starts the workers, or has none
        cases = tempfile.TemporaryDirectory(prefix="raymoe-cases-")
        config.add_cleanup(cases.cleanup)
        os.environ["RAYMOE_TEST_CASES"] = cases.name


@pytest.fixture(scope="session", autouse=True)
def _no_profile_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans must not depend on whether somebody measured this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYMOE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
