"""The block pool against a plain model of it, and the order in which prefixes are lost."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raymoe.errors import CapacityError
from raymoe.memory.block_pool import BlockPool

NUM_BLOCKS = 11
ALPHABET = 3


def keys_of(chain: tuple[int, ...]) -> tuple[bytes, ...]:
    """A key for each prefix of a chain of block contents."""
    return tuple(bytes(chain[: end + 1]) for end in range(len(chain)))


def compute(pool: BlockPool, chain: tuple[int, ...]) -> np.ndarray:
    """Blocks of a sequence that shares what there is and computes the rest; loses are allowed."""
    keys = keys_of(chain)
    shared = pool.find(keys[: pool.num_found(keys)])
    pool.retain(shared)
    fresh, _ = pool.allocate(len(chain) - len(shared))
    blocks = np.concatenate([shared, fresh])
    pool.share(keys, blocks.tolist())
    return blocks


def num_found(pool: BlockPool, chain: tuple[int, ...]) -> int:
    return pool.num_found(keys_of(chain))


def test_asking_for_more_than_is_free_takes_nothing():
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(CapacityError, match="2 KV blocks asked, 1 of 4 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_prefix_is_found_after_its_sequence_until_its_memory_is_needed():
    pool = BlockPool(6)
    pool.release(compute(pool, (1, 2, 3)))
    assert (pool.num_free, pool.num_kept, num_found(pool, (1, 2, 9))) == (6, 3, 2)
    pool.release(compute(pool, (1, 2, 3)))  # the same blocks
    assert pool.num_kept == 3
    blocks, lost = pool.allocate(4)  # three were empty
    assert lost == [bytes((1, 2, 3))]  # the end goes first
    pool.release(blocks)
    assert (pool.num_kept, pool.num_free, num_found(pool, (1, 2, 3))) == (2, 6, 2)


def test_the_prefix_left_longest_ago_is_lost_first():
    pool = BlockPool(4)
    for chain in ((1, 1), (2, 2)):
        pool.release(compute(pool, chain))
    pool.release(compute(pool, (3, 3)))
    assert [num_found(pool, (i, i)) for i in (1, 2, 3)] == [0, 2, 2]


def test_a_block_of_a_lost_prefix_that_several_used_begins_anew():
    pool = BlockPool(3)
    for blocks in [compute(pool, (1,)) for _ in range(2)]:
        pool.release(blocks)
    blocks, lost = pool.allocate(3)
    assert lost == [bytes((1,))]
    pool.release(blocks)
    held = [compute(pool, (i,)) for i in (2, 3, 4)]  # the last is where the lost one was
    for i in (2, 0, 1):
        pool.release(held[i])
    assert pool.allocate(1)[1] == [bytes((4,))]


def test_prefixes_that_several_used_outlive_a_cache_of_others_and_no_more():
    pool = BlockPool(8)
    first, second = compute(pool, (1, 1)), compute(pool, (1, 1))
    pool.release(first)
    pool.release(second)
    for i in range(2, 6):  # 8 blocks
        pool.release(compute(pool, (i, i)))
    assert num_found(pool, (1, 1)) == 2
    for i in range(6, 11):
        pool.release(compute(pool, (i, i)))
    assert num_found(pool, (1, 1)) == 0
    assert pool.num_evicted == 2 * 10 - 8


def test_what_running_sequences_use_is_never_lost():
    pool = BlockPool(4)
    running = compute(pool, (1, 1))
    for i in range(2, 9):
        pool.release(compute(pool, (i, i)))
    assert num_found(pool, (1, 1)) == 2
    with pytest.raises(CapacityError):
        pool.allocate(3)
    pool.release(running)
    assert len(pool.allocate(4)[1]) == 4


def test_dropping_what_is_kept_leaves_running_sequences_alone():
    pool = BlockPool(6)
    running = compute(pool, (1, 1))
    pool.release(compute(pool, (1, 1, 2)))
    pool.release(compute(pool, (3,)))
    assert sorted(pool.drop_kept()) == [bytes((1, 1, 2)), bytes((3,))]
    assert [num_found(pool, chain) for chain in ((1, 1, 2), (3,))] == [2, 0]
    pool.release(running)
    assert pool.num_free == 6


class BlockPoolModel(RuleBasedStateMachine):
    """Sequences hold chains of contents; the pool must agree with counting their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.owners: list[tuple[np.ndarray, tuple[int, ...]]] = []
        self.contents: dict[int, tuple[int, ...]] = {}  # of computed blocks, with all before them

    def counts(self) -> Counter[int]:
        return Counter(block for blocks, _ in self.owners for block in blocks.tolist())

    @rule(
        chain=st.lists(st.integers(0, ALPHABET), max_size=NUM_BLOCKS + 1).map(tuple),
        num_computed=st.integers(0, NUM_BLOCKS),
    )
    def begin(self, chain, num_computed):
        """A sequence enters, and computes some blocks or is cancelled before."""
        keys = keys_of(chain)
        shared = self.pool.find(keys[: self.pool.num_found(keys)])
        for end, block in enumerate(shared.tolist(), 1):
            assert self.contents[block] == chain[:end], "a block of other contents was found"
        used, free = self.counts(), self.pool.num_free
        revived = sum(block not in used for block in shared.tolist())
        if len(chain) - len(shared) > free - revived:
            self.pool.retain(shared)
            with pytest.raises(CapacityError):
                self.pool.allocate(len(chain) - len(shared))
            self.pool.release(shared)
            return
        self.pool.retain(shared)
        fresh, lost = self.pool.allocate(len(chain) - len(shared))
        assert not set(fresh.tolist()) & (set(used) | set(shared.tolist())), "a block owned twice"
        assert len(lost) == len(set(lost))
        for block in fresh.tolist():
            self.contents.pop(block, None)
        blocks = np.concatenate([shared, fresh])
        end = max(len(shared), min(num_computed, len(chain)))
        for index in range(len(shared), end):
            self.contents[int(blocks[index])] = chain[: index + 1]
        self.pool.share(keys[:end], blocks[:end].tolist())
        self.owners.append((blocks, chain))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def end(self, data):
        blocks, _ = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(blocks)

    @rule()
    def drop_kept(self):
        self.pool.drop_kept()
        assert self.pool.num_kept == 0

    @invariant()
    def nothing_is_lost_or_counted_twice(self):
        counts = self.counts()
        found = self.pool.references(np.arange(NUM_BLOCKS)).tolist()
        assert found == [counts[block] for block in range(NUM_BLOCKS)]
        check_pool(self.pool)


def check_pool(pool: BlockPool) -> None:
    """Every block is used, kept or empty, exactly once, and keys and blocks are one to one."""
    free = [*pool._empty, *pool._used_once, *pool._used_often]
    assert len(free) == len(set(free)) == pool.num_free
    assert set(free) == set(np.flatnonzero(pool._references == 0).tolist())
    assert {block: key for key, block in pool._blocks.items()} == pool._keys
    assert not set(pool._empty) & set(pool._keys)
    for queue in (pool._used_once, pool._used_often):
        assert set(queue) <= set(pool._keys)
        assert list(queue.values()) == sorted(queue.values())


TestBlockPool = BlockPoolModel.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
