"""Notebooks 02 and 03's frames: the paper's numbers as printed, ours beside them, and what each part is worth."""

import json

import numpy as np
import pandas as pd
import pytest

from artifact.models import trace
from artifact.prr import baselines, coverage
from artifact.study import claims, fitting, foresight, paths, prediction, printed, results, scale


@pytest.fixture(scope="module")
def recorded():
    return foresight.recordings(scale.load("tiny"))


@pytest.fixture(scope="module")
def found(recorded):
    return foresight.curves(recorded, 0)


# --- what the paper printed

def test_the_published_tables_are_the_papers(root):
    path = root.parent / "shared" / "golden" / "prr_paper_tables.json"
    if not path.is_file():
        pytest.skip("../shared/golden is not there: the printed tables cannot be compared with it")
    facts = json.loads(path.read_text())
    for key, found, column, unit in (("table5", printed.overlap(), "overlap_frac", 1),
                                     ("table7", printed.coverage(), "coverage_frac", 100)):
        (tables,) = (value for name, value in facts.items() if name.startswith(key))
        wanted = [value / unit for method in ("Quest", "InfLLM-v2") for model in facts["models"]
                  for value in tables[method][model]]
        assert found[column].tolist() == pytest.approx(wanted, abs=1e-9)
        assert found["benchmark"].tolist() == [*facts["benchmarks"], "average"] * 12
    four, seven = printed.coverage(4), printed.coverage()
    assert four["coverage_frac"].tolist() == seven[seven["model"] == "GLM-4-9B-1M"]["coverage_frac"].tolist()


def test_published_rows_say_where_they_stand():
    for name in ("overlap", "coverage", "costs"):
        frame = results.read(paths.data_dir() / "published" / f"prr_{name}.csv")
        assert set(frame["origin"]) == {"published"} and frame["source"].str.startswith("arXiv 2606.30389").all()
        assert frame["cell"].notna().all() and not frame.duplicated(["table", "cell"]).any()
    assert len(printed.overlap()) == len(printed.coverage()) == 72 and len(printed.cells(printed.overlap())) == 60


def test_printed_digits_are_kept():
    for name, column, unit in (("overlap", "overlap_frac", 1), ("coverage", "coverage_frac", 100)):
        frame = pd.read_csv(paths.data_dir() / "published" / f"prr_{name}.csv", dtype=str)
        assert (frame["printed"].astype(float) / unit).tolist() == pytest.approx(frame[column].astype(float).tolist())
        assert set(frame["printed"].str.partition(".")[2].str.len()) == {3 if name == "overlap" else 2}


def test_printed_averages_are_those_of_their_cells():
    for found in (printed.overlap(), printed.coverage()):
        column = next(name for name in found if name.endswith("_frac"))
        means = printed.cells(found).groupby(["method", "model"])[column].mean()
        averages = found[found["benchmark"] == "average"].set_index(["method", "model"])[column]
        assert (means - averages).abs().max() < 0.00125  # the paper's own rounding, in its last digit


def test_means_of_the_cells():
    means = printed.means().set_index(["quantity", "method", "model"])
    assert [round(means.loc[(*key, "all"), "mean_frac"], 4) for key in (
        ("overlap", "quest"), ("overlap", "infllm"), ("coverage", "quest"), ("coverage", "infllm"))] \
        == [0.6616, 0.6776, 0.9802, 0.9844]
    assert means.loc[("overlap", "both", "all"), ["cells_count", "against_count"]].tolist() == [60, 6]
    assert means.loc[("coverage", "both", "all"), ["lowest_frac", "against_count"]].tolist() == [0.9646, 3]


def test_costs_are_those_beside_ours():
    theirs = fitting.cost(rows=(4,), blocks=(256, 1024), rounds=1).query("origin == 'published'")
    said = printed.costs()
    for what, column in (("exposed tail", "layer_ms"), ("complete search", "whole_ms")):
        rows = said[said["what"] == what].set_index("context_tokens")["time_ms"]
        assert theirs.set_index("context_tokens")[column].to_dict() == rows.to_dict()
    assert (theirs["prediction_ms"] == said[said["what"] == "one prediction"]["time_ms"].item()).all()


def test_a_table_as_it_is_printed():
    wide = printed.wide(printed.coverage())
    assert list(wide)[:3] == ["method", "model", "LongBench"] and len(wide) == 12
    assert wide.iloc[0].tolist()[1:-1] == ["GLM-4-9B-1M", 0.9865, 0.9686, 0.9836, 0.9815, 0.9825, 0.9805]


# --- ours

def test_a_scale_uses_one_prompt_of_each_family_before_a_second():
    for name in scale.names():
        size = scale.load(name)
        used = [(one.family, one.prompt) for one in foresight.recordings(size)]
        assert len(used) == len(set(used)) == min(size.prediction_prompts, len(prediction.shipped()))
        assert len({family for family, _ in used}) == min(5, len(used))
    with pytest.raises(ValueError, match="no traces of Qwen3-14B; `make traces` records those of SmolLM2-135M"):
        foresight.recordings(scale.load("tiny"), "Qwen3-14B")


def test_settings_are_what_the_methods_do(recorded):
    frame = foresight.settings(recorded[0]).set_index(["method", "page_tokens"])
    for name, page in foresight.METHODS:
        part = prediction.steps(recorded[0], 10, foresight.method(name, page))
        assert frame.loc[(name, page), "dynamic_count"] == part.picks[0]
        assert frame.loc[(name, page), "forced_count"] == part.forced[0].sum()
        assert frame.loc[(name, page), "blocks_count"] == part.forced[0].shape[0] - 3 * (page == 16)


