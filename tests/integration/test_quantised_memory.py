"""Quantised weights take the bytes that they are stored in: in the arena, and while loading."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.memory.weights import WeightStore
from raymoe.model.loading import decoder_arena_bytes
from raymoe.plan.placement import layer_sizes
from raymoe.specs.model import ModelSpec
from raymoe.units import GIB
from tests.random_checkpoints import make_random_checkpoint
from tests.unit.engine.fakes import write_byte_tokenizer

MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        }
    },
}
FOUR_BITS = {"gptq": GPTQ, "awq": AWQ, "packed": PACKED}


def make(directory: Path, quantization: dict[str, Any], **sizes: int) -> int:
    return make_random_checkpoint(MODEL | sizes | {"quantization_config": quantization}, directory)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_the_arena_of_four_bits_is_as_large_as_the_files(name: str, tmp_path: Path) -> None:
    num_bytes = make(tmp_path, FOUR_BITS[name])
    spec = ModelSpec.from_directory(tmp_path)
    store = WeightStore.open(spec, tmp_path)
    on_link = sum(size.total for size in layer_sizes(spec, 2))
    outside = 2 * spec.vocab_size * spec.hidden_size * 2
    assert num_bytes / 1.02 < on_link + outside <= 1.02 * num_bytes
    arena_bytes = decoder_arena_bytes(spec, torch.bfloat16, store)
    if packed_linear_is_used(torch.bfloat16):
        assert num_bytes / 1.1 < arena_bytes <= 1.02 * num_bytes
    else:
        assert arena_bytes <= 0.02 * num_bytes


# A process of its own: the peak is one of the process.
JOB = """
import json, sys
from raymoe.config import EngineConfig
from raymoe.device.host import peak_rss_bytes
from raymoe.engine.engine import Engine
from raymoe.plan.policy import DevicePolicy, Policy

device = sys.argv[2]
policy = Policy(
    max_num_seqs=2, max_num_batched_tokens=32, max_prefill_chunk_tokens=32, num_kv_blocks=8,
    device=DevicePolicy(num_micro_batches=1) if device == "emulated" else None,
)
schedule = "cgopipe" if device == "emulated" else "auto"
config = EngineConfig(dtype="bfloat16", device=device, schedule=schedule, policy=policy)
with Engine.from_pretrained(sys.argv[1], config) as engine:
    rows = engine.generate([[1, 2, 3]], {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True})
    assert rows[0].error == "" and rows[0].num_generated_tokens == 4
print(json.dumps({"peak_rss": peak_rss_bytes()}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_loading_takes_the_arena_and_at_most_one_gib(device: str, tmp_path: Path) -> None:
    """1.9 B parameters: 1 GB as stored, 3.8 GB decoded."""
    num_bytes = make(tmp_path, PACKED, num_hidden_layers=6, num_experts=64)
    write_byte_tokenizer(tmp_path)
    assert num_bytes < 1.2 * GIB
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path), device],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # On the emulated device two layers are in host memory once more.
    slots = 2 * num_bytes / 6 if device == "emulated" else 0
    peak = json.loads(done.stdout.splitlines()[-1])["peak_rss"]
    assert peak <= num_bytes + slots + GIB
