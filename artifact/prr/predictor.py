"""PRR's predictor: each block's score, smoothed, with a trend (paper section 4.1, Eqs. 2 and 3).

State in, state out; per layer, KV head and block: a level l and a trend v, fp32. With a block's score s at step t

    prediction^t = l^(t-1) + gamma v^(t-1)
    v^t = beta (s - l^(t-1)) + (1 - beta) v^(t-1)      (against the old level: this is not Holt's smoothing)
    l^t = alpha s + (1 - alpha) l^(t-1)

What the paper leaves open: a score of -inf or NaN says that the block cannot be selected at this step: it does not
exist yet or is forced, and stands outside the predictor. Where the old level or the score is not finite, the block
begins anew with l = s, v = 0. A block without a score in the step before is newborn: predicted -inf, it belongs into
the predicted set by rule until it has a score, as forced blocks do, outside the predictor and its budget. All scored
blocks are updated, not only selected ones.

Finite scores must stay within +-1e30, so that no difference overflows.
"""

from typing import NamedTuple

import numpy as np

from artifact import ops

LARGEST = 1e30


class Theta(NamedTuple("Theta", [("alpha", float), ("beta", float), ("gamma", float)])):
    """The smoothing of level and trend, and the trend's weight. ValueError outside the paper's ranges (section 4.1)."""

    __slots__ = ()

    def __new__(cls, alpha: float, beta: float, gamma: float):
        """`alpha` and `beta` in (0, 1], `gamma` in [0, 1]."""
        for name, number, inside, allowed in (
            ("alpha", alpha, 0 < alpha <= 1, "above 0, at most 1"),
            ("beta", beta, 0 < beta <= 1, "above 0, at most 1"),
            ("gamma", gamma, 0 <= gamma <= 1, "0 to 1"),
        ):
            if not inside:
                raise ValueError(f"{name} is {number}; allowed: {allowed}")
        return super().__new__(cls, float(alpha), float(beta), float(gamma))

    @property
    def weights(self) -> tuple[np.float32, ...]:
        """alpha, 1 - alpha, beta, 1 - beta, gamma as the recurrence uses them: rounded to fp32 first."""
        alpha, beta, gamma = (np.float32(value) for value in self)
        return alpha, np.float32(1) - alpha, beta, np.float32(1) - beta, gamma


def predicted_count(budget: int, ratio: float) -> int:
    """|P| = the largest whole number of blocks within `ratio` * `budget` (Eq. 1)."""
    return int(budget * ratio + 1e-9)


class EmaState(NamedTuple):
    """fp32 [..., G, N] each; level -inf: no score at the last step."""

    level: np.ndarray
    trend: np.ndarray


def begin(shape: tuple[int, ...]) -> EmaState:
    """The state before any score, [..., G, N]."""
    return EmaState(np.full(shape, -np.inf, np.float32), np.zeros(shape, np.float32))


def clean(scores: np.ndarray) -> np.ndarray:
    """`scores` as contiguous fp32 with NaN as -inf. ValueError for a finite score beyond +-1e30."""
    scores = np.ascontiguousarray(scores, dtype=np.float32)
    size = np.abs(scores)
    if ((size > LARGEST) & (size < np.inf)).any():
        raise ValueError(f"a score is {size[size < np.inf].max():g} in size; allowed: at most {LARGEST:g}, or infinite")
    return np.where(np.isnan(scores), np.float32(-np.inf), scores)


def predict(state: EmaState, theta: Theta) -> np.ndarray:
    """The scores expected of the next step (Eq. 2), fp32 [..., G, N]; -inf for newborn blocks."""
    *_, gamma = Theta(*theta).weights
    return state.level + gamma * state.trend


def update(state: EmaState, scores: np.ndarray, theta: Theta) -> EmaState:
    """The state after a step's scores [..., G, N] (Eq. 3); N may have grown, new blocks are newborn.

    ValueError when another axis differs or blocks are gone.
    """
    scores = clean(scores)
    return EmaState(*ops.ema_step(*_grown(state, scores.shape), scores, Theta(*theta))[:2])


def _grown(state, shape):
    old = state.level.shape
    if old == shape:
        return state
    if old[:-1] != shape[:-1] or old[-1] > shape[-1]:
        raise ValueError(f"scores have shape {shape}, the state {old}; allowed: the same, or more blocks (last axis)")
    grown = begin(shape)
    grown.level[..., : old[-1]] = state.level
    grown.trend[..., : old[-1]] = state.trend
    return grown
