"""The house itself: what lies where, that pins are exact and the same everywhere, and which room may import which."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import artifact

ROOT = Path(__file__).resolve().parents[1]
FIXED = {"notebooks", "artifact", "kernels", "data", "environment.yml", "Makefile", "tests", "README.md"}
TOOLS = {"pyproject.toml", "requirements.lock", "LICENSE", "CITATION.cff", ".gitignore", ".ci"}
LARGEST_BYTES = 5 * 2**20


def _listed() -> list[Path]:
    """Files git keeps or would keep, relative to the root; without git, all but the usual leftovers."""
    try:
        done = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                              capture_output=True, text=True, check=True)
        names = [Path(name) for name in done.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = [path.relative_to(ROOT) for folder in sorted(FIXED | TOOLS)
                 for path in ([ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*"))]
        names = [name for name in names if "__pycache__" not in name.parts and name.parts[:2] != ("data", "results")]
    return [name for name in names if (ROOT / name).is_file()]


LISTED = _listed()
SOURCES = [name for name in LISTED if name.suffix == ".py" and name.parts[0] in ("artifact", "kernels")]
NOTEBOOKS = [name for name in LISTED if name.suffix == ".ipynb"]


def _text(name: Path) -> str:
    return (ROOT / name).read_bytes().decode("utf-8", errors="ignore")


# --- what lies where

def test_top_level_names_are_the_fixed_ones():
    assert {name.parts[0] for name in LISTED} - FIXED - TOOLS == set()


def test_every_room_is_in_the_package_map():
    mapped = tomllib.loads(_text(Path("pyproject.toml")))["tool"]["setuptools"]["packages"]
    found = {".".join(name.parent.parts) for name in SOURCES if name.name == "__init__.py"}
    assert {name.replace("kernels", "artifact.kernels", 1) if name.startswith("kernels") else name
            for name in found} == set(mapped) - {"artifact.data", "artifact.notebooks"}  # no sources in these


def test_every_folder_of_sources_is_a_package():
    assert {name.parent for name in SOURCES} == {name.parent for name in SOURCES if name.name == "__init__.py"}


def test_no_room_without_a_subject():
    assert [name for name in LISTED if name.stem in ("utils", "util", "helpers", "common", "manager", "misc")] == []


@pytest.mark.parametrize("name", SOURCES, ids=str)
def test_every_module_says_what_it_is_for(name):
    assert ast.get_docstring(ast.parse(_text(name)))


def test_no_file_is_large():
    sizes = {str(name): (ROOT / name).stat().st_size for name in LISTED}
    assert {name: size for name, size in sizes.items() if size > LARGEST_BYTES} == {}
    assert sum(size for name, size in sizes.items() if name.startswith("data/recorded/")) <= LARGEST_BYTES


@pytest.mark.parametrize("name", ["data/models/a.gguf", "data/serving/a.csv", "data/results/full/a.csv", ".venv/ready",
                                  "artifact/__pycache__/a.pyc", "a.egg-info/PKG-INFO"])
def test_what_a_machine_makes_is_ignored(name):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert subprocess.run(["git", "-C", ROOT, "check-ignore", "-q", name], check=False).returncode == 0


# --- what stands in the files

def machine_paths(text: str, root: Path = ROOT, home: Path | None = None) -> list[str]:
    """Absolute paths that only one machine has: people's homes, this checkout, its parent and this home."""
    anyones = {Path("/"), *(Path("/", name) for name in FIXED | {"tmp", "usr", "opt", "srv", "var", "results"})}
    places = {root, home or Path.home(), root.parent} - anyones
    own = "|".join(re.escape(f"{place}/") for place in places)
    return re.findall(rf"(?<![\w.-])(?:/(?:home|Users)/\w|/roo[t]/|{own})", text)


