"""The Triton kernels compiled for GPUs that are not here: registers, spills, shared memory and loads of each.

In a process of its own, since a process that interprets kernels cannot compile them and Triton's settings are global.
`make test` compiles the short list below; the whole matrix is slow.
"""

import csv
import os
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from artifact.kernels import aot

NVIDIA = ("sm80", "sm90", "sm100")


def _table(root, tmp_path, *flags, **environment):
    """The rows of `python -m artifact.kernels.aot`, numbers as such."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), **environment}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-m", "artifact.kernels.aot", *flags], cwd=root, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(done.stdout.splitlines())]


def _number(text):
    return int(text) if text.lstrip("-").isdigit() else text


def _wrong(rows):
    return [row for row in rows if row["faults"]]


def _other_than_recorded(root, rows):
    """The rows that differ in any number from those of data/recorded/kernels."""
    names = {"dim": "dim_count", "block": "block_tokens", "group": "group_count"}
    with open(root / "data" / "recorded" / "kernels" / "compiled.csv") as file:
        recorded = [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(file)]
    return [row for row in rows if {**{names.get(name, name): value for name, value in row.items()},
                                    "origin": "recorded"} not in recorded]


def test_the_short_list_compiles_for_every_target(root, tmp_path):
    rows = _table(root, tmp_path, "--targets", *NVIDIA)
    assert {row["kernel"] for row in rows} == set(aot.KERNELS)
    assert {(*(row[name] for name in aot.Case._fields), row["target"]) for row in rows} \
        == {(*case, target) for case in aot.SHORT for target in NVIDIA}
    assert _wrong(rows) == []
    assert _other_than_recorded(root, rows) == []


@pytest.mark.parametrize(("change", "fault"), [
    ({"spills_bytes": 8}, "local memory"), ({"local_accesses_count": 2}, "local memory"),
    ({"shared_bytes": 101_377}, "shared memory"), ({"wide_loads_count": 0}, "narrow loads"),
    ({"narrow_copies_count": 1}, "narrow loads"), ({"buffers_count": 1}, "no pipeline"),
    ({"shared_bytes": 38_916}, "no pipeline"), ({"mma_count": 0}, "no tensor cores"),
    ({"error": "RuntimeError: of ptxas"}, "does not compile"), ({"target": "gfx942"}, "shared memory"),
])
def test_what_a_kernel_must_not_come_to_is_seen(change, fault):
    row = {**aot.Case("attend", "bf16", 128, 64, 4)._asdict(), **aot.Compiled(
        "attend_blocks", "sm90", 64, 4, 3, 138, 0, 0, 71_680, 2, 50, 0, 0, 64, 67, 32, 26, 13, 1272)._asdict()}
    assert aot.faults(row) == [] and aot.faults({**row, **change}) == [fault]


def test_what_does_not_compile_is_a_row_with_its_reason(monkeypatch):
    def refusing(*_, **__):
        raise RuntimeError("PTX assembly aborted\nand more")

    monkeypatch.setattr(aot.triton, "compile", refusing)
    (row,) = aot.rows([aot.SHORT[0]], ["sm90"])
    assert row["error"] == "RuntimeError: PTX assembly aborted" and row["faults"] == "does not compile"
    assert row["registers_count"] is None and row["warps_count"] == 4


def test_the_short_list_is_of_the_matrix():
    every = set(aot.every())
    assert {case.operator for case in aot.SHORT} == {case.operator for case in every}
    for name in ("dtype", "dim", "block", "group"):
        assert {getattr(case, name) for case in aot.SHORT} >= {getattr(case, name) for case in every} - {3, 5, 4}


def test_a_table_that_was_begun_is_continued(tmp_path, monkeypatch):
    asked, shapes = [], aot.SHORT[:3]

    def compiled(case, target, done):
        asked.append((case, target))
        return [aot.Compiled("attend_blocks", target, 16, 4, 3, error="RuntimeError: not compiled in this test")]

    monkeypatch.setattr(aot, "measure", compiled)
    monkeypatch.setattr(aot, "SHORT", shapes[:1])
    out = str(tmp_path / "table.csv")
    aot.main(["--targets", "sm80", "--out", out])
    monkeypatch.setattr(aot, "SHORT", shapes)
    aot.main(["--targets", "sm80", "sm90", "--out", out])
    assert asked == [(shapes[0], "sm80"), (shapes[1], "sm80"), (shapes[2], "sm80"),
                     *((case, "sm90") for case in shapes)]
    with open(out) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and {row["faults"] for row in rows} == {"does not compile"}
    aot.main(["--targets", "sm80", "sm90", "--out", out])
    assert len(asked) == 6


@pytest.mark.slow
def test_the_short_list_compiles_with_the_oldest_triton(root, tmp_path):
    folder = root / ".venv" / "triton-3.6.0"
    if not (folder / "triton").is_dir():
        pytest.skip("no triton 3.6.0: make .venv/triton-3.6.0")
    rows = _table(root, tmp_path, "--targets", *NVIDIA, PYTHONPATH=str(folder))
    assert {row["triton"] for row in rows} == {"3.6.0"} and len(rows) >= len(aot.SHORT) * len(NVIDIA)
    assert _wrong(rows) == []


@pytest.mark.slow
def test_the_short_list_on_gfx942(root, tmp_path):
    """All of it compiles; what spills or does not fit there is what is recorded."""
    rows = _table(root, tmp_path, "--targets", "gfx942")
    assert {tuple(row[name] for name in aot.Case._fields) for row in rows} == set(aot.SHORT)
    with open(root / "data" / "recorded" / "kernels" / "compiled.csv", newline="") as table:
        recorded = Counter(row["faults"] for row in csv.DictReader(table) if row["target"] == "gfx942")
    assert Counter(row["faults"] for row in rows) == recorded and not any(row["error"] for row in rows)


@pytest.mark.slow
def test_the_whole_matrix_compiles_for_every_target(root, tmp_path):
    rows = _table(root, tmp_path, "--full", "--workers", str(os.cpu_count()), "--targets", *NVIDIA)
    assert len({tuple(row[name] for name in aot.Case._fields) for row in rows}) == len(list(aot.every()))
    assert _wrong(rows) == []
