"""What lies beside an output: never lost, never mixed, never of somebody else."""

import os

import pytest

from raymoe.cli.resume import ResumeState
from raymoe.cli.storage import Location
from raymoe.data import manifest as manifests
from raymoe.data.journal import RowJournal
from raymoe.data.quarantine import in_flight_files
from raymoe.engine.outputs import Generation
from raymoe.errors import ConfigError
from tests.unit.cli.places import remote
from tests.unit.data.jobs import made
from tests.unit.data.journals import key_of, row
from tests.unit.data.statuses import actor, job, write


@pytest.fixture(params=["out", "out.jsonl"])
def resume_state(request, tmp_path):
    return ResumeState.of(Location.local(tmp_path / request.param))


def run(resume_state, manifest, *, is_killed=False, **how):
    """What the command does, and an actor in it."""
    how = {"resume": False, "overwrite": False, **how}
    resume_state.check(manifest, **how)
    resume_state.prepare(manifest, resume=how["resume"])
    journal = RowJournal(resume_state.journal)
    for number in range(3):
        journal.append(key_of(number), row(number))
    journal.close()
    if not is_killed:
        resume_state.finish()
    return journal


def names(resume_state):
    return sorted(path.name for path in resume_state.output.local_path.parent.iterdir())


def test_a_finished_run_leaves_its_manifest_and_nothing_else(resume_state):
    before = os.umask(0o022)
    run(resume_state, made())
    os.umask(before)
    assert resume_state.manifest.local_path.stat().st_mode & 0o777 == 0o600
    assert names(resume_state) == [f"{resume_state.output.name}.manifest.json"]
    run(resume_state, made(), resume=True)
    assert names(resume_state) == [f"{resume_state.output.name}.manifest.json"]
    assert manifests.read(resume_state.manifest.local_path) == made()


def test_a_killed_run_is_neither_repeated_nor_forgotten_unless_told_so(resume_state):
    run(resume_state, made(), is_killed=True)
    with pytest.raises(ConfigError, match=r"a run that was not finished; add --resume .*overwrite"):
        run(resume_state, made())
    assert run(resume_state, made(), is_killed=True, resume=True).contents.num_rows == 3
    assert run(resume_state, made(seed=4), overwrite=True).contents.num_rows == 0
    assert manifests.read(resume_state.manifest.local_path).seed == 4


def test_a_run_that_died_before_its_first_row_is_just_repeated(resume_state):
    resume_state.prepare(made(), resume=False)
    run(resume_state, made(seed=2))
    assert manifests.read(resume_state.manifest.local_path).seed == 2


@pytest.mark.parametrize("is_killed", [True, False])
def test_another_job_may_not_resume(resume_state, is_killed):
    run(resume_state, made(), is_killed=is_killed)
    before = names(resume_state)
    with pytest.raises(ConfigError, match=r"seed was 0, is 1"):
        run(resume_state, made(seed=1), resume=True)
    assert names(resume_state) == before
    assert manifests.read(resume_state.manifest.local_path) == made()


def test_a_driver_without_the_model_lets_the_actors_compare_and_keeps_their_manifest(resume_state):
    resume_state.check(None, resume=False, overwrite=False)
    resume_state.prepare(None, resume=False)
    manifests.claim(resume_state.journal / manifests.FILE_NAME, made())  # as an actor does
    resume_state.finish()
    assert manifests.read(resume_state.manifest.local_path) == made()
    resume_state.check(None, resume=True, overwrite=False)
    resume_state.prepare(None, resume=True)
    with pytest.raises(ConfigError, match=r"seed was 0, is 1"):
        manifests.claim(resume_state.journal / manifests.FILE_NAME, made(seed=1))


def test_without_a_journal_there_is_still_a_manifest(resume_state):
    resume_state.prepare(made(), resume=False, has_journal=False)
    assert names(resume_state) == [f"{resume_state.output.name}.manifest.json"]


def test_files_of_others_are_left_alone_even_to_overwrite(resume_state):
    resume_state.journal.mkdir()
    (resume_state.journal / "thesis.doc").write_text("x")
    with pytest.raises(ConfigError, match=r"thesis\.doc, which raymoe did not write"):
        run(resume_state, made(), overwrite=True)
    assert (resume_state.journal / "thesis.doc").exists()


