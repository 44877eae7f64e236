"""The choice of theta during prefill (paper section 4.2): 80 candidates, one pass over rows of scores.

H(theta) = mean over rows and KV heads of (sum of IS over P and A) / (sum of IS over A)   (Eq. 4)
A: the row's `budget` highest scores; P: the `budget` * `ratio` highest predictions made from the rows before it.

What the paper leaves open, and what is done here:

- rows: the paper's cost cannot be that of all prefill tokens, so the row budget is explicit; the last rows are used
- Eq. 4 needs non-negative weights, but Quest's scores are bounds and may be negative: `weights` says what stands for
  IS; "shift" (default) subtracts the row's lowest selectable score, "softmax" is exp(score - highest), "raw" is the
  score itself and refuses negative ones. In a row where all of A weighs 0 the blocks of A weigh the same; a score of
  +inf weighs as the row's highest finite one
- theta is shared by a layer's heads; the level starts at the first row, which therefore counts for nothing
- newborn blocks (no score in the row before) are in P by rule, not by prediction: they count neither in A nor in P
- rows that have no more selectable blocks than the budget hold nothing to predict and do not count
- equal objectives: the lowest alpha, then beta, then gamma; with gamma = 0 beta is without effect, so 64 candidates
  are distinct. No row counts: the objective is NaN everywhere and theta the first candidate
"""

from typing import NamedTuple

import numpy as np

from artifact.compiled import compiled
from artifact.prr import predictor, threshold
from artifact.prr.predictor import Theta, predicted_count

ALPHAS = (0.2, 0.4, 0.6, 0.8)
BETAS = (0.1, 0.2, 0.3, 0.4, 0.5)
GAMMAS = (0.0, 0.25, 0.5, 0.75)
AXES = (ALPHAS, BETAS, GAMMAS)
SHAPE = tuple(len(axis) for axis in AXES)
WEIGHTS = ("shift", "softmax", "raw")
_UNIT = 2.0**60


class Calibration(NamedTuple):
    """The whole grid, not only the winner."""

    theta: Theta
    objective: np.ndarray  # float64 [4, 5, 4] over alpha, beta, gamma: H
    hits: np.ndarray  # int64 [4, 5, 4], blocks of A that were predicted
    wanted: int  # blocks of A that could have been
    rows: int  # rows x heads that count


def calibrate(scores: np.ndarray, budget: int, *, ratio: float = 1.0, rows: int | None = None,
              skip: int = 0, weights: str = "shift") -> Calibration:
    """The best candidate for one layer, from prefill scores [R, G, N]; -inf or NaN where a block cannot be selected.

    `budget`: dynamic blocks per row, 1 to N. `rows`: only the last so many. `skip`: the first so many of them bring
    the state up and do not count. ValueError for what cannot be calibrated.
    The objective's terms are summed as integers of 2^-60 (order does not matter then), so it equals a float64 sum to
    1e-12, not to the last bit; hits are exact.
    """
    scores, weight, picks = _checked(scores, budget, ratio, rows, skip, weights)
    grid = np.array([Theta(a, b, g).weights for a in ALPHAS for b in BETAS for g in GAMMAS], dtype=np.float32)
    hits, objective = np.zeros(SHAPE, np.int64), np.zeros(SHAPE)
    wanted, counted = _grid(scores, weight, budget, picks, skip, grid.reshape(*SHAPE, 5), hits, objective)
    hits[:, 1:, 0], objective[:, 1:, 0] = hits[:, :1, 0], objective[:, :1, 0]
    return _chosen(objective, hits, wanted, counted)


def plain(scores: np.ndarray, budget: int, *, ratio: float = 1.0, rows: int | None = None, skip: int = 0,
          weights: str = "shift") -> Calibration:
    """`calibrate` as the definition reads, candidate by candidate and row by row in NumPy: its oracle."""
    scores, weight, picks = _checked(scores, budget, ratio, rows, skip, weights)
    hits, objective = np.zeros(SHAPE, np.int64), np.zeros(SHAPE)
    selected = largest(scores, budget)
    known = np.zeros(scores.shape, bool)
    known[1:] = ~np.isneginf(scores[:-1])
    counts = (~np.isneginf(scores)).sum(-1) > budget
    target = selected & known & counts[..., None]
    target[:skip] = False
    parts = shares(weight, target)
    for index in np.ndindex(SHAPE):
        alpha, keep_level, beta, keep_trend, gamma = Theta(*(v[i] for v, i in zip(AXES, index, strict=True))).weights
        level, trend = scores[0], np.zeros(scores.shape[1:], np.float32)
        for row, wanted, share in zip(scores[1:], target[1:], parts[1:], strict=True):
            hit = largest(level + gamma * trend, picks) & wanted
            hits[index] += hit.sum()
            objective[index] += share[hit].sum()
            going_on = np.isfinite(row) & np.isfinite(level)
            with np.errstate(invalid="ignore"):
                trend = np.where(going_on, beta * (row - level) + keep_trend * trend, np.float32(0))
                level = np.where(going_on, alpha * row + keep_level * level, row)
    return _chosen(objective, hits, int(target.sum()), int(target.any(-1).sum()))


