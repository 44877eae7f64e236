"""Sweeps: expansion by scale, resuming, failures, and the same bytes for the same seed."""

import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

from artifact.study import experiments, paths, scale, sensitivity, sweep
from artifact.study.serving import Cell


@pytest.fixture(scope="module")
def tiny():
    return scale.load("tiny")


def test_every_sweep_expands_at_every_scale(root):
    for path in sorted((root / "data/sweeps").glob("*.yml")):
        loaded = sweep.load(path.stem)
        counts = [len(sweep.expand(loaded, scale.load(name))) for name in scale.names()]
        assert counts == sorted(counts) and counts[0] >= 1, path.name


def test_the_headline_has_the_studys_cells():
    cells = sweep.expand(sweep.load("headline"), scale.load("full"))
    assert len(cells) == len(set(cells)) == 48
    published = {c for c, r in experiments.published_cells() if r["experiment"] == "headline"}
    assert published == set(cells)
    assert len(sweep.expand(sweep.load("heatmap"), scale.load("full"))) == 42


PHASES = {"kvheads": "kv-heads", "pressure": "vllm-pressure", "kvsplit": "kv-split",
          **{n: n for n in ("seeds", "headroom", "arrival", "batch", "speculation", "compaction")}}  # fmt: skip


@pytest.mark.parametrize(("name", "phase"), PHASES.items())
def test_a_sweep_has_the_published_cells_of_its_phase(name, phase):
    """As the study settled the settings it did not name: `auto` is what `serving` takes it for."""
    plain = {"spec_adopt": "auto"}
    own = {c.model_copy(update=plain if c.spec_adopt == _auto(c) else {}) for c in
           sweep.expand(sweep.load(name), scale.load("full"))}  # fmt: skip
    published = {c.model_copy(update=plain if c.spec_adopt == _auto(c) else {})
                 for c, r in experiments.published_cells() if r["experiment"] == phase}  # fmt: skip
    assert published and published <= own


def _auto(cell):
    return "copyback" if cell.allocator == "pim-aware" else "splice"


def test_all_sweeps_of_the_study_are_there_and_each_names_its_source():
    files = {path.stem for path in (paths.data_dir() / "sweeps").glob("*.yml")}
    assert files == {"headline", "heatmap", "maps", "options", "baselines", *sensitivity.SWEEPS}
    cells = sum(len(sweep.expand(sweep.load(name), scale.load("full"))) for name in files - {"options", "baselines"})
    assert cells > 350
    assert all("commit" in sweep.load(name).source or "KV-PIMple" in sweep.load(name).source
               or "this artifact" in sweep.load(name).source for name in files)  # fmt: skip


def test_a_scale_caps_requests_and_sizes(tiny):
    cells = sweep.expand(sweep.load("headline"), tiny)
    assert {c.requests for c in cells} == {tiny.sweep_requests}
    assert {c.block_tokens for c in cells} == set(tiny.block_tokens)
    assert {c.seed for c in sweep.expand(sweep.load("seeds"), tiny)} == set(range(tiny.sweep_seeds))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("title: t\nsource: s\ncells: []\n", "no cell is left"),
        ("title: t\nsource: s\ncells:\n- {allocator: buddy}\n", "allocator is 'buddy'"),
        ("title: t\nsource: s\ncells:\n- {speed: 3}\n", "unknown key 'speed'"),
        ("title: t\ncells: []\n", "'source' is missing"),
        ("title: t\nsource: s\ncells: []\nextra: 1\n", "unknown key 'extra'"),
        ("cells: [", "not YAML"),
    ],
)
def test_a_wrong_sweep_is_refused(tmp_path, tiny, text, complaint):
    path = tmp_path / "own.yml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        sweep.expand(sweep.load(path), tiny)


def test_unknown_sweep():
    with pytest.raises(ValueError, match="unknown sweep 'nope'; allowed: headline"):
        sweep.load("nope")


CELLS = [Cell(requests=20, allocator=a, seed=s) for a in ("paged", "random") for s in (0, 1)]


def test_finished_cells_are_not_computed_again(tmp_path, monkeypatch):
    first = sweep.compute(CELLS, keep=tmp_path, workers=1)
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 4
    monkeypatch.setattr(sweep, "run", lambda cell: pytest.fail("computed again"))
    assert sweep.compute(CELLS, keep=tmp_path, workers=1).equals(first)


def test_only_what_is_whole_is_trusted(tmp_path):
    first = sweep.compute(CELLS, keep=tmp_path, workers=1)
    cut, other, empty, fine = sorted(tmp_path.glob("*.json"))
    kept = fine.read_text()
    cut.write_text(cut.read_text()[:-40])
    other.write_text(fine.read_text())  # another cell's numbers
    empty.write_text("")
    again = sweep.compute(CELLS, keep=tmp_path, workers=1)
    assert again.equals(first) and fine.read_text() == kept
    assert json.loads(cut.read_text())["summary"]


def test_processes_give_the_same_frame():
    assert sweep.compute(CELLS, workers=2).equals(sweep.compute(CELLS, workers=1))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_cell_is_named_and_the_rest_is_kept(tmp_path, workers):
    bad = Cell(requests=20, pool_blocks=3)
    says = "1 of 5 cells failed: .*pool_blocks=3.*smaller than one region"
    with pytest.raises(sweep.CellsFailed, match=says) as found:
        sweep.compute([bad, *CELLS], keep=tmp_path, workers=workers)
    assert len(list(tmp_path.glob("*.json"))) == 4
    assert found.value.finished.equals(sweep.compute(CELLS, workers=1))


