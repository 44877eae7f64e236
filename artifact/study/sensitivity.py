"""What notebook 12 computes: every sweep of the study, what the study leaves out, and how long a run must be.

`SWEEPS` are the files of data/sweeps in the notebook's order; which allocators are compared stands in those files.
"""

import numpy as np
import pandas as pd

from artifact.pim import bandwidth, geometry
from artifact.study import cycles, experiments, intervals, paths, results, serving, sweep
from artifact.study.serving import Cell

SWEEPS = (
    "seeds", "inorder", "headroom", "arrival", "batch", "structure", "speculation", "shards", "kvheads", "pressure",
    "planning", "compaction", "kvsplit", "geometry",
)  # fmt: skip
BASES = ("paged", "vllm-v1", "sglang")  # what an engine does today; a gain is one over each that was run
UNORDERED = "paged, freed in any order"  # as vLLM v0.2.7 did; the study frees in a table's order
_FULL = {"recompute": "recomputed when full", "swap": "swapped to the host when full"}
_SETTLING = ("paged", "random", "pim-aware", "contiguous")
_PRINTED = ("m1_row_hit_frac", "m3_bandwidth_gbps")
_SHORTEST = 500  # requests of the first run that is asked whether it has settled
_BLOCKS = 20  # of a run's samples, in order: what the bootstrap of a trace draws


def sweeps(size, keep=None):
    """Every cell of every sweep of `SWEEPS`, with its sweep's name: one frame, so that a claim names a row of it."""
    cells = {name: sweep.expand(sweep.load(name), size) for name in SWEEPS}
    frames = [sweep.compute(cells[name], keep=keep, preset=experiments.PRESET).assign(sweep=name) for name in SWEEPS]
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


def agreement(frame):
    """How many cells of each sweep the study published, how many were run, and how many equal it in M1 and M3.

    Equal: to every digit that `data/published/kvpimple_sweeps.csv` has, in the one row of `frame` with its settings.
    """
    path = paths.data_dir() / "published" / "kvpimple_sweeps.csv"
    printed = pd.read_csv(path, dtype=str, keep_default_na=False)
    settings = [name for name in printed if name in frame and name not in ("origin", *_PRINTED)]
    found = {"all": [0, 0, 0]}
    for row in printed.to_dict("records"):
        mine = frame
        for name in [name for name in settings if row[name]]:
            mine = mine[_same(mine[name], row[name])] if len(mine) else mine
        if len(mine) > 1:
            raise ValueError(f"{path.name}: {row} is {len(mine)} cells; it must be one")
        equal = len(mine) == 1 and all(experiments.same_digits(row[name], mine[name].item()) for name in _PRINTED)
        for name in ("all", row["sweep"]):
            counts = found.setdefault(name, [0, 0, 0])
            found[name] = [a + b for a, b in zip(counts, (1, len(mine), equal), strict=True)]
    rows = [(name, *map(int, counts), int(counts[1] - counts[2])) for name, counts in found.items()]
    names = ["sweep", "published_count", "run_count", "equal_count", "differing_count"]
    return pd.DataFrame(rows, columns=names).assign(origin="simulated")


def _same(values, text):
    """Which of a column's values a printed text means; numbers are compared as such."""
    try:
        return pd.to_numeric(values) == float(text)
    except ValueError:
        return values == text


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
    """Attention time that pim-aware saves in a decode step of the whole model: steady, first seed of `baselines`.

    layers x mean batch x (M4 of paged - M4 of pim-aware), as the study counts it: mean batch = all output tokens /
    decode steps. Modelled.
    """
    cells = frame[(frame["workload"] == "steady") & (frame["seed"] == frame["seed"].min())].set_index("allocator")
    paged, aware = cells.loc["paged"], cells.loc["pim-aware"]
    cell = Cell(requests=int(paged["requests_count"]), seed=int(paged["seed"]), model=paged["model"])
    batch = cell.load_requests().output_tokens.sum() / paged["decode_steps_count"]
    each_ns = paged["m4_latency_ns"] - aware["m4_latency_ns"]
    return pd.DataFrame([{
        "workload": "steady", "batch_mean_count": batch, "layers_count": cell.shape.layers, "each_ns": each_ns,
        "saved_per_step_ms": cell.shape.layers * batch * each_ns / 1e6, "origin": "modelled",
    }])  # fmt: skip


