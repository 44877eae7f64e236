"""Triton: how selection methods score blocks.

What each means stands in `reference`. Metadata is read once and where it lies; products are float32.
"""

import torch
import triton
import triton.language as tl
from artifact.kernels.merge import LOG2E

QUEST_NUMBERS = 2**12  # of a bound in one program: 32 pages of 128 channels
HEADS = 16  # query heads of one program, the M of its products
PROGRAMS, SPLITS = 264, 64  # to split a softmax for, and into at most


@triton.jit(do_not_specialize=["count"])
def quest_bounds(q, low, high, pages, scores, q_b, q_h, low_b, low_g, low_n, high_b, high_g, high_n, kv_heads, group,
                 count, D: tl.constexpr, WIDTH: tl.constexpr, PAGES: tl.constexpr, MEAN: tl.constexpr,
                 SUM: tl.constexpr):
    """q [B, H, D], low and high [B or 1 (stride 0), G, N, D], pages int64 [B] -> scores [B, G, N].

    Grid: ceil(N / PAGES), B * G. The bounds stay in registers while one query head after the other meets them.
    """
    row = tl.program_id(1)
    b, g = row // kv_heads, row % kv_heads
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    channel = tl.arange(0, WIDTH)
    counts = page < tl.minimum(tl.load(pages + b), count)
    mask = counts[:, None] & (channel < D)[None, :]
    at = page.to(tl.int64)[:, None]
    least = tl.load(low + b.to(tl.int64) * low_b + g.to(tl.int64) * low_g + at * low_n + channel[None, :],
                    mask=mask, other=0.0).to(tl.float32)
    most = tl.load(high + b.to(tl.int64) * high_b + g.to(tl.int64) * high_g + at * high_n + channel[None, :],
                   mask=mask, other=0.0).to(tl.float32)
    first = q + b * q_b + g * group * q_h + channel
    if MEAN:
        query = tl.zeros([WIDTH], tl.float32)
        for member in range(0, group):
            query += tl.load(first + member * q_h, mask=channel < D, other=0.0).to(tl.float32)
        query = query / group
        score = tl.sum(query[None, :] * tl.where((query > 0)[None, :], most, least), 1)
    else:
        score = tl.full([PAGES], 0.0 if SUM else -float("inf"), tl.float32)
        for member in range(0, group):
            query = tl.load(first + member * q_h, mask=channel < D, other=0.0).to(tl.float32)
            bound = tl.sum(query[None, :] * tl.where((query > 0)[None, :], most, least), 1)
            # a NaN of any head makes the page's score NaN
            score = score + bound if SUM else tl.maximum(score, bound, propagate_nan=tl.PropagateNan.ALL)
    score = tl.where(counts & (score == score), score, -float("inf"))
    tl.store(scores + row.to(tl.int64) * count + page, score, mask=page < count)


