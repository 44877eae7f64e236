"""A decode step as it runs on this machine's CPU: in turn, with both cores on each operator, and overlapped.

The step is `artifact.prr.decode.step` over random keys and values at the shape of a model's layers. What is selected
follows the scores of our recorded traces (`artifact.dsa.replay`), so that the prediction covers what it covers there.
All ways of a setting take turns in one process; before a time is given, overlapped steps are the bits of those in
turn, and PRR's exact mode and DSA on two cores are DSA to rounding. Times are of the attention path, selection to the
result; projections and FFN, the same in every way, are not in them.

The fair rival of two overlapped threads is DSA with both cores on each operator: half of the KV heads on each.

Two times are taken of a step. `wall`: by the clock; on a machine with other work it tells of that work, too. `busy`: by
the threads' own CPU time, where two run beside each other that of the longer one. What a thread waits, for a core, for
the other thread or for the interpreter, is not in it, which flatters all that runs on two threads; speed-ups are of
`busy`.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from artifact.dsa import replay
from artifact.dsa.replay import METHODS
from artifact.models import registry
from artifact.models import trace as traces
from artifact.ops import PagedKV
from artifact.prr import decode, overlap
from artifact.prr.decode import Plan
from artifact.prr.predictor import Theta
from artifact.study import experiments, prediction
from artifact.study.scale import Scale

MODELS = ("Llama3-8B-1M", "GLM-4-9B-1M")
RATIOS = (1.0, 1.5)
THETA = Theta(0.6, 0.3, 0.25)  # one for all; what calibration adds is notebook 03's
WARM_ROWS, WARM_UP = 32, 3
SERIAL, HALVES, OVERLAPPED = "in turn", "heads in halves", "overlapped"
DIFFERENCE = 5e-6  # of the largest number: sums in another order
_LAYER = 2  # past those that a method may leave dense


class Setting(NamedTuple):
    """What one group of rows is of: a model's layers, B sequences of up to `context_tokens`."""

    model: str
    method: str
    context_tokens: int
    layers_count: int = 1
    batch_count: int = 1


class _Way(NamedTuple):
    name: str
    plan: Plan
    run: str  # SERIAL, HALVES or OVERLAPPED

    @property
    def threads(self):
        return 1 if self.run == SERIAL else 2


def settings(size: Scale) -> list[Setting]:
    """One layer of each model at each context; at the shortest also a stack of layers and a batch, ragged."""
    shortest = min(size.runtime_tokens)
    found = [Setting(model, method, context) for model in MODELS[:size.runtime_models]
             for context in size.runtime_tokens for method in METHODS]
    found += [Setting(MODELS[0], method, shortest, layers_count=size.runtime_layers) for method in METHODS]
    return found + [Setting(MODELS[0], method, shortest, batch_count=4) for method in METHODS]


def measured(size: Scale) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`timed` of every setting of a scale; of our recorded run, origin `recorded`, where a scale asks for no rounds."""
    if not size.runtime_rounds:
        return tuple(experiments.recorded("06_runtime", name).assign(origin="recorded")
                     for name in ("running.timing.csv", "running_stages.timing.csv"))
    both = [timed(setting, size.runtime_rounds, size.seed) for setting in settings(size)]
    return tuple(pd.concat(parts, ignore_index=True) for parts in zip(*both, strict=True))


def timed(setting: Setting, rounds: int, seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One setting's steps and stages, origin `measured`.

    steps: a row per way. busy_us, wall_us: medians of `rounds` steps, and the shortest; one_ratio, two_ratio: how much
    faster than DSA on one thread and on both cores, by the shortest busy time; coverage_frac: |P and A| / |A| without
    blocks that are always attended, of the steps timed. stages: a row per way of PRR and stage, median CPU times when
    they run in turn and beside each other. ValueError when two ways differ in what they compute.
    """
    shape = registry.shape(setting.model)
    method = METHODS[setting.method]
    layers = [_Layer(setting, shape, method, rounds + WARM_UP, seed + i) for i in range(setting.layers_count)]
    ways = [_Way("DSA", Plan("dsa", method=layers[0].method), SERIAL),
            _Way("DSA", Plan("dsa", method=layers[0].method), HALVES)]
    ways += [_Way(f"PRR, {fidelity}", Plan("prr", fidelity, layers[0].method, ratio, THETA), run)
             for ratio in RATIOS for fidelity in decode.FIDELITIES for run in (SERIAL, OVERLAPPED)]
    spent, stages, counted = ({i: [] for i in range(len(ways))} for _ in range(3))
    with overlap.Threads() as threads:
        running = [[_Running(layer, way, threads) for layer in layers] for way in ways]
        random = np.random.default_rng(seed)
        for turn in range(WARM_UP + rounds):
            outs = {}
            for i in random.permutation(len(ways)).tolist():
                began = time.perf_counter()
                outs[i] = [one.step(turn) for one in running[i]]
                wall = time.perf_counter() - began
                if turn >= WARM_UP:
                    spent[i].append((wall, sum(one.busy for one in running[i])))
                    stages[i] += [one.stages for one in running[i]]
                    counted[i] += [one.happened for one in running[i]]
            _agree(setting, ways, outs)
    steps = _steps(setting, ways, spent, counted)
    return steps, _stages(setting, ways, stages)


