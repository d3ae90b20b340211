"""Rates that no idle machine has are told from those that it may have."""

import dataclasses

import pytest

from raymoe.measure.plausible import find_problems
from raymoe.specs.hardware import HARDWARE_PRESETS, Curve
from tests.unit.specs.test_hardware import HOST, MEASURED

CURVES = dataclasses.replace(
    MEASURED.host_curves,
    product_flop_per_s=Curve(((1.0, 20e9), (64.0, 400e9), (256.0, 380e9))),
    task_overhead_s=Curve(((1.0, 40e-6), (64.0, 60e-6), (2048.0, 9e-3))),
)
GOOD = dataclasses.replace(MEASURED, host_curves=CURVES)


def test_nodes_that_were_measured_alone_and_presets_have_no_problems() -> None:
    for node in (GOOD, HOST, *HARDWARE_PRESETS.values()):
        assert find_problems(node) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"product_flop_per_s": Curve(((1.0, 20e9), (64.0, 400e9), (256.0, 90e9)))},
            "the rate of projections falls from 400 G/s with 64 rows to 90 G/s with 256",
        ),
        (
            {"attention_bytes_per_s_of_threads": Curve(((1.0, 9e9), (2.0, 2e9)))},
            "the rate of decode attention falls from 9 G/s with 1 threads to 2 G/s with 2",
        ),
        (
            {"task_overhead_s": Curve(((1.0, 40e-6), (64.0, 8e-3), (2048.0, 9e-3)))},
            "in a step of 64 tokens each task takes 8.0 ms more than its kernels",
        ),
    ],
)
def test_what_cannot_be_is_named_with_its_numbers(changes, problem: str) -> None:
    curves = dataclasses.replace(CURVES, **changes)
    assert find_problems(dataclasses.replace(GOOD, host_curves=curves)) == [problem]


def test_a_quick_measurement_is_held_to_the_same() -> None:
    slow = dataclasses.replace(HOST, task_overhead_s=Curve(((1.0, 5e-3),)))
    assert len(find_problems(slow)) == 1
