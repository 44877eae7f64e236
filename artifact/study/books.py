"""The notebooks in their order: what each declares, and digests of all that its results depend on.

A notebook's metadata holds, under `artifact`, lists of: `results` (CSV names), `figures` and `tables` (keys), `needs`
(earlier notebooks), `claims` (ids).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import artifact
from artifact.study import claims, execute, paths, provenance, results
from artifact.study.scale import Scale

_DECLARED = ("results", "figures", "tables", "needs", "claims")
_NOT_INPUT = ("results/", "models/", "recorded/full/", "evaluation.yml", "claims.yml")  # claims count by notebook
_NOT_CODE = ("__main__.py", "report.py", "evaluation.py", "evidence.py", "document.py")  # they only show results


@dataclass(frozen=True)
class Book:
    """A notebook and what its metadata declares."""

    name: str
    path: Path
    content: dict
    results: tuple[str, ...]
    figures: tuple[str, ...]
    tables: tuple[str, ...]
    needs: tuple[str, ...]
    claims: tuple[str, ...]

    @property
    def declared(self) -> list[str]:
        """The files that a successful run leaves in the notebook's folder."""
        return [*self.results, *(f"figures/{key}.json" for key in self.figures),
                *(f"tables/{key}.md" for key in self.tables)]


def shelf(folder: Path | None = None) -> list[Book]:
    """The notebooks of a folder (None: the checkout's) by name, which is their order. ValueError names a faulty one."""
    folder = paths.notebooks_dir() if folder is None else Path(folder)
    found = [_book(path) for path in sorted(folder.glob("*.ipynb"))]
    if not found:
        raise ValueError(f"{folder}: no notebooks in it")
    for number, book in enumerate(found):
        for need in book.needs:
            if need not in [earlier.name for earlier in found[:number]]:
                raise ValueError(f"{book.path}: needs {need!r}, which is no earlier notebook")
    return found


def pick(books: Sequence[Book], only: Sequence[str]) -> list[Book]:
    """The books whose names start with one of `only` (none given: all). ValueError for a prefix of no notebook."""
    for prefix in only:
        if not any(book.name.startswith(prefix) for book in books):
            raise ValueError(f"no notebook starts with {prefix!r}; there are: {', '.join(book.name for book in books)}")
    return [book for book in books if not only or book.name.startswith(tuple(only))]


def with_needs(books: Sequence[Book], picked: Sequence[Book]) -> list[Book]:
    """`picked` and all that they need, directly or not, in order."""
    wanted = {book.name for book in picked}
    for book in reversed(books):
        if book.name in wanted:
            wanted.update(book.needs)
    return [book for book in books if book.name in wanted]


def inputs(book: Book, size: Scale, folder: Path) -> dict[str, str]:
    """A digest for each thing that the results of `book` at a scale depend on; `folder` holds that scale's results."""
    needs = []
    for need in book.needs:
        path = folder / need / results.MANIFEST
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        needs.append([need, manifest.get("inputs"), manifest.get("files")])
    cells = [[cell["cell_type"], cell["source"], cell["metadata"].get("tags", [])] for cell in book.content["cells"]]
    return {"notebook": _digest([cells, book.content["metadata"].get("artifact")]), "scale": _digest(size.model_dump()),
            "claims": _digest([claim.model_dump() for claim in claims.of(book.name)]),
            "needs": _digest(needs), **_surroundings()}


def _book(path: Path) -> Book:
    content = execute.load(path)
    declared = content["metadata"].get("artifact", {})
    if not isinstance(declared, dict):
        raise ValueError(f"{path}: metadata artifact must be a mapping of {', '.join(_DECLARED)}")
    for key, value in declared.items():
        if key not in _DECLARED:
            raise ValueError(f"{path}: metadata artifact.{key} is unknown; allowed: {', '.join(_DECLARED)}")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{path}: metadata artifact.{key} must be a list of text")
    return Book(path.stem, path, content, **{key: tuple(declared.get(key, ())) for key in _DECLARED})


@cache
def _surroundings() -> dict[str, str]:
    """Digests of code, data and versions: they do not change while one process runs the chain."""
    package, checkout = Path(artifact.__file__).parent, paths.root()
    code = {path: None for folder in (package, checkout / "kernels" if checkout else package)
            for path in sorted(folder.rglob("*.py")) if path.name not in _NOT_CODE}
    shipped = paths.data_dir()
    data = {path.relative_to(shipped).as_posix(): path for path in sorted(shipped.rglob("*")) if path.is_file()}
    data = {name: path for name, path in data.items() if not name.startswith(_NOT_INPUT)}
    installed = provenance.versions()
    return {"code": _digest([[*path.parts[-2:], results.sha256(path)] for path in code]),
            "data": _digest([[name, path.stat().st_size if name.startswith("serving/") else results.sha256(path)]
                             for name, path in data.items()]),  # one's own traces may be too large to read each time
            "versions": _digest({name: installed.get(name) for name in provenance.pinned()[0]})}


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
