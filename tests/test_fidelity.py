"""Notebook 07's frames: paired differences, what is found, what the union adds; then a model decoding in every mode."""

import joblib
import numpy as np
import pandas as pd
import pytest

from artifact.models import weights
from artifact.prr import baselines, calibration, coverage
from artifact.study import fidelity, figures, foresight, intervals, paths, prediction, results, scale
from artifact.study.fidelity import Reading

TINY = scale.load("tiny")
SMALL = TINY.model_copy(update={"fidelity_prompt_tokens": 512, "fidelity_tokens": 40, "fidelity_passages": 2,
                                "fidelity_needle_tokens": 512, "fidelity_needles": 3})
PLANS = [(fidelity._DENSE, 0.0), *((setting._asdict() | {"mode": mode, "predicted_ratio": ratio}, worse)
                                   for setting in fidelity.SETTINGS[:2]
                                   for mode, ratio, worse in (("dsa", None, 0.3), ("union", 1.0, 0.2),
                                                              ("union", 2.0, 0.1), ("exact", 1.0, 0.3)))]


def made(passages=2, tokens=256, layers=3):
    """Readings in which each mode is worse than dense attention by a known mean, with noise of its own."""
    draw, found = np.random.default_rng(0), []
    for number in range(passages):
        base = draw.gamma(2.0, 1.0, tokens)
        for run, worse in PLANS:
            noise = np.random.default_rng([number, round(worse * 100)]).normal(0, 0.02, tokens)
            nll = base + (worse and worse + noise)
            error = np.full((layers, tokens - 1), worse) * np.arange(1, layers + 1)[:, None]
            error[0] = np.nan  # a layer that attends to everything
            found.append(Reading(run, None if run is fidelity._DENSE else 48, f"text {number}", 3072, nll,
                                 error if number == 0 else None, 0.1, 0.5))
    return found


@pytest.fixture(scope="module")
def nll():
    return fidelity.likelihood(made(), 0)


@pytest.fixture(scope="module")
def marks():
    """A needle frame: dense finds all of six, DSA the first three, the union one of them and one of the others."""
    rows = []
    for run, _ in PLANS[:3]:
        hits = {"dense": [1] * 6, "dsa": [1, 1, 1, 0, 0, 0], "union": [1, 0, 0, 1, 0, 0]}[run["mode"]]
        rows += [run | {"family": "needle-single", "prompt": str(at), "prompt_tokens": 2048, "found": bool(hit)}
                 for at, hit in enumerate(hits)]
    return fidelity._typed(pd.DataFrame(rows)).assign(origin="measured")


# --- frames

def test_likelihood_is_a_paired_difference_with_its_interval(nll):
    rows = nll[nll["text"] == "all"].set_index(["budget_frac", "mode", "predicted_ratio"]).sort_index()
    assert len(nll) == len(PLANS) * 3 and set(nll["text"]) == {"all", "text 0", "text 1"}
    union = rows.loc[(0.25, "union", 2.0)]
    assert union["over_dense_nats"] == pytest.approx(0.1, abs=0.005)
    assert union["over_dense_nats_min"] < union["over_dense_nats"] < union["over_dense_nats_max"]
    assert union["over_dense_nats_max"] - union["over_dense_nats_min"] < 0.01  # the texts' own spread is not in it
    assert union["over_dsa_nats"] == pytest.approx(-0.2, abs=0.005) and union["over_dsa_nats_max"] < -0.18
    assert union["scored_tokens"] == 512 and union["passages_count"] == 2 and union["farthest_nats"] > 0.2
    exact = rows.loc[(0.25, "exact", 1.0)]
    assert exact[["over_dsa_nats", "over_dsa_nats_min", "over_dsa_nats_max", "farthest_nats"]].tolist() == [0] * 4
    dense = nll[(nll["mode"] == "dense") & (nll["text"] == "text 1")].iloc[0]
    assert dense["over_dense_nats"] == dense["moved_frac"] == 0 and np.isnan(dense["over_dsa_nats"])


