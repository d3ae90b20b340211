"""Directories that the processes of a job share: on a file system, and ours to write.

They hold text of rows, so they are made for this user alone; one that was there keeps its mode.
"""

import os
from pathlib import Path

from raymoe.errors import ConfigError

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700


def open_private(path: str | Path, flags: int) -> int:
    """Open a file that only this user may read, if the flags make one; fits `opener`."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)


def make_directory(directory: str | Path, option: str, *, access: int = os.W_OK | os.X_OK) -> Path:
    """Make a directory where it is missing; return its absolute path.

    Args:
        directory: What the user gave.
        option: The name under which the user gave it.
        access: What this user must be allowed there.

    Raises:
        ConfigError: It cannot be made or written, or is no path of a file system.
    """
    if "://" in str(directory):
        raise ConfigError(
            f"{option} is {str(directory)!r}; files there grow, which object stores cannot do: "
            "give a directory of a file system that the nodes share"
        )
    path = Path(directory).expanduser().absolute()
    try:
        path.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be made: {error}") from error
    if not os.access(path, access):
        raise ConfigError(f"{option} {path} cannot be written by this user")
    return path
