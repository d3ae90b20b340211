"""Pictures of a plan: its operations counted by hand, its memories, and whose curves there are."""

import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.draw import HEIGHT, LEFT, RIGHT, WIDTH, roofline_picture, throughput_picture
from raymoe.plan.operations import attention, feed_forward
from raymoe.plan.plan import Plan
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.search import find_plan
from raymoe.plan.work import ModelWork, Operation
from raymoe.specs.hardware import HardwareSpec, hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload
from raymoe.units import GIB

MIXTRAL, L4 = model_preset("mixtral-8x7b"), hardware_preset("l4")
WORKLOAD = Workload(num_rows=2000, prompt_tokens=100, generated_tokens=20)
EXPERT_BYTES = 3 * 4096 * 14336 * 2


def experts(plan: Plan) -> Operation:
    return feed_forward(plan.steps, plan.decode_load)


def plan_with(
    *,
    rows: int = 512,
    micro_batches: int = 8,
    group: int = 1,
    resident: int = 0,
    node: HardwareSpec = L4,
) -> Plan:
    policy = Policy(
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
        max_prefill_chunk_tokens=256,
        num_kv_blocks=4 * rows,
        device=DevicePolicy(
            num_micro_batches=micro_batches, micro_batches_per_group=group, resident_bytes=resident
        ),
    )
    return find_plan(MIXTRAL, node, WORKLOAD, schedule="micro_batches", policy=policy)


@pytest.mark.parametrize(("group", "launches"), [(1, 8), (3, 3), (8, 1)])
def test_the_feed_forward_network_is_counted(group: int, launches: int) -> None:
    """Eight experts, of which each token meets two; every launch has tokens for all of them."""
    found = experts(plan_with(group=group))
    assert found.name == "FFN of 512 tokens"
    assert found.flop == 512 * 32 * 2 * 2 * (EXPERT_BYTES // 2)
    assert found.near_bytes == pytest.approx(launches * 32 * 8 * EXPERT_BYTES, rel=1e-6)
    attention_part = 32 * (2 * (4096 * (4096 + 1024 + 1024 + 4096) + 8 * 4096 + 2 * 4096))
    assert found.far_bytes == 32 * 8 * EXPERT_BYTES + attention_part


def test_what_stays_is_not_fetched() -> None:
    chosen = plan_with(resident=8 * GIB)
    resident = chosen.steps.placement.resident_bytes
    assert resident > 7 * GIB
    assert experts(chosen).far_bytes == experts(plan_with()).far_bytes - resident


def test_attention_reads_its_context_once() -> None:
    """Four queries share a head of KV: 4 operations for each of its 2-byte numbers, twice."""
    found = attention(ModelWork.of(MIXTRAL, 2), 110)
    assert found.name == "attention at 110 tokens"
    assert found.far_bytes == found.near_bytes == 110 * 32 * 2 * 8 * 128 * 2
    assert found.flop / found.near_bytes == 4


def test_the_roofline_holds_both_operations() -> None:
    chosen = plan_with()
    picture = roofline_picture(chosen)
    text = "".join(ET.fromstring(picture).itertext())
    for wanted in ("mixtral-8x7b on l4", "FFN of 512 tokens", "attention at 110 tokens", "P1 at"):
        assert wanted in text


def draw(chosen: Plan, min_gib: float = 0.0) -> tuple[ET.Element, list[int]]:
    """The picture with our curve as a straight line, and the memories that were planned for."""
    asked = []

    def plan_on(node: HardwareSpec) -> Plan:
        asked.append(node.host_memory_bytes)
        if node.host_memory_bytes < min_gib * GIB:
            raise InfeasiblePlanError("too little")
        return replace(chosen, hardware=node)

    return ET.fromstring(throughput_picture(chosen, MIXTRAL, plan_on)), asked


def test_memory_goes_from_the_weights_to_twice_what_the_node_has() -> None:
    chosen = plan_with(
        node=replace(L4, host_memory_bytes=random.Random().randrange(120, 200) * GIB)
    )
    own, weights = chosen.hardware.host_memory_bytes, chosen.footprint.bytes_of("weights")
    root, asked = draw(chosen)
    assert weights < asked[0] < own < 2 * own == asked[-1]
    assert own not in asked, "there is a plan for it"
    assert asked == sorted(asked)
    names = [text.text for text in root.iter() if text.text]
    for wanted in ("raymoe", "CGOPipe, policy of MoE-Lightning", "VSLPipe, policy of MoE-Lens"):
        assert wanted in names


def test_where_nothing_fits_there_is_no_point() -> None:
    chosen = plan_with()
    root, asked = draw(chosen, min_gib=150)
    line = next(p for p in root.iter() if p.get("fill") == "none" and p.get("d"))
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", line.get("d", ""))
    assert len(points) == 1 + sum(memory >= 150 * GIB for memory in asked)
    for x, y in points:
        assert LEFT <= float(x) <= WIDTH - RIGHT
        assert float(y) <= HEIGHT


def test_a_job_for_which_a_paper_has_no_formula() -> None:
    """MoE-Lightning counts the steps after the one that gives the first token."""
    chosen = replace(plan_with(), workload=replace(WORKLOAD, generated_tokens=1))
    root, _ = draw(chosen)
    names = [text.text for text in root.iter() if text.text]
    assert "VSLPipe, policy of MoE-Lens" in names
    assert "CGOPipe, policy of MoE-Lightning" not in names


def test_a_host_alone_is_compared_with_nobody() -> None:
    """The papers are about nodes with a GPU."""
    small = ModelSpec.from_config(
        {
            "model_type": "mixtral",
            "hidden_size": 256,
            "num_attention_heads": 8,
            "num_hidden_layers": 2,
            "intermediate_size": 512,
            "vocab_size": 1000,
        }
    )
    chosen = find_plan(small, L4.without_gpu(), WORKLOAD)
    picture = throughput_picture(chosen, small, lambda node: replace(chosen, hardware=node))
    assert "raymoe" in picture
    assert "policy of" not in picture