def test_moved_counts_single_tokens_though_the_mean_stays():
    found = made(passages=1)[:1]
    swing = np.where(np.arange(256) % 4 == 0, 0.3, -0.1)
    found.append(found[0]._replace(run=PLANS[1][0], nll=found[0].nll + swing))
    row = fidelity.likelihood(found, 0).query("mode == 'dsa' and text == 'all'").iloc[0]
    assert row["over_dense_nats"] == pytest.approx(0) and row["moved_frac"] == 1
    assert row["over_dense_nats_p05"] == pytest.approx(-0.1) and row["over_dense_nats_p95"] == pytest.approx(0.3)


def test_plans_are_counted_as_worse_or_better_only_beyond_the_margin(nll):
    found = fidelity.against_dsa(nll).set_index(["mode", "predicted_ratio"])
    assert found.loc[("union", 2.0), ["plans_count", "worse_count", "better_count"]].tolist() == [2, 0, 2]
    assert found.loc[("exact", 1.0), ["worse_count", "better_count", "farthest_nats"]].tolist() == [0, 0, 0]
    nearly = nll.assign(over_dsa_nats_min=5e-4, over_dsa_nats_max=6e-4)
    assert fidelity.against_dsa(nearly)[["worse_count", "better_count"]].to_numpy().sum() == 0
    worse = nll.assign(over_dsa_nats_min=2e-3, over_dsa_nats_max=3e-3)
    assert (fidelity.against_dsa(worse)["worse_count"] == 2).all()


def test_the_union_is_held_against_dsa_of_its_own_size():
    row = fidelity.same_size(made(), 0).iloc[0]
    assert (row["budget_frac"], row["dsa_budget_frac"]) == (0.125, 0.25) and row["blocks_ratio"] == 1.5
    assert row["over_dsa_nats"] == pytest.approx(-0.2, abs=0.005)


def test_errors_are_quantiles_of_the_layers_that_select():
    frame = fidelity.errors(made())
    assert set(frame["layer"]) == {1, 2} and "dense" not in set(frame["mode"])
    row = frame.query("mode == 'dsa' and layer == 2").iloc[0]
    assert row["error_frac_p50"] == row["error_frac_p95"] == pytest.approx(0.9) and row["scored_tokens"] == 255
    deep = fidelity.depth(frame).query("mode == 'union' and predicted_ratio == 2 and budget_frac == 0.25").iloc[0]
    assert (deep["error_frac"], deep["error_frac_max"]) == (pytest.approx(0.25), pytest.approx(0.3))


def test_what_is_found_is_counted_and_paired_with_dsa(marks):
    found = fidelity.found(marks).set_index("mode")
    assert found["found_count"].to_dict() == {"dense": 6, "dsa": 3, "union": 2}
    assert tuple(found.loc["dsa", ["found_frac_min", "found_frac_max"]]) == intervals.of_share(3, 6)
    assert found.loc["union", ["gained_count", "lost_count"]].tolist() == [1, 2]
    assert found.loc["dsa", ["gained_count", "lost_count"]].tolist() == [0, 0]
    assert found.loc["dense", ["gained_count", "lost_count"]].isna().all()


def test_the_mass_of_the_union_is_that_of_its_sets():
    recorded = foresight.recordings(TINY)[:1]
    frame = fidelity.waste(recorded).set_index(["method", "predicted_ratio"])
    chosen, masses, shares = foresight.method(), [], []
    for _, _, part in prediction.every(recorded, chosen):
        theta = prediction.calibrated(part, calibration.weights_of(chosen)).theta
        guess = calibration.largest(baselines.ema(part, theta), int(part.picks[0])) | coverage.newborn(part)
        seen = ~np.isneginf(part.scores) & ~(guess | coverage.selected(part))
        masses.append((1 - np.where(seen, part.mass, 0).sum(-1, dtype=np.float64)).mean())
        shares.append((guess & ~coverage.selected(part)).sum(-1).mean() / chosen.budget_blocks)
    row = frame.loc[("quest", 1.0)]
    assert row["mass_union_frac"] == pytest.approx(np.mean(masses), abs=1e-6)
    assert row["wasted_frac"] == pytest.approx(np.mean(shares))
    quest = frame.loc["quest"]
    assert quest["mass_wasted_frac"].is_monotonic_increasing and (quest["mass_union_frac"] <= 1).all()
    assert quest["missed_frac"].is_monotonic_decreasing and quest["wasted_frac"].is_monotonic_increasing