def pays(steps: pd.DataFrame) -> pd.DataFrame:
    """Whether PRR pays: of each setting its quickest way, overlapped, against DSA; then of all settings, and by method.

    one_ratio, two_ratio: how much faster than DSA on one thread and on both cores, means geometric; faster_one_count,
    faster_two_count: settings where it is faster than that.
    """
    keys = list(Setting._fields)
    best = steps[steps["run"] == OVERLAPPED].sort_values("busy_us_min").groupby(keys, sort=False).head(1).sort_index()
    best = best.assign(settings_count=1, faster_one_count=(best["one_ratio"] > 1).astype(int),
                       faster_two_count=(best["two_ratio"] > 1).astype(int))
    counts = ["settings_count", "faster_one_count", "faster_two_count"]
    ratios = ["predicted_ratio", "coverage_frac", "one_ratio", "two_ratio"]
    rows = best[[*keys, "way", *ratios, *counts, "origin"]].to_dict("records")
    for method, part in [("all", best), *best.groupby("method", sort=False)]:
        rows.append({"model": "all", "method": method, "way": "the quickest", **part[counts].sum().to_dict(),
                     "coverage_frac": part["coverage_frac"].mean(), "one_ratio": _mean(part["one_ratio"]),
                     "two_ratio": _mean(part["two_ratio"]), "origin": part["origin"].iloc[0]})
    found = pd.DataFrame(rows)
    return found.astype({name: "Int64" for name in found if name.endswith(("_count", "_tokens"))})


def reasons(stages: pd.DataFrame) -> pd.DataFrame:
    """Why: of each setting, of PRR's union with |P| = |A|, what overlap could give at most and what is in its way.

    work_ratio: PRR's work, all on one thread, over DSA's. bound_ratio: DSA on one thread over the longer of selection
    and speculation, and the repair, as if neither slowed the other down. ideal_two_ratio: the same over half of DSA,
    the most that two cores can make of it. _slower_ratio: a stage's CPU time beside the other over alone.
    """
    chosen, rows = stages[(stages["way"] == "PRR, union") & (stages["predicted_ratio"] == 1)], []
    for key, part in chosen.groupby(list(Setting._fields), sort=False):
        alone, beside = (part.set_index("stage")[f"{run}_us"] for run in ("alone", "beside"))
        dsa, hidden = part["dsa_us"].iloc[0], max(alone["selection"], alone["speculation"]) + alone["repair"]
        rows.append({**dict(zip(Setting._fields, key, strict=True)), "selection_us": alone["selection"],
                     "speculation_us": alone["speculation"], "repair_us": alone["repair"], "dsa_us": dsa,
                     "work_ratio": alone[["selection", "speculation", "repair"]].sum() / dsa,
                     "bound_ratio": dsa / hidden, "ideal_two_ratio": (dsa / 2) / hidden,
                     "selection_slower_ratio": beside["selection"] / alone["selection"],
                     "speculation_slower_ratio": beside["speculation"] / alone["speculation"],
                     "origin": part["origin"].iloc[0]})
    return pd.DataFrame(rows)


