"""The chain: what looks like success and is none, what must run again and what must not, and how it stops."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from artifact.study import books, chain, execute, paths, results, stills

WRITES = """
from pathlib import Path
home = Path(results) / scale / "{name}"
home.mkdir(parents=True, exist_ok=True)
(home / "a.csv").write_text("a_count,origin\\n{value},simulated\\n")
"""


def put(folder, name, *cells, declares=("a.csv",), needs=(), parameters='scale = "tiny"\nresults = None'):
    """A notebook of code cells in `folder`; {name} in a cell is its name."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata["artifact"] = {"results": list(declares), "needs": list(needs)}
    first = nbformat.v4.new_code_cell(parameters)
    first.metadata["tags"] = ["parameters"]
    cells = [nbformat.v4.new_code_cell(cell.replace("{name}", name).replace("{value}", "1")) for cell in cells]
    notebook.cells = [nbformat.v4.new_markdown_cell("# Why?"), first, *cells]
    nbformat.write(notebook, folder / f"{name}.ipynb")


def states(outcomes):
    return {outcome["notebook"]: outcome["state"] for outcome in outcomes}


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def lies(tmp_path_factory):
    """One chain of notebooks that go wrong, each in its way, run once."""
    folder, out = tmp_path_factory.mktemp("lies"), tmp_path_factory.mktemp("out")
    put(folder, "10_exit", WRITES, "import sys; sys.exit(0)", "never = 1")
    put(folder, "11_killed", WRITES, "import os; os.kill(os.getpid(), 9)", "never = 1")
    put(folder, "12_silent", "pass")
    put(folder, "13_error", WRITES, "1 / 0", "never = 1")
    put(folder, "14_stale", "pass")
    put(folder, "15_needs_one", WRITES, needs=["13_error"])
    put(folder, "16_unknown", WRITES, parameters='scal = "tiny"\nresults = None')
    put(folder, "17_untidy", WRITES.replace("a_count,origin", "a_count,source"))
    put(folder, "19_last_exit", WRITES, "import sys; sys.exit(0)")
    put(folder, "20_good", WRITES, "import sys, os; print(sys.executable, os.getcwd(), sep=chr(10))")
    stale = out / "tiny" / "14_stale" / "a.csv"
    stale.parent.mkdir(parents=True)
    stale.write_text("a_count,origin\n1,simulated\n")
    said = []
    outcomes = chain.reproduce("tiny", notebooks=folder, results_dir=out, say=said.append)
    return {outcome["notebook"][:2]: outcome for outcome in outcomes}, out / "tiny", said


@pytest.mark.parametrize(("notebook", "reason"), [
    ("10", "code cell 3 of 4: SystemExit: 0"),
    ("11", "the kernel died (killed, or out of memory) in or after code cell"),  # 2 or 3: what it could still say
    ("12", "did not write a.csv, which it declares"),
    ("13", "code cell 3 of 4: ZeroDivisionError: division by zero"),
    ("14", "the one there is older than the run"),
    ("16", "the parameters cell sets scal, results; it must set scale and results and nothing else"),
    ("17", "no column `origin`"),
    ("19", "code cell 3 of 3: SystemExit: 0"),
])
def test_what_looks_like_success_is_none(lies, notebook, reason):
    outcomes, folder, said = lies
    outcome = outcomes[notebook]
    assert outcome["state"] == "failed" and reason in outcome["reason"] and "\n" not in outcome["reason"]
    home = folder / outcome["notebook"]
    assert not (home / "manifest.json").exists() and not (home / "notebook.ipynb").exists()
    assert (home / "failed.ipynb").is_file() or notebook == "16", "what ran is kept to be looked at"
    assert not list(home.glob(".*")), "nothing of the attempt is left"
    assert any(line.startswith(f"{outcome['notebook']}: failed, ") for line in said)


def test_what_needs_a_failed_one_is_skipped_and_the_rest_runs(lies):
    outcomes, folder, _ = lies
    assert outcomes["15"]["state"] == "skipped" and "13_error" in outcomes["15"]["reason"]
    assert outcomes["20"]["state"] == "done"
    executed = nbformat.read(folder / "20_good" / "notebook.ipynb", as_version=4)
    python, where = executed.cells[-1].outputs[0].text.splitlines()
    assert python == sys.executable, "the kernel is this interpreter"
    assert not Path(where).exists() and not Path(where).is_relative_to(paths.root()), "in a folder of its own"
    manifest = results.trusted(folder / "20_good")
    assert manifest["scale"] == "tiny" and manifest["duration_s"] > 0 and manifest["commit"] == manifest["commit"]
    assert {"seed", "started", "versions", "dirty", "python", "os", "cpu", "inputs"} <= manifest.keys()


