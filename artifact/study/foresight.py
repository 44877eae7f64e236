"""What notebooks 02 and 03 show: the experiments of `prediction`, `fitting` and `shifts` under several selection
methods, averaged over prompts, beside what the paper printed.

Recorded traces in, tidy frames out. Intervals are 95 % over prompts (Student's t). Every number is of the small model
that was recorded; rows of origin `published` are the paper's and of other, larger models.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from artifact.models import registry, trace, weights
from artifact.models.trace import Trace
from artifact.prr import calibration, coverage, predictor
from artifact.study import fitting, paths, prediction, printed, recording, results, shifts
from artifact.study.scale import Scale

METHODS = (("quest", 16), ("quest", 64), ("infllm", 64))  # and tokens per block; the first is shown when only one is
MAIN = (METHODS[0], METHODS[-1])
AS = ["method", "page_tokens"]
PARTS = {  # what -> (with it, without it), each a predictor at |P| / |A|
    "level": (("no trend", None), ("last step", None)),
    "trend": (("calibrated", None), ("no trend", None)),
    "level and trend": (("calibrated", None), ("last step", None)),
    "calibration": (("calibrated", None), ("fixed theta", None)),
    "learned instead of EMA": (("learned", None), ("calibrated", None)),
    "larger P alone": (("last step", 1.5), ("last step", 1.0)),
    "larger P and EMA": (("calibrated", 1.5), ("last step", 1.0)),
}
_ENDS = ("", "_min", "_max")
PARTS_SHOWN = [*AS, "part", "predicted_ratio", "prompts_count", *(f"gain_frac{end}" for end in _ENDS),
               *(f"gain_forced_frac{end}" for end in _ENDS), "origin"]
COVERAGE_SHOWN = [*AS, "predictor", "predicted_ratio", "prompts_count", *(f"coverage_frac{end}" for end in _ENDS),
                  "coverage_forced_frac", "coverage_weighted_frac", "mass_predicted_frac", "mass_selected_frac",
                  "origin"]


def recordings(size: Scale, model: str = registry.OFFLINE) -> list[Trace]:
    """The traces of a model in data/traces that a scale uses, and of their layers the first ones: one prompt of each
    family before a second one."""
    folder = paths.data_dir() / "traces"
    lines = [line for line in trace.index(folder) if line["model"] == model]
    lines.sort(key=lambda line: (line["prompt"], line["family"]))
    if not lines:
        raise ValueError(f"{folder}: no traces of {model}; `make traces` records those of {registry.OFFLINE}")
    chosen = lines[: size.prediction_prompts]
    return [trace.read(folder / line["file"]).first(size.prediction_layers) for line in chosen]


def method(name: str = METHODS[0][0], page_tokens: int = METHODS[0][1]):
    """A method by its two columns; the first of `METHODS` when nothing is said."""
    return prediction.method(name, page=page_tokens)


def settings(recorded: Trace) -> pd.DataFrame:
    """What each method selects of the prompt at the first decode step: blocks, the budget, how many are forced."""
    rows, length = [], recorded.lengths()[:1]
    for name, page in METHODS:
        chosen = method(name, page)
        forced, budget = int(chosen.forced(length).sum()), chosen.budget_blocks
        rows.append({"method": name, "page_tokens": page, "length_tokens": int(length[0]),
                     "blocks_count": -(-int(length[0]) // page), "budget_count": budget, "forced_count": forced,
                     "dynamic_count": budget - forced, "attended_frac": budget * page / int(length[0])})
    return pd.DataFrame(rows).assign(origin="recorded")


def selections(recorded: Trace, layer: int, head: int, steps: int = 32) -> pd.DataFrame:
    """The blocks that one head attends to, step by step: again (the step before did, too), new, or forced.

    The step before the first is the prefill's last row.
    """
    part = prediction.steps(recorded, layer, method())
    before = coverage.ranks(part.before[-1:, head]) < part.picks[0]
    chosen = np.concatenate([before, coverage.selected(part)[:, head]])
    rows = [(t, int(block), "again" if chosen[t, block] else "new")
            for t in range(steps) for block in np.flatnonzero(chosen[t + 1])]
    rows += [(t, int(block), "forced") for t in range(steps) for block in np.flatnonzero(part.forced[t])]
    frame = pd.DataFrame(rows, columns=["step", "block", "kind"])
    return frame.assign(layer=layer, head=head, origin="recorded", **_named(recorded))


def overlaps(recorded: Sequence[Trace]) -> pd.DataFrame:
    """`prediction.locality` under every method: one row per method, prompt, layer and head."""
    return _each(lambda chosen: prediction.locality(recorded, chosen))


def overall(found: pd.DataFrame) -> pd.DataFrame:
    """Overlap by method over all prompts, without and with forced blocks, and that of random sets."""
    return prediction.over_prompts(found, AS).drop(columns=["random_frac_min", "random_frac_max"])


def locality(found: pd.DataFrame) -> pd.DataFrame:
    """Figure 3 and Table 5: overlap by prompt family, and below ours the paper's cells, told apart by origin."""
    ours = prediction.over_prompts(found.assign(of=found["family"]), [*AS, "model", "of"])
    ours = ours.rename(columns={"of": "family"})
    theirs = printed.cells(printed.overlap())
    return pd.concat([ours, theirs[["method", "model", "benchmark", "overlap_frac", "cell", "source", "origin"]]],
                     ignore_index=True)


