"""The NUMA node of a GPU on trees as the kernel shows them; threads and policies that follow it."""

import os
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from raymoe.device.cuda import (
    DEFAULT,
    PREFERRED,
    NumaPlace,
    find_place,
    memory_near,
    near,
    parse_cpus,
)
from raymoe.device.lane import Worker
from raymoe.errors import ConfigError

GPU = "0000:3b:00.0"
CPUS = frozenset(range(16))


def tree(root: Path, nodes: dict[int, str], gpu_node: str | None) -> Path:
    for node, cpus in nodes.items():
        directory = root / f"sys/devices/system/node/node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{cpus}\n")
    if gpu_node is not None:
        device = root / "sys/bus/pci/devices" / GPU
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{gpu_node}\n")
    return root


def test_a_gpu_has_the_cpus_of_its_node_that_may_be_used(tmp_path: Path) -> None:
    root = tree(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, "1")
    assert find_place(GPU, root, CPUS) == NumaPlace(
        node=1, cpus=frozenset({4, 5, 6, 7, 12, 13, 14, 15})
    )
    allowed = frozenset({0, 1, 5})
    assert find_place(GPU, root, allowed) == NumaPlace(node=1, cpus=frozenset({5}))


@pytest.mark.parametrize(
    ("nodes", "gpu_node", "allowed"),
    [
        ({0: "0-15"}, "0", CPUS),  # one node: nothing to choose
        ({0: "0-7", 1: "8-15"}, "-1", CPUS),  # as virtual machines have it
        ({0: "0-7", 1: "8-15"}, None, CPUS),  # no such device
        ({0: "0-7", 1: "8-15"}, "1", frozenset({0, 1})),  # bound elsewhere by somebody else
        ({0: "0-15", 1: ""}, "1", CPUS),  # memory without CPUs
        ({}, "0", CPUS),
    ],
)
def test_where_it_makes_no_difference_nothing_is_bound(
    nodes: dict[int, str], gpu_node: str | None, allowed: frozenset[int], tmp_path: Path
) -> None:
    assert find_place(GPU, tree(tmp_path, nodes, gpu_node), allowed) is None


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-2,7,10-11\n") == {0, 1, 2, 7, 10, 11}
    assert parse_cpus("\n") == frozenset()
    with pytest.raises(ConfigError, match="no list of CPUs"):
        parse_cpus("0-x")


def test_a_thread_is_bound_before_its_context_and_others_are_not() -> None:
    before = os.sched_getaffinity(0)
    cpu = min(before)
    seen = []

    @contextmanager
    def context():
        seen.append(os.sched_getaffinity(0))
        yield

    Worker("bound", near(NumaPlace(node=0, cpus=frozenset({cpu})), context)).close()
    Worker("free", near(None, context)).close()
    assert seen == [{cpu}, before]
    assert os.sched_getaffinity(0) == before


def test_memory_is_preferred_from_a_node_and_the_policy_goes_back_after_an_error() -> None:
    calls: list[tuple[int, int | None]] = []
    place = NumaPlace(node=3, cpus=frozenset({0}))

    def fail() -> None:
        with memory_near(place, lambda *call: calls.append(call)):
            assert calls == [(PREFERRED, 3)]
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - its own
        fail()
    assert calls == [(PREFERRED, 3), (DEFAULT, None)]
    with memory_near(None, lambda *call: calls.append(call)), nullcontext():
        assert len(calls) == 2


def test_the_system_call_is_the_one_of_this_machine() -> None:
    with memory_near(NumaPlace(node=0, cpus=frozenset({0}))):
        policies = Path("/proc/self/numa_maps")
        if not policies.exists():
            pytest.skip("this kernel has no NUMA policies")
        try:
            text = policies.read_text()
        except OSError as error:
            pytest.skip(f"not to be read here: {error}")
        assert "prefer" in text
    assert "prefer" not in policies.read_text()
