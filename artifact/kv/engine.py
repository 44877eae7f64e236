"""Continuous batching: admit, decode one token per sequence and step, sample block tables, release.

A discrete model of an engine's scheduler (KV-PIMple `sim.py`, commit eb56d6d), one loop compiled with its
allocator. Per step: re-admit preempted requests, admit arrivals first come first served, decode the batch in
admission order, sample up to `sample_sequences` block tables every `sample_every` steps, release what finished.

oracle admission   a request enters when its final footprint fits beside everybody's; nothing is ever preempted
vllm admission     it enters when its prompt fits above a watermark; when blocks run out, the most recently admitted
                   other sequence is preempted: what it holds is recomputed later, or swapped to the host's memory

Where contents are shared, an allocator that caches finds them again: up to all full blocks of a prompt but the one
with its last token, as vLLM and SGLang do. The others share nothing, but for the study's one pinned prefix of the
`prefix` workload. What a request generates is its own: only itself finds it again, after a preemption.

A sequence that does not speculate needs nothing but its length to change until its last block is full: its length is
kept as what it was at step 0, and a step looks at sequences that are due.

Deviation from the study: a sequence that has finished in the current step is no preemption victim (the study picks
it, then fails with KeyError when it releases it).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from artifact.arena import Arena
from artifact.compiled import compiled, inlined
from artifact.kv import allocators, draws, regions
from artifact.kv.pool import CONTIGUOUS, NAMES, QUEUE, REGION, reserved

ADMISSIONS = ("oracle", "vllm")
ADOPTS = ("auto", "splice", "copyback")
SCRATCHES = ("separate", "shared")
PREEMPTS = ("recompute", "swap")
_MOST_PREEMPTIONS = 1000
_OWN = 1 << 62  # keys of what a request does not share lie above, 2**_OWN_BITS for each request
_OWN_BITS = 21

_COUNTERS = (
    "completed", "dropped", "preemptions", "self_preemptions", "frag_failures", "decode_steps", "samples",
    "peak_live_blocks", "cow_copies", "blocks_copied", "copied_tokens", "compactions", "spec_stalls",
    "recomputed_tokens", "blocks_swapped",
)  # fmt: skip
_CURSORS = ("step", "arrived", "active", "waiting", "spare", "finished", "committed", "rows", "cells", "done")
STATE = np.dtype([(name, np.int64) for name in (*_COUNTERS, *_CURSORS)])
# a slot: its request, its length before step 0 had it been there, its final length, blocks held, full blocks whose
# content the allocator knows, blocks set aside for speculation (contiguous), how often it has been preempted
SEAT = np.dtype([(n, np.int64) for n in ("request", "base", "total", "held", "keyed", "scratch", "preempted")])
WAIT = np.dtype([(name, np.int64) for name in ("request", "length", "preempted")])


class Rules(NamedTuple):
    """What the loop needs to know, as numbers."""

    block_tokens: int
    max_batch: int
    vllm: bool
    watermark_blocks: int
    spec_width: int  # 0 = no speculation
    spec_depth: int
    spec_accept: float
    splice: bool
    shared_scratch: bool
    compact: float
    sample_every: int
    sample_sequences: int
    swap: bool = False


class Run(NamedTuple):
    """The loop's state; n requests in arrival order, slots = max_batch sequences + 1 scratch + the pinned prefixes."""

    state: np.ndarray  # STATE [1]
    arrival: np.ndarray  # int64 [n]
    prompt: np.ndarray  # int64 [n], tokens
    total: np.ndarray  # int64 [n], final length, tokens
    prefix: np.ndarray  # int64 [n, 2], pinned prefix and its tokens; one row of -1, 0 when nothing is pinned
    known: np.ndarray  # int64 [n, 2], tokens of known content, where its ids begin; [0, 2] when nothing is cached
    ids: np.ndarray  # int64, ids of known content, each for `id_tokens` tokens and all before them
    id_tokens: int
    seats: np.ndarray  # SEAT [slots]
    tables: np.ndarray  # int32 [slots, longest], block ids
    active: np.ndarray  # int64 [max_batch], slots in admission order
    due: np.ndarray  # int64 [max_batch], the step at which each of them must be looked at
    waiting: np.ndarray  # WAIT [max_batch], preempted requests, the next one last
    spare: np.ndarray  # int64 [max_batch], slots nobody uses, the next one last
    finished: np.ndarray  # int64 [max_batch], slots
    branch: np.ndarray  # int32 [spec_width, blocks per branch]
    order: np.ndarray  # int64 [max_batch], the batch by request number
    picks: np.ndarray  # int64 [sample_sequences]
    keys: np.ndarray  # int64 [longest], what a prompt's blocks hold
    sampler: np.ndarray  # uint64 [6], random stream of what is sampled; see `draws`
    speculator: np.ndarray  # uint64 [6], of what speculation accepts


