"""MoE-Gen (2025): its critical path, its split of attention, its rates."""

import random
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.papers import moe_gen
from raymoe.plan.papers.hrm import Hierarchy, PaperModel
from raymoe.plan.papers.moe_gen import GenSearch, ModuleTimes, critical_path_s
from raymoe.plan.papers.policies import GEN_KERNEL_BYTES_PER_S
from raymoe.specs.hardware import GPU_PRODUCT_FRACTION, HardwareSpec, hardware_preset
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload
from raymoe.units import GB, GIB, TB

WIDTHS = {"mixtral-8x7b": 2, "mixtral-8x22b": 2, "deepseek-v2": 2, "deepseek-v3": 1}
MODELS = {name: PaperModel.of(model_preset(name), width) for name, width in WIDTHS.items()}
# Rates that no row below is the source of. The link: twice what MoE-Lightning measured on PCIe 4
# x8 (its figure 9). Products: the share of the peak of an A40 that MoE-Lens reached (its tokens of
# a step, section 7), of the A5000's 111 and the A6000's 155 TFLOP/s.
LINK_BYTES_PER_S = 2 * 12.35 * GB
A5000, A6000 = (
    replace(
        hardware_preset(name),
        htod_bytes_per_s=LINK_BYTES_PER_S,
        gpu_flop_per_s=GPU_PRODUCT_FRACTION * peak * TB,
    )
    for name, peak in (("a5000", 111), ("a6000", 155))
)
# Table 3. The code pins whole GiB; presets leave 15 % of the memory to others.
NODES = {
    "C1": replace(A5000, host_memory_bytes=256 * GIB),
    "C2": replace(A5000, host_memory_bytes=512 * GIB),
    "C3": replace(A6000, host_memory_bytes=480 * GIB),
    "1 TB": replace(A5000, host_memory_bytes=1024 * GIB),  # README: DeepSeek-R1
}
# The middle of the rates (16 to 19 GB/s) whose best split is figure 7's 0.6 (C1, B = 3640, 256 + 32
# tokens). The kernel converts keys once for each query head; its threads scale with the cores.
KERNEL_BYTES_PER_S = GEN_KERNEL_BYTES_PER_S
KERNEL_GROUP = 4
CORES = {"C1": 28, "C2": 28, "C3": 16, "1 TB": 28}


def kernel_bytes_per_s(node: str, model: str) -> float:
    group = {"mixtral-8x7b": 4, "mixtral-8x22b": 6}.get(model)
    if group is None:  # no kernel for MLA
        return 0.0
    return KERNEL_BYTES_PER_S * KERNEL_GROUP / group * CORES[node] / CORES["C2"]


def search(
    node: HardwareSpec,
    model: str,
    cpu_bytes_per_s: float,
    *,
    lengths: tuple[int, int] = (512, 256),
    num_rows: int = 10**6,
) -> GenSearch:
    """As released: all weights are copied in every step."""
    return GenSearch(
        model=MODELS[model],
        hardware=node,
        workload=Workload(num_rows=num_rows, prompt_tokens=lengths[0], generated_tokens=lengths[1]),
        cpu_attention_bytes_per_s=cpu_bytes_per_s,
        keeps_parameters=False,
    )


@pytest.mark.parametrize(
    ("node", "model", "published", "found"),
    [
        ("C1", "mixtral-8x7b", 0.6, 0.6),
        ("C2", "mixtral-8x7b", 0.6, 0.5),
        ("C2", "mixtral-8x22b", 0.7, 0.6),
        ("C3", "mixtral-8x7b", 0.3, 0.3),
        # Misses: the paper's only split on C3 that is below what its other entries lead to.
        ("C3", "mixtral-8x22b", 0.2, 0.5),
        ("C2", "deepseek-v2", 0.0, 0.0),
    ],
)
def test_attention_split(node: str, model: str, published: float, found: float) -> None:
    """Table 10, where all but one are within a step of its grid."""
    policy = search(NODES[node], model, kernel_bytes_per_s(node, model)).decode().policy
    assert policy.cpu_attention_fraction == found
    assert (abs(found - published) < 0.11) == (model != "mixtral-8x22b" or node != "C3")


