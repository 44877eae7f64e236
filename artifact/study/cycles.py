"""The cycle-level controller asked: one stream from the command line, and what notebook 14 computes."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from artifact.kv import allocators
from artifact.pim import bandwidth, controller, geometry, mapping, runs, streams, timing
from artifact.study import paths, results, serving, simulators
from artifact.study.serving import Cell

PRESETS = ("HBM3_5.2Gbps", "HBM3_5.2Gbps_NPC")  # AttAcc's default, with and without its power limit


def stream(trace=None, pattern=None, block_table=None, *, commands=1000, seed=0, mode="AB", barrier=0, split=False,
           order="window"):
    """The `controller.Trace` that the command line names: a file, a pattern, or a block table's JSON file.

    ValueError unless exactly one is given.
    """
    if [trace, pattern, block_table].count(None) != 2:
        raise ValueError("give one of: a trace file, --pattern, --block-table")
    if trace is not None:
        return streams.read(trace)
    if pattern is not None:
        return streams.expand(streams.pattern(pattern, commands, seed), mode, barrier=barrier, split=split)
    table, tokens, lay = read_table(block_table)
    return streams.block_table(table, tokens, lay, order=order)


def read_table(path):
    """A file {seq_len, table, block_tokens (16)} -> block ids, tokens and the study's layout that holds them."""
    name, cell = Path(path).name, Cell()
    try:
        entry = json.loads(Path(path).read_text(encoding="utf-8"))
        table, tokens = np.array(entry["table"]), entry["seq_len"]
        block_tokens = entry.get("block_tokens", 16)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except KeyError as error:
        raise ValueError(f"{name}: missing {error}; allowed: {{seq_len, table, block_tokens}}") from None
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{name}: not a JSON object; allowed: {{seq_len, table, block_tokens}}") from None
    if table.ndim != 1 or table.dtype.kind != "i" or not table.size or table.min() < 0:
        raise ValueError(f"{name}: table is {str(entry['table'])[:40]}; allowed: block numbers from 0, at least one")
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise ValueError(f"{name}: seq_len is {tokens!r}; allowed: a whole number of at least 1")
    try:
        geometry.blocks_per_region(cell.memory, cell.token_bytes, block_tokens)
        lay = layout(cell, block_tokens, int(table.max()) + 1)
        bandwidth.count(table, tokens, lay)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return table, tokens, lay


def layout(cell, block_tokens, blocks, address_map=None):
    """The `bandwidth.Layout` of so many blocks of a cell, under its own address map unless one is named."""
    order = mapping.address_map(address_map or cell.address_map, cell.memory)
    return bandwidth.layout(order, cell.token_bytes, block_tokens, blocks)


def answer(*, preset="HBM3_5.2Gbps", refresh="on", quirks="on", against=None, simulator=None, export=None, **asked):
    """What `artifact pim cycles` prints: a flat mapping. Keywords as its options; `asked` as those of `stream`.

    Bytes are those the MACs of all channels in the trace read; a block table's MAC reads 1,024, one rank of both
    pseudo-channels. `attacc_cycles` and `equal` stand there when AttAcc was asked.
    """
    for name, value in (("refresh", refresh), ("quirks", quirks)):
        if value not in ("on", "off"):
            raise ValueError(f"{name} is {value!r}; allowed: on, off")
    if against not in (None, "attacc"):
        raise ValueError(f"against is {against!r}; allowed: attacc")
    if against:
        simulators.home(against, simulator)
    times, trace = timing.preset(preset), stream(**asked)
    found = controller.simulate(trace, times, refresh=refresh == "on", quirks=quirks == "on")
    if asked.get("block_table") is not None:
        found = found._replace(bytes=found.macs * streams.COMMAND_BYTES)
    if export:
        streams.write(export, trace)
    said = {"preset": preset, "refresh": refresh, "commands_count": found.macs, "cycles": found.cycles,
            "activations_count": found.activations, "refreshes_count": found.refreshes,
            "row_hits_count": found.row_hits, "read_bytes": found.bytes, "bytes_per_cycle": found.bytes_per_cycle,
            "time_ns": found.cycles * times.tck_ps / 1000,
            "read_energy_pj": found.bytes * timing.ENERGY_TABLE[trace.mode][0]}
    if against:
        theirs = simulators.attacc_cycles(trace, preset, refresh=refresh == "on", folder=simulator)
        said |= {"attacc_cycles": theirs, "equal": theirs == found.cycles}
    return said


def recorded(name):
    """The reference result `name`: runs of other simulators, kept with the checkout."""
    return results.read(paths.data_dir() / "recorded" / "reference" / name)


