"""Measured parts of the GPU suite: our engine, and transformers with accelerate's offloading."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from raymoe.bench.contenders import PAD_TOKEN_ID
from raymoe.bench.gpu.node import (
    DTYPES,
    HostMemory,
    KernelProfile,
    computing_dtype,
    device_peak_bytes,
    pinned_bytes_per_s,
)
from raymoe.bench.gpu.report import RunRecorder, draw_steady_step
from raymoe.bench.gpu.settings import (
    GPU_WORKLOADS,
    SCHEDULES,
    BusyShares,
    Figures,
    PartSettings,
    PredictedFigures,
    RowStatistics,
    SkipPartError,
    longest_row,
    shape_config,
    shape_spec,
    write_shape,
)
from raymoe.bench.steps import WARM_UP_ROWS
from raymoe.bench.workloads import random_prompts
from raymoe.config import EngineConfig, SamplingParams
from raymoe.device.host import peak_rss_bytes
from raymoe.engine.accuracy import RunReport
from raymoe.engine.engine import Engine
from raymoe.engine.load import load_parts
from raymoe.errors import ConfigError, ExecutionError
from raymoe.memory.weights import NUM_VALUES, STANDARD_DEVIATION, dealt
from raymoe.plan.bound import device_bound
from raymoe.plan.plan import Plan
from raymoe.plan.work import LayerWork, ModelWork
from raymoe.schedule.graph import Resource
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.weight_format import BFLOAT16_BYTES
from raymoe.specs.workload import Workload
from raymoe.units import GIB, ceil_div, format_bytes, format_seconds

PlanOf = Callable[[Workload], Plan]

MARGIN = 0.95  # share of the rows that fill the time: steps do not shrink with the rows
MAX_STEPS = 40


def fitting_plan(plan_of: PlanOf, rows: RowStatistics, max_rows: int, seconds: float) -> Plan:
    """The plan of the largest job that fits in `seconds`, with its prefill run separately.

    Rows beyond the last whole batch are dropped: with static batches they would take as long as a
    full one. Raises ConfigError if not even one row fits.
    """
    plan = _largest(plan_of, rows, max_rows, seconds)
    num_rows, batch = plan.workload.num_rows, plan.policy.max_num_seqs
    if num_rows <= batch or not num_rows % batch:
        return plan
    whole = plan_of(rows.job(num_rows - num_rows % batch))
    return whole if predicted_s(whole) <= seconds else plan


def predicted_s(plan: Plan) -> float:
    return plan.job.seconds + plan.estimate(prefill_of(plan.workload)).seconds


def prefill_of(workload: Workload) -> Workload:
    lengths = tuple((prompt, 1) for prompt, _ in workload.row_lengths)
    return replace(workload, generated_tokens=1, row_lengths=lengths)


def _largest(plan_of: PlanOf, rows: RowStatistics, max_rows: int, seconds: float) -> Plan:
    num_rows = max_rows
    for _ in range(MAX_STEPS):
        plan = plan_of(rows.job(num_rows))
        needed_s = predicted_s(plan)
        if needed_s <= seconds:
            return plan
        if num_rows == 1:
            break
        num_rows = max(1, min(num_rows - 1, int(MARGIN * num_rows * seconds / needed_s)))
    raise ConfigError(
        f"{num_rows} rows take {format_seconds(needed_s)}, and {format_seconds(seconds)} are left "
        "for them; raise --part-limit, or choose fewer layers (--layers) or shorter rows"
    )


# Share of what a part's limit leaves after loading; the rest is for runs slower than predicted.
JOB_SHARE = 0.7
START_S = 20.0  # importing, compiling, warming up, and the step that is profiled
LINGER_S = 60.0  # start no step before all rows have arrived

Prompts = Sequence[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    load_s: float
    prefill_s: float
    total_s: float
    kernel_share: float
    recorder: RunRecorder
    report: RunReport


def measure_engine(
    settings: PartSettings, node: HardwareSpec, out: Path, memory: HostMemory
) -> Figures:
    """Plan, load, and run the job's prefill and then the whole job; pictures go to `out`."""
    contender = SCHEDULES[settings.contender]
    spec = shape_spec(settings.shape, settings.num_layers)
    weight_bytes = ModelWork.of(spec, BFLOAT16_BYTES).all_weight_bytes
    left_s = settings.limit_s - START_S - memory.load_seconds(weight_bytes)
    plan = fitting_plan(
        lambda workload: contender.plan(spec, node, workload)[0],
        GPU_WORKLOADS[settings.workload],
        settings.max_rows,
        JOB_SHARE * left_s,
    )
    _, policy_of = contender.plan(spec, node, plan.workload)
    node = replace(node, htod_bytes_per_s=pinned_bytes_per_s(node, settings.node.device))
    model = write_shape(settings.shape, settings.num_layers, out / "models" / settings.file_name)
    prompts = random_prompts([prompt for prompt, _ in plan.workload.row_lengths], spec.vocab_size)
    run = _run(model, plan, settings, prompts, memory=memory)
    memory.record(weight_bytes, run.load_s)
    if run.recorder.steady is not None:
        draw_steady_step(plan, run.recorder.steady, settings, out)
    workload = plan.workload
    device = plan.policy.device
    bound = device_bound(
        ModelWork.of(spec, BFLOAT16_BYTES),
        node,
        workload,
        has_host_experts=device is not None and device.cpu_experts_fraction > 0,
    )
    return Figures(
        schedule=plan.schedule,
        policy=policy_of,
        num_rows=workload.num_rows,
        prompt_tokens=round(workload.total_prompt_tokens),
        generated_tokens=round(workload.total_generated_tokens),
        prefill_s=run.prefill_s,
        total_s=run.total_s,
        load_s=run.load_s,
        num_measured_steps=workload.generated_tokens - 1,
        pinned_bytes_per_s=node.htod_bytes_per_s,
        bound_s=bound.seconds,
        limit=bound.limit,
        device_peak_bytes=device_peak_bytes(settings.node.device),
        peak_rss_bytes=peak_rss_bytes(),
        model=_predicted(plan, run),
    )


