"""Model shapes and row lengths for benchmarks on random weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from raymoe.errors import ConfigError
from raymoe.specs.files import read_own_json, write_file
from raymoe.specs.workload import Workload

SHAPES: dict[str, dict[str, object]] = {
    # 0.93 B parameters, 0.27 B active per token: few big experts.
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": 12,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 2816,
        "max_position_embeddings": 4096,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
    },
    # 1.03 B parameters, 0.21 B active per token: many small experts.
    "qwen3": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 12,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "intermediate_size": 2816,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "vocab_size": 32000,
    },
    # 1.08 B parameters, 0.27 B active per token: three layers with states to one with attention.
    "hybrid": {
        "model_type": "qwen3_next",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_hidden_layers": 12,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 384,
        "intermediate_size": 2816,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "vocab_size": 32000,
    },
    # For trying the benchmark itself.
    "tiny": {
        "model_type": "mixtral",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 512,
        "max_position_embeddings": 2048,
        "vocab_size": 4096,
        "rms_norm_eps": 1e-5,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """Rows of a workload; prompt lengths spread evenly over the mean +- 25 %."""

    num_rows: int
    mean_prompt_tokens: int
    generated_tokens: int

    def prompt_lengths(self) -> list[int]:
        quarter = self.mean_prompt_tokens // 4
        low, high = self.mean_prompt_tokens - quarter, self.mean_prompt_tokens + quarter
        lengths = np.linspace(low, high, self.num_rows).astype(int)
        return [int(n) for n in np.random.default_rng(7).permutation(lengths)]

    @property
    def job(self) -> Workload:
        return Workload.of_rows(
            tuple((length, self.generated_tokens) for length in self.prompt_lengths())
        )


WORKLOADS = {
    "W1": RowLengths(num_rows=256, mean_prompt_tokens=96, generated_tokens=32),
    "W2": RowLengths(num_rows=64, mean_prompt_tokens=512, generated_tokens=64),
    "W3": RowLengths(num_rows=128, mean_prompt_tokens=64, generated_tokens=128),
    "smoke": RowLengths(num_rows=8, mean_prompt_tokens=32, generated_tokens=8),
}


def make_prompts(workload: RowLengths, vocab_size: int) -> list[list[int]]:
    return random_prompts(workload.prompt_lengths(), vocab_size)


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Random token ids with frequencies proportional to 1 / rank, as in text."""
    weights = 1.0 / np.arange(10, vocab_size + 10)
    weights /= weights.sum()
    tokens = np.random.default_rng(1234).choice(vocab_size, size=sum(lengths), p=weights)
    ends = np.cumsum(lengths)[:-1]
    return [prompt.tolist() for prompt in np.split(tokens, ends)]


def make_checkpoint(shape: str, directory: Path, *, seed: int = 0) -> Path:
    """Write random bfloat16 weights of a shape, or reuse those that are there."""
    if shape not in SHAPES:
        raise ConfigError(f"shape {shape!r} is not one of {sorted(SHAPES)}")
    config = transformers.AutoConfig.for_model(
        **SHAPES[shape], bos_token_id=1, eos_token_id=0, pad_token_id=2, tie_word_embeddings=False
    )
    config.initializer_range = 0.03
    marker = directory / "raymoe_bench.json"
    wanted = {"shape": SHAPES[shape], "seed": seed}
    if marker.exists() and read_own_json(marker) == wanted:
        return directory
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty and holds no checkpoint of shape {shape!r}")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="1GB")
    write_file(marker, json.dumps(wanted))
    return directory
