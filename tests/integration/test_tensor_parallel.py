"""Ranks that share every step give the tokens of one, under all schedules; none is left behind."""

import functools
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import transformers

from raymoe.config import EngineConfig, Settings
from raymoe.engine.engine import Engine
from raymoe.engine.rank_model import LoadJob
from raymoe.engine.ranks import Ranks
from raymoe.errors import CheckpointError, ConfigError, ExecutionError
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.specs.hardware import hardware_preset
from tests.parity.cases import Case, get_case
from tests.parity.configurations import first_of_each_family
from tests.parity.oracle import make_checkpoint

PAPERS = ("cgopipe", "vslpipe", "module_batching")
# Grouped queries, fewer KV heads than ranks; norms over all heads; a gated shared expert, biases;
# sinks, biases of all sums; latents, a group-limited router, dense layers.
FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "gpt_oss", "deepseek_v3")
NUM_PROMPTS, NUM_TOKENS = 10, 16
SIZES = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_prefill_chunk_tokens": 512,
    "num_kv_blocks": 120,
}
STREAMED = DevicePolicy(num_micro_batches=3, page_bytes=9_000, cpu_attention_fraction=0.4)
PARTLY_RESIDENT = DevicePolicy(num_micro_batches=2, page_bytes=20_000, resident_bytes=30_000)
STAGED = DevicePolicy(num_micro_batches=4, page_bytes=5_000, staging_slots=3)
ENDLESS = {"max_tokens": 200, "ignore_eos": True}
END_S = 30.0  # for processes to disappear, however busy the machine is


@functools.cache
def case_of(family: str) -> Case:
    """The plain model of a family with heads for four ranks."""
    plain = next(each for each in first_of_each_family() if each.family == family)
    is_latent = "kv_lora_rank" in plain.fields
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if is_latent else 2}
    configuration = replace(plain, fields=plain.fields | heads | {"hidden_size": 64})
    directory = Path(tempfile.mkdtemp(prefix="raymoe-ranks-"), "model")
    make_checkpoint(configuration, directory)
    return Case(configuration, directory)


def make_engine(
    case: Case, num_ranks: int, schedule: str, device: DevicePolicy = STREAMED, **options: object
) -> Engine:
    policy = Policy(**SIZES | options.pop("sizes", {}), device=device)  # type: ignore[arg-type, operator]
    config = EngineConfig(
        dtype="float32",
        device="emulated",
        schedule=schedule,
        policy=None if schedule in {"auto", "resident"} else policy,
        tensor_parallel_size=num_ranks,
        linger_s=0.0,
        **options,  # type: ignore[arg-type]
    )
    return Engine.from_pretrained(case.directory, config)


def run(engine: Engine, case: Case) -> list[tuple[int, ...]]:
    prompts = case.reference.prompts[:NUM_PROMPTS]
    generations = engine.generate(prompts, {"temperature": 0, "max_tokens": NUM_TOKENS})
    assert [generation.error for generation in generations] == [""] * len(prompts)
    return [generation.token_ids for generation in generations]


def expected(case: Case) -> list[tuple[int, ...]]:
    """What transformers generates; rows in which rounding decides are left out there."""
    return [tuple(row[:NUM_TOKENS]) for row in case.reference.tokens[:NUM_PROMPTS]]


def rank_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if any("engine.ranks" in word for word in child.cmdline())]


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    assert alive == []


def check(family: str, num_ranks: int, schedule: str, device: DevicePolicy = STREAMED) -> None:
    case = case_of(family)
    with make_engine(case, num_ranks, schedule, device) as engine:
        ranks = rank_processes()
        assert len(ranks) == num_ranks - 1
        assert run(engine, case) == expected(case)
        assert run(engine, case) == expected(case)
        assert engine.stats().num_cached_tokens > 0  # the second time, blocks of the first
        assert engine.last_timeline is not None
        assert engine.last_timeline.name == schedule
    assert_gone(ranks)


