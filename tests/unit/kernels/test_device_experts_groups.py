"""Grouping of tokens by expert, by torch alone."""

import pytest
import torch

from raymoe.kernels.gpu_experts_kernels import group_by_expert, in_planes, max_tiles, tile_table


def routes(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(num_tokens, num_experts, generator=random)
    return scores_TE.topk(top_k).indices.int()


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 1, 1), (1, 8, 2), (50, 9, 4)])
def test_rows_of_an_expert_are_its_tokens_in_order(
    num_tokens: int, num_experts: int, top_k: int
) -> None:
    ids_TK = routes(num_tokens, num_experts, top_k)
    groups = group_by_expert(ids_TK, torch.rand(num_tokens, top_k), num_experts)
    for expert in range(num_experts):
        begin, end = groups.bounds_E1[expert : expert + 2].tolist()
        tokens = [token for token in range(num_tokens) if expert in ids_TK[token].tolist()]
        assert groups.tokens_R[begin:end].tolist() == tokens


def test_a_token_is_summed_by_ascending_expert_with_the_weights_of_its_experts() -> None:
    ids_TK = torch.tensor([[3, 0, 2], [1, 3, 0]], dtype=torch.int32)
    weights_TK = torch.tensor([[0.3, 0.0, 0.2], [0.1, 0.3, 0.0]])
    groups = group_by_expert(ids_TK, weights_TK, 4)
    torch.testing.assert_close(groups.weights_TK, torch.tensor([[0.0, 0.2, 0.3], [0.0, 0.1, 0.3]]))
    assert groups.places_TK.tolist() == [[0, 3, 4], [1, 2, 5]]
    assert groups.tokens_R[groups.places_TK.long()].tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("tile_rows", [1, 4, 16])
@pytest.mark.parametrize("counts", [[0], [1], [16], [17, 0, 0], [0, 0, 5], [3, 16, 0, 33]], ids=str)
def test_tiles_cover_every_row_once(counts: list[int], tile_rows: int) -> None:
    bounds_E1 = torch.tensor([0, *counts]).cumsum(0).int()
    table = tile_table(bounds_E1, sum(counts), tile_rows).tolist()
    assert len(table) == max_tiles(sum(counts), len(counts), tile_rows)
    used = [row for row in table if row[0] >= 0]
    assert used == table[: len(used)], "tiles that are left over come last"
    covered = []
    for number, (expert, first, count, begin, end) in enumerate(used):
        assert (begin, end) == tuple(bounds_E1[expert : expert + 2].tolist())
        assert first <= number < first + count
        rows = range(begin + (number - first) * tile_rows, end)[:tile_rows]
        assert rows, "a tile has rows"
        covered += rows
    assert covered == list(range(sum(counts)))


@pytest.mark.parametrize("num_inputs", [8, 13, 1])
def test_planes_put_columns_that_share_a_unit_apart(num_inputs: int) -> None:
    input_TI = torch.arange(1.0, 2 * num_inputs + 1).view(2, num_inputs)
    planes = in_planes(input_TI, 8).view(2, 8, -1)
    for column in range(num_inputs):
        assert torch.equal(planes[:, column % 8, column // 8], input_TI[:, column])
    assert int((planes != 0).sum()) == 2 * num_inputs
    assert torch.equal(in_planes(input_TI, 1), input_TI)