def test_exactness_costs_more_with_small_blocks_and_wide_groups():
    over = fidelity.moved().set_index(["mode", "block_tokens", "group_count"])["over_frac"].unstack()
    assert (over.loc["dsa"] == 0).all(axis=None) and (over.loc["exact"] > over.loc["union"]).all(axis=None)
    assert (over.loc["exact"].diff().dropna() < 0).all(axis=None)
    assert (over.loc["exact"].T.diff().dropna() > 0).all(axis=None)


def test_budgets_are_shares_of_the_prompt():
    for setting in fidelity.SETTINGS:
        for tokens in (1024, 2048, 4096):
            chosen = setting.chosen(tokens)
            assert chosen.budget_blocks * setting.page_tokens == tokens * setting.budget_frac
            assert chosen.budget_blocks > int(chosen.forced([tokens]).sum()) and chosen.block == setting.page_tokens


def test_without_weights_or_at_tiny_the_recorded_run_is_shown(monkeypatch):
    full = scale.load("full")
    for size in (TINY, full):
        if size is full:
            monkeypatch.setattr(weights, "find", lambda *_: (_ for _ in ()).throw(ValueError("no weights")))
        readings = fidelity.readings(size)
        assert readings == []
        shown = [fidelity.likelihood(readings, 0), fidelity.errors(readings), fidelity.same_size(readings, 0),
                 fidelity.needles(size)]
        assert all(set(frame["origin"]) == {"recorded"} for frame in shown)
        derived = [fidelity.against_dsa(shown[0]), fidelity.depth(shown[1]), fidelity.found(shown[3])]
        assert all(set(frame["origin"]) == {"recorded"} for frame in derived)


def test_every_frame_is_a_result_and_comes_back(nll, marks, tmp_path):
    frames = {"nll": nll, "against_dsa": fidelity.against_dsa(nll), "same_size": fidelity.same_size(made(), 0),
              "errors": fidelity.errors(made()), "depth": fidelity.depth(fidelity.errors(made())), "needles": marks,
              "found": fidelity.found(marks), "moved": fidelity.moved()}
    for name, frame in frames.items():
        results.write(frame, tmp_path / f"{name}.csv")
    again = fidelity._typed(results.read(tmp_path / "nll.csv"))
    pd.testing.assert_frame_equal(fidelity.against_dsa(again), frames["against_dsa"])
    again = fidelity._typed(results.read(tmp_path / "needles.csv").astype({"prompt": str}))
    pd.testing.assert_frame_equal(fidelity.found(again), frames["found"])


# --- figures

def test_the_figures_draw_each_mode_where_it_lies(nll, marks):
    drawn = figures.draw("likelihood", nll)
    exact = [trace for trace in drawn.data if trace.marker.symbol == "diamond"]
    dsa = [trace for trace in drawn.data if trace.marker.symbol == "circle"]
    assert [trace.x[0] for trace in exact] == [trace.x[0] for trace in dsa]
    assert [trace.name for trace in figures.draw("errors", fidelity.errors(made())).data if trace.showlegend] \
        == ["DSA", "PRR, union, δ = 1", "PRR, union, δ = 2", "PRR, exact"]
    texts = [note.text for note in figures.draw("needles", fidelity.found(marks)).layout.annotations]
    assert "3 of 6" in texts and "2 of 6" in texts
    with pytest.raises(ValueError, match="mode 'other' has no colour; allowed: dense, dsa"):
        figures.draw("likelihood", nll.assign(mode="other"))
    with pytest.raises(ValueError, match="no rows but of dense attention"):
        figures.draw("likelihood", nll[nll["mode"] == "dense"])


# --- a model

