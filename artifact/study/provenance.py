"""What a result came from: the machine, the installed versions against the pins, the commit, and what can run here."""

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import artifact
from artifact.study import paths

CPU_TIER = ("numpy", "numba", "pandas")
CHROMIUM_ADVICE = "install Debian's or Ubuntu's package `chromium`, or set BROWSER_PATH to a Chrome or Chromium"
_DISTRIBUTION = "prr-kvpimple-artifact"


def environment() -> dict[str, object]:
    """What `artifact env` prints: flat; values are text, numbers, booleans, lists of text, or None where unknown.

    `tier_X` says whether the tier can run here and `tier_X_reason` why not (None when it can).
    """
    checkout = paths.root()
    commit, dirty = git_state()
    installed = versions()
    pins, source = pinned()
    browser, browser_version = chromium()
    tiers = {
        "cpu": _lacking(CPU_TIER, installed),
        "model": _lacking(("torch", "transformers"), installed) or _without_weights(),
        "gpu": _lacking(("torch",), installed) or _without_cuda(),
    }
    return {
        "artifact": artifact.__version__,
        "checkout": str(checkout) if checkout else None,
        "commit": commit,
        "dirty": dirty,
        **machine(),
        "pins_from": source,
        "pins_count": len(pins),
        "pins_missing": [f"{name} {pin}" for name, pin in pins.items() if name not in installed],
        "pins_different": [f"{name} {installed[name]} (pinned {pin})" for name, pin in pins.items()
                           if name in installed and installed[name].partition("+")[0] != pin],
        **{key: value for tier, reason in tiers.items()
           for key, value in ((f"tier_{tier}", reason is None), (f"tier_{tier}_reason", reason))},
        "chromium": browser,
        "chromium_version": browser_version,
        "attacc": simulator("ATTACC_DIR"),
        "ramulator": simulator("RAMULATOR_DIR"),
    }


def summary(found: dict[str, object]) -> dict[str, str]:
    """What `environment` found, for people: label -> text."""
    rows = {key: value for key, value in found.items() if not key.endswith("_reason")}
    rows["checkout"] = found["checkout"] or "none, an installed package"
    rows["memory_bytes"] = f"{found['memory_bytes'] / 2**30:.1f} GiB"
    rows["chromium"] = found["chromium"] or f"not found, so no still images: {CHROMIUM_ADVICE}"
    rows["attacc"] = found["attacc"] or "not found: set ATTACC_DIR to its folder"
    rows["ramulator"] = found["ramulator"] or "not found: set RAMULATOR_DIR to its folder"
    for tier in ("tier_cpu", "tier_model", "tier_gpu"):
        rows[tier] = "yes" if found[tier] else f"no, {found[f'{tier}_reason']}"
    texts = {key: "unknown" if value is None else str(value) for key, value in rows.items()}
    texts |= {key: ", ".join(value) or "none" for key, value in rows.items() if isinstance(value, list)}
    return {key.removesuffix("_bytes").removesuffix("_count").replace("_", " "): text for key, text in texts.items()}


def frame():  # -> pandas.DataFrame, which only notebooks need
    """This machine as a table of two columns, `what` and `found`, for notebooks."""
    import pandas as pd

    told = {label: text for label, text in summary(environment()).items() if label not in ("checkout", "chromium")}
    return pd.DataFrame({"what": told.keys(), "found": told.values()})


def machine() -> dict[str, object]:
    """This machine: os, cpu, cores_count usable by this process, memory_bytes, python."""
    return {
        "os": platform.platform(),
        "cpu": _cpu(),
        "cores_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
    }


def git_state() -> tuple[str | None, bool | None]:
    """Commit and whether anything differs from it; (None, None) outside a checkout, without git or before a commit."""
    checkout = paths.root()
    if checkout is None:
        return None, None
    top = _git(checkout, "rev-parse", "--show-toplevel")
    commit = _git(checkout, "rev-parse", "HEAD")
    if top is None or commit is None or Path(top).resolve() != checkout:
        return None, None
    return commit, _git(checkout, "status", "--porcelain") != ""


def versions() -> dict[str, str]:
    """Every installed distribution's version by its normalised name."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(normalised(name), distribution.version)
    return found


def pinned() -> tuple[dict[str, str], str]:
    """Exact pins for this machine by normalised name, and where they stand: the checkout's lock, else the package's."""
    from packaging.requirements import Requirement

    checkout = paths.root()
    if checkout and (checkout / "requirements.lock").is_file():
        lines = (checkout / "requirements.lock").read_text(encoding="utf-8").splitlines()
        source = "requirements.lock"
    else:
        try:
            lines = metadata.requires(_DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            lines = []
        source = "package metadata"
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {normalised(pin.name): str(pin.specifier).removeprefix("==") for pin in wanted
            if pin.marker is None or pin.marker.evaluate({"extra": ""})}, source


def chromium() -> tuple[str | None, str | None]:
    """Path and version of the browser that still images are made with, (None, None) when there is none.

    The search is kaleido's own, so that what is reported is what is used.
    """
    from choreographer.browsers.chromium import Chromium

    path = Chromium.find_browser(skip_local=False)
    if not path or not os.access(path, os.X_OK):
        return None, None
    return str(path), _output(str(path), "--version")


def simulator(variable: str) -> str | None:
    """The folder that the environment variable names, read now; None when it is not set or is no folder."""
    folder = os.environ.get(variable)
    return folder if folder and Path(folder).is_dir() else None


def _lacking(names: tuple[str, ...], installed: dict[str, str]) -> str | None:
    missing = [name for name in names if name not in installed]
    return f"not installed: {', '.join(missing)}" if missing else None


def _without_weights() -> str | None:
    try:
        there = any((paths.data_dir() / "models").glob("**/*.gguf"))
    except ValueError:
        there = False
    return None if there else "no weights (*.gguf) in data/models"


def _without_cuda() -> str | None:
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if name:
            return name[1]
    return platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    return _output("git", "-C", str(folder), *arguments)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def normalised(name: str) -> str:
    """A distribution's name as all its spellings share it."""
    return re.sub(r"[-_.]+", "-", name).lower()
