"""`artifact gpu profile`: how long the stages and the steps of a layer take on this GPU, into data/stage_times.

`python -m artifact.study.gpu_profile` from a checkout does the same where nothing is installed but torch 2.11 or newer,
Triton and NumPy; FlashInfer is used where it is installed. Layers have the shape of GLM-4-9B and of Llama-3-8B, random
weights, keys and values in bfloat16, one sequence of 16K to 512K tokens. What is selected follows the scores of our
recorded traces (`artifact.dsa.replay`), so that predictions hit and miss as they do there. For each model two files:

DEVICE_MODEL.csv        the stages that `artifact.study.stage_times` describes, each a graph of its own. Attention over
                        A, serial DSA's, is FlashInfer's decode, planned once; without FlashInfer it is this artifact's
steps_DEVICE_MODEL.csv  whole layers, projections to FFN, each one graph: dense attention; serial DSA, by FlashInfer and
                        by the faster kernel; S1 and S2; PRR, union and exact, on two streams (`artifact.prr.graph`),
                        with as many blocks as the stages just timed leave room for

No time is taken of attention that is not the reference's in float64, nor of a step that is not DSA's or, of union,
the reference's. It stops before `LIMIT_S`; contexts left out by then are named. `--dry-run` goes the same way at toy
size on a CPU, with Triton's interpreter, times nothing, and marks every row so.

Selection is the method's score kernel and the one of top-k among torch's own small ones (the newest key, masks): one
fused kernel would leave less to hide. Timed nowhere yet: on a GPU this has not run.
"""

import argparse
import csv
import hashlib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import artifact

ROOT = Path(__file__).resolve().parents[2]
if importlib.util.find_spec("artifact.kernels") is None:  # not installed: the folder beside this package stands for it
    artifact.__path__.append(str(ROOT))

FOLDER = ROOT / "data" / "stage_times"
MODELS = ("GLM-4-9B-1M", "Llama3-8B-1M")
CONTEXTS = (16384, 32768, 65536, 131072, 262144, 524288)
RATIOS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # |P| / |A|
MISSED = (0.0, 0.1, 0.25, 0.5, 1.0)  # |M| / |A|
THETA = (0.6, 0.3, 0.25)  # one for all: what a theta is worth is notebook 03's
STEPS = 160  # room for more tokens than all repeats of a step take
WARM_ROWS, SEED, LIMIT_S = 32, 0, 510
STAGE_COLUMNS = ("device", "model", "method", "page_tokens", "budget_count", "context_tokens", "stage",
                 "attended_ratio", "time_us", "time_us_p20", "time_us_p80", "skipped", "source", "origin")
STEP_COLUMNS = ("device", "model", "method", "page_tokens", "budget_count", "context_tokens", "way", "predicted_ratio",
                "coverage_frac", "time_us", "time_us_p20", "time_us_p80", "skipped", "source", "origin")
_PROGRAMS = 264  # two for each of an H100's multiprocessors, as `artifact.kernels.decode` splits for
DRY = "dry run"
OURS, THEIRS = "this artifact's kernels", "FlashInfer's decode, planned once"


class Shape(NamedTuple):
    """A layer: hidden and FFN width, query heads, KV heads, channels of a head."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int


class Cell(NamedTuple):
    """What is timed together: one method on one model's layer at one context."""

    model: str
    shape: Shape
    name: str
    method: object
    context: int
    ratios: tuple[float, ...] = RATIOS
    missed: tuple[float, ...] = MISSED


def cells(tiny: bool = False, models: Sequence[str] = MODELS, contexts: Sequence[int] = CONTEXTS) -> list[Cell]:
    """All cells, model by model and each model's shortest contexts first; at toy size one context of each."""
    from artifact.dsa.infllm import InfLLM
    from artifact.dsa.quest import Quest
    from artifact.dsa.replay import METHODS
    from artifact.models import registry

    if tiny:
        methods = {"quest": Quest(page=16, budget_blocks=4, dense_layers=0),
                   "infllm": InfLLM(block=32, local=1, topk=3, dense_len=-1)}
        toy = {"GLM-4-9B-1M": Shape(32, 48, 4, 1, 16), "Llama3-8B-1M": Shape(32, 64, 4, 2, 16)}
        return [Cell(model, toy[model], name, method, 256, (0.5, 1.0, 1.5), (0.0, 0.5)) for model in models
                for name, method in methods.items()]
    found = []
    for model in models:
        one = registry.shape(model)
        shape = Shape(one.hidden, one.ffn, one.heads, one.kv_heads, one.head_dim)
        found += [Cell(model, shape, name, method, context) for context in contexts
                  for name, method in METHODS.items()]
    return found


