"""What a task takes beyond its kernels: the interpreter, and threads that wake up for each kernel.

Kernels alone are timed in tight loops, in which no thread falls asleep. A small decoder runs passes
as a model does; what they take beyond the kernels' own rates is the overhead.
"""

from collections.abc import Sequence
from functools import partial

import torch

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.measure.timing import KernelJob
from raymoe.memory.arena import HostArena
from raymoe.memory.kv_cache import KvCache
from raymoe.model.cache import cache_layout
from raymoe.model.decoder import Decoder
from raymoe.model.loading import decoder_arena_bytes
from raymoe.plan.cost import HostCost, PassShape
from raymoe.plan.work import ModelWork
from raymoe.runtime.bindings import PassInputs
from raymoe.runtime.runner import PassRunner
from raymoe.schedule.builders import build_in_place
from raymoe.specs.hardware import Curve, HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import model_weights
from raymoe.units import ceil_div

DTYPE = torch.bfloat16
CONTEXT = BLOCK_TOKENS
# Sequences of a pass, and new tokens of each. More kernels use all threads the more rows there are,
# and from 64 to 512 tokens the overhead of a task grew threefold.
PASSES = ((1, 1), (8, 1), (64, 1), (8, 64))
TOKENS = tuple(rows * new_tokens for rows, new_tokens in PASSES)
LEAST_S = 1e-6  # where the kernels' rates leave less than nothing
MODEL = ModelSpec.from_config(
    {
        "model_type": "mixtral",
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 512,
        "max_position_embeddings": 2 * CONTEXT,
        "vocab_size": 1024,
    }
)


def pass_jobs() -> list[KernelJob]:
    """Each of `PASSES` through one decoder."""
    runner = _make_runner()
    return [
        KernelJob(
            kernel="pass",
            case=f"{rows * new_tokens} tokens",
            calls=[
                partial(
                    runner.run,
                    pass_inputs(rows, _context(new_tokens), MODEL.vocab_size, new_tokens),
                )
            ],
            bytes_per_call=0.0,
            flop_per_call=0.0,
        )
        for rows, new_tokens in PASSES
    ]


def pass_shape(rows: int, new_tokens: int) -> PassShape:
    """What one of `PASSES` holds."""
    if new_tokens == 1:
        return PassShape.decode(rows, CONTEXT)
    return PassShape.prefill(rows, new_tokens)


def task_overhead(node: HardwareSpec, pass_s: Sequence[float]) -> Curve:
    """Seconds of a task beyond its kernels, over the tokens of its pass.

    Args:
        node: With curves.
        pass_s: Seconds of each of `pass_jobs` on it.
    """
    tasks = build_in_place(MODEL.num_layers).tasks
    work, points = ModelWork.of(MODEL, DTYPE.itemsize), []
    for sizes, taken_s in zip(PASSES, pass_s, strict=True):
        cost = HostCost(work, node, pass_shape(*sizes))
        beyond_s = taken_s - sum(cost.kernel_s(task) for task in tasks)
        points.append((cost.shape.tokens, max(LEAST_S, beyond_s / len(tasks))))
    return Curve(tuple(points))


def pass_inputs(rows: int, context: int, vocab_size: int, new_tokens: int = 1) -> PassInputs:
    """The last `new_tokens` of each of `rows` sequences of `context` tokens; logits are dropped."""
    blocks, tokens = ceil_div(context, BLOCK_TOKENS), rows * new_tokens
    return PassInputs(
        token_ids=torch.arange(tokens) % vocab_size,
        positions=torch.arange(context - new_tokens, context, dtype=torch.int32).repeat(rows),
        attention=AttentionBatch(
            query_start=torch.arange(0, tokens + 1, new_tokens, dtype=torch.int32),
            context_tokens=torch.full((rows,), context, dtype=torch.int32),
            block_table=torch.arange(rows * blocks, dtype=torch.int32).reshape(rows, blocks),
        ),
        prompt_tokens=torch.full((tokens,), context - (new_tokens == 1), dtype=torch.int32),
        logit_rows=torch.arange(new_tokens - 1, tokens, new_tokens),
        on_logits=lambda _row, _logits: None,
    )


def _make_runner() -> PassRunner:
    """A decoder of random weights, with a cache for the largest pass."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(shape, dtype=DTYPE).normal_(0.0, 0.03, generator=generator)
        for name, shape in model_weights(MODEL).items()
    }
    arena = HostArena(decoder_arena_bytes(MODEL, DTYPE))
    decoder = Decoder.load(MODEL, weights.__getitem__, arena.allocate, DTYPE)
    layout = cache_layout(MODEL, DTYPE)
    num_blocks = max(rows * ceil_div(_context(new), BLOCK_TOKENS) for rows, new in PASSES)
    cache = KvCache(layout, MODEL.num_layers, num_blocks)
    return PassRunner(decoder, cache, build_in_place(MODEL.num_layers))


def _context(new_tokens: int) -> int:
    """Tokens of a sequence of one of `PASSES`, the new ones included."""
    return max(CONTEXT, new_tokens)
