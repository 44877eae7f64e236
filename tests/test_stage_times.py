"""Stage times and the PRR paper's other tables as data: what is printed, what adds up, which files are refused."""

import csv
import json

import pandas as pd
import pytest

from artifact.prr import timeline
from artifact.study import paths, printed, results, stage_times

FILES = ("figure2b", "nsight")
SAID = {"Quest": "quest", "InfLLM-v2": "infllm"}
MANIFEST = {"what": "stages of a test", "device": "A", "per": "layer", "origin": "measured", "source": "this test",
            "driver": "1", "versions": {"torch": "2"}, "command": "artifact gpu profile", "started": "now"}


@pytest.fixture(scope="module")
def golden(root):
    folder = root.parent / "shared" / "golden"
    if not (folder / "prr_paper_tables.json").is_file():
        pytest.skip("../shared/golden is not there: the printed tables cannot be compared with it")
    with open(folder / "prr_utilization.csv") as file:
        return json.loads((folder / "prr_paper_tables.json").read_text()), list(csv.DictReader(file))


def rows(**changes):
    """A whole file: two methods, three contexts, all stages; in random order of nothing in particular."""
    made = []
    for method in ("quest", "infllm"):
        for context in (4096, 8192, 16384):
            times = {("qkv", None): 5, ("selection", None): 20 + context / 4096}
            times |= {("attention", 1): 50, ("ffn", None): 90}
            times |= {("speculation", ratio): 4 + 20 * ratio for ratio in (0.5, 1, 2)}
            times |= {("repair", ratio): 3 + 20 * ratio for ratio in (0, 1)}
            made += [{"device": "A", "model": "m", "method": method, "page_tokens": 16, "budget_count": 128,
                      "context_tokens": context, "stage": stage, "attended_ratio": ratio, "time_us": time,
                      "source": "here", "origin": "measured"} for (stage, ratio), time in times.items()]
    return pd.DataFrame(made).assign(**changes)


# --- what is printed

def test_stage_times_are_the_published_ones(golden):
    facts, profile = golden
    bars = stage_times.read("figure2b").rows
    for method, name in SAID.items():
        one = facts["fig2b_latency_ms_per_step"][method]
        for stage, wanted in (("selection", one["sel_ms"]), ("attention", [one["attn_ms"]] * 6),
                              ("ffn", [one["ffn_ms"]] * 6)):
            part = bars[(bars["method"] == name) & (bars["stage"] == stage)]
            assert (part["context_tokens"] / 1024).tolist() == facts["fig2b_latency_ms_per_step"]["ctx_k"]
            assert (part["time_us"] / 1000).tolist() == pytest.approx(wanted, abs=1e-9)
    theirs = {"qkv": "qkv_pre", "total": "LAYER", "layer": "LAYER"}
    kernels, used = stage_times.read("nsight").rows, printed.utilization("profile")
    assert len(kernels) == len(used) == len(profile) == 60
    for frame, columns in ((kernels, {"time_us": ("dur_us", 1)}),
                           (used, {f"{part}_frac": (f"{part}_pct", 100) for part in ("sm", "l2", "dram")})):
        for row in frame.to_dict("records"):
            (cell,) = [one for one in profile if one["method"] == row["method"]
                       and int(one["context_k"]) * 1024 == row["context_tokens"]
                       and one["stage"] == theirs.get(row["stage"], row["stage"])]
            for column, (name, unit) in columns.items():
                assert row[column] == pytest.approx(float(cell[name]) / unit, abs=1e-9)


def test_the_other_tables_are_the_papers(golden):
    facts, _ = golden
    one, eight, two = (printed.speedups(table) for table in (1, 8, 2))
    for frame, key in ((one, "table1"), (eight, "table8")):
        (cells,) = (value for name, value in facts.items() if name.startswith(key))
        wanted = [value for method in SAID for model in facts["models"] for value in cells[method][model]]
        assert frame["speedup_ratio"].tolist() == wanted
    assert two["speedup_ratio"].tolist() == eight[(eight["method"] == "infllm") & (eight["model"] == "GLM-4-9B-1M")][
        "speedup_ratio"].tolist()
    three = facts["table3_kernel_speedup_vs_flashinfer_bsr"]["rows"]
    assert printed.kernels()["speedup_ratio"].tolist() == [value for line in three.values() for value in line]
    six, cells = printed.utilization("6"), facts["table6_batch_utilization_pct"]
    for part, column in (("SM", "sm_frac"), ("L2", "l2_frac"), ("DRAM", "dram_frac")):
        assert six[column].tolist() == pytest.approx(
            [value / 100 for method in SAID for value in cells[method][part]], abs=1e-9)


