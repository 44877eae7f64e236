"""Whether what a form's line points to is there: a file, a target, a section, a key, a finished run, claims."""

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from artifact.study import books, claims, paths, results
from artifact.study import scale as scales

KINDS = ("file", "make", "readme", "citation", "run", "claims")


def found(reference: str, home: Path) -> tuple[bool, str]:
    """(is it there, where or what instead) for one reference, as data/evaluation.yml's head explains them.

    `home`: the results of all scales. Raises ValueError for a reference of no kind.
    """
    kind, _, name = reference.partition(":")
    if kind not in KINDS or not name:
        raise ValueError(f"evidence {reference!r} is not one of: {', '.join(f'{kind}:...' for kind in KINDS)}")
    if kind == "run":
        return _run(name, home)
    if kind == "claims":
        return _claims(name, home)
    checkout = paths.root()
    if checkout is None:
        return False, f"{name}: this is an installed package; a checkout would show it"
    if kind == "file":
        return (checkout / name).exists(), f"`{name}`"
    if kind == "make":
        there = re.search(rf"^{re.escape(name)}:", _text(checkout / "Makefile"), re.MULTILINE) is not None
        return there, f"`make {name}`"
    if kind == "readme":
        there = re.search(rf"^#+ {re.escape(name)}$", _text(checkout / "README.md"), re.MULTILINE) is not None
        return there, f"README, “{name}”"
    return bool(citation().get(name)), f"`{name}` in `CITATION.cff`"


def citation() -> dict:
    """CITATION.cff of the checkout, empty without one."""
    checkout = paths.root()
    path = checkout / "CITATION.cff" if checkout else None
    content = scales.read_yaml(path) if path and path.is_file() else {}
    return content if isinstance(content, dict) else {}


def recorded() -> Path:
    """The results of all scales that are shipped: our own full run."""
    return paths.data_dir() / "recorded"


def finished(scale: str, home: Path) -> dict[str, dict]:
    """The manifests of `scale`'s finished runs below `home`, by notebook; changed ones do not count."""
    runs = {}
    for path in sorted((home / scale).glob(f"*/{results.MANIFEST}")):
        try:
            runs[path.parent.name] = results.trusted(path.parent)
        except ValueError:
            continue
    return runs


def lacking(scale: str, home: Path) -> list[str]:
    """The notebooks with results that have no finished run at `scale` below `home`."""
    runs = finished(scale, home)
    return [book.name for book in books.shelf() if book.results and book.name not in runs]


def undecided(judged: pd.DataFrame, scale: str) -> list[str]:
    """Ids of claims that `scale` and a CPU decide but that were not decided: a run is missing."""
    small = judged["scale"].map(scales.ORDER.index) <= scales.ORDER.index(scale)
    return list(judged[(judged["tier"] == "cpu") & small & (judged["verdict"] == "not-measured-here")]["id"])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _places(home: Path) -> Sequence[tuple[str, Path]]:
    ours = ("in our recorded run", recorded())
    return [ours] if home == recorded() else [("here", home), ours]


def _run(scale: str, home: Path) -> tuple[bool, str]:
    scales.load(scale)
    for larger in scales.ORDER[scales.ORDER.index(scale):]:
        for where, root in _places(home):
            if not lacking(larger, root):
                return True, f"all notebooks finished {where} at scale {larger}"
    return False, f"no finished run here of {', '.join(lacking(scale, home))} at scale {scale}"


def _claims(scale: str, home: Path) -> tuple[bool, str]:
    scales.load(scale)
    for where, root in _places(home):
        if not finished(scale, root):
            continue
        judged = claims.verdicts(scale, root)
        wrong, open_ = list(judged[~judged["holds"]]["id"]), undecided(judged, scale)
        decided = claims.counts(judged)["decided_count"]
        if wrong or open_:
            bad = [f"{len(ids)} {how}: {', '.join(ids[:5])}" for ids, how in
                   ((wrong, "do not hold"), (open_, "are not decided")) if ids]
            return False, f"{where} {'; '.join(bad)}"
        return True, f"{decided} claims decided {where}, all as expected"
    return False, f"no finished run at scale {scale}"
