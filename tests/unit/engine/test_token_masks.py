"""Masks against a plain reference, and what happens to a process that a row ends."""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from raymoe.bench.hostile_forms import exploding_outputs, slow_outputs
from raymoe.engine.grammar_server import GrammarServer
from raymoe.engine.grammars import CompileLimits, Grammars
from raymoe.engine.token_masks import MatchLimits, TokenMasks
from raymoe.errors import CapacityError, ConfigError, ExecutionError
from raymoe.processes import descendants
from raymoe.structured import StructuredOutputs
from tests.unit.engine.fakes import EOS, VOCAB_SIZE

NUM_SLOTS = 6


@pytest.fixture(scope="module")
def server(tokenizer_directory):
    server = GrammarServer(tokenizer_directory, VOCAB_SIZE, (EOS,))
    yield server
    server.close()


@pytest.fixture(scope="module")
def grammars(server):
    grammars = Grammars(server, lambda: False, CompileLimits(limit_s=2.0))
    yield grammars
    grammars.close()


@pytest.fixture
def make_masks(server):
    made = []

    def make(limits=None, **options):
        made.append(TokenMasks(server, NUM_SLOTS, VOCAB_SIZE, limits, **options))
        return made[-1]

    yield make
    for masks in made:
        masks.close()


def compiled(grammars, **options):
    return grammars.get(StructuredOutputs.of(options)).result(300)


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


@pytest.mark.parametrize("token_limit_s", [1.0, 1.5e-4, 0.0], ids=["none", "some", "all"])
def test_masks_are_those_of_plain_prefixes_whoever_is_slow(grammars, make_masks, token_limit_s):
    limits = MatchLimits(row_limit_s=0.0, token_limit_s=token_limit_s, step_limit_s=0.05)
    masks, rng = make_masks(limits, slower=make_masks(gives_way=True)), random.Random(5)
    texts = ["".join(rng.choices('ab\n"\\é日', k=rng.randrange(1, 6))) for _ in range(12)]
    plain = [text.encode() for text in texts]
    grammar = compiled(grammars, choice=texts)
    prefixes = [rng.choice(plain)[: rng.randrange(4)] for _ in range(NUM_SLOTS)]
    for slot, prefix in enumerate(prefixes):
        masks.begin(slot, grammar, prefix)
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


def test_special_tokens_and_surrogates_never_fit(grammars, make_masks):
    masks = make_masks()
    masks.begin(0, compiled(grammars, regex=".{4}"), b"\xed")
    assert allowed(masks, 0) == [set(range(0x80, 0xA0))]
    masks.begin(1, compiled(grammars, choice=["<s>"]), b"")
    assert allowed(masks, 1) == [{ord("<")}]


def test_a_slot_is_used_again_and_grammars_are_forgotten(grammars, make_masks):
    masks = make_masks()
    for text in ("ab", "cd", "ab"):
        masks.begin(2, compiled(grammars, choice=[text]), text[:1].encode())
        assert allowed(masks, 2) == [{ord(text[1])}]
        masks.end(2)
        masks.synchronize()


def test_a_row_that_is_too_slow_fails_alone(grammars, make_masks):
    masks = make_masks(MatchLimits(row_limit_s=0.2, token_limit_s=0.001, step_limit_s=0.2))
    masks.begin(0, compiled(grammars, choice=["a" * 60]), b"aa")
    masks.begin(1, compiled(grammars, **slow_outputs()[0]), b"")
    for _ in range(40):
        assert allowed(masks, 0) == [{ord("a")}]
        accept(masks, s0=ord("a"), s1=ord("a"))
        if masks.error(1):
            break
    assert "to match" in str(masks.error(1)) or "for one token" in str(masks.error(1))
    assert allowed(masks, 0, 1) == [{ord("a")}, set()]
    assert masks.error(0) is None


