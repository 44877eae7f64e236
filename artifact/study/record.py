"""Our own full run, kept in the tree: its CSVs, manifests and pictures, so that figures are seen before any compute.

`python -m artifact.study.record [03 …]` copies what `data/results/full` holds of all or some notebooks, and only what
their manifests vouch for, and fills the README's tables from it. `--redraw` instead draws what is kept once more, after
figures have changed their look.
"""

import io
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from artifact.study import books, figures, paths, plate, readme, results, stills

_WIDE = 1  # pixels per point: half of what a run draws, enough for a screen
_KEPT = ("notebook", "scale", "seed", "commit", "dirty", "started", "duration_s", "peak_rss_bytes", "os", "cpu",
         "python", "versions")  # fmt: skip


def record(folder: Path | None = None, target: Path | None = None, only: Sequence[str] = ()) -> list[str]:
    """Copies each notebook's results and draws its figures again, smaller; returns the names written.

    `folder`: None = data/results/full; `target`: None = data/recorded/full; `only`: the first two digits of some
    notebooks. Raises ValueError for digits of none, and for a notebook whose results its manifest does not vouch for:
    then nothing of it is written.
    """
    folder = paths.results_dir() / "full" if folder is None else Path(folder)
    target = paths.data_dir() / "recorded" / "full" if target is None else Path(target)
    written = []
    for book in books.pick(books.shelf(), only):
        manifest = results.trusted(folder / book.name)
        with tempfile.TemporaryDirectory(prefix="artifact-") as draft:
            for key in book.figures:
                shutil.copy(folder / book.name / "figures" / f"{key}.json", draft)
            names = [*book.results, *_pictures(Path(draft), target / book.name)]
        for name in book.results:
            results.write_bytes(target / book.name / name, (folder / book.name / name).read_bytes())
        if names:
            _vouch(target / book.name, names, manifest)
        written += [f"{book.name}/{name}" for name in names]
    return written


def redraw(target: Path | None = None, only: Sequence[str] = ()) -> list[str]:
    """Draws the pictures of what is recorded again, from its CSVs; returns the names of those that changed.

    `target` and `only` as in `record`. Raises ValueError for a recorded result that is not as it was written.
    """
    target = paths.data_dir() / "recorded" / "full" if target is None else Path(target)
    changed = []
    for book in books.pick(books.shelf(), only):
        if not book.figures:
            continue
        manifest = results.trusted(target / book.name)
        with tempfile.TemporaryDirectory(prefix="artifact-") as draft:
            for key in book.figures:
                plot = figures.known(key)
                plate.write(key, target / plot.notebook / plot.result, Path(draft) / f"{key}.json")
            _pictures(Path(draft), target / book.name)
        before, names = manifest["files"], list(manifest["files"])
        after = _vouch(target / book.name, names, manifest)
        changed += [f"{book.name}/{name}" for name in names if before[name] != after[name]]
    return changed


def _vouch(folder: Path, names: list[str], manifest: dict) -> dict:
    """Writes `folder`'s manifest: of `names`, with what `manifest` says of their run; returns what it lists."""
    facts = {key: manifest[key] for key in _KEPT if key in manifest}
    results.write_manifest(folder, names, origin="recorded", **facts)
    return results.trusted(folder)["files"]


def _small(path: Path) -> bytes:
    """The PNG at `path` in 128 colours: a quarter of its size, and the eye finds no difference."""
    from PIL import Image

    kept = io.BytesIO()
    few = Image.open(path).convert("RGB").quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(kept, "PNG", optimize=True)
    return kept.getvalue()


def _pictures(draft: Path, target: Path) -> list[str]:
    """Draws the figures in `draft` into `target`/figures; returns the names written."""
    stills.export(sorted(draft.glob("*.json")), lambda line: print(line, file=sys.stderr), scale=_WIDE)
    drawn = sorted(draft.glob("*.png"))
    for path in drawn:
        results.write_bytes(target / "figures" / path.name, _small(path))
    return [f"figures/{path.name}" for path in drawn]


if __name__ == "__main__":
    redrawn, chosen = "--redraw" in sys.argv, [word for word in sys.argv[1:] if word != "--redraw"]
    print(json.dumps((redraw if redrawn else record)(only=chosen), indent=1))
    readme.refresh()
