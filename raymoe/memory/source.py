"""From what a user calls a model to a local directory: a path, or a Hugging Face hub name."""

import logging
import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

from raymoe.errors import CheckpointError, ConfigError
from raymoe.memory.checkpoint import INDEX_FILE, SINGLE_FILE
from raymoe.specs.files import read_json_object

logger = logging.getLogger(__name__)

# Weights, configuration and tokenizer; no pickles and no code.
DOWNLOADED = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "*.txt"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(model_source: str | Path, *, revision: str | None = None) -> Path:
    """The local directory of a model, downloaded into the hub cache where it is not there yet.

    Args:
        model_source: A directory, or a hub name such as "mistralai/Mixtral-8x7B-Instruct-v0.1".
        revision: Branch, tag or commit of a hub name.

    Raises:
        ConfigError: Neither a directory nor something that can be a hub name.
        CheckpointError: The hub does not have it, or cannot be reached.
    """
    path = Path(model_source).expanduser()
    if path.is_dir():
        return path
    name = str(model_source)
    if path.exists() or not is_hub_name(name):
        kind = "a file" if path.exists() else "not there, and not a name on the Hugging Face hub"
        raise ConfigError(f"model_source {name!r} is {kind}; give a directory with config.json")
    cached = _find_cached(name, revision)
    return cached if cached is not None else _download(name, revision)


def find_model(model_source: str | Path) -> Path | None:
    """The local directory of a model that is here already; None for one to be downloaded."""
    path = Path(model_source).expanduser()
    if path.is_dir():
        return path
    name = str(model_source)
    return _find_cached(name, None) if is_hub_name(name) and not path.exists() else None


def is_hub_name(text: str) -> bool:
    """Whether this can be a name on the Hugging Face hub."""
    return _HUB_NAME.fullmatch(text) is not None


def fetch_config(name: str, *, revision: str | None = None) -> Path:
    """The `config.json` of a hub name, downloaded into the hub cache where it is not there yet.

    Raises:
        CheckpointError: The hub does not have it, or cannot be reached.
    """
    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json", revision=revision))
    except (OSError, ValueError) as error:
        raise _unreachable(name, error) from error


def _find_cached(name: str, revision: str | None) -> Path | None:
    try:
        found = Path(
            huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True)
        )
    except (LocalEntryNotFoundError, ValueError):
        return None
    return found if _is_complete(found) else None


def _is_complete(directory: Path) -> bool:
    """Whether configuration and all weight files are there; a broken cache downloads again."""
    if not (directory / "config.json").is_file():
        return False
    if (directory / SINGLE_FILE).is_file():
        return True
    if not (directory / INDEX_FILE).is_file():
        return False
    weight_map = read_json_object(directory, INDEX_FILE).get("weight_map")
    files = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    return all(isinstance(file, str) and (directory / file).is_file() for file in files)


def _download(name: str, revision: str | None) -> Path:
    logger.info("downloading %s into the Hugging Face cache", name)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=DOWNLOADED, max_workers=4
            )
        )
    except (OSError, ValueError) as error:
        raise _unreachable(name, error) from error


def _unreachable(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{name!r} is neither a local directory nor in the Hugging Face cache, and downloading it "
        f"failed ({type(error).__name__}: {error}); check the name, the network and the access "
        "token, or give a directory"
    )