@pytest.mark.parametrize("model", ["mixtral-8x7b", "mixtral-8x22b"])
def test_fewer_cores_take_a_smaller_share(model: str) -> None:
    """Table 10, C2 against C3: "limiting its capacity to handle the same workload"."""
    shares = [
        search(NODES[node], model, kernel_bytes_per_s(node, model)).decode().policy
        for node in ("C2", "C3")
    ]
    assert shares[1].cpu_attention_fraction < shares[0].cpu_attention_fraction


def test_attention_moves_to_the_gpu_as_the_cpu_weakens() -> None:
    """Appendix A.1: "If a weaker CPU is used ... MoE-Gen would select w = 0"."""
    rates = [127, 32, 16, 8, 2, 0.1]
    plans = [search(NODES["C2"], "mixtral-8x7b", rate * GB).decode() for rate in rates]
    shares = [plan.policy.cpu_attention_fraction for plan in plans]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert shares[-1] == 0.0


def test_a_kernel_at_the_rate_of_memory_attends_alone() -> None:
    """With our kernel, 0.85 of the 150 GB/s that the host reads, nothing is left to the GPU.

    The pass is then the weights alone, twice as fast as with their kernel.
    """
    ours, theirs = (
        search(NODES["C2"], "mixtral-8x7b", rate).decode()
        for rate in (0.85 * A5000.host_bytes_per_s, KERNEL_BYTES_PER_S)
    )
    assert ours.policy.cpu_attention_fraction == 1.0
    weights_s = MODELS["mixtral-8x7b"].weight_bytes / A5000.htod_bytes_per_s
    assert ours.step_s == pytest.approx(weights_s, rel=0.25)
    assert ours.tokens_per_s > 2 * theirs.tokens_per_s


def test_where_attention_runs_where_the_cpu_has_no_kernel() -> None:
    """Table 10, DeepSeek-V2: 0:10, since the CPU kernel does not know its attention."""
    assert search(NODES["C2"], "mixtral-8x7b", 0.0).decode().policy.cpu_attention_fraction == 0.0


def test_rate_over_the_split() -> None:
    """Figure 7: it rises to a single peak near 0.6 and falls; B = 3640, prompts of 256, 32 more."""
    figure_7 = search(
        NODES["C1"], "mixtral-8x7b", KERNEL_BYTES_PER_S, lengths=(256, 32), num_rows=3640
    )
    rates = [figure_7.decode(tenths / 10).tokens_per_s for tenths in range(11)]
    peak = rates.index(max(rates))
    assert peak == pytest.approx(6, abs=1)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


TOLERANCE = 0.4


class Row(NamedTuple):
    """A published rate, ours over it, and why where the two differ by more than 40 %."""

    source: str
    node: str
    model: str
    lengths: tuple[int, int]
    published: float
    ratio: float
    num_rows: int = 10**6
    is_prefill: bool = False
    cpu_share: float | None = None  # None: searched
    batch: int | None = None  # None: searched; the released code has constants for prefill
    reason: str = ""

    def tokens_per_s(self) -> float:
        plan = search(
            NODES[self.node], self.model, kernel_bytes_per_s(self.node, self.model),
            lengths=self.lengths, num_rows=self.num_rows,
        )  # fmt: skip
        found = plan.prefill(self.batch) if self.is_prefill else plan.decode(self.cpu_share)
        return found.tokens_per_s


