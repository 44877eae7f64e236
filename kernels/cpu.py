"""The fast path on a CPU: Numba over NumPy arrays, each number read once where it lies, one core, without the GIL.

Half-precision numbers come as their bits, uint16 for bfloat16 and int16 for float16, and are widened in registers.
What each operator means stands in `reference`.
"""

import math

import numpy as np
from artifact.kernels.lanes_cpu import (
    HEADS,
    INDEX,
    LANES,
    ROWS,
    accumulate,
    ask,
    compiled,
    constant,
    instruction,
    loaded,
    over_channels,
    prefetch,
    rows_from,
    slots,
    store_sums,
)
from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic, overload

_PAGES = 64  # whose bounds are made, for all heads, before they are joined: a multiple of all tiles
_AHEAD_BYTES = 2560  # how far to prefetch; from 2 to 3 KiB was best for float32 and for half precision


@intrinsic
def _bits_to_float(context, bits):
    """int32 bits -> the float32 they are."""

    def generate(context, builder, signature, values):
        return builder.bitcast(values[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _float_to_bits(context, number):
    """float32 -> its bits as int32."""

    def generate(context, builder, signature, values):
        return builder.bitcast(values[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def _half_to_float(context, bits):
    """float16 bits -> float32, as the processor converts them."""

    def generate(context, builder, signature, values):
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

    return types.float32(bits), generate


@intrinsic
def _bfloat_to_float(context, bits):
    """bfloat16 bits -> float32: they are its upper half."""

    def generate(context, builder, signature, values):
        word = builder.shl(builder.zext(values[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(bits), generate


def _wide(x):
    """The float32 of a stored number."""


@overload(_wide)
def _wide_by_type(x):
    if x == types.uint16:
        return lambda x: _bfloat_to_float(x)
    if x == types.int16:
        return lambda x: _half_to_float(x)
    return lambda x: x


@compiled(fast=True)
def total(values):
    """The sum of a flat array's numbers in float32: what reading them once costs."""
    s = np.float32(0)
    for i in range(values.size):
        s += _wide(values[i])
    return s


def _bounds(heads):
    """Quest's bounds of `heads` queries and as many pages as fill a tile."""

    @instruction(types.void, None, types.intp, types.intp, None, None, types.intp, types.intp, None, types.intp,
                 types.intp)
    def bounds(builder, q, a, dim, low, high, i, last, out, o, width):
        """out[o + h * width + t] = the bound of query h from q[a] and page t of the next from low[i] and high[i].

        None lies after that at `last`, which is taken instead. Meanwhile asks for pages further on.
        """
        count = LANES // heads
        pages = rows_from(builder, i, dim, last, count)
        queries = [builder.add(a, builder.mul(INDEX(h), dim)) for h in range(heads)]
        sums = slots(builder, LANES)
        bits = 8 * _AHEAD_BYTES, low.dtype.bitwidth
        for d, channels in over_channels(builder, dim, 16):
            ahead = builder.add(builder.add(i, INDEX(bits[0] // bits[1])), builder.mul(INDEX(count), d))
            for c in range(0, count * channels, 512 // bits[1]):
                ask(builder, low, builder.add(ahead, INDEX(c)))
                ask(builder, high, builder.add(ahead, INDEX(c)))
            for c in range(0, channels, LANES):
                e = builder.add(d, INDEX(c))
                least = [loaded(builder, low, builder.add(page, e)) for page in pages]
                most = [loaded(builder, high, builder.add(page, e)) for page in pages]
                for h, query in enumerate(queries):
                    x = loaded(builder, q, builder.add(query, e))
                    up = builder.fcmp_ordered(">", x, constant(0))
                    for t in range(count):
                        accumulate(builder, sums[h * count + t], x, builder.select(up, most[t], least[t]))
        store_sums(builder, sums, out, [builder.add(o, builder.mul(INDEX(h), width)) for h in range(heads)])

    return bounds


_bounds_of_four, _bounds_of_one = _bounds(HEADS), _bounds(1)


@compiled()
def quest_scores(q, group, low, high, pages, add, out):
    """Quest's page bounds, `reference.quest_scores`, of the "max" or (add) the "sum" over a group.

    q float32 [B, G, H/G rounded up to a multiple of 4, D], of which `group` heads count (and the next is zero or
    counts), D a multiple of 16; low, high [B or 1, G, N, D] contiguous, float32 or bits; pages int64 [B]; out float32
    [B, G, N], written.
    """
    flat_q, flat_low, flat_high = q.reshape(-1), low.reshape(-1), high.reshape(-1)
    blocks, dim = low.shape[2], low.shape[3]
    bounds = np.empty(q.shape[2] * _PAGES, np.float32)
    for b in range(q.shape[0]):
        at = min(b, low.shape[0] - 1)
        for g in range(q.shape[1]):
            queries, start = (b * q.shape[1] + g) * q.shape[2] * dim, (at * low.shape[1] + g) * blocks * dim
            count = min(pages[b], blocks)
            last = start + (count - 1) * dim
            out[b, g, count:] = -np.inf
            for n in range(0, count, _PAGES):
                there = min(_PAGES, count - n)
                for h in range(0, group, HEADS):
                    if h + 1 == group:
                        for t in range(0, there, LANES):
                            _bounds_of_one(flat_q, queries + h * dim, dim, flat_low, flat_high, start + (n + t) * dim,
                                           last, bounds, h * _PAGES + t, _PAGES)
                    else:
                        for t in range(0, there, ROWS):
                            _bounds_of_four(flat_q, queries + h * dim, dim, flat_low, flat_high, start + (n + t) * dim,
                                            last, bounds, h * _PAGES + t, _PAGES)
                _join(bounds, group, add, out[b, g, n:n + there])


@compiled()
def _join(bounds, group, add, out):
    """out[n] = the sum or the largest of the heads' bounds, bounds[h * _PAGES + n]; -inf when one is NaN."""
    out[:] = bounds[:out.size]
    for h in range(1, group):
        for n in range(out.size):
            x, y = out[n], bounds[h * _PAGES + n]
            if add:
                out[n] = x + y
            else:
                out[n] = y if y > x or y != y else x
    for n in range(out.size):
        out[n] = -np.inf if out[n] != out[n] else out[n]


@compiled(fast=True)
def _logits_of_four(q, h, keys, n):
    """Dot products of key n with the heads h to h + 3."""
    a0 = a1 = a2 = a3 = np.float32(0)
    for d in range(q.shape[1]):
        x = _wide(keys[n, d])
        a0 += q[h, d] * x
        a1 += q[h + 1, d] * x
        a2 += q[h + 2, d] * x
        a3 += q[h + 3, d] * x
    return a0, a1, a2, a3


@compiled(fast=True)
def _exponentials(logits, largest):
    """exp(logits - largest) in place, and their sum. All are finite or -inf and none exceeds `largest`.

    2**x = 2**n * 2**r with n whole and |r| <= 1/2, the latter as a polynomial: within 2e-7 of the exponential.
    """
    s = np.float32(0)
    for i in range(logits.size):
        x = (logits[i] - largest) * np.float32(1.4426950408889634)
        x = x if x > np.float32(-126) else np.float32(-126)
        n = np.floor(x + np.float32(0.5))
        r = x - n
        y = np.float32(1.5403530e-4)
        y = y * r + np.float32(1.3333558e-3)
        y = y * r + np.float32(9.6181291e-3)
        y = y * r + np.float32(5.5504109e-2)
        y = y * r + np.float32(2.4022651e-1)
        y = y * r + np.float32(6.9314718e-1)
        y = y * r + np.float32(1.0)
        y = y * _bits_to_float((np.int32(n) + np.int32(127)) << np.int32(23))
        y = y if x > np.float32(-126) else np.float32(0)
        logits[i] = y
        s += y
    return s


@compiled()
def infllm_scores(q, group, keys, counts, per_block, before, out):
    """InfLLM-v2's block scores, `reference.infllm_scores`.

    q float32 [B, G, H/G rounded up to a multiple of 4, D], scaled by 1 / sqrt(D), of which `group` heads count; keys
    [B or 1, G, C, D] contiguous, float32 or bits; counts int64 [B]: keys that count; per_block: keys that start in a
    block; before: earlier keys that reach into it; out float32 [B, G, N], written.
    """
    heads = q.shape[2]
    logits = np.empty((heads, keys.shape[2]), np.float32)
    flat = keys.reshape(-1)
    dim, line, ahead = keys.shape[3], 64 // keys.itemsize, _AHEAD_BYTES // keys.itemsize
    for b in range(q.shape[0]):
        at, count = min(b, keys.shape[0] - 1), min(counts[b], keys.shape[2])
        for g in range(q.shape[1]):
            start = (at * keys.shape[1] + g) * keys.shape[2] * dim + ahead
            for c in range(count):
                for i in range(start + c * dim, start + (c + 1) * dim, line):
                    prefetch(flat, i)
                for h in range(0, heads, 4):
                    a0, a1, a2, a3 = _logits_of_four(q[b, g], h, keys[at, g], c)
                    logits[h, c], logits[h + 1, c], logits[h + 2, c], logits[h + 3, c] = a0, a1, a2, a3
            defined = count > 0
            for h in range(group):
                largest = np.float32(-np.inf)
                for c in range(count):
                    x = logits[h, c]
                    largest = x if x > largest or x != x else largest
                if not math.isfinite(largest):
                    defined = False
                    break
                weight = np.float32(1) / _exponentials(logits[h, :count], largest)
                for c in range(count):
                    logits[0, c] = weight * logits[h, c] + (logits[0, c] if h else np.float32(0))
            for n in range(out.shape[2]):
                best = np.float32(-np.inf)
                if defined:
                    for c in range(max(0, n * per_block - before), min(count, (n + 1) * per_block)):
                        best = max(best, logits[0, c])
                out[b, g, n] = best


@compiled()
def ema_steps(level, trend, scores, alpha, beta, gamma, levels, trends, predictions):
    """PRR's level, trend and prediction after each row of scores, `reference.ema_step`; float32 [N], the scores and the
    last three, which are written, [T, N].

    Rounds as the reference does, so that both agree to the last bit.
    """
    a, b, c, one = np.float32(alpha), np.float32(beta), np.float32(gamma), np.float32(1)
    for t in range(scores.shape[0]):
        for i in range(level.size):
            old, score = level[i], scores[t, i]
            known = abs(score) < np.inf and abs(old) < np.inf
            new = score if score == score else np.float32(-np.inf)
            new = a * score + (one - a) * old if known else new
            drift = b * (score - old) + (one - b) * trend[i] if known else np.float32(0)
            levels[t, i], trends[t, i], predictions[t, i] = new, drift, new + c * drift
        level, trend = levels[t], trends[t]


_MISSING = -2139095041  # the key of -inf, as a plain int: sums of keys do not fit 32 bits


@compiled()
def _ordered(scores, forced, keys):
    """int32 keys that order as the scores do, equal ones alike; -inf, NaN and the forced blocks get the lowest.

    -> how many can be chosen, and the highest key.
    """
    count, top = np.int32(0), np.int32(_MISSING)
    for i in range(scores.size):
        x = scores[i] + np.float32(0)  # -0 becomes 0
        bits = _float_to_bits(x)
        key = bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
        key = key if x > -np.inf and not forced[i] else np.int32(_MISSING)
        keys[i] = key
        count = np.int32(count + np.int32(key > np.int32(_MISSING)))
        top = max(top, key)
    return count, np.int64(top)


@compiled()
def _at_least(keys, bound):
    """How many keys are at least `bound`."""
    count = np.int32(0)
    for i in range(keys.size):
        count = np.int32(count + np.int32(keys[i] >= bound))
    return count


@compiled()
def topk(scores, count, forced, out):
    """The blocks with the highest scores, `reference.topk`.

    scores float32 [R, N]; forced bool [F, N], each row for R / F of them; out int32 [R, S], written. The smallest key
    to take is found by halving the range of keys: no sort, no copy, at most 32 counts of a row.
    """
    keys = np.empty(scores.shape[1], np.int32)
    for r in range(scores.shape[0]):
        must = forced[r * forced.shape[0] // scores.shape[0]]
        able, top = _ordered(scores[r], must, keys)
        free = count
        for i in range(must.size):
            free -= must[i]
        free = max(0, min(free, able))
        low, high, reach = _MISSING + 1, top + 1, able  # `reach` >= free keys reach `low`, fewer reach `high`
        if free == 0:
            low, reach = high, 0
        while reach > free and high - low > 1:
            middle = low + (high - low) // 2
            found = _at_least(keys, np.int32(middle))
            if found >= free:
                low, reach = middle, found
            else:
                high = middle
        # of the keys equal to `low`, the first ones
        ties = free if reach == free else free - _at_least(keys, np.int32(high))
        at = 0
        for i in range(keys.size):
            if keys[i] < low and not must[i]:
                continue
            if keys[i] == low and not must[i]:
                if ties == 0:
                    continue
                ties -= 1
            out[r, at] = i
            at += 1
        for i in range(at, out.shape[1]):
            out[r, i] = -1
