"""One figure as a file: from a result CSV to HTML, JSON or PNG."""

import tempfile
from pathlib import Path

from artifact.study import experiments, figures, paths, provenance, results, stills

KINDS = (".html", ".json", ".png")


def write(key: str, source: str | Path | None = None, out: str | Path | None = None) -> dict[str, object]:
    """Draws figure `key` and says what was drawn: key, title, source, origins, rows_count, file.

    `source`: a result CSV (None: our recorded full run's). `out`: a file whose ending chooses the kind (None: KEY.html
    in the current folder). A figure that shows published numbers gets those of the same cells. ValueError, one line,
    for an unknown key or kind, a CSV that is not right, and a PNG without a browser.
    """
    plot = figures.known(key)
    out = Path(f"{key}.html" if out is None else out)
    if out.suffix not in KINDS:
        raise ValueError(f"{out}: a figure is written as one of: {', '.join(KINDS)}")
    path = paths.data_dir() / "recorded" / "full" / plot.notebook / plot.result if source is None else Path(source)
    frame = results.read(path)
    if plot.published:
        frame = experiments.beside(frame)
    try:
        figure = figures.draw(key, frame)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if out.suffix == ".html":
        results.write_text(out, figure.to_html(div_id=f"figure-{key}", config={"displaylogo": False}))
    elif out.suffix == ".json":
        results.write_text(out, figure.to_json())
    else:
        results.write_bytes(out, _png(figure.to_json(), out))
    return {"key": key, "title": figures.title(figure), "source": str(path), "rows_count": len(frame),
            "origins": sorted(set(frame["origin"])), "file": str(out)}


def _png(content: str, out: Path) -> bytes:
    if provenance.chromium()[0] is None:
        raise ValueError(f"{out}: a PNG needs a browser: {provenance.CHROMIUM_ADVICE}; .html and .json need none")
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="artifact-") as folder:
        path = Path(folder) / "figure.json"
        path.write_text(content, encoding="utf-8")
        if not stills.export([path], said.append):
            raise ValueError(f"{out}: {said[-1]}")
        return path.with_suffix(".png").read_bytes()
