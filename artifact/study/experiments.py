"""What notebooks 10 and 11 compute: one function per experiment, scale in, tidy frame out."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from artifact.kv import allocators
from artifact.pim import bandwidth, geometry, mapping
from artifact.study import paths, results, sweep
from artifact.study.serving import Cell, run

_COMPARED = allocators.STUDIED
# settings that one allocator has and another has not: no part of what makes two cells the same
_OF_ALLOCATOR = ("allocator", "spec_adopt", "pim_scratch", "pim_plan", "pim_compact_frac", "frees")
PRESET = "HBM3_5.2Gbps"  # AttAcc's default, in whose cycles a gain is counted beside M3's


def recorded(notebook, name):
    """The result `name` of our own full run, shipped with the checkout: seen before anything is computed."""
    return results.read(paths.data_dir() / "recorded" / "full" / notebook / name)


def headline(size, keep=None):
    """M1 to M4 by block size and workload: the study's 48 headline cells."""
    return sweep.compute(sweep.expand(sweep.load("headline"), size), keep=keep, preset=PRESET)


def heatmap(size, keep=None):
    """M1 of paged allocation by prompt length and block size."""
    return sweep.compute(sweep.expand(sweep.load("heatmap"), size), keep=keep)


def maps(size, keep=None):
    """The three address maps: bandwidth averaged over channels, and by the busiest channel."""
    return sweep.compute(sweep.expand(sweep.load("maps"), size), keep=keep)


def run_length(size, keep=None):
    """M1 by number of requests: how long the free list keeps its first order."""
    cells = [
        Cell(allocator=allocator, requests=n, seed=size.seed)
        for n in size.run_length_requests
        for allocator in ("paged", "random", "pim-aware")
    ]
    return sweep.compute(cells, keep=keep)


def gains(frame, *, base="paged", more=()):
    """Each allocator over `base` in the same cell of `frame`: by the mean of rates, by bytes over time, and by the
    busiest channel's rate; where the controller ran, the first two in its cycles too.

    A cell is the same when all settings are but those of allocators, and the columns `more`. Of several ways that
    `base` adopts drafts, the first in the frame counts.
    """
    settings = [name for name in sweep.row(Cell(), {}) if name in frame and name not in ("origin", *_OF_ALLOCATOR)]
    same = [*settings, *more]
    metrics = {"mean": "m3_bandwidth_gbps", "total": "m3_total_gbps", "busiest": "m3_busiest_gbps",
               "cycles_mean": "cycles_bandwidth_gbps", "cycles_total": "cycles_total_gbps"}  # fmt: skip
    metrics = {name: column for name, column in metrics.items() if column in frame}
    of_base = frame[frame["allocator"] == base].drop_duplicates(same)
    both = frame[frame["allocator"] != base].merge(
        of_base[[*same, *metrics.values()]], on=same, suffixes=("", "_base"), validate="many_to_one"
    )
    out = both[[name for name in both if name in (*same, *_OF_ALLOCATOR)]].copy()
    for name, column in metrics.items():
        out[f"gain_{name}_ratio"] = both[column] / both[f"{column}_base"]
    return out.assign(origin=both["origin"])


def throughput(frame, shares=(0.1, 0.25, 0.5, 0.75, 1.0)):
    """Step time and tokens per second of a whole model, from M4 of the steady 16-token cells of `frame`.

    Attention of one step = layers x mean batch x M4, sequences one after another in memory. Everything else of the
    step takes what makes attention the share `attention_share_frac` of the paged step, and the same under every
    allocator (Amdahl). Modelled: no other hardware is assumed.
    """
    rows = frame[(frame["workload"] == "steady") & (frame["block_tokens"] == 16)]
    rows = rows[rows["address_map"] == "host-cacheline"]
    attention, batch = {}, {}
    for r in rows.itertuples():
        cell = Cell(workload="steady", requests=int(r.requests_count), seed=int(r.seed), model=r.model)
        batch[r.allocator] = cell.load_requests().output_tokens.sum() / r.decode_steps_count
        attention[r.allocator] = cell.shape.layers * batch[r.allocator] * r.m4_latency_ns / 1e3
    out = []
    for share in shares:
        rest_us = attention["paged"] * (1 - share) / share
        for allocator, attention_us in attention.items():
            step_us = attention_us + rest_us
            out.append((allocator, share, batch[allocator], attention_us, step_us, batch[allocator] / step_us * 1e6))
    names = ("allocator", "attention_share_frac", "batch_mean_count", "attention_time_us", "step_time_us")
    frame = pd.DataFrame(out, columns=[*names, "throughput_tokens_per_s"]).assign(origin="modelled")
    base = frame[frame["allocator"] == "paged"].set_index("attention_share_frac")["throughput_tokens_per_s"]
    gain = frame["throughput_tokens_per_s"] / frame["attention_share_frac"].map(base)
    return frame.assign(gain_throughput_ratio=gain)


