"""The notebook chain: each notebook once, in order, in a fresh kernel; strict about success, and resumable.

A notebook has succeeded when `execute` finds nothing wrong and everything its metadata declares exists and is newer
than its start. Then its manifest is written, with digests of all that its results depend on: the notebook, the code,
the data, the scale, the installed versions, and what it `needs`. The next run skips it as long as these and the
results are unchanged.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from errno import EACCES, EDQUOT, ENOSPC, EPERM, EROFS
from pathlib import Path

from artifact.study import books, execute, paths, results, run, stills
from artifact.study import scale as scales

LIMIT_S = 7200.0
STATES = ("done", "up to date", "failed", "skipped")
_ENVIRONMENT = (EACCES, EPERM, EROFS, ENOSPC, EDQUOT)


def notebook(name: str, scale: str, results: str | Path | None = None) -> run.Run:
    """What every notebook opens with: its run at a scale, below `results` (None: the default results folder).

    Raises ValueError for a scale there is not.
    """
    size = scales.load(scale)
    return run.Run(name, size, paths.results_dir(results) / size.name / name)


def reproduce(scale: str, *, only: Sequence[str] = (), force: bool = False, results_dir: str | Path | None = None,
              notebooks: Path | None = None, limit_s: float = LIMIT_S,
              say: Callable[[str], None] = lambda line: None) -> list[dict]:
    """Runs the chain at a scale, or of it what `only` picks by prefix and what that needs; skips what is up to date.

    `force`: run the picked ones anyhow. `notebooks`: a folder of others than the checkout's. `limit_s`: seconds for
    one notebook. `say`: takes lines of progress. Returns, for each notebook, `notebook`, `state` (one of
    `STATES`), `reason` and `duration_s`; one that fails does not stop those that do not need it. Raises
    ValueError for a bad scale, prefix or notebook, OSError for a results folder that cannot be written.
    """
    size = scales.load(scale)
    shelf = books.shelf(notebooks)
    asked = books.pick(shelf, only)
    folder = paths.results_dir(results_dir) / size.name
    outcomes: dict[str, dict] = {}
    with _alone(folder):
        for book in books.with_needs(shelf, asked):
            bad = [need for need in book.needs if outcomes[need]["state"] in ("failed", "skipped")]
            if bad:
                outcome = {"state": "skipped", "reason": f"needs {bad[0]}, which did not succeed", "duration_s": 0.0}
            else:
                inputs = books.inputs(book, size, folder)
                why = "forced" if force and book in asked else _outdated(book, inputs, folder)
                outcome = _run(book, size, folder, inputs, why, limit_s, say) if why else _kept(folder / book.name)
            outcomes[book.name] = {"notebook": book.name, **outcome}
            say(f"{book.name}: {outcome['state']}" + (f", {outcome['reason']}" if outcome["reason"] else "")
                + (f" ({outcome['duration_s']:.1f} s)" if outcome["state"] in ("done", "failed") else ""))
        stills.export([folder / book.name / f"figures/{key}.json" for book in shelf for key in book.figures
                       if outcomes.get(book.name, {}).get("state") in ("done", "up to date")], say)
    return list(outcomes.values())


def status(scale: str, results_dir: str | Path | None = None, notebooks: Path | None = None) -> list[dict]:
    """Each notebook's `state` at a scale (up to date, out of date, not run, failed), `reason`, `started`,
    `duration_s`, without running anything."""
    size = scales.load(scale)
    folder = paths.results_dir(results_dir) / size.name
    rows: dict[str, dict] = {}
    for book in books.shelf(notebooks):
        stale = [need for need in book.needs if rows[need]["state"] != "up to date"]
        why = f"needs {stale[0]}, {rows[stale[0]]['state']}" if stale else \
            _outdated(book, books.inputs(book, size, folder), folder)
        try:
            manifest = json.loads((folder / book.name / results.MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            manifest = {}
        state = "up to date" if why is None else "out of date" if manifest else "not run"
        if not manifest and (folder / book.name / "failed.ipynb").is_file():
            state, why = "failed", f"see {folder / book.name / 'failed.ipynb'}"
        rows[book.name] = {"notebook": book.name, "state": state, "reason": why, "started": manifest.get("started"),
                           "duration_s": manifest.get("duration_s"), "results_count": len(book.results)}
    return list(rows.values())


def _run(book: books.Book, size: scales.Scale, folder: Path, inputs: dict, why: str, limit_s: float,
         say: Callable[[str], None]) -> dict:
    say(f"{book.name}: running ({why})")
    home = folder / book.name
    home.mkdir(parents=True, exist_ok=True)
    results.distrust(home)
    running, failed = home / ".running.ipynb", home / "failed.ipynb"
    failed.unlink(missing_ok=True)
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    marker = home / ".started"  # the results' own file system says what is newer, not this machine's clock
    results.write_text(marker, started)
    try:
        error = _attempt(book, running, size, folder, limit_s, say) or _undelivered(book, home, marker)
        duration_s = round(time.monotonic() - clock, 3)
        if running.is_file():
            os.replace(running, failed if error else home / "notebook.ipynb")
    finally:
        running.unlink(missing_ok=True)
        marker.unlink(missing_ok=True)
    if error:
        results.distrust(home)
        number = re.search(r"\[Errno (\d+)\]", error)
        if number and int(number[1]) in _ENVIRONMENT:
            raise OSError(f"{book.name}: {error}")
        return {"state": "failed", "reason": error, "duration_s": duration_s}
    _seal(book, size, home, inputs, started, duration_s)
    return {"state": "done", "reason": None, "duration_s": duration_s}


def _attempt(book: books.Book, output: Path, size: scales.Scale, folder: Path, limit_s: float,
             say: Callable[[str], None]) -> str | None:
    told = [0.0]

    def tick(elapsed_s: float) -> None:
        if elapsed_s - told[0] >= 15:
            told[0] = elapsed_s
            say(f"{book.name}: {elapsed_s:.0f} s")

    try:
        prepared = execute.prepare(book.content)
    except ValueError as error:
        return str(error)
    return execute.execute(prepared, output, {"scale": size.name, "results": str(folder.parent)}, limit_s, tick)


def _undelivered(book: books.Book, home: Path, marker: Path) -> str | None:
    for name in book.declared:
        if not (home / name).is_file():
            return f"did not write {name}, which it declares"
        if (home / name).stat().st_mtime_ns < marker.stat().st_mtime_ns:
            return f"did not write {name}, which it declares; the one there is older than the run"
    for name in book.results:
        try:
            results.read(home / name)
        except ValueError as error:
            return str(error)
    return None


def _seal(book: books.Book, size: scales.Scale, home: Path, inputs: dict, started: str, duration_s: float) -> None:
    """Writes the manifest that makes the run count; what the notebook itself noted in its manifest is kept."""
    try:
        noted = results.trusted(home)
    except ValueError:
        noted = {"files": {}, **run.facts()}
    files = [*book.declared, *noted.pop("files")]
    results.write_manifest(home, files, **{**noted, "notebook": book.name, "scale": size.name, "seed": size.seed,
                                           "started": started, "duration_s": duration_s, "inputs": inputs})


def _outdated(book: books.Book, inputs: dict, folder: Path) -> str | None:
    """Why the notebook must run; None when its results are whole and nothing they depend on has changed."""
    try:
        manifest = results.trusted(folder / book.name)
    except ValueError as error:
        return str(error).replace(f"{folder}{os.sep}", "")
    before = manifest.get("inputs")
    if not isinstance(before, dict):
        return "last run by hand"
    changed = [key for key in inputs if before.get(key) != inputs[key]]
    return f"changed: {', '.join(changed)}" if changed else None


def _kept(home: Path) -> dict:
    return {"state": "up to date", "reason": None, "duration_s": results.trusted(home).get("duration_s")}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds `folder` for this run; the lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another run is writing there; wait for it, or give --results") from None
        yield
