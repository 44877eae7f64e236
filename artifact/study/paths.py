"""Where things lie: the checkout or the installed package, the data and notebooks of either, and where results go."""

from pathlib import Path


def root() -> Path | None:
    """The checkout this package runs from (pyproject.toml and notebooks/ beside it); None when installed elsewhere."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir() else None


def data_dir() -> Path:
    """Scales, sweeps, claims, published and recorded numbers: data/ of the checkout, else of the installed package.

    What a user brings, models/ and serving/, lies there too. Raises ValueError where there is neither.
    """
    return _shipped("data")


def notebooks_dir() -> Path:
    """The notebooks of the checkout, else of the installed package. Raises ValueError where there is neither."""
    return _shipped("notebooks")


def results_dir(explicit: str | Path | None = None) -> Path:
    """Where a run writes: `explicit` when given, data/results of the checkout, else ./results. Nothing is created."""
    if explicit is not None:
        return Path(explicit).expanduser().absolute()
    folder = root()
    return folder / "data" / "results" if folder else Path.cwd() / "results"


def _shipped(name: str) -> Path:
    checkout, package = root(), Path(__file__).parents[1]
    folder = checkout / name if checkout else package / name
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder, and {package} is in no checkout: install the wheel, or clone the "
                         "repository and install it there with `make setup`")
    return folder
