"""An operator tells how it does from before its engine is there until after its end."""

import dataclasses
import json
import time

import pyarrow as pa
import pytest

from raymoe.data import generator as generators
from raymoe.data import observer as observers
from raymoe.data.generator import MoEGenerator
from raymoe.data.observer import MAX_STEPS, TypicalStep
from raymoe.data.status import read_status
from raymoe.engine.accuracy import MeasuredStep
from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError, ExecutionError
from raymoe.plan.work import StepLoad
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.schedule.timeline import Span, Timeline
from tests.unit.data.statuses import passed, planned
from tests.unit.engine.fakes import FakeRunner, fake_parts, small_policy

TABLE = pa.table({"prompt": ["one", "two", "", "four"]})


@pytest.fixture
def make(tokenizer_directory, tmp_path, monkeypatch):
    """Makes operators around the checksum model that look at it all the time."""
    before = {"load": lambda: None, "pass": lambda _inputs: None}
    made = []

    def load(_source, config):
        before["load"]()
        runner = FakeRunner(64, before["pass"])
        parts = fake_parts(runner, small_policy(), directory=tokenizer_directory)
        return Engine(parts, dataclasses.replace(config, linger_s=0.0))

    def make(**hooks):
        before.update(hooks)
        made.append(
            MoEGenerator(
                "models/tiny",
                sampling_params={"max_tokens": 4, "temperature": 0.0},
                status_dir=tmp_path / "status",
            )
        )
        return made[-1]

    monkeypatch.setattr(generators, "_load_engine", load)
    monkeypatch.setattr(observers, "SAMPLE_EVERY_S", 0.005)
    monkeypatch.setattr(observers, "WRITE_EVERY_S", 0.01)
    yield make
    for operator in made:
        operator.close()


def only_actor(tmp_path):
    files = read_status(tmp_path / "status")
    assert files.unreadable == ()
    (status,) = files.actors
    return status


def test_the_last_status_has_all_rows_and_what_the_engine_did(make, tmp_path):
    operator = make()
    operator(TABLE)
    operator.close()
    status = only_actor(tmp_path)
    assert (status.state, status.model) == ("ended", "models/tiny")
    assert (status.rows.num_rows, status.rows.num_error_rows) == (4, 1)
    assert status.rows.errors == (("ValueError", 1),)
    assert status.rows.error_groups[0].text().startswith("ValueError: column 'prompt' is empty")
    assert status.engine.num_finished_rows == 3  # the empty one never came so far
    assert status.engine.num_generated_tokens == 12
    assert status.engine.num_live_sequences == 0
    assert status.history[-1][1:4] == (4.0, float(status.engine.num_prompt_tokens), 12.0)


def test_rows_of_an_idle_actor_are_told_before_it_ends(make, tmp_path, monkeypatch):
    monkeypatch.setattr(observers, "WRITE_EVERY_S", 3600.0)
    operator = make()
    operator(TABLE)
    deadline_s = time.monotonic() + 60
    while only_actor(tmp_path).rows.num_rows < 4:
        assert time.monotonic() < deadline_s
    assert only_actor(tmp_path).state == "running"
    assert only_actor(tmp_path).engine.num_finished_rows == 3


def test_while_a_model_loads_and_while_it_runs_the_status_says_so(make, tmp_path):
    seen = []

    def look(*_):
        while not seen or seen[-1] not in {"loading", "running"}:
            files = read_status(tmp_path / "status")
            seen.extend(status.state for status in files.actors[:1])

    def look_again(*_):
        while seen[-1] != "running":
            seen.append(read_status(tmp_path / "status").actors[0].state)

    operator = make(load=look, **{"pass": look_again})
    assert seen[-1] == "loading"
    operator(TABLE)
    assert seen[-1] == "running"


def test_a_model_that_cannot_be_loaded_leaves_the_reason(make, tmp_path):
    def fail():
        raise ConfigError("no such model")

    with pytest.raises(ConfigError):
        make(load=fail)
    status = only_actor(tmp_path)
    assert (status.state, status.reason) == ("failed", "ConfigError: no such model")


def test_an_engine_that_breaks_leaves_the_reason(make, tmp_path):
    def fail(_inputs):
        raise RuntimeError("out of luck")

    operator = make(**{"pass": fail})
    with pytest.raises(ExecutionError):
        operator(TABLE)
    operator.close()
    status = only_actor(tmp_path)
    assert status.state == "failed"
    assert "out of luck" in status.reason


def test_a_disk_that_is_full_costs_the_status_and_no_row(make, tmp_path, monkeypatch, caplog):
    def refuse(_path, _record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(observers, "write_record", refuse)
    operator = make()
    assert operator(TABLE).num_rows == 4
    operator.close()
    warnings = [one for one in caplog.records if "cannot be written" in one.getMessage()]
    assert len(warnings) == 1


def test_the_default_lies_beside_the_journal(tmp_path):
    assert generators._status_beside(tmp_path / "a.journal") == tmp_path / "a.status"
    (tmp_path / "file").write_text("x")
    assert generators._status_beside(tmp_path / "file" / "b.journal") is None


def measured(seconds, **load):
    task = Task(op=Op.PRE, layer=0, part=0, resource=Resource.CPU)
    return MeasuredStep(StepLoad(**load), Timeline("t", (Span(task, 0.0, seconds),)))


def test_a_typical_pass_is_of_the_most_frequent_kind_and_of_median_length():
    typical = TypicalStep()
    assert typical.choose() is None
    typical.see(None)
    typical.see(measured(9.0, prompt_tokens=100))
    for number in range(10 * MAX_STEPS):
        typical.see(measured(float(number), decode_rows=8, decode_context=10))
    chosen = typical.choose()
    assert chosen.load.decode_rows == 8
    assert 50 < chosen.timeline.makespan_s < 110
    assert len(typical._steps) <= MAX_STEPS


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_pass_is_recorded_beside_its_prediction_with_few_layers(has_gpu):
    record = passed(planned(has_gpu=has_gpu))
    assert record.measured_s == pytest.approx(1.25 * record.predicted_s)
    assert (record.num_layers, record.num_shown_layers) == (32, 2)
    layers = {layer for _, layer, *_ in record.measured}
    assert 2 <= len(layers) <= 6
    assert record.measured[-1][-1] <= record.measured_s / 4
    assert [one.name.split()[0] for one in record.placed] == ["FFN", "attention"]
    assert len(json.dumps(record.measured)) < 1 << 20
