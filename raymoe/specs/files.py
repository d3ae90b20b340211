"""Files of a model directory, opened without trust: names, links, kinds and sizes are checked."""

import json
import os
import stat
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from raymoe.errors import CheckpointError
from raymoe.nesting import nesting_problem
from raymoe.units import MIB, format_bytes

MAX_JSON_BYTES = 128 * MIB


def resolve_inside(directory: Path, name: str) -> Path:
    """The real path of `name`, one plain file name, in a model directory.

    Links may stay inside the directory or, where the directory is a snapshot of the Hugging Face
    hub cache (`models--*/snapshots/<revision>`), inside that model's cache folder.

    Raises:
        CheckpointError: The name has separators, dots or other tricks, the file is missing, is not
            a regular file, or is a link that leaves the directory.
    """
    if name != Path(name).name or name in {"", ".", ".."} or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"{directory}: file name {name!r} is not a plain name; "
            "weights must lie in the model directory itself"
        )
    root = directory.resolve()
    return _resolve(root / name, _allowed_root(root))


def check_small_files(directory: Path, suffixes: Collection[str]) -> None:
    """Check what a library will open by itself: every file of these kinds, in folders too.

    Raises:
        CheckpointError: One is a link that leaves the directory (see `resolve_inside`), no regular
            file, or absurdly large.
    """
    allowed = _allowed_root(directory.resolve())
    for path in sorted(directory.resolve().rglob("*")):
        if path.suffix in suffixes and _resolve(path, allowed).stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {format_bytes(MAX_JSON_BYTES)}, refused")


def _resolve(path: Path, allowed: Path) -> Path:
    """The real path of a regular file that must lie in `allowed`."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links, up to Python 3.12
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not real.is_relative_to(allowed):
        raise CheckpointError(
            f"{path}: a link that leaves the model directory (to {real}); "
            "copy the file or use the directory that holds it"
        )
    try:
        mode = real.stat().st_mode
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: not a regular file")
    return real


def _allowed_root(root: Path) -> Path:
    is_snapshot = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    return root.parent.parent if is_snapshot else root


def open_regular(path: Path) -> int:
    """Open a resolved path for reading; the descriptor is surely a regular file.

    The caller closes it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file")
    return descriptor


def read_json_object(
    directory: Path, name: str, *, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, object]:
    """The JSON object in a file of a model directory.

    Raises:
        CheckpointError: As for `resolve_inside`, or not a JSON object, or absurdly large, or a key
            occurs twice.
    """
    path = resolve_inside(directory, name)
    with open(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise CheckpointError(f"{path}: larger than {format_bytes(max_bytes)}, refused")
    return parse_json_object(content, where=str(path))


def parse_json_object(content: bytes, *, where: str) -> dict[str, object]:
    """A JSON object without repeated keys; `where` names the source in errors."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice = next(key for key in counts if counts[key] > 1)
            raise CheckpointError(f"{where}: {twice!r:.100} occurs twice")
        return result

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error
    problem = nesting_problem(value)
    if problem:
        raise CheckpointError(f"{where}: JSON {problem}")
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: JSON holds {type(value).__name__}, expected an object")
    return dict(value)
