"""The Triton kernels compiled for GPUs that are not here: registers, spills, shared memory and loads of each.

In a process of its own, since a process that interprets kernels cannot compile them and Triton's settings are global.
`make test` compiles the short list below; the whole matrix is slow.
"""

import csv
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from artifact.kernels import aot

PIPELINED = {"attend_blocks": 2, "compressed_lse": 1, "pooled_scores": 1}  # what each reads ahead in tiles: K and V
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def _table(root, tmp_path, *flags, **environment):
    """The rows of `python -m artifact.kernels.aot`, numbers as such."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), **environment}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-m", "artifact.kernels.aot", *flags], cwd=root, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [{name: int(text) if text.lstrip("-").isdigit() else text for name, text in row.items()}
            for row in csv.DictReader(done.stdout.splitlines())]


def _faults(row):
    """What is wrong with one compiled launch."""
    faults = []
    if row["spills_bytes"] or row["local_bytes"] or row["local_accesses_count"]:
        faults.append("local memory")
    if row["shared_bytes"] > 99 * 1024:
        faults.append("shared memory")
    if not row["wide_loads_count"] or row["narrow_copies_count"]:
        faults.append("narrow loads")
    tiles = PIPELINED.get(row["kernel"], 0)
    width = 1 << (row["dim"] - 1).bit_length()
    if tiles and (row["buffers_count"] < 2
                  or row["shared_bytes"] < 2 * tiles * row["tile_tokens"] * width * BYTES[row["dtype"]]):
        faults.append("no pipeline")
    if row["kernel"] == "attend_blocks" and row["dtype"] != "fp32" and not row["mma_count"]:
        faults.append("no tensor cores")
    return faults


def _wrong(rows):
    return [(fault, row) for row in rows for fault in _faults(row)]


def test_the_short_list_compiles_for_every_target(root, tmp_path):
    rows = _table(root, tmp_path)
    assert {row["kernel"] for row in rows} == set(aot.KERNELS)
    assert {(*(row[name] for name in aot.Case._fields), row["target"]) for row in rows} \
        == {(*case, target) for case in aot.SHORT for target in aot.TARGETS}
    assert _wrong(rows) == []


@pytest.mark.parametrize(("change", "fault"), [
    ({"spills_bytes": 8}, "local memory"), ({"local_accesses_count": 2}, "local memory"),
    ({"shared_bytes": 101_377}, "shared memory"), ({"wide_loads_count": 0}, "narrow loads"),
    ({"narrow_copies_count": 1}, "narrow loads"), ({"buffers_count": 1}, "no pipeline"),
    ({"shared_bytes": 38_916}, "no pipeline"), ({"mma_count": 0}, "no tensor cores"),
])
def test_what_a_kernel_must_not_come_to_is_seen(change, fault):
    row = {**aot.Case("attend", "bf16", 128, 64, 4)._asdict(),
           **aot.Compiled("attend_blocks", "sm90", 64, 4, 3, 138, 0, 0, 71_680, 2, 50, 0, 0, 32, 26, 1272)._asdict()}
    assert _faults(row) == [] and _faults({**row, **change}) == [fault]


def test_the_short_list_is_of_the_matrix():
    every = set(aot.every())
    assert {case.operator for case in aot.SHORT} == {case.operator for case in every}
    for name in ("dtype", "dim", "block", "group"):
        assert {getattr(case, name) for case in aot.SHORT} >= {getattr(case, name) for case in every} - {3, 5, 4}


@pytest.mark.slow
def test_the_short_list_compiles_with_the_oldest_triton(root, tmp_path):
    folder = root / ".venv" / "triton-3.6.0"
    if not folder.is_dir():
        pytest.skip("no triton 3.6.0: .venv/bin/pip install --no-deps --target .venv/triton-3.6.0 triton==3.6.0")
    rows = _table(root, tmp_path, PYTHONPATH=str(folder))
    assert len(rows) >= len(aot.SHORT) * len(aot.TARGETS)
    assert _wrong(rows) == []


@pytest.mark.slow
def test_the_whole_matrix_compiles_for_every_target(root, tmp_path):
    rows = _table(root, tmp_path, "--full", "--workers", str(os.cpu_count()))
    assert len({tuple(row[name] for name in aot.Case._fields) for row in rows}) == len(list(aot.every()))
    assert _wrong(rows) == []
