"""The glossary explains each thing once, and explains what results, claims and contracts speak of."""

import pandas as pd
import pytest

from artifact.kv import allocators
from artifact.study import claims, evidence, glossary, results, scale


@pytest.fixture(scope="module")
def names():
    return {name for group in glossary.load() for entry in group.entries for name in (entry.term, *entry.also)}


def test_origins_verdicts_tiers_scales_allocators_and_contract_symbols_are_explained(names):
    assert set(results.ORIGINS) | set(claims.VERDICTS) | set(scale.names()) | {"cpu", "model", "gpu"} <= names
    assert {"q", "B", "H", "G", "D", "N", "S", "bs", "A", "P", "θ", "δ", "lse", "M1", "M2", "M3", "M4"} <= names
    assert set(allocators.NAMES) <= names


def test_columns_that_it_names_are_in_our_recorded_results(names):
    held = set()
    for path in (evidence.recorded() / "full").glob("*/*.csv"):
        held |= set(pd.read_csv(path, nrows=0).columns)
    columns = {name for name in names if results.unit(name) and "_" in name}
    assert len(columns) > 10
    assert columns - held <= {"wasted_count"}  # of a decode step's account, which no result keeps


def test_the_frame_is_one_row_an_entry():
    frame = glossary.frame()
    assert len(frame) == sum(len(group.entries) for group in glossary.load()) == frame["term"].nunique()
    assert frame["means"].str.strip().str.endswith(".").all()


@pytest.mark.parametrize(("text", "says"), [
    ("a: 1", "must be a list of groups"),
    ("- group: a\n  entries: []", "entries is []"),
    ("- group: a\n  entries:\n  - {term: x, also: [], unit: null}", "means"),
    ("- {group: a, entries: [{term: x, also: [y], unit: null, means: m}, {term: y, also: [], unit: null, means: m}]}",
     "'y' is explained twice"),
])
def test_a_faulty_glossary_is_one_line(tmp_path, text, says):
    (tmp_path / "g.yml").write_text(text)
    with pytest.raises(ValueError) as caught:
        glossary.load(tmp_path / "g.yml")
    assert says in str(caught.value) and "\n" not in str(caught.value) and "g.yml" in str(caught.value)
