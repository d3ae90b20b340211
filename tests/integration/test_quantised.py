"""Quantised checkpoints give what transformers gives with the numbers that they stand for."""

import functools
import itertools
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
import torch
import transformers

from raymoe import _native
from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.memory.checkpoint import Checkpoint
from raymoe.plan.footprint import device_footprint
from raymoe.plan.policy import DevicePolicy, Footprint, Policy
from raymoe.plan.sizes import JobOnNode, SearchPoint, Sizes
from raymoe.plan.work import ModelWork
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import Fp8Block, Fp8Tensor
from raymoe.specs.workload import Workload
from tests.mixed_checkpoints import CASES as MIXED_CASES
from tests.parity.configurations import model_class
from tests.parity.driver import Driver, load_decoder
from tests.quantised_checkpoints import CASES, QuantisedCase, checkpoints, make_checkpoints

NAMES = [case.name for case in CASES]
# Through the engine in the default run: other bits, other scales, zero points and orders.
QUICK = (
    "fp8 blocks, bfloat16 scales, some plain",
    "fp8 matrices of transformers, static",
    "gptq, act-order, zero points",
    "mxfp4",
    "nvfp4 of modelopt",
    "fp8 blocks of DeepSeek-V3",
    "fp8 blocks, experts mxfp4, of DeepSeek-V4",
)
ENGINE_NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES
]
# They differ from another case in what config.json says alone.
ALIKE = ("fp8 matrices of compressed-tensors", "fp8 matrices of modelopt")
LOGIT_NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in NAMES
]
SCHEDULES = ("cgopipe", "vslpipe", "module_batching")
QUICK_PAIRS = set(zip(QUICK, itertools.cycle(SCHEDULES), strict=False))
PAIRS = [
    pytest.param(*pair, marks=() if pair in QUICK_PAIRS else pytest.mark.slow)
    for pair in itertools.product(NAMES, SCHEDULES)
]
SIZES = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_prefill_chunk_tokens": 64,
    "num_kv_blocks": 40,
}
NUM_TOKENS = 24
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
WORKLOAD = Workload(num_rows=5, prompt_tokens=40, generated_tokens=NUM_TOKENS)
DEVICE = DevicePolicy(num_micro_batches=2, page_bytes=9_000, resident_bytes=30_000)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(199, (n,), generator=generator).tolist() for n in (1, 40, 17, 33, 8)]


def of_transformers(directory: Path, **options: str) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.from_pretrained(directory)
    found = model_class(config).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **options
    )
    return found.eval()


@pytest.mark.parametrize("name", LOGIT_NAMES)
def test_logits_are_those_of_transformers_with_the_decoded_weights(name: str) -> None:
    found = checkpoints(name)
    theirs = of_transformers(found.plain, experts_implementation="eager")
    rows = prompts()
    driver = Driver(load_decoder(found.quantised), rows, 1)
    logits_TV = driver.run_step([(0, len(row)) for row in rows])
    for row, logits in zip(rows, logits_TV.split([len(row) for row in rows]), strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([row])).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())


@functools.cache
def generate(directory, **options) -> list[tuple[int, ...]]:
    device_policy = DEVICE if options.get("device") == "emulated" else None
    policy = Policy(**SIZES, device=device_policy)
    config = EngineConfig(linger_s=0.0, policy=policy, **options)
    with Engine.from_pretrained(directory, config) as engine:
        rows = engine.generate(prompts(), GREEDY)
    assert [row.error for row in rows] == [""] * len(rows)
    return [row.token_ids for row in rows]


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_stored_bytes_give_the_tokens_of_the_decoded_weights(name: str) -> None:
    found = checkpoints(name)
    expected = generate(found.plain, dtype="float32")
    assert generate(found.quantised, dtype="float32") == expected


@pytest.mark.parametrize(("name", "schedule"), PAIRS)
def test_pages_of_stored_bytes_give_the_tokens_of_the_cpu(name: str, schedule: str) -> None:
    stored = checkpoints(name).quantised
    on_device = {"dtype": "float32", "device": "emulated", "schedule": schedule}
    assert generate(stored, **on_device) == generate(stored, dtype="float32")


@pytest.fixture
def _decoding_kernels() -> Iterator[None]:
    """AVX512-BF16 multiplies by numbers, and scales sums: it rounds no weight to bfloat16."""
    before = _native.active_isa()
    if before == "avx512_bf16":
        _native.set_isa("avx512")
    yield
    _native.set_isa(before)


