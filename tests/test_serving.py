"""Cells of the serving study against what the study itself gave: every column, and the bytes of its sample files."""

import csv
import hashlib
import math

import numpy as np
import pandas as pd
import pytest

from artifact.pim import mapping
from artifact.study import experiments, paths, serving, sweep
from artifact.study.serving import Cell, run

RECORDED = paths.data_dir() / "recorded/reference"
CELLS = list(csv.DictReader((RECORDED / "serving_cells.csv").open()))
DIGEST = list(csv.DictReader((RECORDED / "serving_digest.csv").open()))
PUBLISHED = experiments.published_cells()
_SAMPLES = {
    "step": "step", "request": "seq_id", "tokens": "seq_len", "kv_bytes": "kv_bytes", "bursts": "n_bursts",
    "commands": "n_cmds", "hits": "n_hits", "m1_row_hit_frac": "m1", "m2_bank_parallelism_frac": "m2",
    "m3_bandwidth_gbps": "m3_gbps", "m4_latency_ns": "m4_ns", "block_adjacency_frac": "blk_adj",
    "same_region_frac": "same_frame", "region_spread": "frame_spread", "live_blocks": "live_blocks",
    "free_blocks": "free_blocks",
}  # fmt: skip


def _name(row):
    return "-".join(row[k] for k in ("workload", "allocator", "block_tokens", "address_map"))


def test_all_references_are_there():
    assert (len(CELLS), len(DIGEST), len(PUBLISHED)) == (96, 32, 108)


@pytest.mark.parametrize("row", CELLS, ids=_name)
def test_equal_to_the_recorded_cell(row):
    given = {k: row[k] for k in ("workload", "allocator", "address_map")}
    cell = Cell(
        **given, block_tokens=int(row["block_tokens"]), requests=int(row["requests_count"]), seed=int(row["seed"])
    )
    summary, samples = run(cell)
    for column, text in row.items():
        metric = column.removesuffix("_count")
        if metric not in summary:
            continue
        expected = float(text) if text else math.nan
        assert summary[metric] == pytest.approx(expected, rel=1e-9, abs=0, nan_ok=True), column
    frame = pd.DataFrame({theirs: samples[ours] for ours, theirs in _SAMPLES.items()})
    text = frame.to_csv(index=False, float_format="%.8g", lineterminator="\n")
    assert hashlib.sha256(text.encode()).hexdigest() == row["samples_csv_sha256"]


def test_every_recorded_column_is_compared():
    summary, _ = run(Cell(requests=20))
    compared = {c for c in CELLS[0] if c.removesuffix("_count") in summary}
    rest = {"workload", "allocator", "block_tokens", "address_map", "requests_count", "seed", "samples_csv_sha256"}
    assert set(CELLS[0]) - compared == rest | {"source", "origin"}


@pytest.mark.parametrize("row", DIGEST, ids=_name)
def test_prefix_and_longctx_match_their_digest(row):
    """Printed to three or four digits, M1 rounded twice: hence 0.55 of its last digit, not 0.5."""
    given = {k: row[k] for k in ("workload", "allocator", "address_map")}
    summary, _ = run(Cell(**given, block_tokens=int(row["block_tokens"]), requests=200))
    assert abs(summary["m1_row_hit_frac"] - float(row["m1_row_hit_frac"])) <= 0.00055
    assert experiments.same_digits(row["m3_bandwidth_gbps"], summary["m3_bandwidth_gbps"])
    if row["region_spread"]:
        assert experiments.same_digits(row["region_spread"], summary["region_spread"])


UNEQUAL = {  # the study's own re-run gives 2718.48 where it published 2719, and 2271.2036 where it published ...37
    ("kill-test", "contiguous"): "m3_bandwidth_gbps",
    ("speculation", "pim-aware", 4, "shared", "splice"): "m3_bandwidth_gbps",
}


