"""How rows end, and what is collected on the way; around the checksum model."""

import pytest

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from tests.unit.engine.fakes import (
    BOS,
    EOS,
    FakeRunner,
    expected_tokens,
    fake_logits,
    fake_parts,
    small_policy,
)

CERTAIN = 100.0  # a logit bias that decides


@pytest.fixture
def make_engine(tokenizer_directory):
    engines = []

    def make(runner=None, **policy):
        sizes = small_policy(**policy)
        runner = runner or FakeRunner(sizes.num_kv_blocks)
        parts = fake_parts(runner, sizes, directory=tokenizer_directory)
        engines.append(Engine(parts, EngineConfig(linger_s=0.0)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def one(engine, prompt, **params):
    (generation,) = engine.generate([prompt], {"temperature": 0, "max_tokens": 8} | params)
    assert generation.error == ""
    return generation


def test_eos_ends_a_row_and_is_in_the_tokens_but_not_in_the_text(make_engine):
    generation = one(make_engine(), [1], logit_bias={EOS: CERTAIN})
    assert (generation.token_ids, generation.text) == ((EOS,), "")
    assert generation.finish_reason == "stop"


def test_ignored_eos_is_a_token_like_others(make_engine):
    generation = one(make_engine(), [1], logit_bias={EOS: CERTAIN}, ignore_eos=True)
    assert (generation.token_ids, generation.finish_reason) == ((EOS,) * 8, "length")


def test_min_tokens_delays_eos(make_engine):
    generation = one(make_engine(), [1], logit_bias={EOS: CERTAIN}, min_tokens=3)
    assert list(generation.token_ids) == [*expected_tokens([1], 3), EOS]


def test_a_stop_token_ends_a_row_and_is_not_in_the_text(make_engine):
    generation = one(make_engine(), "x", logit_bias={65: CERTAIN}, stop_token_ids=[65])
    assert (generation.token_ids, generation.text) == ((65,), "")
    assert generation.finish_reason == "stop"


def test_the_last_of_max_tokens_may_also_be_eos(make_engine):
    generation = one(make_engine(), [1], logit_bias={EOS: CERTAIN}, max_tokens=1)
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_stop_string_across_tokens_cuts_the_text_and_keeps_the_tokens(make_engine, width):
    prompt = [1, 2, 3]
    tokens = expected_tokens(prompt, 200)
    begin = next(i for i in range(4, 200) if all(32 <= t < 127 for t in tokens[i : i + width]))
    stop = bytes(tokens[begin : begin + width]).decode()
    generation = one(make_engine(), prompt, max_tokens=200, stop=["never seen", stop])
    assert list(generation.token_ids) == tokens[: begin + width]
    assert generation.text == bytes(tokens[:begin]).decode(errors="replace")
    assert (generation.finish_reason, generation.num_generated_tokens) == ("stop", begin + width)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
def test_a_stop_string_ends_nothing_before_min_tokens(make_engine, min_tokens):
    generation = one(make_engine(), [1], logit_bias={65: CERTAIN}, stop="A", min_tokens=min_tokens)
    assert generation.token_ids == (65,) * (min_tokens + 1)
    assert generation.text == "A" * min_tokens
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_stop_string_that_is_a_special_token_ends_the_row_as_one(make_engine, min_tokens):
    engine = make_engine()
    biases = {BOS: CERTAIN, 65: CERTAIN / 2}
    generation = one(engine, [1], logit_bias=biases, stop=["x", "<s>"], min_tokens=min_tokens)
    assert generation.token_ids == (65,) * min_tokens + (BOS,)
    assert (generation.text, generation.finish_reason) == ("A" * min_tokens, "stop")
    row = engine.generate(["x"], [{"stop": "<s>\n"}])[0]
    assert row.error.endswith("'<s>', which is not in the text; give it alone, or stop_token_ids "
                              f"[{BOS}]")  # fmt: skip


def test_without_its_stop_string_a_row_ends_by_length(make_engine):
    generation = one(make_engine(), [1], stop="never seen")
    assert (generation.finish_reason, generation.num_generated_tokens) == ("length", 8)


def logprob(context, token):
    return float(fake_logits(context).log_softmax(0)[token])


def test_logprobs_are_of_the_raw_distribution_of_every_generated_token(make_engine):
    prompt = [1, 2]
    generation = one(make_engine(), prompt, logprobs=2, logit_bias={9: 1.0})
    context = list(prompt)
    assert len(generation.logprobs) == 8
    for token, entry in zip(generation.token_ids, generation.logprobs, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(logprob(context, token), abs=1e-5)
        assert entry.top[0][0] == int(fake_logits(context).argmax())
        context.append(token)


@pytest.mark.parametrize("chunk", [7, 300])
def test_prompt_logprobs_cover_the_prompt_whatever_the_chunks(make_engine, chunk):
    prompt = [(7 * i) % 250 for i in range(290)]
    engine = make_engine(max_prefill_chunk_tokens=chunk, max_num_batched_tokens=512)
    generation = one(engine, prompt, prompt_logprobs=1, max_tokens=2)
    first, *rest = generation.prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in rest] == prompt[1:]
    for position in (1, 5, 255, 256, 257, 289):
        expected = logprob(prompt[:position], prompt[position])
        assert rest[position - 1].logprob == pytest.approx(expected, abs=1e-5)
        assert len(rest[position - 1].top) == 1
    assert generation.logprobs is None


def test_prompt_logprobs_of_one_token_are_one_none(make_engine):
    assert one(make_engine(), [5], prompt_logprobs=0).prompt_logprobs == (None,)


def test_logprobs_survive_preemption(make_engine):
    engine = make_engine(num_kv_blocks=8)
    engine.generate([[1]] * 20, {"max_tokens": 1})
    prompts = [[i] * 40 for i in range(1, 6)]
    params = {"temperature": 0, "max_tokens": 60, "logprobs": 0, "prompt_logprobs": 0}
    generations = engine.generate(prompts, params)
    assert engine.stats().num_preemptions > 0
    for prompt, generation in zip(prompts, generations, strict=True):
        assert [e.token_id for e in generation.logprobs] == expected_tokens(prompt, 60)
        assert [e.token_id for e in generation.prompt_logprobs[1:]] == prompt[1:]


def test_samples_of_a_row_differ_and_do_not_depend_on_their_number(make_engine):
    engine = make_engine()
    params = {"temperature": 5.0, "max_tokens": 6}
    (many,) = [f.result(30) for f in engine.submit([[1, 2]], params | {"n": 4}, row_keys=["a"])]
    (single,) = [f.result(30) for f in engine.submit([[1, 2]], params, row_keys=["a"])]
    samples = [many, *many.others]
    assert len({sample.token_ids for sample in samples}) == 4
    assert single.token_ids == many.token_ids


class BrokenRunner(FakeRunner):
    """Gives NaN to sequences that begin with token 66."""

    def _logits(self, context):
        return super()._logits(context) * (float("nan") if int(context[0]) == 66 else 1.0)


def test_nan_in_the_logits_of_a_row_is_an_error_row(make_engine):
    engine = make_engine(BrokenRunner(64))
    good, bad = engine.generate([[1], [66]], {"temperature": 0, "max_tokens": 3})
    assert list(good.token_ids) == expected_tokens([1], 3)
    assert "no token can be chosen: the logits have NaN" in bad.error
    assert engine.stats().num_free_blocks == 64


def test_text_prompts_count_their_bos(make_engine):
    assert one(make_engine(), "abc").num_input_tokens == len([BOS, *b"abc"])
