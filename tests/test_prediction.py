"""From traces to frames: steps as a method sees them, every experiment, the two verbs and what they refuse."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from test_calibration import trace_like

from artifact.models import trace
from artifact.prr import calibration, coverage
from artifact.prr.predictor import Theta
from artifact.study import bench, fitting, prediction, results, shifts

TOKENS, STEPS, ROWS, LAYERS, GROUP = 321, 24, 20, (3, 11), 3


def recording(seed=0, family="needle"):
    """A small trace of smoothly moving queries over random keys; every array as a recording would have it."""
    draw = np.random.default_rng(seed)
    kv_heads, dim, total = 2, 8, TOKENS + STEPS
    made = {name: [] for name in ("q_prefill", "q_decode", "page_min", "page_max", "page_mean", "mass")}
    for _ in LAYERS:
        keys = draw.normal(size=(kv_heads, total, dim)) + np.repeat(draw.normal(size=(kv_heads, total // 16 + 1, dim)),
                                                                    16, axis=1)[:, :total]
        walk = trace_like(rows=ROWS + STEPS, heads=kv_heads * GROUP, blocks=dim, seed=seed + 1)
        paged = keys[:, : total // 16 * 16].reshape(kv_heads, -1, 16, dim)
        mass = np.zeros((STEPS, kv_heads, paged.shape[1]))
        for t, q in enumerate(walk[ROWS:]):
            logits = np.einsum("ghd,gnd->ghn", q.reshape(kv_heads, GROUP, dim), keys[:, : TOKENS + t + 1]) / dim**0.5
            weight = np.exp(logits - logits.max(-1, keepdims=True))
            weight = (weight / weight.sum(-1, keepdims=True)).mean(1)
            padded = np.pad(weight, ((0, 0), (0, total - weight.shape[1])))[:, : total // 16 * 16]
            mass[t] = padded.reshape(kv_heads, -1, 16).sum(-1)
        values = (walk[:ROWS], walk[ROWS:], paged.min(2), paged.max(2), paged.mean(2), mass)
        for name, value in zip(made, values, strict=True):
            made[name].append(value)
    return trace.Trace(
        model="SmolLM2-135M", family=family, prompt=str(seed), decoding="greedy", layers=np.array(LAYERS, np.int32),
        tokens=TOKENS, rows=np.arange(TOKENS - ROWS, TOKENS, dtype=np.int32), generated=np.zeros(STEPS, np.int32),
        **{name: np.stack(value).astype(np.float16) for name, value in made.items()},
    )


@pytest.fixture(scope="module")
def recordings():
    return [recording(0, "needle"), recording(1, "needle"), recording(2, "summary")]


@pytest.fixture(scope="module")
def quest():
    return prediction.method("quest", budget=8, group="max")


@pytest.fixture(scope="module")
def infllm():
    return prediction.method("infllm", budget=4)


@pytest.fixture
def files(recordings, tmp_path):
    paths = [tmp_path / f"{one.family}-{one.prompt}.npz" for one in recordings]
    for one, path in zip(recordings, paths, strict=True):
        trace.write(one, path, "a processor")
    return paths


def test_the_steps_of_quest(recordings, quest):
    one = recordings[0]
    part = prediction.steps(one, 11, quest)
    assert part.before.shape == (ROWS, 2, 21) and part.scores.shape == (STEPS, 2, 21)
    assert (part.picks == 7).all() and (part.forced.sum(-1) == 1).all()
    for t, length in enumerate(one.lengths()):  # complete pages but the newest token's
        able = np.arange(21) < min(length // 16, (length - 1) // 16)
        assert np.array_equal(~np.isneginf(part.scores[t]), np.broadcast_to(able, (2, 21)))
        assert part.forced[t, (length - 1) // 16]
    assert np.flatnonzero(coverage.newborn(part).any(axis=(1, 2))).tolist() == [337 - 322]  # page 20 is past, and new
    assert np.array_equal(part.mass, one.mass[1].astype(np.float32))


def test_the_steps_of_infllm(recordings, infllm):
    part = prediction.steps(recordings[0], 3, infllm)
    assert part.scores.shape == (STEPS, 2, 5) and infllm.local == 1 and infllm.budget_blocks == 4
    assert (part.forced.sum(-1) == 3).all() and (part.picks == 1).all()
    assert (part.scores[np.isfinite(part.scores)] >= 0).all()
    pages = recordings[0].mass[0].astype(np.float32)
    assert part.mass[4, 1, 2] == pytest.approx(pages[4, 1, 8:12].sum())


def test_attention_that_a_step_does_not_see_is_what_its_blocks_miss(recordings, quest):
    """Mass on A and on the recent tokens, from the definition."""
    one = recordings[0]
    part = prediction.steps(one, 3, quest)
    chosen = coverage.selected(part)
    for t in (0, 5):
        length = one.lengths()[t]
        current = (length - 1) // 16
        seen = np.where(chosen[t], part.mass[t], 0).sum(-1)
        recent = 1 - part.mass[t][:, :current].sum(-1)
        assert coverage.selected_mass(part)[t] == pytest.approx(seen + recent, abs=2e-3)


def test_locality(recordings, quest):
    found = prediction.locality(recordings, quest)
    assert len(found) == 3 * len(LAYERS) * 2
    part = prediction.steps(recordings[1], 11, quest)
    row = found[(found["prompt"] == "1") & (found["layer"] == 11) & (found["head"] == 1)].iloc[0]
    chosen = coverage.selected(part)[:, 1]
    assert row["overlap_frac"] == pytest.approx((chosen[1:] & chosen[:-1]).sum(-1).mean() / 7)
    assert row["overlap_forced_frac"] > row["overlap_frac"] > row["random_frac"]


def test_curves_rise_and_are_summed_up_over_prompts(recordings, quest):
    found = prediction.curves(recordings, quest, (0.5, 1.0, 2.0), theta=Theta(1, 1, 0))
    assert len(found) == 3 * len(LAYERS) * 9 * 3 * 2
    means = prediction.over_prompts(found, ["predictor", "predicted_ratio"])
    wide = means.pivot(index="predictor", columns="predicted_ratio", values="coverage_frac")
    assert (wide[1.0] >= wide[0.5]).all() and (wide[2.0] >= wide[1.0]).all() and wide.loc["oracle", 1.0] == 1
    assert wide.loc["given theta"].equals(wide.loc["last step"])
    assert wide.loc["calibrated", 1.0] > wide.loc["random", 1.0] + 0.2
    one = means[(means["predictor"] == "learned") & (means["predicted_ratio"] == 1)].iloc[0]
    prompts = found[(found["predictor"] == "learned") & (found["predicted_ratio"] == 1)].groupby("prompt")
    values = prompts["coverage_frac"].mean()
    assert one["prompts_count"] == 3 and one["coverage_frac"] == pytest.approx(values.mean())
    half = 4.303 * values.std() / 3**0.5
    assert one["coverage_frac_max"] - one["coverage_frac"] == pytest.approx(half)
    single = prediction.over_prompts(found[found["prompt"] == "0"], ["predictor"])
    assert single["coverage_frac_min"].isna().all() and (single["prompts_count"] == 1).all()


def test_heads(recordings, quest):
    found = prediction.heads(prediction.curves(recordings, quest, (1.0,)))
    assert len(found) == 4 and (found["prompts_count"] == 3).all()
    expected = (found["coverage_frac"] - found["random_frac"]) / (1 - found["random_frac"])
    assert found["skill_frac"].to_numpy() == pytest.approx(expected.to_numpy(), abs=0.02)
    assert found["predicts"].equals(found["skill_frac_max"] >= 0.5)


def test_depth_is_the_grid_over_all_pages_of_the_prompt(recordings):
    found = prediction.depth(recordings[0], budget=6, skip=4)
    assert list(found["layer"]) == [3, 3, 11, 11] and (found["worst_frac"] <= found["no_trend_frac"]).all()
    assert (found["no_trend_frac"] <= found["best_frac"]).all()
    scores = recordings[0].scores(prediction.method("quest", group="max"), 3)[..., : TOKENS // 16]
    grid = calibration.plain(scores, 6, skip=4)
    assert found["best_frac"][0] == pytest.approx(grid.hits.max() / grid.wanted)


def test_fits_and_their_rows_weights_and_rivals(recordings, quest, infllm):
    found = fitting.fits(recordings, quest)
    part = prediction.steps(recordings[0], 3, quest)
    expected = calibration.plain(part.before, 7)
    first = found.iloc[0]
    assert (first["alpha"], first["beta"], first["gamma"]) == expected.theta
    assert first["objective_frac"] == pytest.approx(expected.objective.max(), abs=1e-12)
    assert (found["best_coverage_frac"] >= found["coverage_frac"]).all()
    rows = fitting.by_rows(recordings, quest, (4, 20, 64))
    assert set(rows["rows_count"]) == {4, 20}  # a recording has no 64 rows
    same = ["alpha", "beta", "gamma", "objective_frac", "coverage_frac"]
    assert rows[rows["rows_count"] == 20][same].reset_index(drop=True).equals(found[same])
    assert set(fitting.by_weights(recordings, quest)["weights"]) == {"shift", "softmax", "raw"}
    tight = [replace(one, page_max=one.page_min) for one in recordings]  # bounds that are below 0 in places
    assert set(fitting.by_weights(tight, quest)["weights"]) == {"shift", "softmax"}
    assert set(fitting.by_weights(recordings, infllm)["weights"]) == set(calibration.WEIGHTS)
    wide = fitting.thetas(recordings, quest).groupby("choice")["coverage_frac"].mean()
    assert wide["best in hindsight"] == wide.drop("last step").max() and len(wide) == 8
    assert wide["worst in hindsight"] == wide.drop("last step").min()
    assert "other prompts'" not in set(fitting.thetas(recordings[:1], quest)["choice"])


def test_held_out_hits_are_those_of_the_ema_step_by_step(recordings, quest):
    """The fit's coverage after the prompt equals that of running the predictor."""
    curve = prediction.curves(recordings, quest, (1.0,))
    curve = curve[curve["predictor"] == "calibrated"].groupby(["prompt", "layer"])["coverage_frac"].mean()
    fits = fitting.fits(recordings, quest).set_index(["prompt", "layer"])["coverage_frac"]
    assert fits.sort_index().to_numpy() == pytest.approx(curve.sort_index().to_numpy(), abs=0.01)


