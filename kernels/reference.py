"""Each operator as its paper writes it, in torch: readable, on any device and dtype, the oracle of every faster one.

Shapes: B sequences, H query heads, G KV heads (query head h uses KV head h // (H/G)), D channels, N blocks, bs tokens
in one of them, S slots in a list of blocks, P parts. Results are float32, or float64 when the query or the scores are;
attention is float64 inside. A score of -inf means that the block cannot be selected; a score that would be NaN becomes
-inf.
"""

import math

import torch
from artifact.kernels.paged import Partial


def quest_scores(q, low, high, pages=None, *, group="max"):
    """Quest's upper bound of a page's dot products with the query: the sum over channels of max(q * low, q * high).

    q [B, H, D]; low, high [B or 1, G, N, D]: smallest and largest key of each page per channel, low <= high. With a
    leading 1 all sequences share them. pages int [B]: pages that count in each sequence, the first ones (None = all).
    group: what a KV head makes of its H/G query heads: the score of their "mean" query (PRR, appendix A.1), or the
    "max" or the "sum" of their scores.
    -> [B, G, N]. The larger product is taken as q * high where q > 0 and q * low elsewhere, which is the same for
    low <= high and says what infinite keys do: a channel with q = 0 and an infinite low is NaN.

    Source: Quest (arXiv 2406.10774), section 3.3.
    """
    wide = _wide(q)
    heads = _by_kv_head(q, low.shape[1])
    heads = heads.mean(2, keepdim=True) if group == "mean" else heads
    rows = []
    for b in range(q.shape[0]):
        at = min(b, low.shape[0] - 1)
        query = heads[b].unsqueeze(2)  # [G, H/G, 1, D] against pages [G, 1, N, D]
        bound = torch.where(query > 0, high[at].to(wide).unsqueeze(1), low[at].to(wide).unsqueeze(1))
        scores = (query * bound).sum(-1)
        rows.append(scores.sum(1) if group == "sum" else scores.amax(1))
    return _missing(torch.stack(rows), pages)


