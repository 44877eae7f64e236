"""Block allocators: which free block a sequence gets. Integers in, integers out.

paged       vLLM v0.2.7 `vllm/core/block_manager.py` (commit 2e0b6e77): a list used as a stack
pim-aware   KV-PIMple: a sequence fills its region (one row index across all banks) before it claims another
contiguous  first fit of the sequence's final footprint, freed spans merged
random      a uniformly random free block

Ported from KV-PIMple `allocator.py` (commit eb56d6d). Deviations from vLLM, the study's own: a freed sequence's
blocks return in block-table order, where vLLM walked an unordered set; the watermark is the engine's.

A policy's state is one `Pool` of arrays and its rules are compiled functions on it: the engine's loop calls them
directly, `Allocator` wraps the same functions for everybody else. A sequence is a *slot* here, a small integer.
"""

from typing import NamedTuple

import numpy as np

from artifact.compiled import compiled

NAMES = ("paged", "pim-aware", "contiguous", "random")
PAGED, REGION, CONTIGUOUS, RANDOM = range(len(NAMES))
PLANS = ("bestfit", "greedy")


class OutOfBlocks(Exception):
    """The pool cannot hold what was asked for; nothing was changed."""


TALLY = np.dtype([(name, np.int64) for name in ("free", "allocated", "freed", "extents", "empty_hint")])


class Pool(NamedTuple):
    """State of one allocator: N blocks, R regions of G, S slots. Arrays a policy does not use are empty."""

    policy: int
    blocks_per_region: int
    bestfit: bool
    tally: np.ndarray  # TALLY [1]: free blocks, blocks ever allocated and freed, extents in use
    refs: np.ndarray  # int32 [N], owners of each block; 0 = free
    stack: np.ndarray  # int32 [N], free ids; the top is at tally.free - 1 (paged, random)
    rng: np.random.Generator  # (random)
    extents: np.ndarray  # int64 [S + 2, 2], start and length of free spans, ascending (contiguous)
    spans: np.ndarray  # int64 [S, 3], start, next and end of each slot's span (contiguous)
    room: np.ndarray  # int32 [R], free blocks of each region (pim-aware)
    empty: np.ndarray  # uint64 [ceil(R / 64)], bit = region is empty (pim-aware)
    affinity: np.ndarray  # int32 [S], region a slot is filling, -1 = none (pim-aware)
    plan: np.ndarray  # int32 [S, P], regions set aside at admission, in order (pim-aware)
    planned: np.ndarray  # int32 [S], first region of each plan not yet used up (pim-aware)
    plan_end: np.ndarray  # int32 [S], length of each plan (pim-aware)


