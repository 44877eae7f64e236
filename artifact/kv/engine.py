"""Continuous batching: admit, decode one token per sequence and step, sample block tables, release.

A discrete model of an engine's scheduler (KV-PIMple `sim.py`, commit eb56d6d), one loop compiled with its
allocator. Per step: re-admit preempted requests, admit arrivals first come first served, decode the batch in
admission order, sample up to `sample_sequences` block tables every `sample_every` steps, release what finished.

oracle admission   a request enters when its final footprint fits beside everybody's; nothing is ever preempted
vllm admission     it enters when its prompt fits above a watermark; when blocks run out, the most recently admitted
                   other sequence is preempted and later recomputed

Deviation from the study: a sequence that has finished in the current step is no preemption victim (the study picks
it, then fails with KeyError when it releases it).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from artifact.compiled import compiled
from artifact.kv import allocators
from artifact.kv.allocators import CONTIGUOUS, REGION

ADMISSIONS = ("oracle", "vllm")
ADOPTS = ("auto", "splice", "copyback")
SCRATCHES = ("separate", "shared")
_MOST_PREEMPTIONS = 1000

_COUNTERS = (
    "completed", "dropped", "preemptions", "self_preemptions", "frag_failures", "decode_steps", "samples",
    "peak_live_blocks", "cow_copies", "blocks_copied", "copied_tokens", "compactions", "spec_stalls",
)  # fmt: skip
_CURSORS = ("step", "arrived", "active", "waiting", "spare", "finished", "committed", "rows", "cells", "done")
STATE = np.dtype([(name, np.int64) for name in (*_COUNTERS, *_CURSORS)])


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


class Run(NamedTuple):
    """The loop's state; n requests in arrival order, slots = max_batch sequences + 1 scratch + the shared prefixes."""

    state: np.ndarray  # STATE [1]
    arrival: np.ndarray  # int64 [n]
    total: np.ndarray  # int64 [n], final length, tokens
    length: np.ndarray  # int64 [n], length now, tokens
    prefix_id: np.ndarray  # int64 [n]
    prefix_tokens: np.ndarray  # int64 [n]
    preempted: np.ndarray  # int32 [n], times
    request: np.ndarray  # int64 [slots], request in each slot
    tables: np.ndarray  # int32 [slots, longest], block ids
    held: np.ndarray  # int64 [slots], length of each table, blocks
    scratch: np.ndarray  # int64 [slots], blocks set aside for speculation at admission (contiguous)
    gone: np.ndarray  # bool [slots], preempted or finished in this step
    active: np.ndarray  # int32 [max_batch], slots in admission order
    turn: np.ndarray  # int32 [max_batch], the batch as it was when decoding began
    waiting: np.ndarray  # int64 [n], preempted requests, the next one last
    spare: np.ndarray  # int32 [max_batch], slots nobody uses, the next one last
    finished: np.ndarray  # int32 [max_batch]
    branch: np.ndarray  # int32 [spec_width, blocks per branch]
    order: np.ndarray  # int64 [max_batch], request numbers of the batch, ascending


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


@compiled
def _blocks(tokens, rules):
    return (tokens + rules.block_tokens - 1) // rules.block_tokens


@compiled
def _append(run, p, slot, n):
    """`n` more blocks at the end of the slot's table."""
    for _ in range(n):
        run.tables[slot, run.held[slot]] = allocators.take(p, slot)
        run.held[slot] += 1


@compiled
def _share_prefix(run, p, rules, rid, slot):
    """Put the request's cached prefix blocks into its table; the first request to ask for a prefix fills the cache."""
    cache = rules.max_batch + 1 + run.prefix_id[rid]
    n = run.prefix_tokens[rid] // rules.block_tokens
    if run.held[cache] == 0:
        allocators.open_slot(p, cache, n, n)
        _append(run, p, cache, n)
    for i in range(n):
        block = run.tables[cache, i]
        p.refs[block] += 1
        run.tables[slot, i] = block
    run.held[slot] = n


