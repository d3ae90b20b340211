"""Split, QK norm, clip and rotation against Hugging Face's own functions, on every ISA."""

import math

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.mixtral.modeling_mixtral import apply_rotary_pos_emb
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from raymoe.errors import ConfigError
from raymoe.kernels.compressed import rotate_ends, rotate_ends_reference
from raymoe.kernels.elementwise import (
    FLOAT_DTYPES,
    Projected,
    Steps,
    qkv_rope,
    qkv_rope_reference,
)
from tests.kinds import covering

NUM_POSITIONS = 50
UNIT = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}

pytestmark = pytest.mark.usefixtures("isa")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(half: int) -> tuple[Tensor, Tensor]:
    frequency = 10000.0 ** -(torch.arange(half) / max(half, 1))
    angles = torch.arange(NUM_POSITIONS)[:, None] * frequency
    return angles.cos() * 1.1, angles.sin() * 1.1


def positions(num_tokens: int) -> Tensor:
    return (torch.arange(num_tokens, dtype=torch.int32) * 7) % NUM_POSITIONS


def assert_same(got: Projected, want: Projected, *, exact: bool) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.is_contiguous()
        assert mine.dtype == theirs.dtype
        if exact:
            assert torch.equal(mine, theirs)
        else:  # a rotation of two values that differ by a unit each; cancellation makes it absolute
            torch.testing.assert_close(mine, theirs, rtol=4 * UNIT[mine.dtype], atol=1e-6)
            if mine.dtype != torch.float32:
                assert (mine != theirs).sum() <= max(2, mine.numel() // 100)


# Heads, KV heads, dimensions, rotated pairs.
SIZES = [(4, 2, 64, 32), (1, 1, 8, 4), (6, 3, 24, 12), (2, 2, 80, 16), (2, 1, 128, 0)]
SIZES += [(3, 1, 40, 20)]


@covering(dtype=FLOAT_DTYPES, sizes=SIZES, num_tokens=[0, 1, 37])
def test_rotation_is_bit_equal_to_hugging_face(
    num_tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    heads, kv_heads, dim, half = sizes
    qkv = random(num_tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cos, sin = tables(half)
    got = qkv_rope(
        qkv, positions(num_tokens), cos, sin, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim
    )
    split = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    query, key, value = (x.unflatten(1, (-1, dim)) for x in split)
    full = (t[positions(num_tokens).long()].repeat(1, 2).to(dtype) for t in (cos, sin))
    rotary = apply_rotary_pos_emb(query[..., : 2 * half], key[..., : 2 * half], *full)
    want = Projected(
        torch.cat([rotary[0], query[..., 2 * half :]], -1),
        torch.cat([rotary[1], key[..., 2 * half :]], -1),
        value,
    )
    assert_same(got, want, exact=True)


@covering(dtype=FLOAT_DTYPES, clip=[math.inf, 0.75], full=[False, True])
def test_norm_then_clip_then_rotation_as_in_olmoe_and_qwen3(
    full: bool, clip: float, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = 4, 2, 48
    qkv = random(19, (heads + 2 * kv_heads) * dim, dtype=dtype)
    module_type = OlmoeRMSNorm if full else Qwen3MoeRMSNorm
    q_norm = module_type(heads * dim if full else dim, eps=1e-5)
    k_norm = module_type(kv_heads * dim if full else dim, eps=1e-5)
    for seed, norm in enumerate((q_norm, k_norm)):
        norm.weight.data = random(*norm.weight.shape, dtype=dtype, seed=seed + 1)
    cos, sin = tables(dim // 2)
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    with torch.no_grad():
        got = qkv_rope(
            qkv,
            positions(19),
            cos,
            sin,
            **sizes,
            q_norm=q_norm.weight,
            k_norm=k_norm.weight,
            steps=Steps(eps=1e-5, clip=clip),
        )
        parts = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        if full:
            query, key = q_norm(parts[0]), k_norm(parts[1])
        else:
            query, key = (
                norm(part.unflatten(1, (-1, dim))).flatten(1)
                for norm, part in zip((q_norm, k_norm), parts, strict=False)
            )
        value = parts[2].clone()
        if clip < math.inf:  # OlmoeAttention: after the norms, before the rotation
            for x in (query, key, value):
                x.clamp_(min=-clip, max=clip)
        query, key, value = (x.unflatten(1, (-1, dim)) for x in (query, key, value))
        angles = (t[positions(19).long()].repeat(1, 2).to(dtype) for t in (cos, sin))
        want = Projected(*apply_rotary_pos_emb(query, key, *angles), value)
    assert_same(got, want, exact=False)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (8, 4), (40, 20), (80, 16), (24, 12)])
def test_interleaved_pairs_come_out_parted_as_in_deepseek(
    dim: int, half: int, dtype: torch.dtype
) -> None:
    qkv = random(9, 4 * dim, dtype=dtype)
    cos, sin = tables(half)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": dim}
    got = qkv_rope(qkv, positions(9), cos, sin, **sizes, steps=Steps(is_interleaved=True))
    query, key, value = (x.unflatten(1, (-1, dim)) for x in qkv.split([2 * dim, dim, dim], dim=1))
    full = (t[positions(9).long()].repeat(1, 2).to(dtype)[None] for t in (cos, sin))
    rotary = apply_rotary_pos_emb_interleave(
        *(x[None, ..., : 2 * half] for x in (query, key)), *full, unsqueeze_dim=2
    )
    want = Projected(
        torch.cat([rotary[0][0], query[..., 2 * half :]], -1),
        torch.cat([rotary[1][0], key[..., 2 * half :]], -1),
        value,
    )
    assert_same(got, want, exact=True)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("clip", [math.inf, 0.75])
def test_a_norm_after_the_rotation_as_in_hunyuan(clip: float, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = 4, 2, 48
    qkv = random(19, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cos, sin = tables(dim // 2)
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    norms = [Qwen3MoeRMSNorm(dim, eps=1e-5) for _ in range(2)]
    for seed, norm in enumerate(norms):
        norm.weight.data = random(dim, dtype=dtype, seed=seed + 1)
    with torch.no_grad():
        rotated = qkv_rope(qkv, positions(19), cos, sin, **sizes, steps=Steps(clip=clip))
        got = qkv_rope(
            qkv,
            positions(19),
            cos,
            sin,
            **sizes,
            q_norm=norms[0].weight,
            k_norm=norms[1].weight,
            steps=Steps(eps=1e-5, clip=clip, is_norm_after_rope=True),
        )
        query, key = (norm(x) for norm, x in zip(norms, rotated, strict=False))
    assert_same(got, Projected(query, key, rotated.value_TGV), exact=False)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("values_are_keys", [False, True])
def test_values_are_normed_as_in_gemma4(values_are_keys: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = 4, 2, 40
    widths = [heads * dim, *[kv_heads * dim] * (1 if values_are_keys else 2)]
    qkv = random(11, sum(widths), dtype=dtype)
    cos, sin = tables(dim // 2)
    norms = [Gemma4RMSNorm(dim, eps=1e-5, with_scale=part != 2) for part in range(3)]
    for seed, norm in enumerate(norms[:2]):
        norm.weight.data = random(dim, dtype=dtype, seed=seed + 1)
    with torch.no_grad():
        got = qkv_rope(
            qkv,
            positions(11),
            cos,
            sin,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            q_norm=norms[0].weight,
            k_norm=norms[1].weight,
            steps=Steps(
                eps=1e-5, norms_values=True, values_are_keys=values_are_keys, norm_offset=0.0
            ),
        )
        parts = [part.unflatten(1, (-1, dim)) for part in qkv.split(widths, dim=1)]
        query, key = norms[0](parts[0]), norms[1](parts[1])
        angles = (t[positions(11).long()].repeat(1, 2).to(dtype) for t in (cos, sin))
        want = Projected(*apply_rotary_pos_emb(query, key, *angles), norms[2](parts[-1]))
    assert_same(got, want, exact=False)


def test_a_norm_over_all_heads_after_the_rotation_is_refused() -> None:
    qkv, weight = torch.ones(1, 24), torch.ones(16)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 6}
    with pytest.raises(ValueError, match="must be one per head"):
        qkv_rope(
            qkv,
            positions(1),
            *tables(3),
            **sizes,
            q_norm=weight[:12],
            steps=Steps(is_norm_after_rope=True),
        )


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("is_norm_after_rope", [False, True])
@pytest.mark.parametrize("is_gemma", [False, True])
def test_the_reference_agrees_with_the_kernel(
    is_gemma: bool, is_norm_after_rope: bool, is_interleaved: bool
) -> None:
    qkv = random(11, 6 * 32 + 2 * 24, dtype=torch.bfloat16)
    cos, sin = tables(8)
    weight = random(32, dtype=torch.bfloat16, seed=1)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "value_dim": 24}
    offset = 1.0 if is_gemma else None
    steps = Steps(1e-6, 1.5, is_norm_after_rope, is_interleaved, is_gemma, False, offset)
    got = qkv_rope(qkv, positions(11), cos, sin, **sizes, q_norm=weight, k_norm=None, steps=steps)
    want = qkv_rope_reference(
        qkv,
        positions(11),
        (cos, sin),
        sizes=(4, 2, 32, 24),
        norms=(weight, None),
        steps=steps,
    )
    assert_same(got, want, exact=False)


def test_float64_and_long_positions_take_the_reference() -> None:
    cos, sin = tables(4)
    qkv = random(3, 32, dtype=torch.float32)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    native = qkv_rope(qkv, positions(3), cos, sin, **sizes)
    assert_same(qkv_rope(qkv, positions(3).long(), cos, sin, **sizes), native, exact=True)
    assert qkv_rope(qkv.double(), positions(3), cos, sin, **sizes).query_THD.dtype == torch.float64


@pytest.mark.parametrize("position", [-1, NUM_POSITIONS])
def test_positions_outside_the_tables_are_refused(position: int) -> None:
    at = torch.tensor([0, position], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"positions\[1\] is {position}, the tables have 50"):
        qkv_rope(torch.ones(2, 24), at, *tables(4), num_heads=1, num_kv_heads=1, head_dim=8)


def test_wrong_widths_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected \\[T, 24\\] for 1 query and 1 KV heads of 8"):
        qkv_rope(
            torch.ones(2, 25), positions(2), *tables(4), num_heads=1, num_kv_heads=1, head_dim=8
        )


@covering(dtype=FLOAT_DTYPES, half=[0, 4, 20], backwards=[False, True])
def test_ends_of_rows_are_rotated_in_pairs(dtype: torch.dtype, half: int, backwards: bool) -> None:
    rows_TNW = random(37, 5, 3 + 43, dtype=dtype)[..., 3:]
    rotated_TNW = rotate_ends(rows_TNW, positions(37), tables(half), backwards=backwards)
    want_TNW = rotate_ends_reference(rows_TNW, positions(37), tables(half), backwards=backwards)
    assert torch.equal(rotated_TNW, want_TNW)
    empty_TNW = rows_TNW[:0]
    assert rotate_ends(empty_TNW, positions(0), tables(half)).shape == empty_TNW.shape


def test_positions_that_the_tables_lack_are_not_rotated() -> None:
    rows_TNW = random(2, 1, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"positions\[1\] is 50, the tables have 50 rows"):
        rotate_ends(rows_TNW, torch.tensor([0, 50], dtype=torch.int32), tables(4))
