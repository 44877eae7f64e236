"""Bytes that a decode step's attention moves: what each mode reads and writes beside what it has to.

Counted by block, the newest one as whole, per sequence and layer. Queries, block lists and the selection's own reads
are the same in every mode and left out. The fewest possible: the keys and values of A, read once, and one result.

A partial result is one head's output and the logarithm of its sum, fp32. "union" hands one over between its two
passes. "exact" also writes one for each guessed block, which is predicted and not certain; reads all logarithms; and of
the outputs those that turn out to count.
"""

from dataclasses import dataclass

import pandas as pd

from artifact.prr.decode import Happened

_FLOAT = 4
_SUMMED = ["cache_read_bytes", "parts_written_bytes", "parts_read_bytes", "result_bytes"]


@dataclass(frozen=True)
class Layout:
    """One layer's cache: tokens of a block, query heads of a KV head, KV heads, channels, bytes of a stored number."""

    block: int = 64
    group: int = 4
    kv_heads: int = 8
    dim: int = 128
    stored: int = 2

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; allowed: at least 1")

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block of one KV head."""
        return 2 * self.block * self.dim * self.stored

    @property
    def part_bytes(self) -> int:
        """One partial result of a KV head's query heads: outputs and logarithms."""
        return self.group * (self.dim + 1) * _FLOAT


def counted(happened: Happened, layout: Layout) -> pd.DataFrame:
    """What the steps of `happened` moved, as means over its rows: one row each for dsa, union and exact.

    Rows that selected nothing are left out; ValueError when no other is there, or the KV heads are not the layout's.
    """
    heads = happened.selected.shape[-1]
    if heads != layout.kv_heads:
        raise ValueError(f"kv_heads is {layout.kv_heads}; allowed: {heads}, those of what happened")
    if not happened.sparse.any():
        raise ValueError("happened has no row that selected; allowed: at least one")
    sizes = (part[happened.sparse].double().mean().item()
             for part in (happened.selected, happened.predicted, happened.missed, happened.certain))
    return _frame(*sizes, layout).assign(origin="counted")


def modelled(budget: float, coverage: float, speculation: float, layout: Layout, *, certain: float = 1) -> pd.DataFrame:
    """The same from expected sizes: `budget` blocks of which `certain` are forced; of the others the share `coverage`
    was predicted, and predicted are `speculation` times as many (no newborn ones).

    ValueError for a coverage that is not 0 to 1 or more than was predicted, or fewer blocks than certain ones.
    """
    if not 0 <= certain <= budget:
        raise ValueError(f"certain is {certain}; allowed: 0 to the budget, {budget}")
    if not 0 <= coverage <= min(1, speculation):
        raise ValueError(f"coverage is {coverage}; allowed: 0 to {min(1, speculation)}, at most what was predicted")
    dynamic = budget - certain
    sizes = budget, certain + speculation * dynamic, (1 - coverage) * dynamic, certain
    return _frame(*sizes, layout).assign(origin="modelled")


def _frame(selected, predicted, missed, certain, layout):
    """Sizes in blocks of a KV head -> bytes of all KV heads."""
    part, logs = layout.part_bytes, layout.group * _FLOAT
    guessed, wasted = predicted - certain, predicted + missed - selected
    moved = {  # blocks read, bytes of partial results written, and read
        "dsa": (selected, 0, 0),
        "union": (predicted + missed, part, part),
        "exact": (predicted + missed, part + guessed * part, part + (guessed - wasted) * part + wasted * logs),
    }
    rows = [(kind, blocks, blocks * layout.block_bytes, written, read, part)
            for kind, (blocks, written, read) in moved.items()]
    frame = pd.DataFrame(rows, columns=["kind", "blocks_count", *_SUMMED])
    frame[["blocks_count", *_SUMMED]] *= layout.kv_heads
    frame["moved_bytes"] = frame[_SUMMED].sum(axis=1)
    frame["fewest_bytes"] = (selected * layout.block_bytes + part) * layout.kv_heads
    frame["over_frac"] = frame["moved_bytes"] / frame["fewest_bytes"] - 1
    return frame.assign(block_tokens=layout.block, group_heads=layout.group)
