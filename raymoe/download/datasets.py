"""Data sets of the Hugging Face hub: their files at one commit, by configuration and split."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, quote, unquote, urlencode

import huggingface_hub
from huggingface_hub import constants
from pyarrow import fs

from raymoe.download.hub import HUB_LIMIT_S, check_host, explained
from raymoe.errors import ConfigError
from raymoe.specs.files import is_hub_name

PREFIX = "hf://datasets/"
FORM = f"{PREFIX}OWNER/NAME[@REVISION][/PATH], or {PREFIX}OWNER/NAME?config=NAME&split=NAME"
DEFAULT = "default"  # the configuration that is meant where none is named
MAX_NAMES = 20  # that an error lists

# Branches of the hub's own have a slash in their names; in others it is written as %2F.
_PLACE = re.compile(r"(?P<name>[^/@]+/[^/@]+)(@(?P<revision>refs/(convert|pr)/[^/]+|[^/]+))?"
                    r"(/(?P<path>.*))?")  # fmt: skip
_QUERY = re.compile(r"(?P<place>.*?)\?(?P<query>\w+=[^?*/]*)")
_SHARD = re.compile(r"(.*/)?data/(?P<split>\w+(\.\w+)*)-\d{5}-of-\d{5}[^/]*")
_CONVERTED = re.compile(r"(?P<config>[^/]+)/(?P<split>[^/]+)/\d{4}\.parquet")
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_WORD_ENDS = re.compile(r"[-._ 0-9]+")


def is_dataset(uri: str) -> bool:
    """Whether a URI names something of the hub's data sets, well or not."""
    return uri.startswith("hf://")


