"""The notebooks themselves: each runs at tiny scale, twice to the same bytes, and types no number."""

import json
import re
from pathlib import Path

import pytest

from artifact.study import books, chain, experiments, figures, results, stills

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]


@pytest.fixture(scope="module")
def shelf():
    return {book.name: book for book in books.shelf()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The whole chain at tiny scale, twice, each into a folder of its own: its outcomes and the folders."""
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stills, "export", lambda *_: 0)  # pictures of pictures: tested where they are made
        for which in ("first", "second"):
            folder = tmp_path_factory.mktemp(which)
            ran.append((chain.reproduce("tiny", results_dir=folder), folder / "tiny"))
    return ran


def sources(book, kind):
    """The sources of a notebook's cells of one kind, in order."""
    return ["".join(cell["source"]) for cell in book.content["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_at_tiny_scale(runs, name):
    for outcomes, _ in runs:
        (outcome,) = [one for one in outcomes if one["notebook"] == name]
        assert outcome["state"] == "done", outcome["reason"]
        print(f"{name}: {outcome['duration_s']} s")


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_bytes(runs, shelf, name):
    (_, first), (_, second) = runs
    files = [*(file for file in shelf[name].results if not file.endswith(results.TIMING)),
             *(f"figures/{key}.{kind}" for key in shelf[name].figures for kind in ("json", "csv")
               if not figures.FIGURES[key].result.endswith(results.TIMING)),
             *(f"tables/{key}.{kind}" for key in shelf[name].tables if not key.endswith(".timing")
               for kind in ("md", "tex"))]
    assert [file for file in files if (first / name / file).read_bytes() != (second / name / file).read_bytes()] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_was_shown_is_kept_and_nothing_went_to_stderr(runs, shelf, name):
    ran = json.loads((runs[0][1] / name / "notebook.ipynb").read_text(encoding="utf-8"))
    outputs = [out for cell in ran["cells"] for out in cell.get("outputs", [])]
    assert [out.get("text") for out in outputs if out["output_type"] == "stream" and out["name"] == "stderr"] == []
    shown = [out.get("metadata", {}).get("artifact", {}).get("figure") for out in outputs]
    assert [key for key in shown if key] == list(shelf[name].figures)
    assert len([out for out in outputs if "text/markdown" in out.get("data", {})]) == len(shelf[name].tables)


@pytest.mark.parametrize("name", NAMES)
def test_pictures_come_before_tables_and_the_run_is_closed(shelf, name):
    source = "\n".join(sources(shelf[name], "code"))
    if shelf[name].figures and "run.table" in source:
        assert source.index("run.figure") < source.index("run.table")
    assert source.rstrip().endswith("run.close()")


@pytest.mark.parametrize("name", NAMES)
def test_no_number_is_typed_into_prose(shelf, name):
    for text in sources(shelf[name], "markdown"):
        prose = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|^\|.*$", "", text, flags=re.MULTILINE)
        assert re.findall(r"\d+[.,]\d+|\d{2,}|\d+ ?(?:%|GB|ns|µs|tokens)", prose) == []


@pytest.mark.parametrize("name", NAMES)
def test_links_between_notebooks_lead_somewhere(shelf, name):
    text = "\n".join(sources(shelf[name], "markdown"))
    assert [link for link in re.findall(r"\]\(([^)#]+\.ipynb)\)", text) if not (NOTEBOOKS / link).is_file()] == []


def test_every_figure_is_drawn_by_the_notebook_it_names(shelf):
    assert {(key, plot.notebook) for key, plot in figures.FIGURES.items()} \
        == {(key, book.name) for book in shelf.values() for key in book.figures}


def test_the_recorded_run_is_whole(shelf):
    for book in shelf.values():
        for name in book.results:
            assert len(experiments.recorded(book.name, name)) > 0
