"""The region-aware queue behind vLLM v1's block pool: on blocks of the same interface, and in vLLM where it is."""

import collections
import importlib.util
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact.kv.vllm import RegionQueue, follow, use


@dataclass(eq=False)
class Block:
    """The attributes of vLLM's `KVCacheBlock`."""

    block_id: int
    ref_cnt: int = 0
    block_hash: object = None
    prev_free_block: object = None
    next_free_block: object = None
    is_null: bool = False


class Pool:
    """What a block pool does with its queue: takes and evicts, touches, frees, finds again."""

    def __init__(self, count, region, ahead):
        self.blocks = [Block(i) for i in range(count)]
        self.found, self.evicted = {}, []
        self.queue = RegionQueue(self.blocks, region, ahead=ahead, evict=self.evict)

    def evict(self, block):
        if block.block_hash is None:
            return False
        del self.found[block.block_hash]
        self.evicted.append(block.block_hash)
        block.block_hash = None
        return True

    def get_new_blocks(self, count):
        taken = self.queue.popleft_n(count)
        for block in taken:
            self.evict(block)
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        return taken

    def touch(self, block):
        if block.ref_cnt == 0:
            self.queue.remove(block)
        block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1
        self.queue.append_n([block for block in blocks if block.ref_cnt == 0])


def test_a_request_fills_its_region_first():
    pool = Pool(16, 4, 0)
    pool.queue.serve("a")
    assert [b.block_id for b in pool.get_new_blocks(2)] == [0, 1]
    pool.queue.serve("b")
    assert [b.block_id for b in pool.get_new_blocks(5)] == [4, 5, 6, 7, 8]
    pool.queue.serve("a")
    assert [b.block_id for b in pool.get_new_blocks(3)] == [2, 3, 12]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 6))
def test_no_leak_and_the_oldest_content_goes_first(data, ahead):
    """Any calls: the queue holds what nobody owns, and hashes are given up in the order of a plain queue."""
    pool, living, order, hashes = Pool(24, 4, ahead), {}, collections.OrderedDict(), 0
    for step in range(100):
        free = pool.queue.num_free_blocks
        what = data.draw(st.sampled_from(("take", "free", "touch")))
        if what == "take" and free:
            gone = len(pool.evicted)
            pool.queue.serve(step)
            taken = pool.get_new_blocks(data.draw(st.integers(1, min(free, 8))))
            gone = pool.evicted[gone:]
            assert gone == list(order)[: len(gone)]
            for name in gone:
                del order[name]
            assert not {b.block_id for b in taken} & {b.block_id for bs in living.values() for b in bs}
            for block in taken[: data.draw(st.integers(0, len(taken)))]:
                block.block_hash, hashes = hashes, hashes + 1
                pool.found[block.block_hash] = block
            living[step] = taken
        elif what == "free" and living:
            owner = data.draw(st.sampled_from(sorted(living)))
            blocks = living.pop(owner)[::-1]
            pool.free_blocks(blocks)
            pool.queue.forget(owner)
            for block in blocks:
                if block.ref_cnt == 0 and block.block_hash is not None:
                    order[block.block_hash] = block
        elif what == "touch" and order:
            name = data.draw(st.sampled_from(sorted(order)))
            block = order.pop(name)
            pool.touch(block)
            living[step] = [block]
        owned = {b.block_id for blocks in living.values() for b in blocks}
        assert pool.queue.num_free_blocks == 24 - len(owned)
        everything = pool.queue.get_all_free_blocks()
        assert sorted(b.block_id for b in everything) == sorted(set(range(24)) - owned)
        assert [b for b in everything if b.block_hash is not None] == list(order.values())


def test_misuse_is_refused_and_changes_nothing():
    pool = Pool(8, 4, 0)
    mine = pool.get_new_blocks(3)
    before = [b.block_id for b in pool.queue.get_all_free_blocks()]
    for misuse, complaint in (
        (lambda: pool.queue.append(Block(2)), "block 2 is foreign"),
        (lambda: pool.queue.append(Block(99)), "block 99 is foreign"),
        (lambda: pool.queue.append(pool.blocks[7]), "block 7 is free already"),
        (lambda: pool.queue.remove(mine[0]), "block 0 is not free"),
        (lambda: pool.queue.popleft_n(6), "6 blocks are asked for; 5 are free"),
        (lambda: RegionQueue(pool.blocks, 3), "blocks_per_region is 3"),
        (lambda: RegionQueue(pool.blocks, 4, ahead=1), "ahead is 1 without evict"),
    ):
        with pytest.raises(ValueError, match=complaint):
            misuse()
    assert [b.block_id for b in pool.queue.get_all_free_blocks()] == before
    pool.queue.popleft_n(5)
    with pytest.raises(ValueError, match="No free blocks available"):
        pool.queue.popleft()


@dataclass
class Queue:
    """The count that a fresh queue has."""

    num_free_blocks: int


class Fresh:
    """What `use` looks at of vLLM's `BlockPool`, fresh: block 0 is the null block."""

    def __init__(self, count, enable_caching):
        self.blocks, self.enable_caching = [Block(i) for i in range(count)], enable_caching
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_block_queue = Queue(count - 1)

    def _maybe_evict_cached_block(self, block):
        block.block_hash = None
        return True


def test_a_fresh_pool_gets_the_queue_and_a_used_one_does_not():
    pool = Fresh(16, True)
    queue = use(pool, 4)
    assert pool.free_block_queue is queue and queue.num_free_blocks == 15
    queue.serve("a")
    assert [b.block_id for b in queue.popleft_n(5)] == [4, 5, 6, 7, 8]
    used = Fresh(16, False)
    used.blocks[3].ref_cnt = 1
    with pytest.raises(ValueError, match="the pool has 1 blocks in use; allowed: a fresh one"):
        use(used, 4)


def test_a_manager_tells_who_asks():
    class Manager:
        def __init__(self, pool):
            self.pool, self.held = pool, collections.defaultdict(list)

        def allocate_new_blocks(self, request_id, count):
            self.held[request_id] += self.pool.get_new_blocks(count)
            return [b.block_id for b in self.held[request_id]]

        def free(self, request_id):
            self.pool.free_blocks(self.held.pop(request_id)[::-1])

    pool = Pool(16, 4, 0)
    manager = Manager(pool)
    follow(pool.queue, manager)
    for request in "ab":
        manager.allocate_new_blocks(request, 1)
    assert manager.allocate_new_blocks("a", 3) == [0, 1, 2, 3]
    assert manager.allocate_new_blocks("b", 2) == [4, 5, 6]
    manager.free("a")
    assert manager.allocate_new_blocks("c", 1) == [0]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_behind_the_real_block_pool():
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=32, enable_caching=False, hash_block_size=16)
    queue = use(pool, 8)
    assert pool.get_num_free_blocks() == 31
    queue.serve("a")
    first = pool.get_new_blocks(10)
    assert [b.block_id for b in first] == [*range(8, 16), 16, 17]
    pool.free_blocks(reversed(first))
    assert pool.get_num_free_blocks() == 31
    with pytest.raises(ValueError):
        pool.get_new_blocks(32)