def weights_of(method) -> str:
    """What stands for IS in Eq. 4: InfLLM-v2's probabilities as they are, Quest's bounds shifted to be positive."""
    return "raw" if hasattr(method, "topk") else "shift"


def importance(scores: np.ndarray, weights: str) -> np.ndarray:
    """What stands for IS in Eq. 4, non-negative float64 like `scores` [..., N], 0 where nothing can be selected."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights is {weights!r}; allowed: {', '.join(WEIGHTS)}")
    there = ~np.isneginf(scores)
    if weights == "raw" and (scores[there] < 0).any():
        raise ValueError(f"weights is 'raw' but a score is {scores[there].min():g}; allowed: scores of at least 0, or "
                         "weights 'shift' or 'softmax'")
    finite = np.isfinite(scores)
    top = np.max(scores, axis=-1, keepdims=True, where=finite, initial=-np.inf)
    capped = np.minimum(scores, np.where(np.isneginf(top), 0, top)).astype(np.float64)
    if weights == "shift":
        capped -= np.min(capped, axis=-1, keepdims=True, where=there, initial=np.inf)
    elif weights == "softmax":
        capped = np.exp(capped - np.where(np.isneginf(top), 0, top))
    return np.where(there, capped, 0)


def shares(weight: np.ndarray, target: np.ndarray) -> np.ndarray:
    """`weight` [..., N] of the blocks of `target` as shares of their row's sum; equal ones where that is 0."""
    parts = np.where(target, weight, 0)
    parts = np.where(parts.sum(-1, keepdims=True) > 0, parts, target)
    return parts / np.maximum(parts.sum(-1, keepdims=True), np.finfo(float).tiny)


def _checked(scores, budget, ratio, rows, skip, weights):
    scores = np.asarray(scores)
    if scores.ndim != 3 or scores.shape[0] < 2 or 0 in scores.shape:
        raise ValueError(f"scores have shape {scores.shape}; allowed: [rows, heads, blocks] with at least 2 rows")
    if not 1 <= budget <= scores.shape[-1]:
        raise ValueError(f"budget is {budget}; allowed: 1 to {scores.shape[-1]} blocks")
    if not 0 < ratio < np.inf or predicted_count(budget, ratio) < 1:
        raise ValueError(f"ratio is {ratio}; allowed: above 0, and at least 1 predicted block of a budget of {budget}")
    if rows is not None and not 2 <= rows <= scores.shape[0]:
        raise ValueError(f"rows is {rows}; allowed: 2 to {scores.shape[0]}")
    scores = predictor.clean(scores[-rows:] if rows else scores)
    if not 0 <= skip < scores.shape[0]:
        raise ValueError(f"skip is {skip}; allowed: 0 to {scores.shape[0] - 1}, fewer than the rows")
    return scores, importance(scores, weights), predicted_count(budget, ratio)


def _chosen(objective, hits, wanted, counted):
    objective = objective / counted if counted else np.full(SHAPE, np.nan)
    a, b, g = np.unravel_index(np.argmax(objective), SHAPE)  # the first of equal ones; all NaN: the very first
    return Calibration(Theta(ALPHAS[a], BETAS[b], GAMMAS[g]), objective, hits, wanted, counted)


def largest(scores, k):
    """bool like `scores`: the k largest of the last axis above -inf, ties to the lowest index."""
    if k >= scores.shape[-1]:
        return ~np.isneginf(scores)
    least = np.partition(scores, -k, axis=-1)[..., -k, None]
    above = scores > least
    ties = (scores == least) & ~np.isneginf(scores)
    return above | (ties & (np.cumsum(ties, axis=-1) <= k - above.sum(-1, keepdims=True)))