def test_a_notebook_past_its_limit_fails_and_its_kernel_is_gone(tmp_path):
    put(tmp_path, "10_late", f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))",
        "import time; time.sleep(600)")
    (outcome,) = chain.reproduce("tiny", notebooks=tmp_path, results_dir=tmp_path / "out", limit_s=6)
    assert outcome["state"] == "failed" and "ran past its limit of 6 s" in outcome["reason"]
    assert outcome["duration_s"] < 20
    if (tmp_path / "pid").exists():  # on a very busy machine the kernel may not have come so far
        assert not lives(int((tmp_path / "pid").read_text()))


def test_resume_does_only_what_is_needed(tmp_path):
    folder, out = tmp_path / "notebooks", tmp_path / "out"
    folder.mkdir()
    put(folder, "10_first", WRITES)
    put(folder, "11_second", WRITES, needs=["10_first"])
    put(folder, "12_alone", WRITES)

    def again(**options):
        return states(chain.reproduce("tiny", notebooks=folder, results_dir=out, **options))

    def seen():
        return {row["notebook"]: row["state"] for row in chain.status("tiny", out, folder)}

    assert set(seen().values()) == {"not run"}
    assert again(only=["11"]) == {"10_first": "done", "11_second": "done"}, "what a notebook needs is run before it"
    assert again() == {"10_first": "up to date", "11_second": "up to date", "12_alone": "done"}
    assert set(again().values()) == set(seen().values()) == {"up to date"}

    alone = out / "tiny" / "12_alone"
    put(folder, "10_first", WRITES, "edited = 1")
    (alone / "a.csv").write_text((alone / "a.csv").read_text().replace("1", "2"))
    assert seen() == {"10_first": "out of date", "11_second": "out of date", "12_alone": "out of date"}
    assert [row["reason"] for row in chain.status("tiny", out, folder)] == [
        "changed: notebook", "needs 10_first, out of date", "12_alone/a.csv: changed after the run that wrote it"]
    assert set(again().values()) == {"done"} and results.read(alone / "a.csv")["a_count"].tolist() == [1]

    (alone / "manifest.json").write_bytes((alone / "manifest.json").read_bytes()[:100])
    assert "not a manifest" in chain.status("tiny", out, folder)[2]["reason"]
    assert again(only=["12"]) == {"12_alone": "done"}
    assert again(only=["12"], force=True) == {"12_alone": "done"}
    with pytest.raises(ValueError, match="no notebook starts with '33'; there are: 10_first"):
        again(only=["33"])


OPENS = """
from artifact.study import chain
import pandas as pd
run = chain.notebook("{name}", scale, results)
run.write("a.csv", pd.DataFrame({"value_frac": [1 / 3], "origin": "simulated"}))
run.table("a", pd.DataFrame({"value_frac": [1 / 3], "origin": "simulated"}))
"""


def test_a_run_keeps_what_it_writes_and_repeats_its_bytes(tmp_path):
    put(tmp_path, "10_run", OPENS, "assert run.scale.name == 'tiny'", "run.close()")
    notebook = nbformat.read(tmp_path / "10_run.ipynb", as_version=4)
    notebook.metadata["artifact"]["tables"] = ["a"]
    toy = nbformat.v4.new_code_cell("raise RuntimeError('only for people')")
    toy.metadata["tags"] = ["interactive"]
    notebook.cells.append(toy)
    nbformat.write(notebook, tmp_path / "10_run.ipynb")
    for out in ("one", "two"):
        (outcome,) = chain.reproduce("tiny", notebooks=tmp_path, results_dir=tmp_path / out)
        assert outcome["state"] == "done", outcome["reason"]
    one, two = (results.trusted(tmp_path / out / "tiny" / "10_run") for out in ("one", "two"))
    assert one["files"] == two["files"] and set(one["files"]) == {"a.csv", "tables/a.md", "tables/a.tex"}
    assert one["peak_rss_bytes"] > 2**20
    executed = nbformat.read(tmp_path / "one" / "tiny" / "10_run" / "notebook.ipynb", as_version=4)
    assert "only for people" not in json.dumps(executed)


def test_a_run_by_hand_is_believed_but_run_again(tmp_path, monkeypatch):
    frame = results.pd.DataFrame({"value_frac": [0.5], "origin": "simulated"})
    run = chain.notebook("10_run", "tiny", tmp_path)
    run.write("a.csv", frame)
    with pytest.raises(ValueError, match="no finished run"):
        results.trusted(run.folder)
    run.close()
    assert results.trusted(run.folder)["notebook"] == "10_run"
    put(tmp_path, "10_run", WRITES)
    assert chain.status("tiny", tmp_path, tmp_path)[0]["reason"] == "last run by hand"
    chain.notebook("10_run", "tiny", tmp_path).write("b.csv", frame)
    with pytest.raises(ValueError, match="no finished run"):
        results.trusted(run.folder)
    with pytest.raises(ValueError, match="scale 'big' is not one of"):
        chain.notebook("10_run", "big", tmp_path)