def m1_histogram(size):
    """How many samples of a steady run have which M1, in 50 bins, for the study's baseline, its rule, and dice."""
    rows = []
    for allocator in ("paged", "pim-aware", "random"):
        cell = Cell(allocator=allocator, requests=min(2000, size.sweep_requests), seed=size.seed)
        values = serving.run(cell)[1]["m1_row_hit_frac"]
        counts, edges = np.histogram(values, bins=50, range=(0.5, 1.0))
        rows += [{
            "allocator": allocator, "requests_count": cell.requests, "m1_frac_min": round(a, 6),
            "m1_frac_max": round(b, 6), "samples_count": n, "m1_row_hit_frac_mean": values.mean(),
            "origin": "simulated",
        } for a, b, n in zip(edges[:-1], edges[1:], counts.tolist(), strict=True)]  # fmt: skip
    return pd.DataFrame(rows)


def validation():
    """The study's two outside checks on its nine block tables, ours beside the published numbers.

    `ramulator`: M1 of each table and, published, the share of row hits that Ramulator 2 gave for it; of ours,
    `equal_count` is whether M1 and M3 round to the study's. `attacc`: each sequence's gain of pim-aware by M3, by
    AttAcc's published cycles, and by the cycles of our controller, where one command serves both halves of a channel.
    """
    cell, tables = Cell(), cycles.study_tables()
    lay, rows, m3 = cycles.layout(cell, 16, 1 << 13), [], {}
    for r in results.read(paths.data_dir() / "published" / "kvpimple_ramulator.csv").itertuples():
        entry = tables[r.allocator, r.seq_id]
        tokens = np.array([entry["seq_len"]])
        counts = bandwidth.count_tables(np.array(entry["table"]), np.array([0]), tokens, lay, cell.memory)
        found = bandwidth.metrics(counts, tokens * cell.token_bytes, cell.memory)
        m1, rate = float(found.m1_row_hit_frac[0]), float(found.m3_bandwidth_gbps[0])
        m3[r.allocator, r.seq_id] = rate
        equal = f"{m1:.8g}" == f"{r.m1_row_hit_frac:.8g}" and f"{rate:.8g}" == f"{r.m3_bandwidth_gbps:.8g}"
        said = {"against": "ramulator", "allocator": r.allocator, "seq_id": r.seq_id}
        rows += [
            said | {"m1_row_hit_frac": m1, "equal_count": int(equal), "origin": "simulated"},
            said | {"m1_row_hit_frac": r.m1_row_hit_frac, "hit_frac": r.hit_frac, "source": r.source,
                    "difference_frac": abs(r.hit_frac - r.m1_row_hit_frac), "origin": "published"},
        ]  # fmt: skip
    points = cycles.study_points()
    for way, origin, charged in (("AttAcc", "published", "twice"), ("cycles", "simulated", "once")):
        some = points[(points["origin"] == origin) & (points["charged"] == charged)]
        some = some[some["address_map"] == "host-cacheline"]
        wide = some.pivot_table(index="seq_id", columns="allocator", values="run_cycles")
        for seq, gain in (wide["paged"] / wide["pim-aware"]).items():
            rows.append({"against": "attacc", "way": way, "seq_id": seq, "gain_ratio": gain, "origin": origin})
    rows += [{"against": "attacc", "way": "M3", "seq_id": seq, "gain_ratio": m3["pim-aware", seq] / m3["paged", seq],
              "origin": "simulated"} for seq in dict.fromkeys(key[1] for key in m3)]  # fmt: skip
    return pd.DataFrame(rows)


def checks(frame):
    """`validation` in a few numbers: points equal to the study's, and how far Ramulator's hits are from M1."""
    hits = frame[frame["against"] == "ramulator"]
    ours, theirs = hits[hits["origin"] == "simulated"], hits[hits["origin"] == "published"]
    return pd.DataFrame([
        {"what": "block tables whose M1 and M3 are the study's", "points_count": len(ours),
         "equal_count": int(ours["equal_count"].sum()), "origin": "simulated"},
        {"what": "Ramulator's hits beside M1", "points_count": len(theirs),
         "difference_frac_mean": theirs["difference_frac"].mean(),
         "difference_frac_max": theirs["difference_frac"].max(), "origin": "published"},
    ])  # fmt: skip


def parallelism():
    """What a map that keeps one bank busy costs by allocator, in commands (the model) and in AttAcc's published cycles.

    host-centric over host-cacheline, the three sequences of the study's check together.
    """
    tables, commands = cycles.study_tables(), {}
    published = cycles.study_points().query("origin == 'published'").groupby(["allocator", "address_map"])
    theirs, rows = published["run_cycles"].sum(), []
    for allocator in dict.fromkeys(key[0] for key in theirs.index):
        for name in ("host-cacheline", "host-centric"):
            lay = cycles.layout(Cell(), 16, 1 << 13, name)
            counted = (bandwidth.count(np.array(e["table"]), e["seq_len"], lay) for (a, _), e in tables.items()
                       if a == allocator)  # fmt: skip
            commands[name] = sum(int(found[:, 1].sum()) for found in counted)
        for way, (centric, cacheline), origin in (
            ("commands", (commands["host-centric"], commands["host-cacheline"]), "simulated"),
            ("AttAcc's cycles", (theirs[allocator, "host-centric"], theirs[allocator, "host-cacheline"]), "published"),
        ):
            rows.append({"way": way, "allocator": allocator, "host_centric_ratio": centric / cacheline,
                         "origin": origin})  # fmt: skip
    return pd.DataFrame(rows)


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
        (" " in row["address_map"] and "^=" not in row["address_map"], "row bits inside a block"),
        (row["model"] != "llama-gqa-8kv", row["model"]),
        (row["frees"] == "unordered", UNORDERED),
        (row["admission"] == "vllm", f"small pool, {_FULL[row['preempt']]}"),
    )  # fmt: skip
    return ", ".join(text for given, text in words if given)


