"""`artifact kv ...`: the fixed options, the fixed JSON, the two headline commands, and one line for bad input."""

import json

import pytest

from artifact.__main__ import _CELL_OPTIONS
from artifact.study.serving import Cell

KEYS = (
    "completed dropped preemptions self_preemptions frag_failures decode_steps samples pool_blocks peak_live_blocks "
    "blocks_allocated_total cow_copies blocks_copied copied_bytes compactions spec_stalls m1_row_hit_frac "
    "m2_bank_parallelism_frac m3_bandwidth_gbps m4_latency_ns block_adjacency_frac same_region_frac region_spread "
    "m1_row_hit_frac_p05 m1_row_hit_frac_p95 m2_bank_parallelism_frac_p05 m2_bank_parallelism_frac_p95 "
    "m4_latency_ns_p95 m3_busiest_gbps m4_busiest_ns m3_total_gbps recomputed_tokens swapped_bytes prefix_hit_tokens"
).split()


def test_options_are_the_cells_fields_and_defaults():
    options = {name.replace("-", "_"): default for name, _, default, _ in _CELL_OPTIONS}
    options["trace_file"] = options.pop("trace")
    fields = {n: None if f.default is None else str(f.default) for n, f in Cell.model_fields.items() if n != "kv_split"}
    assert options == fields


@pytest.mark.parametrize(
    ("allocator", "m1", "m3", "spread"),
    [
        ("paged", "0.7694586777735906", "1226.2691202733354", "6.0992"),
        ("pim-aware", "0.9632714", "2805.3679", "1.0000"),
    ],
)
def test_headline_commands(cli, allocator, m1, m3, spread):
    fixed = "--workload steady --address-map host-cacheline --block-tokens 16 --requests 1000 --seed 0 --json".split()
    ran = cli("kv", "simulate", "--allocator", allocator, *fixed)
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert set(found) == set(KEYS)
    shown = [(found["m1_row_hit_frac"], m1), (found["m3_bandwidth_gbps"], m3), (found["region_spread"], spread)]
    for value, text in shown:
        assert f"{value:.{len(text.partition('.')[2])}f}" == text


def test_defaults_are_the_headline(cli):
    assert json.loads(cli("kv", "simulate", "--json").out)["m1_row_hit_frac"] == 0.7694586777735906


def test_people_get_a_table(cli):
    ran = cli("kv", "simulate", "--requests", 20)
    assert ran.code == 0 and "m1_row_hit_frac" in ran.out and not ran.out.startswith("{")


