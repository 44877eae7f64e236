"""The study's five validation gates, each through an allocator and an address map, and beside it a case that must fail.

The study's own second gate avoids both, and its third runs where nothing can vary (KV-PIMple tests, section "gates").
Here a gate is a number, the limit it has to keep, and the same number of a control that must not keep it: a gate whose
control passes says nothing, and counts as not passed.
"""

import hashlib

import numpy as np
import pandas as pd

from artifact.kv import allocators
from artifact.study import serving
from artifact.study.serving import Cell

SLACK = 0.005  # by which M1 may fall from one block size to the next: the study's
COMMAND_MAP = "ch5 ba2 bg2 co5 ro14"  # a burst a bank, so that a 16 KiB block is one command in each channel
COLUMNS = ("gate", "says", "measured_ratio", "limit_ratio", "control", "control_ratio", "passed", "origin")


def gates(size, run=serving.run):
    """One row of `COLUMNS` a check, `passed` yes or no; `run`: what simulates a `Cell` (tests give a broken one)."""
    requests = min(1000, size.sweep_requests)

    def summary(**given):
        return run(Cell(requests=requests, seed=size.seed, **given))[0]

    best, host = (summary(allocator="contiguous", address_map=name) for name in ("pim-friendly", "host-centric"))
    scattered = summary(allocator="random")
    rows = [
        _row("1 perfect", "contiguous under pim-friendly: M1 at least", best["m1_row_hit_frac"], 0.95,
             "random under host-cacheline", scattered["m1_row_hit_frac"]),
        _row("1 perfect", "... and M2 at least", best["m2_bank_parallelism_frac"], 0.99, "host-centric",
             host["m2_bank_parallelism_frac"]),
    ]  # fmt: skip
    worst, kept = (summary(allocator=name, block_tokens=4, address_map=COMMAND_MAP, coalesce="inorder")
                   for name in ("random", "pim-aware"))
    expected = Cell(block_tokens=4).blocks_per_region / worst["pool_blocks"]
    rows.append(_row("2 worst", "blocks of one command at random: M1 over 1 / rows, at most twice off",
                     _off(worst["m1_row_hit_frac"] / expected), 2, "pim-aware",
                     _off(kept["m1_row_hit_frac"] / expected), most=True))
    sizes = sorted(size.block_tokens)
    rising, falling = ([summary(allocator=name, block_tokens=b)["m1_row_hit_frac"] for b in order]
                       for name, order in (("contiguous", sizes), ("paged", sizes[::-1])))
    rows.append(_row("3 monotonic", "contiguous: least step of M1 as blocks grow", min(np.diff(rising)), -SLACK,
                     "paged as blocks shrink", min(np.diff(falling))))
    cell = Cell(requests=requests, seed=size.seed)
    first, again, other = (_digest(run(c)[1]) for c in (cell, cell, cell.model_copy(update={"seed": size.seed + 1})))
    rows.append(_row("4 deterministic", "the same seed: share of equal sample files", float(first == again), 1,
                     "another seed", float(first == other)))
    for allocator in allocators.NAMES:
        lost, without = _unaccounted(run, Cell(requests=requests, seed=size.seed, allocator=allocator,
                                               sample_sequences=64, max_batch=64, sample_every=4))
        rows.append(_row("5 conserved", f"{allocator}: most blocks live but in no table, any sampled step", lost, 0,
                         "one sequence of each step left out", without, most=True))
    return pd.DataFrame(rows, columns=COLUMNS)


def summary(frame):
    """How many checks each gate has, passed and failed; all of them in the first row."""
    groups = [("all", frame), *frame.groupby("gate", sort=False)]
    rows = [(name, len(part), int((part["passed"] == "yes").sum())) for name, part in groups]
    frame = pd.DataFrame(rows, columns=["gate", "checks_count", "passed_count"])
    return frame.assign(failed_count=frame["checks_count"] - frame["passed_count"], origin="simulated")


def _row(gate, says, measured, limit, control, control_measured, most=False):
    keeps, control_keeps = ((value <= limit) if most else (value >= limit) for value in (measured, control_measured))
    passed = "yes" if keeps and not control_keeps else "no"
    return gate, says, float(measured), float(limit), control, float(control_measured), passed, "simulated"


def _off(ratio):
    """How many times a ratio is off one, to either side."""
    return max(ratio, 1 / ratio) if ratio else float("inf")


def _digest(columns):
    text = pd.DataFrame(columns).to_csv(index=False, lineterminator="\n")
    return hashlib.sha256(text.encode()).hexdigest()


def _unaccounted(run, cell):
    """Most blocks that any sampled step has live, or has lost, beside those in the batch's tables; with a sequence left
    out, the same."""
    worst = [0, 0]
    pool, reserved = cell.num_blocks(cell.load_requests()), allocators.reserved(cell.allocator)

    def look(samples):
        edges = np.append(np.flatnonzero(np.diff(samples.step, prepend=-1)), samples.step.size)
        for a, b in zip(edges[:-1], edges[1:], strict=True):
            tables = [samples.flat[s : s + n] for s, n in zip(samples.starts[a:b], samples.blocks[a:b], strict=True)]
            live, free = samples.live_blocks[a], samples.free_blocks[a]
            for i, some in enumerate((tables, tables[1:])):
                held = np.unique(np.concatenate(some)).size if some else 0
                worst[i] = max(worst[i], abs(int(live) - reserved - held), abs(pool - int(live + free)))

    run(cell, on_tables=look)
    return worst
