"""Notebooks 01, 05 and 06: bounds, budgets, baselines, the audit, the place of each figure and table, the verbs."""

import json
import re

import pandas as pd
import pytest
from test_stage_times import rows as timed_rows

from artifact.prr import timeline
from artifact.study import audit, books, claims, figures, latency, printed, results, stage_times


@pytest.fixture(scope="module")
def baselines():
    return latency.baselines()


@pytest.fixture(scope="module")
def lines():
    return audit.lines()


# --- what follows from the published stage times

@pytest.mark.parametrize(("method", "bound", "first", "last", "most"), [
    ("quest", "overlap", 1.28, 1.51, 1.51), ("infllm", "overlap", 1.33, 1.43, 1.48),
    ("quest", "hidden", 1.69, 1.51, 1.69), ("infllm", "hidden", 1.61, 1.43, 1.61),
    ("quest", "fast", 1.26, 1.20, 1.26), ("infllm", "fast", 1.24, 1.18, 1.24)])
def test_bounds_from_figure_2b(method, bound, first, last, most):
    ends = latency.bound_ends(latency.bounds()).set_index(["profile", "method", "bound"])
    row = ends.loc[("figure2b", method, bound)]
    assert (row["first_ratio"], row["last_ratio"], row["most_ratio"]) == pytest.approx((first, last, most), abs=0.01)


def test_shares_and_the_projection():
    found = latency.shares().set_index(["profile", "method", "context_tokens"]).sort_index()
    assert found.loc[("figure2b", "quest"), "selection_frac"].iloc[[0, -1]].round(3).tolist() == [0.221, 0.355]
    assert found.loc[("figure2b", "infllm"), "selection_frac"].iloc[[0, -1]].round(3).tolist() == [0.249, 0.405]
    assert found.loc[("nsight", "quest"), "selection_frac"].iloc[[0, -1]].round(3).tolist() == [0.107, 0.229]
    assert found.loc[("figure2b", "infllm"), "path_frac"].iloc[[0, -1]].round(3).tolist() == [0.629, 0.707]
    stages = latency.stages().groupby(["profile", "method", "context_tokens"])["share_frac"].sum()
    assert stages.tolist() == pytest.approx([1] * 24)
    grown = latency.projection()
    assert (grown["sm_idle_frac"] * 100).round(2).tolist() == [87.08, 93.54, 96.77, 98.38]
    assert grown.iloc[0][["sm_used_frac", "dram_frac"]].round(4).tolist() == [0.1292, 0.2470]


def test_means_of_the_printed_speedups():
    means = latency.speedup_means().set_index(["method", "model", "stage"])["mean_ratio"].sort_index().round(3)
    for method, wanted in (("quest", [1.002, 1.170, 1.383]), ("infllm", [1.010, 1.239, 1.469])):
        assert means.loc[(method, "all")].tolist() == wanted
    assert means.loc[("infllm", "GLM-4-9B-1M")].tolist() == [1.012, 1.304, 1.562]
    cells = printed.means().set_index(["quantity", "method", "model"])["mean_frac"]
    assert [round(cells[key], 4) for key in (("coverage", "quest", "all"), ("coverage", "infllm", "all"))] == [0.9802,
                                                                                                           0.9844]


def test_tables_are_as_printed():
    one, eight, three = latency.table1(), latency.table8(), latency.table3()
    assert len(one) == 12 and one.loc[0, ["LongBench", "MATH500", "average"]].tolist() == [1.5, 1.42, 1.42]
    assert eight["stage"].tolist() == ["S1", "S2", "S3"] * 12 and len(latency.table8(2)) == 3
    row = eight[(eight["model"] == "Qwen3-32B") & (eight["method"] == "infllm") & (eight["stage"] == "S2")].iloc[0]
    assert row[["LongBench", "InfiniteBench", "RULER", "AIME", "MATH500", "average"]].tolist() \
        == [1.11, 1.11, 1.09, 1.12, 1.13, 1.11]
    assert three.loc[3, ["block_tokens", "8192 tokens"]].tolist() == [128, 3.71] and len(latency.table6()) == 8


# --- budgets

def test_deltas_fit_and_the_next_larger_does_not():
    found = latency.deltas()
    assert (found["speculation_us"] <= found["window_us"] * (1 + 1e-9)).all()
    row = found.query("profile == 'figure2b' and method == 'quest' and context_tokens == 16384 and fixed_frac == 0")
    assert row.set_index("kernel")["predicted_ratio"].to_dict() == pytest.approx({
        "serial DSA's": int(100 * 3.71 / 6.87) / 100, "PRR's": int(100 * 3.71 / 6.87 * 2.2192) / 100})
    wide = latency.delta_table(found)
    assert list(wide)[4:-1] == ["16K", "32K", "64K", "128K", "256K", "512K"] and len(wide) == 16


