"""Rows of tables of n-grams: those of transformers, however a sequence is cut into steps."""

import pytest
import torch
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from raymoe.errors import CheckpointError
from raymoe.kernels.ngrams import NO_TOKEN, fill_table, read_rows, table_rows
from raymoe.specs.attention.ngrams import NgramSpec
from raymoe.specs.model import ModelSpec
from tests.unit.specs.config_classes import written

END = 3


def make(num_tables: int = 1, **fields: object) -> tuple[Qwen4ExpTextConfig, list[NgramSpec]]:
    numbers = {
        "vocab_size": 19,
        "num_hidden_layers": 4,
        "ple_layer_ids": list(range(1, 1 + num_tables)),
        "ple_embed_dim": 48,
        "ngram_vocab_size_base": 40,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "eos_token_id": END,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 256,
        "indexer_n_heads": 1,
        "indexer_kv_heads": 1,
    }
    config = Qwen4ExpTextConfig(**numbers | fields)
    layers = ModelSpec.from_config(written(config)).layers
    return config, [layer.ngrams for layer in layers if layer.ngrams is not None]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"ngram_size": 2, "heads_per_ngram": 3, "seed": 99},
        {"ngram_size": 4, "heads_per_ngram": 4, "ple_conv_kernel_size": 2, "vocab_size": 5},
    ],
    ids=["of 3", "of 2", "of 4"],
)
@torch.inference_mode()
def test_rows_are_those_of_transformers_wherever_steps_end(fields: dict[str, object]) -> None:
    config, (_, spec) = make(num_tables=2, **fields)
    theirs = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 1, ple_layer_index=1)
    theirs.ngram_embedding.weight.normal_()
    table_RD = theirs.ngram_embedding.weight.data
    assert table_RD.shape == (spec.num_rows, spec.row_width)
    rows = [torch.randint(config.vocab_size, (size,)) for size in (40, 1, 23)]
    rows[0][[0, 2, 19, 20]] = END
    wanted = [theirs(row[None], None)[0] for row in rows]
    for cuts in ((0, 0, 0), (1, 1, 2), (7, 0, 3), (20, 1, 21)):
        steps = [torch.tensor([0, *cut, len(row)]) for row, *cut in zip(rows, cuts, strict=True)]
        for step in range(2):
            parts = [
                row[ends[step] : ends[step + 1]] for row, ends in zip(rows, steps, strict=True)
            ]
            past = [
                [int(row[p]) if p >= 0 else NO_TOKEN for p in range(begin - spec.num_past, begin)]
                for row, ends in zip(rows, steps, strict=True)
                for begin in [int(ends[step])]
            ]
            starts = torch.tensor([0, *map(len, parts)]).cumsum(0).int()
            found_TN = table_rows(torch.cat(parts), starts, torch.tensor(past).int(), spec)
            read_TX = read_rows(table_RD, found_TN, 1.0, torch.float32)
            for i, (want, ends) in enumerate(zip(wanted, steps, strict=True)):
                part = slice(int(ends[step]), int(ends[step + 1]))
                assert torch.equal(read_TX[starts[i] : starts[i + 1]], want[part])


def test_a_table_of_fp8_is_read_in_its_own_type_and_scaled_once() -> None:
    _, (spec,) = make()
    tensors = {
        f"ngrams.table.{i}": torch.randn(rows, spec.row_width).to(torch.float8_e4m3fn)
        for i, rows in enumerate(spec.tensor_rows)
    }
    stored = torch.cat([each.view(torch.uint8) for each in tensors.values()])
    with pytest.raises(CheckpointError, match="float8_e4m3fn, and others, or the model, have"):
        fill_table(torch.empty(spec.table_bytes, dtype=torch.uint8), spec, tensors.__getitem__)
    assert spec.dtype == "bfloat16"
    _, (spec,) = make(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert spec.table_bytes == stored.nbytes
    memory = torch.empty(spec.table_bytes, dtype=torch.uint8)
    table_RD = fill_table(memory, spec, tensors.__getitem__)
    assert torch.equal(memory.view_as(stored), stored)
    rows_TN = torch.randint(spec.num_rows, (9, 5))
    want = stored.view(torch.float8_e4m3fn).float()[rows_TN.flatten()] * 0.0313
    got_TE = read_rows(table_RD, rows_TN, 0.0313, torch.bfloat16)
    assert torch.equal(got_TE, want.bfloat16().view(9, -1))
