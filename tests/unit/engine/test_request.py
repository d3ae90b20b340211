"""Row keys, which random numbers depend on, and rows that ask for too much."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.config import EngineConfig, SamplingParams
from raymoe.engine.request import InputProcessor, hash_key
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import ConfigError


def make_input_processor(directory, *, max_model_len=64, **config) -> InputProcessor:
    return InputProcessor(
        Tokenizer(directory, 100),
        vocab_size=100,
        max_model_len=max_model_len,
        num_kv_blocks=max_model_len // 8,
        has_eos=True,
        config=EngineConfig(**config),
    )


@given(st.one_of(st.integers(), st.text(), st.binary(), st.floats(), st.none(), st.booleans()))
def test_keys_have_63_bits(value):
    assert 0 <= hash_key(value) < 2**63


def test_keys_of_different_types_differ_and_those_of_equal_integers_do_not():
    assert hash_key(5) == hash_key(np.int64(5))
    assert len({hash_key(value) for value in (5, "5", b"5", 5.5)}) == 4


def test_without_a_key_tokens_and_parameters_decide(tmp_path):
    input_processor = make_input_processor(tmp_path)

    def key(prompt, **params):
        return input_processor.build(prompt, SamplingParams(**params), None).row_key

    assert key([1, 2]) == key([1, 2])
    assert key([1, 2]) != key([1, 3])
    assert key([1, 2]) != key([1, 2], temperature=0.5)
    assert key([1], logit_bias={1: 1, 2: 2}) == key([1], logit_bias={2: 2, 1: 1})


def test_a_given_key_is_independent_of_the_prompt(tmp_path):
    input_processor = make_input_processor(tmp_path)
    assert (
        input_processor.build([1], None, "id").row_key
        == input_processor.build([2], {"n": 2}, "id").row_key
    )


def test_the_seed_is_the_rows_or_the_engines(tmp_path):
    input_processor = make_input_processor(tmp_path, seed=7)
    assert input_processor.build([1], None, None).seed == 7
    assert input_processor.build([1], {"seed": 3}, None).seed == 3


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({"logprobs": 63, "max_tokens": 257, "n": 64}, 64 * 257 * 64),
        ({"prompt_logprobs": 61, "max_tokens": 1}, 17_000 * 62),
        ({"logprobs": 9, "prompt_logprobs": 60, "max_tokens": 1159}, 1159 * 10 + 17_000 * 61),
    ],
)
def test_a_row_cannot_ask_for_more_log_probabilities_than_memory_allows(tmp_path, params, count):
    input_processor = make_input_processor(tmp_path, max_model_len=1 << 15)
    with pytest.raises(ConfigError, match=f"may need {count} log probabilities; at most 1048576"):
        input_processor.build([1] * 17_000, params, None)
    fewer = {name: value - 1 for name, value in params.items() if "logprobs" in name}
    assert input_processor.build([1] * 17_000, params | fewer, None).max_tokens_total
    assert input_processor.build([1], params | {"n": 1, "max_tokens": 1 << 20, "logprobs": 0}, None)


def test_equal_rows_of_a_call_have_keys_of_their_own_and_the_first_that_of_one_alone(tmp_path):
    input_processor = make_input_processor(tmp_path)

    def keys(prompts, row_keys=None, occurrences=None):
        none = [None] * len(prompts)
        rows = [prompts, none, row_keys or none, occurrences or none]
        return [request.row_key for _, request in input_processor.build_all(*rows)]

    one, other = keys([[1, 2]])[0], keys([[3]])[0]
    several = keys([[1, 2], [3], [1, 2], [1, 2]])
    assert several[:2] == [one, other]
    assert len(set(several)) == 4
    assert keys([[1, 2], [1, 2]]) == several[0:3:2]
    assert keys([[1, 2]], occurrences=[2]) == several[3:]
    assert keys([[1, 2], [1, 2]], occurrences=[0, 0]) == [one, one]
    assert len(set(keys([[1], [1]], row_keys=["id", "id"]))) == 1
