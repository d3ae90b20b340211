"""Identity of a model: digests of its files, cached while a file does not change; shared weights.

A digest is the sha256 of a file's bytes. The hub cache names its blobs by it; other files are read
once, in parallel. One core hashes 1 to 2 GB/s. A thread can hash while the same files are loaded;
the operating system then reads each byte from the disk once.

Digests are kept next to the model (elsewhere if that cannot be written) under device, inode, size,
and the times of the last change of contents and of inode, which the kernel sets.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from raymoe._version import __version__
from raymoe.config import EngineConfig, Settings
from raymoe.download.models import resolve_model
from raymoe.engine.tokenizer import TOKENIZER_FILES
from raymoe.errors import CheckpointError, ConfigError, PerformanceWarning
from raymoe.memory.shared_file import SharedFile
from raymoe.plan.policy import Choice, DevicePolicy, Policy
from raymoe.specs.files import (
    CONFIG_FILE,
    INDEX_FILE,
    QUANTIZATION_FILE,
    SINGLE_FILE,
    chat_template_files,
    open_regular,
    parse_json_object,
    resolve_inside,
    weight_file_names,
)
from raymoe.specs.model import ModelSpec
from raymoe.specs.other_formats import ADAPTER_FILE, ADAPTER_WEIGHTS
from raymoe.units import GIB, MIB

CACHE_NAME = ".raymoe-digests.json"
MAX_ENTRIES = 4096
READ_BYTES = 16 * MIB
# A file that has just changed may change again within the resolution of its times.
STABLE_NS = 2_000_000_000

_SHA256 = re.compile("[0-9a-f]{64}")


def file_state(path: Path) -> str:
    """Return what the kernel knows of a file; it changes with every change of the file."""
    status = path.stat()
    fields = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return "-".join(map(str, fields))


def known_digests(paths: Sequence[Path], caches: Sequence[Path]) -> dict[Path, str]:
    """Return digests that need no reading, from names of blobs and from caches."""
    entries = {state: digest for cache in caches for state, digest in _read_cache(cache).items()}
    known = {}
    for path in paths:
        digest = path.name if _is_blob(path) else entries.get(file_state(path))
        if digest is not None:
            known[path] = digest
    return known


def read_digests(paths: Sequence[Path], caches: Sequence[Path]) -> dict[Path, str]:
    """Return digests of files, read if they are not known; only one of several processes reads.

    `caches` are files for digests; the first that can be written is used.

    Raises:
        CheckpointError: A file cannot be read, or changes while it is read.
    """
    with _locked(caches) as cache:
        known = known_digests(paths, caches)
        missing = [path for path in paths if path not in known]
        states = [file_state(path) for path in missing]
        now_ns = time.time_ns()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "raymoe-digest") as pool:
            digests = list(pool.map(_digest, missing))
        stable = {}
        for path, state, digest in zip(missing, states, digests, strict=True):
            if file_state(path) != state:
                raise CheckpointError(f"{path}: has changed while it was read; load it again")
            status = path.stat()
            if max(status.st_mtime_ns, status.st_ctime_ns) + STABLE_NS < now_ns:
                stable[state] = digest
        if stable and cache is not None:
            _write_cache(cache, stable)
    return known | dict(zip(missing, digests, strict=True))


def _is_blob(path: Path) -> bool:
    is_in_cache = path.parent.name == "blobs" and path.parent.parent.name.startswith("models--")
    return is_in_cache and _SHA256.fullmatch(path.name) is not None


def _digest(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(READ_BYTES)
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _read_cache(path: Path) -> dict[str, str]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in {0, os.geteuid()} or status.st_mode & 0o022:
                return {}
            entries = json.loads(file.read(MIB))
    except (OSError, CheckpointError, ValueError, RecursionError):
        return {}  # the files are read again
    if not isinstance(entries, Mapping):
        return {}
    pairs = [(str(state), digest) for state, digest in entries.items() if isinstance(digest, str)]
    return {state: digest for state, digest in pairs if _SHA256.fullmatch(digest)}


def _write_cache(path: Path, entries: dict[str, str]) -> None:
    kept = list((_read_cache(path) | entries).items())[-MAX_ENTRIES:]
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # without it, the next process reads the files again
        try:
            with os.fdopen(os.open(temporary, flags, 0o644), "w") as file:
                json.dump(dict(kept), file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(caches: Sequence[Path]) -> Iterator[Path | None]:
    """Lock the folder of the first cache that can be written; yield that cache."""
    for cache in caches:
        with contextlib.suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
        if os.access(cache.parent, os.W_OK):
            folder = os.open(cache.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with contextlib.suppress(OSError):  # a file system without locks: both read
                    fcntl.flock(folder, fcntl.LOCK_EX)
                yield cache
            finally:
                os.close(folder)
            return
    yield None


SMALL_BYTES = GIB  # weight files of this size are hashed at once, in a second or so

_CONFIGS = (CONFIG_FILE, "generation_config.json", QUANTIZATION_FILE)
_TOKENIZER_FILES = (
    *TOKENIZER_FILES,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
_TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """The identity of a model by contents.

    Attributes:
        directory: Local directory.
        name: The directory, or the name on the hub.
        revision: Commit of a snapshot in the hub's cache; None for other directories.
        dtype: Of the checkpoint, "auto" if its config names none.
        config: Digest of config.json and the files that add to it.
        files: `files_key` when it was made.
        pending_weights: Digest of the weight files, names and contents; see `weights`.
        adapter: Digest of the files of its adapter; "" without one.
        adapter_directory: Where they are.
    """

    directory: Path
    name: str
    revision: str | None
    dtype: str
    config: str
    tokenizer: str
    chat_template: str
    files: str
    pending_weights: Future[str]
    adapter: str = ""
    adapter_directory: str | Path | None = None

    @property
    def has_weights(self) -> bool:
        return self.pending_weights.done()

    @property
    def weights(self) -> str:
        """Digest of the weight files, names and contents; waits until they are read."""
        return self.pending_weights.result()

    def check_unchanged(self) -> None:
        """Refuse a model whose files have changed since it was identified."""
        check_unchanged(self.directory, self.files, self.adapter_directory)

    @classmethod
    def of(
        cls,
        model_source: str | Path,
        *,
        adapter: str | Path | None = None,
        reads_weights: bool = True,
    ) -> "ModelIdentity":
        """Read the files of a model and its adapter; a hub name is downloaded as for an engine.

        With `reads_weights`, a background thread reads large weight files whose digests are not
        known; without it `weights` may never complete. Small ones are always read.
        """
        directory = resolve_model(model_source)
        spec = ModelSpec.from_directory(directory)
        root = directory.resolve()
        is_snapshot = root.parent.name == "snapshots" and spec.name != root.name
        tokenizer_config, template = _split_tokenizer_config(directory)
        return cls(
            directory=directory,
            name=spec.name if is_snapshot else str(root),
            revision=root.name if is_snapshot else None,
            dtype=spec.dtype or "auto",
            config=_identity_digest(_contents(directory, _CONFIGS)),
            tokenizer=_identity_digest([*_contents(directory, _TOKENIZER_FILES), tokenizer_config]),
            chat_template=_identity_digest([*_templates(directory), template]),
            files=files_key(directory, adapter),
            adapter="" if adapter is None else _adapter_digest(Path(adapter)),
            adapter_directory=adapter,
            pending_weights=_weights(directory, reads=reads_weights),
        )


def _contents(directory: Path, names: Iterable[str]) -> list[bytes]:
    contents = []
    for name in names:
        if (directory / name).exists():
            contents += [name.encode(), _read(directory, name)]
    return contents


def _templates(directory: Path) -> Iterator[bytes]:
    for path in chat_template_files(directory):
        yield path.name.encode()
        yield _read_file(path)


def _read(directory: Path, name: str) -> bytes:
    return _read_file(resolve_inside(directory, name))


def _read_file(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def _split_tokenizer_config(directory: Path) -> tuple[bytes, bytes]:
    if not (directory / _TOKENIZER_CONFIG).exists():
        return b"", b""
    content = _read(directory, _TOKENIZER_CONFIG)
    try:
        config = parse_json_object(content, where=_TOKENIZER_CONFIG)
    except CheckpointError:
        return content, b""  # the tokenizer's loader reports what is wrong
    template = config.pop("chat_template", None)
    return _json(config), _json(template)


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def weight_files(directory: Path) -> dict[str, Path]:
    """Return names of the weight files and the regular files behind them."""
    is_single = (directory / SINGLE_FILE).exists()
    names = [SINGLE_FILE] if is_single else weight_file_names(directory)
    return {name: resolve_inside(directory, name) for name in names}


def files_key(directory: Path, adapter: str | Path | None = None) -> str:
    """Return a digest of the configuration and of the states of the weight files.

    Args:
        adapter: Directory of the adapter that is merged into them.

    It changes with every change of a file, and with the file behind a name; equal contents in other
    files have another key.
    """
    states = [f"{name} {file_state(path)}" for name, path in weight_files(directory).items()]
    contents = _contents(directory, _CONFIGS)
    if adapter is not None:
        contents += _contents(Path(adapter), [ADAPTER_FILE])
        states.append(file_state(resolve_inside(Path(adapter), ADAPTER_WEIGHTS)))
    return _identity_digest([*contents, *(state.encode() for state in states)])


def _adapter_digest(directory: Path) -> str:
    """Digest of the contents of an adapter's files; its tensors are read, if they are not known."""
    path = resolve_inside(directory, ADAPTER_WEIGHTS)
    caches = [Settings.from_environment().cache_directory / CACHE_NAME]
    tensors = read_digests([path], caches)[path]
    return _identity_digest([*_contents(directory, [ADAPTER_FILE]), tensors.encode()])


