"""Claims: what a paper printed or the artifact asserts, against what a run gave; each with one verdict.

A verdict is `reproduced` (within the tolerance), `within-deviation` (outside it, inside a deviation that the claim
states with its reason), `contradicted`, or `not-measured-here` (with what it needs). A claim holds when its verdict is
the one it expects; one that is not measured here does not fail.
"""

from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from artifact.study import paths, results
from artifact.study import scale as scales

VERDICTS = ("reproduced", "within-deviation", "contradicted", "not-measured-here")
FILE = "verdicts.csv"
COLUMNS = ("id", "work", "scale", "tier", "published", "claimed", "ours", "tolerance", "origin", "verdict", "expected",
           "holds", "notebook", "result", "metric", "figure", "text", "source", "reason")


class Deviation(BaseModel):
    """How far beyond its tolerance a result may lie, and why."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    within: PositiveFloat | PositiveInt
    reason: str = Field(min_length=1)


class Claim(BaseModel):
    """One entry of data/claims.yml; the file's head describes the keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    work: Literal["kv-pimple", "prr", "artifact"]
    text: str = Field(min_length=1)
    notebook: str
    result: str = Field(pattern=r"\.csv$")
    where: dict[str, str | int | float | bool | None]
    metric: str
    published: str | None
    claimed: str | None = None
    source: str = Field(min_length=1)
    tolerance: Literal["digits"] | PositiveFloat | PositiveInt
    reason: str | None = None
    scale: Literal["smoke", "full"]
    tier: Literal["cpu", "model", "gpu"]
    expected: Literal["reproduced", "within-deviation", "contradicted"] = "reproduced"
    deviation: Deviation | None = None
    needs: str | None = None
    figure: str | None = None

    @field_validator("published", "claimed")
    @classmethod
    def _number(cls, text: str | None) -> str | None:
        try:
            finite = text is None or Decimal(text).is_finite()
        except InvalidOperation:
            finite = False
        if not finite:
            raise ValueError('a number in quotes, as printed, like "0.77"')
        return text

    @model_validator(mode="after")
    def _consistent(self) -> "Claim":
        if (self.published is None) == (self.claimed is None):
            raise ValueError("a claim with either `published` or `claimed`, the other null")
        if self.tolerance != "digits" and not self.reason:
            raise ValueError("a claim with a `reason` for its numeric tolerance")
        if self.expected == "within-deviation" and self.deviation is None:
            raise ValueError("a claim with a `deviation` when that is expected")
        if self.tier != "cpu" and not self.needs:
            raise ValueError(f"a claim that says in `needs` what tier {self.tier} takes")
        return self

    @property
    def target(self) -> Decimal:
        """The number to meet: the published one, or the artifact's own."""
        return Decimal(self.published if self.published is not None else self.claimed)

    @property
    def within(self) -> Decimal:
        """The tolerance as a number; `digits` is half a unit of the last printed digit."""
        if self.tolerance == "digits":
            return Decimal((0, (5,), self.target.as_tuple().exponent - 1))
        return Decimal(repr(self.tolerance))


def load(path: Path | None = None) -> list[Claim]:
    """The claims of a file (None: data/claims.yml). ValueError, one line, naming the file and the claim."""
    path = paths.data_dir() / "claims.yml" if path is None else Path(path)
    entries = scales.read_yaml(path)
    if not isinstance(entries, list):
        raise ValueError(f"{path}: must be a list of claims")
    claims: dict[str, Claim] = {}
    for number, entry in enumerate(entries, 1):
        for one in _cells(entry, path) if isinstance(entry, dict) and "cells" in entry else [entry]:
            name = one.get("id", f"number {number}") if isinstance(one, dict) else f"number {number}"
            if name in claims:
                raise ValueError(f"{path}: claim {name} stands there twice")
            claims[name] = scales.check(one, Claim, f"{path}: claim {name}")
    return list(claims.values())


def _cells(entry: dict, path: Path) -> list[dict]:
    """The claims of an entry with `cells`: its other keys, and of each row of that table the columns that are keys;
    a row's other columns that are filled say where, in YAML's types."""
    table = path.parent / "published" / str(entry["cells"])
    try:
        rows = pd.read_csv(table, dtype=str, keep_default_na=False).to_dict("records")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cells are {entry['cells']!r}; allowed: a table of data/published: {error}") from None
    found = []
    for row in rows:
        filled = {name: text for name, text in row.items() if text}
        own = {name: scales.scalar(text) if name == "tolerance" else text for name, text in filled.items()
               if name in Claim.model_fields}
        where = {name: scales.scalar(text) for name, text in filled.items() if name not in Claim.model_fields}
        found.append({"published": None} | {name: value for name, value in entry.items() if name != "cells"}
                     | own | {"where": entry.get("where", {}) | where})
    return found


def of(notebook: str) -> list[Claim]:
    """The claims that a notebook decides; all of them for one that decides none and so can only show them."""
    claims = load()
    return [claim for claim in claims if claim.notebook == notebook] or claims


