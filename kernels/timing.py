"""GPU times of the attention kernels, each behind a parity gate, beside FlashInfer's where it is installed.

`python -m artifact.kernels.timing --out FILE.csv`, or this file by its path where nothing is installed: torch, triton
and numpy are enough. The CSV has a row for each side of each case; FILE.json says what measured it. No time is taken of
a side that differs from the reference in float64: the run ends with what differs, and writes nothing. `--dry-run` goes
the same way on a CPU, over tiny shapes and interpreted kernels, and times nothing.

Times are CUDA events' around one call, after calls that warm up, with the second-level cache overwritten before each.
`graph`: the call replayed as a CUDA graph, so that launching from Python is not in it. `eager`: as Python calls it.
"""

import argparse
import csv
import hashlib
import importlib.util
import itertools
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import types
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run by its path: the folder beside which it lies stands for the package
    sys.modules["artifact"] = types.ModuleType("artifact")
    sys.modules["artifact"].__path__ = [str(Path(__file__).resolve().parents[1])]

SEED, DIM = 0, 128
WARM_UP, REPEATS, FLUSH_BYTES, COPY_BYTES, WORKSPACE_BYTES = 10, 100, 2**28, 2**30, 2**27
DIFFERENCE = 5e-3  # of the largest number, from float64: for bfloat16 caches
FLASHINFER = "flashinfer-python==0.6.8.post1 apache-tvm-ffi==0.1.15.post2"


class Case(NamedTuple):
    """What is timed: `listed` of each sequence's blocks, of which the last `missed` are repaired in study `repair`."""

    study: str  # decode | batch | repair | table3
    batch_count: int
    heads_count: int
    kv_heads_count: int
    block_tokens: int
    listed_count: int
    context_tokens: int
    missed_count: int | None = None


class Spent(NamedTuple):
    """One side's time, or why it has none; the quantiles are over `repeats_count` calls."""

    side: str
    method: str  # graph | eager
    time_us: float | None = None  # median
    time_us_p20: float | None = None
    time_us_p80: float | None = None
    repeats_count: int | None = None
    bytes_fewest_bytes: int | None = None  # see `moved.fewest`
    skipped: str = ""


COLUMNS = *Case._fields, *Spent._fields, "origin"


def cases(tiny=False):
    """Every case: decoding, a batch against copy bandwidth, repairs of nothing to everything, the paper's Table 3."""
    if tiny:
        heads, few, many, block, listed, context, batch, step = 4, 1, 2, 16, 4, 256, 2, 2
        sizes, budgets = (16, 32), (32,)
    else:
        heads, few, many, block, listed, context, batch, step = 32, 4, 8, 64, 96, 131072, 32, 8
        sizes, budgets = (16, 32, 64, 128, 256), (1024, 2048, 4096, 6144, 8192)
    yield from (Case("decode", 1, heads, kv_heads, block, listed, context) for kv_heads in (few, many))
    yield Case("batch", batch, heads, many, block, listed, context)
    for missed in range(0, listed + 1, step):
        yield Case("repair", 1, heads, many, block, listed, context, missed)
    for size, budget in itertools.product(sizes, budgets):
        yield Case("table3", 1, heads, many, size, budget // size, context)


class Gpu:
    """Runs and times a side on the current CUDA device."""

    device = "cuda"

    def __init__(self):
        import torch

        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)

    def spent(self, side, method, call, least=None):
        """The Spent of `call`. A call that cannot be captured has its reason instead of a time."""
        import torch

        try:
            run = self._captured(call) if method == "graph" else call
        except RuntimeError as error:
            return Spent(side, method, skipped=f"not captured as a graph: {str(error).splitlines()[0]}")
        for _ in range(WARM_UP):
            run()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        for before, after in events:
            self._flush.zero_()
            before.record()
            run()
            after.record()
        torch.cuda.synchronize()
        times = sorted(1e3 * before.elapsed_time(after) for before, after in events)
        fifths = statistics.quantiles(times, n=5)
        return Spent(side, method, statistics.median(times), fifths[0], fifths[-1], REPEATS, least)

    def _captured(self, call):
        import torch

        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # compiles and allocates before the capture
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


class Dry:
    """Calls a side once on the CPU, and has no time to tell."""

    device = "cpu"

    def spent(self, side, method, call, least=None):
        call()
        return Spent(side, method, bytes_fewest_bytes=least, skipped="a dry run takes no times")


def rows(place, asked):
    """A dict of Case and Spent for each side of each case, in order. ValueError where a side is not the reference's."""
    import torch

    origin = {"origin": "measured"}
    source = torch.empty(COPY_BYTES if place.device == "cuda" else 2**10, dtype=torch.uint8, device=place.device)
    copied = place.spent("copy", "eager", partial(torch.empty_like(source).copy_, source), 2 * source.numel())
    yield Case("copy", 1, 1, 1, 1, 0, 0)._asdict() | copied._asdict() | origin
    del source
    for case in asked:
        for spent in _sides(place, case):
            yield case._asdict() | spent._asdict() | origin


