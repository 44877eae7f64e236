"""The PRR paper's own numbers (arXiv 2606.30389) and what they add up to. They are published; none is measured here.

Its Table 5 is the overlap of adjacent steps and Table 7 the coverage of its predictor, each six models x five
benchmarks x two selection methods; Table 4 and Figure 3 are their rows of GLM-4-9B. `|P|` behind Table 7 is not given.
Table 8 is the speed-up over serial DSA of three stages of PRR; Table 1 is its last stage, Table 2 its rows of GLM-4-9B
with InfLLM-v2. Table 3 compares two kernels, in ratios alone; Table 6 and Figure 4 say how far a GPU's parts are used.
"""

from functools import cache

import pandas as pd

from artifact.study import paths, results

_ALL = "average"  # a row's printed mean over the benchmarks


def overlap() -> pd.DataFrame:
    """Table 5: a row for each cell, method, model and benchmark ("average" as printed)."""
    return _read("overlap")


def coverage(table: int = 7) -> pd.DataFrame:
    """Table 7, or Table 4, which repeats its rows of GLM-4-9B."""
    found = _read("coverage")
    return found[found["table"] == table].reset_index(drop=True)


def speedups(table: int = 8) -> pd.DataFrame:
    """Table 8: a row for each stage (S1, S2, S3 = PRR), method, model and benchmark; or Table 1 or 2."""
    found = _read("speedup")
    return found[found["table"] == table].reset_index(drop=True)


def kernels() -> pd.DataFrame:
    """Table 3: how much faster than FlashInfer's block-sparse attention the paper's kernel is, by block size and
    budget; on an H100, 32 query and 8 KV heads, 128K context."""
    return _read("kernels")


@cache
def kernel_mean() -> float:
    """How many times faster the paper's kernel is, mean of Table 3's cells."""
    return float(kernels()["speedup_ratio"].mean())


def utilization(table: str) -> pd.DataFrame:
    """Shares of the peak at which SMs, L2 and DRAM ran: table "6" by batch, or the authors' "profile" by stage, whose
    layers are Figure 4."""
    found = _read("utilization")
    return found[found["table"] == table].reset_index(drop=True)


def statements() -> pd.DataFrame:
    """Numbers that stand in the text and not in a table, by `statement`: value, unit, what is said, source."""
    return _read("statements").set_index("statement")


def items() -> pd.DataFrame:
    """Every figure and table of the paper: what it shows, and the notebook and key of what it became here."""
    return _read("items").drop(columns="source")


def costs() -> pd.DataFrame:
    """Appendix A.5: what calibration and one prediction took."""
    return _read("costs")


def cells(found: pd.DataFrame) -> pd.DataFrame:
    """The cells themselves, without the printed averages."""
    return found[found["benchmark"] != _ALL].reset_index(drop=True)


def averages(found: pd.DataFrame) -> pd.DataFrame:
    """The printed averages."""
    return found[found["benchmark"] == _ALL].reset_index(drop=True)


def wide(found: pd.DataFrame) -> pd.DataFrame:
    """A table as it is printed: a row per method and model, a column per benchmark."""
    (column,) = [name for name in found if name.endswith(("_frac", "_ratio"))]
    rows = found.pivot(index=["method", "model"], columns="benchmark", values=column)
    order = found.drop_duplicates(["method", "model"])
    rows = rows.loc[list(order[["method", "model"]].itertuples(index=False, name=None)), found["benchmark"].unique()]
    return rows.rename_axis(columns=None).reset_index().assign(origin="published")


def means() -> pd.DataFrame:
    """Mean, ends and outliers of Tables 5 and 7 by method, from their cells: one row per table and method, and for
    both methods together; also for GLM-4-9B alone.

    against_count: the cells that go against what the text says of all of them: an overlap above 0.7 (A.3), a
    coverage below 0.97 (A.7).
    """
    rows = []
    for table, column, found in ((5, "overlap_frac", overlap()), (7, "coverage_frac", coverage())):
        found = cells(found)
        groups = [(method, "all", part) for method, part in found.groupby("method", sort=False)]
        groups += [("both", "all", found)]
        groups += [("both", model, part) for model, part in found.groupby("model", sort=False) if "GLM-4" in model]
        for method, model, part in groups:
            values = part[column]
            against = values > 0.7 if table == 5 else values < 0.97
            rows.append({"table": str(table), "quantity": column.removesuffix("_frac"), "method": method,
                         "model": model, "cells_count": len(part), "mean_frac": values.mean(),
                         "lowest_frac": values.min(), "highest_frac": values.max(),
                         "against_count": int(against.sum())})
    return pd.DataFrame(rows).assign(origin="published")


def _read(name: str) -> pd.DataFrame:
    return results.read(paths.data_dir() / "published" / f"prr_{name}.csv").drop(columns="printed", errors="ignore")
