"""Log probabilities against torch."""

import pytest
import torch

from raymoe.engine.sampler import SLICE_ROWS, token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_log_softmax_of_the_raw_logits(dtype):
    num_rows = SLICE_ROWS + 3
    logits_RV = (4 * torch.randn(num_rows, 40, generator=torch.Generator().manual_seed(0))).to(
        dtype
    )
    token_ids = [row % 40 for row in range(num_rows)]
    num_top = [row % 4 for row in range(num_rows)]
    expected_RV = logits_RV.float().log_softmax(1)
    for row, entry in enumerate(token_logprobs(logits_RV, token_ids, num_top)):
        assert entry.token_id == token_ids[row]
        assert entry.logprob == pytest.approx(float(expected_RV[row, token_ids[row]]), abs=1e-5)
        best = expected_RV[row].topk(num_top[row])
        assert len(entry.top) == num_top[row]
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert all(
            float(expected_RV[row, token]) == pytest.approx(p, abs=1e-5) for token, p in entry.top
        )
