"""Triton: one step of PRR's predictor in one pass: three arrays read, three written.

What it means stands in `reference.ema_step`. No product is fused with a sum, so the bits are the reference's.
"""

import torch
import triton
import triton.language as tl

TILE = 1024


@triton.jit(do_not_specialize=["alpha", "beta", "gamma"])
def ema(level, trend, scores, new_level, new_trend, prediction, count, alpha, beta, gamma, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < count
    old = tl.load(level + at, mask=mask, other=0.0)
    slope = tl.load(trend + at, mask=mask, other=0.0)
    score = tl.load(scores + at, mask=mask, other=0.0)
    infinite = float("inf")
    known = (tl.abs(score) < infinite) & (tl.abs(old) < infinite)
    slope = tl.where(known, beta * (score - old) + (1 - beta) * slope, 0.0)
    fresh = tl.where(score == score, score, -infinite)
    old = tl.where(known, alpha * score + (1 - alpha) * old, fresh)
    tl.store(new_level + at, old, mask=mask)
    tl.store(new_trend + at, slope, mask=mask)
    tl.store(prediction + at, old + gamma * slope, mask=mask)


def ema_step(level, trend, scores, theta):
    """`reference.ema_step` of float32 tensors."""
    given = [x.contiguous() for x in (level, trend, scores)]
    new = [torch.empty_like(given[0]) for _ in range(3)]
    count = scores.numel()
    if count:
        with torch.cuda.device_of(scores):
            ema[(-(-count // TILE),)](*given, *new, count, *(float(weight) for weight in theta), TILE=TILE,
                                      num_warps=4, enable_fp_fusion=False)
    return tuple(new)
