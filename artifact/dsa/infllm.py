"""InfLLM-v2: a block's score is the attention mass on the compressed keys that overlap it (arXiv 2509.24663).

As OpenBMB/infllmv2_cuda_impl at f908e73 does it for one decoding query: keys averaged over windows of 32 tokens, 16
apart; softmax over them, summed over a group's heads; the largest in each block of 64 tokens. The first block and the
last 33, the current one among them, are always attended (csrc/max_pooling_1d.cuh, line 79: off_bq <= off_bk +
local_blocks) and lie within the topk + local blocks of a step. Two things differ: the denominator is exact, not from
keys four times coarser, and the group has its own size, not 16.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from artifact import ops


class Compressed(NamedTuple):
    """Means of the keys over overlapping windows.

    keys [B, G, C, D] in the keys' dtype, those past a sequence's end anything; recent [B, G, size, D]: the last
    tokens' keys, the one at position p in slot p % size; length int64 [B]: tokens.
    """

    keys: torch.Tensor
    recent: torch.Tensor
    length: torch.Tensor


@dataclass(frozen=True)
class InfLLM:
    """InfLLM-v2's selection. size, stride: tokens of a compression window and between two; block: tokens.

    init, local: blocks always attended, the first ones, and those before the current one beside it; topk + local:
    blocks attended in a step, these included; dense_len: sequences shorter than this attend to everything, -1 = none.
    """

    size: int = 32
    stride: int = 16
    block: int = 64
    init: int = 1
    local: int = 32
    topk: int = 64
    dense_len: int = 8192

    def __post_init__(self):
        for name, least in (("stride", 1), ("init", 0), ("local", 0), ("topk", 1), ("dense_len", -1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: at least {least}")
        for name in ("size", "block"):
            if getattr(self, name) < self.stride or getattr(self, name) % self.stride:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: multiples of stride {self.stride}")

    @property
    def budget_blocks(self) -> int:
        """Blocks attended in a step, the forced ones included."""
        return self.topk + self.local

    def summarize(self, k, length=None) -> Compressed:
        """Compressed keys of k [B, G, T, D]; length int [B]: how many of the T each sequence has (None = all)."""
        batch, kv_heads, tokens, dim = k.shape
        length = torch.full((batch,), tokens) if length is None else torch.as_tensor(length).to(torch.int64)
        if tokens < self.size:
            keys = k.new_zeros(batch, kv_heads, 0, dim)
        else:
            keys = k.unfold(2, self.size, self.stride).mean(-1, dtype=_wide(k)).to(k.dtype)
        recent = k.new_zeros(batch, kv_heads, self.size, dim)
        for b, end in enumerate(length.tolist()):
            at = torch.arange(max(0, end - self.size), end)
            recent[b, :, at % self.size] = k[b, :, at]
        return Compressed(keys, recent, length)

    @property
    def most_forced(self) -> int:
        """Blocks that are always attended, at most."""
        return self.init + self.local + 1

    def room(self, metadata: Compressed, blocks: int) -> Compressed:
        """`metadata` with room for so many blocks at least, and no less than it has."""
        more = max(0, (blocks * self.block - self.size) // self.stride + 1 - metadata.keys.shape[2])
        return metadata._replace(keys=torch.nn.functional.pad(metadata.keys, (0, 0, 0, more))) if more else metadata

    def append(self, metadata: Compressed, k_new) -> Compressed:
        """Metadata after the keys k_new [B, G, t, D]. It may share memory with `metadata`, which is used up.

        A length on a GPU is not looked at: there must be `room`, and then it is written where it lies.
        """
        if metadata.length.device.type == "cpu":
            held = metadata.keys.shape[2]
            needed = (int(metadata.length.max()) + k_new.shape[2] - self.size) // self.stride + 1
            if needed > held:
                more = max(needed - held, held // 8)
                metadata = metadata._replace(keys=torch.nn.functional.pad(metadata.keys, (0, 0, 0, more)))
        keys, recent, length = metadata
        if k_new.shape[2] > 1 and length.device.type == "cpu":
            return self._extended(metadata, k_new)
        rows = torch.arange(recent.shape[0], device=length.device)
        slots = torch.arange(self.size, device=length.device)
        for token in k_new.unbind(2):
            recent[rows, :, length % self.size] = token
            length = length + 1
            if not keys.shape[2]:
                continue
            complete = (length >= self.size) & ((length - self.size) % self.stride == 0)
            window = recent[rows[:, None], :, (length[:, None] + slots) % self.size]  # [B, size, G, D], oldest first
            mean = window.mean(1, dtype=_wide(keys)).to(keys.dtype)
            at = ((length - self.size) // self.stride).clamp(0, keys.shape[2] - 1)
            keys[rows, :, at] = torch.where(complete[:, None, None], mean, keys[rows, :, at])
        return Compressed(keys, recent, length)

    def _extended(self, metadata, k_new):
        """`append` of many tokens: each sequence's windows that end in them at once."""
        keys, recent, length = metadata
        after = length + k_new.shape[2]
        for b, (old, end) in enumerate(zip(length.tolist(), after.tolist(), strict=True)):
            first = max(0, old - self.size)  # the oldest token that `recent` still holds
            known = torch.cat([recent[b, :, torch.arange(first, old) % self.size], k_new[b]], dim=1)
            begins = [max(0, (tokens - self.size) // self.stride + 1) for tokens in (old, end)]
            windows = torch.arange(*begins)
            inside = (windows * self.stride - first)[:, None] + torch.arange(self.size)
            window = known[:, inside].permute(1, 2, 0, 3).contiguous()  # [windows, size, G, D]
            keys[b, :, windows] = window.mean(1, dtype=_wide(keys)).to(keys.dtype).transpose(0, 1)
            last = torch.arange(max(0, end - self.size), end)
            recent[b, :, last % self.size] = known[:, last - first]
        return Compressed(keys, recent, after)

    def score(self, q, metadata: Compressed, *, impl="cpu", blocks=None):
        """q [B, H, D] -> scores float32 [B, G, N], N = `blocks` or those of the longest sequence; -inf where nothing is
        known.

        Blocks that no complete window overlaps have no score: at most the last one, which is forced.
        """
        return ops.infllm_scores(q, metadata.keys, metadata.length, size=self.size, stride=self.stride,
                                 block=self.block, blocks=blocks, impl=impl)

    def forced(self, length, blocks=None):
        """length int [B] -> bool [B, N]: the first blocks, the current one and the `local` ones before it; N as in
        `score`."""
        length = torch.as_tensor(length)[:, None]
        blocks = -(-int(length.max()) // self.block) if blocks is None else blocks
        block, current = torch.arange(blocks, device=length.device), (length - 1) // self.block
        return ((block < self.init) | (block >= current - self.local)) & (block <= current)

    def dense(self, layer, length):
        """length int [B] -> bool [B]: whether the sequence attends to everything, in every layer alike."""
        return torch.as_tensor(length) < self.dense_len

    def select(self, scores, forced, *, impl="cpu"):
        """scores [B, G, N], forced bool [B, N] -> int32 [B, G, S]: `budget_blocks` blocks, the forced ones first."""
        return ops.topk(scores, self.budget_blocks, forced[:, None], impl=impl)


def _wide(k):
    return torch.promote_types(k.dtype, torch.float32)