def test_learning_and_cost_have_times_and_the_papers_numbers(recordings, quest):
    learning = fitting.learning(recordings[:1], quest)
    assert set(learning["predictor"]) == {"ema", "learned"} and learning[["fit_ms", "prediction_us"]].min(axis=None) > 0
    cost = fitting.cost(rows=(4,), blocks=(256,), rounds=1)
    assert list(cost["origin"]) == ["measured", "published"] and list(cost["whole_ms"])[1] == 2.4


def test_the_bench_says_what_it_measured():
    frame = bench.predictor(rows=12, blocks=32, heads=1, budget=8, rounds=1)
    assert set(frame["unit"]) == {"ms", "ratio"} and frame["value"].min() > 0 and set(frame["origin"]) == {"measured"}


@pytest.mark.slow
def test_the_shipped_traces_say_what_the_predictor_is_worth():
    """A small model's numbers: the level adds a point or two to the last step, the trend next to nothing."""
    recorded = [trace.read(file) for file in prediction.shipped()]
    found = prediction.curves(recorded, prediction.method(group="max"), (1, 1.5))
    means = prediction.over_prompts(found, ["predicted_ratio", "predictor"]).set_index(["predicted_ratio", "predictor"])
    at = means["coverage_frac"]
    assert set(means["prompts_count"]) == {len(recorded)}
    assert at[1, "calibrated"] - at[1, "last step"] == pytest.approx(0.02, abs=0.01)
    assert abs(at[1, "calibrated"] - at[1, "no trend"]) < 0.003
    assert at[1.5, "calibrated"] > 0.95 > 0.5 > at[1.5, "random"]