def _independent(name, elements, seed):
    """Channel c of 16 reads pattern `name` of seed + c; a command of each in turn."""
    rows = np.stack([streams.pattern(name, elements, seed + c) for c in range(streams.CHANNELS)], axis=1)
    channel = np.tile(np.arange(streams.CHANNELS, dtype=np.int16), elements)
    return streams.expand(rows.reshape(-1))._replace(channel=channel)


def attacc(size):
    """Recorded AttAcc runs beside the model's: one row a run, evenly taken from all of them as the scale says.

    event: `controller.simulate`; runs: by run lengths, of all-bank commands; formula: the study's M1 at the preset's
    own nCCDAB and nRC. Channels that all do the same are computed once.
    """
    theirs = recorded("attacc_cycles.csv")
    rows = []
    for r in theirs.iloc[np.unique(np.linspace(0, len(theirs) - 1, size.controller_runs).astype(int))].itertuples():
        times, refresh = timing.preset(r.preset), r.refresh == "on"
        pattern = streams.pattern(r.pattern, r.elements_count, r.seed)
        trace = streams.expand(pattern, r.mode, barrier=r.barrier_count, split=r.split)
        if r.independent:
            trace = _independent(r.pattern, r.elements_count, r.seed)
        same = 1 if r.independent else r.channels_count
        ours = controller.simulate(trace, times, refresh=refresh)
        by_runs = np.nan
        if r.mode == "AB" and not r.independent:
            by_runs = runs.served(pattern, times, refresh=refresh, barrier=r.barrier_count or None)[0]
        formula = r.elements_count * (r.m1_inorder_frac * times.nCCDAB + (1 - r.m1_inorder_frac) * times.nRC)
        rows.append({
            **{name: getattr(r, name) for name in ("pattern", "mode", "barrier_count", "split", "preset", "refresh",
                                                   "channels_count", "independent")},
            "attacc_cycles": r.run_cycles, "event_cycles": ours.cycles, "runs_cycles": by_runs,
            "formula_cycles": formula if r.mode == "AB" else np.nan,
            "equal_count": int((ours.cycles, ours.activations * same, ours.refreshes * same)
                               == (r.run_cycles, r.activations_count, r.refreshes_count)),
        })  # fmt: skip
    frame = pd.DataFrame(rows)
    for name in ("event", "runs", "formula"):
        frame[f"{name}_ratio"] = frame[f"{name}_cycles"] / frame["attacc_cycles"]
    return frame.assign(origin="simulated")


def block_tables(size):
    """Recorded AttAcc runs of real block tables beside the model's: one row a run, as `attacc`."""
    theirs, cell = recorded("attacc_block_tables.csv"), Cell()
    found = json.loads((paths.data_dir() / "recorded/reference/attacc_block_tables.json").read_text(encoding="utf-8"))
    key = ("workload", "allocator", "step", "seq_id")
    tables = {tuple(entry[name] for name in key): entry["table"] for entry in found["tables"]}
    lay = layout(cell, 16, max(map(max, tables.values())) + 1)
    rows = []
    for r in theirs.iloc[np.unique(np.linspace(0, len(theirs) - 1, size.controller_runs).astype(int))].itertuples():
        table = tables[tuple(getattr(r, name) for name in key)]
        trace = streams.block_table(table, r.length_tokens, lay, order=r.order)
        ours = controller.simulate(trace, timing.preset(r.preset), refresh=r.refresh == "on")
        rows.append({
            **{name: getattr(r, name) for name in (*key, "length_tokens", "order", "preset", "refresh")},
            "attacc_cycles": r.run_cycles, "event_cycles": ours.cycles,
            "equal_count": int((ours.macs, ours.cycles, ours.activations, ours.refreshes) == (
                r.commands_count, r.run_cycles, r.activations_count, r.refreshes_count)),
        })  # fmt: skip
    return pd.DataFrame(rows).assign(origin="simulated")


def agreement(*frames):
    """How many recorded runs were computed again and how many are equal, by name: (name, frame) pairs."""
    rows = [(name, len(frame), int(frame["equal_count"].sum())) for name, frame in frames]
    named = pd.DataFrame(rows, columns=["what", "run_count", "equal_count"])
    return named.assign(differing_count=named["run_count"] - named["equal_count"], origin="simulated")


