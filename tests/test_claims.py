"""Claims: verdicts by the printed digits, one row or an error, and nothing decided that was not measured."""

from decimal import Decimal

import pandas as pd
import pytest
import yaml

from artifact.study import chain, claims, results

CLAIM = {
    "id": "m1.paged-16", "work": "kv-pimple", "text": "Paged blocks of 16 tokens hit open rows 77 % of the time.",
    "notebook": "11_bandwidth", "result": "headline.csv",
    "where": {"workload": "steady", "allocator": "paged", "block_tokens": 16}, "metric": "m1_row_hit_frac",
    "published": "0.77", "source": "README, headline table", "tolerance": "digits", "scale": "smoke", "tier": "cpu"}
ROWS = pd.DataFrame({
    "workload": ["steady", "steady", "spec"], "allocator": ["paged", "pim-aware", "paged"], "block_tokens": [16] * 3,
    "prompt_tokens": [None, 512, 512], "m1_row_hit_frac": [0.7694586777735906, 0.9632714, None],
    "origin": ["simulated", "simulated", "simulated"]})


def claim(**changes):
    return claims.Claim.model_validate({**CLAIM, **changes})


@pytest.fixture
def ran(tmp_path):
    """A results folder in which 11_bandwidth has run at smoke."""
    folder = tmp_path / "smoke" / "11_bandwidth"
    results.write(ROWS, folder / "headline.csv")
    results.write_manifest(folder, ["headline.csv"])
    return tmp_path


@pytest.mark.parametrize(("published", "ours", "verdict"), [
    ("0.77", 0.7694586777735906, "reproduced"), ("0.77", 0.765, "reproduced"), ("0.77", 0.7649999, "contradicted"),
    ("0.77", 0.775, "contradicted"), ("0.770", 0.7694586777735906, "contradicted"), ("1226", 1226.2691, "reproduced"),
    ("2.40", 2.4, "reproduced"), ("1.2e3", 1249.9, "reproduced"), ("0", 0, "reproduced"), ("-1.5", -1.46, "reproduced"),
])
def test_digits_mean_half_a_unit_of_the_last_one(published, ours, verdict):
    assert claims.judge(claim(published=published), ours) == verdict


@pytest.mark.parametrize("tolerance", ["digits", 0.004, 3])
@pytest.mark.parametrize("part", [-1, -0.5, 0, 0.5, 0.999])
def test_twice_the_tolerance_flips_a_verdict(tolerance, part):
    one = claim(tolerance=tolerance, reason="seeds differ")
    ours = float(one.target + one.within * Decimal(str(part)))
    assert claims.judge(one, ours) == "reproduced"
    for sign in (-1, 1):
        moved = claim(tolerance=tolerance, reason="seeds differ", published=str(one.target + 2 * sign * one.within))
        if tolerance != "digits":
            assert claims.judge(moved, ours) == "contradicted"
        else:  # the moved number may be printed with more digits, which asks for more
            assert claims.judge(moved, ours) == "contradicted" and moved.within <= one.within


def test_a_deviation_is_stated_or_it_is_a_contradiction():
    stated = claim(published="0.80", deviation={"within": 0.05, "reason": "another seed"})
    assert claims.judge(stated, 0.77) == "within-deviation"
    assert claims.judge(stated, 0.8) == "reproduced"
    assert claims.judge(stated, 0.74) == "contradicted"
    assert claims.judge(claim(published="0.80"), 0.77) == "contradicted"


def only(ran, scale="smoke", **changes):
    return claims.verdicts(scale, ran, [claim(**changes)]).iloc[0]


def test_every_verdict_from_results(ran):
    assert tuple(only(ran)[["verdict", "ours", "origin", "holds", "tolerance"]]) == (
        "reproduced", 0.7694586777735906, "simulated", True, 0.005)
    wrong = only(ran, published="0.78")
    assert wrong["verdict"] == "contradicted" and not wrong["holds"]
    assert only(ran, published="0.78", expected="contradicted")["holds"]
    assert not only(ran, expected="contradicted")["holds"], "what was to be contradicted and is not fails too"
    near = only(ran, published="0.78", deviation={"within": 0.02, "reason": "rounded twice"},
                expected="within-deviation")
    assert (near["verdict"], near["holds"], near["reason"]) == ("within-deviation", True, "rounded twice")
    own = only(ran, published=None, claimed="0.769", tolerance=0.002, reason="two seeds")
    assert own["verdict"] == "reproduced" and own["published"] is None and own["claimed"] == "0.769"


