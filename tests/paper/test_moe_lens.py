"""MoE-Lens (2025), section 5: its worked examples, and its equations on its own settings."""

import random
from dataclasses import replace

import pytest

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.job import job_steps
from raymoe.plan.papers.hrm import PaperModel
from raymoe.plan.papers.moe_lens import (
    Bound,
    LensNode,
    effective_kv_tokens,
    gemm_intensity,
    host_bandwidth_need,
    host_flop_need,
    parallelism_memory_efficiency,
    stage1_tokens_per_s,
    stage2,
    tokens_to_saturate,
)
from raymoe.plan.policy import Policy
from raymoe.plan.search import find_plan
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload
from raymoe.units import GB, GIB, MIB, TIB

MIXTRAL = model_preset("mixtral-8x7b")
KV_TOKEN_BYTES = {"8x7B": 131072, "8x22B": 229376}
# Section 7: sizes of the models; section 8.1: the link; the token budget is the profiler's of
# Mixtral-8x7B (figure 7), which the independent evaluation below takes for all.
WEIGHT_BYTES = {"8x7B": 94 * GB, "8x22B": 282 * GB}
LINK_BYTES_PER_S = 19.5 * GB
MAX_NUM_BATCHED_TOKENS = 18500


def a40(model: str, kv_gb: float) -> LensNode:
    return LensNode(
        step_s=WEIGHT_BYTES[model] / LINK_BYTES_PER_S,
        kv_tokens=kv_gb * GB / KV_TOKEN_BYTES[model],
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )


def rows_of(kv_gb: float, prompt: int, generated: int, active_rows: float) -> int:
    """Section 7: 25,000 or 20,000 rows of MTBench with 70 GB of KV, 5 g q elsewhere."""
    if kv_gb == 70 and prompt == 98:
        return 25_000 if generated == 32 else 20_000
    return round(5 * active_rows)


