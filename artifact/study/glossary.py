"""The glossary: symbols, words and metrics of data/glossary.yml, for notebook 00 and the report."""

from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from artifact.study import paths
from artifact.study import scale as scales


class Entry(BaseModel):
    """One term; `also` are its other names, in columns and code."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    term: str = Field(min_length=1)
    also: list[str]
    unit: str | None
    means: str = Field(min_length=1)


class Group(BaseModel):
    """Terms of one subject."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    group: str
    entries: list[Entry] = Field(min_length=1)


def load(path: Path | None = None) -> list[Group]:
    """The groups of a file (None: data/glossary.yml); ValueError, one line, for a faulty one or a name given twice."""
    path = paths.data_dir() / "glossary.yml" if path is None else Path(path)
    content = scales.read_yaml(path)
    if not isinstance(content, list):
        raise ValueError(f"{path}: must be a list of groups")
    groups = [scales.check(one, Group, f"{path}: group {number}") for number, one in enumerate(content, 1)]
    names: set[str] = set()
    for entry in (entry for group in groups for entry in group.entries):
        for name in (entry.term, *entry.also):
            if name in names:
                raise ValueError(f"{path}: {name!r} is explained twice")
            names.add(name)
    return groups


def frame(path: Path | None = None) -> pd.DataFrame:
    """The entries as a table for notebooks: subject, term, also, means."""
    return pd.DataFrame([
        {"subject": group.group, "term": entry.term, "also": ", ".join(f"`{name}`" for name in entry.also) or None,
         "means": entry.means + (f" Unit: {entry.unit}." if entry.unit else "")}
        for group in load(path) for entry in group.entries
    ])