DRIVER = """
import sys
from pathlib import Path
from artifact.study import chain
outcomes = chain.reproduce("tiny", notebooks=Path(sys.argv[1]), results_dir=sys.argv[2], say=print)
print(*(outcome["state"] for outcome in outcomes))
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL,
                                  pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=lambda sent: sent.name)
def test_a_stopped_run_leaves_no_kernel_and_is_resumed(tmp_path, sent, foreground):
    pid, slow = tmp_path / "pid", tmp_path / "slow"
    folder, out = tmp_path / "notebooks", tmp_path / "out"
    folder.mkdir()
    slow.touch()
    put(folder, "10_slow", WRITES, f"import os; open({str(pid)!r}, 'w').write(str(os.getpid()))",
        f"import time\nwhile os.path.exists({str(slow)!r}): time.sleep(0.1)", WRITES)
    command = [sys.executable, "-c", DRIVER, str(folder), str(out)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=foreground)
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.05)
    running.send_signal(sent)
    running.communicate(timeout=20)
    kernel = int(pid.read_text())
    while lives(kernel):
        assert time.monotonic() < deadline, "the kernel outlives the run"
        time.sleep(0.05)
    home = out / "tiny" / "10_slow"
    assert not (home / "manifest.json").exists() and (home / "a.csv").exists()
    slow.unlink()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "done"
    assert results.trusted(home) and not list(home.glob(".*"))


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    put(tmp_path, "10_a", WRITES)
    with chain._alone(tmp_path / "out" / "tiny"), pytest.raises(ValueError, match="another run is writing there"):
        chain.reproduce("tiny", notebooks=tmp_path, results_dir=tmp_path / "out")


def test_a_results_folder_that_cannot_be_written_stops_the_run(tmp_path, monkeypatch):
    put(tmp_path, "10_a", WRITES)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        chain.reproduce("tiny", notebooks=tmp_path, results_dir=tmp_path / "file" / "below")
    with pytest.raises(OSError, match="file"):
        chain.reproduce("tiny", notebooks=tmp_path, results_dir=tmp_path / "file")
    full = "code cell 3 of 3: OSError: [Errno 28] No space left on device: 'x/a.csv'"
    monkeypatch.setattr(execute, "execute", lambda *_: full)
    with pytest.raises(OSError, match="10_a: .* No space left"):
        chain.reproduce("tiny", notebooks=tmp_path, results_dir=tmp_path / "out")


@pytest.mark.parametrize(("change", "says"), [
    ({"artifact": {"result": []}}, "artifact.result is unknown; allowed: results, figures"),
    ({"artifact": {"results": "a.csv"}}, "artifact.results must be a list of text"),
    ({"artifact": {"needs": ["11_later"]}}, "needs '11_later', which is no earlier notebook"),
])
def test_a_notebook_that_declares_nonsense_is_refused_by_name(tmp_path, change, says):
    for name in ("10_a", "11_later"):
        put(tmp_path, name, "pass")
    notebook = nbformat.read(tmp_path / "10_a.ipynb", as_version=4)
    notebook.metadata.update(change)
    nbformat.write(notebook, tmp_path / "10_a.ipynb")
    with pytest.raises(ValueError, match=r"10_a\.ipynb") as caught:
        books.shelf(tmp_path)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}",
                                  '{"nbformat": 3}', '{"nbformat": 4, "metadata": {}, "cells": 3}'])
def test_a_file_that_is_no_notebook_is_refused_by_name(tmp_path, text):
    (tmp_path / "10_a.ipynb").write_text(text)
    with pytest.raises(ValueError, match=r"10_a\.ipynb: not a notebook") as caught:
        books.shelf(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="no notebooks in it"):
        books.shelf(tmp_path / "none")


def figure(folder, key):
    folder.mkdir(exist_ok=True)
    path = folder / f"{key}.json"
    path.write_text('{"data": [{"type": "bar", "y": [1, 2]}], "layout": {"title": {"text": "two bars"}}}')
    return path


def test_still_images_without_a_browser_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(stills.provenance, "chromium", lambda: (None, None))
    said = []
    assert stills.export([figure(tmp_path, "a"), tmp_path / "absent.json"], said.append) == 0
    assert len(said) == 1 and "1 not drawn" in said[0] and "chromium" in said[0]


def test_still_images_that_fail_or_hang_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(stills.provenance, "chromium", lambda: ("browser", "1"))
    broken, said = figure(tmp_path, "a"), []
    broken.write_text("{")
    assert stills.export([broken], said.append) == 0
    assert stills.export([broken], said.append, limit_s=0.01) == 0
    assert len(said) == 4 and "took more than 0.01 s" in said[3] and "\n" not in "".join(said)


def test_still_images_are_drawn_once(tmp_path):
    if stills.provenance.chromium()[0] is None:
        pytest.skip(f"no browser: {stills.provenance.CHROMIUM_ADVICE}")
    both = [figure(tmp_path, "a"), figure(tmp_path, "b")]
    assert stills.export(both, lambda line: None) == 2
    assert both[0].with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert stills.export(both, lambda line: None) == 0
    os.utime(both[1], ns=(time.time_ns() + 10**9,) * 2)
    assert [path for path in both if not stills._fresh(path)] == [both[1]]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder of notebooks that the command line takes for the checkout's."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setattr(paths, "notebooks_dir", lambda: folder)
    return folder


def one_line(done, code, says):
    assert done.code == code and says in done.err.splitlines()[-1], done
    assert done.out == "" and "Traceback" not in done.err


def test_reproduce_and_status_on_the_command_line(cli, desk, tmp_path):
    put(desk, "10_good", WRITES)
    put(desk, "11_bad", "raise RuntimeError('no luck')")
    done = cli("reproduce", "--scale", "tiny", "--results", tmp_path / "out", "--json")
    found = json.loads(done.out)
    assert done.code == 1 and done.err == "", "quiet, but for its one object"
    assert (found["notebooks_done_count"], found["notebooks_failed_count"], found["scale"]) == (1, 1, "tiny")
    assert [row["state"] for row in found["notebooks"]] == ["done", "failed"]
    done = cli("status", "--results", tmp_path / "out", "--json")
    assert done.code == 0 and json.loads(done.out)["scale"] == "tiny", "the scale that has been run"
    assert [row["state"] for row in json.loads(done.out)["notebooks"]] == ["up to date", "failed"]
    done = cli("reproduce", "--scale", "tiny", "--results", tmp_path / "out", "--only", "10")
    assert done.code == 0 and "10_good: up to date" in done.err and "1 up to date" in done.out
    assert "failed.ipynb" in cli("status", "--results", tmp_path / "out").out


def test_what_the_command_line_refuses_is_one_line(cli, desk, tmp_path, monkeypatch):
    put(desk, "10_good", WRITES)
    (tmp_path / "file").write_text("")
    ask = ("reproduce", "--scale", "tiny", "--results")
    for where in ("file", "file/below"):
        one_line(cli(*ask, tmp_path / where), 2, str(tmp_path / "file"))
    one_line(cli("reproduce", "--scale", "big"), 2, "scale 'big' is not one of: tiny, smoke, full")
    one_line(cli(*ask, tmp_path / "out", "--only", "99"), 2, "no notebook starts with '99'")
    one_line(cli(*ask, tmp_path / "out", "99"), 2, "picked with --only")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
        one_line(cli(*ask, tmp_path / "out"), 2, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(execute, "execute", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        one_line(cli(*ask, tmp_path / "out"), 130, "interrupted")
    (tmp_path / "data" / "scales").mkdir(parents=True)
    tiny = (paths.data_dir() / "scales" / "tiny.yml").read_text()
    (tmp_path / "data" / "scales" / "tiny.yml").write_text(tiny + "colour: 3\n")
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path / "data")
    one_line(cli(*ask, tmp_path / "out"), 2, "tiny.yml: unknown key 'colour'; allowed: name, seed")


def test_memory_is_that_of_a_run_and_the_processes_it_starts(tmp_path):
    """Two children with a quarter of a gigabyte each count together."""
    put(tmp_path, "10_run", OPENS, "import subprocess, sys\n"
        "hold = [sys.executable, '-c', 'held = bytearray(2**28); import time; time.sleep(4)']\n"
        "for child in [subprocess.Popen(hold) for _ in range(2)]:\n    child.wait()", "run.close()")
    notebook = nbformat.read(tmp_path / "10_run.ipynb", as_version=4)
    notebook.metadata["artifact"]["tables"] = ["a"]
    nbformat.write(notebook, tmp_path / "10_run.ipynb")
    (outcome,) = chain.reproduce("tiny", notebooks=tmp_path, results_dir=tmp_path / "out")
    assert outcome["state"] == "done", outcome["reason"]
    assert 2**29 < results.trusted(tmp_path / "out" / "tiny" / "10_run")["peak_rss_bytes"] < 2**31
