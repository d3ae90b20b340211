"""Nodes of a cluster: those that run, and those that its autoscaler may still start.

Ray has no one place that lists an autoscaler's groups of nodes. Anyscale reports them to Ray;
KubeRay has them in the RayCluster; Ray's launcher leaves its file on the head.
"""

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.util import get_node_ip_address

ACCELERATOR = "accelerator_type:"  # what Ray names the resource of a kind of GPU
ACCELERATOR_LABEL = "ray.io/accelerator-type"
GROUP_LABEL = "ray.io/node-group"
NODE_LABEL = "ray.io/node-id"
HEAD_RESOURCE = "node:__internal_head__"
LAUNCHER_FILE = Path("~/ray_bootstrap_config.yaml")  # Ray's launcher copies it to the head
NO_LIMIT = -1
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster.

    Attributes:
        resources: What Ray gives away of it, in all; `memory` in bytes.
        node_id: Ray's name of a node that runs.
    """

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    node_id: str = ""

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> "Node":
        """The node that an entry of `ray.nodes()` describes."""
        return cls(
            resources=node["Resources"],
            labels=node.get("Labels") or {},
            address=node.get("NodeManagerAddress", ""),
            node_id=node.get("NodeID", ""),
        )

    @property
    def gpu_name(self) -> str:
        """Ray's name of the GPU in lower case; "" if there is none, or it is unknown."""
        names = [name for name in self.resources if name.startswith(ACCELERATOR)]
        name = names[0].removeprefix(ACCELERATOR) if names else ""
        return (name or self.labels.get(ACCELERATOR_LABEL, "")).lower()

    @property
    def kind(self) -> "Kind":
        """What is the same of like nodes: CPUs, GPUs, their name, and memory within some 9 %.

        Two machines of a kind differ by what their systems hold of the memory.
        """
        memory = round(8 * math.log2(self.resources.get("memory", 0) + 1))
        return self.resources.get("CPU", 0), self.resources.get("GPU", 0), self.gpu_name, memory


Kind = tuple[float, float, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Like nodes that an autoscaler starts and ends.

    Attributes:
        max_count: The most nodes of it, those that run among them; `NO_LIMIT` for no limit.
    """

    name: str
    resources: Mapping[str, float]
    max_count: int
    min_count: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_come(self, alive: Sequence[Node]) -> list[Node]:
        """Return the nodes of it that do not run; one if there is no limit."""
        num_running = sum(self._has(node) for node in alive)
        limit = (
            max(self.min_count, num_running + 1) if self.max_count == NO_LIMIT else self.max_count
        )
        labels = {**self.labels, GROUP_LABEL: self.name}
        node = Node(resources=dict(self.resources), labels=labels)
        return list(repeat(node, max(0, limit - num_running)))

    def _has(self, node: Node) -> bool:
        name = node.labels.get(GROUP_LABEL)
        if name is not None or HEAD_RESOURCE in node.resources:
            return name == self.name
        return all(
            node.resources.get(one, 0) == self.resources.get(one, 0) for one in ("CPU", "GPU")
        )


def nodes_to_come(alive: Sequence[Node]) -> list[Node]:
    """Return the nodes that the autoscaler may start besides those that run.

    None where there is no autoscaler, or nothing here knows its groups.
    """
    head = next((node for node in alive if HEAD_RESOURCE in node.resources), None)
    groups, limit = find_groups(head)
    found: Iterable[Node] = (node for group in groups for node in group.to_come(alive))
    if limit is not None:
        found = islice(found, max(0, limit - sum(node is not head for node in alive)))
    return list(found)


def find_groups(head: Node | None) -> tuple[list[NodeGroup], int | None]:
    """Return the groups of workers, and the most workers in all if there is such a limit."""
    reported = ray._private.state.state.get_cluster_config()  # noqa: SLF001 - Ray has no public way
    if reported is not None and reported.node_group_configs:
        return list(_reported(reported.node_group_configs, head)), None
    config = _of_kuberay() or _of_launcher(head)
    return ([], None) if config is None else (list(_configured(config)), config.get("max_workers"))


def _reported(groups: Iterable[Any], head: Node | None) -> Iterator[NodeGroup]:
    for group in groups:
        resources = dict(group.resources)
        # As Ray Data does it: a group of one node like the head is that of the head.
        is_heads = head is not None and group.max_count == 1 and all(
            int(head.resources.get(name, 0)) == resources.get(name, 0) for name in ("CPU", "GPU")
        )  # fmt: skip
        if resources and not is_heads:
            yield NodeGroup(name=group.name, resources=resources, max_count=group.max_count,
                            min_count=group.min_count)  # fmt: skip


def _configured(config: Mapping[str, Any]) -> Iterator[NodeGroup]:
    for name, group in config["available_node_types"].items():
        if name != config.get("head_node_type") and group.get("resources"):
            yield NodeGroup(
                name=name,
                resources=group["resources"],
                max_count=group.get("max_workers", config.get("max_workers", 0)),
                min_count=group.get("min_workers", 0),
                labels=group.get("labels") or {},
            )


def _of_launcher(head: Node | None) -> Mapping[str, Any] | None:
    """Read the launcher's file, if this machine is the head that it has started."""
    if head is None or head.address != get_node_ip_address():
        return None
    try:
        config = yaml.safe_load(LAUNCHER_FILE.expanduser().read_text())
    except (OSError, RuntimeError, ValueError, yaml.YAMLError):  # no such file, or none of Ray's
        return None
    is_of_it = isinstance(config, dict) and "available_node_types" in config
    is_of_it = is_of_it and config.get("head_node_type") == head.labels.get(GROUP_LABEL)
    return config if is_of_it else None


def _of_kuberay() -> Mapping[str, Any] | None:
    """Read the RayCluster that this pod is of; None outside of KubeRay."""
    variables = os.environ  # noqa: TID251 - KubeRay's own, and those of Kubernetes
    name = variables.get("RAY_CLUSTER_NAME")
    if name is None or "KUBERNETES_SERVICE_HOST" not in variables:
        return None
    # These are private in Ray, which has no public equivalent; its versions are pinned.
    from ray.autoscaler._private.kuberay import autoscaling_config  # noqa: PLC0415
    from ray.autoscaler._private.kuberay.node_provider import (  # noqa: PLC0415
        KubernetesHttpApiClient,
    )

    try:
        namespace = variables.get("RAY_CLUSTER_NAMESPACE") or _NAMESPACE_FILE.read_text().strip()
        client = KubernetesHttpApiClient(namespace=namespace)
        cluster = client.get(f"rayclusters/{name}")
        if not cluster["spec"].get("enableInTreeAutoscaling"):
            return None
        return dict(autoscaling_config._derive_autoscaling_config_from_ray_cr(cluster))  # noqa: SLF001
    except Exception as error:  # a role that may not, a network that is closed
        logger.info(  # without an autoscaler a head often may not
            "the groups of nodes of the RayCluster %s cannot be read (%s: %s): the plan is for the "
            "nodes that run", name, type(error).__name__, error,
        )  # fmt: skip
        return None