def per_row(longest=128):
    """Cycles a command by commands per row: exactly, and by the formula of M1 = 1 - 1/k, in order, without refresh."""
    k = np.arange(1, longest + 1)
    rows = []
    for name in PRESETS:
        times = timing.preset(name)
        exact = runs.period(k, times) / k
        formula = ((k - 1) * times.nCCDAB + times.nRC) / k
        rows.append(pd.DataFrame({"preset": name, "commands_per_row_count": k, "exact_cycles": exact,
                                  "formula_cycles": formula, "formula_ratio": formula / exact}))
    return pd.concat(rows, ignore_index=True).assign(origin="modelled")


def worst_per_row(frame):
    """The row of `per_row` where the formula errs most, for each preset."""
    return frame.loc[frame.groupby("preset", sort=False)["formula_ratio"].idxmax()].reset_index(drop=True)


def reordering(size):
    """Each pattern in order, behind barriers, and freely through the queue; and with refresh; cycles a command."""
    n = size.controller_commands
    rows = []
    for pattern in streams.PATTERNS:
        stream = streams.pattern(pattern, n, size.seed)
        for name in PRESETS:
            times = timing.preset(name)
            inorder, free = (runs.served(stream, times, refresh=False, barrier=b) for b in (1, None))
            barriers = runs.served(stream, times, refresh=False, barrier=16)
            refreshed = runs.served(stream, times, refresh=True)
            rows.append({
                "pattern": pattern, "preset": name, "commands_count": n,
                "m1_inorder_frac": 1 - inorder[1] / n, "m1_served_frac": 1 - free[1] / n,
                "inorder_cycles": inorder[0] / n, "barrier16_cycles": barriers[0] / n, "queue_cycles": free[0] / n,
                "recovered_ratio": inorder[0] / free[0], "refresh_ratio": refreshed[0] / free[0],
                "formula_ratio": (inorder[1] * times.nRC + (n - inorder[1]) * times.nCCDAB) / free[0],
            })  # fmt: skip
    return pd.DataFrame(rows).assign(origin="simulated")


def study_tables():
    """The nine block tables of the study's outside checks, by allocator and sequence: {seq_len, table, ...} each."""
    path = paths.data_dir() / "recorded/reference/attacc_block_tables.json"
    return {(e["allocator"], e["seq_id"]): e for e in json.loads(path.read_text(encoding="utf-8"))["tables"]
            if e["workload"] == "steady300"}


def study_points():
    """The study's AttAcc cycle counts, and ours from its nine block tables: every hit charged twice, and once.

    One row each. equal_count: whether ours is the study's, and whether three constants give it: 6 cycles a command, 40
    more a row change but 14 for the first.
    """
    cell, times, tables = Cell(), timing.preset(PRESETS[0]), study_tables()
    rows = []
    for r in results.read(paths.data_dir() / "published" / "kvpimple_attacc.csv").itertuples():
        entry = tables[r.allocator, r.seq_id]
        lay = layout(cell, 16, 1 << 13, r.address_map)
        twice, once = (controller.simulate(streams.block_table(entry["table"], entry["seq_len"], lay, order=order),
                                           times, refresh=False) for order in ("double", "window"))
        constants = times.nCCDAB * twice.macs + 14 + 40 * (twice.activations - 1)
        said = {"address_map": r.address_map, "allocator": r.allocator, "seq_id": r.seq_id}
        rows += [
            said | {"charged": "twice", "run_cycles": r.run_cycles, "source": r.source, "origin": "published"},
            said | {"charged": "twice", "run_cycles": twice.cycles, "row_changes_count": twice.activations,
                    "constants_cycles": constants, "equal_count": int(twice.cycles == r.run_cycles),
                    "constants_equal_count": int(constants == r.run_cycles), "origin": "simulated"},
            said | {"charged": "once", "run_cycles": once.cycles, "row_changes_count": once.activations,
                    "origin": "simulated"},
        ]  # fmt: skip
    return pd.DataFrame(rows)


def point_gains(frame):
    """Paged over pim-aware of `study_points` in the study's own map: each sequence, and their mean."""
    own = frame[frame["address_map"] == "host-cacheline"]
    wide = own.pivot_table(index=["origin", "charged", "seq_id"], columns="allocator", values="run_cycles")
    ratio = (wide["paged"] / wide["pim-aware"]).rename("gain_mean_ratio").reset_index()
    means = ratio.groupby(["origin", "charged"], as_index=False)["gain_mean_ratio"].mean().assign(seq_id="mean")
    return pd.concat([ratio, means], ignore_index=True).assign(seq_id=lambda f: f["seq_id"].astype(str))


def point_agreement(frame):
    """How many of the study's points ours equals, and how many the three constants give."""
    own = frame.dropna(subset=["equal_count"])
    return pd.DataFrame([{"what": "the study's points", "run_count": len(own),
                          "equal_count": int(own["equal_count"].sum()),
                          "constants_equal_count": int(own["constants_equal_count"].sum()), "origin": "simulated"}])


