"""The papers' policies on our terms: their own sizes where these fit, and never more than fits."""

import random
from dataclasses import replace

import pytest

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.papers.hrm import PaperModel
from raymoe.plan.papers.moe_lens import LensNode, stage2
from raymoe.plan.papers.moe_lightning import LightningOptimizer
from raymoe.plan.papers.policies import PaperPolicies
from raymoe.plan.plan import Plan
from raymoe.plan.search import find_plan
from raymoe.specs.hardware import HARDWARE_PRESETS, HardwareSpec, hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from raymoe.specs.quantization import parse_quantization
from raymoe.specs.workload import Workload
from raymoe.units import GIB

MIXTRAL = model_preset("mixtral-8x7b")
MTBENCH = Workload(num_rows=20_000, prompt_tokens=77, generated_tokens=128)
CHOOSERS = {
    "cgopipe": PaperPolicies.cgopipe,
    "vslpipe": PaperPolicies.vslpipe,
    "flexgen_s3": PaperPolicies.flexgen_s3,
    "flexgen_s4": PaperPolicies.flexgen_s4,
    "layer_by_layer": PaperPolicies.layer_by_layer,
}


def plan(schedule: str, node: HardwareSpec, workload: Workload = MTBENCH) -> Plan:
    """Refused where the sizes do not fit our count of memory."""
    policy = CHOOSERS[schedule](PaperPolicies(MIXTRAL, node, workload))
    return find_plan(MIXTRAL, node, workload, schedule=schedule, policy=policy)


def test_moe_lightning_keeps_its_batch_and_micro_batches() -> None:
    node = hardware_preset("l4")
    best = LightningOptimizer(
        model=PaperModel.of(MIXTRAL), hardware=node, prompt_tokens=77, generated_tokens=128
    ).best()
    policy = plan("cgopipe", node).policy
    assert policy.device is not None
    assert policy.max_num_seqs == best.batch_size
    assert policy.device.num_micro_batches == best.num_micro_batches
    assert policy.num_kv_blocks * 32 >= best.batch_size * (77 + 128)
    experts = 32 * 8 * 3 * 4096 * 14336 * 2
    matrices = 32 * 2 * (2 * 4096 * (4096 + 1024) + 8 * 4096)
    norms = 32 * 2 * (2 * 4096)
    kept = policy.device.resident_bytes - int(best.resident_fraction * experts)
    assert kept == matrices + norms, "all that is not an expert"


def test_where_less_fits_less_stays() -> None:
    """Long outputs on a large host: our activations take what MoE-Lightning gives to experts."""
    node = replace(
        hardware_preset("l4"), host_memory_bytes=372 * GIB, gpu_memory_bytes=int(29.6 * GIB)
    )
    workload = Workload(num_rows=20_000, prompt_tokens=328, generated_tokens=239)
    chosen = plan("cgopipe", node, workload)
    assert chosen.device_footprint is not None
    spare = node.gpu_memory_bytes - chosen.device_footprint.total
    assert 0 <= spare < GIB, "slots of what streams shrink as more stays"


def test_moe_lens_fills_the_host_with_kv() -> None:
    """Apart from what MoE-Lens does not count: activations and the runtime."""
    node = hardware_preset("a40")
    lens = LensNode.of(MIXTRAL, node)
    chosen = plan("vslpipe", node)
    block = 32 * MIXTRAL.kv_bytes_per_token(2)
    assert 0 <= node.host_memory_bytes - chosen.footprint.total < block
    assert chosen.policy.max_num_seqs == pytest.approx(stage2(lens, MTBENCH).active_rows, abs=1)
    assert chosen.policy.device is not None
    assert chosen.policy.device.resident_bytes == 0
    assert chosen.policy.num_kv_blocks * 32 == pytest.approx(lens.kv_tokens, rel=0.02)


