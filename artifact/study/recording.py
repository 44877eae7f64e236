"""Recording traces: everything is checked before a weight is loaded, and nothing is written unless all went well.

`python -m artifact.study.recording` (`make traces`) records every trace of data/traces again, as its index says, says
how far each is from the one that lay there, and replaces it.
"""

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from artifact.models import prompts, registry, trace, weights
from artifact.study import paths, provenance

TOLERANCE = 1e-3  # of each step's largest |score|, on the same processor
ELSEWHERE = 5e-3  # on another one, which adds in another order: what is stored is rounded and may fall to either side


def record(family: str, prompt: str = "0", *, model: str = registry.OFFLINE, tokens: int = 4096, steps: int = 64,
           rows: int = 64, layers: Sequence[int] | str | None = None,
           on_progress: Callable[[int, int], None] | None = None) -> trace.Trace:
    """A trace of `model` on a prompt of `tokens` tokens: `steps` decode steps, the last `rows` rows of the prefill.

    `family`, `prompt`: as in artifact.models.prompts. `model`: a name of the registry, a folder or a hub id. `layers`:
    which, or "all"; None is four, spread over the depth. A CPU computes with one thread, so that the same machine
    gives the same trace. Raises ValueError for what does not fit, before the weights are loaded.
    """
    folder = paths.data_dir()
    prompts.check(family, prompt, folder / "prompts")
    source = weights.find(model, folder / "models")
    shape = weights.shape(source)
    if layers is None or layers == "all":
        layers = spread(shape.layers) if layers is None else range(shape.layers)
    layers = list(layers)
    registry.check_layers(layers, shape.layers)
    trace.check_length(tokens, steps, rows, shape.context_tokens)
    built = prompts.build(family, prompt, tokens, weights.tokenizer(source), folder / "prompts", steps)
    trace.check_length(len(built.ids), steps, 0 if built.chain else rows, shape.context_tokens)

    import torch

    from artifact.models import capture

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loaded, ids, seed = weights.load(source), built.ids, prompts.seed(family, prompt)
        if built.chain:
            ids = capture.extend(loaded, ids, tokens, seed=seed, on_progress=on_progress)
        return capture.record(loaded, ids, layers=layers, steps=steps, rows=rows, decoding=built.decoding, seed=seed,
                              continuation=built.continuation, on_progress=on_progress,
                              labels={"model": model, "family": family, "prompt": prompt})
    finally:
        torch.set_num_threads(threads)


def write(out: str | None = None, layers: str | None = None, **asked: object) -> dict[str, object]:
    """`record`, then a file and its line in the index beside it; returns what was written, flat.

    `out`: a .npz; None is FAMILY-PROMPT.npz here. `layers`: as on the command line, `2,10` or `all`. Otherwise as
    `record`. Raises ValueError, with nothing written, for what is wrong.
    """
    named = f"{asked['family']}-{asked['prompt']}"
    path = Path(out or f"{re.sub(r'[^A-Za-z0-9.-]+', '-', named)}.npz")
    if path.suffix != ".npz":
        raise ValueError(f"out is {str(path)!r}; allowed: a file that ends in .npz")
    trace.index(path.parent)
    recorded = record(**asked, layers=layers if layers is None or layers == "all" else _numbers(layers))
    trace.write(recorded, path, provenance.machine()["cpu"])
    return {"file": str(path), "bytes": path.stat().st_size, "model": recorded.model, "family": recorded.family,
            "prompt": recorded.prompt, "decoding": recorded.decoding, "tokens": recorded.tokens,
            "steps": recorded.steps, "rows": recorded.rows.size, "layers": " ".join(map(str, recorded.layers))}


def again(line: dict[str, str], on_progress: Callable[[int, int], None] | None = None) -> trace.Trace:
    """Records what a line of a traces' index says."""
    return record(line["family"], line["prompt"], model=line["model"], tokens=int(line["tokens"]),
                  steps=int(line["steps"]), rows=int(line["rows"]), layers=[int(at) for at in line["layers"].split()],
                  on_progress=on_progress)


def tolerance(line: dict[str, str]) -> float:
    """How far a trace recorded here may be from the one in a line of a traces' index."""
    return TOLERANCE if line["cpu"] == provenance.machine()["cpu"] else ELSEWHERE


def spread(layers: int) -> list[int]:
    """Four layers over the depth of a model of so many, the first two and the last left out: 2, 10, 19, 28 of 30."""
    first, last = min(2, layers - 1), max(layers - 2, 0)
    return sorted({int(at) for at in np.linspace(min(first, last), max(first, last), 4)})


def difference(one: trace.Trace, other: trace.Trace) -> float:
    """How far apart two traces are: the largest difference of a score over its row's largest |score|, all rows.

    Scores: Quest's, page 16, the largest of the group. Infinite when a shape differs, or the pages that are complete.
    """
    from artifact.dsa.quest import Quest

    worst, method = 0.0, Quest(page=trace.PAGE_TOKENS, group="max")
    if one.layers.tolist() != other.layers.tolist():
        return np.inf
    for layer in one.layers:
        for part in ("decode", "prefill"):
            a, b = (side.scores(method, layer, part) for side in (one, other))
            known = np.isfinite(a)
            if a.shape != b.shape or (known != np.isfinite(b)).any():
                return np.inf
            largest = np.where(known, np.abs(b), 0).max((1, 2), keepdims=True)
            worst = max(worst, float((np.abs(np.where(known, a, 0) - np.where(known, b, 0)) / largest).max(initial=0)))
    return worst


def overlap(recorded: trace.Trace, pages: int, method) -> np.ndarray:
    """Share of a step's best `pages` that were among the step's before: float64 [layers, steps - 1, G].

    `method`: a Quest of artifact.dsa. Only pages of the prompt count: the recent ones would be attended anyway.
    """
    shares = []
    for layer in recorded.layers:
        scores = recorded.scores(method, layer)[..., :recorded.tokens // method.page]
        best = np.argsort(-scores, axis=-1, kind="stable")[..., :pages]
        chosen = np.zeros(scores.shape, bool)
        np.put_along_axis(chosen, best, True, -1)
        shares.append((chosen[1:] & chosen[:-1]).sum(-1) / pages)
    return np.stack(shares)


def constitution(on_progress: Callable[[int, int], None] | None = None) -> trace.Trace:
    """SmolLM2 on 8,064 tokens of the US Constitution, 64 steps of the text's own continuation, all 30 layers; live."""
    return record("text", "0", tokens=8064, rows=0, layers="all", on_progress=on_progress)


def rebuild(folder: str | Path | None = None, say: Callable[[str], None] = print) -> int:
    """Records every trace of `folder`/index.csv again and replaces it; returns how many differ from what lay there."""
    folder = Path(folder) if folder else paths.data_dir() / "traces"
    differing = 0
    for line in trace.index(folder):
        started = time.perf_counter()
        new = again(line)
        try:
            apart = difference(new, trace.read(folder / line["file"]))
        except ValueError as error:
            apart, reason = np.inf, str(error)
        else:
            reason = f"{apart:.1e} of each step's largest |score| from the one before, allowed {tolerance(line):g}"
        trace.write(new, folder / line["file"], provenance.machine()["cpu"])
        differing += apart > tolerance(line)
        say(f"{line['file']}: {time.perf_counter() - started:.0f} s, {reason}")
    return differing


def _numbers(text):
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise ValueError(f"layers are {text!r}; allowed: whole numbers like 2,10,19,28, or all")
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    try:
        sys.exit(int(rebuild() > 0))
    except (ValueError, OSError) as failure:
        sys.exit(f"traces: {failure}")
