"""Where the PRR paper's published numbers disagree with each other, computed from the numbers themselves.

Each line holds one printed number against another, both with their source, and says what would settle it. A line is no
verdict: rounding, another set-up or a slip of the pen may be behind it, and the paper's idea does not hang on it.
"""

from decimal import Decimal
from functools import cache

import pandas as pd

from artifact.prr import budget, timeline
from artifact.study import latency, printed, stage_times

_CELLS = "Table 1, recomputed from its cells"
_EIGHT = "Table 8, recomputed from its cells"
_FIGURE = "Figure 2b, bar heights"
_PROFILE = "the authors' kernel profile (roofline/utilization.csv)"
COLUMNS = ("line", "item", "about", "one", "one_source", "other", "other_source", "unit", "agree", "settled_by",
           "origin")
_METHODS = (("quest", "Quest"), ("infllm", "InfLLM-v2"))


def lines() -> pd.DataFrame:
    """The audit: a row per pair of numbers. `one` is as printed; `other` is what it is held against, in the same unit;
    agree: whether `other` rounds to `one`, or lies on the side of it that the text says."""
    found = [*_step_shares(), *_headlines(), *_averages(), *_second_stage(), *_overlaps(), *_coverages(), *_saving(),
             *_utilizations(), *_profiles(), *_beyond_the_bound(), *_costlier(), *_window(), *_missing_bar()]
    rows = [{"line": f"{item}.{sum(earlier[0] == item for earlier in found[:i]) + 1}", **dict(zip(
        COLUMNS[1:], (item, *rest), strict=True))} for i, (item, *rest) in enumerate(found)]
    return pd.DataFrame(rows)


def counts(found: pd.DataFrame) -> pd.DataFrame:
    """How many lines each item has, and how many of them agree."""
    groups = found.groupby("item", sort=False)
    return pd.DataFrame({"lines_count": groups.size(), "agree_count": groups["agree"].sum().astype(int)}) \
        .reset_index().assign(origin="modelled")


def _line(item, about, said, other, source, settled_by, side="equal", digits=None, origin="published"):
    """One row: `said` a key of the statements, or (number, source, unit). side: what the text says of `other`."""
    one, one_source, unit = _said(said) if isinstance(said, str) else said
    if side == "equal":
        digits = max(0, -Decimal(f"{one:g}").as_tuple().exponent) if digits is None else digits
        agree = abs(other - one) <= 0.5 * 10.0**-digits + 1e-9
    else:
        agree = other > one if side == "above" else other < one
    return item, about, one, one_source, float(other), source, unit, bool(agree), settled_by, origin


def _said(key):
    row = printed.statements().loc[key]
    return float(row["value"]), row["source"].removeprefix("arXiv 2606.30389v1, "), row["unit"]


def _share(profile, method, context):
    found = _shares()
    found = found[(found["profile"] == profile) & (found["method"] == method) & (found["context_tokens"] == context)]
    return found.iloc[0]


@cache
def _shares():
    return latency.shares()


@cache
def _bounds():
    return latency.bound_ends(latency.bounds())


def _bound(profile, method, bound):
    found = _bounds()
    found = found[(found["profile"] == profile) & (found["method"] == method) & (found["bound"] == bound)]
    return found.iloc[0]


def _mean(method, stage="S3"):
    found = latency.speedup_means().set_index(["method", "model", "stage"])
    return found.loc[(method, "all", stage), "mean_ratio"]


def _step_shares():
    """1: a share of selection and a share of selection with attention."""
    short, long = (_share("figure2b", "infllm", context) for context in latency.ENDS)
    same = "which stages each share counts"
    yield _line("1", "InfLLM-v2 at 16K: selection and attention", "blog-share-16k", short["path_frac"], _FIGURE, same,
                digits=2)
    yield _line("1", "InfLLM-v2 at 512K: selection and attention", "blog-share-512k", long["path_frac"], _FIGURE, same,
                digits=2)
    yield _line("1", "InfLLM-v2 at 512K: selection alone", "selection-share", long["selection_frac"], _FIGURE, same,
                digits=2)
    yield _line("1", "InfLLM-v2 at 16K: selection and attention", "path-share-16k", short["path_frac"], _FIGURE, same,
                digits=1)


