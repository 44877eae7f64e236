"""Where a decode step's time goes and what overlapping can save: one function per experiment of notebooks 01, 05, 06.

All of it follows from stage times (`stage_times`), published or timed on a GPU, and from how much of A was foreseen:
the paper's tables, or our recorded traces. Speed-ups are over serial DSA with the same stage times.
"""

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from artifact.models import registry
from artifact.prr import budget, timeline
from artifact.prr.timeline import Contention
from artifact.study import experiments, paths, printed, results, stage_times
from artifact.study.stage_times import Timed

AT = 131072  # tokens, where one context stands for all
ENDS = (16384, 524288)  # the shortest and the longest context that the paper timed
TWICE = 2.0  # a kernel so many times faster, where only "a faster kernel" is meant
FIXED = (0.0, 0.5)  # shares of attention's time that the number of blocks does not change: nobody has printed one
INTENSITY = (1, 2, 4, 8)  # how much further compute outgrows bandwidth, in the authors' projection
HAMPERED = (0.0, 0.1, 0.25, 0.5, 1.0)
MOST = 2.0  # |P| / |A| up to which our traces' coverage was counted
_TABLE8 = {"S1": "S1", "S2": "S2", "S3": "PRR, union"}  # as the ways of `gpu_profile` are called
_STEPS = ("model", "method", "context_tokens", "way", "predicted_ratio", "coverage_frac", "time_us")
_PAGES = {"quest": 16, "infllm": 64}  # of the recorded traces


def files() -> list[Timed]:
    """All stage times that are there, the published ones first."""
    found = [stage_times.read(name) for name in stage_times.names()]
    return sorted(found, key=lambda one: (one.manifest.origin != "published", one.name))


def dataflow() -> pd.DataFrame:
    """What Figure 2a says in numbers: one row, GLM-4-9B with Quest at `AT`, and the overlap of adjacent steps."""
    one = stage_times.stages(stage_times.read("figure2b"), "quest", AT)
    shared = printed.averages(printed.overlap()).query("method == 'quest' and model == 'GLM-4-9B-1M'")
    serial = timeline.latency(timeline.step(one, "serial"))
    return pd.DataFrame([{"model": "GLM-4-9B-1M", "method": "quest", "context_tokens": AT,
                          "selection_frac": one.selection / serial, "attention_frac": one.attention / serial,
                          "after_frac": one.after / serial, "overlap_frac": shared["overlap_frac"].item(),
                          "source": "Figure 2b and Table 5", "origin": "published"}])


def stages() -> pd.DataFrame:
    """Every stage of every file, with its share of the step: Figure 2b and the kernel profile."""
    rows = []
    for found, method, context in _each():
        one = stage_times.stages(found, method, context)
        times = {"qkv": one.before, "selection": one.selection, "attention": one.attention, "ffn": one.after}
        whole = sum(times.values())
        rows += [{"profile": found.name, "per": found.manifest.per, "method": method, "context_tokens": context,
                  "stage": stage, "time_us": time, "share_frac": time / whole, "origin": found.manifest.origin}
                 for stage, time in times.items() if time]
    return pd.DataFrame(rows)


def shares() -> pd.DataFrame:
    """Selection, attention and both as shares of the step, by file, method and context."""
    wide = stages().pivot(index=["profile", "method", "context_tokens"], columns="stage", values="share_frac")
    wide = wide.loc[list(dict.fromkeys((found.name, method, context) for found, method, context in _each()))]
    return pd.DataFrame({"selection_frac": wide["selection"], "attention_frac": wide["attention"],
                         "path_frac": wide["selection"] + wide["attention"]}).reset_index().assign(origin="modelled")


def bounds() -> pd.DataFrame:
    """The most that each of three things could speed a step up: attention over exactly A beside selection with the same
    kernel (overlap); attention that takes no time (hidden); no overlap, but a kernel twice as fast (fast) or as much
    faster as the mean of Table 3 (table3)."""
    rows = []
    for found, method, context in _each():
        one = stage_times.stages(found, method, context, kernel_ratio=TWICE)
        third = stage_times.stages(found, method, context)
        serial, least = timeline.latency(timeline.step(one, "serial")), timeline.bounds(one)
        fast, table3 = (timeline.latency(timeline.step(stages, "fast")) for stages in (one, third))
        rows.append({"profile": found.name, "method": method, "context_tokens": context, "serial_us": serial,
                     "overlap_ratio": serial / least.overlap, "hidden_ratio": serial / least.hidden,
                     "fast_ratio": serial / fast, "table3_ratio": serial / table3})
    return pd.DataFrame(rows).assign(origin="modelled")


