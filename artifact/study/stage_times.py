"""Stage times: how long the stages of a decode step take on a GPU, published or measured, as files of data/stage_times.

NAME.csv has one row for each stage of each method and context, `COLUMNS`; NAME.json beside it says what was timed, on
what, and how. A stage that attends to blocks carries how many, as a ratio to |A|:

    qkv          what comes before selection and speculation; may be missing, then it is in another stage
    selection    scores and top-k
    attention    over A, with the kernel of serial DSA; ratio 1
    speculation  over P, with the kernel that can be continued; one row a ratio. May be missing
    repair       the same, continued over M; one row a ratio. May be missing
    ffn          what comes after
    total        all of them; may be missing, and is only compared

Where speculation and repair are missing, they are modelled from attention (`stages`), and say so.
"""

import json
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, model_validator

from artifact.prr import budget, timeline
from artifact.study import paths, printed, results, scale

STAGES = ("qkv", "selection", "attention", "speculation", "repair", "ffn", "total")
NEEDED = ("selection", "attention", "ffn")
COLUMNS = ("device", "model", "method", "page_tokens", "budget_count", "context_tokens", "stage", "attended_ratio",
           "time_us", "source", "origin")
_KEY = ["method", "context_tokens", "stage", "attended_ratio"]
RATIOS = tuple(i / 4 for i in range(1, 9))  # |P| / |A| of a modelled profile


