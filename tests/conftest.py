"""What several test files need: the checkout's root and the command line in this process."""

import contextlib
import functools
import io
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from artifact.__main__ import main
from artifact.study import provenance

# The files that take longest come first: whatever is short fills the gaps at the end. JupyterLab comes after others
# have compiled what it needs.
LONGEST = ("notebooks", "packaging", "pages", "chain", "triton", "figures", "lab", "readme", "aot", "attention")


def pytest_collection_modifyitems(items) -> None:
    """Files in the order of `LONGEST`, then the rest; tests of a file stay in theirs."""
    place = {f"test_{name}.py": at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


class Ran(NamedTuple):
    """One run of the command line."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout these tests lie in."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def cli():
    """`cli("kv", "simulate", "--json")` runs `artifact kv simulate --json` here and returns its code, out and err."""

    def run(*arguments: object) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
        return Ran(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def screenshots(root) -> Path:
    """Where tests leave what a browser showed them, to be looked at; `make clean` removes it."""
    folder = root / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window, driven by Playwright; a test that asks for it is skipped where either is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found, _ = provenance.chromium()
    if found is None:
        pytest.skip(f"no browser: {provenance.CHROMIUM_ADVICE}")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=[
            "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--no-first-run"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def complaints():
    """`complaints(page)` is a list that gets what the page's console reports as errors, from then on; with
    `requests=True` also the addresses that it asked for in vain."""

    def listen(page, requests: bool = False) -> list[str]:
        said: list[str] = []
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        if requests:
            page.on("requestfailed", lambda request: said.append(request.url))
        return said

    return listen


def pytest_terminal_summary(terminalreporter) -> None:
    """What tests measured and do not judge, such as how soon a slider redraws: `record_property("said", ...)`."""
    said = [value for reports in terminalreporter.stats.values() for report in reports
            for name, value in getattr(report, "user_properties", ()) if name == "said" and report.when == "call"]
    for line in sorted(said):
        terminalreporter.write_line(line)


@pytest.fixture
def foreground():
    """For a child's `preexec_fn`: Ctrl-C reaches it, which a shell has its background jobs, and theirs, ignore."""
    return functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
