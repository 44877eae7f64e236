"""The README's numbers are the recorded run's, and its commands and snippets run."""

import re

import pytest

from artifact.study import claims, paths
from artifact.study.readme import filled

RECORDED = paths.data_dir() / "recorded"


@pytest.fixture(scope="module")
def readme(root):
    return (root / "README.md").read_text()


@pytest.fixture(scope="module")
def verdicts():
    return claims.verdicts("full", RECORDED).set_index("id")


def test_the_recorded_run_holds_every_claim(verdicts):
    decided = verdicts[verdicts["verdict"] != "not-measured-here"]
    assert len(decided) >= 50 and decided["holds"].all()


def test_its_tables_are_the_recorded_runs(readme):
    assert filled(readme) == readme


def test_a_wrong_number_is_put_right(readme):
    row, cost = "| `kvp-paged-m1` | 0.77 | 0.77 | simulated | reproduced |", re.search(r"\| `03_\w+` \|.+", readme)[0]
    wrong = readme.replace(row, "| `kvp-paged-m1` |  | 0.81 | published | contradicted |")
    wrong = wrong.replace(cost, "| `03_predictor` | 0.1 | 1 MiB |").replace("decides all ", "decides all 9")
    assert row in readme and wrong != readme
    assert filled(wrong) == readme


def test_a_row_without_its_claim_is_one_line(readme):
    with pytest.raises(ValueError, match="'kvp-paged-m9'"):
        filled(readme.replace("`kvp-paged-m1`", "`kvp-paged-m9`"))


def test_snippets_run(readme, capsys):
    snippets = re.findall(r"```python\n(.+?)```", readme, re.S)
    assert len(snippets) >= 3
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})
    assert "0.96327" in capsys.readouterr().out


def test_every_claim_that_is_named_is_there(readme):
    named = set(re.findall(r"`((?:own|prr|kvp)-[a-z0-9-]+)`", readme))
    assert len(named) > 50 and named <= {claim.id for claim in claims.load()}


def test_make_targets_are_there(readme, root):
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`?make ([a-z-]+)", readme))
    assert {"reproduce", "test"} <= named <= targets


def test_local_links_resolve(readme, root):
    for link in re.findall(r"\]\(([^)#]+)\)", readme):
        assert link.startswith("https://") or (root / link).exists(), link