def bound_ends(found: pd.DataFrame) -> pd.DataFrame:
    """`bounds` at the shortest context, the longest, and where it is highest: a row per file, method and bound."""
    rows = []
    for (profile, method), part in found.groupby(["profile", "method"], sort=False):
        part = part.set_index("context_tokens")
        for bound in ("overlap", "hidden", "fast", "table3"):
            values = part[f"{bound}_ratio"]
            rows.append({"profile": profile, "method": method, "bound": bound, "first_ratio": values.iloc[0],
                         "last_ratio": values.iloc[-1], "most_ratio": values.max(),
                         "most_at_tokens": int(values.idxmax())})
    return pd.DataFrame(rows).assign(origin="modelled")


def utilization() -> pd.DataFrame:
    """Figure 4 and Table 6: how far SMs, L2 and DRAM are used, by context at batch 1 and by batch; whole layers."""
    layers = printed.utilization("profile").query("stage == 'layer'")
    return pd.concat([layers, printed.utilization("6")], ignore_index=True).drop(columns=["stage"])


def stage_utilization() -> pd.DataFrame:
    """The same by stage in the profile: lowest and highest over contexts."""
    found = printed.utilization("profile").query("stage != 'layer'")
    groups = found.groupby(["method", "stage"], sort=False)
    parts = {f"{part}_frac_{end}": getattr(groups[f"{part}_frac"], end)()
             for part in ("sm", "l2", "dram") for end in ("min", "max")}
    return pd.DataFrame(parts).reset_index().assign(origin="published")


def projection() -> pd.DataFrame:
    """The authors' roofline projection: compute grows k times faster than bandwidth, so SMs are used 1/k as much.

    It takes the mean SM throughput of the profile's layers for the share of the SMs that is busy, as they do.
    """
    layers = printed.utilization("profile").query("stage == 'layer'")
    used = layers["sm_frac"].mean()
    return pd.DataFrame([{"intensity_ratio": float(k), "sm_used_frac": used / k, "sm_idle_frac": 1 - used / k,
                          "dram_frac": layers["dram_frac"].mean() if k == 1 else np.nan}
                         for k in INTENSITY]).assign(origin="modelled")


# --- the budget

def deltas() -> pd.DataFrame:
    """delta by context: the largest |P| / |A| that fits into selection, for each file, method, kernel and fixed share.

    A file that has no speculation is completed from its attention, by the kernel of serial DSA or by one as fast as
    Table 3's mean; delta is then what follows from these assumptions, and not the paper's, which is not printed.
    """
    rows = []
    for found, method in _methods():
        whole = stage_times.modelled(found)
        kernels = ((1.0, "serial DSA's"), (printed.kernel_mean(), "PRR's")) if whole else ((1.0, "PRR's"),)
        for (ratio, kernel), fixed in itertools.product(kernels, FIXED if whole else (0.0,)):
            fitted = budget.fit(stage_times.profile(found, method, ratio, fixed))
            for context in fitted.profile.contexts:
                answer = fitted.answer(context)
                rows.append({"profile": found.name, "method": method, "kernel": kernel, "fixed_frac": fixed,
                             "context_tokens": context, "predicted_ratio": answer.ratio, "window_us": answer.selection,
                             "speculation_us": answer.speculation, "limit": answer.limit})
    return pd.DataFrame(rows).assign(origin="modelled")


def delta_table(found: pd.DataFrame) -> pd.DataFrame:
    """`deltas` as a table: a column per context."""
    index = ["profile", "method", "kernel", "fixed_frac"]
    wide = found.pivot(index=index, columns="context_tokens", values="predicted_ratio")
    wide = wide.loc[list(dict.fromkeys(found[index].itertuples(index=False, name=None)))]
    wide.columns = [f"{context // 1024}K" for context in wide.columns]
    return wide.reset_index().assign(origin="modelled")