def test_a_topic_changes_at_once(recordings, quest):
    one, other = (prediction.steps(recordings[i], 3, quest) for i in (0, 2))
    part = shifts.topic(one, other)
    assert np.array_equal(part.scores[:12], one.scores[:12]) and np.array_equal(part.scores[12:], other.scores[:12])
    course = shifts.courses(recordings, quest, "topic")
    assert sorted(set(course["step"])) == list(range(-12, 12)) and course["moved_frac"].isna().all()
    found = shifts.recovery(course).set_index("predictor")
    assert found.loc["oracle", "shift_frac"] == 1 and found.loc["oracle", "steps_count"] == 0
    assert found.loc["calibrated", "shift_frac"] < found.loc["calibrated", "before_frac"] - 0.1
    assert found.loc["last step", "steps_count"] >= 1 and (found["prompts_count"] == 3).all()
    with pytest.raises(ValueError, match="no other family's trace"):
        shifts.courses(recordings[:2], quest, "topic")


def test_a_sink_moves(recordings, quest):
    part = prediction.steps(recordings[0], 3, quest)
    moved, places = shifts.sink(part)
    assert np.array_equal(moved.scores[:12], part.scores[:12])
    assert np.array_equal(np.sort(moved.scores, -1), np.sort(part.scores, -1)) and places.shape == (2,)
    course = shifts.courses(recordings, quest, "sink")
    last = course[course["predictor"] == "last step"].groupby("step")["moved_frac"].mean()
    assert last[0] < 0.5 < last[1]  # unseen at the shift, seen one step later
    assert shifts.recovery(course).set_index("predictor").loc["last step", "moved_count"] == 1
    with pytest.raises(ValueError, match="kind is 'other'; allowed: topic, sink"):
        shifts.courses(recordings, quest, "other")


