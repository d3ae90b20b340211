"""Rows that begin the same, through real models: the tokens of each alone, from shared blocks."""

import functools

import pytest
import torch

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.plan.policy import DevicePolicy, Policy
from tests.kinds import covering
from tests.parity.cases import get_case
from tests.parity.configurations import CONFIGURATIONS
from tests.parity.oracle import Reference, Rows, make_model, make_reference
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


PLACED_KV = {
    "cpu": {"device": "cpu", "dtype": "float32"},
    "emulated": {"device": "emulated", "dtype": "float32"},
    "int8": {"device": "cpu", "dtype": "bfloat16", "kv_dtype": "int8"},
}


@covering(placed=PLACED_KV, rope={"by length": LONGROPE, "plain": None})
def test_rows_share_blocks_and_keep_their_tokens(placed, rope, tmp_path):
    changes = {} if rope is None else {"rope_parameters": rope}
    model = make_checkpoint(tmp_path / "model", **changes)
    config = EngineConfig(
        **placed,
        num_threads=1,
        host_memory_bytes=3 * 2**30,
        linger_s=60.0,
    )
    prompts = [HEAD + "x" * (7 * index) for index in range(8)]
    with Engine.from_pretrained(model, config) as engine:
        alone = []
        for prompt in prompts:
            engine.reset_prefix_cache()
            alone += engine.generate([prompt], PARAMS)
        engine.reset_prefix_cache()
        together = engine.generate(prompts, PARAMS)
        again = engine.generate(prompts[::-1], PARAMS)[::-1]
    for rows in (together, again):
        assert [row.token_ids for row in rows] == [row.token_ids for row in alone]
        assert [row.error for row in rows] == [""] * 8
    assert sum(row.num_cached_tokens for row in alone) == 0
    # Of those with the long factors, the first computes its prompt too.
    num_long = sum(row.num_input_tokens > 96 for row in alone)
    num_sharing = sum(row.num_cached_tokens >= 64 for row in together)
    assert num_sharing == (7 if rope is None else 6)
    assert 0 < num_long < 8
    assert all(row.num_cached_tokens > row.num_input_tokens - 40 for row in again)


