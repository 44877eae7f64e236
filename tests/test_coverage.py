"""Coverage and overlap against sets counted one by one; what forced, newborn and missing blocks do to them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from artifact.prr import coverage
from artifact.prr.coverage import Steps

SCORES = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -math.inf, math.inf]), st.integers(-3, 3))


@st.composite
def some_steps(draw, most=8):
    """Any steps, holes, ties and more forced blocks than the budget included."""
    rows, count, heads, blocks = (draw(st.integers(1, n)) for n in (3, 5, 2, most))
    scores = draw(arrays.arrays(np.float32, (rows + count, heads, blocks), elements=SCORES))
    forced = draw(arrays.arrays(bool, (count, blocks + draw(st.integers(0, 2)))))
    scores[rows:][np.broadcast_to(forced[:, None, :blocks], (count, heads, blocks))] = -np.inf
    picks = np.maximum(draw(st.integers(1, most)) - forced.sum(-1), 0)
    mass = draw(arrays.arrays(np.float32, (count, heads, blocks), elements=st.floats(0, 1, width=16)))
    return Steps(scores[:rows], scores[rows:], picks, forced, mass / np.float32(blocks))


def best(scores, k):
    """The k highest as a set, by sorting."""
    able = [(-score if score else 0.0, i) for i, score in enumerate(scores.tolist()) if score > -math.inf]
    return {i for _, i in sorted(able)[:k]}


@settings(deadline=None)
@given(some_steps(), st.data(), st.sampled_from([0.5, 1, 1.4, 2]))
def test_coverage_is_what_counting_sets_gives(steps, data, ratio):
    prediction = data.draw(arrays.arrays(np.float32, steps.scores.shape, elements=SCORES))
    found = coverage.measure(steps, prediction, (ratio,))
    earlier = np.concatenate([steps.before[-1:], steps.scores])
    for t, g in np.ndindex(steps.scores.shape[:2]):
        able = best(steps.scores[t, g], 99)
        born = {i for i in able if earlier[t, g, i] == -np.inf}
        chosen = best(steps.scores[t, g], steps.picks[t])
        guess = best(prediction[t, g], math.floor(steps.picks[t] * ratio + 1e-9))
        values = [values[0, t, g] for values in found]
        wanted = chosen - born
        if not wanted or len(able) <= steps.picks[t]:
            assert np.isnan(values).all()
            continue
        free = int(steps.forced[t].sum()) + len(chosen & born)
        assert values[0] == len(guess & wanted) / len(wanted)
        assert values[1] == (len(guess & wanted) + free) / (len(wanted) + free)
        assert 0 <= values[2] <= 1 + 1e-12
        missed = sum(float(steps.mass[t, g, i]) for i in able - born - guess)
        assert values[3] == pytest.approx(1 - missed, abs=1e-6)


@settings(deadline=None)
@given(some_steps(), st.data())
def test_coverage_does_not_fall_when_more_is_predicted(steps, data):
    prediction = data.draw(arrays.arrays(np.float32, steps.scores.shape, elements=SCORES))
    for values in coverage.measure(steps, prediction, (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 4)):
        assert (np.diff(values, axis=0)[~np.isnan(np.diff(values, axis=0))] >= -1e-12).all()


@settings(deadline=None)
@given(some_steps())
def test_the_steps_own_scores_cover_all(steps):
    found = coverage.measure(steps, steps.scores, (1,))
    for values in (found.dynamic, found.forced, found.weighted):
        assert np.isnan(values).all() or np.nanmin(values) == pytest.approx(1)
    counted = ~np.isnan(found.mass[0])
    expected = coverage.selected_mass(steps) + np.where(
        coverage.newborn(steps) & ~coverage.selected(steps), steps.mass, 0).sum(-1)
    assert found.mass[0][counted] == pytest.approx(expected[counted], abs=1e-6)


def test_a_case_by_hand():
    """Four blocks and the current one, forced; two picks: {0, 1} then {0, 3}, of which 3 is newborn."""
    steps = Steps(
        before=np.float32([[[9, 8, 1, -np.inf]]]), scores=np.float32([[[9, 8, 1, -np.inf]], [[9, 2, 3, 7]]]),
        picks=np.array([2, 2]), forced=np.array([[0, 0, 0, 1, 0], [0, 0, 0, 0, 1]], bool),
        mass=np.float32([[[0.4, 0.2, 0.1, 0]], [[0.5, 0.1, 0.1, 0.2]]]),
    )
    found = coverage.measure(steps, np.float32([[[5, 1, 3, 4]], [[5, 1, 3, -np.inf]]]), (1,), "raw")
    assert found.dynamic.ravel().tolist() == [0.5, 1]  # {0, 3} against {0, 1}; {0, 2} against {0}
    assert found.forced.ravel().tolist() == [2 / 3, 1]
    assert found.weighted.ravel().tolist() == [9 / 17, 1]
    assert found.mass.ravel() == pytest.approx([1 - 0.2 - 0.1, 1 - 0.1], abs=1e-6)
    dynamic, whole = coverage.overlap(steps)
    assert dynamic.tolist() == [[0.5]] and whole.tolist() == [[2 / 3]]  # {0, 3, 4} and {0, 1, 3} share 0 and 3
    assert coverage.selected_mass(steps).ravel() == pytest.approx([0.9, 0.8], abs=1e-6)


def test_ranks_go_by_score_then_index():
    scores = np.float32([[1, 3, -np.inf, 3, np.inf, -0.0, 0.0]])
    assert coverage.ranks(scores).tolist() == [[3, 1, 7, 2, 0, 4, 5]]