def test_undefined_metrics_are_null(cli):
    ran = cli("kv", "simulate", "--block-tokens", "derived", "--requests", 20, "--json")
    assert json.loads(ran.out)["region_spread"] is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--block-tokens", "24"], "block_tokens is 24"),
        (["--block-tokens", "0"], "block_tokens is 0"),
        (["--block-tokens", "-16"], "block_tokens is -16"),
        (["--block-tokens", "many"], "block_tokens is 'many'"),
        (["--pool-blocks", "7"], "pool of 7 blocks is smaller than one region"),
        (["--pool-blocks", "8", "--workload", "longctx"], "pool of 8 blocks is smaller than every request"),
        (["--pool-blocks", "999999"], "a pool of 999999 blocks"),
        (["--allocator", "buddy"], "allocator is 'buddy'"),
        (["--workload", "chat"], "workload is 'chat'"),
        (["--address-map", "xor"], "address_map is 'xor'"),
        (["--address-map", "co1 ch5 ba2 bg2 co5 ro14"], "bits 14 (co[5]) collide"),
        (["--address-map", "co1 ch5 ba2 bg2 co4 ro14 ba^=ba[0:2]"], "bits 6 (ba[0]), 7 (ba[1]) collide"),
        (["--model", "gpt-9"], "unknown model 'gpt-9'; allowed: llama-gqa-8kv"),
        (["--dram", "hbm9"], "unknown dram 'hbm9'"),
        (["--dram", "absent.yml"], "absent.yml: no such file"),
        (["--rate", "-1"], "rate is -1.0"),
        (["--rate", "0"], "rate is 0.0"),
        (["--rate", "nan"], "rate is nan"),
        (["--headroom", "nan"], "headroom is nan"),
        (["--headroom", "0"], "headroom is 0.0"),
        (["--headroom", "-2"], "headroom is -2.0"),
        (["--headroom", "inf"], "headroom is inf"),
        (["--requests", "0"], "requests is 0"),
        (["--requests", "2.5"], "'2.5' is not a valid integer"),
        (["--seed", "-1"], "seed is -1"),
        (["--kv-shards", "3"], "kv_shards is 3"),
        (["--window", "0"], "window is 0"),
        (["--workload", "trace"], "workload trace and trace_file go together"),
        (["--workload", "trace", "--trace", "absent.csv"], "absent.csv"),
        (["--speed", "9"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(cli, arguments, complaint):
    ran = cli("kv", "simulate", "--json", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert complaint in ran.err and ran.err.count("\n") == 1 and ran.err.startswith("artifact: ")


def test_a_dram_file_is_never_evaluated(cli, tmp_path):
    path, planted = tmp_path / "mine.yml", tmp_path / "planted"
    path.write_text(f"channels: !!python/object/apply:os.mkdir ['{planted}']\n")
    ran = cli("kv", "simulate", "--dram", path)
    assert ran.code == 2 and "mine.yml" in ran.err and ran.err.count("\n") == 1 and not planted.exists()


def test_a_broken_trace_is_named_by_line(cli, tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808\n")
    ran = cli("kv", "simulate", "--workload", "trace", "--trace", path)
    assert ran.code == 2 and "azure.csv line 2: 2 columns" in ran.err and ran.err.count("\n") == 1


def test_requests_are_printed_and_written(cli, tmp_path):
    printed = cli("kv", "requests", "--workload", "prefix", "--requests", 20).out
    lines = printed.splitlines()
    assert lines[0] == "rid,arrival_step,prompt_len,output_len,prefix_id,prefix_len" and len(lines) == 21
    assert cli("kv", "requests", "--workload", "prefix", "--requests", 20, "--out", tmp_path / "r.csv").code == 0
    assert (tmp_path / "r.csv").read_text() == printed


def test_samples_are_written_or_nothing_is(cli, tmp_path):
    assert cli("kv", "simulate", "--requests", 20, "--out", tmp_path / "s.csv").code == 0
    assert (tmp_path / "s.csv").is_file() and (tmp_path / "s.csv.manifest.json").is_file()
    ran = cli("kv", "simulate", "--requests", 20, "--out", tmp_path / "s.csv" / "below.csv")
    assert ran.code == 2 and ran.err.count("\n") == 1


def _replay(cli, tmp_path, content, *more):
    path = tmp_path / "ops.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return cli("kv", "replay", path, *more)


def test_replay_answers_each_operation(cli, tmp_path):
    ops = [["alloc", 0, 33], ["append", 0, 15], ["append", 0, 1], ["free", 0], ["alloc", 1, 16]]
    entry = {"pool_blocks": 16, "block_tokens": 16, "ops": ops}
    ran = _replay(cli, tmp_path, entry)
    assert json.loads(ran.out) == {"new_blocks": [[15, 14, 13], [], [12], None, [12]]}
    aware = _replay(cli, tmp_path, entry, "--allocator", "pim-aware")
    assert json.loads(aware.out) == {"new_blocks": [[0, 1, 2], [], [3], None, [0]]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ops": [["free", 3]]}, "operation 0: unknown sequence 3"),
        ({"ops": [["append", 3, 1]]}, "operation 0: unknown sequence 3"),
        ({"ops": [["alloc", 0, 999]]}, "operation 0: sequence 0 asks for 63 blocks; 16 of 16 are free"),
        ({"ops": [["alloc", 0, 1], ["alloc", 0, 1]]}, "operation 1: sequence 0 is already admitted"),
        ({"ops": [["move", 0, 1]]}, "operation 0: ['move', 0, 1]; allowed"),
        ({"ops": [["alloc", 0, -1]]}, "operation 0: ['alloc', 0, -1]"),
        ({"ops": [7]}, "operation 0: 7"),
        ({"block_tokens": 24}, "block_tokens is 24"),
        ({"pool_blocks": 0}, "num_blocks is 0"),
    ],
)
def test_replay_refuses(cli, tmp_path, change, complaint):
    ran = _replay(cli, tmp_path, {"pool_blocks": 16, "block_tokens": 16, "ops": []} | change)
    assert (ran.code, ran.out) == (2, "") and complaint in ran.err and ran.err.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"pool_blocks": 4}', "3"])
def test_replay_refuses_other_files(cli, tmp_path, text):
    ran = _replay(cli, tmp_path, text)
    assert ran.code == 2 and "ops.json" in ran.err and ran.err.count("\n") == 1


def test_sweeps_print_tidy_csv(cli, tmp_path):
    ran = cli("kv", "sweep", "maps", "--scale", "tiny", "--workers", 1)
    assert ran.code == 0 and ran.out.splitlines()[0].startswith("workload,") and len(ran.out.splitlines()) == 10
    assert cli("kv", "sweep", "maps", "--scale", "tiny", "--workers", 1, "--out", tmp_path / "m.csv").code == 0
    unknown = cli("kv", "sweep", "nope")
    assert unknown.code == 2 and "unknown sweep 'nope'" in unknown.err


def test_a_failing_cell_fails_the_sweep(cli, tmp_path):
    path = tmp_path / "own.yml"
    path.write_text("title: t\nsource: s\ncells:\n- {requests: 20, pool_blocks: [3, 3161]}\n")
    ran = cli("kv", "sweep", path, "--workers", 1)
    assert ran.code == 1 and "1 of 2 cells failed" in ran.err and "pool_blocks=3" in ran.err
