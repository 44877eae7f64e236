"""One notebook in processes of its own, and an honest account of how that ended.

papermill runs in a child process, which holds the kernel: so a time limit ends whatever it is that hangs, Ctrl-C
leaves nothing behind, and should this process be killed, the child sees its standard input close and takes the kernel
with it. papermill's exit code is not trusted: it is 0 after `sys.exit(0)` in a cell, and cells that a killed kernel
never reached are marked completed. What counts is every code cell's execution count and output.
"""

import ast
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

PARAMETERS = ("scale", "results")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def load(path: Path) -> dict:
    """A notebook file (nbformat 4) with each cell's source as one text; ValueError when it is none."""
    try:
        notebook = json.loads(Path(path).read_text(encoding="utf-8"))
        if notebook["nbformat"] != 4:
            raise ValueError(f"nbformat is {notebook['nbformat']}; it must be 4")
        notebook["metadata"].get("artifact")
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"])
            cell["metadata"].get("tags")
            if cell["cell_type"] == "code":
                cell["outputs"] = list(cell["outputs"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a notebook: {error}") from None
    return notebook


def prepare(notebook: dict) -> dict:
    """A copy for batch: without cells tagged `interactive`, without outputs, for the kernel python3.

    Raises ValueError when the parameters are not exactly those of `PARAMETERS`: papermill only warns of unknown ones.
    """
    batch = copy.deepcopy(notebook)
    batch["cells"] = [cell for cell in batch["cells"] if "interactive" not in _tags(cell)]
    batch["metadata"]["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
    for cell in _code(batch):
        cell["outputs"], cell["execution_count"] = [], None
    tagged = [cell for cell in _code(batch) if "parameters" in _tags(cell)]
    if len(tagged) != 1:
        raise ValueError(f"{len(tagged)} cells are tagged `parameters`; one must be, with {' and '.join(PARAMETERS)}")
    try:
        names = [target.id for line in ast.parse(tagged[0]["source"]).body for target in line.targets]
    except (SyntaxError, AttributeError):
        names = [tagged[0]["source"].strip().split("\n")[0]]
    if sorted(names) != sorted(PARAMETERS):
        raise ValueError(f"the parameters cell sets {', '.join(names) or 'nothing'}; "
                         f"it must set {' and '.join(PARAMETERS)} and nothing else")
    return batch


def execute(notebook: dict, output: Path, parameters: Mapping[str, object], limit_s: float,
            tick: Callable[[float], None] = lambda elapsed_s: None) -> str | None:
    """Runs a prepared notebook in a fresh python3 kernel of this interpreter, in an empty temporary folder.

    `output`: the executed notebook, as far as it came. `limit_s`: seconds for the whole notebook. `tick`: called
    about five times a second with the seconds elapsed. Returns None when every code cell ran without an error, else
    one line that says what did not. KeyboardInterrupt ends the kernel and passes through.
    """
    with tempfile.TemporaryDirectory(prefix="artifact-", ignore_cleanup_errors=True) as folder:
        request, log = _lay_out(Path(folder), notebook, output, parameters)
        started = time.monotonic()
        with open(log, "wb") as file:
            child = subprocess.Popen([sys.executable, "-m", "artifact.study.execute", str(request)],
                                     stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
                                     env=_environment(Path(folder)), start_new_session=True)
        try:
            while child.poll() is None and (elapsed := time.monotonic() - started) < limit_s:
                tick(elapsed)
                try:
                    child.wait(0.2)
                except subprocess.TimeoutExpired:
                    pass
            late = child.poll() is None
        finally:
            end(child.pid)
            child.wait()
            child.stdin.close()
        said = log.read_text(encoding="utf-8", errors="replace")
    return _judge(output, said, child.returncode, f"ran past its limit of {limit_s:g} s" if late else None)


def _lay_out(folder: Path, notebook: dict, output: Path, parameters: Mapping) -> tuple[Path, Path]:
    kernel = folder / "jupyter" / "kernels" / "python3"
    for made in (kernel, folder / "work", folder / "ipython", folder / "runtime"):
        made.mkdir(parents=True)
    (kernel / "kernel.json").write_text(json.dumps({
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3", "language": "python"}), encoding="utf-8")
    (folder / "input.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    request = folder / "request.json"
    request.write_text(json.dumps({
        "input_path": str(folder / "input.ipynb"), "output_path": str(output), "parameters": dict(parameters),
        "cwd": str(folder / "work")}), encoding="utf-8")
    return request, folder / "log"


def _environment(folder: Path) -> dict[str, str]:
    """The kernel named python3 is this interpreter, whatever kernels and start-up files the user has."""
    return {**os.environ, "JUPYTER_PATH": str(folder / "jupyter"), "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "IPYTHONDIR": str(folder / "ipython"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}


def _judge(output: Path, said: str, code: int, late: str | None) -> str | None:
    try:
        cells = [cell for cell in _code(load(output)) if cell["source"].strip()]
    except (OSError, ValueError):
        return late or f"papermill wrote no notebook: {_last(said)}"
    where = _where(cells)
    if late:
        return f"{late} in {where}"
    for cell in cells:
        for out in cell["outputs"]:
            if out["output_type"] == "error":
                return f"{_where(cells, cell)}: {out['ename']}: {_last(out['evalue'])}"
    if "DeadKernelError" in said:
        return f"the kernel died (killed, or out of memory) in or after {where}"
    if code != 0:
        return f"papermill failed in {where}: {_last(said)}"
    if [cell["execution_count"] for cell in cells] != list(range(1, len(cells) + 1)):
        return f"not every cell ran, in order: the last was {where}"
    return None


def _where(cells: list[dict], at: dict | None = None) -> str:
    """`code cell 3 of 7` as its author counts: `at`, or the one that runs, or else the last that ran."""
    if at is None:
        begun = [cell for cell in cells if cell["execution_count"] is not None
                 or cell["metadata"].get("papermill", {}).get("status") == "running"]
        if not begun:
            return "no cell"
        at = begun[-1]
    own = [cell for cell in cells if "injected-parameters" not in _tags(cell)]
    return f"code cell {own.index(at) + 1} of {len(own)}" if at in own else "the parameters cell"


def _last(text: str) -> str:
    lines = [line.strip() for line in _ANSI.sub("", text).splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no message"


def _tags(cell: dict) -> list[str]:
    return cell["metadata"].get("tags", [])


def _code(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def end(pid: int) -> None:
    """Kills a process and all that it started; the kernel has a session of its own, so no group reaches it."""
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass


def _end_with_parent() -> None:
    while os.read(0, 1):  # nothing is ever sent; empty = the parent is gone
        pass
    end(os.getpid())


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.modules["rfc3987_syntax"] = None  # jsonschema would compile its grammar for a second; notebooks have no IRIs
    import papermill

    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    papermill.execute_notebook(**asked, kernel_name="python3", progress_bar=False, start_timeout=180)
