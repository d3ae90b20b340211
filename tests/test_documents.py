"""What README, guide and contributing name exists, and the first example of README runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "docs/guide.md",
    "raymoe/bench/RESULTS.md",
    ".github/CONTRIBUTING.md",
]
PATH = re.compile(r"`((?:raymoe|tests|native|examples|schedule|runtime|model|engine|data)/[^` ]+)`")


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_readme_is_short_and_shows_a_picture_early() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1600
    assert "```mermaid" in "\n".join(text.splitlines()[:60])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    document = ROOT / name
    text = document.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    paths = PATH.findall(text)
    places = (ROOT, ROOT / "raymoe")
    missing = [path for path in paths if not any(list(place.glob(path)) for place in places)]
    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_examples_are_python(name: str) -> None:
    for block in python_blocks((ROOT / name).read_text()):
        compile(block, name, "exec")


@pytest.mark.ray
def test_the_first_example_of_readme_runs(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    code = python_blocks((ROOT / "README.md").read_text())[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 5
    example.write_text(code)
    # Not a cluster that some other process has started, or left behind.
    done = subprocess.run(
        [sys.executable, example], env=os.environ | {"RAY_ADDRESS": "local"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2024-03-28" in done.stdout
