"""Streams of PIM commands: traces read and written, block tables into commands, and what is refused by its line."""

import json

import numpy as np
import pytest

from artifact.pim import bandwidth, controller, geometry, mapping, streams, timing
from artifact.study import cycles, simulators

NORMAL = timing.preset("HBM3_5.2Gbps")
HBM3 = geometry.dram("hbm3-pim")


def _layout(block_tokens=16, blocks=512, name="host-cacheline"):
    return bandwidth.layout(mapping.address_map(name, HBM3), 4096, block_tokens, blocks)


# --- trace files

@pytest.mark.parametrize("shape", streams.SHAPES)
def test_a_written_trace_reads_back_equal(tmp_path, shape):
    trace = streams.expand(streams.pattern("rand0.5", 40), shape, barrier=16, split=True)
    streams.write(tmp_path / "a.trace", trace)
    again = streams.read(tmp_path / "a.trace")
    for ours, theirs in zip(trace, again, strict=True):
        assert np.array_equal(ours, theirs)


def test_channels_and_moves_read_back_too(tmp_path):
    trace = streams.expand(streams.pattern("rand0.5", 48))
    op = np.tile(np.array([timing.MAC, timing.MOVE, timing.SFM, timing.BARRIER], dtype=np.int8), 12)
    trace = trace._replace(op=op, channel=np.tile(np.arange(16, dtype=np.int16), 3))
    streams.write(tmp_path / "a.trace", trace)
    assert all(np.array_equal(a, b) for a, b in zip(trace, streams.read(tmp_path / "a.trace"), strict=True))


def test_a_trace_file_by_hand(tmp_path, cli):
    (tmp_path / "a.trace").write_text("PIM_MAC_AB 0x00000000\nPIM_MAC_AB 0x00000020\nPIM_MAC_AB 1024")
    done = cli("pim", "cycles", tmp_path / "a.trace", "--refresh", "off", "--json")
    found = json.loads(done.out)
    assert done.code == 0 and done.err == ""
    assert (found["cycles"], found["activations_count"], found["row_hits_count"]) == (84, 2, 1)
    assert found["refreshes_count"] == 0 and found["bytes_per_cycle"] == 3 * 2048 / 84


@pytest.mark.parametrize(("content", "says"), [
    (b"PIM_MAC_AB 0x0\nPIM_MAC_XB 0x0\n", "line 2: unknown command 'PIM_MAC_XB'; allowed: PIM_MAC_AB, "),
    (b"PIM_MAC_AB 0x0\nLD 0x0\n", "line 2: LD is not modelled; allowed: PIM_MAC_AB"),
    (b"PIM_MAC_AB 0x400000000\n", "line 1: address 0x400000000 is out of range; allowed: 0 to 0x3ffffffff"),
    (b"PIM_MAC_AB -1\n", "line 1: 'PIM_MAC_AB -1' is odd; allowed: a command and an address"),
    (b"PIM_MAC_AB 0x0\n\nPIM_MAC_AB 0x0\n", "line 2: '' is odd"),
    (b"PIM_MAC_AB 0x0\nPIM_MAC_AB\n", "line 2: 'PIM_MAC_AB' is odd"),
    (b"PIM_MAC_AB 0x0 0x1\n", "line 1: 'PIM_MAC_AB 0x0 0x1' is odd"),
    (b"PIM_MAC_AB 0xzz\n", "line 1: 'PIM_MAC_AB 0xzz' is odd"),
    (b"PIM_MAC_AB 0x0\nPIM_MAC_SB 0x0\n", "line 2: PIM_MAC_SB after PIM_MAC_AB; allowed: one kind of MAC in a trace"),
    (b"", "line 1: the trace is empty; allowed: at least one command"),
    (b"\n", "line 1: the trace is empty"),
    (b"PIM_MAC_AB 0x0\nPIM_MAC_AB 0x0\r\n", "line 2: ends in CRLF; allowed: LF"),
    (b"PIM_MAC_AB 0x0\n\xff\xfe\n", "line 2: not ASCII text"),
])
def test_a_bad_trace_is_one_line_with_its_number(tmp_path, cli, content, says):
    (tmp_path / "bad.trace").write_bytes(content)
    done = cli("pim", "cycles", tmp_path / "bad.trace", "--json")
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1
    assert f"bad.trace {says}" in done.err


