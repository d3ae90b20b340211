"""Greedy generation by the operations of a decoder alone: naive blocks, no engine."""

from pathlib import Path

import numpy as np
import torch

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.ngrams import NO_TOKEN
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.memory.arena import HostArena
from raymoe.memory.kv_cache import KvCache
from raymoe.memory.weights import WeightStore
from raymoe.model.decoder import Decoder, cache_layouts
from raymoe.model.loading import decoder_arena_bytes
from raymoe.specs.model import ModelSpec


def load_decoder(
    directory: Path, dtype: torch.dtype = torch.float32, state_dtype: str = "float32"
) -> Decoder:
    """The decoder of a checkpoint; its arena is exactly as large as the plan says."""
    spec = ModelSpec.from_directory(directory).with_state_dtype(state_dtype)
    store = WeightStore.open(spec, directory)
    spec = spec.with_table_dtype(store.table_dtype())
    num_bytes = decoder_arena_bytes(spec, dtype, store)
    arena = HostArena(num_bytes)
    decoder = Decoder.load(spec, store, arena.allocate, dtype, release=store.drop_pages)
    assert arena.used_bytes == num_bytes
    return decoder


class Driver:
    """A batch of sequences, each with its own blocks, all in every step."""

    def __init__(self, decoder: Decoder, prompts: list[list[int]], max_new_tokens: int) -> None:
        self.decoder, self.prompts = decoder, prompts
        self.rows = [list(prompt) for prompt in prompts]
        self.rope_tokens = [len(prompt) for prompt in prompts]
        self.blocks = [-(-(len(prompt) + max_new_tokens) // BLOCK_TOKENS) for prompt in prompts]
        first = np.cumsum([0, *self.blocks[:-1]])
        width = max(self.blocks)
        table = [
            [start + min(j, count - 1) for j in range(width)]
            for start, count in zip(first, self.blocks, strict=True)
        ]
        self.block_table = torch.tensor(np.array(table), dtype=torch.int32)
        layouts = cache_layouts(decoder.spec, decoder.dtype)
        self.cache = KvCache(layouts, sum(self.blocks), num_slots=len(prompts))

    @torch.inference_mode()
    def run_step(self, ranges: list[tuple[int, int]]) -> torch.Tensor:
        """Logits [T, V] of tokens begin..end of each sequence; an empty range leaves it out."""
        active = [s for s, (begin, end) in enumerate(ranges) if end > begin]
        counts = [ranges[s][1] - ranges[s][0] for s in active]
        num_past = self.decoder.spec.num_past_tokens
        tokens = [token for s in active for token in self.rows[s][slice(*ranges[s])]]
        positions = [p for s in active for p in range(*ranges[s])]
        prompt_tokens = [self.rope_tokens[s] for s in active]
        batch = AttentionBatch(
            query_start=torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32),
            context_tokens=torch.tensor([ranges[s][1] for s in active], dtype=torch.int32),
            block_table=self.block_table[active],
            prompt_tokens=torch.tensor(prompt_tokens, dtype=torch.int32),
            slots=torch.tensor(active, dtype=torch.int32),
        )
        past = [
            [self.rows[s][p] if p >= 0 else NO_TOKEN for p in range(begin - num_past, begin)]
            for s in active
            for begin in [ranges[s][0]]
        ]
        return self._forward(
            torch.tensor(tokens),
            torch.tensor(positions, dtype=torch.int32),
            torch.tensor(np.repeat(prompt_tokens, counts), dtype=torch.int32),
            batch,
            torch.tensor(past).view(len(active), num_past),
        )

    def _forward(self, tokens_T, positions_T, prompt_tokens_T, batch, past_SP) -> torch.Tensor:
        decoder = self.decoder
        decoder.reserve(int(batch.context_tokens.max()))
        hidden_TH = decoder.embed(tokens_T)
        experts_NTK = decoder.experts_of_tokens(tokens_T)
        ngrams_NTE = decoder.ngrams_of_tokens(tokens_T, batch.query_start, past_SP)
        for i in range(decoder.spec.num_layers):
            projected = decoder.pre(
                i, hidden_TH, positions_T, prompt_tokens_T, ngrams_NTE=ngrams_NTE
            )
            attention_TX = decoder.attend(i, projected, self.cache.layer(i), batch)
            hidden_TH, normed_TH, routing, factors_TF = decoder.post(
                i, hidden_TH, attention_TX, experts_NTK=experts_NTK
            )
            hidden_TH = decoder.ffn(i, hidden_TH, normed_TH, routing, factors_TF=factors_TF)
        return decoder.logits(decoder.final(hidden_TH, torch.arange(len(tokens_T))))


def generate(
    decoder: Decoder, prompts: list[list[int]], max_new_tokens: int, chunk_tokens: int = 10**9
) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch; prompts enter in chunks of `chunk_tokens`."""
    driver = Driver(decoder, prompts, max_new_tokens)
    done, border = [0] * len(prompts), decoder.spec.restart_length
    while any(
        len(row) < len(prompt) + max_new_tokens
        for row, prompt in zip(driver.rows, prompts, strict=True)
    ):
        ranges = [
            (begin, min(len(row), begin + chunk_tokens))
            if len(row) < len(prompt) + max_new_tokens
            else (begin, begin)
            for row, prompt, begin in zip(driver.rows, prompts, done, strict=True)
        ]
        logits_TV = driver.run_step(ranges)
        offset = 0
        for sequence, (begin, end) in enumerate(ranges):
            offset += end - begin
            if end > begin and end == len(driver.rows[sequence]):
                driver.rows[sequence].append(int(logits_TV[offset - 1].argmax()))
            done[sequence] = end
            length = driver.rope_tokens[sequence]
            if border is not None and length <= border < len(driver.rows[sequence]):
                driver.rope_tokens[sequence], done[sequence] = border + 1, 0  # starts again
    return [row[len(prompt) :] for row, prompt in zip(driver.rows, prompts, strict=True)]
