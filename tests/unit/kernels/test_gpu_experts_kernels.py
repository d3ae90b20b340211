"""Sorting of tokens by expert: in Triton's interpreter, or on a GPU."""

import pytest
import torch

from tests.triton_mode import DEVICES

pytest.importorskip("triton")


def routes(num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """Experts of each token, most of them among the first."""
    scores_TE = torch.rand(num_tokens, num_experts) * torch.linspace(1, 0.2, num_experts)
    return scores_TE.topk(top_k).indices.int()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tile_rows", [(1, 4), (16, 16), (8, 32)], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 1, 1), (1, 8, 2), (50, 9, 4), (700, 24, 2)]
)
def test_rows_and_tiles_of_experts_are_those_of_sorted_choices(
    device: str, tile_rows: tuple[int, int], num_tokens: int, num_experts: int, top_k: int
) -> None:
    from raymoe.kernels.gpu_experts_kernels import align  # noqa: PLC0415 - needs Triton

    ids_TK = routes(num_tokens, num_experts, top_k)
    weights_TK = torch.rand(num_tokens, top_k)
    launch, groups = align((ids_TK.to(device), weights_TK.to(device)), num_experts, tile_rows)
    launch.run()
    order_R = sorted(range(num_tokens * top_k), key=lambda i: (ids_TK.flatten()[i].item(), i))
    assert groups.tokens_R.tolist() == [i // top_k for i in order_R]
    assert [groups.places_TK.flatten()[i] for i in order_R] == list(range(len(order_R)))
    counts = torch.bincount(ids_TK.flatten(), minlength=num_experts)
    bounds = [0, *counts.cumsum(0).tolist()]
    tiles = zip((groups.gate_up_tiles_NF, groups.down_tiles_NF), tile_rows, strict=True)
    for tiles_NF, rows in tiles:
        check_tiles(tiles_NF.tolist(), bounds, rows)


def check_tiles(tiles: list[list[int]], bounds: list[int], tile_rows: int) -> None:
    covered: list[int] = []
    for number, (expert, first, count, begin, end) in enumerate(tiles):
        if expert < 0:
            continue
        assert (begin, end) == (bounds[expert], bounds[expert + 1])
        assert first <= number < first + count
        rows = range(begin + (number - first) * tile_rows, end)[:tile_rows]
        assert rows, "a tile has rows"
        covered += rows
    assert covered == list(range(bounds[-1]))


@pytest.mark.parametrize("num_inputs", [8, 13, 1])
def test_planes_put_columns_that_share_a_unit_apart(num_inputs: int) -> None:
    from raymoe.kernels.gpu_experts_kernels import in_planes  # noqa: PLC0415 - needs Triton

    input_TI = torch.arange(1.0, 2 * num_inputs + 1).view(2, num_inputs)
    planes = in_planes(input_TI, 8).view(2, 8, -1)
    for column in range(num_inputs):
        assert torch.equal(planes[:, column % 8, column // 8], input_TI[:, column])
    assert int((planes != 0).sum()) == 2 * num_inputs
    assert torch.equal(in_planes(input_TI, 1), input_TI)