_WAYS = (  # name, preset, order, refresh: what a gain is counted by
    ("cycles", PRESETS[0], "window", False), ("with refresh", PRESETS[0], "window", True),
    ("in order", PRESETS[0], "inorder", False), ("charged twice", PRESETS[0], "double", False),
    ("unlimited power", PRESETS[1], "window", False),
)
_KEY = ["rid", "length_tokens"]


def sequences(size, *, block_tokens=16):
    """Every sequence that a steady paged run samples, at the same length under each allocator: one row each.

    An allocator's run meets the sequence at a step of its own. `m4_latency_ns` is the analytic time (M4), a column
    named as a preset the same with its nCCDAB and nRC, in cycles; one named as a way of `_WAYS` the controller's
    cycles, where a first refresh is due nREFI after the sequence's start.
    """
    requests, wanted = min(1000, size.sweep_requests), None
    frames = []
    for allocator in allocators.STUDIED:  # paged first
        every = {} if wanted is None else {"sample_every": 1, "sample_sequences": 64}
        cell = Cell(allocator=allocator, requests=requests, seed=size.seed, block_tokens=block_tokens, **every)
        machine, lay = serving.begin(cell)
        for batch in machine.samples():
            code = batch.request << 32 | batch.tokens
            keep = np.ones(code.size, dtype=bool) if wanted is None else np.isin(code, wanted)
            starts, tokens = batch.starts[keep], batch.tokens[keep]
            counts = bandwidth.count_tables(batch.flat, starts, tokens, lay, cell.memory)
            kv_bytes = tokens * cell.token_bytes
            found = {"allocator": allocator, "step": batch.step[keep], "rid": batch.request[keep],
                     "length_tokens": tokens, "kv_bytes": kv_bytes,
                     "m4_latency_ns": bandwidth.metrics(counts, kv_bytes, cell.memory).m4_latency_ns}
            for way, name, order, refresh in _WAYS:
                how = {"order": order, "refresh": refresh}
                found[way] = streams.many(batch.flat, starts, tokens, lay, timing.preset(name), **how)[:, 1]
            for name in PRESETS:
                times, hits = timing.preset(name), counts.commands - counts.misses
                found[name] = (times.nCCDAB * hits + times.nRC * counts.misses) / cell.memory.channels
            frames.append(pd.DataFrame(found))
        if wanted is None:
            mine = pd.concat(frames, ignore_index=True)
            wanted = mine["rid"].to_numpy() << 32 | mine["length_tokens"].to_numpy()
    return pd.concat(frames, ignore_index=True)


def _pairs(frame):
    """Each allocator's rows of `sequences` beside paged's of the same sequence at the same length."""
    base = frame[frame["allocator"] == "paged"]
    return frame[frame["allocator"] != "paged"].merge(base, on=_KEY, suffixes=("", "_paged"),
                                                      validate="many_to_one")


def gains(frame):
    """Each allocator over paged, by every way of counting: mean over sequences, total, and mean of rates.

    `optimism_ratio`: M3's gain over the way's, of the means. `below_frac`: sequences that gain less than 1.6.
    """
    both, rows = _pairs(frame), []
    ways = [("M3", None, None, "m4_latency_ns"), *((way, name, order, way) for way, name, order, _ in _WAYS),
            ("M3, this preset's constants", PRESETS[0], None, PRESETS[0]),
            ("M3, constants without power limit", PRESETS[1], None, PRESETS[1])]
    for allocator, group in both.groupby("allocator", sort=False):
        for way, preset, order, column in ways:
            ratio = group[f"{column}_paged"] / group[column]
            analytic = group["m4_latency_ns_paged"] / group["m4_latency_ns"]
            rates = [(group["kv_bytes"] / group[name]).mean() for name in (column, f"{column}_paged")]
            total = group[f"{column}_paged"].sum() / group[column].sum()
            analytic_total = group["m4_latency_ns_paged"].sum() / group["m4_latency_ns"].sum()
            rows.append({
                "allocator": allocator, "way": way, "preset": preset, "order": order, "sequences_count": len(group),
                "gain_mean_ratio": ratio.mean(), "gain_total_ratio": total, "gain_rates_ratio": rates[0] / rates[1],
                "gain_mean_ratio_p05": ratio.quantile(0.05), "gain_mean_ratio_p95": ratio.quantile(0.95),
                "optimism_ratio": analytic.mean() / ratio.mean(), "optimism_total_ratio": analytic_total / total,
                "below_frac": (ratio < 1.6).mean(), "origin": "modelled" if order is None else "simulated",
            })  # fmt: skip
    return pd.DataFrame(rows)


