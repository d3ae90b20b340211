"""Experts divided between device and cores step by step: tokens of the device `cpu`, float32."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.plan.policy import DevicePolicy
from raymoe.schedule.graph import Op
from tests.integration import test_every_format as formats
from tests.integration.test_schedules import (
    DEVICES,
    check_configuration,
    make_engine,
    on_cpu,
    plain_configuration,
    run,
)
from tests.parity.configurations import CONFIGURATIONS, first_of_each_family
from tests.splits import choose_splits, random_splits

SCHEDULES = ("micro_batches", "cgopipe", "module_batching")


def on_cores(placement: str, fraction: float = 0.4) -> DevicePolicy:
    return replace(DEVICES[placement], cpu_experts_fraction=fraction)


@pytest.mark.parametrize(
    ("schedule", "placement", "scenario"),
    [
        pytest.param("micro_batches", "ring", "mixed lengths", marks=pytest.mark.slow),
        pytest.param("micro_batches", "resident share", "long prompt", marks=pytest.mark.slow),
        ("cgopipe", "pages", "preemption"),
        pytest.param("module_batching", "staged", "mixed lengths", marks=pytest.mark.slow),
    ],
)
def test_splits_that_change_from_step_to_step_change_no_token(
    schedule: str, placement: str, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    choose_splits(monkeypatch, random_splits(7), seen)
    name = plain_configuration("qwen2_moe")
    check_configuration(name, schedule, scenario, on_cores(placement))
    assert set(seen) == {0, 1, 2}


@pytest.mark.parametrize("split", [0, 1, 2])
def test_cores_compute_the_share_of_the_split(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_splits(monkeypatch, lambda _: split)
    name = plain_configuration("mixtral")
    config = {"device": "emulated", "schedule": "cgopipe", "device_policy": on_cores("pages", 0.5)}
    with make_engine(name, {}, **config) as engine:
        assert run(engine, name, {}) == on_cpu(name, "mixed lengths")
        assert engine.last_timeline is not None
        ops = [span.task.op for span in engine.last_timeline.spans]
    num_launches = ops.count(Op.POST)
    for op in (Op.ROWS, Op.CEXPERTS, Op.SUMS):
        assert ops.count(op) == (num_launches if split else 0)
    assert ops.count(Op.EXPERTS) == num_launches * (2 if split == 1 else 1)


def probabilities(engine: Engine, num_others: int) -> dict[str, object]:
    """Tokens and log probabilities of one row among others."""
    dice = random.Random(num_others)
    lengths = [dice.randint(2, 30) for _ in range(num_others)]
    others = [[dice.randrange(1, 90) for _ in range(length)] for length in lengths]
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 3}
    row, *_ = engine.generate([[5, 9, 2, 7, 11, 3], *others], params)
    return {"tokens": row.token_ids, "logprobs": row.logprobs}


@pytest.mark.skipif(not packed_linear_is_used(torch.bfloat16), reason="torch multiplies")
def test_with_a_fixed_share_rows_depend_on_no_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, in bfloat16; with a share that differs from step to step they do."""
    choose_splits(monkeypatch, random_splits(5))
    found = {}
    for is_fixed in (True, False):
        device = replace(on_cores("pages", 0.5), is_cpu_experts_fraction_fixed=is_fixed)
        config = {"device": "emulated", "schedule": "cgopipe", "device_policy": device}
        name = plain_configuration("qwen3_moe")
        with make_engine(name, {}, dtype="bfloat16", **config) as engine:
            alone, *among = (probabilities(engine, number) for number in (0, 1, 5, 12))
        found[is_fixed] = [row == alone for row in among]
    assert all(found[True])
    assert not all(found[False])


@pytest.mark.parametrize("stored", list(formats.FORMATS)[:2])
def test_cores_compute_experts_as_they_are_stored(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = next(each for each in first_of_each_family() if each.family == "qwen3_moe")
    check_format(configuration, stored, tmp_path, monkeypatch)


def check_format(configuration, stored: str, root: Path, monkeypatch) -> None:
    config = formats.config_of(configuration.family, configuration.fields)
    quantised, plain = formats.write(config, formats.FORMATS[stored], root)
    expected = formats.generate(plain)
    choose_splits(monkeypatch, random_splits(3))
    options = {"device": "emulated", "schedule": "micro_batches"}
    assert formats.generate(quantised, cpu_experts_fraction=0.5, **options) == expected


def test_a_schedule_that_computes_all_experts_on_the_device_is_refused() -> None:
    name = plain_configuration("mixtral")
    config = {"device": "emulated", "schedule": "flexgen_s4", "device_policy": on_cores("pages")}
    with pytest.raises(ConfigError, match=r"cpu_experts_fraction is 0\.4.*cgopipe"):
        make_engine(name, {}, **config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    list(zip((each.name for each in CONFIGURATIONS), itertools.cycle(SCHEDULES), strict=False)),
)
def test_every_configuration_with_random_splits(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_splits(monkeypatch, random_splits(sum(map(ord, name + schedule))))
    check_configuration(name, schedule, "mixed lengths", on_cores("pages"))
    check_configuration(name, schedule, "long prompt", on_cores("resident share", 0.6))
    check_configuration(name, schedule, "mixed lengths", on_cores("ring", 0.3))


@pytest.mark.slow
@pytest.mark.parametrize("stored", formats.FORMATS)
def test_every_format_with_random_splits(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = next(each for each in first_of_each_family() if each.family == "deepseek_v3")
    check_format(configuration, stored, tmp_path, monkeypatch)
