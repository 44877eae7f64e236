"""How fast the parts are, as ratios in one process: equal answers first, then times, after a warm-up."""

import subprocess
import sys
import time

import numpy as np
import pandas as pd

from artifact.pim import bandwidth, controller, mapping, oracle, runs, streams, timing
from artifact.study import cycles, experiments, scale, sensitivity, sweep
from artifact.study.serving import Cell, run


def simulator(*, rounds=5, oracle_samples=24, published=True):
    """Counting the headline cell against the oracle, the cell as a whole command, all published cells, every sweep.

    -> frame: measure, value with its unit's column, origin `measured`. The oracle takes minutes for the whole cell, so
    it counts `oracle_samples` of its sequences, between our rounds over the same ones; ValueError when one differs.
    """
    cell = Cell(workload="steady", allocator="paged", requests=1000)
    tables, tokens = _tables(cell)
    order = mapping.address_map(cell.address_map, cell.memory)
    blocks = cell.num_blocks(cell.load_requests())
    lay = bandwidth.layout(order, cell.token_bytes, cell.tokens_per_block, blocks)

    def ours(pick):
        chosen = [tables[i] for i in pick]
        starts = np.cumsum([0, *(len(t) for t in chosen[:-1])])
        flat = np.concatenate(chosen)
        began = time.perf_counter()
        counts = bandwidth.count_tables(flat, starts, tokens[pick], lay, cell.memory)
        return time.perf_counter() - began, counts

    few = np.linspace(0, tokens.size - 1, oracle_samples).astype(int)
    _, counts = ours(few)
    slow, fast = [], []
    for j, i in enumerate(few):
        began = time.perf_counter()
        expected = oracle.count(tables[i], tokens[i], order, cell.token_bytes, cell.tokens_per_block).sum(axis=0)
        slow.append(time.perf_counter() - began)
        if (counts.bursts[j], counts.commands[j], counts.misses[j]) != tuple(expected):
            raise ValueError(
                f"sequence {i}: counted {counts.commands[j]} commands, the oracle {expected[1]}; no time is given"
            )
        fast.append(ours(few)[0])
    bursts = int(counts.bursts.sum())
    whole = [ours(np.arange(tokens.size))[0] for _ in range(rounds)]
    every = int(tokens.sum()) * cell.token_bytes // cell.memory.burst_bytes
    rows = [
        ("bursts counted", every, "count"),
        ("counting the whole cell", min(whole) * 1e3, "ms"),
        ("counting, per burst", min(whole) / every * 1e9, "ns"),
        ("oracle, per burst", sum(slow) / bursts * 1e9, "ns"),
        ("oracle / ours on the same sequences", sum(slow) / min(fast), "ratio"),
        ("oracle / ours, whole cell by burst", sum(slow) / bursts / (min(whole) / every), "ratio"),
    ]
    wall, peak = _command()
    rows += [("the cell as a command, wall", wall * 1e3, "ms"), ("the cell as a command, peak memory", peak, "bytes")]
    if published:
        cells = [c for c, _ in experiments.published_cells()]
        began = time.perf_counter()
        sweep.compute(cells, quiet=True)
        rows.append((f"{len(cells)} published cells, two processes", (time.perf_counter() - began) * 1e3, "ms"))
        names = ("headline", "heatmap", "maps", *sensitivity.SWEEPS)
        cells = [cell for name in names for cell in sweep.expand(sweep.load(name), scale.load("full"))]
        began = time.perf_counter()
        sweep.compute(cells, quiet=True)
        rows.append((f"{len(cells)} cells of every sweep, two processes", (time.perf_counter() - began) * 1e3, "ms"))
    return _frame(rows)