def by(frame, column, edges):
    """The gains of `sequences` in bins of the paged run's `column` (length_tokens or step) up to each of `edges`."""
    both, rows = _pairs(frame), []
    value = both[column if column in _KEY else f"{column}_paged"].to_numpy()
    both["bin"] = np.searchsorted(edges, value)
    for (allocator, which), group in both.groupby(["allocator", "bin"], sort=False):
        if which < len(edges):
            for way, name in (("M3", "m4_latency_ns"), ("cycles", "cycles"), ("unlimited power", "unlimited power")):
                ratio = group[f"{name}_paged"] / group[name]
                rows.append((allocator, edges[which], way, len(group), ratio.mean(), (ratio < 1.6).mean()))
    kind = "length_tokens" if column == "length_tokens" else "step"
    names = ["allocator", kind, "way", "sequences_count", "gain_mean_ratio", "below_frac"]
    found = pd.DataFrame(rows, columns=names).sort_values(["allocator", "way", kind], ignore_index=True)
    return found.assign(origin=np.where(found["way"] == "M3", "modelled", "simulated"))


def by_length_and_age(frame):
    """`by` sequence length and `by` step of the paged run, one below the other."""
    return pd.concat([by(frame, "length_tokens", (64, 128, 256, 512, 1024, 2048, 4096)),
                      by(frame, "step", (250, 500, 1000, 2000, 4000, 8000))], ignore_index=True)


def served(size):
    """Our counters beside Ramulator 2.1's recorded reads: M1 in order, and the share of hits it served."""
    theirs = recorded("ramulator_reads.csv")
    ours = {pattern: streams.pattern(pattern, 1000, 0) for pattern in streams.PATTERNS}
    rows = []
    for r in theirs[theirs["scheduler"] == "FRFCFSRowHit"].itertuples():
        stream = ours[r.pattern]
        rows.append({
            "pattern": r.pattern, "reads": r.reads, "refresh": r.refresh, "reused": _reused(stream),
            "m1_inorder_frac": 1 - runs.lengths(stream, barrier=1).size / stream.size,
            "m1_queue_frac": 1 - runs.lengths(stream).size / stream.size,
            "recorded_inorder_frac": r.m1_inorder_frac, "recorded_served_frac": r.m1_served_frac,
        })  # fmt: skip
    frame = pd.DataFrame(rows)
    return frame.assign(difference_frac=(frame["recorded_served_frac"] - frame["m1_inorder_frac"]).abs(),
                        origin="simulated")


def _reused(rows):
    """Whether a queue of 33 commands can ever find a row that the stream has left and comes back to."""
    return bool(runs.lengths(rows).size < runs.lengths(rows, barrier=1).size - len(rows) // 100)


def served_summary(frame):
    """The largest distance to Ramulator's served hits, refresh off, by whether rows are reused inside the queue."""
    off = frame[frame["refresh"] == "off"]
    rows = [("reused" if reused else "not reused", len(group), group["difference_frac"].mean(),
             group["difference_frac"].max()) for reused, group in off.groupby("reused")]
    names = ["rows", "run_count", "difference_mean_frac", "difference_max_frac"]
    return pd.DataFrame(rows, columns=names).assign(origin="simulated")


def constraints():
    """The table of timing constraints, each with its cycles at the default preset and its source."""
    times = timing.preset(PRESETS[0])
    rows = [{**row._asdict(), "cycles": str(row.cycles),
             "at_cycles": row.cycles if isinstance(row.cycles, int) else getattr(times, row.cycles)}
            for row in timing.CONSTRAINTS]
    frame = pd.DataFrame(rows).rename(columns={"cycles": "parameter"})
    frame["quirk"] = [f"{q} {'on' if on else 'off'}" if q else None
                      for q, on in zip(frame["quirk"], frame["when"], strict=True)]
    columns = ["level", "before", "after", "parameter", "at_cycles", "quirk", "source"]
    return frame[columns].assign(origin="published")


def worst(frame):
    """For the controller, its run-length form and the formula: runs compared, equal ones, the ratios' extremes."""
    rows = []
    for name in ("event", "runs", "formula"):
        ratio = frame[f"{name}_ratio"].dropna()
        rows.append((name, len(ratio), int((ratio == 1).sum()), ratio.min(), ratio.max(), (ratio - 1).abs().max()))
    names = ["form", "run_count", "equal_count", "ratio_min", "ratio_max", "largest_error_frac"]
    return pd.DataFrame(rows, columns=names).assign(origin="simulated")
