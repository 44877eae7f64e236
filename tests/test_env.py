"""`artifact env`, where a result comes from, and the one place where errors become a line and an exit code."""

import json
import os
import platform
import subprocess
import sys

import click
import pytest

import artifact.__main__ as command_line
from artifact.study import paths, provenance


@pytest.fixture
def verb(monkeypatch):
    """Plants a verb `planted` that does what it is given."""

    def plant(action):
        commands = dict(command_line.cli.commands, planted=click.Command("planted", callback=action))
        monkeypatch.setattr(command_line.cli, "commands", commands)

    return plant


def raising(error):
    def action():
        raise error

    return action


def one_line(text):
    """Exactly one; click ends the terminal's `^C` with an empty line before it."""
    return text.endswith("\n") and text.removeprefix("\n").count("\n") == 1


def git(folder, *arguments):
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments], check=True,
                   capture_output=True)


def test_env_json_is_one_flat_object_about_this_machine(cli):
    ran = cli("env", "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert not any(isinstance(value, dict) for value in found.values())
    assert found["python"] == platform.python_version()
    assert found["cores_count"] in range(1, os.cpu_count() + 1)
    assert 2**28 < found["memory_bytes"] < 2**50
    assert found["tier_cpu"] is True and found["tier_cpu_reason"] is None
    for tier in ("model", "gpu"):
        assert (found[f"tier_{tier}_reason"] is None) == found[f"tier_{tier}"]


def test_env_table_says_the_same(cli):
    ran = cli("env")
    assert ran.code == 0
    rows = {line[:17].strip(): line[18:] for line in ran.out.splitlines()}
    assert rows["python"] == platform.python_version()
    assert rows["tier cpu"] == "yes"
    assert rows["attacc"] == os.environ.get("ATTACC_DIR", "not found: set ATTACC_DIR to its folder")


def test_this_environment_is_the_lock(cli):
    found = json.loads(cli("env", "--json").out)
    assert found["pins_from"] == "requirements.lock"
    assert found["pins_count"] > 100
    assert (found["pins_missing"], found["pins_different"]) == ([], [])


def test_differences_from_the_pins_are_listed(monkeypatch, cli):
    installed = provenance.versions() | {"numpy": "1.0"}
    del installed["pandas"]
    monkeypatch.setattr(provenance, "versions", lambda: installed)
    pins, _ = provenance.pinned()
    found = json.loads(cli("env", "--json").out)
    assert found["pins_different"] == [f"numpy 1.0 (pinned {pins['numpy']})"]
    assert found["pins_missing"] == [f"pandas {pins['pandas']}"]
    assert found["tier_cpu_reason"] == "not installed: pandas"
    assert "tier cpu          no, not installed: pandas" in cli("env").out


def test_local_builds_of_a_pin_are_no_difference(monkeypatch):
    pins, _ = provenance.pinned()
    monkeypatch.setattr(provenance, "versions", lambda: pins | {"numpy": pins["numpy"] + "+cpu"})
    assert provenance.environment()["pins_different"] == []


def test_simulators_are_looked_for_when_called(monkeypatch, tmp_path):
    monkeypatch.delenv("ATTACC_DIR", raising=False)
    assert provenance.environment()["attacc"] is None
    monkeypatch.setenv("ATTACC_DIR", str(tmp_path))
    monkeypatch.setenv("RAMULATOR_DIR", str(tmp_path / "nowhere"))
    found = provenance.environment()
    assert found["attacc"] == str(tmp_path)
    assert found["ramulator"] is None


def test_without_a_browser_env_says_how_to_get_one(monkeypatch, cli, tmp_path):
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-browser"))
    ran = cli("env")
    assert ran.code == 0
    assert f"not found, so no still images: {provenance.CHROMIUM_ADVICE}" in ran.out


def test_the_browser_found_is_asked_for_its_version(monkeypatch, tmp_path):
    browser = tmp_path / "a browser"
    browser.write_text("#!/bin/sh\necho Chromium 1.2.3\n")
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(browser))
    assert provenance.chromium() == (str(browser), "Chromium 1.2.3")


