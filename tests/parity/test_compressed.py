"""Contexts around windows of 128 tokens, and up to the longest whose entries are all selected."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raymoe.device.threads import set_num_threads
from tests.parity.configurations import CONFIGURATIONS, Configuration
from tests.parity.driver import Driver, generate, load_decoder
from tests.parity.hybrid_families import AS_PUBLISHED
from tests.parity.oracle import Rows, make_checkpoint, make_reference


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)  # matrices this small only wait for a second thread


def all_chosen() -> Configuration:
    """All entries and experts are chosen: of two thousand tokens, rounding would decide of some."""
    (published,) = (
        c for c in CONFIGURATIONS if c.name.startswith("deepseek_v4") and AS_PUBLISHED in c.name
    )
    sizes = {"max_position_embeddings": 4096, "n_routed_experts": 2, "num_experts_per_tok": 2}
    return replace(published, fields=published.fields | sizes | {"index_topk": 512})


@pytest.mark.parametrize(
    ("lengths", "num_tokens"),
    [
        ((1, 123, 250), 12),
        pytest.param((2039, 2046), 5, marks=pytest.mark.slow),
    ],
)
def test_rows_across_ends_of_windows_have_the_tokens_of_transformers(
    lengths: tuple[int, ...], num_tokens: int, tmp_path: Path
) -> None:
    configuration = all_chosen()
    model = make_checkpoint(configuration, tmp_path)
    rows = Rows(num_prompts=len(lengths), lengths=lengths, max_new_tokens=num_tokens)
    reference = make_reference(model, configuration, rows)
    decoder = load_decoder(tmp_path)
    assert generate(decoder, reference.prompts, num_tokens) == reference.tokens
    chunks = generate(decoder, reference.prompts, num_tokens, chunk_tokens=max(lengths) // 3)
    assert chunks == reference.tokens


@pytest.mark.slow
@torch.inference_mode()
def test_logits_err_as_little_as_those_of_transformers(tmp_path: Path) -> None:
    """Where tokens of a row differ, the two best were then closer than float32 can tell."""
    configuration, num_rows, prompt, num_tokens = all_chosen(), 4, 200, 60
    model = make_checkpoint(configuration, tmp_path)
    generator = torch.Generator().manual_seed(3)
    size = (num_rows, prompt + num_tokens)
    tokens = torch.randint(configuration.vocab_size, size, generator=generator)
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    exact_STV = exact(tokens).logits
    theirs = float((model(tokens).logits - exact_STV).abs().max())
    decoder = load_decoder(tmp_path)
    for steps in ([prompt + num_tokens], [prompt] + [1] * num_tokens):
        driver, end, found = Driver(decoder, tokens.tolist(), 1), 0, []
        for count in steps:
            logits_TV = driver.run_step([(end, end + count)] * num_rows)
            found.append(logits_TV.view(num_rows, count, -1))
            end += count
        assert float((torch.cat(found, dim=1) - exact_STV).abs().max()) < 4 * theirs