def test_what_fits_is_best():
    three = latency.three_budgets().drop_duplicates("way").set_index("way")["speedup_ratio"]
    assert three["fits"] > max(three["too small"], three["too large"])
    for _, line in latency.tradeoff().groupby(["method", "context_tokens"]):
        chosen = line[line["chosen"]]
        assert len(chosen) == 1
        assert chosen["speedup_ratio"].item() == pytest.approx(line["speedup_ratio"].max(), abs=2e-3)


def test_coverage_is_the_recorded_one_and_nothing_is_guessed():
    curve = [latency.covered("quest", ratio) for ratio in (0, 0.25, 0.5, 1, 1.1, 2)]
    assert curve == sorted(curve) and curve[0] == 0 and curve[3] == pytest.approx(0.8950, abs=1e-4)
    assert latency.covered("infllm", 1, "last step") < latency.covered("infllm", 1)
    with pytest.raises(ValueError, match=r"\|P\| / \|A\| ratio is 2.5; the stage times know: 0 to 2"):
        latency.covered("quest", 2.5)


def test_extrapolation_is_shown_with_its_error():
    found = latency.extrapolated().set_index(["profile", "method", "context_tokens"])["error_frac"]
    assert found[("figure2b", "quest", 524288)] == pytest.approx(0.38, abs=0.005) and len(found) == 12
    assert abs(found[("nsight", "quest", 524288)]) < 0.1
    chosen = latency.fits().query("chosen and stage == 'selection'").set_index(["profile", "method"])["degree"]
    assert chosen.to_dict() == {("figure2b", "quest"): 2, ("figure2b", "infllm"): 2, ("nsight", "quest"): 1,
                                ("nsight", "infllm"): 1}


# --- baselines

def test_baselines_keep_their_order(baselines):
    wide = baselines.pivot(index=["profile", "method", "context_tokens"], columns="baseline", values="speedup_ratio")
    bounds = latency.bounds().set_index(["profile", "method", "context_tokens"])["hidden_ratio"]
    assert len(wide) == 24 and wide.shape[1] == 12 and (wide["serial DSA"] == 1).all()
    assert (wide.max(axis=1) <= bounds[wide.index] + 1e-9).all()
    assert (wide["oracle: P = A"] >= wide["S3: PRR"]).all() and (wide["S3: PRR"] >= wide["S2: reuse and repair"]).all()
    assert (wide["EMA, calibrated: PRR"] >= wide["random set, PRR's size"]).all()
    assert (wide["S1: reuse, or all again"] <= 1 + 1e-9).all()
    missing = latency.bounds().set_index(["profile", "method", "context_tokens"])["table3_ratio"]
    assert wide["serial DSA, faster kernel"].tolist() == pytest.approx(missing[wide.index].tolist())
    assert set(baselines["origin"]) == {"modelled"}


def test_contention_only_costs():
    found = latency.contention()
    for _, line in found.groupby(["profile", "method", "context_tokens"]):
        assert line["speedup_ratio"].is_monotonic_decreasing
    assert list(latency.contention_table(found))[3:-1] == [f"slower by {slow:g}" for slow in latency.HAMPERED]


def test_cells_fill_from_what_is_there(tmp_path, monkeypatch):
    published = latency.cells()
    assert (published["basis"] == "printed").sum() == 72 and set(published["basis"]) == {"printed", "published stages"}
    modelled = published[published["basis"] != "printed"]
    assert set(modelled["model"]) == {"GLM-4-9B-1M"} and set(modelled["origin"]) == {"modelled"}
    wanted = [claim for claim in claims.load() if claim.where.get("basis") == "our stages"]
    assert wanted and all(claims._absent(claim, published) for claim in wanted)
    own = timed_rows(model="Llama3-8B-1M")
    own["context_tokens"] *= 8  # 128K is one of them
    files = latency.files()
    for name in ("a", "b"):
        stage_times.write(tmp_path / f"{name}.csv", own, what="a test", device="A", per="layer", origin="measured",
                          source="here", driver="1", versions={}, command="none", started="now")
        files.append(stage_times.read(tmp_path / f"{name}.csv"))
    monkeypatch.setattr(latency, "files", lambda: files)
    found = latency.cells()
    mine = found[found["basis"] == "our stages"]
    assert set(mine["profile"]) == {"a"} and set(mine["model"]) == {"Llama3-8B-1M"} and len(mine) == 2 * 6
    (claim,) = [claim for claim in wanted if (claim.where["model"], claim.where["method"]) == ("Llama3-8B-1M", "quest")]
    value, origin = claims.lookup(claim, found)
    stages = stage_times.stages(files[-1], "quest", 131072)
    coverage = printed.averages(printed.coverage()).query("method == 'quest' and model == 'Llama3-8B-1M'")
    repaired = timeline.step(stages, "repair", 2.0, 1 - coverage["coverage_frac"].item())
    assert stages.selection < timeline.at(stages.speculation, 2.0) and origin == "modelled"
    assert value >= timeline.latency(timeline.step(stages, "serial")) / timeline.latency(repaired)
    assert len(latency.cell_table(found)) == len(latency.cell_table(published)) + 2


