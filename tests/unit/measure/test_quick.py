"""Of several probes the best counts; there are more of them while other programs run."""

import dataclasses

import pytest

from raymoe.measure import quick
from raymoe.measure.others import OtherPrograms
from raymoe.measure.quick import MAX_PROBES, NUM_PROBES, measure_quickly
from raymoe.specs.hardware import Curve, HardwareSpec

NODE = HardwareSpec(
    name="here", num_cores=2, host_memory_bytes=1 << 30, host_bytes_per_s=1.0, host_flop_per_s=1.0
)


USUAL = Curve(((1.0, 50e-6),))


@dataclasses.dataclass
class Machine:
    """A machine whose probes, steps and other programs the test chooses; counts the pauses."""

    busy_cores: list[float]  # at each look; the last one stays
    curve: Curve = USUAL
    num_probes: int = 0
    num_pauses: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "Machine":
        for name, value in {"probe_host": self._probe, "NarrowModel": lambda _: self,
                            "CoreWatch": lambda: self}.items():  # fmt: skip
            monkeypatch.setattr(quick, name, value)
        monkeypatch.setattr(quick.time, "sleep", self._sleep)
        return self

    def _probe(self, num_threads: int | None, seconds: float) -> HardwareSpec:
        self.num_probes += 1
        middle = self.num_probes == 2  # neither the first nor the last is the best
        return dataclasses.replace(
            NODE,
            host_bytes_per_s=20e9 if middle else 3e9 + self.num_probes,
            host_flop_per_s=300e9 if middle else 8e9 + self.num_probes,
        )

    def _sleep(self, _seconds: float) -> None:
        self.num_pauses += 1

    def run(self, _seconds: float) -> None: ...

    def begin(self) -> None: ...

    def overhead(self, node: HardwareSpec) -> Curve:
        assert (node.host_bytes_per_s, node.host_flop_per_s) == (20e9, 300e9)
        return self.curve

    def read(self) -> OtherPrograms:
        busy = self.busy_cores.pop(0) if len(self.busy_cores) > 1 else self.busy_cores[0]
        return OtherPrograms(busy_cores=busy, num_cores=2)


@pytest.mark.parametrize(
    ("busy_cores", "num_probes", "num_pauses", "warns"),
    [
        ([0.1], NUM_PROBES, 0, False),
        ([2.0], MAX_PROBES, 7, True),
        ([2.0] * 5 + [0.1], 6, 5, False),
        ([2.0, 0.1, 2.0], NUM_PROBES, 1, False),  # one probe had the cores
    ],
)
def test_the_best_of_the_probes_counts(
    busy_cores: list[float], num_probes: int, num_pauses: int, warns: bool, monkeypatch, caplog
) -> None:
    machine = Machine(busy_cores).install(monkeypatch)
    measured = measure_quickly()
    assert (machine.num_probes, machine.num_pauses) == (num_probes, num_pauses)
    assert (measured.host_bytes_per_s, measured.host_flop_per_s) == (20e9, 300e9)
    assert measured.task_overhead_s == machine.curve
    assert ("other programs took 2.0 of the 2 cores" in caplog.text) == warns


def test_an_overhead_that_cannot_be_is_not_used(monkeypatch, caplog) -> None:
    Machine([1.0], curve=Curve(((1.0, 9e-3),))).install(monkeypatch)
    assert measure_quickly().task_overhead_s is None
    assert caplog.text.count("\n") == 1
    assert "raymoe profile" in caplog.text
