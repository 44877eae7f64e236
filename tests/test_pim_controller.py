"""The cycle-level controller: AttAcc's recorded runs to the cycle, every constraint on both sides, every form alike."""

import numpy as np
import pytest

from artifact.pim import controller, lanes, runs, streams, timing
from artifact.study import bench, cycles, scale

NORMAL = timing.preset("HBM3_5.2Gbps")
WHOLE = scale.load("full").model_copy(update={"controller_runs": 10_000})


# --- AttAcc's own runs

def test_every_recorded_attacc_run_of_a_pattern_to_the_cycle():
    frame = cycles.attacc(WHOLE)
    assert len(frame) == 553 and (frame["equal_count"] == 1).all()
    assert set(frame["mode"]) == {"AB", "SB", "SBr", "AB1SB", "PB", "PBr"} and frame["independent"].sum() == 2
    by_runs = frame.dropna(subset=["runs_ratio"])
    inexact = by_runs[by_runs["runs_ratio"] != 1]
    assert (abs(by_runs["runs_ratio"] - 1) < 0.01).all()
    assert (inexact["split"] & (inexact["refresh"] == "on")).all(), "exact but where two bank addresses meet a refresh"


def test_every_recorded_attacc_run_of_a_block_table_to_the_cycle():
    frame = cycles.block_tables(WHOLE)
    assert len(frame) == 1264 and (frame["equal_count"] == 1).all()
    assert set(frame["order"]) == set(streams.ORDERS)


def test_the_studys_eighteen_points_and_the_three_constants_behind_them():
    points = cycles.study_points()
    (row,) = cycles.point_agreement(points).to_dict("records")
    assert (row["run_count"], row["equal_count"], row["constants_equal_count"]) == (18, 18, 18)
    own = points[(points["address_map"] == "host-cacheline") & (points["origin"] == "simulated")]
    once = own[own["charged"] == "once"].set_index(["allocator", "seq_id"])["run_cycles"]
    assert once["paged", 58] == 870 and once["pim-aware", 58] == 390


def test_our_counter_is_m1_and_ramulators_served_hits_where_rows_are_not_reused():
    frame = cycles.served(WHOLE)
    assert len(frame) == 102 and (abs(frame["m1_inorder_frac"] - frame["recorded_inorder_frac"]) < 1e-9).all()
    off = frame[(frame["refresh"] == "off") & ~frame["reused"]]
    assert len(off) == 33 and off["difference_frac"].max() < 0.005
    assert set(frame.loc[frame["reused"], "pattern"]) == {"kv1", "kv4", "kv16", "paged6", "rand0.5_pool8",
                                                          "rand0.75_pool8"}


# --- the table of constraints

def _mode(row):
    return next(mode for mode in timing.MODES if {row.before, row.after} <= set(timing.roles(mode)))


@pytest.mark.parametrize("row", timing.CONSTRAINTS, ids=lambda r: f"{r.level}-{r.before}-{r.after}-{r.cycles}")
def test_a_constraint_blocks_one_cycle_before_and_not_on_the_cycle(row):
    mode, bank = _mode(row), 21  # rank 1, bank group 1, bank 1 of pseudo-channel 0
    names, number = timing.roles(mode), timing.MODES.index(mode)
    on = {row.quirk} if row.quirk and row.when else set()
    rules = timing.rules(NORMAL, mode, on, (row,))
    assert len(rules) == 1
    dev, unit = controller.device(mode), controller._unit(number, bank)
    controller.issue(dev, 0, names[row.before], bank, unit, 1000, rules)
    after, free = names[row.after], 1000 + rules[0, 3]

    def ready(where):
        return controller.ready_at(dev, 0, after, where, controller._unit(number, where), False)

    held = {"misplaced": (unit >> 4) << 2 | unit & 3}.get(row.level, bank)
    assert ready(held) > free - 1 and ready(held) <= free
    alone = row.before in ("REFab", "MOVE", "SFM")
    elsewhere = {"pseudochannel": 32, "rank": 5, "bankgroup": 25, "bank": 22, "unit": 22, "misplaced": bank}
    elsewhere = elsewhere.get(row.level)
    if elsewhere is not None and (alone or row.level != "pseudochannel"):
        assert ready(elsewhere) < 0, "another node of the level is not held up"
    others = set(names.values()) - {after, timing.SFM}
    assert all(controller.ready_at(dev, 0, other, held, 0, False) < 0 for other in others)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("row", [row for row in timing.CONSTRAINTS if row.level in ("rank", "bankgroup", "bank")
                                 and row.before != "MOVE" and row.before != "SFM"],
                         ids=lambda r: f"{r.level}-{r.before}-{r.after}-{r.cycles}")