def fits() -> pd.DataFrame:
    """Which degree describes each time best, and how far off left-out points are predicted: a row per degree tried in
    the context, with the ratio's degree that goes best with it."""
    rows = [{"profile": found.name, "method": method} | tried for found, method in _methods()
            for tried in _degrees(budget.fit(stage_times.profile(found, method)))]
    return pd.DataFrame(rows).assign(origin="modelled")


def extrapolated(longest: int = 65536) -> pd.DataFrame:
    """Each file's times past `longest` from a fit to those up to it, as if nothing longer had been profiled."""
    rows = []
    for found, method in _methods():
        for context, predicted, timed, *_ in budget.extrapolation(stage_times.profile(found, method), longest):
            rows.append({"profile": found.name, "method": method, "stage": "selection", "fitted_to_tokens": longest,
                         "context_tokens": context, "predicted_us": predicted, "timed_us": timed,
                         "error_frac": predicted / timed - 1})
    return pd.DataFrame(rows).assign(origin="modelled")


def covered(method: str, ratio: float, predictor: str = "calibrated") -> float:
    """How much of A the predictor covers with |P| = ratio · |A|: recorded traces of a small model, on the line between
    the sizes that were counted; nothing at 0. ValueError above the largest size."""
    return float(timeline.at(_curve(method, predictor), ratio, "|P| / |A|"))


def three_budgets(profile: str = "figure2b", method: str = "quest", context: int = ENDS[0]) -> pd.DataFrame:
    """Figure 5 from stage times: a layer whose delta is too small, too large, and what fits. One row per stage.

    Coverage is our recorded traces'; the kernel is as fast as Table 3's mean.
    """
    found = stage_times.read(profile)
    stages = stage_times.stages(found, method, context)
    right = budget.fit(stage_times.profile(found, method)).answer(context).ratio
    rows = []
    for place, (name, ratio) in enumerate((("too small", 0.5), ("too large", MOST), ("fits", right))):
        step = timeline.step(stages, "repair", ratio, 1 - covered(method, ratio))
        rows += _events(name, step, stages, predicted_ratio=ratio, order_index=place)
    return pd.DataFrame(rows).assign(profile=profile, method=method, context_tokens=context, origin="modelled")


def tradeoff(profile: str = "figure2b") -> pd.DataFrame:
    """Speed-up against delta at the shortest, a middle and the longest context; `chosen`: delta is the budget's."""
    found, rows = stage_times.read(profile), []
    for method in found.times:
        fitted = budget.fit(stage_times.profile(found, method))
        for context in (ENDS[0], AT, ENDS[1]):
            stages = stage_times.stages(found, method, context)
            serial, right = timeline.latency(timeline.step(stages, "serial")), fitted.answer(context).ratio
            for ratio in sorted({*(i / 20 for i in range(10, 41)), right}):
                missed = 1 - covered(method, ratio)
                took = timeline.latency(timeline.step(stages, "repair", ratio, missed))
                rows.append({"profile": profile, "method": method, "context_tokens": context, "predicted_ratio": ratio,
                             "missed_frac": missed, "speedup_ratio": serial / took, "chosen": ratio == right})
    return pd.DataFrame(rows).assign(origin="modelled")


# --- the running step

def teaser(profile: str = "figure2b", method: str = "infllm", context: int = AT) -> pd.DataFrame:
    """Figure 1 from stage times: serial DSA and PRR, with Table 7's coverage of GLM-4-9B. One row per stage."""
    stages = stage_times.stages(stage_times.read(profile), method, context)
    ratio = budget.fit(stage_times.profile(stage_times.read(profile), method)).answer(context).ratio
    missed = 1 - _hit(_printed_coverage(method), ratio)
    rows = _events("serial DSA", timeline.step(stages, "serial"), stages, predicted_ratio=np.nan, order_index=0)
    rows += _events("PRR", timeline.step(stages, "repair", ratio, missed), stages, predicted_ratio=ratio, order_index=1)
    return pd.DataFrame(rows).assign(profile=profile, method=method, context_tokens=context, origin="modelled")


