"""Attention to last tokens and compressed entries, against the layer of transformers."""

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from raymoe.device.threads import set_num_threads
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.memory.arena import HostArena
from raymoe.model.compressed import CompressedAttention, compressed_layout
from raymoe.model.loading import Loader
from raymoe.model.rope import Rotary
from raymoe.specs.attention.compressed import CompressedAttentionSpec
from raymoe.specs.rope import RopeSpec

KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
RATIOS = dict(zip(KINDS, (None, 4, 128), strict=True))
CONFIG = DeepseekV4Config(
    hidden_size=48,
    num_attention_heads=4,
    head_dim=32,
    partial_rotary_factor=0.25,
    q_lora_rank=24,
    num_hidden_layers=3,
    layer_types=list(KINDS),
    o_groups=2,
    o_lora_rank=16,
    index_n_heads=2,
    index_head_dim=16,
    sliding_window=16,
    rope_theta=100.0,
    compress_rope_theta=1600.0,
    max_position_embeddings=4096,
    attn_implementation="eager",
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)  # matrices this small only wait for a second thread


def spec_of(kind: str) -> CompressedAttentionSpec:
    return CompressedAttentionSpec(
        num_heads=4,
        head_dim=32,
        rope_head_dim=8,
        q_lora_rank=24,
        scale=32**-0.5,
        norm_eps=1e-6,
        sliding_window=16,
        ratio=RATIOS[kind],
        is_overlapping=RATIOS[kind] == 4,
        num_groups=2,
        group_rank=16,
    )


def layers_of(kind: str) -> tuple[theirs.DeepseekV4Attention, CompressedAttention, Rotary]:
    """The layer of transformers with random weights, the same of raymoe, and its rotation."""
    layer = theirs.DeepseekV4Attention(CONFIG, KINDS.index(kind)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        factor = 0.3 if parameter.ndim == 2 and "bias" not in name else 1.0
        parameter.data = factor * torch.randn(parameter.shape, generator=generator)
    weights = {name.replace("o_b_proj", "o_proj"): x for name, x in layer.state_dict().items()}
    loader = Loader(weights.__getitem__, HostArena(1 << 20).allocate, torch.float32)
    theta = 100.0 if kind == KINDS[0] else 1600.0
    rope = RopeSpec(
        kind="default",
        rotary_dim=8,
        theta=theta,
        max_position_embeddings=4096,
        original_max_tokens=4096,
        is_interleaved=True,
    )
    rotary = Rotary(rope)
    rotary.reserve(512)
    return layer, _attention(kind, loader, rotary), rotary


def _attention(kind: str, loader: Loader, rotary: Rotary) -> CompressedAttention:
    return CompressedAttention(spec_of(kind), loader, "", (rotary, rotary))


def attended_by_theirs(layer: theirs.DeepseekV4Attention, hidden_TH: Tensor) -> Tensor:
    positions = torch.arange(len(hidden_TH))[None]
    back = positions[0][:, None] - positions
    mask = torch.zeros(back.shape).masked_fill((back < 0) | (back >= 16), -torch.inf)
    rotary = theirs.DeepseekV4RotaryEmbedding(CONFIG)
    angles = {
        kind: rotary(hidden_TH, position_ids=positions, layer_type=kind)
        for kind in ("main", "compress")
    }
    out, _ = layer(hidden_TH[None], angles, positions, mask[None, None])
    return out[0]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_layer_in_chunks_is_that_of_transformers(kind: str) -> None:
    layer, attention, rotary = layers_of(kind)
    hidden_TH = torch.randn(263, 48, generator=torch.Generator().manual_seed(1))
    expected = attended_by_theirs(layer, hidden_TH)
    layout = compressed_layout(spec_of(kind), torch.float32)
    num_blocks = -(-263 // BLOCK_TOKENS)
    cache = torch.empty(num_blocks * layout.block_bytes + layout.sequence_bytes, dtype=torch.uint8)
    results, begin = [], 0
    for end in (7, 8, 120, 127, 128, 129, 255, 256, 257, 263):
        batch = AttentionBatch(
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            context_tokens=torch.tensor([end], dtype=torch.int32),
            block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
            slots=torch.zeros(1, dtype=torch.int32),
        )
        positions_T = torch.arange(begin, end, dtype=torch.int32)
        projected = attention.project(hidden_TH[begin:end], rotary.angles(positions_T))
        attended = attention.attend(projected, cache, batch)
        results.append(attention.output(attended, hidden_TH[begin:end]))
        begin = end
    torch.testing.assert_close(torch.cat(results), expected, rtol=1e-4, atol=1e-4)
