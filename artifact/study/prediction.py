"""What notebooks 02 and 03 compute from decode traces: one function per experiment, traces in, tidy frame out.

A prompt counts once: its heads, layers and steps are averaged first, and intervals are over prompts. Layers that a
method leaves dense are left out.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from artifact.models import trace as traces_
from artifact.models.trace import Trace
from artifact.prr import baselines, calibration, coverage, predictor
from artifact.prr.calibration import weights_of
from artifact.prr.coverage import Steps
from artifact.prr.predictor import Theta
from artifact.study import paths

RATIOS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
METHODS = ("quest", "infllm")
_FAMILY = ["family", "prompt"]
# two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
            2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


def shipped() -> list[Path]:
    """The traces that come with the artifact, in order. ValueError when there are none."""
    folder = paths.data_dir() / "traces"
    files = [folder / line["file"] for line in traces_.index(folder)]
    if not files:
        raise ValueError(f"{folder}: no traces; `make traces` records them, or name a trace file")
    return files


def method(name: str = "quest", *, page: int | None = None, budget: int | None = None, group: str = "mean"):
    """A selection method: `page` tokens per block (16 or 64; 64 for infllm), `budget` blocks with the forced ones.

    Defaults are for prompts of 4K tokens: 64 pages of 16, or 24 blocks of 64 of which a third are local, as 32 of
    InfLLM-v2's own 96 are, and no prompt is too short for selection. ValueError for anything else.
    """
    from artifact.dsa.infllm import InfLLM
    from artifact.dsa.quest import Quest

    if name not in METHODS:
        raise ValueError(f"method is {name!r}; allowed: {', '.join(METHODS)}")
    allowed = (16, 64) if name == "quest" else (64,)
    page = allowed[0] if page is None else page
    if page not in allowed:
        raise ValueError(f"page is {page}; allowed for {name}: {', '.join(map(str, allowed))} tokens")
    if budget is None:
        budget = 24 if page == 64 else 64
    if budget < 1:
        raise ValueError(f"budget is {budget}; allowed: at least 1 block")
    if name == "quest":
        return Quest(page=page, budget_blocks=budget, group=group)
    return InfLLM(block=page, local=budget // 3, topk=budget - budget // 3, dense_len=-1)


def steps(recorded: Trace, layer: int, chosen) -> Steps:
    """The layer's steps under a selection method; ValueError when its budget does not suit them."""
    check_budget(recorded, chosen)
    parts = {}
    for part in ("prefill", "decode"):
        scores = recorded.scores(chosen, layer, part)
        forced = chosen.forced(recorded.lengths(part)).numpy()
        hidden = forced[:, None, : scores.shape[2]]
        scores[..., : hidden.shape[2]][np.broadcast_to(hidden, (*scores.shape[:2], hidden.shape[2]))] = -np.inf
        parts[part] = predictor.clean(scores), forced
    if not recorded.rows.size or recorded.rows[-1] != recorded.tokens - 1:
        raise ValueError("the trace has no prefill rows up to the prompt's end; record it with --rows")
    scores, forced = parts["decode"]
    blocks = scores.shape[-1]
    mass = recorded.mass[list(recorded.layers).index(layer)].astype(np.float32)
    folded = mass.shape[-1] // blocks
    mass = mass[..., : blocks * folded].reshape(*mass.shape[:2], blocks, folded).sum(-1)
    return Steps(parts["prefill"][0], scores, chosen.budget_blocks - forced.sum(-1), forced, mass)


