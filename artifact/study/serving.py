"""One cell of the serving study: requests through an allocator and an engine, and the bandwidth that is left."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from artifact.kv import allocators, engine, placement, requests
from artifact.pim import bandwidth, blocks, geometry, mapping, reads, streams, timing
from artifact.study import reduction

Count = Annotated[int, Field(ge=1, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
CHARGES = ("reads", "moves")


class Cell(BaseModel):
    """A configuration, checked as a whole; the defaults are the study's.

    `block_tokens` may be "derived": the block that is one region. `dram` and `model` are preset names or YAML files.
    `turn_tokens`: the batch is read in turns of so many tokens a sequence (None: each sequence alone). `charged`:
    "moves" also counts the token that each sequence writes and, as reads and writes at the run's own bandwidth, what
    speculation and compaction copy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    workload: Literal[requests.NAMES] = "steady"
    trace_file: str | None = None
    step_ms: Positive = 25.0
    allocator: Literal[allocators.NAMES] = "paged"
    address_map: str = "host-cacheline"
    block_tokens: Count | Literal["derived"] = 16
    requests: Count = 1000
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    model: str = "llama-gqa-8kv"
    dram: str = "hbm3-pim"
    max_batch: Count = 64
    headroom: Positive = 1.3
    pool_blocks: Count | None = None
    rate: Positive | None = None
    prompt_tokens: Count = 2048
    output_tokens: Count = 128
    admission: Literal[engine.ADMISSIONS] = "oracle"
    watermark: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.01
    coalesce: Literal[bandwidth.MODES] = "window"
    window: Count = 64
    kv_shards: Count = 1
    kv_split: bool = False
    base_bytes: Annotated[int, Field(ge=0, strict=True)] = 0
    block_layout: Literal[reads.LAYOUTS] = "token-major"
    turn_tokens: Count | None = None
    charged: Literal[CHARGES] = "reads"
    spec_width: Count = 4
    spec_depth: Count = 3
    spec_accept: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.8
    spec_adopt: Literal[engine.ADOPTS] = "auto"
    pim_scratch: Literal[engine.SCRATCHES] = "separate"
    pim_plan: Literal[allocators.PLANS] = "bestfit"
    pim_compact: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    preempt: Literal[engine.PREEMPTS] = "recompute"
    frees: Literal[allocators.FREES] = "ordered"
    sample_every: Count = 16
    sample_sequences: Count = 8

    def __init__(self, **given):
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ValueError(_one_line(error, type(self))) from None

    @field_validator("address_map")
    @classmethod
    def _map_is_read(cls, text):
        try:
            mapping.parse(text)
        except ValueError as error:
            raise ValueError(str(error).replace("unknown address map", "address_map is")) from None
        return text

    @model_validator(mode="after")
    def _fits_together(self):
        if (self.workload == "trace") != (self.trace_file is not None):
            raise ValueError("workload trace and trace_file go together; allowed: both or neither")
        if self.allocator == "contiguous" and self.admission == "vllm":
            raise ValueError(
                "allocator contiguous cannot run under vllm admission; allowed: oracle, since it needs final lengths"
            )
        if self.frees == "unordered" and self.allocator != "paged":
            raise ValueError(f"frees is 'unordered' with allocator {self.allocator}; allowed: with paged")
        if self.kv_split and self.kv_shards > 1:
            raise ValueError("kv_split with kv_shards above 1 is not defined; allowed: one of them")
        whole = {"turn_tokens": self.turn_tokens, "charged moves": self.charged == "moves"}
        for name, given in whole.items():
            if given and self.sample_sequences < self.max_batch:
                raise ValueError(f"{name} is about the whole batch, and sample_sequences is {self.sample_sequences}; "
                                 f"allowed: at least max_batch ({self.max_batch})")
        return self

    @cached_property
    def memory(self):
        """The PIM device one shard sees."""
        return _table(geometry.Dram, geometry.dram, self.dram).shard(self.kv_shards)

    @cached_property
    def shape(self):
        """The model shape one shard sees."""
        return _table(geometry.Shape, geometry.shape, self.model).shard(self.kv_shards)

    @property
    def token_bytes(self):
        """KV bytes of one token in one layer that lie together: K and V, or one of them when they are split."""
        return self.shape.kv_bytes_per_token // (2 if self.kv_split else 1)

    @property
    def tokens_per_block(self):
        if self.block_tokens == "derived":
            return geometry.derived_block_tokens(self.memory, self.token_bytes)
        return self.block_tokens

    @property
    def as_studied(self):
        """Whether sequences lie and are read as in the study (see `pim.reads`)."""
        return (self.base_bytes, self.block_layout, self.turn_tokens, self.charged) == (0, "token-major", None, "reads")

    @property
    def blocks_per_region(self):
        return geometry.blocks_per_region(self.memory, self.token_bytes, self.tokens_per_block)

    def load_requests(self):
        """The cell's requests, drawn or read."""
        if self.workload == "trace":
            return requests.read_trace(self.trace_file, step_ms=self.step_ms, limit=self.requests)
        return requests.generate(
            self.workload,
            self.requests,
            self.seed,
            rate=self.rate,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )

    def num_blocks(self, work):
        """Blocks of the pool for the requests `work`: what a full batch of mean requests needs, times the headroom."""
        blocks = self.pool_blocks
        if blocks is None:
            mean = int(work.total_tokens.mean())
            blocks = int(self.headroom * self.max_batch * -(-(mean + 1) // self.tokens_per_block))
        if blocks < self.blocks_per_region:
            raise ValueError(
                f"pool of {blocks} blocks is smaller than one region; allowed: at least {self.blocks_per_region} blocks"
            )
        smallest = -(-int(work.total_tokens.min()) // self.tokens_per_block)
        if blocks < smallest:
            raise ValueError(
                f"pool of {blocks} blocks is smaller than every request; allowed: at least {smallest} blocks"
            )
        return allocators.padded(self.allocator, blocks, self.blocks_per_region)


def _one_line(error, model):
    """The first complaint of a pydantic error as one sentence: name, value, what is allowed."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"unknown key {name!r}; allowed: {', '.join(model.model_fields)}"
    wanted = "; or ".join(
        dict.fromkeys(e["msg"].removeprefix("Input should be ") for e in error.errors() if e["loc"][0] == name)
    )
    return f"{name} is {first['input']!r}; allowed: {wanted}"


def _table(kind, preset, name):
    """A preset by name, or a user's YAML file."""
    if not name.endswith((".yml", ".yaml")):
        return preset(name)
    from artifact.study import scale

    return kind.from_mapping(scale.read_yaml(name), Path(name).stem)


def run(cell, *, preset=None, on_tables: Callable | None = None, on_progress: Callable | None = None):
    """Simulate `cell` -> (summary dict, per-sample columns dict of arrays [S]).

    The summary has the keys of the command line's `kv simulate --json`; with a `preset` of `pim.timing` also the
    bandwidth in cycles of its controller, without refresh (NaN where that is unknown, see below).
    `on_tables(samples)` sees every batch of sampled block tables (`engine.Samples`, valid during the call);
    `on_progress(arrived, requests)` comes after each.
    """
    batches = []

    def keep(columns):
        batches.append({name: np.array(values) for name, values in columns.items()})

    summary = summarise(cell, preset=preset, on_tables=on_tables, on_progress=on_progress, on_columns=keep)
    return summary, {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def summarise(cell, *, preset=None, by_burst=False, on_tables=None, on_progress=None, on_columns=None):
    """The summary of `run` alone, in memory that does not grow with the samples, unless moves are charged to them.

    `by_burst` counts every burst where whole blocks would do. `on_columns(columns)` sees each batch's columns.
    """
    machine, lay = begin(cell)
    memory, region, num_blocks = cell.memory, cell.blocks_per_region, lay.base.size
    reading, how = _reading(cell, num_blocks), {"coalesce": cell.coalesce, "window": cell.window}
    whole = None if by_burst else blocks.whole(reading, num_blocks, **how)
    reduced = {name: reduction.Reduction(percentiles=name in _SPREAD) for name in _REDUCED}
    held = []

    def add(columns):
        for name in _REDUCED:
            if name in columns:
                reduced[name].add(columns[name].astype(np.float64, copy=False))
        if preset is not None:
            reduced["cycles_bandwidth_gbps"].add(columns["kv_bytes"] / columns["controller_ns"])
        if on_columns:
            on_columns(columns)

    for batch in machine.samples():
        groups = _groups(batch.step, cell.turn_tokens)
        if whole is not None:
            counts = blocks.count_tables(batch.flat, batch.starts, batch.tokens, memory, whole, groups=groups)
        elif cell.as_studied:
            counts = bandwidth.count_tables(batch.flat, batch.starts, batch.tokens, lay, memory, **how)
        else:
            counts = reads.count(batch.flat, batch.starts, batch.tokens, reading, memory, groups=groups, **how)
        columns = _columns(batch, groups)
        kv_bytes = columns["tokens"] * cell.token_bytes
        columns |= {
            "kv_bytes": kv_bytes,
            "bursts": counts.bursts,
            "commands": counts.commands,
            "hits": counts.commands - counts.misses,
            **bandwidth.metrics(counts, counts.bursts * memory.burst_bytes, memory)._asdict(),
        }
        lie = placement.placement(batch.flat, batch.starts, batch.blocks, region, num_blocks)._asdict()
        columns |= lie if cell.turn_tokens is None else {k: np.full(kv_bytes.size, np.nan) for k in lie}
        if preset is not None:
            columns["controller_ns"] = _controller_ns(cell, columns["tokens"], batch, lay, timing.preset(preset))
        if cell.charged == "moves":  # what was copied is known at the end
            held.append({name: np.array(values) for name, values in columns.items()})
        else:
            add(columns)
        if on_tables:
            on_tables(batch)
        if on_progress:
            on_progress(*machine.progress)
    outcome = machine.outcome()
    if held:
        columns = {name: np.concatenate([part[name] for part in held]) for name in held[0]}
        _charge(columns, outcome, cell)
        add(columns)
    return _summary(outcome, reduced, cell, preset is not None)


_SPREAD = ("m1_row_hit_frac", "m2_bank_parallelism_frac", "m4_latency_ns")
_REDUCED = (
    *_SPREAD, "m3_bandwidth_gbps", "m3_busiest_gbps", "m4_busiest_ns", "kv_bytes", "controller_ns",
    "cycles_bandwidth_gbps", "block_adjacency_frac", "same_region_frac", "region_spread",
)  # fmt: skip


def _reading(cell, num_blocks):
    """How the cell's sequences lie and are read; the study's way is one of them, which `bandwidth` counts quicker."""
    order = mapping.address_map(cell.address_map, cell.memory)
    return reads.reading(
        order, cell.token_bytes, cell.tokens_per_block, num_blocks, heads=cell.shape.kv_heads,
        base_bytes=cell.base_bytes, layout=cell.block_layout, turn=cell.turn_tokens, writes=cell.charged == "moves",
    )  # fmt: skip


def _groups(step, turn_tokens):
    """Where the samples of each step begin, and the end; one sample a group when sequences are read alone."""
    if turn_tokens is None:
        return np.arange(step.size + 1)
    return np.append(np.flatnonzero(np.diff(step, prepend=-1)), step.size)


def _columns(batch, groups):
    """What is known of each group before anything is counted; `request` is -1 where it is several."""
    first, sizes = groups[:-1], np.diff(groups)
    columns = {name: getattr(batch, name)[first] for name in ("step", "request", "live_blocks", "free_blocks")}
    columns["tokens"] = np.add.reduceat(batch.tokens, first) if first.size else batch.tokens[:0]
    columns["request"] = np.where(sizes > 1, -1, columns["request"])
    names = ("step", "request", "tokens", "live_blocks", "free_blocks")
    return {**{name: columns[name] for name in names}, "sequences": sizes}


def _charge(columns, outcome, cell):
    """Adds to each sample its part of all that was copied, and makes its bandwidth that of the bytes read."""
    copied = (outcome.copied_tokens + outcome.blocks_copied * cell.tokens_per_block) * cell.token_bytes
    read_gbps = _total(columns["kv_bytes"], columns["m4_latency_ns"])
    each_ns = 2 * copied / read_gbps / (columns["sequences"].sum() * cell.sample_every)
    for time, rate in (("m4_latency_ns", "m3_bandwidth_gbps"), ("m4_busiest_ns", "m3_busiest_gbps")):
        columns[time] = columns[time] + each_ns * columns["sequences"]
        columns[rate] = columns["kv_bytes"] / columns[time]


def _controller_ns(cell, tokens, batch, lay, times):
    """The controller's time of each sampled sequence, its legacy channels at work together; NaN where that is unknown:
    for another device than its own, other streams in each channel, or commands that close when a bank repeats."""
    if not (cell.as_studied and cell.coalesce == "window" and cell.dram == "hbm3-pim" and lay.stream.size):
        return np.full(tokens.size, np.nan)
    cycles = streams.many(batch.flat, batch.starts, batch.tokens, lay, times, window=cell.window)[:, 1]
    return cycles * times.tck_ps / 1000


def begin(cell):
    """The engine of `cell` before its first step, and the layout of its pool in memory."""
    work = cell.load_requests()
    num_blocks = cell.num_blocks(work)
    order = mapping.address_map(cell.address_map, cell.memory)
    lay = bandwidth.layout(order, cell.token_bytes, cell.tokens_per_block, num_blocks)
    slots = engine.Engine.slots(work, cell.max_batch)
    pool = allocators.pool(cell.allocator, num_blocks, cell.blocks_per_region, slots, seed=cell.seed,
                           plan=cell.pim_plan, frees=cell.frees)
    return engine.Engine(work, pool, _rules(cell, num_blocks), seed=cell.seed), lay


def _rules(cell, num_blocks):
    adopt = cell.spec_adopt
    if adopt == "auto":
        adopt = "copyback" if cell.allocator in allocators.REGIONAL else "splice"
    return engine.Rules(
        block_tokens=cell.tokens_per_block,
        max_batch=cell.max_batch,
        vllm=cell.admission == "vllm",
        watermark_blocks=int(cell.watermark * num_blocks),
        spec_width=cell.spec_width if cell.workload == "spec" else 0,
        spec_depth=cell.spec_depth,
        spec_accept=cell.spec_accept,
        splice=adopt == "splice",
        shared_scratch=cell.pim_scratch == "shared",
        compact=cell.pim_compact,
        sample_every=cell.sample_every,
        sample_sequences=cell.sample_sequences,
        swap=cell.preempt == "swap",
    )


def _spread(name, values):
    """Mean and 5th and 95th percentile (linear) of `values`, NaN when there are none."""
    low, high = values.percentile(5, 95)
    return {name: values.mean(), f"{name}_p05": low, f"{name}_p95": high}


def _total(kv_bytes, time_ns):
    """All bytes over all time, GB/s; NaN when there is none."""
    return kv_bytes.sum() / time_ns.sum() if time_ns.sum() else float("nan")


def _summary(outcome, reduced, cell, cycles):
    latency = _spread("m4_latency_ns", reduced["m4_latency_ns"])
    counts = dict(vars(outcome))
    copied_bytes = counts.pop("copied_tokens") * cell.token_bytes
    prefix_hit_tokens = counts.pop("prefix_hit_blocks") * cell.tokens_per_block
    swapped_bytes = counts.pop("blocks_swapped") * cell.tokens_per_block * cell.token_bytes
    in_cycles = {}
    if cycles:
        in_cycles["cycles_bandwidth_gbps"] = reduced["cycles_bandwidth_gbps"].mean()
        in_cycles["cycles_total_gbps"] = _total(reduced["kv_bytes"], reduced["controller_ns"])
    return {
        **counts,
        "copied_bytes": copied_bytes,
        "swapped_bytes": swapped_bytes,
        "prefix_hit_tokens": prefix_hit_tokens,
        **_spread("m1_row_hit_frac", reduced["m1_row_hit_frac"]),
        **_spread("m2_bank_parallelism_frac", reduced["m2_bank_parallelism_frac"]),
        "m3_bandwidth_gbps": reduced["m3_bandwidth_gbps"].mean(),
        "m4_latency_ns": latency["m4_latency_ns"],
        "m4_latency_ns_p95": latency["m4_latency_ns_p95"],
        "m3_busiest_gbps": reduced["m3_busiest_gbps"].mean(),
        "m4_busiest_ns": reduced["m4_busiest_ns"].mean(),
        "m3_total_gbps": _total(reduced["kv_bytes"], reduced["m4_latency_ns"]),
        **in_cycles,
        **{k: reduced[k].mean() for k in ("block_adjacency_frac", "same_region_frac", "region_spread")},
    }


def write_samples(path, cell, columns):
    """Every sample of a run as a tidy CSV at `path`, and beside it `path`.manifest.json: configuration and versions."""
    import json

    import pandas as pd

    from artifact.study import provenance, results

    counts = ("live_blocks", "free_blocks", "bursts", "commands", "hits")
    names = {"request": "rid", "tokens": "length_tokens", **{name: f"{name}_count" for name in counts}}
    columns = {name: values for name, values in columns.items() if name != "sequences"}
    results.write(pd.DataFrame(columns).rename(columns=names).assign(origin="simulated"), Path(path))
    commit, dirty = provenance.git_state()
    facts = {"commit": commit, "dirty": dirty, "versions": provenance.versions(), "cell": cell.model_dump()}
    results.write_text(Path(f"{path}.manifest.json"), json.dumps(facts, indent=1) + "\n")