# Model, KV, prompt, generated; pass, q, rows that decode, tokens of a step; T_1, T_2, T; stage 1.
# From a program apart from this code. T_2 is None where equation 12 counts a negative middle.
SETTINGS = [
    ("8x7B", 70, 98, 32, 4.82, 133.0, 4255, 17288, 754, 820, 754, 945),
    ("8x7B", 70, 98, 64, 4.82, 59.7, 3822, 9673, 666, 1217, 666, 852),
    ("8x7B", 70, 98, 128, 4.82, 24.4, 3125, 5518, 561, 1839, 561, 684),
    ("8x7B", 70, 98, 256, 4.82, 8.9, 2278, 3150, 424, None, 424, 490),
    ("8x7B", 70, 926, 128, 4.82, 4.15, 531, 4375, 92, 261, 92, 112),
    ("8x7B", 70, 128, 512, 4.82, 2.66, 1362, 1702, 235, None, 235, 289),
    ("8x7B", 210, 98, 32, 4.82, 398.9, 12766, 51863, 2207, 891, 891, 945),
    ("8x7B", 210, 98, 64, 4.82, 179.1, 11465, 29020, 1982, 1396, 1396, 1516),
    ("8x7B", 210, 98, 128, 4.82, 73.3, 9376, 16555, 1621, 2017, 1621, 2052),
    ("8x7B", 210, 98, 256, 4.82, 26.7, 6834, 9450, 1181, 3153, 1181, 1471),
    ("8x7B", 210, 926, 128, 4.82, 12.45, 1594, 13124, 276, 369, 276, 336),
    ("8x7B", 210, 128, 512, 4.82, 7.98, 4085, 5106, 706, None, 706, 866),
    ("8x22B", 70, 98, 32, 14.46, 76.0, 2432, 9879, 153, 273, 153, 185),
    ("8x22B", 70, 98, 64, 14.46, 34.1, 2184, 5528, 136, 406, 136, 162),
    ("8x22B", 70, 98, 128, 14.46, 13.95, 1786, 3153, 113, 613, 113, 130),
    ("8x22B", 70, 98, 256, 14.46, 5.085, 1302, 1800, 85, None, 85, 93),
    ("8x22B", 210, 98, 32, 14.46, 228, 7295, 29636, 420, 285, 285, 315),
    ("8x22B", 210, 98, 64, 14.46, 102.4, 6551, 16583, 378, 439, 378, 487),
    ("8x22B", 210, 98, 128, 14.46, 41.9, 5358, 9460, 309, 638, 309, 391),
    ("8x22B", 210, 98, 256, 14.46, 15.25, 3905, 5400, 225, None, 225, 280),
]


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: "-".join(map(str, row[:4])))
def test_the_equations_on_the_settings_of_section_7(row: tuple[str, int, *tuple[int, ...]]) -> None:
    """Within 1 % of an evaluation apart from this code; equations 4 and 8 to 14."""
    model, kv_gb, prompt, generated, step_s, admitted, active, tokens, *rates = row
    node = a40(model, kv_gb)
    assert node.step_s == pytest.approx(step_s, rel=0.01)
    num_rows = rows_of(kv_gb, prompt, generated, active)
    job = Workload(num_rows=num_rows, prompt_tokens=prompt, generated_tokens=generated)
    found = stage2(node, job)
    assert found.admitted_per_step == pytest.approx(admitted, rel=0.01)
    assert found.active_rows == pytest.approx(active, rel=0.01)
    assert found.admitted_per_step * job.context_tokens == pytest.approx(tokens, rel=0.01)
    memory, gpu, whole, stage1 = rates
    assert found.memory_tokens_per_s == pytest.approx(memory, rel=0.01)
    if gpu is None:
        assert found.bound is Bound.KV_MEMORY
    else:
        assert found.gpu_tokens_per_s == pytest.approx(gpu, rel=0.01)
    assert found.tokens_per_s == pytest.approx(whole, rel=0.01)
    assert stage1_tokens_per_s(node, job) == pytest.approx(stage1, rel=0.01)


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: "-".join(map(str, row[:4])))
def test_a_planned_job_takes_hardly_more_steps_than_stage_2(
    row: tuple[str, int, *tuple[int, ...]],
) -> None:
    """With blocks of our size. Rows that enter as soon as there is room take up to 1.5 times."""
    model, kv_gb, prompt, generated, _, _, active, *_ = row
    node = a40(model, kv_gb)
    job = Workload(
        num_rows=rows_of(kv_gb, prompt, generated, active),
        prompt_tokens=prompt,
        generated_tokens=generated,
    )
    policy = Policy(
        max_num_seqs=int(node.kv_tokens / (prompt + generated / 2 + KV_BLOCK_TOKENS / 2)),
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_prefill_chunk_tokens=MAX_NUM_BATCHED_TOKENS,
        num_kv_blocks=int(node.kv_tokens / KV_BLOCK_TOKENS * 64 / 63),  # one in 64 stays free
        steady_admission=True,
    )
    num_steps = sum(number for _, number in job_steps(job, policy))
    planned = job.total_generated_tokens / num_steps / node.step_s
    assert planned >= 0.98 * stage2(node, job, block_tokens=KV_BLOCK_TOKENS).tokens_per_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "generated", "share"),
    [
        ("mixtral-8x7b", 128, 0.97),
        ("mixtral-8x22b", 64, 0.97),
        ("mixtral-8x22b", 128, 0.97),
        ("mixtral-8x7b", 64, 0.97),
        ("mixtral-8x22b", 256, 0.97),
        ("mixtral-8x7b", 256, 0.97),
        ("dbrx", 64, 0.95),  # bound by the GPU
        ("dbrx", 128, 0.97),
        ("dbrx", 256, 0.97),
    ],
)
def test_plans_reach_the_rates_of_the_papers_model(
    model: str, generated: int, share: float
) -> None:
    """210 GB of KV, MTBench, section 7; host bandwidth does not limit, as the model assumes."""
    spec, a40_node = model_preset(model), hardware_preset("a40")
    lens = LensNode.of(spec, a40_node, kv_bytes=210 * GB)
    one = Workload(num_rows=1, prompt_tokens=98, generated_tokens=generated)
    job = replace(one, num_rows=round(5 * stage2(lens, one).active_rows))
    node = replace(
        a40_node,
        gpu_memory_bytes=(16 if model == "mixtral-8x7b" else 24) * GB,
        host_memory_bytes=spec.weight_bytes(2) + 210 * GB,
        host_bytes_per_s=10 * a40_node.host_bytes_per_s,
    )
    assert find_plan(spec, node, job).tokens_per_s >= share * stage2(lens, job).tokens_per_s


