"""What decides a part of the GPU suite, and the name under which its result is kept."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np

from raymoe.errors import ConfigError, InfeasiblePlanError, RaymoeError
from raymoe.plan.papers.policies import PaperPolicies
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy
from raymoe.plan.search import find_plan
from raymoe.plan.work import ModelWork
from raymoe.specs.files import from_plain
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS
from raymoe.specs.workload import Workload

# Part of the key of a result: raise it when what is measured, or how, changes.
FORMAT = 1


class SkipPartError(RaymoeError):
    """A part that cannot be run here; says what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Which node, and how much of it.

    Attributes:
        device: "cuda" or "emulated".
        hardware: Preset whose pace the emulated device takes on; None on a GPU.
        device_memory_bytes: Cap; None for what is free.
        host_memory_bytes: Cap; None for what is available.
        num_threads: Cores; None for all.
    """

    device: str
    hardware: str | None = None
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    num_threads: int | None = None

    def to_json(self) -> str:
        """For `from_json`, on a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return from_plain(cls, json.loads(text), where="NodeSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings:
    """One shape, workload and contender on one node.

    Attributes:
        node: Which node.
        shape: Of `shapes.GPU_SHAPES`.
        num_layers: Of it, the first ones.
        workload: Of `workloads.GPU_WORKLOADS`.
        contender: Of `contenders.GPU_CONTENDERS`.
        limit_s: After which the part has failed.
        most_rows: No more rows than that, however fast.
    """

    node: NodeSettings
    shape: str
    num_layers: int
    workload: str
    contender: str
    limit_s: float
    most_rows: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.shape} {self.workload} {self.contender}"

    @property
    def file_name(self) -> str:
        """Of its pictures and its log, without what they end in."""
        return f"{self.shape}-{self.workload}-{self.contender}-{self.key[:8]}"

    @property
    def key(self) -> str:
        """The same for equal settings only."""
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """For `from_json`, on a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return from_plain(cls, json.loads(text), where="PartSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """Lengths of rows; the same for any number of them.

    Attributes:
        least_prompt: Tokens of the shortest prompt.
        mean_prompt: Mean tokens of a prompt.
        most_prompt: Tokens of the longest one.
        generated_tokens: Of each row.
    """

    least_prompt: int
    mean_prompt: int
    most_prompt: int
    generated_tokens: int

    def prompt_lengths(self, num_rows: int) -> list[int]:
        """Tokens of each prompt, in a fixed shuffled order.

        Quantiles of the power law that has the least, the mean and the largest length: the
        published statistics say no more.
        """
        span = self.most_prompt - self.least_prompt
        if not span:
            return [self.least_prompt] * num_rows
        power = span / (self.mean_prompt - self.least_prompt) - 1
        quantiles = (np.arange(num_rows) + 0.5) / num_rows
        lengths = np.rint(self.least_prompt + span * quantiles**power).astype(int)
        return [int(length) for length in np.random.default_rng(7).permutation(lengths)]

    def job(self, num_rows: int) -> Workload:
        """So many rows."""
        lengths = self.prompt_lengths(num_rows)
        return Workload.of_rows(tuple((length, self.generated_tokens) for length in lengths))


def _mtbench(generated_tokens: int) -> RowStatistics:
    return RowStatistics(
        least_prompt=8, mean_prompt=77, most_prompt=418, generated_tokens=generated_tokens
    )


GPU_WORKLOADS: Mapping[str, RowStatistics] = {
    **{f"mtbench-{count}": _mtbench(count) for count in (32, 64, 128, 256)},
    "512-256": RowStatistics(
        least_prompt=512, mean_prompt=512, most_prompt=512, generated_tokens=256
    ),
    # For trying the suite itself.
    "smoke": RowStatistics(least_prompt=4, mean_prompt=12, most_prompt=40, generated_tokens=6),
}
DEFAULT_WORKLOADS = ("mtbench-64", "512-256")
Config = Mapping[str, object]

BYTES_PER_ELEMENT = 2
# Of the host memory; the rest is for KV.
WEIGHT_SHARE = 0.8

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
    """The `config.json` of a shape, with all of its layers or the first ones."""
    config = dict(GPU_SHAPES[name])
    return config if num_layers is None else config | {"num_hidden_layers": num_layers}


def shape_spec(name: str, num_layers: int | None = None) -> ModelSpec:
    """The model of a shape."""
    return ModelSpec.from_config(shape_config(name, num_layers), name=name)


def write_shape(name: str, num_layers: int, directory: Path) -> Path:
    """Write the `config.json` of a shape; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape_config(name, num_layers), indent=1))
    return directory


def layers_that_fit(name: str, node: HardwareSpec, generated_tokens: int, seconds: float) -> int:
    """Layers of a shape whose weights fit the host, and stream once for each token in the time.

    Args:
        name: Of the shape.
        node: With the memory that may be used.
        generated_tokens: Of each row, so as many passes at least.
        seconds: For the passes.
    """
    most = shape_spec(name).num_layers
    return next(
        (
            count
            for count in range(most, 1, -1)
            if _fits(ModelWork.of(shape_spec(name, count), BYTES_PER_ELEMENT), node)
            and generated_tokens * _pass_s(name, count, node) <= seconds
        ),
        1,
    )


def _fits(work: ModelWork, node: HardwareSpec) -> bool:
    return work.all_weight_bytes <= WEIGHT_SHARE * node.host_memory_bytes


def _pass_s(name: str, num_layers: int, node: HardwareSpec) -> float:
    weights = ModelWork.of(shape_spec(name, num_layers), BYTES_PER_ELEMENT).all_weight_bytes
    return max(0.0, weights - node.gpu_memory_bytes) / node.htod_bytes_per_s


ACCELERATE = "accelerate"
PLANNER = "planner"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleContender:
    """Our engine by one schedule.

    Attributes:
        schedule: Its name, or "auto".
        paper: Whose policy it has.
        choose: That policy; None for our planner's.
    """

    schedule: str
    paper: str = PLANNER
    choose: Callable[[PaperPolicies], Policy] | None = None

    def plan(self, model: ModelSpec, node: HardwareSpec, workload: Workload) -> tuple[Plan, str]:
        """The plan of a job, and whose policy that is.

        Where the paper has no policy for the model or the node, our planner chooses one for the
        paper's schedule, and the name says so.

        Raises:
            InfeasiblePlanError: Nothing fits.
        """
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
            max_context_tokens=longest_row(workload),
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


def longest_row(workload: Workload) -> int:
    """Tokens of the longest row at its end."""
    return max(prompt + generated for prompt, generated in workload.row_lengths)
