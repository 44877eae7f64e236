"""The recorded run: it is what this code computes, it fits, and only vouched-for results are kept."""

import shutil

import pandas as pd
import pytest

from artifact.study import books, experiments, paths, provenance, record, results, scale, sweep

FULL = paths.data_dir() / "recorded" / "full"
BOOKS = [book for book in books.shelf() if book.results]


@pytest.mark.parametrize("book", BOOKS, ids=lambda b: b.name)
def test_every_result_and_picture_is_there_as_it_was_written(book):
    manifest = results.trusted(FULL / book.name)
    wanted = {*book.results, *(f"figures/{key}.png" for key in book.figures)}
    assert set(manifest["files"]) == wanted
    assert manifest["origin"] == "recorded" and manifest["scale"] == "full" and manifest["cpu"]
    for name in book.results:
        assert len(results.read(FULL / book.name / name))


def test_all_of_it_fits():
    assert sum(path.stat().st_size for path in FULL.rglob("*") if path.is_file()) <= 5e6


def test_the_headline_computed_now_is_the_recorded_one():
    now = experiments.headline(scale.load("full"))
    kept = results.read(FULL / "11_bandwidth" / "headline.csv")
    numbers = now.select_dtypes("number").columns
    pd.testing.assert_frame_equal(now[numbers], kept[numbers], rtol=1e-12, check_dtype=False)
    assert (now["allocator"] == kept["allocator"]).all()


def test_nothing_unvouched_is_recorded(tmp_path):
    with pytest.raises(ValueError, match="no finished run"):
        record.record(tmp_path / "results", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_pictures_are_drawn_again_from_what_is_recorded(tmp_path):
    if provenance.chromium()[0] is None:
        pytest.skip(f"no browser: {provenance.CHROMIUM_ADVICE}")
    home = tmp_path / "05_budget"
    shutil.copytree(FULL / "05_budget", home)
    old = results.trusted(home)
    shutil.copy(home / "figures" / "tradeoff.png", home / "figures" / "budget.png")  # a picture of an older look
    results.write_manifest(home, list(old["files"]), **{key: old[key] for key in old if key != "files"})
    assert "05_budget/figures/budget.png" in record.redraw(tmp_path, ["05"])
    new = results.trusted(home)
    assert {**new, "files": None} == {**old, "files": None} and list(new["files"]) == list(old["files"])
    assert all(new["files"][name] == old["files"][name] for name in new["files"] if name.endswith(".csv"))
    assert (home / "figures" / "budget.png").read_bytes() != (home / "figures" / "tradeoff.png").read_bytes()


def test_sweep_columns_are_the_recorded_ones():
    kept = results.read(FULL / "11_bandwidth" / "headline.csv")
    cell = sweep.expand(sweep.load("headline"), scale.load("tiny"))[0]
    assert list(sweep.compute([cell], quiet=True, preset=experiments.PRESET).columns) == list(kept.columns)
