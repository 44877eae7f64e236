"""What calibration finds, what it is worth and what it costs: rows, weights, fixed thetas, a learned predictor."""

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from artifact import ops
from artifact.models.trace import Trace
from artifact.prr import baselines, calibration, coverage, predictor
from artifact.prr.calibration import Calibration
from artifact.prr.coverage import Steps
from artifact.prr.predictor import Theta
from artifact.study import prediction

ROWS = (4, 8, 16, 32, 64)


def fits(recordings: Iterable[Trace], chosen, *, ratio: float = 1.0, rows: int | None = None) -> pd.DataFrame:
    """The theta of every prompt and layer, and what it covers of the decode steps that followed.

    objective: Eq. 4 on the prefill's rows, of the winner and of the worst candidate. coverage: |P and A| / |A| of the
    decode steps, of the winner and of the best candidate in hindsight.
    """
    out = []
    for recorded, layer, part in prediction.every(recordings, chosen):
        weights = prediction.weights_of(chosen)
        fit = prediction.calibrated(part, weights, ratio=ratio, rows=rows)
        after = held_out(part, weights, ratio)
        out.append(prediction.label(recorded) | {"layer": layer} | _row(fit, after) | {
            "worst_objective_frac": float(fit.objective.min()), "predicted_ratio": ratio,
        })
    return pd.DataFrame(out).assign(origin="recorded")


def by_rows(recordings: Iterable[Trace], chosen, rows: Sequence[int] = ROWS) -> pd.DataFrame:
    """Sensitivity to the row budget: theta, objective and coverage of the decode steps from the last so many rows."""
    out = []
    for recorded, layer, part in prediction.every(recordings, chosen):
        weights = prediction.weights_of(chosen)
        after = held_out(part, weights)
        for count in rows:
            if count <= len(part.before):
                fit = prediction.calibrated(part, weights, rows=count)
                out.append(prediction.label(recorded) | {"layer": layer, "rows_count": count} | _row(fit, after))
    return pd.DataFrame(out).assign(origin="recorded")


def by_weights(recordings: Iterable[Trace], chosen) -> pd.DataFrame:
    """What stands for IS in Eq. 4, which the paper leaves open: each choice's theta and its coverage afterwards.

    "raw" stands only where no score of the prefill's rows is negative.
    """
    out = []
    for recorded, layer, part in prediction.every(recordings, chosen):
        after = held_out(part, prediction.weights_of(chosen))
        signed = (part.before[np.isfinite(part.before)] < 0).any()
        for weights in calibration.WEIGHTS:
            if not (weights == "raw" and signed):
                fit = prediction.calibrated(part, weights)
                out.append(prediction.label(recorded) | {"layer": layer, "weights": weights} | _row(fit, after))
    return pd.DataFrame(out).assign(origin="recorded")


def thetas(recordings: Iterable[Trace], chosen) -> pd.DataFrame:
    """Calibrated against fixed theta: coverage of the decode steps at |P| = |A|, one row per prompt, layer and choice.

    "other prompts'" is the candidate that the other prompts' calibrations of the layer like best on average; "best"
    and "worst in hindsight" are picked on the steps themselves.
    """
    weights, found = prediction.weights_of(chosen), []
    for recorded, layer, part in prediction.every(recordings, chosen):
        last = coverage.measure(part, baselines.last_step(part), (1.0,), weights).dynamic
        found.append((recorded, layer, prediction.calibrated(part, weights), held_out(part, weights), np.nanmean(last)))
    out = []
    for recorded, layer, fit, after, last in found:
        hits = after.hits / after.wanted
        others = [f.objective for r, at, f, _, _ in found if at == layer and r is not recorded]
        choices = {
            "calibrated": hits[_place(fit.theta)], "middle of the grid": hits[_place(baselines.FIXED)],
            "no trend": hits[_place(prediction.without_trend(fit))], "best in hindsight": hits.max(),
            "best without trend in hindsight": hits[:, 0, 0].max(), "worst in hindsight": hits.min(),
            "last step": last,
        }
        if others:
            best = np.unravel_index(np.mean(others, axis=0).argmax(), calibration.SHAPE)
            choices["other prompts'"] = hits[best]
        out += [prediction.label(recorded) | {"layer": layer, "choice": name, "coverage_frac": float(value)}
                for name, value in choices.items()]
    return pd.DataFrame(out).assign(origin="recorded")


def held_out(part: Steps, weights: str, ratio: float = 1.0) -> Calibration:
    """The whole grid on the decode steps, its states brought up by the prefill's rows."""
    rows = np.concatenate([part.before, part.scores])
    return calibration.calibrate(rows, int(part.picks[0]), ratio=ratio, skip=len(part.before), weights=weights)


