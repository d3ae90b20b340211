"""Bitmasks against a plain reference, and what happens to a worker that a row ends."""

import json
import os
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch

from raymoe.engine import grammar_source
from raymoe.engine.grammars import GrammarServer, MatchLimits, TokenBitmasks
from raymoe.structured import StructuredOutputs
from raymoe.units import MIB
from tests.hostile_forms import exploding_outputs, slow_outputs
from tests.unit.engine.fakes import BOS, EOS, VOCAB_SIZE
from tests.unit.engine.kills import signal_forked

NUM_SLOTS = 6


@pytest.fixture(scope="module")
def server(tokenizer_directory):
    server = GrammarServer(tokenizer_directory, VOCAB_SIZE, (EOS,))
    yield server
    server.close()


@pytest.fixture
def make_masks(server):
    made = []

    def make(limits=None):
        made.append(TokenBitmasks(server, NUM_SLOTS, VOCAB_SIZE, limits))
        return made[-1]

    yield make
    for masks in made:
        masks.close()


def form(**options):
    return StructuredOutputs.of(options)


def allowed(masks, *slots):
    """The tokens that may come next in each slot, as sets."""
    masks.synchronize(None)
    assert not masks.pending()
    logits = torch.zeros(len(slots), VOCAB_SIZE)
    masks.apply(logits, np.arange(len(slots)), np.array(slots, np.int32))
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logits]


def accept(masks, **tokens):
    slots = np.array([int(slot[1:]) for slot in tokens], np.int32)
    masks.accept(slots, np.array(list(tokens.values()), np.int32))


def expected(texts, prefix):
    """What may follow when the text is one of several: bytes, or EOS where one is complete."""
    rest = [text[len(prefix) :] for text in texts if text.startswith(prefix)]
    return {text[0] if text else EOS for text in rest}


@pytest.mark.parametrize("kind", ["choice", "grammar"])
def test_masks_are_those_of_plain_prefixes(make_masks, kind):
    masks, rng = make_masks(), random.Random(5)
    texts = ["".join(rng.choices('ab\n"\\é日', k=rng.randrange(1, 6))) for _ in range(12)]
    plain = [text.encode() for text in texts]
    outputs = form(choice=texts)
    if kind == "grammar":
        outputs = form(grammar="root ::= " + " | ".join(map(json.dumps, texts)))
    prefixes = [rng.choice(plain)[: rng.randrange(4)] for _ in range(NUM_SLOTS)]
    for slot, prefix in enumerate(prefixes):
        masks.begin(slot, outputs, prefix)
    while any(prefix is not None for prefix in prefixes):
        live = [slot for slot, prefix in enumerate(prefixes) if prefix is not None]
        for slot, found in zip(live, allowed(masks, *live), strict=True):
            assert found == expected(plain, prefixes[slot])
            token = rng.choice(sorted(found))
            if token == EOS:
                masks.end(slot)
                prefixes[slot] = None
            else:
                accept(masks, **{f"s{slot}": token})
                prefixes[slot] += bytes([token])


def test_special_tokens_and_surrogates_never_fit(make_masks):
    masks = make_masks()
    masks.begin(0, form(regex=".{4}"), b"\xed")
    assert allowed(masks, 0) == [set(range(0x80, 0xA0))]
    masks.begin(1, form(choice=["<s>"]), b"")
    assert allowed(masks, 1) == [{ord("<")}]


def test_the_begin_of_reasoning_may_come_first_and_ends_the_constraint(make_masks):
    masks = make_masks()
    for slot in (0, 1):
        masks.begin(slot, form(choice=["ab"]), b"", reasoning_token=BOS)
    assert allowed(masks, 0, 1) == [{ord("a"), BOS}] * 2
    accept(masks, s0=BOS, s1=ord("a"))
    assert masks.pending() == {1}
    assert allowed(masks, 1) == [{ord("b")}]


def test_a_slot_is_used_again_and_grammars_are_forgotten(make_masks):
    masks = make_masks()
    for text in ("ab", "cd", "ab"):
        masks.begin(2, form(choice=[text]), text[:1].encode())
        assert allowed(masks, 2) == [{ord(text[1])}]
        masks.end(2)
        masks.synchronize()


def test_a_row_that_is_too_slow_fails_alone(make_masks):
    masks = make_masks(MatchLimits(row_limit_s=0.05, token_limit_s=0.0))
    masks.begin(0, form(choice=["a" * 600]), b"aa")
    masks.begin(1, form(**slow_outputs()[1]), b"")
    while not masks.error(1):
        assert allowed(masks, 0) == [{ord("a")}]
        accept(masks, s0=ord("a"), s1=ord("a"))
        masks.synchronize(None)
    assert re.search(
        r"takes 0.\d+ s of CPU time to match \d+ tokens; at most 0.05 s are allowed",
        str(masks.error(1)),
    )
    assert masks.error(0) is None
    assert allowed(masks, 0, 1) == [{ord("a")}, set()]


def test_a_lexer_that_reaches_its_limit_is_named(make_masks):
    masks = make_masks()
    masks.begin(0, form(**slow_outputs()[0]), b"")
    for _ in range(60):
        masks.synchronize(None)
        accept(masks, s0=ord("a"))
    assert "cannot be matched: lexer error: too many expressions" in str(masks.error(0))


def test_masks_of_other_rows_are_not_waited_for(make_masks):
    masks = make_masks()
    masks.begin(0, form(choice=["abc"]), b"")
    masks.synchronize(30.0, [1, 2])
    assert masks.pending() == {0}
    masks.synchronize(30.0, [0, 1])
    assert masks.pending() == set()


