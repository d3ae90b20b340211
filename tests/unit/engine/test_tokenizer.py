"""Prompts of any form to tokens, and back."""

import io
import json
import os
import shutil

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoTokenizer

from raymoe.engine.tokenizer import Chat, DecodeError, Room, Tokenizer
from raymoe.errors import CheckpointError, ConfigError, ExecutionError
from raymoe.specs.files import read_chat_template
from tests.unit.engine.fakes import BOS, EOS, VOCAB_SIZE, kept_tokenizer


@pytest.fixture
def tokenizer(tokenizer_directory):
    return kept_tokenizer(tokenizer_directory)


@pytest.fixture
def make():
    """Tokenizers that are closed at the end of the test."""
    tokenizers = []

    def make_one(directory, vocab_size=VOCAB_SIZE, **options) -> Tokenizer:
        tokenizers.append(Tokenizer(directory, vocab_size, **options))
        return tokenizers[-1]

    yield make_one
    for tokenizer in tokenizers:
        tokenizer.close()


def test_text_gets_the_special_tokens_of_the_tokenizer(tokenizer):
    assert tokenizer.encode("hé").tolist() == [BOS, *"hé".encode()]


def test_a_closed_tokenizer_says_so(tokenizer_directory, make):
    tokenizer = make(tokenizer_directory)
    tokenizer.close()
    with pytest.raises(ExecutionError, match="the tokenizer is closed"):
        tokenizer.encode("x")


def test_a_sentencepiece_model_alone_is_a_tokenizer(tmp_path, make):
    texts, model = ["the quick brown fox", "the lazy dog", "a fox and a dog"], io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=290, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<unk>"}))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    tokenizer = make(tmp_path, 300)
    pieces = SentencePieceProcessor(model_proto=model.getvalue())
    for text in (*texts, "the fox 🦊"):
        ids = tokenizer.encode(text).tolist()
        assert ids == pieces.encode(text)
        assert tokenizer.decode(ids) == text


def test_a_vocabulary_that_needs_code_of_its_repository_is_named(tmp_path, make):
    (tmp_path / "qwen.tiktoken").write_text("IQ== 0\n")
    with pytest.raises(ConfigError, match=r"no tokenizer.*qwen\.tiktoken needs.*never run"):
        make(tmp_path).encode("x")


def test_token_ids_are_taken_as_they_are(tokenizer):
    assert tokenizer.encode([5, 0, 257]).tolist() == [5, 0, 257]
    assert tokenizer.encode(np.array([5, 6])).tolist() == [5, 6]


def test_special_tokens_are_not_in_the_text(tokenizer):
    assert tokenizer.decode([BOS, *b"hi", EOS]) == "hi"


@pytest.mark.parametrize("form", ["files", "list"])
def test_rows_with_tools_take_the_template_of_tools(tokenizer_directory, tmp_path, make, form):
    directory = tmp_path / "model"
    shutil.copytree(tokenizer_directory, directory)
    default, tool_use = "[{{ messages[0].content }}]", "{{ tools | length }}{{ messages }}"
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    if form == "files":
        (directory / "chat_template.jinja").write_text(default)
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    else:
        path = directory / "tokenizer_config.json"
        named = {"default": default, "tool_use": tool_use}
        named = [{"name": name, "template": text} for name, text in named.items()]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    tokenizer, reference = make(directory), AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "x"}]
    for tools in ([], [{"type": "function", "function": {"name": "f"}}]):
        expected = reference.apply_chat_template(chat, tools=tools or None, tokenize=False)
        assert tokenizer.read(Chat(chat, tools), Room()).text == expected
    assert read_chat_template(directory).split("\n") in ([default, tool_use], [tool_use, default])


@pytest.fixture(scope="module")
def splitting(tokenizer_directory):
    """To which special tokens in texts are ordinary text."""
    tokenizer = Tokenizer(tokenizer_directory, VOCAB_SIZE, split_special_tokens=True)
    yield tokenizer
    tokenizer.close()


