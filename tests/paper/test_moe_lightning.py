"""MoE-Lightning (ASPLOS 2025): the policies of its optimizer, as it printed and published them."""

from dataclasses import replace
from typing import NamedTuple

import pytest

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.papers.hrm import PaperModel
from raymoe.plan.papers.moe_lightning import (
    L4,
    T4,
    LightningOptimizer,
    LightningPolicy,
)
from raymoe.plan.search import of_one_rank
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.presets_models import model_preset
from raymoe.units import GIB, TB

MIXTRAL = PaperModel.of(model_preset("mixtral-8x7b"))


class Row(NamedTuple):
    """A published row, and what the formulas say of it with nothing resident.

    MTBench rows: README of the artifact and paper, table 5; the others: paper, table 4. Times and
    rates of the model were worked out apart from this code; `rows` is what finished.
    """

    node: HardwareSpec
    prompt: int
    generated: int
    micro_batch: int
    count: int
    rows: int
    link_s: float
    gpu_s: float
    cpu_s: float
    tokens_per_s: float

    def optimizer(self) -> LightningOptimizer:
        is_padded_l4 = self.node is L4 and self.prompt == 418
        return LightningOptimizer(
            model=MIXTRAL,
            hardware=self.node,
            prompt_tokens=self.prompt,
            generated_tokens=self.generated,
            keeps_residual=not is_padded_l4,
        )


# What was free on the L4 host is known of one start only; 0.7 % less gives this row.
L4_LATER = replace(L4, host_memory_bytes=int(183 * GIB))
SEARCHED = [
    Row(L4, 77, 32, 324, 14, 4494, 5.25, 4.14, 0.82, 601),
    Row(L4, 77, 64, 228, 16, 3616, 5.25, 4.73, 0.85, 590),
    Row(L4, 77, 128, 164, 16, 2608, 5.25, 4.73, 0.88, 470),
    Row(L4_LATER, 77, 256, 132, 12, 1560, 5.25, 3.54, 0.86, 292),
    Row(L4, 418, 32, 68, 16, 1088, 5.25, 4.72, 0.79, 133),
    Row(L4, 418, 64, 68, 15, 1020, 5.25, 4.42, 0.80, 154),
    Row(L4, 418, 128, 68, 13, 884, 5.25, 3.83, 0.78, 151),
    Row(L4, 418, 256, 68, 11, 748, 5.25, 3.24, 0.81, 136),
    Row(T4, 77, 32, 164, 19, 3097, 5.25, 5.33, 0.43, 398),
    Row(T4, 77, 64, 164, 19, 3097, 5.25, 5.33, 0.55, 472),
    Row(T4, 77, 128, 164, 14, 2296, 5.25, 3.93, 0.59, 403),
    Row(T4, 77, 256, 100, 15, 1485, 5.25, 4.21, 0.62, 276),
    Row(T4, 418, 32, 36, 14, 504, 5.25, 3.92, 0.28, 68),
    Row(T4, 418, 64, 36, 14, 504, 5.25, 3.92, 0.30, 80),
    Row(T4, 418, 128, 36, 14, 504, 5.25, 3.92, 0.34, 87),
    Row(T4, 418, 256, 36, 14, 504, 5.25, 3.92, 0.42, 91),
    Row(L4, 256, 50, 100, 15, 1500, 5.25, 4.43, 0.75, 220),
    Row(T4, 256, 50, 36, 26, 936, 5.25, 7.28, 0.35, 106),
    Row(T4, 1984, 64, 4, 19, 76, 5.25, 5.32, 0.19, 12.5),
]
# Table 4, summarization on the L4: a micro-batch that the search does not try.
BY_HAND = Row(L4, 1984, 64, 8, 36, 288, 5.25, 10.61, 0.95, 23)


def label(row: Row) -> str:
    return f"{row.node.name[:2]}-{row.prompt}-{row.generated}"


# Settings S6 to S9: Mixtral-8x22B padded to 417 tokens and DBRX, on 2 and 4 T4 with one host of
# 416 GB. Free memory of it is not published: from 401.25 to 401.35 GiB give all of these policies.
# Published are the rows that finished, in 14 of 16 cases the whole batch (files mtbench_moel_p_S6
# to _S9 of the artifact); in the others the same number of each micro-batch is missing.
TENSOR_PARALLEL_HOST_BYTES = int(401.3 * GIB)


