"""What lies beside an output: never lost, never mixed, never of somebody else."""

import pytest

from raymoe.cli.resume import Remains
from raymoe.cli.storage import Location
from raymoe.data import manifest as manifests
from raymoe.data.journal import RowJournal
from raymoe.errors import ConfigError
from tests.unit.cli.places import remote
from tests.unit.data.jobs import made
from tests.unit.data.journals import key_of, row
from tests.unit.data.statuses import actor, job, write


@pytest.fixture(params=["out", "out.jsonl"])
def remains(request, tmp_path):
    return Remains.of(Location.local(tmp_path / request.param))


def run(remains, manifest, *, is_killed=False, **how):
    """What the command does, and an actor in it."""
    how = {"resume": False, "overwrite": False, **how}
    remains.check(manifest, **how)
    remains.prepare(manifest, resume=how["resume"])
    journal = RowJournal(remains.journal)
    for number in range(3):
        journal.append(key_of(number), row(number))
    journal.close()
    if not is_killed:
        remains.finish()
    return journal


def names(remains):
    return sorted(path.name for path in remains.output.local_path.parent.iterdir())


def test_a_finished_run_leaves_its_manifest_and_nothing_else(remains):
    run(remains, made())
    assert names(remains) == [f"{remains.output.name}.manifest.json"]
    run(remains, made(), resume=True)
    assert names(remains) == [f"{remains.output.name}.manifest.json"]
    assert manifests.read(remains.manifest.local_path) == made()


def test_a_killed_run_is_neither_repeated_nor_forgotten_unless_told_so(remains):
    run(remains, made(), is_killed=True)
    with pytest.raises(ConfigError, match=r"a run that was not finished; add --resume .*overwrite"):
        run(remains, made())
    assert run(remains, made(), is_killed=True, resume=True).contents.num_rows == 3
    assert run(remains, made(seed=4), overwrite=True).contents.num_rows == 0
    assert manifests.read(remains.manifest.local_path).seed == 4


def test_a_run_that_died_before_its_first_row_is_just_repeated(remains):
    remains.prepare(made(), resume=False)
    run(remains, made(seed=2))
    assert manifests.read(remains.manifest.local_path).seed == 2


@pytest.mark.parametrize("is_killed", [True, False])
def test_another_job_may_not_resume(remains, is_killed):
    run(remains, made(), is_killed=is_killed)
    before = names(remains)
    with pytest.raises(ConfigError, match=r"seed was 0, is 1"):
        run(remains, made(seed=1), resume=True)
    assert names(remains) == before
    assert manifests.read(remains.manifest.local_path) == made()


def test_a_driver_without_the_model_lets_the_actors_compare_and_keeps_their_manifest(remains):
    remains.check(None, resume=False, overwrite=False)
    remains.prepare(None, resume=False)
    manifests.claim(remains.journal / manifests.FILE_NAME, made())  # as an actor does
    remains.finish()
    assert manifests.read(remains.manifest.local_path) == made()
    remains.check(None, resume=True, overwrite=False)
    remains.prepare(None, resume=True)
    with pytest.raises(ConfigError, match=r"seed was 0, is 1"):
        manifests.claim(remains.journal / manifests.FILE_NAME, made(seed=1))


def test_without_a_journal_there_is_still_a_manifest(remains):
    remains.prepare(made(), resume=False, has_journal=False)
    assert names(remains) == [f"{remains.output.name}.manifest.json"]


def test_files_of_others_are_left_alone_even_to_overwrite(remains):
    remains.journal.mkdir()
    (remains.journal / "thesis.doc").write_text("x")
    with pytest.raises(ConfigError, match=r"thesis\.doc, which raymoe did not write"):
        run(remains, made(), overwrite=True)
    assert (remains.journal / "thesis.doc").exists()


@pytest.mark.parametrize("content", ["my own notes", '{"format": 1}'])
def test_a_manifest_of_something_else_is_left_alone(remains, content):
    remains.manifest.local_path.write_text(content)
    with pytest.raises(ConfigError, match=r"is no manifest of raymoe"):
        run(remains, made(), overwrite=True)
    assert remains.manifest.local_path.read_text() == content


def test_the_status_of_a_former_run_goes_with_the_next_one(remains):
    write(remains.status, job=job(), actors=[actor()])
    run(remains, made(), resume=True)
    assert list(remains.status.iterdir()) == []
    (remains.status / "thesis.doc").write_text("x")
    with pytest.raises(ConfigError, match=r"thesis\.doc, which raymoe did not write"):
        run(remains, made(), overwrite=True)


def test_the_status_of_an_output_on_an_object_store_is_beside_its_journal(tmp_path):
    output = remote(tmp_path, "out")
    assert (Remains.of(output).status, Remains.of(output).report) == (None, None)
    remains = Remains.of(output, str(tmp_path / "shared" / "job.journal"))
    assert remains.status == tmp_path / "shared" / "job.status"
    assert remains.report == tmp_path / "shared" / "job.report.html"


def test_a_page_of_others_is_not_replaced_by_a_report(remains):
    remains.report.write_text("<html>my thesis</html>")
    with pytest.raises(ConfigError, match=r"is no report of raymoe; move it away"):
        run(remains, made(), overwrite=True)
    assert remains.report.name == f"{remains.output.name}.report.html"


def test_a_link_or_a_file_in_the_place_of_the_journal_is_refused(remains, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    remains.journal.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a directory"):
        run(remains, made())
    remains.journal.unlink()
    remains.journal.write_text("x")
    with pytest.raises(ConfigError, match="is not a directory"):
        run(remains, made())


def test_on_a_store_the_manifest_is_beside_the_output_and_there_is_no_journal(tmp_path):
    remains = Remains.of(remote(tmp_path, "out"))
    assert remains.journal is None
    for resume in (False, True):
        remains.check(made(), resume=resume, overwrite=False)
        remains.prepare(made(), resume=resume)
        remains.finish()
    assert [one.name for one in remains.output.at("bucket").entries()] == ["out.manifest.json"]
    with pytest.raises(ConfigError, match=r"store://bucket/out\.manifest\.json .* was 0, is 1"):
        remains.check(made(seed=1), resume=True, overwrite=False)
    remains.check(made(seed=1), resume=False, overwrite=True)
    remains.prepare(made(seed=1), resume=False)
    assert manifests.parse(remains.manifest.read_bytes(), where="").seed == 1


def test_on_a_store_a_journal_is_where_it_is_told(tmp_path):
    output = remote(tmp_path, "out")
    remains = Remains.of(output, str(tmp_path / "journal"))
    run(remains, made(), is_killed=True)
    assert manifests.read(tmp_path / "journal" / manifests.FILE_NAME) == made()
    with pytest.raises(ConfigError, match="a run that was not finished"):
        run(remains, made())
    assert run(remains, made(), resume=True).contents.num_rows == 3
    assert not (tmp_path / "journal").exists()


def test_a_journal_is_neither_among_the_rows_nor_on_a_store(tmp_path):
    with pytest.raises(ConfigError, match="is in the output"):
        Remains.of(Location.local(tmp_path / "out"), str(tmp_path / "out" / "journal"))
    with pytest.raises(ConfigError, match="a journal grows row by row"):
        Remains.of(Location.local(tmp_path / "out"), "s3://jobs/journal?region=us-east-1")
