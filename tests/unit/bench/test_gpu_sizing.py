"""Rows, layers and batches of the GPU suite fit the time and the memory, and little more would."""

import json
import os
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest

from raymoe.bench.gpu.engines import fitting_plan, predicted_s, prefill_of, sizes_that_fit
from raymoe.bench.gpu.node import HostMemory, covered_s
from raymoe.bench.gpu.settings import (
    DEFAULT_SHAPES,
    GPU_CONTENDERS,
    GPU_WORKLOADS,
    MAIN_CONTENDERS,
    SCHEDULES,
    PartResult,
    Status,
    layers_that_fit,
    shape_spec,
)
from raymoe.bench.gpu.suite import PartProcesses, SuiteSettings
from raymoe.errors import ConfigError
from raymoe.plan.plan import Plan
from raymoe.plan.work import ModelWork
from raymoe.schedule.builders import BUILDERS
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.workload import Workload
from raymoe.units import GIB
from tests.unit.bench.gpu_results import SETTINGS

L4 = hardware_preset("l4")
ROWS = GPU_WORKLOADS["mtbench-32"]


@pytest.mark.parametrize("name", GPU_WORKLOADS)
@pytest.mark.parametrize("count", [64, 2000])
def test_rows_have_the_published_lengths(name: str, count: int) -> None:
    rows = GPU_WORKLOADS[name]
    lengths = rows.prompt_lengths(count)
    assert len(lengths) == count
    assert sum(lengths) / count == pytest.approx(rows.mean_prompt, rel=0.02)
    assert rows.min_prompt <= min(lengths)
    assert 0.9 * rows.max_prompt <= max(lengths) <= rows.max_prompt
    assert rows.job(count).row_lengths == tuple((n, rows.generated_tokens) for n in lengths)


def plan_of(contender: str, workload: Workload) -> Plan:
    return SCHEDULES[contender].plan(shape_spec("mixtral-8x7b", 4), L4, workload)[0]


@pytest.mark.parametrize("contender", ["cgopipe", "layer_by_layer"])
def test_the_job_and_its_prefill_take_the_time_and_no_more(contender: str) -> None:
    plan = fitting_plan(lambda job: plan_of(contender, job), ROWS, 20_000, 60.0)
    assert 30.0 < predicted_s(plan) <= 60.0
    prefill_s = plan.estimate(prefill_of(plan.workload)).seconds
    assert predicted_s(plan) == pytest.approx(plan.job.seconds + prefill_s)
    assert 0 < prefill_s < plan.job.seconds
    rows, batch = plan.workload.num_rows, plan.policy.max_num_seqs
    assert rows <= batch or rows % batch == 0


def test_few_rows_are_all_taken() -> None:
    plan = fitting_plan(lambda job: plan_of("cgopipe", job), ROWS, 7, 60.0)
    assert plan.workload.num_rows == 7


def test_where_one_row_takes_longer_the_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"1 rows take .*--part-limit.*--layers"):
        fitting_plan(lambda job: plan_of("cgopipe", job), ROWS, 50, 0.1)


def test_layers_are_as_many_as_memory_and_link_allow() -> None:
    roomy = replace(L4, host_memory_bytes=300 * GIB)
    assert layers_that_fit("mixtral-8x7b", roomy, 64, 1e9) == 32
    by_link = layers_that_fit("mixtral-8x7b", roomy, 64, 162.0)
    weights = [
        ModelWork.of(shape_spec("mixtral-8x7b", count), 2).all_weight_bytes
        for count in (by_link, by_link + 1)
    ]
    seconds = [64 * (size - L4.gpu_memory_bytes) / L4.htod_bytes_per_s for size in weights]
    assert seconds[0] <= 162.0 < seconds[1]
    by_memory = layers_that_fit("mixtral-8x7b", replace(L4, host_memory_bytes=40 * GIB), 64, 1e9)
    room = 0.8 * 40 * GIB + 0.5 * L4.gpu_memory_bytes
    assert room / (2.9e9 + 0.1e9) - 1 <= by_memory <= room / 2.8e9
    assert layers_that_fit("mixtral-8x7b", roomy, 64, 0.0) < by_link


@pytest.mark.parametrize("shape", DEFAULT_SHAPES)
def test_every_contender_has_a_plan_for_every_shape(shape: str) -> None:
    node = replace(L4, gpu_memory_bytes=16 * GIB)
    workload = GPU_WORKLOADS["smoke"].job(64)
    for name, contender in SCHEDULES.items():
        plan, source = contender.plan(shape_spec(shape, 4), node, workload)
        assert name in {plan.schedule, "raymoe"}
        assert plan.schedule in BUILDERS
        assert source == contender.paper
    assert set(SCHEDULES) < set(GPU_CONTENDERS)


