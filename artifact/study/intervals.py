"""How sure a number is: a mean over tokens that resemble their neighbours, a share of few trials, a mean of few seeds,
a ratio of two runs, a drift."""

import math
from collections.abc import Sequence

import numpy as np

LEVEL = 0.95
_NORMAL = 1.959964  # two-sided 95 % quantile of the normal distribution
# ... of Student's t with 1, 2, 3 … degrees of freedom, as every table of it has them
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
            2.120, 2.110, 2.101, 2.093)  # fmt: skip


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


def _student(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t; the normal distribution's where the table ends, which is 4 % less."""
    return _STUDENT[degrees - 1] if degrees <= len(_STUDENT) else _NORMAL


def of_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean of independent `values`; NaN, NaN for fewer than two or where one is NaN."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return math.nan, math.nan
    half = _student(len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def of_ratio(mine: np.ndarray, base: np.ndarray, *, draws: int = 4000, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of bytes / time of `mine` over that of `base`, each float [parts, 2] of bytes and time.

    Parts are drawn with replacement, the same of both. ValueError when they are not equally many, or fewer than two.
    """
    mine, base = np.asarray(mine, np.float64), np.asarray(base, np.float64)
    if mine.shape != base.shape or len(mine) < 2:
        raise ValueError(f"parts are {len(mine)} and {len(base)}; allowed: equally many, at least two")
    drawn = np.random.default_rng(seed).integers(len(mine), size=(draws, len(mine)))
    (b, t), (b0, t0) = (part[drawn].sum(axis=1).T for part in (mine, base))
    low, high = np.quantile(b / t / (b0 / t0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def of_slope(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The slope of a straight line through equally spaced `values`, per step, and its 95 % interval (least squares).

    ValueError for fewer than three values.
    """
    values = np.asarray(values, np.float64)
    if len(values) < 3:
        raise ValueError(f"values are {len(values)}; allowed: at least three")
    x = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(x @ values / (x @ x))
    residual = values - values.mean() - slope * x
    half = _student(len(values) - 2) * math.sqrt(residual @ residual / (len(values) - 2) / (x @ x))
    return slope, (slope - half, slope + half)