def infllm_scores(q, keys, length, *, size, stride, block, blocks=None):
    """InfLLM-v2's block scores: softmax over compressed keys, summed over the group, the largest in each block.

    q [B, H, D]; keys [B or 1, G, C, D]: key c is the mean of the sequence's keys c * stride to c * stride + size - 1.
    length int [B]: tokens in each sequence; only the (length - size) // stride + 1 keys of complete windows count.
    size, stride, block: tokens; size and block are multiples of stride.
    -> [B, G, N] with N = ceil(max(length) / block), or `blocks`. A block's score is the largest of all compressed keys
    that overlap it: for 32, 16 and 64 a pooling with kernel 5, stride 4 and padding 1. A block that none overlaps is
    -inf. The softmax's denominator is exact; the CUDA code can approximate it over four times coarser keys.

    Source: InfLLM-v2 (arXiv 2509.24663); OpenBMB/infllmv2_cuda_impl at f908e73, infllm_v2/max_pooling_1d.py.
    """
    wide = _wide(q)
    heads, keys = _by_kv_head(q, keys.shape[1]), keys.to(wide)
    logits = torch.einsum("bgqd,bgcd->bgqc", heads, keys.expand(q.shape[0], -1, -1, -1)) / math.sqrt(q.shape[-1])
    counts = compressed_count(length, size, stride)
    absent = torch.arange(keys.shape[2], device=q.device) >= counts.unsqueeze(1)  # [B, C]
    total = logits.masked_fill(absent[:, None, None], -math.inf).softmax(-1).sum(2)
    total = total.masked_fill(absent[:, None], -math.inf)
    blocks = -(-int(length.max()) // block) if blocks is None else blocks
    per_block, before = block // stride, size // stride - 1
    after = max(0, (blocks + 1) * per_block - total.shape[2])
    total = torch.nn.functional.pad(total, (before, after), value=-math.inf)
    return _missing(total.unfold(-1, per_block + before, per_block)[:, :, :blocks].amax(-1))


def compressed_count(length, size, stride):
    """Complete windows of `size` tokens, `stride` apart, in `length` tokens; for a number or a tensor of them."""
    count = (length - size) // stride + 1
    return count.clamp(min=0) if isinstance(count, torch.Tensor) else max(0, count)


def ema_step(level, trend, scores, theta):
    """PRR's predictor: level and trend of each block's score, and the score to expect next.

    level, trend, scores of one shape [..., N]; theta = (alpha, beta, gamma).
    -> level, trend, prediction: trend' = beta (score - level) + (1 - beta) trend against the old level, level' = alpha
    score + (1 - alpha) level, prediction = level' + gamma trend'. Where the score or the old level is not finite, the
    block begins anew with level = score and trend = 0; without a score its level is -inf, and so is its prediction.

    Source: PRR (arXiv 2606.30389), section 4.1, equations 2 and 3.
    """
    alpha, beta, gamma = (torch.tensor(weight, dtype=scores.dtype) for weight in theta)
    known = torch.isfinite(scores) & torch.isfinite(level)
    trend = torch.where(known, beta * (scores - level) + (1 - beta) * trend, 0.0)
    level = torch.where(known, alpha * scores + (1 - alpha) * level, _missing(scores))
    return level, trend, level + gamma * trend


def topk(scores, count, forced=None, slots=None):
    """The blocks with the highest scores, ties to the lowest index, beside those that are attended in any case.

    scores [R, N]; count: blocks in a list, or int [R] of each; forced bool [R, N]: blocks that are in whatever their
    score, first of all and even when they are more than `count`. NaN counts as -inf, and such blocks are in only when
    forced. slots: S, at most so many, forced ones the first; with it nothing is asked of the device (None: as below).
    -> int32 [R, S] with S = count or the most forced blocks of a row; ascending indices, -1 after the last.

    The lowest score that is still in divides the rest: what is above it is in, and of what equals it the first ones.
    """
    rows, blocks = scores.shape
    forced = torch.zeros(rows, blocks, dtype=torch.bool, device=scores.device) if forced is None else forced
    scores = scores.nan_to_num(-math.inf, math.inf, -math.inf).masked_fill(forced, -math.inf)
    several = isinstance(count, torch.Tensor)
    if slots is not None:
        count = count.clamp(max=slots) if several else min(count, slots)
    free = ((count[:, None] if several else count) - forced.sum(-1, keepdim=True)).clamp(0, blocks)
    most = min(blocks, slots if several else count)
    chosen = forced
    if most and rows:
        lowest = torch.topk(scores, most).values.gather(-1, (free - 1).clamp(min=0))
        above, equal = scores > lowest, scores == lowest
        ties = equal & (equal.cumsum(-1) <= free - above.sum(-1, keepdim=True))
        chosen = forced | ((above | ties) & (free > 0) & (scores > -math.inf))
    if slots is None:
        slots = max(count, int(forced.sum(-1).max()) if rows else 0)
    place = torch.where(chosen, chosen.cumsum(-1) - 1, slots).clamp(max=slots)
    listed = torch.full((rows, slots + 1), -1, dtype=torch.int32, device=scores.device)
    index = torch.arange(blocks, dtype=torch.int32, device=scores.device).expand(rows, -1)
    return listed.scatter(-1, place, index)[:, :slots]


def attend(q, kv, blocks):
    """Attention of one query per head over exactly the listed blocks, scaled by 1 / sqrt(D).

    q [B, H, D]; kv: PagedKV; blocks int32 [B, G, S], logical blocks in any order. What is no block of the sequence is
    padding: -1, an index past its length or the page table, a page that does not exist.
    -> Partial of [B, H, D] and [B, H].
    """
    (batch, kv_heads, slots), (pages, _, size, _) = blocks.shape, kv.k.shape
    table = kv.page_table.shape[1]
    if not (slots and table and pages):
        return Partial(torch.zeros_like(q, dtype=_wide(q)), torch.full_like(q[..., 0], -math.inf, dtype=_wide(q)))
    at = blocks.clamp(0, table - 1).long()
    page = kv.page_table.long().unsqueeze(1).expand(-1, kv_heads, -1).gather(2, at)
    there = (blocks >= 0) & (blocks < table) & (page >= 0) & (page < pages)
    token = at.unsqueeze(-1) * size + torch.arange(size, device=q.device)
    valid = (there.unsqueeze(-1) & (token < kv.length[:, None, None, None])).reshape(batch, kv_heads, -1)
    where = page.clamp(0, pages - 1), torch.arange(kv_heads, device=q.device)[:, None]
    k, v = (x[where].double().flatten(2, 3).masked_fill(~valid.unsqueeze(-1), 0) for x in (kv.k, kv.v))
    logits = q.double().unflatten(1, (kv_heads, -1)) @ k.mT / math.sqrt(q.shape[-1])
    logits = logits.masked_fill(~valid.unsqueeze(2), -math.inf)
    out = torch.where(valid.unsqueeze(2), logits.softmax(-1), 0.0) @ v
    return Partial(out.flatten(1, 2).to(_wide(q)), logits.logsumexp(-1).flatten(1, 2).to(_wide(q)))


def attend_groups(q, kv, blocks, group):
    """`attend` over every `group` slots of the lists in turn, the last one over what is left.

    -> Partial of [P, B, H, D] and [P, B, H] with P = ceil(S / group).
    """
    parts = [attend(q, kv, some) for some in blocks.split(group, dim=2)]  # one, of nothing, from no slots
    return Partial(*(torch.stack(x)[:-(-blocks.shape[2] // group)] for x in zip(*parts, strict=True)))


def repair(state, q, kv, missed):
    """`state`, attention over some blocks, continued over the `missed` ones, which are none of them.

    -> Partial of attention over the union. Source: PRR (arXiv 2606.30389), section 3, "repair".
    """
    fresh = attend(q, kv, missed)
    return merge(Partial(*(torch.stack(both) for both in zip(state, fresh, strict=True))))


def merge(parts, keep=None):
    """Attention over all that the parts attend to, each token in one of them at most.

    parts: Partial of [P, B, H, D] and [P, B, H]; keep bool [P, B, G]: what counts (None = all), by KV head.
    -> Partial: lse = log sum exp(lse_p), out = sum exp(lse_p - lse) out_p. A part that does not count, or that attends
    to nothing, may hold anything as its out.
    """
    out, lse = parts
    if keep is not None:
        lse = lse.masked_fill(~keep.repeat_interleave(lse.shape[2] // keep.shape[2], dim=2), -math.inf)
    absent = lse == -math.inf
    weights = torch.where(absent, 0.0, lse.double().softmax(0)).unsqueeze(-1)
    merged = (weights * out.masked_fill(absent.unsqueeze(-1), 0)).sum(0)
    return Partial(merged.to(out.dtype), lse.double().logsumexp(0).to(lse.dtype))


def dense(q, kv):
    """`attend` over every block of each sequence."""
    every = torch.arange(kv.page_table.shape[1], dtype=torch.int32, device=q.device)
    return attend(q, kv, every.expand(q.shape[0], kv.k.shape[1], -1))


def _wide(q):
    return torch.promote_types(q.dtype, torch.float32)


def _by_kv_head(q, kv_heads):
    """[B, H, D] -> [B, G, H/G, D], in at least float32."""
    return q.to(_wide(q)).reshape(q.shape[0], kv_heads, -1, q.shape[-1])


def _missing(scores, count=None):
    """NaN becomes -inf, and so does all from block `count[b]` on."""
    scores = scores.masked_fill(scores.isnan(), -math.inf)
    if count is None:
        return scores
    absent = torch.arange(scores.shape[-1], device=scores.device) >= count.unsqueeze(1)
    return scores.masked_fill(absent[:, None], -math.inf)
