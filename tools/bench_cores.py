"""Plans with experts on the cores, measured: `python -m tools.bench_cores [ROWS ...]`.

Models shaped like Qwen3-235B and gpt-oss, scaled to one core, which computes attention and experts
for real. The link copies for real, at the pace that the A5000 preset has relative to its host. The
GPU only takes its predicted time, and experts are chosen at random. Each job runs by the plan, by
the plan of the core alone and by the plan in which all experts cross the link. Two cores are
needed, and quiet: the second one copies and runs the interpreter.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor

from raymoe.config import EngineConfig
from raymoe.device.emulated import EmulatedDevice, sleep_until
from raymoe.device.lane import Call
from raymoe.engine import rank_model
from raymoe.engine.engine import Engine
from raymoe.measure.profile import measure_machine
from raymoe.plan.footprint import DEVICE_RUNTIME_BYTES, logit_bytes
from raymoe.plan.plan import Plan
from raymoe.plan.policy import PAGE_BYTES, Policy
from raymoe.plan.search import Search, find_plan
from raymoe.plan.sizes import JobOnNode, SearchSpace, Sizes
from raymoe.plan.work import ModelWork
from raymoe.runtime.operations import StreamedMemory, StreamedState
from raymoe.schedule.graph import Resource, Task
from raymoe.specs.hardware import HardwareSpec, hardware_preset
from raymoe.specs.model import ModelSpec, MoeSpec
from raymoe.specs.workload import Workload
from raymoe.units import GIB

ROWS, TURNS, PROFILE_SECONDS = (16, 128, 512, 2048), 1, 15.0
PROMPT_TOKENS, GENERATED_TOKENS, MAX_MODEL_LEN, VOCAB = 16, 24, 64, 512
DEVICE_SHARE = 0.15  # of the weights that the device's memory holds
SHAPE = {
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
}
CONFIGS = {
    "like Qwen3-235B": transformers.Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=256, num_experts=128, num_experts_per_tok=8
    ),
    "like gpt-oss-120b": transformers.GptOssConfig(
        **SHAPE, intermediate_size=768, num_local_experts=64, num_experts_per_tok=4
    ),
}


class PacedDevice(EmulatedDevice):
    """Copies and the tasks of the GPU take the predicted time, those of the cores their own."""

    poison = None  # type: ignore[assignment]  # skipped tasks leave what was there

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        self.ledger.take(num_bytes, purpose)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def _stretch(self, task: Task, call: Call) -> None:
        begin_s = time.perf_counter()
        call()
        if task.resource is Resource.GPU:
            sleep_until(begin_s + self.cost.duration_s(task))


class Skipped(StreamedMemory):
    """Operations without the GPU's products; experts are chosen at random."""

    def pre(self, task: Task, state: StreamedState) -> None: ...

    def attend_on_device(self, task: Task, state: StreamedState) -> None: ...

    def experts(self, task: Task, state: StreamedState) -> None: ...

    def post(self, task: Task, state: StreamedState) -> None:
        rows, top_k = state.micro_batch(task).rows, self.top_k[task.layer]
        ffn = self.decoders[0].spec.layers[task.layer].ffn
        assert isinstance(ffn, MoeSpec)
        ids_TK, weights_TK = self.device.routing(rows, top_k)
        chosen = torch.rand(len(ids_TK), ffn.num_experts).topk(top_k).indices
        ids_TK.copy_(chosen)
        weights_TK.fill_(1 / top_k)


def node_of(host: HardwareSpec, model: ModelSpec) -> HardwareSpec:
    """This core, with a GPU and a link as far above it as those of the preset above its host."""
    preset = hardware_preset("a5000")
    memory = host.host_bytes_per_s / preset.host_bytes_per_s
    flop = host.host_flop_per_s / preset.host_flop_per_s
    device_bytes = DEVICE_RUNTIME_BYTES + logit_bytes(model)
    return dataclasses.replace(
        preset,
        name="one core, a5000 scaled",
        num_cores=1,
        host_memory_bytes=8 * GIB,
        host_bytes_per_s=host.host_bytes_per_s,
        host_flop_per_s=host.host_flop_per_s,
        host_copy_bytes_per_s=host.host_copy_bytes_per_s,
        host_curves=host.host_curves,
        gpu_memory_bytes=int(device_bytes + DEVICE_SHARE * model.weight_bytes(2)),
        gpu_bytes_per_s=memory * preset.gpu_bytes_per_s,
        gpu_flop_per_s=flop * preset.gpu_flop_per_s,
        htod_bytes_per_s=memory * preset.htod_bytes_per_s,
        dtoh_bytes_per_s=memory * preset.dtoh_bytes_per_s,
        device_curves=None,
    )


