"""Settings and results of the GPU suite."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

import numpy as np

from raymoe.errors import ConfigError, InfeasiblePlanError, RaymoeError
from raymoe.measure.kept import keep
from raymoe.plan.papers.policies import PaperPolicies
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy
from raymoe.plan.search import find_plan
from raymoe.plan.work import ModelWork
from raymoe.specs.files import from_plain, read_text
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS
from raymoe.specs.weight_format import BFLOAT16_BYTES
from raymoe.specs.workload import Workload

# Part of the key of a result; raise it when the measurements change.
FORMAT = 2


class SkipPartError(RaymoeError):
    """A part that cannot run here; says what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    device: str
    hardware: str | None = None  # preset whose rates the emulated device imitates; None on a GPU
    device_memory_bytes: int | None = None  # cap; None for what is free
    host_memory_bytes: int | None = None  # cap; None for what is available
    num_threads: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return from_plain(cls, json.loads(text), where="NodeSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings:
    node: NodeSettings
    shape: str
    num_layers: int
    workload: str
    contender: str
    limit_s: float  # time after which the part fails
    max_rows: int  # upper bound, however fast the contender is

    @property
    def name(self) -> str:
        return f"{self.shape} {self.workload} {self.contender}"

    @property
    def file_name(self) -> str:
        return f"{self.shape}-{self.workload}-{self.contender}-{self.key[:8]}"

    @property
    def key(self) -> str:
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return from_plain(cls, json.loads(text), where="PartSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """Row lengths, independent of the number of rows; `generated_tokens` is the same for all."""

    min_prompt: int
    mean_prompt: int
    max_prompt: int
    generated_tokens: int

    def prompt_lengths(self, num_rows: int) -> list[int]:
        """Quantiles of the power law with these minimum, mean and maximum, shuffled."""
        span = self.max_prompt - self.min_prompt
        if not span:
            return [self.min_prompt] * num_rows
        power = span / (self.mean_prompt - self.min_prompt) - 1
        quantiles = (np.arange(num_rows) + 0.5) / num_rows
        lengths = np.rint(self.min_prompt + span * quantiles**power).astype(int)
        return [int(length) for length in np.random.default_rng(7).permutation(lengths)]

    def job(self, num_rows: int) -> Workload:
        lengths = self.prompt_lengths(num_rows)
        return Workload.of_rows(tuple((length, self.generated_tokens) for length in lengths))


def _mtbench(generated_tokens: int) -> RowStatistics:
    return RowStatistics(
        min_prompt=8, mean_prompt=77, max_prompt=418, generated_tokens=generated_tokens
    )


GPU_WORKLOADS: Mapping[str, RowStatistics] = {
    **{f"mtbench-{count}": _mtbench(count) for count in (32, 64, 128, 256)},
    "512-256": RowStatistics(min_prompt=512, mean_prompt=512, max_prompt=512, generated_tokens=256),
    # For trying the suite itself.
    "smoke": RowStatistics(min_prompt=4, mean_prompt=12, max_prompt=40, generated_tokens=6),
}
DEFAULT_WORKLOADS = ("mtbench-64", "512-256")
Config = Mapping[str, object]

# Share of host memory for weights; the rest is for KV. And share of device memory for weights that
# stay there, and need no place on the host.
WEIGHT_SHARE, RESIDENT_SHARE = 0.8, 0.5

_TINY: Config = {
    "model_type": "mixtral",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
DEFAULT_SHAPES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b")
GPU_SHAPES: Mapping[str, Config] = {
    **{name: MODEL_PRESETS[name] for name in DEFAULT_SHAPES},
    # For trying the suite itself.
    "tiny": _TINY,
}


def shape_config(name: str, num_layers: int | None = None) -> dict[str, object]:
    config = dict(GPU_SHAPES[name])
    return config if num_layers is None else config | {"num_hidden_layers": num_layers}


def shape_spec(name: str, num_layers: int | None = None) -> ModelSpec:
    return ModelSpec.from_config(shape_config(name, num_layers), name=name)


def write_shape(name: str, num_layers: int, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape_config(name, num_layers), indent=1))
    return directory


def layers_that_fit(name: str, node: HardwareSpec, generated_tokens: int, seconds: float) -> int:
    """Layers that fit the host and can stream once per generated token in `seconds`."""
    maximum = shape_spec(name).num_layers
    return next(
        (
            count
            for count in range(maximum, 1, -1)
            if _fits(ModelWork.of(shape_spec(name, count), BFLOAT16_BYTES), node)
            and generated_tokens * _step_s(name, count, node) <= seconds
        ),
        1,
    )


def _fits(work: ModelWork, node: HardwareSpec) -> bool:
    on_host = work.all_weight_bytes - RESIDENT_SHARE * node.gpu_memory_bytes
    return on_host <= WEIGHT_SHARE * node.host_memory_bytes


def _step_s(name: str, num_layers: int, node: HardwareSpec) -> float:
    weights = ModelWork.of(shape_spec(name, num_layers), BFLOAT16_BYTES).all_weight_bytes
    return max(0.0, weights - node.gpu_memory_bytes) / node.htod_bytes_per_s


ACCELERATE = "accelerate"
PLANNER = "planner"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleContender:
    schedule: str
    paper: str = PLANNER
    # The paper's policy; None for our planner's.
    choose: Callable[[PaperPolicies], Policy] | None = None

    def plan(self, model: ModelSpec, node: HardwareSpec, workload: Workload) -> tuple[Plan, str]:
        """The plan and its policy's source: the paper, or our planner where it has none."""
        policy, source = None, self.paper
        if self.choose is not None:
            try:
                policy = self.choose(PaperPolicies(model, node, workload))
            except (ConfigError, InfeasiblePlanError) as error:
                reason = str(error).splitlines()[0]
                source = f"{PLANNER}; {self.paper} has none: {reason}"
        plan = find_plan(
            model,
            node,
            workload,
            schedule=self.schedule,
            policy=policy,
            max_model_len=longest_row(workload),
            may_leave_gpu_idle=False,
        )
        return plan, source


SCHEDULES: Mapping[str, ScheduleContender] = {
    "raymoe": ScheduleContender(schedule="auto"),
    "cgopipe": ScheduleContender(
        schedule="cgopipe", paper="MoE-Lightning", choose=PaperPolicies.cgopipe
    ),
    "vslpipe": ScheduleContender(
        schedule="vslpipe", paper="MoE-Lens", choose=PaperPolicies.vslpipe
    ),
    "module_batching": ScheduleContender(
        schedule="module_batching", paper="MoE-Gen", choose=PaperPolicies.module_batching
    ),
    "flexgen_s3": ScheduleContender(
        schedule="flexgen_s3", paper="MoE-Lightning", choose=PaperPolicies.flexgen_s3
    ),
    "flexgen_s4": ScheduleContender(
        schedule="flexgen_s4", paper="MoE-Lightning", choose=PaperPolicies.flexgen_s4
    ),
    "layer_by_layer": ScheduleContender(
        schedule="layer_by_layer", paper="ZeRO-Inference", choose=PaperPolicies.layer_by_layer
    ),
}
GPU_CONTENDERS = (*SCHEDULES, ACCELERATE)
MAIN_CONTENDERS = ("raymoe", "cgopipe", "vslpipe", "module_batching")  # measured first


def longest_row(workload: Workload) -> int:
    return max(prompt + generated for prompt, generated in workload.row_lengths)


class Status(StrEnum):
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyShares:
    gpu: float
    cpu: float
    htod: float
    dtoh: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedFigures:
    predicted_s: float  # seconds of the job, from the plan
    steps_predicted_s: float  # seconds of the executed steps, from the cost model
    steps_measured_s: float
    link_bytes_per_s: float  # to the device, while copies were in progress; 0 without copies
    busy: BusyShares
    # Kernels of a decode step over its time, without the gaps between launches that `busy.gpu`
    # counts; 0 where it was not measured.
    kernel_share: float
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    schedule: str
    policy: str
    num_rows: int
    prompt_tokens: int
    generated_tokens: int
    prefill_s: float  # the job with one new token per row
    total_s: float
    load_s: float  # weights written and pinned, before the job
    # Measured decode steps; with fewer than the job has, the job's time is the prefill plus all
    # steps at their mean.
    num_measured_steps: int
    pinned_bytes_per_s: float  # copies from pinned memory to the device, measured just before
    bound_s: float  # the job at the limits of the node
    limit: str
    device_peak_bytes: int  # peak reserved by torch; 0 without a GPU
    peak_rss_bytes: int
    model: PredictedFigures | None = None  # predictions, for our engine only

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.total_s

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after each row's first over the time after the prefill; 0 without any."""
        decode_s = self.total_s - self.prefill_s
        decoded = self.generated_tokens - self.num_rows
        return decoded / decode_s if decode_s > 0 else 0.0

    @property
    def share_of_bound(self) -> float:
        return self.bound_s / self.total_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    key: str
    settings: PartSettings
    status: str
    reason: str  # why there are no figures; empty otherwise
    whole_layers: int  # layers of the published model; `settings.num_layers` of them were used
    date: str
    device_name: str  # the driver's name, or the preset
    versions: str
    figures: Figures | None = None

    def to_json(self) -> str:
        """One line, with derived figures for other programs."""
        derived = {}
        if self.figures is not None:
            names = ("tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s")
            derived = {name: getattr(self.figures, name) for name in (*names, "share_of_bound")}
        return json.dumps(asdict(self) | {"derived": derived})

    @classmethod
    def from_json(cls, line: str) -> Self:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"it is not JSON: {line:.60}") from error
        if isinstance(fields, dict):
            fields.pop("derived", None)
        return from_plain(cls, fields, where="PartResult")


def read_results(path: Path) -> list[PartResult]:
    """Results of a file; the latest of equal settings takes the place of the first."""
    latest: dict[str, PartResult] = {}
    for number, line in enumerate(_lines(path), 1):
        try:
            result = PartResult.from_json(line)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}; choose another --out") from error
        latest[result.key] = result
    return list(latest.values())


def append_result(path: Path, result: PartResult) -> None:
    """Append a line atomically for readers."""
    text = "".join(f"{line}\n" for line in (*_lines(path), result.to_json()))
    keep(path, lambda written: written.write_text(text))


def _lines(path: Path) -> list[str]:
    return read_text(path).splitlines() if path.exists() else []