def test_published_numbers_say_where_they_stand():
    for name, key in (("speedup", ["table", "cell"]), ("kernels", ["cell"]), ("utilization", ["table", "cell"]),
                      ("statements", ["statement"])):
        frame = results.read(paths.data_dir() / "published" / f"prr_{name}.csv")
        assert set(frame["origin"]) == {"published"} and frame["source"].notna().all()
        assert not frame.duplicated(key).any()
        if "printed" in frame:
            shown = frame["printed"].astype(str)
            assert shown.map(lambda text: float(text.split()[0])).gt(0).all()
    for name in FILES:
        found = stage_times.read(name)
        assert found.manifest.origin == "published" and found.rows["cell"].is_unique
    assert stage_times.names() == sorted(FILES)


def test_times_of_kernels_and_of_whole_steps_are_no_stage_times(tmp_path, monkeypatch):
    """They lie beside them, in columns of their own."""
    (tmp_path / "stage_times").mkdir()
    for name in ("kernels_h100", "steps_h100", "h100"):
        (tmp_path / "stage_times" / f"{name}.csv").write_text("origin\nmeasured\n")
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path)
    assert stage_times.names() == ["h100"]


def test_printed_numbers_and_values_are_the_same():
    for row in pd.read_csv(paths.data_dir() / "published" / "prr_speedup.csv", dtype=str).to_dict("records"):
        assert float(row["printed"]) == float(row["speedup_ratio"]) and len(row["printed"].partition(".")[2]) == 2
    used = results.read(paths.data_dir() / "published" / "prr_utilization.csv")
    for row in used.to_dict("records"):
        shown = [float(text) / 100 for text in row["printed"].split()]
        assert [row["sm_frac"], row["l2_frac"], row["dram_frac"]] == pytest.approx(shown)
    for name, unit in (("figure2b", 1000), ("nsight", 1)):
        found = stage_times.read(name).rows
        assert [float(text.split()[0]) * unit for text in found["printed"]] == pytest.approx(found["time_us"].tolist())


def test_what_is_published_adds_up():
    kernels = stage_times.read("nsight").rows.pivot(index=["method", "context_tokens"], columns="stage",
                                                    values="time_us")
    parts = kernels[["qkv", "selection", "attention", "ffn"]].sum(axis=1)
    assert (parts - kernels["total"]).abs().max() <= 0.021  # five printed roundings of half a hundredth each
    one, eight = (printed.speedups(table).set_index(["method", "model", "benchmark", "stage"])["speedup_ratio"]
                  for table in (1, 8))
    last = eight[eight.index.get_level_values("stage") == "S3"]
    cells = last.index.get_level_values("benchmark") != "average"
    assert len(last) == len(one) == 72 and (last[cells] == one[last.index][cells]).all()
    for found in (printed.speedups(8), printed.speedups(1)):
        means = printed.cells(found).groupby(["method", "model", "stage"])["speedup_ratio"].mean()
        shown = printed.averages(found).set_index(["method", "model", "stage"])["speedup_ratio"]
        assert (means - shown).abs().max() < 0.011
    assert printed.kernel_mean() == pytest.approx(2.22, abs=0.005)


# --- files

def test_a_file_of_our_own_is_kept_and_read(tmp_path):
    stage_times.write(tmp_path / "a.csv", rows(), **MANIFEST)
    found = stage_times.read(tmp_path / "a.csv")
    assert found.manifest.versions == {"torch": "2"} and stage_times.contexts(found, "infllm") == [4096, 8192, 16384]
    assert not stage_times.modelled(found) and stage_times.modelled(stage_times.read("nsight"))
    stages = stage_times.stages(found, "quest", 8192)
    assert stages == timeline.Stages(5, 22, 50, 90, ((0.5, 14), (1, 24), (2, 44)), ((0, 3), (1, 23)))
    profile = stage_times.profile(found, "quest")
    assert profile.ratios == (0.5, 1, 2) and profile.selection == (21, 22, 24) and profile.budget_count == 128
    assert profile.speculation == ((14, 24, 44),) * 3
    with pytest.raises(ValueError, match="context is 5000 tokens; a has quest at: 4096, 8192, 16384"):
        stage_times.stages(found, "quest", 5000)
    with pytest.raises(ValueError, match="method is 'nsa'; a has: quest, infllm"):
        stage_times.contexts(found, "nsa")
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text().replace("90", "91"))
    with pytest.raises(ValueError, match="changed after it was timed"):
        stage_times.read(tmp_path / "a.csv")


