"""Subjects of commits are `area: verb what`, as CONTRIBUTING.md asks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECKER = ROOT / ".github" / "check_subject.py"
FIRST = "a82c78aab5ee47526f0d79f98d16e635a0ff2313"  # the rule is for what came after it

spec = importlib.util.spec_from_file_location("check_subject", CHECKER)
assert spec is not None
assert spec.loader is not None
check_subject = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_subject)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_subjects_of_commits_follow_the_rule() -> None:
    try:
        found = git("merge-base", "--is-ancestor", FIRST, "HEAD")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if found.returncode:
        pytest.skip(
            f"commit {FIRST[:7]} is not in the history that is here: {found.stderr.strip()}"
        )
    subjects = git("log", "--format=%s", f"{FIRST}..HEAD").stdout.splitlines()
    problems = {subject: check_subject.find_problem(subject) for subject in subjects}
    assert not {subject: problem for subject, problem in problems.items() if problem}


@pytest.mark.parametrize(
    "subject",
    [
        "schedule: add VSLPipe",
        "README: say what was not tried",
        "engine, data: feed rows as they come",
        "Merge branch 'docs'",
        "tests: " + "keep " + "x" * 60,
    ],
)
def test_good_subjects_pass(subject: str) -> None:
    assert check_subject.find_problem(subject) is None


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("", "is not"),
        ("Add VSLPipe", "is not"),
        ("schedule: VSLPipe", "is not"),
        ("schedule:add VSLPipe", "is not"),
        ("Schedule: add VSLPipe", "is not"),
        ("schedule: added VSLPipe", "imperative"),
        ("schedule: adding VSLPipe", "imperative"),
        ("engine: a row that comes late", "a verb"),
        ("engine: add a row.", "period"),
        ("tests: " + "keep " + "x" * 61, "73 characters"),
    ],
)
def test_bad_subjects_are_named(subject: str, problem: str) -> None:
    assert problem in check_subject.find_problem(subject)


def test_the_hook_reads_the_first_line_of_a_message(tmp_path: Path) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    for text, code in (("# branch\n\ndocs: add a guide\n\nBody.", 0), ("Added a guide\n", 1)):
        message.write_text(text)
        done = subprocess.run([sys.executable, CHECKER, message], capture_output=True, check=False)
        assert done.returncode == code, done.stderr
