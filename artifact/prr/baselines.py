"""What else could predict the next selection: each a function of `Steps` that gives a prediction for every step.

A prediction is fp32 [T, G, N], made for step t from what was known before it; the highest are the predicted set, -inf
is never in it. All see the same history: the prefill rows of `Steps.before`, then the decode steps.
"""

import numpy as np

from artifact import ops
from artifact.prr import coverage, predictor
from artifact.prr.coverage import Steps
from artifact.prr.predictor import Theta

FIXED = Theta(0.4, 0.3, 0.25)  # a candidate from the middle of the paper's grid
FEATURES = ("one", "last", "step", "slow", "fast", "picked", "often")
_SLOW, _FAST = 0.1, 0.5
_RIDGE = 1e-3


def last_step(steps: Steps) -> np.ndarray:
    """The scores of the step before: at |P| = |A| exactly its selection, beyond that its next best."""
    return np.concatenate([steps.before[-1:], steps.scores[:-1]])


def random(steps: Steps, generator: np.random.Generator) -> np.ndarray:
    """Any blocks that could be selected at the step before."""
    drawn = generator.random(steps.scores.shape, dtype=np.float32)
    return np.where(np.isneginf(last_step(steps)), np.float32(-np.inf), drawn)


def frequency(steps: Steps) -> np.ndarray:
    """The blocks that the prefill's rows would have selected most often, the same at every step."""
    picked = coverage.ranks(steps.before) < steps.picks[0]
    counts = np.broadcast_to(picked.sum(0).astype(np.float32), steps.scores.shape)
    return np.where(np.isneginf(last_step(steps)), np.float32(-np.inf), counts)


def ema(steps: Steps, theta: Theta) -> np.ndarray:
    """PRR's predictor, brought up by the prefill rows."""
    rows = predictor.clean(np.concatenate([steps.before, steps.scores]))
    state = predictor.begin(rows.shape[1:])
    ahead = ops.ema_steps(*state, rows, Theta(*theta))[2]
    return np.concatenate([predictor.predict(state, theta)[None], ahead])[len(steps.before) : -1]


def oracle(steps: Steps) -> np.ndarray:
    """The step's own scores: the best that any predictor can do."""
    return steps.scores


def learn(steps: Steps) -> np.ndarray:
    """A linear predictor of "will be selected" over `features`, fitted by ridge regression to the prefill's rows.

    -> weights float64 [F], shared by the layer's heads and blocks.
    """
    known = ~np.isneginf(steps.before[:-1])
    x = features(steps.before[:-1], steps.picks[0])[known].astype(np.float64)
    y = (coverage.ranks(steps.before[1:]) < steps.picks[0])[known]
    return np.linalg.solve(x.T @ x + _RIDGE * max(len(x), 1) * np.eye(x.shape[1]), x.T @ y)


def learned(steps: Steps, weights: np.ndarray) -> np.ndarray:
    """What `learn`'s weights predict."""
    known = features(np.concatenate([steps.before, steps.scores[:-1]]), steps.picks[0])[-len(steps.scores) :]
    return np.where(np.isneginf(last_step(steps)), np.float32(-np.inf), known @ weights.astype(np.float32))


def features(rows: np.ndarray, picks: int) -> np.ndarray:
    """What is known of each block after each row of scores [R, G, N]: fp32 [R, G, N, F], 0 where it has no score.

    Scores count in standard deviations of their row: the last one, its step from the one before, a slow and a fast
    level of it; whether the row selected the block, and how often such rows lately did.
    """
    there = ~np.isneginf(rows)
    finite = np.where(np.isfinite(rows), rows, 0)
    count = np.maximum(there.sum(-1, keepdims=True), 1)
    mean = finite.sum(-1, keepdims=True) / count
    spread = np.sqrt((np.where(there, finite - mean, 0) ** 2).sum(-1, keepdims=True) / count)
    score = np.where(there, (finite - mean) / np.maximum(spread, np.finfo(np.float32).tiny), 0).astype(np.float32)
    picked = (coverage.ranks(rows) < picks).astype(np.float32)
    out = np.zeros((*rows.shape, len(FEATURES)), np.float32)
    slow = fast = score[0]
    often, last = picked[0], score[0]
    for r in range(len(rows)):
        slow, fast = slow + np.float32(_SLOW) * (score[r] - slow), fast + np.float32(_FAST) * (score[r] - fast)
        often = often + np.float32(_SLOW) * (picked[r] - often)
        out[r] = np.stack([there[r], score[r], score[r] - last, slow, fast, picked[r], often], axis=-1)
        last = score[r]
    return out