def test_what_is_not_timed_is_modelled_and_says_so():
    found = stage_times.read("nsight")
    stages = stage_times.stages(found, "quest", 131072, kernel_ratio=2, fixed_frac=0.5)
    assert stages.before == 68.06 and stages.attention == 63.2
    assert [timeline.at(stages.speculation, ratio) for ratio in (0, 1, 2)] == pytest.approx([15.8, 31.6, 47.4])
    default = stage_times.stages(found, "quest", 131072)
    assert timeline.at(default.repair, 1) == pytest.approx(63.2 / printed.kernel_mean())


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda f: f[f["stage"] != "ffn"], "quest at 4096 tokens has no stage ffn; needed: selection, attention, ffn"),
    (lambda f: f.drop(index=f.index[(f["stage"] == "selection") & (f["context_tokens"] == 8192)][:1]),
     "quest at 8192 tokens has no stage selection"),
    (lambda f: f.assign(time_us=f["time_us"].where(f["stage"] != "repair", -1.0)),
     r"quest at 4096 tokens, repair of 0 \|A\|: time_us is -1.0; allowed: numbers of at least 0"),
    (lambda f: f.assign(time_us=f["time_us"].where(f["stage"] != "ffn")), "ffn: time_us is nan; allowed"),
    (lambda f: f.assign(time_us="soon"), "time_us is soon; allowed: numbers"),
    (lambda f: f.assign(device=["A", "B"] * (len(f) // 2)), "device is A and B; a file is of one device"),
    (lambda f: f.assign(model=["m", "n"] * (len(f) // 2)), "model is m and n; a file is of one model"),
    (lambda f: f.assign(page_tokens=[16, None] * (len(f) // 2)), "page_tokens is 16.0 and nan; quest is timed"),
    (lambda f: pd.concat([f, f.iloc[:1]]), "quest at 4096 tokens, qkv stands there twice"),
    (lambda f: pd.concat([f, f[f["stage"] == "repair"].iloc[:1]]), r"repair of 0 \|A\| stands there twice"),
    (lambda f: f.assign(stage=f["stage"].replace("ffn", "mlp")), "stage is 'mlp'; allowed: qkv, selection"),
    (lambda f: f.assign(attended_ratio=f["attended_ratio"].fillna(1)), "attended_ratio of qkv is 1.0; allowed: none"),
    (lambda f: f.assign(attended_ratio=f["attended_ratio"].replace(1, 3)), "attended_ratio of attention is 3.0; al"),
    (lambda f: f.assign(attended_ratio=None), "quest at 4096 tokens, speculation stands there twice"),
    (lambda f: f.drop(columns="stage"), "no column 'stage'; needed: device, model"),
    (lambda f: f.assign(context_tokens=0), "context_tokens is 0; allowed: numbers of at least 1"),
    (lambda f: f[~((f["stage"] == "speculation") & (f["context_tokens"] == 8192))],
     r"quest at 8192 tokens has no stage speculation of 0.5 \|A\|, which it has at others"),
    (lambda f: f[~((f["attended_ratio"] == 2) & (f["context_tokens"] == 16384))],
     r"quest at 16384 tokens has no stage speculation of 2 \|A\|, which it has at others"),
    (lambda f: f[~((f["stage"] == "repair") & (f["method"] == "infllm"))],
     "infllm at 4096 tokens has no stage repair, which other methods have"),
    (lambda f: f[~((f["stage"] == "qkv") & (f["context_tokens"] == 4096) & (f["method"] == "quest"))],
     "quest at 4096 tokens has no stage qkv, which it has at others"),
    (lambda f: f.iloc[:0], "no rows")])
def test_rows_that_are_refused(tmp_path, spoil, says):
    bad = spoil(rows())
    with pytest.raises(ValueError, match=says) as caught:
        stage_times.write(tmp_path / "a.csv", bad, **MANIFEST)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
    bad.to_csv(tmp_path / "a.csv", index=False)
    (tmp_path / "a.json").write_text(json.dumps(MANIFEST | {"sha256": results.sha256(tmp_path / "a.csv")}))
    with pytest.raises(ValueError, match=r"a\.csv: "):
        stage_times.read(tmp_path / "a.csv")


@pytest.mark.parametrize(("change", "says"), [
    ({"sha256": None}, "one with `sha256`, as its origin is measured"),
    ({"device": "B"}, "device and origin are A, measured; its manifest says B"),
    ({"per": "token"}, "per is 'token'; it must be 'layer' or 'step'"), ({"origin": "recorded"}, "says A, recorded"),
    ({"speed": 1}, "unknown key 'speed'")])
def test_manifests_that_are_refused(tmp_path, change, says):
    stage_times.write(tmp_path / "a.csv", rows(), **MANIFEST)
    content = json.loads((tmp_path / "a.json").read_text()) | change
    (tmp_path / "a.json").write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    with pytest.raises(ValueError, match=says):
        stage_times.read(tmp_path / "a.csv")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="stage times are 'mine'; allowed: figure2b, nsight, or a CSV's path"):
        stage_times.read("mine")
    with pytest.raises(ValueError, match="no such file"):
        stage_times.read(tmp_path / "a.csv")
    stage_times.write(tmp_path / "a.csv", rows(), **MANIFEST)
    (tmp_path / "a.json").unlink()
    with pytest.raises(ValueError, match=r"a\.json: no such file; it says what the stage times beside it are"):
        stage_times.read(tmp_path / "a.csv")