def test_the_same_banks_by_the_other_pseudo_channels_address(row, apart):
    """Their times are kept apart by AttAcc's quirk, and are one without it."""
    mode = _mode(row)
    number, names = timing.MODES.index(mode), timing.roles(mode)
    dev = controller.device(mode, apart=apart)
    controller.issue(dev, 0, names[row.before], 21, controller._unit(number, 21), 1000,
                     timing.rules(NORMAL, mode, set(), (row,)))
    for bank, held in ((21, True), (21 + 32, not apart)):
        ready = controller.ready_at(dev, 0, names[row.after], bank, controller._unit(number, bank), False)
        assert (ready > 1000) == held


def test_a_row_of_a_quirk_is_in_force_on_one_side_of_its_switch_only():
    for row in timing.CONSTRAINTS:
        if row.quirk:
            both = [len(timing.rules(NORMAL, _mode(row), on, (row,))) for on in ({row.quirk}, set())]
            assert both == [int(row.when), int(not row.when)]


def test_all_constraints_together_wait_for_the_latest():
    for mode in timing.MODES:
        rules, names = timing.rules(NORMAL, mode, frozenset(timing.QUIRKS)), timing.roles(mode)
        dev = controller.device(mode)
        controller.issue(dev, 0, names[f"ACT{mode}"], 0, 0, 10, rules)
        assert controller.ready_at(dev, 0, names[f"MAC{mode}"], 0, 0, False) == 10 + 19
        assert controller.ready_at(dev, 0, timing.PRE, 0, 0, False) == 10 + 45
        assert controller.ready_at(dev, 0, names[f"ACT{mode}"], 0, 0, False) == 10 + 63


def test_every_number_has_a_source():
    assert all(row.source for row in timing.CONSTRAINTS) and all(row[-1] for row in timing.PRESET_TABLE.values())
    for row in timing.CONSTRAINTS:
        assert isinstance(row.cycles, int) or hasattr(NORMAL, row.cycles)
        assert row.level in timing.LEVELS and row.quirk in {None, *timing.QUIRKS}
    assert len(timing.PRESETS) == 10


@pytest.mark.parametrize(("name", "nrfc", "tck_ps"), [("4.8", 421, 833), ("5.2", 456, 769), ("5.6", 491, 714),
                                                      ("6.0", 526, 666), ("6.4", 560, 625)])
def test_presets_round_as_jedec_does(name, nrfc, tck_ps):
    for preset in (timing.preset(f"HBM3_{name}Gbps"), timing.preset(f"HBM3_{name}Gbps_NPC")):
        assert (preset.nRFC, preset.tck_ps) == (nrfc, tck_ps) and preset.hits_first


# --- by hand

_LETTERS = {timing.ACT: "A", timing.MAC: "M", timing.PRE: "P", timing.PREA: "P", timing.REF: "R", timing.BARRIER: "B"}


def _log(rows, *, barrier=0, refresh=False, quirks=True):
    """(cycle, letter, trace position) of every command that issues for all-bank MACs to `rows`."""
    trace = streams.expand(np.array(rows), "AB", barrier=barrier)
    _, log = controller.events(trace, NORMAL, refresh=refresh, quirks=quirks, log=10_000)
    return [(int(cycle), _LETTERS[command], int(j)) for cycle, command, j in log]


def test_a_row_change_by_hand():
    assert _log([0, 0, 1]) == [(1, "A", 0), (20, "M", 0), (26, "M", 1), (46, "P", 2), (65, "A", 2), (84, "M", 2)]


