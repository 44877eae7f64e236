"""Attention on a CPU: each listed block read once where it lies, all query heads of its KV head together, one core.

Written in the tiles of `lanes_cpu`. The next rows are asked for between the multiplications, not in bursts, once for
all heads and from end to end: that is what lets them arrive meanwhile. What each operator means stands in `reference`.
"""

import numpy as np
import torch
from artifact.kernels.lanes_cpu import (
    FLOAT,
    HEADS,
    INDEX,
    LANES,
    ROWS,
    accumulate,
    add,
    ask,
    at,
    compiled,
    constant,
    exp2_of_difference,
    instruction,
    lanes,
    larger,
    largest,
    load,
    loaded,
    over_channels,
    pointer,
    rows_from,
    slots,
    splat,
    spread,
    store,
    store_sums,
    total,
)
from artifact.kernels.paged import Partial
from numba import carray, types
from numba.core import cgutils

_CHUNK = 256  # tokens summed up before they go to the sum of all: many small numbers first, so that rounding stays low
_LOG2_E = 1.4426950408889634
_VECTORS = 4 * LANES // 16  # of a row's values at a time: with the heads half of the registers


def _ask(builder, ahead, i, step, rows, d, width):
    """Asks for `width` channels of rows of `ahead` from i, `step` apart, the first of them at i + d.

    Two rows of half precision are taken as one of twice the size.
    """
    packed = min(rows, 32 // ahead.dtype.bitwidth)
    for r in range(0, rows, packed):
        row = builder.add(i, builder.add(builder.mul(INDEX(r), step), builder.mul(INDEX(packed), d)))
        for c in range(0, packed * width, 512 // ahead.dtype.bitwidth):
            ask(builder, ahead, builder.add(row, INDEX(c)))


def _over_heads(builder, rows, build):
    """What `build` builds of the first head of a tile and whether to ask for rows meanwhile: once is enough."""
    build(INDEX(0), True)
    with cgutils.for_range_slice(builder, INDEX(HEADS), rows, INDEX(HEADS), INDEX) as (h, _):
        build(h, False)


@instruction(types.void, None, types.intp, types.intp, None, types.intp, types.intp, types.intp, None, types.intp,
             types.intp, None, types.intp, types.intp)
def _logits(builder, q, rows, dim, k, i, step, last, out, o, width, ahead, j, ahead_step):
    """out[o + h * width + t] = the dot product of query h of `rows` and key t of the next ROWS from k[i].

    Keys are `step` apart and none lies after k[last], which is taken instead. Meanwhile asks for as many rows at
    ahead[j].
    """
    keys = rows_from(builder, i, step, last, ROWS)

    def tile(head, asks):
        heads = [builder.add(head, INDEX(h)) for h in range(HEADS)]
        queries = [builder.mul(h, dim) for h in heads]
        sums = slots(builder, HEADS * ROWS)
        for d, channels in over_channels(builder, dim, 16):
            if asks:
                _ask(builder, ahead, j, ahead_step, ROWS, d, channels)
            for c in range(0, channels, LANES):
                e = builder.add(d, INDEX(c))
                x = [loaded(builder, k, builder.add(key, e)) for key in keys]
                for h, query in enumerate(queries):
                    y = loaded(builder, q, builder.add(query, e))
                    for r in range(ROWS):
                        accumulate(builder, sums[h * ROWS + r], y, x[r])
        store_sums(builder, sums, out, [builder.add(o, builder.mul(h, width)) for h in heads])

    _over_heads(builder, rows, tile)


@instruction(types.void, None, types.intp, types.intp, None, types.intp, types.intp, types.intp, None, types.intp,
             None, types.intp, types.intp)
def _weigh(builder, p, rows, width, v, i, step, count, acc, dim, ahead, j, ahead_step):
    """acc of each head h of `rows` += `count` values from v[i], weighted by p[h * width + t].

    Values are `step` apart. Meanwhile asks for as many rows at ahead[j].
    """
    for d, channels in over_channels(builder, dim, _VECTORS * LANES):
        # rows of `ahead` that lie side by side are asked for from end to end, not a piece of each
        compact = builder.icmp_signed("==", ahead_step, dim)
        first = builder.add(j, builder.select(compact, builder.mul(d, count), d))
        advance = builder.select(compact, INDEX(channels), ahead_step)

        def tile(head, asks, d=d, channels=channels, first=first, advance=advance):
            heads = [builder.add(head, INDEX(h)) for h in range(HEADS)]
            places = [[builder.add(builder.mul(h, dim), builder.add(d, INDEX(c))) for c in range(0, channels, LANES)]
                      for h in heads]
            sums = [slots(builder, len(of_head)) for of_head in places]
            with cgutils.for_range(builder, count, intp=INDEX) as token:
                t = token.index
                if asks:
                    _ask(builder, ahead, builder.add(first, builder.mul(t, advance)), advance, 1, INDEX(0), channels)
                row = builder.add(builder.add(i, d), builder.mul(t, step))
                x = [loaded(builder, v, builder.add(row, INDEX(c))) for c in range(0, channels, LANES)]
                for h, of_head in zip(heads, sums, strict=True):
                    weight = builder.load(at(builder, p, builder.add(builder.mul(h, width), t), FLOAT))
                    weight = spread(builder, weight)
                    for slot, y in zip(of_head, x, strict=True):
                        accumulate(builder, slot, weight, y)
            for place, slot in zip(sum(places, []), sum(sums, []), strict=True):
                x = builder.fadd(loaded(builder, acc, place), builder.load(slot))
                builder.store(x, at(builder, acc, place), align=4)

        _over_heads(builder, rows, tile)


@instruction(lanes, None, types.intp, types.intp, types.intp, types.intp, None, types.intp, types.intp)
def _sum(builder, x, i, step, count, dim, ahead, j, ahead_step):
    """A vector whose lanes sum up `count` rows of x from x[i]; meanwhile asks for as many from ahead[j]."""
    sums = slots(builder, 64 // LANES)
    with cgutils.for_range(builder, count, intp=INDEX) as token:
        t = token.index
        row = builder.add(i, builder.mul(t, step))
        for d, channels in over_channels(builder, dim, 64):
            _ask(builder, ahead, builder.add(j, builder.mul(t, ahead_step)), ahead_step, 1, d, channels)
            for slot, c in zip(sums, range(0, channels, LANES), strict=False):
                accumulate(builder, slot, loaded(builder, x, builder.add(builder.add(row, d), INDEX(c))), constant(1))
    sums = [builder.load(slot) for slot in sums]
    while len(sums) > 1:
        sums = [builder.fadd(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@compiled()
def _exponentials(p, o, count, bound):
    """p[o : o + count], logits to base two, becomes 2**(p - m) with m the largest of them and `bound`.

    The rest up to a multiple of sixteen becomes 0. -> m, the sum.
    """
    for i in range(count, -(-count // LANES) * LANES):
        p[o + i] = -np.inf
    most = splat(bound)
    for i in range(0, count, LANES):
        most = larger(most, load(p, o + i))
    m = largest(most)
    most, s = splat(m), splat(np.float32(0))
    for i in range(0, count, LANES):
        x = exp2_of_difference(load(p, o + i), most)
        store(p, o + i, x)
        s = add(s, x)
    return m, total(s)


@compiled()
def _add_block(queries, rows, dim, k, keys, k_row, v, values, v_row, count, following, p, width, acc, recent, most,
               mass):
    """A block's `count` tokens, keys at k[keys] and values at v[values], into the state of all heads of a group.

    The state: `most`, the largest logit so far, to base two; mass = sum of 2**(logit - most); acc + recent = the same
    sum of weighted values, this block's in `recent`. following: where in k the next block's keys are, to ask for them.
    """
    last = keys + (count - 1) * k_row
    for t in range(0, count, ROWS):  # past the end the last token again, with no weight
        _logits(queries, rows, dim, k, keys + t * k_row, k_row, last, p, t, width, v, values + t * v_row, v_row)
    for r in range(rows):
        old = most[r]
        most[r], fresh = _exponentials(p, r * width, count, old)
        if most[r] > old:
            shrink = np.float32(2.0 ** np.float64(old - most[r]))
            mass[r] *= shrink
            for d in range(r * dim, (r + 1) * dim):
                acc[d] *= shrink
                recent[d] *= shrink
        mass[r] += fresh
    _weigh(p, rows, width, v, values, v_row, count, recent, dim, k, following, k_row)


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
    rows, width = -(-group // HEADS) * HEADS, -(-size // LANES) * LANES  # a few heads of zeros fill up the last four
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


_FLOATS, _INTS = np.empty(0, np.float32), np.empty(0, np.int32)  # what is at an address
_KINDS = {torch.float32: _FLOATS, torch.bfloat16: np.empty(0, np.uint16), torch.float16: np.empty(0, np.int16)}


@compiled()
def _attend_at(kind, k, v, k_strides, v_strides, size, pages, queries, lists, blocks, per, parts, out, lse, q, table,
               length, listed, state, state_lse):
    """`_attend` of what lies at addresses, a state at 0 being none; queries [B, H, D] and lists [B, G, S] are shapes.

    kind: an array of what k and v hold; blocks: N.
    """
    batches, heads, dim = queries
    before = batches if state else 0
    return _attend(
        carray(pointer(_FLOATS, q), queries), carray(pointer(kind, k), (0,)), carray(pointer(kind, v), (0,)),
        k_strides, v_strides, size, pages, carray(pointer(_INTS, table), (batches, blocks)),
        carray(pointer(_INTS, length), (batches,)), carray(pointer(_INTS, listed), lists), per,
        carray(pointer(_FLOATS, state), (before, heads, dim)), carray(pointer(_FLOATS, state_lse), (before, heads)),
        carray(pointer(_FLOATS, out), (parts, batches, heads, dim)),
        carray(pointer(_FLOATS, lse), (parts, batches, heads)))


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
        out[b, g] += total(_sum(k, keys, k_row, count, dim, v, values, v_row))
        out[b, g] += total(_sum(v, values, v_row, count, dim, k, following, k_row))


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
    """`reference.attend`, of float32 or half precision, D a multiple of 16, k and v with a stride of 1 over D.

    Shapes and dtypes are taken as `artifact.ops` has checked them.
    """
    return _launch(q, kv, blocks, max(1, blocks.shape[2]), None)


def attend_groups(q, kv, blocks, group):
    """`reference.attend_groups`."""
    return _launch(q, kv, blocks, group, -(-blocks.shape[2] // group))


def repair(state, q, kv, missed):
    """`reference.repair`."""
    return _launch(q, kv, missed, max(1, missed.shape[2]), None, state)


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


def _launch(q, kv, blocks, per, parts, state=()):
    """Partial of [parts, B, H, D] and [parts, B, H], without the first axis where parts is None.

    IndexError when a list, a length or the page table names what is not there, or a block twice. Tensors go by their
    addresses: as NumPy arrays they made a call over next to nothing twice as long.
    """
    pages, _, size, _ = kv.k.shape
    whole, parts = (tuple(q.shape), 1) if parts is None else ((parts, *q.shape), parts)
    out, lse = torch.empty(whole), torch.empty(whole[:-1])
    given = [x.contiguous() for x in (q.float(), kv.page_table, kv.length, blocks, *state)]  # kept until it is done
    if not _attend_at(_KINDS[kv.k.dtype], kv.k.data_ptr(), kv.v.data_ptr(), kv.k.stride()[:3], kv.v.stride()[:3], size,
                      pages, tuple(q.shape), tuple(blocks.shape), kv.page_table.shape[1], per, parts,
                      out.data_ptr(), lse.data_ptr(), *[x.data_ptr() for x in given], *(() if state else (0, 0))):
        raise IndexError("a list, a length or the page table names what is not there, or a block twice")
    return Partial(out, lse)


def _array(x):
    """A tensor's numbers, in order, as a NumPy array."""
    return x.detach().contiguous().numpy()


def _flat(x):
    """All that x reaches in memory, from its first number on, as one NumPy axis of float32 or bits."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    flat = x.detach().as_strided((extent,), (1,))
    kind = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(x.dtype)
    return (flat if kind is None else flat.view(kind)).numpy()