@pytest.mark.parametrize("content", ["my own notes", '{"format": 1}'])
def test_a_manifest_of_something_else_is_left_alone(resume_state, content):
    resume_state.manifest.local_path.write_text(content)
    with pytest.raises(ConfigError, match=r"is no manifest of raymoe"):
        run(resume_state, made(), overwrite=True)
    assert resume_state.manifest.local_path.read_text() == content


def test_the_status_of_a_former_run_goes_with_the_next_one(resume_state):
    write(resume_state.status, job=job(), actors=[actor()])
    run(resume_state, made(), resume=True)
    assert list(resume_state.status.iterdir()) == []
    (resume_state.status / "thesis.doc").write_text("x")
    with pytest.raises(ConfigError, match=r"thesis\.doc, which raymoe did not write"):
        run(resume_state, made(), overwrite=True)


def test_the_status_of_an_output_on_an_object_store_is_beside_its_journal(tmp_path):
    output = remote(tmp_path, "out")
    assert (ResumeState.of(output).status, ResumeState.of(output).report) == (None, None)
    resume_state = ResumeState.of(output, str(tmp_path / "shared" / "job.journal"))
    assert resume_state.status == tmp_path / "shared" / "job.status"
    assert resume_state.report == tmp_path / "shared" / "job.report.html"


def test_a_page_of_others_is_not_replaced_by_a_report(resume_state):
    resume_state.report.write_text("<html>my thesis</html>")
    with pytest.raises(ConfigError, match=r"is no report of raymoe; move it away"):
        run(resume_state, made(), overwrite=True)
    assert resume_state.report.name == f"{resume_state.output.name}.report.html"


def test_a_link_or_a_file_in_the_place_of_the_journal_is_refused(resume_state, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    resume_state.journal.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a directory"):
        run(resume_state, made())
    resume_state.journal.unlink()
    resume_state.journal.write_text("x")
    with pytest.raises(ConfigError, match="is not a directory"):
        run(resume_state, made())


def test_on_a_store_the_manifest_is_beside_the_output_and_there_is_no_journal(tmp_path):
    resume_state = ResumeState.of(remote(tmp_path, "out"))
    assert resume_state.journal is None
    for resume in (False, True):
        resume_state.check(made(), resume=resume, overwrite=False)
        resume_state.prepare(made(), resume=resume)
        resume_state.finish()
    assert [one.name for one in resume_state.output.at("bucket").entries()] == ["out.manifest.json"]
    with pytest.raises(ConfigError, match=r"store://bucket/out\.manifest\.json .* was 0, is 1"):
        resume_state.check(made(seed=1), resume=True, overwrite=False)
    resume_state.check(made(seed=1), resume=False, overwrite=True)
    resume_state.prepare(made(seed=1), resume=False)
    assert manifests.parse(resume_state.manifest.read_bytes(), where="").seed == 1


def test_on_a_store_a_journal_is_where_it_is_told(tmp_path):
    output = remote(tmp_path, "out")
    resume_state = ResumeState.of(output, str(tmp_path / "journal"))
    run(resume_state, made(), is_killed=True)
    assert manifests.read(tmp_path / "journal" / manifests.FILE_NAME) == made()
    with pytest.raises(ConfigError, match="a run that was not finished"):
        run(resume_state, made())
    assert run(resume_state, made(), resume=True).contents.num_rows == 3
    assert not (tmp_path / "journal").exists()


def test_a_journal_is_not_among_the_rows(tmp_path):
    with pytest.raises(ConfigError, match="is in the output"):
        ResumeState.of(Location.local(tmp_path / "out"), str(tmp_path / "out" / "journal"))
    with pytest.raises(ConfigError, match="--journal s3://jobs/a has options behind a question"):
        ResumeState.of(Location.local(tmp_path / "out"), "s3://jobs/a?region=us-east-1")


def test_rows_with_errors_and_rows_that_ended_actors_are_forgotten(resume_state):
    resume_state.forget_errors()  # there is no journal yet
    run(resume_state, made(), is_killed=True)
    journal = RowJournal(resume_state.journal)
    journal.append(key_of(7), Generation(finish_reason="error", error="DecodeError: x"))
    journal.close()
    (resume_state.journal / "death-1.rows").write_bytes(b"raymoei1")
    resume_state.forget_errors()
    assert in_flight_files(resume_state.journal) == []
    journal = RowJournal(resume_state.journal)
    assert journal.find([key_of(1), key_of(7)]) == [row(1), None]
    journal.close()
