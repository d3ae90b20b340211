"""Constants that Python and the native kernels both declare are the same."""

import pytest

from raymoe import _native
from raymoe.codecs import INT4_ZERO
from raymoe.kernels.elementwise import MAX_NATIVE_EXPERTS, MAX_NATIVE_HEAD_DIM
from raymoe.kernels.paged_kv import VALUE_COLUMNS
from raymoe.memory.arena import ALIGNMENT as ARENA_ALIGNMENT
from raymoe.model.loading import ALIGNMENT as LOADED_ALIGNMENT
from raymoe.rotation import MAX_INPUT_RUN
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.layer_config import HEAD_DIM_MULTIPLE


@pytest.mark.parametrize(
    ("native", "python"),
    [
        (_native.BLOCK_TOKENS, KV_BLOCK_TOKENS),
        (_native.VALUE_COLUMNS, VALUE_COLUMNS),
        (_native.HEAD_DIM_MULTIPLE, HEAD_DIM_MULTIPLE),
        (_native.MAX_HEAD_DIM, MAX_NATIVE_HEAD_DIM),
        (_native.MAX_EXPERTS, MAX_NATIVE_EXPERTS),
        (_native.INT4_ZERO, INT4_ZERO),
        (_native.MAX_INPUT_RUN, MAX_INPUT_RUN),
    ],
)
def test_python_and_native_declare_the_same(native: int, python: int) -> None:
    assert python == native


@pytest.mark.parametrize("alignment", [ARENA_ALIGNMENT, LOADED_ALIGNMENT])
def test_weights_are_aligned_as_packed_ones_must_be(alignment: int) -> None:
    assert alignment % _native.PACKED_ALIGNMENT == 0


def test_packed_matrices_are_whole_panels() -> None:
    assert _native.packed_bytes(1, 2) == _native.PANEL_COLUMNS * 2 * 2
