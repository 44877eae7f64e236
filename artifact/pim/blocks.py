"""The counts of `bandwidth` block by block instead of burst by burst, where every window lies inside one block.

In an XOR-linear map a block's bursts differ from another's by its base alone, so that what a block costs is the same
for all of them but for its first window, which hits when its row is the one that the block before left open. That
takes, in every channel, whole windows in each block, and one row in the first; elsewhere `bandwidth` counts bursts.
"""

from typing import NamedTuple

import numpy as np

from artifact.compiled import compiled
from artifact.pim import bandwidth


class Whole(NamedTuple):
    """What the first t tokens of a block at base 0 cost in each channel, t from 0 to all; C channels, 1 if all agree.

    Where all channels see the same stream, `commands`, `misses` and `last` are of all of them for the tail, and the
    loop counts whole blocks in channel 0 for all.
    """

    bursts: np.ndarray  # int64 [block_tokens + 1, C]
    commands: np.ndarray  # int64 [block_tokens + 1, C]
    misses: np.ndarray  # int64 [block_tokens + 1, C], with no row open before
    first: np.ndarray  # int64 [C], row of the first window; -1 = the channel holds nothing of the block
    last: np.ndarray  # int64 [C], row left open by the whole block
    counted: np.ndarray  # int64, the channels that the loop counts


def whole(lay, *, coalesce="window", window=64):
    """The `Whole` of blocks in `lay`, or None where bursts must be counted. Errors as `bandwidth.count`."""
    bank_bits, mask = (lay.banks - 1).bit_length(), lay.channels - 1
    own = int(lay.base[0]) & mask
    counts = np.zeros((lay.block_tokens + 1, lay.channels, 3), dtype=np.int64)
    for tokens in range(1, lay.block_tokens + 1):
        counted = bandwidth.count([0], tokens, lay, coalesce=coalesce, window=window)
        counts[tokens] = counted[np.arange(lay.channels) ^ own]
    first, last = np.full(lay.channels, -1, dtype=np.int64), np.full(lay.channels, -1, dtype=np.int64)
    for channel in range(lay.channels):
        rows = lay.offset[lay.offset & mask == channel] >> (lay.channel_bits + bank_bits)
        if rows.size % window or (rows[:window] != rows[:1]).any() or coalesce != "window":
            return None
        if rows.size:
            first[channel], last[channel] = rows[0], rows[-1]
    counted = np.array([0]) if lay.stream.size else np.flatnonzero(first >= 0)
    return Whole(*(np.ascontiguousarray(counts[:, :, k]) for k in range(3)), first, last, counted)


@compiled
def _count_tables(flat, starts, tokens, base, row_bits, block_tokens, w, tccd_ns, trc_ns, counts, busiest):
    channels = w.first.size
    mask = channels - 1
    uniform = w.counted.size == 1 and channels > 1 and w.first[channels - 1] >= 0
    commands, misses = np.zeros(channels, dtype=np.int64), np.zeros(channels, dtype=np.int64)
    open_row = np.zeros(channels, dtype=np.int64)
    for i in range(tokens.size):
        full = tokens[i] // block_tokens
        tail = tokens[i] - full * block_tokens
        commands[:], misses[:], open_row[:] = 0, 0, -1
        for j in range(starts[i], starts[i] + full):
            packed = base[flat[j]]
            row = packed >> row_bits
            for c in w.counted:
                channel = c ^ (packed & mask)
                commands[channel] += w.commands[block_tokens, c]
                misses[channel] += w.misses[block_tokens, c] - (open_row[channel] == row ^ w.first[c])
                open_row[channel] = row ^ w.last[c]
        if uniform:
            commands[1:], misses[1:] = commands[0], misses[0]
            open_row[1:] = open_row[0]
        if tail:
            packed = base[flat[starts[i] + full]]
            row = packed >> row_bits
            for c in range(channels):
                channel = c ^ (packed & mask)
                if w.bursts[tail, c]:
                    commands[channel] += w.commands[tail, c]
                    misses[channel] += w.misses[tail, c] - (open_row[channel] == row ^ w.first[c])
        for c in range(channels):
            counts[i, 0] += full * w.bursts[block_tokens, c] + w.bursts[tail, c]
            counts[i, 1] += commands[c]
            counts[i, 2] += misses[c]
            busiest[i] = max(busiest[i], tccd_ns * (commands[c] - misses[c]) + trc_ns * misses[c])


def count_tables(flat, starts, tokens, lay, dram, w):
    """`bandwidth.count_tables` with `w`, the `whole` of the same layout and windows: equal, and quicker by far."""
    counts, busiest = np.zeros((tokens.size, 3), dtype=np.int64), np.zeros(tokens.size)
    row_bits = lay.channel_bits + (lay.banks - 1).bit_length()
    if tokens.size:
        _count_tables(flat, starts, tokens, lay.base, row_bits, lay.block_tokens, w,
                      dram.tccd_ab_ns, dram.trc_ns, counts, busiest)
    return bandwidth.Counts(counts[:, 0], counts[:, 1], counts[:, 2], busiest)
