"""Models of the GPU suite: published shapes, of which a node takes as many layers as it can."""

import json
from collections.abc import Mapping
from pathlib import Path

from raymoe.plan.work import ModelWork
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS

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