def _headlines():
    """2: means over all models, as the introduction, section 5.2 and the table give them."""
    for method, name in _METHODS:
        mean = _mean(method)
        settled = "over which cells each mean goes"
        yield _line("2", f"{name}: speed-up across models", f"intro-speedup-{method}", mean, _CELLS, settled, digits=2)
        yield _line("2", f"{name}: mean speed-up", f"mean-speedup-{method}", mean, _CELLS, settled, digits=2)


def _averages():
    """3: averages of the same cells, printed twice."""
    one, eight = (printed.averages(printed.speedups(table)) for table in (1, 8))
    both = one.merge(eight[eight["stage"] == "S3"], on=["method", "model"], suffixes=("", "_again"))
    for row in both[both["speedup_ratio"] != both["speedup_ratio_again"]].itertuples():
        yield _line("3", f"{row.model}, {row.method}: average of S3", (row.speedup_ratio, "Table 1", "ratio"),
                    row.speedup_ratio_again, "Table 8", "the cells with one digit more", digits=2)
    cell = eight.query("stage == 'S3' and method == 'infllm' and model == 'GLM-4-9B-1M'")["speedup_ratio"].item()
    yield _line("3", "GLM-4-9B-1M, infllm: average of S3", "s3-glm4-infllm", cell, "Tables 1, 2 and 8",
                "the cells with one digit more", digits=2)


def _second_stage():
    """4: what appendix A.8 says of S2 and what Table 8 prints."""
    found = printed.averages(printed.speedups())
    found = found[found["stage"] == "S2"].groupby("method")["speedup_ratio"]
    settled = "which models the range is of"
    low, high = found.min(), found.max()
    yield _line("4", "Quest, S2: lowest average of a model", "s2-quest", low["quest"], "Table 8", settled, digits=2)
    yield _line("4", "Quest, S2: highest average of a model", "s2-quest", high["quest"], "Table 8", settled, digits=2)
    yield _line("4", "InfLLM-v2, S2: lowest average", "s2-infllm-least", low["infllm"], "Table 8", settled, digits=2)
    yield _line("4", "InfLLM-v2, S2: highest average", "s2-infllm-most", high["infllm"], "Table 8", settled, digits=2)


def _overlaps():
    """5: limits and means of the overlap of adjacent steps."""
    cells = printed.cells(printed.overlap())
    values = cells["overlap_frac"]
    settled = "which models the sentence is about"
    yield _line("5", "highest overlap of a cell", "overlap-most", values.max(), "Table 5", settled, side="below")
    yield _line("5", "cells above 0.7", (0.0, "appendix A.3", "count"), (values > 0.7).sum(), "Table 5", settled)
    yield _line("5", "lowest overlap of a cell", "overlap-least", values.min(), "Table 5", settled, side="above")
    four = values[cells["model"] == "GLM-4-9B-1M"]
    yield _line("5", "lowest overlap, GLM-4-9B alone", "overlap-least", four.min(), "Table 5", settled, side="above")
    yield _line("5", "mean overlap, GLM-4-9B alone", "overlap-mean", four.mean(), "Table 5", settled, digits=2)
    yield _line("5", "mean overlap, all models", "overlap-mean", values.mean(), "Table 5", settled, digits=2)
    yield _line("5", "mean overlap, all models", "overlap-mean-a8", values.mean(), "Table 5", settled, digits=1)


def _coverages():
    """6: the least coverage."""
    values = printed.cells(printed.coverage())["coverage_frac"]
    settled = "a correction of the sentence, or of three cells"
    yield _line("6", "lowest coverage of a cell", "coverage-least", values.min(), "Table 7", settled, side="above")
    yield _line("6", "cells below 0.97", (0.0, "appendix A.7", "count"), (values < 0.97).sum(), "Table 7", settled)


def _saving():
    """7: the most latency saved."""
    best = printed.cells(printed.speedups(1))["speedup_ratio"].max()
    yield _line("7", "most latency saved in a cell", "latency-saved", 1 - 1 / best, f"Table 1: 1 − 1 / {best:g}",
                "nothing: it is rounded up", digits=2)