_LONG = """
import sys, time
from artifact.study.serving import Cell, summarise
allocator, requests, by_burst = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
summarise(Cell(allocator=allocator, requests=50), by_burst=by_burst)
best = []
for n in (requests // 10, requests):
    spent = []
    for _ in range(3 if n < requests else 1):
        began = time.process_time()
        found = summarise(Cell(allocator=allocator, requests=n), by_burst=by_burst)
        spent.append(time.process_time() - began)
    best.append(min(spent))
import resource
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(*best, found["m1_row_hit_frac"], peak)
"""


def million(requests=1_000_000, sides=(("paged", False), ("pim-aware", False), ("random", False), ("paged", True))):
    """`requests` steady requests with every metric, compiled code cached, on one core, each in a process of its own.

    CPU seconds, peak memory, M1, and the time of a request over that at a tenth of the requests (the shortest of
    three). The last side counts every burst. -> frame: measure, value, unit, origin `measured`.
    """
    rows = []
    for allocator, by_burst in sides:
        asked = [sys.executable, "-c", _LONG, allocator, str(requests), str(by_burst)]
        subprocess.run([*asked[:4], "100", asked[5]], capture_output=True)  # compiles, so that memory is the run's own
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{allocator}: the run ended with exit code {done.returncode}: {done.stderr.strip()}")
        tenth, whole, m1, peak = map(float, done.stdout.split())
        name = f"{requests} requests, {allocator}" + ", by burst" * by_burst
        rows += [(name, whole, "s"), (f"{name}: of a request / at a tenth of them", whole / (10 * tenth), "ratio"),
                 (f"{name}: M1", m1, "fraction"), (f"{name}: peak memory", peak, "bytes")]
    return _frame(rows)


def allocators(*, rounds=5):
    """What `upkeep` finds, as lines: time of a decode step and above paged, the worst cases, the bytes of bookkeeping.

    -> frame: measure, value, unit, origin `measured`. ValueError when the operations are not those of the engine.
    """
    from artifact.study import scale, upkeep

    size, rows = scale.load("smoke"), []
    facts, times = upkeep.cost(size, rounds=rounds)
    for r in times.itertuples():
        name = f"{r.workload}, {r.allocator}, {r.implementation}"
        rows += [(f"{name}: a decode step", r.step_time_us, "us"), (f"{name}: above paged", r.above_paged_us, "us")]
    for r in facts.itertuples():
        name = f"{r.workload}, {r.allocator}, {r.implementation}"
        rows.append((f"{name}: bookkeeping after the run", r.bookkeeping_bytes, "bytes"))
        if r.heap_entries_count:
            rows.append((f"{name}: heap of empty regions, {r.regions_count} regions", r.heap_entries_count, "entries"))
    for r in upkeep.worst(size, rounds=rounds).itertuples():
        name = f"worst {r.operation}, {r.regions_count} regions, {r.allocator}, {r.implementation}"
        rows.append((name, r.time_ns, "ns"))
    rows += [(f"pim-aware, compiled: bookkeeping {what} a million operations", held, "bytes")
             for what, held in upkeep.bounded().items()]
    return _frame(rows)