def _run(
    model: Path, plan: Plan, settings: PartSettings, prompts: Prompts, *, memory: HostMemory
) -> _Run:
    config = _config(plan, settings)
    memory.reused.restart()
    begin_s = time.perf_counter()
    parts = load_parts(model, config, memory.reused.arena)
    load_s = time.perf_counter() - begin_s
    recorder = RunRecorder(parts.runner)
    with Engine(replace(parts, runner=recorder), config) as engine:
        _generate(engine, prompts[:WARM_UP_ROWS], 2)
        prefill_s = _generate(engine, prompts, 1)
        is_profiled = settings.node.device == "cuda"
        share = _kernel_share(engine, prompts, recorder, plan) if is_profiled else 0.0
        recorder.restart()
        total_s = _generate(engine, prompts, plan.workload.generated_tokens)
    report = engine.last_report  # complete: the engine reports a run before it ends
    assert report is not None, "an engine with a plan reports every run"
    if report.num_steps != recorder.num_steps:
        raise ExecutionError(
            f"the engine reported {report.num_steps} of the {recorder.num_steps} steps of the job, "
            "as it was idle in between; repeat the measurement"
        )
    return _Run(
        load_s=load_s,
        prefill_s=prefill_s,
        total_s=total_s,
        kernel_share=share,
        recorder=recorder,
        report=report,
    )


def _kernel_share(engine: Engine, prompts: Prompts, recorder: RunRecorder, plan: Plan) -> float:
    """Run the prefill and a decode step of all rows again, and profile that step."""
    prefill_steps = ceil_div(
        sum(map(len, prompts)), plan.policy.max_num_batched_tokens - len(prompts)
    )
    recorder.profile = profile = KernelProfile()
    _generate(engine, prompts, min(prefill_steps + 2, plan.workload.generated_tokens))
    return profile.share


def _config(plan: Plan, settings: PartSettings) -> EngineConfig:
    return EngineConfig(
        dtype=computing_dtype(settings.node.device),
        device=settings.node.device,
        load_format="dummy",
        schedule=plan.schedule,
        policy=plan.policy,
        hardware=plan.hardware,
        host_memory_bytes=plan.hardware.host_memory_bytes,
        device_memory_bytes=plan.hardware.gpu_memory_bytes,
        num_threads=settings.node.num_threads,
        workload=plan.workload,
        max_model_len=longest_row(plan.workload),
        max_queued_rows=plan.workload.num_rows,
        linger_s=LINGER_S,
        watchdog_s=settings.limit_s,
    )


