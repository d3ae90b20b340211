"""Steps on a GPU access no memory without order, and each wait that is left out is noticed."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import pytest

from raymoe.plan.policy import DevicePolicy
from raymoe.schedule.graph import Op
from raymoe.specs.hardware import hardware_preset
from raymoe.units import GIB
from tests.integration import test_schedules as schedules
from tests.unit.device.checked_cuda import CheckedCuda, CheckedDevice, watch
from tests.unit.device.deferred_cuda import leave_streams_alone, use_device
from tests.unit.device.happens_before import Trace, Wait, find_hazards

DEVICES = schedules.DEVICES
CORES = {"cpu_experts_fraction": 0.5, "is_cpu_experts_fraction_fixed": True}
PLACEMENTS: dict[str, DevicePolicy | None] = {
    **DEVICES,
    "cores": replace(DEVICES["pages"], **CORES),  # type: ignore[arg-type]
    "cores and ring": replace(DEVICES["ring"], **CORES),  # type: ignore[arg-type]
    "states": replace(DEVICES["pages"], states_on_device=True),
    "states and ring": replace(DEVICES["ring"], states_on_device=True),
    "everything": None,  # on the device
}


class Case(NamedTuple):
    family: str
    schedule: str
    placement: str
    scenario: str = "mixed lengths"


STREAMED = Case("mixtral", "module_batching", "pages")
WITH_CORES = Case("qwen2_moe", "micro_batches", "cores and ring")
STAGED = Case("mixtral", "flexgen_s3", "staged")
QUICK = [
    STREAMED,
    WITH_CORES,
    STAGED,
    Case("qwen2_moe", "fastdecode", "resident"),
    Case("mixtral", "resident", "everything"),
]
SLOW = [
    Case("mixtral", "cgopipe", "pages"),
    Case("mixtral", "vslpipe", "ring", "long prompt"),
    Case("mixtral", "micro_batches", "cores"),
    Case("mixtral", "module_batching", "cores and ring", "long prompt"),
    Case("mixtral", "module_batching", "pages", "preemption"),
    Case("qwen2_moe", "flexgen_s4", "resident share", "long prompt"),
    Case("qwen2_moe", "micro_batches", "ring", "preemption"),
    Case("qwen2_moe", "layer_by_layer", "one micro-batch"),
    Case("qwen3_moe", "module_batching", "resident", "preemption"),
    Case("qwen3_moe", "fastdecode", "cores"),
    Case("qwen3_moe", "layer_by_layer", "staged", "long prompt"),
    Case("olmoe", "vslpipe", "pages"),
    Case("olmoe", "flexgen_s3", "resident share", "long prompt"),
    Case("olmoe", "cgopipe", "cores and ring"),
    Case("deepseek_v2", "cgopipe", "ring"),
    Case("deepseek_v2", "layer_by_layer", "pages", "preemption"),
    Case("deepseek_v3", "flexgen_s4", "staged"),
    Case("deepseek_v3", "module_batching", "ring", "long prompt"),
    Case("deepseek_v3", "micro_batches", "pages", "preemption"),
    Case("gpt_oss", "flexgen_s4", "one micro-batch", "long prompt"),
    Case("gpt_oss", "micro_batches", "cores", "long prompt"),
    Case("qwen3_next", "cgopipe", "states", "long prompt"),
    Case("qwen3_next", "module_batching", "pages", "long prompt"),
    Case("nemotron_h", "micro_batches", "states and ring"),
    Case("nemotron_h", "flexgen_s4", "states", "preemption"),
    Case("kimi_linear", "vslpipe", "states and ring", "long prompt"),
    Case("deepseek_v4", "micro_batches", "pages", "long prompt"),
    Case("qwen4_exp_text", "cgopipe", "states", "long prompt"),
    Case("deepseek_v3", "resident", "everything", "long prompt"),
    Case("qwen3_next", "resident", "everything", "preemption"),
]


@lru_cache(maxsize=len(QUICK))
def trace_of(case: Case) -> Trace:
    """What an engine does that is loaded, generates and is closed."""
    name = schedules.plain_configuration(case.family)
    prompts = schedules.get_case(name).reference.prompts
    sizes, _ = schedules.SCENARIOS[case.scenario]
    cuda = CheckedCuda()
    with pytest.MonkeyPatch.context() as patch:
        leave_streams_alone(patch, [cuda])
        use_device(patch, lambda *_, **__: CheckedDevice(cuda, GIB))
        watch(patch, cuda)
        with (
            cuda.watching(),
            schedules.make_engine(
                name,
                sizes,
                device="cuda",
                schedule=case.schedule,
                device_policy=PLACEMENTS[case.placement],
                hardware=hardware_preset("t4"),
            ) as engine,
        ):
            if case.scenario == "preemption":
                schedules.run(engine, name, {})
                assert engine.stats().num_preemptions > 0
            else:
                params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
                generations = engine.generate(prompts[: schedules.NUM_PROMPTS], params)
                assert not any(generation.error for generation in generations)
    cuda.trace.end()
    return cuda.trace


class Removed(NamedTuple):
    """Waits, the run that needs them, and two accesses that have no order without them."""

    case: Case
    waits: Callable[[Wait], bool]
    accesses: tuple[str, str]


def wait(waited: str, waiting: str, case: Case, accesses: tuple[str, str] | None = None) -> Removed:
    """Of one operation for another, between which there is no order then, or of other kinds."""
    return Removed(case, lambda kind: kind == (waited, waiting), accesses or (waited, waiting))


def is_end_of_step(kind: Wait) -> bool:
    return kind.waiting == "engine" and kind.waited in {*Op} - {Op.HEAD}


def is_for_numbers(kind: Wait) -> bool:
    """For what the stream of the GPU has computed: a list, or logits."""
    return kind.waited == "stream gpu"


def is_of_baseline(kind: Wait) -> bool:
    """A task that waits for all lanes, in schedules of a paper."""
    return Op.SYNC in kind


def is_hand_over(kind: Wait) -> bool:
    return kind.waited == "queue"


REMOVED = {
    "experts, w": wait("experts", "w", STREAMED),  # a slot of weights is read, then filled
    "w, pre": wait("w", "pre", STREAMED),
    "kv, append": wait("kv", "append", STREAMED),
    "head, engine": wait("head", "engine", STREAMED, ("experts", "w")),  # of pages ahead of a step
    "default stream": wait("default stream", "engine", STREAMED, ("_to_copy", "pre")),
    "append, qkv": wait("append", "qkv", STREAMED),
    "attn, hid": wait("attn", "hid", STREAMED),
    "embed, up": wait("embed", "up", STREAMED),
    "gattn, kv": wait("gattn", "kv", STREAMED),
    "hid, post": wait("hid", "post", STREAMED),
    "kv, gattn": wait("kv", "gattn", STREAMED),
    "post, w": wait("post", "w", STREAMED),
    "pre, qkv": wait("pre", "qkv", STREAMED),
    "qkv, append": wait("qkv", "append", STREAMED),
    "qkv, attn": wait("qkv", "attn", STREAMED),
    "qkv, pre": wait("qkv", "pre", STREAMED),
    "up, pre": wait("up", "pre", STREAMED),
    "w, experts": wait("w", "experts", STREAMED),
    "end of a step": Removed(STREAMED, is_end_of_step, ("w", "pre")),
    "numbers of the GPU": Removed(STREAMED, is_for_numbers, ("experts", "experts")),
    "queues": Removed(STREAMED, is_hand_over, ("experts", "w")),
    "futures": wait("future", "engine", STREAMED, ("issue", "synchronize")),
    "start of a thread": wait("start of a thread", "engine", STREAMED, ("w", "pre")),
    "cexperts, sums": wait("cexperts", "sums", WITH_CORES),
    "experts, sums": wait("experts", "sums", WITH_CORES),
    "post, rows": wait("post", "rows", WITH_CORES),
    "rows, cexperts": wait("rows", "cexperts", WITH_CORES),
    "sums, experts": wait("sums", "experts", WITH_CORES),
    "stage, w": wait("stage", "w", STAGED),
    "w, stage": wait("w", "stage", STAGED),
    "sync": Removed(STAGED, is_of_baseline, ("experts", "w")),
}
# Waits for what is over by then in all of these runs, because others lead there: a memory is used
# again only by tasks that come after what has used it.
ORDERED_BY_OTHERS = {
    Wait("attn", "qkv"),
    Wait("cexperts", "rows"),
    Wait("hid", "attn"),
    Wait("post", "hid"),
    Wait("rows", "experts"),
    Wait("rows", "post"),
    Wait("sums", "cexperts"),
    Wait("up", "post"),
    Wait("w", "post"),
}
DEFAULT = ("experts, w", "w, pre", "kv, append", "head, engine", "default stream")


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in DEFAULT else pytest.mark.slow) for each in REMOVED],
)
def test_a_wait_that_is_left_out_is_noticed(name: str) -> None:
    case, waits, accesses = REMOVED[name]
    hazards = find_hazards(trace_of(case), waits)
    assert accesses in [hazard.labels for hazard in hazards]


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids="-".join
)
def test_every_access_comes_after_those_that_it_must_follow(case: Case) -> None:
    trace = trace_of(case)
    assert list(map(str, find_hazards(trace))) == []
    between_tasks = {kind for kind in trace.waits() if {*kind} <= {*Op} and len({*kind}) == 2}
    tried = {kind for kind in between_tasks if any(each.waits(kind) for each in REMOVED.values())}
    assert between_tasks - tried <= ORDERED_BY_OTHERS
