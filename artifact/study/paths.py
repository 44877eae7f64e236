"""Where things lie: the checkout, its data, its notebooks, and where results go."""

from pathlib import Path


def root() -> Path | None:
    """The checkout this package runs from (pyproject.toml and notebooks/ beside it); None when installed elsewhere."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir() else None


def data_dir() -> Path:
    """The checkout's data/: scales, sweeps, published and recorded numbers. Raises ValueError outside a checkout."""
    return _checkout("data")


def notebooks_dir() -> Path:
    """The checkout's notebooks/. Raises ValueError outside a checkout."""
    return _checkout("notebooks")


def results_dir(explicit: str | Path | None = None) -> Path:
    """Where a run writes: `explicit` when given, data/results of the checkout, else ./results. Nothing is created."""
    if explicit is not None:
        return Path(explicit).expanduser().absolute()
    folder = root()
    return folder / "data" / "results" if folder else Path.cwd() / "results"


def _checkout(name: str) -> Path:
    folder = root()
    if folder is None:
        raise ValueError(f"{name}/ is part of a checkout and {Path(__file__).parents[1]} is not in one: "
                         "clone the repository and install it there with `make setup`")
    return folder / name