def _generate(engine: Engine, prompts: Prompts, new_tokens: int) -> float:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    engine.reset_prefix_cache()  # runs repeat their prompts
    gc.collect()
    start_s = time.perf_counter()
    generations = engine.generate(list(prompts), params, use_tqdm=False)
    elapsed_s = time.perf_counter() - start_s
    for row, generation in enumerate(generations):
        if generation.num_generated_tokens != new_tokens:
            raise ExecutionError(
                f"row {row} of {len(prompts)} has {generation.num_generated_tokens} tokens, not "
                f"{new_tokens}: {generation.error or generation.finish_reason}"
            )
    return elapsed_s


def _predicted(plan: Plan, run: _Run) -> PredictedFigures:
    report = run.report
    return PredictedFigures(
        predicted_s=plan.job.seconds,
        steps_predicted_s=report.predicted_s,
        steps_measured_s=report.measured_s,
        link_bytes_per_s=report.link.bytes_per_s,
        busy=BusyShares(
            gpu=report.busy_share(Resource.GPU),
            cpu=report.busy_share(Resource.CPU),
            htod=report.busy_share(Resource.HTOD),
            dtoh=report.busy_share(Resource.DTOH),
        ),
        kernel_share=run.kernel_share,
        plan=plan.describe(),
    )


ACCELERATE_BYTES = GIB  # device memory of kernels, workspaces and the allocator's rounding
LAYERS_AT_ONCE = 2  # layers of weights on the device: the computing one and kernels' copies
MIN_STEP_S = 1e-6  # prefill times may vary by more than a step takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    max_num_seqs: int
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    max_num_seqs: int
    prefill_s: float
    total_s: float
    num_measured_steps: int


def measure_accelerate(settings: PartSettings, node: HardwareSpec, device: str) -> Figures:
    """Choose the batch and run it; `device` "cpu" tries the contender without a GPU."""
    if find_spec("accelerate") is None:
        raise SkipPartError("accelerate is not installed; pip install accelerate")
    pinned = pinned_bytes_per_s(node, device)
    rows = GPU_WORKLOADS[settings.workload]
    spec = shape_spec(settings.shape, settings.num_layers)
    # This contender holds all weights in 16 bits, whatever the stored format.
    work = ModelWork.of(replace(spec, quantization=None), BFLOAT16_BYTES)
    sizes = sizes_that_fit(work, rows, settings.max_rows, node.gpu_memory_bytes)
    begin_s = time.perf_counter()
    model = make_model(shape_config(settings.shape, settings.num_layers), device)
    place(model, device, sizes.weight_bytes)
    load_s = time.perf_counter() - begin_s
    left_s = settings.limit_s - START_S - load_s
    runner = BatchRunner(model=model, device=device, rows=rows, seconds=JOB_SHARE * left_s)
    run = runner.run_largest(sizes.max_num_seqs)
    job = replace(rows, min_prompt=rows.mean_prompt, max_prompt=rows.mean_prompt)
    stored = ModelWork.of(spec, BFLOAT16_BYTES)
    bound = device_bound(stored, replace(node, htod_bytes_per_s=pinned), job.job(run.max_num_seqs))
    return Figures(
        schedule="hooks",
        policy="largest batch" if not sizes.weight_bytes else "all rows, weights in the rest",
        num_rows=run.max_num_seqs,
        prompt_tokens=run.max_num_seqs * rows.mean_prompt,
        generated_tokens=run.max_num_seqs * rows.generated_tokens,
        prefill_s=run.prefill_s,
        total_s=run.total_s,
        load_s=load_s,
        num_measured_steps=run.num_measured_steps,
        pinned_bytes_per_s=pinned,
        bound_s=bound.seconds,
        limit=bound.limit,
        device_peak_bytes=device_peak_bytes(device),
        peak_rss_bytes=peak_rss_bytes(),
    )