def learning(recordings: Iterable[Trace], chosen) -> pd.DataFrame:
    """The learned predictor against the EMA: coverage at |P| = |A|, time to fit a layer, time of one prediction.

    One row per prompt, layer and predictor. Fitting: the learned one's ridge regression, the EMA's 80 candidates.
    A prediction: all that is computed of a step's scores until the next one's blocks are known.
    """
    out = []
    for recorded, layer, part in prediction.every(recordings, chosen):
        weights, picks = prediction.weights_of(chosen), int(part.picks[0])
        fit, learnt = prediction.calibrated(part, weights), baselines.learn(part)
        state = predictor.update(predictor.begin(part.scores.shape[1:]), part.before[-1], fit.theta)
        known = baselines.features(part.before, picks)[-1]

        def by_ema(part=part, state=state, fit=fit, picks=picks):
            ops.topk(predictor.predict(predictor.update(state, part.scores[0], fit.theta), fit.theta), picks)

        def by_learning(part=part, known=known, learnt=learnt, picks=picks):
            baselines.features(part.scores[:1], picks)
            ops.topk(known @ learnt.astype(np.float32), picks)

        for name, guess, work, step in (
            ("ema", baselines.ema(part, fit.theta), lambda p=part, w=weights: prediction.calibrated(p, w), by_ema),
            ("learned", baselines.learned(part, learnt), lambda p=part: baselines.learn(p), by_learning),
        ):
            found = coverage.measure(part, guess, (1.0,), weights).dynamic
            out.append(prediction.label(recorded) | {
                "layer": layer, "predictor": name, "coverage_frac": float(np.nanmean(found)),
                "fit_ms": shortest(work, 3) * 1e3, "prediction_us": shortest(step, 20) * 1e6,
            })
    return pd.DataFrame(out).assign(origin="measured")


def cost(rows: Sequence[int] = (64, 256), blocks: Sequence[int] = (256, 1024), heads: int = 4, budget: int = 96,
         layers: int = 40, rounds: int = 5) -> pd.DataFrame:
    """Calibration's cost on this machine's one core, beside the paper's (appendix A.5: GLM-4-9B's 40 layers, 4 heads).

    `blocks` of 64 tokens: 256 are 16K, 1024 are 64K. layer_ms: one layer's 80 candidates, the exposed tail; whole_ms:
    all layers; prediction_ms: one step's prediction of a layer and its top `budget`.
    """
    out = []
    for count in blocks:
        scores = like_a_trace(max(rows), heads, count)
        state, theta = predictor.EmaState(scores[0], np.zeros_like(scores[0])), Theta(0.2, 0.5, 0.25)
        one = shortest(lambda s=state, t=theta: ops.topk(predictor.predict(s, t), budget), 50) * 1e3
        for used in rows:
            layer = shortest(lambda s=scores, n=used: calibration.calibrate(s, budget, rows=n), rounds) * 1e3
            out.append({"context_tokens": count * 64, "rows_count": used, "layer_ms": layer, "whole_ms": layer * layers,
                        "prediction_ms": one, "origin": "measured", "source": ""})
    paper = {16384: (0.06, 2.4), 65536: (0.28, 11.2)}
    out += [{"context_tokens": tokens, "rows_count": None, "layer_ms": tail, "whole_ms": whole, "prediction_ms": 0.01,
             "origin": "published", "source": "arXiv 2606.30389, appendix A.5"}
            for tokens, (tail, whole) in paper.items() if tokens // 64 in blocks]
    return pd.DataFrame(out).astype({"rows_count": "Int64"})


def like_a_trace(rows: int, heads: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Scores [rows, heads, blocks] whose neighbours in time are about as alike as a model's, fp32."""
    draw = np.random.default_rng(seed)
    base, slow = draw.normal(size=(2, heads, blocks))
    out = np.empty((rows, heads, blocks), np.float32)
    for row in out:
        slow = 0.95 * slow + np.sqrt(1 - 0.95**2) * draw.normal(size=slow.shape)
        row[:] = base + 0.7 * slow + 0.35 * draw.normal(size=slow.shape)
    return out


def shortest(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of `rounds` calls, after one that warms up."""
    work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _place(theta):
    return tuple(axis.index(value) for axis, value in zip(
        (calibration.ALPHAS, calibration.BETAS, calibration.GAMMAS), theta, strict=True))


def _row(fit, after):
    hits = after.hits / after.wanted
    return {
        "alpha": fit.theta.alpha, "beta": fit.theta.beta, "gamma": fit.theta.gamma,
        "objective_frac": float(fit.objective.max()), "coverage_frac": float(hits[_place(fit.theta)]),
        "best_coverage_frac": float(hits.max()),
    }
