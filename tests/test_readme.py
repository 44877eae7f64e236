"""The README's numbers are the recorded run's, and its commands and snippets run."""

import json
import re

import pytest

from artifact.study import claims, paths

RECORDED = paths.data_dir() / "recorded"


@pytest.fixture(scope="module")
def readme(root):
    return (root / "README.md").read_text()


@pytest.fixture(scope="module")
def verdicts():
    return claims.verdicts("full", RECORDED).set_index("id")


def test_the_recorded_run_holds_every_claim(verdicts):
    decided = verdicts[verdicts["verdict"] != "not-measured-here"]
    assert len(decided) >= 50 and decided["holds"].all()


def test_claims_at_a_glance(readme, verdicts):
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \| (.*?) \| (.+?) \| (\w+) \| ([\w-]+) \|$", readme, re.M)
    assert len(rows) >= 15
    for text, name, published, ours, origin, verdict in rows:
        claim = verdicts.loc[name]
        assert published == (claim["published"] if isinstance(claim["published"], str) else ""), text
        assert ours == f"{float(claim['ours']):.{len(ours.partition('.')[2])}f}", text
        assert (origin, verdict) == (claim["origin"], claim["verdict"]), text
    assert f"all {len(verdicts)} claims" in readme


def test_costs_are_the_manifests(readme):
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| (\d+) MiB \|$", readme, re.M)
    assert rows
    for notebook, minutes, memory in rows:
        manifest = json.loads((RECORDED / "full" / notebook / "manifest.json").read_text())
        assert minutes == f"{manifest['duration_s'] / 60:.1f}" and memory == f"{manifest['peak_rss_bytes'] / 2**20:.0f}"
        assert manifest["cpu"] in readme


def test_snippets_run(readme, capsys):
    snippets = re.findall(r"```python\n(.+?)```", readme, re.S)
    assert len(snippets) >= 3
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})
    assert "0.96327" in capsys.readouterr().out


def test_make_targets_are_there(readme, root):
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`?make ([a-z-]+)", readme))
    assert {"reproduce", "test"} <= named <= targets


def test_local_links_resolve(readme, root):
    for link in re.findall(r"\]\(([^)#]+)\)", readme):
        assert link.startswith("https://") or (root / link).exists(), link
