"""The README's numbers are the recorded run's, and its commands and snippets run."""

import re
import shlex
import socket
import subprocess
import sys

import pytest

from artifact.study import claims, paths
from artifact.study.readme import filled

RECORDED = paths.data_dir() / "recorded"
README = (paths.root() / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.partition("#")[0].strip() for block in re.findall(r"```sh\n(.+?)```", README, re.S)
            for line in block.splitlines()]
RUN_ELSEWHERE = {  # command -> the test that runs what it runs, or is it
    "make reproduce": "test_notebooks.py runs the whole chain at tiny scale",
    "make test": "this is it",
    "make lab": "test_lab.py opens JupyterLab in a browser",
    ".venv/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .": "test_packaging.py",
}


@pytest.fixture(scope="module")
def readme(root):
    return (root / "README.md").read_text()


@pytest.fixture(scope="module")
def verdicts():
    return claims.verdicts("full", RECORDED).set_index("id")


def test_the_recorded_run_holds_every_claim(verdicts):
    decided = verdicts[verdicts["verdict"] != "not-measured-here"]
    assert len(decided) >= 50 and decided["holds"].all()


def test_its_tables_are_the_recorded_runs(readme):
    assert filled(readme) == readme


def test_a_wrong_number_is_put_right(readme):
    row, cost = "| `kvp-paged-m1` | 0.77 | 0.77 | simulated | reproduced |", re.search(r"\| `03_\w+` \|.+", readme)[0]
    wrong = readme.replace(row, "| `kvp-paged-m1` |  | 0.81 | published | contradicted |")
    wrong = wrong.replace(cost, "| `03_predictor` | 0.1 | 1 MiB |").replace("decides all ", "decides all 9")
    assert row in readme and wrong != readme
    assert filled(wrong) == readme


def test_a_row_without_its_claim_is_one_line(readme):
    with pytest.raises(ValueError, match="'kvp-paged-m9'"):
        filled(readme.replace("`kvp-paged-m1`", "`kvp-paged-m9`"))


def test_snippets_run(readme, capsys):
    snippets = re.findall(r"```python\n(.+?)```", readme, re.S)
    assert len(snippets) >= 3
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})
    assert "0.96327" in capsys.readouterr().out


def test_every_claim_that_is_named_is_there(readme):
    named = set(re.findall(r"`((?:own|prr|kvp)-[a-z0-9-]+)`", readme))
    assert len(named) > 50 and named <= {claim.id for claim in claims.load()}


def test_make_targets_are_there(readme, root):
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`?make ([a-z-]+)", readme))
    assert {"reproduce", "test"} <= named <= targets


def test_local_links_resolve(readme, root):
    for link in re.findall(r"\]\(([^)#]+)\)", readme):
        assert link.startswith("https://") or (root / link).exists(), link


def test_there_are_commands_and_each_is_run_somewhere():
    assert len(COMMANDS) >= 15 and set(RUN_ELSEWHERE) <= set(COMMANDS)
    for command in COMMANDS:
        program = shlex.split(command)[0]
        assert program == "make" or (paths.root() / program).is_file(), command


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("make ")])
def test_a_make_command_would_run_what_it_says(command, root):
    done = subprocess.run(shlex.split(command) + ["-n"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and ".venv/bin/" in done.stdout, done.stderr


@pytest.fixture
def workplace(tmp_path, monkeypatch, readme):
    """An empty folder with what the README tells to write, whose results are its own."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "results"
    monkeypatch.setattr(paths, "results_dir", lambda explicit=None: own if explicit is None else explicit)
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.+?)```", readme, re.S):
        (tmp_path / name).write_text(text)
    (tmp_path / "data").symlink_to(paths.data_dir())
    return tmp_path


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith(".venv/bin/artifact ")
                                     and "dask:" not in line])
def test_a_command_of_the_artifact_runs(command, cli, workplace):
    arguments = shlex.split(command)[1:]
    if "--scale" in arguments:
        arguments[arguments.index("--scale") + 1] = "tiny"
    if arguments == ["report"]:
        assert cli("reproduce", "--scale", "tiny", "--only", "00").code == 0
    done = cli(*arguments)
    assert done.code == 0 and done.out, done.err


def test_the_commands_of_a_cluster_run(cli, workplace):
    pytest.importorskip("distributed", reason="distributed is not installed")
    scheduler, worker, sweep = [line for line in COMMANDS if "dask" in line]
    address = re.search(r"tcp://\S+", worker)[0]
    assert f"dask:{address}" in sweep and f"--port {address.rpartition(':')[2]}" in scheduler
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    own, started = f"tcp://127.0.0.1:{port}", []
    try:
        for command in (scheduler.replace("8786", port) + " --no-dashboard",
                        worker.replace(address, own) + " --no-dashboard"):
            program, *arguments = shlex.split(command)
            started.append(subprocess.Popen([paths.root() / program, *arguments], stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL))
        arguments = shlex.split(sweep.replace(address, own))[1:]
        arguments[arguments.index("--scale") + 1] = "tiny"
        done = cli(*arguments)
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)
    assert done.code == 0 and (workplace / "heatmap.csv").is_file(), done.err


def test_the_timing_script_runs_without_a_gpu(root, workplace):
    (command,) = [line for line in COMMANDS if "timing.py" in line]
    assert shlex.split(command)[:2] == [".venv/bin/python", "kernels/timing.py"]
    done = subprocess.run([sys.executable, root / "kernels" / "timing.py", *shlex.split(command)[2:]], cwd=workplace,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "measured" in done.stdout, done.stderr


def test_a_link_within_the_page_leads_to_a_heading(readme):
    headings = {re.sub(r"[^\w -]", "", text).strip().lower().replace(" ", "-")
                for text in re.findall(r"^#+ (.+)$", readme, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", readme)) <= headings


def test_places_that_it_names_are_there(readme, root):
    """But what a machine makes, and what a user is told to bring."""
    named = set(re.findall(r"`((?:artifact|data|kernels|notebooks|tests)/[\w./-]*)`", readme))
    made = ("data/results", "data/serving", "data/models")
    assert len(named) > 20
    assert [name for name in named if not name.startswith(made) and not (root / name).exists()] == []
    assert "\nNAMES = " in (root / "artifact/kv/pool.py").read_text()
    assert "\nPOLICIES = " in (root / "artifact/study/style.py").read_text()
