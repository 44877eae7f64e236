"""Block allocators: which free block a sequence gets. Integers in, integers out.

paged           vLLM v0.2.7 `vllm/core/block_manager.py` (commit 2e0b6e77): a list used as a stack
pim-aware       KV-PIMple: a sequence fills its region (one row index across all banks) before it claims another
contiguous      first fit of the sequence's final footprint, freed spans merged
random          a uniformly random free block
vllm-v1         vLLM v0.20.0: a queue in order of last use, block 0 unused, freed in reverse; see `prefixes`
sglang          SGLang: a radix cache over a pool of pages, page 0 unused; see `radix`
vllm-v1-region  vLLM's queue for what can be found again; a sequence fills regions of what cannot
sglang-region   SGLang's tree, and likewise

The first four are ported from KV-PIMple `allocator.py` (commit eb56d6d). Deviations from vLLM v0.2.7, the study's own:
a freed sequence's blocks return in block-table order, where vLLM walked an unordered set (`frees="unordered"` draws an
order); the watermark is the engine's.

The last four keep what released blocks held until they need them, and a sequence that begins with the same content
shares them. The region ones choose among the free blocks without content only, so that whose content goes next is the
engine's choice still; they let it go a little earlier, so that there are regions to choose from: at least `ahead`
such blocks are kept beyond what is asked for, while content is left to give up.

A policy's state is one `Pool` of arrays and its rules are compiled functions on it: the engine's loop calls them
directly, `Allocator` wraps the same functions for everybody else.
"""

import numpy as np

from artifact.compiled import compiled, inlined
from artifact.kv import draws, prefixes, radix, regions
from artifact.kv.pool import (
    CACHING,
    CONTIGUOUS,
    END,
    FREES,
    INSIDE,
    NAMES,
    NEXT,
    PAGED,
    PLANS,
    QUEUE,
    QUEUE_REGION,
    RADIX,
    RADIX_REGION,
    RANDOM,
    REGION,
    REGIONAL,
    START,
    STUDIED,
    Pool,
    padded,
    pool,
    reserved,
)  # fmt: skip

__all__ = ["CACHING", "FREES", "NAMES", "PLANS", "REGIONAL", "STUDIED", "Allocator", "OutOfBlocks", "Pool", "padded",
           "pool", "reserved"]


class OutOfBlocks(Exception):
    """The pool cannot hold what was asked for; nothing was changed."""


@inlined
def _regional(p):
    return p.policy == REGION or p.policy == QUEUE_REGION or p.policy == RADIX_REGION


@inlined
def _queued(p):
    return p.policy == QUEUE or p.policy == QUEUE_REGION


@inlined
def _rooted(p):
    return p.policy == RADIX or p.policy == RADIX_REGION


@inlined
def take(p, slot):
    """One free block for `slot`; the caller has seen that there is one, and has called `make_room`."""
    t = p.tally[0]
    if _regional(p):
        block = regions.take(p, regions.pick(p, slot))
    elif p.policy == PAGED or p.policy == RADIX:
        block = p.links[t.loose - 1, 0]
    else:
        block = _take(p, slot)
    t.loose -= 1
    t.free -= 1
    t.allocated += 1
    p.refs[block] = 1
    return block


@compiled
def _take(p, slot):
    t = p.tally[0]
    if p.policy == CONTIGUOUS:
        block = p.slots[slot, NEXT]
        p.slots[slot, NEXT] += 1
    elif p.policy == RANDOM:
        i = draws.below(p.draws, t.free)
        block = np.int64(p.links[i, 0])
        p.links[i, 0] = p.links[t.free - 1, 0]
    else:
        block = np.int64(prefixes.first(p))
        prefixes.remove(p, block)
        if p.keys[block] >= 0:
            prefixes.forget(p, block)
            t.evicted += 1
    return block


@inlined
def make_room(p, blocks):
    """See to it that `blocks` free blocks hold nothing, of the free ones there are."""
    if p.policy >= QUEUE_REGION or p.policy == RADIX:
        _make_room(p, blocks)


@compiled
def _make_room(p, blocks):
    t = p.tally[0]
    if p.policy == QUEUE_REGION:
        while t.loose < min(t.free, blocks + p.ahead):
            block = prefixes.first(p)
            prefixes.remove(p, block)
            prefixes.forget(p, block)
            t.evicted += 1
            t.loose += 1
            regions.give(p, block)
        return
    if p.policy == RADIX and t.loose >= blocks:
        return
    wanted = blocks if p.policy == RADIX else blocks + p.ahead - t.loose
    for i in range(radix.evict(p, wanted)):
        _set_loose(p, p.some[i])