SMALL_COPIES = (
    "attention on the GPU alone: weights and KV of its step are 16.3 GB/s over 24.7 GB/s of link, "
    "for both models; it copies K and V of one row at a time and attends without a fused kernel"
)
NO_SEARCH = "the released code has no search: it streams all weights for each 30 (V2) or 20 rows"
FEW_ROWS = "its step is no shorter than its weights on the link (19 s, 27 s): "
prefill = partial(Row, is_prefill=True)
on_gpu = partial(Row, cpu_share=0.0)
SHORT, LONG = (512, 256), (512, 1024)
ROWS = (
    Row("table 6", "C2", "mixtral-8x7b", SHORT, 469, 0.78),
    on_gpu("table 6", "C2", "mixtral-8x7b", SHORT, 195, 1.21),
    Row("table 6", "C2", "mixtral-8x7b", LONG, 283, 0.81),
    on_gpu("table 6", "C2", "mixtral-8x7b", LONG, 93, 1.52, reason=SMALL_COPIES),
    Row("table 6", "C2", "mixtral-8x22b", SHORT, 91, 1.12),
    on_gpu("table 6", "C2", "mixtral-8x22b", SHORT, 54, 1.38),
    Row("table 6", "C2", "mixtral-8x22b", LONG, 57, 1.02),
    on_gpu("table 6", "C2", "mixtral-8x22b", LONG, 27, 1.52, reason=SMALL_COPIES),
    Row("table 6", "C1", "mixtral-8x7b", SHORT, 364, 0.80),
    prefill("table 7", "C2", "mixtral-8x7b", SHORT, 2790, 1.02),
    prefill("table 7", "C2", "mixtral-8x22b", SHORT, 907, 1.02),
    prefill("table 7", "C2", "deepseek-v2", SHORT, 787, 2.03, reason=NO_SEARCH),
    prefill("table 7, constants", "C2", "deepseek-v2", SHORT, 787, 1.03, batch=30),
    prefill("table 7", "1 TB", "deepseek-v3", SHORT, 204, 4.65, reason=NO_SEARCH),
    prefill(
        "table 7, constants", "1 TB", "deepseek-v3", SHORT, 204, 1.85, batch=20,
        reason="8-bit experts: 20 buffers for 256 of them, and 16-bit copies before each product, "
        "neither of which overlaps with the link as figure 6 has it",
    ),
    Row(
        "README", "C2", "deepseek-v2", SHORT, 49, 1.42,
        reason=FEW_ROWS + "at most 940 rows; 1,515 fill the host (it pins K and V at twice "
        "their size)",
    ),
    Row(
        "README", "1 TB", "deepseek-v3", SHORT, 27, 7.10,
        reason=FEW_ROWS + "at most 740 rows; 7,975 fill 1 TiB. The README names no batch",
    ),
    Row("table 8", "C1", "mixtral-8x7b", (16384, 8192), 13, 0.69, num_rows=50),
    Row("table 8", "C1", "mixtral-8x7b", (8192, 16384), 13, 0.76, num_rows=50),
    Row("table 8", "C1", "mixtral-8x7b", (8192, 4096), 20, 0.90, num_rows=100),
    Row("table 8", "C1", "mixtral-8x7b", (4096, 2048), 50, 0.72, num_rows=200),
    prefill("table 8", "C1", "mixtral-8x7b", (16384, 8192), 2662, 0.92, num_rows=50),
    prefill("table 8", "C1", "mixtral-8x7b", (8192, 16384), 2684, 0.98, num_rows=50),
    prefill("table 8", "C1", "mixtral-8x7b", (8192, 4096), 2686, 0.98, num_rows=100),
    prefill("table 8", "C1", "mixtral-8x7b", (4096, 2048), 2667, 1.03, num_rows=200),
)  # fmt: skip


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row.source}-{row.model}-{row.lengths[1]}-{row.published}"
)
def test_published_rates(row: Row) -> None:
    """All rows of MoE-Gen, decode and prefill: those that miss by over 40 % say why."""
    ratio = row.tokens_per_s() / row.published
    assert ratio == pytest.approx(row.ratio, abs=0.006, rel=0.01)
    assert bool(row.reason) == (abs(ratio - 1) > TOLERANCE)


@pytest.mark.parametrize(
    ("num_rows", "lengths", "published", "ratio"),
    [
        (116_000, (512, 1), 18, 0.98),  # MMLU
        (8_500, (512, 256), 8, 0.90),  # GSM8K
        # ChatbotArena misses: 36,000 rows in 82 hours are 62 tokens/s, where table 6 has 91 at a
        # context that is no shorter.
        (36_000, (256, 512), 82, 0.59),
    ],
)
def test_hours_of_jobs(
    num_rows: int, lengths: tuple[int, int], published: float, ratio: float
) -> None:
    """Table 4, Mixtral-8x22B on C2."""
    kernel = kernel_bytes_per_s("C2", "mixtral-8x22b")
    found = search(NODES["C2"], "mixtral-8x22b", kernel, lengths=lengths, num_rows=num_rows)
    seconds = num_rows * lengths[0] / found.prefill().tokens_per_s
    if lengths[1] > 1:
        seconds += num_rows * lengths[1] / found.decode().tokens_per_s
    assert seconds / 3600 / published == pytest.approx(ratio, abs=0.011)


