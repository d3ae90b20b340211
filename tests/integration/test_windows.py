"""Windows far shorter than the context: tokens of transformers, from blocks that are freed.

Blocks that nobody has are full of NaN before each step.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from raymoe.config import EngineConfig
from raymoe.engine.core import EngineCore
from raymoe.engine.engine import Engine
from raymoe.engine.sequence import SchedulerOutput
from raymoe.engine.window_blocks import WindowBlocks
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.runtime.in_place import InPlace
from raymoe.runtime.streamed import Streamed
from raymoe.schedule.timeline import Timeline
from tests.kinds import covering
from tests.parity.configurations import first_of_each_family
from tests.parity.oracle import Reference, Rows, make_checkpoint, make_reference

FAMILIES = ("gpt_oss", "gemma3_text", "gemma4_text", "mimo_v2_flash", "laguna", "step3p7")
FAMILIES += ("exaone_moe", "cohere2_moe", "olmo3", "afmoe")
WINDOWS = (5, 31, 32, 33, 64)
ROWS = Rows(num_prompts=6, lengths=(230, 70, 1, 161, 200, 97), max_new_tokens=40)
SIZES = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_prefill_chunk_tokens": 512,
    "num_kv_blocks": 80,
}
SCENARIOS: dict[str, dict[str, int]] = {
    "one batch": {},
    "alone": {"max_num_seqs": 1},
    "chunks of 7": {"max_prefill_chunk_tokens": 7, "max_num_batched_tokens": 40},
    "preemption": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 21},
}
# Host and device attend, and KV is staged; the ring of experts; all on the host; all on the device.
PLACES: dict[str, tuple[str, DevicePolicy | None]] = {
    "cpu": ("auto", None),
    "cgopipe": ("cgopipe", DevicePolicy(page_bytes=9_000)),
    "vslpipe": ("vslpipe", DevicePolicy(page_bytes=9_000, num_micro_batches=2)),
    "module_batching": (
        "module_batching",
        DevicePolicy(page_bytes=9_000, num_micro_batches=3, cpu_attention_fraction=0.4),
    ),
    "resident": ("resident", None),
}


@functools.cache
def with_window(family: str, window: int) -> tuple[Path, Reference]:
    """The plain model of a family with another window, and what transformers generates."""
    (plain,) = (one for one in first_of_each_family() if one.family == family)
    text = plain.fields.get("text_config", plain.fields)
    text = text | {"sliding_window": window, "max_position_embeddings": 512}
    if "sliding_window_size" in text:
        text["sliding_window_size"] = window
    is_wrapper = "text_config" in plain.fields
    fields = plain.fields | {"text_config": text} if is_wrapper else text
    configuration = replace(plain, fields=fields)
    directory = DIRECTORIES[0] / f"{family}-{window}"
    model = make_checkpoint(configuration, directory)
    return directory, make_reference(model, configuration, ROWS)


DIRECTORIES: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    DIRECTORIES[:] = [tmp_path_factory.mktemp("windows")]
    yield
    with_window.cache_clear()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill blocks that are free, and have no prefix, with NaN before each step."""
    run = EngineCore._run

    def poison_and_run(core: EngineCore, next_step: SchedulerOutput) -> Timeline:
        windows, placed = core.scheduler._windows, core._runner._placed  # type: ignore[attr-defined]
        if windows is not None:
            for i, blocks in enumerate(caches_of(placed)):
                pool = windows.pool if placed.decoder.is_windowed(i) else core.scheduler.pool
                assert len(blocks) == pool.num_blocks
                blocks[pool._empty] = float("nan")
        return run(core, next_step)

    monkeypatch.setattr(EngineCore, "_run", poison_and_run)


def engine_of(directory: Path, place: str, **sizes: int) -> Engine:
    schedule, device = PLACES[place]
    config = EngineConfig(
        dtype="float32",
        device="cpu" if place == "cpu" else "emulated",
        schedule=schedule,
        num_threads=1,
        policy=Policy(**(SIZES | sizes), device=device),
        linger_s=60.0,
    )
    return Engine.from_pretrained(directory, config)


def windows_of(engine: Engine) -> WindowBlocks:
    windows = engine._core.scheduler._windows
    assert windows is not None
    return windows


def caches_of(placed: InPlace | Streamed) -> Sequence[Tensor]:
    return placed._cache if isinstance(placed, InPlace) else placed._memory.kv


def assert_planned_memory_is_taken(engine: Engine) -> None:
    assert engine.plan is not None
    footprint = engine.plan.footprint
    if engine.plan.schedule == "resident":
        assert engine.plan.device_footprint is not None
        footprint = engine.plan.device_footprint
    caches = caches_of(engine._core._runner._placed)  # type: ignore[attr-defined]
    assert sum(cache.nbytes for cache in caches) == footprint.bytes_of("KV cache")


def check(family: str, window: int, scenario: str, place: str) -> int:
    """Check the tokens of a model; return how many rows were preempted."""
    directory, reference = with_window(family, window)
    params = {"temperature": 0, "max_tokens": ROWS.max_new_tokens}
    with engine_of(directory, place, **SCENARIOS[scenario]) as engine:
        assert windows_of(engine)._window == window
        pool = windows_of(engine).pool
        if scenario == "preemption":  # rows of one token let the engine expect short ones
            engine.generate([[1]] * 20, {"temperature": 0, "max_tokens": 1})
        assert_planned_memory_is_taken(engine)
        rows = engine.generate(reference.prompts, params)
        assert [row.error for row in rows] == [""] * len(rows)
        assert [list(row.token_ids) for row in rows] == reference.tokens
        num_preemptions = engine.stats().num_preemptions
        assert pool.num_free == pool.num_blocks < engine.plan.policy.num_kv_blocks  # type: ignore[union-attr]
        again = engine.generate(reference.prompts[::-1], params)[::-1]
        assert [list(row.token_ids) for row in again] == reference.tokens
        if scenario != "preemption":  # where prefixes may be lost
            assert any(row.num_cached_tokens for row in again)
    return num_preemptions


@covering(window=WINDOWS, scenario=list(SCENARIOS), place=list(PLACES))
def test_rows_have_the_tokens_of_transformers(window, scenario, place) -> None:
    family = ("gpt_oss", "gemma4_text", "gemma3_text")[window % 3]
    num_preemptions = check(family, window, scenario, place)
    if family == "gpt_oss" and scenario == "preemption":  # clear rows of others may all fit
        assert num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_family(family, window) -> None:
    turn = window + FAMILIES.index(family)
    scenario, place = [*SCENARIOS][turn % len(SCENARIOS)], [*PLACES][turn % len(PLACES)]
    check(family, window, scenario, place)
