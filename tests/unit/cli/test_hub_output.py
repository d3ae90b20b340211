"""An output in a data set of the hub: rows are here until they are whole, then in one commit."""

import pytest

from raymoe.cli.hub_output import DIRECTORY, HubOutput
from raymoe.cli.resume import ResumeState
from raymoe.errors import ConfigError, ExecutionError
from tests.hub import used_hub

NAME = "hf://datasets/me/answers"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with used_hub(tmp_path / "hub", token="mine") as found:
        found.put("datasets/me/answers", {"questions.jsonl": b"{}\n"}, token="mine")
        yield found


def leave(output, *names):
    """Write files as a job does that has ended."""
    manifest = ResumeState.of(output.working).manifest.local_path
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text("{}")
    for name in names:
        file = output.working.child(name) if name else output.working
        file.local_path.parent.mkdir(parents=True, exist_ok=True)
        file.local_path.write_text(f"rows of {name}")


def answers(hub):
    files = hub.models["datasets/me/answers"].files
    return {name: data for name, data in files.items() if name.startswith("answers")}


def test_an_output_is_one_commit_that_replaces_the_former(hub):
    output = HubOutput.of(f"{NAME}/answers")
    output.check(resume=False, overwrite=False)
    leave(output, "part-000000-a.parquet", "part-000001-a.parquet", ".part-000002.parquet.tmp")
    assert "/commit/" in output.send()
    both = {"answers/part-000000-a.parquet": b"rows of part-000000-a.parquet",
            "answers/part-000001-a.parquet": b"rows of part-000001-a.parquet"}  # fmt: skip
    assert answers(hub) == both

    output.working.child("part-000001-a.parquet").delete()
    leave(output, "part-000002-b.parquet")
    output.send()
    assert list(answers(hub)) == ["answers/part-000000-a.parquet", "answers/part-000002-b.parquet"]
    assert hub.models["datasets/me/answers"].num_commits == 2


def test_what_is_there_is_replaced_only_when_asked(hub):
    output = HubOutput.of(f"{NAME}@main/answers.jsonl")
    leave(output, "")
    output.send()
    assert list(answers(hub)) == ["answers.jsonl"]
    output.check(resume=True, overwrite=False)
    output.check(resume=False, overwrite=True)
    with pytest.raises(ConfigError, match=r"already has 1 files on the hub; add --resume"):
        output.check(resume=False, overwrite=False)
    ResumeState.of(
        output.working
    ).manifest.delete()  # as another machine, which cannot go on with those rows
    with pytest.raises(ConfigError, match="already has 1 files on the hub"):
        output.check(resume=True, overwrite=False)


def test_a_refused_commit_leaves_the_rows_here_and_says_where(hub):
    output = HubOutput.of(f"{NAME}/answers")
    leave(output, "part-000000-a.parquet")
    hub.models["datasets/me/answers"].refusals.append(403)
    with pytest.raises(ExecutionError, match=rf"whole in .*{DIRECTORY}/me/answers/answers.*HTTP "
                       "status 403.*--resume sends it"):  # fmt: skip
        output.send()
    output.check(resume=True, overwrite=False)
    output.send()
    assert len(answers(hub)) == 1


def test_who_may_not_write_is_told_before_the_job(hub):
    with pytest.raises(ConfigError, match=r"no dataset 'me/other'.*'hf repos create me/other"):
        HubOutput.of("hf://datasets/me/other/answers").check(resume=False, overwrite=False)
    hub.models["datasets/me/answers"].is_read_only = True
    with pytest.raises(ConfigError, match=r"cannot be written: .*status 403.*check the access"):
        HubOutput.of(f"{NAME}/answers").check(resume=False, overwrite=False)


def test_an_output_is_a_place_in_a_dataset_apart_from_its_input():
    assert HubOutput.of("s3://bucket/answers") is None
    for end in ("", "/", "/answers?split=train", "/../answers", "@main"):
        with pytest.raises(ConfigError, match="name a place in the dataset, such as"):
            HubOutput.of(NAME + end)
    output = HubOutput.of(f"{NAME}/data/new")
    for given in (NAME, f"{NAME}/data", f"{NAME}?split=train"):
        with pytest.raises(ConfigError, match="lies in the input"):
            output.check_apart(given)
    for given in ("data", f"{NAME}/data/*.jsonl", f"{NAME}/old", "hf://datasets/me/other"):
        output.check_apart(given)
