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
from raymoe.schedule.builders.in_place import build_in_place
from raymoe.specs.curve import Curve
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import model_weights
from raymoe.units import ceil_div

DTYPE = torch.bfloat16
TOKENS = (1, 8, 64)  # more kernels use all threads the more rows there are
CONTEXT = BLOCK_TOKENS
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
    """Passes of each number of `TOKENS` through one decoder."""
    runner = _make_runner()
    return [
        KernelJob(
            kernel="pass",
            case=f"{tokens} tokens",
            calls=[partial(runner.run, decode_inputs(tokens, CONTEXT, MODEL.vocab_size))],
            bytes_per_call=0.0,
            flop_per_call=0.0,
        )
        for tokens in TOKENS
    ]


def task_overhead(node: HardwareSpec, pass_s: Sequence[float]) -> Curve:
    """Seconds of a task beyond its kernels, over the tokens of its pass.

    Args:
        node: With curves.
        pass_s: Seconds of each of `pass_jobs` on it.
    """
    tasks = build_in_place(MODEL.num_layers).tasks
    work, points = ModelWork.of(MODEL, DTYPE.itemsize), []
    for tokens, taken_s in zip(TOKENS, pass_s, strict=True):
        cost = HostCost(work, node, PassShape.decode(tokens, CONTEXT))
        beyond_s = taken_s - sum(cost.kernel_s(task) for task in tasks)
        points.append((float(tokens), max(LEAST_S, beyond_s / len(tasks))))
    return Curve(tuple(points))


def decode_inputs(rows: int, context: int, vocab_size: int) -> PassInputs:
    """A pass of one token for each of `rows` sequences of `context` tokens, logits dropped."""
    blocks = ceil_div(context, BLOCK_TOKENS)
    return PassInputs(
        token_ids=torch.arange(rows) % vocab_size,
        positions=torch.full((rows,), context - 1, dtype=torch.int32),
        attention=AttentionBatch(
            query_start=torch.arange(rows + 1, dtype=torch.int32),
            context_tokens=torch.full((rows,), context, dtype=torch.int32),
            block_table=torch.arange(rows * blocks, dtype=torch.int32).reshape(rows, blocks),
        ),
        prompt_tokens=torch.full((rows,), context - 1, dtype=torch.int32),
        logit_rows=torch.arange(rows),
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
    cache = KvCache(layout, MODEL.num_layers, max(TOKENS) * ceil_div(CONTEXT, BLOCK_TOKENS))
    return PassRunner(decoder, cache, build_in_place(MODEL.num_layers))
