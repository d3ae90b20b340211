"""Settings of Ray Data, and combinations that make no sense."""

import math

import pytest
from ray.data import DataContext

from raymoe import configure_data_context
from raymoe.errors import ConfigError

# Ray warns of its own defaults, too.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def context() -> DataContext:
    return DataContext.get_current().copy()


def test_long_passes_are_no_reason_to_end_a_job(context) -> None:
    assert configure_data_context(context=context) is context
    assert context.execution_no_progress_timeout_s == 6 * 3600
    assert context.checkpoint_config is None
    configure_data_context(context=context, no_progress_timeout_s=math.inf, preserve_order=True)
    assert context.execution_no_progress_timeout_s == -1
    assert context.execution_options.preserve_order


def test_tasks_of_an_actor_do_not_each_watch_its_memory(context) -> None:
    assert configure_data_context(context=context).memory_usage_poll_interval_s is None


def test_a_checkpoint_knows_rows_by_their_ids(context, tmp_path) -> None:
    configure_data_context(context=context, id_column="id", checkpoint_path=tmp_path)
    assert context.checkpoint_config is not None
    assert context.checkpoint_config.id_column == "id"
    assert context.checkpoint_config.checkpoint_path == str(tmp_path)
    with pytest.raises(ConfigError, match="id_column is missing"):
        configure_data_context(context=context, checkpoint_path=tmp_path)


@pytest.mark.parametrize("limit_s", [0, -1, math.nan])
def test_a_limit_is_positive(context, limit_s: float) -> None:
    with pytest.raises(ConfigError, match="no_progress_timeout_s"):
        configure_data_context(context=context, no_progress_timeout_s=limit_s)