def answer(paid: pd.DataFrame, why: pd.DataFrame) -> pd.DataFrame:
    """`pays` and `reasons` in words: whether PRR pays on this CPU, and why. One row per question."""
    whole = paid[(paid["model"] == "all") & (paid["method"] == "all")].iloc[0]
    settings = int(whole["settings_count"])

    def times(column, of=why):
        return f"{of[column].min():.2f} to {of[column].max():.2f} times"

    rows = [
        ("Is PRR, overlapped, faster than DSA on one thread?",
         f"in {whole['faster_one_count']} of {settings} settings; its speed is {whole['one_ratio']:.2f} of that"),
        ("... than DSA with both cores on each operator?",
         f"in {whole['faster_two_count']} of {settings}; its speed is {whole['two_ratio']:.2f} of that"),
        ("What would overlap give if nothing slowed down?",
         f"{times('bound_ratio')} the speed of DSA on one thread; {times('ideal_two_ratio')} that of DSA split evenly"),
        ("How much more work does PRR do?",
         f"{times('work_ratio')} DSA's: it attends to blocks that were not selected, and repairs"),
        ("How much longer do they take beside each other?",
         f"selection {times('selection_slower_ratio')} as long, speculation {times('speculation_slower_ratio')}"),
        ("Why?",
         "overlap pays where a core would idle; DSA's operators split over KV heads keep both busy with less work"
         if whole["two_ratio"] < 1 else "DSA's operators, split over KV heads, do not keep both cores as busy"),
    ]
    return pd.DataFrame(rows, columns=["question", "answer"]).assign(origin=whole["origin"])


@cache
def _sources(name):
    return replay.sources([traces.read(file) for file in prediction.shipped()], METHODS[name])


