"""Result files: units and origins are demanded, bytes repeat, and what a kill leaves behind is never trusted."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

from artifact.study import compare, results, tables


@pytest.fixture
def frame():
    return pd.DataFrame({
        "workload": ["steady", "spec"], "block_tokens": [16, 16], "seed": [0, 0],
        "m1_row_hit_frac": [0.7694586777735906, 1 / 3], "m1_row_hit_frac_p05": [0.1, None],
        "throughput_tokens_per_s": [1e-300, 2.5e300], "region_spread": [6.1, 1.0], "origin": "simulated"})


def test_floats_come_back_equal_and_bytes_repeat(frame, tmp_path):
    results.write(frame, tmp_path / "deep" / "a.csv")
    results.write(frame.copy(), tmp_path / "b.csv")
    content = (tmp_path / "b.csv").read_bytes()
    assert (tmp_path / "deep" / "a.csv").read_bytes() == content and b"\r" not in content
    back = results.read(tmp_path / "b.csv")
    pd.testing.assert_frame_equal(back, frame, check_exact=True)


@pytest.mark.parametrize(("change", "says"), [
    (lambda f: f.drop(columns="origin"), "no column `origin`"),
    (lambda f: f.assign(origin="guessed"), "origin 'guessed' is not one of: measured"),
    (lambda f: f.assign(origin=["simulated", None]), "is not one of"),
    (lambda f: f.assign(bandwidth=1.0), "column 'bandwidth' has no unit"),
    (lambda f: f.assign(duration_seconds=1), "has no unit"),
    (lambda f: f.iloc[:0], "no rows"),
    (lambda f: pd.concat([f, f[["seed"]]], axis=1), "twice"),
])
def test_an_untidy_frame_is_refused_and_nothing_is_written(frame, tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        results.write(change(frame), tmp_path / "a.csv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("column", "unit", "stem"), [
    ("m3_bandwidth_gbps", "GB/s", "m3_bandwidth"), ("m1_row_hit_frac_p05", "fraction", "m1_row_hit_p05"),
    ("throughput_tokens_per_s", "tokens/s", "throughput"), ("bytes_per_cycle", "bytes/cycle", ""),
    ("cycles", "cycles", ""), ("allocators", None, "allocators"), ("seed", None, "seed")])
def test_a_name_carries_its_unit(column, unit, stem):
    assert (results.unit(column), results.stem(column)) == (unit, stem)


@pytest.mark.parametrize("content", [b"", b"\n", b"a,b\n1,2\n", b"\xff\xfe\x00", b'origin,a_count\nsimulated,"1\n',
                                     b"origin,a_count\nsimulated,1,2,3\n", b"origin\nsimul"])
def test_a_file_that_is_no_result_is_refused_by_name(tmp_path, content):
    path = tmp_path / "broken.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.csv") as caught:
        results.read(path)
    assert "\n" not in str(caught.value).strip()
    with pytest.raises(ValueError, match=r"absent\.csv: no such file"):
        results.read(tmp_path / "absent.csv")


def test_a_full_disk_leaves_the_old_file_and_no_draft(frame, tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    results.write(frame, path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError, match=r"No space left on device: '.*a\.csv'"):
                results.write(frame.iloc[:1], path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.csv"]


def test_a_folder_below_a_file_is_an_error_that_names_it(frame, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/a\.csv"):
        results.write(frame, tmp_path / "file" / "a.csv")


def test_a_manifest_vouches_for_its_files_only_as_they_were(frame, tmp_path):
    results.write(frame, tmp_path / "a.csv")
    with pytest.raises(ValueError, match="no finished run"):
        results.trusted(tmp_path)
    results.write_manifest(tmp_path, ["a.csv"], scale="tiny")
    assert results.trusted(tmp_path)["scale"] == "tiny"
    content = (tmp_path / "a.csv").read_text()
    (tmp_path / "a.csv").write_text(content.replace("0.7694", "0.7695"))
    with pytest.raises(ValueError, match=r"a\.csv: changed after the run"):
        results.trusted(tmp_path)
    (tmp_path / "a.csv").unlink()
    with pytest.raises(ValueError, match=r"a\.csv: missing"):
        results.trusted(tmp_path)
    for torn in ("{", "[]", "{}", '{"files": {"a.csv": 3}}', '{"files": []}'):
        (tmp_path / "manifest.json").write_text(torn)
        with pytest.raises(ValueError, match="not a manifest"):
            results.trusted(tmp_path)


WRITER = """
import itertools, sys
from pathlib import Path
import pandas as pd
from artifact.study import results
folder = Path(sys.argv[1])
print("ready", flush=True)
for turn in itertools.count():
    results.distrust(folder)
    frame = pd.DataFrame({"turn_count": [turn] * 400, "value_count": range(400), "origin": "simulated"})
    for name in ("a.csv", "b.csv"):
        results.write(frame, folder / name)
    results.write_manifest(folder, ["a.csv", "b.csv"], turn=turn)
