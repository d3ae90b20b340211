"""The NUMA node of a GPU on trees as the kernel shows them; threads and policies that follow it."""

import ctypes
import os
import platform
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pytest
from torch import Tensor

from raymoe.config import EngineConfig
from raymoe.device import cuda
from raymoe.device.cuda import (
    DEFAULT,
    MBIND,
    PREFERRED,
    CudaDevice,
    NumaPlace,
    find_place,
    memory_near,
    near,
    parse_cpus,
)
from raymoe.device.lane import Worker
from raymoe.engine.load import load_parts
from raymoe.errors import ConfigError, PerformanceWarning
from raymoe.memory.arena import HostArena
from raymoe.plan.policy import Policy
from raymoe.specs.hardware import hardware_preset
from raymoe.units import GIB, MIB
from tests.integration import test_schedules as schedules
from tests.parity.cases import get_case
from tests.unit.device.deferred_cuda import DeferredCuda, use_device, without_native_kernels

__all__ = ["without_native_kernels"]

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


def policy_of(memory: Tensor | None = None) -> tuple[int, int]:
    """Policy and mask of nodes of memory, or of this thread; skips where the kernel says none."""
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]  # get_mempolicy(2)
    policy, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number),
        ctypes.byref(policy),
        mask,
        ctypes.c_ulong(1024),
        None if memory is None else ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_ulong(0 if memory is None else 2),  # MPOL_F_ADDR
    )
    if failed:
        pytest.skip(f"get_mempolicy: {os.strerror(ctypes.get_errno())}")
    return policy.value, mask[0]


def open_device(node: int) -> CudaDevice:
    place = NumaPlace(node=node, cpus=frozenset(os.sched_getaffinity(0)))
    return CudaDevice(DeferredCuda(), GIB, place)


def test_memory_of_a_device_is_bound_to_its_node() -> None:
    elsewhere = HostArena(3 * MIB)
    assert policy_of(elsewhere.memory) == (DEFAULT, 0)
    with closing(open_device(0)) as device:
        device.bind(elsewhere.memory)
        device.bind(HostArena(0).memory)
        assert policy_of(elsewhere.memory) == (PREFERRED, 1)
        assert policy_of(device.allocate_pinned(100)) == (PREFERRED, 1)


def test_arenas_of_weights_and_kv_are_bound_before_they_are_filled(
    monkeypatch: pytest.MonkeyPatch, without_native_kernels: list[DeferredCuda]
) -> None:
    device, arenas, bound = open_device(0), [], []
    without_native_kernels.append(device._driver)
    use_device(monkeypatch, lambda *_, **__: device)
    bind = CudaDevice.bind

    def checked(device: CudaDevice, memory: Tensor) -> None:
        assert not memory.any()
        bind(device, memory)
        bound.append(memory.data_ptr())

    def new_arena(num_bytes: int) -> HostArena:
        arenas.append(HostArena(num_bytes))
        return arenas[-1]

    monkeypatch.setattr(CudaDevice, "bind", checked)
    config = EngineConfig(
        device="cuda",
        hardware=hardware_preset("t4"),
        dtype="float32",
        schedule="module_batching",
        policy=Policy(**schedules.SIZES, device=schedules.DEVICES["pages"]),
    )
    directory = get_case(schedules.plain_configuration("mixtral")).directory
    with closing(load_parts(directory, config, new_arena)):
        assert [arena.memory.data_ptr() in bound for arena in arenas] == [True, True]
        assert [policy_of(arena.memory) for arena in arenas] == [(PREFERRED, 1)] * 2


@pytest.mark.parametrize(
    ("node", "numbers", "reason"),
    [
        (900, MBIND, "Invalid argument"),
        (0, dict.fromkeys(MBIND, 100_000), "Function not implemented"),  # a kernel without NUMA
        (0, {}, "the call is not known for"),
    ],
)
def test_a_refusal_is_said_once(
    node: int, numbers: dict[str, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "MBIND", numbers)
    arena = HostArena(MIB)
    with closing(open_device(node)) as device:
        with pytest.warns(PerformanceWarning, match=rf"NUMA node {node}, .*\(mbind: {reason}"):
            device.bind(arena.memory)
        device.bind(arena.memory)  # says nothing: warnings are errors here
        assert device.allocate_pinned(10).nbytes == 10


def test_the_system_call_is_the_one_of_this_machine() -> None:
    before = policy_of()
    with memory_near(NumaPlace(node=0, cpus=frozenset({0}))):
        assert policy_of() == (PREFERRED, 1)
    assert policy_of() == before == (DEFAULT, 0)