def cycle_level(*, commands=1_000_000, patterns=streams.PATTERNS, rounds=5, sequences=True):
    """Each form of the cycle-level controller, refresh on, the slowest of `patterns`; and every sampled sequence of the
    steady headline under four allocators and two presets, its simulation left out.

    The forms answer as the event loop does for the first few hundred commands, else ValueError and no time. -> frame:
    measure, value, unit, origin `measured`.
    """
    times = timing.preset("HBM3_5.2Gbps")
    slowest = {}
    for pattern in patterns:
        rows = streams.pattern(pattern, commands)
        sides = {"in order": lambda _, rows=rows: runs.served(rows, times, barrier=1),
                 "run lengths": lambda _, rows=rows: runs.served(rows, times)}
        for name, mode, share in (("all-bank", "AB", 1), ("same-bank", "SB", 4), ("per-bank", "PB", 32)):
            few = streams.expand(rows[: 640 // share], mode)
            ours, event = (controller.simulate(few, times, form=form) for form in (None, "event"))
            if ours != event:
                raise ValueError(f"{pattern}, {name}: {ours.cycles} cycles, the event loop {event.cycles}; "
                                 "no time is given")
            trace = streams.expand(rows[: commands // share], mode)
            sides[f"event model, {name}"] = lambda _, trace=trace: controller.simulate(trace, times)
        for side, spent in _shortest(sides, 1, rounds).items():
            speed = commands / spent / 1e6
            slowest[side] = min(slowest.get(side, (speed, pattern)), (speed, pattern))
    out = [(f"{side}, slowest pattern ({pattern})", speed, "million commands/s")
           for side, (speed, pattern) in sorted(slowest.items())]
    if sequences:
        out.append(("cycles of every sampled sequence, 4 allocators, 2 presets", _all_sequences(rounds) * 1e3, "ms"))
    return _frame(out)


def _all_sequences(rounds):
    """Seconds for the cycles of all sampled sequences of the steady headline, once their block tables are there."""
    sides = []
    for allocator in ("paged", "pim-aware", "contiguous", "random"):
        cell = Cell(allocator=allocator)
        tables, tokens = _tables(cell)
        lay = cycles.layout(cell, cell.tokens_per_block, cell.num_blocks(cell.load_requests()))
        sides.append((np.concatenate(tables), np.cumsum([0, *(len(t) for t in tables[:-1])]), tokens, lay))
    spent = []
    for _ in range(1 + rounds):
        began = time.perf_counter()
        for side in sides:
            for name in cycles.PRESETS:
                streams.many(*side, timing.preset(name))
        spent.append(time.perf_counter() - began)
    return min(spent[1:])


def selection(*, tokens=65536, sets=10, rounds=60):
    """One step's selection over `tokens` tokens of one layer, 32 query heads, 8 KV heads of 128 channels, on one core.

    Quest's scores (pages of 16, the largest of a group's heads) beside a vectorised sum of the same metadata, which
    reads it once, and beside torch's two matrix products; InfLLM-v2's scores beside a sum of its compressed keys; the
    top 256 beside torch's. `sets` caches are taken in turn, so that none is found in a near cache.
    -> frame: measure, value, unit, origin `measured`. ValueError when a result differs from the reference's in float64.
    """
    import torch

    from artifact import ops
    from artifact.kernels import cpu

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    kv_heads, dim, pages = 8, 128, tokens // 16
    q = torch.randn(1, 32, dim, generator=draw)
    rises, falls = (x.reshape(kv_heads, 4, dim) for x in (q.clamp(min=0), q.clamp(max=0)))
    length, rows = torch.tensor([tokens]), []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        low = [torch.randn(1, kv_heads, pages, dim, generator=draw).to(dtype) for _ in range(sets)]
        high = [x + 1 for x in low]
        flat = [[ops.stored(x).reshape(-1) for x in pair] for pair in zip(low, high, strict=True)]
        ours = {
            "Quest": lambda i, low=low, high=high: ops.quest_scores(q, low[i], high[i]),
            "InfLLM-v2": lambda i, low=low: ops.infllm_scores(q, low[i], length),
        }
        truth = {
            "Quest": ops.quest_scores(q.double(), low[0].double(), high[0].double(), impl="reference"),
            "InfLLM-v2": ops.infllm_scores(q.double(), low[0].double(), length, impl="reference"),
        }
        for what, score in ours.items():
            error = ((score(0) - truth[what]).abs().max() / truth[what].abs().max()).item()
            if not error < 1e-5:
                raise ValueError(f"{what}, {name}: {error:g} of the largest score off the reference; no time is given")
        best = _shortest({
            "Quest": ours["Quest"],
            "sum": lambda i, flat=flat: [cpu.total(x) for x in flat[i]],
            "torch": lambda i, low=low, high=high: (
                rises.to(low[i].dtype) @ high[i][0].mT + falls.to(low[i].dtype) @ low[i][0].mT).amax(1),
        }, sets, rounds)
        keys = _shortest({
            "InfLLM-v2": ours["InfLLM-v2"],
            "sum": lambda i, flat=flat: cpu.total(flat[i][0]),
        }, sets, rounds)
        rows += [
            (f"{name}: Quest's metadata", 2 * low[0].nbytes, "bytes"),
            (f"{name}: Quest's scores", best["Quest"] * 1e3, "ms"),
            (f"{name}: sum of the same metadata", best["sum"] * 1e3, "ms"),
            (f"{name}: Quest's scores / sum", best["Quest"] / best["sum"], "ratio"),
            (f"{name}: torch's products / Quest's scores", best["torch"] / best["Quest"], "ratio"),
            (f"{name}: InfLLM-v2's scores", keys["InfLLM-v2"] * 1e3, "ms"),
            (f"{name}: InfLLM-v2's scores / sum of its keys", keys["InfLLM-v2"] / keys["sum"], "ratio"),
        ]
    scores = [torch.randn(kv_heads, pages, generator=draw) for _ in range(sets)]
    picked = ops.topk(scores[0], 256)
    if not torch.equal(picked.long(), torch.topk(scores[0], 256).indices.sort(-1).values):
        raise ValueError("the top 256 differ from torch's; no time is given")
    best = _shortest({"ours": lambda i: ops.topk(scores[i], 256), "torch": lambda i: torch.topk(scores[i], 256)},
                     sets, rounds)
    rows += [(f"top 256 of {pages}, {kv_heads} heads", best["ours"] * 1e3, "ms"),
             ("torch's top 256 / ours", best["torch"] / best["ours"], "ratio")]
    return _frame(rows)


def kernels(*, tokens=65536, listed=64, missed=7, sets=10, rounds=60):
    """Attention over `listed` blocks of 64 tokens, a list for each KV head, from a cache of `tokens`, on one core.

    32 query heads, 8 KV heads of 128 channels: beside a vectorised sum of the same keys and values where they lie,
    which reads them once, and beside gathering them for torch's attention, the group as query rows; the repair of the
    last `missed` blocks beside the whole; every block beside torch's attention over a contiguous copy; and 4 and 2 KV
    heads, which are bound by arithmetic. `sets` lists are taken in turn, so that none is found in a near cache.
    -> frame: measure, value, unit, origin `measured`. ValueError when a result differs from the reference's.
    """
    import torch

    from artifact import ops
    from artifact.kernels import attention_cpu

    torch.set_num_threads(1)
    heads, dim, size, out = 32, 128, 64, []
    attend = torch.nn.functional.scaled_dot_product_attention
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for kv_heads in (8, 4, 2):
            draw = torch.Generator().manual_seed(0)
            pages = tokens // size
            k, v = (torch.randn(pages, kv_heads, size, dim, generator=draw).to(dtype) for _ in range(2))
            kv = ops.PagedKV(k, v, torch.randperm(pages, generator=draw).int()[None],
                             torch.tensor([tokens], dtype=torch.int32))
            q = torch.randn(1, heads, dim, generator=draw).to(dtype)
            folded = q.reshape(1, kv_heads, heads // kv_heads, dim)
            lists = [torch.stack([torch.randperm(pages, generator=draw)[:listed] for _ in range(kv_heads)])[None].int()
                     for _ in range(sets)]
            late = [x[:, :, -missed:].contiguous() for x in lists]
            states = [ops.attend(q, kv, x[:, :, :-missed]) for x in lists]
            each = torch.arange(kv_heads)[:, None]

            def gathered(i, k=k, v=v, kv=kv, each=each, lists=lists, folded=folded):
                page = kv.page_table[0][lists[i][0].long()].long()
                return attend(folded, k[page, each].flatten(1, 2)[None], v[page, each].flatten(1, 2)[None])

            sides = {
                "attention": lambda i, q=q, kv=kv, lists=lists: ops.attend(q, kv, lists[i]),
                "repair": lambda i, q=q, kv=kv, late=late, states=states: ops.repair(states[i], q, kv, late[i]),
                "sum": lambda i, kv=kv, lists=lists: attention_cpu.totals(kv, lists[i]),
                "torch": gathered,
            }
            truth = ops.attend(q.double(), kv, lists[0], impl="reference")
            for what in ("attention", "repair"):
                _agree(f"{name}, {kv_heads} KV heads, {what}", sides[what](0), truth)
            best = _shortest(sides, sets, rounds)
            whole = f"{name}, {kv_heads} KV heads: {listed} blocks"
            out += [(f"{whole}, bytes read", 2 * listed * kv_heads * size * dim * k.itemsize, "bytes"),
                    (whole, best["attention"] * 1e3, "ms"),
                    (whole, 4 * listed * size * heads * dim / best["attention"] / 1e9, "gflops"),
                    (f"{whole} / sum in place", best["attention"] / best["sum"], "ratio"),
                    (f"gather and torch / {whole}", best["torch"] / best["attention"], "ratio"),
                    (f"repair of {missed} / {whole}", best["repair"] / best["attention"], "ratio")]
            if kv_heads == 8:
                order = kv.page_table[0].long()
                flat = [x[order].transpose(0, 1).flatten(1, 2)[None].contiguous() for x in (k, v)]
                sides = {"dense": lambda _, q=q, kv=kv: ops.dense(q, kv),
                         "torch": lambda _, folded=folded, flat=flat: attend(folded, *flat)}
                _agree(f"{name}, dense", sides["dense"](0), ops.dense(q.double(), kv, impl="reference"))
                best = _shortest(sides, 1, max(2, rounds // 10))
                out += [(f"{name}: every block", best["dense"] * 1e3, "ms"),
                        (f"{name}: every block / torch", best["dense"] / best["torch"], "ratio")]
                del flat
    return _frame(out)


def gpu_kernels(place=None, tiny=False):
    """Attention and its repair on this machine's GPU beside FlashInfer, as `artifact.kernels.timing` times them.

    `place`, `tiny`: a `timing.Dry` and its shapes instead. -> frame: measure, value, unit, origin `measured`, of all
    that was timed. ValueError when a side differs from the reference's.
    """
    from artifact.kernels import timing

    found = []
    for row in timing.rows(timing.Gpu() if place is None else place, timing.cases(tiny)):
        shape = f"{row['listed_count']} blocks of {row['block_tokens']}, {row['kv_heads_count']} KV heads"
        missed = "" if row["missed_count"] is None else f", {row['missed_count']} missed"
        case = f"{row['study']}, batch {row['batch_count']}, {shape}{missed}"
        if row["time_us"] is not None:
            found.append((f"{case}: {row['side']}, {row['method']}", row["time_us"], "us"))
    return _frame(found)


def _agree(what, ours, truth):
    """ValueError unless `ours` is `truth` within 3e-6 of its largest number."""
    for part, own, right in zip(("out", "lse"), ours, truth, strict=True):
        error = ((own - right).abs().max() / right.abs().max()).item()
        if not error <= 3e-6:
            raise ValueError(f"{what}: {part} is {error:g} of its largest off the reference; no time is given")


def predictor(*, rows=256, blocks=256, heads=4, budget=96, rounds=20):
    """Calibrating one layer, 80 candidates, against the plain NumPy loop, on scores as a trace's and on hard ones; one
    prediction for 4 heads of 8192 blocks and its top `budget`.

    Equal hits to the last count first. Both sides run in each round, and the shortest time of each counts.
    -> frame: measure, value, unit, origin `measured`. ValueError when the two differ.
    """
    from artifact import ops
    from artifact.prr import calibration
    from artifact.prr.predictor import EmaState, Theta, predict
    from artifact.study import fitting

    smooth = fitting.like_a_trace(rows, heads, blocks)
    draw = np.random.default_rng(1)
    kinds = {
        "trace-like": smooth, "8 levels, ties": np.round(smooth), "near constant": 1 + np.float32(1e-6) * smooth,
        "scale jumps": smooth * (10.0 ** draw.uniform(-3, 3, (rows, 1, 1))).astype(np.float32),
        "independent": draw.normal(size=smooth.shape).astype(np.float32),
    }
    for kind, scores in kinds.items():
        ours, plain = calibration.calibrate(scores, budget), calibration.plain(scores, budget)
        if not np.array_equal(ours.hits, plain.hits) or abs(ours.objective - plain.objective).max() > 1e-12:
            raise ValueError(f"{kind}: the one pass and the plain loop differ; no time is given")
    plain = _shortest({kind: lambda _, s=scores: calibration.plain(s, budget) for kind, scores in kinds.items()
                       if kind == "trace-like"} | {"ours": lambda _: calibration.calibrate(smooth, budget)}, 1, 2)
    best = _shortest({kind: lambda _, s=scores: calibration.calibrate(s, budget) for kind, scores in kinds.items()},
                     1, rounds)
    out = [(f"calibration, {kind}", spent * 1e3, "ms") for kind, spent in best.items()]
    out += [("plain loop, trace-like", plain["trace-like"] * 1e3, "ms"),
            ("plain loop / calibration in the same rounds", plain["trace-like"] / plain["ours"], "ratio")]
    level = fitting.like_a_trace(1, 4, 8192)[0]
    state, theta = EmaState(level, np.float32(0.1) * level[::-1]), Theta(0.2, 0.5, 0.25)
    if not np.array_equal(ops.topk(predict(state, theta), budget),
                          ops.topk(predict(state, theta), budget, impl="reference")):
        raise ValueError("the predicted set differs from the reference's; no time is given")
    spent = _shortest({"one": lambda _: ops.topk(predict(state, theta), budget)}, 1, 200)["one"]
    return _frame([*out, (f"one prediction, 4 heads of 8192 blocks, top {budget}", spent * 1e3, "ms")])


def _shortest(sides, sets, rounds):
    """Shortest seconds of each side, a function of a set's number, over rounds in which each has one turn.

    The sets come round one by one and the sides in random order, so that no side always follows the same other.
    """
    random, times, turn = np.random.default_rng(0), {side: [] for side in sides}, 0
    for _ in range(3 + rounds):
        for side in random.permutation(list(sides)).tolist():
            began = time.perf_counter()
            sides[side](turn % sets)
            times[side].append(time.perf_counter() - began)
            turn += 1
    return {side: min(spent[3:]) for side, spent in times.items()}  # the first three warm up


def _frame(rows):
    return pd.DataFrame([{"measure": m, "value": float(v), "unit": u} for m, v, u in rows]).assign(origin="measured")


def _tables(cell):
    """Every sampled block table of `cell`'s run, and their lengths in tokens."""
    tables, tokens = [], []

    def keep(samples):
        ends = samples.starts + samples.blocks
        tables.extend(samples.flat[a:b].copy() for a, b in zip(samples.starts, ends, strict=True))
        tokens.extend(samples.tokens.tolist())

    run(cell, on_tables=keep)
    return tables, np.array(tokens)


_COMMAND = """
import sys
from artifact.__main__ import main
code = main(["kv", "simulate", "--json"])
try:
    status = open("/proc/self/status").read()
    print(int(status.split("VmHWM:")[1].split()[0]) * 1024, file=sys.stderr)
except OSError:  # no Linux: the kernel's own maximum
    import resource
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def _command():
    """Wall seconds (best of three, after one) and peak memory of the headline cell as a command of its own."""
    walls, peaks = [], []
    for _ in range(4):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", _COMMAND], capture_output=True, text=True)
        walls.append(time.perf_counter() - began)
        if done.returncode:
            raise ValueError(f"`artifact kv simulate` ended with exit code {done.returncode}: {done.stderr.strip()}")
        peaks.append(int(done.stderr))
    return min(walls[1:]), max(peaks)
