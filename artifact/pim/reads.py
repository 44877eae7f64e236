"""What a decode step reads and writes, burst by burst, where the study simplifies.

The study reads each sequence alone, its K and V interleaved token by token in a pool at address 0, and writes nothing.
Each of these can be otherwise here, and is counted as `bandwidth` counts:

base      the pool begins at any burst, so that a region of block numbers may straddle two rows
layout    token-major: a block holds token after token · head-major: KV head after KV head · head-channels: head-major,
          and each head's part in channels of its own
turn      a batch is read in turns of so many tokens a sequence, round after round. Commands of two sequences are never
          one, for a command has one query; but a row stays open from turn to turn
writes    the newest token of each sequence is written before anything is read

A block is read in the order of its addresses, blocks in that of the table.
"""

from typing import NamedTuple

import numpy as np

from artifact.compiled import compiled
from artifact.pim import bandwidth, mapping

LAYOUTS = ("token-major", "head-major", "head-channels")


class Reading(NamedTuple):
    """How sequences lie and are read. Burst a lies at `low[a & mask] ^ high[a >> bits]`: row | bank | channel."""

    low: np.ndarray  # int64 [2**bits]
    high: np.ndarray  # int64 [bursts of the memory / 2**bits]
    bits: int
    base: int  # first burst of the pool
    block_tokens: int
    token_bursts: int
    heads: int  # parts of a block that lie one after another: KV heads, or 1
    turn: int  # tokens of a sequence in one turn
    writes: bool
    channels: int
    channel_bits: int
    banks: int