@pytest.mark.parametrize(
    ("kv_gb", "slowest_first"), [(210, [32, 256, 64, 128]), (70, [256, 128, 64, 32])]
)
def test_rates_over_the_generation_length(kv_gb: float, slowest_first: list[int]) -> None:
    """Section 8.1, figure 11: with 210 GB the rate rises up to 128 tokens, with 70 GB it falls."""
    rates = {}
    for generated in slowest_first:
        job = Workload(num_rows=50_000, prompt_tokens=98, generated_tokens=generated)
        rates[generated] = stage2(a40("8x7B", kv_gb), job).tokens_per_s
    assert sorted(rates, key=lambda generated: rates[generated]) == slowest_first


@pytest.mark.parametrize(
    ("tflop_per_s", "tokens", "kv_gb"),
    [(150, 19.2e3, (614, 1228)), (181, 23.2e3, (741, 1482)), (312, 40.0e3, (1277, 2554))],
)
def test_tokens_and_kv_that_saturate_a_gpu(
    tflop_per_s: float, tokens: float, kv_gb: tuple[int, int]
) -> None:
    """Section 5.1, the A40 example and table 2: Mixtral-8x7B over 32 GB/s.

    Units there are mixed: 2^40 operations, 2^30 bytes a second, and KV in thousands of MiB.
    """
    found = tokens_to_saturate(tflop_per_s * TIB, 32 * GIB, num_experts=8, top_k=2)
    assert found == pytest.approx(tokens, rel=0.002)
    for length, published in zip((256, 512), kv_gb, strict=True):
        num_bytes = found * length * KV_TOKEN_BYTES["8x7B"]
        assert num_bytes / (1000 * MIB) == pytest.approx(published, rel=0.002)


def test_a_sequence_of_512_tokens_needs_1200_gb_to_saturate_an_a40() -> None:
    """Section 5.1: "1.2TB of CPU memory for KV cache"; 4 % for units and for the rounded number."""
    tokens = tokens_to_saturate(150e12, 32e9, num_experts=8, top_k=2)
    assert tokens * 512 * KV_TOKEN_BYTES["8x7B"] == pytest.approx(1.2e12, rel=0.05)


def test_intensity_is_near_the_share_of_experts_that_a_token_visits() -> None:
    """Section 5.1, equation 1: n N_k / N_e, but for the projections; 10 % for Mixtral-8x7B."""
    assert gemm_intensity(PaperModel.of(MIXTRAL), 19_200) == pytest.approx(4800, rel=0.1)


def test_host_bandwidth_of_a_cache_twice_the_model() -> None:
    """Section 5.3, equation 5: 200 GB of KV with Mixtral-8x7B take thrice the link, 60 GB/s."""
    need = host_bandwidth_need(200 * GB, 100 * GB, 20 * GB)
    assert need == pytest.approx(60 * GB)
    with_kv = host_bandwidth_need(200 * GB, WEIGHT_BYTES["8x7B"], LINK_BYTES_PER_S)
    assert with_kv == pytest.approx(60 * GB, rel=0.05)


def test_operations_of_attention_on_the_cpu() -> None:
    """Section 5.3, equation 6: "on the order of hundreds of GFLOPs" at 40 GB/s of KV."""
    need = host_flop_need(40 * GB, queries_per_kv_head=4, flop_per_byte=1.0)
    assert need == pytest.approx(320e9)