def check_budget(recorded: Trace, chosen) -> None:
    """ValueError unless the budget lets every step select something beside its forced blocks, and leave something."""
    lengths, budget = recorded.lengths(), chosen.budget_blocks
    blocks = -(-int(lengths[0]) // (chosen.page if hasattr(chosen, "page") else chosen.block))
    if budget >= blocks:
        raise ValueError(f"budget is {budget}; allowed: at most {blocks - 1} of the prompt's {blocks} blocks")
    forced = int(chosen.forced(lengths).sum(-1).max())
    if budget <= forced:
        raise ValueError(f"budget is {budget}; allowed: at least {forced + 1} blocks, as {forced} are always attended")


def layers(recorded: Trace, chosen) -> list[int]:
    """The trace's layers in which the method selects at every step. ValueError when there are none."""
    check_budget(recorded, chosen)
    sparse = [int(layer) for layer in recorded.layers if not chosen.dense(int(layer), recorded.lengths()).any()]
    if not sparse:
        raise ValueError(f"{recorded.family} {recorded.prompt}: the method leaves all of its layers dense: "
                         f"{', '.join(map(str, recorded.layers))}")
    return sparse


def every(recordings: Iterable[Trace], chosen) -> Iterator[tuple[Trace, int, Steps]]:
    """Trace, layer and steps of all that select."""
    for recorded in recordings:
        for layer in layers(recorded, chosen):
            yield recorded, layer, steps(recorded, layer, chosen)


def calibrated(part: Steps, weights: str, **given) -> calibration.Calibration:
    """The layer's theta from its prefill rows."""
    return calibration.calibrate(part.before, int(part.picks[0]), weights=weights, **given)


def without_trend(fit: calibration.Calibration) -> Theta:
    """The best candidate with gamma = 0."""
    best = np.argmax(fit.objective[:, 0, 0])
    return Theta(calibration.ALPHAS[best], calibration.BETAS[0], 0)


def theta(text: str) -> Theta:
    """`0.2,0.5,0.25` as alpha, beta, gamma; ValueError for other text or numbers outside the paper's ranges."""
    try:
        alpha, beta, gamma = (float(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"theta is {text!r}; allowed: three numbers, as 0.2,0.5,0.25") from None
    return Theta(alpha, beta, gamma)


def predictions(part: Steps, weights: str, seed: int = 0, theta: Theta | None = None) -> dict[str, np.ndarray]:
    """Every predictor's prediction of every step, fp32 [T, G, N]; `theta` adds the EMA with one of the caller's."""
    fit = calibrated(part, weights)
    given = {} if theta is None else {"given theta": baselines.ema(part, theta)}
    return given | {
        "last step": baselines.last_step(part),
        "calibrated": baselines.ema(part, fit.theta),
        "no trend": baselines.ema(part, without_trend(fit)),
        "fixed theta": baselines.ema(part, baselines.FIXED),
        "learned": baselines.learned(part, baselines.learn(part)),
        "static frequency": baselines.frequency(part),
        "random": baselines.random(part, np.random.default_rng(seed)),
        "oracle": baselines.oracle(part),
    }


def locality(recordings: Iterable[Trace], chosen) -> pd.DataFrame:
    """Blocks that adjacent steps share (Figure 3, Table 5): one row per prompt, layer and head."""
    rows = []
    for recorded, layer, part in every(recordings, chosen):
        dynamic, whole = coverage.overlap(part)
        able = (~np.isneginf(part.scores)).sum(-1)
        for head in range(recorded.kv_heads):
            rows.append(label(recorded) | {
                "layer": layer, "head": head, "steps_count": recorded.steps - 1,
                "overlap_frac": np.nanmean(dynamic[:, head]), "overlap_forced_frac": np.nanmean(whole[:, head]),
                "random_frac": np.mean(part.picks / able[:, head]),
            })
    return pd.DataFrame(rows).assign(origin="recorded")


def curves(recordings: Iterable[Trace], chosen, ratios: Sequence[float] = RATIOS, seed: int = 0,
           theta: Theta | None = None) -> pd.DataFrame:
    """Coverage by predictor and |P| / |A|: one row per prompt, layer and head (Table 7's quantity)."""
    rows = []
    for recorded, layer, part in every(recordings, chosen):
        weights = weights_of(chosen)
        actual = coverage.selected_mass(part).mean(0)
        for name, prediction in predictions(part, weights, seed, theta).items():
            found = coverage.measure(part, prediction, tuple(ratios), weights)
            means = [_mean(values) for values in found]
            for x, head in itertools.product(range(len(ratios)), range(recorded.kv_heads)):
                dynamic, forced, weighted, mass = (values[x, head] for values in means)
                rows.append(label(recorded) | {
                    "layer": layer, "head": head, "predictor": name, "predicted_ratio": float(ratios[x]),
                    "coverage_frac": dynamic, "coverage_forced_frac": forced, "coverage_weighted_frac": weighted,
                    "mass_predicted_frac": mass, "mass_selected_frac": actual[head],
                })
    return pd.DataFrame(rows).assign(origin="recorded")


def heads(found: pd.DataFrame) -> pd.DataFrame:
    """Which heads are predicted, from the rows of `curves` at |P| = |A|: one row per layer and head.

    skill = (calibrated - random) / (1 - random): 0 is chance, 1 is all. A head predicts when its skill is at least a
    half in some prompt; one that never does is better left without speculation.
    """
    equal = found[found["predicted_ratio"] == 1]
    wide = equal.pivot_table(index=["layer", "head", *_FAMILY], columns="predictor", values="coverage_frac")
    skill = (wide["calibrated"] - wide["random"]) / (1 - wide["random"])
    table = pd.DataFrame({
        "coverage_frac": wide["calibrated"], "last_step_frac": wide["last step"], "random_frac": wide["random"],
        "gain_frac": wide["calibrated"] - wide["last step"], "skill_frac": skill,
    })
    groups = table.groupby(["layer", "head"])
    out = groups.mean().assign(skill_frac_min=groups["skill_frac"].min(), skill_frac_max=groups["skill_frac"].max())
    out["predicts"] = out["skill_frac_max"] >= 0.5
    out.insert(0, "prompts_count", groups.size())
    return out.reset_index().assign(origin="recorded")


def depth(recorded: Trace, budget: int = 64, skip: int = 8) -> pd.DataFrame:
    """Every layer of one long recording, by Quest's group maximum over the prompt's pages of 16 alone: what a small
    model's overlap is, and what level and trend add to it.

    Nothing is forced, and theta is the best of the grid on the same steps, so this bounds the predictor from above.
    One row per layer and |P| / |A|; the first `skip` steps only bring the state up.
    """
    chosen, pages = method("quest", budget=budget, group="max"), recorded.tokens // 16
    rows = []
    for layer in recorded.layers:
        scores = predictor.clean(recorded.scores(chosen, int(layer))[..., :pages])
        nothing = np.zeros(scores.shape, np.float32)
        part = Steps(scores[:1], scores, np.full(len(scores), budget), nothing[:, 0] > 0, nothing)
        overlap = float(np.nanmean(coverage.overlap(part)[0]))
        for ratio in (1.0, 1.5):
            grid = calibration.calibrate(scores, budget, ratio=ratio, skip=skip)
            hits = grid.hits / grid.wanted
            last = coverage.measure(part, baselines.last_step(part), (ratio,)).dynamic[0, skip:]
            rows.append(label(recorded) | {
                "layer": int(layer), "predicted_ratio": ratio, "overlap_frac": overlap,
                "last_step_frac": float(np.nanmean(last)), "best_frac": float(hits.max()),
                "no_trend_frac": float(hits[:, 0, 0].max()), "worst_frac": float(hits.min()),
            })
    return pd.DataFrame(rows).assign(origin="recorded")


def over_prompts(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Means over prompts of every `_frac` column, grouped by `by`, with n and the 95 % interval (Student's t).

    Columns X_frac, X_frac_min, X_frac_max (the interval's ends; empty for one prompt) and prompts_count.
    """
    values = [column for column in frame if column.endswith("_frac")]
    prompts = frame.groupby([*by, *_FAMILY], sort=False)[values].mean()
    groups = prompts.groupby(list(by), sort=False)
    mean, spread, count = groups.mean(), groups.std(), groups.size()
    half = spread.mul([_student(n) / np.sqrt(n) for n in count], axis=0)
    out = pd.DataFrame({"prompts_count": count})
    for column in values:
        out[column] = mean[column]
        out[f"{column}_min"], out[f"{column}_max"] = mean[column] - half[column], mean[column] + half[column]
    return out.reset_index().assign(origin=frame["origin"].iloc[0])


def _student(count):
    return np.nan if count < 2 else _STUDENT[count - 2] if count - 2 < len(_STUDENT) else 1.96


def label(recorded: Trace) -> dict[str, str]:
    """The columns that say which prompt a row is about."""
    return {"model": recorded.model, "family": recorded.family, "prompt": recorded.prompt}


def _mean(values):
    """Mean over steps of [X, T, G], NaN where no step counts."""
    counted = ~np.isnan(values)
    return np.where(counted, values, 0).sum(1) / np.where(counted.any(1), counted.sum(1), np.nan)
