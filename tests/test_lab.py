"""Notebooks as a reader meets them: in JupyterLab in a browser, all cells run, a slider moved, no console error."""

import contextlib
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from artifact.study import experiments, foresight, scale, style, walk, walk_figures, widgets

BENIGN = ("favicon", "ResizeObserver loop")
EXPLORER = ".jupyter-widgets .js-plotly-plot"
# However soon a part of the page gives up waiting for another, the reader sees no difference: a machine may be slow.
IMPATIENT = "{ const timeout = AbortSignal.timeout; AbortSignal.timeout = () => timeout.call(AbortSignal, 0); }"
STATE = f"""() => document.querySelector('{EXPLORER}').data.map(
    trace => [trace.type, trace.y, trace.type === 'bar' ? trace.x : null, trace.marker.color ?? null])"""
HEADING = f"""() => [...document.querySelectorAll('{EXPLORER} .annotation-text')].map(e => e.textContent)
    .find(text => text.includes('needed'))"""


TITLES = f"""() => [...document.querySelectorAll('{EXPLORER} .annotation-text')].map(e => e.textContent)"""
POINTS = f"""() => document.querySelector('{EXPLORER}').data.map(trace => [[...trace.x], [...trace.y]])"""


def _moved(page, handle, key, seen):
    """Presses `key` on a slider's handle; returns how long until what `seen` (JavaScript) gives was different, ms."""
    handle.focus()
    page.evaluate(f"""() => {{
        const before = JSON.stringify(({seen})());
        window.moved = null;
        document.addEventListener('keydown', () => {{ window.pressed = performance.now(); }}, {{capture: true}});
        new MutationObserver(() => {{
            if (window.moved === null && JSON.stringify(({seen})()) !== before)
                window.moved = performance.now() - window.pressed;
        }}).observe(document.querySelector('{EXPLORER}'), {{subtree: true, childList: true, characterData: true}});
    }}""")
    page.keyboard.press(key)
    page.wait_for_function("window.moved !== null", timeout=20_000)
    return page.evaluate("window.moved")


def _pace(page, handle, back, forth, seen):
    """What a slider's redraws take once the page has settled, in words; it ends where it began."""
    taken = [_moved(page, handle, key, seen) for key in (back, forth) * 3]
    return f"redrawn {statistics.median(taken):.0f} ms after the key"


def _picture(page, path):
    """The explorer as the reader sees it, wherever what is drawn above it has moved it."""
    page.evaluate("document.querySelector('.jupyter-widgets')?.scrollIntoView()")
    page.screenshot(path=path)


def _free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def _lab(folder, name):
    """A JupyterLab of its own, at home in `folder`; yields the address of notebook `name`."""
    port, token = _free_port(), secrets.token_hex(16)
    own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    log = folder / "lab.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
             "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
             f"--ServerApp.root_dir={folder / 'home'}", "--LabApp.news_url=None",
             "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"],
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **own, "IPYTHONDIR": str(folder / "ipython"), "OMP_NUM_THREADS": "1"})
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status?token={token}", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None, log.read_text()[-2000:]
                time.sleep(0.25)
        else:
            pytest.fail(f"JupyterLab did not answer: {log.read_text()[-2000:]}")
        yield f"http://127.0.0.1:{port}/lab/tree/{name}.ipynb?token={token}&reset"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGINT)
            time.sleep(0.5)
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def _run_all(page):
    """Waits for the kernel, runs all cells, waits until each has its number."""
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
    for _ in range(240):
        if page.locator(".jp-Dialog .jp-mod-accept").count():  # the kernel may be asked for before it is connected
            page.locator(".jp-Dialog .jp-mod-accept").first.click()
        if page.get_by_text("Python 3 (ipykernel) | Idle").count():
            break
        page.wait_for_timeout(250)
    page.click('div.lm-MenuBar-itemLabel:text-is("Run")')
    page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
    page.wait_for_function(r"""() => {
        const cells = [...document.querySelectorAll('.jp-CodeCell')];
        const done = cells.filter(cell => /\[\d+\]/.test(cell.querySelector('.jp-InputPrompt')?.textContent ?? ''));
        return cells.length > 0 && done.length === cells.length;
    }""", timeout=120_000)


@contextlib.contextmanager
def _opened(root, folder, name, browser, complaints, screenshots):
    """Notebook `name` at tiny scale, all of its cells run in a browser: the page, how many figures it declares, and
    what the console reports as errors."""
    notebook = json.loads((root / "notebooks" / f"{name}.ipynb").read_text())
    assert "parameters" in notebook["cells"][1]["metadata"]["tags"]
    notebook["cells"][1]["source"] = f'scale = "tiny"\nresults = {str(folder / "results")!r}'
    (folder / "home").mkdir()
    (folder / "home" / f"{name}.ipynb").write_text(json.dumps(notebook))
    with _lab(folder, name) as address:
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        said = complaints(page)
        page.add_init_script(IMPATIENT)
        try:
            page.goto(address, timeout=120_000)
            _run_all(page)
            assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
            page.locator(".jupyter-widgets .noUi-handle").first.scroll_into_view_if_needed()
            yield page, len(notebook["metadata"]["artifact"]["figures"]), said
        except BaseException:  # a timeout, a failed check: what the reader would have seen
            _picture(page, screenshots / f"lab-{name}-failed.png")
            raise
        finally:
            page.close()


