"""A selection method whose scores take their own time and are then those of recorded traces.

Random keys select at random, and nothing foresees them. Where a step is timed at the shape of a model that is not at
hand, the method computes its scores in full, over keys of that shape, and what is selected follows a real model's
scores: so that the prediction hits, misses and wastes as it does there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from artifact.dsa.infllm import InfLLM
from artifact.dsa.quest import Quest
from artifact.models.trace import Trace

# as steps are timed: Quest's own budget and InfLLM-v2's own, in every layer and at every length
METHODS = {"quest": Quest(page=16, budget_blocks=128, dense_layers=0), "infllm": InfLLM(dense_len=-1)}
SHARE = 0.25  # of a trace's blocks that notebooks 02 and 03 select; here of those with a trace's scores
_EDGE = 8  # of a trace's blocks, the last one in so many: InfLLM-v2 always attends to them


@dataclass(frozen=True, eq=False)
class Replayed:
    """`method` with the scores of `table`, fp32 [T, G, N], a row for each length of a sequence, and round again.

    start: int64 [B] on the table's device: the tokens of each sequence at which the first row comes. Blocks that the
    method's own scores leave out are left out.
    """

    method: Quest | InfLLM
    table: torch.Tensor
    start: torch.Tensor

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.method.block

    @property
    def budget_blocks(self) -> int:
        """Blocks attended in a step, the forced ones included."""
        return self.method.budget_blocks

    def summarize(self, k, length=None):
        """The method's."""
        return self.method.summarize(k, length)

    def append(self, metadata, k_new):
        """The method's."""
        return self.method.append(metadata, k_new)

    @property
    def most_forced(self) -> int:
        """Blocks that are always attended, at most."""
        return self.method.most_forced

    def room(self, metadata, blocks):
        """The method's."""
        return self.method.room(metadata, blocks)

    def forced(self, length, blocks=None):
        """The method's."""
        return self.method.forced(length, blocks)

    def dense(self, layer, length):
        """The method's."""
        return self.method.dense(layer, length)

    def score(self, q, metadata, *, impl="cpu", blocks=None):
        """q [B, H, D] -> fp32 [B, G, N]. The table must be as wide as N."""
        own = self.method.score(q, metadata, impl=impl, blocks=blocks)
        row = (metadata.length.to(self.start.device) - self.start) % len(self.table)
        return torch.where(torch.isneginf(own), own, self.table[row, :, :own.shape[2]])


def sources(recordings: Iterable[Trace], method: Quest | InfLLM, impl: str = "cpu") -> list[np.ndarray]:
    """The scores of every trace, layer and KV head, fp32 [T, n] each: of the prefill's last rows, then of the steps.

    Only blocks that are complete throughout and not attended by rule. What `table` takes; all traces must have as many
    rows and steps.
    """
    found = []
    for recorded in recordings:
        complete = int(recorded.rows[0] + 1) // method.block
        first, last = (method.init, complete - complete // _EDGE) if isinstance(method, InfLLM) else (0, complete)
        for layer in recorded.layers:
            parts = [recorded.scores(method, int(layer), part, impl=impl) for part in ("prefill", "decode")]
            found += list(np.concatenate([part[..., first:last] for part in parts]).transpose(1, 0, 2))
    return found


def live(method: Quest | InfLLM, blocks: int) -> int:
    """How many of `blocks` blocks compete, so that the budget without forced ones is `SHARE` of them; at most all."""
    return min(blocks, round((method.budget_blocks - method.most_forced) / SHARE))


def table(sources: Sequence[np.ndarray], kv_heads: int, blocks: int, live: int) -> torch.Tensor:
    """fp32 [T, kv_heads, blocks]: heads' scores side by side, where a trace has fewer blocks or heads than are wanted.

    sources: fp32 [T, n] each, one head's scores of n blocks over T steps, all finite. Each is brought to mean 0 and
    standard deviation 1 over all its steps, so that none wins everywhere; when all are used up they come again, later
    steps first. live: how many blocks of a head, anywhere in it, get such scores; the others' lie below all of them. A
    budget that is the same share of the live blocks as it was of a trace's then hits as it did there.
    ValueError without sources, for different T and for scores that are not finite.
    """
    if not sources or len({len(one) for one in sources}) > 1:
        raise ValueError(f"sources have {sorted({len(one) for one in sources})} steps; allowed: at least one source, "
                         "all of as many steps")
    if not all(np.isfinite(one).all() for one in sources):
        raise ValueError("a source has a score that is not finite; allowed: blocks that are scored at every step")
    level = [(one - one.mean()) / max(float(one.std()), 1e-12) for one in sources]
    random, at = np.random.default_rng(0), 0
    made = np.full((len(level[0]), kv_heads, blocks), min(float(one.min()) for one in level) - 1, np.float32)
    for g in range(kv_heads):
        places = random.permutation(blocks)[:live]
        while len(places):
            one = np.roll(level[at % len(level)], at // len(level), axis=0)[:, :len(places)]
            made[:, g, places[:one.shape[1]]] = one
            places, at = places[one.shape[1]:], at + 1
    return torch.from_numpy(made)