@compiled
def _grid(scores, weight, budget, picks, skip, grid, hits, objective):
    """All candidates over all rows; level once per alpha, trend once per alpha and beta, prediction per candidate."""
    rows, heads, blocks = scores.shape
    level = np.empty((grid.shape[0], blocks), np.float32)
    trend = np.empty((grid.shape[0], grid.shape[1], blocks), np.float32)
    anew, selected = np.empty(blocks, np.bool_), np.empty(blocks, np.bool_)
    target, share = np.empty(blocks, np.int32), np.empty(blocks, np.int64)
    expected, cell = np.empty(blocks, np.float32), np.empty(1, np.float32)
    keys, moves = np.empty(grid.shape[:3], np.int64), np.empty(grid.shape[:3], np.int64)
    all_wanted, counted = 0, 0
    for g in range(heads):
        for a in range(grid.shape[0]):
            for i in range(blocks):
                level[a, i] = scores[0, g, i]
        trend[:] = 0
        keys[:] = 0
        moves[:] = 1 << 20
        for r in range(1, rows):
            row, before = scores[r, g], scores[r - 1, g]
            wanted = 0 if r < skip else _target(row, before, weight[r, g], budget, selected, cell, target, share)
            all_wanted += wanted
            counted += wanted > 0
            known = threshold.count(before, threshold.value(threshold.LOWEST + 1, cell))
            for i in range(blocks):
                anew[i] = not (np.isfinite(row[i]) and np.isfinite(before[i]))
            drift = 0  # how far this row's thresholds have moved, as the candidate before saw it
            for a in range(grid.shape[0]):
                smooth = level[a]
                for b in range(grid.shape[1]):
                    slope = trend[a, b]
                    for c in range(grid.shape[2] if wanted else 0):
                        if c == 0 and b > 0:
                            continue
                        if known <= picks:  # all that can be predicted is
                            hits[a, b, c] += wanted
                            objective[a, b, c] += 1
                            continue
                        gamma = grid[a, b, c, 4]
                        for i in range(blocks):
                            expected[i] = smooth[i] + gamma * slope[i]
                        guess = keys[a, b, c] + drift
                        key, ties = threshold.find(expected, picks, guess, max(1, moves[a, b, c] >> 3), cell)
                        moves[a, b, c] = (7 * moves[a, b, c] + abs(key - guess)) >> 3
                        drift = key - keys[a, b, c]
                        keys[a, b, c] = key
                        found, part = _overlap(expected, key, ties, cell, target, share)
                        hits[a, b, c] += found
                        objective[a, b, c] += part / _UNIT
                    beta, keep = grid[a, b, 0, 2], grid[a, b, 0, 3]
                    for i in range(blocks):
                        moved = beta * (row[i] - smooth[i]) + keep * slope[i]
                        slope[i] = np.float32(0) if anew[i] else moved
                alpha, keep = grid[a, 0, 0, 0], grid[a, 0, 0, 1]
                for i in range(blocks):
                    moved = alpha * row[i] + keep * smooth[i]
                    smooth[i] = row[i] if anew[i] else moved
    return all_wanted, counted


@compiled
def _target(row, before, weight, budget, selected, cell, target, share):
    """The blocks of A that count, 0 or 1, and their shares of Eq. 4's denominator in units of 2^-60. -> how many."""
    if threshold.mark(row, budget, cell, selected) == threshold.count(row, threshold.value(threshold.LOWEST + 1, cell)):
        return 0
    wanted, whole = 0, 0.0
    for i in range(row.size):
        target[i] = selected[i] and before[i] > -np.inf
        wanted += target[i]
        whole += weight[i] * target[i]
    for i in range(row.size):
        part = weight[i] / whole if whole > 0 else 1 / max(wanted, 1)
        share[i] = np.int64(part * target[i] * _UNIT)
    return wanted


@threshold.inlined
def _overlap(expected, key, ties, cell, target, share):
    """-> how many of `target` are predicted, and the sum of their `share`."""
    least = threshold.value(key + (ties > 0), cell)
    found, part = np.int32(0), np.int64(0)
    for i in range(expected.size):
        found = np.int32(found + (target[i] if expected[i] >= least else np.int32(0)))
    for i in range(expected.size):
        part += share[i] if expected[i] >= least else np.int64(0)
    if ties:
        least = threshold.value(key, cell)
        for i in range(expected.size):
            if expected[i] == least:
                found = np.int32(found + target[i])
                part += share[i]
                ties -= 1
                if ties == 0:
                    break
    return found, part
