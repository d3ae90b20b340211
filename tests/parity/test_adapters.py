"""A model with an adapter generates the tokens of PEFT's merged model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from raymoe.config import EngineConfig
from raymoe.device.threads import set_num_threads
from raymoe.engine.rank_model import in_place_arena_bytes, open_weights, read_model
from raymoe.memory.arena import HostArena
from raymoe.model.decoder import Decoder
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import model_weights, unquantised_tensors
from tests.adapters import make_adapter, merged_model
from tests.parity.cases import get_case
from tests.parity.driver import generate, load_decoder
from tests.parity.oracle import FEW_ROWS, make_model, make_reference
from tests.quantised_checkpoints import CASES as QUANTISED_CASES
from tests.quantised_checkpoints import QuantisedCase, checkpoints

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = {"target_modules": "all-linear", "target_parameters": EXPERTS}
# Of each kind one: stacked experts and a router; ranks and factors of their own, rsLoRA; latents
# and shared experts; a tied embedding and head of the adapter's own; a hybrid with fused
# projections; experts that are stored transposed, with biases.
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"target_modules": ATTENTION, "target_parameters": [*EXPERTS, "gate.weight"]},
    "qwen3_moe": {
        "target_modules": ATTENTION,
        "target_parameters": EXPERTS,
        "use_rslora": True,
        "rank_pattern": {"o_proj": 2, r".*\.down_proj": 3, "layers.0.self_attn.q_proj": 5},
        "alpha_pattern": {"gate_up_proj": 7},
    },
    "deepseek_v3": ALL,
    "gemma3_text": {
        "target_modules": "all-linear",
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
    "qwen3_next": ALL,
    "gpt_oss": {"target_modules": ATTENTION, "target_parameters": EXPERTS, "bias": "lora_only"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "phi3": {"target_modules": "all-linear"},
    "qwen2_moe": {"target_modules": ATTENTION[:3], "lora_bias": True, "bias": "all"},
    "qwen3_5_moe_text": ALL,
    "granitemoehybrid": {"target_modules": "all-linear"},
    "nemotron_h": {"target_modules": [*ATTENTION, "up_proj", "down_proj"]},  # PEFT has no others
    "lfm2_moe": {"target_modules": "all-linear"},
    "glm4_moe": ALL,
    "kimi_linear": {"target_modules": "all-linear"},
    "olmoe": ALL,
    "minimax_m2": {"target_modules": ATTENTION, "target_parameters": EXPERTS},
    "gemma4_text": {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    "llama": {"target_modules": [*ATTENTION, "embed_tokens", "lm_head"]},
    "dbrx": {
        "target_modules": ["Wqkv", "out_proj"],
        "target_parameters": [f"experts.mlp.{name}" for name in ("w1", "v1", "w2")],
    },
    "llama4_text": {
        "target_modules": "all-linear",
        "target_parameters": [f"feed_forward.{name[4:]}" for name in EXPERTS],
    },
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)


def load(directory: Path, adapter: Path) -> Decoder:
    """The decoder of a model with an adapter; its arena is exactly as large as the plan says."""
    config = EngineConfig(adapter=adapter, dtype="float32")
    spec = read_model(directory, config)
    weights = open_weights(spec, directory, config)
    num_bytes = in_place_arena_bytes(spec, weights, torch.float32)
    arena = HostArena(num_bytes)
    decoder = Decoder.load(spec, weights, arena.allocate, torch.float32, release=weights.drop_pages)
    assert arena.used_bytes == num_bytes
    return decoder


def cases() -> list[Any]:
    slow = [pytest.param(name, OTHERS[name], marks=pytest.mark.slow) for name in OTHERS]
    return [*(pytest.param(name, KINDS[name]) for name in KINDS), *slow]


@pytest.mark.parametrize(("family", "fields"), cases())
def test_tokens_are_those_of_the_merged_model_and_the_base_stays(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    case = get_case(f"{family}: plain")
    model = make_model(case.configuration)
    merged = make_adapter(model, tmp_path, **{"r": 4, "lora_alpha": 16, **fields})
    reference = make_reference(merged, case.configuration, FEW_ROWS)
    num_tokens = FEW_ROWS.max_new_tokens
    found = generate(load(case.directory, tmp_path), reference.prompts, num_tokens)
    assert found == reference.tokens
    base = load_decoder(case.directory)
    assert generate(base, reference.prompts, num_tokens) != reference.tokens
    few = case.few_rows
    assert generate(base, few.prompts, num_tokens) == few.tokens


def test_factors_of_single_experts_are_read_as_peft_converts_them(tmp_path: Path) -> None:
    """transformers 4 had a module for each expert, and adapters of that time name those."""
    case = get_case("mixtral: plain")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["w1", "w2", "w3"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_directory(case.directory)
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name, (outputs, inputs) in unquantised_experts(spec).items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * 0.2
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) * 0.2
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    merged = merged_model(make_model(case.configuration), tmp_path)
    reference = make_reference(merged, case.configuration, FEW_ROWS)
    found = generate(load(case.directory, tmp_path), reference.prompts, FEW_ROWS.max_new_tokens)
    assert found == reference.tokens
    assert found != generate(
        load_decoder(case.directory), reference.prompts, FEW_ROWS.max_new_tokens
    )


def unquantised_experts(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    names = next(iter(unquantised_tensors(spec, ["model.layers.0.block_sparse_moe.gate.weight"])))
    return {name: shape for name, shape in names.shapes.items() if ".experts." in name}


def quantised() -> list[Any]:
    """Cases of which attention changes; of gpt-oss, whose experts alone are quantised, those."""
    quick = {"fp8 blocks, odd sizes", "mxfp4"}
    return [
        pytest.param(case, marks=[] if case.name in quick else pytest.mark.slow, id=case.name)
        for case in QUANTISED_CASES
        if "language_model" not in case.family and "text_config" not in case.fields
    ]


@pytest.mark.parametrize("case", quantised())
def test_quantised_matrices_that_change_are_decoded_and_others_stay(
    case: QuantisedCase, tmp_path: Path
) -> None:
    directories = checkpoints(case.name)
    model = AutoModelForCausalLM.from_pretrained(directories.plain, dtype=torch.float32)
    targets = {"target_modules": ["o_proj"]}
    if "self_attn" in case.excluded and case.family == "gpt_oss":
        targets |= {"target_parameters": EXPERTS}
    make_adapter(model, tmp_path, r=4, lora_alpha=16, **targets)
    prompts = [[5, 9, 17, 30], [7, 7, 3]]
    decoder = load(directories.quantised, tmp_path)
    tokens = generate(decoder, prompts, FEW_ROWS.max_new_tokens)
    assert tokens == generate(load(directories.plain, tmp_path), prompts, FEW_ROWS.max_new_tokens)
    spec, base = decoder.spec, ModelSpec.from_directory(directories.quantised)
    formats = {name: spec.format_of(name, shape) for name, shape in model_weights(base).items()}
    assert not any(formats[name] for name in formats if name.endswith("o_proj.weight"))
    assert "target_parameters" in targets or any(formats.values())
    assert generate(load_decoder(directories.quantised), prompts, 4) != [row[:4] for row in tokens]
