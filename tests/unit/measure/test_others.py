"""What other programs take of the cores is the machine's busy time without this process's own."""

from pathlib import Path

import pytest

from raymoe.measure import others
from raymoe.measure.others import CoreWatch, OtherPrograms
from raymoe.processes import TICKS_PER_S


class Clocks:
    """Seconds of the wall and of this process, which only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s = self.own_s = 0.0
        monkeypatch.setattr(others.time, "perf_counter", lambda: self.wall_s)
        monkeypatch.setattr(others.time, "process_time", lambda: self.own_s)


def write_stat(root: Path, *busy_s: float) -> None:
    """Busy seconds of each core: a third in user mode, the rest stolen by another machine."""
    (root / "proc").mkdir(exist_ok=True)
    lines = ["cpu  1 2 3 4"]
    for core, seconds in enumerate(busy_s):
        ticks = round(seconds * TICKS_PER_S)
        lines.append(f"cpu{core} {ticks // 3} 0 0 77777 88888 0 0 {ticks - ticks // 3} 555 0")
    (root / "proc/stat").write_text("\n".join([*lines, "intr 5 6 7"]))


def test_what_this_process_took_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch)
    write_stat(tmp_path, 100.0, 200.0, 0.0)
    watch = CoreWatch(tmp_path, frozenset({0, 1}))
    clocks.wall_s, clocks.own_s = 10.0, 7.0
    write_stat(tmp_path, 110.0, 206.0, 9.0)  # the third core is not ours
    found = watch.read()
    assert found.busy_cores == pytest.approx((10 + 6 - 7) / 10)
    assert found.num_cores == 2
    assert str(found).startswith("other programs took 0.9 of the 2 cores")


def test_the_load_average_stands_for_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others.os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert CoreWatch(tmp_path, frozenset(range(4))).read().busy_cores == 1.5


@pytest.mark.parametrize(
    ("busy_cores", "num_cores", "num_threads", "crowds"),
    [(0.3, 2, 2, False), (1.0, 2, 2, True), (1.0, 2, 1, False), (62.0, 64, 2, False)],
)
def test_programs_crowd_where_threads_find_no_core(
    busy_cores: float, num_cores: int, num_threads: int, crowds: bool
) -> None:
    found = OtherPrograms(busy_cores=busy_cores, num_cores=num_cores)
    assert found.crowds(num_threads) == crowds
