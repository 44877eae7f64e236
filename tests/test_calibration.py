"""The 80-candidate grid: one pass against the definition, its weights, its row budget, and what does not count."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from artifact.prr import calibration, threshold
from artifact.prr.calibration import SHAPE, calibrate, plain
from artifact.study.fitting import like_a_trace

NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf]), st.integers(-3, 3),
                    st.floats(-(2.0**99), 2.0**99, width=32), st.floats(-2, 2, width=16))


def trace_like(rows=40, heads=2, blocks=96, seed=0):
    """Scores whose neighbours in time are as alike as a model's."""
    return like_a_trace(rows, heads, blocks, seed)


def hard(kind, **size):
    scores, random = trace_like(**size), np.random.default_rng(1)
    match kind:
        case "ties":
            return np.round(scores)
        case "near constant":
            return 1 + np.float32(1e-6) * scores
        case "scale jumps":
            return scores * (10.0 ** random.uniform(-3, 3, (len(scores), 1, 1))).astype(np.float32)
        case "signed zeros":
            return np.where(scores > 0.5, scores, np.where(scores > 0, 0, np.float32(-0.0)))
        case "independent":
            return random.normal(size=scores.shape).astype(np.float32)
        case "growing":
            born = np.arange(scores.shape[-1]) * len(scores) // scores.shape[-1]
            return np.where(np.arange(len(scores))[:, None, None] < born - 12, np.float32(-np.inf), scores)
        case "holes":
            return np.where(random.random(scores.shape) < 0.2, np.float32(np.nan), scores)
    return scores


def same(fast, slow):
    assert np.array_equal(fast.hits, slow.hits)
    assert (fast.wanted, fast.rows) == (slow.wanted, slow.rows)
    np.testing.assert_allclose(fast.objective, slow.objective, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["", "ties", "near constant", "scale jumps", "signed zeros", "independent", "growing",
                                  "holes"])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 1.5])
def test_one_pass_equals_the_definition(kind, ratio):
    scores = hard(kind)
    fast, slow = calibrate(scores, 24, ratio=ratio), plain(scores, 24, ratio=ratio)
    same(fast, slow)
    assert fast.rows > 0 and 0 < fast.hits.min() <= fast.hits.max() <= fast.wanted
    assert slow.objective.max() - slow.objective[np.unravel_index(fast.objective.argmax(), SHAPE)] <= 1e-12


@settings(max_examples=60, deadline=None)
@given(st.tuples(st.integers(2, 7), st.integers(1, 2), st.integers(1, 14)).flatmap(
    lambda shape: arrays.arrays(np.float32, shape, elements=NUMBERS)), st.integers(1, 14), st.sampled_from([1, 0.6, 2]))
def test_one_pass_equals_the_definition_on_anything(scores, budget, ratio):
    budget = min(budget, scores.shape[-1])
    ratio = max(ratio, 1 / budget)
    same(calibrate(scores, budget, ratio=ratio), plain(scores, budget, ratio=ratio))


@pytest.mark.parametrize("weights", calibration.WEIGHTS)
def test_every_weight_equals_the_definition(weights):
    scores = np.exp(trace_like()) if weights == "raw" else trace_like()
    same(calibrate(scores, 24, weights=weights), plain(scores, 24, weights=weights))


def test_a_case_by_hand():
    """One of three blocks is picked: block 0 in row 0, block 1 after. Row 1 is missed by all; row 2 needs a level that
    moves fast (alpha .4: 1.8 against 2.46), or a trend (alpha .2: 2.4 - 3 x against 2.28 + 0.9 x, x = beta gamma)."""
    found = calibrate(np.float32([[[3, 2.1, 1]], [[0, 3, 1]], [[0, 3, 1]]]), 1)
    assert (found.wanted, found.rows) == (2, 2)
    assert (found.hits[1:] == 1).all()
    assert found.hits[0].tolist() == [[0, 0, 1, 1]] + [[0, 1, 1, 1]] * 4
    assert found.theta == (0.2, 0.1, 0.5) and found.objective[0, 0].tolist() == [0, 0, 0.5, 0.5]


def test_the_objective_weighs_by_score():
    """Of two selected blocks only the heavier is predicted: half the hits, most of the objective."""
    rows = np.float32([[[9, 0, 8, 0]], [[9, 3, 0, 0]]])
    found = calibrate(rows, 2, weights="raw")
    assert (found.hits == 1).all() and found.wanted == 2
    np.testing.assert_allclose(found.objective, 9 / 12, rtol=1e-15)
    shifted = calibrate(rows - np.float32(5), 2, weights="shift")
    np.testing.assert_allclose(shifted.objective, 9 / 12, rtol=1e-15)
    soft = calibrate(rows, 2, weights="softmax")
    np.testing.assert_allclose(soft.objective, 1 / (1 + math.exp(-6)), rtol=1e-6)


