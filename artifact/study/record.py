"""Our own full run, kept in the tree: its CSVs, manifests and pictures, so that figures are seen before any compute.

`python -m artifact.study.record [03 …]` copies what `data/results/full` holds of all or some notebooks, and only what
their manifests vouch for, and fills the README's tables from it.
"""

import io
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from artifact.study import books, paths, readme, results, stills

_WIDE = 1  # pixels per point: half of what a run draws, enough for a screen
_KEPT = ("notebook", "scale", "seed", "commit", "dirty", "started", "duration_s", "peak_rss_bytes", "os", "cpu",
         "python", "versions")  # fmt: skip


def record(folder: Path | None = None, target: Path | None = None, only: Sequence[str] = ()) -> list[str]:
    """Copies each notebook's results and draws its figures again, smaller; returns the names written.

    `folder`: None = data/results/full; `target`: None = data/recorded/full; `only`: the first two digits of some
    notebooks. Raises ValueError for a notebook whose results its manifest does not vouch for: then nothing of it is
    written.
    """
    folder = paths.results_dir() / "full" if folder is None else Path(folder)
    target = paths.data_dir() / "recorded" / "full" if target is None else Path(target)
    written = []
    for book in books.shelf():
        if only and book.name[:2] not in only:
            continue
        manifest = results.trusted(folder / book.name)
        names = [*book.results, *_pictures(folder / book.name, book.figures, target / book.name)]
        for name in book.results:
            results.write_bytes(target / book.name / name, (folder / book.name / name).read_bytes())
        if names:
            facts = {key: manifest[key] for key in _KEPT if key in manifest}
            results.write_manifest(target / book.name, names, origin="recorded", **facts)
        written += [f"{book.name}/{name}" for name in names]
    return written


def _small(path: Path) -> bytes:
    """The PNG at `path` in 128 colours: a quarter of its size, and the eye finds no difference."""
    from PIL import Image

    kept = io.BytesIO()
    few = Image.open(path).convert("RGB").quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(kept, "PNG", optimize=True)
    return kept.getvalue()


def _pictures(home: Path, keys: tuple[str, ...], target: Path) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="artifact-") as draft:
        figures = [Path(draft) / f"{key}.json" for key in keys]
        for path in figures:
            shutil.copy(home / "figures" / path.name, path)
        stills.export(figures, lambda line: print(line, file=sys.stderr), scale=_WIDE)
        drawn = [path.with_suffix(".png") for path in figures if path.with_suffix(".png").is_file()]
        for path in drawn:
            results.write_bytes(target / "figures" / path.name, _small(path))
        return [f"figures/{path.name}" for path in drawn]


if __name__ == "__main__":
    print(json.dumps(record(only=sys.argv[1:]), indent=1))
    readme.refresh()