def test_a_hit_that_comes_later_is_served_first_but_not_past_a_barrier():
    assert [j for _, command, j in _log([0, 1, 0]) if command == "M"] == [0, 2, 1]
    assert [j for _, command, j in _log([0, 1, 0], barrier=2) if command == "M"] == [0, 1, 3]  # 2 is a barrier
    assert [j for _, command, j in _log([0, *[1] * 40, 0]) if command == "M"][:2] == [0, 1]  # beyond 33 entries


def test_a_refresh_by_hand():
    """Rows change at 64 cycles: the one open at 5070 is closed, two REFab follow, and nRFC later the next opens."""
    log = _log(range(90), refresh=True)
    (first, *_) = [i for i, (_, command, _) in enumerate(log) if command == "R"]
    (closed, kind, j), refs, opened = log[first - 1], log[first : first + 2], log[first + 2]
    assert (kind, j) == ("P", -1) and closed >= 5070 and closed - 45 == log[first - 3][0]
    assert [cycle for cycle, _, _ in refs] == [closed + 1, closed + 2]
    assert opened[:2] == (closed + 1 + 456, "A")


def test_a_move_waits_for_its_banks_queued_hits_and_for_no_other():
    trace = streams.expand(np.zeros(3, dtype=int))
    trace = trace._replace(op=np.array([timing.MAC, timing.MAC, timing.MOVE], dtype=np.int8))
    for bank, cycle in ((0, 27), (1, 1)):  # behind both MACs; beside the activation
        _, log = controller.events(trace._replace(bank=np.array([0, 0, bank], dtype=np.int8)), NORMAL, log=10)
        assert [at for at, command, _ in log.tolist() if command == timing.MOVE] == [cycle]


def test_a_softmax_waits_for_nothing_and_moves_wait_for_it():
    trace = streams.expand(np.zeros(3, dtype=int))
    trace = trace._replace(op=np.array([timing.MOVE, timing.SFM, timing.MOVE], dtype=np.int8))
    _, log = controller.events(trace, NORMAL, log=10)
    assert log[:, 0].tolist() == [1, 2, 6]  # nCCDL after the SFM of the same bank group


def test_identical_channels_take_one_channels_cycles():
    rows = streams.pattern("rand0.75", 300)
    one = controller.simulate(streams.expand(rows), NORMAL)
    trace = streams.expand(np.repeat(rows, 4))._replace(channel=np.tile(np.arange(4, dtype=np.int16), 300))
    four = controller.simulate(trace, NORMAL)
    assert four == (one.cycles, *(4 * value for value in one[1:]))


# --- every form is the event loop, only faster

def _random(seed):
    draw = np.random.default_rng(seed)
    shape = streams.SHAPES[seed % len(streams.SHAPES)]
    rows = draw.integers(0, draw.choice([1, 2, 3, 8, 40, 16384]), draw.integers(1, 300 if shape[:2] != "PB" else 60))
    if draw.random() < 0.5:
        rows = np.repeat(rows, draw.integers(1, 12, rows.size))[: rows.size]
    trace = streams.expand(rows, shape, split=bool(draw.random() < 0.3))
    if shape != "AB" and draw.random() < 0.3:
        order = draw.permutation(trace.op.size)
        trace = trace._replace(bank=trace.bank[order], row=trace.row[order])
    return rows.astype(np.int32), trace, timing.preset(draw.choice(timing.PRESETS)), bool(draw.random() < 0.6), draw


def _alike(seeds):
    for seed in seeds:
        rows, trace, preset, refresh, draw = _random(seed)
        try:
            event = controller.simulate(trace, preset, refresh=refresh, form="event")
        except ValueError as error:
            assert "the trace has no end" in str(error) and np.unique(trace.bank >> 5).size == 2, seed
            continue
        assert controller.simulate(trace, preset, refresh=refresh) == event, seed
        if trace.mode == "AB":
            barrier = int(draw.integers(1, 60))
            event = controller.events(streams.expand(rows, barrier=barrier), preset, refresh=refresh)[0]
            assert runs.served(rows, preset, refresh=refresh, barrier=barrier) == (
                event.cycles, event.activations, event.refreshes), seed


