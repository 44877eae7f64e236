"""How much of what a step selects had been predicted (paper sections 2.2 and 5.2, Tables 5 and 7).

Blocks that a step attends to whatever their score, forced ones, are outside the predictor. They are in the selected
and in the predicted set alike, so a coverage that counts them is higher and says less: both are given. So are newborn
blocks, selectable for the first time: they are in P by rule. Steps that can select all there is predict nothing.
"""

from typing import NamedTuple

import numpy as np

from artifact.prr import calibration


class Steps(NamedTuple):
    """One layer's steps as selection saw them. R prefill rows, T decode steps, G KV heads, N blocks, M >= N with those
    that are not complete yet."""

    before: np.ndarray  # fp32 [R, G, N], scores of the prefill's last rows; -inf for blocks not there, or forced
    scores: np.ndarray  # fp32 [T, G, N], of the decode steps
    picks: np.ndarray  # int64 [T], blocks a step selects beside the forced ones
    forced: np.ndarray  # bool [T, M]
    mass: np.ndarray  # fp32 [T, G, N], share of the attention that truly falls on a block; what is missing is recent


class Coverage(NamedTuple):
    """Float64 [X, T, G] for X sizes of P; NaN where there was nothing to predict."""

    dynamic: np.ndarray  # |P and A| / |A| without forced and newborn blocks
    forced: np.ndarray  # the same with them
    weighted: np.ndarray  # as `dynamic`, each block by its score (Eq. 4)
    mass: np.ndarray  # share of the true attention on P, forced, newborn and incomplete blocks


def order(scores: np.ndarray) -> np.ndarray:
    """The blocks of each row of fp32 `scores` [..., N], highest first, ties by index, -inf last: int64 [..., N]."""
    bits = (np.float32(0) - scores).view(np.int32)  # 0 - x: the two zeros are one
    rising = bits ^ (bits >> 31 & 0x7FFFFFFF)  # whole numbers in the order of the floats
    return np.sort(rising.astype(np.int64) << 32 | np.arange(scores.shape[-1]), axis=-1) & 0xFFFFFFFF


def ranks(scores: np.ndarray) -> np.ndarray:
    """Place of each block in its row, 0 = highest, ties by index; N for -inf. int64 like fp32 `scores` [..., N]."""
    places = np.empty(scores.shape, np.int64)
    np.put_along_axis(places, order(scores), np.broadcast_to(np.arange(scores.shape[-1]), scores.shape), axis=-1)
    places[np.isneginf(scores)] = scores.shape[-1]
    return places


def selected(steps: Steps) -> np.ndarray:
    """A without the forced blocks: bool [T, G, N]."""
    return ranks(steps.scores) < steps.picks[:, None, None]


def newborn(steps: Steps) -> np.ndarray:
    """Blocks that can be selected, but could not at the step before: bool [T, G, N]."""
    earlier = np.concatenate([steps.before[-1:], steps.scores[:-1]])
    return ~np.isneginf(steps.scores) & np.isneginf(earlier)


def measure(steps: Steps, prediction: np.ndarray, ratios: tuple[float, ...], weights: str = "shift") -> Coverage:
    """What the highest of `prediction` [T, G, N] cover, for each |P| / |A| of `ratios`; -inf is never predicted.

    ValueError for a ratio that is not above 0.
    """
    for ratio in ratios:
        if not 0 < ratio < np.inf:
            raise ValueError(f"ratio is {ratio}; allowed: above 0")
    there, born, chosen = ~np.isneginf(steps.scores), newborn(steps), selected(steps)
    wanted = chosen & ~born & (there.sum(-1) > steps.picks[:, None])[..., None]
    share = calibration.shares(calibration.importance(steps.scores, weights), wanted)
    likely, able = order(prediction), (~np.isneginf(prediction)).sum(-1)
    missed = np.where(there & ~born, steps.mass, 0).astype(np.float64)

    sums = {name: np.cumsum(np.take_along_axis(values, likely, axis=-1), axis=-1)
            for name, values in (("wanted", wanted), ("share", share), ("missed", missed))}

    def within(name, sizes):  # what the first `sizes` [T, G] of the predicted blocks hold of it
        found = np.take_along_axis(sums[name], np.maximum(sizes, 1)[..., None] - 1, axis=-1)[..., 0]
        return np.where(sizes > 0, found, 0)

    all_wanted, lost = wanted.sum(-1), missed.sum(-1)
    free = steps.forced.sum(-1)[:, None] + (chosen & born).sum(-1)  # attended without a prediction
    nothing, found = np.where(all_wanted > 0, 1.0, np.nan), []
    with np.errstate(invalid="ignore"):
        for ratio in ratios:
            sizes = np.array([calibration.predicted_count(picks, ratio) for picks in steps.picks])[:, None]
            sizes = np.minimum(sizes, able)
            hits = within("wanted", sizes)
            found.append((
                hits / all_wanted * nothing,
                (hits + free) / (all_wanted + free) * nothing,
                within("share", sizes) * nothing,
                (1 - (lost - within("missed", sizes))) * nothing,
            ))
    return Coverage(*(np.stack(values) for values in zip(*found, strict=True)))


def overlap(steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Share of a step's blocks that the step before attended to as well (Table 5), without and with forced blocks.

    -> two float64 [T - 1, G]; NaN where nothing is selected.
    """
    chosen = selected(steps)
    dynamic = _shared(chosen)
    whole = np.zeros((*chosen.shape[:2], steps.forced.shape[1]), bool)
    whole[..., : chosen.shape[2]] = chosen
    return dynamic, _shared(whole | steps.forced[:, None])


def selected_mass(steps: Steps) -> np.ndarray:
    """Share of the true attention on what the step attends to, float64 [T, G]."""
    left_out = ~np.isneginf(steps.scores) & ~selected(steps)
    return 1 - np.where(left_out, steps.mass, 0).sum(-1, dtype=np.float64)


def _shared(sets):
    with np.errstate(invalid="ignore"):
        return (sets[1:] & sets[:-1]).sum(-1) / sets[1:].sum(-1)
