"""The cases that `raymoe bench --kernels` measures."""

from collections.abc import Callable
from functools import partial

from raymoe.bench.quantised import FORMATS, quantised_experts_job
from raymoe.measure.attention import AttentionShape, decode_job, prefill_job
from raymoe.measure.experts import ExpertsShape, experts_job, linear_job
from raymoe.measure.latent_attention import LatentShape, latent_decode_job
from raymoe.measure.timing import KernelJob

EIGHT_KV_HEADS = AttentionShape()  # Mixtral, Llama 3 8B
FOUR_KV_HEADS = AttentionShape(num_kv_heads=4)  # Qwen3 30B-A3B
LATENT = LatentShape()  # DeepSeek-V2 and V3, Kimi-K2 with half the heads
FEW_HEADS = LatentShape(num_heads=16)  # DeepSeek-V2-Lite
DECODE_CASES = (
    (64, 512), (64, 1024), (64, 4096), (128, 2048),
    (256, 512), (256, 1024), (512, 512), (512, 1024),
)  # fmt: skip
LATENT_CASES = ((64, 512), (64, 1024), (64, 4096))
PREFILL_CASES = ((16, 128), (8, 512), (2, 2048))
FEW_BIG_EXPERTS = ExpertsShape(hidden_size=1024, expert_size=2816, num_experts=8, top_k=2)
MANY_SMALL_EXPERTS = ExpertsShape(hidden_size=1024, expert_size=384, num_experts=64, top_k=8)
TOKENS = (32, 128, 512, 2048)
QUANTISED_EXPERTS = ExpertsShape(hidden_size=2048, expert_size=768, num_experts=16, top_k=4)
QUANTISED_TOKENS = (4, 32, 512, 2048)  # 1, 8, 128 and 512 rows of each expert


def kernel_jobs() -> list[Callable[[], KernelJob]]:
    """Makers, so that only one job's data exists at a time (2 GiB at most)."""
    return [
        *(partial(decode_job, EIGHT_KV_HEADS, *case) for case in DECODE_CASES),
        *(partial(decode_job, FOUR_KV_HEADS, *case) for case in ((64, 1024), (256, 1024))),
        *(partial(latent_decode_job, LATENT, *case) for case in LATENT_CASES),
        partial(latent_decode_job, FEW_HEADS, 64, 1024),
        *(partial(prefill_job, EIGHT_KV_HEADS, *case) for case in PREFILL_CASES),
        *(
            partial(experts_job, shape, tokens)
            for shape in (FEW_BIG_EXPERTS, MANY_SMALL_EXPERTS)
            for tokens in TOKENS
        ),
        *(
            partial(quantised_experts_job, QUANTISED_EXPERTS, tokens, stored)
            for stored in FORMATS
            for tokens in QUANTISED_TOKENS
        ),
        *(partial(linear_job, 1024, 3072, tokens) for tokens in TOKENS),
    ]