class _Layer:
    """One layer's cache, metadata before the first step, and what the ways have in common."""

    def __init__(self, setting, shape, method, steps, seed):
        draw = torch.Generator().manual_seed(seed)
        kv_heads, dim, longest = shape.kv_heads, shape.head_dim, setting.context_tokens
        self.lengths = torch.tensor([longest - b * longest // 8 for b in range(setting.batch_count)])
        blocks = -(-(longest + steps) // method.block)
        scores = replay.table(_sources(setting.method), kv_heads, blocks, replay.live(method, blocks))
        self.method = replay.Replayed(method, scores, self.lengths - WARM_ROWS)
        pages = setting.batch_count * blocks
        k, v = (torch.randn(pages, kv_heads, method.block, dim, generator=draw) for _ in range(2))
        pages = torch.randperm(pages, generator=draw).int().view(setting.batch_count, blocks)
        self.kv = PagedKV(k, v, pages, None)
        self.q = torch.randn(setting.batch_count, shape.heads, dim, generator=draw)
        keys = torch.stack([k[row.long()].transpose(0, 1).flatten(1, 2)[:, :longest] for row in pages])
        self.metadata = self.method.summarize(keys, self.lengths)

    def state(self, plan):
        """The state after the prompt, warmed up by the replayed rows before it."""
        metadata = type(self.metadata)(*(part.clone() for part in self.metadata))
        blank = decode.begin(plan, self.kv.k.new_zeros(len(self.lengths), self.kv.k.shape[1], 0, self.kv.k.shape[3]),
                             torch.zeros(len(self.lengths), dtype=torch.int64))
        state = blank._replace(metadata=metadata)
        if plan.mode == "prr":
            rows = []
            for back in range(WARM_ROWS, 0, -1):
                past = metadata._replace(length=self.lengths - back + 1)
                rows.append(decode.select(plan, self.q, past, _LAYER)[0])
            widest = max(row.shape[2] for row in rows)
            state = decode.warm(plan, state, torch.stack([torch.nn.functional.pad(
                row, (0, widest - row.shape[2]), value=-torch.inf) for row in rows]), _LAYER)
        return state


class _Running:
    """One way through one layer, step by step: its state, and of the last step the CPU seconds and the counts."""

    def __init__(self, layer, way, threads):
        self.lengths, self.way, self.threads = layer.lengths, way, threads
        self.busy, self.stages, self.happened = None, None, None
        plan = replace(way.plan, method=layer.method)
        kv_heads = layer.kv.k.shape[1]
        cuts = [slice(0, kv_heads)] if way.run != HALVES else [slice(0, -(-kv_heads // 2)),
                                                               slice(-(-kv_heads // 2), kv_heads)]
        group = layer.q.shape[1] // kv_heads
        self.parts = []
        for cut in cuts:
            state = layer.state(plan)
            metadata = type(state.metadata)(*(part[:, cut].contiguous() if part.ndim > 1 else part
                                              for part in state.metadata))
            method = replace(layer.method, table=layer.method.table[:, cut].contiguous())
            kv = layer.kv._replace(k=layer.kv.k[:, cut], v=layer.kv.v[:, cut])
            q = layer.q[:, cut.start * group:cut.stop * group].contiguous()
            self.parts.append([replace(plan, method=method), q, kv, state._replace(metadata=metadata)])

    def step(self, turn):
        """One token -> attention fp32 [B, H, D]."""
        length = (self.lengths + turn + 1).int()
        clock = _Clock(overlap.in_turn if self.way.run == SERIAL else self.threads)
        began = time.thread_time()
        if self.way.run == HALVES:
            out = torch.cat(clock(lambda: self._part(0, length, overlap.in_turn),
                                  lambda: self._part(1, length, overlap.in_turn)), dim=1)
        else:
            out = self._part(0, length, clock)
        self.busy, self.stages = time.thread_time() - began, clock.seconds
        if self.way.run != SERIAL:  # the side's time is another thread's
            self.busy += sum(max(0.0, side - main) for main, side in zip(*[iter(self.stages)] * 2, strict=True))
        return out

    def _part(self, i, length, both):
        plan, q, kv, state = self.parts[i]
        out, self.parts[i][3], self.happened = decode.step(plan, q, kv._replace(length=length), state, _LAYER, both)
        return out


class _Clock:
    """`both`, and the CPU seconds of each of what it ran: selection, speculation; then the end, the update."""

    def __init__(self, both):
        self.both, self.seconds = both, []

    def __call__(self, main, side):
        times = {}

        def clocked(name, call):
            began = time.thread_time()
            made = call()
            times[name] = time.thread_time() - began
            return made

        made = self.both(lambda: clocked("main", main), lambda: clocked("side", side))
        self.seconds += [times["main"], times["side"]]
        return made


def _agree(setting, ways, outs):
    """ValueError unless overlapped steps are those in turn to the bit, and "exact" and halves are DSA to rounding."""
    truth = outs[0]
    for i, way in enumerate(ways):
        twin = next(j for j, other in enumerate(ways) if other.plan == way.plan and other.run == SERIAL)
        for own, right, same in zip(outs[i], truth, outs[twin], strict=True):
            if way.run == OVERLAPPED and not torch.equal(own, same):
                raise ValueError(f"{setting}: {way.name}, {way.run}, differs from in turn; no time is given")
            error = ((own - right).abs().max() / right.abs().max()).item()
            if "union" not in way.name and not error <= DIFFERENCE:
                raise ValueError(f"{setting}: {way.name}, {way.run}, is {error:g} of the largest number off DSA; no "
                                 "time is given")


def _steps(setting, ways, spent, counted):
    middle = [[1e6 * statistics.median(one) for one in zip(*spent[i], strict=True)] for i in range(len(ways))]
    least = [[1e6 * min(one) for one in zip(*spent[i], strict=True)] for i in range(len(ways))]
    rivals = {way.run: least[i][1] for i, way in enumerate(ways) if way.name == "DSA"}
    rows = []
    for i, way in enumerate(ways):
        covered = float("nan")
        if way.plan.mode == "prr":
            picked = sum(int((each.selected - each.certain).sum()) for each in counted[i])
            covered = 1 - sum(int(each.missed.sum()) for each in counted[i]) / picked
        rows.append({**setting._asdict(), "way": way.name, "run": way.run, "threads_count": way.threads,
                     "predicted_ratio": way.plan.speculation if way.plan.mode == "prr" else float("nan"),
                     "coverage_frac": covered, "busy_us": middle[i][1], "busy_us_min": least[i][1],
                     "wall_us": middle[i][0], "wall_us_min": least[i][0], "one_ratio": rivals[SERIAL] / least[i][1],
                     "two_ratio": rivals[HALVES] / least[i][1], "order_index": i})
    return pd.DataFrame(rows).assign(origin="measured")


def _stages(setting, ways, stages):
    medians = {i: [1e6 * statistics.median(one) for one in zip(*stages[i], strict=True)]
               for i, way in enumerate(ways) if way.run != HALVES}
    rows = []
    for i, way in enumerate(ways):
        if way.run != OVERLAPPED:
            continue
        twin = next(j for j, other in enumerate(ways) if other.plan == way.plan and other.run == SERIAL)
        for stage, alone, beside in zip(("selection", "speculation", "repair", "update"), medians[twin], medians[i],
                                        strict=True):
            rows.append({**setting._asdict(), "way": way.name, "predicted_ratio": way.plan.speculation, "stage": stage,
                         "alone_us": alone, "beside_us": beside, "dsa_us": medians[0][0] + medians[0][2],
                         "order_index": len(rows)})
    return pd.DataFrame(rows).assign(origin="measured")


def _mean(ratios: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios))))
