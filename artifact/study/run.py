"""A notebook's run: where its results, figures and tables go, its claims' verdicts, and the manifest at its end."""

import contextlib
import json
import resource
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import psutil

import artifact
from artifact.study import claims, provenance, results
from artifact.study.scale import Scale

PLOTLY = "plotly.min.js"
_LOOK_S, _GROWTH = 0.5, 1.02
_SHOWN = ["id", "text", "published", "claimed", "ours", "tolerance", "origin", "verdict", "reason"]


class Run:
    """Opened by `chain.notebook`; `scale` and `folder` are for reading, all that is written goes through here.

    The first thing written takes the manifest of an earlier run away, `close` writes a new one: in between, nothing in
    the folder counts as finished.
    """

    def __init__(self, name: str, scale: Scale, folder: Path) -> None:
        self.name, self.scale, self.folder = name, scale, folder
        self._files: list[str] = []
        self._memory = _Memory()
        self._started, self._clock = datetime.now(UTC), time.monotonic()

    def write(self, name: str, frame: pd.DataFrame) -> None:
        """A tidy frame as the result `name` (`headline.csv`; durations in a `headline.timing.csv` of their own)."""
        results.write(frame, self._path(name))

    def figure(self, key: str, frame: pd.DataFrame) -> None:
        """Draws figure `key` of `frame` and shows it; keeps it as JSON and HTML, and the frame as CSV beside them."""
        from IPython.display import display

        from artifact.study import figures

        drawn = figures.draw(key, frame)
        self._plotly()
        results.write(frame, self._path(f"figures/{key}.csv"))
        results.write_text(self._path(f"figures/{key}.json"), drawn.to_json())
        results.write_text(self._path(f"figures/{key}.html"), drawn.to_html(
            include_plotlyjs=f"../../{PLOTLY}", div_id=f"figure-{key}", config={"displaylogo": False}))
        display({"application/vnd.plotly.v1+json": json.loads(drawn.to_json()), "text/plain": f"figure {key}"},
                raw=True, metadata={"artifact": {"figure": key}})

    def table(self, key: str, frame: pd.DataFrame) -> None:
        """Shows `frame` as a table; keeps it as Markdown and LaTeX."""
        from IPython.display import Markdown, display

        from artifact.study import tables

        text = tables.markdown(frame)
        results.write_text(self._path(f"tables/{key}.md"), text)
        results.write_text(self._path(f"tables/{key}.tex"), tables.latex(frame))
        display(Markdown(text))

    def verdicts(self) -> pd.DataFrame:
        """One row, as people read it, for each claim that this notebook decides, or for all when it decides none."""
        fresh = tuple(self.folder / name for name in self._files)
        found = claims.verdicts(self.scale.name, self.folder.parents[1], claims.of(self.name), fresh)
        targets = found["published"].fillna(found["claimed"])
        ours = [claims.written(value, target) for value, target in zip(found["ours"], targets, strict=True)]
        return found.assign(ours=ours)[_SHOWN]

    def close(self) -> None:
        """Writes the manifest: the run is finished and what it wrote can be trusted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        results.write_manifest(
            self.folder, self._files, notebook=self.name, scale=self.scale.name, seed=self.scale.seed,
            started=self._started.isoformat(timespec="seconds"), duration_s=round(time.monotonic() - self._clock, 3),
            peak_rss_bytes=self._memory.peak_bytes(), **facts())

    def _path(self, name: str) -> Path:
        """Where `name` goes, noted for the manifest. Called before each writing."""
        if not self._files:
            results.distrust(self.folder)
        if name not in self._files:
            self._files.append(name)
        return self.folder / name

    def _plotly(self) -> None:
        path = self.folder.parent / PLOTLY
        if not path.is_file():
            from plotly.offline import get_plotlyjs

            results.write_text(path, get_plotlyjs())


def facts() -> dict[str, object]:
    """What every manifest says of where its results come from: commit, machine, versions."""
    commit, dirty = provenance.git_state()
    installed = provenance.versions()
    return {"artifact": artifact.__version__, "commit": commit, "dirty": dirty, **provenance.machine(),
            "versions": {name: installed[name] for name in sorted(provenance.pinned()[0]) if name in installed}}


class _Memory:
    """The most memory that this process held, or it and its children together, which are looked at while there are any.

    Pages that they share count once where the system tells; since it walks all pages for that, and holds the processes
    up meanwhile, it is asked when they have grown.
    """

    def __init__(self) -> None:
        self._together = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def peak_bytes(self) -> int:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return max(own, self._together)

    def _watch(self):
        this, grown = psutil.Process(), 0
        while True:
            time.sleep(_LOOK_S)
            with contextlib.suppress(psutil.Error):  # one that has just ended
                family = [this, *this.children(recursive=True)]
                resident = sum(process.memory_info().rss for process in family)
                if len(family) > 1 and resident > _GROWTH * grown:
                    grown = resident
                    self._together = max(self._together, sum(map(_held_bytes, family)))


def _held_bytes(process) -> int:
    told = process.memory_full_info()
    return getattr(told, "pss", told.rss)