def test_a_slow_row_goes_on_in_a_process_that_gives_way(grammars, make_masks):
    limits = MatchLimits(row_limit_s=0.02, token_limit_s=0.0, step_limit_s=0.2)
    masks = make_masks(limits, slower=make_masks(gives_way=True))
    masks.begin(0, compiled(grammars, choice=["a" * 60]), b"aa")
    masks.begin(1, compiled(grammars, **slow_outputs()[0]), b"")
    assert allowed(masks, 0, 1) == [{ord("a")}, set(b"abcde@")]
    while not masks.error(1):
        accept(masks, s0=ord("a"), s1=ord("a"))
        allowed(masks, 0, 1)
        if os.SCHED_IDLE in {policy for _, policy in states_of_children()}:
            break
    assert masks.error(1) is None
    assert allowed(masks, 0, 1) == [{ord("a")}, set(b"abcde@")]
    masks.end(1)
    masks.begin(1, compiled(grammars, choice=["xy"]), b"x")
    assert allowed(masks, 1) == [{ord("y")}]


def test_a_process_that_gives_way_rests_until_there_is_nothing_else_to_do(
    grammars, make_masks, monkeypatch
):
    monkeypatch.setattr("raymoe.engine.token_masks.SLOW_SHARE", 1e-9)
    masks = make_masks(gives_way=True)
    masks.begin(0, compiled(grammars, choice=["abc"]), b"")
    assert allowed(masks, 0) == [{ord("a")}]
    accept(masks, s0=ord("a"))
    masks.synchronize(1.0)
    assert masks.pending() == {0}
    assert allowed(masks, 0) == [{ord("b")}]


def test_masks_of_other_rows_are_not_waited_for(grammars, make_masks):
    masks = make_masks(slower=make_masks(gives_way=True))
    masks.begin(0, compiled(grammars, choice=["abc"]), b"")
    masks.synchronize(30.0, [1, 2])
    assert masks.pending() == {0}
    masks.synchronize(30.0, [0, 1])
    assert masks.pending() == set()


def test_a_process_that_does_not_read_delays_nobody(grammars, make_masks):
    masks = make_masks()
    masks.begin(0, compiled(grammars, choice=["abc"]), b"")
    assert allowed(masks, 0) == [{ord("a")}]
    large = compiled(grammars, choice=[f"{number:08}" for number in range(12000)])
    assert len(large.data) > 2**19  # more than a pipe holds
    stopped = matching_processes()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    resume = threading.Timer(60.0, lambda: [os.kill(pid, signal.SIGCONT) for pid in stopped])
    resume.start()
    masks.begin(1, large, b"000")
    masks.synchronize()
    assert resume.is_alive()
    assert masks.pending() == {1}
    resume.cancel()
    resume.function()
    assert allowed(masks, 0, 1) == [{ord("a")}, set(b"01")]


def test_the_answer_of_a_row_that_has_ended_is_not_that_of_the_next_in_its_slot(
    grammars, make_masks
):
    masks = make_masks()
    masks.begin(1, compiled(grammars, choice=["ab"]), b"no such text")
    masks.synchronize()  # asks and does not wait
    masks.end(1)
    assert masks.pending() == set()
    masks.begin(1, compiled(grammars, choice=["cd"]), b"")
    assert allowed(masks, 1) == [{ord("c")}]
    assert masks.error(1) is None


def test_a_process_that_ends_is_replaced_and_its_rows_go_on(grammars, make_masks):
    masks = make_masks(MatchLimits(row_limit_s=0.05, token_limit_s=0.0, step_limit_s=0.05))
    masks.begin(0, compiled(grammars, choice=["abcdef"]), b"ab")
    assert allowed(masks, 0) == [{ord("c")}]
    accept(masks, s0=ord("c"))
    # One step of hundreds of tokens takes longer than the row and its process may.
    masks.begin(3, compiled(grammars, **slow_outputs()[1]), b"ab" * 400)
    assert allowed(masks, 0, 3) == [{ord("d")}, set()]
    assert "takes more than 0.05 s for one token" in str(masks.error(3))
    masks.end(3)
    masks.begin(3, compiled(grammars, choice=["xy"]), b"")
    accept(masks, s0=ord("d"))
    assert allowed(masks, 0, 3) == [{ord("e")}, {ord("x")}]