def reading(order, token_bytes, block_tokens, num_blocks, *, heads=1, base_bytes=0, layout="token-major", turn=None,
            writes=False):
    """The `Reading` of `num_blocks` blocks under the `mapping.AddressMap` `order`; see the head of this file.

    `heads`: KV heads of a token. Raises ValueError for a layout or base that cannot be, and a pool that does not fit.
    """
    dram = order.dram
    if layout not in LAYOUTS:
        raise ValueError(f"block_layout is {layout!r}; allowed: {', '.join(LAYOUTS)}")
    token_bursts = token_bytes // dram.burst_bytes
    if layout != "token-major" and (token_bursts % heads or heads & heads - 1):
        raise ValueError(f"block_layout {layout} with {heads} KV heads of {token_bytes // heads} bytes a token; "
                         f"allowed: a power of two of heads, each of whole bursts of {dram.burst_bytes} bytes")
    if base_bytes % dram.burst_bytes or base_bytes < 0:
        raise ValueError(f"base_bytes is {base_bytes}; allowed: a multiple of {dram.burst_bytes}, at least 0")
    needed = base_bytes + num_blocks * block_tokens * token_bytes
    if needed > dram.capacity_bytes:
        raise ValueError(f"a pool of {num_blocks} blocks of {block_tokens} tokens from byte {base_bytes} on needs "
                         f"{needed} bytes; allowed: at most the {dram.capacity_bytes} bytes of {dram.name}")
    heads = 1 if layout == "token-major" else heads
    if layout == "head-channels":
        order = mapping.with_heads(order, heads, block_tokens * token_bursts // heads)
    bits = order.bits // 2
    low = bandwidth.packed(order, np.arange(1 << bits))
    high = bandwidth.packed(order, np.arange(1 << order.bits - bits) << bits)
    return Reading(low, high, bits, base_bytes // dram.burst_bytes, block_tokens, token_bursts, heads, turn or 1 << 62,
                   writes, dram.channels, (dram.channels - 1).bit_length(), dram.banks)


@compiled
def fill(r, table, first, last, keys, starts, filled):
    """Tokens `first` up to `last` of a sequence as keys (row | bank), channel c's from `starts[c]` to `filled[c]`."""
    part = r.token_bursts // r.heads
    mask, channel_mask = (1 << r.bits) - 1, r.channels - 1
    for placing in range(2):  # first how many go where, then they go
        if placing:
            for c in range(r.channels):
                filled[c] = starts[c]
                starts[c + 1] += starts[c]
        else:
            starts[:] = 0
        for i in range(first // r.block_tokens, (last - 1) // r.block_tokens + 1):
            begin = r.base + table[i] * r.block_tokens * r.token_bursts
            t0 = max(first - i * r.block_tokens, 0)
            t1 = min(last - i * r.block_tokens, r.block_tokens)
            for h in range(r.heads):
                at = begin + (h * r.block_tokens + t0) * part
                for a in range(at, at + (t1 - t0) * part):
                    place = r.low[a & mask] ^ r.high[a >> r.bits]
                    c = place & channel_mask
                    if placing:
                        keys[filled[c]] = place >> r.channel_bits
                        filled[c] += 1
                    else:
                        starts[c + 1] += 1


@compiled
def serve(r, keys, starts, filled, window, in_order, opened, rows, used, most, out):
    """Count what `fill` left, each channel going on at its open row (-1: none); adds to `out` [channels, 3]."""
    bank_bits = 0
    while (1 << bank_bits) < r.banks:
        bank_bits += 1
    for c in range(r.channels):
        n = filled[c] - starts[c]
        if not n:
            continue
        mine = keys[starts[c] : filled[c]]
        commands, misses = bandwidth._count_channel(mine, n, r.banks, window, in_order, rows, used, most)
        for i in range(1 if in_order else min(window, n)):  # the row carried in opens once less
            if mine[i] >> bank_bits == opened[c]:
                misses -= 1
                break
        opened[c] = mine[n - 1] >> bank_bits
        out[c, 0] += n
        out[c, 1] += commands
        out[c, 2] += misses


@compiled
def _count(flat, starts, tokens, groups, r, window, in_order, tccd_ns, trc_ns, counts, busiest_ns):
    longest = min(r.turn, tokens.max()) * r.token_bursts
    keys, at_channel = np.empty(longest, dtype=np.int64), np.empty(r.channels + 1, dtype=np.int64)
    filled, opened = np.empty(r.channels, dtype=np.int64), np.empty(r.channels, dtype=np.int64)
    w = max(1, min(window, longest))
    rows, used, most = np.zeros(w, np.int64), np.zeros(w * r.banks, np.int64), np.zeros(w, np.int64)
    out = np.empty((r.channels, 3), dtype=np.int64)
    for g in range(groups.size - 1):
        out[:] = 0
        opened[:] = -1
        if r.writes:
            for i in range(groups[g], groups[g + 1]):
                fill(r, flat[starts[i] :], tokens[i] - 1, tokens[i], keys, at_channel, filled)
                serve(r, keys, at_channel, filled, window, in_order, opened, rows, used, most, out)
        at, going = 0, True
        while going:
            going = False
            for i in range(groups[g], groups[g + 1]):
                if at < tokens[i]:
                    last = tokens[i] if tokens[i] - at <= r.turn else at + r.turn
                    fill(r, flat[starts[i] :], at, last, keys, at_channel, filled)
                    serve(r, keys, at_channel, filled, window, in_order, opened, rows, used, most, out)
                    going |= last < tokens[i]
            at += r.turn
        for c in range(r.channels):
            for k in range(3):
                counts[g, k] += out[c, k]
            busiest_ns[g] = max(busiest_ns[g], tccd_ns * (out[c, 1] - out[c, 2]) + trc_ns * out[c, 2])


def count(flat, starts, tokens, reading, dram, *, groups=None, coalesce="window", window=64):
    """`bandwidth.Counts` of sequences read as `reading` says, one entry a group.

    Block tables lie one after another in `flat`, sequence i's from `starts[i]`. `groups` int64 [G + 1]: sequences
    `groups[g]` up to `groups[g + 1]` are read together, in turns; None: each alone.
    """
    in_order = bandwidth.in_order(coalesce, window)
    groups = np.arange(tokens.size + 1) if groups is None else groups
    counts = np.zeros((groups.size - 1, 3), dtype=np.int64)
    busiest = np.zeros(groups.size - 1)
    if tokens.size:
        _count(flat, starts, tokens, groups, reading, window, in_order, dram.tccd_ab_ns, dram.trc_ns, counts, busiest)
    return bandwidth.Counts(counts[:, 0], counts[:, 1], counts[:, 2], busiest)
