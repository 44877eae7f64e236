"""All-bank commands of a sequence's KV cache, and the bandwidth they reach (M1 to M4).

A decode step reads a sequence's KV once, in logical order. Each channel coalesces its bursts into all-bank
commands: one row open in every bank, one burst per bank and command.

window    tumbling windows of `window` bursts per channel, aligned to the sequence's start. In a window each distinct
          row r needs max-over-banks(bursts of r in that bank) commands; one miss per distinct row, but for the row
          carried in; the row of the window's last burst is carried out.
in order  a command closes when the row changes, a bank repeats or every bank is used; it hits when its row is the
          previous command's.

Both ignore columns (each bank may read its own) and start every sequence cold. Then

M1 = hits / commands                  M3 = ideal * M2 * tCCD / (M1 * tCCD + (1 - M1) * tRC)
M2 = bursts / (banks * commands)      M4 = KV bytes / M3 = (tCCD * hits + tRC * misses) / channels

Definitions: KV-PIMple `pimmodel.py`, commit eb56d6d. M3 and M4 average over all channels, idle ones too; beside
them stand the busiest channel's: the step ends when the last channel does.
"""

from typing import NamedTuple

import numpy as np

from artifact.compiled import compiled

MODES = ("window", "inorder")


class Layout(NamedTuple):
    """How blocks of one size lie in one memory: what the counting loops need, and no more.

    A burst of block b at offset o is `base[b] ^ offset[o]`, packed as row | bank | channel (low bits last).
    When every channel sees the same stream, `stream` holds it once and the loops count one channel for all.
    """

    base: np.ndarray  # int64 [num_blocks], packed coordinates of each block's first burst
    offset: np.ndarray  # int64 [bursts per block], packed coordinates within a block
    stream: np.ndarray  # int64 [bursts per block / channels], row | bank of channel 0; empty if channels differ
    reach: np.ndarray  # int64 [block_tokens + 1, channels], bursts of a block's first t tokens per channel
    channels: int
    banks: int
    channel_bits: int
    block_tokens: int
    token_bursts: int


def layout(address_map, token_bytes, block_tokens, num_blocks):
    """The `Layout` of `num_blocks` blocks, lying one after another from address 0, under `address_map`.

    `token_bytes` is the KV of one token in one layer, `block_tokens` the block size; both powers of two
    (`geometry.blocks_per_region` checks). Raises ValueError when the pool does not fit the memory.
    """
    dram = address_map.dram
    token_bursts = token_bytes // dram.burst_bytes
    block_bursts = token_bursts * block_tokens
    if num_blocks * block_bursts > dram.bursts:
        raise ValueError(
            f"a pool of {num_blocks} blocks of {block_tokens} tokens needs "
            f"{num_blocks * block_bursts * dram.burst_bytes} bytes; allowed: at most the {dram.capacity_bytes} bytes "
            f"of {dram.name}"
        )
    channel_bits = (dram.channels - 1).bit_length()

    base = packed(address_map, np.arange(num_blocks, dtype=np.int64) * block_bursts)
    offset = packed(address_map, np.arange(block_bursts, dtype=np.int64))
    channel = offset & (dram.channels - 1)
    counts = np.zeros((block_bursts, dram.channels), dtype=np.int64)
    counts[np.arange(block_bursts), channel] = 1
    reach = np.zeros((block_tokens + 1, dram.channels), dtype=np.int64)
    np.cumsum(counts.reshape(block_tokens, token_bursts, dram.channels).sum(axis=1), axis=0, out=reach[1:])
    streams = [offset[channel == c] >> channel_bits for c in range(dram.channels)]
    same = not (base & (dram.channels - 1)).any() and all(np.array_equal(s, streams[0]) for s in streams)
    stream = streams[0] if same else np.zeros(0, dtype=np.int64)
    return Layout(base, offset, stream, reach, dram.channels, dram.banks, channel_bits, block_tokens, token_bursts)


def packed(address_map, address):
    """Burst indices int64 [n] -> where each lies, int64 [n]: row | bank | channel, low bits last."""
    dram = address_map.dram
    channel, group, bank, row, _ = address_map.decode(address)
    channel_bits = (dram.channels - 1).bit_length()
    return ((row * dram.bank_groups + group) * dram.banks_per_group + bank) << channel_bits | channel


