"""Notebook 04's numbers: the recorded tables are whole and of this code, and GPU times are read with suspicion."""

import json

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from artifact.kernels import aot, decode, moved, timing

from artifact.study import compiling, printed, results

CASE = dict(zip(compiling.CASE, aot.Case._fields, strict=True))


@pytest.fixture(scope="module")
def table():
    return compiling.recorded(compiling.COMPILED)


def _cases(table, target, triton):
    some = table[(table["target"] == target) & (table["triton"] == triton)]
    return {aot.Case(*row) for row in some[list(CASE)].itertuples(index=False)}


def test_the_recorded_table_is_of_the_matrix_and_holds_the_short_list(table):
    newest, every = compiling._newest(table), set(aot.every())
    for target in aot.TARGETS:
        held = _cases(table, target, newest)
        assert set(aot.SHORT) <= held <= every | set(aot.SHORT)
        assert set(compiling.missing(table, target)) == every - held
    assert all(_cases(table, target, "3.6.0") == set(aot.SHORT) for target in compiling.NVIDIA)
    assert set(table["origin"]) == {"recorded"}


@pytest.mark.parametrize("target", aot.TARGETS)
def test_the_recorded_table_is_the_whole_matrix(table, target):
    count = len(compiling.missing(table, target))
    if count:
        pytest.skip(f"{count} of {len(list(aot.every()))} cases are not recorded for {target}: "
                    "`python -m artifact.kernels.aot --full --out FILE.csv` compiles them")
    assert _cases(table, target, compiling._newest(table)) >= set(aot.every())


def test_no_recorded_kernel_is_faulty_where_it_must_not_be(table):
    nvidia = table[table["target"].isin(compiling.NVIDIA)]
    assert nvidia[nvidia["faults"] != ""].empty
    assert not any(aot.faults(row) for row in nvidia.rename(columns=CASE).to_dict("records"))
    amd = table[table["target"] == "gfx942"]
    assert amd[amd["error"] != ""]["registers_count"].isna().all()


def test_configurations_are_those_of_the_launchers_and_of_the_table(table):
    found = compiling.configurations()
    attend = found[found["kernel"] == "attend_blocks"]
    for name, dtype in aot.STORED.items():
        for dim in aot.DIMS:
            for block in aot.BLOCKS:
                config = decode.configuration(dim, block, dtype)
                (row,) = [row for _, row in attend.iterrows() if all(
                    str(value) in row[column].split(", ") for column, value in
                    (("types", name), ("head_sizes", dim), ("block_sizes", block)))]
                bound = None if pd.isna(row["registers_bound_count"]) else row["registers_bound_count"]
                assert (row["tile_tokens"], row["warps_count"], row["stages_count"], bound) == config[1:]
    for _, row in table[table["kernel"] == "attend_blocks"].iterrows():
        config = decode.configuration(row["dim_count"], row["block_tokens"], aot.STORED[row["dtype"]])
        assert (row["tile_tokens"], row["warps_count"], row["stages_count"]) == config[1:4]
    assert set(found["kernel"]) == set(aot.KERNELS)


def test_extremes_and_reasons_are_of_all_rows(table):
    summary, misfits = compiling.summary(table), compiling.misfits(table)
    assert summary["launches_count"].sum() == misfits["launches_count"].sum() == len(table)
    assert summary["shared_bytes_max"].max() == table["shared_bytes"].max()
    assert summary["faulty_count"].sum() == (table["faults"] != "").sum()
    planted = table.head(3).assign(faults=["", "local memory", "does not compile"], error=["", "", "RuntimeError: no"])
    assert set(compiling.misfits(planted)["reason"]) == {"none", "local memory", "RuntimeError: no"}
    assert compiling.summary(planted)["compiled_count"].sum() == 2


def test_shares_of_instructions_are_of_all(table):
    mix = compiling.instructions(table)
    assert np.allclose(mix.groupby(["kernel", "dtype"])["instructions_frac"].sum(), 1)
    assert (mix["instructions_count"] >= 0).all()
    assert set(mix["kernel"]) == set(aot.KERNELS)
    attend = mix[mix["kernel"] == "attend_blocks"].set_index(["dtype", "kind"])["instructions_count"]
    assert attend["bf16", "tensor core"] > 0 and attend["fp32", "tensor core"] == 0


def test_recorded_bytes_are_of_every_case_and_never_fewer_than_possible():
    found = compiling.moved()
    assert {moved.Case(*row) for row in found[list(moved.Case._fields)].itertuples(index=False)} == set(moved.CASES)
    assert (found["moved_ratio"] >= 1).all()
    same = found[(found["operator"] == "attend") & (found["block_tokens"] == 64) & (found["dtype"] == "fp16")]
    by_group = same.drop_duplicates("group_count").set_index("group_count")["moved_ratio"]
    assert by_group[20] > 1.9 and by_group[4] < 1.2


def test_a_changed_recording_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "recorded" / "kernels"
    folder.mkdir(parents=True)
    results.write(pd.DataFrame({"faults": ["x"], "origin": ["recorded"]}), folder / compiling.COMPILED)
    results.write_manifest(folder, [compiling.COMPILED])
    monkeypatch.setattr(compiling.paths, "data_dir", lambda: tmp_path)
    assert len(compiling.recorded(compiling.COMPILED)) == 1
    (folder / compiling.COMPILED).write_text("faults,origin\ny,recorded\n")
    with pytest.raises(ValueError, match="changed after the run that wrote it"):
        compiling.recorded(compiling.COMPILED)


