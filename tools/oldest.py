"""Print constraints for pip: the oldest version that pyproject.toml allows of each dependency.

In a new virtual environment of the oldest Python, `python tools/oldest.py > oldest.txt` and `pip
install -c oldest.txt '.[test]'` install them; dependencies without a lower bound are the newest.
`pip install --upgrade '.[test]'` installs the newest ones.
"""

import itertools
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def oldest() -> Iterator[str]:
    """Yield a line for each lower bound: `torch>=2.10,<2.16` gives `torch==2.10.*`."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"].values()
    for line in itertools.chain(project["dependencies"], *extras):
        requirement = Requirement(line)
        for bound in requirement.specifier:
            if bound.operator == ">=":
                yield f"{requirement.name}=={bound.version}.*"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in oldest())