def test_two_ranks_give_the_tokens_of_transformers() -> None:
    check("mixtral", 2, "cgopipe")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", PAPERS)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer(family: str, num_ranks: int, schedule: str) -> None:
    check(family, num_ranks, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("device", [PARTLY_RESIDENT, STAGED], ids=["partly resident", "staged"])
@pytest.mark.parametrize("schedule", STREAMING_BUILDERS)
def test_every_schedule_and_placement(schedule: str, device: DevicePolicy) -> None:
    check("qwen2_moe", 2, schedule, device)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_fits_is_resident_on_two_devices(family: str) -> None:
    check(family, 2, "resident")


@pytest.mark.slow
def test_preemption_and_chunks_of_prompts_are_the_same_on_all_ranks() -> None:
    case = case_of("mixtral")
    sizes = {"num_kv_blocks": 8, "max_num_batched_tokens": 40, "max_prefill_chunk_tokens": 7}
    with make_engine(case, 2, "micro_batches", sizes=sizes) as engine:
        # Rows of one token let the engine expect short ones, so that a small cache overflows.
        engine.generate([[1]] * 20, {"temperature": 0, "max_tokens": 1})
        assert run(engine, case) == expected(case)
        assert engine.stats().num_preemptions > 0


@pytest.mark.slow
def test_the_planner_chooses_for_ranks_at_a_pace() -> None:
    case = case_of("mixtral")
    with make_engine(case, 2, "auto", hardware="t4") as engine:
        assert engine.plan is not None
        assert engine.plan.num_ranks == 2
        assert run(engine, case) == expected(case)


def test_a_rank_that_is_killed_ends_the_engine_and_is_named() -> None:
    case = case_of("mixtral")
    engine = make_engine(case, 2, "cgopipe")
    (rank,) = rank_processes()
    with engine, ThreadPoolExecutor(1) as pool:
        rows = pool.submit(
            engine.generate, [[1, 2, 3]] * 8, {"max_tokens": 200, "ignore_eos": True}
        )
        while not engine.stats().num_computed_tokens:
            time.sleep(0.01)
        rank.send_signal(signal.SIGKILL)
        with pytest.raises(ExecutionError, match=rf"rank 1 .process {rank.pid}. .*SIGKILL"):
            rows.result(timeout=END_S)
        with pytest.raises(ExecutionError, match="rank 1"):
            engine.generate([[1]], {"max_tokens": 1})
    assert_gone([rank])


@pytest.mark.slow
def test_a_killed_rank_of_four_takes_the_others_along() -> None:
    engine = make_engine(case_of("mixtral"), 4, "vslpipe")
    ranks = rank_processes()
    with engine:
        ranks[1].send_signal(signal.SIGKILL)
        with pytest.raises(ExecutionError, match=rf"process {ranks[1].pid}. .*SIGKILL"):
            engine.generate([[1, 2, 3]] * 8, ENDLESS)
    assert_gone(ranks)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_given_up_and_ended() -> None:
    engine = make_engine(case_of("mixtral"), 2, "cgopipe", watchdog_s=3.0)
    (rank,) = rank_processes()
    with engine:
        rank.suspend()
        with pytest.raises(ExecutionError, match=r"stuck|Timed out"):
            engine.generate([[1, 2, 3]], {"max_tokens": 4})
    assert_gone([rank])


@pytest.mark.slow
def test_ranks_end_with_a_process_that_is_killed() -> None:
    script = f"""
        import time
        from raymoe import Engine, EngineConfig
        engine = Engine.from_pretrained({str(case_of("mixtral").directory)!r}, EngineConfig(
            dtype="float32", device="emulated", schedule="cgopipe", tensor_parallel_size=2))
        print("ready", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        ranks = rank_processes()
        assert len(ranks) == 1
        parent.kill()
    assert_gone(ranks)


@pytest.mark.slow
def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    job = LoadJob(
        directory=tmp_path / "nothing",
        config=EngineConfig(tensor_parallel_size=2),
        settings=Settings(),
        device="emulated",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        hardware=hardware_preset("t4").share(24),
        schedule="cgopipe",
        policy=Policy(**SIZES),
        num_torch_threads=1,
        step_limit_s=60.0,
    )
    ranks = Ranks(job)
    with pytest.raises(ExecutionError, match=rf"rank 1 .*{CheckpointError.__name__}: .*nothing"):
        ranks.wait_for("loaded", END_S)
    processes = rank_processes()
    ranks.close()
    assert_gone(processes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "tensor_parallel_size is 2, but the device 'cpu' has no GPUs"),
        ({"device": "emulated", "tensor_parallel_size": 4}, "layer 0 has 6 attention heads"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_starts(
    options: dict[str, object], message: str
) -> None:
    config = EngineConfig(**{"tensor_parallel_size": 2} | options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        Engine.from_pretrained(get_case("mixtral: plain").directory, config)
    assert rank_processes() == []


@pytest.mark.skipif(torch.cuda.device_count() >= 64, reason="has as many GPUs as are asked for")
def test_more_gpus_than_there_are_is_refused_with_their_number() -> None:
    config = EngineConfig(device="cuda", tensor_parallel_size=64)
    with pytest.raises(ConfigError, match=rf"torch sees {torch.cuda.device_count()} GPUs"):
        Engine.from_pretrained(get_case("mixtral: plain").directory, config)
