"""Models on the Hugging Face hub: whether they are there for this user, and their files.

All of it goes through the hub's cache; what is there is not asked for again.
"""

import contextlib
import functools
import re
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from raymoe.download.files import (
    DOWNLOADED,
    NOT_DOWNLOADED,
    Check,
    UnreachableError,
    first_file,
    is_complete,
    is_downloaded,
    is_small,
    problem_of,
    weight_bytes,
)
from raymoe.download.node import once_a_node, progress_in_log
from raymoe.errors import CheckpointError, ConfigError
from raymoe.specs.files import CONFIG_FILE, MAX_JSON_BYTES, QUANTIZATION_FILE, is_hub_name
from raymoe.specs.other_formats import ADAPTER_FILE

HUB_LIMIT_S = 3.0  # for an answer of the hub
NUM_CONNECTIONS = 8
_URI = re.compile(r"hf://(?P<name>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/?")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub.

    Attributes:
        revision: Branch, tag or commit.
    """

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Return what "hf://OWNER/NAME" or "hf://OWNER/NAME@REVISION" names.

        Raises:
            ConfigError: It is neither.
        """
        found = _URI.fullmatch(uri)
        if found is None or not is_hub_name(found["name"]):
            raise ConfigError(f"the model {uri!r} is none of the hub; it takes hf://OWNER/NAME, or "
                              "hf://OWNER/NAME@REVISION")  # fmt: skip
        revision = found["revision"]
        return cls(found["name"], None if revision is None else unquote(revision))

    def __str__(self) -> str:
        return self.name

    def find(self) -> Path | None:
        """Return the snapshot in the hub's cache with the whole model; None without one."""
        return find_cached(self.name, revision=self.revision)

    def find_files(self) -> Path | None:
        """Return the snapshot in the hub's cache with the configuration; None without one."""
        return find_small_files(self.name, revision=self.revision)

    def fetch_files(self, check: Check) -> tuple[Path, int]:
        """Download all but the weights into the hub's cache: see `RemoteModel`.

        Nothing is asked of the hub for a model that is whole there.
        """
        found = self.find()
        if found is not None:
            return found, 0
        sizes = list_files(self.name, revision=self.revision)
        snapshot = fetch_first_file(self.name, sizes, revision=self.revision).parent
        check(snapshot)
        fetch_small_files(self.name, sizes, snapshot)
        return snapshot, weight_bytes(snapshot, sizes)

    def download(self) -> Path:
        """Download the whole model into the hub's cache: see `RemoteModel`."""
        return self.find() or download(self.name, revision=self.revision)


def list_files(name: str, *, revision: str | None = None) -> dict[str, int]:
    """Return the files of a model and their bytes, by one question to the hub.

    Downloads retry for half a minute without a network; this does not.

    Raises:
        CheckpointError: The hub has no such model for this user, or one without safetensors.
        UnreachableError: The hub does not answer.
    """
    with explained(name):
        check_host()
        hub = huggingface_hub.HfApi()
        found = hub.model_info(name, revision=revision, timeout=HUB_LIMIT_S, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    problem = problem_of(sizes)
    if problem:
        raise CheckpointError(f"{name!r} on the Hugging Face hub has {problem}")
    return sizes


def check_host() -> None:
    """Fail at once where there is no network; raises `OSError`."""
    # The host's name may be the proxy's to find.
    if not (getproxies() or constants.HF_HUB_OFFLINE):
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)


def fetch_config(name: str, *, revision: str | None = None) -> Path:
    """Return the `config.json` of a model; download it to the hub cache if it is missing.

    So is the file next to it that may name the quantisation (`read_config`).

    Raises:
        CheckpointError: As `list_files`; also for an adapter, which is no model by itself.
    """
    found = find_small_files(name, revision=revision)
    if found is not None and (found / CONFIG_FILE).is_file():
        return found / CONFIG_FILE
    sizes = list_files(name, revision=revision)
    if CONFIG_FILE not in sizes:
        raise CheckpointError(
            f"{name!r} on the Hugging Face hub has no config.json; {ADAPTER_FILE} is an adapter, "
            f"which is no model by itself; download it ('hf download {name}') and give the "
            "directory as the model, or as adapter of its base"
        )
    return fetch_first_file(name, sizes, revision=revision)


def fetch_first_file(name: str, sizes: Mapping[str, int], *, revision: str | None = None) -> Path:
    """Return the file that says what a model is, or what an adapter is of.

    Raises:
        CheckpointError: The user may not read it.
        UnreachableError: The hub does not answer.
    """
    file = first_file(sizes)
    with explained(name):
        path = _fetch(name, file, revision)
        if QUANTIZATION_FILE in sizes and file == CONFIG_FILE:
            _fetch(name, QUANTIZATION_FILE, path.parent.name)
        return path


def _fetch(name: str, file: str, revision: str | None) -> Path:
    path = huggingface_hub.hf_hub_download(name, file, revision=revision, etag_timeout=HUB_LIMIT_S)
    return Path(path)