def _sides(place, case):
    from artifact.kernels import decode, moved, reference, repair

    q, kv, blocks = inputs(case, place.device)
    truth = reference.attend(q.double(), kv, blocks)
    if case.study == "repair":
        known, missed = parted(blocks, case.missed_count)
        state = decode.attend(q, kv, known)
        call = partial(repair.repair, state, q, kv, missed)
        agree(f"{case}: triton", call(), truth)
        least = moved.fewest(q, kv, missed) + 4 * (q.numel() + q.shape[0] * q.shape[1])
        yield place.spent("triton", "graph", call, least)
        return
    least = moved.fewest(q, kv, blocks)
    call = partial(decode.attend, q, kv, blocks)
    agree(f"{case}: triton", call(), truth)
    for method in ("graph", "eager"):
        yield place.spent("triton", method, call, least)
    yield from _theirs(place, case, (q, kv, blocks), truth, least)


def _theirs(place, case, given, truth, least):
    """FlashInfer's sides; one that cannot be had, or that fails before it gives an answer, has its reason."""
    builders = {"flashinfer decode": partial(planned_decode, *given, tensor_cores=False),
                "flashinfer decode, tensor cores": partial(planned_decode, *given, tensor_cores=True)}
    if case.study in ("decode", "table3"):
        builders["flashinfer bsr"] = partial(block_sparse, *given)
    if importlib.util.find_spec("flashinfer") is None:
        reason = f"flashinfer is not installed: pip install --no-deps {FLASHINFER}"
        yield from (Spent(side, "graph", skipped=reason) for side in builders)
        return
    for side, build in builders.items():
        try:
            plan, run = build()
            found = run()
        except Exception as error:  # of another library's, which may want a compiler or another GPU
            yield Spent(side, "graph", skipped=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            continue
        agree(f"{case}: {side}", natural(found, truth), truth)
        for method in ("graph", "eager"):
            yield place.spent(side, method, run, least)
        if side == "flashinfer bsr":
            yield place.spent(f"{side} and its plan", "eager", partial(_both, plan, run), least)


def _both(plan, run):
    plan()
    return run()


def inputs(case, device, dtype=None):
    """-> q, a paged cache in shuffled pages, and lists. Heads of one sequence share a list, as block-sparse wrappers
    need it; each still has keys and values of its own to read."""
    import torch
    from artifact.kernels.paged import PagedKV

    dtype = torch.bfloat16 if dtype is None else dtype
    draw = torch.Generator(device).manual_seed(SEED)
    of = {"generator": draw, "device": device}
    held = case.context_tokens // case.block_tokens
    shape = case.batch_count * held, case.kv_heads_count, case.block_tokens, DIM
    k, v = (torch.randn(shape, dtype=dtype, **of) for _ in range(2))
    table = torch.randperm(shape[0], **of).int().view(case.batch_count, held)
    length = torch.full((case.batch_count,), case.context_tokens, dtype=torch.int32, device=device)
    blocks = torch.stack([torch.randperm(held, **of)[: case.listed_count].sort().values.int()
                          for _ in range(case.batch_count)])
    blocks = blocks[:, None].expand(-1, case.kv_heads_count, -1).contiguous()
    q = torch.randn(case.batch_count, case.heads_count, DIM, dtype=dtype, **of)
    return q, PagedKV(k, v, table, length), blocks


def parted(blocks, missed):
    """Lists without their last `missed` blocks, and lists, as wide as `blocks`, of those; the rest is padding."""
    import torch

    late = torch.arange(blocks.shape[2], device=blocks.device) >= blocks.shape[2] - missed
    return blocks.masked_fill(late, -1), blocks.masked_fill(~late, -1).flip(2).contiguous()


def agree(what, ours, truth):
    """ValueError unless `ours` is `truth` within `DIFFERENCE` of its largest number."""
    for part, own, right in zip(("out", "lse"), ours, truth, strict=True):
        error = ((own - right).abs().max() / right.abs().max()).item()
        if not error <= DIFFERENCE:
            raise ValueError(f"{what}: {part} is {error:g} of its largest off the reference; no time is given")


def natural(found, like):
    """FlashInfer's (out, lse in base 2) as a Partial of the shapes of `like`."""
    return type(like)(found[0].float().view(like.out.shape), found[1].float().view(like.lse.shape) * math.log(2))


def planned_decode(q, kv, blocks, *, tensor_cores):
    """FlashInfer's decode over the lists, planned -> its plan, and its run. Each KV head is a request of its own: page
    p of head g is page p * G + g of a cache of one head."""
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    pages, kv_heads, size, dim = kv.k.shape
    batch, group = q.shape[0], q.shape[1] // kv_heads
    requests, device = batch * kv_heads, q.device
    head = torch.arange(kv_heads, device=device)[None, :, None]
    listed = kv.page_table.gather(1, blocks.flatten(1).long()).view(blocks.shape) * kv_heads + head
    start = blocks.shape[2] * torch.arange(requests + 1, dtype=torch.int32, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "HND",
                                                 use_tensor_cores=tensor_cores)
    full = torch.full((requests,), size, dtype=torch.int32, device=device)
    plan = partial(wrapper.plan, start, listed.flatten().int(), full, group, 1, dim, size, q_data_type=q.dtype,
                   kv_data_type=kv.k.dtype)
    cache = tuple(x.view(pages * kv_heads, 1, size, dim) for x in (kv.k, kv.v))
    plan()
    return plan, partial(wrapper.run, q.view(requests, group, dim), cache, return_lse=True)


def block_sparse(q, kv, blocks):
    """FlashInfer's block-sparse attention over one sequence's list, planned -> its plan, and its run. It needs a cache
    in the order of tokens, heads inside."""
    import torch
    from flashinfer import BlockSparseAttentionWrapper

    k, v = (x[kv.page_table[0].long()].transpose(1, 2).flatten(0, 1).contiguous() for x in (kv.k, kv.v))
    wrapper = BlockSparseAttentionWrapper(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device))
    start = torch.tensor([0, blocks.shape[2]], dtype=torch.int32, device=q.device)
    plan = partial(wrapper.plan, start, blocks[0, 0].contiguous(), 1, k.shape[0], 1, kv.k.shape[2], q.shape[1],
                   k.shape[1], q.shape[2], q_data_type=q.dtype, kv_data_type=k.dtype, o_data_type=q.dtype)
    plan()
    return plan, partial(wrapper.run, q, k, v, return_lse=True)