"""


def test_ten_kills_leave_nothing_half_written_that_is_trusted(tmp_path):
    finished = 0
    moments = random.Random(7)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        for _ in range(10):
            writer.stdout.readline()
            time.sleep(moments.uniform(0.02, 0.2))
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
            for path in tmp_path.glob("*.csv"):
                assert len(results.read(path)) == 400
            try:
                manifest = results.trusted(tmp_path)
            except ValueError as refused:
                assert "no finished run" in str(refused)
            else:
                finished += 1
                for name in ("a.csv", "b.csv"):
                    assert set(results.read(tmp_path / name)["turn_count"]) == {manifest["turn"]}
            writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    results.distrust(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"a.csv", "b.csv"}, "drafts of killed runs are cleared"


def test_compare_pairs_rows_by_their_settings(frame, tmp_path):
    results.write(frame, tmp_path / "a.csv")
    results.write(frame.iloc[::-1].assign(origin="recorded"), tmp_path / "b.csv")
    found, files, values = compare.compare(tmp_path / "a.csv", tmp_path / "a.csv")
    assert found.empty and (files, values) == (1, 14)
    assert compare.compare(tmp_path / "a.csv", tmp_path / "b.csv")[0].empty, "order, name and origin may differ"


def test_compare_says_what_differs_and_by_how_much(frame, tmp_path):
    for name in ("one", "two"):
        results.write(frame, tmp_path / name / "10" / "a.csv")
    results.write(frame, tmp_path / "one" / "10" / "a.timing.csv")
    other = frame.assign(m1_row_hit_frac=[0.7694586777735906, 0.34], extra_count=1)
    results.write(pd.concat([other, other.iloc[:1].assign(workload="prefix")]), tmp_path / "two" / "10" / "a.csv")
    found, files, _ = compare.compare(tmp_path / "one", tmp_path / "two")
    assert files == 1 and sorted(found["what"]) == ["column only on one side", "row only on one side", "value"]
    value = found[found["what"] == "value"].iloc[0]
    assert value["row"] == "spec" and value["relative"] == pytest.approx(abs(1 / 3 - 0.34) / 0.34)
    assert "value" not in set(compare.compare(tmp_path / "one", tmp_path / "two", rtol=0.02)[0]["what"])
    for a, b, says in (("one", "one/10/a.csv", "one is a folder"), ("one", "three", "three: no such"),
                       ("empty", "one", "no result CSV")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=says):
            compare.compare(tmp_path / a, tmp_path / b)
    with pytest.raises(ValueError, match="rtol is nan"):
        compare.compare(tmp_path / "one", tmp_path / "two", rtol=float("nan"))


def test_tables_have_units_and_digits_by_column(frame):
    text = tables.markdown(frame.assign(m3_bandwidth_gbps=[1226.2691, 91.8], note="a|b"))
    assert text.splitlines()[0].count("|") == 11
    assert "M1 row hit (fraction)" in text and "M3 bandwidth (GB/s)" in text and "throughput (tokens/s)" in text
    assert " 1226.3 " in text and " 91.8 " in text and " 0.7695 " in text and " 0.3333 " in text and r"a\|b" in text
    assert "–" in text, "an empty field is drawn as a dash"
    assert len({len(line.replace(r"\|", "|")) for line in text.splitlines()}) <= 2
    tex = tables.latex(frame.assign(note="50%_{x}"))
    assert r"50\%\_\{x\}" in tex and r"\toprule" in tex and tex.count(r"\\") == 3
    with pytest.raises(ValueError, match="at least one"):
        tables.markdown(frame, columns=[])


def test_manifest_is_json_with_sizes(frame, tmp_path):
    results.write(frame, tmp_path / "a.csv")
    results.write_manifest(tmp_path, ["a.csv", "a.csv"], seed=3)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["files"]["a.csv"]["bytes"] == (tmp_path / "a.csv").stat().st_size


def test_compare_on_the_command_line(cli, frame, tmp_path):
    results.write(frame, tmp_path / "a.csv")
    results.write(frame.assign(region_spread=[6.1, 1.001]), tmp_path / "b.csv")
    same = cli("compare", tmp_path / "a.csv", tmp_path / "a.csv")
    assert same.code == 0 and "14 values, 0 differences" in same.out
    other = cli("compare", tmp_path / "a.csv", tmp_path / "b.csv")
    assert other.code == 1 and "region_spread" in other.out and "spec" in other.out
    found = json.loads(cli("compare", tmp_path / "a.csv", tmp_path / "b.csv", "--json").out)
    assert found["differences_count"] == 1 and found["differences"][0]["relative"] == pytest.approx(1e-3, rel=0.01)
    assert cli("compare", tmp_path / "a.csv", tmp_path / "b.csv", "--rtol", "0.01").code == 0
    (tmp_path / "c.csv").write_text("a,b\n1,2\n")
    for arguments, says in ((("absent.csv", tmp_path / "a.csv"), "absent.csv: no such"),
                            ((tmp_path / "a.csv", tmp_path / "c.csv"), "c.csv: no column `origin`"),
                            ((tmp_path / "a.csv", tmp_path / "b.csv", "--rtol", "-1"), "rtol is -1.0")):
        done = cli("compare", *arguments)
        assert done.code == 2 and says in done.err and done.err.count("\n") == 1 and done.out == ""