@inlined
def _set_loose(p, block):
    """`block`, which is free and holds nothing, can be taken."""
    t = p.tally[0]
    if _regional(p):
        regions.give(p, block)
    elif _queued(p):
        prefixes.append(p, block)
    elif p.policy != CONTIGUOUS:
        p.links[t.loose, 0] = block
    t.loose += 1


@inlined
def give(p, block):
    """Drop one owner of `block`, which nobody can find; it is free when the last one goes."""
    p.refs[block] -= 1
    if p.refs[block] == 0:
        _set_loose(p, block)
        p.tally[0].free += 1
        p.tally[0].freed += 1


@compiled
def take_into(p, slot, row, at, blocks):
    """`blocks` free blocks for `slot`, as `row[at:]`."""
    make_room(p, blocks)
    for i in range(at, at + blocks):
        row[i] = take(p, slot)


@compiled
def take_end(p, slot, n):
    """The last `n` blocks of the slot's span (contiguous): scratch for speculation."""
    for block in range(p.slots[slot, END] - n, p.slots[slot, END]):
        p.refs[block] = 1
    p.tally[0].free -= n
    p.tally[0].loose -= n
    p.tally[0].allocated += n


@compiled
def give_end(p, slot, n):
    """The inverse of `take_end`."""
    for block in range(p.slots[slot, END] - n, p.slots[slot, END]):
        give(p, block)


@compiled
def open_slot(p, slot, blocks, footprint):
    """Prepare `slot` to take `blocks` now and `footprint` in all; False when no span is long enough."""
    if _regional(p):
        regions.begin(p, slot, blocks)
    if p.policy != CONTIGUOUS:
        return True
    t = p.tally[0]
    for i in range(t.extents):
        if p.extents[i, 1] >= footprint:
            start = p.extents[i, 0]
            p.slots[slot, START], p.slots[slot, NEXT], p.slots[slot, END] = start, start, start + footprint
            p.extents[i, 0] += footprint
            p.extents[i, 1] -= footprint
            if p.extents[i, 1] == 0:
                for j in range(i, t.extents - 1):
                    p.extents[j, 0], p.extents[j, 1] = p.extents[j + 1, 0], p.extents[j + 1, 1]
                t.extents -= 1
            return True
    return footprint == 0


@compiled
def close_slot(p, slot):
    """Forget `slot`, all of whose blocks have been given back; a contiguous span returns to the free extents."""
    if _regional(p):
        regions.begin(p, slot, 0)
    elif p.policy == CONTIGUOUS:
        start, end = p.slots[slot, START], p.slots[slot, END]
        p.slots[slot, START], p.slots[slot, NEXT], p.slots[slot, END] = 0, 0, 0
        if start < end:
            _merge(p, start, end)


@compiled
def _merge(p, start, end):
    """The free span from `start` to `end` goes among the extents, joined with its neighbours."""
    t = p.tally[0]
    i = 0
    while i < t.extents and p.extents[i, 0] < start:
        i += 1
    joins_left = i > 0 and p.extents[i - 1, 0] + p.extents[i - 1, 1] == start
    joins_right = i < t.extents and p.extents[i, 0] == end
    if joins_left and joins_right:
        p.extents[i - 1, 1] += end - start + p.extents[i, 1]
        for j in range(i, t.extents - 1):
            p.extents[j, 0], p.extents[j, 1] = p.extents[j + 1, 0], p.extents[j + 1, 1]
        t.extents -= 1
    elif joins_left:
        p.extents[i - 1, 1] += end - start
    elif joins_right:
        p.extents[i, 0] = start
        p.extents[i, 1] += end - start
    else:
        for j in range(t.extents, i, -1):
            p.extents[j, 0], p.extents[j, 1] = p.extents[j - 1, 0], p.extents[j - 1, 1]
        p.extents[i, 0], p.extents[i, 1] = start, end - start
        t.extents += 1


@compiled
def found(p, keys, limit):
    """How many of the blocks that hold `keys[:limit]` are there, from the first on, and how many of them are owned."""
    owned, block = 0, -1
    for i in range(limit):
        block = radix.after(p, block, keys[i]) if _rooted(p) else prefixes.find(p, keys[i])
        if block < 0:
            return i, owned
        owned += p.refs[block] > 0
    return limit, owned


