"""What evaluation forms ask, answered from the claims, the runs and data/evaluation.yml: nothing is typed twice.

Five documents: the claims, an appendix as USENIX and EuroSys want it, the checklists of cTuning/MLSys and of NeurIPS,
and a check of one's own against the badges. Each is a list of `document` blocks.
"""

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

import artifact
from artifact.study import books, claims, document, evidence, paths, provenance, results
from artifact.study import scale as scales
from artifact.study.document import Heading, Table

DOCUMENTS = ("claims", "appendix", "checklist", "neurips", "badges")
FOLDER = "evaluation"  # below a scale's results
MAIN = "evaluation"  # the LaTeX document of all five
_READING = re.compile(r"\*\*Minutes\*\*.*?(\d+) to read")
_MET = {True: "met", False: "missing"}


class Answer(BaseModel):
    """One question of the NeurIPS form."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    question: str
    answer: str = Field(pattern="^(yes|no|n/a)$")
    because: str = Field(min_length=1)
    evidence: list[str]


class Line(BaseModel):
    """One line of a badge: what is asked, what shows it, what to do when that is missing."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    asks: str
    evidence: list[str] = Field(min_length=1)
    missing: str


class Badge(BaseModel):
    """One badge; it is earned when every line is met."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    badge: str
    lines: list[Line] = Field(min_length=1)


class Sections(BaseModel):
    """The appendix' texts."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    abstract: str
    access: str
    hardware: str
    software: str
    data: str
    setup: str
    reusability: str
    notes: str


class Answers(BaseModel):
    """data/evaluation.yml."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    major: list[str]
    appendix: Sections
    checklist: list[list[str]]
    neurips: list[Answer]
    badges: list[Badge]


@dataclass(frozen=True)
class Study:
    """What is evaluated: the claims as judged at a scale, the runs behind them, the notebooks."""

    scale: str
    home: Path  # the results of all scales
    recorded: bool  # whether they are our shipped run's, because nothing was run here at that scale
    listed: list[claims.Claim]
    judged: pd.DataFrame
    runs: dict[str, dict]
    shelf: list[books.Book]


@dataclass(frozen=True)
class Experiment:
    """A notebook that decides claims."""

    id: str
    book: books.Book
    question: str
    human_minutes: str
    compute: str
    memory: str
    claims: pd.DataFrame


def study(scale: str, results_dir: str | Path | None = None, listed: list[claims.Claim] | None = None) -> Study:
    """The claims (None: data/claims.yml) and runs at a scale; our recorded full run where nothing has been run at it.
    """
    size, home = scales.load(scale), paths.results_dir(results_dir)
    shown = not evidence.finished(size.name, home)
    scale, home = ("full", evidence.recorded()) if shown else (size.name, home)
    listed = claims.load() if listed is None else listed
    judged = claims.verdicts(scale, home, listed)
    runs = evidence.finished(scale, home)
    return Study(scale, home, home == evidence.recorded(), listed, judged, runs, books.shelf())


def answers(path: Path | None = None) -> Answers:
    """data/evaluation.yml, or another file of its kind; ValueError, one line, when it is not right."""
    return scales.validated(paths.data_dir() / "evaluation.yml" if path is None else Path(path), Answers)


def documents(of: Study, given: Answers | None = None) -> dict[str, list[document.Block]]:
    """The five documents by name. ValueError for a claim or number that `given` (None: the shipped answers) names in
    vain."""
    given = answers() if given is None else given
    known = facts(of)
    return {"claims": _claims(of), "appendix": _appendix(of, given, known), "checklist": _checklist(of, given, known),
            "neurips": _neurips(of, given, known), "badges": _badges(of, given)}


def overview(of: Study) -> list[document.Block]:
    """The badges and both checklists below one another, for a page with a title of its own."""
    given, known = answers(), facts(of)
    blocks = [*_badges(of, given), *_checklist(of, given, known), *_neurips(of, given, known)]
    return [Heading(block.level + 1, block.text) if isinstance(block, Heading) else block for block in blocks]


def write(of: Study, folder: Path) -> list[Path]:
    """The documents as Markdown and LaTeX in `folder`, and one LaTeX document of all; the files written."""
    written = []
    for name, blocks in documents(of).items():
        for ending, text in (("md", document.markdown(blocks)), ("tex", document.latex(blocks))):
            written.append(folder / f"{name}.{ending}")
            results.write_text(written[-1], text)
    written.append(folder / f"{MAIN}.tex")
    results.write_text(written[-1], document.frame("Artifact evaluation", DOCUMENTS))
    return written


def check(of: Study, given: Answers | None = None) -> list[dict]:
    """Each badge's lines: badge, asks, met, evidence (what was found), missing (what to do, None when met)."""
    rows = []
    for badge in (answers() if given is None else given).badges:
        for line in badge.lines:
            looked = [evidence.found(reference, of.home) for reference in line.evidence]
            met = all(there for there, _ in looked)
            shown = [text for there, text in looked if there]
            gaps = [text for there, text in looked if not there]
            rows.append({"badge": badge.badge, "asks": line.asks, "met": met, "evidence": "; ".join(shown),
                         "missing": None if met else f"{line.missing} ({'; '.join(gaps)})"})
    return rows


