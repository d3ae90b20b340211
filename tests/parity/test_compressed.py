"""Contexts around windows of 128 tokens, and up to the longest whose entries are all selected."""

from dataclasses import replace
from pathlib import Path

import pytest

from raymoe.device.threads import set_num_threads
from tests.parity.configurations import CONFIGURATIONS
from tests.parity.driver import generate, load_decoder
from tests.parity.hybrid_families import AS_PUBLISHED
from tests.parity.oracle import Rows, make_checkpoint, make_reference


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)  # matrices this small only wait for a second thread


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
    (published,) = (
        c for c in CONFIGURATIONS if c.name.startswith("deepseek_v4") and AS_PUBLISHED in c.name
    )
    # All experts are chosen: of two thousand tokens some would choose by less than rounding.
    # So would entries, if not all were.
    sizes = {"max_position_embeddings": 4096, "n_routed_experts": 2, "num_experts_per_tok": 2}
    sizes["index_topk"] = 512
    fields = published.fields | sizes
    configuration = replace(published, fields=fields)
    model = make_checkpoint(configuration, tmp_path)
    rows = Rows(num_prompts=len(lengths), lengths=lengths, max_new_tokens=num_tokens)
    reference = make_reference(model, configuration, rows)
    decoder = load_decoder(tmp_path)
    assert generate(decoder, reference.prompts, num_tokens) == reference.tokens
    chunks = generate(decoder, reference.prompts, num_tokens, chunk_tokens=max(lengths) // 3)
    assert chunks == reference.tokens
