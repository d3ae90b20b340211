"""What a dataset's context has Ray Data call, wherever the context is taken."""

import sys

import pytest
import ray.cloudpickle
from ray.data import DataContext
from ray.data._internal.execution.execution_callback import ExecutionCallback

from raymoe.data.before_start import PrepareGenerators
from raymoe.data.callbacks import register_callbacks
from raymoe.data.cluster import CheckFit
from raymoe.data.journal_use import UseJournals

# Ray warns of its own defaults, too.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


OURS = [PrepareGenerators, UseJournals, CheckFit]


class OfSomebodyElse(ExecutionCallback):
    pass


@pytest.fixture
def context():
    context = DataContext.get_current().copy()
    context.custom_execution_callback_classes = [OfSomebodyElse]
    register_callbacks(context)
    return context


def made(context):
    """What Ray Data makes for one execution."""
    return [type(one()) for one in context.custom_execution_callback_classes]


def test_callbacks_are_there_once_beside_those_of_others_and_in_copies(context):
    register_callbacks(context)
    copied = context.copy()
    register_callbacks(copied)
    assert made(context) == made(copied) == [OfSomebodyElse, *OURS]


def test_a_worker_without_raymoe_loads_the_context_and_calls_nothing_of_ours(context, monkeypatch):
    data = ray.cloudpickle.dumps(context)
    for name in [name for name in sys.modules if name.partition(".")[0] == "raymoe"]:
        monkeypatch.setitem(sys.modules, name, None)
    loaded = ray.cloudpickle.loads(data)
    first, *ours = (one() for one in loaded.custom_execution_callback_classes)
    assert type(first) is OfSomebodyElse
    assert len(ours) == len(OURS)
    assert all(isinstance(one, ExecutionCallback) for one in ours)
    assert all(
        type(one).before_execution_starts is ExecutionCallback.before_execution_starts
        for one in ours
    )
