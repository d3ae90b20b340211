"""A model whose next token is a checksum of everything before it, and a byte tokenizer.

The fake runner keeps token ids where a real one keeps KV, in the same blocks: a wrong block, a
stale one, or a token in the wrong place changes all later tokens. Its states are the checksums of
the tokens that each sequence has computed.
"""

import atexit
import functools
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from raymoe.config import EngineConfig
from raymoe.engine.load import EngineParts
from raymoe.engine.tokenizer import Tokenizer
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.plan.policy import Policy
from raymoe.runtime.batch import InputBatch
from raymoe.schedule.timeline import Timeline

VOCAB_SIZE = 258
BOS, EOS = 256, 257


def checksum(context) -> int:
    return zlib.crc32(np.asarray(context, np.int32).tobytes())


def next_token(context) -> int:
    return checksum(context) % 256


def expected_tokens(prompt, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def fake_logits(context) -> torch.Tensor:
    """The next token stands out by 5 from small differences that depend on the context too."""
    number = checksum(context)
    logits = torch.sin(torch.arange(VOCAB_SIZE) * 0.37 + number % 1000)
    logits[number % 256] += 5
    logits[256:] = -20
    return logits


class FakeRunner:
    """Runs steps of the checksum model and checks the shape of each.

    `before` is called with each step; a test may raise, wait or look there. `num_states` is the
    number of slots of states; without them the model has none. Layers with a window have
    `num_window_blocks` of their own, where the runner checks that a token sees its window.
    """

    def __init__(
        self,
        num_blocks: int,
        before=lambda _batch: None,
        *,
        num_states: int = 0,
        window: int = 0,
        num_window_blocks: int = 0,
    ) -> None:
        self._states = [-1] * num_states
        self._window = window
        self.windowed = np.full((num_window_blocks, BLOCK_TOKENS), -1, np.int64)
        self._tokens = np.full((num_blocks, BLOCK_TOKENS), -1, np.int64)
        self._before = before
        self.max_num_batched_tokens: list[int] = []
        self.largest_chunk = 0

    last_timeline = Timeline("fake", ())

    @contextmanager
    def run(self, batch: InputBatch) -> Iterator[torch.Tensor]:
        self._before(batch)
        sequences = batch.sequences
        starts, contexts = sequences.query_start.tolist(), sequences.context_tokens.tolist()
        for source, target in batch.state_copies:
            self._states[target] = self._states[source]
        assert starts[0] == 0
        assert starts[-1] == len(batch.token_ids) == len(batch.positions)
        self.max_num_batched_tokens.append(starts[-1])
        ends = {}
        for index, context in enumerate(contexts):
            begin, end = starts[index], starts[index + 1]
            first = context - (end - begin)
            assert batch.positions[begin:end].tolist() == list(range(first, context))
            self.largest_chunk = max(self.largest_chunk, end - begin)
            blocks = sequences.block_table[index]
            self._see_windows(batch, index)
            slot = int(sequences.slots[index]) if self._states else None
            if slot is not None and first == 0:
                self._states[slot] = 0
            for offset in range(end - begin):
                block, row = divmod(first + offset, BLOCK_TOKENS)
                self._tokens[blocks[block], row] = batch.token_ids[begin + offset]
                ends[begin + offset] = (blocks, first + offset + 1)
                if slot is not None:
                    token = np.int32(batch.token_ids[begin + offset]).tobytes()
                    self._states[slot] = zlib.crc32(token, self._states[slot])
                    context_now = self._context(blocks, first + offset + 1)
                    assert self._states[slot] == checksum(context_now), "a state of other tokens"
        rows = batch.logit_rows.tolist()
        assert rows == sorted(set(rows))
        self._contexts = [self._context(*ends[row]) for row in rows]
        yield torch.arange(len(rows))[:, None]  # each row is its number

    def _see_windows(self, batch: InputBatch, index: int) -> None:
        """Append the tokens of a sequence to its blocks of a window, and read what each sees."""
        sequences = batch.sequences
        assert (sequences.window_table is not None) == (len(self.windowed) > 0)
        if sequences.window_table is None:
            return
        table, rows = sequences.window_table[index], sequences.query_start[index : index + 2]
        new = batch.token_ids[slice(*rows)]
        positions = np.arange(sequences.context_tokens[index])
        places = table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
        first = len(positions) - len(new)
        self.windowed[places[0][first:], places[1][first:]] = new
        seen = max(0, first - self._window + 1)
        kept = table[seen // BLOCK_TOKENS : positions[-1] // BLOCK_TOKENS + 1]
        assert len(set(kept.tolist())) == len(kept), "a block twice in a window"
        assert set(table[: seen // BLOCK_TOKENS].tolist()) <= {int(kept[0])}
        found = self.windowed[places[0][seen:], places[1][seen:]]
        assert (found >= 0).all(), "a window reads a block that was freed"
        tokens = self._tokens[sequences.block_table[index]].reshape(-1)[seen:first]
        assert (found[: len(tokens)] == tokens).all(), "a window of other tokens"

    def compute_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._logits(self._contexts[row]) for row in hidden_RH[:, 0]])

    def _logits(self, context) -> torch.Tensor:
        return fake_logits(context)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _context(self, blocks, length: int) -> np.ndarray:
        context = self._tokens[blocks].reshape(-1)[:length]
        assert (context >= 0).all(), "a block that was never written is read"
        return context


def write_byte_tokenizer(directory: Path, marks: Sequence[str] = ()) -> Path:
    """A tokenizer with a token for each byte, BOS before text, and a chat template.

    `marks` are special tokens too, from `VOCAB_SIZE` on.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    special = [(BOS, "<s>"), (EOS, "</s>"), *enumerate(marks, VOCAB_SIZE)]
    added = [
        {"id": token, "content": text, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for token, text in special
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": False}  # fmt: skip
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
    }  # fmt: skip
    vocabulary = {characters[byte]: byte for byte in range(256)} | {t: i for i, t in special}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
             "vocab": vocabulary, "merges": []}  # fmt: skip
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
                 "normalizer": None, "pre_tokenizer": byte_level, "post_processor": template,
                 "decoder": byte_level, "model": model}  # fmt: skip
    chat = (
        "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
              "eos_token": "</s>", "chat_template": chat,
              "clean_up_tokenization_spaces": False}  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


class KeptTokenizer(Tokenizer):
    """Outlives the engines of a test: its processes take two seconds to start."""

    def close(self) -> None:
        pass


@functools.cache
def kept_tokenizer(directory: Path) -> Tokenizer:
    tokenizer = KeptTokenizer(directory, VOCAB_SIZE)
    atexit.register(Tokenizer.close, tokenizer)
    return tokenizer


def fake_parts(runner, policy: Policy, *, directory: Path, max_model_len: int = 512) -> EngineParts:
    """Parts of an engine around a fake runner; `directory` may hold a tokenizer."""
    return EngineParts(
        runner=runner,
        policy=policy,
        tokenizer=kept_tokenizer(directory),
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        num_threads=1,
    )


def small_policy(**changes: int) -> Policy:
    sizes = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_prefill_chunk_tokens": 32,
        "num_kv_blocks": 64,
    }
    return Policy(**(sizes | changes))


QUICK = EngineConfig(linger_s=0.0)
