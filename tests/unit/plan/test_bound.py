"""The bound of a job, against figures worked out apart."""

import numpy as np
import pytest

from raymoe.plan.bound import job_bound
from raymoe.plan.work import ModelWork
from raymoe.specs.model import ModelSpec

MIXTRAL = {
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
}
QWEN3 = {
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
}
ROWS = {"W1": (256, 96, 32), "W2": (64, 512, 64), "W3": (128, 64, 128)}


@pytest.mark.parametrize(
    ("config", "workload", "tokens_per_s"),
    [
        (MIXTRAL, "W1", 223),
        (MIXTRAL, "W2", 98),
        (MIXTRAL, "W3", 561),
        (QWEN3, "W1", 295),
        (QWEN3, "W2", 123),
        (QWEN3, "W3", 726),
    ],
)
def test_generated_tokens_per_second_at_the_limit(
    config: dict[str, object], workload: str, tokens_per_s: float
) -> None:
    """Limits at 440 GFLOP/s and 36 GB/s, from an independent script over the same shapes."""
    model = ModelSpec.from_config(config)
    rows, mean, generated = ROWS[workload]
    lengths = np.linspace(mean - mean // 4, mean + mean // 4, rows).astype(int).tolist()
    bound = job_bound(model, lengths, generated, flop_per_s=440e9, bytes_per_s=36e9)
    assert rows * generated / bound.total_s == pytest.approx(tokens_per_s, rel=0.005)


def test_all_experts_are_touched_by_many_tokens_and_top_k_by_one() -> None:
    work = ModelWork.of(ModelSpec.from_config(QWEN3), 2)
    layer = work.layers[0]
    assert layer.activated_experts(1) == pytest.approx(8)
    assert layer.activated_experts(10_000) == pytest.approx(64)
    assert work.activated_weight_bytes(10_000) == pytest.approx(work.all_weight_bytes)


def test_a_slow_memory_binds_the_decode_phase() -> None:
    bound = job_bound(ModelSpec.from_config(QWEN3), [64] * 8, 8, flop_per_s=4e11, bytes_per_s=1e9)
    assert bound.decode_limit == "memory bandwidth"
