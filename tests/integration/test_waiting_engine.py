"""The waiting engine: real rows in and out, passes as long as planned, and nothing computed."""

import pickle

import pytest

from raymoe.assets import demo_model_path
from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError
from raymoe.measure.host import make_batch
from raymoe.plan.search import find_plan
from raymoe.plan.work import StepLoad
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload
from tests.scale.waiting import WaitingModel, WaitingRunner, waiting_parts


@pytest.fixture(scope="module")
def plan():
    return find_plan(
        model_preset("mixtral-8x7b"),
        hardware_preset("l4"),
        Workload(num_rows=64, prompt_tokens=64, generated_tokens=16),
        max_model_len=256,
    )


def test_passes_take_what_the_plan_says_over_the_speedup(plan) -> None:
    model = pickle.loads(pickle.dumps(WaitingModel.of(plan, speedup=8.0)))
    model.times.model = None  # whatever is asked, it knows already
    times = plan.step_times()
    for rows, context, prompts in ((0, 0, 64), (5, 30, 0), (64, 80, 100), (10**6, 10**6, 10**6)):
        load = StepLoad(decode_rows=rows, decode_context=context, prompt_tokens=prompts)
        assert model.seconds(load) == pytest.approx(times(load) / 8)
    with pytest.raises(ConfigError, match="speed-up"):
        WaitingModel.of(plan, speedup=0.0)


def test_rows_go_through_the_real_engine(plan, monkeypatch) -> None:
    asked = []
    seconds = WaitingModel.seconds

    def watched(self, load):
        asked.append(load)
        return seconds(self, load)

    monkeypatch.setattr(WaitingModel, "seconds", watched)
    model = WaitingModel.of(plan, speedup=1e5)
    prompts = [f"{index} of the rows" for index in range(40)]
    params = [{"max_tokens": 4 + index % 9, "temperature": 0.0} for index in range(40)]
    with Engine(waiting_parts(model, demo_model_path()), EngineConfig(linger_s=0.0)) as engine:
        rows = engine.generate(prompts, params)
        stats = engine.stats()
    assert [row.num_generated_tokens for row in rows] == [4 + index % 9 for index in range(40)]
    assert all(row.text and row.finish_reason == "length" for row in rows)
    assert stats.num_steps == len(asked)
    assert sum(load.tokens for load in asked) == stats.num_computed_tokens
    assert stats.num_computed_tokens == sum(row.num_input_tokens for row in rows) + sum(
        row.num_generated_tokens - 1 for row in rows
    )


def test_a_runner_waits_and_says_for_how_long(plan) -> None:
    runner = WaitingRunner(WaitingModel.of(plan, speedup=100.0), 258)
    with runner.run(make_batch(300, 70, 258)) as hidden_RH:
        assert len(hidden_RH) == 300
        assert runner.compute_logits(hidden_RH[256:]).shape == (44, 258)
    timeline = runner.last_timeline
    load = StepLoad(decode_rows=300, decode_context=70)
    assert timeline.makespan_s >= plan.step_times()(load) / 100
