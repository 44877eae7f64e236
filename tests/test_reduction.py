"""Means and percentiles in pieces: NumPy's while everything is kept, close to them beyond."""

import numpy as np
import pytest

from artifact.study import reduction
from artifact.study.reduction import Reduction


def _of(values, pieces):
    reduced = Reduction(percentiles=True)
    for piece in np.array_split(values, pieces):
        reduced.add(piece)
    return reduced


def test_what_is_kept_is_numpys():
    values = np.random.default_rng(0).lognormal(3, 2, 5000)
    reduced = _of(values, 7)
    assert reduced.mean() == values.mean() and reduced.percentile(5, 95) == np.percentile(values, [5, 95]).tolist()


def test_beyond_it_is_close(monkeypatch):
    monkeypatch.setattr(reduction, "KEPT", 100)
    values = np.concatenate([np.random.default_rng(1).lognormal(3, 2, 50_000), np.full(20_000, 0.75), np.zeros(9)])
    reduced = _of(values, 333)
    assert reduced.mean() == pytest.approx(values.mean(), rel=1e-12)
    assert reduced.sum() == pytest.approx(values.sum(), rel=1e-12)
    for share in (1, 5, 50, 95, 99.5):  # rounded to 16 binary digits
        assert reduced.percentile(share)[0] == pytest.approx(np.percentile(values, share), rel=2.0**-16)


def test_nothing_and_nan():
    assert np.isnan(Reduction().mean()) and np.isnan(Reduction(percentiles=True).percentile(5)[0])
    reduced = Reduction()
    reduced.add(np.array([np.nan, 2.0, 4.0]))
    assert reduced.mean() == 3.0