def device(*, dram="hbm3-pim", model="llama-gqa-8kv", block_tokens=16):
    """The memory's numbers and what a token and a block of the model take in it: one row, for the drawing of both."""
    memory, shape = geometry.dram(dram), geometry.shape(model)
    return pd.DataFrame([{
        "dram": dram, "model": model, "channels_count": memory.channels, "banks_count": memory.banks,
        "rows_count": memory.rows, "row_bytes": memory.row_bytes, "burst_bytes": memory.burst_bytes,
        "region_bytes": memory.region_bytes, "token_bytes": shape.kv_bytes_per_token, "block_tokens": block_tokens,
        "blocks_per_region": geometry.blocks_per_region(memory, shape.kv_bytes_per_token, block_tokens),
        "tccd_ab_ns": memory.tccd_ab_ns, "trc_ns": memory.trc_ns, "ideal_gbps": memory.ideal_gbps,
        "origin": "published",
    }])  # fmt: skip


def placement(size, keep=None):
    """Adjacency, same region and spread of each allocator in a steady run: no DRAM model behind them."""
    cells = [
        Cell(allocator=allocator, requests=n, seed=size.seed)
        for n in sorted({min(size.sample_requests, 1000), min(1000, size.sweep_requests)})
        for allocator in _COMPARED
    ]
    return sweep.compute(cells, keep=keep)


def placement_map(size):
    """Every block of one sequence late in a steady run, by allocator and block size: region, and slot within it.

    The sequence is the last sampled one of 321 to 640 tokens, or the longest if there is none. The run is the
    headline's, so M1 and M3 beside it are those of the headline.
    """
    out, requests = [], min(1000, size.sweep_requests)
    for block_tokens in size.block_tokens:
        for allocator in _COMPARED:
            cell = Cell(allocator=allocator, block_tokens=block_tokens, requests=requests, seed=size.seed)
            taken = {}

            def take(samples, taken=taken):
                for i in range(samples.tokens.size):
                    fits = 320 < samples.tokens[i] <= 640
                    if fits or not taken.get("fits") and samples.tokens[i] >= taken.get("tokens", 0):
                        table = samples.flat[samples.starts[i] : samples.starts[i] + samples.blocks[i]]
                        taken.update(fits=fits, tokens=int(samples.tokens[i]), step=int(samples.step[i]),
                                     rid=int(samples.request[i]), table=table.copy())  # fmt: skip

            summary, _ = run(cell, on_tables=take)
            g = cell.blocks_per_region
            for i, block in enumerate(taken["table"].tolist()):
                out.append((
                    allocator, block_tokens, requests, taken["step"], taken["rid"], taken["tokens"], i, block,
                    block // g, block % g, g, summary["m1_row_hit_frac"], summary["m3_bandwidth_gbps"],
                ))  # fmt: skip
    names = ["allocator", "block_tokens", "requests_count", "step", "rid", "length_tokens", "order_index", "block"]
    names += ["region", "slot", "blocks_per_region", "m1_row_hit_frac", "m3_bandwidth_gbps"]
    return pd.DataFrame(out, columns=names).assign(origin="simulated")


def trace_files(folder=None):
    """The real traces of `folder` (None: data/serving): every *.csv (Azure) and *.jsonl (Mooncake)."""
    folder = paths.data_dir() / "serving" if folder is None else Path(folder)
    return sorted([*folder.glob("*.csv"), *folder.glob("*.jsonl")])


def traces(size, keep=None, folder=None):
    """The allocators on real serving traces: every *.csv (Azure) and *.jsonl (Mooncake) of `folder`, data/serving.

    Where there is no trace, the rows of our own recorded run, marked `recorded`.
    """
    files = trace_files(folder)
    if not files:
        return recorded("11_bandwidth", "traces.csv").assign(origin="recorded")
    cells = [
        Cell(workload="trace", trace_file=str(file), requests=size.trace_requests, allocator=allocator, seed=size.seed)
        for file in files
        for allocator in _COMPARED
    ]
    return sweep.compute(cells, keep=keep, preset=PRESET)


_OWN = (
    "model", "headroom", "admission", "max_batch", "prompt_tokens", "sample_every", "sample_sequences", "spec_adopt",
    "pim_scratch", "pim_compact",
)  # fmt: skip
_RENAMED = {"requests_count": "requests", "pool_blocks_count": "pool_blocks", "arrival_rate": "rate"}
_INTEGERS = ("max_batch", "prompt_tokens", "sample_every", "sample_sequences", "requests_count", "pool_blocks_count")


def published_cells():
    """The study's published cells -> list of (Cell, row as text); values keep the digits they were printed with."""
    path = paths.data_dir() / "published" / "kvpimple_cells.csv"
    out = []
    for r in pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records"):
        given = {"workload": r["workload"], "allocator": r["allocator"], "block_tokens": int(r["block_tokens"])}
        for column in (*_OWN, *_RENAMED, "seed"):
            if r[column]:
                kind = int if column in _INTEGERS or column == "seed" else str
                kind = float if column in ("headroom", "arrival_rate", "pim_compact") else kind
                given[_RENAMED.get(column, column)] = kind(r[column])
        out.append((Cell(**given, kv_split=r["kv_split"] == "true"), r))
    return out


