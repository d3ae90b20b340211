"""Long texts in pieces, and only the end that is needed: tokens are as transformers cuts them."""

import array
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from raymoe.engine import tokenizer as module
from raymoe.engine.tasks.rows import RowEncoder, TaskOptions, TaskRow
from raymoe.engine.tokenizer import Room, Text
from raymoe.engine.workers.tokenizer_worker import PIECES, Codec, longest_token_bytes
from raymoe.errors import ConfigError
from tests.unit.engine.tokenizers_like import LIKE, SPACE, byte_level, sample_text, write_like

VOCAB_SIZE = 1 << 16


class InProcess:
    """Stands for a worker process, whose start takes two seconds."""

    def __init__(self, _role, settings, blob=b"", **_limits) -> None:
        self.sent_bytes: list[int] = []
        if blob:
            self._codec = Codec(Tokenizer.from_buffer(blob))
        else:
            tokenizer = AutoTokenizer.from_pretrained(settings["directory"])
            self._codec = Codec(tokenizer.backend_tokenizer, tokenizer)

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def load(self):
        return self._codec.facts()

    def ask(self, message, blob, **_limits):
        self.sent_bytes += message.get("num_bytes", [])
        return self._codec.answer(message, blob)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {name: write_like(name, tmp_path_factory.mktemp(name)) for name in LIKE}


@pytest.fixture(params=LIKE)
def pair(request, directories, monkeypatch):
    """Our tokenizer, which cuts texts into tiny pieces, and that of transformers."""
    monkeypatch.setattr(module, "WorkerProcess", InProcess)
    monkeypatch.setattr(module, "MAX_PIECE_CHARACTERS", 40)
    directory = directories[request.param]
    return module.Tokenizer(directory, VOCAB_SIZE), AutoTokenizer.from_pretrained(directory)


def make_texts(count: int) -> list[str]:
    """Sentences, code and pieces of all kinds, mixed."""
    choose = random.Random(5)
    words = sample_text().split(" ")[:4000]
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(choose.randint(1, 12)):
            begin = choose.randrange(len(words) - 30)
            parts.append(" ".join(words[begin : begin + choose.randint(1, 30)]))
            parts.append("".join(choose.choices([*PIECES, "<|end|>", "<s>"], k=4)))
        texts.append("".join(parts))
    return texts


def encode(tokenizer, text, **room):
    (result,) = tokenizer.encode_all([Text(text, room.pop("has_special", True), Room(**room))])
    if isinstance(result, Exception):
        raise result
    return result.tolist()


def test_tokens_of_the_pieces_are_those_of_the_text(pair):
    ours, theirs = pair
    num_cut = 0
    for text in make_texts(150):
        sent = len(ours._encoder.sent_bytes)
        for has_special in (True, False):
            expected = theirs.encode(text, add_special_tokens=has_special)
            assert encode(ours, text, has_special=has_special) == expected
        num_cut += len(ours._encoder.sent_bytes) > sent + 2
    assert num_cut > 100


@pytest.mark.parametrize("side", ["truncate_left", "truncate_right"])
def test_the_end_that_is_needed_is_that_of_the_whole_text(pair, side):
    ours, theirs = pair
    theirs.truncation_side = side.removeprefix("truncate_")
    texts = make_texts(150)
    for text in texts:
        for count in (3, 7, 30, 200):
            expected = theirs.encode(text, truncation=True, max_length=count)
            assert encode(ours, text, max_tokens=count, on_too_long=side) == expected
    sent = sum(ours._encoder.sent_bytes)
    assert sent < 0.8 * 4 * sum(len(text.encode()) for text in texts)


def test_no_token_stands_for_more_bytes_than_the_bound(pair):
    ours, theirs = pair
    ours.load()
    longest = ours._facts["longest_token_bytes"]
    assert longest is not None
    for text in [*make_texts(50), "e\u0301" * 50, "\u1fbe\u0308\u0301" * 50, "\U0001f642" * 50]:
        count = len(theirs.encode(text, add_special_tokens=False))
        assert len(text.encode()) <= count * longest
        assert len(encode(ours, text, max_tokens=count + 1)) <= count + 1


