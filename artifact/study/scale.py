"""A scale: how large each experiment is, and its seed; nothing else."""

from pathlib import Path
from typing import Annotated, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from artifact.study import paths

M = TypeVar("M", bound=BaseModel)
ORDER = ("tiny", "smoke", "full")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, ten times quicker, where the wheel has it
Sizes = Annotated[tuple[PositiveInt, ...], Field(min_length=1, strict=False)]  # YAML has lists, a frozen model tuples


class Scale(BaseModel):
    """One file of data/scales. Every file has the same keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    name: str
    seed: NonNegativeInt
    sweep_requests: PositiveInt = Field(description="cap on the requests of one cell of a sweep")
    sweep_seeds: PositiveInt = Field(description="the first so many seeds of a sweep that lists them")
    settle_requests: PositiveInt = Field(description="the longest run when asking how long a run must be")
    block_tokens: Sizes = Field(description="block sizes of the headline and the heat map, tokens")
    prompt_tokens: Sizes = Field(description="rows of the heat map, tokens")
    run_length_requests: Sizes = Field(description="run lengths of the experiment on M1 by run length, requests")
    trace_requests: PositiveInt = Field(description="the first so many requests of a real trace")
    sample_requests: PositiveInt = Field(description="requests of the shorter of the two placement runs")
    controller_runs: PositiveInt = Field(description="recorded AttAcc runs computed again, evenly taken from all")
    controller_commands: PositiveInt = Field(description="commands of a pattern")
    prediction_prompts: PositiveInt = Field(description="the first so many of the recorded decode traces")
    prediction_layers: PositiveInt = Field(description="the first so many of a trace's layers")
    compiled_cases: PositiveInt = Field(description="the first so many kernels of the short list compiled again")
    kernel_tokens: PositiveInt = Field(description="tokens of the cache that attention on the CPU is timed with")
    kernel_rounds: PositiveInt = Field(description="rounds of each such timing")
    fidelity_prompt_tokens: PositiveInt = Field(description="prompt of a passage whose continuation is scored")
    fidelity_tokens: NonNegativeInt = Field(description="tokens scored of each passage; 0: our recorded run is shown")
    fidelity_passages: PositiveInt = Field(description="passages, from the texts in turn")
    fidelity_needle_tokens: PositiveInt = Field(description="length of a prompt that hides a fact")
    fidelity_needles: NonNegativeInt = Field(description="such prompts; 0: our recorded run is shown")
    runtime_tokens: Sizes = Field(description="contexts of the decode steps that are timed on this CPU, tokens")
    runtime_models: PositiveInt = Field(description="models whose layers' shape they have")
    runtime_layers: PositiveInt = Field(description="layers of a stack of them")
    runtime_rounds: NonNegativeInt = Field(description="steps timed in each way; 0: our recorded run is shown")


def load(name: str, folder: Path | None = None) -> Scale:
    """The scale `name` of `folder` (None: data/scales). ValueError, one line, for a name or file that is not right."""
    folder = paths.data_dir() / "scales" if folder is None else Path(folder)
    known = names(folder)
    if name not in known:
        raise ValueError(f"scale {name!r} is not one of: {', '.join(known) or f'(none in {folder})'}")
    scale = validated(folder / f"{name}.yml", Scale)
    if scale.name != name:
        raise ValueError(f"{folder / name}.yml: name is {scale.name!r}; it must be the file's, {name!r}")
    return scale


def names(folder: Path | None = None) -> list[str]:
    """The scales there are, smallest first."""
    folder = paths.data_dir() / "scales" if folder is None else Path(folder)
    found = sorted(path.stem for path in folder.glob("*.yml"))
    return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def largest(results: Path) -> str:
    """The largest scale that something has been run at below `results`; smoke when nothing has."""
    run = [name for name in names() if any((results / name).glob("*/manifest.json"))]
    return run[-1] if run else "smoke"


def read_yaml(path: Path) -> object:
    """The content of a YAML file, safely loaded. ValueError, one line, naming the file when it is not YAML."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise ValueError(f"{path}:{line} not YAML: {getattr(error, 'problem', None) or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None


def scalar(text: str) -> str | int | float | bool | None:
    """A word or number as YAML types it: 4, 0.25, true, null, steady."""
    return yaml.load(text, _LOADER)


def validated(path: Path, model: type[M]) -> M:
    """The YAML file `path` as a `model`. ValueError, one line, naming file, key and what is allowed."""
    return check(read_yaml(path), model, str(path))


def check(content: object, model: type[M], where: str) -> M:
    """`content` as a `model`; ValueError, one line, that starts with `where`."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: must be a mapping of {', '.join(model.model_fields)}")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")  # a misspelt key before its lack
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{where}: unknown key {key!r}; allowed: {', '.join(model.model_fields)}") from None
        if first["type"] == "missing":
            raise ValueError(f"{where}: key {key!r} is missing; needed: {', '.join(model.model_fields)}") from None
        allowed = {"tuple_type": "a list", "too_short": "a list with something in it"}.get(first["type"])
        allowed = allowed or first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise ValueError(f"{where}: " + (f"{key} is {first['input']!r}; it" if key else "it")
                         + f" must be {allowed}") from None
