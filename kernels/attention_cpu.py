"""Attention on a CPU: each listed block read once where it lies, all query heads of its KV head together, one core.

Vectors of sixteen floats are written out, since Numba turns a dot product's many accumulators into none by itself.
They are one register with AVX-512 and LLVM splits them elsewhere. The next rows are asked for between the
multiplications, not in bursts: that is what lets them arrive meanwhile. As in `cpu`, half-precision numbers come as
their bits, uint16 for bfloat16 and int16 for float16. What each operator means stands in `reference`.
"""

import functools

import numpy as np
import torch
from artifact.kernels.cpu import compiled
from artifact.kernels.paged import Partial
from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic, models, register_model

LANES = 16
_CHUNK = 256  # tokens summed up before they go to the sum of all: many small numbers first, so that rounding stays low
_LOG2_E = 1.4426950408889634


class _Lanes(types.Type):
    """Sixteen float32 side by side."""

    def __init__(self):
        super().__init__(name="sixteen_floats")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.VectorType(ir.FloatType(), LANES))


_lanes, _float = _Lanes(), types.float32
_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
_STORED = {types.float32: _FLOATS, types.int16: ir.VectorType(ir.HalfType(), LANES),
           types.uint16: ir.VectorType(ir.IntType(16), LANES)}


def _instruction(result, *arguments):
    """A function of Numba code from one that builds it of LLVM values; None stands for any flat array."""

    def decorate(build):
        @intrinsic
        @functools.wraps(build)  # its arguments' names
        def made(context, *given):
            def generate(context, builder, signature, values):
                values = [context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array)
                          else value for kind, value in zip(signature.args, values, strict=True)]
                built = build(builder, *values)
                return context.get_dummy_value() if result is types.void else built

            return result(*(g if kind is None else kind for g, kind in zip(given, arguments, strict=True))), generate

        return made

    return decorate


def _constant(number):
    return ir.Constant(_FLOATS, [number] * LANES)


def _intrinsic(builder, name, result, *values, **options):
    """A call of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [value.type for value in values])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, values, **options)


@intrinsic
def _load(context, flat, i):
    """flat[i : i + 16], widened."""

    def generate(context, builder, signature, values):
        address = builder.gep(context.make_array(flat)(context, builder, values[0]).data, [values[1]])
        x = builder.load(builder.bitcast(address, _STORED[flat.dtype].as_pointer()), align=flat.dtype.bitwidth // 8)
        if flat.dtype == types.uint16:  # bfloat16: the upper half of a float32
            return builder.bitcast(builder.shl(builder.zext(x, _WORDS), ir.Constant(_WORDS, [16] * LANES)), _FLOATS)
        return builder.fpext(x, _FLOATS) if flat.dtype == types.int16 else x

    return _lanes(flat, types.intp), generate


@_instruction(types.void, None, types.intp, _lanes)
def _store(builder, data, i, x):
    """flat[i : i + 16] = x"""
    builder.store(x, builder.bitcast(builder.gep(data, [i]), _FLOATS.as_pointer()), align=4)


@_instruction(types.void, None, types.intp, types.intp, _lanes)
def _store_rows(builder, data, i, stride, x):
    """Four lanes each to flat[i :], flat[i + stride :], flat[i + 2 * stride :] and flat[i + 3 * stride :]."""
    for j in range(0, LANES, 4):
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 4), list(range(j, j + 4)))
        row = builder.shuffle_vector(x, x, lanes)
        builder.store(row, builder.bitcast(builder.gep(data, [i]), row.type.as_pointer()), align=4)
        i = builder.add(i, stride)


@_instruction(types.void, None, types.intp)
def _prefetch(builder, data, i):
    """Asks for the cache line of flat[i] in the second level; no harm past the array's end."""
    word = ir.IntType(32)
    _intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), builder.gep(data, [i]), word(0), word(2), word(1))


@_instruction(_lanes, _float)
def _splat(builder, x):
    """x in every lane."""
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), x, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * LANES))


