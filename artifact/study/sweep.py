"""Sweeps: many cells of the serving study, over local processes or a cluster, resumable cell by cell.

A sweep is a YAML file of `data/sweeps`: a list of groups, each a mapping of `serving.Cell` fields to a value or a list
of values; a group is the product of its lists. A scale caps requests and seeds and keeps the block and prompt sizes it
names.
"""

import hashlib
import json
import signal
import threading
import warnings
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict

from artifact.study import paths, results, scale
from artifact.study.serving import Cell, run

COUNTS = (
    "completed", "dropped", "preemptions", "self_preemptions", "frag_failures", "decode_steps", "samples",
    "pool_blocks", "peak_live_blocks", "blocks_allocated_total", "cow_copies", "blocks_copied", "compactions",
    "spec_stalls",
)  # fmt: skip
_SETTINGS = {  # Cell field -> column
    "workload": "workload", "trace_file": "trace", "allocator": "allocator", "address_map": "address_map",
    "model": "model", "dram": "dram", "requests": "requests_count", "seed": "seed", "headroom": "headroom",
    "admission": "admission", "max_batch": "max_batch", "rate": "arrival_rate", "prompt_tokens": "prompt_tokens",
    "coalesce": "coalesce", "window": "window", "kv_shards": "kv_shards", "kv_split": "kv_split",
    "spec_adopt": "spec_adopt", "pim_scratch": "pim_scratch", "pim_plan": "pim_plan", "pim_compact": "pim_compact_frac",
    "base_bytes": "base_bytes", "block_layout": "block_layout", "turn_tokens": "turn_tokens", "charged": "charged",
    "preempt": "preempt", "frees": "frees",
}  # fmt: skip


class CellsFailed(RuntimeError):
    """Some cells of a sweep raised; `finished` is the frame of the others, which are kept."""

    def __init__(self, message, finished):
        super().__init__(message)
        self.finished = finished


class Sweep(BaseModel):
    """One file of data/sweeps."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    title: str
    source: str
    cells: list[dict[str, object]]


def load(name):
    """The sweep `name` of data/sweeps, or the YAML file `name`. ValueError, one line, when it is not right."""
    if str(name).endswith((".yml", ".yaml")):
        return scale.validated(Path(name), Sweep)
    folder = paths.data_dir() / "sweeps"
    if not (folder / f"{name}.yml").is_file():
        known = ", ".join(sorted((p.stem for p in folder.glob("*.yml")), key=lambda n: (n != "headline", n)))
        raise ValueError(f"unknown sweep {name!r}; allowed: {known} or a YAML file")
    return scale.validated(folder / f"{name}.yml", Sweep)


def expand(sweep, size):
    """The cells of `sweep` at the scale `size` (`scale.Scale`), in the order of the file."""
    cells = []
    for group in sweep.cells:
        axes = {name: value if isinstance(value, list) else [value] for name, value in group.items()}
        for name in ("block_tokens", "prompt_tokens"):
            if len(axes.get(name, [])) > 1:
                axes[name] = [v for v in axes[name] if v in getattr(size, name)]
        if len(axes.get("seed", [])) > 1:
            axes["seed"] = axes["seed"][: size.sweep_seeds]
        if "requests" in axes:
            axes["requests"] = list(dict.fromkeys(min(n, size.sweep_requests) for n in axes["requests"]))
        for values in product(*axes.values()):
            given = dict(zip(axes, values, strict=True))
            cells.append(Cell(**({"seed": size.seed} | given)))
    if not cells:
        raise ValueError(f"{sweep.title}: no cell is left at scale {size.name}")
    return cells


def row(cell, summary):
    """One row of a result: the cell's settings, then what its run gave, each with its unit."""
    settings = {column: getattr(cell, name) for name, column in _SETTINGS.items()}
    settings["trace"] = Path(cell.trace_file).name if cell.trace_file else None
    if cell.workload != "fixedlen":
        settings["prompt_tokens"] = None
    measured = {f"{name}_count" if name in COUNTS else name: value for name, value in summary.items()}
    return {**settings, "block_tokens": cell.tokens_per_block, **measured, "origin": "simulated"}