@compiled
def regroup(keys, start, end, banks, bank_bits, rows, used, most):
    """The bursts `keys[start:end]` (row | bank) of one window by row -> how many rows, and the last burst's.

    rows: the rows as they first come; most: commands of each, the most bursts of it in one bank. Both and used, of
    rows x banks, must be zero where they are added to.
    """
    bank_mask = banks - 1
    distinct, slot, row = 0, 0, -1
    for i in range(start, end):
        key = keys[i]
        if key >> bank_bits != row:
            row = key >> bank_bits
            slot = 0
            while slot < distinct and rows[slot] != row:
                slot += 1
            if slot == distinct:
                rows[slot] = row
                distinct += 1
        at = slot * banks + (key & bank_mask)
        used[at] += 1
        if used[at] > most[slot]:
            most[slot] = used[at]
    return distinct, row


@compiled
def _count_window(keys, n, banks, window, rows, used, most):
    """Commands and misses of one channel's `keys[:n]` (row | bank) in tumbling windows; scratch is all zero."""
    bank_bits = 0
    while (1 << bank_bits) < banks:
        bank_bits += 1
    commands, misses = 0, 0
    open_row = -1
    for start in range(0, n, window):
        distinct, last = regroup(keys, start, min(start + window, n), banks, bank_bits, rows, used, most)
        misses += distinct
        for s in range(distinct):
            commands += most[s]
            if rows[s] == open_row:
                misses -= 1
            most[s] = 0
            for b in range(s * banks, (s + 1) * banks):
                used[b] = 0
        open_row = last
    return commands, misses


@compiled
def _count_in_order(keys, n, banks):
    """Commands and misses of one channel's `keys[:n]` (row | bank) served strictly in order."""
    bank_mask = banks - 1
    bank_bits = 0
    while (1 << bank_bits) < banks:
        bank_bits += 1
    commands, misses, width = 0, 0, 0
    row = -1
    seen = np.zeros(banks, dtype=np.int64)  # the command that last used each bank
    for i in range(n):
        key = keys[i]
        bank = key & bank_mask
        if key >> bank_bits != row or width == banks or seen[bank] == commands:
            commands += 1
            width = 0
            if key >> bank_bits != row:
                row = key >> bank_bits
                misses += 1
        seen[bank] = commands
        width += 1
    return commands, misses


@compiled
def _count_channel(keys, n, banks, window, in_order, rows, used, most):
    if in_order:
        return _count_in_order(keys, n, banks)
    return _count_window(keys, n, banks, window, rows, used, most)


@compiled
def _count_table(table, tokens, lay, window, in_order, keys, rows, used, most, out):
    """Fill `out` int64 [channels, 3] with bursts, commands and misses of one sequence."""
    full = tokens // lay.block_tokens
    tail = tokens - full * lay.block_tokens
    channels = lay.channels
    if lay.stream.size:
        m = lay.stream.size
        filled = 0
        for i in range(full + (tail > 0)):
            start = lay.base[table[i]] >> lay.channel_bits
            for j in range(m):
                keys[filled + j] = start ^ lay.stream[j]
            filled += m
        last_n, commands, misses = -1, 0, 0
        for c in range(channels):
            n = full * m + lay.reach[tail, c]
            if n != last_n:  # channels differ by the tail at most: few distinct lengths, in runs
                commands, misses = _count_channel(keys, n, lay.banks, window, in_order, rows, used, most)
                last_n = n
            out[c, 0], out[c, 1], out[c, 2] = n, commands, misses
        return
    starts = np.zeros(channels + 1, dtype=np.int64)
    mask = channels - 1
    for i in range(full + (tail > 0)):
        flip = lay.base[table[i]] & mask  # maps are XOR-linear: a block's base permutes its channels
        taken = lay.block_tokens if i < full else tail
        for c in range(channels):
            starts[(c ^ flip) + 1] += lay.reach[taken, c]
    for c in range(channels):
        starts[c + 1] += starts[c]
    at = starts.copy()
    block_bursts = lay.offset.size
    for i in range(full + (tail > 0)):
        start = lay.base[table[i]]
        for j in range(block_bursts if i < full else tail * lay.token_bursts):
            packed = start ^ lay.offset[j]
            c = packed & mask
            keys[at[c]] = packed >> lay.channel_bits
            at[c] += 1
    for c in range(channels):
        n = starts[c + 1] - starts[c]
        out[c, 0] = n
        out[c, 1], out[c, 2] = _count_channel(keys[starts[c] :], n, lay.banks, window, in_order, rows, used, most)