def test_random_traces_by_every_form():
    _alike(range(60))


def test_a_trace_without_an_end_is_refused():
    _, trace, preset, refresh, _ = _random(319)
    with pytest.raises(ValueError, match="no end: banks with two addresses") as caught:
        controller.simulate(trace, preset, refresh=refresh)
    assert "\n" not in str(caught.value)
    quirks = set(timing.QUIRKS) - {"times_one_pseudochannel"}
    assert controller.simulate(trace, preset, refresh=refresh, quirks=quirks).macs == (trace.op == timing.MAC).sum()


@pytest.mark.slow
def test_many_random_traces_by_every_form():
    _alike(range(60, 1500))


@pytest.mark.parametrize("pattern", streams.PATTERNS)
def test_run_lengths_say_what_is_served(pattern):
    rows = streams.pattern(pattern, 500, 1)
    for barrier in (None, 1, 16):
        lengths = runs.lengths(rows, barrier=barrier)
        last, activations, refreshes = runs.served(rows, NORMAL, refresh=False, barrier=barrier)
        assert lengths.sum() == 500 and lengths.min() >= 1 and activations == lengths.size and refreshes == 0
        assert last == 1 + runs.period(lengths[:-1], NORMAL).sum() + 19 + (lengths[-1] - 1) * 6
    assert runs.lengths(rows, barrier=1).size == 1 + (np.diff(rows) != 0).sum() >= runs.lengths(rows).size


def test_lanes_take_what_a_processor_may_not_predict():
    """Each bank to its own rows: lanes of one mode at every distance from each other."""
    draw = np.random.default_rng(5)
    for shape in ("SB", "PB"):
        trace = streams.expand(np.zeros(100, dtype=int), shape)
        trace = trace._replace(row=draw.integers(0, 3, trace.op.size).astype(np.int32))
        event = controller.events(trace, NORMAL)[0]
        assert lanes.served(trace, NORMAL) == (event.cycles, event.activations, event.refreshes)


# --- quirks

def test_banks_reached_by_both_pseudo_channels_addresses_as_attacc_does():
    """Per-bank streams, each as AttAcc's own binary took; what it had not ended after 20 s is not here."""
    frame = cycles.recorded("attacc_addresses.csv")
    assert len(frame) > 40 and set(frame["preset"]) == set(timing.PRESETS) and set(frame["refresh"]) == {"on", "off"}
    for r in frame.itertuples():
        trace = streams.expand(streams.pattern(r.pattern, r.elements_count, r.seed), r.mode, barrier=r.barrier_count,
                               split=r.split)
        ours = controller.simulate(trace, timing.preset(r.preset), refresh=r.refresh == "on")
        assert ours.cycles == r.run_cycles, r


def _moves():
    draw = np.random.default_rng(0)
    trace = streams.expand(draw.integers(0, 4, 400), "AB")
    op = np.where(draw.random(400) < 0.3, timing.MOVE, timing.MAC).astype(np.int8)
    return trace._replace(op=op, bank=draw.integers(0, 64, 400).astype(np.int8))


@pytest.mark.parametrize(("quirk", "trace"), [
    ("refresh_skips_pseudochannels", streams.expand(streams.pattern("new_row", 300))),
    ("refresh_burst", streams.expand(np.repeat([0, 1], [2000, 10]))),
    ("activate_checks_one_pseudochannel", streams.expand(streams.pattern("new_row", 300))),
    ("precharge_unpaired", streams.expand(streams.pattern("rand0.5", 200), "PB")),
    ("same_bank_stays_open", streams.expand(streams.pattern("rand0.75", 300), "AB1SB")),
    ("precharge_all_skips_banks", streams.expand(streams.pattern("rand0.5", 400), "PB")),
    ("misplaced_read_to_precharge", streams.expand(streams.pattern("rand0.5", 200), "PB")),
    ("times_one_pseudochannel", streams.expand(streams.pattern("rand0.5", 200), "PB", split=True)),
], ids=lambda value: value if isinstance(value, str) else "")
def test_each_quirk_has_a_switch_that_does_something(quirk, trace):
    with_all = controller.simulate(trace, NORMAL, form="event")
    without = controller.simulate(trace, NORMAL, quirks=set(timing.QUIRKS) - {quirk})
    assert with_all != without and with_all.macs == without.macs
    assert with_all == controller.simulate(trace, NORMAL)