def compute(cells, *, keep=None, workers=2, quiet=False, preset=None, executor="local"):
    """Run every cell -> a frame, one `row` a cell, in order; with a `preset` also in cycles (`serving.run`).

    `executor`: local, which is `workers` processes here, or dask:ADDRESS, the workers of that scheduler.

    `keep` is a folder for finished cells: what lies there and is whole is not computed again, so an interrupted
    sweep goes on where it stopped. A cell that raises is reported with its settings after all others have run
    (CellsFailed).
    """
    from tqdm import tqdm

    if keep is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
    done = {}
    for i, cell in enumerate(cells):
        found = _kept(cell, keep, preset)
        if found is not None:
            done[i] = found
    todo = [i for i in range(len(cells)) if i not in done]
    failures = []
    with tqdm(total=len(cells), initial=len(done), unit=" cells", delay=2, disable=quiet or None, leave=False) as bar:
        for i, summary, error in _each(cells, todo, workers, preset, executor, keep):
            if error is None:
                done[i] = summary
                if _kept(cells[i], keep, preset) is None:
                    _keep(cells[i], summary, keep, preset)
            else:
                failures.append(f"{_describe(cells[i])}: {error}")
            bar.update()
    frame = pd.DataFrame([row(cells[i], done[i]) for i in sorted(done)])
    if failures:
        raise CellsFailed(f"{len(failures)} of {len(cells)} cells failed: " + "; ".join(failures), frame)
    return frame


def _summary(cell, preset):
    """What a worker does with one cell -> (summary, error text)."""
    try:
        return run(cell, preset=preset)[0], None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _each(cells, todo, workers, preset, executor, keep):
    """Yield (index, summary, error) as cells finish, in processes when there is enough to do."""
    kind, _, address = executor.partition(":")
    if kind == "dask" and address:
        from artifact import compiled
        from artifact.study import cluster

        folder = None if keep is None else str(Path(keep).absolute())
        work = partial(_elsewhere, preset=preset, keep=folder, digest=compiled.DIGEST)
        yield from cluster.each(work, cells, todo, address)
        return
    if executor != "local":
        raise ValueError(f"executor is {executor!r}; allowed: local, or dask:ADDRESS as dask:tcp://127.0.0.1:8786")
    if workers < 2 or len(todo) < 4:
        for i in todo:
            yield (i, *_summary(cells[i], preset))
        return
    from joblib import Parallel, delayed

    work, left = Parallel(n_jobs=workers, return_as="generator_unordered"), set(todo)
    with _ignored(signal.SIGINT):  # workers inherit that: Ctrl-C is this process's affair
        found = work(delayed(_numbered)(i, cells[i], preset) for i in todo)
    try:
        for one in found:
            left.discard(one[0])
            yield one
    except GeneratorExit:  # joblib warns of what an interrupted run leaves undone; the next one does it
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\d+ tasks", UserWarning)
            found.close()
        raise
    except BrokenExecutor:  # a worker was killed, and nobody knows by which cell: each that is left by itself
        for i in sorted(left):
            yield _alone(i, cells[i], preset)


def _alone(i, cell, preset):
    """`_numbered` in a process of its own; that this process died is an error like any other."""
    from joblib.externals.loky import ProcessPoolExecutor

    with ProcessPoolExecutor(max_workers=1) as pool:
        with _ignored(signal.SIGINT):
            waiting = pool.submit(_numbered, i, cell, preset)
        try:
            return waiting.result()
        except BrokenExecutor:
            return i, None, "its process died, killed or out of memory"


@contextmanager
def _ignored(number):
    """The signal `number` ignored meanwhile; elsewhere than in the main thread, where that cannot be, nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def _numbered(i, cell, preset):
    return (i, *_summary(cell, preset))


def _elsewhere(i, cell, preset, keep, digest):
    """`_numbered` on a cluster's worker: kept there at once, and not computed again when it is."""
    from artifact import compiled

    if digest != compiled.DIGEST:
        return i, None, "RuntimeError: this worker has other sources than the caller; install the same there"
    shared = keep if keep is not None and Path(keep).is_dir() else None
    summary = _kept(cell, shared, preset)
    if summary is not None:
        return i, summary, None
    _, summary, error = _numbered(i, cell, preset)
    if error is None:
        _keep(cell, summary, shared, preset)
    return i, summary, error


def _describe(cell):
    given = cell.model_dump(exclude_defaults=True)
    return " ".join(f"{k}={v}" for k, v in given.items()) or "all defaults"


def _path(cell, keep, preset):
    from artifact import compiled

    text = cell.model_dump_json() + compiled.DIGEST + (preset or "")
    if cell.trace_file:
        text += results.sha256(Path(cell.trace_file))
    return Path(keep) / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _keep(cell, summary, keep, preset):
    if keep is not None:
        entry = {"cell": cell.model_dump(), "summary": summary}
        results.write_text(_path(cell, keep, preset), json.dumps(entry) + "\n")


def _kept(cell, keep, preset):
    """A finished cell's summary; None when there is none, or none that can be trusted."""
    if keep is None:
        return None
    try:
        entry = json.loads(_path(cell, keep, preset).read_text(encoding="utf-8"))
        return entry["summary"] if entry["cell"] == cell.model_dump() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
