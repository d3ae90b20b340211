"""Where copies of models lie that the hub's cache does not hold: in the cache of raymoe."""

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from raymoe.config import Settings
from raymoe.specs.files import CONFIG_FILE, write_file
from raymoe.specs.other_formats import ADAPTER_FILE


def copy_directory(model_source: str | Path) -> Path:
    """Return where the copy of a model is or will be; its name is the last part of the model's."""
    source = str(model_source)
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    name = PurePosixPath(source.partition("?")[0]).name.rpartition("@")[2]  # without credentials
    return Settings.from_environment().cache_directory / "models" / digest / name


def find_copy(model_source: str | Path) -> Path | None:
    """Return the directory with a copy of a model's or adapter's small files; None without one."""
    directory = copy_directory(model_source)
    is_here = any((directory / name).is_file() for name in (CONFIG_FILE, ADAPTER_FILE))
    return directory if is_here else None


def write_copy(model_source: str | Path, contents: Mapping[str, bytes]) -> None:
    """Write small files of a model.

    Args:
        contents: By names, which may have directories.

    Raises:
        OSError: They cannot be written.
    """
    directory = copy_directory(model_source)
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