def plans_of(model: ModelSpec, node: HardwareSpec, workload: Workload) -> dict[str, Plan]:
    def plan(**options: object) -> Plan:
        return find_plan(model, node, workload, max_model_len=MAX_MODEL_LEN, **options)  # type: ignore[arg-type]

    work = ModelWork.of(model, 2)
    job = JobOnNode(
        model=model, work=work, hardware=node, workload=workload, max_model_len=MAX_MODEL_LEN
    )
    preset = hardware_preset("a5000")
    page_bytes = int(PAGE_BYTES * node.htod_bytes_per_s / preset.htod_bytes_per_s)

    def with_pages(policy: Policy) -> Plan:
        """The plan with pages that take as long as those of the preset."""
        assert policy.device is not None
        device = dataclasses.replace(policy.device, page_bytes=page_bytes)
        return plan(schedule="micro_batches", policy=dataclasses.replace(policy, device=device))

    grid = dataclasses.replace(SearchSpace.of(job), cpu_experts_fraction=(0.0,))
    streamed = Search(Sizes(job)).best(grid)
    assert streamed is not None
    ours = plan()
    return {
        "plan": with_pages(ours.policy) if ours.policy.device else ours,
        "core alone": plan(schedule="in_place"),
        "link alone": with_pages(streamed.placement.policy),
    }


def measured(directory: Path, node: HardwareSpec, plan: Plan) -> float:
    """Generated tokens per second of the job, without loading."""
    config = EngineConfig(
        load_format="dummy",
        dtype="bfloat16",
        num_threads=1,
        device="cpu" if plan.schedule == "in_place" else "emulated",
        hardware=plan.hardware if plan.schedule == "in_place" else node,
        schedule=plan.schedule,
        policy=plan.policy,
        max_model_len=MAX_MODEL_LEN,
        linger_s=0.0,
    )
    num_rows = plan.workload.num_rows
    prompts = [[(3 * i + j) % VOCAB for j in range(PROMPT_TOKENS)] for i in range(num_rows)]
    params = {"temperature": 0, "max_tokens": GENERATED_TOKENS, "ignore_eos": True}
    with Engine.from_pretrained(directory, config) as engine:
        engine.generate(prompts, params | {"max_tokens": 3})  # builds the schedules
        begin_s = time.perf_counter()
        rows = engine.generate(prompts, params)
        seconds = time.perf_counter() - begin_s
    assert not any(row.error for row in rows)
    return num_rows * GENERATED_TOKENS / seconds


def results(host: HardwareSpec, num_rows: int, directory: Path) -> Iterator[str]:
    workload = Workload(
        num_rows=num_rows, prompt_tokens=PROMPT_TOKENS, generated_tokens=GENERATED_TOKENS
    )
    for name, config in CONFIGS.items():
        config.save_pretrained(directory)
        model = ModelSpec.from_directory(directory)
        node = node_of(host, model)
        plans = plans_of(model, node, workload)
        turns: dict[str, list[float]] = {label: [] for label in plans}
        for _ in range(TURNS):
            for label, plan in plans.items():
                turns[label].append(measured(directory, node, plan))
        rates = {label: statistics.median(each) for label, each in turns.items()}
        ours = rates.pop("plan")
        device = plans["plan"].policy.device
        share = f"{100 * device.cpu_experts_fraction:.0f} %" if device else "core alone"
        yield (
            f"| {name} | {num_rows:,} | {share} | {ours:,.0f} | {rates['core alone']:,.0f} | "
            f"{rates['link alone']:,.0f} | {ours / max(rates.values()):.2f} | "
            f"{plans['plan'].tokens_per_s / ours:.2f} |"
        )


def main() -> None:
    rank_model.StreamedMemory = Skipped  # type: ignore[attr-defined]
    rank_model.EmulatedDevice = PacedDevice  # type: ignore[attr-defined]
    host = measure_machine(num_threads=1, seconds=PROFILE_SECONDS)
    print(
        "| model | rows | experts on the core | plan, tokens/s | core | link | ratio | predicted |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for num_rows in map(int, sys.argv[1:] or ROWS):
            for line in results(host, num_rows, Path(directory)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
