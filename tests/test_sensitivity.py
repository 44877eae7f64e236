"""Notebook 12's experiments: what the options do to a cell, gains over seeds and traces, and gates that can fail."""

import numpy as np
import pandas as pd
import pytest

from artifact.pim import bandwidth
from artifact.study import experiments, gates, intervals, scale, sensitivity, serving, sweep
from artifact.study.serving import Cell, run

WHOLE = {"sample_sequences": 64, "sample_every": 32}


@pytest.fixture(scope="module")
def tiny():
    return scale.load("tiny")


@pytest.fixture(scope="module")
def sweeps(tiny):
    return sensitivity.sweeps(tiny)


# --- options of a cell

def test_options_are_off_unless_asked_for():
    assert Cell().as_studied
    for given in ({"base_bytes": 32}, {"block_layout": "head-major"}, {"turn_tokens": 16, **WHOLE},
                  {"charged": "moves", **WHOLE}):  # fmt: skip
        assert not Cell(**given).as_studied


@pytest.mark.parametrize("workload", ["steady", "prefix"])
def test_a_turn_longer_than_every_sequence_reads_each_alone(workload):
    """Then a step's group is its sequences one after another, and only the open row may carry over."""
    alone, samples = run(Cell(workload=workload, requests=40, **WHOLE))
    whole, groups = run(Cell(workload=workload, requests=40, turn_tokens=1 << 20, **WHOLE))
    assert groups["bursts"].sum() == samples["bursts"].sum() and groups["commands"].sum() == samples["commands"].sum()
    saved = groups["hits"].sum() - samples["hits"].sum()
    assert 0 <= saved <= (samples["tokens"].size - groups["tokens"].size) * 32
    assert groups["tokens"].sum() == samples["tokens"].sum() and set(groups["step"]) == set(samples["step"])
    assert np.isnan(whole["region_spread"]) and alone["region_spread"] >= 1


def test_a_pool_that_begins_after_whole_regions_is_the_studys():
    plain, _ = run(Cell(allocator="pim-aware", requests=40))
    moved, _ = run(Cell(allocator="pim-aware", requests=40, base_bytes=5 * 512 * 1024))
    assert moved == plain
    inside, _ = run(Cell(allocator="pim-aware", requests=40, base_bytes=256 * 1024))
    assert inside["m1_row_hit_frac"] < plain["m1_row_hit_frac"]
    placed = ("block_adjacency_frac", "same_region_frac", "region_spread", "decode_steps", "samples")
    assert all(inside[name] == plain[name] for name in placed)  # the allocator knows nothing of it


def test_charged_moves_only_add_time():
    """Writes only under steady traffic; under speculation also copies, read and written at the run's own rate."""
    for workload in ("steady", "spec"):
        plain, samples = run(Cell(workload=workload, requests=40, **WHOLE))
        charged, more = run(Cell(workload=workload, requests=40, charged="moves", **WHOLE))
        assert (more["m4_latency_ns"] > samples["m4_latency_ns"]).all()
        assert (more["m3_bandwidth_gbps"] < samples["m3_bandwidth_gbps"]).all()
        assert np.allclose(more["m3_bandwidth_gbps"] * more["m4_latency_ns"], samples["kv_bytes"])
        assert np.array_equal(more["bursts"] - samples["bursts"], np.full(more["bursts"].size, 128))
        assert charged["copied_bytes"] == plain["copied_bytes"] and (plain["copied_bytes"] > 0) == (workload == "spec")
    written = bandwidth.metrics(bandwidth.Counts(more["bursts"], more["commands"], more["commands"] - more["hits"],
                                                 more["m4_busiest_ns"]), more["bursts"] * 32, Cell().memory)
    extra = more["m4_latency_ns"] - written.m4_latency_ns
    assert np.allclose(extra, extra[0])
    read_gbps = more["kv_bytes"].sum() / written.m4_latency_ns.sum()
    copied_ns = extra.sum() * 32  # every 32nd step was sampled, whole
    assert copied_ns == pytest.approx(2 * charged["copied_bytes"] / read_gbps, rel=1e-9)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"turn_tokens": 16}, "turn_tokens is about the whole batch, and sample_sequences is 8; allowed: at least"),
        ({"charged": "moves"}, "charged moves is about the whole batch"),
        ({"charged": "all"}, "charged is 'all'; allowed: 'reads' or 'moves'"),
        ({"block_layout": "rows"}, "block_layout is 'rows'; allowed: 'token-major', 'head-major' or 'head-channels'"),
        ({"base_bytes": -32}, "base_bytes is -32"),
        ({"turn_tokens": 0, **WHOLE}, "turn_tokens is 0"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(given, says):
    with pytest.raises(ValueError, match=says) as raised:
        Cell(**given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"base_bytes": 33}, "base_bytes is 33; allowed: a multiple of 32"),
        ({"base_bytes": 8 << 30}, "allowed: at most the 8589934592 bytes of hbm3-pim"),
        ({"block_layout": "head-channels", "kv_shards": 8, "dram": "gddr6-pim", "model": "mha-32kv"}, "4 KV heads in"),
    ],
)
def test_an_option_that_the_memory_cannot_have_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        run(Cell(requests=20, **given))


