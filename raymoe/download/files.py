"""The files of a model: what plans read, what holds the weights, and what is missing of it."""

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from raymoe.errors import CheckpointError
from raymoe.specs.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, weight_file_names
from raymoe.specs.other_formats import ADAPTER_FILE, ADAPTER_WEIGHTS, other_format

# Configuration and tokenizer; no pickles and no code.
SMALL_FILES = ["*.json", "tokenizer.model", "*.jinja", "*.txt"]
DOWNLOADED = ["*.safetensors", *SMALL_FILES]
# The same weights again, in the format of their publisher.
NOT_DOWNLOADED = ["*/*.safetensors", "consolidated*.safetensors"]

Check = Callable[[Path], None]


class UnreachableError(CheckpointError):
    """Files of a model cannot be brought here, for reasons that are not the model's."""


class RemoteModel(Protocol):
    """A model that is not in a directory of the user's."""

    def find(self) -> Path | None:
        """Return the local copy of the whole model; None without one. Nothing is asked for."""

    def find_files(self) -> Path | None:
        """Return the local copy of its configuration and tokenizer; None without one."""

    def fetch_files(self, check: Check) -> tuple[Path, int]:
        """Copy all but the weights, and return where, and the bytes of weights that are not there.

        Args:
            check: Is called when the configuration is there, before the rest is read.

        Raises:
            CheckpointError: There is no such model for this user, or one without safetensors.
            UnreachableError: Nobody answers.
        """

    def download(self) -> Path:
        """Copy what is missing of the model, once for all processes of this node; return where.

        Raises:
            CheckpointError: As `fetch_files`.
        """


def first_file(names: Collection[str]) -> str:
    """Return the file that says what a model is, or what an adapter is of."""
    return CONFIG_FILE if CONFIG_FILE in names else ADAPTER_FILE


def problem_of(names: Collection[str]) -> str:
    """Return what is missing of a model or an adapter with these files; "" if nothing is."""
    if CONFIG_FILE not in names:
        if ADAPTER_FILE in names:
            return ""
        return f"no config.json; {other_format(names) or 'it is no model of transformers'}"
    if SINGLE_FILE in names or INDEX_FILE in names:
        return ""
    expected = f"expected {SINGLE_FILE}, or {INDEX_FILE} and its files"
    return f"no weights in safetensors; {other_format(names) or expected}"


def is_small(file: str) -> bool:
    """Whether a file of a model is one of its configuration or tokenizer."""
    return any(fnmatchcase(file, pattern) for pattern in SMALL_FILES)


def is_downloaded(file: str) -> bool:
    """Whether a file of a repository is one of its model."""
    is_other = any(fnmatchcase(file, pattern) for pattern in NOT_DOWNLOADED)
    return not is_other and any(fnmatchcase(file, pattern) for pattern in DOWNLOADED)


def is_complete(directory: Path) -> bool:
    """Whether a directory has all weight files of its model, or of its adapter."""
    if not (directory / CONFIG_FILE).is_file():
        return (directory / ADAPTER_WEIGHTS).is_file() and (directory / ADAPTER_FILE).is_file()
    if (directory / SINGLE_FILE).is_file():
        return True
    if not (directory / INDEX_FILE).is_file():
        return False
    return all((directory / name).is_file() for name in weight_file_names(directory))


def weight_names(directory: Path, names: Collection[str]) -> list[str]:
    """Return which of these files hold the weights of a model, or of an adapter.

    Args:
        directory: Holds the index, if it is among them.
    """
    if CONFIG_FILE not in names:
        wanted = [ADAPTER_WEIGHTS]
    else:
        wanted = [SINGLE_FILE] if SINGLE_FILE in names else weight_file_names(directory)
    return [name for name in wanted if name in names]


def weight_bytes(directory: Path, sizes: Mapping[str, int]) -> int:
    """Return the bytes of the weights; arguments as for `weight_names`, with the sizes."""
    return sum(sizes[name] for name in weight_names(directory, sizes))