def test_recovery_counts_steps():
    course = pd.DataFrame({
        "kind": "topic", "predictor": "a", "predicted_ratio": 1.0, "family": "f", "prompt": ["0"] * 6 + ["1"] * 6,
        "step": [-2, -1, 0, 1, 2, 3] * 2, "moved_frac": np.nan,
        "coverage_frac": [0.8, 0.8, 0.2, 0.5, 0.77, 0.8] + [0.6, 0.6, 0.1] + [0.3] * 3,
    })
    found = shifts.recovery(course).iloc[0]
    assert (found["before_frac"], found["shift_frac"]) == (pytest.approx(0.7), pytest.approx(0.15))
    assert (found["steps_count"], found["back_frac"], found["prompts_count"]) == (3, 0.5, 2)  # 2, and never in 4


def test_every_frame_is_a_result(recordings, quest, tmp_path):
    """Origin on every row and a unit on every number, so that it can be written; the same again is the same bytes."""
    frames = {
        "locality": lambda: prediction.locality(recordings, quest),
        "curves": lambda: prediction.curves(recordings, quest, (1.0,)),
        "depth": lambda: prediction.depth(recordings[0], budget=6, skip=4),
        "fits": lambda: fitting.fits(recordings, quest), "rows": lambda: fitting.by_rows(recordings, quest, (4,)),
        "weights": lambda: fitting.by_weights(recordings, quest), "thetas": lambda: fitting.thetas(recordings, quest),
        "courses": lambda: shifts.courses(recordings, quest, "sink"),
    }
    frames["over"] = lambda: prediction.over_prompts(frames["curves"](), ["predictor"])
    frames["heads"] = lambda: prediction.heads(frames["curves"]())
    frames["recovery"] = lambda: shifts.recovery(frames["courses"]())
    for name, make in frames.items():
        for at in ("a", "b"):
            results.write(make(), tmp_path / at / f"{name}.csv")
        assert (tmp_path / "a" / f"{name}.csv").read_bytes() == (tmp_path / "b" / f"{name}.csv").read_bytes(), name
    results.write(fitting.cost(rows=(4,), blocks=(256,), rounds=1), tmp_path / "cost.timing.csv")
    results.write(fitting.learning(recordings[:1], quest), tmp_path / "learning.timing.csv")