def test_flexgen_has_the_sizes_of_moe_lightning_and_room_for_the_kv_of_a_wave() -> None:
    node = hardware_preset("l4")
    lightning, s3, s4 = (
        plan(schedule, node).policy for schedule in ("cgopipe", "flexgen_s3", "flexgen_s4")
    )
    assert s3 == lightning
    assert s4.device is not None
    assert lightning.device is not None
    assert (s4.max_num_seqs, s4.device.num_micro_batches) == (
        lightning.max_num_seqs,
        lightning.device.num_micro_batches,
    )
    micro_batch_rows = -(-s4.max_num_seqs // s4.device.num_micro_batches)
    assert s4.device.staged_blocks == micro_batch_rows * -(-(77 + 128) // 32)


def test_a_batch_of_layer_by_layer_has_its_kv_beside_two_layers() -> None:
    node = hardware_preset("l4")
    policy = plan("layer_by_layer", node).policy
    assert policy.device is not None
    assert (policy.device.num_micro_batches, policy.device.resident_bytes) == (1, 0)
    kv_bytes = policy.num_kv_blocks * 32 * MIXTRAL.kv_bytes_per_token(2)
    two_layers = 2 * MIXTRAL.weight_bytes(2) / MIXTRAL.num_layers
    assert 0.6 * node.gpu_memory_bytes < kv_bytes + two_layers < node.gpu_memory_bytes
    assert policy.num_kv_blocks == policy.max_num_seqs * -(-(77 + 128) // 32)


@pytest.mark.parametrize("schedule", CHOOSERS)
def test_sizes_fit_or_are_refused(schedule: str) -> None:
    rng = random.Random()
    for _ in range(5):
        node = replace(
            HARDWARE_PRESETS[rng.choice(list(HARDWARE_PRESETS))],
            host_memory_bytes=int(rng.uniform(60, 500) * GIB),
            gpu_memory_bytes=int(rng.uniform(9, 40) * GIB),
        )
        prompt, generated = int(2 ** rng.uniform(3, 12)), int(2 ** rng.uniform(1, 9))
        workload = Workload(
            num_rows=rng.choice([1, 50, 20_000]), prompt_tokens=prompt, generated_tokens=generated
        )
        try:
            policy = CHOOSERS[schedule](PaperPolicies(MIXTRAL, node, workload))
        except InfeasiblePlanError as refusal:
            assert node.name in str(refusal)  # noqa: PT017 - either outcome is right
            continue
        assert policy.max_num_seqs <= workload.num_rows
        assert policy.max_num_seqs <= policy.max_num_batched_tokens
        chosen = find_plan(MIXTRAL, node, workload, schedule=schedule, policy=policy)
        assert chosen.policy == policy, (node, workload)


@pytest.mark.parametrize("schedule", CHOOSERS)
def test_rows_that_are_not_there_are_not_planned_for(schedule: str) -> None:
    few = replace(MTBENCH, num_rows=5)
    assert plan(schedule, hardware_preset("l4"), few).policy.max_num_seqs == 5


def test_moe_gen_counts_eight_bits_of_fp8_weights() -> None:
    """DeepSeek-V3 in 16 bits is 1.22 TiB; a host of 1 TiB holds its 8 bits and some rows."""
    node = replace(hardware_preset("h100"), host_memory_bytes=1024 * GIB)
    job = Workload(num_rows=20_000, prompt_tokens=512, generated_tokens=256)
    policy = PaperPolicies(model_preset("deepseek-v3"), node, job).module_batching()
    row_bytes = 768 * model_preset("deepseek-v3").kv_bytes_per_token(2)
    assert 0.5 * 1024 * GIB < policy.max_num_seqs * row_bytes + 669e9 < 1024 * GIB
    # What counts is how experts are stored, whatever the other matrices are.
    in_fp8, in_fp4 = (
        mixed_precision(experts=experts, attention=attention)
        for experts, attention in (("FP8", "NVFP4"), ("NVFP4", "FP8"))
    )
    assert PaperPolicies(in_fp8, node, job).module_batching().max_num_seqs > 0
    for wide in (replace(model_preset("deepseek-v3"), quantization=None), in_fp4):
        with pytest.raises(InfeasiblePlanError, match=r"1\.22 TiB of weights"):
            PaperPolicies(wide, node, job).module_batching()


def mixed_precision(**algorithms: str) -> ModelSpec:
    """DeepSeek-V3 with experts and attention in formats of modelopt."""
    names = {"experts": "mlp.experts", "attention": "self_attn.o_proj"}
    layers = {
        f"model.layers.{i}.{names[part]}": {"quant_algo": algorithm}
        for part, algorithm in reversed(algorithms.items())
        for i in range(61)
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    return replace(
        model_preset("deepseek-v3"),
        quantization=parse_quantization(config | {"quantized_layers": layers}),
    )
