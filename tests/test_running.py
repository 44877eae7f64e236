"""The step measured on a CPU: what is compared is equal, coverage is the traces', the answer follows from the rows."""

import numpy as np
import pandas as pd
import pytest
import torch

from artifact.dsa import replay
from artifact.dsa.infllm import InfLLM
from artifact.dsa.quest import Quest
from artifact.models import trace as traces
from artifact.prr import overlap
from artifact.study import prediction, results, running, scale
from artifact.study.running import Setting

SMALL = Setting("Llama3-8B-1M", "quest", 4096)


@pytest.fixture(scope="module")
def timed():
    """Steps and stages of one small setting, three rounds."""
    return running.timed(SMALL, 3)


def test_every_way_is_timed_and_no_time_is_nothing(timed):
    steps, stages = timed
    assert list(zip(steps["way"], steps["run"], strict=True))[:2] == [("DSA", "in turn"), ("DSA", "heads in halves")]
    assert len(steps) == 2 + 2 * 2 * 2 and set(steps["threads_count"]) == {1, 2}
    for column in ("busy_us", "busy_us_min", "wall_us", "wall_us_min", "one_ratio", "two_ratio"):
        assert (steps[column] > 0).all()
    assert (steps["busy_us_min"] <= steps["busy_us"]).all() and (steps["wall_us_min"] <= steps["wall_us"]).all()
    assert set(stages["stage"]) == {"selection", "speculation", "repair", "update"} and (stages["alone_us"] > 0).all()
    assert (steps["origin"] == "measured").all() and (stages["origin"] == "measured").all()


def test_coverage_is_that_of_the_traces_and_the_same_in_every_run(timed):
    steps, _ = timed
    found = steps[steps["way"] != "DSA"]
    by_ratio = found.groupby("predicted_ratio")["coverage_frac"]
    assert (by_ratio.nunique() == 1).all(), "union or exact, overlapped or not: the same sets"
    assert by_ratio.first()[1.5] > by_ratio.first()[1.0] > 0.5
    again, _ = running.timed(SMALL, 3)
    assert again["coverage_frac"].tolist() == pytest.approx(steps["coverage_frac"].tolist(), nan_ok=True)


@pytest.mark.parametrize("change", [
    Setting("GLM-4-9B-1M", "infllm", 8192), Setting("Llama3-8B-1M", "infllm", 8192, batch_count=4),
    Setting("Llama3-8B-1M", "quest", 4096, layers_count=2)], ids=str)
def test_other_settings_run(change):
    steps, stages = running.timed(change, 1)
    assert len(steps) == 10 and running.reasons(stages)["work_ratio"].gt(0).all()


def test_results_are_results(timed, tmp_path):
    steps, stages = timed
    paid, why = running.pays(steps), running.reasons(stages)
    for name, frame in (("a", steps), ("b", stages), ("c", paid), ("d", why), ("e", running.answer(paid, why))):
        results.write(frame, tmp_path / f"{name}.timing.csv")
        assert len(results.read(tmp_path / f"{name}.timing.csv")) == len(frame)


# --- what is compared

@pytest.mark.parametrize(("run", "says"), [("overlapped", "differs from in turn"), ("heads in halves", "off DSA")])
def test_ways_that_differ_get_no_time(monkeypatch, run, says):
    step = running._Running.step

    def wrong(self, turn):
        out = step(self, turn)
        return out * 1.001 if self.way.run == run else out

    monkeypatch.setattr(running._Running, "step", wrong)
    with pytest.raises(ValueError, match=f"{says}; no time is given"):
        running.timed(SMALL, 1)


def test_a_clock_takes_each_threads_own_time():
    """Two threads that compute as long as each other: what either took is not what both did."""
    values = torch.ones(2**22)

    def work():
        for _ in range(8):
            values.sum()

    alone = running._Clock(overlap.in_turn)
    alone(work, lambda: None)
    with overlap.Threads() as threads:
        beside = running._Clock(threads)
        beside(work, work)
    assert len(beside.seconds) == 2 and min(*beside.seconds, alone.seconds[0]) > 0
    assert alone.seconds[1] < alone.seconds[0]


# --- the answer

def rows(one, two, **more):
    """A frame of steps of two settings whose overlapped way has these ratios."""
    made = []
    for setting, ratios in zip((SMALL, SMALL._replace(method="infllm")), zip(one, two, strict=True), strict=True):
        for run in ("in turn", "overlapped"):
            made.append({**setting._asdict(), "way": "PRR, union", "run": run, "predicted_ratio": 1.0,
                         "coverage_frac": 0.9, "busy_us_min": 10.0, "one_ratio": ratios[0], "two_ratio": ratios[1],
                         "origin": "measured", **more})
    return pd.DataFrame(made)