def quest_scores(q, low, high, pages, *, group="max"):
    """`reference.quest_scores`; pages int64 [B]."""
    batch, heads, dim = q.shape
    _, kv_heads, count, _ = low.shape
    scores = torch.empty(batch, kv_heads, count, device=q.device)
    q, low, high = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, low, high))
    width = triton.next_power_of_2(dim)
    tile = max(16, QUEST_NUMBERS // width)
    if scores.numel():
        with torch.cuda.device_of(q):
            quest_bounds[(-(-count // tile), batch * kv_heads)](
                q, low, high, pages, scores, q.stride(0), q.stride(1), *_strides(low), *_strides(high), kv_heads,
                heads // kv_heads, count, D=dim, WIDTH=width, PAGES=tile, MEAN=group == "mean", SUM=group == "sum",
                num_warps=4)
    return scores


@triton.jit(do_not_specialize=["splits", "tiles"])
def compressed_lse(q, keys, length, lse, q_b, q_h, keys_b, keys_g, keys_c, kv_heads, group, size, stride, splits, tiles,
                   scale_log2, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
                   WIDEN: tl.constexpr):
    """q [B, H, D], keys [B or 1 (stride 0), G, C, D], length int64 [B] -> lse [splits, B, H] in base 2, of the softmax
    over every `splits`-th tile of keys. Grid: splits, B * G, ceil(group / HEADS)."""
    split = tl.program_id(0)
    b, g = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    member = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, WIDTH)
    query = tl.load(q + b * q_b + (g * group + member)[:, None] * q_h + channel[None, :],
                    mask=(member < group)[:, None] & (channel < D)[None, :], other=0.0)
    complete = (tl.load(length + b) - size) // stride + 1
    complete = tl.where(tl.load(length + b) < size, 0, complete).to(tl.int32)
    first = keys + b.to(tl.int64) * keys_b + g.to(tl.int64) * keys_g
    top = tl.full([HEADS], -float("inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    for step in range(0, tiles):
        at = (split + step * splits) * TILE + tl.arange(0, TILE)
        key = tl.load(first + at[:, None] * keys_c + channel[None, :],
                      mask=(at < complete)[:, None] & (channel < D)[None, :], other=0.0)
        logits = _logits(query, key, WIDEN) * scale_log2
        logits = tl.where((at < complete)[None, :], logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        mass = mass * tl.exp2(top - shift) + tl.sum(tl.exp2(logits - shift[:, None]), 1)
        top = new_top
    place = (split * tl.num_programs(1) + tl.program_id(1)) * group + member
    tl.store(lse + place, tl.where(mass > 0.0, top + tl.log2(tl.where(mass > 0.0, mass, 1.0)), -float("inf")),
             mask=member < group)


@triton.jit(do_not_specialize=["splits", "count"])
def pooled_scores(q, keys, length, lse, scores, q_b, q_h, keys_b, keys_g, keys_c, kv_heads, group, size, stride, splits,
                  count, scale_log2, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
                  SPLITS: tl.constexpr, EACH: tl.constexpr, BEFORE: tl.constexpr, CHUNKS: tl.constexpr,
                  WIDEN: tl.constexpr):
    """The softmax's weights, summed over the group, the largest of the EACH keys that begin in a block and the BEFORE
    that reach into it -> scores [B, G, count]. A group is CHUNKS times HEADS, unrolled: a loop would hold the keys in
    registers, and wide float32 ones do not fit. Grid: ceil(count / TILE), B * G."""
    row = tl.program_id(1)
    b, g = row // kv_heads, row % kv_heads
    channel = tl.arange(0, WIDTH)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    complete = (tl.load(length + b) - size) // stride + 1
    complete = tl.where(tl.load(length + b) < size, 0, complete).to(tl.int32)
    first = keys + b.to(tl.int64) * keys_b + g.to(tl.int64) * keys_g
    split = tl.arange(0, SPLITS)
    best = tl.full([TILE], -float("inf"), tl.float32)
    for offset in range(-BEFORE, EACH):
        at = block * EACH + offset
        there = (at >= 0) & (at < complete)
        key = tl.load(first + at[:, None] * keys_c + channel[None, :],
                      mask=there[:, None] & (channel < D)[None, :], other=0.0)
        total = tl.zeros([TILE], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            member = chunk * HEADS + tl.arange(0, HEADS)
            query = tl.load(q + b * q_b + (g * group + member)[:, None] * q_h + channel[None, :],
                            mask=(member < group)[:, None] & (channel < D)[None, :], other=0.0)
            parts = tl.load(lse + (split[:, None] * tl.num_programs(1) + row) * group + member[None, :],
                            mask=(split < splits)[:, None] & (member < group)[None, :], other=-float("inf"))
            top = tl.max(parts, 0)
            top = tl.where(top == -float("inf"), 0.0, top)
            mass = tl.sum(tl.exp2(parts - top[None, :]), 0)
            logits = _logits(query, key, WIDEN) * scale_log2
            weight = tl.exp2(logits - top[:, None]) / tl.where(mass > 0.0, mass, 1.0)[:, None]
            total += tl.sum(tl.where((member < group)[:, None], weight, 0.0), 0)
        total = tl.where(there & (total == total), total, -float("inf"))
        best = tl.maximum(best, total)
    tl.store(scores + row.to(tl.int64) * count + block, best, mask=block < count)


@triton.jit
def _logits(query, key, WIDEN: tl.constexpr):
    if WIDEN:
        query, key = query.to(tl.float32), key.to(tl.float32)
    return tl.dot(query, tl.trans(key), input_precision="ieee")


def infllm_scores(q, keys, length, blocks, *, size, stride, block):
    """`reference.infllm_scores` for `blocks` blocks, a number, so that no length need come from the device."""
    batch, heads, dim = q.shape
    _, kv_heads, held, _ = keys.shape
    scores = torch.empty(batch, kv_heads, blocks, device=q.device)
    if not scores.numel():
        return scores
    q, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys))
    group = heads // kv_heads
    width = max(16, triton.next_power_of_2(dim))
    widen = q.dtype != keys.dtype or (INTERPRETED and q.dtype == torch.bfloat16)  # the interpreter's bf16 dot is wrong
    wide = widen or q.dtype == torch.float32
    tile = max(16, min(64, 2**13 // (width * (2 if wide else 1))))
    tiles = -(-held // tile)
    splits = max(1, min(SPLITS, tiles, PROGRAMS // (batch * kv_heads)))
    lse = torch.empty(splits, batch, heads, device=q.device)
    shape = q.stride(0), q.stride(1), *_strides(keys), kv_heads, group, size, stride, splits
    fixed = {"D": dim, "WIDTH": width, "TILE": tile, "HEADS": HEADS, "WIDEN": widen, "num_warps": 8 if wide else 4}
    scale = dim ** -0.5 * LOG2E
    with torch.cuda.device_of(q):
        compressed_lse[(splits, batch * kv_heads, -(-group // HEADS))](
            q, keys, length, lse, *shape, -(-tiles // splits), scale, **fixed)
        few = max(16, tile // 2)
        pooled_scores[(-(-blocks // few), batch * kv_heads)](
            q, keys, length, lse, scores, *shape, blocks, scale, SPLITS=SPLITS, EACH=block // stride,
            BEFORE=size // stride - 1, CHUNKS=-(-group // HEADS), **{**fixed, "TILE": few})
    return scores


INTERPRETED = not isinstance(quest_bounds, triton.JITFunction)


def _strides(tensor):
    """Of sequence, KV head and block; sequences that share one have a stride of 0."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0), tensor.stride(1), tensor.stride(2)
