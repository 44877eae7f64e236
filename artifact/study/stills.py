"""Still images: a PNG beside each figure's JSON, all drawn by one browser, within a bounded time."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from artifact.study import execute, provenance, results

_PNG_END = b"IEND\xaeB`\x82"  # the last bytes of a whole PNG


def export(figures: Sequence[Path], say: Callable[[str], None], limit_s: float | None = None, scale: float = 2) -> int:
    """Draws those figures (their JSON files) whose PNG is missing or older; returns how many were drawn.

    `scale`: pixels per point. `limit_s`: None = 60 s and 10 s a figure. Without a browser, or when it fails, that is
    said in one line and the rest goes on: a still image is never worth a run.
    """
    wanted = [path for path in figures if path.is_file() and not _fresh(path)]
    if not wanted:
        return 0
    if provenance.chromium()[0] is None:
        say(f"still images: {len(wanted)} not drawn, no browser found: {provenance.CHROMIUM_ADVICE}, and run again")
        return 0
    say(f"still images: drawing {len(wanted)}")
    limit_s = 60 + 10 * len(wanted) if limit_s is None else limit_s
    with tempfile.TemporaryDirectory(prefix="artifact-", ignore_cleanup_errors=True) as folder:
        drafts = [Path(folder) / f"{number}.png" for number in range(len(wanted))]
        request = json.dumps({"figures": list(map(str, wanted)), "files": list(map(str, drafts)), "scale": scale})
        child = subprocess.Popen([sys.executable, "-m", "artifact.study.stills"], stdin=subprocess.PIPE, text=True,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        try:
            said = child.communicate(request, timeout=limit_s)[1].strip()
            trouble = said.splitlines()[-1] if child.returncode and said else None
        except subprocess.TimeoutExpired:
            trouble = f"the browser took more than {limit_s:g} s"
        finally:
            execute.end(child.pid)
            child.wait()
        images = [draft.read_bytes() if draft.is_file() else b"" for draft in drafts]
    drawn = [(path, image) for path, image in zip(wanted, images, strict=True) if image.endswith(_PNG_END)]
    for path, image in drawn:
        results.write_bytes(path.with_suffix(".png"), image)
    if len(drawn) < len(wanted):
        say(f"still images: {len(wanted) - len(drawn)} not drawn: {trouble or 'no reason given'}")
    return len(drawn)


def _fresh(path: Path) -> bool:
    image = path.with_suffix(".png")
    return image.is_file() and image.stat().st_mtime_ns >= path.stat().st_mtime_ns


if __name__ == "__main__":
    import plotly.io

    asked = json.load(sys.stdin)
    drawn = [plotly.io.read_json(path) for path in asked["figures"]]
    plotly.io.write_images(drawn, asked["files"], scale=asked["scale"], width=[figure.layout.width for figure in drawn],
                           height=[figure.layout.height for figure in drawn])  # it does not read them from the layout
