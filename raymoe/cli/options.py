"""Values that several commands take."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import ray

from raymoe.data.cluster import Cluster
from raymoe.data.sizing import configure_data_context
from raymoe.device.host import read_host
from raymoe.errors import ConfigError
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS, model_preset
from raymoe.units import MIB, parse_bytes


def size(text: object) -> int:
    """Parser of an option such as --host-memory 192GiB; typer sends the default through it, too."""
    return parse_bytes(str(text))


def model_by_name(text: str) -> ModelSpec:
    """The model that --model names: a preset, or else a directory with a `config.json`.

    Raises:
        UnknownOptionError: Neither; names the nearest preset.
        ConfigError: A path where there is no directory, or a model that is not supported.
        CheckpointError: The directory's `config.json` cannot be read.
    """
    path = Path(text)
    if path.is_dir() and text.lower() not in MODEL_PRESETS:
        return ModelSpec.from_directory(path)
    if path.name != text:
        raise ConfigError(
            f"--model {text}: there is no such directory; by name there are "
            f"{', '.join(MODEL_PRESETS)}"
        )
    return model_preset(text)


os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # read when Ray is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


STDERR = 2
OBJECT_STORE_BYTES = 400 * MIB


def has_cluster() -> bool:
    """Whether RAY_ADDRESS names a cluster to use."""
    return bool(os.environ.get("RAY_ADDRESS"))


def this_machine() -> Cluster:
    """Return what a Ray on this machine will have."""
    host = read_host()
    memory_bytes = host.available_memory_bytes - OBJECT_STORE_BYTES
    return Cluster(
        num_nodes=1, num_cpus=host.num_cores, num_gpus=0, memory_bytes=max(1, memory_bytes)
    )


@contextmanager
def running_ray(*, preserve_order: bool, verbose: bool) -> Iterator[None]:
    """Connect to Ray, or start it; leave or end it afterwards.

    Args:
        preserve_order: Rows come out in the order of the input.
        verbose: Show what Ray and the actors log.
    """
    address = os.environ.get("RAY_ADDRESS")
    with nullcontext() if verbose else _without_stderr():
        _start(address, verbose=verbose)
    context = configure_data_context(preserve_order=preserve_order)
    context.enable_progress_bars = False
    if not verbose:
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        ray.shutdown()


def _start(address: str | None, *, verbose: bool) -> None:
    level = "info" if verbose else "error"
    if address:
        ray.init(address, logging_level=level, log_to_driver=verbose)
        return
    ray.init(
        "local",
        num_cpus=read_host().num_cores,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level=level,
        log_to_driver=verbose,
    )


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Hide what native code prints while Ray starts; exceptions still say what went wrong."""
    sys.stderr.flush()
    saved = os.dup(STDERR)
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), STDERR)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, STDERR)
        os.close(saved)