@compiled
def enter(p, slot, row, blocks, keys, full, hits):
    """`blocks` blocks for a new sequence, as `row`: the first `hits` found, the rest free ones; the policy caches.

    `keys[:full]` is what the first of them hold; free ones among these can be found from now on.
    """
    t = p.tally[0]
    t.hits += hits
    for i in range(hits):
        block = prefixes.find(p, keys[i])
        row[i] = block
        if _queued(p):
            if p.refs[block] == 0:
                prefixes.remove(p, block)
                t.free -= 1
                t.revived += 1
            p.refs[block] += 1
    node = radix.lock(p, row, 0, hits) if _rooted(p) else -1
    open_slot(p, slot, blocks - hits, 0)
    take_into(p, slot, row, hits, blocks - hits)
    if _queued(p):
        for i in range(hits, full):
            prefixes.learn(p, row[i], keys[i])
        return
    start = hits
    above = row[start - 1] if start else -1
    while start < full:
        above = radix.after(p, above, keys[start])
        if above < 0:
            break
        give(p, row[start])  # the tree holds the same already
        row[start] = above
        start += 1
    if start > hits:
        node = radix.lock(p, row, hits, start)
    for i in range(start, full):
        if prefixes.find(p, keys[i]) >= 0:
            full = i
            break
        p.keys[row[i]] = keys[i]
    radix.insert(p, node, row, start, full)


@inlined
def know(p, block, key):
    """`block`, taken as a free one, is full and holds `key`; the policy caches."""
    if p.keys[block] < 0:
        if _queued(p):
            prefixes.learn(p, block, key)
        elif p.refs[block] == 1:
            p.keys[block] = key  # it goes into the tree when its sequence is released


@compiled
def share(p, row):
    """One more owner for every block of a living sequence, `row`.

    What it holds goes into the tree first: forks share what is in there, or what nobody will ever find.
    """
    if _rooted(p):
        own, full = 0, 0
        while own < row.size and p.tree[row[own], INSIDE]:
            own += 1
        full = own
        while full < row.size and p.keys[row[full]] >= 0 and prefixes.find(p, p.keys[row[full]]) < 0:
            full += 1
        radix.insert(p, radix.descend(p, row, own), row, own, full)
        for i in range(full, row.size):
            p.keys[row[i]] = -1
    for block in row:
        p.refs[block] += 1


@compiled
def release(p, slot, row, blocks):
    """Drop the sequence `slot` as owner of its blocks `row[:blocks]`, and forget it; `row` may be reordered."""
    if _rooted(p):
        _release_rooted(p, row, blocks)
    elif _queued(p):
        t = p.tally[0]
        for i in range(blocks - 1, -1, -1):
            block = row[i]
            if p.keys[block] < 0:
                give(p, block)
                continue
            p.refs[block] -= 1
            if p.refs[block] == 0:
                prefixes.append(p, block)
                t.free += 1
                t.freed += 1
    else:
        if p.unordered:
            for i in range(blocks - 1, 0, -1):
                j = draws.below(p.draws, i + 1)
                row[i], row[j] = row[j], row[i]
        for i in range(blocks):
            give(p, row[i])
    close_slot(p, slot)


@compiled
def give_last(p, slot, row):
    """Drop the sequence `slot` as owner of its last blocks, `row`, in table order."""
    for i in range(row.size):
        give(p, row[i])
    if p.policy == CONTIGUOUS:
        p.slots[slot, NEXT] -= row.size


@compiled
def _release_rooted(p, row, blocks):
    t = p.tally[0]
    full, own = 0, 0
    while full < blocks and p.keys[row[full]] >= 0:
        full += 1
    while own < full and p.tree[row[own], INSIDE]:
        own += 1
    done = own
    above = row[own - 1] if own else -1
    while done < full:
        above = radix.after(p, above, p.keys[row[done]])
        if above < 0:
            break
        done += 1
    node = radix.descend(p, row, done)
    for i in range(blocks):
        p.refs[row[i]] -= 1
    for i in range(done, full):
        if prefixes.find(p, p.keys[row[i]]) >= 0:
            full = i
            break
    radix.insert(p, node, row, done, full)
    if own:
        radix.settle(p, row[own - 1])
    # what the tree has from others already, then what is not full: each goes back sorted
    for start, end in ((own, done), (full, blocks)):
        count = 0
        for i in range(start, end):
            if p.refs[row[i]] == 0:
                p.some[count] = row[i]
                p.keys[row[i]] = -1
                count += 1
        radix.newest_last(p.some, 0, count)
        for i in range(count):
            _set_loose(p, p.some[i])
    for i in range(blocks):
        if p.refs[row[i]] == 0:
            t.free += 1
            t.freed += 1