def test_texts_are_decoded_as_transformers_does(pair):
    ours, theirs = pair
    choose = random.Random(3)
    samples = [[choose.randrange(len(theirs)) for _ in range(20)] for _ in range(300)]
    texts = [theirs.decode(ids, skip_special_tokens=True) for ids in samples]
    assert ours.decode_all(samples) == texts
    assert ours.decode_all([]) == []


def test_a_text_that_is_surely_too_long_is_never_sent(directories, monkeypatch):
    monkeypatch.setattr(module, "WorkerProcess", InProcess)
    tokenizer = module.Tokenizer(directories["llama3"], VOCAB_SIZE)
    room = Room(max_tokens=511)
    with pytest.raises(ConfigError, match=r"has 12000000 bytes; at most 511 tokens of up to 19 "):
        tokenizer.read("word " * 2_400_000, room)
    assert tokenizer._encoder.sent_bytes == []


def test_a_text_that_is_too_long_is_encoded_no_further_than_that(directories, monkeypatch):
    monkeypatch.setattr(module, "WorkerProcess", InProcess)
    tokenizer = module.Tokenizer(directories["llama3"], VOCAB_SIZE)
    with pytest.raises(ConfigError, match="has more than 60000 tokens, which is all that fits"):
        encode(tokenizer, "a b c d " * 125_000, max_tokens=60_000)
    assert sum(tokenizer._encoder.sent_bytes) < 200_000
    for side in ("truncate_left", "truncate_right"):
        assert len(encode(tokenizer, "word " * 2_400_000, max_tokens=500, on_too_long=side)) == 500
    assert sum(tokenizer._encoder.sent_bytes) < 400_000


@pytest.mark.parametrize("side", ["truncate_left", "truncate_right"])
def test_what_the_tokenizer_adds_around_a_text_is_not_cut_off(directories, monkeypatch, side):
    """A vector that is read at an end token is of no use without it."""
    monkeypatch.setattr(module, "WorkerProcess", WithEnds)
    ours = module.Tokenizer(directories["llama3"], VOCAB_SIZE)
    theirs = AutoTokenizer.from_pretrained(directories["llama3"])
    theirs.backend_tokenizer.post_processor = ENDS
    theirs.truncation_side = side.removeprefix("truncate_")
    for text in ("a b " * 10, "word " * 40_000):
        for count in (4, 20):
            expected = theirs(text, truncation=True, max_length=count).input_ids
            assert encode(ours, text, max_tokens=count, on_too_long=side) == expected
            assert expected[:2] + expected[-1:] == [0, 0, 1]
    with pytest.raises(ConfigError, match="adds 3 tokens to a text, and only 3 of the prompt"):
        encode(ours, "a b", max_tokens=3, on_too_long=side)
    rows = RowEncoder(ours, TaskOptions(task="classify", labels=[" yes", " no"]), 20, "lm")
    (row,) = rows.encode([TaskRow("a b " * 40, [" yes", " no"])], truncates="truncate_left")
    for tokens, _, _ in row.parts:
        assert (len(tokens), [*tokens[:2]]) == (20, [0, 0])


@pytest.mark.parametrize("prompt", ["a b is", "a b " * 2000 + "is"])
@pytest.mark.parametrize("truncates", ["error", "truncate_left"])
def test_what_is_scored_after_a_prompt_has_no_end_token(
    directories, monkeypatch, prompt, truncates
):
    monkeypatch.setattr(module, "WorkerProcess", WithEnds)
    ours = module.Tokenizer(directories["llama3"], VOCAB_SIZE)
    labels, limit = [" yes", " no way", "1 2"], 9000 if truncates == "error" else 24
    encoder = RowEncoder(ours, TaskOptions(task="classify", labels=labels), limit, "lm")
    (row,) = encoder.encode([TaskRow(prompt, labels)], truncates=truncates)
    for label, (tokens, targets, _) in zip(labels, row.parts, strict=True):
        assert ours.decode(targets) == label
        assert 1 not in {*tokens, *targets}
        assert [*tokens[:2]] == [0, 0]
        assert [*tokens[len(tokens) + 1 - len(targets) :]] == [*targets[:-1]]
    assert row.num_input_tokens == min(limit, len(ours.encode(prompt.rstrip())) - 1)
    ids = [5, 6, 7]
    encoder = RowEncoder(ours, TaskOptions(task="score"), limit, "lm")
    (row,) = encoder.encode([TaskRow(prompt, [ids])], truncates=truncates)
    ((tokens, targets, _),) = row.parts
    assert [*targets] == ids
    assert 1 not in tokens


