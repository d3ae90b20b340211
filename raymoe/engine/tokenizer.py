"""Text to token ids and back, with the tokenizer of the model directory. No code from it is run."""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from raymoe.engine.chat_template import Chat, ChatTemplate
from raymoe.engine.sequence import Int32s
from raymoe.engine.stopping import DecodeError
from raymoe.errors import CheckpointError, ConfigError, ExecutionError
from raymoe.specs.files import check_small_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# What transformers may open by itself when it loads a tokenizer.
TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | Chat


class Tokenizer:
    """Encodes prompts of any form and decodes what was generated. Thread-safe.

    Args:
        directory: Of the model. Without a tokenizer in it, prompts must be token ids and text
            stays empty.
        vocab_size: Token ids must be below.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.directory = directory
        self._vocab_size = vocab_size
        # The Rust tokenizers refuse use from two threads while one sets their truncation.
        self._lock = threading.Lock()
        # They keep ten thousand words for each thread that ever encoded with them, several MiB:
        # with hundreds of callers, more than a model's activations.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="raymoe-tokenizer")
        self._tokenizer = _load(directory)
        self._chat: ChatTemplate | None = None
        source = getattr(self._tokenizer, "chat_template", None)
        if isinstance(source, dict):
            source = source.get("default")
        if source:
            self._chat = ChatTemplate(source, self._tokenizer.special_tokens_map)

    def encode(self, prompt: object) -> Int32s:
        """Token ids of a prompt: text, token ids or chat messages.

        Text gets the tokenizer's special tokens (BOS); a chat only those of its template.

        Raises:
            ConfigError: The prompt is empty or cannot be read; says why.
        """
        if prompt is None:
            raise ConfigError("the prompt is null")
        if isinstance(prompt, str):
            return self._encode_text(prompt, add_special_tokens=True)
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if isinstance(prompt, Chat):
            return self._encode_text(self._render(prompt), add_special_tokens=False)
        if isinstance(prompt, (bytes, dict)) or not isinstance(prompt, Sequence):
            kind = type(prompt).__name__
            raise ConfigError(f"the prompt is a {kind}; it takes text, token ids or messages")
        if len(prompt) == 0:
            raise ConfigError("the prompt is empty")
        if isinstance(prompt[0], dict):
            return self.encode(Chat(prompt))
        return self._check_ids(prompt)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids, special tokens left out.

        Raises:
            DecodeError: The tokenizer does not know them.
        """
        if self._tokenizer is None:
            return ""
        try:
            with self._lock:
                return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
        except Exception as error:
            raise DecodeError(f"generated tokens cannot be decoded: {error}") from error

    @property
    def is_present(self) -> bool:
        """Whether the model has a tokenizer."""
        return self._tokenizer is not None

    def close(self) -> None:
        """End the process that renders chats, and the thread that encodes."""
        self._encoder.shutdown(wait=False)
        if self._chat is not None:
            self._chat.close()

    def _render(self, chat: Chat) -> str:
        if self._chat is None:
            raise ConfigError("the model has no chat template; give prompts as text instead")
        return self._chat.render(chat.messages, chat.tools)

    def _encode_text(self, text: str, *, add_special_tokens: bool) -> Int32s:
        if self._tokenizer is None:
            raise ConfigError("the model directory has no tokenizer; give prompts as token ids")
        if not text:
            raise ConfigError("the prompt is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the prompt is not valid Unicode: {error.reason} at character {error.start}"
            ) from error
        try:
            future = self._encoder.submit(self._token_ids, text, add_special_tokens)
        except RuntimeError as error:
            raise ExecutionError("the tokenizer is closed") from error
        token_ids = future.result()
        if not token_ids:
            raise ConfigError("the prompt has no tokens")
        return self._check_ids(token_ids)

    def _token_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._lock:
            encoded = self._tokenizer(
                text,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                verbose=False,
            )
        return list(encoded["input_ids"])

    def _check_ids(self, token_ids: Sequence[Any]) -> Int32s:
        for index, token in enumerate(token_ids):
            if type(token) is not int:
                raise ConfigError(f"prompt token {index} is {token!r:.60}; it takes whole numbers")
            if not 0 <= token < self._vocab_size:
                raise ConfigError(
                    f"prompt token {index} is {token!r:.60}; the vocabulary has ids "
                    f"0 to {self._vocab_size - 1}"
                )
        return np.asarray(token_ids, np.int32)


def _load(directory: Path) -> Any:
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    check_small_files(directory, TEXT_SUFFIXES)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(tokenizer.model_max_length, int | float):  # it is compared with lengths
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: model_max_length is "
            f"{tokenizer.model_max_length!r:.100}; it takes a number"
        )
    return tokenizer
