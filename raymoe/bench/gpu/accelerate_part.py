"""A part of the GPU suite that runs transformers with accelerate's offloading to host memory.

Assumptions, all in its favour:
- Rows have the mean prompt of the workload: batches of sorted rows are hardly padded.
- One batch, as large as the cap holds with its KV; where more than all rows fit, weights take the
  rest of the device.
- Where a job takes longer than there is time, its first steps stand for all of them.
"""

import time
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from raymoe.bench.gpu.node import DTYPES, computing_dtype, device_peak_bytes, pinned_bytes_per_s
from raymoe.bench.gpu.result import Figures
from raymoe.bench.gpu.settings import (
    BYTES_PER_ELEMENT,
    GPU_WORKLOADS,
    PartSettings,
    RowStatistics,
    SkipPartError,
    shape_config,
    shape_spec,
)
from raymoe.bench.workloads import random_prompts
from raymoe.device.host import peak_rss_bytes
from raymoe.errors import ConfigError, ExecutionError
from raymoe.memory.weights import NUM_VALUES, STANDARD_DEVIATION, dealt
from raymoe.plan.bound import device_bound
from raymoe.plan.work import LayerWork, ModelWork
from raymoe.specs.hardware import HardwareSpec
from raymoe.units import GIB, format_bytes