class Samples(NamedTuple):
    """A batch of sampled block tables; row i's table is `flat[starts[i]:starts[i] + blocks[i]]`."""

    step: np.ndarray  # int64 [S]
    request: np.ndarray  # int64 [S]
    tokens: np.ndarray  # int64 [S]
    live_blocks: np.ndarray  # int64 [S], of the whole pool at that moment
    free_blocks: np.ndarray  # int64 [S]
    blocks: np.ndarray  # int64 [S]
    starts: np.ndarray  # int64 [S]
    flat: np.ndarray  # int64 [cells]


@inlined
def _blocks(tokens, rules):
    return (tokens + rules.block_tokens - 1) // rules.block_tokens


@inlined
def _append(run, p, slot, n):
    """`n` more blocks at the end of the slot's table."""
    seat = run.seats[slot]
    allocators.take_into(p, slot, run.tables[slot], seat.held, n)
    seat.held += n


@compiled
def _key(run, rules, rid, block):
    """What the full block number `block` of request `rid` holds."""
    end = (block + 1) * rules.block_tokens
    if end > run.known[rid, 0]:
        return _OWN | rid << _OWN_BITS | block
    chunk = (end - 1) // run.id_tokens
    within = (block * rules.block_tokens - chunk * run.id_tokens) // rules.block_tokens
    each = max(1, run.id_tokens // rules.block_tokens)
    return run.ids[run.known[rid, 1] + chunk] * each + max(0, within)


@compiled
def _learn(run, p, rules, slot, length):
    """Tell the allocator of the slot's blocks that are full with `length` tokens."""
    seat = run.seats[slot]
    while seat.keyed < length // rules.block_tokens:
        allocators.know(p, run.tables[slot, seat.keyed], _key(run, rules, seat.request, seat.keyed))
        seat.keyed += 1


@compiled
def _share_prefix(run, p, rules, rid, slot):
    """Put the pinned prefix's blocks into the slot's table; the first request to ask for a prefix brings it in."""
    pinned = rules.max_batch + 1 + run.prefix[rid, 0]
    n = run.prefix[rid, 1] // rules.block_tokens
    if run.seats[pinned].held == 0:
        allocators.open_slot(p, pinned, n, n)
        _append(run, p, pinned, n)
    for i in range(n):
        block = run.tables[pinned, i]
        p.refs[block] += 1
        run.tables[slot, i] = block
    run.seats[slot].held = n


@compiled
def _admit(run, p, rules, rid, length, preempted):
    """Try to bring request `rid`, `length` tokens long now, into the batch."""
    s = run.state[0]
    free = p.tally[0].free
    prompt, final = _blocks(length, rules), _blocks(run.total[rid], rules)
    if prompt > p.refs.size:
        return False
    shared, ready, full, hits, scratch = 0, 0, 0, 0, 0
    if p.policy >= QUEUE:
        full = length // rules.block_tokens
        for i in range(full):
            run.keys[i] = _key(run, rules, rid, i)
        hits, ready = allocators.found(p, run.keys, (length - 1) // rules.block_tokens)
    elif run.prefix.shape[0] > 1 and run.prefix[rid, 0] >= 0 and p.policy != CONTIGUOUS:
        shared = run.prefix[rid, 1] // rules.block_tokens
        if shared and run.seats[rules.max_batch + 1 + run.prefix[rid, 0]].held:
            ready = shared
    if p.policy == CONTIGUOUS and rules.spec_width:
        scratch = rules.spec_width * _blocks(rules.block_tokens + rules.spec_depth, rules)
    if rules.vllm:
        if free - (prompt - ready) < rules.watermark_blocks or prompt - ready > free:
            return False
    elif free - s.committed < final + scratch - ready:
        return False
    slot = run.spare[s.spare - 1]
    if p.policy == CONTIGUOUS and not allocators.open_slot(p, slot, prompt, final + scratch):
        s.frag_failures += 1
        return False
    seat = run.seats[slot]
    seat.request, seat.base, seat.total, seat.held, seat.keyed = rid, length - s.step, run.total[rid], 0, full
    seat.scratch, seat.preempted = scratch, preempted
    if p.policy >= QUEUE:
        allocators.enter(p, slot, run.tables[slot], prompt, run.keys, full, hits)
        seat.held = prompt
    else:
        if shared:
            _share_prefix(run, p, rules, rid, slot)
        if p.policy != CONTIGUOUS:
            allocators.open_slot(p, slot, prompt - shared, 0)
        _append(run, p, slot, prompt - shared)
        if scratch:
            allocators.take_end(p, slot, scratch)
    if preempted:
        if rules.swap:
            s.blocks_swapped += prompt - max(hits, shared)
        else:
            s.recomputed_tokens += length - max(hits, shared) * rules.block_tokens
    s.spare -= 1
    run.active[s.active] = slot
    run.due[s.active] = s.step + min(prompt * rules.block_tokens - length, seat.total - 1 - length)
    s.active += 1
    s.committed += final - prompt
    return True


@compiled
def _compact(run, p, rules):
    """Empty every region filled below `compact`: block by block into the fullest region that is not so sparse itself.

    Which are sparse is settled before anything moves. Only blocks in a table move, shared ones in all of theirs; a move
    is neither an allocation nor a release.
    """
    s = run.state[0]
    g = p.blocks_per_region
    sparse = np.zeros(p.rooms.size, dtype=np.bool_)
    for region in range(p.rooms.size):
        sparse[region] = 0 < g - p.rooms[region] < rules.compact * g
    before = s.blocks_copied
    caches = run.tables.shape[0] - rules.max_batch - 1
    for region in range(p.rooms.size):
        for block in range(region * g, region * g + sparse[region] * g):
            if not p.refs[block]:
                continue
            moved = -1
            for i in range(s.active + caches):
                slot = run.active[i] if i < s.active else rules.max_batch + 1 + i - s.active
                for j in range(run.seats[slot].held):
                    if run.tables[slot, j] != block:
                        continue
                    if moved < 0:
                        target = -1
                        for other in range(p.rooms.size):
                            if not sparse[other] and p.rooms[other] > 0:
                                if target < 0 or p.rooms[other] < p.rooms[target]:
                                    target = other
                        if target < 0:
                            break
                        moved = regions.take(p, target)
                        p.tally[0].free -= 1
                        p.tally[0].loose -= 1
                        p.refs[moved] = p.refs[block]
                    run.tables[slot, j] = moved
            if moved >= 0:
                p.refs[block] = 1
                allocators.give(p, block)
                p.tally[0].freed -= 1
                s.blocks_copied += 1
    s.compactions += s.blocks_copied > before


@compiled
def _leave(run, p, rules, at, length):
    """Take the batch's sequence number `at`, `length` tokens long, out of it; its blocks go back."""
    s = run.state[0]
    slot = run.active[at]
    seat = run.seats[slot]
    s.committed -= _blocks(seat.total, rules) - seat.held
    if p.policy >= QUEUE:
        _learn(run, p, rules, slot, length)
    if seat.scratch:
        allocators.give_end(p, slot, seat.scratch)
    allocators.release(p, slot, run.tables[slot], seat.held)
    seat.held = 0
    s.active -= 1
    for j in range(at, s.active):
        run.active[j], run.due[j] = run.active[j + 1], run.due[j + 1]
    run.spare[s.spare] = slot
    s.spare += 1
    if rules.compact > 0.0 and p.policy == REGION:
        _compact(run, p, rules)


@compiled
def _preempt(run, p, rules, at, length):
    """Later again: the tokens so far are what the request comes back with, and it waits at the front."""
    s = run.state[0]
    seat = run.seats[run.active[at]]
    entry = run.waiting[s.waiting]
    entry.request, entry.length, entry.preempted = seat.request, length, seat.preempted + 1
    s.waiting += 1
    s.preemptions += 1
    if rules.swap:
        s.blocks_swapped += seat.held
    _leave(run, p, rules, at, length)


@compiled
def _make_room(run, p, rules, at, n):
    """Preempt the youngest other sequences until `n` blocks are free; alone, number `at` of the batch itself.

    -> where that one stands in the batch now; -1 - at when it is gone.
    """
    s = run.state[0]
    while p.tally[0].free < n:
        victim, length = -1, 0
        for i in range(s.active - 1, -1, -1):
            seat = run.seats[run.active[i]]
            length = seat.base + s.step + (i < at)  # those before it have had their turn
            if i != at and length < seat.total:
                victim = i
                break
        if victim < 0:
            _preempt(run, p, rules, at, run.seats[run.active[at]].base + s.step)
            s.self_preemptions += 1
            return -1 - at
        _preempt(run, p, rules, victim, length)
        if victim < at:
            at -= 1
    return at


@compiled
def _grow_to(run, p, rules, at, tokens):
    """Blocks for `tokens` tokens in all -> as `_make_room`: where the sequence stands, or that it is gone."""
    seat = run.seats[run.active[at]]
    n = _blocks(tokens, rules) - seat.held
    if n <= 0:
        return at
    if rules.vllm and p.tally[0].free < n:
        at = _make_room(run, p, rules, at, n)
        if at < 0:
            return at
    run.state[0].committed -= n
    slot = run.active[at]
    if p.policy >= QUEUE:
        _learn(run, p, rules, slot, seat.base + run.state[0].step)
    _append(run, p, slot, n)
    return at


@compiled
def _next(run, p, rules, at):
    """One token for number `at` of the batch, which is due -> the number to look at next."""
    s = run.state[0]
    seat = run.seats[run.active[at]]
    length = seat.base + s.step + 1
    if length > seat.held * rules.block_tokens:
        at = _grow_to(run, p, rules, at, length)
        if at < 0:
            return -1 - at
    if length >= seat.total:
        run.finished[s.finished] = run.active[at]
        s.finished += 1
    run.due[at] = s.step + 1 + min(seat.held * rules.block_tokens - length, seat.total - 1 - length)
    return at + 1


@compiled
def _speculate(run, p, rules, at):
    """One round of number `at` of the batch: draft `spec_width` branches of `spec_depth` tokens, keep the winner's
    accepted ones -> the number to look at next."""
    s = run.state[0]
    slot = run.active[at]
    seat = run.seats[slot]
    length = seat.base + s.step
    accepted = 0
    while accepted < rules.spec_depth and draws.random(run.speculator) < rules.spec_accept ** (accepted + 1):
        accepted += 1
    advance = min(accepted + 1, seat.total - length)
    winner = draws.below(run.speculator, rules.spec_width)
    used = length % rules.block_tokens
    size = _blocks(used + rules.spec_depth + 1, rules)
    growth = 0
    if not rules.splice and not rules.vllm:  # its own new blocks are taken beside the branches
        growth = max(0, _blocks(length + advance, rules) - seat.held)
    if p.policy == CONTIGUOUS:  # its scratch was set aside at admission
        s.copied_tokens += advance
        at = _grow_to(run, p, rules, at, length + advance)
    elif p.tally[0].free < rules.spec_width * size + growth:
        s.spec_stalls += 1
        advance = 1
        at = _grow_to(run, p, rules, at, length + 1)
    else:
        owner = slot if rules.shared_scratch else rules.max_batch
        allocators.make_room(p, rules.spec_width * size)
        for w in range(rules.spec_width):
            for i in range(size):
                run.branch[w, i] = allocators.take(p, owner)
        if used:
            s.copied_tokens += rules.spec_width * used
        if rules.splice:
            before = seat.held
            if used:
                seat.held -= 1
                allocators.give(p, run.tables[slot, seat.held])
                s.cow_copies += 1
            kept = _blocks(used + advance, rules)
            for i in range(size):
                if i < kept:
                    run.tables[slot, seat.held] = run.branch[winner, i]
                    seat.held += 1
                else:
                    allocators.give(p, run.branch[winner, i])
            s.committed -= seat.held - before
            if p.policy >= QUEUE:
                _learn(run, p, rules, slot, length + advance)
        else:
            s.copied_tokens += advance
            at = _grow_to(run, p, rules, at, length + advance)
        for w in range(rules.spec_width):
            if w != winner or not rules.splice:
                for i in range(size):
                    allocators.give(p, run.branch[w, i])
    if at < 0:
        return -1 - at
    seat.base += advance - 1
    if length + advance >= seat.total:
        run.finished[s.finished] = slot
        s.finished += 1
    return at + 1


@compiled
def _sample(run, p, rules, out):
    """Copy the tables of a random few of the batch, in ascending order of request number."""
    s = run.state[0]
    n = s.active
    for i in range(n):
        slot = run.active[i]
        rid = run.seats[slot].request
        j = i
        while j > 0 and run.seats[run.order[j - 1]].request > rid:
            run.order[j] = run.order[j - 1]
            j -= 1
        run.order[j] = slot
    k = min(rules.sample_sequences, n)
    draws.choice(run.sampler, n, run.picks[:k])
    for i in range(1, k):
        pick, j = run.picks[i], i
        while j > 0 and run.picks[j - 1] > pick:
            run.picks[j] = run.picks[j - 1]
            j -= 1
        run.picks[j] = pick
    for i in range(k):
        slot = run.order[run.picks[i]]
        seat = run.seats[slot]
        row = s.rows
        out.step[row], out.request[row], out.tokens[row] = s.step, seat.request, seat.base + s.step + 1
        out.free_blocks[row] = p.tally[0].free
        out.live_blocks[row] = p.refs.size - p.tally[0].free
        out.blocks[row], out.starts[row] = seat.held, s.cells
        for j in range(seat.held):
            out.flat[s.cells + j] = run.tables[slot, j]
        s.cells += seat.held
        s.rows += 1
        s.samples += 1


@compiled
def _admit_all(run, p, rules):
    """Preempted requests first, then arrivals, head of line; what cannot enter an empty machine is dropped."""
    s = run.state[0]
    while s.waiting and s.active < rules.max_batch:
        entry = run.waiting[s.waiting - 1]
        if entry.preempted > _MOST_PREEMPTIONS or _blocks(entry.length + 1, rules) > p.refs.size:
            s.waiting -= 1
            s.dropped += 1
            continue
        if not _admit(run, p, rules, entry.request, entry.length, entry.preempted):
            if s.active:
                return
            s.dropped += 1
        s.waiting -= 1
    while s.arrived < run.arrival.size and run.arrival[s.arrived] <= s.step and s.active < rules.max_batch:
        if not _admit(run, p, rules, s.arrived, run.prompt[s.arrived], np.int64(0)):
            if s.active:
                return
            s.dropped += 1
        s.arrived += 1


@compiled
def _advance(run, p, rules, out, steps):
    """Run up to `steps` steps, or until `out` is full or nothing is left to do."""
    s = run.state[0]
    s.rows, s.cells = 0, 0
    last_row, last_cell = out.step.size - rules.sample_sequences, out.flat.size - rules.sample_sequences * run.keys.size
    arrival, due = run.arrival, run.due
    for _ in range(steps):
        if s.rows > last_row or s.cells > last_cell:
            return
        step = s.step
        if s.active < rules.max_batch and (s.waiting or (s.arrived < arrival.size and arrival[s.arrived] <= step)):
            _admit_all(run, p, rules)
        if s.active == 0:
            if s.arrived == arrival.size and s.waiting == 0:
                s.done = 1
                return
            following = arrival[s.arrived] if s.arrived < arrival.size else step + 1
            s.step = max(step + 1, following)
            continue
        s.finished = 0
        at = np.int64(0)  # a bare 0 is a type of its own to Numba, and everything below compiled twice
        if rules.spec_width:
            while at < s.active:
                at = _speculate(run, p, rules, at)
        else:
            active = s.active
            while at < active:
                if due[at] > step:
                    at += 1
                else:
                    at = _next(run, p, rules, at)
                    active = s.active
        s.decode_steps += 1
        s.peak_live_blocks = max(s.peak_live_blocks, p.refs.size - p.tally[0].free)
        if step % rules.sample_every == 0 and s.active:
            _sample(run, p, rules, out)
        at = np.int64(0)
        for i in range(s.finished):
            while run.active[at] != run.finished[i]:
                at = at + 1 if at + 1 < s.active else 0
            _leave(run, p, rules, at, run.seats[run.finished[i]].total)
            s.completed += 1
        s.step = step + 1


@dataclass(frozen=True)
class Outcome:
    """What a finished run counted; blocks and tokens are counts, see the column names of `results`."""

    completed: int
    dropped: int
    preemptions: int
    self_preemptions: int
    frag_failures: int
    decode_steps: int
    samples: int
    peak_live_blocks: int
    cow_copies: int
    blocks_copied: int
    copied_tokens: int
    compactions: int
    spec_stalls: int
    recomputed_tokens: int
    blocks_swapped: int
    pool_blocks: int
    blocks_allocated_total: int
    prefix_hit_blocks: int


class Engine:
    """One run of `requests` through `pool` (see `allocators.pool`; needs `Engine.slots` slots).

    Iterate `samples()` to its end, then read `outcome()`. The run advances only while it is iterated, a bounded
    number of steps at a time, so that it can be shown, interrupted and kept in bounded memory.
    """

    def __init__(self, requests, pool, rules, *, seed=0, rows=8192):
        n, slots = len(requests), self.slots(requests, rules.max_batch)
        self._names = None
        if np.any(np.diff(requests.arrival_step) < 0):
            self._names = np.argsort(requests.arrival_step, kind="stable")
            requests = requests.taken(self._names)
        total = requests.total_tokens
        longest = int(min(-(-total.max() // rules.block_tokens), pool.refs.size)) + 1
        branch = -(-(rules.block_tokens - 1 + rules.spec_depth + 1) // rules.block_tokens) if rules.spec_width else 0
        self._pool, self._rules = pool, rules
        state = np.zeros(1, dtype=STATE)
        state["spare"] = rules.max_batch
        caches, pins = pool.policy >= QUEUE, slots > rules.max_batch + 1
        content = requests.content
        ids = np.zeros(0, dtype=np.int64) if content is None else content.ids
        self._run = Arena(Run(
            state=state,
            arrival=np.ascontiguousarray(requests.arrival_step),
            prompt=np.ascontiguousarray(requests.prompt_tokens),
            total=total,
            prefix=np.stack([requests.prefix_id, requests.prefix_tokens], axis=1) if pins else np.array([[-1, 0]]),
            known=_known(requests, n) if caches else np.zeros((0, 2), dtype=np.int64),
            ids=ids,
            id_tokens=1 if content is None else content.id_tokens,
            seats=np.zeros(slots, dtype=SEAT),
            tables=np.zeros((slots, longest), dtype=np.int32),
            active=np.zeros(rules.max_batch, dtype=np.int64),
            due=np.zeros(rules.max_batch, dtype=np.int64),
            waiting=np.zeros(rules.max_batch, dtype=WAIT),
            spare=np.arange(rules.max_batch - 1, -1, -1, dtype=np.int64),
            finished=np.zeros(rules.max_batch, dtype=np.int64),
            branch=np.zeros((rules.spec_width, branch), dtype=np.int32),
            order=np.zeros(rules.max_batch, dtype=np.int64),
            picks=np.zeros(rules.sample_sequences, dtype=np.int64),
            keys=np.zeros(longest, dtype=np.int64),
            sampler=draws.stream(seed + 1),
            speculator=draws.stream(seed + 2),
        ))
        cells = max(1 << 18, 4 * rules.sample_sequences * longest)
        rows = max(rows, rules.sample_sequences)
        self._out = Arena(Samples(
            *(np.zeros(rows, dtype=np.int64) for _ in range(7)), np.zeros(cells, dtype=np.int64)))

    @staticmethod
    def slots(requests, max_batch):
        """Slots an allocator needs: the batch, the speculation scratch, and one for each pinned prefix."""
        return max_batch + 1 + int(requests.prefix_id.max(initial=-1) + 1)

    @property
    def progress(self):
        """(requests that have left or entered, all requests)."""
        return int(self._run.state["arrived"][0]), self._run.arrival.size

    def samples(self, steps=100_000):
        """Yield `Samples` batches until every request is served or dropped; a batch may be empty."""
        s = self._run.state
        while not s["done"][0]:
            _advance(self._run, self._pool, self._rules, self._out, steps)
            rows, cells = int(s["rows"][0]), int(s["cells"][0])
            batch = Samples(*(getattr(self._out, name)[:rows] for name in Samples._fields[:7]), self._out.flat[:cells])
            yield batch if self._names is None else batch._replace(request=self._names[batch.request])
        self._release_prefixes()

    def _release_prefixes(self):
        """The pinned prefixes go last; after them the pool is whole again."""
        seats = self._run.seats
        for slot in range(self._rules.max_batch + 1, seats.size):
            allocators.release(self._pool, slot, self._run.tables[slot], seats["held"][slot])
        tally, names = self._pool.tally[0], NAMES[self._pool.policy]
        whole = tally["free"] == self._pool.refs.size - reserved(names)
        assert whole and tally["allocated"] + tally["revived"] == tally["freed"], "blocks leaked"

    def outcome(self):
        """The counts of a run whose samples were iterated to the end."""
        state, tally = self._run.state[0], self._pool.tally[0]
        counts = {name: int(state[name]) for name in _COUNTERS}
        return Outcome(**counts, pool_blocks=self._pool.refs.size, blocks_allocated_total=int(tally["allocated"]),
                       prefix_hit_blocks=int(tally["hits"]))


def _known(requests, n):
    """Per request: tokens of known content, and where its ids begin."""
    if requests.content is None:
        return np.zeros((n, 2), dtype=np.int64)
    return np.stack([requests.content.known_tokens, requests.content.starts], axis=1)
