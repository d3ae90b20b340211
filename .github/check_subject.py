"""Check the subjects of commits: `area: verb what`, at most 72 characters.

As a commit-msg hook:  python .github/check_subject.py .git/COMMIT_EDITMSG
For pushed commits:    python .github/check_subject.py main..HEAD
"""

import re
import subprocess
import sys
from pathlib import Path

MAX_LENGTH = 72
SUBJECT = re.compile(r"(README|[a-z0-9][\w./+-]*)(, [a-z0-9][\w./+-]*)*: (?P<first>\S+)( \S+)+")
MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
NO_VERBS = {"a", "an", "as", "for", "from", "in", "it", "its", "no", "of", "on", "the", "to"}
NO_IMPERATIVE = re.compile(r"\w+(?<!e)ed|\w+ing", re.ASCII)
IMPERATIVES = {"bring", "embed", "ping", "shed", "string"}


def find_problem(subject: str) -> str | None:
    """Return what is wrong with a subject, or None."""
    if subject.startswith(MADE_BY_GIT):
        return None
    if len(subject) > MAX_LENGTH:
        return f"has {len(subject)} characters; at most {MAX_LENGTH}"
    match = SUBJECT.fullmatch(subject)
    if match is None:
        return "is not `area: verb what`, with an area in lower case and single spaces"
    first = match["first"]
    if first in NO_VERBS:
        return f"begins with {first!r}; begin with a verb: add, fix, keep ..."
    if NO_IMPERATIVE.fullmatch(first) and first not in IMPERATIVES:
        return f"begins with {first!r}; use the imperative: add, not added or adding"
    return "ends with a period" if subject.endswith(".") else None


def read_subjects(source: str) -> list[str]:
    """Return the subjects of a range of revisions, or the one in the file of a message."""
    if Path(source).is_file():
        lines = Path(source).read_text(encoding="utf-8").splitlines()
        return next(([line] for line in lines if line.strip() and not line.startswith("#")), [""])
    command = ["git", "log", "--format=%s", source, "--"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def main(source: str) -> int:
    """Print each subject with a problem; the exit code is 1 if there is one."""
    problems = [(subject, find_problem(subject)) for subject in read_subjects(source)]
    for subject, problem in problems:
        if problem:
            sys.stderr.write(f"subject {subject!r} {problem}\n")
    return int(any(problem for _, problem in problems))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
