"""Every schedule on the emulated device gives the tokens of the device `cpu`, float32, greedy."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from raymoe.config import EngineConfig
from raymoe.device.lane import TaskMark
from raymoe.device.mover import MoverLane
from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.kernels.elementwise import Projected
from raymoe.model.compressed import CompressedAttention
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.schedule.builders import RING_SCHEDULES, STREAMING_BUILDERS
from raymoe.schedule.graph import Op, Task
from raymoe.specs.workload import Workload
from tests.kinds import covering
from tests.parity.cases import get_case
from tests.parity.configurations import CONFIGURATIONS

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
NUM_PROMPTS, NUM_TOKENS = 10, 16
SIZES = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_prefill_chunk_tokens": 512,
    "num_kv_blocks": 120,
}
# Sizes of steps that differ from SIZES, and what is asked of the rows.
SCENARIOS: dict[str, tuple[dict[str, int], dict[str, object]]] = {
    "mixed lengths": ({}, {}),
    "early end": ({}, {"stop_token_ids": "common"}),
    "preemption": ({"num_kv_blocks": 8, "max_num_batched_tokens": 512}, {}),
    "long prompt": ({"max_prefill_chunk_tokens": 7, "max_num_batched_tokens": 40}, {}),
}
# Four ways to place the weights: everything moves; some experts stay; all stays; through a ring.
DEVICES = {
    "pages": DevicePolicy(num_micro_batches=3, page_bytes=9_000, cpu_attention_fraction=0.4),
    "resident share": DevicePolicy(num_micro_batches=3, page_bytes=20_000, resident_bytes=60_000),
    "resident": DevicePolicy(
        num_micro_batches=2, resident_bytes=1 << 30, cpu_attention_fraction=0.7
    ),
    "staged": DevicePolicy(num_micro_batches=4, page_bytes=5_000, staging_slots=3),
    "ring": DevicePolicy(
        num_micro_batches=3,
        page_bytes=5_000,
        expert_groups=4,
        ring_slots=2,
        cpu_attention_fraction=0.6,
    ),
    "one micro-batch": DevicePolicy(
        num_micro_batches=1, page_bytes=30_000, cpu_attention_fraction=0.0
    ),
}


def plain_configuration(family: str) -> str:
    return next(c.name for c in CONFIGURATIONS if c.name.startswith(f"{family}:"))


def make_engine(name: str, sizes: dict[str, int], **config: object) -> Engine:
    device = config.pop("device_policy", None)
    policy = Policy(**(SIZES | sizes), device=device)  # type: ignore[arg-type]
    options = {"dtype": "float32", "policy": policy, "linger_s": 0.0} | config
    return Engine.from_pretrained(get_case(name).directory, EngineConfig(**options))  # type: ignore[arg-type]


def run(engine: Engine, name: str, params: dict[str, object]) -> list[tuple[int, ...]]:
    prompts = get_case(name).reference.prompts[:NUM_PROMPTS]
    # Rows of one token let the engine expect short ones, so that a small cache overflows.
    engine.generate([[1]] * 20, {"temperature": 0, "max_tokens": 1})
    generations = engine.generate(prompts, {"temperature": 0, "max_tokens": NUM_TOKENS} | params)
    assert [generation.error for generation in generations] == [""] * len(prompts)
    return [generation.token_ids for generation in generations]


@cache
def common_token(name: str) -> int:
    """A token that ends some rows early."""
    with make_engine(name, {}) as engine:
        tokens = [token for row in run(engine, name, {}) for token in row[2:-2]]
    return max(set(tokens), key=tokens.count)


@cache
def on_cpu(name: str, scenario: str) -> list[tuple[int, ...]]:
    sizes, _ = SCENARIOS[scenario]
    with make_engine(name, sizes) as engine:
        return run(engine, name, parameters(name, scenario))


def parameters(name: str, scenario: str) -> dict[str, object]:
    _, params = SCENARIOS[scenario]
    return {"stop_token_ids": [common_token(name)]} if params else {}


def check(
    family: str, schedule: str, scenario: str, policy: DevicePolicy, **config: object
) -> None:
    check_configuration(plain_configuration(family), schedule, scenario, policy, **config)


def check_configuration(
    name: str, schedule: str, scenario: str, policy: DevicePolicy, **config: object
) -> None:
    sizes, _ = SCENARIOS[scenario]
    config = {"device": "emulated", "schedule": schedule, "device_policy": policy} | config
    with make_engine(name, sizes, **config) as engine:
        assert run(engine, name, parameters(name, scenario)) == on_cpu(name, scenario)
        if scenario == "preemption":
            assert engine.stats().num_preemptions > 0
        assert engine.last_timeline is not None
        assert engine.last_timeline.name == schedule


@covering(schedule=STREAMING_BUILDERS.keys(), scenario=SCENARIOS.keys())
def test_a_schedule_gives_the_tokens_of_the_cpu(schedule: str, scenario: str) -> None:
    check("mixtral", schedule, scenario, DEVICES["pages"])


@pytest.mark.parametrize("placement", DEVICES)
def test_placement_changes_no_token(placement: str) -> None:
    check("qwen2_moe", "module_batching", "mixed lengths", DEVICES[placement])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mixtral: gelu, one KV head, 3 layers", marks=pytest.mark.slow),
        "qwen2_moe: dense first layer, sparse step 2",
    ],
)
def test_slots_change_places_and_dense_layers_stream(name: str) -> None:
    check_configuration(name, "cgopipe", "mixed lengths", DEVICES["pages"])
    check_configuration(name, "flexgen_s4", "long prompt", DEVICES["resident share"])


@pytest.mark.parametrize("placement", ["pages", "ring", "staged"])
def test_the_link_begins_the_next_step_while_the_host_prepares_it(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the second layer, as the first is loaded in the step before; unless pages are staged."""
    loads: list[tuple[int, int]] = []
    submit = MoverLane.submit

    def recorded(lane: MoverLane, task: Task, *arguments: Any) -> TaskMark:
        if task.op is Op.W:
            loads.append((task.layer, task.part))
        return submit(lane, task, *arguments)

    monkeypatch.setattr(MoverLane, "submit", recorded)
    config = {"device": "emulated", "schedule": "micro_batches"}
    name = plain_configuration("mixtral")
    with make_engine(name, {}, device_policy=DEVICES[placement], **config) as engine:
        loads.clear()
        engine.generate([[1, 2, 3]], {"temperature": 0, "max_tokens": 5, "ignore_eos": True})
    assert set(Counter(loads).values()) == {5}  # each page once a step
    assert loads[-1][0] == (0 if placement == "staged" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("schedule", STREAMING_BUILDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_schedule_and_scenario(family: str, schedule: str, scenario: str) -> None:
    check(family, schedule, scenario, DEVICES["pages"])


@pytest.mark.parametrize(
    ("schedule", "scenario", "placement"),
    [
        ("cgopipe", "mixed lengths", "pages"),
        pytest.param("vslpipe", "mixed lengths", "pages", marks=pytest.mark.slow),
        pytest.param("module_batching", "mixed lengths", "pages", marks=pytest.mark.slow),
        ("module_batching", "preemption", "resident"),
        pytest.param("flexgen_s4", "long prompt", "one micro-batch", marks=pytest.mark.slow),
    ],
)
def test_latent_attention_is_divided_between_host_and_device(
    schedule: str, scenario: str, placement: str
) -> None:
    name = "deepseek_v3: narrow latent, pairs apart, no dense layer"  # prompts in both forms
    check_configuration(name, schedule, scenario, DEVICES[placement])


@pytest.mark.slow
@pytest.mark.parametrize("placement", DEVICES)
@pytest.mark.parametrize("schedule", STREAMING_BUILDERS)
def test_every_schedule_and_placement(schedule: str, placement: str) -> None:
    if placement == "ring" and schedule not in RING_SCHEDULES:
        pytest.skip("it loads whole layers")
    check("qwen2_moe", schedule, "long prompt", DEVICES[placement])


@pytest.mark.parametrize(
    ("name", "schedule", "scenario", "placement"),
    [
        ("windows of 8 and 64 tokens, one expert", "cgopipe", "mixed lengths", "pages"),
        pytest.param("plain", "vslpipe", "long prompt", "staged", marks=pytest.mark.slow),
        pytest.param("plain", "micro_batches", "preemption", "ring", marks=pytest.mark.slow),
        pytest.param(
            "long windows first, none by token ids, two tokens as they are",
            "flexgen_s3",
            "early end",
            "resident share",
            marks=pytest.mark.slow,
        ),
        ("plain", "module_batching", "long prompt", "one micro-batch"),
    ],
)
def test_attention_to_entries_is_divided_between_host_and_device(
    name: str, schedule: str, scenario: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots and blocks of the device's rows are copied there, and the host appends for itself."""
    attended: list[int] = []
    attend = CompressedAttention.attend_staged

    def counted(self: CompressedAttention, projected: Projected, *arguments: Any) -> Tensor:
        attended.append(len(projected.query_THD))
        return attend(self, projected, *arguments)

    monkeypatch.setattr(CompressedAttention, "attend_staged", counted)
    check_configuration(f"deepseek_v4: {name}", schedule, scenario, DEVICES[placement])
    assert sum(attended)


# Kinds of states, which differ in the kernels that update them.
WITH_STATES = (
    "qwen3_next: convolution of 2, one KV head, top-3",
    "nemotron_h: groups of experts, scaled, top-3",
    "granitemoehybrid: groups of heads, wide convolution, no bias of it",
    "lfm2_moe: wide convolution with biases",
    "kimi_linear: more heads than attention has, wide convolution, 2 dense layers",
    "bailing_hybrid: attention first, latent queries, biases, no dense layer",
    "glm5_next: three streams divided once, large epsilon, decay without a bound",
    "qwen4_exp_text: n-grams of 4, convolution of 2, several ends, another seed",
)


def check_states(name: str, schedule: str, scenario: str, placement: str) -> None:
    policy = replace(DEVICES[placement], states_on_device=True)
    check_configuration(name, schedule, scenario, policy)


@pytest.mark.parametrize(
    ("name", "schedule", "scenario", "placement"),
    [
        pytest.param(WITH_STATES[0], "cgopipe", "long prompt", "pages", marks=pytest.mark.slow),
        (WITH_STATES[0], "flexgen_s4", "preemption", "resident share"),
        (WITH_STATES[1], "micro_batches", "mixed lengths", "ring"),
        pytest.param(WITH_STATES[2], "flexgen_s3", "early end", "staged", marks=pytest.mark.slow),
        (WITH_STATES[3], "module_batching", "mixed lengths", "pages"),
        (WITH_STATES[4], "vslpipe", "long prompt", "ring"),
        pytest.param(WITH_STATES[5], "cgopipe", "preemption", "pages", marks=pytest.mark.slow),
        pytest.param(WITH_STATES[6], "cgopipe", "preemption", "staged", marks=pytest.mark.slow),
        (WITH_STATES[7], "cgopipe", "preemption", "ring"),
    ],
)
def test_states_on_the_device_change_no_token(
    name: str, schedule: str, scenario: str, placement: str
) -> None:
    check_states(name, schedule, scenario, placement)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("schedule", STREAMING_BUILDERS)
@pytest.mark.parametrize("name", WITH_STATES)
def test_states_of_every_kind_schedule_and_scenario(
    name: str, schedule: str, scenario: str
) -> None:
    check_states(name, schedule, scenario, "pages")


# Kinds of what tokens choose, at contexts where they do.
CHOOSING = (
    *("glm5_next: plain", "minimax_m3_vl_text: plain", "deepseek_v4: plain"),
    "qwen4_exp_text: plain",
)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(
            name,
            schedule,
            marks=() if (name, schedule) == (CHOOSING[1], "cgopipe") else pytest.mark.slow,
        )
        for name in CHOOSING
        for schedule in ("cgopipe", "vslpipe", "module_batching")
    ],
)
def test_choices_change_with_no_schedule(name: str, schedule: str) -> None:
    check_configuration(name, schedule, "preemption", DEVICES["pages"])


@pytest.mark.slow
@pytest.mark.parametrize("placement", DEVICES)
@pytest.mark.parametrize("schedule", STREAMING_BUILDERS)
def test_states_on_the_device_of_every_placement(schedule: str, placement: str) -> None:
    if placement == "ring" and schedule not in RING_SCHEDULES:
        pytest.skip("it loads whole layers")
    check_states(WITH_STATES[0], schedule, "long prompt", placement)


def test_a_device_that_is_too_small_is_refused_before_the_first_row() -> None:
    name = plain_configuration("mixtral")
    with pytest.raises(InfeasiblePlanError, match="of device memory"):
        make_engine(name, {}, device="emulated", device_memory_bytes=100_000)


def test_a_schedule_of_another_device_is_refused_with_those_that_fit() -> None:
    name = plain_configuration("mixtral")
    with pytest.raises(ConfigError, match="runs in_place"):
        make_engine(name, {}, device="cpu", schedule="cgopipe")
    with pytest.raises(ConfigError, match="cgopipe, fastdecode"):
        make_engine(name, {}, device="emulated", schedule="in_place")


RESIDENT = {*map(plain_configuration, ("mixtral", "deepseek_v3")), WITH_STATES[0]}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in RESIDENT else pytest.mark.slow)
        for name in (*map(plain_configuration, FAMILIES), *WITH_STATES)
    ],
)
def test_a_model_that_fits_on_the_device_is_resident_with_the_same_tokens(name: str) -> None:
    config = EngineConfig(dtype="float32", device="emulated", hardware="l4", linger_s=0.0)
    with Engine.from_pretrained(get_case(name).directory, config) as engine:
        assert engine.plan is not None
        assert engine.plan.schedule == "resident"
        assert run(engine, name, {}) == on_cpu(name, "mixed lengths")
        assert engine.last_timeline is not None
        assert engine.last_timeline.name == "resident"


@pytest.mark.parametrize("schedule", ["micro_batches", "cgopipe", "flexgen_s4"])
def test_the_planners_own_policy_changes_no_token(schedule: str) -> None:
    name = plain_configuration("qwen3_moe")
    workload = Workload(num_rows=20, prompt_tokens=30, generated_tokens=16)
    config = EngineConfig(
        dtype="float32", device="emulated", schedule=schedule, workload=workload, linger_s=0.0
    )
    with Engine.from_pretrained(get_case(name).directory, config) as engine:
        assert engine.plan is not None
        assert engine.plan.schedule == schedule
        assert run(engine, name, {}) == on_cpu(name, "mixed lengths")
