"""`artifact gpu profile` where there is no GPU: its dry run, with nothing installed that it does not need; refusals.

That what it times is right, and that its files are whole, is tested in `interpreted.py`, where kernels run.
"""

import csv
import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from artifact.kernels import timing

from artifact.study import gpu_profile, paths, stage_times

ALONE = """
import runpy, sys
for name in ("numba", "pandas", "plotly", "click", "pydantic", "transformers"):
    sys.modules[name] = None  # an import of it fails
sys.argv = ["gpu_profile", *sys.argv[1:]]
runpy.run_module("artifact.study.gpu_profile", run_name="__main__")
"""


def _profile(root, *flags):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", ALONE, *map(str, flags)], cwd=root, capture_output=True, text=True,
                          env={**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def dry(root, tmp_path_factory):
    """The files of a dry run of one model, stages and steps."""
    out = tmp_path_factory.mktemp("dry") / "mine.csv"
    done = _profile(root, "--dry-run", "--model", "Llama3-8B-1M", "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(out), str(out.with_name("steps_mine.csv"))]
    return out, out.with_name("steps_mine.csv")


def test_a_dry_run_has_a_row_for_every_stage_and_way_and_no_time(dry):
    stages, steps = (list(csv.DictReader(path.open())) for path in dry)
    for method in ("quest", "infllm"):
        mine = [row for row in stages if (row["method"], row["context_tokens"]) == (method, "256")]
        assert [(row["stage"], row["attended_ratio"]) for row in mine] == [
            ("qkv", ""), ("selection", ""), ("attention", "1.0"), ("speculation", "0.5"), ("speculation", "1.0"),
            ("speculation", "1.5"), ("repair", "0.0"), ("repair", "0.5"), ("ffn", "")]
        ways = [row for row in steps if (row["method"], row["context_tokens"]) == (method, "256")]
        assert [row["way"] for row in ways] == ["dense", "serial DSA", "serial DSA, faster kernel", "S1", "S2",
                                                "PRR, union", "PRR, exact"]
        assert all(0 <= float(row["coverage_frac"]) <= 1 for row in ways[3:])
    for row in stages + steps:
        assert row["time_us"] == "" and row["skipped"] and row["model"] == "Llama3-8B-1M"


def test_a_dry_run_can_never_be_taken_for_a_gpus(dry, cli):
    for path in dry:
        rows, manifest = list(csv.DictReader(path.open())), json.loads(path.with_suffix(".json").read_text())
        assert {row["origin"] for row in rows} == {manifest["origin"]} == {"dry run"}
        assert {row["device"] for row in rows} == {manifest["device"]} == {"dry run on a CPU"}
        assert manifest["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        with pytest.raises(ValueError, match="origin 'dry run' is not one of: measured"):
            stage_times.read(path)
    ran = cli("prr", "budget", "--stages", dry[0])
    assert ran.code == 2 and ran.err.count("\n") == 1 and "'dry run'" in ran.err


def test_without_a_gpu_one_line_and_exit_2(cli, root, tmp_path):
    ran = cli("gpu", "profile", "--out", tmp_path)
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1
    assert "finds no CUDA device; --dry-run needs none" in ran.err and list(tmp_path.iterdir()) == []
    done = _profile(root, "--out", tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "finds no CUDA device" in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("flags", "says"), [
    (["--model", "Qwen3-14B"], "model is Qwen3-14B; allowed: GLM-4-9B-1M, Llama3-8B-1M"),
    (["--context", 1000], "context is 1000; allowed: 16384, 32768"),
    (["--context", 16384], "contexts are 1; allowed: at least 3, of which a budget is fitted"),
    (["--limit", 0], "limit is 0; allowed: above 0 s"),
    (["--out", "mine.csv"], "mine.csv: one file for 2 models; allowed: a folder, or a file for one --model"),
    (["--dry-run"], "a dry run's rows are no stage times; say --out with another place than data/stage_times"),
    (["--dry-run", "--out", paths.data_dir() / "stage_times"], "a dry run's rows are no stage times"),
    (["--dry-run", "--out", paths.data_dir() / "stage_times" / "h100.csv"], "a dry run's rows are no stage times"),
])
def test_what_it_refuses_is_one_line_and_exit_2(cli, flags, says):
    ran = cli("gpu", "profile", *flags)
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1 and says in ran.err


def test_the_cells_are_those_of_the_study():
    cells = gpu_profile.cells()
    assert len(cells) == 2 * 6 * 2 and {cell.name for cell in cells} == {"quest", "infllm"}
    shapes = {cell.model: cell.shape for cell in cells}
    assert shapes["GLM-4-9B-1M"] == (4096, 13696, 32, 4, 128) and shapes["Llama3-8B-1M"] == (4096, 14336, 32, 8, 128)
    assert sorted({cell.context for cell in cells}) == [2**n * 1024 for n in range(4, 10)]
    assert min(gpu_profile.RATIOS) <= 0.5 and max(gpu_profile.RATIOS) == 2 and set(gpu_profile.MISSED) >= {0, 1}


def _row(stage, ratio, took):
    return {"stage": stage, "attended_ratio": ratio, "time_us": took}


@pytest.mark.parametrize(("times", "fits"), [
    ((10, 20, 30), 1.0), ((10, 19, 31), 1.0), ((21, 22, 23), 0.5), ((1, 2, 3), 1.5), ((None, None, None), 0.5)])
def test_as_many_blocks_as_fit_into_selection(times, fits):
    rows = [_row("selection", None, 20), *(_row("speculation", ratio, took) for ratio, took in zip(
        (0.5, 1.0, 1.5), times, strict=True))]
    assert gpu_profile.fitting(rows) == fits


def test_make_installs_the_flashinfer_that_is_timed(root):
    """Without its dependencies, which would take the place of what is pinned."""
    makefile = (root / "Makefile").read_text()
    assert re.search(r"^FLASHINFER := (.+)$", makefile, re.MULTILINE)[1] == timing.FLASHINFER
    recipe = makefile[makefile.index("\ngpu:"):].split("\n\n")[0]
    assert "--no-deps $(FLASHINFER)" in recipe and "artifact gpu profile" in recipe
