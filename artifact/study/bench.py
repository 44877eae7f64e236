"""How fast the simulator is, as ratios in one process: equal counts first, then times, after a warm-up."""

import subprocess
import sys
import time

import numpy as np
import pandas as pd

from artifact.pim import bandwidth, mapping, oracle
from artifact.study import experiments, sweep
from artifact.study.serving import Cell, run


def simulator(*, rounds=5, oracle_samples=24, published=True):
    """Counting the headline cell against the oracle, the cell as a whole command, and all published cells.

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
    frame = pd.DataFrame([{"measure": m, "value": float(v), "unit": u} for m, v, u in rows])
    return frame.assign(origin="measured")


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
