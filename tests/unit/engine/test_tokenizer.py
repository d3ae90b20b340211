"""Prompts of any form to tokens, and back."""

import numpy as np
import pytest

from raymoe.engine.stopping import DecodeError
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import CheckpointError, ConfigError
from tests.unit.engine.fakes import BOS, EOS, VOCAB_SIZE


@pytest.fixture
def tokenizer(tokenizer_directory):
    tokenizer = Tokenizer(tokenizer_directory, VOCAB_SIZE)
    yield tokenizer
    tokenizer.close()


def test_text_gets_the_special_tokens_of_the_tokenizer(tokenizer):
    assert tokenizer.encode("hé").tolist() == [BOS, *"hé".encode()]


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


def test_a_tokenizer_that_fails_to_decode_names_the_problem(tokenizer):
    with pytest.raises(DecodeError, match="cannot be decoded"):
        tokenizer.decode([-5])
