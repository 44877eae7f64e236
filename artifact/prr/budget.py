"""How many blocks may be speculated on: the largest delta = |P| / |A| whose attention fits into selection (paper A.6).

Once per device, model, method, block size and budget, the latency of selection and of speculation is timed over context
and delta. At run time delta follows from the current context: from the times themselves where it is one that was timed,
else, and a little past the longest, from polynomials. The paper prints neither their degree nor delta: here the degree
is the one that predicts left-out points best, and is reported.
"""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MOST_DEGREE = 3
FAR = 2  # past so many times the longest context timed, delta is given only when asked for
_STEP = 0.01  # of delta, where the budget in blocks is not known


@dataclass(frozen=True)
class Profile:
    """Latencies in µs (of a layer or of a step, all alike): selection by context, speculation by context and ratio.

    contexts: tokens, ascending; ratios: |P| / |A|, ascending; page_tokens and budget_count: None where nobody says.
    Raises ValueError for fewer than 3 contexts or ratios, for either out of order, and for times that are not whole.
    """

    device: str
    model: str
    method: str
    page_tokens: int | None
    budget_count: int | None
    contexts: tuple[int, ...]
    ratios: tuple[float, ...]
    selection: tuple[float, ...]
    speculation: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        for name in ("contexts", "ratios"):
            values = getattr(self, name)
            if len(values) < 3 or list(values) != sorted(set(values)) or not values[0] > 0:
                raise ValueError(f"{name} are {', '.join(map(str, values)) or 'none'}; allowed: at least 3, ascending, "
                                 "above 0")
        grid = np.array([*self.selection, *itertools.chain(*self.speculation)], np.float64)
        if len(self.selection) != len(self.contexts) or grid.size != len(self.contexts) * (1 + len(self.ratios)):
            raise ValueError(f"times are {grid.size}; allowed: selection at each of {len(self.contexts)} contexts and "
                             f"speculation at each of them and of {len(self.ratios)} ratios")
        if not (np.isfinite(grid) & (grid >= 0)).all():
            raise ValueError("a time is negative or no number; allowed: at least 0, in µs")

    def require(self, **wanted: object) -> None:
        """ValueError when the profile is of another device, model, method, page_tokens or budget_count than wanted, or
        does not say; None is anything."""
        for name, value in wanted.items():
            own = getattr(self, name)
            if value is not None and own != value:
                said = f"is of {own}" if own is not None else "does not say which it is of"
                raise ValueError(f"{name} is {value}; the profile {said}")


class Surface(NamedTuple):
    """A polynomial of time in context and ratio. degrees: of each; errors: per degrees tried, the root mean square of
    what left-out contexts and ratios were predicted wrong, µs, the lowest degrees first."""

    degrees: tuple[int, int]
    errors: dict[tuple[int, int], float]
    coefficients: np.ndarray  # of the powers of context / its scale [down] and of ratio / its scale [across]
    scales: tuple[float, float]

    def at(self, context: float, ratio: float | np.ndarray = 1.0) -> np.ndarray:
        """Time at a context and a ratio or several, µs."""
        x = np.vander([context / self.scales[0]], self.degrees[0] + 1, increasing=True)
        y = np.vander(np.atleast_1d(ratio) / self.scales[1], self.degrees[1] + 1, increasing=True)
        return (x @ self.coefficients @ y.T)[0]


class Answer(NamedTuple):
    """delta at a context. ratio: 0 when not even the fewest blocks fit; limit: what ended it, "window" or "profile" (no
    larger one was timed); beyond: whether the context is longer than any that was timed. Times in µs."""

    context: int
    ratio: float
    selection: float
    speculation: float
    limit: str
    beyond: bool


