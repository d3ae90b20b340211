"""An exception in work that belongs to one row ends that row, and no other."""

import pytest

from raymoe.config import EngineConfig
from raymoe.engine import core
from raymoe.engine.engine import Engine
from raymoe.engine.grammars import TokenBitmasks
from raymoe.engine.sampler import Sampler
from raymoe.engine.tokenizer import StopStrings
from tests.unit.engine.fakes import (
    FakeRunner,
    expected_tokens,
    fake_parts,
    small_policy,
)

BAD = [66, 66, 66]
GOOD = [[1], [2, 3], [4] * 40, [5]]
# The bad row takes every path at once: stop strings, log probabilities, penalties, filters.
PARAMS = {
    "temperature": 0.7,
    "top_k": 40,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "stop": ["never"],
    "max_tokens": 5,
}
GREEDY = {"temperature": 0, "max_tokens": 5, "logprobs": 1, "prompt_logprobs": 1}


@pytest.fixture(scope="module")
def engine(tokenizer_directory):
    policy = small_policy()
    parts = fake_parts(FakeRunner(policy.num_kv_blocks), policy, directory=tokenizer_directory)
    with Engine(parts, EngineConfig(linger_s=0.0)) as engine:
        yield engine


def is_bad_row(sampler: Sampler, slots) -> bool:
    samples = [sampler._samples[int(slot)] for slot in slots]
    return any(list(sample.request.prompt) == BAD for sample in samples if sample is not None)


def raise_in(monkeypatch, owner, name, is_bad) -> None:
    """Let a function raise where it works for the bad row, alone or with others."""
    original = getattr(owner, name)

    def broken(*args, **kwargs):
        if is_bad(*args, **kwargs):
            raise RuntimeError(f"{name} broke")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


def of_slots(position):
    return lambda self, *args: is_bad_row(self, args[position])


def wants_bad_tokens(_logits, token_ids, _counts) -> bool:
    return 66 in token_ids


BREAKS = {
    "admit": (Sampler, "admit", lambda _self, sample: list(sample.request.prompt) == BAD),
    "choose": (Sampler, "choose", of_slots(1)),
    "processed": (Sampler, "processed", of_slots(1)),
    "adjust": (Sampler, "_adjust", of_slots(1)),
    "filter": (Sampler, "_filter", of_slots(1)),
    "random": (Sampler, "_random_keys", of_slots(0)),
    "prompt log probabilities": (core, "token_logprobs", wants_bad_tokens),
    "stop strings": (StopStrings, "push", lambda *_: True),
    "stop strings found": (StopStrings, "find", lambda *_: True),
    "stop strings begin": (StopStrings, "__init__", lambda *_args, **_: True),
}


def assert_only_the_bad_row_failed(engine, generations, message) -> None:
    *good, bad = generations
    assert bad.finish_reason == "error"
    assert message in bad.error
    for prompt, generation in zip(GOOD, good, strict=True):
        assert list(generation.token_ids) == expected_tokens(prompt, 5)
        assert len(generation.logprobs) == 5
        assert len(generation.prompt_logprobs) == len(prompt)
    assert engine.stats().num_free_blocks == engine.policy.num_kv_blocks
    assert engine.generate([[9]], GREEDY)[0].error == ""


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("samples", [1, 3])
def test_what_raises_for_one_row_ends_only_that_row(engine, monkeypatch, name, samples):
    owner, function, is_bad = BREAKS[name]
    raise_in(monkeypatch, owner, function, is_bad)
    params = [*[GREEDY] * len(GOOD), PARAMS | {"n": samples}]
    generations = [f.result(60) for f in engine.submit([*GOOD, BAD], params)]
    assert_only_the_bad_row_failed(engine, generations, "broke")


def test_log_probabilities_that_raise_end_only_their_row(engine, monkeypatch):
    def wants_five(_logits, _token_ids, counts) -> bool:
        return 5 in counts

    raise_in(monkeypatch, core, "token_logprobs", wants_five)
    params = [*[GREEDY] * len(GOOD), PARAMS | {"logprobs": 5}]
    generations = [f.result(60) for f in engine.submit([*GOOD, BAD], params)]
    assert_only_the_bad_row_failed(engine, generations, "RuntimeError: token_logprobs broke")


@pytest.mark.parametrize("function", ["begin", "apply"])
def test_masks_that_raise_end_only_their_row(engine, monkeypatch, function):
    if function == "begin":
        raise_in(monkeypatch, TokenBitmasks, "begin", lambda *_: True)
    else:
        raise_in(monkeypatch, TokenBitmasks, "apply", lambda *_: True)
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    params = [*[GREEDY] * len(GOOD), PARAMS | {"min_tokens": 0} | form]
    generations = [f.result(60) for f in engine.submit([*GOOD, BAD], params)]
    assert_only_the_bad_row_failed(engine, generations, f"{function} broke")


@pytest.mark.parametrize(("samples", "logprobs"), [(1, None), (1, 3), (3, 0)])
def test_no_token_to_choose_is_the_error_of_its_row(engine, samples, logprobs):
    form = {"structured_outputs": {"grammar": 'root ::= "a" rest\nrest ::= rest'}}
    params = [
        *[GREEDY] * len(GOOD),
        PARAMS | {"min_tokens": 0} | form | {"n": samples, "logprobs": logprobs},
    ]
    generations = [f.result(60) for f in engine.submit([*GOOD, BAD], params)]
    assert_only_the_bad_row_failed(engine, generations, "allows no next token")


@pytest.mark.parametrize(("samples", "logprobs"), [(1, None), (1, 3), (3, 0)])
def test_nan_logits_of_one_row_are_its_error(tokenizer_directory, samples, logprobs):
    class BrokenRunner(FakeRunner):
        """Gives NaN to the bad row."""

        def _logits(self, context):
            is_bad = context[: len(BAD)].tolist() == BAD
            return super()._logits(context) * (float("nan") if is_bad else 1.0)

    policy = small_policy()
    parts = fake_parts(BrokenRunner(policy.num_kv_blocks), policy, directory=tokenizer_directory)
    with Engine(parts, EngineConfig(linger_s=0.0)) as engine:
        params = [*[GREEDY] * len(GOOD), GREEDY | {"n": samples, "logprobs": logprobs}]
        generations = [f.result(60) for f in engine.submit([*GOOD, BAD], params)]
        assert_only_the_bad_row_failed(engine, generations, "no token can be chosen")


@pytest.mark.parametrize("function", ["_check", "_generation"])
def test_what_raises_while_a_row_finishes_ends_only_that_row(engine, monkeypatch, function):
    def is_bad(_self, sample, *_args, **_options):
        return list(sample.request.prompt) == BAD

    raise_in(monkeypatch, core.EngineCore, function, is_bad)
    params = [GREEDY] * (len(GOOD) + 1)
    generations = [f.result(60) for f in engine.submit([*GOOD, BAD], params)]
    assert_only_the_bad_row_failed(engine, generations, "broke")


def test_rows_fail_in_the_middle_of_their_prompt(engine, monkeypatch):
    raise_in(monkeypatch, core, "token_logprobs", wants_bad_tokens)
    prompts = [*GOOD, [66] * 150]
    generations = [f.result(60) for f in engine.submit(prompts, [GREEDY] * len(prompts))]
    assert_only_the_bad_row_failed(engine, generations, "broke")