def test_options_reach_the_command_line(cli):
    plain = cli("kv", "simulate", "--requests", 20, "--allocator", "pim-aware")
    moved = cli("kv", "simulate", "--requests", 20, "--allocator", "pim-aware", "--base-bytes", 262144)
    turns = cli("kv", "simulate", "--requests", 20, "--turn-tokens", 16, "--sample-sequences", 64, "--charged", "moves")
    heads = cli("kv", "simulate", "--requests", 20, "--block-layout", "head-channels")
    assert (plain.code, moved.code, turns.code, heads.code) == (0, 0, 0, 0) and plain.out != moved.out
    refused = cli("kv", "simulate", "--requests", 20, "--turn-tokens", 16)
    assert refused.code == 2 and refused.err.count("\n") == 1 and "whole batch" in refused.err


# --- gains, intervals, drift

def test_gains_compare_the_same_cell_and_no_other(sweeps):
    found = sensitivity.gains(sweeps)
    assert set(found["sweep"]) <= set(sensitivity.SWEEPS) and not (found["allocator"] == "paged").any()
    rows = sweeps[(sweeps["sweep"] == "batch") & (sweeps["max_batch"] == 32)].set_index("allocator")
    mine = found[(found["sweep"] == "batch") & (found["max_batch"] == 32)].set_index("allocator")
    for name in ("pim-aware", "contiguous"):
        expected = rows.loc[name, "m3_bandwidth_gbps"] / rows.loc["paged", "m3_bandwidth_gbps"]
        assert mine.loc[name, "gain_mean_ratio"] == pytest.approx(expected, rel=1e-12)
    other = experiments.gains(rows.reset_index(), base="contiguous").set_index("allocator")
    assert other.loc["pim-aware", "gain_mean_ratio"] == pytest.approx(
        mine.loc["pim-aware", "gain_mean_ratio"] / mine.loc["contiguous", "gain_mean_ratio"])


def test_every_option_has_a_name_of_its_own(tiny):
    frame = sensitivity.options(tiny)
    settings = ["kv_split", "base_bytes", "block_layout", "turn_tokens", "charged", "address_map", "workload",
                "admission", "preempt", "frees"]
    own = frame[(frame["option"] != sensitivity.UNORDERED) | (frame["allocator"] == "paged")]
    named = own.drop_duplicates([*settings, "allocator"]).groupby(["workload", "option"]).size()
    assert len(named) == 19 and (named.drop(("steady", sensitivity.UNORDERED)) == 2).all()
    found = sensitivity.option_gains(frame)
    assert len(found) == 19 and (found["seeds_count"] == tiny.sweep_seeds).all()
    assert (found["gain_total_ratio_min"] <= found["gain_total_ratio"]).all()