def test_the_token_budget_of_the_a40_follows_from_its_rate_of_products() -> None:
    """Figure 7: the profiler finds about 18,500 tokens; the preset's rate comes from there."""
    node = LensNode.of(MIXTRAL, hardware_preset("a40"), kv_bytes=70 * GB)
    assert node.max_num_batched_tokens == pytest.approx(MAX_NUM_BATCHED_TOKENS, rel=0.01)
    assert node.step_s == pytest.approx(a40("8x7B", 70).step_s, rel=0.01)
    assert node.kv_tokens == pytest.approx(a40("8x7B", 70).kv_tokens)


def test_pme_is_the_mean_of_a_sequence_counted_token_by_token() -> None:
    """Section 5.2, equation 3: the printed sum, which is the closed form but for its last step."""
    rng = random.Random()
    prompt, generated = rng.randint(50, 2000), rng.randint(200, 2000)
    held = sum(prompt + i for i in range(generated + 1))
    counted = (prompt + generated) / held
    assert parallelism_memory_efficiency(prompt, generated) == pytest.approx(counted, rel=0.01)


def test_overlap_makes_the_cache_larger() -> None:
    """Section 5.4, equation 7: 2 (p + g) / (2 p + g), up to twice for long generations."""
    job = Workload(num_rows=1, prompt_tokens=100, generated_tokens=100)
    assert effective_kv_tokens(3000, job) == pytest.approx(4000)


def test_stage_2_becomes_stage_1_for_endless_requests_and_single_slots() -> None:
    """Section 5.5: with K to infinity and blocks of one token both models agree; half a percent."""
    rng = random.Random()
    for kv_gb in (20, 70, 210, 1000):
        node = a40("8x7B", kv_gb)
        prompt, generated = rng.randint(50, 2000), rng.randint(200, 600)
        job = Workload(num_rows=10**9, prompt_tokens=prompt, generated_tokens=generated)
        endless = stage2(node, job, block_tokens=1).tokens_per_s
        assert endless == pytest.approx(stage1_tokens_per_s(node, job), rel=0.005)


def test_blocks_and_few_requests_only_cost() -> None:
    """Figure 4: paging shifts the turning point, a finite job lowers the curve."""
    node, rows = a40("8x7B", 70), (100, 1000, 10_000, 100_000)
    jobs = [Workload(num_rows=n, prompt_tokens=100, generated_tokens=128) for n in rows]
    rates = [stage2(node, job).tokens_per_s for job in jobs]
    assert rates == sorted(rates)
    assert rates[-1] < stage1_tokens_per_s(node, jobs[-1])
    for job in jobs:
        assert stage2(node, job, block_tokens=64).tokens_per_s < stage2(node, job).tokens_per_s


def test_few_requests_have_a_rate_that_goes_over_into_equation_12() -> None:
    """The guard: both forms agree where the pipeline is just full; one row takes g passes.

    Equation 12 itself counts fewer than g passes below 17,474 rows, and below 4,096 less than none.
    """
    node, prompt, generated = a40("8x7B", 1000), 98, 256
    filled = generated * MAX_NUM_BATCHED_TOKENS * (1 + prompt / (prompt + generated)) / 2 / prompt

    def gpu_rate(num_rows: int) -> float:
        job = Workload(num_rows=num_rows, prompt_tokens=prompt, generated_tokens=generated)
        return stage2(node, job).gpu_tokens_per_s

    assert gpu_rate(int(filled) + 1) == pytest.approx(gpu_rate(int(filled)), rel=1e-3)
    assert gpu_rate(1) == pytest.approx(1 / node.step_s, rel=1e-3)
    rates = [gpu_rate(num_rows) for num_rows in (1, 100, 10_000, 40_000)]
    assert rates == sorted(rates)


def test_weights_beyond_the_host_memory_are_refused_with_the_bytes_missing() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"98\.73 GiB short"):
        LensNode.of(model_preset("mixtral-8x22b"), hardware_preset("t4"))
