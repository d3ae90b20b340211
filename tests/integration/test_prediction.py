"""Jobs on the emulated device take as long as planned: costs of large models, tiny numerics."""

import dataclasses
import functools
import logging
import math
import random
import statistics
import time
from pathlib import Path

import pytest
import torch
import transformers

from raymoe.config import EngineConfig
from raymoe.device.emulated import EmulatedDevice
from raymoe.engine import rank_model
from raymoe.engine.accuracy import Accuracy, load_of
from raymoe.engine.engine import Engine
from raymoe.engine.sequence import SchedulerOutput
from raymoe.engine.step_costs import EmulatedTiming
from raymoe.plan.placement import layer_sizes
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy
from raymoe.plan.search import find_plan
from raymoe.plan.work import ModelWork, StepLoad
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.timeline import Timeline
from raymoe.specs.hardware import HardwareSpec, hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload
from raymoe.units import GIB

pytestmark = pytest.mark.slow

NUM_LAYERS, VOCAB, BATCH = 4, 64, 40
LOGNORMAL_MEANS, LOGNORMAL_ROWS, LOGNORMAL_BATCH = (40, 8), 300, 100
LONG_SCALE = 8.0  # tasks of tens of milliseconds, whatever else runs on this machine
TIME_SCALE = 2.0  # the shortest tasks take the interpreter longer than a GPU
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
# Whose costs are taken, device memory that does not hold the layers, and what computes.
MODELS = {
    "mixtral-8x7b": (
        8 * GIB,
        transformers.MixtralConfig(
            **SMALL, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2
        ),
    ),
    "qwen3-30b-a3b": (
        4 * GIB,
        transformers.Qwen3MoeConfig(
            **SMALL, moe_intermediate_size=16, num_experts=16, num_experts_per_tok=4, head_dim=8
        ),
    ),
}
# Prompt tokens from, to; most generated tokens; rows.
WORKLOADS = {"prompts as long as answers": (8, 48, 32, 100), "long prompts": (60, 300, 12, 120)}


@functools.cache
def make_model(name: str, directory: Path) -> Path:
    torch.manual_seed(0)
    config = MODELS[name][1]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory / name)
    return directory / name


