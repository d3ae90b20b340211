"""Rows and tokenizers that panic, abort, grow or never end; and processes that others end."""

import json
import os
import shutil
import signal
import threading
import time

import psutil
import pytest
from transformers import AutoTokenizer

from raymoe.engine import tokenizer as tokenizer_module
from raymoe.engine.engine import Engine
from raymoe.engine.load import EngineParts
from raymoe.engine.tokenizer import DecodeError, Room, Text, Tokenizer
from raymoe.engine.workers import process
from raymoe.errors import CheckpointError, ConfigError, ExecutionError
from raymoe.units import MIB
from tests.unit.engine.fakes import (
    BOS,
    EOS,
    QUICK,
    VOCAB_SIZE,
    FakeRunner,
    expected_tokens,
    fake_parts,
    small_policy,
)
from tests.unit.engine.tokenizers_like import write_like

GREEDY = {"temperature": 0, "max_tokens": 4}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": False}  # fmt: skip
# Gives up by a panic, as the expression of GPT-4 does at ten million spaces.
PANIC = {
    "type": "Split",
    "pattern": {"Regex": "(?:q|qq)+(?:z|w)"},
    "behavior": "Isolated",
    "invert": False,
}
QS = "q" * 60 + "xw"
# One q becomes 10 ** 15.
MULTIPLY = [{"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 1000}] * 5
GROW = {"type": "Sequence", "normalizers": MULTIPLY}


@pytest.fixture
def make(tokenizer_directory, tmp_path):
    """Byte tokenizers with changes to tokenizer.json."""
    tokenizers = []

    def make_one(**changes) -> Tokenizer:
        directory = tmp_path / f"model{len(tokenizers)}"
        shutil.copytree(tokenizer_directory, directory)
        path = directory / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        tokenizers.append(Tokenizer(directory, VOCAB_SIZE))
        return tokenizers[-1]

    yield make_one
    for tokenizer in tokenizers:
        tokenizer.close()


@pytest.fixture
def make_engine():
    engines = []

    def make_one(tokenizer) -> Engine:
        policy = small_policy()
        parts = EngineParts(
            runner=FakeRunner(policy.num_kv_blocks),
            policy=policy,
            tokenizer=tokenizer,
            vocab_size=VOCAB_SIZE,
            max_model_len=512,
            eos_token_ids=(EOS,),
            num_threads=1,
        )
        engines.append(Engine(parts, QUICK))
        return engines[-1]

    yield make_one
    for engine in engines:
        engine.close()


def ids_of(tokenizer, texts):
    return tokenizer.encode_all([Text(text, True, Room()) for text in texts])


def assert_only_the_middle_failed(results, message) -> None:
    good, bad, other = results
    assert (good.tolist(), other.tolist()) == ([BOS, *b"good"], [BOS, *b"other"])
    assert type(bad) is ConfigError
    assert message in str(bad)


def test_a_panic_is_the_error_of_its_row(make, make_engine):
    tokenizer = make(pre_tokenizer={"type": "Sequence", "pretokenizers": [PANIC, BYTE_LEVEL]})
    engine = make_engine(tokenizer)
    tokenizer.load()
    process = tokenizer._encoder._process
    good, bad, other = engine.generate(["good", QS, "other"], GREEDY)
    assert bad.error.startswith("ConfigError: the prompt cannot be tokenized: PanicException")
    assert list(good.token_ids) == expected_tokens([BOS, *b"good"], 4)
    assert list(other.token_ids) == expected_tokens([BOS, *b"other"], 4)
    assert tokenizer._encoder._process is process


def test_a_normalizer_that_takes_all_memory_harms_only_its_row(make, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "TOKENIZER_MAX_MEMORY_BYTES", 256 * MIB)
    results = ids_of(make(normalizer=GROW), ["good", "q", "other"])
    assert_only_the_middle_failed(results, "for lack of memory: it may have 256 MiB")


def test_a_normalizer_that_never_ends_harms_only_its_row(make, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "REQUEST_LIMIT_S", 0.2)
    results = ids_of(make(normalizer=GROW), ["good", "q", "other"])
    assert_only_the_middle_failed(results, "the tokenizer took more than 0.2")


@pytest.mark.slow
def test_a_tokenizer_that_explodes_for_every_text_is_not_loaded(make, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "TOKENIZER_MAX_MEMORY_BYTES", 256 * MIB)
    every = [{"type": "Prepend", "prepend": "q"}, *MULTIPLY]
    tokenizer = make(normalizer={"type": "Sequence", "normalizers": every})
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .* for lack of memory"):
        tokenizer.load()


def test_decoders_that_panic_or_grow_harm_only_their_row(make, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "TOKENIZER_MAX_MEMORY_BYTES", 256 * MIB)
    panic = {"type": "Replace", "pattern": {"Regex": "(?:z|zz)+(?:x|w)"}, "content": ""}
    decoders = [BYTE_LEVEL, {"type": "Fuse"}, panic, *MULTIPLY]
    tokenizer = make(decoder={"type": "Sequence", "decoders": decoders})
    bad = [[*b"z" * 60, *b"qw"], [*b"aqa"]]
    texts = tokenizer.decode_all([[*b"good"], *bad, [*b"other"]])
    assert (texts[0], texts[3]) == ("good", "other")
    assert [type(text) for text in texts[1:3]] == [DecodeError, DecodeError]
    assert "PanicException" in str(texts[1])
    assert "for lack of memory" in str(texts[2])


@pytest.mark.slow
def test_ten_million_spaces_are_the_error_of_their_row(tmp_path):
    tokenizer = Tokenizer(write_like("llama3", tmp_path), 1 << 16)
    good, bad, other = ids_of(tokenizer, ["good", " " * 10_000_010 + "x", "other"])
    assert type(bad) is ConfigError
    assert "PanicException: Onig: Regex search error: retry-limit-in-match over" in str(bad)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (good.tolist(), other.tolist()) == (theirs.encode("good"), theirs.encode("other"))
    tokenizer.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_that_others_kill_or_stop_harm_no_row(make, make_engine, monkeypatch, number):
    monkeypatch.setattr(process, "POLL_S", 0.05)
    monkeypatch.setattr(process, "MAX_IDLE_POLLS", 6)
    tokenizer = make()
    engine = make_engine(tokenizer)
    tokenizer.load()
    hit: set[int] = set()

    def send_after_a_signal(worker, data):
        if worker._is_loaded and id(worker) not in hit:
            hit.add(id(worker))
            os.kill(worker._process.pid, number)
        send(worker, data)

    send = process.WorkerProcess._send
    monkeypatch.setattr(process.WorkerProcess, "_send", send_after_a_signal)
    prompts = [f"row {row}" for row in range(100)]
    stops = GREEDY | {"stop": ["never"]}
    chat = [{"role": "user", "content": "x"}]
    *generations, last = engine.generate([*prompts, chat], [*[GREEDY, stops] * 50, GREEDY])
    for prompt, generation in zip(prompts, generations, strict=True):
        assert list(generation.token_ids) == expected_tokens([BOS, *prompt.encode()], 4)
        assert generation.text == bytes(generation.token_ids).decode(errors="replace")
    assert last.error == ""
    assert {id(tokenizer._encoder), id(tokenizer._decoder)} <= hit


def test_both_processes_give_what_transformers_gives(tmp_path):
    tokenizer = Tokenizer(write_like("llama2", tmp_path), 1 << 16)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    texts = [f"Grüße {n}, naïve  语言 ({n * 7919})\n" * (1 + n % 5) for n in range(600)]
    texts.append("the same words again " * 10_000)  # in pieces
    expected = theirs(texts)["input_ids"]
    assert [ids.tolist() for ids in ids_of(tokenizer, texts)] == expected
    assert tokenizer.decode_all(expected) == [
        theirs.decode(ids, skip_special_tokens=True) for ids in expected
    ]
    os.kill(tokenizer._encoder._process.pid, signal.SIGKILL)  # the next one starts without files
    assert [ids.tolist() for ids in ids_of(tokenizer, texts[:9])] == expected[:9]
    tokenizer.close()


def test_decoding_waits_for_no_encoding_and_short_texts_for_no_whole_long_one(make):
    tokenizer = make()
    tokenizer.load()
    with tokenizer._encoder._turns:
        assert tokenizer.decode([*b"text"]) == "text"
    order: list[str] = []
    ask = tokenizer._encoder.ask
    thread = threading.Thread(target=lambda: tokenizer.encode("short"))

    def noting(message, blob, **limits):
        is_short = message["num_bytes"] == [5]
        order.append("short" if is_short else "piece")
        if len(order) == 1:  # a caller comes while the first piece has its turn
            with tokenizer._encoder._turns:
                thread.start()
                while len(tokenizer._encoder._turns._queue) < 2:
                    time.sleep(0.001)
        return ask(message, blob, **limits)

    tokenizer._encoder.ask = noting
    tokenizer.encode("word " * 100_000)
    thread.join()
    assert order == ["piece", "short", *["piece"] * 7]


def test_a_text_of_12_mb_is_refused_unread_while_short_rows_answer(make, make_engine):
    tokenizer = make()
    engine = make_engine(tokenizer)
    tokenizer.load()
    sent: list[int] = []
    ask = tokenizer._encoder.ask

    def noting(message, blob, **limits):
        sent.append(len(blob))
        return ask(message, blob, **limits)

    tokenizer._encoder.ask = noting
    *rows, long = engine.generate(["short"] * 8 + ["word " * 2_400_000], GREEDY)
    assert "ConfigError: the prompt has 12000000 bytes; at most 511 tokens" in long.error
    assert {row.error for row in rows} == {""}
    assert sum(sent) == 8 * len("short")


def test_slots_are_free_before_texts_are_there(tokenizer_directory, monkeypatch):
    policy = small_policy(max_num_seqs=2)
    parts = fake_parts(FakeRunner(policy.num_kv_blocks), policy, directory=tokenizer_directory)
    decode_all, is_open = parts.tokenizer.decode_all, threading.Event()

    def late(sequences):
        assert is_open.wait(60)
        texts = decode_all(sequences)
        return [DecodeError("broken") if ids[0] == bad else text
                for ids, text in zip(sequences, texts, strict=True)]  # fmt: skip

    bad = expected_tokens([3], 1)[0]
    monkeypatch.setattr(parts.tokenizer, "decode_all", late)
    with Engine(parts, QUICK) as engine:
        futures = engine.submit([[row] for row in range(9)], GREEDY | {"n": 2})
        while engine.stats().num_generated_tokens < 9 * 2 * 4:
            time.sleep(0.005)
        assert not any(future.done() for future in futures)
        is_open.set()
        for row, future in enumerate(futures):
            generation = future.result(30)
            for sample in (generation, *generation.others):
                is_bad = sample.error != ""
                assert is_bad == (expected_tokens([row], 1)[0] == bad)
                text = bytes(expected_tokens([row], 4)).decode(errors="replace")
                assert sample.text == ("" if is_bad else text)


def test_closing_hands_out_the_rows_that_are_over(tokenizer_directory, monkeypatch):
    policy = small_policy()
    parts = fake_parts(FakeRunner(policy.num_kv_blocks), policy, directory=tokenizer_directory)
    decode_all, is_open = parts.tokenizer.decode_all, threading.Event()
    monkeypatch.setattr(
        parts.tokenizer, "decode_all", lambda ids: decode_all(ids) if is_open.wait(60) else []
    )
    engine = Engine(parts, QUICK)
    futures = engine.submit([[row] for row in range(4)], GREEDY)
    while engine.stats().num_generated_tokens < 16:
        time.sleep(0.005)
    closer = threading.Timer(0.1, is_open.set)
    closer.start()
    engine.close()
    closer.join()
    for row, future in enumerate(futures):
        assert list(future.result(0).token_ids) == expected_tokens([row], 4)


def test_a_callback_may_close_the_engine_or_exit(tokenizer_directory):
    policy = small_policy()
    parts = fake_parts(FakeRunner(policy.num_kv_blocks), policy, directory=tokenizer_directory)
    engine = Engine(parts, QUICK)

    def leave(_future):
        raise SystemExit

    first, second = engine.submit([[1], [2]], GREEDY)
    first.add_done_callback(leave)
    assert second.result(30).error == ""
    (third,) = engine.submit([[3]], GREEDY)
    third.add_done_callback(lambda _future: engine.close())
    assert third.result(30).error == ""
    engine._detokenizer._thread.join(30)
    assert not engine._detokenizer._thread.is_alive()
    with pytest.raises(ExecutionError, match="closed"):
        engine.generate([[4]], GREEDY)


def test_no_process_is_left_after_close(make, make_engine):
    before = set(psutil.Process().children(recursive=True))
    engine = make_engine(make())
    engine.generate(["x", [{"role": "user", "content": "x"}]], GREEDY)
    assert len(set(psutil.Process().children(recursive=True)) - before) == 3
    engine.close()
    assert set(psutil.Process().children(recursive=True)) <= before