class Layer:
    """One layer's weights, cache, metadata and replayed scores on a device, and its stages as calls."""

    def __init__(self, cell: Cell, device: str, impl: str) -> None:
        import torch

        from artifact.dsa import replay
        from artifact.ops import PagedKV
        from artifact.prr import decode, graph

        shape, self.cell, self.device, self.impl = cell.shape, cell, device, impl
        draw = torch.Generator(device).manual_seed(SEED)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def normal(*size, scale=1.0):
            return torch.randn(size, generator=draw, device=device, dtype=dtype) * scale

        wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.x = normal(1, shape.hidden)
        self.norms = [torch.ones(shape.hidden, device=device, dtype=dtype) for _ in range(2)]
        self.qkv, self.out = (normal(b, a, scale=a**-0.5) for a, b in ((shape.hidden, wide), (
            shape.heads * shape.head_dim, shape.hidden)))
        self.up, self.down = (normal(b, a, scale=a**-0.5) for a, b in ((shape.hidden, 2 * shape.ffn), (
            shape.ffn, shape.hidden)))
        size = cell.method.block
        self.blocks = -(-(cell.context + STEPS) // size)
        k, v = (normal(self.blocks, shape.kv_heads, size, shape.head_dim) for _ in range(2))
        table = torch.randperm(self.blocks, generator=draw, device=device).int()[None]
        length = torch.tensor([cell.context], dtype=torch.int32, device=device)
        self.kv = PagedKV(k, v, table, length + 1)
        self.q = normal(1, shape.heads, shape.head_dim)
        scores = replay.table(_sources(cell.method, 1 if device == "cpu" else 0), shape.kv_heads, self.blocks,
                              replay.live(cell.method, self.blocks))
        self.method = replay.Replayed(cell.method, scores.to(device),
                                      torch.tensor([cell.context - WARM_ROWS], device=device))
        keys = k[table[0].long()].transpose(0, 1).flatten(1, 2)[None, :, :cell.context]
        self.metadata = cell.method.room(cell.method.summarize(keys), self.blocks)
        self.graph, self.decode = graph, decode

    def plan(self, mode: str, fidelity: str = "union", ratio: float = 1.0):
        """A plan of the layer's own method."""
        return self.decode.Plan(mode, fidelity, self.method, ratio, THETA, self.impl)

    def held(self, plan):
        """What a step of the plan holds after the context, warmed up by the rows before it."""
        import torch

        from artifact import ops
        from artifact.prr.decode import State
        from artifact.prr.predictor import EmaState, Theta

        theta = Theta(*THETA) if plan.mode == "prr" else self.graph.LAST
        held = self.graph.begin(plan, State(self.metadata, None, None), self.blocks, 2, self.device)
        level, trend = held.ema
        for back in range(WARM_ROWS, 0, -1):
            length = torch.tensor([self.cell.context - back + 1], device=self.device)
            forced = self.method.forced(length, self.blocks)[:, None]
            known = torch.arange(self.blocks, device=self.device) * self.cell.method.block < length[:, None]
            row = (length - self.method.start) % len(self.method.table)
            scores = self.method.table[row].masked_fill(forced | ~known[:, None], -torch.inf)
            level, trend, _ = ops.ema_step(level, trend, scores, theta, impl="reference")
        return held._replace(ema=EmaState(level, trend))

    def before(self):
        """Norm and projections -> q [1, H, D]. The key and value go where they would: over random ones of the cache."""
        import torch

        x = torch.nn.functional.rms_norm(self.x, self.x.shape[-1:], self.norms[0]) @ self.qkv.T
        shape = self.cell.shape
        q, k, v = x.split([shape.heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2], 1)
        at = (self.kv.length - 1).long()
        page = self.kv.page_table[0].long()[at // self.cell.method.block]
        for room, new in ((self.kv.k, k), (self.kv.v, v)):
            room[page, :, at % self.cell.method.block] = new.view(1, shape.kv_heads, shape.head_dim)
        return q.view(1, shape.heads, shape.head_dim)

    def after(self, out):
        """Output projection, norm and gated FFN of attention's result fp32 [1, H, D]."""
        import torch

        x = self.x + out.flatten(1).to(self.x.dtype) @ self.out.T
        gate, up = (torch.nn.functional.rms_norm(x, x.shape[-1:], self.norms[1]) @ self.up.T).chunk(2, 1)
        return x + (torch.nn.functional.silu(gate) * up) @ self.down.T

    def lists(self, count: int):
        """A different `count` of blocks for each KV head, int32 [1, G, count], all whole ones."""
        import torch

        draw = torch.Generator(self.device).manual_seed(SEED)
        whole = self.cell.context // self.cell.method.block
        return torch.stack([torch.randperm(whole, generator=draw, device=self.device)[:count].sort().values
                            for _ in range(self.cell.shape.kv_heads)])[None].int()


@cache
def _sources(method, count):
    """Scores of the first `count` recorded traces (0: of all), as `replay.table` takes them."""
    from artifact.dsa import replay
    from artifact.models import trace

    files = [ROOT / "data" / "traces" / line["file"] for line in trace.index(ROOT / "data" / "traces")]
    return replay.sources([trace.read(file) for file in files[:count or None]], method, impl="reference")


class Timer:
    """`timing.Gpu` or `timing.Dry`, and steps as graphs of their own: `timing`'s are of one stream."""

    def __init__(self, place):
        self.place, self.device = place, place.device

    def stage(self, call):
        """The Spent of a stage as a graph."""
        return self.place.spent("", "graph", call)

    def step(self, call):
        """The Spent of a whole step, `call` of a `both`, as a graph over two streams."""
        from artifact.prr import graph, overlap

        if self.device == "cpu":
            return self.place.spent("", "graph", partial(call, overlap.in_turn))
        try:
            run = graph.Captured(call)
        except RuntimeError as error:
            return self._skipped(error)
        return self.place.spent("", "eager", run)  # the replay of a graph, and nothing beside it

    @staticmethod
    def _skipped(error):
        from artifact.kernels import timing

        return timing.Spent("", "graph", skipped=f"not captured as a graph: {str(error).splitlines()[0]}")


def stages(timer: Timer, layer: Layer) -> Iterator[dict]:
    """The rows of a cell's stages, as dicts of stage, attended_ratio, source and the Spent."""
    from artifact import ops
    from artifact.kernels import reference, timing

    cell, kv, q, impl = layer.cell, layer.kv, layer.q, layer.impl
    plan = layer.plan("dsa")
    held, budget = layer.held(plan), cell.method.budget_blocks
    yield _row("qkv", None, timer.stage(layer.before))
    yield _row("selection", None, timer.stage(partial(layer.graph.select, plan, q, kv, held)))
    listed = layer.lists(budget)
    truth = reference.attend(q.double(), kv, listed)
    call, source = _attention(layer, listed, truth)
    yield _row("attention", 1.0, timer.stage(call), source)
    timing.agree(f"{cell.name} at {cell.context}: attention", ops.attend(q, kv, listed, impl=impl), truth)
    dynamic = budget - cell.method.most_forced
    for ratio in cell.ratios:
        some = layer.lists(min(cell.context // cell.method.block, round(dynamic * ratio) + cell.method.most_forced))
        yield _row("speculation", ratio, timer.stage(partial(ops.attend, q, kv, some, impl=impl,
                                                             parts=parts(layer, some.shape[2]))))
    for missed in cell.missed:
        known, late = timing.parted(listed, round(budget * missed))
        state = ops.attend(q, kv, known, impl=impl)
        call = partial(ops.repair, state, q, kv, late, impl=impl)
        timing.agree(f"{cell.name} at {cell.context}: repair of {missed:g}", call(), truth)
        yield _row("repair", missed, timer.stage(call))
    yield _row("ffn", None, timer.stage(partial(layer.after, truth.out.float())))


def steps(timer: Timer, layer: Layer, ratio: float) -> Iterator[dict]:
    """The rows of a cell's whole steps, as dicts of way, predicted_ratio, coverage_frac, source and the Spent."""
    from artifact import ops

    _compared(layer, ratio)

    def dense(both):
        return layer.after(ops.dense(layer.before(), layer.kv, impl=layer.impl).out)

    yield {"way": "dense", **_told(timer.step(dense))}
    yield {"way": "serial DSA", **_planned(timer, layer)}
    ways = (("serial DSA, faster kernel", layer.plan("dsa"), 1.0), ("S1", layer.plan("reuse", "exact"), 1.0),
            ("S2", layer.plan("repair"), 1.0), ("PRR, union", layer.plan("prr", "union", ratio), ratio),
            ("PRR, exact", layer.plan("prr", "exact", ratio), ratio))
    for way, plan, share in ways:
        spent, covered = _stepped(timer, layer, plan)
        predicts = plan.mode != "dsa"
        yield {"way": way, "predicted_ratio": share if predicts else None,
               "coverage_frac": covered if predicts else None, **_told(spent)}


def fitting(rows: Sequence[dict]) -> float:
    """The largest of the ratios timed whose speculation took no longer than selection; the smallest when none did, or
    when nothing was timed."""
    times = {row["attended_ratio"]: row["time_us"] for row in rows if row["stage"] == "speculation"}
    window = next(row["time_us"] for row in rows if row["stage"] == "selection")
    fits = [ratio for ratio, took in times.items() if None not in (took, window) and took <= window]
    return max(fits, default=min(times))


def parts(layer: Layer, slots: int) -> int:
    """Into how many a speculated list is split: half as many programs as would fill a GPU, the rest is selection's."""
    return max(1, min(slots, _PROGRAMS // 2 // layer.cell.shape.kv_heads))


def _attention(layer, listed, truth):
    """Serial DSA's attention over a list, and whose it is."""
    from artifact import ops
    from artifact.kernels import timing

    if layer.device == "cuda" and importlib.util.find_spec("flashinfer"):
        try:
            _, run = timing.planned_decode(layer.q, layer.kv, listed, tensor_cores=True)
            timing.agree("FlashInfer", timing.natural(run(), truth), truth)
            return run, THEIRS
        except Exception as error:  # another library's, which may want a compiler or another GPU
            print(f"gpu profile: FlashInfer: {type(error).__name__}: {error}", file=sys.stderr)
    return partial(ops.attend, layer.q, layer.kv, listed, impl=layer.impl), OURS


def _planned(timer, layer):
    """Serial DSA by FlashInfer's decode: planned once for as many blocks, its list of pages written in the graph."""
    import torch

    from artifact.kernels import timing

    if layer.device != "cuda" or importlib.util.find_spec("flashinfer") is None:
        why = "a dry run has no FlashInfer" if layer.device != "cuda" else "FlashInfer is not installed: `make gpu`"
        return {"time_us": None, "skipped": why, "source": THEIRS}
    shape, plan, size = layer.cell.shape, layer.plan("dsa"), layer.cell.method.block
    held, group = layer.held(plan), shape.heads // shape.kv_heads
    try:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        each = layer.cell.method.budget_blocks
        of = {"dtype": torch.int32, "device": layer.device}
        start = each * torch.arange(shape.kv_heads + 1, **of)
        pages, full = torch.zeros(each * shape.kv_heads, **of), torch.full((shape.kv_heads,), size, **of)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(timing.WORKSPACE_BYTES, dtype=torch.uint8, device=layer.device), "HND", use_cuda_graph=True,
            use_tensor_cores=True, paged_kv_indptr_buffer=start.clone(), paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=full.clone())
        wrapper.plan(start, pages.clone(), full, group, 1, shape.head_dim, size, q_data_type=layer.q.dtype,
                     kv_data_type=layer.kv.k.dtype)
        cache = tuple(x.view(-1, 1, size, shape.head_dim) for x in (layer.kv.k, layer.kv.v))
        head = torch.arange(shape.kv_heads, device=layer.device)[None, :, None]

        def serial(both):
            q = layer.before()
            *_, selected = layer.graph.select(plan, q, layer.kv, held)
            page = layer.kv.page_table.gather(1, selected.flatten(1).long()).view(selected.shape)
            pages.copy_((page * shape.kv_heads + head).flatten())
            out = wrapper.run(q.view(shape.kv_heads, group, shape.head_dim), cache)
            return layer.after(out.view(1, shape.heads, shape.head_dim).float())

        return {**_told(timer.step(serial)), "source": THEIRS}
    except Exception as error:  # another library's, which may want a compiler or another GPU
        return {"time_us": None, "skipped": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
                "source": THEIRS}


def _stepped(timer, layer, plan):
    """The Spent of a plan's whole step, and what share of the blocks selected, without forced ones, was foreseen."""
    import torch

    held, kv = layer.held(plan), layer.kv
    kv.length.fill_(layer.cell.context)
    count = layer.graph.guesses(plan, torch.tensor([layer.cell.context])).to(layer.device)
    most, sums = int(count.max()), torch.zeros(2, dtype=torch.int64, device=layer.device)
    forced = layer.cell.method.most_forced * layer.cell.shape.kv_heads

    def step(both):
        kv.length.add_(1)
        out, counts = layer.graph.step(plan, layer.before(), kv, held, count, most, both,
                                       parts(layer, most + layer.cell.method.most_forced))
        sums.add_(torch.stack([counts.missed.sum(), counts.selected.sum() - forced]))
        return layer.after(out)

    spent = timer.step(step)
    missed, wanted = sums.tolist()
    kv.length.fill_(layer.cell.context + 1)
    return spent, 1 - missed / wanted if wanted else None


def _compared(layer, ratio):
    """ValueError unless one step of every way is what it should be: S1, S2's and PRR's exact one DSA, union what the
    reference makes of the blocks that were attended to."""
    import torch

    from artifact.kernels import timing

    kv, q = layer.kv, layer.q
    count = {share: layer.graph.guesses(layer.plan("prr", ratio=share), torch.tensor([layer.cell.context])).to(
        layer.device) for share in (1.0, ratio)}

    def one(mode, fidelity, share):
        plan = layer.plan(mode, fidelity, share)
        return layer.graph.step(plan, q, kv, layer.held(plan), count[share], int(count[share].max()))[0]

    direct = one("dsa", "union", 1.0)
    for mode, fidelity, share in (("reuse", "exact", 1.0), ("repair", "exact", 1.0), ("prr", "exact", ratio)):
        error = ((one(mode, fidelity, share) - direct).abs().max() / direct.abs().max()).item()
        if not error <= timing.DIFFERENCE:
            raise ValueError(f"{layer.cell.name} at {layer.cell.context}: {mode}, exact, is {error:g} of the largest "
                             "number off DSA; no time is given")
    union, right = (_union(layer, impl, count[ratio], ratio) for impl in (layer.impl, "reference"))
    error = ((union - right).abs().max() / right.abs().max()).item()
    if not error <= timing.DIFFERENCE:
        raise ValueError(f"{layer.cell.name} at {layer.cell.context}: union is {error:g} of the largest number off the "
                         "reference; no time is given")


def _union(layer, impl, count, ratio):
    plan = layer.decode.Plan("prr", "union", layer.method, ratio, THETA, impl)
    return layer.graph.step(plan, layer.q, layer.kv, layer.held(plan), count, int(count.max()))[0]


def _row(stage, ratio, spent, source=OURS):
    return {"stage": stage, "attended_ratio": ratio, **_told(spent), "source": source}


def _told(spent):
    return {"time_us": spent.time_us, "time_us_p20": spent.time_us_p20, "time_us_p80": spent.time_us_p80,
            "skipped": spent.skipped, "source": OURS}


def measured(place, asked: Sequence[Cell], limit_s: float, say=print) -> Iterator[tuple[str, list[dict], list[dict]]]:
    """Model by model its stages' and steps' rows, without columns that are the same in all. Cells that would begin
    after `limit_s` are left out, which `say` is told."""
    began, timer = time.monotonic(), Timer(place)
    impl = "triton"
    for model in dict.fromkeys(cell.model for cell in asked):
        found, whole = [], []
        for cell in [cell for cell in asked if cell.model == model]:
            where = f"{model}, {cell.name} at {cell.context}"
            if time.monotonic() - began > limit_s:
                say(f"{where}: left out, {limit_s:g} s are over")
                continue
            same = {"model": model, "method": cell.name, "page_tokens": cell.method.block,
                    "budget_count": cell.method.budget_blocks, "context_tokens": cell.context}
            layer = Layer(cell, place.device, impl)
            rows = list(stages(timer, layer))
            right = fitting(rows)
            lacking = [row for row in rows if row["time_us"] is None]
            if lacking and place.device != "cpu":
                say(f"{where}: left out, {lacking[0]['stage']} has no time: {lacking[0]['skipped']}")
                continue
            found += [same | row for row in rows]
            whole += [same | row for row in steps(timer, layer, right)]
            say(f"{where}: {len(rows)} stages, |P| = {right:g} |A|")
            del layer
        yield model, found, whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Times the stages and steps of a layer on this GPU, into two CSVs a model with a manifest beside each."""
    parser = argparse.ArgumentParser(prog="python -m artifact.study.gpu_profile", description=main.__doc__)
    parser.add_argument("--out", type=Path, help="a folder instead of data/stage_times, or of one model the CSV")
    parser.add_argument("--model", nargs="+", default=(), help=f"{' and '.join(MODELS)} unless given")
    parser.add_argument("--context", nargs="+", type=int, default=(), help="tokens, 16K to 512K unless given")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which no context is begun")
    parser.add_argument("--dry-run", action="store_true", help="one model at toy size, interpreted on a CPU, no times")
    asked = parser.parse_args(arguments)
    try:
        for path in run(out=asked.out, models=asked.model, contexts=asked.context, limit=asked.limit,
                        dry=asked.dry_run):
            print(path)
    except ValueError as error:
        print(f"gpu profile: {error}", file=sys.stderr)
        return 2
    return 0


def run(*, out: Path | None = None, models: Sequence[str] = (), contexts: Sequence[int] = (), limit: float = LIMIT_S,
        dry: bool = False) -> list[Path]:
    """`artifact gpu profile` -> the CSVs written. ValueError, one line, for what it cannot take and without a GPU."""
    for name, given, allowed in (("model", models, MODELS), ("context", contexts, CONTEXTS)):
        for one in given:
            if one not in allowed:
                raise ValueError(f"{name} is {one}; allowed: {', '.join(map(str, allowed))}")
    models = list(dict.fromkeys(models)) or list(MODELS[:1] if dry else MODELS)
    contexts = sorted(set(contexts)) or list(CONTEXTS)
    alone = out is not None and Path(out).suffix == ".csv"
    if alone and len(models) > 1:
        raise ValueError(f"{out}: one file for {len(models)} models; allowed: a folder, or a file for one --model")
    if not dry and len(contexts) < 3:
        raise ValueError(f"contexts are {len(contexts)}; allowed: at least 3, of which a budget is fitted")
    if not limit > 0:
        raise ValueError(f"limit is {limit:g}; allowed: above 0 s")
    if dry and (out is None or (Path(out).parent if alone else Path(out)).resolve() == FOLDER):
        raise ValueError("a dry run's rows are no stage times; say --out with another place than data/stage_times")
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    if not dry and not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} finds no CUDA device; --dry-run needs none")
    from artifact.kernels import decode, timing

    if dry and not decode.INTERPRETED:
        raise ValueError("Triton was imported before the dry run; run it in a process of its own")
    place, origin, written = timing.Dry() if dry else timing.Gpu(), DRY if dry else "measured", []
    facts = timing.machine(place)
    device = f"{DRY} on a CPU" if dry else facts["device"]
    for model, found, whole in measured(place, cells(dry, models, contexts), limit,
                                        say=lambda line: print(line, file=sys.stderr, flush=True)):
        if not found:
            continue
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device} {model}").strip("-").lower()
        path = Path(out) if alone else Path(out or FOLDER) / f"{name}.csv"
        same = {"device": device, "origin": origin}
        for each, columns, rows in ((path, STAGE_COLUMNS, found),
                                    (path.with_name(f"steps_{path.name}"), STEP_COLUMNS, whole)):
            write(each, columns, [row | same for row in rows], facts, device, model, origin)
            written.append(each)
    return written


def write(path: Path, columns: Sequence[str], rows: list[dict], facts: dict, device: str, model: str,
          origin: str) -> None:
    """Rows as CSV, and the manifest that `artifact.study.stage_times` wants beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.tmp")
    with open(draft, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    versions = {name: str(facts[name]) for name in ("python", "torch", "triton", "numpy", "cuda", "flashinfer")
                if facts.get(name)}
    told = {"what": f"one layer of {model}'s shape, random weights, batch 1, bfloat16, medians of "
                    f"{len(rows)} rows' CUDA graphs", "device": device, "per": "layer", "origin": origin,
            "source": "artifact gpu profile", "driver": str(facts.get("driver")), "versions": versions,
            "command": "artifact gpu profile" + (" --dry-run" if origin == DRY else ""),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "sha256": hashlib.sha256(draft.read_bytes()).hexdigest()}
    os.replace(draft, path)
    path.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
