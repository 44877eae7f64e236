"""The other predictors: each knows only what was there before its step, and is what its name says."""

import numpy as np
import pytest
from test_calibration import trace_like

from artifact.prr import baselines, calibration, coverage
from artifact.prr.coverage import Steps
from artifact.prr.predictor import Theta

PICKS = 12


@pytest.fixture
def steps():
    scores = trace_like(rows=60, heads=2, blocks=48)
    scores[:35, :, 46:], scores[:, :, 47:] = -np.inf, -np.inf  # one block is born, one never there
    none = np.zeros((30, 2, 48))
    return Steps(scores[:30], scores[30:], np.full(30, PICKS), none[:, 0].astype(bool), none.astype(np.float32))


def every(steps):
    return {
        "last step": baselines.last_step(steps), "random": baselines.random(steps, np.random.default_rng(3)),
        "frequency": baselines.frequency(steps), "ema": baselines.ema(steps, Theta(0.2, 0.5, 0.25)),
        "learned": baselines.learned(steps, baselines.learn(steps)),
    }


def test_no_predictor_looks_ahead(steps):
    known = every(steps)
    for t in (0, 7, 29):
        spoilt = steps._replace(scores=steps.scores.copy())
        spoilt.scores[t:] = np.random.default_rng(4).normal(size=spoilt.scores[t:].shape)
        for name, prediction in every(spoilt).items():
            assert np.array_equal(prediction[: t + 1], known[name][: t + 1]), name


def test_newborn_blocks_are_not_predicted(steps):
    for name, prediction in every(steps).items():
        assert np.isneginf(prediction[coverage.newborn(steps)]).all(), name
        assert np.isneginf(prediction[..., 47]).all() and np.isfinite(prediction[..., :46]).all(), name


def test_last_step_is_the_ema_without_smoothing_or_trend(steps):
    assert np.array_equal(baselines.last_step(steps), baselines.ema(steps, Theta(1, 0.5, 0)))
    same = coverage.ranks(baselines.last_step(steps))[1:] < PICKS
    assert np.array_equal(same, coverage.selected(steps)[:-1])


def test_the_emas_hits_are_those_of_the_grid(steps):
    whole = calibration.calibrate(np.concatenate([steps.before, steps.scores]), PICKS, skip=30)
    found = coverage.measure(steps, baselines.ema(steps, Theta(0.6, 0.4, 0.75)), (1,))
    assert np.nansum(found.dynamic * PICKS).round() == pytest.approx(whole.hits[2, 3, 3], abs=1)
    assert np.nanmean(found.weighted) == pytest.approx(whole.objective[2, 3, 3], abs=1e-9)


def test_frequency_counts_the_prefills_rows(steps):
    picked = coverage.ranks(steps.before) < PICKS
    assert np.array_equal(baselines.frequency(steps)[10, :, :46], picked.sum(0)[:, :46])


def test_random_covers_what_chance_does(steps):
    found = coverage.measure(steps, baselines.random(steps, np.random.default_rng(0)), (1,))
    assert np.nanmean(found.dynamic) == pytest.approx(PICKS / 46.5, abs=0.05)


def test_a_learned_predictor_learns(steps):
    """It beats chance by far, and on scores that are the last step's plus noise it weighs the smooth level highest."""
    weights = baselines.learn(steps)
    found = coverage.measure(steps, baselines.learned(steps, weights), (1,))
    plain = coverage.measure(steps, baselines.last_step(steps), (1,))
    assert weights.shape == (len(baselines.FEATURES),)
    assert np.nanmean(found.dynamic) > np.nanmean(plain.dynamic) - 0.02 > 0.5


def test_features_by_hand():
    rows = np.float32([[[1, 3, -np.inf]], [[4, 2, 0]]])
    found = baselines.features(rows, 1)
    assert found.shape == (2, 1, 3, len(baselines.FEATURES))
    assert found[0, 0].tolist() == [[1, -1, 0, -1, -1, 0, 0], [1, 1, 0, 1, 1, 1, 1], [0] * 7]
    spread = np.sqrt(8 / 3)
    one, last, step, slow, fast, picked, often = found[1, 0, 0]
    assert (one, picked) == (1, 1) and often == pytest.approx(0.1)
    assert last == pytest.approx(2 / spread) and step == pytest.approx(2 / spread + 1)
    assert slow == pytest.approx(-1 + 0.1 * step) and fast == pytest.approx(-1 + 0.5 * step)