def sizes_that_fit(work: ModelWork, rows: RowStatistics, max_rows: int, device_bytes: int) -> Sizes:
    """The largest batch and the bytes of weights that stay with it; `work` is in 16 bits."""
    largest = max(layer.weight_bytes(layer.num_experts) for layer in work.kinds)
    fixed = ACCELERATE_BYTES + LAYERS_AT_ONCE * max(largest, work.head.num_bytes)
    row = _row_bytes(work, rows)
    fitting = int((device_bytes - fixed) // row)
    if fitting < 1:
        raise ConfigError(
            f"accelerate needs {format_bytes(fixed + row)} of device memory for one row, two "
            f"layers and its workspaces; --device-memory allows {format_bytes(device_bytes)}"
        )
    batch = min(fitting, max_rows)
    spare = device_bytes - fixed - batch * row
    return Sizes(max_num_seqs=batch, weight_bytes=int(spare) if batch == max_rows else 0)


def _row_bytes(work: ModelWork, rows: RowStatistics) -> float:
    element, hidden = work.bytes_per_element, work.hidden_size
    kv = (rows.mean_prompt + rows.generated_tokens) * work.kv_token_bytes
    widest = max(_token_elements(layer, hidden) for layer in work.kinds)
    return kv + rows.mean_prompt * widest * element + 4 * work.head.parameters / hidden


def _token_elements(layer: LayerWork, hidden: int) -> float:
    routed = layer.top_k * (3 * layer.expert_input + 4 * layer.expert_hidden)
    routed += 4 * layer.common_hidden
    return routed + 6 * hidden + 2 * (layer.attention.query_width + layer.attention.output_width)


def make_model(config: dict[str, object], device: str) -> PreTrainedModel:
    """A transformers model in host memory whose weights share one pool of random values."""
    from accelerate import init_empty_weights  # noqa: PLC0415 - not a dependency

    transformers.logging.set_verbosity_error()
    dtype = DTYPES[computing_dtype(device)]
    fields = {k: v for k, v in config.items() if k not in {"quantization_config", "torch_dtype"}}
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=dtype)
    drawn = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(0))
    values = drawn.mul_(STANDARD_DEVIATION).to(dtype)
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = _weight(values, f"{module_name}.{name}", parameter)
            module.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    model.tie_weights()
    return model.eval()


def _weight(values: Tensor, name: str, like: Tensor) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(like.shape, dtype=like.dtype)
    return dealt(values, name, tuple(like.shape)).to(like.dtype)


def place(model: PreTrainedModel, device: str, weight_bytes: int) -> None:
    """Put resident weights on the device and offload the others, which are loaded for each use."""
    from accelerate import cpu_offload, dispatch_model, infer_auto_device_map  # noqa: PLC0415

    total = sum(parameter.nbytes for parameter in model.parameters())
    if weight_bytes >= total:
        model.to(device)
        return
    target = 0 if device == "cuda" else device
    device_map = infer_auto_device_map(
        model,
        max_memory={target: weight_bytes, "cpu": 2 * total},
        no_split_module_classes=model._no_split_modules,  # noqa: SLF001 - the documented use
    )
    if set(device_map.values()) == {"cpu"}:
        cpu_offload(model, execution_device=torch.device(device))
    else:
        dispatch_model(model, device_map)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRunner:
    model: PreTrainedModel
    device: str
    rows: RowStatistics
    seconds: float

    def run_largest(self, max_num_seqs: int) -> BatchTimes:
        """Run a batch, halved while memory runs out; raises ConfigError if not one row fits."""
        while max_num_seqs:
            try:
                return self.run(max_num_seqs)
            except torch.cuda.OutOfMemoryError:
                max_num_seqs //= 2
            torch.cuda.empty_cache()
        raise ConfigError(
            "not even one row fits in device memory beside the layers that "
            "accelerate copies there; raise --device-memory"
        )

    def run(self, max_num_seqs: int) -> BatchTimes:
        """Time as many decode steps as prefill and step times allow."""
        prompts = random_prompts(
            [self.rows.mean_prompt] * max_num_seqs, self.model.config.vocab_size
        )
        ids = torch.tensor(prompts, device=self.device)
        self._generate_s(ids, 2)  # warm up every kernel
        prefill_s = self._generate_s(ids, 1)
        steps = self.rows.generated_tokens - 1
        step_s = max(self._generate_s(ids, 2) - prefill_s, MIN_STEP_S)
        measured = max(1, min(steps, int((self.seconds - 4 * prefill_s) / step_s)))
        decode_s = self._generate_s(ids, 1 + measured) - prefill_s
        return BatchTimes(
            max_num_seqs=max_num_seqs,
            prefill_s=prefill_s,
            total_s=prefill_s + decode_s * steps / measured,
            num_measured_steps=measured,
        )

    @torch.inference_mode()
    def _generate_s(self, ids: Tensor, new_tokens: int) -> float:
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=PAD_TOKEN_ID,
            eos_token_id=None,
        )
        mask = torch.ones_like(ids)
        start_s = time.perf_counter()
        out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        out.cpu()  # waits for the device
        elapsed_s = time.perf_counter() - start_s
        if out.shape[1] != ids.shape[1] + new_tokens:
            raise ExecutionError(
                f"{out.shape[1] - ids.shape[1]} tokens came back, not {new_tokens}"
            )
        return elapsed_s
