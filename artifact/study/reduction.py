"""Means and percentiles of values that come in pieces, in bounded memory."""

import numpy as np

KEPT = 1 << 18  # more than the samples of any published run; up to here results are NumPy's on all values, bit by bit
_BITS, _OCTAVES = 16, 64


class Reduction:
    """One column of a run's samples; NaN counts as no value.

    Up to `KEPT` values, results are NumPy's on all of them. Beyond, the mean is that of the pieces' sums, and a
    percentile is of values rounded to 16 binary digits, which is within 1 part in 130,000.
    """

    def __init__(self, *, percentiles=False):
        self._pieces, self._kept = [], 0
        self._count, self._sum = 0, 0.0
        self._percentiles, self._bins = percentiles, None

    def add(self, values):
        """One more piece, float64 [n]; positive or zero where percentiles are asked for."""
        self._pieces.append(values[~np.isnan(values)])
        self._kept += self._pieces[-1].size
        if self._kept > KEPT:
            self._fold()

    def _fold(self):
        values = self._joined()
        self._pieces, self._kept = [], 0
        self._count += values.size
        self._sum += float(values.sum())
        if self._percentiles:
            if self._bins is None:
                self._bins = np.zeros(_OCTAVES << _BITS, dtype=np.int64)
            places = np.clip((values.view(np.int64) >> (52 - _BITS)) - _lowest(), 0, self._bins.size - 1)
            low = int(places.min())
            found = np.bincount(places - low)
            self._bins[low : low + found.size] += found

    def _joined(self):
        return np.concatenate(self._pieces) if self._pieces else np.zeros(0)

    def sum(self):
        """Sum of all values."""
        return self._sum + float(self._joined().sum())

    def mean(self):
        """Their mean, NaN when there are none."""
        if self._count:
            return self.sum() / (self._count + self._kept)
        return float(self._joined().mean()) if self._kept else float("nan")

    def percentile(self, *shares):
        """The `shares` per cent percentiles, linear between neighbours; NaN when there are no values."""
        if not self._count:
            values = self._joined() if self._kept else np.array([np.nan])
            return [float(v) for v in np.percentile(values, shares)]
        if self._kept:
            self._fold()
        upto = np.cumsum(self._bins)
        out = []
        for share in shares:
            place = share / 100 * (self._count - 1)
            near, far = (int(np.searchsorted(upto, k, side="right")) for k in (int(place), int(np.ceil(place))))
            out.append(_middle(near) + (_middle(far) - _middle(near)) * (place - int(place)))
        return out


def _lowest():
    """The bin of the smallest value told apart, 2**-32, as the high bits of a double."""
    return (1023 - _OCTAVES // 2) << _BITS


def _middle(place):
    """The value in the middle of bin `place`."""
    bits = np.array([((place + _lowest()) << (52 - _BITS)) + (1 << (51 - _BITS))])
    return float(bits.view(np.float64)[0])