def _utilizations():
    """8: utilisation below 40 %, and at batch 1 against larger batches."""
    found = latency.utilization()
    layers, batches = (found[found["table"] == table] for table in ("profile", "6"))
    parts = [f"{part}_frac" for part in ("sm", "l2", "dram")]
    settled = "all batches profiled in one way, with one back-end"
    yield _line("8", "highest of SM, L2 and DRAM, batch 1", "utilization-most", layers[parts].max(axis=None), _PROFILE,
                settled, side="below")
    yield _line("8", "highest of SM, L2 and DRAM, batch 2 to 16", "utilization-most", batches[parts].max(axis=None),
                "Table 6", settled, side="below")
    for method, name in _METHODS:
        one = layers[(layers["method"] == method) & (layers["context_tokens"] == latency.AT)]["sm_frac"].item()
        most = batches[batches["method"] == method]["sm_frac"].max()
        yield _line("8", f"{name}, 128K: SM at batch 1, and the most at a larger batch",
                    (one, _PROFILE, "fraction"), most, "Table 6", settled, side="above")


def _profiles():
    """9: shares of selection and attention in Figure 2b and in the kernel profile, and what hiding attention gives."""
    settled = "one step timed as a CUDA graph, and what else the host does in it"
    for method, name in _METHODS:
        for context in latency.ENDS:
            theirs, kernels = (_share(profile, method, context) for profile in ("figure2b", "nsight"))
            for part in ("selection", "attention"):
                yield _line("9", f"{name}, {context // 1024}K: share of {part}",
                            (theirs[f"{part}_frac"], _FIGURE, "fraction"), kernels[f"{part}_frac"], _PROFILE, settled,
                            digits=2)
        yield _line("9", f"{name}: mean speed-up, and the most if attention took no time",
                    (_mean(method), _CELLS, "ratio"), _bound("nsight", method, "hidden")["most_ratio"], _PROFILE,
                    settled, side="above", origin="modelled")


def _beyond_the_bound():
    """11: cells of Table 1 above what Figure 2b allows."""
    settled = "context lengths and stage times of these runs"
    for method, name in _METHODS:
        bound = _bound("figure2b", method, "hidden")["most_ratio"]
        cells = printed.cells(printed.speedups(1)).query("method == @method")["speedup_ratio"]
        yield _line("11", f"{name}: highest cell, and the bound with attention wholly hidden",
                    (cells.max(), "Table 1", "ratio"), bound, f"{_FIGURE}, 16K", settled, side="above",
                    origin="modelled")
        yield _line("11", f"{name}: cells above that bound, to the printed digits", (0.0, "the bound itself", "count"),
                    (cells > round(bound, 2)).sum(), "Table 1", settled, origin="modelled")


def _costlier():
    """12: whose attention takes longer."""
    times = {method: stage_times.stages(stage_times.read("figure2b"), method, latency.AT).attention
             for method, _ in _METHODS}
    yield _line("12", "attention of InfLLM-v2 / of Quest", "infllm-attention", times["infllm"] / times["quest"],
                _FIGURE, "both attention stages at the budgets used", side="above")


def _window():
    """13: what fits into selection's window with serial DSA's kernel, and S1 if |P| = |A| does not."""
    found, settled = stage_times.read("figure2b"), "delta, and the time of speculation alone"
    for method, name in _METHODS:
        fits = budget.fit(stage_times.profile(found, method, kernel_ratio=1.0)).answer(latency.ENDS[0]).ratio
        yield _line("13", f"{name}, 16K: coverage with FlashInfer's kernel, and the most it can be: the |P| / |A| that "
                          "fits if time goes with |P|", "ema-coverage", fits, _FIGURE, settled, side="above",
                    origin="modelled")
    for method, name in _METHODS:
        stages = stage_times.stages(found, method, latency.ENDS[0])
        serial, first = (timeline.latency(timeline.step(stages, way, missed=1.0)) for way in ("serial", "recompute"))
        yield _line("13", f"{name}, 16K: S1, and S1 by the timeline if |P| = |A|",
                    (_mean(method, "S1"), _EIGHT, "ratio"), serial / first, f"{_FIGURE}, modelled", settled, digits=2,
                    origin="modelled")


def _missing_bar():
    """The bar that the ablation lacks: serial DSA with the faster kernel, no overlap. S2 is said to be more than it."""
    for profile, source in (("figure2b", _FIGURE), ("nsight", _PROFILE)):
        for method, name in _METHODS:
            row = _bound(profile, method, "fast")
            for end, where in (("first", "16K"), ("last", "512K")):
                yield _line("bar", f"{name}: S2, and serial DSA with a kernel twice as fast, {where}",
                            (_mean(method, "S2"), _EIGHT, "ratio"), row[f"{end}_ratio"], f"{source}, modelled",
                            "serial DSA with the faster kernel, in the ablation", side="below", origin="modelled")
