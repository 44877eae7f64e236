"""Intervals: they hold what they should as often as they say, and follow neighbours that are alike."""

import numpy as np
import pytest

from artifact.study import intervals


def alike(count, seed, memory=0.9):
    """Noise of mean 0 whose neighbours resemble each other."""
    draw, out = np.random.default_rng(seed).normal(size=count), np.zeros(count)
    for at in range(1, count):
        out[at] = memory * out[at - 1] + draw[at]
    return out


def test_the_interval_of_a_mean_covers_it_though_neighbours_are_alike():
    inside = {1: 0, 64: 0}
    for trial in range(100):
        parts = [alike(512, 10 * trial), alike(512, 10 * trial + 1)]
        for block in inside:
            low, high = intervals.of_mean(parts, block=block, draws=400, seed=trial)
            inside[block] += low <= 0 <= high
    assert inside[64] >= 84 and inside[1] < 60  # single tokens drawn make it far too narrow


def test_of_independent_values_it_is_the_usual_one():
    values = np.random.default_rng(1).normal(2.0, 3.0, 4096)
    low, high = intervals.of_mean([values[:1000], values[1000:]], block=16, seed=3)
    half = 1.96 * 3 / 4096**0.5
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.015)


def test_every_value_counts_alike():
    """The middle of the draws is the mean, first and last values included."""
    spike = np.zeros(200)
    spike[0] = 200.0
    drawn = [sum(intervals.of_mean([spike], block=20, draws=2000, seed=seed)) / 2 for seed in range(5)]
    assert 0.5 < np.mean(drawn) < 2.5


def test_the_same_seed_gives_the_same_and_no_spread_no_width():
    parts = [alike(300, 5)]
    assert intervals.of_mean(parts, block=30, seed=1) == intervals.of_mean(parts, block=30, seed=1)
    assert intervals.of_mean(parts, block=30, seed=1) != intervals.of_mean(parts, block=30, seed=2)
    assert intervals.of_mean([np.full(50, 0.25)] * 2, block=50) == (0.25, 0.25)


@pytest.mark.parametrize(("parts", "block"), [([np.zeros(9), np.zeros(50)], 10), ([np.zeros(9)], 0), ([], 1)])
def test_a_block_that_does_not_fit_is_refused(parts, block):
    with pytest.raises(ValueError, match=f"block is {block}; allowed: 1 to"):
        intervals.of_mean(parts, block=block)


@pytest.mark.parametrize(("found", "of", "ends"), [  # Wilson's formula, worked out
    (20, 20, (0.8389, 1.0)), (0, 20, (0.0, 0.1611)), (10, 20, (0.2993, 0.7007)), (1, 1, (0.2065, 1.0))])
def test_the_interval_of_a_share(found, of, ends):
    assert intervals.of_share(found, of) == pytest.approx(ends, abs=5e-5)


@pytest.mark.parametrize(("found", "of"), [(-1, 5), (6, 5), (0, 0)])
def test_no_count_is_refused(found, of):
    with pytest.raises(ValueError, match=f"found is {found} of {of}; allowed"):
        intervals.of_share(found, of)