def test_a_cell_that_crashes_is_named_with_its_settings_and_the_rest_is_written(tmp_path, monkeypatch, cli):
    """Any exception, not only ours: here the counting of one allocator's tables breaks."""
    real = sweep.run

    def breaks(cell, **how):
        return 1 // 0 if cell.allocator == "random" else real(cell, **how)

    monkeypatch.setattr(sweep, "run", breaks)
    path, out = tmp_path / "own.yml", tmp_path / "out.csv"
    path.write_text("title: t\nsource: s\ncells:\n- {requests: 20, allocator: [paged, random, pim-aware], seed: 3}\n")
    ran = cli("kv", "sweep", path, "--workers", 1, "--out", out)
    assert ran.code == 1 and ran.err.count("\n") == 1
    assert "1 of 3 cells failed: allocator=random requests=20 seed=3: ZeroDivisionError" in ran.err
    assert list(pd.read_csv(out)["allocator"]) == ["paged", "pim-aware"]
    assert cli("kv", "sweep", path, "--workers", 1).out.count("\n") == 3


def test_a_cell_that_kills_its_process_is_named_and_the_rest_is_computed(monkeypatch):
    real = sweep._numbered

    def deadly(i, cell, preset):
        if cell.seed == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(i, cell, preset)

    monkeypatch.setattr(sweep, "_numbered", deadly)
    bad = Cell(requests=20, seed=7)
    with pytest.raises(sweep.CellsFailed, match="1 of 5 cells failed: requests=20 seed=7: its process died") as found:
        sweep.compute([*CELLS[:2], bad, *CELLS[2:]], workers=2, quiet=True)
    monkeypatch.undo()
    assert found.value.finished.equals(sweep.compute(CELLS, workers=1))


def test_the_same_seed_gives_the_same_bytes(tiny):
    for experiment in (experiments.headline, experiments.maps, experiments.placement_map):
        assert experiment(tiny).to_csv(index=False) == experiment(tiny).to_csv(index=False)


def test_gains_by_rate_and_by_time(tiny):
    frame = experiments.headline(tiny)
    gains = experiments.gains(frame)
    assert "paged" not in set(gains["allocator"])
    pick = (frame["workload"] == "steady") & (frame["block_tokens"] == 16)
    cells = frame[pick].set_index("allocator")
    row = gains[(gains["workload"] == "steady") & (gains["block_tokens"] == 16)].set_index("allocator").loc["pim-aware"]
    for name, metric in (("mean", "m3_bandwidth_gbps"), ("total", "m3_total_gbps"), ("busiest", "m3_busiest_gbps")):
        expected = cells.loc["pim-aware", metric] / cells.loc["paged", metric]
        assert row[f"gain_{name}_ratio"] == pytest.approx(expected)


def test_throughput_obeys_amdahl(tiny):
    frame = experiments.throughput(experiments.headline(tiny))
    aware = frame[frame["allocator"] == "pim-aware"].set_index("attention_share_frac")
    paged = frame[frame["allocator"] == "paged"].set_index("attention_share_frac")
    assert (paged["gain_throughput_ratio"] == 1).all()
    assert aware["gain_throughput_ratio"].is_monotonic_increasing
    whole = paged.loc[1.0, "attention_time_us"] / aware.loc[1.0, "attention_time_us"]
    batch = aware.loc[1.0, "batch_mean_count"] / paged.loc[1.0, "batch_mean_count"]
    assert aware.loc[1.0, "gain_throughput_ratio"] == pytest.approx(whole * batch)
    assert set(frame["origin"]) == {"modelled"}


def test_published_cells_above_the_cap_are_listed_not_run(tiny):
    frame = experiments.published(tiny)
    assert frame["equal_count"].isna().all() and set(frame["origin"]) == {"published"}
    counts = experiments.agreement(frame).set_index("experiment")
    assert counts.loc["all", "run_count"] == 0 and counts.loc["headline", "published_count"] == 48


def test_traces_run_where_files_are(tmp_path, tiny):
    (tmp_path / "chat.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:{i % 60:02d}.0,{50 + i},{5 + i % 9}\n" for i in range(30))
    )
    frame = experiments.traces(tiny, folder=tmp_path)
    assert set(frame["trace"]) == {"chat.csv"} and len(frame) == 4


def test_ctrl_c_is_one_line_and_the_next_run_goes_on(tmp_path, foreground):
    """SIGINT to the whole group, as a terminal sends it, once the first cells are kept."""
    keep, out = tmp_path / "keep", tmp_path / "out.csv"
    command = [sys.executable, "-m", "artifact", "kv", "sweep", "headline", "--keep", keep, "--out", out]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True,
                               preexec_fn=foreground)
    while running.poll() is None and len(list(keep.glob("*.json"))) < 2:
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    said = running.communicate()[1]
    kept = len(list(keep.glob("*.json")))
    assert running.returncode == 130 and said.strip() == "artifact: interrupted; finished results are kept"
    assert not out.exists() and 2 <= kept < 48
    assert subprocess.run(command).returncode == 0
    assert len(pd.read_csv(out)) == 48 == len(list(keep.glob("*.json")))