@pytest.mark.parametrize(("changes", "reason"), [
    ({"scale": "full"}, "run `artifact reproduce --scale full --only 11`"),
    ({"notebook": "12_sensitivity"}, "run `artifact reproduce --scale smoke --only 12`"),
    ({"result": "other.csv"}, "run `artifact reproduce --scale smoke --only 11`"),
    ({"notebook": "04_kernels", "tier": "gpu", "needs": "an NVIDIA GPU of 24 GiB"}, "needs an NVIDIA GPU of 24 GiB"),
])
def test_what_is_not_measured_here_says_what_it_takes_and_does_not_fail(ran, changes, reason):
    row = only(ran, **changes)
    assert (row["verdict"], row["holds"], row["reason"]) == ("not-measured-here", True, reason)
    assert row["ours"] is None and row["origin"] is None


def test_an_unfinished_or_changed_result_decides_nothing(ran):
    folder = ran / "smoke" / "11_bandwidth"
    content = (folder / "headline.csv").read_text()
    (folder / "headline.csv").write_text(content.replace("0.76945", "0.77945"))
    with pytest.raises(ValueError, match="claim m1.paged-16: .*changed after the run.*--only 11` again"):
        only(ran)
    results.distrust(folder)
    assert only(ran)["verdict"] == "not-measured-here"


@pytest.mark.parametrize(("changes", "says"), [
    ({"where": {"workload": "steady"}}, "workload steady is 2 rows of headline.csv; it must be one"),
    ({"where": {}}, "every row is 3 rows"),
    ({"where": {"workload": "prefix"}}, "is 0 rows"),
    ({"where": {"block_tokens": "16"}}, "is 0 rows"),
    ({"where": {"blocks": 16}}, "no column 'blocks'; it has: workload, allocator"),
    ({"metric": "m3_bandwidth_gbps"}, "no column 'm3_bandwidth_gbps'"),
    ({"metric": "workload"}, "workload is 'steady' where"),
    ({"where": {"workload": "spec"}}, "m1_row_hit_frac is .*nan.* it must be a number"),
])
def test_a_claim_that_names_no_single_number_is_an_error_with_its_name(ran, changes, says):
    with pytest.raises(ValueError, match=f"claim m1.paged-16: .*{says}"):
        only(ran, **changes)


def test_where_null_picks_an_empty_field(ran):
    assert only(ran, where={"prompt_tokens": None})["verdict"] == "reproduced"


@pytest.mark.parametrize(("change", "says"), [
    ({"published": 0.77}, "published is 0.77; it must be a valid string"),
    ({"published": "about 1"}, 'a number in quotes, as printed, like "0.77"'),
    ({"published": "nan"}, "a number in quotes"),
    ({"published": None}, "either `published` or `claimed`"),
    ({"claimed": "1"}, "either `published` or `claimed`"),
    ({"tolerance": 0.1}, "a `reason` for its numeric tolerance"),
    ({"tolerance": 0, "reason": "none"}, "tolerance"),
    ({"tolerance": "digit"}, "tolerance"),
    ({"tolerance": float("nan"), "reason": "none"}, "tolerance"),
    ({"scale": "tiny"}, "scale is 'tiny'; it must be 'smoke' or 'full'"),
    ({"tier": "gpu"}, "says in `needs` what tier gpu takes"),
    ({"expected": "within-deviation"}, "a `deviation` when that is expected"),
    ({"deviation": {"within": 0.1}}, "'deviation.reason' is missing"),
    ({"wher": {}}, "unknown key 'wher'"),
    ({"work": "other"}, "work is 'other'"),
])
def test_a_faulty_claims_file_is_one_line(tmp_path, change, says):
    (tmp_path / "claims.yml").write_text(yaml.safe_dump([{**CLAIM, "id": "a"}, {**CLAIM, **change}]))
    with pytest.raises(ValueError) as caught:
        claims.load(tmp_path / "claims.yml")
    message = str(caught.value)
    assert says in message and "claims.yml: claim m1.paged-16" in message and "\n" not in message
    assert len(message.replace(str(tmp_path), "")) < 300


@pytest.mark.parametrize(("text", "says"), [
    (yaml.safe_dump([CLAIM, CLAIM]), "claim m1.paged-16 stands there twice"), ("a: 1", "must be a list of claims"),
    ("- 3", "claim number 1: must be a mapping"), ("[", "not YAML"), ("", "must be a list")])