def _published_id(pair):
    cell, r = pair
    return f"{r['experiment']}-{cell.workload}-{cell.allocator}-{sweep._describe(cell)}".replace(" ", "-")


@pytest.mark.parametrize("pair", PUBLISHED, ids=_published_id)
def test_equal_to_the_published_cell(pair):
    cell, r = pair
    if r["experiment"] == "compaction" and cell.pim_compact > 0.25:
        pytest.skip("compaction above 0.25: the order in which the study empties several regions is not published")
    summary, _ = run(cell)
    name = (r["experiment"], cell.allocator)
    shared = (*name, cell.block_tokens, cell.pim_scratch, cell.spec_adopt)
    for metric in ("m1_row_hit_frac", "m3_bandwidth_gbps"):
        unequal = metric in (UNEQUAL.get(name), UNEQUAL.get(shared))
        assert experiments.same_digits(r[metric], summary[metric]) != unequal, metric


def test_headline_exactly():
    paged, _ = run(Cell())
    assert paged["m1_row_hit_frac"] == 0.7694586777735906
    assert paged["m3_bandwidth_gbps"] == 1226.2691202733354
    assert f"{paged['region_spread']:.4f}" == "6.0992"
    aware, _ = run(Cell(allocator="pim-aware"))
    digits = {"m1_row_hit_frac": "0.9632714", "m3_bandwidth_gbps": "2805.3679", "region_spread": "1.0000"}
    assert {k: f"{aware[k]:.{len(text.partition('.')[2])}f}" for k, text in digits.items()} == digits
    assert aware["m3_total_gbps"] / paged["m3_total_gbps"] == pytest.approx(2.40, abs=0.005)


@pytest.mark.parametrize("name", mapping.NAMES)
@pytest.mark.parametrize("given", [{"allocator": "paged"}, {"allocator": "pim-aware", "workload": "spec"}])
def test_a_named_map_written_as_text_gives_an_equal_cell(name, given):
    cell = Cell(address_map=name, requests=60, **given)
    text = mapping.written(mapping.address_map(name, cell.memory))
    named, samples = run(cell)
    again, written = run(Cell(address_map=text, requests=60, **given))
    assert again == named and all(np.array_equal(written[k], samples[k], equal_nan=True) for k in samples)


def test_the_slab_map_by_mean_and_by_the_busiest_channel():
    summary, _ = run(Cell(address_map="pim-friendly", requests=200))
    assert f"{summary['m3_bandwidth_gbps']:.0f}" == "2937"
    assert f"{summary['m3_busiest_gbps']:.1f}" == "91.8"


def test_derived_block_is_one_region():
    for model, tokens in (("llama-gqa-8kv", 128), ("mqa-1kv", 1024), ("mha-32kv", 32)):
        cell = Cell(block_tokens="derived", model=model)
        assert (cell.tokens_per_block, cell.blocks_per_region) == (tokens, 1)


def test_shards_scale_bandwidth_and_nothing_else():
    whole, _ = run(Cell(requests=100))
    half, _ = run(Cell(requests=100, kv_shards=2))
    assert half["m1_row_hit_frac"] == whole["m1_row_hit_frac"]
    assert half["m3_bandwidth_gbps"] == pytest.approx(whole["m3_bandwidth_gbps"] / 2, rel=1e-12)
    assert half["m4_latency_ns"] == pytest.approx(whole["m4_latency_ns"], rel=1e-12)