def test_a_gain_over_traces_holds_its_ratio_and_pairs_parts(tiny, tmp_path):
    (tmp_path / "chat.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:{i % 60:02d}.0,{50 + 9 * i},{40 + i % 9}\n" for i in range(50))
    )
    frame = sensitivity.trace_gains(tiny, folder=tmp_path).set_index(["allocator", "over"]).sort_index()
    totals = {name: run(Cell(workload="trace", trace_file=str(tmp_path / "chat.csv"), requests=50, allocator=name))[0]
              for name in ("paged", "pim-aware")}  # fmt: skip
    expected = totals["pim-aware"]["m3_total_gbps"] / totals["paged"]["m3_total_gbps"]
    row = frame.loc["pim-aware", "paged"]
    assert row["gain_total_ratio"] == pytest.approx(expected, rel=1e-12)
    assert row["gain_total_ratio_min"] <= expected <= row["gain_total_ratio_max"]
    assert set(frame["trace"]) == {"chat.csv"} and set(frame.index.levels[1]) == set(sensitivity.BASES)


def test_intervals_of_seeds_ratios_and_slopes():
    low, high = intervals.of_seeds([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (low + high) / 2 == pytest.approx(3) and (high - low) / 2 == pytest.approx(2.776 * np.sqrt(2.5 / 5))
    assert all(np.isnan(intervals.of_seeds([1.0])))
    parts = np.array([[2.0, 1.0], [4.0, 2.0], [6.0, 3.0]])  # the same rate everywhere: no doubt
    assert intervals.of_ratio(parts, parts * [1, 2]) == pytest.approx((2, 2))
    slope, (low, high) = intervals.of_slope(np.arange(10) * 0.5 + 3)
    assert (slope, low, high) == pytest.approx((0.5, 0.5, 0.5))
    rng = np.random.default_rng(0)
    within = [low <= 0 <= high for low, high in
              (intervals.of_slope(rng.normal(size=20))[1] for _ in range(2000))]  # fmt: skip
    assert 0.93 < np.mean(within) < 0.97
    with pytest.raises(ValueError, match="parts are 3 and 2; allowed: equally many"):
        intervals.of_ratio(parts, parts[:2])
    with pytest.raises(ValueError, match="values are 2"):
        intervals.of_slope([1, 2])


def test_a_run_that_drifts_has_not_settled(tiny, monkeypatch):
    """A made-up M1 that falls for the first thousand requests and is noise about one half after them."""
    def fake(cell):
        step = np.arange(4 * cell.requests)
        noise = np.random.default_rng(cell.requests).normal(size=step.size) * 1e-3
        return {}, {"step": step, "m1_row_hit_frac": 0.5 + np.maximum(0, 4000 - step) / 8000 + noise}

    monkeypatch.setattr(serving, "run", fake)
    size = tiny.model_copy(update={"settle_requests": 16000})
    rows = sensitivity.settled(size)
    paged = rows[rows["allocator"] == "paged"]
    assert list(paged["settled"]) == ["no"] * (len(paged) - 1) + ["yes"] and paged["requests_count"].max() >= 2000
    assert paged["m1_row_hit_frac"].iloc[-1] == pytest.approx(0.5, abs=0.01)
    short = sensitivity.settled(tiny.model_copy(update={"settle_requests": 1000}))
    assert set(short["settled"]) == {"no"}


def test_remedies_and_ranges_read_the_sweeps(sweeps):
    changes = sensitivity.changes(sweeps)
    planned = changes[changes["what"] == "bestfit over greedy"]
    assert len(planned) == 16 and (planned["change_ratio"] == planned["after_ratio"] / planned["before_ratio"]).all()
    ranges = sensitivity.seed_ranges(sweeps)
    assert ranges["m1_range_frac"].iloc[-1] == ranges["m1_range_frac"].max() > 0
    seeds = sensitivity.of(sweeps, "seeds")
    one = seeds[(seeds["workload"] == "spec") & (seeds["allocator"] == "paged") & (seeds["block_tokens"] == 16)]
    mine = ranges[(ranges["workload"] == "spec") & (ranges["allocator"] == "paged") & (ranges["block_tokens"] == 16)]
    spread = one["m1_row_hit_frac"].max() - one["m1_row_hit_frac"].min()
    assert mine["m1_range_frac"].item() == pytest.approx(spread)


def test_the_outside_checks_are_the_studys_tables():
    frame = sensitivity.validation()
    checks = sensitivity.checks(frame).set_index("points_count")
    assert sensitivity.checks(frame)["equal_count"].iloc[0] == 9
    published = checks[checks["origin"] == "published"]
    assert f"{published['difference_frac_mean'].item():.4f}" == "0.0023"
    assert f"{published['difference_frac_max'].item():.4f}" == "0.0065"
    ratios = sensitivity.parallelism().set_index(["way", "allocator"])["host_centric_ratio"]
    assert ratios["commands", "paged"] == 8


def test_published_sweep_cells_are_compared_digit_by_digit(tiny):
    assert sensitivity.agreement(sensitivity.sweeps(tiny)).set_index("sweep").loc["all", "run_count"] == 0
    full = scale.load("full")
    frame = pd.concat([sweep.compute(sweep.expand(sweep.load(name), full), quiet=True).assign(sweep=name)
                       for name in ("structure", "arrival")], ignore_index=True)  # fmt: skip
    found = sensitivity.agreement(frame).set_index("sweep")
    assert tuple(found.loc["structure"])[:3] == (12, 12, 12) and tuple(found.loc["arrival"])[:3] == (6, 6, 6)
    assert found.loc["all", "published_count"] == 251 and found.loc["all", "run_count"] == 18
    frame.loc[3, "m1_row_hit_frac"] += 1e-8
    assert sensitivity.agreement(frame).set_index("sweep").loc["structure", "equal_count"] == 11


# --- gates

def test_all_gates_hold(tiny):
    frame = gates.gates(tiny)
    assert list(frame["passed"]) == ["yes"] * len(frame) and frame["gate"].nunique() == 5
    assert gates.summary(frame).set_index("gate").loc["all", "passed_count"] == len(frame)


def _broken(gate):
    """A simulation with one thing wrong, such that just `gate` should notice."""
    def broken(cell, **how):
        if gate == "1 perfect" and cell.address_map == "pim-friendly":
            cell = cell.model_copy(update={"address_map": "host-centric"})
        if gate == "2 worst" and cell.allocator == "random" and cell.coalesce == "inorder":
            cell = cell.model_copy(update={"allocator": "contiguous"})
        if gate == "3 monotonic" and cell.allocator == "contiguous" and cell.block_tokens == 128:
            cell = cell.model_copy(update={"allocator": "random", "block_tokens": 16})
        if gate == "4 deterministic" and not how:
            broken.calls = getattr(broken, "calls", 0) + 1
            cell = cell.model_copy(update={"seed": cell.seed + broken.calls})
        if gate == "5 conserved" and "on_tables" in how:
            look = how["on_tables"]
            how["on_tables"] = lambda s: look(s._replace(free_blocks=s.free_blocks - (s.step > 64)))
        return run(cell, **how)

    return broken


@pytest.mark.parametrize("gate", ["1 perfect", "2 worst", "3 monotonic", "4 deterministic", "5 conserved"])
def test_a_gate_fails_when_its_subject_is_broken(tiny, gate):
    frame = gates.gates(tiny, run=_broken(gate))
    assert set(frame[frame["passed"] == "no"]["gate"]) == {gate}


def test_a_gate_whose_control_passes_is_no_gate():
    assert gates._row("g", "s", 1.0, 0.9, "c", 0.95)[-2] == "no"
    assert gates._row("g", "s", 1.0, 0.9, "c", 0.85)[-2] == "yes"
    assert gates._row("g", "s", 0.0, 0, "c", 0.0, most=True)[-2] == "no"


def test_frames_carry_units_and_origin(sweeps, tmp_path):
    from artifact.study import results

    for name, frame in (("sweeps", sweeps), ("gains", sensitivity.gains(sweeps)), ("regions", sensitivity.regions()),
                        ("changes", sensitivity.changes(sweeps)), ("structure", sensitivity.extremes(sweeps))):
        results.write(frame, tmp_path / f"{name}.csv")
        assert isinstance(results.read(tmp_path / f"{name}.csv"), pd.DataFrame)