class ParallelRow(NamedTuple):
    """One file's line: times by the formulas with nothing resident, worked out apart."""

    model: str
    num_gpus: int
    generated: int
    micro_batch: int
    count: int
    rows: int
    gpu_s: float
    cpu_s: float
    tokens_per_s: float

    def optimizer(self) -> LightningOptimizer:
        return LightningOptimizer(
            model=PaperModel.of(model_preset(self.model)),
            hardware=replace(T4, host_memory_bytes=TENSOR_PARALLEL_HOST_BYTES),
            prompt_tokens=417 if self.model == "mixtral-8x22b" else 77,
            generated_tokens=self.generated,
            num_gpus=self.num_gpus,
        )


PARALLEL = [
    ParallelRow("mixtral-8x22b", 2, 32, 36, 7, 252, 2.94, 0.24, 14.8),
    ParallelRow("mixtral-8x22b", 2, 64, 36, 7, 252, 2.94, 0.26, 15.4),
    ParallelRow("mixtral-8x22b", 2, 128, 36, 7, 252, 2.94, 0.30, 15.7),
    ParallelRow("mixtral-8x22b", 2, 256, 36, 7, 252, 2.94, 0.37, 15.8),
    ParallelRow("mixtral-8x22b", 4, 32, 36, 18, 648, 3.78, 0.63, 37.1),
    ParallelRow("mixtral-8x22b", 4, 64, 36, 17, 612, 3.57, 0.64, 37.0),
    ParallelRow("mixtral-8x22b", 4, 128, 36, 15, 540, 3.15, 0.64, 33.6),
    ParallelRow("mixtral-8x22b", 4, 256, 36, 13, 468, 2.73, 0.68, 29.5),
    ParallelRow("dbrx", 2, 32, 68, 39, 2652, 15.36, 0.47, 147.3),
    ParallelRow("dbrx", 2, 64, 68, 39, 2652, 15.36, 0.59, 159.0),
    ParallelRow("dbrx", 2, 128, 68, 33, 2244, 13.00, 0.72, 146.6),
    ParallelRow("dbrx", 2, 256, 68, 21, 1344, 8.27, 0.74, 90.1),  # 64 of each 68 rows
    ParallelRow("dbrx", 4, 32, 68, 64, 4352, 12.60, 0.76, 258.0),
    ParallelRow("dbrx", 4, 64, 68, 53, 3604, 10.44, 0.81, 231.1),
    ParallelRow("dbrx", 4, 128, 68, 40, 2440, 7.88, 0.88, 162.1),  # 61 of each 68 rows
    ParallelRow("dbrx", 4, 256, 36, 51, 1836, 10.04, 0.95, 123.7),
]
LINK_S = {"mixtral-8x22b": 15.75, "dbrx": 14.77}  # one link, however many GPUs


def parallel_label(row: ParallelRow) -> str:
    return f"{row.model}-{row.num_gpus}-{row.generated}"


@pytest.mark.parametrize("row", PARALLEL, ids=parallel_label)
def test_policies_and_step_times_on_two_and_four_t4(row: ParallelRow) -> None:
    """Policies exactly; times of a decode step to 0.005 s; the rate with prefill to 1 %."""
    optimizer = row.optimizer()
    best = optimizer.best()
    assert (best.micro_batch_size, best.num_micro_batches) == (row.micro_batch, row.count)
    assert row.rows % row.count == 0
    policy = optimizer.evaluate(row.micro_batch, row.count, 0.0)
    num_layers = optimizer.model.num_layers
    times = [time * num_layers for time in (policy.link_s, policy.gpu_s, policy.cpu_s)]
    assert times == pytest.approx([LINK_S[row.model], row.gpu_s, row.cpu_s], abs=0.0051)
    found = policy.end_to_end_tokens_per_s * row.rows / policy.batch_size
    assert found == pytest.approx(row.tokens_per_s, rel=0.01)


@pytest.mark.parametrize(
    ("shorter", "longer", "walls", "ratio"),
    [
        (PARALLEL[0], PARALLEL[1], (1498.060, 2199.179), 1.39),
        (PARALLEL[1], PARALLEL[2], (2199.179, 4161.383), 1.95),
        (PARALLEL[2], PARALLEL[3], (4161.383, 7067.781), 1.44),
        (PARALLEL[8], PARALLEL[9], (2493.315, 4684.061), 4.46),  # DBRX: a fourth of the rate
    ],
)
def test_measured_steps_are_longer_than_the_formulas_say(
    shorter: ParallelRow, longer: ParallelRow, walls: tuple[float, float], ratio: float
) -> None:
    """Where two runs have the same batch, their times differ by the decode steps of the longer."""
    assert shorter.rows == longer.rows
    step_s = (walls[1] - walls[0]) / (longer.generated - shorter.generated)
    optimizer = longer.optimizer()
    policy = optimizer.evaluate(longer.micro_batch, longer.count, 0.0)
    predicted_s = policy.decode_s / (longer.generated - 1)
    assert step_s / predicted_s == pytest.approx(ratio, abs=0.006)


