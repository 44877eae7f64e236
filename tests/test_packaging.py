"""The package as others install it: wheel and sdist are whole and clean, run outside a checkout, and suit macOS too."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_house import LISTED, SOURCES, machine_paths

ROOT = Path(__file__).resolve().parents[1]
NOT_PACKED = (".ci", ".gitignore")  # what only a repository needs
MACOS = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64", "os_name": "posix"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist), built from a copy of what git keeps."""
    folder = tmp_path_factory.mktemp("built")
    for name in LISTED:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    for kind in ("sdist", "wheel"):
        code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", code, folder], cwd=folder / "source", capture_output=True,
                              text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A fresh environment with the wheel in it; the other packages are this environment's own."""
    return _environment(built[0], tmp_path_factory.mktemp("a fresh place"))


def _environment(archive, folder):
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    here = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True,
                          capture_output=True, check=True).stdout.strip()
    (Path(here) / "zz_packages.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--no-deps", "--no-index",
                    "--no-build-isolation", archive], check=True)
    return folder / "venv" / "bin"


def _run(installed, folder, *arguments, code=0):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["JUPYTER_PATH"] = str(Path(sysconfig.get_path("data")) / "share" / "jupyter")  # of the shared packages
    done = subprocess.run([installed / "artifact", *arguments], cwd=folder, capture_output=True, text=True, check=False,
                          env=environment)
    assert done.returncode == code, done.stderr[-2000:]
    return done.stdout


def test_the_wheel_holds_sources_data_and_notebooks_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as archive:
        held = {name for name in archive.namelist() if not re.match(r"[^/]+\.(dist-info|data)/", name)}
    packed = [name for name in LISTED if name.parts[0] in ("artifact", "data", "kernels", "notebooks")]
    assert held == {name.as_posix() if name.parts[0] == "artifact" else f"artifact/{name.as_posix()}"
                    for name in packed}
    assert set(SOURCES) <= set(packed)


def test_the_sdist_is_a_checkout(built):
    with tarfile.open(built[1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.as_posix() for name in LISTED if not name.as_posix().startswith(NOT_PACKED)} - held == set()


def test_archives_carry_no_absolute_path(built):
    with zipfile.ZipFile(built[0]) as wheel, tarfile.open(built[1]) as sdist:
        contents = {name: wheel.read(name) for name in wheel.namelist()}
        contents |= {one.name: sdist.extractfile(one).read() for one in sdist.getmembers() if one.isfile()}
    assert [name for name in contents if name.startswith("/") or ".." in Path(name).parts] == []
    own = re.compile(re.escape(f"{built[0].parent}/").encode())
    assert [name for name, text in contents.items() if own.search(text)] == []
    assert [name for name, text in contents.items()
            if b"\0" not in text and machine_paths(text.decode("utf-8", errors="ignore"))] == []


def test_the_wheel_runs_outside_a_checkout(installed, tmp_path):
    found = json.loads(_run(installed, tmp_path, "env", "--json"))
    assert found["checkout"] is None and found["pins_from"] == "package metadata" and found["tier_cpu"] is True
    assert (found["pins_missing"], found["pins_different"]) == ([], [])
    summary = json.loads(_run(installed, tmp_path, "kv", "simulate", "--requests", "50", "--json"))
    assert summary["completed"] == 50
    _run(installed, tmp_path, "figure", "headline")
    assert (tmp_path / "headline.html").is_file()
    told = json.loads(_run(installed, tmp_path, "reproduce", "--scale", "tiny", "--only", "00", "--json"))
    assert [one["state"] for one in told["notebooks"]] == ["done"]
    assert (tmp_path / "results" / "tiny" / "00_overview" / "tables" / "claims.md").is_file()
    again = json.loads(_run(installed, tmp_path, "reproduce", "--scale", "tiny", "--only", "00", "--json"))
    assert [one["state"] for one in again["notebooks"]] == ["up to date"]
    _run(installed, tmp_path, "verify", "--scale", "tiny")
    assert Path(_run(installed, tmp_path, "report", "--scale", "tiny").strip()).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["headline.html", "results"]


def test_an_installed_package_does_not_take_the_checkouts_place(installed, tmp_path):
    code = "import artifact, artifact.kernels; print(artifact.__file__); print(artifact.kernels.__file__)"
    done = subprocess.run([installed / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(str(installed.parent) in line for line in done.stdout.splitlines())


@pytest.mark.slow
def test_the_whole_chain_runs_outside_a_checkout(built, tmp_path):
    """From the sdist this time, which pip first makes a wheel of."""
    there = _environment(built[1], tmp_path / "of the sdist")
    (tmp_path / "work").mkdir()
    told = json.loads(_run(there, tmp_path / "work", "reproduce", "--scale", "tiny", "--json"))
    assert {one["state"] for one in told["notebooks"]} == {"done"}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11.2", "3.12.0"])  # Debian 12's, and the next
def test_the_lock_resolves_on_macos(tmp_path, version):
    """Every pin that macOS asks for has a wheel there, and what these ask for in turn is in the lock."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    python = {"python_version": version[:4], "python_full_version": version}
    target = default_environment() | MACOS | python | {"extra": ""}
    wanted = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(target)]
    (tmp_path / "macos.txt").write_text("".join(f"{pin.name}{pin.specifier}\n" for pin in wanted))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--report",
         tmp_path / "report.json", "--target", tmp_path / "nowhere", "--platform", "macosx_14_0_arm64",
         "--python-version", version, "--only-binary=:all:", "--requirement", tmp_path / "macos.txt"],
        capture_output=True, text=True, check=False)
    if re.search(r"NewConnectionError|ConnectTimeout|Temporary failure in name resolution", done.stderr):
        pytest.skip("no network: the package index would say which wheels there are for macOS")
    assert done.returncode == 0, done.stderr[-2000:]
    there = {canonicalize_name(pin.name): pin for pin in wanted}
    found = json.loads((tmp_path / "report.json").read_text())["install"]
    assert {canonicalize_name(one["metadata"]["name"]) for one in found} == set(there)
    for one in found:
        for line in one["metadata"].get("requires_dist", []):
            further = Requirement(line)
            if further.marker is None or further.marker.evaluate(target):
                pin = there.get(canonicalize_name(further.name))
                assert pin, f"{one['metadata']['name']} asks for {line} on macOS, which the lock does not have"
                assert further.specifier.contains(str(pin.specifier).removeprefix("=="), prereleases=True), line