@pytest.mark.parametrize(("ask", "says"), [
    ((), "give one of: a trace file, --pattern, --block-table"),
    (("--pattern", "every2", "--block-table", "a.json"), "give one of"),
    (("--pattern", "none"), "pattern is 'none'; allowed: same_row, "),
    (("--pattern", "every0"), "pattern is 'every0'"),
    (("--pattern", "rand1.5"), "pattern is 'rand1.5'"),
    (("--pattern", "every2", "--commands", "0"), "commands is 0; allowed"),
    (("--pattern", "every2", "--seed", "-1"), "seed is -1; allowed"),
    (("--pattern", "every2", "--mode", "XB"), "mode is 'XB'; allowed: AB, SB, PB"),
    (("--pattern", "every2", "--barrier", "-1"), "barrier is -1; allowed"),
    (("--pattern", "every2", "--preset", "HBM4"), "preset is 'HBM4'; allowed: HBM3_4.8Gbps"),
    (("--pattern", "every2", "--refresh", "maybe"), "refresh is 'maybe'; allowed: on, off"),
    (("--pattern", "every2", "--against", "me"), "against is 'me'; allowed: attacc"),
    (("no.trace",), "no.trace: no such file"),
])
def test_a_bad_question_is_one_line(cli, ask, says):
    done = cli("pim", "cycles", *ask)
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1 and says in done.err


# --- block tables

@pytest.mark.parametrize("block_tokens", [4, 16, 128])
def test_a_streams_commands_and_row_changes_are_the_counted_ones(block_tokens):
    lay, draw = _layout(block_tokens), np.random.default_rng(block_tokens)
    for tokens in (1, 63, 100, 1000):
        table = draw.permutation(512)[: -(-tokens // block_tokens)]
        for window in (1, 64, 1000) if block_tokens >= 16 else (1,):  # smaller blocks share rows out of turn
            bursts, commands, misses = bandwidth.count(table, tokens, lay, window=window).max(axis=0)
            rows = streams.rows(table, tokens, lay, window=window)
            assert rows.size == commands and 1 + (np.diff(rows) != 0).sum() == misses
            assert set(rows) == {lay.base[b] >> lay.channel_bits >> 4 for b in table} or block_tokens == 128


def test_a_window_gathers_rows_and_plain_does_not():
    lay = _layout(4)
    table = [0, 32, 1, 33]  # two regions in turn
    assert streams.rows(table, 16, lay, order="window").tolist() == [0, 0, 1, 1]
    assert streams.rows(table, 16, lay, order="plain").tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    double = streams.block_table(table, 16, lay, order="double")
    assert double.row.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] and double.bank.tolist() == [0, 32] * 4


@pytest.mark.parametrize("order", streams.ORDERS)
def test_many_tables_at_once_are_each_by_itself(order):
    lay, draw = _layout(), np.random.default_rng(3)
    tables, tokens = [draw.permutation(512)[:n] for n in (1, 4, 63, 40)], np.array([3, 64, 1000, 633])
    starts = np.cumsum([0, *(t.size for t in tables[:-1])])
    for refresh in (False, True) if order != "double" else (False,):
        found = streams.many(np.concatenate(tables), starts, tokens, lay, NORMAL, order=order, refresh=refresh)
        for row, table, n in zip(found, tables, tokens, strict=True):
            one = controller.simulate(streams.block_table(table, n, lay, order=order), NORMAL, refresh=refresh)
            assert tuple(row) == (one.macs, one.cycles, one.activations)


@pytest.mark.parametrize(("call", "says"), [
    (lambda lay: streams.rows([0], 17, lay), "tokens is 17; allowed: 1 to 16"),
    (lambda lay: streams.rows([512], 16, lay), "names block 512"),
    (lambda lay: streams.rows([0], 16, lay, order="sorted"), "order is 'sorted'; allowed: window, plain"),
    (lambda lay: streams.rows([0], 16, _layout(name="pim-friendly")), "the channels see different streams"),
    (lambda lay: streams.many(np.array([0]), np.array([0]), np.array([9]), lay, NORMAL, order="double", refresh=True),
     "order 'double' with refresh is not exact"),
    (lambda lay: streams.write_reads("a", [0], reads="all"), "reads is 'all'; allowed: 1bank"),
])
def test_what_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call(_layout())


def test_the_command_line_answers_for_a_block_table(tmp_path, cli):
    (theirs,) = cycles.recorded("attacc_block_tables.csv").query(
        "workload == 'steady' and allocator == 'paged' and seq_id == 14 and order == 'window' and refresh == 'on' "
        "and preset == 'HBM3_5.2Gbps_NPC'").head(1).to_dict("records")
    text = (cycles.paths.data_dir() / "recorded/reference/attacc_block_tables.json").read_text()
    (entry,) = [e for e in json.loads(text)["tables"] if e["workload"] == "steady" and e["allocator"] == "paged"
                and e["seq_id"] == 14 and e["step"] == theirs["step"]]
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"seq_len": entry["seq_len"], "table": entry["table"]}))
    done = cli("pim", "cycles", "--block-table", path, "--preset", theirs["preset"], "--refresh", "on", "--json")
    found = json.loads(done.out)
    assert {"cycles", "activations_count", "refreshes_count", "row_hits_count", "bytes_per_cycle"} <= set(found)
    assert found["cycles"] == theirs["run_cycles"] and found["activations_count"] == theirs["activations_count"]
    assert found["bytes_per_cycle"] == theirs["commands_count"] * 1024 / theirs["run_cycles"]