@compiled
def _admit(run, p, rules, rid):
    """Try to bring request `rid` into the batch."""
    s = run.state[0]
    free = p.tally[0].free
    prompt, final = _blocks(run.length[rid], rules), _blocks(run.total[rid], rules)
    shares = run.prefix_id[rid] >= 0 and run.prefix_tokens[rid] >= rules.block_tokens and p.policy != CONTIGUOUS
    cached, ready = 0, 0
    if shares:
        cached = run.prefix_tokens[rid] // rules.block_tokens
        if run.held[rules.max_batch + 1 + run.prefix_id[rid]]:
            ready = cached
    scratch = 0
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
    run.held[slot] = 0
    if shares:
        _share_prefix(run, p, rules, rid, slot)
    if p.policy != CONTIGUOUS:
        allocators.open_slot(p, slot, prompt - cached, 0)
    _append(run, p, slot, prompt - cached)
    run.scratch[slot] = scratch
    if scratch:
        allocators.take_end(p, slot, scratch)
    s.spare -= 1
    run.request[slot] = rid
    run.gone[slot] = False
    run.active[s.active] = slot
    s.active += 1
    s.committed += final - prompt
    return True


@compiled
def _compact(run, p, rules):
    """Empty every region filled below `compact`: its blocks go one by one to the fullest other region with room."""
    s = run.state[0]
    g = p.blocks_per_region
    for region in range(p.room.size):
        if not 0 < g - p.room[region] < rules.compact * g:
            continue
        s.compactions += 1
        for i in range(s.active):
            slot = run.active[i]
            for j in range(run.held[slot]):
                block = run.tables[slot, j]
                if block // g != region:
                    continue
                target = -1
                for other in range(p.room.size):
                    if other != region and p.room[other] > 0 and (target < 0 or p.room[other] < p.room[target]):
                        target = other
                if target < 0:
                    return
                moved = allocators.take_in_region(p, target)
                p.refs[moved] = p.refs[block]
                p.refs[block] = 1
                allocators.give(p, block)
                s.blocks_copied += 1
                for other in range(run.tables.shape[0]):
                    for k in range(run.held[other]):
                        if run.tables[other, k] == block:
                            run.tables[other, k] = moved


@compiled
def _leave(run, p, rules, slot):
    """Take the slot's sequence out of the batch and give its blocks back, scratch first, then in table order."""
    s = run.state[0]
    s.committed -= _blocks(run.total[run.request[slot]], rules) - run.held[slot]
    if run.scratch[slot]:
        allocators.give_end(p, slot, run.scratch[slot])
    for i in range(run.held[slot]):
        allocators.give(p, run.tables[slot, i])
    allocators.close_slot(p, slot)
    i = 0
    while run.active[i] != slot:
        i += 1
    for j in range(i, s.active - 1):
        run.active[j] = run.active[j + 1]
    s.active -= 1
    run.gone[slot] = True
    run.spare[s.spare] = slot
    s.spare += 1
    if rules.compact > 0.0 and p.policy == REGION:
        _compact(run, p, rules)


@compiled
def _preempt(run, p, rules, slot):
    """Recompute later: the tokens so far become the prompt, the request waits at the front."""
    s = run.state[0]
    rid = run.request[slot]
    _leave(run, p, rules, slot)
    run.preempted[rid] += 1
    run.waiting[s.waiting] = rid
    s.waiting += 1
    s.preemptions += 1


@compiled
def _make_room(run, p, rules, slot, n):
    """Preempt the youngest other sequences until `n` blocks are free; alone, `slot` itself. False when it is gone."""
    s = run.state[0]
    while p.tally[0].free < n:
        victim = -1
        for i in range(s.active - 1, -1, -1):
            other = run.active[i]
            if other != slot and run.length[run.request[other]] < run.total[run.request[other]]:
                victim = other
                break
        if victim < 0:
            _preempt(run, p, rules, slot)
            s.self_preemptions += 1
            return False
        _preempt(run, p, rules, victim)
    return True


