"""Which nodes an autoscaler may still start, wherever its groups are written."""

from types import SimpleNamespace

import pytest
import ray
import yaml
from ray.autoscaler._private.kuberay import node_provider

from raymoe.data import nodes as nodes_module
from raymoe.data.nodes import GROUP_LABEL, HEAD_RESOURCE, NO_LIMIT, Node, NodeGroup, nodes_to_come
from raymoe.units import GIB

HEAD = Node(resources={HEAD_RESOURCE: 1.0, "CPU": 4.0}, labels={GROUP_LABEL: "head"}, address="h")
L4 = {"CPU": 64, "GPU": 1, "memory": 200 * GIB}
WORKER = Node(resources=L4, labels={GROUP_LABEL: "l4"}, node_id="w")


@pytest.fixture
def reported(monkeypatch):
    """What an autoscaler reports to Ray; a test fills it."""
    groups = []
    config = SimpleNamespace(node_group_configs=groups)
    monkeypatch.setattr(ray._private.state.state, "get_cluster_config", lambda: config)
    return groups


def group(name, resources, most, least=0):
    return SimpleNamespace(name=name, resources=resources, max_count=most, min_count=least)


def test_groups_that_are_reported_to_ray(reported):
    reported += [group("head", {"CPU": 4}, 1), group("l4", L4, 3), group("off", L4, 0)]
    to_come = nodes_to_come([HEAD, WORKER])
    assert [node.resources for node in to_come] == [L4, L4]
    assert to_come[0].labels == {GROUP_LABEL: "l4"}
    assert len(nodes_to_come([HEAD, Node(resources=dict(L4))])) == 2  # a worker without labels
    reported[:] = [group("l4", L4, NO_LIMIT)]
    assert len(nodes_to_come([HEAD, WORKER])) == 1
    reported[:] = [group("l4", L4, NO_LIMIT, least=5)]
    assert len(nodes_to_come([HEAD, WORKER])) == 4


def test_the_file_of_rays_launcher_counts_on_the_head_that_it_has_started(
    reported, monkeypatch, tmp_path
):
    types = {
        "head": {"resources": {"CPU": 4}, "max_workers": 0},
        "l4": {"resources": L4, "max_workers": 8, "labels": {"market": "spot"}},
        "unknown": {"resources": {}},
    }
    config = {"available_node_types": types, "head_node_type": "head", "max_workers": 5}
    path = tmp_path / "ray_bootstrap_config.yaml"
    monkeypatch.setattr(nodes_module, "LAUNCHER_FILE", path)
    monkeypatch.setattr(nodes_module, "get_node_ip_address", lambda: "h")
    assert not nodes_to_come([HEAD])
    path.write_text(yaml.safe_dump(config))
    found = nodes_to_come([HEAD, WORKER])
    assert len(found) == 4
    assert found[0].labels == {GROUP_LABEL: "l4", "market": "spot"}
    assert not nodes_to_come([Node(resources=HEAD.resources, address="elsewhere")])
    path.write_text(yaml.safe_dump(config | {"head_node_type": "of another cluster"}))
    assert not nodes_to_come([HEAD])


class Kubernetes:
    """The API of Kubernetes, with one RayCluster."""

    def __init__(self, namespace):
        assert namespace == "jobs"

    def get(self, path):
        if path != "rayclusters/mine":
            raise OSError("403 Forbidden")
        limits = {"cpu": "30", "memory": "120Gi", "nvidia.com/gpu": "1"}
        template = {"spec": {"containers": [{"resources": {"limits": limits}}]}}
        workers = {"groupName": "l4", "minReplicas": 0, "maxReplicas": 4, "rayStartParams": {},
                   "template": template}  # fmt: skip
        head = {"rayStartParams": {"num-cpus": "0"}, "template": template}
        spec = {"enableInTreeAutoscaling": True, "headGroupSpec": head}
        return {"metadata": {"name": "mine", "namespace": "jobs"},
                "spec": spec | {"workerGroupSpecs": [workers]}}  # fmt: skip


def test_the_groups_of_kuberay_are_those_of_its_raycluster(reported, monkeypatch, caplog):
    monkeypatch.setattr(node_provider, "KubernetesHttpApiClient", Kubernetes)
    for name, value in {"NAME": "mine", "NAMESPACE": "jobs"}.items():
        monkeypatch.setenv(f"RAY_CLUSTER_{name}", value)
    assert not nodes_to_come([HEAD])
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    found = nodes_to_come([HEAD])
    assert len(found) == 4
    assert found[0].resources == {"CPU": 30, "GPU": 1, "memory": 120 * GIB}
    assert not caplog.records
    monkeypatch.setenv("RAY_CLUSTER_NAME", "other")
    with caplog.at_level("INFO"):
        assert not nodes_to_come([HEAD])
    assert "RayCluster other cannot be read (OSError: 403 Forbidden)" in caplog.text


def test_a_group_gives_no_more_nodes_than_it_may_have():
    few = NodeGroup(name="l4", resources=L4, max_count=1)
    assert not few.to_come([HEAD, WORKER, WORKER])
