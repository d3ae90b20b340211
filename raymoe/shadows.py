"""Files that hide a package: a raymoe.py or torch.py beside what is run."""

import sys
from collections.abc import Iterable
from pathlib import Path

NAMES = (
    "raymoe", "ray", "torch", "numpy", "pyarrow", "transformers", "tokenizers", "safetensors",
    "huggingface_hub", "jinja2", "jsonschema", "llguidance", "numba", "triton",
)  # fmt: skip


def find_shadow(directories: Iterable[Path]) -> str | None:
    """Return which file in the directories hides which package, and what to do; None if none."""
    for directory in directories:
        for name in NAMES:
            path = directory / f"{name}.py"
            if path.is_file():
                return (
                    f"{path} hides the package {name!r}: Python, and the workers of Ray, look for "
                    "packages in this directory first. Rename the file, or run in another directory"
                )
    return None


def first_directory() -> list[Path]:
    """Return the directory in which this process looks for packages first: that of its script."""
    return [Path(sys.path[0] or Path.cwd())] if sys.path else []


def directories_of_workers() -> list[Path]:
    """Return the directories in which the workers of Ray look for packages first."""
    return [*first_directory(), Path.cwd()]