def check_unchanged(directory: Path, key: str, adapter: str | Path | None = None) -> None:
    """Refuse a model whose files have changed since `files_key` returned `key`."""
    if files_key(directory, adapter) != key:
        raise CheckpointError(
            f"{directory}: config.json or weight files have changed while they were loaded; "
            "load the model again when they stay as they are"
        )


def _weights(directory: Path, *, reads: bool) -> Future[str]:
    """Return the digest of all weight files; a thread computes it if it is not known."""
    files = weight_files(directory)
    index = _contents(directory, [] if SINGLE_FILE in files else [INDEX_FILE])
    paths = list(files.values())
    settings = Settings.from_environment()
    caches = [directory.resolve() / CACHE_NAME, settings.cache_directory / CACHE_NAME]
    found: Future[str] = Future()

    def combine(digests: Mapping[Path, str]) -> str:
        named = [f"{name} {digests[path]}".encode() for name, path in files.items()]
        return _identity_digest([*index, *named])

    def read() -> None:
        try:
            found.set_result(combine(read_digests(paths, caches)))
        except Exception as error:
            found.set_exception(error)

    known = known_digests(paths, caches)
    if len(known) == len(set(paths)):
        found.set_result(combine(known))
    elif sum(path.stat().st_size for path in set(paths)) <= SMALL_BYTES:
        read()
    elif reads:
        threading.Thread(target=read, name="raymoe-digest", daemon=True).start()
    return found