def speedup_means() -> pd.DataFrame:
    """Mean and ends of speed-ups: Table 8, with Table 1 as its last stage, over the 30 cells of a method and stage;
    Table 2, over its benchmarks; Table 3, over all of its cells (stage "kernel")."""
    cells = printed.cells(printed.speedups()).assign(of="all")
    two = printed.cells(printed.speedups(2)).assign(of="GLM-4-9B-1M")
    kernel = printed.kernels().assign(method="both", stage="kernel", of="all")
    groups = pd.concat([cells, two, kernel]).groupby(["method", "of", "stage"], sort=False)["speedup_ratio"]
    return pd.DataFrame({"cells_count": groups.size(), "mean_ratio": groups.mean(), "lowest_ratio": groups.min(),
                         "highest_ratio": groups.max()}).reset_index().rename(columns={"of": "model"}) \
        .assign(origin="published")


def table1() -> pd.DataFrame:
    """Table 1 as printed."""
    return printed.wide(printed.speedups(1))


def table8(table: int = 8) -> pd.DataFrame:
    """Table 8, or 2, as printed: a row per method, model and stage."""
    found = printed.speedups(table)
    parts = [printed.wide(part).assign(stage=stage) for stage, part in found.groupby("stage", sort=False)]
    whole = pd.concat(parts, ignore_index=True)
    order = {key: i for i, key in enumerate(dict.fromkeys(zip(found["method"], found["model"], strict=True)))}
    whole["order"] = [order[key] for key in zip(whole["method"], whole["model"], strict=True)]
    whole = whole.sort_values(["order", "stage"], kind="stable").drop(columns="order").reset_index(drop=True)
    return whole[["method", "model", "stage", *found["benchmark"].unique(), "origin"]]


def table3() -> pd.DataFrame:
    """Table 3 as printed: a row per block size, a column per token budget, and the mean of each row."""
    found = printed.kernels()
    wide = found.pivot(index="block_tokens", columns="budget_tokens", values="speedup_ratio")
    wide.columns = [f"{budget} tokens" for budget in wide.columns]
    return wide.assign(mean_ratio=wide.mean(axis=1)).reset_index().assign(origin="published")


def table6() -> pd.DataFrame:
    """Table 6 as printed, as fractions."""
    return printed.utilization("6").drop(columns=["table", "stage", "cell", "source"])


def baselines() -> pd.DataFrame:
    """What PRR is to be compared with, as far as stage times can say: one row per file, method, context and baseline.

    basis: whose coverage the row takes. "paper": GLM-4-9B's Tables 5 and 7. "traces": our recorded traces of a small
    model. "none": it takes none. Speculation is given the delta of the budget, or |P| = |A| where that is the point.
    """
    rows = []
    for found, method in _methods():
        fitted = budget.fit(stage_times.profile(found, method))
        reused, foreseen = _printed_overlap(method), _printed_coverage(method)
        for context in stage_times.contexts(found, method):
            stages = stage_times.stages(found, method, context)
            right = min(fitted.answer(context).ratio, MOST)
            serial = timeline.latency(timeline.step(stages, "serial"))
            for name, basis, way, ratio, hit in (
                    ("serial DSA", "none", "serial", 1.0, 1.0), ("serial DSA, faster kernel", "none", "fast", 1.0, 1.0),
                    ("S1: reuse, or all again", "paper", "recompute", 1.0, reused),
                    ("S2: reuse and repair", "paper", "repair", 1.0, reused),
                    ("S3: PRR", "paper", "repair", right, _hit(foreseen, right)),
                    ("last step's set, PRR's size", "traces", "repair", right, covered(method, right, "last step")),
                    ("EMA, fixed θ", "traces", "repair", right, covered(method, right, "fixed theta")),
                    ("EMA, calibrated: PRR", "traces", "repair", right, covered(method, right)),
                    ("random set, PRR's size", "traces", "repair", right, covered(method, right, "random")),
                    ("oracle: P = A", "none", "repair", 1.0, 1.0), ("no repair: P alone", "none", "reuse", right, 1.0)):
                took = timeline.latency(timeline.step(stages, way, ratio, 1 - hit))
                rows.append(_row(found, method, context, name, basis, ratio, hit, serial, took))
            larger = right + 1 - _hit(foreseen, right)  # |A ∪ P|: select that many and attend to them in turn
            if larger > stages.speculation[-1][0]:
                continue  # more than was timed
            took = serial - stages.attention + timeline.at(stages.speculation, larger, "speculation")
            rows.append(_row(found, method, context, "serial DSA, budget |A ∪ P|", "paper", larger, 1.0, serial, took))
    whole = pd.DataFrame(rows)
    return whole.assign(order_index=pd.factorize(whole["baseline"])[0], origin="modelled")