def beside(frame):
    """`frame` and, below its own rows, the study's published numbers of the same cells (origin `published`).

    A cell is the same when every setting that `frame` has a column for is; a frame without the settings of cells, or
    with published rows already, comes back as it is.
    """
    rows = [
        {**sweep.row(cell, {name: float(r[name]) for name in ("m1_row_hit_frac", "m3_bandwidth_gbps")}),
         "source": r["source"], "origin": "published"}
        for cell, r in published_cells()
    ]  # fmt: skip
    settings = [name for name in sweep.row(Cell(), {}) if name in frame and name != "origin"]
    needed = {"workload", "allocator", "block_tokens", "requests_count", "m1_row_hit_frac"}
    if not needed <= set(frame) or "published" in set(frame["origin"]):
        return frame
    computed = set(_keys(frame, settings))
    theirs = pd.DataFrame(rows)
    theirs = theirs[[key in computed for key in _keys(theirs, settings)]]
    columns = [name for name in theirs if name in frame or name == "source"]
    return pd.concat([frame, theirs[columns]], ignore_index=True) if len(theirs) else frame


def _keys(frame, columns):
    """Each row's values of `columns`, comparable: 512 equals 512.0, and nothing equals nothing."""
    values = frame[columns].astype(object)
    return list(values.where(values.notna(), None).itertuples(index=False, name=None))


def published(size, keep=None):
    """Every published cell, ours beside the study's; those above the scale's cap on requests are listed, not run."""
    wanted = published_cells()
    cells = [c for c, _ in wanted if c.requests <= size.sweep_requests]
    ours = iter(sweep.compute(cells, keep=keep).to_dict("records") if cells else ())
    rows = []
    for cell, r in wanted:
        mine = next(ours) if cell.requests <= size.sweep_requests else {}
        m1, m3 = (mine.get(name, float("nan")) for name in ("m1_row_hit_frac", "m3_bandwidth_gbps"))
        equal = same_digits(r["m1_row_hit_frac"], m1) and same_digits(r["m3_bandwidth_gbps"], m3)
        rows.append(
            {
                **{name: r[name] for name in ("experiment", "workload", "allocator")},
                "block_tokens": cell.block_tokens,
                "requests_count": cell.requests,
                "m1_published_frac": float(r["m1_row_hit_frac"]),
                "m1_row_hit_frac": m1,
                "m3_published_gbps": float(r["m3_bandwidth_gbps"]),
                "m3_bandwidth_gbps": m3,
                "equal_count": int(equal) if mine else None,
                "source": r["source"],
                "origin": "simulated" if mine else "published",
            }
        )
    return pd.DataFrame(rows)


def agreement(frame):
    """How many of the cells of `published` were run, and how many equal the study's to every printed digit."""
    groups = [("all", frame), *frame.groupby("experiment", sort=False)]
    rows = []
    for name, group in groups:
        run_, equal = group["equal_count"].notna().sum(), group["equal_count"].sum()
        rows.append((name, len(group), int(run_), int(equal), int(run_ - equal)))
    names = ["experiment", "published_count", "run_count", "equal_count", "differing_count"]
    return pd.DataFrame(rows, columns=names).assign(origin="simulated")


def same_digits(printed, value):
    """Whether `value` rounds to the number `printed` as text (half a unit of its last digit, plus rounding noise)."""
    decimals = len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5 * 10.0**-decimals + 1e-9 * abs(value)


def tables(path, *, dram="hbm3-pim", model="llama-gqa-8kv", address_map="host-cacheline"):
    """M1 to M4 of the block tables in a JSON file: a list of {seq_len, table, block_tokens (16)}, a user's engine's."""
    cell = Cell(dram=dram, model=model, address_map=address_map)
    memory, name = cell.memory, Path(path).name
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{name}: not JSON; allowed: a list of {{seq_len, table, block_tokens}}") from None
    rows = []
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        try:
            tokens, table = entry["seq_len"], np.array(entry["table"], dtype=np.int64)
            block_tokens = entry.get("block_tokens", 16)
            geometry.blocks_per_region(memory, cell.token_bytes, block_tokens)
            order = mapping.address_map(address_map, memory)
            lay = bandwidth.layout(order, cell.token_bytes, block_tokens, int(table.max(initial=0)) + 1)
            counted = bandwidth.count(table, tokens, lay)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            why = f"missing {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{name} entry {number}: {why}") from None
        total = counted.sum(axis=0)
        times = memory.tccd_ab_ns * (counted[:, 1] - counted[:, 2]) + memory.trc_ns * counted[:, 2]
        counts = bandwidth.Counts(*(np.array([v]) for v in total), np.array([times.max()]))
        values = bandwidth.metrics(counts, np.array([tokens * cell.token_bytes]), memory)
        settings = {"sample": number, "length_tokens": tokens, "blocks_count": table.size, "block_tokens": block_tokens}
        rows.append({**settings, **{k: float(v[0]) for k, v in values._asdict().items()}, "origin": "simulated"})
    return pd.DataFrame(rows)
