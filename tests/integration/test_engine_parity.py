"""The engine against transformers: float32, greedy, the same tokens however they are computed."""

import numpy as np
import pytest

from raymoe.config import STATE_DTYPES, EngineConfig
from raymoe.engine.engine import Engine
from raymoe.plan.policy import Policy
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from tests.parity.cases import get_case
from tests.parity.configurations import CONFIGURATIONS
from tests.parity.oracle import ROWS

QUICK_PROMPTS, QUICK_TOKENS = 8, 20
# Layers that slide, and layers with states.
QUICK = (
    "mixtral: sliding window, 5 experts, top-3",
    "qwen3_next: convolution of 2, one KV head, top-3",
)


class Case:
    """A checkpoint, its prompts, and what transformers makes of them."""

    def __init__(self, name: str, num_prompts: int, max_tokens: int) -> None:
        case = get_case(name)
        self.directory, self.max_tokens = case.directory, max_tokens
        self.prompts = case.reference.prompts[:num_prompts]
        self.expected = [row[:max_tokens] for row in case.reference.tokens[:num_prompts]]

    def engine(
        self,
        *,
        dtype: str = "float32",
        kv_dtype: str = "auto",
        state_dtype: str = "float32",
        **policy: int,
    ) -> Engine:
        sizes = {
            "max_num_seqs": 32,
            "max_num_batched_tokens": 4096,
            "max_prefill_chunk_tokens": 4096,
            "num_kv_blocks": 200,
        }
        config = EngineConfig(
            dtype=dtype,
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
            policy=Policy(**(sizes | policy)),
            linger_s=0.0,
        )
        return Engine.from_pretrained(self.directory, config)

    def assert_agrees(self, engine: Engine, order=None) -> None:
        order = range(len(self.prompts)) if order is None else order
        params = {"temperature": 0, "max_tokens": self.max_tokens}
        generations = engine.generate([self.prompts[row] for row in order], params)
        for row, generation in zip(order, generations, strict=True):
            assert generation.error == ""
            assert list(generation.token_ids) == self.expected[row], f"prompt {row}"


def check_every_way(name: str, num_prompts: int, max_tokens: int) -> None:
    check_steps(Case(name, num_prompts, max_tokens))
    check_preemption(Case(name, ROWS.num_prompts, max_tokens))


def check_steps(case: Case, **dtypes: str) -> None:
    with case.engine(**dtypes) as engine:  # one batch, any order
        case.assert_agrees(engine)
        case.assert_agrees(engine, order=range(len(case.prompts))[::-1])
    with case.engine(**dtypes, max_num_seqs=1) as engine:  # one row at a time
        case.assert_agrees(engine)
    small = {"max_prefill_chunk_tokens": 7, "max_num_batched_tokens": 40, "num_kv_blocks": 24}
    with case.engine(**dtypes, **small, steady_admission=True) as engine:
        case.assert_agrees(engine)


def check_preemption(case: Case, **dtypes: str) -> None:
    def needs_more_blocks(row: int) -> bool:
        """Whether a row takes another block after its first token."""
        length = len(case.prompts[row])
        return length // KV_BLOCK_TOKENS < (length + case.max_tokens - 1) // KV_BLOCK_TOKENS

    with case.engine(**dtypes, num_kv_blocks=8, max_num_batched_tokens=512) as engine:
        # Rows of one token let the engine expect short ones, so that it overfills the cache. Which
        # rows are clear differs from model to model: those that grow come first and together.
        engine.generate([[1]] * 20, {"temperature": 0, "max_tokens": 1})
        rows = range(len(case.prompts))
        case.assert_agrees(engine, order=sorted(rows, key=needs_more_blocks, reverse=True))
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("name", QUICK)
def test_tokens_are_those_of_transformers_however_they_are_computed(name):
    check_every_way(name, QUICK_PROMPTS, QUICK_TOKENS)


def test_int8_keys_and_values_give_the_same_tokens_however_they_are_computed():
    # In bfloat16: torch's products of float32 differ in their last bits from step to step, which
    # rounding to int8 makes visible.
    dtype = "bfloat16"
    case = Case(QUICK[0], ROWS.num_prompts, QUICK_TOKENS)
    params = {"temperature": 0, "max_tokens": case.max_tokens}
    found = {}
    for kv_dtype in ("auto", "int8"):
        with case.engine(dtype=dtype, kv_dtype=kv_dtype) as engine:
            rows = engine.generate(case.prompts, params | {"logprobs": 0})
        case.expected = [list(row.token_ids) for row in rows]
        found[kv_dtype] = np.array([row.logprobs[0].logprob for row in rows])
    assert 1e-4 < np.median(np.abs(found["int8"] - found["auto"])) < 0.1
    check_steps(case, dtype=dtype, kv_dtype="int8")
    check_preemption(case, dtype=dtype, kv_dtype="int8")


def test_states_of_bfloat16_reach_the_engine():
    case = Case(QUICK[-1], QUICK_PROMPTS, QUICK_TOKENS)
    params = {"temperature": 0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
    found = []
    for state_dtype in STATE_DTYPES:
        with case.engine(state_dtype=state_dtype) as engine:
            rows = engine.generate(case.prompts, params)
        found.append(np.array([[one.logprob for one in row.logprobs[:4]] for row in rows]))
    error = np.abs(found[1] - found[0])
    assert not error[:, 0].any()  # the prompt was one step, which rounds at its end
    assert 1e-5 < np.median(error[:, 1:]) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", [configuration.name for configuration in CONFIGURATIONS])
def test_many_prompts_of_every_configuration(name):
    check_every_way(name, ROWS.num_prompts, ROWS.max_new_tokens)
