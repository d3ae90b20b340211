"""Every family in every format gives the tokens of its decoded weights, on both devices."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.specs.families.wrappers import WRAPPERS
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import model_weights
from tests.parity.configurations import FAMILY_CONFIGS, first_of_each_family
from tests.quantised_checkpoints import CASES
from tests.quantisers import quantise

# One configuration of each format, without modules that are stored unquantised.
FORMATS = {
    repr(case.stored): {
        name: value
        for name, value in case.config.items()
        if name not in ("ignore", "modules_to_not_convert", "ignored_layers")
    }
    for case in CASES
}
# Columns that all groups divide, in every field that sizes a matrix.
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "linear_num_value_heads": 8, "d_model": 64, "n_heads": 4,
    "ffn_hidden_size": 64,
}  # fmt: skip
SCHEDULES = ("cgopipe", "vslpipe", "module_batching")
SAMPLING = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
PROMPTS = [[3, 1, 4, 1, 5], list(range(50, 90)), [9, 2, 6]]
SIZES_OF_STEPS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_prefill_chunk_tokens": 32,
    "num_kv_blocks": 24,
}


def config_of(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    config = getattr(transformers, FAMILY_CONFIGS[family])(**sized(fields)).to_dict()
    return {name: value for name, value in config.items() if value is not None}


def sized(fields: dict[str, Any]) -> dict[str, Any]:
    nested = {name: sized(value) for name, value in fields.items() if isinstance(value, dict)}
    sizes = SIZES | ({"num_key_value_heads": 4} if "kv_lora_rank" in fields else {})
    return fields | nested | {name: size for name, size in sizes.items() if name in fields}


def write(config: dict[str, Any], quantization: dict[str, Any], root: Path) -> tuple[Path, Path]:
    """A quantised checkpoint in canonical names, and one of the numbers that it stands for."""
    quantised, plain = root / "quantised", root / "plain"
    full = config | {"quantization_config": quantization | {"quant_method": method(quantization)}}
    spec = ModelSpec.from_config(full)
    generator = torch.Generator().manual_seed(11)
    tensors, numbers = {}, {}
    for number, (canonical, shape) in enumerate(model_weights(spec).items()):
        is_wrapped = config["model_type"] in WRAPPERS
        name = written(canonical, config["model_type"]) if is_wrapped else canonical
        weight = torch.randn(shape, generator=generator) * 0.3
        stored = spec.format_of(canonical, shape)
        if stored is None:
            weight = weight + name.endswith("norm.weight")
            tensors[name] = numbers[name] = weight
            continue
        found = quantise(stored, weight, seed=number)
        module = name.removesuffix(".weight")
        tensors |= {module + suffix: tensor for suffix, tensor in found.tensors.items()}
        numbers[name] = found.exact.float()
    for directory, weights, content in ((quantised, tensors, full), (plain, numbers, config)):
        directory.mkdir()
        save_file(weights, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(content))
    return quantised, plain


def written(name: str, model_type: str) -> str:
    """A canonical name with the prefix of a model that wraps a language model."""
    body, head = WRAPPERS[model_type].prefixes[0]
    if name.startswith("model."):
        return body + name.removeprefix("model.")
    return head + name


def method(quantization: dict[str, Any]) -> str:
    return quantization.get("quant_method", "modelopt")


def generate(
    directory: Path, *, cpu_experts_fraction: float = 0.0, **options: Any
) -> list[tuple[int, ...]]:
    device = None
    if options.get("device") == "emulated":
        device = DevicePolicy(
            num_micro_batches=2, page_bytes=9_000, cpu_experts_fraction=cpu_experts_fraction
        )
    policy = Policy(**SIZES_OF_STEPS, device=device)
    config = EngineConfig(linger_s=0.0, dtype="float32", policy=policy, **options)
    with Engine.from_pretrained(directory, config) as engine:
        rows = engine.generate(PROMPTS, SAMPLING)
    assert [row.error for row in rows] == [""] * len(rows)
    return [row.token_ids for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("configuration", first_of_each_family(), ids=lambda each: each.family)
def test_tokens_are_those_of_the_decoded_weights(
    configuration, stored: str, tmp_path: Path
) -> None:
    config = config_of(configuration.family, configuration.fields)
    quantised, plain = write(config, FORMATS[stored], tmp_path)
    expected = generate(plain)
    assert generate(quantised) == expected
    schedule = SCHEDULES[len(configuration.family + stored) % len(SCHEDULES)]
    assert generate(quantised, device="emulated", schedule=schedule) == expected