class Allocator:
    """One policy over `num_blocks` blocks, for use outside the engine.

    Every call is all-or-nothing: `OutOfBlocks` when the pool cannot serve it, `ValueError` for misuse, and after
    either the state is what it was. `slots` is how many sequences may live at once; the rest is `pool`'s.

    `content` says what full blocks hold, for the policies that cache: a key for each, a whole number, which stands for
    its tokens and all before them. Without it nothing is found again.
    """

    def __init__(self, policy, num_blocks, *, blocks_per_region=1, seed=0, plan="bestfit", frees="ordered", ahead=None,
                 slots=1024):
        self._pool = pool(policy, num_blocks, blocks_per_region, slots, seed=seed, plan=plan, frees=frees, ahead=ahead)
        self._caches = policy in CACHING
        self._tables, self._known_keys = {}, {}
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

    def cached(self):
        """The free blocks whose content can be found, the one given up next first."""
        p = self._pool
        if not self._caches:
            return []
        if p.tree.size:
            return radix.order(p)
        out, block = [], int(prefixes.first(p))
        while block != self.num_blocks:
            out += [block] if p.keys[block] >= 0 else []
            block = int(p.links[block, 1])
        return out

    def admit(self, seq, blocks, footprint=None, content=()):
        """Blocks for a new sequence -> their ids. `footprint`: all it may ever hold, which contiguous sets aside."""
        footprint = blocks if footprint is None else footprint
        self._new(seq)
        self._count("blocks", blocks)
        self._count("footprint", footprint)
        if footprint < blocks:
            raise ValueError(f"footprint is {footprint}; allowed: at least the {blocks} blocks asked for now")
        keys = self._content(content, blocks)
        hits, owned = found(self._pool, keys, keys.size) if self._caches else (0, 0)
        if blocks - owned > self.free_blocks:
            raise OutOfBlocks(
                f"sequence {seq!r} asks for {blocks} blocks; {self.free_blocks} of {self.num_blocks} are free"
            )
        slot, row = self._spare[-1], np.zeros(blocks, dtype=np.int64)
        if self._caches:
            enter(self._pool, slot, row, blocks, keys, keys.size, hits)
        elif not open_slot(self._pool, slot, blocks, footprint):
            raise OutOfBlocks(f"sequence {seq!r} asks for a span of {footprint} blocks; no free span is that long")
        else:
            take_into(self._pool, slot, row, 0, blocks)
        self._slots[seq] = self._spare.pop()
        self._tables[seq], self._known_keys[seq] = row.tolist(), keys.size
        return list(self._tables[seq])

    def grow(self, seq, blocks, content=()):
        """More blocks for a living sequence -> the new ids. `content`: of its next blocks that have become full."""
        table = self._known(seq)
        self._count("blocks", blocks)
        keys = self._content(content, len(table) + blocks - self._known_keys[seq])
        slot = self._slots[seq]
        room = self.free_blocks
        if self._pool.policy == CONTIGUOUS:
            room = int(self._pool.slots[slot, END] - self._pool.slots[slot, NEXT])
        if blocks > room:
            raise OutOfBlocks(f"sequence {seq!r} asks for {blocks} more blocks; {room} can be had")
        row = np.zeros(blocks, dtype=np.int64)
        take_into(self._pool, slot, row, 0, blocks)
        table += row.tolist()
        for key in keys.tolist() if self._caches else ():
            know(self._pool, table[self._known_keys[seq]], key)
            self._known_keys[seq] += 1
        return row.tolist()

    def release(self, seq, blocks=None):
        """Give back everything `seq` holds, or its last `blocks` (ids) and go on; shared ones stay with others.

        Blocks whose content is known go with their sequence only.
        """
        table = np.array(self._known(seq), dtype=np.int64)
        if blocks is not None:
            self._trim(seq, list(blocks))
            return
        slot = self._slots.pop(seq)
        release(self._pool, slot, table, table.size)
        self._spare.append(slot)
        del self._tables[seq], self._known_keys[seq]

    def _trim(self, seq, blocks):
        table = self._tables[seq]
        kept = len(table) - len(blocks)
        if table[max(0, kept) :] != blocks:
            raise ValueError(f"blocks are {blocks}; allowed: the last of the {len(table)} that sequence {seq!r} holds")
        known = [block for block in blocks if self._caches and self._pool.keys[block] >= 0]
        if known:
            raise ValueError(f"blocks are {blocks}; allowed: those of unknown content, that of {known[0]} is known")
        give_last(self._pool, self._slots[seq], np.array(blocks, dtype=np.int64))
        del table[kept:]
        self._known_keys[seq] = min(kept, self._known_keys[seq])

    def fork(self, parent, child):
        """`child` shares every block `parent` has now. Contiguous cannot share: ValueError."""
        table = self._known(parent)
        self._new(child)
        if self._pool.policy == CONTIGUOUS:
            allowed = ", ".join(name for name in NAMES if name != "contiguous")
            raise ValueError(f"contiguous cannot share blocks; allowed: {allowed}")
        self._slots[child] = self._spare.pop()
        open_slot(self._pool, self._slots[child], 0, 0)
        share(self._pool, np.array(table, dtype=np.int64))
        self._tables[child], self._known_keys[child] = list(table), self._known_keys[parent]
        return list(table)

    def _content(self, content, most):
        keys = list(content)
        for key in keys:
            self._count("content", key)
        if len(keys) > most:
            raise ValueError(f"content has {len(keys)} keys; allowed: at most {most}, one for each block without one")
        return np.array(keys, dtype=np.int64)

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