@pytest.mark.parametrize("text", ["a</s>b", "</s>", "<s>é", "no mark"])
def test_special_tokens_in_text_may_be_ordinary_text(tokenizer_directory, splitting, text):
    theirs = AutoTokenizer.from_pretrained(tokenizer_directory)
    expected = theirs(text, split_special_tokens=True).input_ids
    assert splitting.encode(text).tolist() == expected == [BOS, *text.encode()]
    long = f"{text} " * 20_000
    assert splitting.encode(long).tolist() == [BOS, *long.encode()]
    assert splitting.encode([{"role": "user", "content": "hi"}]).tolist()[0] == BOS
    assert kept_tokenizer(tokenizer_directory).encode(text).tolist() == theirs(text).input_ids


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a</s>"}],
        [{"role": "user", "content": [{"type": "text", "text": "x<s>"}]}],
        [{"role": "</s>", "content": "a"}],
    ],
)
def test_special_tokens_in_messages_are_refused_where_they_may_not_be(splitting, messages):
    with pytest.raises(ConfigError, match=r"token '</?s>', which split_special_tokens forb"):
        splitting.encode(messages)


def test_special_tokens_in_messages_are_those_of_the_text(tokenizer_directory):
    tokens = kept_tokenizer(tokenizer_directory).encode([{"role": "user", "content": "a</s>"}])
    assert EOS in tokens


def test_a_final_assistant_message_is_continued(tokenizer):
    messages = [
        {"role": "user", "content": "q", "tool_calls": None},
        {"role": "assistant", "content": "The answer "},
    ]
    assert bytes(tokenizer.encode(messages).tolist()[1:]) == b"<user>q\n<assistant>The answer "


def test_without_a_tokenizer_only_token_ids_are_accepted(tmp_path, make):
    tokenizer = make(tmp_path, 10)
    assert tokenizer.encode([1, 2]).tolist() == [1, 2]
    assert tokenizer.decode([1, 2]) == ""
    with pytest.raises(ConfigError, match="has no tokenizer; give prompts as token ids"):
        tokenizer.encode("text")
    with pytest.raises(ConfigError, match="has no chat template"):
        tokenizer.encode([{"role": "user", "content": "x"}])


def test_a_broken_tokenizer_is_refused_by_name(tmp_path, make):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"the tokenizer in {tmp_path} cannot be loaded"):
        make(tmp_path, 10).load()


def test_code_of_a_model_repository_is_not_run(tmp_path, make):
    (tmp_path / "evil.py").write_text("raise SystemExit('code was run')")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}, "tokenizer_class": "Evil"}'
    )
    with pytest.raises(CheckpointError):
        make(tmp_path, 10).load()


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
)
def test_files_beside_the_tokenizer_that_are_no_files_of_it_are_refused(
    tokenizer_directory, tmp_path, name
):
    directory = tmp_path / "model"
    shutil.copytree(tokenizer_directory, directory)
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is a pipe, not a file"):
        Tokenizer(directory, VOCAB_SIZE)
    path.unlink()
    (tmp_path / "secret").write_text("{}")
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="a link that leaves the model directory"):
        Tokenizer(directory, VOCAB_SIZE)
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)  # takes no room on the disk
    with pytest.raises(CheckpointError, match="larger than"):
        Tokenizer(directory, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "[" * 100_000),
        pytest.param("tokenizer_config.json", '{"a":' * 100_000, marks=pytest.mark.slow),
        ("tokenizer.json", '{"model": ' + "9" * 5000),
    ],
)
def test_bombs_of_json_are_errors_of_the_tokenizer(tokenizer_directory, tmp_path, make, name, text):
    shutil.copytree(tokenizer_directory, tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        make(tmp_path / "model").load()


def test_a_tokenizer_that_fails_to_decode_names_the_problem(tokenizer):
    with pytest.raises(DecodeError, match="cannot be decoded"):
        tokenizer.decode([-5])


@pytest.mark.parametrize("value", [[], pytest.param("long", marks=pytest.mark.slow)])
def test_a_length_that_is_no_number_is_an_error_of_the_tokenizer(
    tokenizer_directory, tmp_path, make, value
):
    directory = shutil.copytree(tokenizer_directory, tmp_path / "copy")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": value}))
    with pytest.raises(CheckpointError, match="model_max_length is"):
        make(directory).load()