def test_importance_is_never_negative_and_nothing_weighs_where_nothing_can_be_selected():
    scores = np.float32([[-3, -1, np.inf, -np.inf], [-np.inf] * 4, [np.inf] * 3 + [-np.inf]])
    for how in ("shift", "softmax"):
        weight = calibration.importance(scores, how)
        assert np.isfinite(weight).all() and (weight >= 0).all()
        assert (weight[np.isneginf(scores)] == 0).all()
    assert calibration.importance(scores, "shift")[0].tolist() == [0, 2, 2, 0]
    with pytest.raises(ValueError, match="weights is 'raw' but a score is -3"):
        calibration.importance(scores, "raw")
    with pytest.raises(ValueError, match="weights is 'other'; allowed: shift, softmax, raw"):
        calibration.importance(scores, "other")


@pytest.mark.parametrize("scores, budget", [
    (np.full((3, 1, 4), -np.inf), 2), (np.full((3, 1, 4), np.nan), 2), (np.ones((3, 1, 1)), 1), (np.ones((3, 2, 4)), 4),
])
def test_with_nothing_to_predict_no_row_counts(scores, budget):
    found = calibrate(scores, budget)
    assert found.rows == found.wanted == 0 and np.isnan(found.objective).all() and found.theta == (0.2, 0.1, 0.0)


def test_equal_scores_are_all_predicted_right_and_the_first_candidate_wins():
    found = calibrate(np.ones((4, 1, 6)), 2)
    assert (found.hits == found.wanted).all() and (found.objective == 1).all() and found.theta == (0.2, 0.1, 0.0)


def test_newborn_blocks_count_for_nothing():
    """Block 3 appears in row 1 as its best: it is in P by rule, so only block 0 is left to predict."""
    rows = np.float32([[[5, 1, 0, -np.inf]], [[5, 1, 0, 9]]])
    found = calibrate(rows, 2)
    assert found.wanted == found.rows == 1 and (found.hits == 1).all()


def test_without_a_trend_beta_is_without_effect():
    found = calibrate(trace_like(), 24)
    assert (found.hits[:, :, 0] == found.hits[:, :1, 0]).all()
    assert len(np.unique(found.hits.reshape(-1))) > 5


def test_hits_do_not_fall_when_more_is_predicted():
    scores = trace_like()
    hits = [calibrate(scores, 24, ratio=ratio).hits for ratio in (0.5, 0.75, 1, 1.25, 1.5, 2)]
    assert all((more >= fewer).all() for fewer, more in zip(hits, hits[1:], strict=False))


@pytest.mark.parametrize("row", [
    np.full(300, 0.5), np.where(np.arange(300) % 2, 1.0, np.nextafter(np.float32(1), np.float32(2))),
    np.geomspace(1e-30, 1e30, 300), -np.geomspace(1e-30, 1e30, 300), np.arange(300) % 3 - 1.0,
    np.where(np.arange(300) < 200, 0.0, np.geomspace(1e-38, 1e30, 300)),
])
@pytest.mark.parametrize("k", [0, 1, 100, 299, 300, 301])
def test_the_threshold_of_hard_rows(row, k):
    row, chosen = row.astype(np.float32), np.empty(300, bool)
    assert threshold.mark(row, k, np.empty(1, np.float32), chosen) == min(k, 300)
    assert sorted(np.argsort(-row, kind="stable")[:k]) == np.flatnonzero(chosen).tolist()


def test_the_row_budget_takes_the_last_rows():
    scores = trace_like()
    same(calibrate(scores, 24, rows=10), plain(scores[-10:], 24))
    assert calibrate(scores, 24, rows=10).rows == 9 * 2


def test_skipped_rows_bring_the_state_up_and_do_not_count():
    scores = trace_like()
    whole, first, rest = calibrate(scores, 24), calibrate(scores[:15], 24), calibrate(scores, 24, skip=15)
    assert np.array_equal(whole.hits, first.hits + rest.hits) and rest.rows == 25 * 2
    same(rest, plain(scores, 24, skip=15))


@pytest.mark.parametrize("given, message", [
    ({"budget": 0}, "budget is 0; allowed: 1 to 96 blocks"), ({"budget": -1}, "budget is -1"),
    ({"budget": 97}, "budget is 97"), ({"rows": 1}, "rows is 1; allowed: 2 to 40"), ({"rows": 41}, "rows is 41"),
    ({"rows": 0}, "rows is 0"),
    ({"skip": 40}, "skip is 40; allowed: 0 to 39"), ({"skip": -1}, "skip is -1"),
    ({"ratio": 0}, "ratio is 0; allowed: above 0"), ({"ratio": 0.01}, "ratio is 0.01"),
    ({"ratio": math.nan}, "ratio is nan"), ({"scores": np.zeros((1, 2, 3))}, "scores have shape"),
    ({"scores": np.zeros((4, 3))}, "scores have shape"), ({"scores": np.full((2, 1, 30), 1e31)}, "allowed: at most"),
])
def test_what_cannot_be_calibrated_is_refused(given, message):
    given = {"scores": trace_like(), "budget": 24, **given}
    with pytest.raises(ValueError, match=message):
        calibrate(given.pop("scores"), given.pop("budget"), **given)