def test_notebook_11_runs_and_its_slider_redraws(root, tmp_path, browser, complaints, screenshots, record_property):
    table = experiments.recorded("10_placement", "placement_map.csv")
    with _opened(root, tmp_path, "11_bandwidth", browser, complaints, screenshots) as (page, count, said):
        handle = page.locator(".jupyter-widgets .noUi-handle").first
        page.wait_for_function(f"!!({HEADING})()", timeout=60_000)
        before = page.evaluate(HEADING)
        _picture(page, screenshots / "lab-11-before.png")
        _moved(page, handle, "ArrowLeft", HEADING)
        after = page.evaluate(HEADING)
        record_property("said", f"notebook 11: {_pace(page, handle, 'ArrowRight', 'ArrowLeft', HEADING)}")
        page.click('.jupyter-widgets button:has-text("pim-aware")')
        page.wait_for_function(f"({HEADING})().startsWith('pim-aware')", timeout=20_000)
        chosen, state = page.evaluate(HEADING), page.evaluate(STATE)
        _picture(page, screenshots / "lab-11-after.png")
        drawn = page.locator(".js-plotly-plot").count()

    def regions(allocator, tokens):
        cells = table[(table["allocator"] == allocator) & (table["block_tokens"] == tokens)]
        return f"{allocator}: {cells['region'].nunique()} regions"

    assert before.startswith(regions("paged", 16)) and after.startswith(regions("paged", 8))
    assert chosen.startswith(regions("pim-aware", 8))
    shown = table[table["block_tokens"] == 8].groupby("allocator").first()
    bars = [["bar", [name], [shown.loc[name, metric]], style.POLICIES[name].colour]
            for metric in ("m1_row_hit_frac", "m3_bandwidth_gbps") for name in style.policies(table)]
    assert state[:-1] == bars  # what the browser holds, not only what was sent to it
    cells = table[(table["allocator"] == "pim-aware") & (table["block_tokens"] == 8)].sort_values("order_index")
    assert state[-1] == ["scatter", cells["region"].tolist(), None, style.POLICIES["pim-aware"].colour]
    assert drawn == count + 1
    assert [text for text in said if not any(word in text for word in BENIGN)] == []


def test_notebook_03_runs_and_its_predictor_moves(root, tmp_path, browser, complaints, screenshots, record_property):
    with _opened(root, tmp_path, "03_predictor", browser, complaints, screenshots) as (page, count, said):
        page.wait_for_function(f"(({TITLES})()[1] ?? '').startsWith('all steps')", timeout=60_000)
        before = page.evaluate(TITLES)
        handles = page.locator(".jupyter-widgets .noUi-handle")
        _picture(page, screenshots / "lab-03-before.png")
        _moved(page, handles.nth(0), "ArrowRight", TITLES)
        record_property("said", f"notebook 03: {_pace(page, handles.nth(0), 'ArrowLeft', 'ArrowRight', TITLES)}")
        for _ in range(7):  # alpha from 0.45 to 0.8
            handles.nth(0).press("ArrowRight")
        handles.nth(3).press("ArrowRight")  # |P| / |A| from 1 to 1.25
        box = widgets.predictor_explorer(foresight.scores(
            foresight.recordings(scale.load("tiny"))[0], layer=10, head=0))
        (alpha, *_), (size, _) = (part.children for part in box.children[0].children)
        alpha.value, size.value = 0.8, 1.25
        expected = box.children[1]
        wanted = [note.text.replace("<b>", "").replace("</b>", "") for note in expected.layout.annotations[:2]]
        page.wait_for_function(f"wanted => ({TITLES})()[1] === wanted", arg=wanted[1], timeout=20_000)
        page.wait_for_timeout(300)
        after, held = page.evaluate(TITLES), page.evaluate(POINTS)
        _picture(page, screenshots / "lab-03-after.png")
        drawn = page.locator(".js-plotly-plot").count()
    assert after[:2] == wanted != before[:2]
    for (x, y), trace in zip(held, expected.data, strict=True):  # what the browser holds, not only what was sent to it
        assert x == list(trace.x) and y == pytest.approx(list(trace.y))
    assert drawn == count + 1
    assert [text for text in said if not any(word in text for word in BENIGN)] == []


def test_notebook_10_shows_a_sequence_living(root, tmp_path, browser, complaints, screenshots, record_property):
    life = experiments.recorded("10_placement", "life.csv")
    last = int(life["last_step"].max())
    with _opened(root, tmp_path, "10_placement", browser, complaints, screenshots) as (page, count, said):
        page.wait_for_function(f"(({TITLES})()[1] ?? '').includes('regions')", timeout=60_000)
        before, handle = page.evaluate(TITLES), page.locator(".jupyter-widgets .noUi-handle").first
        _picture(page, screenshots / "lab-10-before.png")
        _moved(page, handle, "ArrowRight", TITLES)
        record_property("said", f"notebook 10: {_pace(page, handle, 'ArrowLeft', 'ArrowRight', TITLES)}")
        after, held = page.evaluate(TITLES), page.evaluate(POINTS)
        _picture(page, screenshots / "lab-10-after.png")
        drawn = page.locator(".js-plotly-plot").count()
    step = (int(life["first_step"].min()) + last) // 2
    for titles, now in ((before, step), (after, step + 1)):
        assert titles[:2] == [f"{name}, step {now}: {walk_figures.moment(life, name, now).words}"
                              for name in walk.FOLLOWED]
    wanted = [list(map(list, walk_figures.moment(life, name, step + 1).places[state]))
              for name in walk.FOLLOWED for state in walk_figures.looks(name, 13)]
    assert held == wanted  # what the browser holds, not only what was sent to it
    assert drawn == count + 1
    assert [text for text in said if not any(word in text for word in BENIGN)] == []
