"""Arenas: the same fields in Python and in compiled code, in place, and nothing that compiled code could misread."""

from typing import NamedTuple

import numpy as np
import pytest

from artifact.arena import Arena
from artifact.compiled import compiled

RECORD = np.dtype([("low", np.int64), ("high", np.float64)])


class Fields(NamedTuple):
    """Every kind of field: numbers, one and two dimensions, records, nothing."""

    count: int
    flat: np.ndarray
    table: np.ndarray
    records: np.ndarray
    none: np.ndarray


def _fields(rows=3):
    return Fields(7, np.arange(5, dtype=np.int32), np.arange(rows * 4, dtype=np.uint64).reshape(rows, 4),
                  np.zeros(2, dtype=RECORD), np.zeros((0, 3)))


@compiled
def _touch(arena):
    arena.flat[1] += arena.count
    arena.table[arena.table.shape[0] - 1, 3] = 99
    record = arena.records[1]
    record.low += 5
    record.high = 0.5
    return arena.count + arena.flat.size + arena.none.shape[0]


def test_compiled_code_writes_where_python_reads():
    for rows in (3, 8):  # another shape is no other type
        fields = _fields(rows)
        arena = Arena(fields)
        assert _touch(arena) == 12
        assert arena.count == 7 and arena.flat[1] == fields.flat[1] == 8
        assert arena.table[rows - 1, 3] == 99
        assert tuple(arena.records[1]) == (5, 0.5)
    assert len(_touch.signatures) == 1


@pytest.mark.parametrize(("change", "complaint"), [
    ({"count": 1.5}, "count is 1.5; allowed: an array or a whole number"),
    ({"flat": [1, 2]}, r"flat is \[1, 2\]"),
    ({"table": np.zeros((4, 6))[:, ::2]}, r"table is an array with strides \(48, 16\); allowed: C-contiguous"),
])
def test_other_fields_are_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        Arena(_fields()._replace(**change))