@_instruction(_lanes, _lanes, _lanes, _lanes)
def _fma(builder, a, b, c):
    """a * b + c"""
    return _intrinsic(builder, "llvm.fmuladd.v16f32", _FLOATS, a, b, c)


@_instruction(_lanes, _lanes, _lanes)
def _add(builder, a, b):
    return builder.fadd(a, b)


@_instruction(_lanes, _lanes, _lanes)
def _max(builder, a, b):
    """The larger of each; a where b is NaN."""
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


@_instruction(_lanes, _lanes, _lanes)
def _exp2_of_difference(builder, x, y):
    """2**(x - y) where x <= y, within 2e-7 of it, 0 below 2**-126 and NaN where either is.

    2**x = 2**n * 2**r with n whole and |r| <= 1/2, the latter as a polynomial.
    """
    x = builder.fsub(x, y)
    tiny = builder.fcmp_ordered("<", x, _constant(-126.0))
    x = builder.select(tiny, _constant(-126.0), x)
    rounding = _constant(12582912.0)  # 1.5 * 2**23: the sum's last bit is worth one
    n = builder.fadd(x, rounding)
    r = builder.fsub(x, builder.fsub(n, rounding))
    z = _constant(np.float32(1.5403530e-4).item())
    for c in (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0):
        z = _intrinsic(builder, "llvm.fmuladd.v16f32", _FLOATS, z, r, _constant(np.float32(c).item()))
    power = builder.shl(builder.bitcast(n, _WORDS), ir.Constant(_WORDS, [23] * LANES))
    power = builder.add(power, ir.Constant(_WORDS, [127 << 23] * LANES))
    return builder.select(tiny, _constant(0.0), builder.fmul(z, builder.bitcast(power, _FLOATS)))


@_instruction(_float, _lanes)
def _largest(builder, x):
    return _intrinsic(builder, "llvm.vector.reduce.fmax.v16f32", ir.FloatType(), x)


@_instruction(_float, _lanes)
def _total(builder, x):
    zero = ir.FloatType()(0.0)
    return _intrinsic(builder, "llvm.vector.reduce.fadd.v16f32", ir.FloatType(), zero, x, fastmath=("reassoc",))


