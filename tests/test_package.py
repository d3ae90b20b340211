"""What the package says of itself is the same in each place."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from raymoe._version import __version__

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_pythons_are_those_that_wheels_are_built_for() -> None:
    build = PYPROJECT["tool"]["cibuildwheel"]["build"]
    built = [f"3.{minor}" for minor in re.findall(r"cp3(\d+)-", build)]
    listed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert listed == built
    assert PROJECT["requires-python"] == f">={built[0]}"
    tested = read_workflow(ROOT / ".github" / "workflows" / "versions.yml")["jobs"]
    assert tested["newest"]["strategy"]["matrix"]["python"] == built


def test_readme_names_the_versions_that_are_allowed() -> None:
    readme = (ROOT / "README.md").read_text()
    for name, bounds in ("Ray", "ray[data]"), ("torch", "torch"), ("transformers", "transformers"):
        (line,) = (line for line in PROJECT["dependencies"] if line.startswith(f"{bounds}>="))
        oldest, major, minor = re.findall(r">=(\d+\.\d+),<(\d+)\.(\d+)$", line)[0]
        assert f"{name} {oldest} to {major}.{int(minor) - 1}" in readme


def test_a_citation_names_authors_licence_and_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["title"] == PROJECT["name"]
    assert citation["abstract"] == PROJECT["description"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]
    assert citation["version"] == __version__


def test_an_sdist_holds_what_is_under_version_control() -> None:
    found = subprocess.run(
        ["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(f"not a checkout: {found.stderr.strip()}")
    first, *kept = PYPROJECT["tool"]["scikit-build"]["sdist"]["exclude"]
    assert first == "/*"
    names = {path.split("/")[0] for path in found.stdout.splitlines()}
    assert sorted(kept) == sorted(f"!/{name}" for name in names)


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read_workflow(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def test_pull_requests_run_what_contributors_run() -> None:
    workflow = read_workflow(ROOT / ".github" / "workflows" / "ci.yml")
    assert "pull_request" in workflow[True]  # `on`, as YAML reads it
    assert {"run": "bash .ci/run"} in workflow["jobs"]["ci"]["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_publish_only_by_hand(path: Path) -> None:
    """Secrets and tokens that write are for jobs that someone starts and the owner approves."""
    workflow = read_workflow(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        text = yaml.safe_dump(job)
        if re.search(r"secrets\.|: write|--push|gh-action-pypi-publish", text):
            assert job["environment"] == "release"
            assert "github.event_name == 'workflow_dispatch' && inputs." in job["if"]
