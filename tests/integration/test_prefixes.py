"""Rows that begin the same, through real models: the tokens of each alone, from shared blocks."""

import pytest

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from tests.tiny import make_checkpoint

PARAMS = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
HEAD = "the same long instruction for each of them, and then some more of it: "
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 96,
    "attention_factor": 1.0,
}


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("rope", [None, LONGROPE], ids=["plain", "by length"])
def test_rows_share_blocks_and_keep_their_tokens(device, rope, tmp_path):
    changes = {} if rope is None else {"rope_parameters": rope}
    model = make_checkpoint(tmp_path / "model", **changes)
    # `generate` starts the engine when all rows are inside; the first must not end before.
    config = EngineConfig(
        dtype="float32", device=device, num_threads=1, host_memory_bytes=3 * 2**30, linger_s=60.0
    )
    prompts = [HEAD + "x" * (7 * index) for index in range(8)]
    with Engine.from_pretrained(model, config) as engine:
        alone = [engine.generate([prompt], PARAMS)[0] for prompt in prompts]
        together = engine.generate(prompts, PARAMS)
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]
    assert [row.error for row in together] == [""] * 8
    assert sum(row.num_cached_tokens for row in alone) == 0
    num_sharing = sum(row.num_cached_tokens >= 64 for row in together)
    assert num_sharing == (7 if rope is None else 0)
