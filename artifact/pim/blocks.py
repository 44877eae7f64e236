"""The counts of `reads` block by block instead of burst by burst, where every window lies inside one block.

In an XOR-linear map a block's bursts differ from another's by its base alone, so that what a block costs is the same
for all of them but for its first window, which hits when its row is the one left open before. That takes, in every
channel, whole windows in each block, and one row in the first; elsewhere bursts are counted.
"""

from typing import NamedTuple

import numpy as np

from artifact.compiled import compiled, inlined
from artifact.pim import bandwidth, reads

FIRST, ALONE = 0, 1  # parts of a block: its first t tokens, or the last of those alone


class Whole(NamedTuple):
    """What each part of a block costs in each channel c of C, for t from 0 to all tokens of a block: cost[part, t, c].

    Channels and rows are those of a block at channel and row 0: another's are these XOR its own. A part that costs the
    same in every channel is `even`.
    """

    base: np.ndarray  # int64 [num_blocks], packed coordinates of each block's first burst
    bursts: np.ndarray  # int64 [2, block_tokens + 1, C]
    commands: np.ndarray  # int64 [2, block_tokens + 1, C]
    misses: np.ndarray  # int64 [2, block_tokens + 1, C], with no row open before
    first: np.ndarray  # int64 [2, block_tokens + 1, C], row of the first window
    last: np.ndarray  # int64 [2, block_tokens + 1, C], row left open
    even: np.ndarray  # bool [2, block_tokens + 1]
    row_bits: int  # packed coordinates above them are the row
    block_tokens: int
    token_bursts: int
    turn: int
    writes: bool


def whole(r, num_blocks, *, coalesce="window", window=64):
    """The `Whole` of `num_blocks` blocks that lie and are read as the `reads.Reading` `r` says, or None where bursts
    must be counted. ValueError for a mode or window that there is not."""
    size = r.block_tokens * r.token_bursts
    if bandwidth.in_order(coalesce, window) or size & (size - 1) or r.base % size or r.turn % r.block_tokens:
        return None
    bank_bits = (r.banks - 1).bit_length()
    row_bits = r.channel_bits + bank_bits
    at = r.base + np.arange(num_blocks) * size
    base = r.low[at & (1 << r.bits) - 1] ^ r.high[at >> r.bits]
    relative = np.arange(r.channels) ^ (base[0] & r.channels - 1)
    costs = np.zeros((5, 2, r.block_tokens + 1, r.channels), dtype=np.int64)
    for part in (FIRST, ALONE) if r.writes else (FIRST,):
        for t in range(r.block_tokens, 0, -1):
            cost = _part(r, t - 1 if part == ALONE else 0, t, window, bank_bits)
            if cost is None or (part == FIRST and t == r.block_tokens and (cost[0] % window).any()):
                return None
            cost[3:] ^= np.where(cost[0] > 0, base[0] >> row_bits, 0)
            costs[:, part, t] = cost[:, relative]
    even = (costs == costs[..., :1]).all(axis=(0, 3)) & (costs[0, :, :, 0] > 0)
    return Whole(base, *costs, even, row_bits, r.block_tokens, r.token_bursts, r.turn, r.writes)


def _part(r, first, last, window, bank_bits):
    """Tokens `first` up to `last` of block 0 by channel: int64 [5, C] of bursts, commands, misses, first and last row;
    None when a channel's first window has several rows."""
    keys, starts = np.empty((last - first) * r.token_bursts, np.int64), np.empty(r.channels + 1, np.int64)
    filled, opened = np.empty(r.channels, np.int64), np.full(r.channels, -1)
    out = np.zeros((r.channels, 3), np.int64)
    reads.fill(r, np.zeros(1, np.int64), first, last, keys, starts, filled)
    w = min(window, keys.size)
    scratch = np.zeros(w, np.int64), np.zeros(w * r.banks, np.int64), np.zeros(w, np.int64)
    reads.serve(r, keys, starts, filled, window, False, opened, *scratch, out)
    rows = np.zeros(r.channels, np.int64)
    for c in np.flatnonzero(out[:, 0]):
        begin = keys[starts[c] : filled[c]][:window] >> bank_bits
        if (begin != begin[0]).any():
            return None
        rows[c] = begin[0]
    return np.stack([*out.T, rows, np.where(out[:, 0] > 0, opened, 0)])


