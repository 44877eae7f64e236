"""Where a sequence's blocks lie: neighbours, shared regions, and regions touched. No DRAM model needed.

adjacency    share of consecutive table entries b, b + 1 (a descending run, just as good for rows, counts as none)
same region  share of consecutive table entries in one region
spread       regions touched / regions needed; 1 is perfect

Definitions: KV-PIMple `sim.py`, commit eb56d6d. NaN for tables of one block; the last two NaN where a
block is a region or more.
"""

from typing import NamedTuple

import numpy as np

from artifact.compiled import compiled


class Placement(NamedTuple):
    """Per sequence, float64 [S]."""

    block_adjacency_frac: np.ndarray
    same_region_frac: np.ndarray
    region_spread: np.ndarray


@compiled
def _placement(flat, starts, blocks, g, region_of, adjacency, same, spread):
    seen = np.full(region_of[-1] + 1, -1, dtype=np.int64)
    for i in range(starts.size):
        n = blocks[i]
        adjacent, together, distinct = 0, 0, 0
        before, before_region = np.int64(-2), np.int64(-1)
        for j in range(starts[i], starts[i] + n):
            block = flat[j]
            region = region_of[block]
            if seen[region] != i:
                seen[region] = i
                distinct += 1
            adjacent += block == before + 1
            together += region == before_region
            before, before_region = block, region
        if n > 1:
            adjacency[i] = adjacent / (n - 1)
            if g > 1:
                same[i] = together / (n - 1)
                spread[i] = distinct / ((n + g - 1) // g)


def placement(flat, starts, blocks, blocks_per_region, num_blocks):
    """Placement of many block tables: table i is `flat[starts[i]:starts[i] + blocks[i]]`, ids below `num_blocks`."""
    out = Placement(*(np.full(starts.size, np.nan) for _ in range(3)))
    _placement(flat, starts, blocks, blocks_per_region, np.arange(num_blocks) // blocks_per_region, *out)
    return out