def padded(policy, num_blocks, blocks_per_region):
    """Pool size a policy uses: pim-aware rounds up to whole regions, the others take `num_blocks` as it is."""
    if policy == "pim-aware":
        return -(-num_blocks // blocks_per_region) * blocks_per_region
    return num_blocks


def pool(policy, num_blocks, blocks_per_region, slots, *, seed=0, plan="bestfit"):
    """A fresh `Pool` of `num_blocks` for up to `slots` sequences at once. Raises ValueError for misuse."""
    if policy not in NAMES:
        raise ValueError(f"unknown allocator {policy!r}; allowed: {', '.join(NAMES)}")
    if plan not in PLANS:
        raise ValueError(f"unknown plan {plan!r}; allowed: {', '.join(PLANS)}")
    for name, value in (("num_blocks", num_blocks), ("blocks_per_region", blocks_per_region)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{name} is {value!r}; allowed: a whole number of at least 1")
    kind = NAMES.index(policy)
    region = kind == REGION
    if region and num_blocks % blocks_per_region:
        raise ValueError(
            f"num_blocks is {num_blocks}; allowed with {policy}: a multiple of {blocks_per_region}, whole regions"
        )
    regions = num_blocks // blocks_per_region if region else 0
    tally = np.zeros(1, dtype=TALLY)
    tally["free"] = num_blocks
    extents = np.zeros((slots + 2 if kind == CONTIGUOUS else 0, 2), dtype=np.int64)
    if kind == CONTIGUOUS:
        extents[0] = 0, num_blocks
        tally["extents"] = 1
    empty = np.zeros(-(-regions // 64), dtype=np.uint64)
    for r in range(regions):
        empty[r >> 6] |= np.uint64(1 << (r & 63))
    return Pool(
        policy=kind,
        blocks_per_region=blocks_per_region,
        bestfit=plan == "bestfit",
        tally=tally,
        refs=np.zeros(num_blocks, dtype=np.int32),
        stack=np.arange(num_blocks if kind in (PAGED, RANDOM) else 0, dtype=np.int32),
        rng=np.random.default_rng(seed),
        extents=extents,
        spans=np.zeros((slots if kind == CONTIGUOUS else 0, 3), dtype=np.int64),
        room=np.full(regions, blocks_per_region, dtype=np.int32),
        empty=empty,
        affinity=np.full(slots if region else 0, -1, dtype=np.int32),
        plan=np.zeros((slots if region else 0, regions), dtype=np.int32),
        planned=np.zeros(slots if region else 0, dtype=np.int32),
        plan_end=np.zeros(slots if region else 0, dtype=np.int32),
    )


@compiled
def _lowest_empty(p):
    """Lowest empty region, -1 if there is none. Words below tally.empty_hint are known to be zero."""
    t = p.tally[0]
    for word in range(t.empty_hint, p.empty.size):
        bits = p.empty[word]
        if bits:
            t.empty_hint = word
            bit = 0
            while not (bits >> np.uint64(bit)) & np.uint64(1):
                bit += 1
            return word * 64 + bit
    t.empty_hint = p.empty.size
    return -1


@compiled
def _make_plan(p, slot, n):
    """Set regions aside for `n` blocks: whole empty ones, lowest first, then partial ones, roomiest first."""
    p.planned[slot], p.plan_end[slot] = 0, 0
    if not p.bestfit:
        return
    count, covered = 0, 0
    for word in range(p.empty.size):
        if covered >= n:
            break
        bits = p.empty[word]
        for bit in range(64):
            if not bits:
                break
            if bits & np.uint64(1) and covered < n:
                p.plan[slot, count] = word * 64 + bit
                count += 1
                covered += p.blocks_per_region
            bits >>= np.uint64(1)
    for want in range(p.blocks_per_region - 1, 0, -1):  # at most G passes; empties were taken above
        if covered >= n:
            break
        for region in range(p.room.size):
            if p.room[region] == want and covered < n:
                p.plan[slot, count] = region
                count += 1
                covered += want
    p.plan_end[slot] = count


@compiled
def _pick_region(p, slot):
    while p.planned[slot] < p.plan_end[slot]:
        region = p.plan[slot, p.planned[slot]]
        if p.room[region] > 0:
            return region
        p.planned[slot] += 1
    if p.affinity[slot] >= 0 and p.room[p.affinity[slot]] > 0:
        return p.affinity[slot]
    region = _lowest_empty(p)
    if region < 0:
        region = 0
        for r in range(1, p.room.size):
            if p.room[r] > p.room[region]:
                region = r
    p.affinity[slot] = region
    return region


@compiled
def take_in_region(p, region):
    """Count and return the lowest free block of `region`, which has room; its owners are the caller's to set."""
    if p.room[region] == p.blocks_per_region:
        p.empty[region >> 6] &= ~(np.uint64(1) << np.uint64(region & 63))
    p.room[region] -= 1
    block = region * p.blocks_per_region
    while p.refs[block]:
        block += 1
    p.tally[0].free -= 1
    p.tally[0].allocated += 1
    return block


@compiled
def take(p, slot):
    """One free block for `slot`; the caller has seen that there is one."""
    t = p.tally[0]
    if p.policy == PAGED:
        block = p.stack[t.free - 1]
    elif p.policy == RANDOM:
        i = p.rng.integers(0, t.free)
        block = p.stack[i]
        p.stack[i] = p.stack[t.free - 1]
    elif p.policy == CONTIGUOUS:
        block = p.spans[slot, 1]
        p.spans[slot, 1] += 1
    else:
        block = take_in_region(p, _pick_region(p, slot))
        p.refs[block] = 1
        return block
    t.free -= 1
    t.allocated += 1
    p.refs[block] = 1
    return block


@compiled
def take_end(p, slot, n):
    """The last `n` blocks of the slot's span (contiguous): scratch for speculation."""
    for block in range(p.spans[slot, 2] - n, p.spans[slot, 2]):
        p.refs[block] = 1
    p.tally[0].free -= n
    p.tally[0].allocated += n


@compiled
def give_end(p, slot, n):
    """The inverse of `take_end`."""
    for block in range(p.spans[slot, 2] - n, p.spans[slot, 2]):
        give(p, block)


@compiled
def give(p, block):
    """Drop one owner of `block`; it is free when the last one goes."""
    t = p.tally[0]
    p.refs[block] -= 1
    if p.refs[block]:
        return
    if p.policy == PAGED or p.policy == RANDOM:
        p.stack[t.free] = block
    elif p.policy == REGION:
        region = block // p.blocks_per_region
        p.room[region] += 1
        if p.room[region] == p.blocks_per_region:
            p.empty[region >> 6] |= np.uint64(1) << np.uint64(region & 63)
            if region >> 6 < t.empty_hint:
                t.empty_hint = region >> 6
    t.free += 1
    t.freed += 1


@compiled
def open_slot(p, slot, blocks, footprint):
    """Prepare `slot` to take `blocks` now and `footprint` in all; False when no span is long enough."""
    if p.policy == REGION:
        p.affinity[slot] = -1
        _make_plan(p, slot, blocks)
    elif p.policy == CONTIGUOUS:
        t = p.tally[0]
        for i in range(t.extents):
            if p.extents[i, 1] >= footprint:
                start = p.extents[i, 0]
                p.spans[slot] = start, start, start + footprint
                p.extents[i, 0] += footprint
                p.extents[i, 1] -= footprint
                if p.extents[i, 1] == 0:
                    for j in range(i, t.extents - 1):
                        p.extents[j] = p.extents[j + 1]
                    t.extents -= 1
                return True
        return footprint == 0
    return True


@compiled
def close_slot(p, slot):
    """Forget `slot`, all of whose blocks have been given back; a contiguous span returns to the free extents."""
    if p.policy == REGION:
        p.affinity[slot] = -1
        p.planned[slot], p.plan_end[slot] = 0, 0
    elif p.policy == CONTIGUOUS:
        start, end = p.spans[slot, 0], p.spans[slot, 2]
        p.spans[slot] = 0, 0, 0
        if start == end:
            return
        t = p.tally[0]
        i = 0
        while i < t.extents and p.extents[i, 0] < start:
            i += 1
        joins_left = i > 0 and p.extents[i - 1, 0] + p.extents[i - 1, 1] == start
        joins_right = i < t.extents and p.extents[i, 0] == end
        if joins_left and joins_right:
            p.extents[i - 1, 1] += end - start + p.extents[i, 1]
            for j in range(i, t.extents - 1):
                p.extents[j] = p.extents[j + 1]
            t.extents -= 1
        elif joins_left:
            p.extents[i - 1, 1] += end - start
        elif joins_right:
            p.extents[i, 0] = start
            p.extents[i, 1] += end - start
        else:
            for j in range(t.extents, i, -1):
                p.extents[j] = p.extents[j - 1]
            p.extents[i] = start, end - start
            t.extents += 1


class Allocator:
    """One policy over `num_blocks` blocks, for use outside the engine.

    Every call is all-or-nothing: `OutOfBlocks` when the pool cannot serve it, `ValueError` for misuse, and after
    either the state is what it was. `slots` is how many sequences may live at once.
    """

    def __init__(self, policy, num_blocks, *, blocks_per_region=1, seed=0, plan="bestfit", slots=1024):
        self._pool = pool(policy, num_blocks, blocks_per_region, slots, seed=seed, plan=plan)
        self._tables = {}
        self._slots = {}
        self._spare = list(range(slots - 1, -1, -1))

    @property
    def num_blocks(self):
        return self._pool.refs.size

    @property
    def free_blocks(self):
        return int(self._pool.tally["free"][0])

    def table(self, seq):
        """Block ids of `seq`, in order."""
        return list(self._known(seq))

    def admit(self, seq, blocks, footprint=None):
        """Blocks for a new sequence -> their ids. `footprint`: all it may ever hold, which contiguous sets aside."""
        footprint = blocks if footprint is None else footprint
        self._new(seq)
        self._count("blocks", blocks)
        self._count("footprint", footprint)
        if footprint < blocks:
            raise ValueError(f"footprint is {footprint}; allowed: at least the {blocks} blocks asked for now")
        if blocks > self.free_blocks:
            raise OutOfBlocks(
                f"sequence {seq!r} asks for {blocks} blocks; {self.free_blocks} of {self.num_blocks} are free"
            )
        slot = self._spare[-1]
        if not open_slot(self._pool, slot, blocks, footprint):
            raise OutOfBlocks(f"sequence {seq!r} asks for a span of {footprint} blocks; no free span is that long")
        self._slots[seq] = self._spare.pop()
        self._tables[seq] = self._take(slot, blocks)
        return list(self._tables[seq])

    def grow(self, seq, blocks):
        """More blocks for a living sequence -> the new ids."""
        table = self._known(seq)
        self._count("blocks", blocks)
        slot = self._slots[seq]
        room = self.free_blocks
        if self._pool.policy == CONTIGUOUS:
            room = int(self._pool.spans[slot, 2] - self._pool.spans[slot, 1])
        if blocks > room:
            raise OutOfBlocks(f"sequence {seq!r} asks for {blocks} more blocks; {room} can be had")
        new = self._take(slot, blocks)
        table += new
        return new

    def release(self, seq):
        """Give back everything `seq` holds; shared blocks stay with their other owners."""
        for block in self._known(seq):
            give(self._pool, block)
        slot = self._slots.pop(seq)
        close_slot(self._pool, slot)
        self._spare.append(slot)
        del self._tables[seq]

    def fork(self, parent, child):
        """`child` shares every block `parent` has now. Contiguous cannot share: ValueError."""
        table = self._known(parent)
        self._new(child)
        if self._pool.policy == CONTIGUOUS:
            raise ValueError("contiguous cannot share blocks; allowed: paged, pim-aware, random")
        self._slots[child] = self._spare.pop()
        open_slot(self._pool, self._slots[child], 0, 0)
        for block in table:
            self._pool.refs[block] += 1
        self._tables[child] = list(table)
        return list(table)

    def _take(self, slot, blocks):
        return [int(take(self._pool, slot)) for _ in range(blocks)]

    def _known(self, seq):
        if seq not in self._tables:
            raise ValueError(f"unknown sequence {seq!r}; allowed: one that was admitted and not released")
        return self._tables[seq]

    def _new(self, seq):
        if seq in self._tables:
            raise ValueError(f"sequence {seq!r} is already admitted; release it first")
        if not self._spare:
            raise ValueError(f"too many sequences at once; allowed: {len(self._slots)} (slots)")

    @staticmethod
    def _count(name, value):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
            raise ValueError(f"{name} is {value!r}; allowed: a whole number of at least 0")