def test_eight_bit_weights_take_half_of_memory_and_link() -> None:
    """README, DeepSeek-R1: its 671 B parameters are on the link as they are stored."""
    wide = PaperModel.of(model_preset("deepseek-v3"))
    narrow = MODELS["deepseek-v3"]
    assert narrow.weight_bytes == pytest.approx(669 * GB, rel=0.01)
    assert wide.weight_bytes == 2 * narrow.weight_bytes
    assert (wide.expert_flop(10), wide.dense_flop(10)) == (
        narrow.expert_flop(10), narrow.dense_flop(10),
    )  # fmt: skip
    assert wide.kv_token_bytes == narrow.kv_token_bytes
    slow = replace(
        NODES["1 TB"], htod_bytes_per_s=2 * GB, gpu_flop_per_s=1e16, gpu_bytes_per_s=1e15
    )
    plan = search(slow, "deepseek-v3", 0.0, num_rows=20).prefill()
    assert plan.step_s == pytest.approx(narrow.weight_bytes / (2 * GB), rel=0.02)
    dequantising = replace(slow, htod_bytes_per_s=1e15, gpu_bytes_per_s=10 * GB)
    plan = search(dequantising, "deepseek-v3", 0.0, num_rows=20).prefill()
    moved = 5 * narrow.weight_bytes  # 8 bits read, 16 written, 16 read
    assert plan.step_s == pytest.approx(moved / (10 * GB), rel=0.02)
    with pytest.raises(InfeasiblePlanError, match=r"111\.17 GiB more than the host memory"):
        search(NODES["C2"], "deepseek-v3", 0.0).decode()


def test_no_kv_comes_to_the_device_while_prefilling() -> None:
    """Section 4.3: "there is no HtoD KV-cache copy"; a slow link then only waits for weights."""
    slow = replace(NODES["C2"], htod_bytes_per_s=2 * GB, gpu_flop_per_s=1e16)
    plan = search(slow, "mixtral-8x7b", KERNEL_BYTES_PER_S, num_rows=1000).prefill()
    weights_s = MODELS["mixtral-8x7b"].weight_bytes / slow.htod_bytes_per_s
    assert plan.step_s == pytest.approx(weights_s, rel=0.02)


def test_tokens_that_hide_the_fetch_of_an_expert() -> None:
    """Figure 3, right: more than 2^11 on an A5000; an expert's intensity is its tokens."""
    levels = Hierarchy.of(A5000)
    tokens = levels.near.flop_per_s / levels.link_bytes_per_s
    assert 2**11 < tokens < 2**12


@pytest.mark.parametrize("model", ["mixtral-8x7b", "mixtral-8x22b"])
def test_what_is_chosen_fits_both_memories(model: str) -> None:
    """Equations 2 and 3, counted again; parameters fill the device (S_Params)."""
    numbers, node = MODELS[model], NODES["C2"]
    plan = replace(search(node, model, KERNEL_BYTES_PER_S), keeps_parameters=True).decode()
    policy = plan.policy
    row_bytes = 768 * numbers.kv_token_bytes_all
    host_bytes = policy.batch_size * row_bytes + numbers.weight_bytes
    assert node.host_memory_bytes - row_bytes < host_bytes <= node.host_memory_bytes
    device_bytes = (
        policy.resident_fraction * numbers.weight_bytes
        + policy.expert_slots * numbers.expert_bytes
        + 2 * policy.attention_batch * 768 * numbers.kv_token_bytes
    )
    assert 0.9 * node.gpu_memory_bytes < device_bytes <= node.gpu_memory_bytes


