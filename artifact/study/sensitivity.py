"""What notebook 12 computes: every sweep of the study, what the study leaves out, and how long a run must be.

`SWEEPS` are the files of data/sweeps in the notebook's order; which allocators are compared stands in those files.
"""

import numpy as np
import pandas as pd

from artifact.kv import allocators
from artifact.pim import geometry
from artifact.study import experiments, intervals, serving, sweep
from artifact.study.serving import Cell

SWEEPS = (
    "seeds", "inorder", "headroom", "arrival", "batch", "structure", "speculation", "shards", "kvheads", "pressure",
    "planning", "compaction", "kvsplit", "geometry",
)  # fmt: skip
BASES = ("paged", "vllm-v1", "sglang")  # what an engine does today; a gain is one over each that was run
_SHORTEST = 500  # requests of the first run that is asked whether it has settled
_BLOCKS = 20  # of a run's samples, in order: what the bootstrap of a trace draws


def sweeps(size, keep=None):
    """Every cell of every sweep of `SWEEPS`, with its sweep's name: one frame, so that a claim names a row of it."""
    frames = [sweep.compute(sweep.expand(sweep.load(name), size), keep=keep).assign(sweep=name) for name in SWEEPS]
    frame = pd.concat(frames, ignore_index=True)
    return frame[["sweep", *(name for name in frame if name != "sweep")]]


def of(frame, name):
    """The rows of one sweep."""
    return frame[frame["sweep"] == name].reset_index(drop=True)


def gains(frame):
    """Each allocator of each sweep over `paged` in the same cell, in the three ways of `experiments.gains`."""
    with_paged = [part for _, part in frame.groupby("sweep", sort=False) if "paged" in set(part["allocator"])]
    found = [experiments.gains(part).assign(sweep=part["sweep"].iloc[0]) for part in with_paged]
    out = pd.concat(found, ignore_index=True)
    return out[["sweep", *(name for name in out if name != "sweep")]]


def seed_ranges(frame):
    """How far M1 spreads over the seeds of one cell, largest less smallest; and the largest of these, `all`."""
    seeds = of(frame, "seeds")
    cells = seeds.groupby(["workload", "allocator", "block_tokens"], sort=False)["m1_row_hit_frac"]
    found = (cells.max() - cells.min()).rename("m1_range_frac").reset_index()
    worst = {"workload": "all", "allocator": "all", "m1_range_frac": found["m1_range_frac"].max()}
    return pd.concat([found, pd.DataFrame([worst])], ignore_index=True).assign(origin="simulated")


def extremes(frame):
    """Structure in two numbers each: the least and the most that any cell of the sweep `structure` shows of paged."""
    cells = of(frame, "structure")
    cells = cells[cells["allocator"] == "paged"]
    rows = []
    for workload, part in (*cells.groupby("workload", sort=False), ("all", cells)):
        for metric in ("block_adjacency_frac", "region_spread"):
            rows.append({"workload": workload, "metric": metric, "least_ratio": part[metric].min(),
                         "most_ratio": part[metric].max(), "origin": "simulated"})  # fmt: skip
    return pd.DataFrame(rows)


def changes(frame):
    """What each remedy changes: a metric with it, and the ratio to the same cell without."""
    rows = []

    def add(what, metric, after, before, **settings):
        a, b = float(after[metric]), float(before[metric])
        rows.append({"what": what, **settings, "metric": metric, "before_ratio": b, "after_ratio": a,
                     "change_ratio": a / b if b else np.nan, "origin": "simulated"})  # fmt: skip

    planned = of(frame, "planning").set_index(["workload", "headroom", "pim_plan"])
    for workload, headroom in dict.fromkeys(key[:2] for key in planned.index):
        greedy, best = (planned.loc[(workload, headroom, plan)] for plan in ("greedy", "bestfit"))
        for metric in ("m1_row_hit_frac", "m3_bandwidth_gbps"):
            add("bestfit over greedy", metric, best, greedy, workload=workload, headroom=headroom)
    compacted = of(frame, "compaction").set_index(["headroom", "pim_compact_frac"])
    for headroom, share in compacted.index:
        if share:
            add("compaction", "m1_row_hit_frac", compacted.loc[(headroom, share)], compacted.loc[(headroom, 0.0)],
                headroom=headroom, pim_compact_frac=share)  # fmt: skip
    adopted = of(frame, "speculation")
    adopted = adopted[(adopted["workload"] == "spec") & (adopted["block_tokens"] == 16)]
    adopted = adopted.set_index(["allocator", "pim_scratch", "spec_adopt"])
    for allocator, scratch in dict.fromkeys(key[:2] for key in adopted.index):
        splice, back = (adopted.loc[(allocator, scratch, adopt)] for adopt in ("splice", "copyback"))
        for metric in ("m1_row_hit_frac", "copied_bytes"):
            add("copyback over splice", metric, back, splice, allocator=allocator, pim_scratch=scratch)
    return pd.DataFrame(rows)


