"""Tables of n-grams and gated streams: contexts around blocks and the limit, ends, and bfloat16."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raymoe.device.threads import set_num_threads
from tests.parity.configurations import CONFIGURATIONS, Configuration
from tests.parity.driver import Driver, generate, load_decoder
from tests.parity.oracle import Rows, make_checkpoint, make_prompts, make_reference

# All experts are chosen: of two thousand tokens some would choose by less than rounding.
SIZES = {"max_position_embeddings": 4096, "num_experts": 2, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)  # matrices this small only wait for a second thread


def configuration_of(name: str, **fields: object) -> Configuration:
    (found,) = (c for c in CONFIGURATIONS if c.name == f"qwen4_exp_text: {name}")
    return replace(found, fields=found.fields | fields)


@pytest.mark.parametrize(
    ("lengths", "num_tokens"),
    [
        ((124, 126, 127), 6),
        pytest.param((2043, 2045), 6, marks=pytest.mark.slow),
    ],
)
def test_rows_of_real_ratios_have_the_tokens_of_transformers(
    lengths: tuple[int, ...], num_tokens: int, tmp_path: Path
) -> None:
    configuration = configuration_of("plain", **SIZES)
    model = make_checkpoint(configuration, tmp_path)
    rows = Rows(num_prompts=len(lengths), lengths=lengths, max_new_tokens=num_tokens)
    reference = make_reference(model, configuration, rows)
    decoder = load_decoder(tmp_path)
    assert generate(decoder, reference.prompts, num_tokens) == reference.tokens
    chunks = generate(decoder, reference.prompts, num_tokens, chunk_tokens=max(lengths) // 3)
    assert chunks == reference.tokens


def test_ends_at_every_place_before_a_step_cut_the_history(tmp_path: Path) -> None:
    name = "n-grams of 4, convolution of 2, several ends, another seed"
    configuration = configuration_of(name, **SIZES)
    model = make_checkpoint(configuration, tmp_path)
    end, other = configuration.fields["eos_token_id"]
    head = [token for token in make_prompts(configuration, 1, (9,))[0] if token != end]
    tails = ([end], [end, 1], [end, 1, 2], [end, 1, 2, 4], [end, end, 1], [1, end, 2, end], [other])
    candidates = [head + tail for tail in tails] + [[*tail, 5] for tail in tails]
    rows = Rows(num_prompts=len(candidates), lengths=(9,), max_new_tokens=4)
    reference = make_reference(model, configuration, rows, candidates)
    decoder = load_decoder(tmp_path)
    for chunk in (1, 3, 100):
        tokens = generate(decoder, reference.prompts, 4, chunk_tokens=chunk)
        assert tokens == reference.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plain", "two tables, the first before all layers, in uneven tensors"]
)
@torch.inference_mode()
def test_bfloat16_errs_at_most_twice_as_much_as_plain_torch(name: str, tmp_path: Path) -> None:
    # Neither experts nor blocks are chosen: a single tie would be the largest error.
    configuration = configuration_of(name, initializer_range=0.1, indexer_budget=2048, **SIZES)
    model = make_checkpoint(configuration, tmp_path)
    model.set_attn_implementation("sdpa")
    (tokens,) = make_prompts(configuration, 1, (1500,))
    tokens_1T = torch.tensor([tokens])
    exact_TV = model(tokens_1T).logits[0].double()
    plain_TV = model.to(torch.bfloat16)(tokens_1T).logits[0].double()
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        driver = Driver(load_decoder(tmp_path, dtype), [tokens], 1)
        found = [
            driver.run_step([(begin, min(begin + 400, 1500))]) for begin in range(0, 1500, 400)
        ]
        errors[dtype] = (torch.cat(found).double() - exact_TV).norm() / exact_TV.norm()
    plain_error = (plain_TV - exact_TV).norm() / exact_TV.norm()
    assert errors[torch.float32] < 1e-3
    assert errors[torch.bfloat16] <= 2 * plain_error


def test_a_table_in_fp8_with_one_scale_gives_the_tokens_of_its_values(tmp_path: Path) -> None:
    scale, prompts = 0.0625, make_prompts(configuration_of("plain"), 3)
    found = []
    for name in ("stored", "decoded"):
        directory = tmp_path / name
        make_checkpoint(configuration_of("plain"), directory)
        file = directory / "model.safetensors"
        tensors = load_file(file)
        table = [name for name in tensors if ".ngram_embedding.shard_" in name]
        assert len(table) == 4
        for tensor in table:
            tensors[tensor] = (tensors[tensor] / scale).to(torch.float8_e4m3fn)
            if name == "decoded":
                tensors[tensor] = tensors[tensor].float() * scale
        if name == "stored":
            module = table[0].partition(".shard_")[0]
            tensors[f"{module}.weight_scale"] = torch.tensor([scale], dtype=torch.bfloat16)
        save_file(tensors, file)
        decoder = load_decoder(directory)
        ngrams = decoder.spec.layers[1].ngrams
        assert ngrams is not None
        assert ngrams.dtype == ("float8_e4m3fn" if name == "stored" else "float32")
        found.append(generate(decoder, prompts, 8))
    assert found[0] == found[1]