@inlined
def _add(w, part, t, block, commands, misses, opened, shared):
    """One part of a block. While all channels are alike, `shared` is commands, misses and the open row of all of them
    and its last entry 1; otherwise `opened` has each channel's row. `commands`, `misses` [C]: what is not shared."""
    packed = w.base[block]
    row = packed >> w.row_bits
    if shared[3] and w.even[part, t]:
        shared[0] += w.commands[part, t, 0]
        shared[1] += w.misses[part, t, 0] - (shared[2] == row ^ w.first[part, t, 0])
        shared[2] = row ^ w.last[part, t, 0]
        return
    if shared[3]:
        opened[:] = shared[2]
    for c in range(opened.size):
        if w.bursts[part, t, c]:
            channel = c ^ (packed & (opened.size - 1))
            commands[channel] += w.commands[part, t, c]
            misses[channel] += w.misses[part, t, c] - (opened[channel] == row ^ w.first[part, t, c])
            opened[channel] = row ^ w.last[part, t, c]
    shared[2], shared[3] = opened[0], w.even[part, t]


@compiled
def _count_tables(flat, starts, tokens, groups, w, tccd_ns, trc_ns, counts, busiest):
    channels = w.first.shape[2]
    commands, misses = np.zeros(channels, dtype=np.int64), np.zeros(channels, dtype=np.int64)
    opened, shared = np.zeros(channels, dtype=np.int64), np.zeros(4, dtype=np.int64)
    for g in range(groups.size - 1):
        commands[:], misses[:] = 0, 0
        shared[0], shared[1], shared[2], shared[3] = 0, 0, -1, 1
        for i in range(groups[g], groups[g + 1]):
            counts[g, 0] += w.token_bursts * (tokens[i] + w.writes)
            if w.writes:
                j, t = divmod(tokens[i] - 1, w.block_tokens)
                _add(w, ALONE, t + 1, flat[starts[i] + j], commands, misses, opened, shared)
        at, going = 0, True
        while going:
            going = False
            for i in range(groups[g], groups[g + 1]):
                if at >= tokens[i]:
                    continue
                last = tokens[i] if tokens[i] - at <= w.turn else at + w.turn
                going |= last < tokens[i]
                for j in range(at // w.block_tokens, last // w.block_tokens):
                    _add(w, FIRST, w.block_tokens, flat[starts[i] + j], commands, misses, opened, shared)
                tail = last % w.block_tokens
                if tail:
                    _add(w, FIRST, tail, flat[starts[i] + last // w.block_tokens], commands, misses, opened, shared)
            at += w.turn
        for c in range(channels):
            hits = commands[c] + shared[0] - misses[c] - shared[1]
            counts[g, 1] += commands[c] + shared[0]
            counts[g, 2] += misses[c] + shared[1]
            busiest[g] = max(busiest[g], tccd_ns * hits + trc_ns * (misses[c] + shared[1]))


def count_tables(flat, starts, tokens, dram, w, *, groups=None):
    """`reads.count` with `w`, the `whole` of the same reading and windows: equal, and quicker by far."""
    groups = np.arange(tokens.size + 1) if groups is None else groups
    counts, busiest = np.zeros((groups.size - 1, 3), dtype=np.int64), np.zeros(groups.size - 1)
    if tokens.size:
        _count_tables(flat, starts, tokens, groups, w, dram.tccd_ab_ns, dram.trc_ns, counts, busiest)
    return bandwidth.Counts(counts[:, 0], counts[:, 1], counts[:, 2], busiest)