def gpu_steps(folder: Path | None = None) -> pd.DataFrame:
    """Whole layers as they ran on a GPU, beside the paper's ablation: S1 to S3 of Table 8, a row per model and method,
    and every way of the files steps_*.csv of a folder (None: data/stage_times). Speed-ups are over serial DSA or, where
    that has no time, over DSA with the faster kernel (`against`). ValueError for a file without the columns of one.

    Rows of ours are `measured`, as their file says, and there are none until somebody has run `artifact gpu profile`.
    chosen: of several files of one model the first. S1 takes this artifact's kernel here, FlashInfer's in the paper.
    """
    theirs = printed.averages(printed.speedups(8))
    rows = [{"model": row.model, "method": row.method, "way": _TABLE8[row.stage], "context_tokens": np.nan,
             "predicted_ratio": np.nan, "coverage_frac": np.nan, "against": "serial DSA",
             "speedup_ratio": row.speedup_ratio, "profile": "Table 8", "chosen": True, "origin": "published"}
            for row in theirs.itertuples()]
    first: dict[str, str] = {}
    folder = paths.data_dir() / "stage_times" if folder is None else folder
    for path in sorted(folder.glob("steps_*.csv")):
        found = results.read(path)
        lacking = [column for column in _STEPS if column not in found]
        if lacking:
            raise ValueError(f"{path}: no column {lacking[0]!r}; needed: {', '.join(_STEPS)}")
        for (model, method, context), part in found.groupby(["model", "method", "context_tokens"], sort=False):
            times = part.set_index("way")["time_us"]
            against = "serial DSA" if times.get("serial DSA", np.nan) > 0 else "serial DSA, faster kernel"
            rows += [{"model": model, "method": method, "way": row.way, "context_tokens": context,
                      "predicted_ratio": row.predicted_ratio, "coverage_frac": row.coverage_frac, "against": against,
                      "speedup_ratio": times[against] / row.time_us, "profile": path.stem,
                      "chosen": first.setdefault(model, path.stem) == path.stem, "origin": row.origin}
                     for row in part.itertuples() if row.time_us > 0]
    return pd.DataFrame(rows)


def contention() -> pd.DataFrame:
    """PRR's speed-up when selection and speculation slow each other down alike, by how much; Table 7's coverage."""
    rows = []
    for found, method in _methods():
        fitted = budget.fit(stage_times.profile(found, method))
        for context in sorted({ENDS[0], AT, ENDS[1]} & set(fitted.profile.contexts)):
            stages = stage_times.stages(found, method, context)
            serial = timeline.latency(timeline.step(stages, "serial"))
            right = fitted.answer(context).ratio
            step = timeline.step(stages, "repair", right, 1 - _hit(_printed_coverage(method), right))
            rows += [{"profile": found.name, "method": method, "context_tokens": context, "contention_frac": slow,
                      "speedup_ratio": serial / timeline.latency(step, Contention(slow, slow))} for slow in HAMPERED]
    return pd.DataFrame(rows).assign(origin="modelled")


def contention_table(found: pd.DataFrame) -> pd.DataFrame:
    """`contention` as a table: a column per slow-down."""
    index = ["profile", "method", "context_tokens"]
    wide = found.pivot(index=index, columns="contention_frac", values="speedup_ratio")
    wide = wide.loc[list(dict.fromkeys(found[index].itertuples(index=False, name=None)))]
    wide.columns = [f"slower by {slow:g}" for slow in wide.columns]
    return wide.reset_index().assign(origin="modelled")


