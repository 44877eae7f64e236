"""What notebook 14 computes: the same sequences under every allocator, and gains that are what they say."""

import numpy as np
import pandas as pd
import pytest

from artifact.kv import allocators
from artifact.pim import timing
from artifact.study import cycles, experiments, scale, serving, sweep

TINY = scale.load("tiny")


@pytest.fixture(scope="module")
def sequences():
    return cycles.sequences(TINY)


def test_every_allocator_serves_the_same_sequences_at_the_same_lengths(sequences):
    kinds = {name: set(zip(group["rid"], group["length_tokens"], strict=True))
             for name, group in sequences.groupby("allocator")}
    assert set(kinds) == set(allocators.STUDIED) and all(kind == kinds["paged"] for kind in kinds.values())
    assert not sequences.duplicated(["allocator", "rid", "length_tokens"]).any()
    assert (sequences["in order"] >= sequences["cycles"]).all()
    assert (sequences["charged twice"] > sequences["cycles"]).all()
    assert (sequences["with refresh"] >= sequences["cycles"]).all()
    assert (sequences["unlimited power"] <= sequences["cycles"]).all()


def test_gains_by_hand():
    ways = {way: 1 for way, *_ in cycles._WAYS} | dict.fromkeys(cycles.PRESETS, 1) | {"m4_latency_ns": 1}
    base = {"step": 1, "length_tokens": 16, "kv_bytes": 64, **ways}
    rows = [base | {"allocator": "paged", "rid": 0, "cycles": 40, "m4_latency_ns": 60.0},
            base | {"allocator": "paged", "rid": 1, "cycles": 10, "m4_latency_ns": 10.0},
            base | {"allocator": "pim-aware", "rid": 0, "cycles": 20, "m4_latency_ns": 20.0},
            base | {"allocator": "pim-aware", "rid": 1, "cycles": 10, "m4_latency_ns": 10.0}]
    found = cycles.gains(pd.DataFrame(rows)).set_index("way")
    assert found.loc["cycles", "gain_mean_ratio"] == 1.5 and found.loc["cycles", "gain_total_ratio"] == 50 / 30
    assert found.loc["cycles", "gain_rates_ratio"] == pytest.approx((1 / 20 + 1 / 10) / (1 / 40 + 1 / 10))
    assert found.loc["M3", "gain_mean_ratio"] == 2 and found.loc["cycles", "optimism_ratio"] == 2 / 1.5
    assert found.loc["cycles", "below_frac"] == 0.5
    bins = cycles.by(pd.DataFrame(rows), "length_tokens", (8, 16))
    assert bins["length_tokens"].tolist() == [16] * 3 and set(bins["sequences_count"]) == {2}


@pytest.mark.slow
def test_the_whole_steady_headline_in_cycles():
    frame = cycles.gains(cycles.sequences(scale.load("full")))
    found = frame[frame["allocator"] == "pim-aware"].set_index("way")
    for way, mean, total in (("cycles", 2.058, 2.054), ("in order", 2.083, 2.083), ("charged twice", 1.581, 1.583),
                             ("unlimited power", 2.755, 2.748), ("M3", 2.364, 2.394)):
        assert found.loc[way, "gain_mean_ratio"] == pytest.approx(mean, abs=5e-4)
        assert found.loc[way, "gain_total_ratio"] == pytest.approx(total, abs=5e-4)
    assert (found["sequences_count"] == 2560).all()


def test_a_cell_in_cycles_beside_its_analytic_bandwidth():
    cell = serving.Cell(requests=40)
    plain, _ = serving.run(cell)
    summary, columns = serving.run(cell, preset="HBM3_5.2Gbps")
    assert {key: summary[key] for key in plain} == plain
    rates = columns["kv_bytes"] / columns["controller_ns"]
    assert summary["cycles_bandwidth_gbps"] == pytest.approx(rates.mean())
    assert summary["cycles_total_gbps"] == pytest.approx(columns["kv_bytes"].sum() / columns["controller_ns"].sum())
    ideal = 2 * 16 * 16 * timing.BURST_BYTES / (6 * 0.769)  # every command a hit
    assert 0 < rates.max() < ideal
    other, _ = serving.run(serving.Cell(requests=40, address_map="pim-friendly"), preset="HBM3_5.2Gbps")
    assert np.isnan(other["cycles_bandwidth_gbps"]), "channels that differ have no one stream"


def test_gains_in_cycles_stand_beside_those_of_m3():
    cells = [serving.Cell(requests=40, allocator=name) for name in ("paged", "pim-aware")]
    both = sweep.compute(cells, quiet=True, preset=experiments.PRESET)
    (row,) = experiments.gains(both).to_dict("records")
    rates = both.set_index("allocator")["cycles_bandwidth_gbps"]
    assert row["gain_cycles_mean_ratio"] == rates["pim-aware"] / rates["paged"]
    assert "gain_cycles_mean_ratio" not in experiments.gains(sweep.compute(cells, quiet=True))
