"""Abrupt shifts: how far coverage falls when what is attended to changes at once, and how soon it is back.

topic   halfway, the scores become those of another prompt's steps (the same model, layers and heads): everything the
        predictor knows is about another text
sink    halfway, each head's highest block and its lowest change places, as when an attention sink moves
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from artifact.models.trace import Trace
from artifact.prr import coverage
from artifact.prr.coverage import Steps
from artifact.study import prediction

KINDS = ("topic", "sink")
RECOVERED = 0.95  # of the coverage before


def topic(first: Steps, second: Steps) -> Steps:
    """`first`'s steps until halfway, then `second`'s as many; the blocks that both have."""
    half, blocks = len(first.scores) // 2, min(first.scores.shape[2], second.scores.shape[2])
    length = min(half, len(second.scores))
    more = first.forced.shape[1] - second.forced.shape[1]
    forced = [np.pad(first.forced[:half], ((0, 0), (0, max(0, -more)))),
              np.pad(second.forced[:length], ((0, 0), (0, max(0, more))))]
    return Steps(
        first.before[..., :blocks], np.concatenate([first.scores[:half], second.scores[:length]])[..., :blocks],
        np.concatenate([first.picks[:half], second.picks[:length]]), np.concatenate(forced),
        np.concatenate([first.mass[:half, ..., :blocks], second.mass[:length, ..., :blocks]]),
    )


def sink(part: Steps) -> tuple[Steps, np.ndarray]:
    """`part` with each head's highest and lowest block exchanged from halfway on, and where the highest went, [G]."""
    half = len(part.scores) // 2
    known = np.isfinite(part.before[-1]) & np.isfinite(part.scores).all(0)
    mean = np.where(known, part.scores[:half].mean(0), np.nan)
    high, low = np.nanargmax(mean, axis=-1), np.nanargmin(mean, axis=-1)
    moved = part._replace(scores=part.scores.copy(), mass=part.mass.copy())
    for g, (a, b) in enumerate(zip(high, low, strict=True)):
        for values in (moved.scores, moved.mass):
            values[half:, g, [a, b]] = values[half:, g, [b, a]]
    return moved, low


def courses(recordings: Iterable[Trace], chosen, kind: str, ratio: float = 1.0, seed: int = 0) -> pd.DataFrame:
    """Coverage step by step around a shift, one row per prompt, predictor and step; step 0 is the first after it.

    moved: the share of heads that predict the block the sink has moved to (`sink`). ValueError for an unknown kind, or
    for a topic without a second prompt of the same layers.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(KINDS)}")
    weights, parts = prediction.weights_of(chosen), {}
    recordings = list(recordings)
    for recorded, layer, part in prediction.every(recordings, chosen):
        parts[id(recorded), layer] = part
    out = []
    for i, recorded in enumerate(recordings):
        other = _other(recordings, i) if kind == "topic" else None
        values, moved, half = {}, {}, recorded.steps // 2
        for layer in prediction.layers(recorded, chosen):
            part, places = parts[id(recorded), layer], None
            if kind == "topic":
                part = topic(part, parts[id(other), layer])
            else:
                part, places = sink(part)
            for name, guess in prediction.predictions(part, weights, seed).items():
                found = coverage.measure(part, guess, (ratio,), weights)
                values.setdefault(name, []).append((found.dynamic[0], found.weighted[0]))
                if places is not None:
                    at = np.take_along_axis(coverage.ranks(guess), places[None, :, None], axis=-1)[..., 0]
                    moved.setdefault(name, []).append(at < part.picks[:, None] * ratio)
        for name, found in values.items():
            dynamic, weighted = np.nanmean(np.concatenate(found, axis=-1), axis=-1)
            share = np.concatenate(moved[name], axis=-1).mean(-1) if moved else np.full(len(dynamic), np.nan)
            out += [prediction.label(recorded) | {
                "kind": kind, "predictor": name, "predicted_ratio": ratio, "step": t - half,
                "coverage_frac": dynamic[t], "coverage_weighted_frac": weighted[t], "moved_frac": share[t],
            } for t in range(len(dynamic))]
    return pd.DataFrame(out).assign(origin="simulated")


def recovery(course: pd.DataFrame, by: Sequence[str] = ("kind", "predictor", "predicted_ratio")) -> pd.DataFrame:
    """From `courses`: coverage before (mean of the steps), at the shift, and steps until it is back to 95 % of before.

    A prompt that is not back when its steps end counts as all of them, so its mean is a lower bound: see back_frac,
    the share of prompts that are. moved_count: steps until half of the heads predict the moved sink.
    """
    rows = []
    for keys, one in course.groupby([*by, "family", "prompt"], sort=False):
        before, after = one[one["step"] < 0]["coverage_frac"].mean(), one[one["step"] >= 0].sort_values("step")
        back, moved = after["coverage_frac"] >= RECOVERED * before, after["moved_frac"] >= 0.5
        rows.append(dict(zip(by, keys, strict=False)) | {
            "before_frac": before, "shift_frac": after["coverage_frac"].iloc[0],
            "steps_count": _first(back), "back_frac": float(back.any()),
            "moved_count": np.nan if after["moved_frac"].isna().all() else _first(moved),
        })
    groups = pd.DataFrame(rows).groupby(list(by), sort=False)
    return groups.mean().assign(prompts_count=groups.size()).reset_index().assign(origin="simulated")


def _first(reached):
    return int(np.argmax(reached.to_numpy())) if reached.any() else len(reached)


def _other(recordings, i):
    """The next recording of another family that fits the i-th."""
    one = recordings[i]
    for step in range(1, len(recordings)):
        other = recordings[(i + step) % len(recordings)]
        same = np.array_equal(other.layers, one.layers) and other.kv_heads == one.kv_heads
        if same and other.model == one.model and other.family != one.family:
            return other
    raise ValueError(f"{one.family} {one.prompt}: no other family's trace of {one.model} with its layers to change to")
