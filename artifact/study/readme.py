"""The README's tables, filled from the recorded run: a row names a claim and shows its digits, the rest follows."""

import json
import re
from pathlib import Path

from artifact.study import books, claims, paths

_CLAIM = re.compile(r"^\| (?P<text>.+?) \| `(?P<id>[\w-]+)` \|[^|]*\| *(?P<ours>-?[\d.]*)[^|]*\|[^|]*\|[^|]*\|$", re.M)
_COSTS = re.compile(r"(?<=\|---\|--:\|--:\|\n)(\| `\d\d_\w+` \|.+\n)+")
_MACHINE = re.compile(r"(?<=What it costs, on )[^,]+(?=,)")
_COUNT = re.compile(r"(?<=decides all )\d+(?= claims)")


def filled(text: str, recorded: Path | None = None) -> str:
    """The README `text` with the values, origin and verdict of each claim it lists, and every notebook's cost.

    `recorded`: None = data/recorded. ValueError for a row whose claim there is not.
    """
    recorded = paths.data_dir() / "recorded" if recorded is None else Path(recorded)
    verdicts = claims.verdicts("full", recorded).set_index("id")

    def row(found):
        if found["id"] not in verdicts.index:
            raise ValueError(f"README.md lists the claim {found['id']!r}; there is none in claims.yml")
        claim = verdicts.loc[found["id"]]
        published = claim["published"] if isinstance(claim["published"], str) else ""
        digits = len(found["ours"].partition(".")[2])
        decided = claim["verdict"] != "not-measured-here"
        ours = f"{round(float(claim['ours']), digits) + 0.0:.{digits}f}" if decided else ""  # + 0.0: no minus zero
        return f"| {found['text']} | `{found['id']}` | {published} | {ours} | {claim['origin']} | {claim['verdict']} |"

    manifests = {book.name: recorded / "full" / book.name / "manifest.json" for book in books.shelf()}
    kept = {name: json.loads(path.read_text()) for name, path in manifests.items() if path.is_file()}
    costs = "".join(f"| `{name}` | {one['duration_s'] / 60:.1f} | {one['peak_rss_bytes'] / 2**20:.0f} MiB |\n"
                    for name, one in kept.items())
    text = _COUNT.sub(str(len(verdicts)), _CLAIM.sub(row, text))
    return _MACHINE.sub(" and ".join(sorted({one["cpu"] for one in kept.values()})), _COSTS.sub(costs, text))


def refresh(path: Path | None = None) -> None:
    """`filled`, in place; `path`: None = the checkout's README.md."""
    path = paths.root() / "README.md" if path is None else Path(path)
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