def test_selections_are_the_sets_whose_overlap_is_counted(recorded):
    frame = foresight.selections(recorded[0], 10, 1, steps=64)
    part = prediction.steps(recorded[0], 10, foresight.method())
    shares = coverage.overlap(part)[0][:, 1]
    picked = frame[frame["kind"] != "forced"].groupby("step")["kind"].apply(lambda kinds: (kinds == "again").mean())
    assert picked.iloc[1:].tolist() == pytest.approx(shares.tolist())
    assert (frame[frame["kind"] == "forced"].groupby("step").size() == 1).all()


def test_the_history_is_the_predictors(recorded):
    frame = foresight.history(recorded[0], 10, 0)
    part = prediction.steps(recorded[0], 10, foresight.method())
    theta = prediction.theta(",".join(str(frame[name].iloc[0]) for name in ("alpha", "beta", "gamma")))
    block = frame["block"].iloc[0]
    assert frame["prediction"].tolist() == pytest.approx(baselines.ema(part, theta)[:, 0, block].tolist())
    taken = (frame["score"] >= frame["least_selected"]).tolist()
    assert taken == coverage.selected(part)[:, 0, block].tolist() and 0 < sum(taken) < len(taken)


def test_the_grid_has_one_choice_and_it_is_the_best(recorded):
    frame = foresight.grid(recorded[0], 10)
    assert len(frame) == 80 and frame["chosen"].sum() == 1
    assert frame.loc[frame["chosen"], "objective_frac"].item() == frame["objective_frac"].max()


def test_parts_are_differences_within_a_prompt(found):
    parts = foresight.parts(found).set_index([*foresight.AS, "part", "predicted_ratio"]).sort_index()
    means = foresight.by_size(found).set_index([*foresight.AS, "predictor", "predicted_ratio"])
    means = means["coverage_frac"].sort_index()
    for name, page in foresight.METHODS:
        gain, mean = parts.loc[(name, page)]["gain_frac"], means.loc[(name, page)]
        assert gain["level and trend", 1.0] == pytest.approx(gain["level", 1.0] + gain["trend", 1.0])
        assert gain["trend", 1.5] == pytest.approx(mean["calibrated", 1.5] - mean["no trend", 1.5])
        assert gain["larger P alone", 1.5] == pytest.approx(mean["last step", 1.5] - mean["last step", 1.0])
        assert gain["larger P alone", 1.5] > 5 * gain["level", 1.0] > 5 * abs(gain["trend", 1.0])
    prompts = found[(found["method"] == "quest") & (found["page_tokens"] == 16) & (found["predicted_ratio"] == 1)]
    wide = prompts.pivot_table(index="family", columns="predictor", values="coverage_frac")
    apart = wide["no trend"] - wide["last step"]
    row = parts.loc[("quest", 16, "level", 1.0)]
    assert row["gain_frac_max"] - row["gain_frac"] == pytest.approx(12.706 * apart.std() / np.sqrt(2))


def test_locality_keeps_the_papers_rows_apart(recorded):
    frame = foresight.locality(foresight.overlaps(recorded))
    ours, theirs = (frame[(frame["origin"] == "published") == them] for them in (False, True))
    assert len(theirs) == 60 and len(ours) == 3 * len({one.family for one in recorded})
    assert set(ours["model"]) == {"SmolLM2-135M"} and not set(theirs["model"]) & set(ours["model"])
    assert theirs["cell"].notna().all() and ours["cell"].isna().all()


def test_models_are_never_averaged_together(recorded, found, tmp_path, monkeypatch):
    """A user's own traces of another model get rows of their own."""
    shared = foresight.overlaps(recorded)
    alone = foresight.models(scale.load("tiny"), shared, found)
    lines = trace.index(paths.data_dir() / "traces")
    monkeypatch.setattr(trace, "index", lambda folder: [*lines, {"model": "Qwen3-14B"}])
    monkeypatch.setattr(foresight, "recordings", lambda size, model: recorded)
    monkeypatch.setattr(foresight, "overlaps", lambda used: shared.assign(model="Qwen3-14B"))
    monkeypatch.setattr(foresight, "curves", lambda used, seed: found)
    both = foresight.models(scale.load("tiny"), shared, found)
    pd.testing.assert_frame_equal(both.iloc[: len(alone)], alone)
    assert set(both.iloc[len(alone):]["model"]) == {"Qwen3-14B"}


def test_the_live_check_is_recorded_where_it_was_not_measured(monkeypatch):
    for name in ("tiny", "smoke"):
        assert set(foresight.constitution(scale.load(name))["origin"]) == {"recorded"}
    monkeypatch.setattr(foresight.weights, "find", lambda *_: (_ for _ in ()).throw(ValueError("no weights")))
    frame = foresight.constitution(scale.load("full"))
    assert set(frame["origin"]) == {"recorded"} and frame["prompt"].tolist() == ["0", "0"]


def test_what_was_not_measured_here_is_not_decided(tmp_path):
    """A claim that needs a model is open when its result has no row of it, and decided when it has."""
    (one,) = [claim for claim in claims.load() if claim.id == "own-live-overlap"]
    folder = tmp_path / "full" / one.notebook
    row = {"predicted_ratio": [1.0, 1.5], one.metric: [0.7626, 0.7626]}
    for origin, verdict in (("recorded", "not-measured-here"), ("measured", "reproduced")):
        results.write(pd.DataFrame(row | {"origin": [origin] * 2}), folder / one.result)
        results.write_manifest(folder, [one.result])
        judged = claims.verdicts("full", tmp_path, [one]).iloc[0]
        assert judged["verdict"] == verdict and (verdict == "reproduced" or "make model" in judged["reason"])