@pytest.mark.parametrize("row", PARALLEL[::3], ids=parallel_label)
def test_the_share_of_a_rank_gives_the_same_policy(row: ParallelRow) -> None:
    """`raymoe plan --tensor-parallel` hands the paper's modes one rank's share of model and node.

    There a GPU has its own link, of which the artifact has one for all.
    """
    whole = row.optimizer()
    model, node = of_one_rank(model_preset(row.model), whole.hardware, row.num_gpus)
    one_link = replace(node, htod_bytes_per_s=node.htod_bytes_per_s / row.num_gpus)
    share = replace(whole, model=PaperModel.of(model), hardware=one_link, num_gpus=1).best()
    best = whole.best()
    assert share.micro_batch_size == best.micro_batch_size
    assert share.num_micro_batches == pytest.approx(best.num_micro_batches, abs=1)
    assert share.tokens_per_s == pytest.approx(best.tokens_per_s, rel=0.03)


@pytest.mark.parametrize("row", SEARCHED, ids=label)
def test_published_policies_are_found_exactly(row: Row) -> None:
    best = row.optimizer().best()
    assert (best.micro_batch_size, best.num_micro_batches) == (row.micro_batch, row.count)


@pytest.mark.parametrize("row", [*SEARCHED, BY_HAND], ids=label)
def test_times_of_published_policies(row: Row) -> None:
    """Each processor's time of a decode step to 0.005 s; the rate with prefill to 1 %."""
    policy = row.optimizer().evaluate(row.micro_batch, row.count, 0.0)
    times = (policy.link_s, policy.gpu_s, policy.cpu_s)
    assert [time * MIXTRAL.num_layers for time in times] == pytest.approx(
        [row.link_s, row.gpu_s, row.cpu_s], abs=0.0051
    )
    finished = row.rows / policy.batch_size
    assert policy.end_to_end_tokens_per_s * finished == pytest.approx(row.tokens_per_s, rel=0.01)


def test_the_printed_plan_of_the_l4() -> None:
    """README of the artifact: the log of one start, digit by digit."""
    best = SEARCHED[0].optimizer().best()
    assert round(best.tokens_per_s, 2) == 944.66
    assert best.resident_fraction == pytest.approx(0.055884688, abs=5e-10)
    assert round(best.link_s, 4) == 0.1549
    assert round(best.decode_s / 31, 3) == 4.957, "32 layers of a step"


def test_rates_that_the_optimizer_aims_at() -> None:
    """Decode rates of the same formulas in an independent program, to the last whole token."""
    found = [round(row.optimizer().best().tokens_per_s) for row in SEARCHED[4:16]]
    assert found[:4] == [231, 213, 183, 154]
    assert found[4:7] == [603, 594, 446]
    assert found[8:] == [99, 98, 97, 96]


def test_the_second_run_of_the_longest_generation() -> None:
    """The artifact's backup file: 1610 rows are 164 x 10 but three a micro-batch."""
    policy = SEARCHED[3]._replace(node=L4).optimizer().best()
    assert (policy.micro_batch_size, policy.num_micro_batches) == (164, 10)


def test_the_policy_that_no_search_found() -> None:
    """Table 4: 8 x 36 is also FlexGen's policy of that column, and not what the optimizer gives.

    It does not fit the node's memory by the optimizer's own account; with the mean prompt of 1693
    tokens it is the most that does, 0.4 % above the free memory of the printed start. Any count
    from 16 on is as fast by its formulas.
    """
    for host_gib in (L4.host_memory_bytes / GIB, 192):
        node = replace(L4, host_memory_bytes=int(host_gib * GIB))
        assert BY_HAND._replace(node=node).optimizer().policy(8, 36) is None
    node = replace(L4, host_memory_bytes=int(185 * GIB))
    optimizer = BY_HAND._replace(node=node, prompt=1693).optimizer()
    policy = optimizer.policy(8, 36)
    assert policy is not None
    assert optimizer.policy(8, 37) is None
    best = optimizer.best(micro_batch_sizes=[8])
    assert policy.tokens_per_s == pytest.approx(best.tokens_per_s, rel=1e-7)
    sixteen = optimizer.policy(8, 16)
    assert sixteen is not None
    assert sixteen.tokens_per_s == pytest.approx(best.tokens_per_s, rel=1e-7)
    assert optimizer.best().micro_batch_size == 4