def overlap_heads(found: pd.DataFrame) -> pd.DataFrame:
    """Overlap by method, layer and KV head."""
    return prediction.over_prompts(found, [*AS, "layer", "head"])


def curves(recorded: Sequence[Trace], seed: int) -> pd.DataFrame:
    """`prediction.curves` under every method: one row per method, prompt, layer, head, predictor and |P| / |A|."""
    return _each(lambda chosen: prediction.curves(recorded, chosen, seed=seed))


def by_size(found: pd.DataFrame) -> pd.DataFrame:
    """Coverage by method, predictor and |P| / |A|, over prompts; every way of counting it."""
    return prediction.over_prompts(found, [*AS, "predictor", "predicted_ratio"])


def models(size: Scale, shared: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """Overlap, and what the calibrated EMA and the last step cover at |P| = |A| and at 1.5 |A|, a row per method and
    model: what Tables 5 and 7 hold of the paper's models.

    `shared`, `found`: `overlaps` and `curves` of the shipped traces. A user's own traces of other models, recorded
    into data/traces, are added.
    """
    both = [(shared, found)]
    for model in sorted({line["model"] for line in trace.index(paths.data_dir() / "traces")} - {registry.OFFLINE}):
        others = recordings(size, model)
        both.append((overlaps(others), curves(others, size.seed)))
    out = []
    for one, two in both:
        row = prediction.over_prompts(one, [*AS, "model"])[[*AS, "model", "prompts_count", "overlap_frac"]]
        means = by_size(two).set_index([*AS, "predictor", "predicted_ratio"])["coverage_frac"]
        for column, by, ratio in (("last_step_frac", "last step", 1.0), ("coverage_frac", "calibrated", 1.0),
                                  ("last_step_larger_frac", "last step", 1.5),
                                  ("coverage_larger_frac", "calibrated", 1.5)):
            row[column] = [means[name, page, by, ratio] for name, page in row[AS].itertuples(index=False)]
        out.append(row)
    return pd.concat(out, ignore_index=True).assign(origin="recorded")


def heads(found: pd.DataFrame) -> pd.DataFrame:
    """`prediction.heads` under every method: which heads are predicted, which never."""
    groups = found.groupby(AS, sort=False)
    return pd.concat([prediction.heads(part).assign(method=name, page_tokens=page) for (name, page), part in groups],
                     ignore_index=True).pipe(_first)


def parts(found: pd.DataFrame) -> pd.DataFrame:
    """What each part of the predictor adds to coverage: differences within a prompt, then means and intervals.

    One row per method, part and |P| / |A| (that of the side with the part). "larger P alone" predicts the last step's
    best at 1.5 |A| instead of its set at |A|; "larger P and EMA" is what the paper's Table 7 sets against Table 5.
    """
    keys = [*AS, "family", "prompt"]
    values = {"gain_frac": "coverage_frac", "gain_forced_frac": "coverage_forced_frac",
              "gain_weighted_frac": "coverage_weighted_frac", "gain_mass_frac": "mass_predicted_frac"}
    prompts = found.groupby([*keys, "predictor", "predicted_ratio"], sort=False)[list(values.values())].mean()
    rows = []
    for what, ((name, ratio), (other, without)) in PARTS.items():
        for size in (1.0, 1.5) if ratio is None else (ratio,):
            one = prompts.xs((name, size), level=("predictor", "predicted_ratio"))
            two = prompts.xs((other, size if without is None else without), level=("predictor", "predicted_ratio"))
            gained = (one - two).rename(columns={old: new for new, old in values.items()}).reset_index()
            rows.append(gained.assign(part=what, predicted_ratio=size))
    return prediction.over_prompts(pd.concat(rows).assign(origin="recorded"), [*AS, "part", "predicted_ratio"])


def history(recorded: Trace, layer: int, head: int, block: int | None = None) -> pd.DataFrame:
    """One block's score at each decode step, with the level and the prediction that were made before it, and the
    lowest score that was still selected. `block`: None = of those not always selected, the one with the clearest
    trend over the steps."""
    part = prediction.steps(recorded, layer, method())
    chosen, theta = coverage.selected(part)[:, head], predictor.Theta(0.4, 0.3, 0.75)
    if block is None:
        known = np.isfinite(part.before[:, head]).all(0) & np.isfinite(part.scores[:, head]).all(0)
        values = np.where(known, part.scores[:, head], 0)
        values, time = values - values.mean(0), np.arange(len(values)) - (len(values) - 1) / 2
        clear = np.abs(time @ values) / np.sqrt((values**2).sum(0) + 1e-9)
        block = int(np.argmax(np.where(known & (np.abs(chosen.mean(0) - 0.5) < 0.3), clear, -1)))
    state, rows = predictor.begin(part.scores.shape[1:]), []
    for row in part.before:
        state = predictor.update(state, row, theta)
    for t, row in enumerate(part.scores):
        expected = predictor.predict(state, theta)
        least = np.where(chosen[t], row[head], np.inf).min()
        rows.append({"step": t, "block": block, "score": row[head, block], "level": state.level[head, block],
                     "prediction": expected[head, block], "least_selected": least})
        state = predictor.update(state, row, theta)
    return pd.DataFrame(rows).assign(layer=layer, head=head, alpha=theta.alpha, beta=theta.beta, gamma=theta.gamma,
                                     origin="recorded", **_named(recorded))


def grid(recorded: Trace, layer: int) -> pd.DataFrame:
    """Calibration's 80 candidates for one prompt and layer: objective on the prefill's rows, coverage afterwards."""
    chosen = method()
    part = prediction.steps(recorded, layer, chosen)
    fit = prediction.calibrated(part, prediction.weights_of(chosen))
    after = fitting.held_out(part, prediction.weights_of(chosen))
    rows = []
    for a, alpha in enumerate(calibration.ALPHAS):
        for b, beta in enumerate(calibration.BETAS):
            for g, gamma in enumerate(calibration.GAMMAS):
                rows.append({"alpha": alpha, "beta": beta, "gamma": gamma, "objective_frac": fit.objective[a, b, g],
                             "coverage_frac": after.hits[a, b, g] / after.wanted,
                             "chosen": fit.theta == (alpha, beta, gamma)})
    return pd.DataFrame(rows).assign(
        layer=layer, rows_count=len(part.before), blocks_count=part.before.shape[-1], budget_count=int(part.picks[0]),
        origin="recorded", **_named(recorded))


def fits(recorded: Sequence[Trace]) -> pd.DataFrame:
    """`fitting.fits` under every method: the theta of every prompt and layer."""
    return _each(lambda chosen: fitting.fits(recorded, chosen))


def rows(recorded: Sequence[Trace]) -> pd.DataFrame:
    """Sensitivity to the row budget, over prompts, by method and number of rows."""
    found = _each(lambda chosen: fitting.by_rows(recorded, chosen), MAIN)
    return prediction.over_prompts(found, [*AS, "rows_count"])


def choices(recorded: Sequence[Trace]) -> pd.DataFrame:
    """Calibrated theta against fixed ones and against the best in hindsight, at |P| = |A|, over prompts."""
    return prediction.over_prompts(_each(lambda chosen: fitting.thetas(recorded, chosen), MAIN), [*AS, "choice"])


def weighings(recorded: Sequence[Trace]) -> pd.DataFrame:
    """What may stand for IS in the objective, over prompts: the paper leaves it open."""
    return prediction.over_prompts(_each(lambda chosen: fitting.by_weights(recorded, chosen), MAIN), [*AS, "weights"])


def courses(recorded: Sequence[Trace], seed: int) -> pd.DataFrame:
    """Coverage step by step around both shifts, one row per prompt, predictor and step, at |P| = |A|, first method."""
    return _each(lambda chosen: pd.concat([shifts.courses(recorded, chosen, kind, seed=seed) for kind in shifts.KINDS],
                                          ignore_index=True), METHODS[:1])


def around(found: pd.DataFrame) -> pd.DataFrame:
    """`courses` over prompts, by step, from a little before the shift until all that recovers has."""
    near = found[found["step"].between(-8, 16)].drop(columns="coverage_weighted_frac")
    return prediction.over_prompts(near, [*AS, "kind", "predictor", "step"])


def recovery(found: pd.DataFrame) -> pd.DataFrame:
    """Coverage before and at the shift and steps to recover, per predictor."""
    return shifts.recovery(found, [*AS, "kind", "predictor"])


def learning(recorded: Sequence[Trace]) -> pd.DataFrame:
    """The learned predictor against the EMA: coverage, time to fit a layer, time of a prediction. Durations: this run.

    One row per predictor and layer of the first prompt, under the first method.
    """
    return fitting.learning(recorded[:1], method())


def scores(recorded: Trace, layer: int, head: int) -> pd.DataFrame:
    """All that one head's selection saw, for the explorer: a row per step and block, steps of the prefill below 0."""
    part = prediction.steps(recorded, layer, method())
    whole = np.concatenate([part.before, part.scores])[:, head]
    at, block = np.nonzero(~np.isneginf(whole))
    return pd.DataFrame({"step": at - len(part.before), "block": block, "score": whole[at, block],
                         "budget_count": int(part.picks[0])}).assign(layer=layer, head=head, origin="recorded",
                                                                     **_named(recorded))


def constitution(size: Scale) -> pd.DataFrame:
    """8K tokens of the US Constitution through the model itself, all of its layers: overlap, and the best that level
    and trend could do. One row per |P| / |A|; measured when all prompts are asked for and the weights are there
    (minutes), else the rows of our own recorded run.
    """
    whole = size.prediction_prompts >= len(prediction.shipped())
    try:
        weights.find(registry.OFFLINE, paths.data_dir() / "models")
    except ValueError:
        whole = False
    if not whole:
        path = paths.data_dir() / "recorded" / "full" / "02_locality" / "constitution.csv"
        return results.read(path).astype({"prompt": str}).assign(origin="recorded")
    return _deep(prediction.depth(recording.constitution())).assign(origin="measured")


def _deep(found: pd.DataFrame) -> pd.DataFrame:
    """`prediction.depth` over its layers."""
    groups = found.groupby(["model", "family", "prompt", "predicted_ratio"], sort=False)
    values = [column for column in found if column.endswith("_frac")]
    return groups[values].mean().assign(layers_count=groups.size()).reset_index()


def _each(compute: Callable[[object], pd.DataFrame], methods: Iterable[tuple[str, int]] = METHODS) -> pd.DataFrame:
    found = [compute(method(name, page)).assign(method=name, page_tokens=page) for name, page in methods]
    return pd.concat(found, ignore_index=True).pipe(_first)


def _first(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[[*AS, *frame.columns.drop(AS)]]


def _named(recorded: Trace) -> dict[str, str]:
    return prediction.label(recorded)
