"""What evaluation forms ask: answered from claims and runs, escaped for each format, and never flattering."""

import json
import re
import shutil
import subprocess

import pandas as pd
import pytest

from artifact.study import chain, claims, document, evaluation, evidence, paths
from artifact.study.document import Heading, Table

NASTY = r"50 % of \alpha_1 {a} & b # $ ~ ^ <script> |P| 2 × θ ≥ 1 “x” -- `data/x_y&z.csv`"
LATEX = shutil.which("pdflatex") or shutil.which("tectonic")


def claim(**changes):
    return claims.Claim.model_validate({
        "id": "right", "work": "kv-pimple", "text": "a", "notebook": "11_bandwidth", "result": "headline.csv",
        "where": {"allocator": "paged"}, "metric": "m1_row_hit_frac", "published": "0.77", "source": "s",
        "tolerance": "digits", "scale": "smoke", "tier": "cpu", **changes})


@pytest.fixture(scope="module")
def ours():
    return evaluation.study("full", paths.data_dir() / "recorded")


@pytest.fixture(scope="module")
def written(ours, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    return {path.name: path.read_text(encoding="utf-8") for path in evaluation.write(ours, folder)}, folder


def test_each_document_is_there_as_markdown_and_latex(written):
    files, _ = written
    assert set(files) == {f"{name}.{ending}" for name in evaluation.DOCUMENTS for ending in ("md", "tex")} | {
        "evaluation.tex"}
    assert all(text.strip() and "{" not in re.sub(r"`[^`]*`", "", text) for name, text in files.items()
               if name.endswith(".md"))
    assert all(text.isascii() for name, text in files.items() if name.endswith(".tex"))


def test_every_claim_stands_in_the_table_with_the_verdict_of_the_run(written, ours):
    rows = [line for line in written[0]["claims.md"].splitlines() if line.startswith("| `")]
    assert [re.match(r"\| `([^`]+)`", row)[1] for row in rows] == list(ours.judged["id"])
    for row, verdict in zip(rows, ours.judged["verdict"], strict=True):
        assert verdict.replace("-", " ") in row
    assert not any("| ..." in row for row in rows)


def test_the_appendix_names_claims_experiments_minutes_and_deviations(written, ours):
    text = written[0]["appendix.md"]
    for number, name in enumerate(evaluation.answers().major, 1):
        assert f"- C{number} (E" in text and f"`{name}`" in text
    for one in evaluation.experiments(ours):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {one.id} ")]
        assert f"--only {one.book.name[:2]}`" in row and one.question in row
        assert f"{ours.runs[one.book.name]['duration_s'] / 60:.1f}" in row and one.human_minutes.isdigit()
        kinds = row.rsplit("|", 2)[1]
        exact, loose = (sum(map(int, re.findall(rf"(\d+): {kind}", kinds)))
                        for kind in ("none beyond", "a stated number"))
        assert exact + loose == len(one.claims)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert heads == ["Artifact appendix", "Abstract", "Description and requirements", "Set-up", "Evaluation workflow",
                     "Major claims", "Experiments", "Notes on reusability", "General notes"]


def test_the_checklists_ask_what_the_forms_ask(written):
    checklist, neurips = written[0]["checklist.md"], written[0]["neurips.md"]
    for item in ("Algorithm", "Data set", "Hardware", "Execution", "Metrics", "disk space", "time is needed to prepare",
                 "time is needed to run", "Code licence", "Data licence", "Archived", "variation allowed"):
        assert item in checklist
    answers = re.findall(r"^\| [^|]+ \| (\S+) \|", neurips, re.MULTILINE)[2:]
    assert len(answers) == 16 and set(answers) <= {"yes", "no", "n/a"}


def test_what_a_line_stands_on_is_there_or_named_as_missing(ours):
    """Not that all is met: that none is called met whose evidence is not there."""
    for line in evaluation.check(ours):
        assert bool(line["missing"]) != line["met"]
    (identifier,) = [line for line in evaluation.check(ours) if "identifier" in line["asks"]]
    assert identifier["met"] == bool(evidence.citation().get("doi"))
    for one in evaluation.answers().neurips:
        for reference in one.evidence:
            assert evidence.found(reference, ours.home)[0], reference


@pytest.mark.parametrize(("reference", "there"), [
    ("file:LICENSE", True), ("file:LICENCE", False), ("make:reproduce", True), ("make:reproduc", False),
    ("readme:The two commands", True), ("readme:The two", False), ("citation:license", True),
    ("citation:licence", False), ("run:full", True)])
def test_evidence_is_looked_for(reference, there, tmp_path):
    assert evidence.found(reference, tmp_path)[0] is there


@pytest.mark.parametrize("reference", ["file:", "LICENSE", "folder:data", "claims:huge", "run:huge"])
def test_evidence_of_no_kind_is_refused(reference, tmp_path):
    with pytest.raises(ValueError, match="is not one of"):
        evidence.found(reference, tmp_path)


def test_claims_that_fail_or_were_not_decided_are_no_evidence(tmp_path, monkeypatch):
    listed = [claim(), claim(id="wrong", published="0.79"), claim(id="absent", result="gains.csv"),
              claim(id="large", scale="full"), claim(id="build", result="cycles.csv", needs="a build of a simulator")]
    monkeypatch.setattr(claims, "load", lambda path=None: listed)
    run = chain.notebook("11_bandwidth", "smoke", tmp_path)
    run.write("headline.csv", pd.DataFrame({"allocator": ["paged"], "m1_row_hit_frac": [0.77], "origin": "simulated"}))
    run.close()
    assert evidence.found("claims:smoke", tmp_path) == (False, "here 1 do not hold: wrong; 1 are not decided: absent")


@pytest.mark.parametrize(("changes", "says"), [
    ({"major": ["no-such-claim"]}, "major names the claim 'no-such-claim'"),
    ({"checklist": [["Disk", "{disk_mib} MiB"]]}, "disk_mib"),
])
def test_answers_that_name_what_is_not_there_are_refused(ours, changes, says):
    given = evaluation.answers().model_copy(update=changes)
    with pytest.raises(ValueError, match=says):
        evaluation.documents(ours, given)


def test_a_text_that_goes_on_stands_on_its_own():
    texts = evaluation.told(claims.load())
    assert not any(text.startswith("...") for text in texts.values())
    assert texts["kvp-paged-m3"].startswith("Under steady traffic") and texts["kvp-paged-m3"].endswith("1,226 GB/s.")


def test_nasty_text_is_escaped_in_each_dress():
    blocks = [Heading(2, NASTY), NASTY, [NASTY], Table((NASTY, "b"), ((NASTY, "`a|b`"),), (1, 2))]
    assert "<script>" not in document.page(blocks) and "<code>data/x_y&amp;z.csv</code>" in document.page(blocks)
    rows = document.markdown(blocks).splitlines()[-3:]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [3, 3, 3] and r"\<script\>" in rows[0]
    text = document.latex(blocks)
    assert text.isascii() and r"50 \% of \textbackslash{}alpha\_1 \{a\} \& b \# \$" in text
    with pytest.raises(ValueError, match="'☃'"):
        document.latex(["a ☃"])
    with pytest.raises(ValueError, match="a row of 1 cells in a table of 2"):
        Table(("a", "b"), (("1",),), (1, 2))


@pytest.mark.skipif(LATEX is None, reason="no LaTeX: pdflatex or tectonic would compile the documents")
def test_the_latex_compiles(written, tmp_path):
    _, folder = written
    shutil.copytree(folder, tmp_path / "tex")
    nasty = document.latex([Heading(1, NASTY), NASTY, [NASTY], Table((NASTY, "b"), ((NASTY, NASTY),), (1, 2))])
    (tmp_path / "tex" / "nasty.tex").write_text(nasty)
    (tmp_path / "tex" / "all.tex").write_text(document.frame(NASTY, [*evaluation.DOCUMENTS, "nasty"]))
    (tmp_path / "tex" / "one.tex").write_text(document.frame("Appendix", ["appendix"]))
    options = ["-interaction=nonstopmode", "-halt-on-error"] if LATEX.endswith("pdflatex") else []
    for name in ("all", "one"):
        done = subprocess.run([LATEX, *options, f"{name}.tex"], cwd=tmp_path / "tex", capture_output=True, text=True,
                              errors="replace", check=False)
        assert done.returncode == 0, done.stdout[-2000:]
        assert (tmp_path / "tex" / f"{name}.pdf").stat().st_size > 10_000


def test_report_appendix_on_the_command_line(cli, tmp_path):
    done = cli("report", "--appendix", "--scale", "smoke", "--results", tmp_path, "--json")
    found = json.loads(done.out)
    assert (done.code, done.err) == (0, "") and found["recorded"] is True and found["scale"] == "full"
    assert found["lines_count"] == len(found["badges"]) >= found["met_count"] > 0
    assert all((tmp_path / "smoke" / "evaluation" / name).is_file() for name in ("appendix.md", "evaluation.tex"))
    shown = cli("report", "--appendix", "--scale", "smoke", "--results", tmp_path)
    assert shown.code == 0 and "Reproduced" in shown.out and "badges.tex" in shown.out
    wrong = cli("report", "--appendix", "--scale", "huge", "--results", tmp_path)
    assert wrong.code == 2 and wrong.err.count("\n") == 1 and "'huge'" in wrong.err


@pytest.mark.parametrize(("changes", "code"), [
    ({}, 0),
    ({"published": "0.79"}, 1),  # ours is another
    ({"published": "0.79", "expected": "contradicted"}, 0),  # ... and that was known
    ({"expected": "contradicted"}, 1),  # said to be contradicted, and it is not
    ({"published": "0.79", "deviation": {"within": 0.05, "reason": "r"}}, 0),  # as it states that it may
    ({"published": "0.79", "deviation": {"within": 0.05, "reason": "r"}, "expected": "within-deviation"}, 0),
    ({"published": "0.79", "scale": "full"}, 0),  # a larger scale would decide it
    ({"published": "0.79", "notebook": "10_placement"}, 0),  # nothing was run that decides it
    ({"published": "0.79", "where": {"allocator": "other"}, "tier": "gpu", "needs": "a GPU"}, 0),  # no GPU here
    ({"where": {"allocator": "other"}}, 2),  # a claim about nothing is a mistake, not a verdict
])
def test_verify_fails_exactly_when_a_claim_does_not_hold_here(cli, tmp_path, monkeypatch, changes, code):
    monkeypatch.setattr(claims, "load", lambda path=None: [claim(**changes)])
    run = chain.notebook("11_bandwidth", "smoke", tmp_path)
    run.write("headline.csv", pd.DataFrame({"allocator": ["paged"], "m1_row_hit_frac": [0.77], "origin": "simulated"}))
    run.close()
    done = cli("verify", "--scale", "smoke", "--results", tmp_path)
    assert done.code == code, done.out + done.err
