"""What a command does before it starts Ray."""

import io
import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from raymoe.assets import demo_model_path
from raymoe.cli import pipeline
from raymoe.cli.generate import how_to_go_on
from raymoe.cli.pipeline import (
    PROMPT_COLUMNS,
    RAY_TOKEN_VARIABLE,
    Job,
    JobWatch,
    _dataset,
    _ensure_token,
    describe_difference,
    describe_kept,
)
from raymoe.cli.sources import open_source
from raymoe.cli.stopping import Stopped
from raymoe.cli.storage import Location
from raymoe.cli.writers import ParquetWriter, RunStats
from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.journal import num_recorded_rows, pack_record
from raymoe.data.status import read_status
from raymoe.specs.hardware import HardwareSpec


@pytest.fixture
def variables(monkeypatch):
    monkeypatch.setenv(RAY_TOKEN_VARIABLE, "")  # so that the test's end restores it
    for name in (RAY_TOKEN_VARIABLE, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("home", ["/proc/none", "/dev/null"])
def test_without_a_home_to_write_to_the_token_of_ray_is_in_the_environment(home, variables, caplog):
    variables.setenv("HOME", home)
    with caplog.at_level(logging.WARNING):
        _ensure_token()
    (record,) = caplog.records
    assert "no home to write to ([Errno" in record.message
    assert len(os.environ[RAY_TOKEN_VARIABLE]) == 64


def test_elsewhere_ray_writes_its_token_as_always(variables, tmp_path):
    variables.setenv("HOME", str(tmp_path))
    _ensure_token()
    assert RAY_TOKEN_VARIABLE not in os.environ
    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        variables.setenv("HOME", "/proc/none")
        variables.setenv(name, "disabled")
        _ensure_token()
        assert RAY_TOKEN_VARIABLE not in os.environ


def make_job(**fields):
    given = {"source": SimpleNamespace(num_rows=2000), "written": None, "journal_dir": None}
    return SimpleNamespace(**given | {"id_column": "id"} | fields)


def write_journal(directory, *, name="rows-a.journal", keys, damage=b""):
    directory.mkdir(exist_ok=True)
    records = [pack_record(key.to_bytes(16, "big"), b"row") for key in keys]
    (directory / name).write_bytes(b"raymoej1" + b"".join(records) + damage)


def test_a_job_whose_input_lost_rows_says_so():
    job = SimpleNamespace(num_rows=2000)
    assert describe_difference(job, RunStats(total_rows=2000, num_rows=2000)) == ""
    said = describe_difference(job, RunStats(total_rows=2000, num_rows=1900))
    assert "had 2,000 rows" in said
    assert "1,900 were read" in said
    assert "--resume" in said


def test_what_a_stopped_job_keeps_is_counted(tmp_path):
    journal = tmp_path / "out.journal"
    stats = RunStats(total_rows=2000, num_rows=100)
    assert describe_kept(make_job(), stats) == "100 of 2,000 rows are safe"
    written = SimpleNamespace(num_rows=1000)
    assert describe_kept(make_job(written=written), stats) == "1,100 of 2,000 rows are safe"
    assert describe_kept(make_job(journal_dir=journal), stats) == "100 of 2,000 rows are safe"
    write_journal(journal, keys=range(120), damage=b"half a record")
    write_journal(journal, name="rows-b.journal", keys=range(110, 140))
    assert num_recorded_rows(journal) == 140
    text = "at least 140 of 2,000 rows are safe: 100 written, 40 more in the journal"
    assert describe_kept(make_job(journal_dir=journal), stats) == text
    without_ids = make_job(journal_dir=journal, id_column=None)
    assert describe_kept(without_ids, stats) == text


def test_how_to_go_on_is_a_command_that_a_shell_takes():
    given = ["--model", "my model", "--overwrite", "--output", "out"]
    text = how_to_go_on(make_job(), given)
    assert text == "to go on: raymoe generate --model 'my model' --output out --resume"
    assert how_to_go_on(make_job(id_column=None), given) == text


def watched(directory):
    return JobWatch(directory, RunStats(total_rows=1), name="job", model="m")


def test_a_stopped_job_has_not_failed(tmp_path):
    def status_after(error):
        with pytest.raises(type(error)), watched(tmp_path):
            raise error
        job = read_status(tmp_path).job
        return job.state, job.reason

    assert status_after(Stopped(signal.SIGTERM)) == ("stopped", "stopped by SIGTERM")
    assert status_after(ValueError("why")) == ("failed", "why")


def test_the_prediction_at_the_start_is_kept_for_the_report(tmp_path, monkeypatch):
    """The report shows what the terminal showed, to the letter."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "date: 3 May 2021 ->"}\n' * 50)
    rates = HardwareSpec(
        name="given", num_cores=2, host_memory_bytes=4 << 30, host_bytes_per_s=1e10,
        host_flop_per_s=1e11,
    )  # fmt: skip
    job = Job(
        model=str(demo_model_path()), source=open_source(str(source), id_column=None),
        writer=ParquetWriter(location=Location.local(tmp_path / "out")),
        options={"sampling_params": SamplingParams(max_tokens=8), **PROMPT_COLUMNS},
        engine_config=EngineConfig(hardware=rates, device="cpu"),
    )  # fmt: skip
    monkeypatch.setattr(pipeline, "MoEGenerator", lambda table: table)
    dataset = SimpleNamespace()
    dataset.repartition = dataset.map_batches = lambda *_, **__: dataset
    monkeypatch.setattr(type(job.source), "dataset", lambda _: dataset)
    noted, console = {}, Console(width=1000, record=True, file=io.StringIO())
    watch = SimpleNamespace(note=noted.__setitem__)
    _dataset(job, watch, None, console)
    assert noted["predicted"].startswith("about 11 s to load, ")
    assert f"predicted: {noted['predicted']}; " in console.export_text()


def test_ray_starts_in_an_empty_directory_that_lasts_as_long_as_it(tmp_path, monkeypatch):
    """Its workers look for packages there, before all others."""
    (tmp_path / "cupy.py").touch()
    monkeypatch.chdir(tmp_path)
    places = []
    monkeypatch.setattr(pipeline, "_ensure_token", lambda: None)
    monkeypatch.setattr(pipeline, "listen", lambda: None)
    monkeypatch.setattr(pipeline, "configure_data_context", lambda **_: SimpleNamespace())
    monkeypatch.setattr(pipeline, "_start", lambda **_: places.append(Path.cwd()))
    monkeypatch.setattr(pipeline.ray, "shutdown", lambda: places.append(places[0]))
    with pipeline.running_ray(preserve_order=True, verbose=True):
        assert Path.cwd() == tmp_path
        assert places[0] != tmp_path
        assert not [*places[0].iterdir()]
    assert len(places) == 2
    assert not places[0].exists()
