"""Which model is it? Digests of what its tokens depend on, the same on every node that has it."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from raymoe.engine.tokenizer import TOKENIZER_FILES
from raymoe.errors import CheckpointError
from raymoe.memory.checkpoint import INDEX_FILE, SINGLE_FILE
from raymoe.memory.source import resolve_model
from raymoe.specs.files import (
    open_regular,
    parse_json_object,
    read_json_object,
    resolve_inside,
)
from raymoe.specs.model import ModelSpec

# A hub revision pins the weights. Directories of their own have none, and reading hundreds of
# gigabytes would take as long as loading them: samples of each file tell other weights from these,
# because training changes nearly all of them.
NUM_SAMPLES, SAMPLE_BYTES = 16, 4096

_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZER_FILES = (
    *TOKENIZER_FILES,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """A model, by contents.

    Attributes:
        directory: Where it is on this node.
        name: What people call it: the directory, or its name on the hub.
        revision: Commit of a snapshot in the hub's cache; None for other directories.
        dtype: Of the checkpoint, "auto" where its config does not say.
        config: Digest, as the following: of config.json and generation_config.json.
        weights: Of the names and sizes of the weight files, and samples of what is in them.
        tokenizer: Of its files, the chat template left out.
        chat_template: Of the template.
    """

    directory: Path
    name: str
    revision: str | None
    dtype: str
    config: str
    weights: str
    tokenizer: str
    chat_template: str

    @classmethod
    def of(cls, model_source: str | Path) -> "ModelIdentity":
        """Read the files of a model; a hub name is downloaded as for an engine.

        Raises:
            CheckpointError: A file is missing or unsafe, or the hub cannot be reached.
            UnsupportedModelError: As for `ModelSpec.from_directory`.
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
            config=_digest(_contents(directory, _CONFIGS)),
            weights=_digest(_weight_samples(directory)),
            tokenizer=_digest([*_contents(directory, _TOKENIZER_FILES), tokenizer_config]),
            chat_template=_digest([*_contents(directory, _TEMPLATE_FILES), template]),
        )


def _contents(directory: Path, names: Iterable[str]) -> list[bytes]:
    """Return names and contents of those files that are there."""
    contents = []
    for name in names:
        if (directory / name).exists():
            contents += [name.encode(), _read(directory, name)]
    return contents


def _read(directory: Path, name: str) -> bytes:
    with os.fdopen(open_regular(resolve_inside(directory, name)), "rb") as file:
        return file.read()


def _split_tokenizer_config(directory: Path) -> tuple[bytes, bytes]:
    """Return what the tokenizer's configuration says of tokens, and its chat template."""
    if not (directory / _TOKENIZER_CONFIG).exists():
        return b"", b""
    content = _read(directory, _TOKENIZER_CONFIG)
    try:
        config = parse_json_object(content, where=_TOKENIZER_CONFIG)
    except CheckpointError:
        return content, b""  # whoever loads the tokenizer says what is wrong with it
    template = config.pop("chat_template", None)
    return _json(config), _json(template)


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _weight_samples(directory: Path) -> list[bytes]:
    if (directory / SINGLE_FILE).exists():
        names = [SINGLE_FILE]
    else:
        weight_map = read_json_object(directory, INDEX_FILE).get("weight_map")
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    parts = _contents(directory, [INDEX_FILE])
    for name in names:
        parts += [name.encode(), *_samples(resolve_inside(directory, name))]
    return parts


def _samples(path: Path) -> list[bytes]:
    """Return the size of a file and its bytes at places that are evenly spread over it."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        last = max(0, size - SAMPLE_BYTES)
        offsets = sorted({last * index // (NUM_SAMPLES - 1) for index in range(NUM_SAMPLES)})
        return [str(size).encode(), *(os.pread(descriptor, SAMPLE_BYTES, at) for at in offsets)]
    finally:
        os.close(descriptor)


def _digest(parts: Iterable[bytes]) -> str:
    """Return one digest of several contents, their borders included."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()
