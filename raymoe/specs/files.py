"""Open files that others may have put there, and convert plain data to and from JSON."""

import contextlib
import dataclasses
import json
import os
import re
import stat
import types
import uuid
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from raymoe.errors import CheckpointError, ConfigError, UnknownOptionError
from raymoe.safe_text import nesting_problem
from raymoe.specs.other_formats import (
    ADAPTER_FILE,
    MLX_PROBLEM,
    POINTER,
    adapter_problem,
    is_of_mlx,
    is_pointer,
    no_config_problem,
    pointer_problem,
)
from raymoe.units import MIB, format_bytes

CONFIG_FILE, QUANTIZATION_FILE = "config.json", "hf_quant_config.json"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_JSON_BYTES = 128 * MIB
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def expanded(path: str | Path) -> Path:
    """Return an absolute path, with ~ as the home of its user; ConfigError if there is none."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"{path}: the home directory of its ~ is not known").at(
            path=path
        ) from error


def is_hub_name(text: str) -> bool:
    return _HUB_NAME.fullmatch(text) is not None


# Schemes of object stores in which journals can be, and fsspec's extra for each.
STORE_EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs"} | dict.fromkeys(
    ("abfs", "abfss", "az"), "abfs"
)


def is_in_bucket(uri: str) -> bool:
    """Whether a URI is one of a place in a bucket, with nothing that is only for Arrow."""
    scheme, _, place = uri.partition("://")
    return scheme in STORE_EXTRAS and "?" not in place and "/" in place.strip("/")


def local_model(model_source: str | Path) -> Path | None:
    """Return the directory that is meant; None for a name on the hub or a URI, else ConfigError."""
    name = str(model_source)
    if "://" in name:
        return None
    path = expanded(model_source) if name.startswith("~") else Path(model_source)
    if path.is_dir():
        return path
    if path.exists() or not is_hub_name(name):
        kind = "a file" if path.exists() else "neither a directory nor a name on the hub"
        error = ConfigError(
            f"the model {name!r} is {kind}; give a directory with config.json, or OWNER/NAME of a "
            "model on the Hugging Face hub"
        )
        raise error.at(path=path)
    return None


def chat_template_files(directory: Path) -> list[Path]:
    """Return the files with chat templates beside the tokenizer; raises as `resolve_inside`."""
    root = directory.resolve()
    found = [root / "chat_template.jinja", *(root / "additional_chat_templates").glob("*.jinja")]
    return [_resolve(path, _allowed_root(root)) for path in sorted(found) if path.is_file()]


def read_chat_template(directory: Path) -> str:
    """Return the chat templates of a model directory as transformers finds them, joined; or "".

    There are several where they have names.
    """
    files = chat_template_files(directory)
    if files:
        return "\n".join(read_file(path).decode(errors="replace") for path in files)
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return ""
    found = parse_json_object(read_file(path), where=str(path)).get("chat_template")
    if isinstance(found, list):
        templates = [one.get("template") for one in found if isinstance(one, dict)]
    else:
        templates = [*found.values()] if isinstance(found, dict) else [found]
    return "\n".join(one for one in templates if isinstance(one, str))


def resolve_inside(directory: Path, name: str) -> Path:
    """The real path of the plain file `name` in a model directory.

    Links may stay inside the directory or, if the directory is a snapshot of the Hugging Face hub
    cache (`models--*/snapshots/<revision>`), inside that model's cache folder. Raises
    CheckpointError for other links, missing or irregular files, and names with a path.
    """
    if name != Path(name).name or name in {"", ".", ".."} or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"{directory}: file name {name!r} is not a plain name; "
            "weights must lie in the model directory itself"
        )
    root = directory.resolve()
    return _resolve(root / name, _allowed_root(root))


def check_small_files(directory: Path, suffixes: Collection[str]) -> None:
    """Check all files of these kinds, subfolders included, before a library opens them.

    Raises CheckpointError for a link that leaves the directory (`resolve_inside`), a file that is
    not regular, one far too large, or a pointer of Git LFS.
    """
    allowed = _allowed_root(directory.resolve())
    for path in sorted(directory.resolve().rglob("*")):
        if path.suffix not in suffixes:
            continue
        with open(open_regular(_resolve(path, allowed)), "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_JSON_BYTES:
                raise CheckpointError(
                    f"{path}: larger than {format_bytes(MAX_JSON_BYTES)}, refused"
                )
            if is_pointer(file.read(len(POINTER))):
                raise CheckpointError(pointer_problem(path))


def _resolve(path: Path, allowed: Path) -> Path:
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
    _check_regular(path, mode)
    return real


def _allowed_root(root: Path) -> Path:
    is_snapshot = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    return root.parent.parent if is_snapshot else root


_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700


def kind_problem(path: Path, *, follows_links: bool = False) -> str:
    """Return what is at a path instead of a file, such as "is a pipe, not a file"; else ""."""
    try:
        mode = path.stat(follow_symlinks=follows_links).st_mode
    except OSError:
        return ""
    return _kind_problem(mode)


def _kind_problem(mode: int) -> str:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return "" if stat.S_ISREG(mode) else f"is {kind}, not a file"


def _check_regular(path: Path, mode: int) -> None:
    problem = _kind_problem(mode)
    if problem:
        raise CheckpointError(f"{path}: {problem}")


def open_regular(
    path: Path, flags: int = os.O_RDONLY, *, mode: int = PRIVATE_FILE, follows_links: bool = False
) -> int:
    """Open what must be a regular file; the caller closes the descriptor.

    It never waits: opening a pipe would, until somebody opens its other end. A device is not even
    opened, as that alone may do something.

    Raises:
        CheckpointError: It is no regular file.
        OSError: It cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_regular(path, path.stat(follow_symlinks=follows_links).st_mode)
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, mode)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
    except CheckpointError:
        os.close(descriptor)
        raise
    return descriptor