@dataclass(frozen=True)
class Budget:
    """A profile and what was fitted to it."""

    profile: Profile
    selection: Surface
    speculation: Surface

    def answer(self, context: int, *, far: bool = False) -> Answer:
        """The largest delta that fits at `context` tokens, in whole blocks where the budget is known.

        Raises ValueError below the shortest context timed, more than `FAR` times past the longest unless `far`, and
        where the fit has left what a time can be.
        """
        known = self.profile.contexts
        if context < known[0] or (context > FAR * known[-1] and not far):
            more = "" if context < known[0] else ", or further when asked for"
            raise ValueError(f"context is {context} tokens; allowed: {known[0]} to {FAR * known[-1]}, {FAR} times the "
                             f"longest that was timed{more}")
        ratios = _ratios(self.profile)
        if context in known:
            i = known.index(context)
            window, times = self.profile.selection[i], np.interp(ratios, self.profile.ratios,
                                                                 self.profile.speculation[i])
        else:
            window, times = float(self.selection.at(context)[0]), self.speculation.at(context, ratios)
        if context not in known and (window <= 0 or (times <= 0).any()):
            raise ValueError(f"context is {context} tokens; the fitted times are no longer above 0 there: time it")
        fits = np.append(times <= window * (1 + 1e-9), False)  # a tie is one before rounding
        count = int(np.argmin(fits))  # those before the first that does not fit
        ratio = float(ratios[count - 1]) if count else 0.0
        limit = "profile" if count == len(ratios) else "window"
        return Answer(context, ratio, window, float(times[count - 1]) if count else 0.0, limit, context > known[-1])


def fit(profile: Profile) -> Budget:
    """Polynomials for both times, their degrees chosen by leaving out one context, and one ratio, at a time."""
    grid = np.array(profile.speculation, np.float64)
    return Budget(profile, _surface(profile.contexts, (1.0,), np.array(profile.selection, np.float64)[:, None]),
                  _surface(profile.contexts, profile.ratios, grid))


def extrapolation(profile: Profile, longest: int) -> list[tuple[int, float, float, float, float]]:
    """How far off a fit to contexts up to `longest` is at the longer ones: (context, selection predicted and timed,
    speculation at the middle ratio predicted and timed), µs. ValueError where fewer than 3 contexts are left to fit."""
    kept = sum(context <= longest for context in profile.contexts)
    short = Profile(profile.device, profile.model, profile.method, profile.page_tokens, profile.budget_count,
                    profile.contexts[:kept], profile.ratios, profile.selection[:kept], profile.speculation[:kept])
    fitted, middle = fit(short), len(profile.ratios) // 2
    ratio = profile.ratios[middle]
    return [(context, float(fitted.selection.at(context)[0]), profile.selection[i],
             float(fitted.speculation.at(context, ratio)[0]), profile.speculation[i][middle])
            for i, context in enumerate(profile.contexts) if context > longest]


def _ratios(profile):
    """The deltas to choose from: whole blocks, or hundredths where their number is not known; within what was timed."""
    step = _STEP if profile.budget_count is None else 1 / profile.budget_count
    low, high = profile.ratios[0], profile.ratios[-1]
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return np.arange(first, last + 1) * step


def _surface(contexts, ratios, times):
    """Least squares on a grid, one axis after the other, which comes to the same; every pair of degrees tried."""
    x, y = np.array(contexts, np.float64), np.array(ratios, np.float64)
    scales = float(x[-1]), float(y[-1])
    axes = [[_axis(points, degree) for degree in range(_most(points) + 1)] for points in (x / scales[0], y / scales[1])]
    errors = {}
    for i, j in sorted(itertools.product(*map(range, map(len, axes))), key=lambda pair: (sum(pair), pair)):
        (_, fit_x, out_x), (_, fit_y, out_y) = axes[0][i], axes[1][j]
        wrong = [out_x @ times @ fit_y.T - times]
        wrong += [fit_x @ times @ out_y.T - times] if len(y) > 1 else []
        errors[i, j] = float(np.sqrt(np.mean(np.square(wrong))))
    least = min(errors.values()) * (1 + 1e-6) + 1e-9 * float(np.abs(times).max())
    degrees = next(degrees for degrees, error in errors.items() if error <= least)
    (solve_x, *_), (solve_y, *_) = axes[0][degrees[0]], axes[1][degrees[1]]
    return Surface(degrees, errors, solve_x @ times @ solve_y.T, scales)


def _most(points):
    """The highest degree that is still determined when one point is left out."""
    return max(0, min(MOST_DEGREE, len(points) - 2))


def _axis(points, degree):
    """Of a polynomial on `points`: values -> coefficients, values -> fitted values, and values -> each one predicted
    from the others."""
    terms = np.vander(points, degree + 1, increasing=True)
    solve, left_out = np.linalg.pinv(terms), np.zeros((len(points), len(points)))
    for i in range(len(points) if len(points) > 1 else 0):
        rest = np.delete(np.arange(len(points)), i)
        left_out[i, rest] = terms[i] @ np.linalg.pinv(terms[rest])
    return solve, terms @ solve, left_out
