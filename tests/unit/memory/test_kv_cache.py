"""The KV cache: shapes, and the block pool against a model."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raymoe.errors import CapacityError, ConfigError
from raymoe.kernels.paged_kv import KvLayout
from raymoe.memory.kv_cache import BlockPool, KvCache, blocks_of_tokens

NUM_BLOCKS = 11


def test_layers_have_the_layout_of_the_kernels_and_do_not_overlap():
    layout = KvLayout(num_kv_heads=3, head_dim=8, dtype=torch.bfloat16)
    cache = KvCache([layout] * 2, num_blocks=5)
    assert cache.layer(0).shape == (5, *layout.block_shape)
    assert cache.num_bytes == 2 * 5 * layout.block_bytes
    cache.layer(0).fill_(1)
    cache.layer(1).fill_(2)
    assert (cache.layer(0) == 1).all()


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


def test_asking_for_more_than_is_free_takes_nothing():
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(CapacityError, match="2 KV blocks asked, 1 of 4 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


class BlockPoolModel(RuleBasedStateMachine):
    """Owners hold lists of blocks; the pool must agree with counting them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.owners: list[list[int]] = []

    def counts(self) -> Counter[int]:
        return Counter(block for owner in self.owners for block in owner)

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count):
        free = NUM_BLOCKS - len(self.counts())
        if count > free:
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count).tolist()
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.counts()), "a block is owned twice"
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data):
        owner = data.draw(st.sampled_from(self.owners))
        shared = owner[: data.draw(st.integers(0, len(owner)))]
        self.pool.retain(np.array(shared, np.int32))
        self.owners.append(shared)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(np.array(owner, np.int32))

    @precondition(lambda self: self.owners)
    @rule()
    def release_all_at_once(self):
        blocks = [block for owner in self.owners for block in owner]
        self.pool.release(np.array(blocks, np.int32))
        self.owners = []

    @invariant()
    def reference_counts_are_exact(self):
        counts = self.counts()
        assert [self.pool.references(b) for b in range(NUM_BLOCKS)] == [
            counts[b] for b in range(NUM_BLOCKS)
        ]
        assert self.pool.num_free == NUM_BLOCKS - len(counts)


TestBlockPool = BlockPoolModel.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