def facts(of: Study) -> dict[str, object]:
    """What the texts' {braces} are filled with; numbers as text, "unknown" where a run did not note them."""
    counts, runs = claims.counts(of.judged), list(of.runs.values())
    machine = max(runs, key=lambda run: run.get("started") or "", default={})
    doi = evidence.citation().get("doi")
    seconds = sum(run.get("duration_s") or 0 for run in runs)
    peak = max((run.get("peak_rss_bytes") or 0 for run in runs), default=0)
    written = sum(entry["bytes"] for run in runs for entry in run["files"].values())
    return {
        **counts, "version": artifact.__version__, "notebooks_count": len(of.shelf),
        "cpu_claims_count": int((of.judged["tier"] == "cpu").sum()), "minutes": f"{seconds / 60:.0f}",
        "peak_gib": f"{peak / 2**30:.1f}", "results_mib": f"{written / 2**20:.0f}",
        "data_mib": f"{_shipped_bytes() / 2**20:.0f}", "packages_gib": f"{_packages_bytes() / 2**30:.1f}",
        **{key: machine.get(key) or "unknown" for key in ("python", "os", "cpu", "cores_count")},
        "memory_gib": f"{machine['memory_bytes'] / 2**30:.0f}" if machine.get("memory_bytes") else "unknown",
        "setup": _setup(), "doi": doi or "not archived yet: no `doi` in `CITATION.cff`",
    }


def experiments(of: Study) -> list[Experiment]:
    """The notebooks that decide claims, in order."""
    found = []
    for book in of.shelf:
        own = of.judged[of.judged["notebook"] == book.name]
        if own.empty:
            continue
        opening = book.content["cells"][0]["source"]
        heading, reading = re.search(r"^#\s+(.+)$", opening, re.MULTILINE), _READING.search(opening)
        run = of.runs.get(book.name, {})
        took, peak = run.get("duration_s"), run.get("peak_rss_bytes")
        found.append(Experiment(
            f"E{book.name[:2]}", book, heading[1] if heading else book.name, reading[1] if reading else "unknown",
            "not run" if took is None else f"{took / 60:.1f}", "–" if peak is None else f"{peak / 2**20:.0f} MiB", own))
    return found


def told(listed: list[claims.Claim]) -> dict[str, str]:
    """Each claim's text by id; one that goes on where the claim before it stopped ("...") stands on its own here."""
    texts: dict[str, str] = {}
    before = ""
    for claim in listed:
        text = claim.text.rstrip(".,;: ")
        before = f"{before} {text[3:].strip()}" if text.startswith("...") else text
        texts[claim.id] = f"{before}."
    return texts


def _filled(text: str, known: dict[str, object]) -> str:
    try:
        return text.format_map(known)
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(f"evaluation.yml: {text[:50]!r} has {{{error}}}; known: {', '.join(known)}") from None


def _basis(of: Study) -> str:
    machine = ", ".join(sorted({str(run.get("cpu", "unknown")) for run in of.runs.values()})) or "unknown"
    where = "our recorded run" if of.recorded else "this run"
    return f"Numbers are of {where} at scale {of.scale}, on {machine}."