def read_file(path: Path, *, what: str = "", max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return what a regular file, or what a link to one, holds; `what` names it in errors.

    Raises:
        ConfigError: It cannot be read, is no regular file, or is too large.
    """
    name = f"{what} {path}".strip()
    try:
        problem = kind_problem(path, follows_links=True)
        if problem:
            raise ConfigError(f"{name} {problem}").at(path=path)
        with open(open_regular(path, follows_links=True), "rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or "its name cannot be one of a file"
        raise ConfigError(f"{name}: cannot be read ({reason})").at(path=path) from error
    if len(content) > max_bytes:
        raise ConfigError(f"{name}: larger than {format_bytes(max_bytes)}, refused").at(path=path)
    return content


def read_text(path: Path, *, what: str = "", max_bytes: int = MAX_JSON_BYTES) -> str:
    """Return the text of a regular file; raises as `read_file`, and for what is not UTF-8.

    A byte order mark, which Windows writes, is left out.
    """
    try:
        return read_file(path, what=what, max_bytes=max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        name = f"{what} {path}".strip()
        reason = f"{name}: is not UTF-8 ({error.reason} at byte {error.start})"
        raise ConfigError(reason).at(path=path) from error


def read_own_json(path: Path, *, what: str = "", max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the JSON value of a regular file.

    Raises:
        ConfigError: As `read_file`, or it is no JSON, or nested too deep.
    """
    name = f"{what} {path}".strip()
    content = read_file(path, what=what, max_bytes=max_bytes)
    try:
        return parse_json(content, where=name)
    except CheckpointError as error:
        raise ConfigError(str(error)).at(path=path) from error


def new_file(path: Path, *, mode: int = PRIVATE_FILE) -> int:
    """Make an empty file in place of what has its name; the caller closes the descriptor.

    Raises:
        ConfigError: There is a pipe, a directory or the like.
        OSError: It cannot be written.
    """
    _check_replaceable(path)
    path.unlink(missing_ok=True)
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=mode)


def _check_replaceable(path: Path) -> None:
    problem = kind_problem(path, follows_links=True)
    if problem:
        raise ConfigError(f"{path} {problem}; move it away, or choose another name").at(path=path)


