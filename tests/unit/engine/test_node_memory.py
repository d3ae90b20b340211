"""A plan that exceeds what is free is refused with numbers, after a moment of patience."""

import pytest

from raymoe.device.host import HostInfo
from raymoe.engine import node as engine_node
from raymoe.engine.node import check_available
from raymoe.errors import InfeasiblePlanError
from raymoe.plan.policy import Footprint
from raymoe.units import GIB

FOOTPRINT = Footprint(memory="host memory", parts=(("weights", 90 * GIB), ("KV cache", 10 * GIB)))


@pytest.fixture
def free(monkeypatch):
    """What the machine has free, one number for each look; the last one stays."""
    sizes, slept = [], []

    def read():
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        return HostInfo(
            num_cores=1,
            num_physical_cores=1,
            total_memory_bytes=256 * GIB,
            available_memory_bytes=size,
        )

    monkeypatch.setattr(engine_node, "read_host", read)
    monkeypatch.setattr(engine_node, "rss_bytes", lambda: GIB)
    monkeypatch.setattr(engine_node.time, "sleep", slept.append)
    monkeypatch.setattr(engine_node.time, "monotonic", lambda: float(len(slept)))
    return sizes, slept


def test_what_is_free_is_enough(free):
    sizes, slept = free
    sizes.append(99 * GIB)  # and one that this process has taken already
    check_available(FOOTPRINT, what="a model")
    assert slept == []


def test_memory_that_a_process_before_still_gives_back_is_waited_for(free):
    sizes, slept = free
    sizes += [20 * GIB, 70 * GIB, 120 * GIB]
    check_available(FOOTPRINT, what="a model")
    assert len(slept) == 2


def test_a_plan_that_never_fits_is_refused_with_its_table(free):
    sizes, slept = free
    sizes.append(60 * GIB)
    with pytest.raises(InfeasiblePlanError) as caught:
        check_available(FOOTPRINT, what="a model")
    message = str(caught.value)
    assert "a model needs 100.00 GiB of host memory, 61.00 GiB may be used" in message
    assert "(39.00 GiB short)" in message
    assert "weights" in message
    assert "Reduce host_memory_bytes" in message
    assert len(slept) == engine_node.PATIENCE_S


def test_what_others_have_loaded_already_counts_as_there(free):
    sizes, _ = free
    sizes.append(60 * GIB)
    check_available(FOOTPRINT, what="a model", already_there=39 * GIB)