def _row(row: dict) -> tuple[str, str, str]:
    """Claimed, ours and verdict of a judged claim as text."""
    target = row["published"] if isinstance(row["published"], str) else row["claimed"]
    own = "" if isinstance(row["published"], str) else " (own)"
    verdict = row["verdict"].replace("-", " ") + ("" if row["holds"] else f", expected {row['expected']}")
    verdict += ", as expected" if row["holds"] and row["verdict"] == "contradicted" else ""
    return f"{target}{own}", claims.written(row["ours"], target) or "–", verdict


def _claims(of: Study) -> list[document.Block]:
    texts, counts, rows = told(of.listed), claims.counts(of.judged), []
    for row in of.judged.to_dict("records"):
        claimed, ours, verdict = _row(row)
        reason = row["reason"] if isinstance(row["reason"], str) else ""
        rows.append((f"`{row['id']}`", texts[row["id"]], row["source"], claimed, f"±{row['tolerance']:.3g}", ours,
                     f"{verdict}. {reason}".strip(". ") or verdict, f"E{row['notebook'][:2]}"))
    return [
        Heading(1, "Claims"), _basis(of),
        f"{counts['claims_count']} claims: {counts['reproduced_count']} reproduced, {counts['within_deviation_count']} "
        f"within a stated deviation, {counts['contradicted_count']} contradicted, {counts['not_measured_here_count']} "
        f"not measured here; {counts['failed_count']} came out otherwise than expected.",
        Table(("id", "claim", "source", "claimed", "tolerance", "ours", "verdict", "by"), tuple(rows),
              (1.6, 2.6, 1.4, 0.95, 0.95, 1.1, 2.2, 0.5)),
    ]


def _appendix(of: Study, given: Answers, known: dict) -> list[document.Block]:
    texts = {name: _filled(text, known) for name, text in given.appendix.model_dump().items()}
    done = experiments(of)
    return [
        Heading(1, "Artifact appendix"), _basis(of),
        Heading(2, "Abstract"), texts["abstract"],
        Heading(2, "Description and requirements"),
        *(f"{name.capitalize()}: {texts[name]}" for name in ("access", "hardware", "software", "data")),
        Heading(2, "Set-up"), texts["setup"],
        Heading(2, "Evaluation workflow"),
        Heading(3, "Major claims"), [_major(number, name, of, done) for number, name in enumerate(given.major, 1)],
        f"All {known['claims_count']} claims with their tolerances and reasons: `claims.md`, or `artifact verify`.",
        Heading(3, "Experiments"), _experiments(of, done),
        Heading(2, "Notes on reusability"), texts["reusability"],
        Heading(2, "General notes"), texts["notes"],
    ]


def _major(number: int, name: str, of: Study, done: list[Experiment]) -> str:
    rows = of.judged[of.judged["id"] == name].to_dict("records")
    if not rows:
        raise ValueError(f"evaluation.yml: major names the claim {name!r}; there is none in claims.yml")
    claimed, ours, verdict = _row(rows[0])
    by = next(one.id for one in done if one.book.name == rows[0]["notebook"])
    return f"C{number} ({by}, `{name}`): {told(of.listed)[name]} Claimed {claimed}, here {ours}: {verdict}."


def _experiments(of: Study, done: list[Experiment]) -> Table:
    rows = []
    for one in done:
        counts = claims.counts(one.claims)
        files = f"{len(one.book.results)} CSV, {len(one.book.figures)} figures in `results/{of.scale}/{one.book.name}`"
        rows.append((
            one.id, one.question, f"{one.human_minutes} + {one.compute}", one.memory, _preparation(one),
            f"`artifact reproduce --scale {of.scale} --only {one.book.name[:2]}`",
            f"{files}; {counts['decided_count']} of {counts['claims_count']} claims decided", _deviation(one, of)))
    return Table(("", "question", "human + compute minutes", "memory", "preparation", "execution", "results",
                  "expected deviation"), tuple(rows), (0.5, 2.2, 1, 0.9, 1.6, 1.8, 2, 1.8))


def _preparation(one: Experiment) -> str:
    tiers = set(one.claims["tier"]) - {"cpu"}
    words = {"model": "`make model` for claims of tier model", "gpu": "a GPU for claims of tier gpu"}
    return "; ".join(words[tier] for tier in ("model", "gpu") if tier in tiers) or "none"


