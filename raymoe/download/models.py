"""What is meant by a model: a directory, a name on the Hugging Face hub, or objects in a store."""

import logging
from pathlib import Path
from urllib.parse import unquote, urlsplit

from raymoe.download.copies import find_copy
from raymoe.download.files import RemoteModel
from raymoe.download.hub import HubModel
from raymoe.download.stores import StoreModel
from raymoe.specs.adapter_config import base_and_adapter
from raymoe.specs.files import CONFIG_FILE, local_model, read_config
from raymoe.specs.model import ModelSpec
from raymoe.units import format_bytes

# A notebook shows INFO of Ray Data's loggers, and of no others.
notebook_logger = logging.getLogger("ray.data.raymoe")


def open_model(model_source: str | Path, *, revision: str | None = None) -> Path | RemoteModel:
    """Return the directory or the remote model that is meant; nothing is asked for.

    Args:
        model_source: A directory, a hub name such as "mistralai/Mixtral-8x7B-Instruct-v0.1" (also
            after "hf://"), or a URI such as "s3://bucket/models/Mixtral-8x7B".
        revision: Branch, tag or commit of a hub name.

    Raises:
        ConfigError: None of these.
    """
    name = str(model_source)
    if name.startswith("hf://"):
        return HubModel.parse(name)
    if name.startswith("file://"):
        return open_model(unquote(urlsplit(name).path))
    if "://" in name:
        return StoreModel(name.rstrip("/"))
    return local_model(model_source) or HubModel(name, revision)


def resolve_model(model_source: str | Path, *, revision: str | None = None) -> Path:
    """Return the local directory of a model; download it if it is missing, once a node.

    Args:
        model_source: As for `open_model`.
        revision: The same.

    Raises:
        ConfigError: As `open_model`.
        CheckpointError: There is no such model for this user, or it cannot be reached.
    """
    model = open_model(model_source, revision=revision)
    return model if isinstance(model, Path) else model.download()


def find_model(model_source: str | Path) -> Path | None:
    """Return the local directory of a model; None if it would have to be downloaded.

    Raises:
        ConfigError: As `open_model`.
    """
    model = open_model(model_source)
    return model if isinstance(model, Path) else model.find()


def find_files(model_source: str | Path) -> Path | None:
    """Return a local directory with what plans read of a model; None if there is none yet.

    Nothing is downloaded. Its weights may be missing. Of an adapter elsewhere it is that of its
    base.

    Raises:
        ConfigError: As `open_model`.
    """
    model = open_model(model_source)
    if isinstance(model, Path):
        return model
    directory = model.find_files() or find_copy(model_source)
    if directory is None or (directory / CONFIG_FILE).is_file():
        return directory
    base, _, _ = base_and_adapter(directory, None)
    return find_files(base)


def fetch_files(model_source: str | Path) -> Path:
    """Bring what plans read of a model to this machine: everything but weights; return where it is.

    The configuration comes first, and a model that is not supported is refused by it.

    Raises:
        ConfigError: As `open_model`.
        UnsupportedModelError: The model's mathematics is not implemented.
        CheckpointError: There is no such model for this user, or one without safetensors.
        UnreachableError: It cannot be reached from here.
    """
    model = open_model(model_source)
    directory, num_bytes = (
        (model, 0) if isinstance(model, Path) else model.fetch_files(_check_config)
    )
    if num_bytes:
        notebook_logger.info(
            "%s: each node that does not have it downloads %s once", model, format_bytes(num_bytes)
        )
    base, adapter, _ = base_and_adapter(directory, None)
    return directory if adapter is None else fetch_files(base)


def _check_config(directory: Path) -> None:
    """Refuse a model that is not supported; of an adapter, its base says."""
    if (directory / CONFIG_FILE).is_file():
        ModelSpec.from_config(read_config(directory), name=directory.name)
