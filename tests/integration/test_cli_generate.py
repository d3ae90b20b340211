"""`raymoe generate` as users run it: files in, files out, exit codes."""

import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raymoe
from raymoe.assets import demo_model_path
from raymoe.cli import generate as generate_command
from raymoe.cli import run
from raymoe.cli.resume import ResumeState
from raymoe.cli.storage import Location
from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.manifest import Manifest
from raymoe.data.status import read_status
from raymoe.engine.identity import ModelIdentity
from raymoe.report import is_report
from raymoe.status_view import JobView
from tests.hub import running_hub
from tests.tiny import make_checkpoint
from tests.unit.cli.test_sources import save_to_disk

COMMAND = [sys.executable, "-c", "from raymoe.cli import main; main()"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def generate(*arguments):
    return raymoe_command("generate", *arguments)


def raymoe_command(*arguments):
    """Run the command in a process of its own, as it starts and ends a Ray."""
    environment = {**os.environ, "PYTHONPATH": str(Path(raymoe.__file__).parents[1])}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
        check=False,
    )


def write_lines(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def leave_parts(directory, rows):
    """What a run leaves that is killed while it writes its last part."""
    directory.mkdir()
    (directory / "part-000000-0a.jsonl").touch()
    write_lines(directory / "part-000001-0a.jsonl", *map(json.dumps, rows))
    (directory / ".part-000002-0a.jsonl.tmp").write_text('{"id": 39, "pro')
    return directory


ANSWER = {
    "generated_text": "text",
    "generated_tokens": [5, 6, 7, 8],
    "num_input_tokens": 6,
    "num_cached_tokens": 0,
    "num_generated_tokens": 4,
    "finish_reason": "length",
    "__inference_error__": "",
}


# Lines that are no rows, and end no run: not the first, and none that resumes.
BROKEN = (
    "{broken",
    json.dumps({"prompt": "a", "deep": 0}).replace("0", "[" * 900 + "]" * 900),
    '{"\\ud800": "a"}',
    json.dumps(dict.fromkeys(map(str, range(40_000)), 0)),
)


def make_records():
    """Rows of which three have errors."""
    records = [{"id": index, "prompt": f"row {index}", "tags": [index]} for index in range(40)]
    records[3]["prompt"] = ""
    records[4]["prompt"] = 4
    records[5]["sampling_params"] = {"max_tokens": 2}
    records[6]["sampling_params"] = {"max_token": 2}
    return records


@pytest.mark.ray
def test_a_job_that_was_cut_off_ends_with_an_answer_or_a_reason_for_each_row(model, tmp_path):
    records = make_records()
    lines = [json.dumps(record) for record in records]
    source = write_lines(tmp_path / "in.jsonl", *lines[:10], *BROKEN, *lines[10:])
    written = [record | ANSWER for record in records[7:27]]
    written[1]["prompt"] = "before the edit"
    partial = leave_parts(tmp_path / "out.jsonl.partial", written)
    output = tmp_path / "out.jsonl"
    options = ("--input", source, "--output", output, "--id-column", "id", "--max-tokens", 4)
    options = ("--model", model, *options, "--ignore-eos", "--price-per-hour", 1.2)
    done = generate(*options, "--resume")
    assert done.returncode == 0, done.stderr
    assert re.search(r"plan: \d+ rows; prompts of .*\n.* predicted: ", done.stderr, re.DOTALL)
    assert "1 rows have been edited since they were written" in done.stderr
    assert "19 of 44 rows are already written" in done.stderr
    assert not partial.exists()
    rows = read_lines(output)
    broken = [row["__inference_error__"] for row in rows if row["id"] is None]
    assert len(broken) == len(BROKEN)
    for problem in ("not JSON", "nested more", "lone surrogate", "40,000 keys"):
        assert re.search(rf"{problem}.*\(.*in.jsonl, line 1[1-4]\)$", "\n".join(broken), re.M)
    found = sorted((row for row in rows if row["id"] is not None), key=lambda row: row["id"])
    assert [row["id"] for row in found] == [*range(40)]
    assert [row["prompt"] for row in found[5:]] == [f"row {index}" for index in range(5, 40)]
    assert [row["tags"] for row in found] == [[index] for index in range(40)]
    assert [row["num_generated_tokens"] for row in found[:8]] == [4, 4, 4, 0, 0, 2, 0, 4]
    assert "did you mean 'max_tokens'" in found[6]["__inference_error__"]
    kept = [row["id"] for row in found if row["generated_tokens"] == ANSWER["generated_tokens"]]
    assert kept == [7, *range(9, 27)]
    files = read_status(tmp_path / "out.jsonl.status")
    assert (files.job.state, files.unreadable) == ("finished", ())
    (actor,) = files.actors
    assert (actor.rows.num_rows, actor.engine.num_generated_tokens) == (25, 17 * 4 + 2)
    assert re.search(r"^44 rows in .*, 7 of them with errors$", done.stdout, re.MULTILINE)
    assert "did you mean 'max_tokens'" in done.stdout  # errors are told whole
    assert is_report(tmp_path / "out.jsonl.report.html")


@pytest.mark.slow
@pytest.mark.ray
def test_json_lines_come_out_with_an_answer_or_a_reason_each_once(model, tmp_path):
    records = make_records()
    lines = [json.dumps(record) for record in records]
    source = write_lines(tmp_path / "in.jsonl", *lines[:10], *BROKEN, *lines[10:])
    output = tmp_path / "out.jsonl"
    options = ("--model", model, "--input", source, "--output", output, "--id-column", "id")

    options = (*options, "--max-tokens", 4, "--ignore-eos")
    done = generate(*options, "--preserve-order", "--price-per-hour", 1.2)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    assert re.search(r"plan: \d+ rows; prompts of .*\n.* predicted: ", done.stderr, re.DOTALL)
    rows = read_lines(output)
    assert [row["id"] for row in rows] == [*range(10), *[None] * len(BROKEN), *range(10, 40)]
    assert rows[7]["tags"] == [7]
    assert [row["num_generated_tokens"] for row in rows[:8]] == [4, 4, 4, 0, 0, 2, 0, 4]
    assert "not JSON" in rows[10]["__inference_error__"]
    assert "did you mean 'max_tokens'" in rows[6]["__inference_error__"]

    check_traces(tmp_path, done)

    # As after a crash: some rows are written, a part only half; and one row has been edited.
    records[8]["prompt"] = "an edited row"
    write_lines(source, *lines[:8], json.dumps(records[8]), lines[9], *BROKEN, *lines[10:])
    partial = leave_parts(tmp_path / "out.jsonl.partial", rows[5:25])
    output.unlink()
    again = generate(*options, "--resume", "--price-per-hour", 1.2)
    assert again.returncode == 0, again.stderr
    check_totals(tmp_path, again)
    assert "1 rows have been edited since they were written" in again.stderr
    assert "19 of 44 rows are already written" in again.stderr
    assert not partial.exists()
    found = sorted(read_lines(output), key=str)
    old = rows.pop(8)
    (edited,) = [row for row in found if row not in rows]
    assert edited["generated_tokens"] != old["generated_tokens"]
    assert edited["prompt"] == "an edited row"
    assert len(found) == len(rows) + 1


def check_totals(directory, done):
    """Rows, errors, tokens and time of a job of two runs, of which the first is not whole."""
    view = JobView.of(read_status(directory / "out.jsonl.status"), time.time())
    assert (view.former.num_runs, view.former.num_rows, view.num_rows) == (1, 19, 44)
    assert (view.num_error_rows, sum(view.errors.values())) == (7, 7)
    assert view.num_generated_tokens == 36 * 4 + 2
    assert view.former.elapsed_s > 0
    assert view.cost == pytest.approx(1.2 * view.elapsed_s / 3600)
    assert re.search(r"^44 rows in .*, 7 of them with errors$", done.stdout, re.MULTILINE)
    assert f"{36 * 4 + 2} generated" in done.stdout
    assert " in 2 runs, " in done.stdout


@pytest.mark.slow
@pytest.mark.ray
def test_arranged_rows_get_the_answers_they_get_without(model, tmp_path):
    prompts = [f"{'ab'[index % 2] * 100} row {index}" for index in range(50)]
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": range(50), "prompt": [*prompts[:-1], None]}), source)
    answers = []
    for more in ((), ("--sort-by-prefix",)):
        output = tmp_path / f"out{len(more)}"
        options = ("--input", source, "--output", output, "--id-column", "id", "--batch-size", 8)
        done = generate("--model", model, *options, "--max-tokens", 3, *more)
        assert done.returncode == 0, done.stderr
        answers.append(pq.read_table(output).sort_by("id"))
    assert answers[0].equals(answers[1])


def test_rows_cannot_be_arranged_and_keep_their_order(capsys, tmp_path):
    write_lines(tmp_path / "in.jsonl", '{"prompt": "a"}')
    options = ("--model", "m", "--input", f"{tmp_path}/in.jsonl", "--output", f"{tmp_path}/out")
    assert run(["generate", *options, "--sort-by-prefix", "--preserve-order"]) == 2
    assert "--sort-by-prefix and --preserve-order contradict each other" in capsys.readouterr().err


def check_traces(directory, done):
    """What a run leaves beside its output besides the rows, for those who look later."""
    assert re.search(r"^44 rows in .*, 7 of them with errors$", done.stdout, re.MULTILINE)
    assert "did you mean 'max_tokens'" in done.stdout  # errors are told whole
    assert " USD per million tokens" in done.stdout
    assert "tokens/s" in done.stdout
    files = read_status(directory / "out.jsonl.status")
    assert (files.job.state, files.job.num_rows, files.job.num_error_rows) == ("finished", 44, 7)
    assert dict(files.job.settings)["ignore_eos"] == "True"
    assert files.unreadable == ()
    (actor,) = files.actors
    assert actor.rows.num_rows == 44
    assert actor.engine.num_generated_tokens == actor.rows.num_generated_tokens == 36 * 4 + 2
    assert [record.actor for record in files.steps] == [actor.actor]
    view = JobView.of(files, files.job.updated_unix_s)
    assert [one.state for one in view.actors] == ["ended"]  # even if Ray gave it no time to say so
    assert view.cost_per_million_tokens > 0
    report = directory / "out.jsonl.report.html"
    assert f"report: {report}" in done.stdout
    assert is_report(report)
    assert "Predicted and measured" in report.read_text()


@pytest.mark.slow
@pytest.mark.ray
def test_parquet_is_resumed_with_the_rows_that_are_missing(model, tmp_path):
    (tmp_path / "in").mkdir()
    prompts = [f"row {index}" for index in range(60)]
    ids = [f"r{index}" for index in range(60)]
    table = pa.table({"id": ids, "prompt": prompts})
    pq.write_table(table.slice(0, 45), tmp_path / "in" / "a.parquet")
    output = tmp_path / "out"
    options = ("--model", model, "--input", tmp_path / "in", "--output", output)
    options = (*options, "--id-column", "id", "--max-tokens", 3, "--num-actors", 2)
    done = generate(*options)
    assert done.returncode == 0, done.stderr
    first_parts = set(output.iterdir())
    pq.write_table(table.slice(45), tmp_path / "in" / "b.parquet")
    report = tmp_path / "out.report.html"
    report.unlink()
    again = generate(*options, "--resume", "--no-report")
    assert not report.exists()
    assert again.returncode == 0, again.stderr
    job = read_status(tmp_path / "out.status").job
    assert (job.former.num_rows, job.num_rows) == (45, 15)
    assert "45 of 60 rows are already written" in again.stderr
    new_parts = set(output.iterdir()) - first_parts
    assert sum(pq.read_metadata(part).num_rows for part in new_parts) == 15
    found = pq.read_table(output)
    assert Counter(found.column("id").to_pylist()) == Counter(ids)
    assert set(found.column("__inference_error__").to_pylist()) == {""}


def refused(capfd, *arguments):
    """Run in this process; return the exit code and the only line on stderr."""
    code = run(["generate", *map(str, arguments)])
    lines = capfd.readouterr().err.splitlines()
    return code, lines[-1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--resume", "--overwrite", "--id-column", "id"), "contradict each other"),
        (("--id-column", "key"), "no line has the key 'key'"),
        (("--prompt-column", "question"), "neither column 'question' nor 'messages' exists"),
        (("--temperature", "-1"), "temperature is -1"),
        (("--sampling-params", '{"tempereture": 1}'), "did you mean 'temperature'"),
        (("--sampling-params", "{"), "--sampling-params is not JSON"),
        (("--dtype", "int3"), "dtype is 'int3'"),
        (("--input", "absent.jsonl"), "no file that ends in"),
        (("--price-per-hour", "nan"), "--price-per-hour is nan; it takes 0 to"),
        (("--currency", "a" * 9), "--currency is 'aaaaaaaaa'; it takes a name"),
        (("--retry-errors",), "--retry-errors needs --resume"),
        (("--prompt-template", "{{ promt }}"), "column in --prompt-template 'promt'; did you mean"),
        (("--prompt-template", "x", "--prompt-column", "id"), "contradict each other"),
        (("--prompt-template", "{{ x"), "--prompt-template is no Jinja template: line 1"),
        (("--system-prompt", "@absent.txt"), "--system-prompt absent.txt: cannot be read"),
        (("--json-schema", "absent.json"), "--json-schema absent.json: cannot be read"),
        (("--output-schema", "absent.json"), "--output-schema absent.json: cannot be read"),
        (("--output-schema", "json:Absent"), "--output-schema json:Absent: module 'json' has no"),
        (("--output-schema", "absent:A"), "No module named 'absent'; it takes a file, or MODULE:"),
        (("--output-schema", "collections:Counter"), "--output-schema is a type; it takes a pydan"),
        (("--output-schema", "a.json", "--json-schema", "b.json"), "contradict each other"),
        (("--output-schema", "a.json", "--task", "embed"), "--output-schema has no meaning for"),
        (("--n", "2", "--sampling-params", '{"n": 3}'), "--n and n of --sampling-params"),
        (("--sampling-params", '{"n": 2}', "--task", "embed"), "error: --sampling-params has no"),
        (("--stop", "x", "--task", "embed"), "--stop has no meaning for --task embed"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(capfd, model, tmp_path, options, reason):
    source = write_lines(tmp_path / "in.jsonl", '{"id": 1, "prompt": "a"}')
    basic = ("--model", model, "--input", source, "--output", tmp_path / "out.jsonl")
    code, line = refused(capfd, *basic, *options)
    assert code == 2
    assert line.startswith("error: ")
    assert reason in line
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_that_is_the_input_or_not_empty_is_refused(capfd, model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", '{"id": 1, "prompt": "a"}')
    (tmp_path / "link.jsonl").symlink_to(source)
    basic = ("--model", model, "--input", source, "--output")
    assert refused(capfd, *basic, tmp_path / "link.jsonl")[0] == 2
    full = write_lines(tmp_path / "full.jsonl", "{}")
    code, line = refused(capfd, *basic, full)
    assert code == 2
    assert "already has rows" in line
    assert full.read_text() == "{}\n"
    assert len(read_lines(source)) == 1


def test_an_unfinished_run_of_another_job_is_refused_before_ray_starts(capfd, model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", '{"id": 1, "prompt": "a"}')
    resume_state = ResumeState.of(Location.local(tmp_path / "out.jsonl"))
    params = SamplingParams()
    manifest = Manifest.of(ModelIdentity.of(model), params, EngineConfig())
    resume_state.prepare(manifest, resume=False)
    (resume_state.journal / "rows-1.journal").write_bytes(b"raymoej1")
    basic = (
        "--model",
        model,
        "--input",
        source,
        "--output",
        resume_state.output,
        "--id-column",
        "id",
    )
    code, line = refused(capfd, *basic)
    assert code == 2
    assert "a run that was not finished; add --resume" in line
    for option, difference in (
        (("--seed", 3), "seed was 0, is 3"),
        (("--max-tokens", 65), "sampling_params.max_tokens was 16, is 65"),
        (("--dtype", "bfloat16"), "dtype was 'float32', is 'bfloat16'"),
    ):
        code, line = refused(capfd, *basic, "--resume", *option)
        assert code == 2
        assert difference in line
    assert not resume_state.output.exists()
    assert (resume_state.journal / "rows-1.journal").exists()


def test_a_model_that_is_none_is_refused_before_ray_starts(capfd, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", '{"id": 1, "prompt": "a"}')
    basic = ("--input", source, "--output", tmp_path / "out.jsonl")
    code, line = refused(capfd, "--model", tmp_path, *basic)
    assert code == 1
    assert "config.json" in line


def test_unknown_options_and_commands_are_bad_usage(capfd):
    assert run(["generate", "--modle", "x"]) == 2
    assert run(["generat"]) == 2
    assert run([]) == 2
    assert "generate" in capfd.readouterr().err


def test_help_and_version_load_no_heavy_library():
    script = (
        "import sys; from raymoe.cli import run; run(['--help']); run(['--version'])\n"
        "assert not {'torch', 'ray', 'pyarrow', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(raymoe.__file__).parents[1])},
        check=True,
    )
    assert raymoe.__version__ in done.stdout
    assert "demo" in done.stdout


def test_each_help_text_of_generate_is_a_sentence_and_the_first_panel_has_five_options(
    capfd, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    parameters = inspect.signature(generate_command.run).parameters.values()
    options = [one.annotation.__metadata__[0] for one in parameters if one.name != "context"]
    for option in options:
        assert re.fullmatch(r"[A-Z].*\.", option.help, re.DOTALL), option.help
    panels = Counter(option.rich_help_panel for option in options)
    assert (options[0].rich_help_panel, panels["Start here"]) == ("Start here", 5)
    assert None not in panels
    assert run(["generate", "--help"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    titles = [re.match(r"╭─ ([^─]+) ─", line)[1] for line in lines if line.startswith("╭")]
    assert titles[:3] == ["Options", "Start here", "Prompts"]


def test_options_of_answers_become_sampling_parameters(tmp_path, capfd):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    given = {name: one.default for name, one in inspect.signature(generate_command.run).parameters.items()}  # fmt: skip # noqa: E501
    given |= {
        "temperature": 0.0,
        "n": 4,
        "stop": [r"\n\n", "END"],
        "json_schema": tmp_path / "schema.json",
    }
    params = generate_command._read_params(given)
    assert (params.n, params.stop) == (4, ("\n\n", "END"))
    assert json.loads(params.structured_outputs_params.json) == schema
    assert "the 4 answers of a row are equal at temperature 0" in capfd.readouterr().err
    # As typer has options that were not given.
    more = {"stop": (), "sampling_params": '{"stop": ["x"]}'}
    assert generate_command._read_params(given | more).stop == ("x",)
    capfd.readouterr()
    generate_command._read_params(given | {"temperature": 0.5})
    assert not capfd.readouterr().err


@pytest.mark.slow
def test_a_dry_run_shows_prompts_answers_and_a_prediction_and_writes_nothing(capfd, tmp_path):
    (tmp_path / "in.csv").write_text("id,day\na,1st\nb,\nc,3rd\nd,4th\n")
    before = sorted(tmp_path.rglob("*"))
    options = ("--input", tmp_path / "in.csv", "--output", tmp_path / "out", "--id-column", "id")
    options = (*options, "--prompt-template", "date: {{ day }} March 2024 ->", "--dry-run")
    options = (*options, "--max-tokens", 12, "--n", 2, "--temperature", 0.01)
    code = run(["generate", "--model", str(demo_model_path()), *map(str, options)])
    said, err = capfd.readouterr()
    assert code == 0, err
    first, second, third, rest = said.split("\n\n")
    assert re.fullmatch(
        r"row 1 of 4, id 'a'\n---- prompt of \d+ tokens\ndate: 1st March 2024 ->\n"
        r"---- answer 1 of 2 of \d+ tokens, finish_reason stop\n2024-03-01\n"
        r"---- answer 2 of 2\n2024-03-01",
        first,
    )
    assert second.endswith("error row\nValueError: prompt_template: column 'day' is null")
    assert third.startswith("row 3 of 4, id 'c'")
    assert re.search(r"plan: 8 rows; .*\n.*\n  predicted: ", rest)
    assert "nothing was written; without --dry-run 4 rows go to" in rest
    assert sorted(tmp_path.rglob("*")) == before


def test_every_command_has_help(capfd):
    for name in ("generate", "demo"):
        assert run([name, "--help"]) == 0
        assert "--output" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.ray
def test_csv_with_a_template_is_limited_resumed_and_its_errors_tried_again(tmp_path):
    source = write_lines(tmp_path / "in.csv", "id,day", "a,1st", 'b,"2nd', "c,3rd,x", "d,", "e,5th")
    output = tmp_path / "out.jsonl"
    basic = ("--model", demo_model_path(), "--input", source, "--output", output, "--id-column",
             "id", "--max-tokens", 12, "--preserve-order", "--no-report", "--n", 2)  # fmt: skip
    prompt = ("--prompt-template", "date: {{ day }} March 2024 ->")
    done = generate(*basic, *prompt, "--limit", 4)
    assert done.returncode == 0, done.stderr
    rows = read_lines(output)
    assert [row["id"] for row in rows] == ["a", None, None, "d"]
    assert rows[0]["generated_texts"] == ["2024-03-01"] * 2
    assert rows[0]["rendered_prompt"] == "date: 1st March 2024 ->"
    for row, reason in zip(rows[1:], ("line 3)", "line 4)", "column 'day' is null"), strict=True):
        assert row["__inference_error__"].endswith(reason)

    done = generate(*basic, *prompt, "--resume", "--retry-errors")
    assert done.returncode == 0, done.stderr
    assert "1 rows had an error and are generated again" in done.stderr
    assert "3 of 5 rows are already written" in done.stderr
    assert {row["id"] for row in read_lines(output)} == {"a", None, "d", "e"}
    assert len(read_lines(output)) == 5

    done = generate(
        *basic, "--prompt-template", "date: {{ day or '4th' }} March 2024 ->", "--resume"
    )
    assert done.returncode == 0, done.stderr
    assert "1 rows have been edited since they were written" in done.stderr
    texts = {row["id"]: row["generated_text"] for row in read_lines(output)}
    assert (texts["d"], texts["e"]) == ("2024-03-04", "2024-03-05")


@pytest.mark.slow
@pytest.mark.ray
def test_a_saved_dataset_is_answered_in_order_as_chats(model, tmp_path):
    table = pa.table({"id": [f"r{one}" for one in range(40)], "text": ["hello"] * 40})
    saved = save_to_disk(tmp_path / "d", table, ("data-0.arrow", "data-1.arrow"))
    basic = ("--model", model, "--input", saved, "--output", tmp_path / "out", "--id-column", "id")
    options = (*basic, "--max-tokens", 4, "--ignore-eos", "--preserve-order", "--no-report")
    prompts = ("--prompt-template", "{{ text }} {{ id }}", "--system-prompt", "Be {{ text }}.")
    for more, count in ((("--limit", 30), 30), (("--resume",), 40)):
        done = generate(*options, *prompts, *more)
        assert done.returncode == 0, done.stderr
        found = pq.read_table(tmp_path / "out")
        assert found.column("id").to_pylist() == table.column("id").to_pylist()[:count]
    assert "30 of 40 rows are already written" in done.stderr
    assert json.loads(found.column("rendered_messages")[39].as_py()) == [
        {"role": "system", "content": "Be hello."},
        {"role": "user", "content": "hello r39"},
    ]


@pytest.mark.slow
@pytest.mark.ray
def test_the_demo_answers_every_row_and_fails_below_the_accuracy_that_was_asked(tmp_path):
    output = tmp_path / "demo"
    done = raymoe_command("demo", "--rows", 80, "--output", output, "--min-accuracy", 1)
    found = pq.read_table(output / "answers")
    assert found.num_rows == 80
    assert set(found.column("__inference_error__").to_pylist()) == {""}
    texts, answers = (found.column(name).to_pylist() for name in ("generated_text", "answer"))
    num_exact = sum(text.strip() == answer for text, answer in zip(texts, answers, strict=True))
    assert f"exact match: {100 * num_exact / 80:.2f} % of 80 rows" in done.stdout
    assert done.returncode == (0 if num_exact == 80 else 1)
    assert num_exact >= 0.8 * 80


def test_a_run_that_cannot_start_leaves_the_old_output_alone(capfd, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", '{"id": 1, "prompt": "a"}')
    part = tmp_path / "out" / "part-000000.parquet"
    part.parent.mkdir()
    pq.write_table(pa.table({"id": [1]}), part)
    (tmp_path / "model").mkdir()
    basic = ("--model", tmp_path / "model", "--input", source, "--output", part.parent)
    assert refused(capfd, *basic, "--overwrite")[0] == 1
    assert part.exists()


@pytest.mark.slow
@pytest.mark.ray
def test_rows_of_the_hub_go_back_to_it_in_one_commit(model, tmp_path, monkeypatch):
    records = [{"id": index, "prompt": f"row {index}"} for index in range(20)]
    data = "".join(f"{json.dumps(record)}\n" for record in records).encode()
    files = {"main/train.jsonl": data, "main/test.jsonl": data[:30]}
    monkeypatch.chdir(tmp_path)
    with running_hub() as hub:
        for name, value in {**hub.environment(tmp_path / "home"), "HF_TOKEN": "mine"}.items():
            monkeypatch.setenv(name, value)
        hub.put("datasets/me/rows", files, token="mine", is_gated=True)
        to = hub.put("datasets/me/answers", {}, token="mine", refusals=[403])
        options = ("--model", model, "--id-column", "id", "--max-tokens", 4, "--ignore-eos",
                   "--output", "hf://datasets/me/answers/out.jsonl")  # fmt: skip
        source = "hf://datasets/me/rows"
        several = generate(*options, "--input", source)
        assert (several.returncode, "several splits: train, test;" in several.stderr) == (2, True)

        options = (*options, "--input", f"{source}?split=train")
        refused = generate(*options)
        assert (refused.returncode, "--resume sends it" in refused.stderr) == (1, True)
        assert "out.jsonl" not in to.files
        sent = generate(*options, "--resume")
        assert sent.returncode == 0, sent.stderr
        assert "20 of 20 rows are already written" in sent.stderr
        rows = [json.loads(line) for line in to.files["out.jsonl"].splitlines()]
        assert sorted(row["id"] for row in rows) == [*range(20)]
        assert {row["num_generated_tokens"] for row in rows} == {4}
        assert to.num_commits == 1
