"""The KV cache: shapes, and physical memory."""

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.kernels.paged_kv import KvLayout
from raymoe.memory.kv_cache import KvCache
from raymoe.runtime.batch import blocks_of_tokens


def test_layers_have_the_layout_of_the_kernels_and_do_not_overlap():
    layout = KvLayout(num_kv_heads=3, head_dim=8, dtype=torch.bfloat16)
    cache = KvCache([layout] * 2, num_blocks=5)
    assert cache.layer(0).shape == (5, *layout.block_shape)
    assert cache.num_bytes == 2 * 5 * layout.block_bytes
    cache.layer(0).fill_(1)
    cache.layer(1).fill_(2)
    assert (cache.layer(0) == 1).all()


def test_layers_may_have_blocks_of_their_own_number():
    layout = KvLayout(num_kv_heads=3, head_dim=8, dtype=torch.bfloat16)
    cache = KvCache([layout] * 3, num_blocks=[5, 2, 5])
    assert [len(layer) for layer in cache.layers] == [5, 2, 5]
    assert cache.num_bytes == 12 * layout.block_bytes
    cache.layer(2).fill_(1)
    cache.touch(3, num_threads=1)
    assert not cache.layer(1).any()
    assert cache.layer(2)[3:].all()
    with pytest.raises(ConfigError, match="0"):
        KvCache([layout] * 2, num_blocks=[5, 0])


def test_cache_without_blocks_is_refused():
    layout = KvLayout(num_kv_heads=1, head_dim=8, dtype=torch.float32)
    with pytest.raises(ConfigError, match="0 blocks"):
        KvCache([layout], num_blocks=0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2)])
def test_blocks_of_tokens_round_up(tokens, blocks):
    assert blocks_of_tokens(tokens) == blocks


def test_touched_blocks_are_the_first_of_every_layer():
    layout = KvLayout(num_kv_heads=3, head_dim=8, dtype=torch.bfloat16)
    cache = KvCache([layout] * 3, num_blocks=8)
    for index in range(3):
        cache.layer(index).fill_(1)
    cache.touch(5, num_threads=2)
    for index in range(3):
        assert not cache.layer(index)[:5].any()
        assert (cache.layer(index)[5:] == 1).all()