def test_models_beyond_a_memory_are_refused_with_numbers() -> None:
    """Table 10: "C1 cannot hold the model size of Mixtral-8x22B"."""
    with pytest.raises(InfeasiblePlanError, match=r"5\.35 GiB more than the host memory"):
        search(NODES["C1"], "mixtral-8x22b", KERNEL_BYTES_PER_S).decode()
    tiny = replace(NODES["C2"], gpu_memory_bytes=GIB // 2)
    with pytest.raises(InfeasiblePlanError, match=r"512\.00 MiB .* need 750\.15 MiB"):
        search(tiny, "mixtral-8x22b", KERNEL_BYTES_PER_S).decode()


BY_HAND = ModuleTimes(
    dense_copy=1.0,
    pre=2.0,
    kv_copy=(4.0, 4.0, 4.0),
    device_attention=(1.0, 1.0, 1.0),
    cpu_attention=20.0,
    post=1.0,
    expert_copy=3.0,
    expert=2.0,
)


@pytest.mark.parametrize(
    ("times", "slots", "seconds"),
    [
        # Copies 1, KV to 13; the CPU from 3 to 23, post to 24; both experts there since 19.
        (BY_HAND, 2, 28.0),
        # The second expert's copy starts when the first is computed, at 26.
        (BY_HAND, 1, 31.0),
        # Without the CPU: KV to 13, attention to 14, post to 15; experts there at 16 and 19.
        (replace(BY_HAND, cpu_attention=0.0), 2, 21.0),
        # The third KV has a buffer at 11, behind the first attention; experts there at 21 and 27.
        (
            replace(BY_HAND, cpu_attention=0.0, device_attention=(6.0,) * 3, expert_copy=6.0),
            2,
            29.0,
        ),
    ],
)
def test_one_layer_by_hand(times: ModuleTimes, slots: int, seconds: float) -> None:
    """Equation 4 on figure 6, two experts."""
    found = critical_path_s(times, num_layers=1, num_experts=2, expert_slots=slots)
    assert found == pytest.approx(seconds)


def test_two_layers_by_hand() -> None:
    """What is not an expert has one buffer: the second layer's is copied behind the first `post`.

    Post at 24, copy to 25, projections behind the experts at 28 to 30, the CPU to 50, post at 51;
    the experts of the second layer wait for the slots of the first.
    """
    found = critical_path_s(BY_HAND, num_layers=2, num_experts=2, expert_slots=2)
    assert found == pytest.approx(55.0)
    later = replace(BY_HAND, dense_copy=10.0)
    found = critical_path_s(later, num_layers=2, num_experts=2, expert_slots=2)
    assert found == pytest.approx(10 + 2 + 20 + 1 + 10 + 2 + 20 + 1 + 4)


def test_paths_are_within_their_bounds_and_slots_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shorter than any processor's work, no longer than all; random times, eight layers."""
    rng = random.Random()
    monkeypatch.setattr(moe_gen, "WALKED_LAYERS", 8)
    for _ in range(200):
        launches = rng.randint(0, 5)
        draw = [rng.expovariate(1.0) for _ in range(6)]
        times = ModuleTimes(
            dense_copy=draw[0],
            pre=draw[1],
            kv_copy=tuple(rng.expovariate(1.0) for _ in range(launches)),
            device_attention=tuple(rng.expovariate(1.0) for _ in range(launches)),
            cpu_attention=draw[2],
            post=draw[3],
            expert_copy=draw[4],
            expert=draw[5],
        )
        link = times.dense_copy + sum(times.kv_copy) + 4 * times.expert_copy
        gpu = times.pre + sum(times.device_attention) + times.post + 4 * times.expert
        cpu = times.pre + times.cpu_attention + times.post + 4 * times.expert
        paths = [
            critical_path_s(times, num_layers=8, num_experts=4, expert_slots=slots)
            for slots in (1, 2, 4)
        ]
        assert 8 * max(link, gpu, cpu) <= paths[-1] * (1 + 1e-9), times
        assert paths == sorted(paths, reverse=True), times
        assert paths[0] <= 8 * (link + gpu + times.cpu_attention) * (1 + 1e-9), times


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_few_layers_tell_how_long_all_take(
    fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 layers walked one by one against the first few and the last of them repeated; 1 %."""
    plan = search(NODES["C2"], "mixtral-8x7b", KERNEL_BYTES_PER_S)
    short = plan.decode(fraction)
    monkeypatch.setattr(moe_gen, "WALKED_LAYERS", 32)
    assert plan.decode(fraction).step_s == pytest.approx(short.step_s, rel=0.01)
