"""Triton: the blocks with the highest scores, exactly, in one launch: a program for each list, nothing sorted.

What it means stands in `reference.topk`. A score becomes a whole number of the same order, and the lowest one that is
still in is found eight bits at a time, each from a histogram of the scores that agree with it so far. A last pass, in
order, writes the list, so it ascends. Up to `MOST` blocks stay in registers; the scores of more are read five times.
"""

import torch
import triton
import triton.language as tl

LEAST, MOST, BINS = 512, 4096, 256  # blocks in a tile; eight bits


@triton.jit
def _keys(scores, forced, first, blocks, TILE: tl.constexpr, FORCED: tl.constexpr):
    """Of one tile: block numbers, whether each is forced, and its order as uint32; 0 for what cannot be selected."""
    at = first + tl.arange(0, TILE)
    score = tl.load(scores + at, mask=at < blocks, other=-float("inf"))
    must = at < 0
    if FORCED:
        must = tl.load(forced + at, mask=at < blocks, other=0) != 0
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0 is 0
    key = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    return at, must, tl.where((score > -float("inf")) & (must == 0), key, 0)


@triton.jit(do_not_specialize=["count", "slots"])
def top_blocks(scores, forced, count, listed, blocks, slots, TILE: tl.constexpr, BINS: tl.constexpr,
               WHOLE: tl.constexpr, FORCED: tl.constexpr, SEVERAL: tl.constexpr):
    """scores fp32 [R, N], forced uint8 [R, N], count int [R] or a number -> listed int32 [R, S]; all contiguous."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * blocks
    forced += row * blocks
    listed += row * slots
    digit = tl.arange(0, BINS)
    free = tl.minimum(tl.load(count + row) if SEVERAL else count, slots).to(tl.int32)
    lowest = tl.full([], 0, tl.uint32)
    if WHOLE:
        at, must, key = _keys(scores, forced, 0, blocks, TILE, FORCED)
    for level in tl.static_range(4):
        shift = 24 - 8 * level
        found = tl.zeros([BINS], tl.int32)
        for first in range(0, blocks, TILE):
            if not WHOLE:
                at, must, key = _keys(scores, forced, first, blocks, TILE, FORCED)
            among = key > 0
            if level == 0:
                free -= tl.sum(must.to(tl.int32), 0)
            else:
                among &= (key >> shift) >> 8 == (lowest >> shift) >> 8
            found += tl.histogram(((key >> shift) & (BINS - 1)).to(tl.int32), BINS, mask=among)
        if level == 0:
            free = tl.maximum(tl.minimum(free, tl.sum(found, 0)), 0)
            some = free > 0
        above = tl.sum(found, 0) - tl.cumsum(found, 0)
        here = (above < free) & (free <= above + found)  # of one digit, or of none when there is nothing to choose
        lowest += tl.sum(tl.where(here, digit, 0), 0).to(tl.uint32) << shift
        free -= tl.sum(tl.where(here, above, 0), 0)
    taken = 0
    equal = 0
    for first in range(0, blocks, TILE):
        if not WHOLE:
            at, must, key = _keys(scores, forced, first, blocks, TILE, FORCED)
        tie = (key == lowest).to(tl.int32)
        chosen = must | (some & ((key > lowest) | ((tie > 0) & (equal + tl.cumsum(tie, 0) <= free))))
        place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(listed + place, at, mask=chosen & (place < slots))
        equal += tl.sum(tie, 0)
        taken += tl.sum(chosen.to(tl.int32), 0)
    for first in range(0, slots, TILE):
        place = first + tl.arange(0, TILE)
        tl.store(listed + place, -1, mask=(place >= taken) & (place < slots))


def topk(scores, count, forced=None, slots=None):
    """`reference.topk` of float32 [R, N]; count a number or an int tensor [R]; forced bool [R, N] or None."""
    rows, blocks = scores.shape
    if slots is None:
        slots = max(count, int(forced.sum(-1).max()) if forced is not None and rows else 0)
    listed = torch.empty(rows, slots, dtype=torch.int32, device=scores.device)
    several, tile = isinstance(count, torch.Tensor), min(max(triton.next_power_of_2(blocks), LEAST), MOST)
    if rows and slots:
        scores, kept = scores.contiguous(), scores if forced is None else forced.contiguous().view(torch.uint8)
        with torch.cuda.device_of(scores):
            top_blocks[(rows,)](scores, kept, count.contiguous() if several else count, listed, blocks, slots,
                                TILE=tile, BINS=BINS, WHOLE=blocks <= tile, FORCED=forced is not None, SEVERAL=several,
                                num_warps=max(4, tile // 512), maxnreg=255)  # else ptxas gives loops 128, and spills
    return listed