def test_a_users_own_memory_and_model(tmp_path):
    memory = tmp_path / "mine.yml"
    memory.write_text(
        "channels: 8\nbank_groups: 4\nbanks_per_group: 4\nrow_bytes: 2048\nburst_bytes: 32\nrows: 16384\n"
        "cacheline_bytes: 64\ntccd_ab_ns: [2.0, my own datasheet]\ntrc_ns: 30\n"
    )
    model = tmp_path / "small.yaml"
    model.write_text("kv_heads: 2\nhead_dim: 64\nelement_bytes: 2\nlayers: 4\n")
    cell = Cell(dram=str(memory), model=str(model), requests=30)
    assert (cell.memory.name, cell.token_bytes, cell.blocks_per_region) == ("mine", 512, 32)
    summary, _ = run(cell)
    assert summary["completed"] == 30
    memory.write_text("channels: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ValueError, match="mine.yml.* not YAML"):
        run(Cell(dram=str(memory)))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"allocator": "buddy"}, "allocator is 'buddy'; allowed: 'paged', 'pim-aware', 'contiguous', 'random',"),
        ({"workload": "chat"}, "workload is 'chat'"),
        ({"address_map": "xor"}, "address_map is 'xor'"),
        ({"blocks": 3}, "unknown key 'blocks'; allowed: workload"),
        ({"headroom": 0}, "headroom is 0; allowed: greater than 0"),
        ({"headroom": float("nan")}, "headroom is nan; allowed: a finite number"),
        ({"rate": -0.1}, "rate is -0.1"),
        ({"requests": 2.0}, "requests is 2.0"),
        ({"block_tokens": "big"}, "block_tokens is 'big'.*'derived'"),
        ({"watermark": 1}, "watermark is 1"),
        ({"spec_accept": 1.5}, "spec_accept is 1.5"),
        ({"allocator": "contiguous", "admission": "vllm"}, "contiguous cannot run under vllm admission"),
        ({"workload": "trace"}, "workload trace and trace_file go together"),
        ({"kv_split": True, "kv_shards": 2}, "kv_split with kv_shards"),
    ],
)
def test_a_wrong_cell_is_refused_in_one_line(given, complaint):
    with pytest.raises(ValueError, match=complaint) as raised:
        Cell(**given)
    assert "\n" not in str(raised.value)


def test_a_pool_must_hold_a_region_and_some_request():
    with pytest.raises(ValueError, match="pool of 7 blocks is smaller than one region; allowed: at least 8"):
        run(Cell(pool_blocks=7))
    with pytest.raises(ValueError, match="pool of 8 blocks is smaller than every request; allowed: at least 136"):
        run(Cell(pool_blocks=8, workload="fixedlen"))


def test_progress_and_tables_are_shown():
    seen, tables = [], []
    run(Cell(requests=30), on_progress=lambda *at: seen.append(at), on_tables=lambda s: tables.append(s.blocks.size))
    assert seen[-1] == (30, 30) and sum(tables) > 0


def test_users_block_tables(tmp_path):
    path = tmp_path / "tables.json"
    path.write_text('[{"seq_len": 128, "table": [0, 1, 2, 3, 4, 5, 6, 7]}, {"seq_len": 40, "table": [0, 8, 16]}]')
    frame = experiments.tables(path)
    assert frame["m1_row_hit_frac"].tolist() == [1 - 1 / 32, pytest.approx(0.7, abs=0.06)]
    for text, complaint in (
        ("[{", "not JSON"),
        ('[{"seq_len": 4}]', "entry 0: missing 'table'"),
        ('[{"seq_len": 99, "table": [0]}]', "entry 0: tokens is 99"),
        ('[{"seq_len": 9, "table": [-1]}]', "entry 0: block table names block -1"),
        ('[{"seq_len": 9, "table": ["a"]}]', "entry 0: "),
        ('[{"seq_len": 9, "table": [0], "block_tokens": 24}]', "entry 0: block_tokens is 24"),
        ("[3]", "entry 0: "),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"tables.json.*{complaint}"):
            experiments.tables(path)


def test_written_samples_carry_units_and_their_manifest(tmp_path):
    import json

    cell = Cell(requests=20)
    _, samples = run(cell)
    serving.write_samples(tmp_path / "run.csv", cell, samples)
    frame = pd.read_csv(tmp_path / "run.csv")
    assert set(frame["origin"]) == {"simulated"} and len(frame) == samples["step"].size
    assert json.loads((tmp_path / "run.csv.manifest.json").read_text())["cell"]["requests"] == 20
