"""Quest: a page's score is an upper bound of its dot products with the query, from each channel's smallest and largest
key (Tang et al., arXiv 2406.10774), as PRR extends it to grouped queries (arXiv 2606.30389, appendix A.1).

Two implementations of Quest differ. As in its CUDA engine, the page of the newest token is always attended and counts
in the budget, and the first two layers are dense. Here it is scored like the others as well, over the tokens it has.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from artifact import ops


class Bounds(NamedTuple):
    """Of each page, per KV head and channel, the smallest and the largest key (after RoPE).

    low, high [B, G, N, D] in the keys' dtype, pages past a sequence's end anything; length int64 [B]: tokens.
    """

    low: torch.Tensor
    high: torch.Tensor
    length: torch.Tensor


@dataclass(frozen=True)
class Quest:
    """Quest's selection. page: tokens; budget_blocks: pages attended in a step, the current one included.

    group: what a KV head makes of its query heads: the score of their "mean" query (PRR), or the "max" or "sum" of
    their scores; the mean query's score bounds no single head's. dense_layers: first layers that select nothing.
    """

    page: int = 16
    budget_blocks: int = 128
    group: str = "mean"
    dense_layers: int = 2

    def __post_init__(self):
        for name, least in (("page", 1), ("budget_blocks", 1), ("dense_layers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: at least {least}")
        if self.group not in ops.GROUPS:
            raise ValueError(f"group is {self.group!r}; allowed: {', '.join(ops.GROUPS)}")

    @property
    def block(self) -> int:
        """Tokens of a page, by the name that a block's have elsewhere."""
        return self.page

    def summarize(self, k, length=None) -> Bounds:
        """Bounds of the keys k [B, G, T, D]; length int [B]: how many of the T each sequence has (None = all)."""
        batch, kv_heads, tokens, dim = k.shape
        length = torch.full((batch,), tokens) if length is None else torch.as_tensor(length).to(torch.int64)
        pages = -(-tokens // self.page)
        past = torch.arange(pages * self.page) >= length[:, None]
        past = past.reshape(batch, 1, pages, self.page, 1).to(k.device)
        paged = torch.nn.functional.pad(k, (0, 0, 0, pages * self.page - tokens))
        paged = paged.reshape(batch, kv_heads, pages, self.page, dim)
        return Bounds(paged.masked_fill(past, math.inf).amin(3), paged.masked_fill(past, -math.inf).amax(3), length)

    @property
    def most_forced(self) -> int:
        """Pages that are always attended, at most."""
        return 1

    def room(self, metadata: Bounds, pages: int) -> Bounds:
        """`metadata` with room for so many pages at least, and no less than it has."""
        more = max(0, pages - metadata.low.shape[2])
        return metadata._replace(**{name: torch.nn.functional.pad(getattr(metadata, name), (0, 0, 0, more))
                                    for name in ("low", "high")}) if more else metadata

    def append(self, metadata: Bounds, k_new) -> Bounds:
        """Bounds after the keys k_new [B, G, t, D]. They may share memory with `metadata`, which is used up.

        A length on a GPU is not looked at: there must be `room`, and then the bounds are written where they lie.
        """
        if metadata.length.device.type == "cpu":
            pages, needed = metadata.low.shape[2], -(-int(metadata.length.max() + k_new.shape[2]) // self.page)
            metadata = self.room(metadata, needed if needed <= pages else max(needed, pages + pages // 8))
        low, high, length = metadata
        if k_new.shape[2] > 1 and length.device.type == "cpu":
            after = length + k_new.shape[2]
            start = torch.arange(low.shape[2]) * self.page
            begun = ((start >= length[:, None]) & (start < after[:, None]))[:, None, :, None].to(low.device)
            at = (length[:, None] + torch.arange(k_new.shape[2])) // self.page
            at = at[:, None, :, None].to(low.device).expand(-1, *k_new.shape[1:2], -1, k_new.shape[3])
            return Bounds(low.masked_fill_(begun, math.inf).scatter_reduce_(2, at, k_new, "amin"),
                          high.masked_fill_(begun, -math.inf).scatter_reduce_(2, at, k_new, "amax"), after)
        rows = torch.arange(low.shape[0], device=length.device)
        for token in k_new.unbind(2):
            page, first = length // self.page, (length % self.page == 0)[:, None, None]
            low[rows, :, page] = torch.where(first, token, torch.minimum(low[rows, :, page], token))
            high[rows, :, page] = torch.where(first, token, torch.maximum(high[rows, :, page], token))
            length = length + 1
        return Bounds(low, high, length)

    def score(self, q, metadata: Bounds, *, impl="cpu", blocks=None):
        """q [B, H, D] -> scores float32 [B, G, N], N = `blocks` or the pages of the longest sequence; -inf past a
        sequence's end."""
        pages = -(-metadata.length // self.page)
        scores = ops.quest_scores(q, metadata.low, metadata.high, pages, group=self.group, impl=impl)
        return scores[:, :, :int(pages.max()) if blocks is None else blocks]

    def forced(self, length, blocks=None):
        """length int [B] -> bool [B, N]: the page of the newest token, always attended; N as in `score`."""
        length = torch.as_tensor(length)
        blocks = -(-int(length.max()) // self.page) if blocks is None else blocks
        return torch.arange(blocks, device=length.device) == (length[:, None] - 1) // self.page

    def dense(self, layer, length):
        """length int [B] -> bool [B]: whether the layer attends to everything: an early one, or the budget suffices."""
        pages = -(-torch.as_tensor(length) // self.page)
        return (pages <= self.budget_blocks) | (layer < self.dense_layers)

    def select(self, scores, forced, *, impl="cpu"):
        """scores [B, G, N], forced bool [B, N] -> int32 [B, G, S]: `budget_blocks` pages, the forced ones first."""
        return ops.topk(scores, self.budget_blocks, forced[:, None], impl=impl)