@compiled
def _grow_to(run, p, rules, slot, tokens):
    """Blocks for `tokens` tokens in all; False when the sequence was preempted for want of them."""
    n = _blocks(tokens, rules) - run.held[slot]
    if n <= 0:
        return True
    if rules.vllm and not _make_room(run, p, rules, slot, n):
        return False
    run.state[0].committed -= n
    _append(run, p, slot, n)
    return True


@compiled
def _decode(run, p, rules, slot):
    """One token."""
    rid = run.request[slot]
    if _grow_to(run, p, rules, slot, run.length[rid] + 1):
        run.length[rid] += 1


@compiled
def _speculate(run, p, rules, slot, rng):
    """One round: draft `spec_width` branches of `spec_depth` tokens, keep the winner's accepted ones."""
    s = run.state[0]
    rid = run.request[slot]
    accepted = 0
    while accepted < rules.spec_depth and rng.random() < rules.spec_accept ** (accepted + 1):
        accepted += 1
    advance = min(accepted + 1, run.total[rid] - run.length[rid])
    winner = rng.integers(0, rules.spec_width)
    if p.policy == CONTIGUOUS:  # its scratch was set aside at admission
        s.copied_tokens += advance
        _grow_to(run, p, rules, slot, run.length[rid] + advance)
        run.length[rid] += advance
        return
    used = run.length[rid] % rules.block_tokens
    size = _blocks(used + rules.spec_depth + 1, rules)
    growth = 0
    if not rules.splice and not rules.vllm:  # its own new blocks are taken beside the branches
        growth = max(0, _blocks(run.length[rid] + advance, rules) - run.held[slot])
    if p.tally[0].free < rules.spec_width * size + growth:
        s.spec_stalls += 1
        _decode(run, p, rules, slot)
        return
    owner = slot if rules.shared_scratch else rules.max_batch
    for w in range(rules.spec_width):
        for i in range(size):
            run.branch[w, i] = allocators.take(p, owner)
    if used:
        s.copied_tokens += rules.spec_width * used
    if rules.splice:
        before = run.held[slot]
        if used:
            run.held[slot] -= 1
            allocators.give(p, run.tables[slot, run.held[slot]])
            s.cow_copies += 1
        kept = _blocks(used + advance, rules)
        for i in range(kept):
            run.tables[slot, run.held[slot]] = run.branch[winner, i]
            run.held[slot] += 1
        for i in range(kept, size):
            allocators.give(p, run.branch[winner, i])
        s.committed -= run.held[slot] - before
    else:
        s.copied_tokens += advance
        if not _grow_to(run, p, rules, slot, run.length[rid] + advance):
            advance = 0
    for w in range(rules.spec_width):
        if w != winner or not rules.splice:
            for i in range(size):
                allocators.give(p, run.branch[w, i])
    run.length[rid] += advance


@compiled
def _choose(rng, n, k, out):
    """NumPy's `Generator.choice(n, k, replace=False)`, draw for draw (Floyd's algorithm, then a shuffle)."""
    m = 0
    for j in range(n - k, n):
        v = rng.integers(0, j + 1)
        for q in range(m):
            if out[q] == v:
                v = j
                break
        out[m] = v
        m += 1
    for i in range(k - 1, 0, -1):
        j = rng.integers(0, i + 1)
        out[i], out[j] = out[j], out[i]


