"""Rows of tasks: their tokens, and that long cells are refused, cut or encoded once."""

import random

import numpy as np
import pytest

from raymoe.engine.tasks.rows import (
    MAX_LABEL_CHARACTERS,
    MAX_LABELS,
    RowEncoder,
    TaskOptions,
    TaskRow,
    check_labels,
)
from raymoe.engine.tokenizer import Room, Text
from raymoe.errors import ConfigError
from tests.unit.engine.fakes import kept_tokenizer

LABELS = ("yes", " no", "may be ", "Zürich")
MAX_TOKENS = 9000


@pytest.fixture(scope="module")
def tokenizer(tokenizer_directory):
    return kept_tokenizer(tokenizer_directory)


@pytest.fixture
def sent(tokenizer, monkeypatch):
    """Characters of the texts that are encoded."""
    sizes, encode = [], tokenizer._encode_batch

    def counted(texts, num_tries):
        sizes.extend(len(text.text) for text in texts)
        return encode(texts, num_tries)

    monkeypatch.setattr(tokenizer, "_encode_batch", counted)
    return sizes


def encode(tokenizer, row, truncates="error", **options):
    options = TaskOptions(**{"task": "classify", "labels": LABELS, **options})
    encoder = RowEncoder(
        tokenizer, options, MAX_TOKENS, "none" if options.task == "embed" else "lm"
    )
    (found,) = encoder.encode([row], truncates=truncates)
    if isinstance(found, Exception):
        raise found
    return found


def words(count, seed=0):
    choose = random.Random(seed)
    return " ".join(choose.choices(["the", "sum", "is", "42", "Grüße", "a\n\nb", "x."], k=count))


@pytest.mark.parametrize("end", ["", " ", "\n", " the", " 42", "é"])
@pytest.mark.parametrize("count", [3, 1200])
def test_labels_after_a_prompt_have_the_tokens_of_the_whole_texts(tokenizer, sent, count, end):
    prompt = words(count) + end
    found = encode(tokenizer, TaskRow(prompt, LABELS))
    if count > 3:
        assert sum(sent) < len(prompt) + 2100 * (1 + len(LABELS))  # the begin once
    before = len(tokenizer.encode(prompt.rstrip()))
    assert found.labels == LABELS
    for label, (tokens, targets, _) in zip(LABELS, found.parts, strict=True):
        whole = tokenizer.encode(prompt + label)
        assert list(tokens) == list(whole[:-1])
        assert list(targets) == list(whole[before:])


def test_the_left_of_a_long_prompt_is_cut_before_it_is_encoded(tokenizer, sent):
    prompt = words(400_000)
    found = encode(tokenizer, TaskRow(prompt, LABELS), truncates="truncate_left")
    assert sum(sent) < 200_000 < len(prompt)
    expected = tokenizer.encode(prompt[-50_000:] + LABELS[0])
    expected = [expected[0], *expected[-MAX_TOKENS:-1]]  # with the BOS token
    assert list(found.parts[0][0]) == expected
    assert found.num_input_tokens == MAX_TOKENS


@pytest.mark.parametrize(
    ("options", "continuations"),
    [
        ({}, LABELS),
        ({"task": "score", "labels": None}, ("x",)),
        ({"task": "embed", "labels": None}, None),
    ],
)
@pytest.mark.parametrize("truncates", ["error", "truncate_right"])
def test_a_cell_of_megabytes_is_refused_or_cut_unread(
    tokenizer, sent, options, continuations, truncates
):
    row = TaskRow("word " * 4_000_000, continuations)
    if truncates == "error" or continuations:
        with pytest.raises(ConfigError, match=r"prompt has .*(bytes|tokens)"):
            encode(tokenizer, row, truncates, **options)
    else:
        assert encode(tokenizer, row, truncates, **options).num_input_tokens == MAX_TOKENS
    assert sum(sent) < 300_000


def test_text_without_a_certain_border_is_cut_before_it_is_encoded(tokenizer, sent, monkeypatch):
    tokenizer.load()
    monkeypatch.setitem(tokenizer._facts, "joint", None)
    for how in ("truncate_left", "truncate_right"):
        text = Text("a" * 10_000_000, False, Room(max_tokens=100, on_too_long=how))
        (tokens,) = tokenizer.encode_all([text])
        assert len(tokens) == 100
    assert sum(sent) < 100_000


def test_a_prompt_of_token_ids_is_not_encoded(tokenizer, sent):
    ids = [0, *range(40)]
    for prompt in (ids, np.array(ids, np.int64)):
        found = encode(tokenizer, TaskRow(prompt, LABELS))
        assert list(found.parts[0][0]) == [*ids, *b"ye"]
    assert sum(sent) == 2 * sum(map(len, LABELS))


@pytest.mark.parametrize("prompt", [[0], np.array([0]), (0,)])
def test_the_token_0_is_a_prompt(tokenizer, prompt):
    found = encode(tokenizer, TaskRow(prompt, ([5, 6],)), task="score", labels=None)
    assert [list(part) for part in found.parts[0][:2]] == [[0, 5], [5, 6]]


@pytest.mark.parametrize("prompt", [None, "", [], (), np.array([], np.int64)])
def test_no_prompt_makes_a_document(tokenizer, prompt):
    found = encode(tokenizer, TaskRow(prompt, ([5, 6, 7],)), task="score", labels=None)
    assert list(found.parts[0][1]) == [6, 7]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([str(number) for number in range(MAX_LABELS + 1)], "has 1025 texts"),
        (["a", "b" * (MAX_LABEL_CHARACTERS + 1)], "4097 characters"),
        (["a", "\ud800"], "not valid Unicode"),
        (b"ab", "takes a list of texts"),
        ({"a": 1, "b": 2}, "takes a list of texts"),
    ],
)
def test_labels_are_bounded(labels, message):
    with pytest.raises(ConfigError, match=message):
        check_labels(labels)


def test_long_prompts_with_many_labels_are_refused(tokenizer):
    row = TaskRow(list(range(200)) * 40, tuple(map(str, range(MAX_LABELS))))
    assert len(encode(tokenizer, row).parts) == MAX_LABELS
    with pytest.raises(ConfigError, match="together may have"):
        encode(tokenizer, TaskRow("é" * 40_000, row.continuations), "truncate_left")


def test_a_document_of_too_many_windows_is_refused(tokenizer):
    row = TaskRow(None, ([1] * 70_000,))
    with pytest.raises(ConfigError, match="raise stride"):
        encode(tokenizer, row, task="score", labels=None, stride=1)


def test_a_text_that_breaks_the_tokenizer_is_the_error_of_its_row(tokenizer, monkeypatch):
    encode_all = tokenizer.encode_all

    def broken(texts):
        if any("bad" in text.text for text in texts):
            raise UnicodeError("broken")
        return encode_all(texts)

    monkeypatch.setattr(tokenizer, "encode_all", broken)
    encoder = RowEncoder(tokenizer, TaskOptions(task="classify", labels=LABELS), MAX_TOKENS, "lm")
    rows = [TaskRow(prompt, LABELS) for prompt in ("a", "bad", "b")]
    first, bad, second = encoder.encode(rows, truncates="error")
    assert isinstance(bad, UnicodeError)
    assert len(first.parts) == len(second.parts) == len(LABELS)


def test_a_text_is_no_list_of_continuations():
    with pytest.raises(ConfigError, match="continuations is 'yes'; it takes a list"):
        TaskRow("a", "yes")
