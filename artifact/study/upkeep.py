"""What an allocator costs the engine that asks it, and what its placement is worth beside that: notebook 13.

Every allocator serves the same operations, those of a steady or speculating run under oracle admission, whose order no
allocator changes. Ours are compiled and called in a compiled loop, as the engine does; the study's own are a port in
plain Python (`rival`), called in a plain loop. Times are process times of the whole stream, the shortest of some
rounds in turn, in one process.
"""

import time

import numpy as np
import pandas as pd

from artifact.kv import allocators, replay
from artifact.kv.replay import ADMIT, GROW, LAST, RELEASE
from artifact.study import rival, serving
from artifact.study.serving import Cell

_RIVALS = {"paged": rival.Stack, "pim-aware": rival.Heaps}
OURS, PLAIN = "compiled", "plain Python"


def operations(cell):
    """The operations of `cell` (steady or spec, copied back) -> int64 [n, 3] as `kv.replay`, decode steps.

    Slot `max_batch` is the drafts'. ValueError when the engine itself counts other steps or blocks.
    """
    work = cell.load_requests()
    pool, size, batch = cell.num_blocks(work), cell.tokens_per_block, cell.max_batch
    arrivals, prompts, totals = (a.tolist() for a in (work.arrival_step, work.prompt_tokens, work.total_tokens))
    draws, spec = np.random.default_rng(cell.seed + 2), cell.workload == "spec"
    out, active, spare = [], [], list(range(batch - 1, -1, -1))
    step = steps = arrived = committed = allocated = 0
    free = pool

    def blocks(tokens):
        return -(-tokens // size)

    while active or arrived < len(arrivals):
        while arrived < len(arrivals) and arrivals[arrived] <= step and spare:
            length, total = prompts[arrived], totals[arrived]
            if free - committed < blocks(total):
                break
            active.append([spare.pop(), length, total, blocks(length)])
            out.append((ADMIT, active[-1][0], blocks(length)))
            free -= blocks(length)
            allocated += blocks(length)
            committed += blocks(total) - blocks(length)
            arrived += 1
        if not active:
            step = max(step + 1, arrivals[arrived])
            continue
        for seat in active:
            slot, length, total, held = seat
            drafts, advance = 0, 1
            if spec:
                accepted = 0
                while accepted < cell.spec_depth and draws.random() < cell.spec_accept ** (accepted + 1):
                    accepted += 1
                draws.integers(cell.spec_width)
                advance = min(accepted + 1, total - length)
                drafts = cell.spec_width * blocks(length % size + cell.spec_depth + 1)
                if free < drafts + max(0, blocks(length + advance) - held):
                    drafts, advance = 0, 1
            more = max(0, blocks(length + advance) - held)
            out += [(GROW, batch, drafts)] * (drafts > 0) + [(GROW, slot, more)] * (more > 0)
            out += [(LAST, batch, drafts)] * (drafts > 0)
            seat[1], seat[3] = length + advance, held + more
            free -= more
            committed -= more
            allocated += more + drafts
        for seat in [seat for seat in active if seat[1] >= seat[2]]:
            out.append((RELEASE, seat[0], seat[3]))
            active.remove(seat)
            spare.append(seat[0])
            free += seat[3]
        steps += 1
        step += 1
    found = serving.summarise(cell)
    if (found["decode_steps"], found["blocks_allocated_total"]) != (steps, allocated):
        raise ValueError(f"{steps} steps and {allocated} blocks; the engine counts {found['decode_steps']} and "
                         f"{found['blocks_allocated_total']}; no time is given")
    return np.array(out, dtype=np.int64), steps


def _ours(policy, pool, region, slots, stream, before=()):
    """A function that serves `before` and then, timed, `stream` with a fresh pool -> (seconds, the pool)."""
    before = np.array(before, dtype=np.int64).reshape(-1, 3)
    longest = _longest(np.concatenate([before, stream]))
    extra = allocators.reserved(policy) * region  # as many blocks to hand out as the others have

    def once():
        p = allocators.pool(policy, pool + extra, region, slots)
        tables, held = np.zeros((slots, longest), dtype=np.int32), np.zeros(slots, dtype=np.int64)
        replay.operate(p, before, tables, held)
        began = time.process_time()
        replay.operate(p, stream, tables, held)
        return time.process_time() - began, p

    return once


def _longest(stream):
    """The most blocks that a sequence holds at once."""
    held, most = {}, 0
    for kind, slot, blocks in stream.tolist():
        held[slot] = {ADMIT: blocks, RELEASE: 0}.get(kind, held.get(slot, 0) + (blocks if kind == GROW else -blocks))
        most = max(most, held[slot])
    return most


def _plain(policy, pool, region, stream, before=()):
    listed = stream.tolist()

    def once():
        p = _RIVALS[policy](pool, region)
        rival.serve(p, before)
        began = time.process_time()
        rival.serve(p, listed)
        return time.process_time() - began, p

    return once


def _shortest(sides, rounds):
    """The shortest seconds of each side, which have a turn each in every round, and what it ended with."""
    best = {}
    for turn in range(rounds + 1):
        for side, once in sides.items():
            spent, p = once()
            best[side] = (min(spent, best[side][0]) if turn > 1 else spent, p)  # the first turn warms up
    return best


def cost(size, *, rounds=5):
    """Each allocator on the operations of a steady and a speculating run -> (facts, times): two frames.

    facts: operations, bytes of bookkeeping before and after, entries of the heap of empty regions; the same every time.
    times: microseconds per decode step, and above `paged` of the same kind.
    """
    facts, times, requests = [], [], min(1000, size.sweep_requests)
    for workload in ("steady", "spec"):
        cell = Cell(workload=workload, allocator="pim-aware", requests=requests, seed=size.seed)
        stream, steps = operations(cell)
        pool, region, slots = cell.num_blocks(cell.load_requests()), cell.blocks_per_region, cell.max_batch + 1
        policies = [name for name in allocators.NAMES if name != "contiguous"]  # it knows final lengths beforehand
        sides = {(name, OURS): _ours(name, pool, region, slots, stream) for name in policies}
        sides |= {(name, PLAIN): _plain(name, pool, region, stream) for name in _RIVALS}
        best = _shortest(sides, rounds)
        for (name, kind), (spent, p) in best.items():
            base = best["paged", kind][0]
            same = {"workload": workload, "allocator": name, "implementation": kind, "requests_count": requests}
            facts.append({**same, "decode_steps_count": steps, "operations_count": len(stream),
                          "regions_count": pool // region, "bookkeeping_bytes": _bytes(p),
                          "heap_entries_count": p.entries() if kind == PLAIN else 0, "origin": "simulated"})
            times.append({**same, "step_time_us": spent / steps * 1e6, "above_paged_us": (spent - base) / steps * 1e6,
                          "origin": "measured"})
    return pd.DataFrame(facts), pd.DataFrame(times)


def _bytes(p):
    if isinstance(p, rival.Stack):
        return p.bytes()
    return sum(value.nbytes for value in p._values.values() if isinstance(value, np.ndarray))


def worst(size, *, rounds=5, repeats=200):
    """An append and an admission when no region is empty, by number of regions: a row each.

    append: every region has one block left, so that each append has to look for another region. admit: every region
    has one block in use, and a sequence of a region's blocks comes and goes; half of both is given.
    """
    region, out = 8, []
    for count in (396, 792, 1584) if size.sweep_requests >= 1000 else (99, 198):
        slots = count + 2
        cases = {
            "append": ([(ADMIT, r, region - 1) for r in range(count)] + [(ADMIT, count, 0)], [(GROW, count, 1)], 1),
            "admit": ([(ADMIT, r, 1) for r in range(count)], [(ADMIT, count, region), (RELEASE, count, region)], 2),
        }
        for what, (before, timed, share) in cases.items():
            times = min(repeats, count)  # no more appends than there are free blocks
            stream = np.array(timed * times, dtype=np.int64)
            sides = {(name, OURS): _ours(name, count * region, region, slots, stream, before) for name in _RIVALS}
            sides |= {(name, PLAIN): _plain(name, count * region, region, stream, before) for name in _RIVALS}
            for (name, kind), (spent, _) in _shortest(sides, rounds).items():
                out.append((what, name, kind, count, spent / (share * times) * 1e9, "measured"))
    return pd.DataFrame(out, columns=["operation", "allocator", "implementation", "regions_count", "time_ns", "origin"])


def worth(size, times):
    """What placement saves in attention and costs in the allocator, for each decode step: one row a workload and kind.

    saved: the fall of M4, times the layers, times the mean batch; cost: `above_paged_us` of `times`, of `cost`.
    """
    out = []
    for workload in ("steady", "spec"):
        requests = min(1000, size.sweep_requests)
        cells = [Cell(workload=workload, allocator=name, requests=requests, seed=size.seed) for name in _RIVALS]
        paged, aware = (serving.summarise(cell) for cell in cells)
        active = cells[0].load_requests().output_tokens.sum() / aware["decode_steps"]
        saved_us = (paged["m4_latency_ns"] - aware["m4_latency_ns"]) * cells[0].shape.layers * active / 1e3
        for kind in (OURS, PLAIN):
            row = times[(times["workload"] == workload) & (times["allocator"] == "pim-aware")
                        & (times["implementation"] == kind)]
            spent_us = float(row["above_paged_us"].iloc[0])
            out.append((workload, kind, requests, active, saved_us, spent_us,
                        saved_us / spent_us if spent_us > 0 else float("nan"), "measured"))
    names = ["workload", "implementation", "requests_count", "batch_mean_count", "saved_time_us", "cost_time_us",
             "benefit_ratio", "origin"]
    return pd.DataFrame(out, columns=names)


def growth(frame):
    """How many times longer the operations of `worst` take with most regions than with fewest: one row each."""
    fewest, most = frame["regions_count"].min(), frame["regions_count"].max()
    same = ["operation", "allocator", "implementation"]
    first, last = (frame[frame["regions_count"] == n].set_index(same)["time_ns"] for n in (fewest, most))
    out = (last / first).rename("growth_ratio").reset_index()
    return out.assign(regions_ratio=most / fewest, origin="measured")


def churn(size):
    """M1 of a steady run as long as the scale allows, a million requests at most -> (results, times): two frames.

    How long a run takes includes counting what is sampled.
    """
    requests, rows, times = min(1_000_000, size.sweep_requests), [], []
    for name in ("paged", "random", "pim-aware"):
        cell = Cell(allocator=name, requests=requests, seed=size.seed)
        serving.summarise(cell.model_copy(update={"requests": min(50, requests)}))  # compiles
        began = time.process_time()
        found = serving.summarise(cell)
        spent = time.process_time() - began
        same = {"workload": "steady", "allocator": name, "requests_count": requests}
        rows.append({**same, "decode_steps_count": found["decode_steps"], "samples_count": found["samples"],
                     "m1_row_hit_frac": found["m1_row_hit_frac"], "region_spread": found["region_spread"],
                     "origin": "simulated"})
        times.append({**same, "run_time_ms": spent * 1e3, "request_time_us": spent / requests * 1e6,
                      "origin": "measured"})
    return pd.DataFrame(rows), pd.DataFrame(times)


def bounded(operations_count=1_000_000):
    """Bytes of pim-aware's arrays before and after so many operations of a speculating run, over and over."""
    cell = Cell(workload="spec", allocator="pim-aware", requests=1000)
    stream, _ = operations(cell)
    pool, region, slots = cell.num_blocks(cell.load_requests()), cell.blocks_per_region, cell.max_batch + 1
    p = allocators.pool("pim-aware", pool, region, slots)
    tables, held = np.zeros((slots, _longest(stream)), dtype=np.int32), np.zeros(slots, dtype=np.int64)
    before = _bytes(p)
    for _ in range(-(-operations_count // len(stream))):
        replay.operate(p, stream, tables, held)
    return {"before": before, "after": _bytes(p)}