def test_a_worker_that_does_not_read_delays_nobody(make_masks):
    masks = make_masks()
    masks.begin(0, form(choice=["abc"]), b"")
    assert allowed(masks, 0) == [{ord("a")}]
    large = form(choice=[f"{number:08}" for number in range(20000)])  # more than a pipe holds
    stopped = masks._worker.pid
    os.kill(stopped, signal.SIGSTOP)
    resume = threading.Timer(60.0, lambda: os.kill(stopped, signal.SIGCONT))
    resume.start()
    masks.begin(1, large, b"000")
    masks.synchronize()
    assert resume.is_alive()
    assert masks.pending() == {1}
    resume.cancel()
    resume.function()
    assert allowed(masks, 0, 1) == [{ord("a")}, set(b"01")]


def test_the_answer_of_a_row_that_has_ended_is_not_that_of_the_next_in_its_slot(make_masks):
    masks = make_masks()
    masks.begin(0, form(choice=["ab"]), b"")
    masks.synchronize(None)
    masks.begin(1, form(choice=["ab"]), b"no such text")
    masks.synchronize()  # asks and does not wait
    masks.end(1)
    assert masks.pending() == set()
    masks.begin(1, form(choice=["cd"]), b"")
    assert allowed(masks, 1) == [{ord("c")}]
    assert masks.error(1) is None


def test_a_worker_that_ends_by_one_row_is_replaced_and_the_others_go_on(make_masks):
    masks = make_masks(MatchLimits(step_limit_s=0.02, token_limit_s=0.0))
    masks.begin(0, form(choice=["abcdef"]), b"ab")
    assert allowed(masks, 0) == [{ord("c")}]
    accept(masks, s0=ord("c"))
    masks.begin(3, form(**slow_outputs()[1]), b"a" * 400)
    assert allowed(masks, 0, 3) == [{ord("d")}, set()]
    assert "takes more than 0.02 s of CPU time or 4096 MiB to match one token" in str(
        masks.error(3)
    )
    masks.end(3)
    masks.begin(3, form(choice=["xy"]), b"")
    accept(masks, s0=ord("d"))
    assert allowed(masks, 0, 3) == [{ord("e")}, {ord("x")}]


def test_what_explodes_is_refused_with_its_limits_and_compiled_once_only(make_masks, monkeypatch):
    pids = signal_forked(monkeypatch, ())
    masks = make_masks(MatchLimits(compile_limit_s=0.3))
    for _ in range(3):
        masks.begin(0, form(choice=["ab"]), b"")
        masks.begin(1, form(**exploding_outputs()[0]), b"")
        assert allowed(masks, 0, 1) == [{ord("a")}, set()]
        assert "takes more than 0.3 s of CPU time or 4096 MiB to compile" in str(masks.error(1))
        masks.end(0)
        masks.end(1)
    assert len(pids) == 2


def test_memory_that_runs_out_is_the_error_of_its_row(make_masks):
    masks = make_masks(MatchLimits(max_memory_bytes=8 * MIB))
    masks.begin(0, form(choice=["ab"]), b"")
    assert allowed(masks, 0) == [{ord("a")}]
    masks.begin(1, form(**exploding_outputs()[1]), b"")
    assert allowed(masks, 0, 1) == [{ord("a")}, set()]
    assert "8 MiB" in str(masks.error(1))


def test_rows_wait_for_a_server_that_starts_while_others_need_not(tokenizer_directory):
    server = GrammarServer(tokenizer_directory, VOCAB_SIZE, (EOS,))
    masks = TokenBitmasks(server, NUM_SLOTS, VOCAB_SIZE)
    masks.begin(0, form(choice=["ab"]), b"")
    begin_s = time.monotonic()
    masks.synchronize()
    assert time.monotonic() - begin_s < 0.2
    assert masks.pending() == {0}
    server.close()
    masks.synchronize(None)
    assert "the engine is closed" in str(masks.error(0))
    masks.close()


def test_only_the_worker_reads_a_grammar_and_says_what_is_refused(make_masks, monkeypatch):
    def read_here(*_):
        raise AssertionError("a grammar was read in the process of the engine")

    for name in ("exact_source", "exact_schema", "exact_regex", "lark_of_grammar"):
        monkeypatch.setattr(grammar_source, name, read_here)
    masks = make_masks()
    refused = {"regex": "(?=a)b"}, {"json": {"contains": {}}}, {"grammar": "root ::= absent"}
    for slot, options in enumerate(refused):
        masks.begin(slot, form(**options), [])
    masks.begin(3, form(regex="ab"), [])
    assert allowed(masks, 3) == [{ord("a")}]
    messages = [str(masks.error(slot)) for slot in range(3)]
    for message, word in zip(messages, ("look-around", "'contains' at #", '"absent"'), strict=True):
        assert message.startswith("structured_outputs has a ")
        assert word in message
    masks.end(0)
    masks.begin(0, form(**refused[0]), [])  # known by now
    assert str(masks.error(0)) == messages[0]


@pytest.mark.parametrize("source", ["start: a\n" + "\n" * 200_000, '"' + r"\"" * 100_000])
def test_a_long_grammar_is_read_in_time(make_masks, source):
    masks = make_masks()
    masks.begin(0, form(grammar=source), [])
    masks.synchronize(None)
    assert "more than" not in str(masks.error(0))  # no limit was reached
