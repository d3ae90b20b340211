"""Plans: they fit, they are chosen by prediction, and what does not fit is refused with numbers."""

import gc
import re
from dataclasses import replace

import pytest

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.policy import Policy
from raymoe.plan.search import GOOD_SIZE, find_plan
from raymoe.plan.sizes import HOST_TOKENS
from raymoe.specs.hardware import HardwareSpec, hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload
from raymoe.units import GIB

MODEL = ModelSpec.from_config(
    {
        "model_type": "mixtral",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": 12,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 2816,
        "max_position_embeddings": 4096,
        "vocab_size": 32000,
    },
    name="mixtral-0.9b",
)


def node(gib: float = 24, bandwidth: float = 36e9, flop: float = 440e9) -> HardwareSpec:
    return HardwareSpec(
        name="node",
        num_cores=2,
        host_memory_bytes=int(gib * GIB),
        host_bytes_per_s=bandwidth,
        host_flop_per_s=flop,
    )


@pytest.mark.parametrize("gib", [3.2, 4, 6, 12, 96])
def test_a_plan_fits_its_memory(gib: float) -> None:
    plan = find_plan(MODEL, node(gib))
    assert plan.footprint.total <= gib * GIB


def test_more_memory_never_plans_less_speed() -> None:
    rates = [find_plan(MODEL, node(gib)).tokens_per_s for gib in (3.2, 3.5, 4, 6, 12, 48)]
    assert all(rate >= GOOD_SIZE * max(rates[:number]) for number, rate in enumerate(rates, 1))


def test_a_model_that_does_not_fit_is_refused_with_the_bytes_missing() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        find_plan(MODEL, node(2))
    text = str(caught.value)
    assert "mixtral-0.9b with one sequence needs" in text
    needs = re.search(r"needs ([\d.]+) GiB.*?\(([\d.]+) MiB short\)", text)
    assert needs is not None
    assert float(needs[1]) * 1024 - 2048 == pytest.approx(float(needs[2]), abs=6)
    for part in ("weights", "KV cache", "activations", "runtime", "total"):
        assert part in text


def test_a_given_policy_is_taken_or_refused_never_changed() -> None:
    policy = Policy(
        max_num_seqs=7, max_num_batched_tokens=64, max_prefill_chunk_tokens=7, num_kv_blocks=40
    )
    assert find_plan(MODEL, node(), policy=policy).policy == policy
    huge = Policy(
        max_num_seqs=7, max_num_batched_tokens=64, max_prefill_chunk_tokens=7, num_kv_blocks=10**6
    )
    with pytest.raises(InfeasiblePlanError, match="KV cache"):
        find_plan(MODEL, node(), policy=huge)


def test_a_slower_memory_asks_for_larger_batches() -> None:
    fast, slow = find_plan(MODEL, node(96)), find_plan(MODEL, node(96, bandwidth=0.5e9))
    assert slow.policy.max_num_batched_tokens > fast.policy.max_num_batched_tokens
    assert slow.policy.max_num_seqs > fast.policy.max_num_seqs


def test_the_prediction_approaches_the_rates_of_the_hardware() -> None:
    plan = find_plan(MODEL, node(), Workload(num_rows=64, prompt_tokens=96, generated_tokens=32))
    flop_per_token = 2 * (MODEL.num_active_parameters - 2 * MODEL.vocab_size * MODEL.hidden_size)
    assert plan.prefill_tokens_per_s == pytest.approx(440e9 / flop_per_token, rel=0.08)
    assert plan.prefill_tokens_per_s < 440e9 / flop_per_token
    assert plan.policy.max_num_batched_tokens in HOST_TOKENS


def test_the_description_names_policy_memory_and_prediction() -> None:
    plan = find_plan(MODEL, node())
    for text in ("policy: schedule in_place", "KV cache", "predicted: prefill", "2048 rows in"):
        assert text in plan.describe()


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "num_kv_blocks"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_policies_without_meaning_are_refused(field: str, value: object) -> None:
    sizes = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "max_prefill_chunk_tokens": 1,
        "num_kv_blocks": 1,
    }
    with pytest.raises(ConfigError, match=f"Policy.{field} is"):
        Policy(**{**sizes, field: value})


@pytest.mark.parametrize("is_enabled", [True, False])
def test_planning_leaves_the_collector_as_it_was(*, is_enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        find_plan(MODEL, node(96))
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_what_a_refusal_advises_resolves_it() -> None:
    """By what does not fit: the weights, the KV cache of the longest row, or a given policy."""
    model = model_preset("mixtral-8x7b")
    weights = model.weight_bytes(2)
    tight = HardwareSpec(
        name="tight", num_cores=8, host_memory_bytes=weights + 4 * GIB, host_bytes_per_s=1e11,
        host_flop_per_s=1e12,
    )  # fmt: skip
    with pytest.raises(InfeasiblePlanError, match="--max-model-len") as refused:
        find_plan(model, replace(tight, host_memory_bytes=weights + 5 * GIB))
    assert "(max_model_len;" in str(refused.value)
    assert find_plan(model, replace(tight, host_memory_bytes=weights + 5 * GIB), max_model_len=2048)
    for node in (replace(tight, host_memory_bytes=weights), hardware_preset("t4")):
        node = replace(node, host_memory_bytes=weights // 2)  # noqa: PLW2901 - the same node
        with pytest.raises(
            InfeasiblePlanError, match="All but the KV cache is too much"
        ) as refused:
            find_plan(model, node, max_model_len=2048)
        assert "--weights fp8" in str(refused.value)
    large = Policy(max_num_seqs=64, max_num_batched_tokens=512, max_prefill_chunk_tokens=512,
                   num_kv_blocks=20_000)  # fmt: skip
    roomy = replace(tight, host_memory_bytes=weights + 20 * GIB)
    with pytest.raises(InfeasiblePlanError, match="leave the policy out"):
        find_plan(model, roomy, policy=large)
    assert find_plan(model, roomy, policy=replace(large, num_kv_blocks=2000))
    assert find_plan(model, roomy, max_model_len=2048)