def cells() -> pd.DataFrame:
    """Six models × five benchmarks × two methods, from whatever is there: a row per cell and basis.

    basis "printed": Table 1. "published stages", "our stages": PRR by the timeline of a model's stage times at one
    context, with Table 7's coverage of the cell, or with our own of a model whose traces are there ("our traces", the
    mean over prompts). Only models that somebody has timed have rows of the latter kinds; of several files of our own
    for one model the first counts.
    """
    rows = [{"method": row.method, "model": row.model, "benchmark": row.benchmark, "basis": "printed",
             "context_tokens": np.nan, "coverage_frac": np.nan, "speedup_ratio": row.speedup_ratio,
             "profile": "Table 1", "origin": "published"} for row in printed.speedups(1).itertuples()]
    theirs = printed.coverage().set_index(["method", "model", "benchmark"])["coverage_frac"]
    traced = experiments.recorded("03_predictor", "models.csv")
    traced = traced[traced["model"].isin(registry.PAPER) & traced["coverage_larger_frac"].notna()
                    & (traced["origin"] != "published")]
    own = set()
    for found, method in _methods():
        model = found.rows["model"].iloc[0]
        basis = "published stages" if found.manifest.origin == "published" else "our stages"
        if basis == "our stages" and (method, model) in own:
            continue
        own |= {(method, model)} if basis == "our stages" else set()
        fitted = budget.fit(stage_times.profile(found, method))
        foreseen = [(benchmark, basis, theirs[method, model, benchmark]) for benchmark in
                    theirs[method].loc[model].index] if model in registry.PAPER else []
        foreseen += [("average", "our traces", row.coverage_larger_frac) for row in traced.itertuples()
                     if (row.method, row.model) == (method, model)]
        for (benchmark, basis_, hit), context in itertools.product(
                foreseen, sorted({ENDS[0], AT, ENDS[1]} & set(fitted.profile.contexts))):
            stages = stage_times.stages(found, method, context)
            serial = timeline.latency(timeline.step(stages, "serial"))
            right = fitted.answer(context).ratio
            step = timeline.step(stages, "repair", right, 1 - _hit(hit, right))
            rows.append({"method": method, "model": model, "benchmark": benchmark, "basis": basis_,
                         "context_tokens": context, "coverage_frac": _hit(hit, right),
                         "speedup_ratio": serial / timeline.latency(step), "profile": found.name,
                         "origin": "modelled"})
    return pd.DataFrame(rows)


def cell_table(found: pd.DataFrame) -> pd.DataFrame:
    """`cells` as a table: a row per method, model, basis and context, a column per benchmark."""
    found = found.assign(at=["–" if pd.isna(context) else f"{context / 1024:.0f}K"
                             for context in found["context_tokens"]])
    index = ["method", "model", "basis", "profile", "at", "origin"]
    wide = found.pivot(index=index, columns="benchmark", values="speedup_ratio")[list(found["benchmark"].unique())]
    keys = sorted(dict.fromkeys(found[index].itertuples(index=False, name=None)),
                  key=lambda key: (list(found["method"].unique()).index(key[0]),
                                   list(found["model"].unique()).index(key[1])))
    wide = wide.loc[keys].rename_axis(columns=None).reset_index()
    return wide[[*wide.columns.drop("origin"), "origin"]]


def budget_of(source: str, method: str, contexts: tuple[int, ...] = (), *, far: bool = False,
              kernel: float | None = None, fixed: float = 0.0,
              **wanted: object) -> tuple[dict, list[dict], list[dict]]:
    """What `artifact prr budget` says of a file of stage times: facts, delta at each context (none given: all that were
    timed), and the degrees tried. `wanted`: what the profile must be of, as in `Profile.require`."""
    found = stage_times.read(source)
    profile = stage_times.profile(found, method, kernel, fixed)
    profile.require(**wanted)
    fitted = budget.fit(profile)
    answers = [fitted.answer(context, far=far) for context in contexts or profile.contexts]
    said = _about(found, method, kernel, fixed) | {
        "page_tokens": profile.page_tokens, "budget_count": profile.budget_count,
        "longest_tokens": profile.contexts[-1],
        "selection_degree": fitted.selection.degrees[0], "speculation_degree": fitted.speculation.degrees[0],
        "speculation_ratio_degree": fitted.speculation.degrees[1]}
    deltas = [{"context_tokens": one.context, "predicted_ratio": one.ratio, "selection_us": one.selection,
               "speculation_us": one.speculation, "limit": one.limit, "beyond": one.beyond} for one in answers]
    return said, deltas, _degrees(fitted)


