"""NumPy's default random stream inside compiled loops, draw for draw: PCG64, its doubles and its bounded integers.

`numpy.random.default_rng(seed)` is PCG64 (XSL-RR, 128 bits of state); `integers` below 2**32 is Lemire's method on 32
bits, the low half of a fresh word first and its high half at the next request, which doubles in between do not touch.
"""

import numpy as np

from artifact.compiled import compiled, inlined
from artifact.words import multiplied


def stream(seed):
    """The state of `numpy.random.default_rng(seed)`: uint64 [6], 128 bits of state and of increment, kept half."""
    given = np.random.PCG64(seed).state
    state, increment = given["state"]["state"], given["state"]["inc"]
    words = [state >> 64, state & (1 << 64) - 1, increment >> 64, increment & (1 << 64) - 1]
    return np.array([*words, given["has_uint32"], given["uinteger"]], dtype=np.uint64)


@inlined
def _word(draws):
    """64 random bits."""
    high, low = multiplied(draws[0], draws[1], draws[2], draws[3])
    draws[0], draws[1] = high, low
    turn = high >> np.uint64(58)
    mixed = high ^ low
    return (mixed >> turn) | (mixed << (np.uint64(64) - turn & np.uint64(63)))


@inlined
def _half(draws):
    """32 random bits."""
    if draws[4]:
        draws[4] = 0
        return draws[5]
    word = _word(draws)
    draws[4], draws[5] = 1, word >> np.uint64(32)
    return word & np.uint64(0xFFFFFFFF)


@compiled
def random(draws):
    """`Generator.random()`."""
    return np.int64(_word(draws) >> np.uint64(11)) * 2.0**-53


@compiled
def below(draws, end):
    """`Generator.integers(end)`, for 1 <= end < 2**32; 1 draws nothing."""
    if end == 1:
        return 0
    bound = np.uint64(end)
    product = _half(draws) * bound
    left = product & np.uint64(0xFFFFFFFF)
    if left < bound:
        threshold = (np.uint64(1 << 32) - bound) % bound
        while left < threshold:
            product = _half(draws) * bound
            left = product & np.uint64(0xFFFFFFFF)
    return np.int64(product >> np.uint64(32))


@compiled
def choice(draws, n, out):
    """`Generator.choice(n, out.size, replace=False)` for n <= 10,000: Floyd's algorithm, then a shuffle."""
    k = out.size
    for m in range(k):
        v = below(draws, n - k + m + 1)
        for q in range(m):
            if out[q] == v:
                v = n - k + m
                break
        out[m] = v
    for i in range(k - 1, 0, -1):
        j = below(draws, i + 1)
        out[i], out[j] = out[j], out[i]