class Manifest(BaseModel):
    """NAME.json: what NAME.csv is. A file that was timed here or elsewhere says with what, and vouches for its rows."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    what: str = Field(min_length=1)
    device: str = Field(min_length=1)
    per: Literal["layer", "step"]
    origin: Literal["published", "measured", "recorded"]
    source: str = Field(min_length=1)
    note: str | None = None
    driver: str | None = None
    versions: dict[str, str] | None = None
    command: str | None = None
    started: str | None = None
    sha256: str | None = None

    @model_validator(mode="after")
    def _vouched(self) -> "Manifest":
        if self.origin != "published":
            for name in ("driver", "versions", "command", "started", "sha256"):
                if getattr(self, name) is None:
                    raise ValueError(f"one with `{name}`, as its origin is {self.origin}")
        return self


class Timed(NamedTuple):
    """A stage-time file: its name, its rows and its manifest; the times again, µs by method, context and stage: of a
    stage that attends to blocks the (ratio, time) of each ratio, ascending."""

    name: str
    rows: pd.DataFrame
    manifest: Manifest
    times: dict[str, dict[int, dict[str, timeline.Points]]]


def names() -> list[str]:
    """The stage times that are there; times of kernels and of whole steps beside them are none."""
    found = (path.stem for path in (paths.data_dir() / "stage_times").glob("*.csv"))
    return sorted(name for name in found if not name.startswith(("kernels", "steps_")))


def read(source: str | Path) -> Timed:
    """A file of data/stage_times by its name, or another by its path. Raises ValueError, one line, for a name there is
    not, and for rows that are not whole: a missing column or stage, an unknown one, a time that is negative or no
    number, a key that stands there twice, several devices or models, and a manifest that does not fit."""
    path = Path(source)
    if path.suffix != ".csv":
        if str(source) not in names():
            raise ValueError(f"stage times are {str(source)!r}; allowed: {', '.join(names())}, or a CSV's path")
        path = paths.data_dir() / "stage_times" / f"{source}.csv"
    rows = results.read(path)
    manifest = scale.check(_json(path.with_suffix(".json")), Manifest, str(path.with_suffix(".json")))
    try:
        check(rows)
        if rows["device"].iloc[0] != manifest.device or rows["origin"].iloc[0] != manifest.origin:
            raise ValueError(f"device and origin are {rows['device'].iloc[0]}, {rows['origin'].iloc[0]}; its manifest "
                             f"says {manifest.device}, {manifest.origin}")
        if manifest.sha256 is not None and manifest.sha256 != results.sha256(path):
            raise ValueError("changed after it was timed: its sha256 is not its manifest's")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    times: dict = {}
    for row in rows.sort_values("attended_ratio", kind="stable").itertuples():
        at = times.setdefault(row.method, {}).setdefault(int(row.context_tokens), {})
        at[row.stage] = (*at.get(row.stage, ()), (float(row.attended_ratio), float(row.time_us)))
    return Timed(path.stem, rows, manifest, times)


def write(path: Path, rows: pd.DataFrame, **said: object) -> None:
    """Rows of `COLUMNS` as `path`, a CSV, and `said`, the manifest's keys but for sha256, as JSON beside it.

    Raises ValueError as `read` does, before anything is written.
    """
    path = Path(path)
    check(rows)
    draft = scale.check({**said, "sha256": ""}, Manifest, f"manifest of {path}")
    results.write(rows[list(COLUMNS)], path)
    content = draft.model_copy(update={"sha256": results.sha256(path)}).model_dump(exclude_none=True)
    results.write_text(path.with_suffix(".json"), json.dumps(content, indent=1) + "\n")


def check(rows: pd.DataFrame) -> None:
    """ValueError, one line, for rows that are not a whole profile of one device and model."""
    for column in COLUMNS:
        if column not in rows:
            raise ValueError(f"no column {column!r}; needed: {', '.join(COLUMNS)}")
    if rows.empty:
        raise ValueError("no rows")
    unknown = sorted(set(map(str, rows["stage"])) - set(STAGES))
    if unknown:
        raise ValueError(f"stage is {unknown[0]!r}; allowed: {', '.join(STAGES)}")
    for column, least in (("time_us", 0), ("context_tokens", 1)):
        found = pd.to_numeric(rows[column], errors="coerce")
        bad = rows[~((found >= least) & (found < float("inf")))]
        if len(bad):
            raise ValueError(f"{_where(bad.iloc[0])}: {column} is {bad[column].iloc[0]}; allowed: numbers of at least "
                             f"{least}")
    for column in ("device", "model", "origin"):
        _same(rows, column, "a file is of one")
    for method, part in rows.groupby("method", sort=False):
        for column in ("page_tokens", "budget_count"):
            _same(part, column, f"{method} is timed with one")
    repeated = rows[rows.duplicated(_KEY)]
    if len(repeated):
        raise ValueError(f"{_where(repeated.iloc[0])} stands there twice")
    for (method, context), part in rows.groupby(["method", "context_tokens"], sort=False):
        lacking = [stage for stage in NEEDED if stage not in set(part["stage"])]
        if lacking:
            raise ValueError(f"{method} at {context} tokens has no stage {lacking[0]}; needed: {', '.join(NEEDED)}")
    _even(rows)
    for stage, part in rows.groupby("stage", sort=False):
        ratios, attends = part["attended_ratio"], stage in ("attention", "speculation", "repair")
        if not ((ratios == 1) if stage == "attention" else ratios.ge(0) if attends else ratios.isna()).all():
            wanted = "1" if stage == "attention" else "at least 0" if attends else "none"
            raise ValueError(f"attended_ratio of {stage} is {ratios.iloc[0]}; allowed: {wanted}")


def contexts(found: Timed, method: str) -> list[int]:
    """The contexts that a method was timed at, tokens. ValueError for a method that was not."""
    if method not in found.times:
        raise ValueError(f"method is {method!r}; {found.name} has: {', '.join(found.rows['method'].unique())}")
    return sorted(found.times[method])


def stages(found: Timed, method: str, context: int, kernel_ratio: float | None = None,
           fixed_frac: float = 0.0) -> timeline.Stages:
    """The stages of a method at a context that was timed, µs a step or a layer as the file's are.

    Where the file has no speculation or repair, its attention stands for both: `kernel_ratio` times faster (None: the
    mean of the paper's Table 3), with `fixed_frac` of it the same for any number of blocks. ValueError for a context
    that was not timed.
    """
    known = contexts(found, method)
    if context not in known:
        raise ValueError(f"context is {context} tokens; {found.name} has {method} at: {', '.join(map(str, known))}")
    at = found.times[method][context]
    single = {stage: points[0][1] for stage, points in at.items()}
    law = timeline.affine(single["attention"], printed.kernel_mean() if kernel_ratio is None else kernel_ratio,
                          fixed_frac)
    return timeline.Stages(single.get("qkv", 0.0), single["selection"], single["attention"], single["ffn"],
                           at.get("speculation", law), at.get("repair", law))


def modelled(found: Timed) -> bool:
    """Whether speculation or repair is not in the file and so follows from its attention."""
    return not {"speculation", "repair"} <= set(found.rows["stage"])


def profile(found: Timed, method: str, kernel_ratio: float | None = None, fixed_frac: float = 0.0) -> budget.Profile:
    """What a budget is fitted to: selection and speculation over context × |P| / |A|; as `stages` where modelled."""
    known = contexts(found, method)
    rows = found.rows[found.rows["method"] == method]
    each = [stages(found, method, context, kernel_ratio, fixed_frac) for context in known]
    timed = rows[rows["stage"] == "speculation"]
    ratios = sorted(timed["attended_ratio"].unique()) if len(timed) else list(RATIOS)
    pages, budgets = (None if pd.isna(rows[name].iloc[0]) else int(rows[name].iloc[0])
                      for name in ("page_tokens", "budget_count"))
    return budget.Profile(
        device=str(rows["device"].iloc[0]), model=str(rows["model"].iloc[0]), method=method, page_tokens=pages,
        budget_count=budgets, contexts=tuple(known), ratios=tuple(float(ratio) for ratio in ratios),
        selection=tuple(one.selection for one in each),
        speculation=tuple(tuple(timeline.at(one.speculation, ratio, "speculation") for ratio in ratios)
                          for one in each))


def _even(rows):
    """ValueError for a context that lacks a stage, or a ratio of it, that another of its method has, and for a method
    that lacks a stage: it would be modelled, or read between its neighbours, and nobody told."""
    def stages_of(part):
        return set(zip(part["stage"], part["attended_ratio"].fillna(-1), strict=True))

    needed = {method: stages_of(part) for method, part in rows.groupby("method", sort=False)}
    for (method, context), part in rows.groupby(["method", "context_tokens"], sort=False):
        for stage, ratio in sorted(needed[method] - stages_of(part)):
            of = f" of {ratio:g} |A|" if ratio >= 0 else ""
            raise ValueError(f"{method} at {context} tokens has no stage {stage}{of}, which it has at others")
        for stage in sorted(set(rows["stage"]) - set(part["stage"])):
            raise ValueError(f"{method} at {context} tokens has no stage {stage}, which other methods have")


def _same(rows, column, why):
    values = rows[column].dropna().unique()
    if len(values) > 1 or (len(values) == 1 and rows[column].isna().any()):
        said = " and ".join(map(str, rows[column].unique()[:2]))
        raise ValueError(f"{column} is {said}; {why} {column}")


def _where(row):
    ratio = "" if pd.isna(row["attended_ratio"]) else f" of {row['attended_ratio']:g} |A|"
    return f"{row['method']} at {row['context_tokens']} tokens, {row['stage']}{ratio}"


def _json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; it says what the stage times beside it are") from None
    except ValueError:
        raise ValueError(f"{path}: not JSON") from None
