"""The k largest of a row, exactly, by counting: no sort, no partition. Ties go to the lowest index.

A row's k-th largest value is searched on the float's order-preserving integer key: count how many are at or above a
guess, step towards k, bisect. A good guess (the last row's answer) makes that about five counts; each is one pass of
vector compares. Floats are compared as floats, so -0.0 ties with 0.0. -inf is never picked, +inf comes first; a row
must hold no NaN.
"""

import numpy as np
from numba import njit

from artifact.compiled import compiled

inlined = njit(forceinline=True)  # passing arrays to a compiled function costs as much as a count
LOWEST, HIGHEST = -2139095041, 2139095041  # keys of -inf, and of the NaN above +inf: nothing is at or above it
_FLIP = np.int32(0x7FFFFFFF)


@inlined
def value(key, cell):
    """The float32 whose key is `key`; `cell` is float32 [1], scratch."""
    bits = np.int32(key)
    cell.view(np.int32)[0] = bits if bits >= 0 else np.int32(bits ^ _FLIP)
    return cell[0]


@inlined
def count(row, least):
    """How many of `row` are at or above `least`."""
    found = np.int32(0)
    for i in range(row.size):
        found = np.int32(found + np.int32(row[i] >= least))
    return found


@inlined
def find(row, k, guess, step, cell):
    """Where the k largest of `row` begin. 0 < k < number of values above -inf; `guess` a key, `step` >= 1.

    -> (key, ties): ties = 0: they are all values at or above `value(key)`. ties > 0: all above it, and the first
    `ties` equal to it.
    """
    at = min(max(guess, LOWEST + 1), HIGHEST - 1)
    here = count(row, value(at, cell))
    if here == k:
        return at, 0
    low, below, high, above = LOWEST, row.size, HIGHEST, 0  # counts: at low more than k, at high fewer
    up = here > k
    while True:  # in growing steps until k lies between
        if here > k:
            low, below = at, here
        else:
            high, above = at, here
        if up != (here > k):
            break
        at += step if up else -step
        step *= 4
        if not LOWEST < at < HIGHEST:
            break
        here = count(row, value(at, cell))
        if here == k:
            return at, 0
    turn = 0
    while high - low > 1:  # three steps by proportion, one by halves: fast on smooth rows, 32 halvings on the worst
        if turn == 3:
            at = (low + high) >> 1
        else:
            at = low + (high - low) * (2 * (below - k) + 1) // (2 * (below - above))
            at = min(max(at, low + 1), high - 1)
        turn = (turn + 1) & 3
        here = count(row, value(at, cell))
        if here == k:
            return at, 0
        if here > k:
            low, below = at, here
        else:
            high, above = at, here
    return low, k - above


@compiled
def mark(row, k, cell, chosen):
    """`chosen[i]` = is row[i] among the k largest above -inf. -> how many are."""
    if k <= 0:
        chosen[:] = False
        return 0
    known = count(row, value(LOWEST + 1, cell))
    if known <= k:
        for i in range(row.size):
            chosen[i] = row[i] > -np.inf
        return known
    key, ties = find(row, k, 0, 1 << 20, cell)
    least = value(key, cell)
    for i in range(row.size):
        chosen[i] = row[i] >= least
    if ties:
        for i in range(row.size):
            if row[i] == least:
                chosen[i] = ties > 0
                ties -= 1
    return k
