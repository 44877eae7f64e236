"""The command counts as their definition reads: NumPy, every burst decoded, every channel, a unique per window.

Slow on purpose; what `bandwidth` is tested and timed against. It counts as the study does (KV-PIMple `pimmodel.py`,
commit eb56d6d) and shares nothing with the compiled loops but the address map.
"""

import numpy as np


def count(table, tokens, address_map, token_bytes, block_tokens, *, coalesce="window", window=64):
    """int64 [channels, 3]: bursts, commands and misses of one sequence; arguments as in `bandwidth.count`."""
    dram = address_map.dram
    token_bursts = token_bytes // dram.burst_bytes
    position = np.arange(tokens * token_bursts)
    block_bursts = token_bursts * block_tokens
    address = np.asarray(table, dtype=np.int64)[position // block_bursts] * block_bursts + position % block_bursts
    channel, group, bank, row, _ = address_map.decode(address)
    bank = group * dram.banks_per_group + bank
    out = np.zeros((dram.channels, 3), dtype=np.int64)
    for c in range(dram.channels):
        mine = channel == c
        served = _in_order(row[mine], bank[mine], dram.banks) if coalesce == "inorder" else None
        out[c] = mine.sum(), *(served or _windows(row[mine], bank[mine], dram.banks, window))
    return out


def _windows(row, bank, banks, window):
    commands, misses, open_row = 0, 0, -1
    for start in range(0, row.size, window):
        rows, banks_ = row[start : start + window], bank[start : start + window]
        keys, times = np.unique(rows * banks + banks_, return_counts=True)
        distinct, first = np.unique(keys // banks, return_index=True)
        commands += int(np.maximum.reduceat(times, first).sum())
        misses += distinct.size - int(open_row in distinct)
        open_row = rows[-1]
    return commands, misses


def _in_order(row, bank, banks):
    commands, misses, open_row, used = 0, 0, -1, set()
    for r, b in zip(row.tolist(), bank.tolist(), strict=True):
        if r != open_row or b in used or len(used) == banks:
            commands += 1
            misses += r != open_row
            open_row, used = r, set()
        used.add(b)
    return commands, misses