def judge(claim: Claim, ours: float) -> str:
    """The verdict on a value. The interval is closed below and open above, as rounding half up is."""
    difference = Decimal(repr(float(ours))) - claim.target
    if -claim.within <= difference < claim.within:
        return "reproduced"
    if claim.deviation is not None and abs(difference) <= Decimal(repr(claim.deviation.within)):
        return "within-deviation"
    return "contradicted"


def lookup(claim: Claim, frame: pd.DataFrame) -> tuple[float, str]:
    """The value and origin of the one row that the claim names; ValueError naming the claim when it is not one."""
    for column in (*claim.where, claim.metric):
        if column not in frame:
            raise ValueError(f"claim {claim.id}: {claim.result} has no column {column!r}; "
                             f"it has: {', '.join(frame.columns)}")
    rows = frame
    for column, value in claim.where.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    wanted = ", ".join(f"{column} {value}" for column, value in claim.where.items()) or "every row"
    if len(rows) != 1:
        raise ValueError(f"claim {claim.id}: {wanted} is {len(rows)} rows of {claim.result}; it must be one")
    value = rows[claim.metric].iloc[0]
    if not pd.api.types.is_number(value) or pd.isna(value):
        raise ValueError(f"claim {claim.id}: {claim.metric} is {value!r} where {wanted}; it must be a number")
    return float(value), str(rows["origin"].iloc[0])


def verdicts(scale: str, folder: Path, claims: list[Claim] | None = None, fresh: tuple[Path, ...] = ()) -> pd.DataFrame:
    """One row of `COLUMNS` a claim, judged at `scale` from the results below `folder` (the results of all scales).

    `claims`: None = all of data/claims.yml. `fresh`: results to read although their run has not finished, because it
    is this run that asks. Raises ValueError for a claim that names no single row, and for a result that was changed
    after its run.
    """
    claims = load() if claims is None else claims
    read, trusted = cache(results.read), cache(results.trusted)  # many claims look at one file
    rows = [_row(claim, scale, folder / scale / claim.notebook, read, trusted, fresh) for claim in claims]
    return pd.DataFrame(rows, columns=COLUMNS)


def _absent(claim: Claim, frame: pd.DataFrame) -> bool:
    """Whether a result has no row for a claim that needs more than a CPU: what it is about was not measured here."""
    rows = frame
    for column, value in claim.where.items():
        if column in rows:
            rows = rows[rows[column].isna() if value is None else rows[column] == value]
    return rows.empty


def written(ours: float | None, target: str) -> str | None:
    """Our value as text, with two digits more than the number that it is held against was printed with."""
    if ours is None or pd.isna(ours):
        return None
    return f"{ours:.{max(0, -Decimal(target).as_tuple().exponent) + 2}f}"


def write(frame: pd.DataFrame, scale: str, folder: Path) -> Path:
    """The verdicts of a scale as `folder`/SCALE/verdicts.csv, whole or not at all."""
    path = folder / scale / FILE
    results.write_text(path, frame.to_csv(index=False, lineterminator="\n"))
    return path


def counts(frame: pd.DataFrame) -> dict[str, int]:
    """How many claims there are, were decided, got each verdict, and failed (decided otherwise than expected)."""
    found = {f"{verdict.replace('-', '_')}_count": int((frame["verdict"] == verdict).sum()) for verdict in VERDICTS}
    decided = len(frame) - found["not_measured_here_count"]
    failed = len(frame) - int(frame["holds"].sum())
    return {"claims_count": len(frame), "decided_count": decided, **found, "failed_count": failed}


def _row(claim: Claim, scale: str, folder: Path, read: Callable, trusted: Callable, fresh: tuple[Path, ...]) -> dict:
    lacking = _lacking(claim, scale, folder, trusted, fresh)
    if lacking is None and claim.needs and _absent(claim, read(folder / claim.result)):
        lacking = f"needs {claim.needs}"
    ours, origin, verdict, reason = None, None, "not-measured-here", lacking
    if lacking is None:
        ours, origin = lookup(claim, read(folder / claim.result))
        verdict = judge(claim, ours)
        stated = claim.deviation.reason if claim.deviation and verdict == "within-deviation" else None
        reason = stated or claim.reason
    holds = verdict in (claim.expected, "within-deviation", "not-measured-here")
    return {**claim.model_dump(include=set(COLUMNS)), "tolerance": float(claim.within), "ours": ours, "origin": origin,
            "verdict": verdict, "holds": holds, "reason": reason}


def _lacking(claim: Claim, scale: str, folder: Path, trusted: Callable, fresh: tuple[Path, ...]) -> str | None:
    """Why the claim cannot be decided here, with what would decide it; None when it can."""
    run = f"run `artifact reproduce --scale {{}} --only {claim.notebook.split('_')[0]}`"
    if scales.ORDER.index(scale) < scales.ORDER.index(claim.scale):
        return run.format(claim.scale)
    if folder / claim.result in fresh:
        return None
    try:
        if claim.result in trusted(folder)["files"]:
            return None
    except ValueError as error:
        if "changed after" in str(error):
            raise ValueError(f"claim {claim.id}: {error}; {run.format(scale)} again") from None
    return f"needs {claim.needs}" if claim.needs else run.format(scale)
