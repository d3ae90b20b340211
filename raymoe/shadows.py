"""Files that hide a package: a raymoe.py, a torch/ or a json.py beside what is run."""

import functools
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path

OWN = Path(__file__).parent
_SUFFIXES = tuple(all_suffixes())
_NAME = re.compile(r"[\w.-]+")


def find_shadow(directories: Iterable[Path]) -> str | None:
    """Return which file in the directories hides which package, and what to do; None if none.

    Packages are those of Python and of all that raymoe requires, directly or not.
    """
    for directory in directories:
        for name, path in sorted(_modules(directory)):
            if not _is_ours(path) and _is_needed(name) and _is_elsewhere(name, directory):
                return (
                    f"{path} hides the package {name!r}: Python, and the workers of Ray, look for "
                    "packages in this directory first. Rename it, or run in another directory"
                )
    return None


def _modules(directory: Path) -> Iterator[tuple[str, Path]]:
    try:
        entries = [*os.scandir(directory)]
    except OSError:  # such as a part of sys.path that does not exist
        return
    for entry in entries:
        name, _, rest = entry.name.partition(".")
        if not name.isidentifier():
            continue
        path = directory / entry.name
        # A directory without __init__ counts only where no package of the name is found.
        if f".{rest}" in _SUFFIXES or (
            not rest and any((path / f"__init__{suffix}").exists() for suffix in _SUFFIXES)
        ):
            yield name, path


def _is_ours(path: Path) -> bool:
    """Whether it is raymoe itself: the package that runs, or a checkout of it."""
    return path == OWN or (path.name == OWN.name and (path / "_version.py").is_file())


def _is_needed(name: str) -> bool:
    return name in sys.stdlib_module_names or name in _required()


def _is_elsewhere(name: str, directory: Path) -> bool:
    if name in sys.stdlib_module_names:
        return not Path(os.__file__).parent.samefile(directory)
    others = [one for one in sys.path if Path(one or ".").resolve() != directory.resolve()]
    found = PathFinder.find_spec(name, others)
    return found is not None and found.origin is not None  # a namespace hides nothing


@functools.cache
def _required() -> frozenset[str]:
    """Names of packages of the distributions that raymoe requires, with all extras."""
    from importlib import metadata  # noqa: PLC0415 - rarely needed, and slow

    pending, seen = ["raymoe"], set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            required = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:  # of an extra that is not installed
            continue
        pending += [_normal(found[0]) for one in required if (found := _NAME.match(one))]
    packages = metadata.packages_distributions()
    return frozenset(
        package for package, owners in packages.items() if not seen.isdisjoint(map(_normal, owners))
    ) | {"raymoe"}


def _normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def first_directory() -> list[Path]:
    """Return the directory in which this process looks for packages first: that of its script."""
    if sys.flags.safe_path:  # -P: it looks in none
        return []
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    # Ray puts directories of its own before all others, wherever it is installed.
    ray = PathFinder.find_spec("ray")
    installed += [] if ray is None else ray.submodule_search_locations or []
    places = (Path(part or Path.cwd()) for part in sys.path)
    own = (one for one in places if not any(one.is_relative_to(other) for other in installed))
    return [*itertools.islice(own, 1)]


def directories_of_workers() -> list[Path]:
    """Return the directories in which the workers of Ray look for packages first."""
    return [*first_directory(), Path.cwd()]
