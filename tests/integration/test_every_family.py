"""Every configuration of every family on the emulated device gives the tokens of transformers.

Steps divide the experts between device and cores at random: none, a share, or all on the cores.
"""

import itertools

import pytest

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.plan.policy import DevicePolicy, Policy
from tests.parity.cases import get_case
from tests.parity.configurations import CONFIGURATIONS, first_of_each_family
from tests.parity.oracle import ROWS
from tests.parity.softmax_families import SOFTMAX_FAMILIES
from tests.splits import choose_splits, random_splits

SCHEDULES = ("cgopipe", "vslpipe", "module_batching")
QUICK_PROMPTS, QUICK_TOKENS = 8, 12
# Every layer moves in several pages, and the host attends for a part of the rows.
DEVICE = DevicePolicy(
    num_micro_batches=3,
    page_bytes=9_000,
    cpu_attention_fraction=0.4,
    cpu_experts_fraction=0.4,
)
POLICY = Policy(
    max_num_seqs=24,
    max_num_batched_tokens=512,
    max_prefill_chunk_tokens=40,
    num_kv_blocks=160,
    device=DEVICE,
)


@pytest.fixture(autouse=True)
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_splits(monkeypatch, random_splits(5))


def check(name: str, schedule: str, num_prompts: int | None, max_tokens: int) -> None:
    case = get_case(name)
    config = EngineConfig(
        dtype="float32", device="emulated", schedule=schedule, policy=POLICY, linger_s=0.0
    )
    with Engine.from_pretrained(case.directory, config) as engine:
        generations = engine.generate(
            case.reference.prompts[:num_prompts], {"temperature": 0, "max_tokens": max_tokens}
        )
        assert engine.last_timeline is not None
        assert engine.last_timeline.name == schedule
    assert [generation.error for generation in generations] == [""] * len(generations)
    expected = [tuple(row[:max_tokens]) for row in case.reference.tokens[:num_prompts]]
    assert [generation.token_ids for generation in generations] == expected


# Of each kind of layer one.
QUICK = {
    *("gpt_oss", "deepseek_v32", "llama4_text", "step3p7", "gemma4_text", "hy_v4"),
}


@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(c, marks=() if c.family in QUICK else pytest.mark.slow)
        for c in first_of_each_family()
        if c.family not in SOFTMAX_FAMILIES
    ],
    ids=lambda c: c.family,
)
def test_the_plain_model_of_families_that_test_schedules_has_not(configuration) -> None:
    turn = sum(map(ord, configuration.family)) % len(SCHEDULES)
    check(configuration.name, SCHEDULES[turn], QUICK_PROMPTS, QUICK_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    list(zip((each.name for each in CONFIGURATIONS), itertools.cycle(SCHEDULES), strict=False)),
)
def test_24_prompts_of_every_configuration(name: str, schedule: str) -> None:
    check(name, schedule, None, ROWS.max_new_tokens)
