"""What a process may use, read from trees of proc and sys made for each test."""

from pathlib import Path

import pytest

from raymoe.device.host import HostInfo, peak_rss_bytes, read_host, rss_bytes
from raymoe.units import GIB, KIB, MIB

EIGHT = frozenset(range(8))


class Tree:
    """A root directory with a machine of 64 GiB, 48 of them available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal: {64 * GIB // KIB} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB // KIB} kB\n",
        )

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def read(self, cpus: frozenset[int] = EIGHT) -> HostInfo:
        return read_host(self.root, cpus)

    def write_group_v2(self, path: str, **files: object) -> None:
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{path}/{name.replace('_', '.', 1)}", text)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_limits_the_machine_is_what_there_is(tree: Tree) -> None:
    info = tree.read()
    assert (info.num_cores, info.num_physical_cores) == (8, 8)
    assert (info.total_memory_bytes, info.available_memory_bytes) == (64 * GIB, 48 * GIB)


def test_hyper_threads_of_a_core_count_once_as_physical(tree: Tree) -> None:
    for cpu in range(8):
        path = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        tree.write(path, f"{cpu % 4},{cpu % 4 + 4}")
    assert tree.read().num_physical_cores == 4
    assert tree.read(frozenset({0, 4, 1})).num_physical_cores == 2


def test_version_2_limits_count_and_the_file_cache_does_not(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/pod")
    stat = f"anon 5\ninactive_file {3 * GIB}\nactive_file {GIB}"
    tree.write_group_v2("pod", memory_max=16 * GIB, memory_current=10 * GIB, memory_stat=stat)
    tree.write_group_v2("pod", cpu_max="350000 100000")
    info = tree.read()
    assert (info.num_cores, info.num_physical_cores) == (3, 3)
    assert (info.total_memory_bytes, info.available_memory_bytes) == (16 * GIB, 10 * GIB)


def test_a_quota_below_one_cpu_still_leaves_one_thread(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/pod")
    tree.write_group_v2("pod", cpu_max="50000 100000")
    assert tree.read().num_cores == 1


def test_unlimited_groups_limit_nothing(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/\n4:memory:/a\n3:cpu,cpuacct:/a")
    tree.write_group_v2("", memory_max="max", memory_current=GIB, cpu_max="max 100000")
    tree.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", 9223372036854771712)
    tree.write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", GIB)
    tree.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", -1)
    tree.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", 100000)
    info = tree.read()
    assert (info.num_cores, info.total_memory_bytes) == (8, 64 * GIB)


def test_the_limit_of_a_parent_group_counts(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/slice/pod")
    tree.write_group_v2("slice", memory_max=8 * GIB, memory_current=6 * GIB)
    tree.write_group_v2("slice/pod", memory_max=16 * GIB, memory_current=GIB)
    info = tree.read()
    assert (info.total_memory_bytes, info.available_memory_bytes) == (8 * GIB, 2 * GIB)


def test_memory_high_limits_as_memory_max_does(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/pod")
    tree.write_group_v2("pod", memory_max="max", memory_high=4 * GIB, memory_current=GIB)
    assert tree.read().available_memory_bytes == 3 * GIB


def test_version_1_limits_count(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "5:cpu,cpuacct:/pod\n4:memory:/pod")
    memory = "sys/fs/cgroup/memory/pod/memory."
    tree.write(memory + "limit_in_bytes", 12 * GIB)
    tree.write(memory + "usage_in_bytes", 7 * GIB)
    tree.write(memory + "stat", f"inactive_file 1\ntotal_inactive_file {2 * GIB}")
    tree.write("sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us", 200000)
    tree.write("sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us", 100000)
    info = tree.read()
    assert (info.num_cores, info.total_memory_bytes) == (2, 12 * GIB)
    assert info.available_memory_bytes == 7 * GIB


def test_the_mount_counts_when_the_path_is_the_hosts(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/kubepods/of/the/host")
    tree.write_group_v2("", memory_max=2 * GIB, memory_current=3 * GIB)
    info = tree.read()
    assert (info.total_memory_bytes, info.available_memory_bytes) == (2 * GIB, 0)


def test_the_peak_is_the_high_water_mark(tree: Tree) -> None:
    tree.write("proc/self/status", "VmPeak: 9 kB\nVmHWM:\t  2048 kB\nVmRSS: 5 kB")
    assert peak_rss_bytes(tree.root) == 2 * MIB


def test_the_peak_of_this_process_is_plausible(tree: Tree) -> None:
    assert 8 * MIB < rss_bytes() <= peak_rss_bytes() < 1024 * GIB
    assert peak_rss_bytes(tree.root) >= 8 * MIB  # without proc, from getrusage


def test_this_machine_can_be_read() -> None:
    info = read_host()
    assert 1 <= info.num_physical_cores <= info.num_cores
    assert 0 < info.available_memory_bytes <= info.total_memory_bytes