def unfinished(text: str) -> list[str]:
    """Marks of work left over."""
    return re.findall(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b", text)


def test_the_two_finders_find():
    root, home = Path("/srv/alice/checkout"), Path("/srv/bob")
    for text in ("open('/srv/alice/data')", "/srv/bob/.cache", "see /home" + "/carol", "/Users" + "/dave"):
        assert machine_paths(text, root, home), text
    for text in ("https://host/home" + "/page", "data/results", "../shared/golden", "/usr/bin/chromium"):
        assert not machine_paths(text, root, home), text
    assert unfinished("x = 1  # TO" + "DO later") and not unfinished("todos hackathon")


@pytest.mark.parametrize("name", [n for n in LISTED if b"\0" not in (ROOT / n).read_bytes()], ids=str)
def test_no_machine_paths_and_nothing_unfinished(name):
    text = _text(name)
    assert machine_paths(text) == []
    assert unfinished(text) == []


def test_the_version_is_said_once_more_in_the_citation_and_both_works_are_cited():
    citation = yaml.safe_load(_text(Path("CITATION.cff")))
    assert citation["version"] == artifact.__version__ == metadata.version("prr-kvpimple-artifact")
    assert citation["license"] == "Apache-2.0"
    first_authors = [work["authors"][0]["family-names"] for work in citation["references"]]
    assert first_authors == ["Wang", "Vu"]


# --- pins

def _lock() -> list[str]:
    lines = _text(Path("requirements.lock")).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _project() -> dict:
    return tomllib.loads(_text(Path("pyproject.toml")))


def test_the_lock_is_exact():
    assert [line for line in _lock() if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*( ; [^+]+)?", line)] == []
    names = [canonicalize_name(Requirement(line).name) for line in _lock()]
    assert len(names) == len(set(names))


def test_the_lock_is_complete_and_holds_nothing_else():
    """Everything the project asks for, and what that asks for in turn, is in the lock, and no more."""
    project = _project()
    extras = [line for lines in project["project"]["optional-dependencies"].values() for line in lines]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"], *extras]
    queue, reached = [Requirement(line) for line in wanted], set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in reached:
                continue
            reached.add((name, extra))
            for line in metadata.requires(name) or []:
                further = Requirement(line)
                if further.marker is None or further.marker.evaluate({"extra": extra}):
                    queue.append(further)
    pins = [Requirement(line) for line in _lock()]
    here = {canonicalize_name(pin.name) for pin in pins if pin.marker is None or pin.marker.evaluate()}
    assert here == {name for name, _ in reached}


def test_the_project_asks_for_what_is_locked():
    project, lock = _project(), set(_lock())
    extras = [line for lines in project["project"]["optional-dependencies"].values() for line in lines]
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"], *extras]
    assert [line for line in asked if line not in lock] == []


def test_the_conda_environment_is_the_lock():
    environment = yaml.safe_load(_text(Path("environment.yml")))
    (from_pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert from_pip == _lock()
    assert [entry for entry in environment["dependencies"] if isinstance(entry, str)] == ["python=3.11", "pip"]


# --- who may import whom: notebooks -> study -> prr, kv, pim, dsa, models -> ops -> kernels

LEVELS = {"study": 4, "__main__": 4, "prr": 3, "kv": 3, "pim": 3, "dsa": 3, "models": 3, "ops": 2, "attention": 2,
          "checks": 2, "compiled": 1, "kernels": 1, "": 0}
# who may touch kernels: the doorway itself, and what times them
DOORWAY = {"ops", "attention", "study", "__main__", "kernels"}
LIGHT = {"kv": {"numpy", "numba", "pandas"}, "pim": {"numpy", "numba", "pandas"}}
KERNELS = {"torch", "triton", "numpy"}
ALONE = {"cpu": "numba", "timing": "flashinfer"}  # and what modules with such a name's end may import besides
READING = {"open", "read", "read_text", "read_bytes", "read_csv", "read_json", "read_parquet", "read_table", "load",
           "safe_load", "glob", "rglob", "iterdir", "data_dir", "results_dir", "notebooks_dir"}


def module_of(name: Path) -> str:
    """`artifact/kv/engine.py` -> `artifact.kv.engine`; `kernels/cpu.py` -> `artifact.kernels.cpu`."""
    parts = name.with_suffix("").parts
    parts = ("artifact", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts).removesuffix(".__init__")


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(source: str) -> set[str]:
    """Full names of all that a source imports, wherever in it; `from a import b` counts as `a` and `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def wrong_imports(module: str, source: str) -> list[str]:
    """What `module` imports against the one direction."""
    room, wrong = _room(module), []
    for name in sorted(imports(source)):
        top = name.partition(".")[0]
        if name.startswith("."):
            wrong.append("a relative import")
        elif top == "kernels":
            wrong.append(f"{name}: its name is artifact.kernels")
        elif top == "artifact":
            other = _room(name)
            other = other if other in LEVELS else ""  # `from artifact import __version__`
            if LEVELS[other] > LEVELS[room] or (room == "kernels" and other != "kernels"):
                wrong.append(f"{name}: {room or 'artifact'} lies below it")
            elif other == "kernels" and room not in DOORWAY:
                wrong.append(f"{name}: artifact.ops is the doorway")
        elif top in sys.stdlib_module_names:
            continue
        elif room in LIGHT and top not in LIGHT[room]:
            wrong.append(f"{name}: {room} imports {', '.join(sorted(LIGHT[room]))} only")
        elif room == "kernels" and top not in KERNELS | {only for end, only in ALONE.items() if module.endswith(end)}:
            wrong.append(f"{name}: kernels import {', '.join(sorted(KERNELS))} only, and numba in *cpu.py")
    return wrong


def file_reads(source: str) -> list[str]:
    """Calls by which a source would read files or look for them."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = [call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls]
    return [name for name in names if name in READING]


@pytest.mark.parametrize(("module", "source"), [
    ("artifact.kv.engine", "import torch"),
    ("artifact.kv.engine", "def f():\n    from artifact.study import paths"),
    ("artifact.pim.mapping", "import yaml"),
    ("artifact.pim.mapping", "from artifact import ops, study"),
    ("artifact.pim.mapping", "from artifact.kernels import cpu"),
    ("artifact.prr.decode", "import artifact.kernels.decode"),
    ("artifact.prr.decode", "from ..study import paths"),
    ("artifact.ops", "from artifact.dsa import quest"),
    ("artifact.kernels.decode", "from artifact import ops"),
    ("artifact.kernels.decode", "import artifact"),
    ("artifact.kernels.decode", "import numba"),
    ("artifact.kernels.decode", "import pandas"),
    ("artifact.kernels.decode", "import flashinfer"),
    ("artifact.study.sweep", "import kernels"),
    ("artifact", "from artifact.study import paths"),
])
def test_a_wrong_import_is_seen(module, source):
    assert wrong_imports(module, source) != []


@pytest.mark.parametrize(("module", "source"), [
    ("artifact.study.sweep", "from artifact.kv import engine\nfrom artifact.kernels import timing\nimport pandas"),
    ("artifact.kv.engine", "import json\nimport numpy as np\nfrom artifact.pim.mapping import AddressMap"),
    ("artifact.kernels.cpu", "import numba\nfrom artifact.kernels import reference"),
    ("artifact.kernels.timing", "from flashinfer import BlockSparseAttentionWrapper"),
    ("artifact.ops", "from artifact.kernels import reference"),
    ("artifact.prr.decode", "from artifact import ops\nimport torch"),
    ("artifact.study.provenance", "import artifact\nfrom artifact import __version__"),
])
def test_a_right_import_is_not(module, source):
    assert wrong_imports(module, source) == []


def test_a_file_read_is_seen():
    assert file_reads("import pandas as pd\nf = pd.read_csv('a')\nopen('b')\np.read_text()") \
        == ["read_csv", "open", "read_text"]
    assert file_reads("frame.groupby('a')\nfig.write_html('b')") == []


@pytest.mark.parametrize("name", SOURCES, ids=str)
def test_imports_run_one_way(name):
    assert wrong_imports(module_of(name), _text(name)) == []


@pytest.mark.parametrize("name", [n for n in SOURCES if n.stem in ("figures", "tables", "widgets")], ids=str)
def test_what_draws_reads_no_files(name):
    assert file_reads(_text(name)) == []


@pytest.mark.parametrize("name", SOURCES, ids=str)
def test_every_module_is_the_one_in_this_checkout(name):
    """What is imported is what lies here: the install is editable and no other package stands before it."""
    module = module_of(name)
    if module == "artifact.__main__":
        module = "artifact"
    try:
        file = importlib.import_module(module).__file__
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("artifact"):
            raise
        pytest.skip(f"{error.name} is not installed")
    assert Path(file).is_relative_to(ROOT)


# --- notebooks

def _notebook(name: Path) -> dict:
    return json.loads(_text(name))


def _code(cell: dict) -> str:
    """The cell's Python, without magics."""
    return "\n".join(line for line in "".join(cell["source"]).splitlines() if not line.lstrip().startswith(("%", "!")))


def notebook_faults(notebook: dict) -> list[str]:
    """What the house does not want of a notebook's file."""
    cells, faults = notebook["cells"], []
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    if any(cell["outputs"] or cell["execution_count"] for cell in code):
        faults.append("outputs")
    trees = [ast.parse(_code(cell)) for cell in code]
    if any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
           for tree in trees for node in ast.walk(tree)):
        faults.append("logic")
    tops = {name.partition(".")[0] for cell in code for name in imports(_code(cell))}
    if tops - {"artifact"}:
        faults.append("imports")
    opening = "".join(cells[0]["source"]).lower()
    if cells[0]["cell_type"] != "markdown" or not all(
            word in opening for word in ("?", "input", "output", "minute", "claim")):
        faults.append("opening")
    parameters = [ast.unparse(tree) for tree, cell in zip(trees, code, strict=True)
                  if "parameters" in cell["metadata"].get("tags", [])]
    second = cells[1]["metadata"].get("tags", [])
    if "parameters" not in second or parameters != ["scale = 'tiny'\nresults = None"]:
        faults.append("parameters")
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        faults.append("kernel")
    told = notebook["metadata"].get("artifact", {})
    if set(told) != {"results", "figures", "tables", "needs", "claims"} or not all(
            isinstance(value, list) for value in told.values()):
        faults.append("metadata")
    return faults


def _good_notebook() -> dict:
    def code(source, **metadata):
        return {"cell_type": "code", "source": source, "metadata": metadata, "outputs": [], "execution_count": None}

    return {
        "cells": [
            {"cell_type": "markdown", "metadata": {}, "source": "# Why?\nInputs a, outputs b, minutes 1, claims c"},
            code('scale = "tiny"\nresults = None', tags=["parameters"]),
            code("from artifact.study import chain\nrun = chain.notebook('a', scale, results)"),
        ],
        "metadata": {"kernelspec": {"name": "python3"},
                     "artifact": {"results": [], "figures": [], "tables": [], "needs": [], "claims": []}},
    }


def _spoil(fault: str) -> dict:
    notebook = _good_notebook()
    cells = notebook["cells"]
    match fault:
        case "outputs":
            cells[2]["outputs"] = [{"output_type": "stream", "text": "a"}]
        case "logic":
            cells[2]["source"] = "def f():\n    pass"
        case "imports":
            cells[2]["source"] = "import numpy"
        case "opening":
            cells[0]["source"] = "# Why?"
        case "parameters":
            cells[1]["source"] = 'scale = "full"\nresults = None'
        case "kernel":
            notebook["metadata"]["kernelspec"] = {"name": "mine"}
        case "metadata":
            del notebook["metadata"]["artifact"]["claims"]
    return notebook


@pytest.mark.parametrize("fault", ["outputs", "logic", "imports", "opening", "parameters", "kernel", "metadata"])
def test_a_faulty_notebook_is_seen(fault):
    assert notebook_faults(_good_notebook()) == []
    assert notebook_faults(_spoil(fault)) == [fault]


@pytest.mark.parametrize("name", NOTEBOOKS, ids=str)
def test_notebooks_are_as_the_house_wants_them(name):
    assert re.fullmatch(r"notebooks/\d\d_[a-z_]+\.ipynb", name.as_posix())
    assert notebook_faults(_notebook(name)) == []
