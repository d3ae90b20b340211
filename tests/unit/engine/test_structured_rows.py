"""Rows with grammars in the engine: neighbours, samples, preemption, errors, closing."""

import dataclasses
import importlib.util
import json

import pytest

from raymoe.config import EngineConfig
from raymoe.engine import core
from raymoe.engine.engine import Engine
from tests.hostile_forms import malformed_outputs
from tests.unit.engine.fakes import EOS, FakeRunner, expected_tokens, fake_parts, small_policy

RECORD = {
    "json": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{3,9}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "disable_any_whitespace": True,
}


@pytest.fixture(scope="module")
def make_engine(tokenizer_directory):
    engines = []

    def make(*, has_states=False, **policy):
        sizes = small_policy(**policy)
        num_states = sizes.num_state_slots if has_states else 0
        runner = FakeRunner(sizes.num_kv_blocks, num_states=num_states)
        parts = fake_parts(runner, sizes, directory=tokenizer_directory)
        parts = dataclasses.replace(parts, has_states=has_states)
        engines.append(Engine(parts, EngineConfig(linger_s=0.0)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine()


def sampled(**more):
    return {"max_tokens": 150, "temperature": 1.0, "structured_outputs": RECORD} | more


def test_the_text_has_the_form_and_ends_with_it(engine):
    forms = [RECORD, {"regex": "[a-c]{2}[0-9]"}, {"choice": ["yes", "no"]}]
    params = [{"temperature": 0, "max_tokens": 150, "structured_outputs": form} for form in forms]
    record, code, answer = engine.generate(["x"] * 3, params)
    assert set(json.loads(record.text)) == {"name", "age", "tags"}
    assert len(code.text) == 3
    assert answer.text in ("yes", "no")
    for generation in (record, code, answer):
        assert generation.finish_reason == "stop"
        assert generation.token_ids[-1] == EOS


def test_json_objects_and_both_kinds_of_grammars_are_kept(engine):
    forms = [
        {"json_object": True, "disable_any_whitespace": True},
        {"grammar": 'root ::= "a" ("b" | "c") "d"'},
        {"grammar": 'start: "a" ("b" | "c") "d"'},
    ]
    found = engine.generate(["x"] * 3, [{"max_tokens": 60, "structured_outputs": f} for f in forms])
    assert [generation.error for generation in found] == [""] * 3
    assert found[0].text.startswith("{")
    assert {found[1].text, found[2].text} <= {"abd", "acd"}


def test_max_tokens_cuts_a_form_short(engine):
    (generation,) = engine.generate(["x"], sampled(max_tokens=5))
    assert (generation.finish_reason, generation.num_generated_tokens) == ("length", 5)
    assert '{"name":"'.startswith(generation.text)


def test_each_sample_follows_the_grammar_on_its_own(engine):
    (first,) = engine.generate(["x"], sampled(n=6))
    texts = [first.text, *(other.text for other in first.others)]
    assert all(json.loads(text)["age"] <= 130 for text in texts)
    assert len(set(texts)) > 3


def test_neighbours_have_the_tokens_that_they_have_alone(engine):
    prompts = [[i, i + 7] for i in range(12)]
    greedy = {"temperature": 0, "max_tokens": 20}
    params = [sampled() if i % 3 == 0 else greedy for i in range(12)]
    generations = engine.generate(prompts, params)
    for i in range(12):
        if i % 3:
            assert list(generations[i].token_ids) == expected_tokens(prompts[i], 20)


def test_tokens_depend_neither_on_neighbours_nor_on_preemption(make_engine, engine):
    prompts = [f"a row of some length: {i}" for i in range(8)]
    params = [sampled(temperature=i % 2, seed=i, n=1 + i % 3) for i in range(8)]
    alone = [engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    crowded = make_engine(num_kv_blocks=8, max_num_seqs=6)
    crowded.generate([[1]] * 20, {"max_tokens": 2})  # it now expects short rows
    together = crowded.generate(prompts, params)
    assert crowded.stats().num_preemptions > 0
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]
    assert [[o.text for o in g.others] for g in together] == [
        [o.text for o in g.others] for g in alone
    ]


@pytest.mark.parametrize(
    ("max_late", "has_states", "policy"),
    [
        (64, False, {}),
        (1, True, {}),
        (64, True, {"num_kv_blocks": 8, "max_num_seqs": 6}),
    ],
    ids=["all late", "one late", "late and preempted"],
)
def test_rows_whose_masks_are_late_have_the_same_tokens(
    make_engine, engine, monkeypatch, max_late, has_states, policy
):
    monkeypatch.setattr(core, "MAX_LATE", max_late)
    prompts = [f"row {i}" for i in range(6)]
    params = [sampled(seed=i) if i % 2 else {"temperature": 0, "max_tokens": 90} for i in range(6)]
    alone = engine.generate(prompts, params)
    slow = make_engine(has_states=has_states, **policy)
    slow.generate([[1]] * 20, {"max_tokens": 2})  # it now expects short rows
    slow.generate(prompts[1:2], params[1:2])  # its grammar is there when the others come
    computed_before = slow.stats().num_computed_tokens
    synchronize, calls, late = slow._masks.synchronize, [], []

    def synchronize_rarely(patience_s=0.0, slots=None):
        calls.append(patience_s)
        late.append(len(slow._core._late))
        if patience_s is None or len(calls) % 7 == 0:
            synchronize(patience_s, slots)

    def preempt_late() -> None:
        scheduler = slow._core.scheduler
        for slot in slow._core._late if policy and len(calls) % 5 == 0 else ():
            scheduler._preempt(scheduler.sample_of(slot))

    slow._core._replan = preempt_late
    slow._masks.synchronize = synchronize_rarely
    together = slow.generate(prompts, params)
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]
    useful = sum(g.num_input_tokens + g.num_generated_tokens - 1 for g in together)
    computed_again = slow.stats().num_computed_tokens - computed_before - useful
    assert (slow.stats().num_preemptions > 0) == (computed_again > 0) == bool(policy)
    assert max(late) == min(max_late, 3)


@pytest.mark.parametrize(("outputs", "message"), malformed_outputs())
def test_a_malformed_form_is_an_error_row_and_disturbs_no_other(engine, outputs, message):
    params = [{"temperature": 0, "max_tokens": 4}, {"structured_outputs": outputs}]
    good, bad = engine.generate([[1, 2], [3]], params)
    assert list(good.token_ids) == expected_tokens([1, 2], 4)
    assert bad.finish_reason == "error"
    assert bad.error.startswith(("ConfigError: structured_outputs", "UnknownOptionError"))
    assert message in bad.error


def test_strings_hold_control_characters_only_as_json_escapes_them(engine):
    schema = {"type": "string", "minLength": 40, "maxLength": 60}
    forms = [{"json": schema}, {"json": {"type": "string", "pattern": "^a\\nb$"}}]
    params = [{"max_tokens": 400, "temperature": 5.0, "structured_outputs": f} for f in forms]
    text, escaped = engine.generate(["x"] * 2, params)
    assert 40 <= len(json.loads(text.text)) <= 60
    assert json.loads(escaped.text) == "a\nb"


def test_a_form_that_logit_bias_makes_impossible_is_an_error_row(engine):
    params = {"structured_outputs": {"choice": ["a"]}, "logit_bias": {ord("a"): -100.0}}
    (generation,) = engine.generate(["x"], params | {"stop_token_ids": [5]})
    assert generation.text == "a"  # a bias is finite
    params = {"structured_outputs": {"choice": ["aa"]}, "stop_token_ids": [ord("a")]}
    (generation,) = engine.generate(["x"], params)
    assert (generation.finish_reason, generation.text) == ("stop", "")


def test_without_llguidance_the_row_says_how_to_get_it(engine, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    good, bad = engine.generate([[1], [2]], [None, sampled()])
    assert good.error == ""
    assert "structured_outputs needs llguidance: pip install" in bad.error


def test_closing_ends_rows_whose_grammar_is_not_compiled_yet(make_engine):
    engine = make_engine()
    futures = engine.submit(["x"] * 3, sampled())
    engine.close()
    for future in futures:
        with pytest.raises(Exception, match="closed"):
            future.result(30)