@pytest.mark.parametrize(("content", "says"), [
    ("{", "not a JSON object"), ("[]", "not a JSON object"), ('{"seq_len": 5}', "missing 'table'"),
    ('{"seq_len": 5, "table": []}', "table is []; allowed: block numbers from 0"),
    ('{"seq_len": 5, "table": [-1]}', "table is [-1]; allowed"), ('{"seq_len": 5, "table": ["a"]}', "table is ['a']"),
    ('{"seq_len": 17, "table": [0]}', "tokens is 17; allowed: 1 to 16"),
    ('{"seq_len": 1.5, "table": [0]}', "seq_len is 1.5; allowed"),
    ('{"seq_len": 5, "table": [0], "block_tokens": 3}', "block_tokens is 3 (12288 bytes"),
    ('{"seq_len": 5, "table": [99999999999]}', "allowed: at most the"),
])
def test_a_bad_block_table_is_one_line(tmp_path, cli, content, says):
    (tmp_path / "bad.json").write_text(content)
    done = cli("pim", "cycles", "--block-table", tmp_path / "bad.json", "--json")
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1 and "bad.json: " in done.err
    assert says in done.err, done.err


# --- a user's own simulators

def _build(folder, prints):
    """A stand-in for a build of AttAcc: prints what it is told, after a look at its configuration."""
    binary = folder / "ramulator2" / "ramulator2"
    binary.parent.mkdir(parents=True)
    checks = 'test "$1" = -f || exit 3\ngrep -q "preset: HBM3_5.2Gbps}" "$2" || exit 4'
    binary.write_text(f"#!/bin/sh\n{checks}\n{prints}\n")
    binary.chmod(0o755)
    return folder


@pytest.mark.parametrize(("prints", "code", "says"), [
    ("echo '  memory_system_cycles: 31962'", 0, "31962"),
    ("echo 'memory_system_cycles: 31963'", 1, "31963"),
    ("echo nothing", 2, "printed no memory_system_cycles"),
    ("echo broken >&2; exit 1", 2, "ended with exit code 1: broken"),
])
def test_a_users_own_attacc_is_compared(tmp_path, cli, monkeypatch, prints, code, says):
    monkeypatch.setenv("ATTACC_DIR", str(_build(tmp_path, prints)))
    done = cli("pim", "cycles", "--pattern", "every2", "--refresh", "off", "--against", "attacc")
    assert done.code == code and says in done.out + done.err
    assert done.err.count("\n") == (code == 2)


def test_without_a_build_it_says_how_to_name_one(tmp_path, cli, monkeypatch):
    monkeypatch.delenv("ATTACC_DIR", raising=False)
    done = cli("pim", "cycles", "--pattern", "every2", "--against", "attacc")
    assert done.code == 2 and "by option or ATTACC_DIR" in done.err
    done = cli("pim", "cycles", "--pattern", "every2", "--against", "attacc", "--simulator", tmp_path)
    assert done.code == 2 and "holds no build of AttAcc" in done.err


def test_reads_for_ramulator(tmp_path):
    assert streams.write_reads(tmp_path / "a", [7, 9], reads="1bank") == 2
    assert (tmp_path / "a").read_text() == "R 0,0,0,0,0,7,0\nR 0,0,0,0,0,9,1\n"
    assert streams.write_reads(tmp_path / "b", [7], reads="16bank_pc2") == 32
    lines = (tmp_path / "b").read_text().splitlines()
    assert len(set(lines)) == 32 and lines[1] == "R 0,1,0,0,0,7,0"


@pytest.mark.parametrize("name", simulators.VARIABLES)
def test_the_real_simulators_agree(name):
    """With a build at hand: its own answers, not the recorded ones."""
    try:
        simulators.home(name)
    except ValueError as error:
        pytest.skip(str(error))
    for pattern in ("every4", "rand0.75"):
        if name == "attacc":
            for mode in timing.MODES:
                trace = streams.expand(streams.pattern(pattern, 300 if mode == "AB" else 20), mode, split=True)
                assert simulators.attacc_cycles(trace, "HBM3_5.2Gbps") == controller.simulate(trace, NORMAL).cycles
        else:
            rows = streams.pattern(pattern, 3000)  # the last 33 of them stay in its queue, not counted
            m1 = (np.diff(rows) == 0).sum() / rows.size
            assert abs(simulators.ramulator_hits(rows) - m1) < 0.01
