"""README and guide: what they name exists, and the first lines of each page run."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymoe.cli import COMMANDS, load_command
from raymoe.specs.families import FAMILIES, MODEL_TYPE_ALIASES, WRAPPERS

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "guide.md"
PAGES = sorted(path.stem for path in GUIDE.parent.glob("*.md") if path != GUIDE)
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "docs/guide.md",
    *(f"docs/{name}.md" for name in PAGES),
    "raymoe/bench/RESULTS.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/README.md",
    *(f"docs/reference/{name}.md" for name in ("datasets", "engine", "errors", "plans")),
]
PATH = re.compile(r"`((?:raymoe|tests|native|examples|schedule|runtime|model|engine|data)/[^` ]+)`")
BLOCK = re.compile(r"```(python|sh)\n(.*?)```", re.DOTALL)


def python_blocks(text: str) -> list[str]:
    return [code for language, code in BLOCK.findall(text) if language == "python"]


def anchors(text: str) -> set[str]:
    """Those that GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each `raymoe ...` in blocks for the shell and between backquotes."""
    blocks = [code for language, code in BLOCK.findall(text) if language == "sh"]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    for line in [*lines, *re.findall(r"`(raymoe [^`]*)`", BLOCK.sub("", text))]:
        for command in re.findall(r"(?:^|&& )(raymoe \w.*?)(?= && |$)", line):
            yield shlex.split(command, comments=True)


def options_of(name: str) -> set[str]:
    params = load_command(name).params
    return {one for each in params for one in (*each.opts, *each.secondary_opts)}


def run_lines(language: str, code: str, directory: Path) -> str:
    """What they print, in an empty directory and with a Ray of their own."""
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    # Not a cluster that some other process has started, or left behind.
    environment = os.environ | {"RAY_ADDRESS": "local", "PATH": path}
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-ec", code]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_is_short_and_shows_a_picture_early() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1300
    assert "```mermaid" in "\n".join(text.splitlines()[:60])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    document = ROOT / name
    text = document.read_text()
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text)
    targets = [(document.parent / link if link else document, anchor) for link, anchor in links]
    assert [path for path, _ in targets if not path.exists()] == []
    assert [
        (path.name, anchor)
        for path, anchor in targets
        if anchor and anchor not in anchors(path.read_text())
    ] == []
    paths = PATH.findall(text)
    places = (ROOT, ROOT / "raymoe")
    missing = [path for path in paths if not any(list(place.glob(path)) for place in places)]
    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_examples_are_python(name: str) -> None:
    for block in python_blocks((ROOT / name).read_text()):
        compile(block, name, "exec")


@pytest.mark.slow  # imports every command
def test_commands_and_their_options_exist() -> None:
    known = {name: options_of(name) for name in COMMANDS}
    unknown, seen = [], 0
    for document in ("README.md", *(name for name in DOCUMENTS if name.startswith("docs/"))):
        for words in commands_of((ROOT / document).read_text()):
            name = words[1]
            given = words[: words.index("--")] if "--" in words else words
            options = [word.split("=")[0] for word in given if word.startswith("--")]
            seen += len(options)
            if name not in known and name not in {"COMMAND"}:
                unknown.append((document, name))
            unknown += [(document, name, one) for one in options if one not in known.get(name, ())]
    assert [one for one in unknown if one[-1] != "--help"] == []
    assert seen > 30


def test_the_guide_links_every_page() -> None:
    assert set(re.findall(r"\]\((\w+)\.md\)", GUIDE.read_text())) == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_begins_with_what_one_can_do_and_lines_that_do_it(name: str) -> None:
    title, summary, code = (GUIDE.parent / f"{name}.md").read_text().split("\n\n")[:3]
    assert title.startswith("# ")
    assert summary.endswith(".")
    assert code.startswith("```")


def test_the_page_on_models_lists_all_families() -> None:
    page = (GUIDE.parent / "models.md").read_text()
    section = page.split("## Families")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    listed = re.findall(r"`(\w+)`", "\n".join(rows))
    assert len(listed) == len(set(listed))
    known = {*FAMILIES, *WRAPPERS, *MODEL_TYPE_ALIASES}
    assert set(listed) - known == set()
    # Of a model with images, the name of its text part is not listed too.
    inner = {name for name in known if re.sub(r"_(text|thinker)$", "", name) in {*listed} - {name}}
    assert known - set(listed) - inner == set()
    assert f"{len(listed)} model types" in (ROOT / "README.md").read_text()


@pytest.mark.ray
def test_the_first_example_of_readme_runs(tmp_path: Path) -> None:
    code = python_blocks((ROOT / "README.md").read_text())[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 5
    assert "2024-03-28" in run_lines("python", code, tmp_path)


# That of clusters.md is in tests/ray/test_submitted_job.py.
PRINTED = {
    "chats": "1234.50 EUR",
    "models": "It runs",
    "nodes": "tokens/s",
    "operations": "raymoe-demo",
    "rows": "2024-03-05",
    "tasks": "2024-03-05",
}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("name", sorted(set(PAGES) - {"clusters"}))
def test_the_first_lines_of_a_page_run(name: str, tmp_path: Path) -> None:
    language, code = BLOCK.findall((GUIDE.parent / f"{name}.md").read_text())[0]
    assert PRINTED[name] in run_lines(language, code, tmp_path)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_stored_outputs_are_small(path: Path, tmp_path: Path) -> None:
    assert path.stat().st_size < 40_000
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in cells)
    assert not any(out["output_type"] == "error" for cell in cells for out in cell["outputs"])
    pytest.importorskip("ipykernel", reason="needs pip install '.[slow]'")
    run_lines("sh", f"jupyter nbconvert --to notebook --execute {path} --output-dir .", tmp_path)


EXAMPLES = {
    "generate.py": "+14155552671",
    "generate_and_judge.py": "count()",
    "quickstart.py": "2024-03-01",
}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert EXAMPLES[name] in run_lines("sh", f"python examples/{name}", tmp_path)