@pytest.mark.usefixtures("_decoding_kernels")
@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_packed_codes_give_the_tokens_of_packed_weights(name: str) -> None:
    """In bfloat16, to the bit where the kernels have it: codes are decoded to what was packed."""
    found = checkpoints(name)
    assert generate(found.quantised, dtype="bfloat16") == generate(found.plain, dtype="bfloat16")


MIXED_QUICK = ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in MIXED_QUICK else pytest.mark.slow)
        for case in MIXED_CASES
    ],
)
def test_published_mixtures_of_formats_give_the_tokens_of_the_decoded_weights(
    case: QuantisedCase,
) -> None:
    found = make_checkpoints(case)
    spec = ModelSpec.from_directory(found.quantised)
    assert spec.quantization is not None
    formats = {each.name for each in spec.quantization.formats}
    assert formats >= {each.name for each in case.modules.values()}
    expected = generate(found.plain, dtype="float32")
    assert generate(found.quantised, dtype="float32") == expected


def smallest_footprint(spec: ModelSpec, schedule: str, slot_layers: float) -> Footprint:
    """What one sequence needs on the device, with so many layers in its weight slots."""
    node, work = hardware_preset("l4"), ModelWork.of(spec, 4)
    job = JobOnNode(
        model=spec, work=work, hardware=node, workload=WORKLOAD, max_model_len=spec.max_model_len
    )
    sizes = Sizes(job, schedule=schedule)
    point = sizes.fixed(SearchPoint(1.0, 1, False, 0, 1.0, 1024, slot_layers))
    steps = sizes.sized(point, max_num_seqs=1, num_kv_blocks=job.min_blocks)
    return device_footprint(spec, work, steps)


@functools.cache
def tokens_of_transformers(directory: Path) -> list[tuple[int, ...]]:
    theirs = of_transformers(directory)
    rows = []
    for prompt in prompts():
        ids_1T = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                next_11 = theirs(ids_1T).logits[:, -1:].argmax(-1)
                ids_1T = torch.cat([ids_1T, next_11], 1)
        rows.append(tuple(ids_1T[0, len(prompt) :].tolist()))
    return rows


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, schedule, marks=() if schedule == quick else pytest.mark.slow)
        for name, quick in (
            ("fp8 blocks of DeepSeek-V3", "micro_batches"),
            ("packed int4 of Kimi-K2", None),
        )
        for schedule in ("micro_batches", "cgopipe")
    ],
)
def test_a_device_without_room_for_two_layers_is_planned_with_a_ring_of_experts(
    name: str, schedule: str
) -> None:
    """As DeepSeek-V3 and Kimi-K2 on a GPU with 24 GB, with the tokens of transformers."""
    found = checkpoints(name)
    spec = ModelSpec.from_directory(found.quantised)
    ring, whole = (smallest_footprint(spec, schedule, layers).total for layers in (0.25, 2.0))
    assert ring < whole
    config = EngineConfig(
        dtype="float32",
        device="emulated",
        schedule=schedule,
        device_memory_bytes=whole - 1,
        workload=WORKLOAD,
        linger_s=0.0,
    )
    with Engine.from_pretrained(found.quantised, config) as engine:
        assert engine.plan is not None
        assert engine.plan.policy.device is not None
        assert engine.plan.policy.device.expert_groups > 1
        rows = engine.generate(prompts(), GREEDY)
    assert [row.token_ids for row in rows] == tokens_of_transformers(found.plain)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_take_the_bytes_that_the_plan_counts(case: QuantisedCase) -> None:
    directory = checkpoints(case.name).quantised
    stored = Checkpoint.open(directory)
    entries = {name: stored.entry(name) for name in stored.names()}
    num_bytes = sum(
        entry.num_bytes
        for name, entry in entries.items()
        if not name.endswith(case.extra) and not any(part in name for part in case.unread)
    )
    if isinstance(case.stored, Fp8Block):  # whose scales are kept as float32
        ends = case.stored.scales_suffix
        others = ".experts." if case.experts is not None else "no others"
        scales = [e for name, e in entries.items() if name.endswith(ends) and others not in name]
        num_bytes += sum(4 * prod(entry.shape) - entry.num_bytes for entry in scales)
    if isinstance(case.stored, Fp8Tensor):  # whose scale is kept for each row
        others = ".experts." if case.experts is not None else "no others"
        scales = [name for name in entries if "weight_scale" in name and others not in name]
        matrices = [name.removesuffix("_inv").removesuffix("_scale") for name in scales]
        num_bytes -= sum(entries[name].num_bytes for name in scales)
        num_bytes += sum(4 * entries[name].shape[0] for name in matrices)
    assert ModelSpec.from_directory(directory).weight_bytes(4) == num_bytes