@pytest.fixture
def babbler(monkeypatch):
    """In the place of all weights a random model, and one token a byte: what it says is nonsense, its attention is
    not. For one test: the next may read real weights."""
    pytest.importorskip("transformers")
    from test_capture import tiny
    from test_prompts import Bytes

    class Words(Bytes):
        def decode(self, ids):
            return bytes(min(token, 255) for token in ids).decode("latin-1")

    shape = {"num_hidden_layers": 3, "head_dim": 16, "max_position_embeddings": 1024}
    monkeypatch.setattr(weights, "find", lambda *_: "tiny")
    monkeypatch.setattr(weights, "load", lambda _: tiny(**shape))
    monkeypatch.setattr(weights, "tokenizer", lambda _: Words())
    monkeypatch.setattr(joblib, "cpu_count", lambda: 2)
    with joblib.parallel_config(backend="sequential"):  # another process would load the model itself
        yield


@pytest.mark.usefixtures("babbler")
def test_a_model_is_read_in_every_mode():
    live = fidelity.readings(SMALL)
    plans = 1 + sum(map(len, fidelity.RUNS.values()))
    assert len(live) == 2 * plans and [one.text for one in live[::plans]] == ["us-constitution", "kjv-genesis-exodus"]
    by = {fidelity._key(one.run): one for one in live[:plans]}
    text = (paths.data_dir() / "prompts" / "texts" / "us-constitution.txt").read_bytes()
    assert len(by) == plans and all(len(one.nll) == 40 for one in live) and len(text) > 552
    for setting, modes in fidelity.RUNS.items():
        dsa = by[(*setting, "dsa", None)]
        assert np.abs(dsa.nll - live[0].nll).max() > 1e-3 and np.isnan(dsa.wasted) and dsa.blocks >= 2
        for mode, ratio in modes:
            one = by[(*setting, mode, ratio)]
            if mode == "exact":
                assert np.abs(one.nll - dsa.nll).max() < 1e-3
            if mode == "union" and one.wasted > 0.05:
                assert np.abs(one.nll - dsa.nll).max() > 1e-3
    assert by[(*fidelity.SETTINGS[0], "union", 2.0)].wasted > by[(*fidelity.SETTINGS[0], "union", 0.5)].wasted
    assert all(one.error is not None for one in live[:plans]) and live[plans].error is None
    errors = fidelity.errors(live)
    assert set(errors.query("method == 'quest'")["layer"]) == {2}  # the first two are dense
    assert set(errors.query("method == 'infllm'")["layer"]) == {0, 1, 2}


@pytest.mark.usefixtures("babbler")
def test_prompts_that_hide_a_fact_are_asked_in_every_mode(monkeypatch):
    from artifact.models import attention

    def said(model, ids, plan, steps, *, prompt, enough):
        tokens = list(b"It is 5333504." if plan.mode != "dsa" else b"It is 5333505.")
        if enough(tokens):
            assert not enough(tokens[:-2])
        return attention.Generated(tokens, None, ())

    monkeypatch.setattr(attention, "generate", said)
    frame = fidelity.needles(SMALL)
    assert list(frame["prompt"].unique()) == ["0", "1", "2"]  # in order, whichever process was first
    assert len(frame) == 3 * (1 + sum(map(len, fidelity.NEEDLES.values())))
    first = frame[frame["prompt"] == "0"]
    assert dict(first.groupby("mode")["found"].all()) == {"dense": True, "dsa": False, "exact": True, "reuse": True,
                                                          "union": True}


@pytest.mark.slow
def test_the_offline_model_says_the_same_exactly_and_finds_what_is_hidden():
    size = scale.load("smoke")
    readings = fidelity.readings(size)
    if not readings:
        pytest.skip("data/models has no weights: `make model`")
    against = fidelity.against_dsa(fidelity.likelihood(readings, 0)).set_index(["mode", "predicted_ratio"])
    assert against.loc[("exact", 1.0), "farthest_nats"] < 0.02
    assert against.loc[("union", 2.0), "worse_count"] == 0
    assert fidelity.found(fidelity.needles(size)).set_index("mode").loc["dense", "found_frac"] == 1
