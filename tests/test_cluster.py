"""A sweep over Dask distributed: equal to the local one; a killed worker costs nothing that had finished."""

import json
import os
import signal
import socket
import threading
import time

import pandas as pd
import pytest

from artifact.study import cluster, sweep
from artifact.study.serving import Cell

distributed = pytest.importorskip("distributed", reason="distributed is not installed")
CELLS = [Cell(requests=20, seed=seed, allocator=name) for seed in range(3) for name in ("paged", "random")]


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """A scheduler here and two worker processes with one thread each."""
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0",
                                  local_directory=tmp_path_factory.mktemp("dask")) as local:
        yield local


def test_two_workers_give_what_one_process_gives(workers, tmp_path):
    there = sweep.compute(CELLS, keep=tmp_path / "cells", quiet=True, executor=f"dask:{workers.scheduler_address}")
    pd.testing.assert_frame_equal(there, sweep.compute(CELLS, workers=1, quiet=True))
    assert len(list((tmp_path / "cells").glob("*.json"))) == len(CELLS)


def test_a_worker_killed_in_the_middle_loses_nothing_and_repeats_nothing(workers, tmp_path):
    """What was kept before the kill is the same file afterwards: written once, by one worker."""
    cells, keep, seen = [Cell(requests=200, seed=seed) for seed in range(12)], tmp_path / "cells", {}
    keep.mkdir()

    def kill():
        while len(found := list(keep.glob("*.json"))) < 3:
            time.sleep(0.01)
        seen.update({path: _stamp(path) for path in found})
        os.kill(next(iter(workers.workers.values())).pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    frame = sweep.compute(cells, keep=keep, quiet=True, executor=f"dask:{workers.scheduler_address}")
    killer.join(60)
    assert 3 <= len(seen) < len(cells), "the kill came too late to show anything"
    assert {path: _stamp(path) for path in seen} == seen
    assert frame["seed"].tolist() == list(range(12)) and len(list(keep.glob("*.json"))) == len(cells)
    assert {json.loads(path.read_text())["cell"]["seed"] for path in keep.glob("*.json")} == set(range(12))


def _stamp(path):
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def test_what_lies_in_the_folder_is_not_computed_again(workers, tmp_path, monkeypatch):
    address = f"dask:{workers.scheduler_address}"
    first = sweep.compute(CELLS[:2], keep=tmp_path, quiet=True, executor=address)
    monkeypatch.setattr(cluster, "each", lambda *_: pytest.fail("asked the cluster") if _[2] else iter(()))
    pd.testing.assert_frame_equal(first, sweep.compute(CELLS[:2], keep=tmp_path, quiet=True, executor=address))


def test_a_cell_that_fails_there_is_named_and_the_rest_goes_on(workers, tmp_path):
    cells = [*CELLS[:3], Cell(requests=20, pool_blocks=1)]
    with pytest.raises(sweep.CellsFailed, match="1 of 4 cells failed: .*pool_blocks=1.*smaller than one region"):
        sweep.compute(cells, keep=tmp_path, quiet=True, executor=f"dask:{workers.scheduler_address}")
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_other_sources_on_a_worker_are_refused(workers, monkeypatch):
    from artifact import compiled

    monkeypatch.setattr(compiled, "DIGEST", "another")
    with pytest.raises(sweep.CellsFailed, match="this worker has other sources"):
        sweep.compute(CELLS[:1], quiet=True, executor=f"dask:{workers.scheduler_address}")


def _free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.parametrize(("executor", "says"), [
    ("dask", "allowed: local, or dask:ADDRESS"), ("dask:", "allowed: local"), ("threads", "executor is 'threads'"),
    ("dask:tcp://127.0.0.1:{port}", "no Dask scheduler answers at 'tcp://127.0.0.1:"),
    ("dask:nonsense://x", "no Dask scheduler answers at 'nonsense://x'")])
def test_what_is_no_executor_is_one_line(cli, monkeypatch, executor, says):
    monkeypatch.setattr(cluster, "WAIT_S", 1)
    done = cli("kv", "sweep", "heatmap", "--scale", "tiny", "--executor", executor.format(port=_free_port()))
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1 and says in done.err


def test_a_scheduler_without_workers_is_one_line(cli, monkeypatch):
    monkeypatch.setattr(cluster, "WAIT_S", 1)
    with distributed.LocalCluster(n_workers=0, dashboard_address=":0") as empty:
        done = cli("kv", "sweep", "heatmap", "--scale", "tiny", "--executor", f"dask:{empty.scheduler_address}")
    assert done.code == 2 and "has no worker" in done.err and done.err.count("\n") == 1


def test_kv_sweep_runs_there(cli, workers, tmp_path):
    done = cli("kv", "sweep", "heatmap", "--scale", "tiny", "--executor", f"dask:{workers.scheduler_address}", "--out",
               tmp_path / "heatmap.csv", "--keep", tmp_path / "cells")
    assert done.code == 0 and len(pd.read_csv(tmp_path / "heatmap.csv")) == len(list((tmp_path / "cells").iterdir()))