ENTRIES = "deepseek_v4: windows of 8 and 64 tokens, one expert"
HYBRIDS = (
    "qwen3_next: convolution of 2, one KV head, top-3",
    "qwen3_5_moe_text: attention first, tied, biases, top-1",
    "nemotron_h: plain",
    "granitemoehybrid: plain",
    "lfm2_moe: wide convolution with biases",
    "kimi_linear: attention first, latent queries, biases, no dense layer",
    "bailing_hybrid: attention first, latent queries, biases, no dense layer",
    "lfm3: windows first, a convolution of 3 with biases, biases, tied",
    "glm5_next: three streams divided once, large epsilon, decay without a bound",
    ENTRIES,
    "qwen4_exp_text: two tables, the first before all layers, in uneven tensors",
)
HEADS, TAILS, NUM_ROWS, NUM_TOKENS = (101, 70, 133), (9, 31, 2, 17, 30, 9), 12, 12
SHARED = [length // BLOCK_TOKENS * BLOCK_TOKENS for length in HEADS]
SIZES = {"max_num_seqs": 48, "max_num_batched_tokens": 512, "max_prefill_chunk_tokens": 512}
# Other sizes of steps, and the share of what could be cached that is.
SCENARIOS: dict[str, tuple[dict[str, int], float]] = {
    "three snapshots": ({}, 1.0),
    "short chunks": ({"max_prefill_chunk_tokens": 7, "max_num_batched_tokens": 40}, 1.0),
    "two snapshots": ({"max_num_seqs": 16}, 0.85),
    "alone": ({"max_num_seqs": 1}, 0.0),
}


# Where states are: the schedule, and how it uses the device.
PLACES: dict[str, tuple[str, DevicePolicy | None]] = {
    "cpu": ("auto", None),
    "on the host": ("module_batching", DevicePolicy(num_micro_batches=3, page_bytes=9_000)),
    "on the device": ("cgopipe", DevicePolicy(page_bytes=9_000, states_on_device=True)),
    "resident": ("resident", None),
}


# Where weights stream, states beside KV stay with it on the host.
HYBRIDS_IN_PLACES = [
    (name, place)
    for name in HYBRIDS
    for place in PLACES
    if not (name.startswith("deepseek_v4") and place == "on the device")
]


@functools.cache
def rows_of_three_heads(name: str) -> tuple[Reference, list[int]]:
    """What transformers generates for rows that begin the same in turn; the head of each."""
    (configuration,) = (one for one in CONFIGURATIONS if one.name == name)
    generator = torch.Generator().manual_seed(7)

    def tokens(length: int) -> list[int]:
        return torch.randint(configuration.vocab_size, (length,), generator=generator).tolist()

    heads = [tokens(length) for length in HEADS]
    candidates = [head + tokens(length) for length in TAILS for head in heads]
    model = make_model(configuration)
    size = Rows(num_prompts=NUM_ROWS, lengths=HEADS, max_new_tokens=NUM_TOKENS)
    reference = make_reference(model, configuration, size, candidates)
    return reference, [candidates.index(prompt) % len(heads) for prompt in reference.prompts]


def hybrid_engine(name: str, place: str = "cpu", **sizes: int) -> Engine:
    policy = Policy(**({"num_kv_blocks": 120} | SIZES | sizes), device=PLACES[place][1])
    config = EngineConfig(
        dtype="float32",
        device="cpu" if place == "cpu" else "emulated",
        schedule=PLACES[place][0],
        num_threads=1,
        policy=policy,
        linger_s=60.0,
    )
    return Engine.from_pretrained(get_case(name).directory, config)


def check_hybrid(name: str, scenario: str, place: str) -> None:
    reference, heads = rows_of_three_heads(name)
    sizes, share = SCENARIOS[scenario]
    shareable = sum(SHARED[head] for head in heads) - sum(SHARED[head] for head in set(heads))
    with hybrid_engine(name, place, **sizes) as engine:
        for order in (range(NUM_ROWS), range(NUM_ROWS)[::-1]):
            before = engine.stats()
            prompts = [reference.prompts[row] for row in order]
            rows = engine.generate(prompts, {"temperature": 0, "max_tokens": NUM_TOKENS})
            tokens = [list(row.token_ids) for row in rows]
            assert tokens == [reference.tokens[row] for row in order]
            num_cached = engine.stats().num_cached_tokens - before.num_cached_tokens
            assert share * shareable <= num_cached <= (shareable if share else 0)
            engine.reset_prefix_cache()
            num_computed = engine.stats().num_computed_tokens - before.num_computed_tokens
            useful = sum(map(len, prompts)) + sum(len(row) - 1 for row in tokens)
            assert num_computed == useful - num_cached


def test_rows_share_states_and_have_the_tokens_of_transformers():
    check_hybrid(HYBRIDS[0], "three snapshots", "cpu")


def test_rows_share_states_beside_entries_of_blocks():
    check_hybrid(ENTRIES, "short chunks", "cpu")


def test_states_beside_entries_stay_on_the_host_where_weights_stream():
    with pytest.raises(ConfigError, match="a state and KV at once"):
        hybrid_engine(ENTRIES, "on the device")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("name", "place"), HYBRIDS_IN_PLACES)
def test_rows_of_every_hybrid_share_states(name, scenario, place):
    check_hybrid(name, scenario, place)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), HYBRIDS_IN_PLACES)
def test_preempted_rows_go_on_from_states_and_keep_their_tokens(name, place):
    prompts = rows_of_three_heads(name)[0].prompts
    params = {"temperature": 0, "max_tokens": 100}
    with hybrid_engine(name, max_num_seqs=1) as engine:
        alone = engine.generate(prompts, params)
    with hybrid_engine(name, place, num_kv_blocks=32) as engine:
        # Rows of one token let the engine expect short ones, so that it overfills the cache.
        engine.generate([[1]] * 20, {"temperature": 0, "max_tokens": 1})
        together = engine.generate(prompts, params)
        assert engine.stats().num_preemptions > 0
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]
    assert sum(row.num_cached_tokens for row in together) > 0