def test_prr_coverage(cli, files):
    ran = cli("prr", "coverage", *files, "--budget", 8, "--group", "max", "--theta", "1,1,0", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert not any(isinstance(value, list | dict) for value in found.values())
    assert found["prompts_count"] == 3 and found["budget_blocks"] == 8 and found["oracle_coverage_frac"] == 1
    assert found["given_theta_coverage_frac"] == found["last_step_coverage_frac"]
    assert found["overlap_frac"] == pytest.approx(found["last_step_coverage_frac"], abs=0.05)
    more = json.loads(cli("prr", "coverage", *files, "--budget", 8, "--group", "max", "--ratio", 2, "--json").out)
    assert more["calibrated_coverage_frac"] > found["calibrated_coverage_frac"]
    table = cli("prr", "coverage", files[0], "--budget", 8)
    assert table.code == 0 and "calibrated" in table.out and "static frequency" in table.out and "nan" not in table.out


def test_prr_calibrate(cli, files):
    ran = cli("prr", "calibrate", *files, "--budget", 8, "--rows", 10, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["fits_count"] == len(found["fits"]) == 6 and found["rows"] == 10
    assert {"alpha", "beta", "gamma", "objective_frac", "coverage_frac", "layer"} <= set(found["fits"][0])
    infllm = cli("prr", "calibrate", files[0], "--method", "infllm", "--budget", 4)
    assert infllm.code == 0 and "needle" in infllm.out


@pytest.mark.parametrize("given, message", [
    (["--budget", 0], "budget is 0; allowed: at least 1 block"), (["--budget", -1], "budget is -1"),
    (["--budget", 1], "budget is 1; allowed: at least 2 blocks, as 1 are always attended"),
    (["--budget", 99], "budget is 99; allowed: at most 20 of the prompt's 21 blocks"),
    (["--budget", 21], "budget is 21"),
    (["--method", "infllm", "--budget", 3], "budget is 3; allowed: at least 4 blocks, as 3 are always attended"),
    (["--method", "infllm", "--budget", 30], "budget is 30; allowed: at most 5 of the prompt's 6 blocks"),
    (["--method", "other"], "method is 'other'; allowed: quest, infllm"), (["--page", 17], "page is 17"),
    (["--method", "infllm", "--page", 16], "page is 16; allowed for infllm: 64"),
    (["--group", "any"], "group is 'any'"), (["--ratio", 0], "ratio is 0"), (["--ratio", "nan"], "ratio is nan"),
])
@pytest.mark.parametrize("verb", ["coverage", "calibrate"])
def test_bad_input_is_one_line(cli, files, verb, given, message):
    ran = cli("prr", verb, files[0], "--budget", 8, *given)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert message in ran.err


@pytest.mark.parametrize("arguments, message", [
    (("coverage", "--theta", "0,0.5,0.5"), "alpha is 0.0; allowed: above 0, at most 1"),
    (("coverage", "--theta", "0.5,0.5,1.5"), "gamma is 1.5; allowed: 0 to 1"),
    (("coverage", "--theta", "half"), "theta is 'half'; allowed: three numbers"),
    (("calibrate", "--rows", 1), "rows is 1; allowed: 2 to 20"), (("calibrate", "--rows", 21), "rows is 21"),
])
def test_bad_numbers_are_one_line(cli, files, arguments, message):
    verb, *options = arguments
    ran = cli("prr", verb, files[0], "--budget", 8, *options)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert message in ran.err


def test_a_wrong_trace_is_one_line(cli, files, tmp_path):
    (tmp_path / "text.npz").write_text("no trace")
    files[0].write_bytes(files[1].read_bytes())  # not what the index says
    for file in (tmp_path / "text.npz", tmp_path / "missing.npz", files[0]):
        ran = cli("prr", "coverage", file)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1) and str(file) in ran.err
