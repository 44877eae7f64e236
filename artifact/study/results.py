"""Result files: tidy CSV with an origin and units, and a manifest; written whole or not at all, read with suspicion.

Columns: numbers end in a unit of `UNITS` (`m3_bandwidth_gbps`, `throughput_tokens_per_s`, `m1_row_hit_frac_p05`) or
are one of `PLAIN`; text is free; `origin` says where each row's numbers come from. Durations never stand in a result:
they go to the manifest or to a `NAME.timing.csv` beside it.
"""

import hashlib
import json
import os
import re
from pathlib import Path

import pandas as pd

ORIGINS = ("measured", "recorded", "simulated", "modelled", "published")
UNITS = {  # suffix -> as people write it
    "us": "µs", "ns": "ns", "ms": "ms", "cycles": "cycles", "bytes": "bytes", "tokens": "tokens", "gbps": "GB/s",
    "gflops": "GFLOP/s", "frac": "fraction", "count": "count", "ratio": "ratio", "nats": "nats",
}
SETTINGS = (  # numbers that need no unit: what was asked for, and which one it is
    "seed", "headroom", "watermark", "max_batch", "arrival_rate", "window", "kv_shards", "spec_width", "spec_depth",
    "rid", "prefix_id", "seq_id", "step", "arrival_step", "until_step", "first_step", "last_step", "sample", "block",
    "region", "channel", "bank_group", "bank", "row", "column", "slot", "order_index", "blocks_per_region", "layer",
    "head", "alpha", "beta", "gamma", "degree", "ratio_degree",
)
SCORES = ("score", "level", "prediction", "least_selected")  # of a block, in the selection method's own measure
AUDITED = ("one", "other")  # numbers of the audit, whose unit is in its column `unit`
PLAIN = (*SETTINGS, *SCORES, *AUDITED, "region_spread", "published", "ours", "tolerance")  # a ratio, and a claim's own
TIMING = ".timing.csv"
MANIFEST = "manifest.json"
_UNIT = re.compile(rf"(?:^|_)(?P<unit>{'|'.join(UNITS)})(_per_(?P<per>[a-z]+))?(?P<rest>_(p\d\d|min|max|mean))?$")


def unit(column: str) -> str | None:
    """The unit a column's name carries, as people write it (`GB/s`, `tokens/s`); None when it carries none."""
    found = _UNIT.search(column)
    if found is None:
        return None
    name = UNITS[found["unit"]]
    return f"{name}/{found['per']}" if found["per"] else name


def stem(column: str) -> str:
    """The column's name without its unit: `m1_row_hit_frac_p05` -> `m1_row_hit_p05`."""
    found = _UNIT.search(column)
    return column[: found.start()] + (found["rest"] or "") if found else column


def write_bytes(path: Path, content: bytes) -> None:
    """`content` into `path` such that a reader sees the old file or the new one. Folders are made; OSError names it."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        _remove(draft)


def write_text(path: Path, content: str) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, content.encode("utf-8"))


def write(frame: pd.DataFrame, path: Path) -> None:
    """A tidy frame as CSV: floats that read back equal, LF, no index, the same bytes for the same frame.

    Raises ValueError for an empty frame, a missing or unknown origin, and a number without a unit in its name.
    """
    path = Path(path)
    _check(frame, path)
    write_text(path, frame.to_csv(index=False, lineterminator="\n"))


def read(path: Path) -> pd.DataFrame:
    """A result CSV; ValueError naming the file when it is missing, empty, unreadable or without a valid origin."""
    path = Path(path)
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (ValueError, IsADirectoryError) as error:  # pandas' parser errors and broken UTF-8 are ValueErrors
        raise ValueError(f"{path}: not a result CSV: {error}") from None
    _check(frame, path, units=False)
    return frame


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write_manifest(folder: Path, files: list[str], **facts: object) -> None:
    """`folder`/manifest.json: `facts` and the size and sha256 of each of `files` (names relative to `folder`).

    Written last: a folder without a manifest holds nothing to trust.
    """
    listed = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
              for name in sorted(set(files))}
    write_text(folder / MANIFEST, json.dumps({**facts, "files": listed}, indent=1) + "\n")


def trusted(folder: Path) -> dict:
    """The manifest of `folder` when every file it lists is there as it was written; else ValueError that says why."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder}: no finished run") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: not a manifest") from None
    for name, digest in files.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: missing, though its manifest lists it")
        if sha256(folder / name) != digest:
            raise ValueError(f"{folder / name}: changed after the run that wrote it")
    return manifest


def distrust(folder: Path) -> None:
    """Takes `folder`'s manifest away, and drafts that a killed run left: what is there no longer counts as finished."""
    _remove(folder / MANIFEST)
    for draft in folder.glob("**/.*.tmp"):
        _remove(draft)


def _check(frame: pd.DataFrame, path: Path, units: bool = True) -> None:
    if frame.empty:
        raise ValueError(f"{path}: no rows")
    if "origin" not in frame:
        raise ValueError(f"{path}: no column `origin`; every row says one of: {', '.join(ORIGINS)}")
    unknown = set(frame["origin"].unique()) - set(ORIGINS)
    if unknown:
        raise ValueError(f"{path}: origin {sorted(map(str, unknown))[0]!r} is not one of: {', '.join(ORIGINS)}")
    if not frame.columns.is_unique:
        raise ValueError(f"{path}: column {frame.columns[frame.columns.duplicated()][0]!r} stands there twice")
    for column in frame.columns if units else ():
        numeric = pd.api.types.is_numeric_dtype(frame[column]) and not pd.api.types.is_bool_dtype(frame[column])
        if numeric and column not in PLAIN and unit(column) is None:
            raise ValueError(f"{path}: column {column!r} has no unit; a number's name ends in one of: "
                             f"{', '.join('_' + name for name in UNITS)}")


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:  # not there, or its folder is not: then nothing is left behind either
        pass