def fetch_small_files(name: str, sizes: Mapping[str, int], snapshot: Path) -> None:
    """Download all files of a model but its weights.

    Args:
        snapshot: The commit's directory in the hub's cache; files that are there are not asked for.

    Raises:
        CheckpointError: As `fetch_first_file`.
    """
    files = [file for file, size in sizes.items() if is_small(file) and size <= MAX_JSON_BYTES]
    fetch = functools.partial(_fetch, name, revision=snapshot.name)
    with explained(name), ThreadPoolExecutor(NUM_CONNECTIONS, "raymoe-hub") as pool:
        for _ in pool.map(fetch, files):
            pass


def find_small_files(name: str, *, revision: str | None = None) -> Path | None:
    """Return the snapshot in the hub cache with a model's configuration; None without one."""
    for file in (CONFIG_FILE, ADAPTER_FILE):
        found = huggingface_hub.try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def find_cached(name: str, *, revision: str | None = None) -> Path | None:
    """Return the snapshot in the hub cache with a whole model; None without one."""
    try:
        found = _snapshot(name, revision, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError):
        return None
    return found if is_complete(found) else None


def _snapshot(name: str, revision: str | None, *, local_files_only: bool = False) -> Path:
    path = huggingface_hub.snapshot_download(
        name,
        revision=revision,
        allow_patterns=DOWNLOADED,
        ignore_patterns=NOT_DOWNLOADED,
        local_files_only=local_files_only,
        max_workers=NUM_CONNECTIONS,
    )
    return Path(path)


def download(name: str, *, revision: str | None = None) -> Path:
    """Download a model into the hub cache, once for all processes that share the cache.

    Raises:
        CheckpointError: As `list_files`.
    """
    cache = Path(constants.HF_HUB_CACHE)
    folder = f"models--{name.replace('/', '--')}"
    with explained(name), once_a_node(cache / ".locks" / folder / "raymoe.lock", name):
        found = find_cached(name, revision=revision)
        if found is not None:
            return found
        sizes: Mapping[str, int] = {}
        with contextlib.suppress(UnreachableError):  # the download tries again
            sizes = list_files(name, revision=revision)
        wanted = [file for file in sizes if is_downloaded(file)]
        num_bytes = sum(sizes[file] for file in wanted) or None
        blobs = cache / folder / "blobs"
        with progress_in_log(name, functools.partial(bytes_of, blobs), num_bytes):
            return _snapshot(name, revision)


def bytes_of(directory: Path) -> int:
    """Return the bytes of the files in a directory, which others may rename meanwhile."""
    num_bytes = 0
    if directory.is_dir():
        for path in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                num_bytes += path.stat().st_size
    return num_bytes


@contextlib.contextmanager
def explained(name: str, kind: str = "model") -> Iterator[None]:
    """Turn an error of the hub or its library into one that says what to do.

    Args:
        kind: What the name is of: "model" or "dataset".

    Raises:
        CheckpointError: For any other error.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # the HTTP library's errors depend on the hub's version
        raise _explain(name, error, kind) from error


def _explain(name: str, error: Exception, kind: str) -> CheckpointError:
    where = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    token = "the access token that is set here does not open it"
    if huggingface_hub.get_token() is None:
        token = "no access token is set here"
    advice = "log in with 'hf auth login', or set HF_TOKEN on every node"
    if isinstance(error, GatedRepoError):
        return CheckpointError(
            f"{name!r} is gated on the Hugging Face hub, and {token}: accept its conditions at "
            f"{where}, and {advice}"
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{name!r} on the Hugging Face hub has no such revision: {where}")
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            f"the Hugging Face hub has no {kind} {name!r}, or a private one, and {token} "
            f"({where}): check the name; for a private {kind} {advice}"
        )
    status = _status_of(error)
    if status in {401, 403}:
        return CheckpointError(
            f"the Hugging Face hub gives no access to {name!r} (HTTP status {status}, {where}): "
            f"{_text_of(error)}; check the access token: {advice}"
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return CheckpointError(f"{name!r} on the Hugging Face hub: {_text_of(error)}")
    failed = f"downloading it failed ({type(error).__name__}: {_text_of(error)})"
    if kind == "dataset":
        text = (f"{name!r} is a dataset of the Hugging Face hub, and {failed}; check the name, the "
                "network and HF_ENDPOINT, or give a directory")  # fmt: skip
    else:
        text = (f"{name!r} is neither a local directory nor in the Hugging Face cache, and "
                f"{failed}; check the name, the network and the access token, or give a directory"
                )  # fmt: skip
    return UnreachableError(text)


def _status_of(error: Exception) -> int | None:
    response = getattr(error, "response", None) if isinstance(error, HfHubHTTPError) else None
    return getattr(response, "status_code", None)


def _text_of(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] or type(error).__name__