ENDS = processors.TemplateProcessing(
    single="<s> <s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
)


class WithEnds(InProcess):
    def __init__(self, role, settings, blob=b"", **limits) -> None:
        super().__init__(role, settings, blob, **limits)
        if not blob:
            self._codec._backend.post_processor = ENDS


def joint_of(backend) -> str | None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    return Codec(tokenizer.backend_tokenizer, tokenizer).facts()[0]["joint"]


def test_texts_are_not_cut_where_the_tokens_would_be_others():
    pairs_of_words = byte_level(r"\p{L}+ \p{L}+|\s+|[^\s\p{L}]+|\p{L}+")
    assert joint_of(pairs_of_words) is None
    stripping = byte_level(None, normalizers.Strip())
    assert joint_of(stripping) is None
    looking_back = byte_level(r"(?<=a) \p{L}+|.|\n")
    assert joint_of(looking_back) is None
    one_word = byte_level(None)
    one_word.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert joint_of(one_word) == " "
    one_word.add_tokens(["of the"])
    assert joint_of(one_word) is None


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Lowercase(),
        normalizers.Strip(),
        normalizers.NFKC(),
        normalizers.Replace(Regex(" +"), " "),
        normalizers.Replace("aa", "a"),
    ],
)
def test_there_is_no_bound_where_a_normalizer_shortens(normalizer):
    assert longest_token_bytes(byte_level(None, normalizer)) is None


def test_there_is_no_bound_where_characters_vanish():
    removing = byte_level(None)
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), removing.pre_tokenizer]
    )
    assert longest_token_bytes(removing) is None
    spaces = byte_level(None)
    spaces.pre_tokenizer = pre_tokenizers.Metaspace(SPACE)
    assert longest_token_bytes(spaces) is None


def test_prompts_of_a_call_are_encoded_together(directories, monkeypatch):
    monkeypatch.setattr(module, "WorkerProcess", InProcess)
    tokenizer = module.Tokenizer(directories["qwen"], VOCAB_SIZE)
    theirs = AutoTokenizer.from_pretrained(directories["qwen"])
    texts = make_texts(600)
    found = tokenizer.encode_all([Text(text, True, Room()) for text in texts])
    assert all(isinstance(ids, np.ndarray) and ids.dtype == np.int32 for ids in found)
    assert [ids.tolist() for ids in found] == theirs(texts)["input_ids"]


@pytest.mark.parametrize("name", LIKE)
def test_bytes_of_tokens_make_up_the_text(name):
    text = "Grüße, 日本語 🙂\x00\n<|end|>"
    backend = LIKE[name]()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    codec = Codec(backend)
    (ids,) = codec.encode([text], has_special=False)
    answer, _ = codec.answer({"wants_bytes": True}, array.array("i", [*ids, 10**6]).tobytes())
    *found, unknown = answer["bytes"]
    assert unknown is None
    pieces = [*map(bytes.fromhex, found)]
    assert b"".join(pieces).decode().removeprefix(" ") == text
    assert any(piece.decode(errors="ignore") == "" for piece in pieces)  # a part of a character


@pytest.mark.parametrize("name", ["qwen", "llama2"])
@pytest.mark.parametrize("is_native", [True, False])
def test_special_tokens_are_split_as_by_transformers(name, is_native, tmp_path):
    theirs = AutoTokenizer.from_pretrained(write_like(name, tmp_path))
    backend = Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    codec = Codec(backend if is_native else None, theirs)
    texts = ["a<|end|>b </s>", "<s> <|im_start|>x", "plain"]
    for splits in (True, False, True):
        found = codec.encode(texts, has_special=True, splits_special=splits)
        assert found == [theirs(one, split_special_tokens=splits).input_ids for one in texts]
