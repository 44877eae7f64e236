"""The report: a folder of static HTML that opens from a file, without a network, and prints: a summary, the claims, a
page for each notebook, all figures, what evaluation forms ask, a glossary, and where every number comes from.

It shows what finished runs of one scale left and computes nothing but the verdicts.
"""

import html
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import jinja2
import pandas as pd

from artifact.study import claims, document, evaluation, evidence, glossary, paths, provenance, results
from artifact.study import scale as scales
from artifact.study.run import PLOTLY

_TEMPLATES = Path(__file__).parent / "templates"
_PAGES = {  # file -> what the navigation calls it
    "index": "Summary", "claims": "Claims", "gallery": "Figures", "evaluation": "Evaluation", "glossary": "Glossary",
    "provenance": "Provenance", "environment": "Environment",
}  # fmt: skip
_SHOWN = 3  # figures on the summary
_LINK = re.compile(r'href="(\d\d_\w+)\.ipynb')


@dataclass(frozen=True)
class Figure:
    """A figure of a finished run; paths are relative to the report's folder, None where there is no such file."""

    key: str
    title: str
    caption: str
    alt: str
    notebook: str
    page: str
    image: str | None
    data: str | None
    content: str  # the figure's JSON, safe inside a script element
    claims: list[str]
    results: list[str]

    @property
    def anchor(self) -> str:
        """Its id in pages; another notebook may draw a figure of the same key."""
        return f"{self.notebook}-{self.key}"


def build(scale: str, results_dir: str | Path | None = None, listed: list[claims.Claim] | None = None) -> Path:
    """Writes RESULTS/SCALE/report/ anew and returns its index.html.

    `listed`: the claims shown (None: data/claims.yml). Raises ValueError when no run of that scale has finished.
    """
    size = scales.load(scale)
    root = paths.results_dir(results_dir)
    folder = root / size.name
    if not evidence.finished(size.name, root):
        raise ValueError(f"{folder}: no finished run to report; run `artifact reproduce --scale {size.name}`")
    study = evaluation.study(size.name, root, listed)
    draft, out = folder / "report.new", folder / "report"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        _write(draft, folder, size, study)
        shutil.rmtree(out, ignore_errors=True)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out / "index.html"