def write_file(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a file that appears whole, in place of a file or link of its name.

    `mode` is its access, less the umask.

    Raises:
        ConfigError: There is a pipe, a directory or the like.
        OSError: It cannot be written.
    """
    _check_replaceable(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name[:80]}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json_object(
    directory: Path, name: str, *, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, object]:
    """The JSON object in a file of a model directory.

    Raises CheckpointError as `resolve_inside`, or if it is far too large, no JSON object, or has
    repeated keys.
    """
    path = resolve_inside(directory, name)
    with open(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise CheckpointError(f"{path}: larger than {format_bytes(max_bytes)}, refused")
    return parse_json_object(content, where=str(path))


def weight_file_names(directory: Path) -> list[str]:
    """Return the names of the weight files in the index of a model directory, sorted.

    Raises as `read_json_object`.
    """
    weight_map = read_json_object(directory, INDEX_FILE).get("weight_map")
    return sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []


def read_config(directory: Path) -> dict[str, object]:
    """The `config.json` of a model directory.

    Checkpoints of modelopt before 0.35 name their quantisation in a file of its own, which is read
    where `config.json` names none. Raises as `read_json_object`; where there is no model, the
    message says what there is.
    """
    if not (directory / CONFIG_FILE).exists() and directory.is_dir():
        check_adapter(directory)
        raise CheckpointError(no_config_problem(directory))
    config = read_json_object(directory, CONFIG_FILE)
    if is_of_mlx(config):
        raise CheckpointError(f"{directory / CONFIG_FILE}: {MLX_PROBLEM}")
    if config.get("quantization_config") is None and (directory / QUANTIZATION_FILE).exists():
        found = read_json_object(directory, QUANTIZATION_FILE)
        config["quantization_config"] = {**found, "quant_method": "modelopt"}
    return config


def check_adapter(
    directory: Path, *, is_ignored: bool = False, adapter: str | Path | None = None
) -> None:
    """Refuse a model directory with an adapter that is neither to be ignored nor the given one.

    Raises:
        CheckpointError: Nobody has said what to do with it.
        ConfigError: It is both to be ignored and the given one.
    """
    if not (directory / ADAPTER_FILE).is_file():
        return
    is_given = adapter is not None and expanded(adapter).resolve() == directory.resolve()
    if is_given and is_ignored:
        raise ConfigError(
            f"adapter is {str(adapter)!r}, the adapter beside the model, which ignore_adapter "
            "leaves out; give one of them"
        )
    if not (is_ignored or is_given):
        found = read_json_object(directory, ADAPTER_FILE)
        raise CheckpointError(adapter_problem(directory, found))


def parse_json(content: bytes, *, where: str) -> object:
    """Return the value of JSON text.

    NaN and Infinity are read, which configurations of models have.

    Raises:
        CheckpointError: It is none, has a key twice, or is nested too deep.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice = next(key for key in counts if counts[key] > 1)
            raise CheckpointError(f"{where}: {twice!r:.100} occurs twice")
        return result

    if is_pointer(content):
        raise CheckpointError(pointer_problem(where))
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error
    problem = nesting_problem(value)
    if problem:
        raise CheckpointError(f"{where}: JSON {problem}")
    return cast("object", value)


def parse_json_object(content: bytes, *, where: str) -> dict[str, object]:
    """Return the object of JSON text; raises as `parse_json`, and for another value."""
    value = parse_json(content, where=where)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: JSON holds {type(value).__name__}, expected an object")
    return dict(value)


Data = TypeVar("Data")


def from_plain(kind: type[Data], value: object, *, where: str) -> Data:
    """Build a dataclass from a mapping of its fields; `where` names the source in errors.

    Fields may be str, int, float, tuples, dataclasses, or one of these and None. Raises ConfigError
    for a missing or unknown field or a wrong type.
    """
    return cast("Data", _read(kind, value, where))


def to_json(data: object) -> str:
    return _write(data, "") + "\n"


def _write(value: object, indent: str) -> str:
    if not dataclasses.is_dataclass(value):
        return json.dumps(value, default=dataclasses.asdict)  # of dataclasses in tuples
    deeper = indent + "  "
    lines = [
        f'{deeper}"{field.name}": {_write(getattr(value, field.name), deeper)}'
        for field in dataclasses.fields(value)
    ]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _read(kind: object, value: object, where: str) -> object:
    if get_origin(kind) is types.UnionType:
        (kind,) = (member for member in get_args(kind) if member is not types.NoneType)
        return None if value is None else _read(kind, value, where)
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, where)
    if kind is float and type(value) in {int, float} and _is_usual(cast("float", value)):
        return float(cast("float", value))
    if kind is int and type(value) is int and abs(value) < MAX_COUNT:
        return value
    if kind in {str, bool} and type(value) is kind:
        return value
    names = {
        float: f"a number: 0, or of {1 / MAX_NUMBER:g} to {MAX_NUMBER:g}",
        int: f"a whole number below {MAX_COUNT}",
        str: "text",
        bool: "true or false",
    }
    raise ConfigError(f"{where} is {value!r:.100}; it takes {names[cast('type', kind)]}")


def _is_usual(value: float) -> bool:
    # Sums and ratios of such numbers are numbers, too.
    return value == 0 or 1 / MAX_NUMBER <= abs(value) <= MAX_NUMBER


def _dataclass(kind: type, value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} holds {type(value).__name__}; it takes an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in value:
        if name not in fields:
            raise UnknownOptionError(str(name), fields, f"field of {where}")
    for name, field in fields.items():
        if name not in value and field.default is dataclasses.MISSING:
            raise ConfigError(f"{where} has no field {name!r}")
    types_of = get_type_hints(kind)
    return kind(**{name: _read(types_of[name], value[name], f"{where}: {name}") for name in value})


def _tuple(members: tuple[object, ...], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} is {value!r:.100}; it takes a list")
    if members[-1] is Ellipsis:
        members = (members[0],) * len(value)
    if len(members) != len(value):
        raise ConfigError(f"{where} is {value!r:.100}; it takes {len(members)} entries")
    return tuple(_read(kind, entry, where) for kind, entry in zip(members, value, strict=True))


# Ten times the largest published value, because an untrusted configuration must not exhaust memory.
MAX_LAYERS = 1024
MAX_INTEGER = 2**40 - 1
MAX_NUMBER = 1e30
MAX_COUNT = 2**63
MAX_TOKEN_ID = 2**31 - 1


def integer(name: str, value: object, *, minimum: int, maximum: int = MAX_INTEGER) -> int:
    if type(value) is int and minimum <= value <= maximum:
        return value
    bounds = f"at least {minimum}" + (f" and at most {maximum}" if maximum < MAX_INTEGER else "")
    raise ConfigError(f"config.json: {name} is {value!r:.100}; expected an integer of {bounds}")