def options(size, keep=None):
    """Every cell of the sweep `options`, with the option in words (`option`; the study's choice is `as studied`)."""
    frame = sweep.compute(sweep.expand(sweep.load("options"), size), keep=keep, preset=experiments.PRESET)
    frame = frame.assign(option=[_option(row) or "as studied" for row in frame.to_dict("records")])
    beside = frame.query("option == 'as studied' and allocator == 'pim-aware' and workload == 'steady'")
    return pd.concat([frame, beside.assign(option=UNORDERED)], ignore_index=True)  # it is paged's option alone


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


def compared():
    """The allocators of data/sweeps/baselines.yml, on drawn and on real traffic."""
    return sweep.load("baselines").cells[0]["allocator"]


def baselines(size, keep=None):
    """Every allocator of the sweep `baselines` on seeded traffic."""
    return sweep.compute(sweep.expand(sweep.load("baselines"), size), keep=keep, preset=experiments.PRESET)


def baseline_gains(frame):
    """Every allocator over every one of `BASES` that was run, by workload: mean and 95 % interval over seeds."""
    out = []
    for base in [name for name in BASES if name in set(frame["allocator"])]:
        found = experiments.gains(frame, base=base)
        out.append(_over_seeds(found, ["workload", "allocator"]).assign(over=base))
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
        for allocator in compared():
            cell = Cell(workload="trace", trace_file=str(file), requests=size.trace_requests, allocator=allocator,
                        seed=size.seed)  # fmt: skip
            found[allocator] = serving.run(cell, preset=experiments.PRESET)[1]
        for base in [name for name in BASES if name in found]:
            for allocator in [name for name in found if name != base]:
                rows.append({"workload": "trace", "trace": file.name, "allocator": allocator, "over": base,
                             **_paired(found[allocator], found[base]), "origin": "simulated"})  # fmt: skip
    return pd.DataFrame(rows)


def _paired(mine, base):
    """Ratios of two runs' bandwidths, with 95 % intervals from their `_BLOCKS` parts in time."""
    out = {}
    ways = {"total": "m4_latency_ns", "busiest": "m4_busiest_ns", "cycles_total": "controller_ns"}
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


def traffic(drawn, real):
    """The gains of `baseline_gains` and of `trace_gains` in one frame."""
    return pd.concat([drawn, real], ignore_index=True)


def settled(size):
    """How many requests a steady run must serve until M1 no longer drifts, for each allocator of the study.

    The run doubles until, for every allocator, the slope of M1 over its later half is inside that slope's noise: the
    half, but for its last fifth, in which the batch drains, is cut into `_BLOCKS` parts by time, and the 95 % interval
    of a straight line through their means holds zero. `settled` says from which length on that has been so;
    `m1_row_hit_frac` is the mean of that half, `m1_whole_frac` that of the whole run. Stops at `settle_requests`.
    """
    rows, waiting, requests = [], list(_SETTLING), min(_SHORTEST, size.settle_requests)
    while waiting and requests <= size.settle_requests:
        for allocator in _SETTLING:
            columns = serving.run(Cell(allocator=allocator, requests=requests, seed=size.seed))[1]
            at = columns["step"] / columns["step"].max()
            half = columns["m1_row_hit_frac"][(at >= 0.5) & (at < 0.9)]
            slope, (low, high) = intervals.of_slope([part.mean() for part in np.array_split(half, _BLOCKS)])
            if low <= 0 <= high and allocator in waiting:
                waiting.remove(allocator)
            rows.append({
                "allocator": allocator, "requests_count": requests, "m1_row_hit_frac": half.mean(),
                "m1_whole_frac": columns["m1_row_hit_frac"].mean(), "drift_frac": slope * _BLOCKS,
                "drift_frac_min": low * _BLOCKS, "drift_frac_max": high * _BLOCKS,
                "settled": "no" if allocator in waiting else "yes", "origin": "simulated",
            })  # fmt: skip
        requests *= 2
    return pd.DataFrame(rows)
