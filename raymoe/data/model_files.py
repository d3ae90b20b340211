"""What a plan reads of a model that is elsewhere: the driver fetches it, or a node does for it."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymoe.download.copies import find_copy, write_copy
from raymoe.download.files import UnreachableError, is_small
from raymoe.download.models import fetch_files
from raymoe.errors import CheckpointError, RaymoeError
from raymoe.specs.adapter_config import base_and_adapter
from raymoe.specs.files import MAX_JSON_BYTES

NODE_LIMIT_S = 60.0  # a worker starts in seconds, and the hub answers in as many

logger = logging.getLogger(__name__)

Contents = dict[str, bytes]


def fetch_for_plan(
    model_source: str | Path, *, runtime_env: Mapping[str, Any] | None = None
) -> None:
    """Bring a model's configuration and tokenizer to the driver before any actor starts.

    What the driver cannot fetch, for want of a network or of access, a node may: it has the network
    and the environment of the actors. Without a Ray to ask, a driver without a network knows
    nothing of the model, and does not refuse it.

    Args:
        runtime_env: Of the actors, which may hold their access token.

    Raises:
        ConfigError: Neither a directory nor a possible name.
        UnsupportedModelError: The model's mathematics is not implemented.
        CheckpointError: Neither this machine nor a node is given the model.
    """
    model_source, _, _ = base_and_adapter(model_source, None)
    try:
        fetch_files(model_source)
    except CheckpointError as error:
        node = _other_node(runtime_env)
        if node is not None:
            _fetch_on_node(model_source, node, runtime_env, error)
        elif find_copy(model_source) is not None:
            logger.info("as a node fetched it before: %s", error)
        elif not ray.is_initialized() and (runtime_env or isinstance(error, UnreachableError)):
            logger.info("no plan before Ray runs: %s", error)
        else:
            raise


def _other_node(runtime_env: Mapping[str, Any] | None) -> str | None:
    """Return a node whose network or environment is not the driver's; one with GPUs if any has."""
    if not ray.is_initialized():
        return None
    here = None if runtime_env else get_node_ip_address()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] != here]

    def size(node: Mapping[str, Any]) -> tuple[float, float]:
        return node["Resources"].get("GPU", 0), node["Resources"].get("CPU", 0)

    return max(nodes, key=size)["NodeID"] if nodes else None


def _fetch_on_node(
    model_source: str | Path,
    node: str,
    runtime_env: Mapping[str, Any] | None,
    problem: CheckpointError,
) -> None:
    """Have a node fetch the files, and keep a copy of them here."""
    logger.info("%s; asking a node of the cluster", problem)
    task = ray.remote(num_cpus=0, max_retries=0)(_read_files).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        runtime_env=dict(runtime_env or {}),
    )
    reply = task.remote(str(model_source))
    try:
        contents = ray.get(reply, timeout=NODE_LIMIT_S)
    except GetTimeoutError:
        ray.cancel(reply, force=True)
        logger.warning(
            "there is no plan: %s; nor has a node answered within %g s", problem, NODE_LIMIT_S
        )
        return
    except RayTaskError as error:
        if not isinstance(error.cause, RaymoeError):
            raise
        # A node that is asked in vain says less than an answer to the driver.
        is_silent = isinstance(error.cause, UnreachableError)
        raise (problem if is_silent else error.cause) from None
    try:
        write_copy(model_source, contents)
    except OSError as error:
        logger.warning("there is no plan: the model's files cannot be kept here (%s)", error)


def _read_files(model_source: str) -> Contents:
    """Return the names and contents of a model's small files; runs on a node."""
    directory = fetch_files(model_source)
    paths = [path for path in directory.rglob("*") if path.is_file() and is_small(path.name)]
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in paths
        if path.stat().st_size <= MAX_JSON_BYTES
    }