def _deviation(one: Experiment, of: Study) -> str:
    """How far claims may lie off, counted by the kind of tolerance."""
    own = [claim for claim in of.listed if claim.notebook == one.book.name]
    kinds = (
        ("none beyond the last printed digit", [claim for claim in own if claim.tolerance == "digits"]),
        ("a stated number, with its reason", [claim for claim in own if claim.tolerance != "digits"]),
        ("further, with its reason", [claim for claim in own if claim.deviation is not None]),
        ("expected to be contradicted", [claim for claim in own if claim.expected == "contradicted"]),
    )
    return "; ".join(f"{len(those)}: {kind}" for kind, those in kinds if those)


def _checklist(of: Study, given: Answers, known: dict) -> list[document.Block]:
    texts = {name: _filled(text, known) for name, text in given.appendix.model_dump().items()}
    rows = tuple((item, _filled(answer, known)) for item, answer in given.checklist)
    done = experiments(of)
    return [
        Heading(1, "Checklist after cTuning and MLSys"), _basis(of),
        Table(("item", "answer"), rows, (1, 3)),
        Heading(2, "Description"), texts["access"], texts["hardware"], texts["software"], texts["data"],
        Heading(2, "Installation"), texts["setup"],
        Heading(2, "Workflow"), _experiments(of, done),
        Heading(2, "Expected results, with the variation allowed"),
        [f"{one.id}: {one.question} {_deviation(one, of)}." for one in done],
        Heading(2, "Customisation"), texts["reusability"],
        Heading(2, "Notes"), texts["notes"],
    ]


def _neurips(of: Study, given: Answers, known: dict) -> list[document.Block]:
    rows = []
    for one in given.neurips:
        looked = [evidence.found(reference, of.home) for reference in one.evidence]
        gaps = [f"{text} is missing" for there, text in looked if not there]
        rows.append((one.question, one.answer, _filled(one.because, known),
                     "; ".join([text for there, text in looked if there] + gaps) or "–"))
    return [Heading(1, "Checklist after NeurIPS"), _basis(of),
            Table(("question", "answer", "because", "evidence"), tuple(rows), (1.6, 0.6, 2.6, 2))]


def _badges(of: Study, given: Answers) -> list[document.Block]:
    lines = check(of, given)
    blocks: list[document.Block] = [Heading(1, "Badges: a check of one's own"), _basis(of)]
    for badge in dict.fromkeys(line["badge"] for line in lines):
        own = [line for line in lines if line["badge"] == badge]
        met = sum(line["met"] for line in own)
        blocks += [Heading(2, f"{badge}: {met} of {len(own)} lines met"),
                   Table(("asks", "", "evidence, or what is missing"),
                         tuple((line["asks"], _MET[line["met"]], line["missing"] or line["evidence"]) for line in own),
                         (2, 0.6, 3))]
    return blocks


def _setup() -> str:
    """What `make setup` noted in .venv, in words."""
    checkout = paths.root()
    ready = checkout / ".venv" / "ready" if checkout else None
    seconds = ready.read_text(encoding="utf-8").strip() if ready and ready.is_file() else ""
    if not seconds.isdigit():
        return "not measured here: `make setup` notes it"
    return f"`make setup` took {int(seconds) / 60:.1f} minutes here, downloads included"


def _shipped_bytes() -> int:
    """Sources and shipped data: what a clone brings, but its history."""
    checkout = paths.root()
    if checkout is None:
        return sum(path.stat().st_size for path in paths.data_dir().rglob("*") if path.is_file())
    made = {"results", "models", "serving"}
    return sum(path.stat().st_size for name in ("artifact", "kernels", "data", "notebooks", "tests")
               for path in (checkout / name).rglob("*")
               if path.is_file() and "__pycache__" not in path.parts
               and not (name == "data" and path.relative_to(checkout / "data").parts[0] in made))


def _packages_bytes() -> int:
    """The pinned packages as installed, by what they list; what is not installed counts nothing."""
    wanted = set(provenance.pinned()[0])
    pinned = [found for found in metadata.distributions() if provenance.normalised(found.metadata["Name"]) in wanted]
    return sum(file.size or 0 for found in pinned for file in found.files or ())