def _halves(width):
    """Adds the halves of each group of `width` lanes: of a's groups, then of b's."""
    low = [i + j for i in range(0, 2 * LANES, width) for j in range(width // 2)]
    low, high = (ir.Constant(_WORDS, lanes) for lanes in (low, [i + width // 2 for i in low]))

    @_instruction(_lanes, _lanes, _lanes)
    def add(builder, a, b):
        return builder.fadd(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high))

    return add


_halves_16, _halves_8, _halves_4, _halves_2 = _halves(16), _halves(8), _halves(4), _halves(2)


@compiled()
def _logits(q, a, dim, k, i0, i1, i2, i3, out, o, width, ahead, j, step):
    """out[o + h * width + t] = the dot product of four queries, from q[a], and the keys at i0 to i3.

    Meanwhile asks for the four rows at ahead[j], `step` apart.
    """
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = _splat(np.float32(0))
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = _splat(np.float32(0))
    packed = 4 // ahead.itemsize
    for d in range(0, dim, LANES):
        _prefetch(ahead, j + packed * d)
        _prefetch(ahead, j + 2 * step + packed * d)
        if packed == 1:
            _prefetch(ahead, j + step + d)
            _prefetch(ahead, j + 3 * step + d)
        x0, x1, x2, x3 = _load(k, i0 + d), _load(k, i1 + d), _load(k, i2 + d), _load(k, i3 + d)
        y = _load(q, a + d)
        s00, s01, s02, s03 = _fma(y, x0, s00), _fma(y, x1, s01), _fma(y, x2, s02), _fma(y, x3, s03)
        y = _load(q, a + dim + d)
        s10, s11, s12, s13 = _fma(y, x0, s10), _fma(y, x1, s11), _fma(y, x2, s12), _fma(y, x3, s13)
        y = _load(q, a + 2 * dim + d)
        s20, s21, s22, s23 = _fma(y, x0, s20), _fma(y, x1, s21), _fma(y, x2, s22), _fma(y, x3, s23)
        y = _load(q, a + 3 * dim + d)
        s30, s31, s32, s33 = _fma(y, x0, s30), _fma(y, x1, s31), _fma(y, x2, s32), _fma(y, x3, s33)
    s00 = _halves_8(_halves_16(s00, s01), _halves_16(s02, s03))
    s10 = _halves_8(_halves_16(s10, s11), _halves_16(s12, s13))
    s20 = _halves_8(_halves_16(s20, s21), _halves_16(s22, s23))
    s30 = _halves_8(_halves_16(s30, s31), _halves_16(s32, s33))
    _store_rows(out, o, width, _halves_2(_halves_4(s00, s10), _halves_4(s20, s30)))


@compiled()
def _exponentials(p, o, count, largest):
    """p[o : o + count], logits to base two, becomes 2**(p - m) with m the largest of them and `largest`.

    The rest up to a multiple of sixteen becomes 0. -> m, the sum.
    """
    for i in range(count, -(-count // LANES) * LANES):
        p[o + i] = -np.inf
    most = _splat(largest)
    for i in range(0, count, LANES):
        most = _max(most, _load(p, o + i))
    largest = _largest(most)
    most, s = _splat(largest), _splat(np.float32(0))
    for i in range(0, count, LANES):
        x = _exp2_of_difference(_load(p, o + i), most)
        _store(p, o + i, x)
        s = _add(s, x)
    return largest, _total(s)


@compiled()
def _weigh(p, o, width, v, i0, i1, i2, i3, acc, a, dim, ahead, j, step):
    """acc of four heads, from acc[a], += the values at i0 to i3, weighted by p[o + h * width + t].

    Meanwhile asks for the four rows at ahead[j], `step` apart.
    """
    p00, p01, p02, p03 = _splat(p[o]), _splat(p[o + 1]), _splat(p[o + 2]), _splat(p[o + 3])
    o += width
    p10, p11, p12, p13 = _splat(p[o]), _splat(p[o + 1]), _splat(p[o + 2]), _splat(p[o + 3])
    o += width
    p20, p21, p22, p23 = _splat(p[o]), _splat(p[o + 1]), _splat(p[o + 2]), _splat(p[o + 3])
    o += width
    p30, p31, p32, p33 = _splat(p[o]), _splat(p[o + 1]), _splat(p[o + 2]), _splat(p[o + 3])
    packed = 4 // ahead.itemsize
    for d in range(0, dim, LANES):
        _prefetch(ahead, j + packed * d)
        _prefetch(ahead, j + 2 * step + packed * d)
        if packed == 1:
            _prefetch(ahead, j + step + d)
            _prefetch(ahead, j + 3 * step + d)
        x0, x1, x2, x3 = _load(v, i0 + d), _load(v, i1 + d), _load(v, i2 + d), _load(v, i3 + d)
        e = a + d
        _store(acc, e, _fma(p00, x0, _fma(p01, x1, _fma(p02, x2, _fma(p03, x3, _load(acc, e))))))
        e += dim
        _store(acc, e, _fma(p10, x0, _fma(p11, x1, _fma(p12, x2, _fma(p13, x3, _load(acc, e))))))
        e += dim
        _store(acc, e, _fma(p20, x0, _fma(p21, x1, _fma(p22, x2, _fma(p23, x3, _load(acc, e))))))
        e += dim
        _store(acc, e, _fma(p30, x0, _fma(p31, x1, _fma(p32, x2, _fma(p33, x3, _load(acc, e))))))


@compiled()
def _add_block(queries, rows, dim, k, keys, k_row, v, values, v_row, count, following, p, width, acc, recent, most,
               mass):
    """A block's `count` tokens, keys at k[keys] and values at v[values], into the state of all heads of a group.

    The state: `most`, the largest logit so far, to base two; mass = sum of 2**(logit - most); acc + recent = the same
    sum of weighted values, this block's in `recent`. following: where in k the next block's keys are, to ask for them.
    """
    last_key, last_value = keys + (count - 1) * k_row, values + (count - 1) * v_row
    for h in range(0, rows, 4):
        for t in range(0, count, 4):  # past the end the last token again, with no weight
            i = keys + t * k_row
            _logits(queries, h * dim, dim, k, i, min(i + k_row, last_key), min(i + 2 * k_row, last_key),
                    min(i + 3 * k_row, last_key), p, h * width + t, width, v, values + t * v_row, v_row)
        for r in range(h, h + 4):
            old = most[r]
            most[r], fresh = _exponentials(p, r * width, count, old)
            if most[r] > old:
                shrink = np.float32(2.0 ** np.float64(old - most[r]))
                mass[r] *= shrink
                for d in range(r * dim, (r + 1) * dim):
                    acc[d] *= shrink
                    recent[d] *= shrink
            mass[r] += fresh
        for t in range(0, count, 4):
            i = values + t * v_row
            _weigh(p, h * width + t, width, v, i, min(i + v_row, last_value), min(i + 2 * v_row, last_value),
                   min(i + 3 * v_row, last_value), recent, h * dim, dim, k, following + t * k_row, k_row)


@compiled()
def _page(blocks, table, length, size, item):
    """Page and tokens of the block in one slot of all lists; 0 tokens where the slot is empty."""
    batch, slots = item // (blocks.shape[1] * blocks.shape[2]), blocks.shape[2]
    block = blocks[batch, item // slots % blocks.shape[1], item % slots]
    return (0, 0) if block < 0 else (table[batch, block], min(size, length[batch] - block * size))


@compiled()
def _sound(blocks, table, length, pages, size):
    """Whether each slot is -1 or a block of its sequence with a page, no block is twice in a list, lengths fit."""
    seen = np.full(table.shape[1], -1, np.int32)
    for b in range(length.size):
        if length[b] < 0 or length[b] > table.shape[1] * size:
            return False
        for g in range(blocks.shape[1]):
            list_ = b * blocks.shape[1] + g
            for s in range(blocks.shape[2]):
                block = blocks[b, g, s]
                if block == -1:
                    continue
                if block < -1 or block * size >= length[b] or seen[block] == list_:
                    return False
                seen[block] = list_
                if table[b, block] < 0 or table[b, block] >= pages:
                    return False
    return True


@compiled()
def _attend(q, k, v, k_strides, v_strides, size, pages, table, length, blocks, per, state, state_lse, out, lse):
    """Attention over the listed blocks, `reference.attend`, `attend_groups` and `repair`.

    q float32 [B, H, D]; k, v flat, float32 or bits, with strides (page, KV head, token) and D a multiple of 16; size:
    tokens of a page; table int32 [B, N]; length int32 [B]; blocks int32 [B, G, S]; per: slots of a part; state float32
    [B, H, D] and state_lse float32 [B, H], or without a first axis to begin anew: where to go on from; out float32
    [P, B, H, D] and lse float32 [P, B, H] with P = ceil(S / per), written. -> whether lists and lengths are sound.
    """
    if not _sound(blocks, table, length, pages, size):
        return False
    batches, kv_heads, slots = blocks.shape
    group, dim = q.shape[1] // kv_heads, q.shape[2]
    rows, width = -(-group // 4) * 4, -(-size // LANES) * LANES  # a few heads of zeros fill up the last four
    queries, p = np.zeros(rows * dim, np.float32), np.empty(rows * width, np.float32)
    acc, recent = np.empty(rows * dim, np.float32), np.empty(rows * dim, np.float32)
    most, mass = np.empty(rows, np.float32), np.empty(rows, np.float64)
    (k_page, k_head, k_row), (v_page, v_head, v_row) = k_strides, v_strides
    for list_ in range(batches * kv_heads):
        b, g = list_ // kv_heads, list_ % kv_heads
        first = g * group
        for h in range(group):
            for d in range(dim):
                queries[h * dim + d] = q[b, first + h, d] * np.float32(_LOG2_E / np.sqrt(dim))
        for part in range(out.shape[0]):
            acc[:], recent[:], unsummed = 0, 0, 0
            most[:], mass[:] = -np.inf, 0
            for h in range(group if state.shape[0] else 0):
                before = state_lse[b, first + h]
                if before > -np.inf or before != before:
                    most[h] = before * _LOG2_E
                    mass[h] = 2.0 ** (before * _LOG2_E - most[h])
                    for d in range(dim):
                        acc[h * dim + d] = state[b, first + h, d] * np.float32(mass[h])
            for item in range(list_ * slots + part * per, list_ * slots + min(slots, (part + 1) * per)):
                page, count = _page(blocks, table, length, size, item)
                if count == 0:
                    continue
                keys, values = page * k_page + g * k_head, page * v_page + g * v_head
                after, following, there = item + 1, 0, 0
                while after < batches * kv_heads * slots and there == 0:
                    following, there = _page(blocks, table, length, size, after)
                    after += 1
                following = following * k_page + (after - 1) // slots % kv_heads * k_head
                _add_block(queries, rows, dim, k, keys, k_row, v, values, v_row, count, following, p, width, acc,
                           recent, most, mass)
                unsummed += count
                if unsummed >= _CHUNK:
                    acc += recent
                    recent[:], unsummed = 0, 0
            for h in range(group):
                weight = np.float32(1 / mass[h] if mass[h] != 0 else 0)
                for d in range(dim):
                    out[part, b, first + h, d] = (acc[h * dim + d] + recent[h * dim + d]) * weight
                lse[part, b, first + h] = (most[h] + np.log2(mass[h])) / _LOG2_E if mass[h] != 0 else -np.inf
    return True


@compiled()
def _sum(x, i, step, count, dim, ahead, j, ahead_step):
    """The sum of `count` rows of x from x[i]; meanwhile asks for as many from ahead[j]."""
    a, b, one = _splat(np.float32(0)), _splat(np.float32(0)), _splat(np.float32(1))
    for t in range(count):
        for d in range(0, dim, 64 // ahead.itemsize):
            _prefetch(ahead, j + t * ahead_step + d)
        for d in range(0, dim - LANES, 2 * LANES):
            a = _fma(one, _load(x, i + t * step + d), a)
            b = _fma(one, _load(x, i + t * step + d + LANES), b)
        if dim % (2 * LANES):
            a = _fma(one, _load(x, i + t * step + dim - LANES), a)
    return _total(_add(a, b))


@compiled()
def _totals(k, v, k_strides, v_strides, size, dim, table, length, blocks, out):
    """out[b, g] = the sum of all numbers in the listed blocks, in the order and with the prefetch of `_attend`."""
    batches, kv_heads, slots = blocks.shape
    (k_page, k_head, k_row), (v_page, v_head, v_row) = k_strides, v_strides
    for item in range(batches * kv_heads * slots):
        b, g = item // (kv_heads * slots), item // slots % kv_heads
        page, count = _page(blocks, table, length, size, item)
        following, there = _page(blocks, table, length, size, min(item + 1, batches * kv_heads * slots - 1))
        following = following * k_page + (item + 1) // slots % kv_heads * k_head
        keys, values = page * k_page + g * k_head, page * v_page + g * v_head
        if item % slots == 0:
            out[b, g] = 0
        out[b, g] += _sum(k, keys, k_row, count, dim, v, values, v_row)
        out[b, g] += _sum(v, values, v_row, count, dim, k, following, k_row)


@compiled()
def _merge(out, lse, keep, merged, merged_lse):
    """`reference.merge`: out float32 [P, B, H, D], lse float32 [P, B, H], keep bool [P, B, G].

    The last two are written.
    """
    group = lse.shape[2] // keep.shape[2]
    weights, total = np.empty(lse.shape[0], np.float64), np.empty(out.shape[3], np.float32)
    for b in range(lse.shape[1]):
        for h in range(lse.shape[2]):
            most, mass = -np.inf, 0.0
            for p in range(lse.shape[0]):
                counts = keep[p, b, h // group]
                weights[p] = lse[p, b, h] if counts else -np.inf
                most = weights[p] if weights[p] > most or weights[p] != weights[p] else most
            for p in range(lse.shape[0]):
                weights[p] = np.exp(weights[p] - most) if weights[p] > -np.inf or most != most else 0.0
                mass += weights[p]
            total[:] = 0
            for p in range(lse.shape[0]):
                if weights[p] != 0:
                    weight = np.float32(weights[p] / mass)
                    for d in range(total.size):
                        total[d] += weight * out[p, b, h, d]
            merged[b, h] = total
            merged_lse[b, h] = most + np.log(mass) if mass != 0 else -np.inf


def attend(q, kv, blocks):
    """`reference.attend`, of float32 or half precision, D a multiple of 16, k and v with a stride of 1 over D."""
    return _launch(q, kv, blocks, max(1, blocks.shape[2]), None)


def attend_groups(q, kv, blocks, group):
    """`reference.attend_groups`."""
    return _launch(q, kv, blocks, group, -(-blocks.shape[2] // group))


def repair(state, q, kv, missed):
    """`reference.repair`."""
    return _launch(q, kv, missed, max(1, missed.shape[2]), None, *(_array(x) for x in state))


def dense(q, kv):
    """`reference.dense`."""
    return attend(q, kv, every_block(q, kv))


def merge(parts, keep=None):
    """`reference.merge`."""
    out, lse = (_array(x) for x in parts)
    keep = np.ones((*lse.shape[:2], 1), bool) if keep is None else _array(keep)
    merged, total = torch.empty(out.shape[1:]), torch.empty(lse.shape[1:])
    _merge(out, lse, keep, merged.numpy(), total.numpy())
    return Partial(merged, total)


def totals(kv, blocks):
    """float32 [B, G]: the sum of all keys and values in the listed blocks, which is what reading them once costs."""
    out = torch.empty(blocks.shape[:2])
    _totals(_flat(kv.k), _flat(kv.v), kv.k.stride()[:3], kv.v.stride()[:3], *kv.k.shape[2:], _array(kv.page_table),
            _array(kv.length), _array(blocks), out.numpy())
    return out


def every_block(q, kv):
    """The list of all of a sequence's blocks, int32 [B, G, N], -1 past its length."""
    block = torch.arange(kv.page_table.shape[1], dtype=torch.int32)
    there = block * kv.k.shape[2] < kv.length.unsqueeze(1)
    return torch.where(there, block, -1).unsqueeze(1).expand(-1, kv.k.shape[1], -1).contiguous()


_NOTHING = np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)


def _launch(q, kv, blocks, per, parts, state=_NOTHING[0], state_lse=_NOTHING[1]):
    """Partial of [parts, B, H, D] and [parts, B, H], without the first axis where parts is None.

    IndexError when a list, a length or the page table names what is not there, or a block twice.
    """
    pages, _, size, _ = kv.k.shape
    out = torch.empty(1 if parts is None else parts, *q.shape)
    lse = torch.empty(out.shape[:-1])
    if not _attend(_array(q if q.dtype == torch.float32 else q.float()), _flat(kv.k), _flat(kv.v), kv.k.stride()[:3],
                   kv.v.stride()[:3], size, pages, _array(kv.page_table), _array(kv.length), _array(blocks), per,
                   state, state_lse, out.numpy(), lse.numpy()):
        raise IndexError("a list, a length or the page table names what is not there, or a block twice")
    return Partial(out, lse) if parts is not None else Partial(out[0], lse[0])


def _array(x):
    """A tensor's numbers, in order, as a NumPy array."""
    return x.detach().contiguous().numpy()


def _flat(x):
    """All that x reaches in memory, from its first number on, as one NumPy axis of float32 or bits."""
    if x.is_contiguous():
        flat = x.detach().view(-1)
    else:
        extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        flat = x.detach().as_strided((extent,), (1,))
    kind = _BITS.get(x.dtype)
    return (flat if kind is None else flat.view(kind)).numpy()


_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