def regions(dram="hbm3-pim", block_tokens=16):
    """The derived sizes of each model shape: bytes of a token, tokens and blocks of a region; and M1's ceiling."""
    memory, rows = geometry.dram(dram), []
    for model in geometry.SHAPE_TABLE:
        token = geometry.shape(model).kv_bytes_per_token
        rows.append({
            "model": model, "dram": dram, "token_bytes": token, "row_bytes": memory.row_bytes,
            "banks_count": memory.banks, "channels_count": memory.channels, "region_bytes": memory.region_bytes,
            "region_tokens": geometry.derived_block_tokens(memory, token),
            "region_blocks_count": geometry.blocks_per_region(memory, token, block_tokens),
            "m1_ceiling_frac": 1 - 1 / memory.columns, "ideal_gbps": memory.ideal_gbps, "origin": "modelled",
        })  # fmt: skip
    return pd.DataFrame(rows)


def saved(frame):
    """Attention time that pim-aware saves in a decode step of the whole model, steady, where M4 stands in `frame`.

    layers x mean batch x (M4 of paged - M4 of pim-aware), as the study counts it: mean batch = all output tokens /
    decode steps. Modelled.
    """
    cells = frame[(frame["workload"] == "steady") & (frame["block_tokens"] == 16)].set_index("allocator")
    paged, aware = cells.loc["paged"], cells.loc["pim-aware"]
    cell = Cell(requests=int(paged["requests_count"]), seed=int(paged["seed"]), model=paged["model"])
    batch = cell.load_requests().output_tokens.sum() / paged["decode_steps_count"]
    each_ns = paged["m4_latency_ns"] - aware["m4_latency_ns"]
    return pd.DataFrame([{
        "workload": "steady", "batch_mean_count": batch, "layers_count": cell.shape.layers, "each_ns": each_ns,
        "saved_per_step_ms": cell.shape.layers * batch * each_ns / 1e6, "origin": "modelled",
    }])  # fmt: skip


def _option(row):
    """Which of the options a row of the sweep `options` sets, in words; empty for the study's choice."""
    words = (
        (row["kv_split"], "K and V in tensors of their own"),
        (row["base_bytes"], f"pool begins at byte {row['base_bytes']:,}"),
        (row["block_layout"] == "head-major", "head after head in a block"),
        (row["block_layout"] == "head-channels", "each KV head in its own channels"),
        (row["turn_tokens"] == row["turn_tokens"] and row["turn_tokens"],
         f"batch in turns of {row['turn_tokens']:,.0f} tokens"),
        (row["charged"] == "moves", "writes and copies charged"),
        ("^=" in row["address_map"], "banks hashed by row"),
        (" " in row["address_map"] and "^=" not in row["address_map"], "rows below columns in the address"),
        (row["model"] != "llama-gqa-8kv", row["model"]),
    )  # fmt: skip
    return ", ".join(text for given, text in words if given)


def options(size, keep=None):
    """Every cell of the sweep `options`, with the option in words (`option`; the study's choice is `as studied`)."""
    frame = sweep.compute(sweep.expand(sweep.load("options"), size), keep=keep)
    words = [_option(row) or "as studied" for row in frame.to_dict("records")]
    return frame.assign(option=words)


def option_gains(frame):
    """The gain of pim-aware over paged under each option, over seeds: mean and 95 % interval, in three ways."""
    same = ["workload", "option"]
    gains_ = experiments.gains(frame.assign(sweep="options"), more=("option",))
    return _over_seeds(gains_[gains_["allocator"] == "pim-aware"], same)