def machine(place):
    """What the manifest says of the machine and of what is installed."""
    import numpy
    import torch
    import triton

    found = {"python": platform.python_version(), "os": platform.platform(), "torch": torch.__version__,
             "triton": triton.__version__, "numpy": numpy.__version__, "cuda": torch.version.cuda, "flashinfer": None,
             "device": "cpu", "driver": None}
    if importlib.util.find_spec("flashinfer"):
        found["flashinfer"] = importlib.import_module("flashinfer").__version__
    if place.device == "cuda":
        device = torch.cuda.get_device_properties(0)
        found |= {"device": device.name, "capability": f"{device.major}.{device.minor}",
                  "memory_bytes": device.total_memory, "multiprocessors_count": device.multi_processor_count,
                  "driver": _driver()}
    return found


def _driver():
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or None


def main(arguments=None):
    """Times every case on this machine's GPU, into a CSV and a manifest beside it."""
    parser = argparse.ArgumentParser(prog="python -m artifact.kernels.timing", description=main.__doc__)
    parser.add_argument("--out", type=Path, help="the CSV; on stdout when not given")
    parser.add_argument("--only", nargs="+", choices=("decode", "batch", "repair", "table3"), help="all unless given")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, tiny, interpreted, without times")
    asked = parser.parse_args(arguments)
    if asked.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    if not asked.dry_run and not torch.cuda.is_available():
        print(f"timing: torch {torch.__version__} finds no CUDA device; --dry-run needs none", file=sys.stderr)
        return 2
    place, found = Dry() if asked.dry_run else Gpu(), []
    wanted = [case for case in cases(asked.dry_run) if not asked.only or case.study in asked.only]
    try:
        for row in rows(place, wanted):
            found.append(row)
            told = row["skipped"] or f"{row['time_us']:.1f} us"
            print(f"{row['study']} {row['side']}, {row['method']}: {told}", file=sys.stderr)
    except ValueError as error:
        print(f"timing: {error}", file=sys.stderr)
        return 1
    write(found, asked.out, place)
    return 0


def write(found, out, place):
    """The rows as CSV and what measured them as JSON; `out` None: the CSV alone, on stdout."""
    draft = out and out.with_name(f".{out.name}.tmp")
    with open(draft, "w", newline="") if out else sys.stdout as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    if out:
        here = Path(__file__).parent
        sources = {path.name: _digest(path) for path in sorted(here.glob("*.py"))}
        told = {"seed": SEED, "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "dry_run": place.device == "cpu", **machine(place), "warm_up_count": WARM_UP, "repeats_count": REPEATS,
                "flush_bytes": FLUSH_BYTES, "sources": sources,
                "files": {out.name: {"bytes": draft.stat().st_size, "sha256": _digest(draft)}}}
        os.replace(draft, out)
        out.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
