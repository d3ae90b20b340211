"""Kernels of all steps are compiled while the model is loaded."""

import itertools
import random
from typing import TYPE_CHECKING

import pytest
import torch

from raymoe.kernels import gpu_attention_batch
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.elementwise import Projected, Routing
from raymoe.kernels.gpu_attention_batch import AttentionCompute
from raymoe.kernels.gpu_experts_layout import BUCKETS
from raymoe.kernels.gpu_state import scan
from raymoe.kernels.paged_kv import largest_layout
from raymoe.model.compilation import compile_attention, compile_experts
from raymoe.model.decoder import Decoder, cache_layouts
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS
from tests.triton_mode import HAS_GPU
from tests.unit.model.test_decoder import load, random_weights

if TYPE_CHECKING:
    from raymoe.kernels.gpu_common import Launch

pytest.importorskip("triton")

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


NUM_STEPS = 40
SMALL = {"hidden_size": 64, "intermediate_size": 56, "num_hidden_layers": 2,
         "num_attention_heads": 8, "vocab_size": 64, "max_position_embeddings": 4096}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40,
    },
    "deepseek_v3": {
        "num_key_value_heads": 8, "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32, "n_group": 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "qwen3_next": {
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
        "linear_num_value_heads": 3, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    },
}  # fmt: skip
RUNTIME_INTEGERS = {
    "table_stride",
    "row_heads",
    "max_parts",
    "inputs_stride",
}  # not specialised, by the kernels


def variant_of(launch: "Launch") -> tuple[object, ...]:
    """Return what Triton compiles for: constants, options, and what it assumes of arguments."""
    assumed = [
        (name, each.dtype, each.data_ptr() % 16 == 0)
        if isinstance(each, torch.Tensor)
        else (name, each == 1, each % 16 == 0)
        for name, each in launch.arguments.items()
        if name not in RUNTIME_INTEGERS
    ]
    return launch.kernel.__name__, (*launch.constants.items(), *launch.options.items()), *assumed


@pytest.mark.skipif(HAS_GPU, reason="stands in for a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_attention_of_random_steps_is_compiled_anew(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raymoe.kernels import gpu_attention  # noqa: PLC0415 - needs Triton

    compute = AttentionCompute.on((8, 0), torch.bfloat16)
    monkeypatch.setattr(gpu_attention_batch, "attention_compute", lambda *_: compute)
    monkeypatch.setattr(scan, "triton_runs_on", lambda _device: True)
    monkeypatch.setattr(gpu_attention, "GATHERED_BYTES", 1 << 17)
    seen: set[tuple[object, ...]] = set()
    monkeypatch.setattr(gpu_attention.Launch, "run", lambda launch: seen.add(variant_of(launch)))
    spec = ModelSpec.from_config({"model_type": family, **SMALL, **FAMILIES[family]})
    decoder = load(spec, random_weights(spec, torch.bfloat16), torch.bfloat16)
    layouts = cache_layouts(spec, torch.bfloat16)
    kwargs = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    compile_attention(decoder, layouts, 4096, **kwargs)
    compiled, seen = seen, set()
    monkeypatch.setattr(gpu_attention.Launch, "run", lambda launch: seen.add(variant_of(launch)))
    chance = random.Random(family)
    for _ in range(NUM_STEPS):
        new = [chance.choice((1, chance.randint(2, 90))) for _ in range(chance.randint(1, 4))]
        contexts = [each + chance.choice((0, 7, 7, 7, 7, 7, 7, 1100)) for each in new]
        attend(decoder, layouts, new, contexts)
    assert seen, "nothing was launched"
    assert seen <= compiled


@torch.inference_mode()
def attend(decoder: Decoder, layouts: list, new: list[int], contexts: list[int]) -> None:
    blocks = -(-max(contexts) // 32)
    batch = AttentionBatch(
        query_start=torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32),
        context_tokens=torch.tensor(contexts, dtype=torch.int32),
        block_table=torch.zeros(len(new), blocks, dtype=torch.int32),
        slots=torch.arange(len(new), dtype=torch.int32),
    )
    staged = decoder.staged_batch(
        batch, largest_layout(layouts), torch.device("cpu"), with_states=batch
    )
    for i, (layer, layout) in enumerate(zip(decoder.spec.layers, layouts, strict=True)):
        shapes = layer.attention.token_shapes
        projected = Projected(
            *(
                torch.zeros(sum(new), *shape, dtype=torch.bfloat16)
                for shape in (shapes.query, shapes.key, shapes.value)
            )
        )
        shape = (1, *layout.block_shape)
        if layout.sequence_bytes:
            shape = (len(new) * layout.sequence_bytes,)
        cache = torch.zeros(shape, dtype=layout.dtype)
        decoder.attend_staged(i, projected, cache, staged)