@dataclasses.dataclass
class Job:
    """Prompts of random lengths; some rows meet a token that ends them early."""

    prompts: list[list[int]]
    params: dict[str, object] | list[dict[str, object]]
    row_lengths: tuple[tuple[int, int], ...]
    shared_tokens: float = 0.0

    @classmethod
    def lognormal(cls, seed: int, head: int = 0) -> "Job":
        """Prompts and answers of lognormal lengths, each row with its own limit.

        All prompts begin with the same `head` tokens.
        """
        dice = random.Random(seed)
        lengths = tuple(
            tuple(
                min(4 * mean, max(1, round(dice.lognormvariate(math.log(mean) - 0.7**2 / 2, 0.7))))
                for mean in LOGNORMAL_MEANS
            )
            for _ in range(LOGNORMAL_ROWS)
        )
        prompts = [[dice.randrange(VOCAB) for _ in range(length)] for length, _ in lengths]
        common = [dice.randrange(VOCAB) for _ in range(head)]
        prompts = [common + prompt for prompt in prompts]
        shared_tokens = head * (LOGNORMAL_ROWS - 1) / LOGNORMAL_ROWS
        params = [{"temperature": 0, "max_tokens": generated} for _, generated in lengths]
        lengths = tuple((head + prompt, generated) for prompt, generated in lengths)
        return cls(prompts, params, lengths, shared_tokens)

    @classmethod
    def make(cls, model: Path, workload: str) -> "Job":
        shortest, longest, max_tokens, num_rows = WORKLOADS[workload]
        dice = random.Random(workload)
        prompts = [
            [dice.randrange(VOCAB) for _ in range(dice.randint(shortest, longest))]
            for _ in range(num_rows)
        ]
        with Engine.from_pretrained(model, EngineConfig(dtype="float32", device="cpu")) as engine:
            free = engine.generate(prompts, {"temperature": 0, "max_tokens": max_tokens})
            tokens = [token for row in free for token in row.token_ids[2:]]
            stop = sorted(set(tokens), key=tokens.count)[len(set(tokens)) // 2]
            params = {"temperature": 0, "max_tokens": max_tokens, "stop_token_ids": [stop]}
            rows = engine.generate(prompts, params)
        lengths = [(row.num_input_tokens, row.num_generated_tokens) for row in rows]
        assert len({generated for _, generated in lengths}) > 3
        return cls(prompts, params, tuple(lengths))


def first_layers(model: ModelSpec) -> ModelSpec:
    return dataclasses.replace(model, layers=model.layers[:NUM_LAYERS])


def plan_job(
    name: str, hardware: HardwareSpec, job: Job, batch: int = BATCH, schedule: str = "auto"
) -> Plan:
    """The planner's own policy, but for a batch small enough to be refilled, and all on the GPU.

    The cores that would compute experts are those that run the emulated device.
    """
    model = first_layers(model_preset(name))
    workload = Workload.of_rows(job.row_lengths, job.shared_tokens)
    plan = find_plan(
        model, hardware, workload, schedule=schedule, max_model_len=512, may_leave_gpu_idle=False
    )
    assert plan.policy.device is not None
    policy = dataclasses.replace(
        plan.policy,
        max_num_seqs=min(batch, plan.policy.max_num_seqs),
        device=dataclasses.replace(plan.policy.device, cpu_experts_fraction=0.0),
    )
    return find_plan(
        model, hardware, workload, schedule=plan.schedule, policy=policy, max_model_len=512
    )


def stand_in_policy(plan: Plan, name: str, model: ModelSpec) -> Policy:
    """The same share of resident weights and about as many pages, of the model that computes."""
    device = plan.policy.device
    assert device is not None
    large, small = (
        sum(layer.total for layer in layer_sizes(spec, size))
        for spec, size in ((first_layers(model_preset(name)), 2), (model, 4))
    )
    scaled = dataclasses.replace(
        device,
        page_bytes=max(1, device.page_bytes * small // large),
        resident_bytes=device.resident_bytes * small // large,
    )
    return dataclasses.replace(plan.policy, device=scaled)


def emulated_timing_of(name: str, plan: Plan, hardware: HardwareSpec):
    """Costs of the large model for the steps of the small one."""

    def make(
        device: EmulatedDevice,
        _work: object,
        _node: object,
        cuts: tuple[tuple[LayerPlacement, ...], ...],
    ) -> EmulatedTiming:
        (cut,) = cuts
        streamed_bytes = sum(sum(layer.page_bytes) for layer in cut)
        scale = plan.steps.placement.streamed_bytes / streamed_bytes
        layers = tuple(
            dataclasses.replace(
                layer, page_bytes=tuple(round(scale * size) for size in layer.page_bytes)
            )
            for layer in cut
        )
        return EmulatedTiming(
            device,
            ModelWork.of(first_layers(model_preset(name)), 2),
            hardware,
            (layers,),
        )

    return make


@dataclasses.dataclass
class Outcome:
    """Generated tokens per second of a whole job."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.predicted:.1f} predicted, {self.measured:.1f} measured, "
            f"{100 * self.error:.1f} % off"
        )


def record_loads(monkeypatch: pytest.MonkeyPatch) -> list[StepLoad]:
    loads: list[StepLoad] = []
    record = Accuracy.record

    def note(self: Accuracy, done: SchedulerOutput, measured: Timeline) -> None:
        loads.append(load_of(done))
        record(self, done, measured)

    monkeypatch.setattr(Accuracy, "record", note)
    return loads


def run_job(
    name: str,
    node: str,
    workload: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_timed: bool = True,
    schedule: str = "auto",
    head: int = 0,
) -> Outcome:
    """Run a job; with `is_timed` False, its steps count with the seconds predicted for each."""
    model = make_model(name, directory)
    is_usual = workload in WORKLOADS
    job = Job.make(model, workload) if is_usual else Job.lognormal(len(node), head)
    scale = (TIME_SCALE if is_usual else LONG_SCALE) if is_timed else 0.0
    hardware = dataclasses.replace(hardware_preset(node), gpu_memory_bytes=MODELS[name][0])
    plan = plan_job(name, hardware, job, BATCH if is_usual else LOGNORMAL_BATCH, schedule)
    monkeypatch.setattr(rank_model, "EmulatedTiming", emulated_timing_of(name, plan, hardware))
    slowed = functools.partial(EmulatedDevice, time_scale=scale)
    monkeypatch.setattr(rank_model, "EmulatedDevice", slowed)
    config = EngineConfig(
        dtype="float32",
        device="emulated",
        hardware=hardware,
        schedule=plan.schedule,
        policy=stand_in_policy(plan, name, ModelSpec.from_directory(model)),
        max_model_len=512,
        linger_s=0.0,
    )
    loads = record_loads(monkeypatch)
    with Engine.from_pretrained(model, config) as engine:
        begin_s = time.perf_counter()
        rows = engine.generate(job.prompts, job.params)
        taken_s = time.perf_counter() - begin_s
    measured_s = taken_s / scale if is_timed else sum(map(plan.steps.seconds, loads))
    lengths = [row.num_generated_tokens for row in rows]
    assert lengths == [generated for _, generated in job.row_lengths]
    measured = sum(lengths) / measured_s
    return Outcome(f"{name} on {node}, {workload}", plan.job.tokens_per_s, measured)


def test_jobs_take_as_long_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [
        run_job(name, node, workload, tmp_path, monkeypatch)
        for name in MODELS
        for node in ("t4", "l4", "a5000")
        for workload in WORKLOADS
    ]
    table = "\n".join(map(str, outcomes))
    logging.getLogger(__name__).info("%s", table)
    errors = [outcome.error for outcome in outcomes]
    assert statistics.mean(errors) <= 0.06, table
    assert max(errors) <= 0.12, table


@pytest.mark.parametrize("node", ["l4", "a5000"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_timed", [False, True])
def test_lognormal_lengths_take_as_long_as_planned_with_their_tail(
    name: str, node: str, is_timed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run_job(name, node, "lognormal lengths", tmp_path, monkeypatch, is_timed=is_timed)
    logging.getLogger(__name__).info("%s", outcome)
    assert outcome.error <= 0.10, outcome


@pytest.mark.parametrize("schedule", ["cgopipe", "vslpipe", "module_batching"])
def test_prefixes_on_the_host_are_predicted(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run_job(
        "mixtral-8x7b", "l4", "lognormal lengths", tmp_path, monkeypatch,
        is_timed=False, schedule=schedule, head=256,
    )  # fmt: skip
    logging.getLogger(__name__).info("%s", outcome)
    assert outcome.error <= 0.05, outcome