@compiled
def _scratch(lay, most_tokens, window):
    """Buffers for sequences of up to `most_tokens`: keys and the window's rows, use counts and maxima."""
    blocks = (most_tokens + lay.block_tokens - 1) // lay.block_tokens
    n = blocks * (lay.stream.size if lay.stream.size else lay.offset.size)
    w = max(1, min(window, n))
    zero = np.zeros(w, dtype=np.int64)
    return np.empty(n, dtype=np.int64), zero, np.zeros(w * lay.banks, dtype=np.int64), zero.copy()


@compiled
def _count_tables(flat, starts, tokens, lay, window, in_order, tccd_ns, trc_ns, counts, busiest_ns):
    keys, rows, used, most = _scratch(lay, tokens.max(), window)
    out = np.zeros((lay.channels, 3), dtype=np.int64)
    for i in range(tokens.size):
        _count_table(flat[starts[i] :], tokens[i], lay, window, in_order, keys, rows, used, most, out)
        for c in range(lay.channels):
            for k in range(3):
                counts[i, k] += out[c, k]
            time = tccd_ns * (out[c, 1] - out[c, 2]) + trc_ns * out[c, 2]
            if time > busiest_ns[i]:
                busiest_ns[i] = time


def in_order(coalesce, window):
    """Whether commands are coalesced in order; ValueError for a mode or window that there is not."""
    if coalesce not in MODES:
        raise ValueError(f"unknown coalesce mode {coalesce!r}; allowed: {', '.join(MODES)}")
    if isinstance(window, bool) or not isinstance(window, (int, np.integer)) or window < 1:
        raise ValueError(f"window is {window!r}; allowed: a whole number of bursts of at least 1")
    return coalesce == "inorder"


def count(table, tokens, lay, *, coalesce="window", window=64):
    """One sequence, channel by channel: int64 [channels, 3] of bursts, commands and misses.

    `table` lists the sequence's block ids in order, `tokens` its length. Raises ValueError for a length the table
    does not cover or a block outside the pool.
    """
    strict = in_order(coalesce, window)
    table = np.ascontiguousarray(table, dtype=np.int64)
    needed = -(-tokens // lay.block_tokens)
    if tokens < 1 or needed > table.size:
        raise ValueError(
            f"tokens is {tokens}; allowed: 1 to {table.size * lay.block_tokens}, what the table's {table.size} "
            "blocks hold"
        )
    outside = table[(table < 0) | (table >= lay.base.size)]
    if outside.size:
        raise ValueError(f"block table names block {outside[0]}; allowed: 0 to {lay.base.size - 1}")
    out = np.zeros((lay.channels, 3), dtype=np.int64)
    _count_table(table, tokens, lay, window, strict, *_scratch(lay, tokens, window), out)
    return out


class Counts(NamedTuple):
    """Per sequence: int64 [S] bursts, commands and misses over all channels; the busiest channel's time, ns."""

    bursts: np.ndarray
    commands: np.ndarray
    misses: np.ndarray
    busiest_ns: np.ndarray


def count_tables(flat, starts, tokens, lay, dram, *, coalesce="window", window=64):
    """Many sequences at once: block tables one after another in `flat`, sequence i's from `starts[i]`."""
    strict = in_order(coalesce, window)
    counts = np.zeros((tokens.size, 3), dtype=np.int64)
    busiest = np.zeros(tokens.size)
    if tokens.size:
        _count_tables(flat, starts, tokens, lay, window, strict, dram.tccd_ab_ns, dram.trc_ns, counts, busiest)
    return Counts(counts[:, 0], counts[:, 1], counts[:, 2], busiest)


class Metrics(NamedTuple):
    """M1 to M4 per sequence, float64 [S]: fractions, GB/s (= bytes/ns) and nanoseconds."""

    m1_row_hit_frac: np.ndarray
    m2_bank_parallelism_frac: np.ndarray
    m3_bandwidth_gbps: np.ndarray
    m4_latency_ns: np.ndarray
    m3_busiest_gbps: np.ndarray
    m4_busiest_ns: np.ndarray


def metrics(counts, kv_bytes, dram):
    """M1 to M4 of `counts` for sequences of `kv_bytes` (int64 [S]) each; see the head of this file."""
    m1 = (counts.commands - counts.misses) / counts.commands
    m2 = counts.bursts / (dram.banks * counts.commands)
    # grouped as the study does: its files print 8 digits, and many values lie exactly between two
    m3 = dram.ideal_gbps * m2 * (dram.tccd_ab_ns / (m1 * dram.tccd_ab_ns + (1 - m1) * dram.trc_ns))
    return Metrics(m1, m2, m3, kv_bytes / m3, kv_bytes / counts.busiest_ns, counts.busiest_ns)