def stages_of(selection, speculation, repair, dsa):
    times = {"selection": selection, "speculation": speculation, "repair": repair, "update": 1.0}
    return pd.DataFrame([{**SMALL._asdict(), "way": "PRR, union", "predicted_ratio": 1.0, "stage": stage,
                          "alone_us": time, "beside_us": 1.1 * time, "dsa_us": dsa, "origin": "measured"}
                         for stage, time in times.items()])


@pytest.mark.parametrize(("one", "two", "counts", "says"), [
    ((1.2, 0.8), (0.9, 0.5), (1, 0), "keep both busy with less work"),
    ((1.2, 1.3), (1.1, 1.2), (2, 2), "do not keep both cores as busy")])
def test_whether_prr_pays_is_counted(one, two, counts, says):
    paid = running.pays(rows(one, two))
    whole = paid[(paid["model"] == "all") & (paid["method"] == "all")].iloc[0]
    assert (whole["faster_one_count"], whole["faster_two_count"]) == counts and whole["settings_count"] == 2
    assert whole["two_ratio"] == pytest.approx(np.sqrt(two[0] * two[1]))
    told = running.answer(paid, running.reasons(stages_of(4, 6, 2, 10)))
    assert told["answer"].iloc[0].startswith(f"in {counts[0]} of 2 settings") and says in told["answer"].iloc[-1]


def test_the_reasons_by_hand():
    row = running.reasons(stages_of(4.0, 6.0, 2.0, 10.0)).iloc[0]
    assert row["work_ratio"] == pytest.approx(1.2) and row["bound_ratio"] == pytest.approx(10 / 8)
    assert row["ideal_two_ratio"] == pytest.approx(5 / 8)
    assert row["selection_slower_ratio"] == row["speculation_slower_ratio"] == pytest.approx(1.1)


def test_without_rounds_the_recorded_run_is_shown():
    tiny = scale.load("tiny")
    steps, stages = running.measured(tiny)
    assert tiny.runtime_rounds == 0 and set(steps["origin"]) == set(stages["origin"]) == {"recorded"}
    assert running.pays(steps)["origin"].eq("recorded").all()


def test_the_settings_of_the_full_scale():
    found = running.settings(scale.load("full"))
    assert len(set(found)) == len(found) == 12
    assert {setting.context_tokens for setting in found} == {16384, 65536}
    assert max(setting.layers_count for setting in found) == 4 and max(setting.batch_count for setting in found) == 4


# --- replayed scores

@pytest.mark.parametrize("name", replay.METHODS)
def test_a_table_holds_the_traces_scores_and_as_many_blocks_compete_as_say_so(name):
    method = replay.METHODS[name]
    recorded = [traces.read(file) for file in prediction.shipped()[:2]]
    sources = replay.sources(recorded, method)
    assert len(sources) == 2 * 4 * recorded[0].kv_heads
    assert {len(one) for one in sources} == {recorded[0].rows.size + recorded[0].steps}
    made = replay.table(sources, 2, 1000, 400)
    assert made.shape == (len(sources[0]), 2, 1000) and made.dtype == torch.float32
    lowest = made.min()
    assert ((made > lowest).any(0).sum(-1) == 400).all() and torch.isfinite(made).all()
    one = (sources[0] - sources[0].mean()) / sources[0].std()
    columns = {tuple(column) for column in made[:, 0].T.numpy().round(3).tolist()}
    assert sum(tuple(column) in columns for column in one.T.round(3).tolist()) == one.shape[1]


def test_replayed_scores_come_row_by_row_and_leave_out_what_the_method_does():
    quest = Quest(page=16, budget_blocks=4, dense_layers=0)
    keys = torch.randn(2, 3, 100, 16)
    table = torch.arange(5 * 3 * 8.0).reshape(5, 3, 8)
    played = replay.Replayed(quest, table, torch.tensor([98, 40]))
    metadata = played.summarize(keys, [100, 45])
    found = played.score(torch.randn(2, 6, 16), metadata)
    assert torch.equal(found[0], table[2, :, :7]) and torch.equal(found[1, :, :3], table[0, :, :3])
    assert torch.isneginf(found[1, :, 3:]).all()
    assert played.block == 16 and played.budget_blocks == 4 and played.most_forced == 1
    assert torch.equal(played.forced([100]), quest.forced([100])) and not played.dense(0, [100]).any()


def test_live_blocks_are_the_share_that_the_budget_is_of_a_traces():
    assert replay.live(Quest(budget_blocks=101), 10000) == 400 and replay.live(Quest(budget_blocks=101), 50) == 50
    assert replay.live(InfLLM(), 10000) == (96 - 34) * 4


@pytest.mark.parametrize(("sources", "says"), [
    ([], r"sources have \[\] steps; allowed: at least one source"),
    ([np.zeros((3, 2)), np.zeros((4, 2))], r"sources have \[3, 4\] steps; allowed: at least one source, all of as"),
    ([np.full((3, 2), -np.inf)], "a source has a score that is not finite")])
def test_what_cannot_be_replayed_is_refused(sources, says):
    with pytest.raises(ValueError, match=says):
        replay.table(sources, 1, 4, 4)
