"""Two results, or two folders of them, value by value within a tolerance."""

from pathlib import Path

import pandas as pd

from artifact.study import results

COLUMNS = ("file", "row", "column", "a", "b", "relative", "what")
_APART = ("figures", "tables", "report", "cells")  # derived from results, or no results


def compare(a: Path, b: Path, rtol: float = 1e-9, atol: float = 0.0) -> tuple[pd.DataFrame, int, int]:
    """Differences between `a` and `b`, both result CSVs or both folders of them; with the files and values compared.

    Numbers are equal when |a - b| <= atol + rtol |b|, and when both are missing; text must be the same. `origin` may
    differ (a recorded run against a simulated one) and timings are left out. Rows are paired by their settings (text
    and plain columns) where these tell rows apart, else by position. A frame of `COLUMNS`, empty when all agree.
    Raises ValueError for a path that is neither, a mix of the two, an unreadable CSV or a tolerance below 0.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must be 0 or more")
    a, b = Path(a), Path(b)
    for path in (a, b):
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    if a.is_dir() != b.is_dir():
        raise ValueError(f"{a} and {b}: one is a folder and one a file; give two result CSVs or two folders")
    left, right = (_files(path) if path.is_dir() else {a.name: path} for path in (a, b))
    rows: list[tuple] = []
    values = 0
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            rows.append((name, "", "", name in left, name in right, None, "file only on one side"))
            continue
        found, count = _frames(results.read(left[name]), results.read(right[name]), rtol, atol)
        rows += [(name, *row) for row in found]
        values += count
    return pd.DataFrame(rows, columns=COLUMNS), len(left.keys() | right.keys()), values


def _files(folder: Path) -> dict[str, Path]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.csv")
             if not path.name.startswith(".") and not path.name.endswith(results.TIMING)
             and path.name != "verdicts.csv" and not set(_APART) & set(path.relative_to(folder).parts)}
    if not found:
        raise ValueError(f"{folder}: no result CSV in it")
    return found


def _frames(a: pd.DataFrame, b: pd.DataFrame, rtol: float, atol: float) -> tuple[list[tuple], int]:
    rows = [("", column, column in a, column in b, None, "column only on one side")
            for column in [*a.columns.difference(b.columns), *b.columns.difference(a.columns)]]
    shared = [column for column in a.columns if column in b and column != "origin"]
    keys = [column for column in shared if _is_key(a, column) and _is_key(b, column)]
    a, b = a[shared], b[shared]
    if keys and not a.duplicated(keys).any() and not b.duplicated(keys).any():
        varying = [key for key in keys if pd.concat([a[key], b[key]]).nunique(dropna=False) > 1] or keys[:1]
        a, b = (frame.set_index(pd.Index(_labels(frame[varying]))) for frame in (a, b))
    for label in [*a.index.difference(b.index), *b.index.difference(a.index)]:
        rows.append((label, "", label in a.index, label in b.index, None, "row only on one side"))
    index = a.index.intersection(b.index, sort=False)
    a, b = a.loc[index], b.loc[index]
    for column in shared:
        rows += _values(a[column], b[column], rtol, atol)
    return rows, len(index) * len(shared)


def _values(a: pd.Series, b: pd.Series, rtol: float, atol: float) -> list[tuple]:
    both_missing = a.isna() & b.isna()
    if all(pd.api.types.is_numeric_dtype(s) for s in (a, b)):
        a, b = a.astype(float), b.astype(float)
        same = both_missing | (a == b) | ((a - b).abs() <= atol + rtol * b.abs())
        relative = (a - b).abs() / b.abs()
    else:
        same = both_missing | (a.astype(object) == b.astype(object))
        relative = pd.Series(None, index=a.index, dtype=object)
    return [(label, a.name, a[label], b[label], relative[label], "value") for label in a.index[~same]]


def _is_key(frame: pd.DataFrame, column: str) -> bool:
    """Whether a column says which row it is rather than what came out: text, settings, sizes asked for in tokens."""
    if not pd.api.types.is_numeric_dtype(frame[column]) or column in results.SETTINGS or column == "requests_count":
        return True
    return results.unit(column) == "tokens" and bool((frame[column].dropna() % 1 == 0).all())


def _labels(keys: pd.DataFrame) -> list[str]:
    """One label a row: `steady, paged, block_tokens 16`."""
    return [", ".join(value if isinstance(value, str) else f"no {name}" if pd.isna(value) else f"{name} {value:g}"
                      for name, value in zip(keys.columns, row, strict=True))
            for row in keys.itertuples(index=False, name=None)]
