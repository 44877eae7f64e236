"""How sure a number is: a mean over tokens that resemble their neighbours, and a share of few trials."""

import math
from collections.abc import Sequence

import numpy as np

LEVEL = 0.95
_NORMAL = 1.959964  # two-sided 95 % quantile of the normal distribution


def of_mean(parts: Sequence[np.ndarray], *, block: int, draws: int = 4000, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean of all values of `parts` [n] each, by the circular block bootstrap.

    Neighbours within a part may be alike, parts are not: runs of `block` values, from anywhere in a part and on from
    its beginning past its end, are drawn with replacement until there are as many values as in the data, and the
    interval holds the middle of the means of `draws` such samples. Of paired measurements give the differences. The
    same seed draws the same runs.
    ValueError when a part is shorter than `block`.
    """
    parts = [np.asarray(part, np.float64) for part in parts]
    least = min((len(part) for part in parts), default=0)
    if not 1 <= block <= least:
        raise ValueError(f"block is {block}; allowed: 1 to {least}, the shortest part's values")
    sums = [np.concatenate([[0.0], np.concatenate([part, part[: block - 1]]).cumsum()]) for part in parts]
    runs = np.concatenate([(total[block:] - total[:-block]) / block for total in sums])
    count = math.ceil(sum(map(len, parts)) / block)
    drawn = np.random.default_rng(seed).integers(len(runs), size=(draws, count))
    low, high = np.quantile(runs[drawn].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def of_share(found: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, `found` of `of` independent trials. ValueError for what is no count."""
    if not 0 <= found <= of or of < 1:
        raise ValueError(f"found is {found} of {of}; allowed: 0 to the number of trials, at least 1")
    share, square = found / of, _NORMAL**2
    middle = (share + square / (2 * of)) / (1 + square / of)
    half = _NORMAL / (1 + square / of) * math.sqrt(share * (1 - share) / of + square / (4 * of**2))
    return max(0.0, middle - half), min(1.0, middle + half)
