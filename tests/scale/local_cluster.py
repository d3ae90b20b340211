"""A Ray cluster of many nodes on this machine, with GPUs that are not there."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

from raymoe.units import MIB

HEAD_CPUS = 2  # reads and the like run there
HEAD_STORE_BYTES, NODE_STORE_BYTES = 300 * MIB, 100 * MIB


@contextmanager
def local_cluster(num_nodes: int) -> Iterator[None]:
    """Start a head and nodes with one CPU and one pretended GPU each; end them afterwards."""
    common = {"include_dashboard": False}
    with (
        tempfile.TemporaryDirectory(prefix="raymoe-", ignore_cleanup_errors=True) as directory,
        # Holds the address for `ray.init()` too: a cluster that a user has started keeps its own.
        _environment_variable("RAY_TMPDIR", directory),
    ):
        head = {"num_cpus": HEAD_CPUS, "num_gpus": 0, "object_store_memory": HEAD_STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args={**common, **head})
        try:
            for _ in range(num_nodes):
                cluster.add_node(
                    num_cpus=1, num_gpus=1, object_store_memory=NODE_STORE_BYTES, **common
                )
            cluster.wait_for_nodes()
            ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