# --- the audit

def test_every_computable_item_is_audited(lines):
    assert list(dict.fromkeys(lines["item"])) == ["1", "2", "3", "4", "5", "6", "7", "8", "9", "11", "12", "13", "bar"]
    assert lines["line"].is_unique and list(lines) == list(audit.COLUMNS)
    for column in ("about", "one_source", "other_source", "unit", "settled_by"):
        assert lines[column].str.len().gt(2).all()
    assert (lines["one_source"] != lines["other_source"]).all() and lines[["one", "other"]].notna().all(axis=None)
    words = " ".join(lines["about"] + lines["settled_by"]).lower()
    assert not re.search(r"wrong|error|mistake|false|fake|claim|mislead", words)
    assert audit.counts(lines)["lines_count"].sum() == len(lines)


@pytest.mark.parametrize(("line", "one", "other", "agree"), [
    ("1.1", 0.41, (4.18 + 6.40) / 16.81, False), ("1.3", 0.41, 8.60 / 21.23, True),
    ("2.1", 1.42, 1.3827, False), ("2.2", 1.35, 1.3827, False), ("2.4", 1.47, 1.469, True), ("3.1", 1.42, 1.41, False),
    ("4.1", 1.20, 1.09, False), ("4.4", 1.32, 1.31, False), ("5.1", 0.7, 0.718, False), ("5.2", 0, 6, False),
    ("5.3", 0.65, 0.629, False), ("5.4", 0.65, 0.658, True), ("5.6", 0.68, 0.6696, False), ("6.1", 0.97, 0.9646, False),
    ("7.1", 0.40, 1 - 1 / 1.64, False), ("8.1", 0.4, 0.3312, True), ("8.2", 0.4, 0.4736, False),
    ("8.3", 0.1288, 0.0866, False), ("9.1", 3.71 / 16.81, 44.48 / 417.31, False),
    ("9.5", 1.3827, 410.34 / (410.34 - 63.58), False), ("11.3", 1.64, 16.81 / (16.81 - 6.40), False),
    ("11.4", 0, 3, False), ("12.1", 1, 6.40 / 6.87, False), ("13.1", 0.91, 0.54, False), ("13.2", 0.91, 0.65, False),
    ("13.3", 1.002, 16.81 / (6.87 + 6.87 + 6.23), False), ("bar.1", 1.17, 16.81 / (16.81 - 6.87 / 2), False),
    ("bar.8", 1.2387, 471.39 / (471.39 - 65.66 / 2), True)])
def test_lines_by_hand(lines, line, one, other, agree):
    row = lines.set_index("line").loc[line]
    assert (row["one"], row["other"]) == pytest.approx((one, other), abs=6e-5) and row["agree"] == agree


# --- the paper's figures and tables

def mentioned(text):
    """`Tables 4 and 7; Figure 2b` -> {"Table 4", "Table 7", "Figure 2b"}."""
    found = set()
    for kind, numbers in re.findall(r"(Table|Figure)s? (\d[a-z]?(?:(?:,| and| or) \d[a-z]?)*)", text):
        found |= {f"{kind} {number}" for number in re.findall(r"\d[a-z]?", numbers)}
    return found


