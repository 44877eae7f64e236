"""PRR's predictor: the recurrence against a scalar loop, newborn and missing blocks, what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from artifact import ops
from artifact.prr import predictor
from artifact.prr.predictor import EmaState, Theta

NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf]),
    st.floats(-(2.0**99), 2.0**99, width=32),
)
THETAS = st.builds(Theta, st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0, 1))


def scores_of(rows=1, blocks=12, numbers=NUMBERS):
    """[at least `rows`, heads, at most `blocks`]"""
    shapes = st.tuples(st.integers(rows, 6), st.integers(1, 3), st.integers(1, blocks))
    return shapes.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=numbers))


def states(scores, theta):
    """The state after each row, from the first."""
    state = predictor.begin(scores.shape[1:])
    for row in scores:
        state = predictor.update(state, row, theta)
        yield state


@settings(deadline=None)  # the first call compiles
@given(scores_of(), THETAS)
def test_the_recurrence_is_the_papers_block_by_block(scores, theta):
    alpha, keep_level, beta, keep_trend, gamma = theta.weights
    last = list(states(scores, theta))[-1]
    for g, i in np.ndindex(scores.shape[1:]):
        level, trend = np.float32(-np.inf), np.float32(0)
        for score in scores[:, g, i]:
            if np.isfinite(score) and np.isfinite(level):
                level, trend = alpha * score + keep_level * level, beta * (score - level) + keep_trend * trend
            else:
                level, trend = np.float32(-np.inf if np.isnan(score) else score), np.float32(0)
        assert (last.level[g, i], last.trend[g, i]) == (level, trend)
        assert predictor.predict(last, theta)[g, i] == level + gamma * trend


def test_the_trend_follows_the_old_level():
    """By hand: scores 1, 2, 4 at alpha .5, beta .25, gamma 1."""
    theta = Theta(0.5, 0.25, 1)
    seen = [(s.level.item(), s.trend.item()) for s in states(np.float32([1, 2, 4]).reshape(3, 1, 1), theta)]
    assert seen == [(1, 0), (1.5, 0.25), (2.75, 0.25 * 2.5 + 0.75 * 0.25)]


@settings(deadline=None)
@given(scores_of(), st.integers(1, 12))
def test_without_smoothing_the_prediction_is_the_last_steps_set(scores, k):
    """gamma = 0, alpha = 1, |P| = |A|; whatever the scores."""
    theta = Theta(1, 0.3, 0)
    for row, state in zip(scores, states(scores, theta), strict=True):
        assert np.array_equal(ops.topk(predictor.predict(state, theta), k), ops.topk(row, k))


def test_a_block_without_a_score_begins_anew():
    theta = Theta(0.5, 0.5, 0.5)
    rows = np.float32([[1, np.nan, -np.inf], [2, 5, np.inf], [np.nan, 6, 3], [3, np.inf, np.nan]])
    first, second, third, fourth = states(rows[:, None], theta)
    assert first.level.tolist() == [[1, -np.inf, -np.inf]]
    assert second.level.tolist() == [[1.5, 5, np.inf]] and second.trend.tolist() == [[0.5, 0, 0]]
    assert third.level.tolist() == [[-np.inf, 5.5, 3]] and third.trend.tolist() == [[0, 0.5, 0]]
    assert fourth.level.tolist() == [[3, np.inf, -np.inf]] and fourth.trend.tolist() == [[0, 0, 0]]
    assert predictor.predict(fourth, theta).tolist() == fourth.level.tolist()


def test_blocks_may_be_added_but_not_taken_away():
    theta = Theta(0.5, 0.5, 0.5)
    *_, state = states(np.float32([[[1, 2]], [[3, 2]]]), theta)
    grown = predictor.update(state, np.float32([[3, 2, 7]]), theta)
    assert grown.level.tolist() == [[2.5, 2, 7]] and grown.trend.tolist() == [[0.5 * 1 + 0.5 * 1, 0, 0]]
    for shape in ((1, 2), (2, 3), (3,)):
        with pytest.raises(ValueError, match="allowed: the same, or more blocks"):
            predictor.update(grown, np.zeros(shape, np.float32), theta)


def test_a_step_changes_no_earlier_state():
    state = predictor.update(predictor.begin((1, 3)), np.float32([[1, 2, 3]]), Theta(0.5, 0.5, 0.5))
    kept = EmaState(state.level.copy(), state.trend.copy())
    predictor.update(state, np.float32([[4, np.nan, 6]]), Theta(0.5, 0.5, 0.5))
    assert np.array_equal(state.level, kept.level) and np.array_equal(state.trend, kept.trend)


@pytest.mark.parametrize("name, theta", [
    ("alpha", (0, 0.5, 0.5)), ("alpha", (1.1, 0.5, 0.5)), ("beta", (0.5, 0, 0)), ("beta", (0.5, 2, 0)),
    ("gamma", (0.5, 0.5, -0.1)), ("gamma", (0.5, 0.5, 1.01)), ("gamma", (0.5, 0.5, math.nan)),
])
def test_theta_outside_the_papers_ranges_is_refused(name, theta):
    with pytest.raises(ValueError, match=f"{name} is .*; allowed: "):
        Theta(*theta)
    with pytest.raises(ValueError, match=f"{name} is "):
        predictor.predict(predictor.begin((1, 1)), theta)


def test_scores_that_would_overflow_are_refused():
    with pytest.raises(ValueError, match="allowed: at most 1e"):
        predictor.update(predictor.begin((1, 1)), np.float32([[2e30]]), Theta(1, 1, 0))
