"""Every tile that a step may choose is used once while the model is loaded."""

import torch

from raymoe.engine.runner_loading import compile_experts
from raymoe.kernels.cpu_elementwise import Routing
from raymoe.kernels.gpu_experts_layout import BUCKETS
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS

DEEPSEEK = ModelSpec.from_config(
    {
        **MODEL_PRESETS["deepseek-v2-lite"],
        "hidden_size": 8,
        "num_hidden_layers": 4,
        "n_routed_experts": 12,
        "vocab_size": 128,
    }
)


def buckets_of(spec: ModelSpec, max_tokens: int) -> list[tuple[int, int]]:
    """(layer, bucket) of each call."""
    seen = []

    def compute(i: int, hidden_TH: torch.Tensor, to: Routing) -> None:
        assert len(hidden_TH) <= max_tokens
        assert hidden_TH.dtype == torch.bfloat16
        assert to.topk_ids_TK.dtype == torch.int32
        rows = to.topk_ids_TK.numel() / 12
        seen.append((i, max((bucket for bucket in BUCKETS if bucket <= rows), default=1)))

    device = torch.device("cpu")
    compile_experts(spec, compute, max_tokens, dtype=torch.bfloat16, device=device)
    return seen


def test_the_first_sparse_layer_computes_with_every_bucket_that_fits_a_launch() -> None:
    assert buckets_of(DEEPSEEK, 3000) == [(1, bucket) for bucket in BUCKETS]
    assert buckets_of(DEEPSEEK, 2 * 70) == [(1, 1), (1, 16), (1, 32), (1, 64)]
    assert buckets_of(DEEPSEEK, 1) == [(1, 1)]


def test_a_model_without_experts_compiles_nothing() -> None:
    dense = {**MODEL_PRESETS["deepseek-v2-lite"], "num_hidden_layers": 1, "hidden_size": 8}
    assert buckets_of(ModelSpec.from_config(dense), 100) == []