def test_every_figure_and_table_of_the_paper_has_its_place():
    items, shelf = printed.items(), {book.name: book for book in books.shelf()}
    assert items["item"].tolist() == [*(f"Figure {n}" for n in ("1", "2a", "2b", "3", "4", "5", "6")),
                                      *(f"Table {n}" for n in range(1, 9))]
    for row in items.to_dict("records"):
        book = shelf[row["notebook"]]
        assert row["key"] in (book.figures if row["kind"] == "figure" else book.tables), row
    theirs = [claim for claim in claims.load() if "arXiv 2606.30389" in claim.source or "PRR's" in claim.source]
    said = [mentioned(claim.source) for claim in theirs]
    assert set().union(*said) == set(items["item"])
    for item in items["item"]:
        assert any(item in one for one in said), f"no claim is about {item}"


# --- the verbs

def test_prr_budget(cli, tmp_path):
    ran = cli("prr", "budget", "--stages", "nsight", "--kernel", 1, "--json")
    told = json.loads(ran.out)
    assert ran.code == 0 and told["device"] == "NVIDIA H100" and told["origin"] == "modelled"
    assert told["selection_degree"] == 1 and len(told["degrees"]) == 8
    first = told["deltas"][0]
    assert (first["context_tokens"], first["limit"], first["beyond"]) == (16384, "window", False)
    assert first["predicted_ratio"] == pytest.approx(int(100 * 44.48 / 63.94) / 100)
    table = cli("prr", "budget", "--context", 20000, "--context", 1000000)
    assert table.code == 0 and "predicted (ratio)" in table.out and "True" in table.out
    own = tmp_path / "mine.csv"
    stage_times.write(own, timed_rows(), what="a test", device="A", per="layer", origin="measured", source="here",
                      driver="1", versions={}, command="none", started="now")
    told = json.loads(cli("prr", "budget", "--stages", own, "--device", "A", "--page", 16, "--budget", 128, "--model",
                          "m", "--json").out)
    assert [round(one["predicted_ratio"] * 128) for one in told["deltas"]] == [108, 115, 128]
    assert "kernel_ratio" not in told


def test_prr_timeline(cli):
    asked = ("prr", "timeline", "--context", 16384, "--ratio", 1, "--coverage", 0.9, "--kernel", 2, "--json")
    told = json.loads(cli(*asked).out)
    ways = {one["way"]: one["latency_us"] for one in told["ways"]}
    assert ways == pytest.approx({"serial": 16810, "fast": 13375, "reuse": 9940, "recompute": 19970,
                                  "repair": 9940 + 343.5})
    assert [event["stage"] for event in told["events"]] == ["selection", "speculation", "repair", "after"]
    assert told["overlap_bound_ratio"] == pytest.approx(16.81 / 13.10)
    slower = json.loads(cli(*asked, "--contention", "0.5,0.5").out)
    assert slower["ways"][-1]["latency_us"] > ways["repair"]
    table = cli("prr", "timeline", "--stages", "nsight", "--method", "infllm")
    assert table.code == 0 and "repair" in table.out and table.err == ""


@pytest.mark.parametrize(("arguments", "says"), [
    (["budget", "--context", "9999999"], "context is 9999999 tokens; allowed: 16384 to 1048576"),
    (["budget", "--context", "100", "--far"], "context is 100 tokens; allowed: 16384"),
    (["budget", "--device", "H200"], "device is H200; the profile is of NVIDIA H100"),
    (["budget", "--method", "nsa"], "method is 'nsa'; figure2b has: quest, infllm"),
    (["budget", "--page", "16"], "page_tokens is 16; the profile does not say which it is of"),
    (["budget", "--stages", "mine"], "stage times are 'mine'; allowed: figure2b, nsight"),
    (["budget", "--kernel", "0"], "kernel_ratio is 0.0; allowed: above 0"),
    (["timeline", "--context", "100"], "context is 100 tokens; figure2b has quest at: 16384"),
    (["timeline", "--contention", "much"], "contention is 'much'; allowed: two numbers, as 0.2,0.1"),
    (["timeline", "--contention=-1,0"], "contention of selection is -1.0; allowed: at least 0"),
    (["timeline", "--coverage", "2"], "missed is -1; allowed: 0 to 1"),
    (["timeline", "--ratio", "9"], "speculation ratio is 9; the stage times know: 0 to 4")])