def test_tables_of_something_else_are_not_recorded(tmp_path):
    results.write(pd.DataFrame({"m": ["x"], "origin": ["measured"]}), tmp_path / "a.csv")
    with pytest.raises(ValueError, match="allowed: tables of aot and one of moved"):
        compiling.record([tmp_path / "a.csv"])


# --- times of a GPU

def _times(tmp_path, dry=False, **changes):
    """A CSV as `timing` writes it, with times made up so that every ratio is known."""
    rows = []
    for case in timing.cases():
        sides = {("triton", "graph"): 10.0, ("triton", "eager"): 20.0, (compiling.PLANNED[0], "graph"): 12.0,
                 (compiling.PLANNED[1], "graph"): 9.0, (compiling.BSR, "graph"): 25.0,
                 (compiling.REPLANNED, "eager"): 80.0}
        if case.study == "repair":
            sides = {("triton", "graph"): 5 + 0.25 * case.missed_count}
        elif case.study == "batch":
            sides = {("triton", "graph"): 100.0}
        for (side, method), spent in sides.items():
            spent = changes.get(case.study, {}).get((side, method), spent)
            rows.append({**case._asdict(), **timing.Spent(side, method, spent, spent, spent, 100, 80_000)._asdict()})
    copy = timing.Spent("copy", "eager", 100.0, 100.0, 100.0, 100, 100_000)
    rows.append({**timing.Case("copy", 1, 1, 1, 1, 0, 0)._asdict(), **copy._asdict()})
    path = tmp_path / "kernels_made_up.csv"
    results.write_text(path, pd.DataFrame(rows).assign(origin="measured").to_csv(index=False))
    path.with_suffix(".json").write_text(json.dumps(
        {"dry_run": dry, "device": "made up", "files": {path.name: {"sha256": results.sha256(path)}}}))
    return path


def test_ratios_of_recorded_times(tmp_path):
    found = compiling.gpu([_times(tmp_path)])
    ours = found[found["origin"] == "recorded"].set_index(["study", "against"])
    assert set(ours["device"]) == {"made up"} and (ours["order_index"] == 0).all()
    cells = ours.loc[("table3", "BSR")]
    assert len(cells) == 25 and (cells["speedup_ratio"] == 2.5).all()
    assert set(zip(cells["block_tokens"], cells["budget_tokens"], strict=True)) \
        == set(printed.kernels()[["block_tokens", "budget_tokens"]].itertuples(index=False, name=None))
    assert (ours.loc[("table3", "BSR and its plan")]["speedup_ratio"] == 4).all()
    planned = ours.loc[("decode", "decode planned once")]
    assert sorted(planned["kv_heads_count"]) == [4, 8] and (planned["speedup_ratio"] == 0.9).all()
    assert (planned["holds_count"] == 0).all() and np.allclose(planned["ours"], 10 / 9)
    assert ours.loc[("batch", "copy"), "ours"].item() == 0.8 and ours.loc[("batch", "copy"), "holds_count"].item() == 1
    assert np.isclose(ours.loc[("repair", "a line"), "ours"].item(), 1)
    assert len(found) == len(ours) + 25


def test_without_recorded_times_the_papers_rows_stand_alone():
    found = compiling.gpu([])
    assert len(found) == 25 and set(found["origin"]) == {"published"} and found["holds_count"].isna().all()


def test_a_side_without_a_time_gives_no_ratio(tmp_path):
    path = _times(tmp_path, table3={(compiling.BSR, "graph"): None}, decode={("triton", "graph"): None})
    found = compiling.gpu([path])
    ours = found[found["origin"] == "recorded"]
    assert "BSR" not in set(ours[ours["study"] == "table3"]["against"])
    assert set(ours[ours["study"] == "decode"]["against"]) == {"BSR and its plan"}


@pytest.mark.parametrize(("fault", "says"), [("dry", "a dry run took no times"), ("changed", "changed after the run")])
def test_times_that_are_none_are_refused(tmp_path, fault, says):
    path = _times(tmp_path, dry=fault == "dry")
    if fault == "changed":
        path.write_text(path.read_text().replace("25.0", "26.0"))
    with pytest.raises(ValueError, match=says):
        compiling.gpu([path])


def test_table_3_is_the_papers(root):
    found = printed.kernels()
    assert len(found) == 25 and set(found["origin"]) == {"published"}
    assert [f"{value:.2f}" for value in found["speedup_ratio"]] == list(
        pd.read_csv(root / "data" / "published" / "prr_kernels.csv", dtype=str)["printed"])
    path = root.parent / "shared" / "golden" / "prr_paper_tables.json"
    if not path.is_file():
        pytest.skip("no ../shared/golden/prr_paper_tables.json to compare with")
    table = json.loads(path.read_text())["table3_kernel_speedup_vs_flashinfer_bsr"]
    assert found["speedup_ratio"].tolist() == [value for row in table["rows"].values() for value in row]
    assert found["budget_tokens"].tolist() == table["budgets"] * 5