@pytest.mark.parametrize("rows", [range(400), np.repeat([0, 1], [2000, 10])], ids=["new rows", "a row that stays"])
def test_without_quirks_refreshes_keep_their_distances(rows):
    """nRP from a precharge, nRFC between a pseudo-channel's REFabs and to what opens both."""
    kept = _log(rows, refresh=True, quirks=False)
    refs = [(i, cycle) for i, (cycle, letter, _) in enumerate(kept) if letter == "R"]
    assert len(refs) >= 4
    for halves in (refs[0::2], refs[1::2]):
        assert np.diff([cycle for _, cycle in halves]).min() >= NORMAL.nRFC
    for i, cycle in refs[0::2]:
        assert cycle - max(at for at, letter, _ in kept[:i] if letter == "P") >= NORMAL.nRP
    for i, cycle in refs[1::2]:
        assert min((at for at, letter, _ in kept[i:] if letter == "A"), default=1 << 30) >= cycle + NORMAL.nRFC
    burst = [cycle for cycle, letter, _ in _log(rows, refresh=True) if letter == "R"]
    assert (np.diff(burst) == 1).any()  # AttAcc refreshes both halves in adjacent cycles


def test_data_moves_beside_macs():
    trace = _moves()
    outcome = controller.simulate(trace, NORMAL, refresh=False)
    assert outcome.macs == (trace.op == timing.MAC).sum()
    alone = controller.simulate(trace._replace(op=np.full(400, timing.MOVE, dtype=np.int8)), NORMAL, refresh=False)
    assert alone.macs == alone.activations == 0 and 400 <= alone.cycles < 4 * 400


@pytest.mark.parametrize(("call", "says"), [
    (lambda: controller.simulate(streams.expand([]), NORMAL), "the trace is empty"),
    (lambda: controller.simulate(streams.expand([1]), NORMAL, quirks={"none"}), "quirk is 'none'; allowed: refresh_"),
    (lambda: controller.simulate(streams.expand([1]), NORMAL, form="fast"), "form is 'fast'; allowed"),
    (lambda: timing.preset("HBM4"), "preset is 'HBM4'; allowed: HBM3_4.8Gbps"),
    (lambda: runs.served([], NORMAL), "the stream is empty"),
    (lambda: runs.served([1], NORMAL, barrier=0), "barrier is 0; allowed"),
    (lambda: runs.served([1], timing.Timing(**{**vars(NORMAL), "nCCDAB": 9})), "nCCDAB is 9; allowed .* below nRTPL"),
    (lambda: timing.Timing(**{**vars(NORMAL), "nRP": 0}), "timing nRP is 0; allowed"),
])
def test_what_is_refused(call, says):
    with pytest.raises(ValueError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


# --- how fast

def test_every_form_is_timed():
    frame = bench.cycle_level(commands=6400, patterns=("every2", "rand0.5"), rounds=1, sequences=False)
    assert (frame["value"] > 0).all() and (frame["origin"] == "measured").all()
    told = " ".join(frame["measure"])
    for side in ("in order", "run lengths", "all-bank", "same-bank", "per-bank"):
        assert side in told


def test_a_wrong_answer_gets_no_time(monkeypatch):
    right = lanes.served
    monkeypatch.setattr(lanes, "served", lambda *given, **how: (right(*given, **how)[0] + 1, *right(*given, **how)[1:]))
    with pytest.raises(ValueError, match="every2, same-bank: .* no time is given"):
        bench.cycle_level(commands=6400, patterns=("every2",), rounds=1, sequences=False)