def test_where_a_paper_has_no_policy_the_planner_has_one_and_the_name_says_so() -> None:
    workload = GPU_WORKLOADS["smoke"].job(8)
    plan, source = SCHEDULES["cgopipe"].plan(shape_spec("mixtral-8x7b", 2), L4, workload)
    assert plan.schedule == "cgopipe"
    assert source.startswith("planner; MoE-Lightning has none: ")


def test_accelerate_fills_the_device_with_rows_or_else_with_weights() -> None:
    work = ModelWork.of(shape_spec("mixtral-8x7b", 16), 2)
    few, many = (sizes_that_fit(work, ROWS, maximum, 16 * GIB) for maximum in (16, 10_000))
    assert (few.max_num_seqs, many.weight_bytes) == (16, 0)
    assert 0 < few.weight_bytes < 16 * GIB - 2 * work.layers[0].weight_bytes(8)
    assert 16 < many.max_num_seqs < 10_000
    kv_bytes = many.max_num_seqs * (77 + 32) * work.kv_token_bytes
    assert kv_bytes < 16 * GIB - 2 * work.layers[0].weight_bytes(8)
    with pytest.raises(ConfigError, match=r"for one row.*device-memory allows 4\.00 GiB"):
        sizes_that_fit(work, ROWS, 16, 4 * GIB)


def test_parts_of_most_interest_come_first_and_a_shape_at_a_time() -> None:
    suite = SuiteSettings(
        node=SETTINGS.node,
        shapes=("mixtral-8x7b", "qwen3-30b-a3b"),
        workloads=("mtbench-64", "512-256"),
        contenders=GPU_CONTENDERS,
        num_layers=2,
        total_s=100.0,
        limit_s=10.0,
        max_rows=10,
        is_again=False,
    )
    parts = suite.parts(L4)
    assert [part.contender for part in parts[:4]] == list(MAIN_CONTENDERS)
    assert len({(part.shape, part.workload) for part in parts[:4]}) == 1
    assert {part.contender for part in parts[:16]} == {*MAIN_CONTENDERS}
    runs = [key for key, _ in groupby((part.shape, part.workload) for part in parts[:16])]
    assert len(runs) == 4


def test_kernels_that_overlap_count_once() -> None:
    assert covered_s([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (0.6, 0.7)]) == 3.0
    assert covered_s([]) == 0.0


def test_the_time_to_load_is_that_of_the_engine_before() -> None:
    memory = HostMemory(2 * GIB)
    assert memory.load_seconds(GIB) > 0
    memory.record(8 * GIB, 4.0)
    assert memory.load_seconds(6 * GIB) == 3.0


def test_parts_of_a_shape_share_a_process_until_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "parts.py"
    program.write_text(
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        '    if \'"contender": "vslpipe"\' in line:\n'
        "        sys.exit(3)\n"
        "    print('noise', json.dumps([]))\n"
        "    status = 'failed' if '\"device\": \"cuda\"' in line else 'done'\n"
        "    print(json.dumps({'pid': os.getpid(), 'status': status}), flush=True)\n"
    )
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(PartResult, "from_json", lambda text: SimpleNamespace(**json.loads(text)))
    (tmp_path / "logs").mkdir()
    processes = PartProcesses(L4, tmp_path / "node.json", tmp_path)

    def run(contender: str, shape: str = "mixtral-8x7b") -> object:
        return processes.run(replace(SETTINGS, contender=contender, shape=shape))

    first, second = run("raymoe"), run("cgopipe")
    assert first == second
    failed = run("vslpipe")
    assert (failed.status, "ended with status 3" in failed.reason) == (Status.FAILED, True)
    third, fourth = run("raymoe"), run("raymoe", "tiny")
    fifth = run("accelerate", "tiny")
    processes.close()
    assert len({each.pid for each in (first, third, fourth, fifth)}) == 4
    with pytest.raises(ProcessLookupError):
        os.kill(fifth.pid, 0)
    on_gpu = replace(SETTINGS, node=replace(SETTINGS.node, device="cuda"))
    assert processes.run(on_gpu).pid != processes.run(on_gpu).pid  # an error stays with a process


@pytest.mark.parametrize(
    ("program", "limit_s", "reason"),
    [
        ("import time; time.sleep(60)", 0.3, "did not end within 300.0 ms; see "),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 30.0, "by signal SIGKILL"),
        ("raise SystemExit(3)", 30.0, "ended with status 3; see "),
        ("print('nothing')", 30.0, "ended with status 0; see "),
    ],
)
def test_a_process_without_a_result_has_failed(
    program: str, limit_s: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    (tmp_path / "logs").mkdir()
    part = replace(SETTINGS, limit_s=limit_s)
    processes = PartProcesses(L4, tmp_path / "node.json", tmp_path)
    result = processes.run(part)
    processes.close()
    assert (result.status, result.figures) == (Status.FAILED, None)
    assert reason in result.reason
    assert result.settings == part
