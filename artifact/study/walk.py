"""A walk for the eyes: one sequence's life in the pool, block by block, and how the pool frays as the engine runs."""

import numpy as np
import pandas as pd

from artifact.study.serving import Cell, run

FOLLOWED = ("paged", "pim-aware")  # side by side
COMPARED = (*FOLLOWED, "contiguous", "random")
POINTS = 60  # of a line over a run
_AFTER = 0.35  # how long the places are watched after the sequence has left, of its life
_TOKENS = (321, 640)  # length of the sequence that is followed: a few regions' worth, and still a picture


def life(size):
    """Who holds each slot of the regions that one sequence ever touches, from shortly before it came to well after.

    The same request of the same steady run under each of `FOLLOWED`. A row for each stay: slot `slot` of region
    `region` held from `step` to before `until_step` by "this sequence" (then `order_index` is the block's position in
    it) or "another"; what is in no row is free. `first_step` and `last_step` are the sequence's own.
    """
    frames = []
    for allocator in FOLLOWED:
        cell = Cell(allocator=allocator, requests=_requests(size), seed=size.seed, sample_every=1, sample_sequences=64)
        rid, tables = _followed(cell.load_requests()), {}

        def take(batch, tables=tables):
            for i in range(batch.step.size):
                table = batch.flat[batch.starts[i] : batch.starts[i] + batch.blocks[i]]
                tables.setdefault(int(batch.step[i]), {})[int(batch.request[i])] = table.copy()

        run(cell, on_tables=take)
        frames.append(_stays(tables, rid, cell.blocks_per_region).assign(allocator=allocator, rid=rid))
    first = ["allocator", "rid", "first_step", "last_step", "region", "slot", "block", "step", "until_step", "holder"]
    frame = pd.concat(frames, ignore_index=True).assign(origin="simulated")
    return frame[[*first, *frame.columns.drop([*first, "origin"]), "origin"]]


def fragmentation(size):
    """How the pool frays over a steady run: means over stretches of steps, for each of `COMPARED`.

    region_spread: regions that a sequence touches over the fewest that could hold it, mean over the batch; shared_frac:
    of the regions in use, those with blocks of several sequences; m1_row_hit_frac: row hits, mean over the batch.
    """
    frames = []
    for allocator in COMPARED:
        cell = Cell(allocator=allocator, requests=min(1000, size.sweep_requests), seed=size.seed, sample_sequences=64)
        shared = []

        def take(batch, shared=shared, region=cell.blocks_per_region):
            shared.append(_shared(batch, region))

        columns = run(cell, on_tables=take)[1]
        found = pd.DataFrame({name: columns[name] for name in ("step", "region_spread", "m1_row_hit_frac")})
        found = found.groupby("step").mean().join(pd.concat(shared).groupby("step").sum())
        found = found[found.index <= int(cell.load_requests().arrival_step.max())]  # not while the last ones drain
        found["shared_frac"] = found.pop("several_count") / found.pop("used_count")
        stretch = max(1, -(-int(found.index.max() + 1) // POINTS))
        means = found.groupby(found.index // stretch).mean()
        means.insert(0, "step", (means.index * stretch + stretch // 2).astype(int))
        frames.append(means.assign(allocator=allocator, requests_count=cell.requests))
    frame = pd.concat(frames, ignore_index=True).assign(origin="simulated")
    return frame[["allocator", "requests_count", *frame.columns.drop(["allocator", "requests_count"])]]


def _requests(size):
    return min(size.sample_requests, size.sweep_requests)


def _followed(work):
    """The request to follow: of the third quarter of arrivals, when the pool is well mixed, the one of `_TOKENS` that
    decodes longest; the longest of all where none has that length."""
    rids = np.arange(work.total_tokens.size)
    late = (rids >= rids.size // 2) & (rids < rids.size - rids.size // 4)
    fits = late & (work.total_tokens >= _TOKENS[0]) & (work.total_tokens <= _TOKENS[1])
    among = fits if fits.any() else late
    return int(rids[among][np.argmax(work.output_tokens[among])])


def _stays(tables, rid, in_region):
    """Rows of `life` from `tables`: step -> request -> block table."""
    own = [step for step, held in tables.items() if rid in held]
    first, last = min(own), max(own)
    length = last - first + 1
    steps = range(max(0, first - length // 10), last + 1 + max(2, int(_AFTER * length)))
    touched = {}  # region -> when first, in the order of the sequence
    for step in own:
        for block in tables[step][rid].tolist():
            touched.setdefault(block // in_region, len(touched))
    blocks = [region * in_region + slot for region in touched for slot in range(in_region)]
    place = {block: i for i, block in enumerate(blocks)}
    holder = np.full((len(steps), len(blocks)), -1)
    order = np.full((len(steps), len(blocks)), -1)
    for row, step in enumerate(steps):
        for request, table in tables.get(step, {}).items():
            for position, block in enumerate(table.tolist()):
                if block in place:
                    holder[row, place[block]] = request
                    order[row, place[block]] = position
    rows = []
    for column, block in enumerate(blocks):
        begins = [0, *(np.flatnonzero(np.diff(holder[:, column])) + 1).tolist(), len(steps)]
        for begin, end in zip(begins, begins[1:], strict=False):
            who = holder[begin, column]
            if who >= 0:
                mine = who == rid
                rows.append((first, last, block // in_region, block % in_region, block, steps[begin],
                             steps[end - 1] + 1, "this sequence" if mine else "another",
                             float(order[begin, column]) if mine else np.nan))
    names = ["first_step", "last_step", "region", "slot", "block", "step", "until_step", "holder", "order_index"]
    return pd.DataFrame(rows, columns=names).assign(blocks_per_region=in_region)


def _shared(batch, in_region):
    """For each sampled step: regions in use, and those with blocks of several sequences."""
    cells = np.repeat(np.arange(batch.step.size), batch.blocks)
    places = np.concatenate([np.arange(start, start + count)
                             for start, count in zip(batch.starts, batch.blocks, strict=True)])
    pairs = pd.DataFrame({"step": batch.step[cells], "row": cells, "region": batch.flat[places] // in_region})
    holders = pairs.drop_duplicates().groupby(["step", "region"]).size()
    return pd.DataFrame({"used_count": holders.groupby("step").size(),
                         "several_count": (holders > 1).groupby("step").sum()})
