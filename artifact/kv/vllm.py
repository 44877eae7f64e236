"""vLLM v1's queue of free blocks, region-aware: put it in place of a `BlockPool`'s `free_block_queue`.

The queue has the methods of `FreeKVCacheBlockQueue` (vLLM v0.20.0, `vllm/v1/core/kv_cache_utils.py`) and works on
whatever has its blocks' attributes: `block_id`, `ref_cnt`, `block_hash`, `is_null`, `prev_free_block`,
`next_free_block`. No vLLM is needed to import it.

    queue = use(pool, blocks_per_region)    # a fresh vllm.v1.core.block_pool.BlockPool
    follow(queue, manager)                  # each of the coordinator's single_type_managers

What can be found again keeps vLLM's order: it is given up from the front, oldest first, and a block that is found
leaves from the middle. The pool evicts what `popleft` hands it. So a block with a hash may come out in its turn only,
and the choice by region is among blocks without one, which have no turn to keep. `ahead` blocks with a hash are given
up early, in their order, whenever fewer without one are free: `evict` is the pool's own `_maybe_evict_cached_block`.

Region r is the blocks from r * blocks_per_region. Whoever asks stays in a region until it is full, and takes the
roomiest then, empty ones first. A queue does not know who asks: `follow` tells it, from the calls of a manager.
"""

from itertools import islice


class RegionQueue:
    """The free ones of `blocks`, by region; see the head of this file. Raises ValueError for a foreign block."""

    def __init__(self, blocks, blocks_per_region, *, ahead=0, evict=None):
        if blocks_per_region < 1 or len(blocks) % blocks_per_region:
            raise ValueError(f"blocks_per_region is {blocks_per_region}; allowed: a divisor of {len(blocks)} blocks")
        if ahead and evict is None:
            raise ValueError(f"ahead is {ahead} without evict; allowed: 0, or what drops a block's hash")
        self._blocks, self._size, self._ahead, self._evict = blocks, blocks_per_region, ahead, evict
        self._cached = {}  # block id -> block, in the order in which they are given up
        self._free = [0] * (len(blocks) // blocks_per_region)  # of each region: a bit for each free block without hash
        self._rows = [(1 << len(self._free)) - 1] + [0] * blocks_per_region  # a bit for each region with so many
        self._regions, self._current = {}, None
        self.num_free_blocks = 0
        for block in blocks:
            self.append(block)

    def serve(self, owner):
        """Until the next call, blocks are for `owner`, any hashable; `None` is nobody in particular."""
        self._current = owner

    def forget(self, owner):
        """`owner` asks for no more blocks."""
        self._regions.pop(owner, None)

    def popleft(self):
        """One free block. ValueError when there is none."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n):
        """`n` free blocks, a list: those without a hash first, by region, then the oldest with one."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks are asked for; {self.num_free_blocks} are free")
        while self._evict and self._cached and self.num_free_blocks - len(self._cached) < n + self._ahead:
            block = self._cached.pop(next(iter(self._cached)))
            self._evict(block)
            self._flip(block.block_id)
        taken = []
        for _ in range(min(n, self.num_free_blocks - len(self._cached))):
            taken.append(self._take())
        for number in list(islice(self._cached, n - len(taken))):
            taken.append(self._cached.pop(number))
        for block in taken:
            block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= n
        return taken

    def remove(self, block):
        """Take out `block`, which was found again."""
        self._own(block)
        if block.block_id in self._cached:
            del self._cached[block.block_id]
        else:
            if not self._holds(block):
                raise ValueError(f"block {block.block_id} is not free; allowed: one that was appended")
            self._flip(block.block_id)
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block):
        """Put `block` back: last in order when it has a hash."""
        self._own(block)
        if self._holds(block):
            raise ValueError(f"block {block.block_id} is free already; allowed: one that was taken")
        if block.block_hash is None:
            self._flip(block.block_id)
        else:
            self._cached[block.block_id] = block
        self.num_free_blocks += 1

    def append_n(self, blocks):
        """Put `blocks` back, in this order."""
        for block in blocks:
            self.append(block)

    def get_all_free_blocks(self):
        """All free blocks: those without a hash by number, then those with one in the order they are given up in."""
        return [b for b in self._blocks if self._plain(b.block_id)] + list(self._cached.values())

    def _own(self, block):
        number = block.block_id
        if not 0 <= number < len(self._blocks) or self._blocks[number] is not block:
            raise ValueError(f"block {number} is foreign; allowed: the {len(self._blocks)} blocks of this queue")

    def _holds(self, block):
        return block.block_id in self._cached or self._plain(block.block_id)

    def _plain(self, number):
        """Whether block `number` is free and has no hash."""
        region, place = divmod(number, self._size)
        return bool(self._free[region] >> place & 1)

    def _flip(self, number):
        """Block `number` is free without a hash from now on, or no longer."""
        region, place = divmod(number, self._size)
        self._rows[self._free[region].bit_count()] ^= 1 << region
        self._free[region] ^= 1 << place
        self._rows[self._free[region].bit_count()] ^= 1 << region

    def _take(self):
        """The lowest free block without a hash of the owner's region, or of the roomiest one."""
        region = self._regions.get(self._current, -1)
        if region < 0 or not self._free[region]:
            region = self._regions[self._current] = _lowest(next(row for row in reversed(self._rows) if row))
        number = region * self._size + _lowest(self._free[region])
        self._flip(number)
        return self._blocks[number]


def _lowest(bits):
    return (bits & -bits).bit_length() - 1


def use(pool, blocks_per_region, *, ahead=None):
    """Put a `RegionQueue` in place of the queue of `pool`, a fresh vLLM `BlockPool` -> the queue.

    `ahead`: None is an eighth of the pool when it caches. ValueError when some block is in use already.
    """
    taken = [b for b in pool.blocks if not b.is_null and b.ref_cnt]
    if taken or pool.free_block_queue.num_free_blocks != len(pool.blocks) - 1:
        raise ValueError(f"the pool has {len(taken)} blocks in use; allowed: a fresh one")
    ahead = (len(pool.blocks) // 8 if pool.enable_caching else 0) if ahead is None else ahead
    queue = RegionQueue(pool.blocks, blocks_per_region, ahead=ahead,
                        evict=pool._maybe_evict_cached_block if pool.enable_caching else None)
    queue.remove(pool.null_block)
    pool.free_block_queue = queue
    return queue


def follow(queue, manager):
    """Let `queue` know for whom `manager`, which allocates from its pool, asks and whom it frees."""
    allocate, free = manager.allocate_new_blocks, manager.free

    def allocate_new_blocks(request_id, *given, **named):
        queue.serve(request_id)
        try:
            return allocate(request_id, *given, **named)
        finally:
            queue.serve(None)

    def forgotten(request_id):
        queue.forget(request_id)
        return free(request_id)

    manager.allocate_new_blocks, manager.free = allocate_new_blocks, forgotten