def test_what_the_verbs_refuse_is_one_line_and_exit_2(cli, arguments, says):
    ran = cli("prr", *arguments)
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1 and says in ran.err


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda f: f[f["stage"] != "ffn"], "has no stage ffn; needed: selection, attention, ffn"),
    (lambda f: f[~((f["stage"] == "speculation") & (f["context_tokens"] == 8192))], "has no stage speculation of 0.5"),
    (lambda f: f.assign(time_us=-1.0), "time_us is -1.0; allowed: numbers of at least 0"),
    (lambda f: f.assign(device=["A", "B"] * (len(f) // 2)), "device is A and B; a file is of one device"),
    (lambda f: pd.concat([f, f.iloc[:1]]), "stands there twice")])
@pytest.mark.parametrize("verb", ["budget", "timeline"])
def test_a_bad_file_of_stage_times_is_one_line_and_exit_2(cli, tmp_path, verb, spoil, says):
    own = tmp_path / "mine.csv"
    spoil(timed_rows()).to_csv(own, index=False)
    told = {"what": "a test", "device": "A", "per": "layer", "origin": "measured", "source": "here", "driver": "1",
            "versions": {}, "command": "none", "started": "now", "sha256": results.sha256(own)}
    own.with_suffix(".json").write_text(json.dumps(told))
    ran = cli("prr", verb, "--stages", own)
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1 and says in ran.err


def test_frames_are_results(tmp_path, baselines, lines):
    """Every frame of the three notebooks is one that may be written: units, origins."""
    made = {name: getattr(latency, name)() for name in (
        "dataflow", "stages", "utilization", "stage_utilization", "teaser", "three_budgets")}
    for name, frame in {**made, "baselines": baselines, "audit": lines}.items():
        results.write(frame, tmp_path / f"{name}.csv")
        pd.testing.assert_frame_equal(results.read(tmp_path / f"{name}.csv")[["origin"]].astype(str),
                                      frame[["origin"]].astype(str).reset_index(drop=True))


# --- figures of what is not there yet

def test_stage_times_of_our_own_stand_beside_the_published(tmp_path, monkeypatch):
    own = timed_rows(model="Llama3-8B-1M")
    own["context_tokens"] *= 8
    stage_times.write(tmp_path / "h200.csv", own, what="a test", device="A", per="layer", origin="measured",
                      source="here", driver="1", versions={}, command="none", started="now")
    files = [*latency.files(), stage_times.read(tmp_path / "h200.csv")]
    monkeypatch.setattr(latency, "files", lambda: files)
    for key, frame in (("stages", latency.stages()), ("bounds", latency.bounds()), ("speedups", latency.cells()),
                       ("baselines", latency.baselines())):
        drawn = figures.draw(key, frame)
        assert drawn.layout.height <= 900
        shown = json.dumps(drawn.to_plotly_json(), default=str)
        assert "h200" in shown
    bars = [bar for bar in figures.draw("stages", latency.stages()).data if bar.type == "bar"]
    hollow = [bar for bar in bars if bar.marker.color.startswith("rgba")]
    assert len(hollow) == 3 * 2 + 4 * 2 and len(bars) - len(hollow) == 4 * 2, "ours are filled"


@pytest.mark.parametrize(("select", "ratio"), [(3, 0), (900, 2)])
def test_stage_times_with_nearly_no_window_or_a_wide_one(tmp_path, monkeypatch, select, ratio):
    own = timed_rows()
    own.loc[own["stage"] == "selection", "time_us"] = select
    stage_times.write(tmp_path / "a.csv", own, what="a test", device="A", per="layer", origin="measured", source="here",
                      driver="1", versions={}, command="none", started="now")
    files = [stage_times.read(tmp_path / "a.csv")]
    monkeypatch.setattr(latency, "files", lambda: files)
    found = latency.baselines().set_index(["method", "context_tokens", "baseline"])
    row = found.loc[("quest", 4096, "S3: PRR")]
    assert row["predicted_ratio"] == ratio and row["coverage_frac"] == min(ratio, 0.9805)
    whole = select + 5 + 90
    assert row["latency_us"] == pytest.approx(whole + (23 if ratio == 0 else 3 + 20 * (1 - 0.9805)))
    assert len(found) == 2 * 3 * (12 if ratio == 0 else 11), "what was not timed has no row"


@pytest.mark.parametrize(("key", "change", "says"), [
    ("stages", {"method": "nsa"}, "method 'nsa' has no colour; allowed: quest, infllm"),
    ("stages", {"time_us": "long"}, "column 'time_us' holds 'long'; it must hold numbers"),
    ("bounds", {"origin": "published"}, "every row is published"),
    ("baselines", {"context_tokens": 1}, "no rows with context_tokens in: 131072")])
def test_what_cannot_be_drawn_is_said(baselines, key, change, says):
    frame = {"stages": latency.stages, "bounds": latency.bounds, "baselines": lambda: baselines}[key]()
    with pytest.raises(ValueError, match=says):
        figures.draw(key, frame.assign(**change))