def _write(out: Path, folder: Path, size: scales.Scale, study: evaluation.Study) -> None:
    from plotly.offline import get_plotlyjs

    runs, judged = study.runs, study.judged
    results.write_text(out / PLOTLY, get_plotlyjs())
    results.write_text(out / "report.css", (_TEMPLATES / "report.css").read_text(encoding="utf-8") + _code_colours())
    figures = [figure for name, manifest in runs.items() for figure in _figures(out, folder / name, manifest, judged)]
    for name, manifest in runs.items():
        for file in manifest["files"]:
            if file.endswith(".csv") and "/" not in file:
                results.write_bytes(out / "data" / name / file, (folder / name / file).read_bytes())
    pages = {name: _notebook(folder / name, [f for f in figures if f.notebook == name]) for name in runs}
    rows = [_claim(row, figures, pages) for row in judged.to_dict("records")]
    show = jinja2.Environment(loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True,
                              lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    common = {"scale": size, "pages": _PAGES, "notebooks": {name: title for name, (title, _) in pages.items()},
              "counts": claims.counts(judged), "runs": runs, "figures": figures, "claims": rows,
              "wrong": [row for row in rows if not row["holds"]]}
    lines = evaluation.check(study)
    own = {
        "index": {"shown": _leading(figures, judged), "experiments": _costs(runs, pages, judged),
                  "badges": {name: [line["met"] for line in lines if line["badge"] == name]
                             for name in dict.fromkeys(line["badge"] for line in lines)}},
        "evaluation": {"body": document.page(evaluation.overview(study))},
        "glossary": {"groups": glossary.load()},
        "environment": {"machine": provenance.frame().to_dict("records")},
    }
    for name in _PAGES:
        results.write_text(out / f"{name}.html", show.get_template(f"{name}.html").render(
            common, up="", here=name, **own.get(name, {})))
    names = list(pages)
    for number, (name, (title, body)) in enumerate(pages.items()):
        results.write_text(out / "notebooks" / f"{name}.html", show.get_template("notebook.html").render(
            common, up="../", here=name, title=title, body=body, before=names[number - 1] if number else None,
            after=names[number + 1] if number + 1 < len(names) else None))


def _leading(figures: list[Figure], judged: pd.DataFrame) -> list[Figure]:
    """The figures of the appendix' major claims, the first few."""
    wanted = list(dict.fromkeys(
        (row.notebook, row.figure) for name in evaluation.answers().major
        for row in judged[judged["id"] == name].itertuples() if isinstance(row.figure, str)))
    by_place = {(figure.notebook, figure.key): figure for figure in figures}
    found = [by_place[place] for place in wanted if place in by_place]
    return (found or figures)[:_SHOWN]


def _costs(runs: dict[str, dict], pages: dict, judged: pd.DataFrame) -> list[dict]:
    rows = []
    for name, run in runs.items():
        own = claims.counts(judged[judged["notebook"] == name])
        took, peak = run.get("duration_s"), run.get("peak_rss_bytes")
        rows.append({"name": name, "title": pages[name][0], **own,
                     "minutes": "–" if took is None else f"{took / 60:.1f}",
                     "memory": "–" if peak is None else f"{peak / 2**20:.0f} MiB"})
    return rows


def _figures(out: Path, home: Path, manifest: dict, judged: pd.DataFrame) -> list[Figure]:
    from artifact.study.figures import FIGURES

    found = []
    for file in manifest["files"]:
        if not (file.startswith("figures/") and file.endswith(".json")):
            continue
        source = home / file
        copies = {}
        for kind in ("png", "csv", "html"):
            if source.with_suffix(f".{kind}").is_file():
                copies[kind] = f"figures/{home.name}/{source.stem}.{kind}"
                results.write_bytes(out / copies[kind], source.with_suffix(f".{kind}").read_bytes())
        content = json.loads(source.read_text(encoding="utf-8"))
        title = content.get("layout", {}).get("title", {})
        title = title.get("text", "") if isinstance(title, dict) else str(title)
        title = re.sub(r"<[^>]+>", " ", html.unescape(title)).strip() or source.stem.replace("_", " ")
        plot = FIGURES.get(source.stem)
        own = judged[judged["notebook"] == home.name]
        exact = own[own["figure"] == source.stem]
        found.append(Figure(
            key=source.stem, title=title, caption=plot.caption if plot else "", alt=(plot.alt if plot else "") or title,
            notebook=home.name, page=f"notebooks/{home.name}.html", image=copies.get("png"), data=copies.get("csv"),
            content=json.dumps(content).replace("<", "\\u003c"),
            claims=list((exact if len(exact) else own[own["figure"].isna()])["id"]),
            results=[f"data/{home.name}/{name}" for name in manifest["files"]
                     if name.endswith(".csv") and "/" not in name]))
    return found


def _claim(row: dict, figures: list[Figure], pages: dict) -> dict:
    known = {key: None if pd.isna(value) else value for key, value in row.items()}
    target = known["published"] or known["claimed"]
    shown = [figure for figure in figures if row["id"] in figure.claims and figure.key == known["figure"]]
    return {**known, "ours": claims.written(known["ours"], target),
            "tolerance": f"{known['tolerance']:.3g}", "anchor": f"claim-{row['id']}",
            "page": f"notebooks/{row['notebook']}.html" if row["notebook"] in pages else None,
            "drawn": f"gallery.html#{shown[0].anchor}" if shown else None}


def _notebook(home: Path, figures: list[Figure]) -> tuple[str, str]:
    """Title and HTML of an executed notebook; a figure's output becomes a place that the page's script draws in."""
    path = home / "notebook.ipynb"
    if not path.is_file():
        return home.name, "<p>This notebook was run by hand, so no executed copy of it was kept.</p>"
    import nbformat
    from nbconvert import HTMLExporter

    content = nbformat.read(path, as_version=4)
    by_key = {figure.key: figure for figure in figures}
    for cell in content["cells"]:
        for out in cell.get("outputs", []):
            key = out.get("metadata", {}).get("artifact", {}).get("figure")
            if key in by_key:
                out["data"] = {"text/html": _place(by_key[key])}
    content["cells"] = [cell for cell in content["cells"] if not {"parameters", "injected-parameters"}
                        & set(cell["metadata"].get("tags", []))]
    exporter = HTMLExporter(template_name="basic", exclude_anchor_links=True, exclude_input_prompt=True,
                            exclude_output_prompt=True)
    body = exporter.from_notebook_node(content)[0]
    heading = re.search(r"^#\s+(.+)$", content["cells"][0]["source"] if content["cells"] else "", re.MULTILINE)
    return heading[1] if heading else home.name, _LINK.sub(r'href="\1.html', body)


def _place(figure: Figure) -> str:
    label = html.escape(figure.alt, quote=True)
    still = f'<img class="still" src="../{figure.image}" alt="{label}">' if figure.image else ""
    links = " · ".join(f'<a href="../{link}">{name}</a>' for name, link in (
        ("data (CSV)", figure.data), ("image (PNG)", figure.image), ("in the gallery", f"gallery.html#{figure.anchor}"))
        if link)
    return (f'<figure id="{figure.anchor}" class="{"has-still" if figure.image else "no-still"}">'
            f'<div class="plot" id="plot-{figure.anchor}" role="img" aria-label="{label}" tabindex="0"></div>'
            f"{still}<figcaption>{html.escape(figure.caption)} {links}</figcaption></figure>")


def _code_colours() -> str:
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter(style="xcode").get_style_defs(".highlight")