def _identity_digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()


FORMAT = 1  # layout version of shared memory


def open_shared(
    config: EngineConfig, files: str, device: str, dtype: torch.dtype
) -> SharedFile | None:
    """Open the weights that the engines of this node share; None if they do not share.

    Raises:
        ConfigError: Sharing is requested but impossible.
        ExecutionError: The name belongs to something else.
    """
    if config.shared_weights is not True:
        return None
    reasons = {
        "on the device 'cpu'": device == "cpu",
        "that are dummies": config.load_format == "dummy",
        "of several ranks": config.tensor_parallel_size > 1,
    }
    for what, is_so in reasons.items():
        if is_so:
            raise ConfigError(
                f"shared_weights is True, but weights {what} are not shared; leave it out"
            )
    file = SharedFile.open(_key(files, dtype))
    chosen = choice_of(file)
    if chosen is None or config.allows(chosen):
        return file
    file.close()
    warnings.warn(
        f"the weights that other engines of this node share lie as schedule {chosen.schedule!r} "
        f"and {chosen.policy} want them; this engine is told otherwise and loads its own copy. "
        "Give all the same schedule and policy, or none.",
        PerformanceWarning,
        stacklevel=2,
    )
    return None


def note_of(choice: Choice) -> bytes:
    """The note of a file of shared weights that are laid out for this choice."""
    return json.dumps(dataclasses.asdict(choice)).encode()


def choice_of(file: SharedFile | None) -> Choice | None:
    """Return the choice of the engine that filled the file; None if it is empty."""
    if file is None or not file.is_whole:
        return None
    plain = json.loads(file.note)
    policy = plain["policy"]
    device = policy.pop("device")
    return Choice(
        schedule=plain["schedule"],
        policy=Policy(**policy, device=None if device is None else DevicePolicy(**device)),
    )


def agree(config: EngineConfig, file: SharedFile | None) -> EngineConfig:
    """Return the configuration with the schedule and sizes for which the weights are laid out."""
    chosen = choice_of(file)
    if chosen is None:
        return config
    return dataclasses.replace(config, schedule=chosen.schedule, policy=chosen.policy)


def _key(files: str, dtype: torch.dtype) -> str:
    # Weights are shared within one machine, whose kernel identifies the files.
    return hashlib.sha256(
        " ".join([str(FORMAT), __version__, files, str(dtype)]).encode()
    ).hexdigest()[:32]
