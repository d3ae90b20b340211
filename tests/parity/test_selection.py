"""Contexts around the published number of chosen positions and far beyond, against transformers.

A position at the border of a choice may change with rounding, but hardly with consequences: of the
rows, tokens are compared while the best logit is clear, and logits closely.
"""

import copy
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from raymoe.config import EngineConfig
from raymoe.device.threads import set_num_threads
from raymoe.engine.engine import Engine
from raymoe.plan.policy import DevicePolicy, Policy
from tests.parity.cases import DIRECTORY
from tests.parity.configurations import model_class
from tests.parity.driver import Driver, load_decoder
from tests.parity.oracle import as_stored, norm_latents_as_trained, randomise
from tests.parity.wrapper_families import WRAPPER_FAMILIES

pytestmark = pytest.mark.slow

NUM_TOKENS, CHUNK = 12, 500
VOCABULARY = 97
LATENT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 2048,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
POOLED = LATENT | {
    "qk_rope_head_dim": 0,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "indexer_types": ["full", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_kpool": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "hc_mult": 2,
}
BLOCKS = {name: LATENT[name] for name in LATENT if name.endswith("_id")} | {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 24,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["minimax_m3_sparse"] * 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,
}
ENTRIES = {
    **{name: LATENT[name] for name in LATENT if name.endswith("_id")},
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 512,
    "sliding_window": 128,
    "layer_types": [
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["moe"] * 3,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "hc_mult": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,
}
# Blocks of 4 tokens in grouped-query attention, whose heads share the choice.
POOLED_BLOCKS = {
    **{name: LATENT[name] for name in LATENT if name.endswith("_id")},
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "hc_count": 2,
    "hc_lowrank": 16,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "rope_parameters": BLOCKS["rope_parameters"],
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,
}
# Class of the configuration, fields, and a seed with which the first tokens are clear.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "deepseek_v32": ("DeepseekV32Config", LATENT, 11),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        LATENT | {"indexer_types": ["full", "shared"]},
        13,
    ),
    "glm5_next": (
        "Glm5NextConfig",
        {
            "text_config": POOLED,
            "vision_config": WRAPPER_FAMILIES["glm5_next"][0]["vision_config"],
        },
        11,
    ),
    "minimax_m3": ("MiniMaxM3VLTextConfig", BLOCKS, 11),
    "deepseek_v4": ("DeepseekV4Config", ENTRIES, 11),
    "qwen4_exp": ("Qwen4ExpTextConfig", POOLED_BLOCKS, 11),
    "hy_v4": (
        "HYV4Config",
        {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"},
        13,
    ),
}
# Rows that begin the same, on both sides of what is chosen, and one far beyond it.
LENGTHS = (2041, 2060, 6000)


@dataclass(frozen=True)
class Long:
    directory: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[torch.Tensor]  # of the last position of each prompt


@functools.cache
def case(family: str) -> Long:
    directory = Path(os.environ[DIRECTORY], f"long-{family}")
    config_class, fields, seed = MODELS[family]
    config = getattr(transformers, config_class)(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (
            model_class(config)
            ._from_config(config, dtype=torch.float32, attn_implementation="eager")
            .eval()
        )
        randomise(model)
    norm_latents_as_trained(model)
    as_stored(model).save_pretrained(directory)
    generator = torch.Generator().manual_seed(5)
    base = torch.randint(VOCABULARY, (max(LENGTHS),), generator=generator).tolist()
    prompts = [base[:length] for length in LENGTHS]
    rows, cache, done = [], transformers.DynamicCache(config=config), 0
    with torch.inference_mode():
        for prompt in prompts:  # each begins with the one before
            while done < len(prompt):
                end = min(len(prompt), done + CHUNK)
                output = model(torch.tensor([prompt[done:end]]), cache=cache, use_cache=True)
                done = end
            rows.append(generate(model, copy.deepcopy(cache), output.logits[0, -1]))
    return Long(directory, prompts, [row for row, _ in rows], [logits for _, logits in rows])


def generate(model: Any, cache: Any, first_V: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens while they are clear, from the logits after a prompt on; and these logits."""
    tokens: list[int] = []
    logits_V = first_V
    while len(tokens) < NUM_TOKENS:
        best = logits_V.topk(2).values
        if float(best[0] - best[1]) < 0.01 * float(logits_V.abs().max()):
            break
        tokens.append(int(logits_V.argmax()))
        output = model(torch.tensor([tokens[-1:]]), cache=cache, use_cache=True)
        logits_V = output.logits[0, -1]
    assert tokens, "the first token is not clear"
    return tokens, first_V


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(2)


@pytest.mark.parametrize("family", MODELS)
def test_logits_after_long_prompts_are_those_of_transformers(family: str) -> None:
    long = case(family)
    decoder = load_decoder(long.directory)
    for prompt, expected in zip(long.prompts, long.logits, strict=True):
        driver = Driver(decoder, [prompt], 1)
        for begin in range(0, len(prompt), 777):
            logits_TV = driver.run_step([(begin, min(begin + 777, len(prompt)))])
        worst = float((logits_TV[-1] - expected).abs().max() / expected.abs().max())
        assert worst < 1e-4, f"{len(prompt)} tokens: {worst:.1e}"


SIZES = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "max_prefill_chunk_tokens": 2048,
    "num_kv_blocks": 640,
}
WAYS: dict[str, dict[str, int]] = {
    "one batch": {},
    "one at a time": {"max_num_seqs": 1},
    "chunks of 7": {"max_prefill_chunk_tokens": 7, "max_num_batched_tokens": 40},
    "preemption": {"num_kv_blocks": 192},
}
DEVICE = DevicePolicy(
    num_micro_batches=2, page_bytes=9_000, cpu_attention_fraction=0.5, cpu_experts_fraction=0.4
)


def check(long: Long, config: EngineConfig, *, rounds: int = 1) -> None:
    with Engine.from_pretrained(long.directory, config) as engine:
        for _ in range(rounds):  # from the second on, prompts are in shared blocks
            rows = engine.generate(long.prompts, {"temperature": 0, "max_tokens": NUM_TOKENS})
            assert [row.error for row in rows] == [""] * len(rows)
            for row, expected in zip(rows, long.tokens, strict=True):
                assert list(row.token_ids[: len(expected)]) == expected
        if rounds > 1:
            assert all(row.num_cached_tokens > 1900 for row in rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", MODELS)
def test_tokens_of_long_contexts_however_they_are_computed(family: str, way: str) -> None:
    policy = Policy(**(SIZES | WAYS[way]))
    config = EngineConfig(dtype="float32", policy=policy, linger_s=0.0)
    check(case(family), config, rounds=2 if way == "one batch" else 1)


@pytest.mark.parametrize("schedule", ["cgopipe", "vslpipe", "module_batching"])
@pytest.mark.parametrize("family", MODELS)
def test_tokens_of_long_contexts_by_every_schedule(family: str, schedule: str) -> None:
    policy = Policy(**SIZES, device=DEVICE)
    config = EngineConfig(
        dtype="float32", device="emulated", schedule=schedule, policy=policy, linger_s=0.0
    )
    check(case(family), config)
