"""Triton: partial attention states into one, under a keep mask.

What it means stands in `reference.merge`. One program per head and 64 channels; a part that does not count, or that
attends to nothing, costs its lse and not its out.
"""

import math

import torch
import triton
import triton.language as tl
from artifact.kernels.paged import Partial

LOG2E = math.log2(math.e)
PARTS, CHANNELS = 32, 64  # a program's tile


@triton.jit(do_not_specialize=["parts"])
def merge_parts(out, lse, keep, merged, total, parts, heads, kv_heads,
                D: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr, KEEP: tl.constexpr,
                LOG2E: tl.constexpr):
    """out fp32 [P, B, H, D], lse fp32 [P, B, H], keep uint8 [P, B, G], all contiguous -> merged [B, H, D], total."""
    rows = tl.num_programs(0)  # B * H
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    kept = row // heads * kv_heads + row % heads // (heads // kv_heads)
    kept_rows = rows // heads * kv_heads
    top = -float("inf")
    mass = 0.0
    acc = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, parts, PARTS):
        part = (first + tl.arange(0, PARTS)).to(tl.int64)
        counts = part < parts
        if KEEP:
            counts = counts & (tl.load(keep + part * kept_rows + kept, mask=counts, other=0) != 0)
        state = tl.load(lse + part * rows + row, mask=counts, other=-float("inf"))
        counts = state != -float("inf")
        values = tl.load(out + (part * rows + row)[:, None] * D + channel[None, :],
                         mask=counts[:, None] & (channel < D)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(state, 0))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        # differences first: at lse 1e4 the product with log2(e) would cost a digit
        fade = tl.exp2((top - shift) * LOG2E)
        weight = tl.exp2((state - shift) * LOG2E)
        mass = mass * fade + tl.sum(weight, 0)
        acc = acc * fade + tl.sum(weight[:, None] * values, 0)
        top = new_top
    some = mass > 0.0
    tl.store(merged + row.to(tl.int64) * D + channel, acc / tl.where(some, mass, 1.0), mask=channel < D)
    if tl.program_id(1) == 0:
        tl.store(total + row, tl.where(some, top + tl.log2(tl.where(some, mass, 1.0)) / LOG2E, -float("inf")))


def merge(parts, keep=None):
    """`reference.merge`: Partial of float32 [P, B, H, D] and [P, B, H], keep bool [P, B, G] or None -> Partial."""
    out, lse = parts.out.contiguous(), parts.lse.contiguous()
    count, batch, heads, dim = out.shape
    if not count:
        return nothing(batch, heads, dim, out.device)
    kept = lse if keep is None else keep.contiguous().view(torch.uint8)
    merged, total = torch.empty_like(out[0]), torch.empty_like(lse[0])
    with torch.cuda.device_of(out):
        merge_parts[(batch * heads, -(-dim // CHANNELS))](
            out, lse, kept, merged, total, count, heads, heads if keep is None else keep.shape[2],
            D=dim, PARTS=PARTS, CHANNELS=CHANNELS, KEEP=keep is not None, LOG2E=LOG2E, num_warps=4)
    return Partial(merged, total)


def nothing(batch, heads, dim, device):
    """The state of having attended to nothing, the neutral element of `merge`."""
    return Partial(torch.zeros(batch, heads, dim, device=device),
                   torch.full((batch, heads), -math.inf, device=device))