RUNTIME_BYTES = GIB  # of the device: kernels, workspaces, the allocator's rounding
LAYERS_AT_ONCE = 2  # of weights: the one that computes, and copies that kernels make of it
JOB_SHARE = 0.5  # of the limit, for the job; the rest to make the weights and to find the sizes
LEAST_STEP_S = 1e-6  # a prefill measured twice may differ by more than a step takes
PAD_TOKEN_ID = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What fits the device.

    Attributes:
        batch_size: Rows at once.
        weight_bytes: Weights that stay.
    """

    batch_size: int
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    """One batch; attributes as in `Figures`."""

    batch_size: int
    prefill_s: float
    total_s: float
    num_measured_steps: int


def measure_accelerate(settings: PartSettings, node: HardwareSpec, device: str) -> Figures:
    """Make the model, choose the batch, run it.

    Args:
        settings: Of the part.
        node: With the memory that may be used.
        device: Where torch computes; "cpu" tries the contender without a GPU.

    Raises:
        SkipPartError: accelerate is not installed.
        ConfigError: Not one row fits.
    """
    if find_spec("accelerate") is None:
        raise SkipPartError("accelerate is not installed; pip install accelerate")
    pinned = pinned_bytes_per_s(node, device)
    rows = GPU_WORKLOADS[settings.workload]
    spec = shape_spec(settings.shape, settings.num_layers)
    # It has all weights in 16 bits, whatever they are stored in.
    work = ModelWork.of(replace(spec, quantization=None), BYTES_PER_ELEMENT)
    sizes = sizes_that_fit(work, rows, settings.most_rows, node.gpu_memory_bytes)
    model = make_model(shape_config(settings.shape, settings.num_layers), device)
    place(model, device, sizes.weight_bytes)
    runner = BatchRunner(
        model=model, device=device, rows=rows, seconds=JOB_SHARE * settings.limit_s
    )
    run = runner.run_largest(sizes.batch_size)
    job = replace(rows, least_prompt=rows.mean_prompt, most_prompt=rows.mean_prompt)
    stored = ModelWork.of(spec, BYTES_PER_ELEMENT)
    bound = device_bound(stored, replace(node, htod_bytes_per_s=pinned), job.job(run.batch_size))
    return Figures(
        schedule="hooks",
        policy="largest batch" if not sizes.weight_bytes else "all rows, weights in the rest",
        num_rows=run.batch_size,
        prompt_tokens=run.batch_size * rows.mean_prompt,
        generated_tokens=run.batch_size * rows.generated_tokens,
        prefill_s=run.prefill_s,
        total_s=run.total_s,
        num_measured_steps=run.num_measured_steps,
        pinned_bytes_per_s=pinned,
        bound_s=bound.seconds,
        limit=bound.limit,
        device_peak_bytes=device_peak_bytes(device),
        peak_rss_bytes=peak_rss_bytes(),
    )


def sizes_that_fit(
    work: ModelWork, rows: RowStatistics, most_rows: int, device_bytes: int
) -> Sizes:
    """The largest batch, and the weights that stay beside it.

    Args:
        work: The model with 16-bit weights.
        rows: Lengths.
        most_rows: No more than that.
        device_bytes: Cap.

    Raises:
        ConfigError: Not one row fits.
    """
    largest = max(layer.weight_bytes(layer.num_experts) for layer in work.kinds)
    fixed = RUNTIME_BYTES + LAYERS_AT_ONCE * max(largest, work.head.num_bytes)
    row = _row_bytes(work, rows)
    fitting = int((device_bytes - fixed) // row)
    if fitting < 1:
        raise ConfigError(
            f"accelerate needs {format_bytes(fixed + row)} of device memory for one row, two "
            f"layers and its workspaces; the cap is {format_bytes(device_bytes)}"
        )
    batch = min(fitting, most_rows)
    spare = device_bytes - fixed - batch * row
    return Sizes(batch_size=batch, weight_bytes=int(spare) if batch == most_rows else 0)


def _row_bytes(work: ModelWork, rows: RowStatistics) -> float:
    """KV of a row at its end, and what the widest layer makes of its prompt."""
    element, hidden = work.bytes_per_element, work.hidden_size
    kv = (rows.mean_prompt + rows.generated_tokens) * work.kv_token_bytes
    widest = max(_token_elements(layer, hidden) for layer in work.kinds)
    return kv + rows.mean_prompt * widest * element + 4 * work.head.parameters / hidden


def _token_elements(layer: LayerWork, hidden: int) -> float:
    """Routed copies in and out, gate, up and their product; queries, keys, values, residuals."""
    wide = layer.expert.parameters / (3 * hidden)
    common = layer.common.parameters / (3 * hidden)
    routed = layer.top_k * (3 * hidden + 4 * wide) + 4 * common
    return routed + 6 * hidden + 2 * (layer.query_width + layer.output_width)


def make_model(config: dict[str, object], device: str) -> PreTrainedModel:
    """A transformers model with random weights in host memory; nothing is drawn twice."""
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
    """Weights that stay go to the device, the others come for each use and go again."""
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
    """Runs one batch of a model that is in its place.

    Attributes:
        model: Of transformers.
        device: Where its inputs go.
        rows: Lengths.
        seconds: For a batch, about.
    """

    model: PreTrainedModel
    device: str
    rows: RowStatistics
    seconds: float

    def run_largest(self, batch_size: int) -> BatchTimes:
        """Run a batch; half of it where the device does not hold it after all.

        Raises:
            ConfigError: Not one row fits.
        """
        while batch_size:
            try:
                return self.run(batch_size)
            except torch.cuda.OutOfMemoryError:
                batch_size //= 2
            torch.cuda.empty_cache()
        raise ConfigError("not one row fits the device memory beside what accelerate moves there")

    def run(self, batch_size: int) -> BatchTimes:
        """Prefill and a step say how many steps there is time for; those are measured together."""
        prompts = random_prompts([self.rows.mean_prompt] * batch_size, self.model.config.vocab_size)
        ids = torch.tensor(prompts, device=self.device)
        self._generate_s(ids, 2)  # first use of every kernel
        prefill_s = self._generate_s(ids, 1)
        steps = self.rows.generated_tokens - 1
        step_s = max(self._generate_s(ids, 2) - prefill_s, LEAST_STEP_S)
        measured = max(1, min(steps, int((self.seconds - 4 * prefill_s) / step_s)))
        decode_s = self._generate_s(ids, 1 + measured) - prefill_s
        return BatchTimes(
            batch_size=batch_size,
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
        out.cpu()  # the host waits
        elapsed_s = time.perf_counter() - start_s
        if out.shape[1] != ids.shape[1] + new_tokens:
            raise ExecutionError(
                f"{out.shape[1] - ids.shape[1]} tokens came back, not {new_tokens}"
            )
        return elapsed_s