class Part(NamedTuple):
    """The files of one split of one configuration."""

    config: str
    split: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetUri:
    """What a URI names.

    Attributes:
        name: OWNER/NAME of the data set.
        revision: Branch, tag or commit; None is the main branch.
        path: File, directory or glob in it; "" is all of it.
        config: The configuration that is asked for; None without one.
        split: The split that is asked for; None without one.
    """

    name: str
    revision: str | None = None
    path: str = ""
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Read a URI of the form `FORM`.

        Raises:
            ConfigError: It is none.
        """
        asked = _QUERY.fullmatch(uri)
        query = dict(parse_qsl(asked["query"], keep_blank_values=True)) if asked else {}
        place = _PLACE.fullmatch((asked["place"] if asked else uri).removeprefix(PREFIX))
        is_known = uri.startswith(PREFIX) and query.keys() <= {"config", "split"}
        if not is_known or place is None or not is_hub_name(place["name"]):
            raise ConfigError(f"{uri} names no data set of the hub; it takes {FORM}")
        path = (place["path"] or "").strip("/")
        if query and set(path) & set("*?["):
            raise ConfigError(f"{uri} has a glob and asks for a {' and a '.join(query)}; give one "
                              "of them")  # fmt: skip
        revision = None if place["revision"] is None else unquote(place["revision"])
        return cls(name=place["name"], revision=revision, path=path, **query)

    def check_is_directory(self, *, is_directory: bool) -> None:
        """Refuse to ask for a part of what is one file, or is not there; raises `ConfigError`."""
        if not is_directory and (self.config is not None or self.split is not None):
            raise ConfigError(f"--input {PREFIX}{self.name}: {self.path} is no directory, and a "
                              "configuration or a split is a part of one; leave it out"
                              )  # fmt: skip

    def asking(self, part: Part) -> str:
        """Return the URI of a part of what this one names."""
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='/')}"
        path = f"/{self.path}" if self.path else ""
        config = {} if part.config == DEFAULT else {"config": part.config}
        query = urlencode({**config, "split": part.split})
        return f"{PREFIX}{self.name}{revision}{path}?{query}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDataset:
    """What a URI names, at the commit that its revision is at now.

    The commit stays the same for all who read files of it, whatever is pushed meanwhile.

    Attributes:
        commit: Hash of the commit.
        configs: What the card of the data set says of its configurations.
    """

    uri: DatasetUri
    commit: str
    configs: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def find(cls, uri: str) -> Self:
        """Ask the hub for a data set.

        Raises:
            ConfigError: The URI is none of a data set.
            CheckpointError: The hub has no such data set for this user, or does not answer.
        """
        parsed = DatasetUri.parse(uri)
        with explained(parsed.name, kind="dataset"):
            check_host()
            hub = huggingface_hub.HfApi()
            info = hub.dataset_info(parsed.name, revision=parsed.revision, timeout=HUB_LIMIT_S)
            if info.gated:  # everyone sees what files there are, and few may read them
                hub.auth_check(parsed.name, repo_type="dataset")
        configs = None if info.card_data is None else info.card_data.get("configs")
        return cls(
            uri=parsed,
            commit=str(info.sha),
            configs=tuple(each for each in _listed(configs) if isinstance(each, dict)),
        )

    @property
    def root(self) -> str:
        """The place of all its files in the file system."""
        return f"datasets/{self.uri.name}@{self.commit}"

    @property
    def path(self) -> str:
        """The place of what the URI names in the file system."""
        return f"{self.root}/{self.uri.path}".rstrip("/")

    @staticmethod
    def filesystem() -> fs.FileSystem:
        """Return the hub as a file system; each process that uses it has its own access token."""
        hub = huggingface_hub.HfFileSystem(endpoint=constants.ENDPOINT)
        return fs.PyFileSystem(fs.FSSpecHandler(hub))

    def choose(self, paths: Sequence[str], is_fact: Callable[[str], bool]) -> tuple[str, ...]:
        """Return those files that the URI asks for.

        Args:
            paths: Files in what the URI names, in the file system, if that is a directory.
            is_fact: Whether a file that no card lists may hold facts about others.

        Raises:
            ConfigError: It asks for what is not there, or for no one of several; says which.
        """
        names = [path.removeprefix(f"{self.root}/") for path in paths]
        parts = () if self.uri.path else tuple(_parts_of_card(self.configs, names))
        if not parts:
            names = [name for name in names if not is_fact(name)] or names
            parts = tuple(_parts_of_names(names, self.uri.path))
        if not parts:
            return ()
        parts = self._of("config", self.uri.config or _default(self.configs, parts), parts)
        (part,) = self._of("split", self.uri.split, parts)
        return tuple(f"{self.root}/{name}" for name in part.files)

    def _of(self, kind: str, wanted: str | None, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        what = "configuration" if kind == "config" else kind
        names = list(dict.fromkeys(getattr(part, kind) for part in parts))
        if wanted is None and len(names) == 1:
            return parts
        chosen = tuple(part for part in parts if getattr(part, kind) == wanted)
        if chosen:
            return chosen
        more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
        listed = ", ".join(name or "without a name" for name in names[:MAX_NAMES]) + more
        if wanted is not None:
            raise ConfigError(
                f"--input {PREFIX}{self.uri.name} has no {what} {wanted!r}; it has {listed}"
            )
        raise ConfigError(
            f"--input {PREFIX}{self.uri.name} has several {what}s: {listed}; name one, such as "
            f"--input '{self.uri.asking(parts[0])}'"
        )


def _default(configs: Iterable[Mapping[str, Any]], parts: Sequence[Part]) -> str | None:
    """Return the configuration that is meant where none is named; None without one."""
    marked = [_name(config) for config in configs if config.get("default") is True]
    names = [*marked, DEFAULT]
    return next((name for name in names if any(part.config == name for part in parts)), None)


def _name(config: Mapping[str, Any]) -> str:
    return str(config.get("config_name", DEFAULT))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _parts_of_card(configs: Iterable[Mapping[str, Any]], names: Sequence[str]) -> Iterator[Part]:
    for config in configs:
        directory = str(config.get("data_dir") or "").strip("/")
        files = _listed(config.get("data_files"))
        if not files:
            inside = [name for name in names if not directory or name.startswith(f"{directory}/")]
            for part in _parts_of_names(inside, directory):
                yield part._replace(config=_name(config))
            continue
        patterns: dict[str, list[str]] = {}
        for each in files:
            is_split = isinstance(each, dict)
            split = str(each.get("split", "train")) if is_split else "train"
            patterns.setdefault(split, []).extend(_listed(each.get("path") if is_split else each))
        for split, globs in patterns.items():
            wanted = [str(PurePosixPath(directory, str(glob))) for glob in globs]
            found = tuple(name for name in names if any(_fits(name, glob) for glob in wanted))
            yield Part(_name(config), split, found)


def _fits(name: str, glob: str) -> bool:
    """Whether a glob means a file, each segment by itself; ``**`` is any number of directories.

    A regular expression of the whole glob, which is a stranger's, may need any time.
    """
    parts = glob.split("/")

    def with_empty(states: Iterable[int]) -> set[int]:
        reached = set(states)
        for state in range(min(reached, default=0), len(parts)):
            if state in reached and parts[state] == "**":
                reached.add(state + 1)
        return reached

    states = with_empty([0])
    for segment in name.split("/"):
        states = with_empty(
            state + (parts[state] != "**")
            for state in states
            if state < len(parts) and (parts[state] == "**" or fnmatchcase(segment, parts[state]))
        )
    return len(parts) in states


def _parts_of_names(names: Sequence[str], directory: str) -> Iterator[Part]:
    """Yield the splits that files are named after, as `load_dataset` finds them.

    Shards count alone where there are any, then files in directories with the name of a split, then
    files with such a name; without one all files are one split.
    """
    converted = [match for match in map(_CONVERTED.fullmatch, names) if match]
    if converted and len(converted) == len(names):
        tables: dict[tuple[str, str], list[str]] = {}
        for match in converted:
            tables.setdefault((match["config"], match["split"]), []).append(match[0])
        for (config, split), files in tables.items():
            yield Part(config, split, tuple(files))
        return
    paths = {name: PurePosixPath(name.removeprefix(directory).strip("/")) for name in names}
    of_directories = {name: _words(path.parts[:-1]) for name, path in paths.items()}
    of_files = {name: _words([path.name]) for name, path in paths.items()}
    splits = _shards(names) or _named(of_directories) or _named(of_files) or {"train": [*names]}
    for split, chosen in splits.items():
        yield Part(DEFAULT, split, tuple(chosen))


def _shards(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is not None:
            found.setdefault(match["split"], []).append(name)
    return found


def _words(parts: Iterable[str]) -> set[str]:
    return {word for part in parts for word in _WORD_ENDS.split(part)}


def _named(words: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return the files of each split, by the words of their names."""
    found = {split: [name for name, has in words.items() if has & meant]
             for split, meant in _SPLITS.items()}  # fmt: skip
    return {split: names for split, names in found.items() if names}