def _over_seeds(gains_, same):
    """Mean and 95 % interval over seeds of every gain, a row for each value of `same`."""
    rows = []
    for key, part in gains_.groupby(same, sort=False):
        row = dict(zip(same, key, strict=True)) | {"seeds_count": len(part)}
        for column in [name for name in part if name.startswith("gain_")]:
            low, high = intervals.of_seeds(part[column])
            row |= {column: part[column].mean(), f"{column}_min": low, f"{column}_max": high}
        rows.append(row | {"origin": "simulated"})
    return pd.DataFrame(rows)


def baselines(size, keep=None):
    """Every allocator of the sweep `baselines` on seeded traffic."""
    return sweep.compute(sweep.expand(sweep.load("baselines"), size), keep=keep)


def baseline_gains(frame):
    """Every allocator over every one of `BASES` that was run, by workload: mean and 95 % interval over seeds."""
    out = []
    for base in [name for name in BASES if name in set(frame["allocator"])]:
        found = experiments.gains(frame, base=base)
        out.append(_over_seeds(found, ["workload", "allocator"]).assign(over=base, trace=None))
    return pd.concat(out, ignore_index=True)


def trace_gains(size, folder=None):
    """As `baseline_gains`, on the real traces of `folder` (data/serving); intervals by resampling parts of the run.

    A trace is one stream, so seeds would only draw other samples of it. Instead each run's samples are cut into as many
    parts by time, and parts are drawn with replacement, the same for every allocator. Without a trace the rows of our
    own recorded run, marked `recorded`.
    """
    files = experiments.trace_files(folder)
    if not files:
        return experiments.recorded("12_sensitivity", "trace_gains.csv").assign(origin="recorded")
    rows = []
    for file in files:
        found = {}
        for allocator in allocators.NAMES:
            cell = Cell(workload="trace", trace_file=str(file), requests=size.trace_requests, allocator=allocator,
                        seed=size.seed)  # fmt: skip
            found[allocator] = serving.run(cell)[1]
        for base in [name for name in BASES if name in found]:
            for allocator in [name for name in found if name != base]:
                rows.append({"workload": "trace", "trace": file.name, "allocator": allocator, "over": base,
                             **_paired(found[allocator], found[base]), "origin": "simulated"})  # fmt: skip
    return pd.DataFrame(rows)


def _paired(mine, base):
    """Ratios of two runs' bandwidths, with 95 % intervals from their `_BLOCKS` parts in time."""
    out = {}
    ways = {"total": "m4_latency_ns", "busiest": "m4_busiest_ns"}
    for way, time in ways.items():
        sums = [np.array([(part["kv_bytes"].sum(), part["time"].sum()) for part in _parts(run_, time)])
                for run_ in (mine, base)]  # fmt: skip
        low, high = intervals.of_ratio(*sums)
        (b, t), (b0, t0) = (s.sum(axis=0) for s in sums)
        name = f"gain_{way}_ratio"
        out |= {name: b / t / (b0 / t0), f"{name}_min": low, f"{name}_max": high}
    return out


def _parts(columns, time):
    cut = pd.DataFrame({"kv_bytes": columns["kv_bytes"], "time": columns[time]})
    return [cut.iloc[at] for at in np.array_split(np.arange(len(cut)), _BLOCKS)]


def settled(size):
    """How many requests a steady run must serve until M1 no longer drifts, for each allocator of the study.

    The run doubles until the slope of M1 over its second half is inside that slope's noise: the half is cut into
    `_BLOCKS` parts by time, and the 95 % interval of a straight line through their means holds zero. `settled` is
    whether that happened within `settle_requests`; `m1_row_hit_frac` is the mean of that half.
    """
    rows = []
    for allocator in ("paged", "random", "pim-aware", "contiguous"):
        requests, done = min(_SHORTEST, size.settle_requests), False
        while not done and requests <= size.settle_requests:
            columns = serving.run(Cell(allocator=allocator, requests=requests, seed=size.seed))[1]
            half = columns["m1_row_hit_frac"][columns["step"] * 2 >= columns["step"].max()]
            means = np.array([part.mean() for part in np.array_split(half, _BLOCKS)])
            slope, (low, high) = intervals.of_slope(means)
            done = low <= 0 <= high
            rows.append({
                "allocator": allocator, "requests_count": requests, "m1_row_hit_frac": half.mean(),
                "drift_frac": slope * _BLOCKS, "drift_frac_min": low * _BLOCKS, "drift_frac_max": high * _BLOCKS,
                "settled": "yes" if done else "no", "origin": "simulated",
            })  # fmt: skip
            requests *= 2
    return pd.DataFrame(rows)
