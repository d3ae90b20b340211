"""`raymoe generate --task`: score, classify and embed from files to files."""

import json
import math
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymoe.cli import run
from raymoe.config import EngineConfig
from raymoe.data.status import read_status
from raymoe.engine.engine import Engine
from tests.tiny import make_checkpoint

FLOAT32 = EngineConfig(dtype="float32", device="cpu", num_threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def command(*arguments):
    """Run the command in a process of its own, as it starts and ends a Ray."""
    program = "from raymoe.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def write_lines(path, records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def score_options(model, directory, records):
    source = write_lines(directory / "in.jsonl", records)
    options = ("generate", "--model", model, "--input", source, "--output", directory / "out.jsonl")
    return (*options, "--id-column", "id", "--dtype", "float32", "--task", "score")


@pytest.mark.slow
@pytest.mark.ray
def test_documents_and_continuations_are_scored(model, tmp_path):
    records = [{"id": i, "continuation": f"document {i} " * (1 + i % 3)} for i in range(30)]
    records[4]["prompt"] = "2 + 2 ="
    records[4]["continuation"] = " 4"
    records[5]["continuation"] = None
    records[6]["continuation"] = [70, 71, 72]  # no text: token ids are for inputs that are all ids
    done = command(*score_options(model, tmp_path, records))
    assert done.returncode == 0, done.stderr
    rows = {row["id"]: row for row in read_lines(tmp_path / "out.jsonl")}
    assert [i for i, row in rows.items() if row["__inference_error__"]] == [5, 6]
    with Engine.from_pretrained(model, FLOAT32) as engine:
        wanted = engine.score(["2 + 2 =", None], [" 4", records[7]["continuation"]])
    for row, one in zip((rows[4], rows[7]), wanted, strict=True):
        assert row["logprob"] == pytest.approx(one.values["logprob"], rel=1e-4)
        assert row["num_scored_tokens"] == one.values["num_scored_tokens"]
        assert row["perplexity"] == pytest.approx(math.exp(-row["mean_logprob"]))
    num_read = sum(row["num_input_tokens"] for row in rows.values())
    assert f"{num_read:,} tokens read" in done.stdout
    assert "rows/s" in done.stdout
    files = read_status(tmp_path / "out.jsonl.status")
    assert files.job.task == files.actors[0].task == "score"
    assert files.actors[0].history[-1][3] >= num_read - 60  # targets of the last token are not read


@pytest.mark.slow
@pytest.mark.ray
def test_scores_are_resumed(model, tmp_path):
    records = [{"id": i, "continuation": f"document {i} " * (1 + i % 3)} for i in range(30)]
    output, options = tmp_path / "out.jsonl", score_options(model, tmp_path, records)
    assert command(*options).returncode == 0
    rows = {row["id"]: row for row in read_lines(output)}
    # The output lost rows, one row was edited, and one was added.
    write_lines(output, [row for row in rows.values() if row["id"] < 20])
    records[8]["continuation"] = "edited"
    write_lines(tmp_path / "in.jsonl", [*records, {"id": 30, "continuation": "new"}])
    again = command(*options, "--resume")
    assert again.returncode == 0, again.stderr
    assert "1 rows have been edited since they were written" in again.stderr
    assert "19 of 31 rows are already written" in again.stderr
    found = {row["id"]: row for row in read_lines(output)}
    assert sorted(found) == list(range(31))
    assert [i for i in range(30) if found[i]["logprob"] != rows[i]["logprob"]] == [8]
    other = command(*options, "--resume", "--task-options", '{"token_logprobs": true}')
    assert other.returncode == 2
    assert "task was" in other.stderr


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("suffix", ["", ".jsonl"])
def test_labels_and_embeddings_are_written(model, tmp_path, suffix):
    labels = [None, ["one", "two", "three"]] * 10
    table = pa.table({"id": range(20), "prompt": [f"row {i}" for i in range(20)], "labels": labels})
    source = tmp_path / f"in{suffix or '.parquet'}"
    if suffix:
        write_lines(source, table.to_pylist())
    else:
        pq.write_table(table, source)
    given = {"classify": {"labels": ["yes", "no"]}, "embed": {"pooling": "mean", "dimensions": 8}}
    for task, options in given.items():
        output = tmp_path / f"{task}{suffix}"
        done = command(
            "generate", "--model", model, "--input", source, "--output", output, "--task", task,
            "--task-options", json.dumps(options), "--dtype", "float32", "--id-column", "id",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows = read_lines(output) if suffix else pq.read_table(output).to_pylist()
        assert len(rows) == 20
        assert not any(row["__inference_error__"] for row in rows)
        assert all(row["labels"] == labels[row["id"]] for row in rows)
        if task == "embed":
            assert all(math.hypot(*row["embedding"]) == pytest.approx(1.0) for row in rows)
            assert {len(row["embedding"]) for row in rows} == {8}
        else:
            counts = {row["id"]: len(row["label_probabilities"]) for row in rows}
            assert counts == {i: 2 + i % 2 for i in range(20)}


@pytest.mark.parametrize(
    ("record", "options", "reason"),
    [
        ({"prompt": "a"}, ("--task", "score"), "no column 'continuation'"),
        ({"text": "a"}, ("--task", "embed"), "--prompt-column or --messages-column"),
        ({"continuation": "a", "logprob": 1}, ("--task", "score"), "names of output columns: logp"),
        ({"prompt": "a"}, ("--task", "rank"), "task is 'rank'"),
        ({"prompt": "a"}, ("--task-options", '{"stride": 3}'), "task_options belong to the tasks"),
        ({"continuation": "a"}, ("--task", "score", "--max-tokens", 3), "--max-tokens has no mean"),
        ({"continuation": "a"}, ("--task", "score", "--samples-as-rows"), "no meaning for --task"),
        ({"prompt": "a"}, ("--task", "embed", "--task-options", '{"poling": 1}'), "'pooling'"),
        (
            {"prompt": "a"},
            ("--task", "score", "--engine-config", "head=none", "--task-options",
             '{"continuation_column": "prompt"}'),
            "which only embeds",
        ),
        (
            {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}},
            ("--task", "embed"),
            "--task embed has no meaning for an OpenAI batch",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_before_ray_starts(
    capfd, model, tmp_path, record, options, reason
):
    source = write_lines(tmp_path / "in.jsonl", [record])
    basic = ("--model", model, "--input", source, "--output", tmp_path / "out.jsonl")
    assert run(["generate", *map(str, (*basic, *options))]) == 2
    assert reason in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out.jsonl").exists()