def test_what_explodes_is_refused_with_its_limits_and_once_only(grammars):
    form = StructuredOutputs.of(exploding_outputs()[1])
    assert grammars.get(form) is grammars.get(form)
    with pytest.raises(ConfigError, match="takes more than 2 s or 2048 MiB"):
        grammars.get(form).result(300)


def test_what_is_compiled_soon_but_takes_long_to_write_is_refused(server):
    grammars = Grammars(server, lambda: False, CompileLimits(limit_s=20.0, write_limit_s=1e-3))
    with pytest.raises(ConfigError, match=r"or 0.001 s to write"):
        compiled(grammars, **slow_outputs()[0])
    assert compiled(grammars, choice=["a"]).data
    grammars.close()


@pytest.mark.slow
def test_strings_of_different_long_maximal_lengths_compile_and_match(server, make_masks):
    fields = {
        f"field {length}": {"type": "string", "maxLength": length} for length in (200, 300, 450)
    }
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    grammars = Grammars(server, lambda: False)
    masks = make_masks()
    text = b'{"field 200": "' + b"a" * 199
    masks.begin(0, compiled(grammars, json=schema), text)
    assert ord("a") in allowed(masks, 0)[0]
    accept(masks, s0=ord("a"))
    assert allowed(masks, 0) == [{ord('"')}]
    grammars.close()


def states_of_children():
    """Of each process below this one: a letter, as `ps` shows it, and how it is scheduled."""
    states = set()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            states.add((state, os.sched_getscheduler(pid)))
    return states


def matching_processes():
    """Those that hold the memory of masks: forked for it, not the one that forks."""
    return [
        pid
        for pid in descendants(os.getpid())
        if any(
            "raymoe-masks" in str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()
        )
    ]


@pytest.mark.parametrize("is_busy", [True, False], ids=["rows are computed", "nothing else"])
def test_what_takes_long_to_compile_rests_while_rows_are_computed(server, monkeypatch, is_busy):
    monkeypatch.setattr("raymoe.engine.grammars.REST_S", 0.05)
    grammars = Grammars(server, lambda: is_busy, CompileLimits(limit_s=0.4))
    slow = grammars.get(StructuredOutputs.of(exploding_outputs(variant=1)[2]))
    seen = set()
    while not slow.done():
        seen |= states_of_children()
        time.sleep(0.01)
    assert (("T", os.SCHED_IDLE) in seen) == is_busy
    assert {policy for _, policy in seen} == {os.SCHED_OTHER, os.SCHED_IDLE}
    with pytest.raises(ConfigError, match=r"takes more than 0.4 s or 2048 MiB"):
        slow.result()
    grammars.close()


def test_what_takes_long_to_compile_delays_no_other(server):
    is_busy = True
    grammars = Grammars(server, lambda: is_busy, CompileLimits(limit_s=0.6))
    slow = [
        grammars.get(StructuredOutputs.of(exploding_outputs(variant)[2])) for variant in range(3)
    ]
    assert grammars.get(StructuredOutputs.of({"choice": ["a"]})).result(300).data
    assert not all(future.done() for future in slow)
    is_busy = False
    for future in slow:
        with pytest.raises((ConfigError, CapacityError)):
            future.result(300)
    grammars.close()


def test_grammars_that_are_not_compiled_yet_fail_when_all_is_closed(tokenizer_directory):
    server = GrammarServer(tokenizer_directory, VOCAB_SIZE, (EOS,))
    grammars = Grammars(server, lambda: True)
    forms = [*(exploding_outputs(variant)[2] for variant in range(3)), {"choice": ["a"]}]
    futures = [grammars.get(StructuredOutputs.of(form)) for form in forms]
    server.close()
    grammars.close()
    assert all(isinstance(future.exception(0), ExecutionError) for future in futures)


def test_old_grammars_leave_the_cache(grammars, monkeypatch):
    monkeypatch.setattr("raymoe.engine.grammars.MAX_ENTRIES", 2)
    forms = [StructuredOutputs.of({"choice": [text]}) for text in "pqr"]
    first = [grammars.get(form) for form in forms]
    assert [future.result(60).digest for future in first] == [form.digest for form in forms]
    assert grammars.get(forms[2]) is first[2]
    assert grammars.get(forms[0]) is not first[0]