@compiled
def _sample(run, p, rules, rng, out):
    """Copy the tables of a random few of the batch, in ascending order of request number."""
    s = run.state[0]
    n = s.active
    for i in range(n):
        rid = run.request[run.active[i]]
        j = i
        while j > 0 and run.order[j - 1] > rid:
            run.order[j] = run.order[j - 1]
            j -= 1
        run.order[j] = rid
    k = min(rules.sample_sequences, n)
    picks = np.empty(k, dtype=np.int64)
    _choose(rng, n, k, picks)
    picks.sort()
    for pick in picks:
        rid = run.order[pick]
        slot = 0
        for i in range(n):
            if run.request[run.active[i]] == rid:
                slot = run.active[i]
        row = s.rows
        out.step[row], out.request[row], out.tokens[row] = s.step, rid, run.length[rid]
        out.free_blocks[row] = p.tally[0].free
        out.live_blocks[row] = p.refs.size - p.tally[0].free
        out.blocks[row], out.starts[row] = run.held[slot], s.cells
        for j in range(run.held[slot]):
            out.flat[s.cells + j] = run.tables[slot, j]
        s.cells += run.held[slot]
        s.rows += 1
        s.samples += 1


@compiled
def _admit_all(run, p, rules):
    """Preempted requests first, then arrivals, head of line; what cannot enter an empty machine is dropped."""
    s = run.state[0]
    while s.waiting and s.active < rules.max_batch:
        rid = run.waiting[s.waiting - 1]
        if run.preempted[rid] > _MOST_PREEMPTIONS or _blocks(run.length[rid] + 1, rules) > p.refs.size:
            s.waiting -= 1
            s.dropped += 1
            continue
        if not _admit(run, p, rules, rid):
            if s.active:
                return
            s.dropped += 1
        s.waiting -= 1
    while s.arrived < run.arrival.size and run.arrival[s.arrived] <= s.step and s.active < rules.max_batch:
        if not _admit(run, p, rules, s.arrived):
            if s.active:
                return
            s.dropped += 1
        s.arrived += 1


@compiled
def _advance(run, p, rules, rng_sample, rng_spec, out, steps):
    """Run up to `steps` steps, or until `out` is full or nothing is left to do."""
    s = run.state[0]
    s.rows, s.cells = 0, 0
    longest = run.tables.shape[1]
    turn, active, gone, request = run.turn, run.active, run.gone, run.request
    length, total, held = run.length, run.total, run.held
    for _ in range(steps):
        if (
            s.rows + rules.sample_sequences > out.step.size
            or s.cells + rules.sample_sequences * longest > out.flat.size
        ):
            return
        _admit_all(run, p, rules)
        if s.active == 0:
            if s.arrived == run.arrival.size and s.waiting == 0:
                s.done = 1
                return
            following = run.arrival[s.arrived] if s.arrived < run.arrival.size else s.step + 1
            s.step = max(s.step + 1, following)
            continue
        s.finished = 0
        batch = s.active
        turn[:batch] = active[:batch]
        for i in range(batch):
            slot = turn[i]
            if gone[slot]:
                continue
            rid = request[slot]
            if rules.spec_width:
                _speculate(run, p, rules, slot, rng_spec)
            elif length[rid] < held[slot] * rules.block_tokens:  # the common case: room in the last block
                length[rid] += 1
            else:
                _decode(run, p, rules, slot)
            if length[rid] >= total[rid] and not gone[slot]:
                run.finished[s.finished] = slot
                s.finished += 1
        s.decode_steps += 1
        s.peak_live_blocks = max(s.peak_live_blocks, p.refs.size - p.tally[0].free)
        if s.step % rules.sample_every == 0 and s.active:
            _sample(run, p, rules, rng_sample, out)
        for i in range(s.finished):
            _leave(run, p, rules, run.finished[i])
            s.completed += 1
        s.step += 1


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
    pool_blocks: int
    blocks_allocated_total: int


