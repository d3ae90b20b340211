"""The examples of other libraries' tables: short, with the same three rows, and each one runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import raymoe

EXAMPLES = Path(__file__).parents[3] / "examples"
ANSWERS = {
    "date: 5 March 2024 ->": "2024-03-05",
    "amount: EUR 1.234,50 ->": "1234.50 EUR",
    "name: Dr. Ada B. Lovelace ->": "Lovelace, Ada",
}
NEEDS = {
    "pandas_notebook": "pandas",
    "huggingface_datasets": "datasets",
    "daft_rows": "daft",
    "datatrove_endpoint": "datatrove.pipeline.inference.run_inference",
}


@pytest.mark.parametrize("name", NEEDS)
def test_the_examples_are_short_and_have_the_same_rows(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.count("\n") < 30
    assert all(text.count(f'"{prompt}"') == 1 for prompt in ANSWERS)


def run(name, *arguments):
    pytest.importorskip(NEEDS[name], exc_type=ImportError)
    root = str(Path(raymoe.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "pandas_notebook",
        pytest.param("huggingface_datasets", marks=pytest.mark.slow),
        pytest.param("daft_rows", marks=pytest.mark.slow),
    ],
)
def test_the_example_prints_the_answer_beside_each_row(name):
    lines = run(name).splitlines()
    for prompt, answer in ANSWERS.items():
        assert any(prompt in line and answer in line for line in lines)


@pytest.mark.slow
def test_datatrove_gets_its_answers_from_the_server(tmp_path):
    served = pytest.importorskip("tests.integration.test_serve").served
    with served(tmp_path / "serve") as (_, url):
        run("datatrove_endpoint", url.removesuffix("/v1"), tmp_path / "answers")
    written = "".join(path.read_text() for path in (tmp_path / "answers").iterdir())
    for prompt, answer in ANSWERS.items():
        assert prompt in written
        assert f'"text":"{answer}"' in written