@pytest.mark.parametrize(
    ("prompt", "generated", "used"), [(98, 32, 0.520), (98, 64, 0.562), (926, 128, 0.350)]
)
def test_plans_leave_host_memory_unused(prompt: int, generated: int, used: float) -> None:
    """MoE-Lens, table 1: its plans for an A40 held to 16 GB with 265 GB of host memory; 1.2 %.

    A GPU that it does not know gets the constants of the L4 but for these three.
    """
    node = replace(
        L4,
        host_memory_bytes=265 * GIB,
        host_bytes_per_s=100 * GIB,
        host_flop_per_s=13 * TB,
        gpu_memory_bytes=16 * GIB,
        gpu_bytes_per_s=300 * GIB,
    )
    best = LightningOptimizer(
        model=MIXTRAL, hardware=node, prompt_tokens=prompt, generated_tokens=generated
    ).best()
    assert best.host_bytes / node.host_memory_bytes == pytest.approx(used, rel=0.012)


def test_no_expert_of_eight_is_resident() -> None:
    """The engine keeps whole experts only: the share of every published row is below one of 8."""
    shares = [row.optimizer().best().resident_fraction for row in SEARCHED]
    assert max(shares) < 1 / 8
    assert min(shares) >= 0


def two_a100(*, cpu_ratio: int, link_gib_per_s: float) -> HardwareSpec:
    """Section 6.3: two A100 as one, and a host of which one ratio scales everything."""
    return replace(
        L4,
        name="two A100",
        host_memory_bytes=200 * cpu_ratio * GIB,
        host_bytes_per_s=100 * cpu_ratio * GIB,
        host_flop_per_s=1.6 * cpu_ratio * TB,
        gpu_memory_bytes=160 * GIB,
        gpu_bytes_per_s=4000 * GIB,
        gpu_flop_per_s=600 * TB,
        htod_bytes_per_s=link_gib_per_s * GIB,
    )


def best_of_both(node: HardwareSpec) -> LightningPolicy:
    """Section 6.3, with the generation length of figure 10's caption."""
    optimizer = LightningOptimizer(
        model=MIXTRAL, hardware=node, prompt_tokens=512, generated_tokens=32, keeps_residual=False
    )
    both = (replace(optimizer, is_attention_on_gpu=on_gpu).best() for on_gpu in (True, False))
    return max(both, key=lambda policy: policy.tokens_per_s)


@pytest.mark.parametrize("link", [100, 200, 300, 400, 500])
def test_attention_goes_to_the_gpu_as_the_cpu_weakens(link: float) -> None:
    """Figure 10: red points (CPU attention) at high CPU ratios only, at every link."""
    on_gpu = [
        best_of_both(two_a100(cpu_ratio=ratio, link_gib_per_s=link)).is_attention_on_gpu
        for ratio in range(1, 11)
    ]
    assert on_gpu == sorted(on_gpu, reverse=True), "once the CPU is strong enough, it stays so"
    assert on_gpu[0]
    assert not on_gpu[-1]


@pytest.mark.parametrize("ratio", [1, 10])
def test_more_weights_stream_over_a_faster_link(ratio: int) -> None:
    """Figure 10, left: the share of weights on the CPU rises with the link."""
    shares = [
        best_of_both(two_a100(cpu_ratio=ratio, link_gib_per_s=link)).resident_fraction
        for link in (100, 200, 300, 400, 500)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[0]


def test_what_does_not_fit_is_refused_with_the_bytes_missing() -> None:
    small = replace(T4, host_memory_bytes=64 * GIB)
    optimizer = LightningOptimizer(
        model=MIXTRAL, hardware=small, prompt_tokens=77, generated_tokens=32
    )
    with pytest.raises(InfeasiblePlanError, match=r"0 B of GPU memory and \S+ GiB of host memory"):
        optimizer.best()


def test_no_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_gpus is 0"):
        replace(PARALLEL[0].optimizer(), num_gpus=0)


def test_one_generated_token_has_no_decoding() -> None:
    with pytest.raises(ConfigError, match="1 generated tokens"):
        LightningOptimizer(model=MIXTRAL, hardware=L4, prompt_tokens=512, generated_tokens=1)