class Engine:
    """One run of `requests` through `pool` (see `allocators.pool`; needs `Engine.slots` slots).

    Iterate `samples()` to its end, then read `outcome()`. The run advances only while it is iterated, a bounded
    number of steps at a time, so that it can be shown, interrupted and kept in bounded memory.
    """

    def __init__(self, requests, pool, rules, *, seed=0, rows=4096):
        n, slots = len(requests), self.slots(requests, rules.max_batch)
        order = np.lexsort((np.arange(n), requests.arrival_step))
        longest = int(min(-(-requests.total_tokens.max() // rules.block_tokens), pool.refs.size)) + 1
        branch = -(-(rules.block_tokens - 1 + rules.spec_depth + 1) // rules.block_tokens) if rules.spec_width else 0
        self._names = order
        self._pool, self._rules = pool, rules
        self._rngs = np.random.default_rng(seed + 1), np.random.default_rng(seed + 2)
        state = np.zeros(1, dtype=STATE)
        state["spare"] = rules.max_batch
        self._run = Run(
            state=state,
            arrival=requests.arrival_step[order],
            total=requests.total_tokens[order],
            length=requests.prompt_tokens[order].copy(),
            prefix_id=requests.prefix_id[order],
            prefix_tokens=requests.prefix_tokens[order],
            preempted=np.zeros(n, dtype=np.int32),
            request=np.zeros(slots, dtype=np.int64),
            tables=np.zeros((slots, longest), dtype=np.int32),
            held=np.zeros(slots, dtype=np.int64),
            scratch=np.zeros(slots, dtype=np.int64),
            gone=np.zeros(slots, dtype=np.bool_),
            active=np.zeros(rules.max_batch, dtype=np.int32),
            turn=np.zeros(rules.max_batch, dtype=np.int32),
            waiting=np.zeros(n, dtype=np.int64),
            spare=np.arange(rules.max_batch - 1, -1, -1, dtype=np.int32),
            finished=np.zeros(rules.max_batch, dtype=np.int32),
            branch=np.zeros((rules.spec_width, branch), dtype=np.int32),
            order=np.zeros(rules.max_batch, dtype=np.int64),
        )
        cells = max(1 << 18, 4 * rules.sample_sequences * longest)
        rows = max(rows, rules.sample_sequences)
        self._out = Samples(*(np.zeros(rows, dtype=np.int64) for _ in range(7)), np.zeros(cells, dtype=np.int64))

    @staticmethod
    def slots(requests, max_batch):
        """Slots an allocator needs: the batch, the speculation scratch, and one for each shared prefix."""
        return max_batch + 1 + int(requests.prefix_id.max(initial=-1) + 1)

    @property
    def progress(self):
        """(requests that have left or entered, all requests)."""
        return int(self._run.state["arrived"][0]), self._run.arrival.size

    def samples(self, steps=100_000):
        """Yield `Samples` batches until every request is served or dropped; a batch may be empty."""
        s = self._run.state
        while not s["done"][0]:
            _advance(self._run, self._pool, self._rules, *self._rngs, self._out, steps)
            rows, cells = int(s["rows"][0]), int(s["cells"][0])
            batch = Samples(*(a[:rows] for a in self._out[:7]), self._out.flat[:cells])
            yield batch._replace(request=self._names[batch.request])
        self._release_prefixes()

    def _release_prefixes(self):
        """The pinned prefixes go last; after them the pool is whole again."""
        for slot in range(self._rules.max_batch + 1, self._run.held.size):
            for i in range(self._run.held[slot]):
                allocators.give(self._pool, self._run.tables[slot, i])
            allocators.close_slot(self._pool, slot)
        tally = self._pool.tally[0]
        assert tally["free"] == self._pool.refs.size and tally["allocated"] == tally["freed"], "blocks leaked"

    def outcome(self):
        """The counts of a run whose samples were iterated to the end."""
        state, tally = self._run.state[0], self._pool.tally[0]
        counts = {name: int(state[name]) for name in _COUNTERS}
        return Outcome(**counts, pool_blocks=self._pool.refs.size, blocks_allocated_total=int(tally["allocated"]))
