"""Which files does --input name? Those of one format: of a path, a directory, a glob or a URI."""

from raymoe.cli.storage import Location
from raymoe.errors import ConfigError

PARQUET_SUFFIXES = (".parquet", ".pq")
JSONL_SUFFIXES = (".jsonl", ".ndjson")


def find_files(pattern: str) -> tuple[Location, ...]:
    """Return the input files of one format, sorted by name.

    Raises:
        ConfigError: There are none, or of two formats, or the file system refuses.
    """
    root = Location.parse(pattern)
    found = _find(root)
    known = (*PARQUET_SUFFIXES, *JSONL_SUFFIXES)
    files = tuple(sorted((one for one in found if one.suffix in known), key=lambda one: one.path))
    if not files:
        kinds = ", ".join(known)
        found_some = f" ({len(found)} files of other kinds)" if found else ""
        raise ConfigError(f"--input {root}: no file that ends in {kinds}{found_some}")
    if len({file.suffix in JSONL_SUFFIXES for file in files}) > 1:
        raise ConfigError(f"--input {root}: both parquet and JSON lines; name one kind by a glob")
    return files


def _find(root: Location) -> list[Location]:
    if root.is_file():
        return [root]
    if root.is_dir():
        return root.files()
    found = root.glob()
    # An object store says why there is nothing only when it is asked to list it.
    return found if found or root.is_local or set(root.path) & set("*?[") else root.files()
