"""Prompts of any form to tokens, and back."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raymoe.engine.stopping import DecodeError
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import CheckpointError, ConfigError, ExecutionError
from tests.unit.engine.fakes import BOS, EOS, VOCAB_SIZE


@pytest.fixture
def tokenizer(tokenizer_directory):
    tokenizer = Tokenizer(tokenizer_directory, VOCAB_SIZE)
    yield tokenizer
    tokenizer.close()


def test_text_gets_the_special_tokens_of_the_tokenizer(tokenizer):
    assert tokenizer.encode("hé").tolist() == [BOS, *"hé".encode()]


def test_all_callers_encode_in_one_thread_because_the_library_keeps_words_for_each(tokenizer):
    inner, threads = tokenizer._tokenizer, set()

    def noting(text, **options):
        threads.add(threading.get_ident())
        return inner(text, **options)

    tokenizer._tokenizer = noting
    with ThreadPoolExecutor(8) as callers:
        texts = [f"{index}" for index in range(64)]
        found = [tokens.tolist() for tokens in callers.map(tokenizer.encode, texts)]
    assert found == [[BOS, *text.encode()] for text in texts]
    assert len(threads) == 1


def test_a_closed_tokenizer_says_so(tokenizer):
    tokenizer.close()
    with pytest.raises(ExecutionError, match="the tokenizer is closed"):
        tokenizer.encode("x")


def test_token_ids_are_taken_as_they_are(tokenizer):
    assert tokenizer.encode([5, 0, 257]).tolist() == [5, 0, 257]
    assert tokenizer.encode(np.array([5, 6])).tolist() == [5, 6]


def test_special_tokens_are_not_in_the_text(tokenizer):
    assert tokenizer.decode([BOS, *b"hi", EOS]) == "hi"


def test_a_final_assistant_message_is_continued(tokenizer):
    messages = [
        {"role": "user", "content": "q", "tool_calls": None},
        {"role": "assistant", "content": "The answer "},
    ]
    assert bytes(tokenizer.encode(messages).tolist()[1:]) == b"<user>q\n<assistant>The answer "


def test_without_a_tokenizer_only_token_ids_are_accepted(tmp_path):
    tokenizer = Tokenizer(tmp_path, 10)
    assert tokenizer.encode([1, 2]).tolist() == [1, 2]
    assert tokenizer.decode([1, 2]) == ""
    with pytest.raises(ConfigError, match="has no tokenizer; give prompts as token ids"):
        tokenizer.encode("text")
    with pytest.raises(ConfigError, match="has no chat template"):
        tokenizer.encode([{"role": "user", "content": "x"}])


def test_a_broken_tokenizer_is_refused_by_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"the tokenizer in {tmp_path} cannot be loaded"):
        Tokenizer(tmp_path, 10)


def test_code_of_a_model_repository_is_not_run(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('code was run')")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}, "tokenizer_class": "Evil"}'
    )
    with pytest.raises(CheckpointError):
        Tokenizer(tmp_path, 10)


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
    with pytest.raises(CheckpointError, match="not a regular file"):
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


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"model": ' + "9" * 5000])
def test_bombs_of_json_are_errors_of_the_tokenizer(tokenizer_directory, tmp_path, text):
    shutil.copytree(tokenizer_directory, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text(text)
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            Tokenizer(tmp_path / "model", VOCAB_SIZE)
        shutil.copy(tokenizer_directory / name, tmp_path / "model" / name)


def test_a_tokenizer_that_fails_to_decode_names_the_problem(tokenizer):
    with pytest.raises(DecodeError, match="cannot be decoded"):
        tokenizer.decode([-5])


@pytest.mark.parametrize("value", [[], {}, "long", [None]])
def test_a_length_that_is_no_number_is_an_error_of_the_tokenizer(
    tokenizer_directory, tmp_path, value
):
    directory = shutil.copytree(tokenizer_directory, tmp_path / "copy")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": value}))
    with pytest.raises(CheckpointError, match="model_max_length is"):
        Tokenizer(directory, 256)