def test_git_state_knows_clean_from_dirty(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    assert provenance.git_state() == (None, None)
    git(tmp_path, "init", "-q")
    assert provenance.git_state() == (None, None)
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    commit, dirty = provenance.git_state()
    assert len(commit) == 40 and dirty is False
    (tmp_path / "new").touch()
    assert provenance.git_state() == (commit, True)


def test_a_repository_around_the_checkout_is_not_taken_for_it(monkeypatch, tmp_path):
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "somebody else's")
    (tmp_path / "unpacked").mkdir()
    monkeypatch.setattr(paths, "root", lambda: tmp_path / "unpacked")
    assert provenance.git_state() == (None, None)


def test_provenance_without_git_installed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.git_state() == (None, None)


def test_an_installed_package_knows_its_own_pins(monkeypatch, cli, tmp_path):
    monkeypatch.setattr(paths, "root", lambda: None)
    monkeypatch.chdir(tmp_path)
    found = json.loads(cli("env", "--json").out)
    assert (found["checkout"], found["commit"], found["dirty"]) == (None, None, None)
    assert found["pins_from"] == "package metadata"
    pins, _ = provenance.pinned()
    assert "numpy" in pins and "pytest" not in pins
    assert paths.results_dir() == tmp_path / "results"
    for folder in (paths.data_dir, paths.notebooks_dir):
        with pytest.raises(ValueError, match="make setup"):
            folder()


def test_results_go_where_they_are_told(tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    assert paths.results_dir() == root / "data" / "results"
    assert paths.results_dir("here") == tmp_path / "here"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "words"), [
    (["nonsense"], ["nonsense", "Allowed:", "env"]),
    (["env", "--nonsense"], ["--nonsense", "artifact env --help"]),
    (["env", "nonsense"], ["nonsense"]),
])
def test_bad_usage_is_one_line_and_exit_2(cli, arguments, words):
    ran = cli(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert one_line(ran.err)
    assert all(word in ran.err for word in words)


@pytest.mark.parametrize(("error", "code", "words"), [
    (ValueError("rate is -1;\n  allowed: above 0"), 2, "rate is -1; allowed: above 0"),
    (OSError(28, "No space left on device", "results"), 2, "No space left on device"),
    (click.BadParameter("no"), 2, "no"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (ValueError(), 2, "ValueError"),
])
def test_errors_become_one_line_and_a_code(cli, verb, error, code, words):
    verb(raising(error))
    ran = cli("planted")
    assert (ran.code, ran.out) == (code, "")
    assert one_line(ran.err) and words in ran.err


def test_a_mistake_of_ours_is_not_hidden(cli, verb):
    verb(raising(TypeError("a bug")))
    with pytest.raises(TypeError, match="a bug"):
        cli("planted")


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (1, 1), ("text", 0)])
def test_a_verb_returns_its_code(cli, verb, returned, code):
    verb(lambda: returned)
    assert cli("planted") == (code, "", "")


def test_no_verb_prints_the_help(cli):
    ran = cli()
    assert ran.code == 0 and "Usage: artifact" in ran.out


def test_the_program_itself(root):
    """The exit codes and streams of a real process."""
    run = [sys.executable, "-m", "artifact"]
    shown = subprocess.run([*run, "--help"], capture_output=True, text=True, check=False)
    assert shown.returncode == 0 and "env" in shown.stdout and shown.stderr == ""
    wrong = subprocess.run([*run, "nonsense"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "") and one_line(wrong.stderr)


def test_the_command_line_starts_light():
    """Only click beyond the standard library until a verb asks for more."""
    code = "import sys, artifact.__main__; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "click" in loaded
    assert not {"numpy", "pandas", "numba", "plotly", "pydantic", "yaml", "papermill", "torch"} & set(loaded)