def test_a_claims_file_of_another_shape(tmp_path, text, says):
    (tmp_path / "claims.yml").write_text(text)
    with pytest.raises(ValueError, match=says):
        claims.load(tmp_path / "claims.yml")


def test_claims_by_a_table_are_those_written_out(tmp_path):
    (tmp_path / "published").mkdir()
    table = tmp_path / "published" / "cells.csv"
    table.write_text("id,text,workload,block_tokens,split,published,tolerance\n"
                     "a,One.,steady,16,,0.77,\nb,Two.,spec,4,true,0.540,0.1\n")
    shared = {name: CLAIM[name] for name in ("work", "notebook", "result", "metric", "source", "scale", "tier")}
    entry = {**shared, "where": {"allocator": "paged"}, "tolerance": "digits", "reason": "a draw", "cells": "cells.csv"}
    (tmp_path / "claims.yml").write_text(yaml.safe_dump([entry]))
    one, two = claims.load(tmp_path / "claims.yml")
    assert one == claim(id="a", text="One.", reason="a draw")
    assert two == claim(id="b", text="Two.", published="0.540", tolerance=0.1, reason="a draw",
                        where={"workload": "spec", "allocator": "paged", "block_tokens": 4, "split": True})
    for content, says in (("id,text,published\na,One.,about 1\n", 'claim a: .*a number in quotes'),
                          ("id,text,published\na,One.,1\na,One.,1\n", "claim a stands there twice"),
                          ("", "cells are 'cells.csv'; allowed: a table of data/published")):
        table.write_text(content)
        with pytest.raises(ValueError, match=says) as caught:
            claims.load(tmp_path / "claims.yml")
        assert "\n" not in str(caught.value)
    table.unlink()
    with pytest.raises(ValueError, match="cells are 'cells.csv'"):
        claims.load(tmp_path / "claims.yml")


def test_shipped_claims_are_valid_and_name_notebooks_there_are(root):
    names = {path.stem for path in (root / "notebooks").glob("*.ipynb")}
    assert [claim.id for claim in claims.load() if claim.notebook not in names] == []


def shipped(monkeypatch, ran, **changes):
    """The command line sees one claim, with `changes`."""
    listed = [claim(**changes)]
    monkeypatch.setattr(claims, "load", lambda path=None: listed)
    return ("verify", "--results", ran)


def test_verify_says_it_in_json_and_by_its_exit_code(cli, ran, monkeypatch):
    import json

    done = cli(*shipped(monkeypatch, ran), "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["scale"] == "smoke" and found["reproduced_count"] == found["decided_count"] == 1
    (row,) = found["claims"]
    assert row["published"] == "0.77" and row["ours"] == 0.7694586777735906 and row["tolerance"] == 0.005
    assert {"id", "scale", "published", "ours", "tolerance", "origin", "verdict", "expected", "claimed", "notebook",
            "reason"} <= row.keys()
    assert results.pd.read_csv(ran / "smoke" / "verdicts.csv")["verdict"].tolist() == ["reproduced"]

    flipped = cli(*shipped(monkeypatch, ran, published=str(Decimal("0.77") + 2 * Decimal(repr(row["tolerance"])))))
    assert flipped.code == 1 and "contradicted, expected reproduced" in flipped.out
    missing = cli(*shipped(monkeypatch, ran, scale="full"), "--json")
    assert missing.code == 0 and json.loads(missing.out)["claims"][0]["ours"] is None
    vague = cli(*shipped(monkeypatch, ran, where={"workload": "steady"}))
    assert vague.code == 2 and vague.out == "" and vague.err.count("\n") == 1 and "m1.paged-16" in vague.err


def test_a_notebook_asks_for_its_own_claims_before_its_run_is_finished(ran, monkeypatch):
    listed = [claim(), claim(id="large", scale="full"), claim(id="other", notebook="12_sensitivity")]
    monkeypatch.setattr(claims, "load", lambda path=None: listed)
    run = chain.notebook("11_bandwidth", "smoke", ran)
    run.write("headline.csv", ROWS)
    with pytest.raises(ValueError, match="no finished run"):
        results.trusted(run.folder)
    assert run.verdicts()[["id", "verdict"]].values.tolist() == [
        ["m1.paged-16", "reproduced"], ["large", "not-measured-here"]], "no scale decides what takes a larger one"
    run.close()
    everything = chain.notebook("20_claims", "smoke", ran).verdicts()
    assert everything["verdict"].tolist() == ["reproduced", "not-measured-here", "not-measured-here"]