def timeline_of(source: str, method: str, context: int, *, ratio: float | None = None, coverage: float | None = None,
                slower: tuple[float, float] = (0.0, 0.0), kernel: float | None = None,
                fixed: float = 0.0) -> tuple[dict, list[dict], list[dict]]:
    """What `artifact prr timeline` says of one context: facts and bounds, the latency of every way to run the step, and
    PRR's schedule. `ratio`: None = the budget's; `coverage`: None = GLM-4-9B's average in Table 7."""
    found, contention = stage_times.read(source), Contention(*slower)
    stages = stage_times.stages(found, method, context, kernel, fixed)
    if ratio is None:
        ratio = budget.fit(stage_times.profile(found, method, kernel, fixed)).answer(context).ratio
    hit = _hit(_printed_coverage(method), ratio) if coverage is None else coverage
    least, serial = timeline.bounds(stages), timeline.latency(timeline.step(stages, "serial"))
    said = _about(found, method, kernel, fixed) | {
        "context_tokens": context, "predicted_ratio": ratio, "coverage_frac": hit,
        "contention_selection_frac": contention.selection, "contention_speculation_frac": contention.speculation,
        "overlap_bound_ratio": serial / least.overlap, "hidden_bound_ratio": serial / least.hidden}
    ways = []
    for way in timeline.WAYS:
        size = 1.0 if way == "recompute" else ratio  # S1 takes the last step's set
        took = timeline.latency(timeline.step(stages, way, size, 1 - hit), contention)
        ways.append({"way": way, "latency_us": took, "speedup_ratio": serial / took})
    events = timeline.schedule([timeline.step(stages, "repair", ratio, 1 - hit)], contention)
    return said, ways, [event._asdict() for event in events]


def _degrees(fitted):
    """For both stages, per degree tried in the context: the ratio's degree that goes best with it, and its error."""
    rows = []
    for stage, surface in (("selection", fitted.selection), ("speculation", fitted.speculation)):
        for degree in sorted({tried for tried, _ in surface.errors}):
            error, other = min((round(error, 6), pair[1]) for pair, error in surface.errors.items()
                               if pair[0] == degree)
            chosen = degree == surface.degrees[0]
            if chosen:  # the lowest that is as good as the best
                other, error = surface.degrees[1], surface.errors[surface.degrees]
            rows.append({"stage": stage, "degree": degree, "ratio_degree": other, "left_out_us": round(error, 6),
                         "chosen": chosen})
    return rows


def _about(found, method, kernel, fixed):
    told = {"stages": found.name, "device": found.manifest.device, "model": str(found.rows["model"].iloc[0]),
            "method": method, "per": found.manifest.per, "stages_origin": found.manifest.origin, "origin": "modelled"}
    if stage_times.modelled(found):
        told |= {"kernel_ratio": printed.kernel_mean() if kernel is None else kernel, "fixed_frac": fixed}
    return told


def _each():
    """Every file, method and context."""
    return [(found, method, context) for found, method in _methods() for context in stage_times.contexts(found, method)]


def _methods():
    return [(found, method) for found in files() for method in found.times]


@cache
def _curve(method, predictor):
    found = experiments.recorded("03_predictor", "coverage.csv")
    found = found[(found["method"] == method) & (found["page_tokens"] == _PAGES[method])
                  & (found["predictor"] == predictor)].sort_values("predicted_ratio")
    return ((0.0, 0.0), *zip(found["predicted_ratio"], found["coverage_frac"], strict=True))


def _events(name, step, stages, **more):
    serial = timeline.latency(timeline.step(stages, "serial"))
    return [{"way": name, "stage": event.stage, "stream": event.stream, "start_us": event.start_us,
             "end_us": event.end_us, "speedup_ratio": serial / timeline.latency(step), **more}
            for event in timeline.schedule([step])]


def _row(found, method, context, name, basis, ratio, hit, serial, took):
    return {"profile": found.name, "method": method, "context_tokens": context, "baseline": name, "basis": basis,
            "predicted_ratio": ratio, "coverage_frac": hit, "latency_us": took, "speedup_ratio": serial / took}


def _hit(foreseen, ratio):
    """Coverage of a P of that size: it cannot cover more than it holds."""
    return min(foreseen, ratio)


def _printed_overlap(method):
    return _average(printed.overlap(), method, "overlap_frac")


def _printed_coverage(method):
    return _average(printed.coverage(), method, "coverage_frac")


def _average(found, method, column):
    """GLM-4-9B's average, the only model whose stage times are published."""
    rows = printed.averages(found)
    return float(rows[(rows["method"] == method) & (rows["model"] == "GLM-4-9B-1M")][column].item())
