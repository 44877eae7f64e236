"""The GPU timing script as it is run: on a machine without a GPU, and without all that it does not need.

What it does with each side is tested in `interpreted.py`, where kernels run.
"""

import csv
import hashlib
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from artifact.kernels import timing

ALONE = """
import runpy, sys
for name in ("numba", "pandas", "plotly", "click", "pydantic"):
    sys.modules[name] = None  # an import of it fails
sys.argv = ["timing.py", *sys.argv[1:]]
runpy.run_path("kernels/timing.py", run_name="__main__")
"""


def _timing(root, *flags):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", ALONE, *flags], cwd=root, capture_output=True, text=True,
                          env={**environment, "CUDA_VISIBLE_DEVICES": ""})


def test_the_file_alone_goes_its_way_without_a_gpu(root, tmp_path):
    out = tmp_path / "times.csv"
    done = _timing(root, "--dry-run", "--only", "repair", "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows, manifest = list(csv.DictReader(out.open())), json.loads(out.with_suffix(".json").read_text())
    assert [row["missed_count"] for row in rows if row["study"] == "repair"] == ["0", "2", "4"]
    assert not any(row["time_us"] for row in rows)
    assert manifest["dry_run"] and manifest["device"] == "cpu" and manifest["seed"] == timing.SEED
    assert manifest["files"]["times.csv"]["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert manifest["sources"]["decode.py"] \
        == hashlib.sha256((root / "kernels" / "decode.py").read_bytes()).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["times.csv", "times.json"]


def test_without_a_gpu_it_says_so_and_writes_nothing(root, tmp_path):
    done = _timing(root, "--out", str(tmp_path / "times.csv"))
    assert done.returncode == 2 and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith("timing: torch ") and "finds no CUDA device" in done.stderr


def test_a_wrong_answer_writes_nothing(monkeypatch, tmp_path, capsys):
    def failing(*_):
        raise ValueError("triton: out is 0.02 of its largest off the reference; no time is given")
        yield

    monkeypatch.setenv("TRITON_INTERPRET", "0")  # so that what main sets ends with the test
    monkeypatch.setattr(timing, "rows", failing)
    assert timing.main(["--dry-run", "--out", str(tmp_path / "times.csv")]) == 1
    assert "no time is given" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_the_cases_are_those_of_the_paper_and_of_the_study():
    cases = list(timing.cases())
    table3 = [(case.block_tokens, case.block_tokens * case.listed_count) for case in cases if case.study == "table3"]
    assert table3 == [(block, budget) for block in (16, 32, 64, 128, 256) for budget in (1024, 2048, 4096, 6144, 8192)]
    assert [case.kv_heads_count for case in cases if case.study == "decode"] == [4, 8]
    assert [case.missed_count for case in cases if case.study == "repair"] == list(range(0, 97, 8))
    assert all(case.context_tokens == 131072 and case.heads_count == 32 for case in cases)
