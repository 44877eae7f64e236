"""A decode trace: what one layer's selection and attention saw at each step of a real model's decoding.

A trace holds, for a few layers of one model on one prompt, the queries after RoPE of every decode step and of the last
rows of the prefill, the minimum, maximum and mean of the keys after RoPE over each page of 16 tokens, and the share of
the attention's mass that truly fell on each page at each decode step. That is enough for the scores of Quest (minimum
and maximum; a page of 64 tokens from four of 16) and of InfLLM-v2 (keys averaged over 32 tokens at stride 16 are means
of two neighbouring pages), for calibration and for recall; whole keys would be an order of magnitude larger.

A file is a NumPy .npz without pickles. Its fp16 arrays lie there as two planes of bytes, uint8 [2, ...], low bytes
first: the plane of signs and exponents deflates well, the other badly, and mixed they spoil each other. The file's
line in `index.csv` beside it has its sha256 and the command that made it.
"""

import csv
import hashlib
import io
import os
import zipfile
import zlib
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from artifact.models import registry

PAGE_TOKENS = 16
BITS = 9  # significant bits kept of fp16's 11; bf16, in which such models usually run, has 8
DECODING = {
    "greedy": "the model's own continuation, its likeliest token each time",
    "sampled": "the model's own continuation, drawn with a fixed seed",
    "teacher": "the text's own continuation, whatever the model would have said",
}
INDEX = "index.csv"
COLUMNS = ("file", "sha256", "bytes", "model", "family", "prompt", "decoding", "tokens", "steps", "rows", "layers",
           "cpu", "command")
_FORMAT = 1
_HALVES = ("q_prefill", "q_decode", "page_min", "page_max", "page_mean", "mass")


@dataclass(frozen=True, eq=False)
class Trace:
    """One recording. L layers, R prefill rows, T decode steps, H query heads, G KV heads, P pages, head size D.

    `model`, `family`, `prompt`: what was recorded; `decoding`: who chose the tokens of the decode steps (`DECODING`).
    `layers` int32 [L], ascending; `tokens`: prompt length; `rows` int32 [R]: positions of the prefill rows, ascending.
    `generated` int32 [T]: the token fed at each decode step; step t stands at position tokens + t.
    `q_prefill` fp16 [L, R, H, D], `q_decode` fp16 [L, T, H, D]: queries after RoPE.
    `page_min`, `page_max`, `page_mean` fp16 [L, G, P, D]: of the keys after RoPE, over the complete pages of the final
    sequence, P = (tokens + T) // 16.
    `mass` fp16 [L, T, G, P]: attention probability on each page, the mean over the group's query heads; a row sums to 1
    but for the tokens after the last complete page.

    Raises ValueError when an array's dtype or shape, or the set of layers, does not fit the others or the model.
    """

    model: str
    family: str
    prompt: str
    decoding: str
    layers: np.ndarray
    tokens: int
    rows: np.ndarray
    generated: np.ndarray
    q_prefill: np.ndarray
    q_decode: np.ndarray
    page_min: np.ndarray
    page_max: np.ndarray
    page_mean: np.ndarray
    mass: np.ndarray

    def __post_init__(self):
        if self.decoding not in DECODING:
            raise ValueError(f"decoding is {self.decoding!r}; allowed: {', '.join(DECODING)}")
        for name in ("layers", "rows", "generated"):
            _shaped(name, getattr(self, name), np.int32, 1)
        for name in _HALVES:
            _shaped(name, getattr(self, name), np.float16, 4)
        registry.check_layers(self.layers.tolist(), registry.layers_of(self.model))
        count, steps, heads, size = self.q_decode.shape
        kv_heads, pages = self.page_min.shape[1:3]
        if kv_heads < 1 or heads < 1 or heads % kv_heads:
            raise ValueError(f"{heads} query heads over {kv_heads} KV heads; allowed: a multiple of them")
        if steps < 1 or pages != (self.tokens + steps) // PAGE_TOKENS or pages < 1:
            raise ValueError(f"{pages} pages for {self.tokens} tokens and {steps} steps; a trace has the complete "
                             f"pages of {PAGE_TOKENS} tokens of its final sequence, at least one")
        expected = {
            "layers": (count,), "rows": self.rows.shape, "generated": (steps,),
            "q_prefill": (count, self.rows.size, heads, size), "q_decode": (count, steps, heads, size),
            **dict.fromkeys(("page_min", "page_max", "page_mean"), (count, kv_heads, pages, size)),
            "mass": (count, steps, kv_heads, pages),
        }
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has shape {list(getattr(self, name).shape)}; beside q_decode "
                                 f"{[count, steps, heads, size]} and page_min it must be {list(shape)}")
        if self.rows.size and (self.rows[0] < 0 or self.rows[-1] >= self.tokens or (np.diff(self.rows) < 1).any()):
            raise ValueError(f"rows must be ascending positions below the {self.tokens} tokens of the prompt")
        for name in _HALVES:
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"{name} holds a number that is not finite")

    @property
    def steps(self) -> int:
        """Decode steps, T."""
        return self.q_decode.shape[1]

    @property
    def kv_heads(self) -> int:
        """KV heads, G."""
        return self.page_min.shape[1]

    def lengths(self, part: str = "decode") -> np.ndarray:
        """int64 [rows]: tokens the row's attention covers, its own included. `part`: "decode" or "prefill"."""
        if part == "decode":
            return self.tokens + 1 + np.arange(self.steps)
        if part == "prefill":
            return self.rows.astype(np.int64) + 1
        raise ValueError(f"part is {part!r}; allowed: decode, prefill")

    def queries(self, layer: int, part: str = "decode") -> np.ndarray:
        """fp32 [rows, H, D]: the layer's queries after RoPE. `layer` is one of `layers`."""
        kept = self.q_decode if part == "decode" else self.q_prefill
        self.lengths(part)
        return kept[self._at(layer)].astype(np.float32)

    def pages(self, layer: int, page_tokens: int = PAGE_TOKENS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Minimum, maximum and mean of the layer's keys, fp32 [G, N, D] each, over pages of `page_tokens`.

        `page_tokens`: a multiple of 16. N: complete pages of the final sequence.
        """
        if page_tokens < 1 or page_tokens % PAGE_TOKENS:
            raise ValueError(f"page_tokens is {page_tokens}; a trace has pages of {PAGE_TOKENS} and multiples of it")
        at, folded = self._at(layer), page_tokens // PAGE_TOKENS
        count = self.page_min.shape[2] // folded
        halves = (self.page_min[at], self.page_max[at], self.page_mean[at])
        whole = [half[:, :count * folded].astype(np.float32) for half in halves]
        low, high, mean = (half.reshape(half.shape[0], count, folded, half.shape[2]) for half in whole)
        return low.min(2), high.max(2), mean.mean(2)

    def scores(self, method, layer: int, part: str = "decode", *, impl: str = "cpu") -> np.ndarray:
        """fp32 [rows, G, N]: what `method` scores the layer's blocks with at each row, -inf where one is not complete.

        `method`: a Quest or an InfLLM of artifact.dsa, with pages, blocks and strides that 16-token pages make up. N:
        its complete blocks of the final sequence. `impl`: of the operators.
        """
        import torch

        from artifact.dsa.infllm import Compressed, InfLLM
        from artifact.dsa.quest import Bounds

        length = self.lengths(part)
        if isinstance(method, InfLLM):
            block, windows = method.block, method.size // PAGE_TOKENS
            if method.stride != PAGE_TOKENS:
                raise ValueError(f"stride is {method.stride}; allowed on a trace, which has pages: {PAGE_TOKENS}")
            means = torch.from_numpy(self.pages(layer)[2])
            keys = means.unfold(1, windows, 1).mean(-1) if means.shape[1] >= windows else means[:, :0]
            metadata = Compressed(keys[None], keys[None, :, :0], torch.from_numpy(length))
        else:
            block = method.page
            low, high, _ = (torch.from_numpy(each)[None] for each in self.pages(layer, block))
            metadata = Bounds(low, high, torch.from_numpy(length // block * block))
        found = method.score(torch.from_numpy(self.queries(layer, part)), metadata, impl=impl).numpy()
        out = np.full((*found.shape[:2], (self.tokens + self.steps) // block), -np.inf, np.float32)
        known = min(found.shape[2], out.shape[2])
        out[..., :known] = found[..., :known]
        out[np.broadcast_to(np.arange(out.shape[2]) >= (length // block)[:, None, None], out.shape)] = -np.inf
        return out

    def first(self, count: int) -> "Trace":
        """The same with the first `count` of its layers only."""
        return replace(self, **{name: getattr(self, name)[:count] for name in ("layers", *_HALVES)})

    def _at(self, layer):
        at = np.flatnonzero(self.layers == layer)
        if not at.size:
            raise ValueError(f"layer is {layer}; this trace has: {', '.join(map(str, self.layers))}")
        return int(at[0])

    def command(self, out: str) -> str:
        """The command line that records this trace again."""
        layers = ",".join(map(str, self.layers))
        return (f"artifact prr record --model {self.model} --family {self.family} --prompt {self.prompt} --tokens "
                f"{self.tokens} --steps {self.steps} --rows {self.rows.size} --layers {layers} --out {out}")


def write(trace: Trace, path: str | Path, cpu: str) -> None:
    """`trace` as a .npz at `path`, and its line in the index.csv beside it; each whole or not at all.

    `cpu`: the processor that computed it, as it names itself; others round otherwise.
    """
    path = Path(path)
    arrays = {"format": np.int64(_FORMAT)}
    for field in fields(Trace):
        value = np.asarray(getattr(trace, field.name))
        arrays[field.name] = _planes(value) if field.name in _HALVES else value
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    content = file.getvalue()
    listed = {line["file"]: line for line in index(path.parent)}
    listed[path.name] = {
        "file": path.name, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "model": trace.model,
        "family": trace.family, "prompt": trace.prompt, "decoding": trace.decoding, "tokens": trace.tokens,
        "steps": trace.steps, "rows": trace.rows.size, "layers": " ".join(map(str, trace.layers)), "cpu": cpu,
        "command": trace.command(path.name),
    }
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(listed[name] for name in sorted(listed))
    _replace(path, content)
    _replace(path.parent / INDEX, text.getvalue().encode())


def read(path: str | Path) -> Trace:
    """The trace at `path`. ValueError, naming the file, when it is missing, broken, or not what its index says."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; a trace is a .npz that `artifact prr record` writes") from None
    digest = {line["file"]: line["sha256"] for line in index(path.parent)}.get(path.name)
    if digest is not None and digest != hashlib.sha256(content).hexdigest():
        raise ValueError(f"{path}: its sha256 is not the one in {INDEX} beside it; record it again or drop its line")
    try:
        return _decode(content)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError):
        raise ValueError(f"{path}: not a whole .npz file") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def index(folder: str | Path) -> list[dict[str, str]]:
    """The lines of a folder's index.csv, `COLUMNS` each; empty when there is none."""
    path = Path(folder) / INDEX
    try:
        table = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
        lines = list(table)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if table.fieldnames != list(COLUMNS) or any(set(line) != set(COLUMNS) or None in line.values() for line in lines):
        raise ValueError(f"{path}: not an index of traces; its columns are {', '.join(COLUMNS)}")
    return lines


def check_length(tokens: int, steps: int, rows: int, context_tokens: int) -> None:
    """Raises ValueError unless a prompt of `tokens` with its `steps` fits the context and has `rows` rows to keep."""
    if steps < 1:
        raise ValueError(f"steps is {steps}; allowed: at least 1")
    if tokens < PAGE_TOKENS:
        raise ValueError(f"tokens is {tokens}; allowed: at least a page of {PAGE_TOKENS}")
    if tokens + steps > context_tokens:
        raise ValueError(f"tokens is {tokens}; with {steps} steps the model's context of {context_tokens} allows at "
                         f"most {max(context_tokens - steps, 0)}")
    if not 0 <= rows <= tokens:
        raise ValueError(f"rows is {rows}; allowed: 0 to {tokens}, the tokens of the prompt")


def _decode(content):
    with np.load(io.BytesIO(content), allow_pickle=False) if content[:2] == b"PK" else _no_archive() as archive:
        expected = {"format", *(field.name for field in fields(Trace))}
        if set(archive.files) != expected:
            odd = sorted(expected.symmetric_difference(archive.files))
            raise ValueError(f"not a trace: {odd[0]!r} is missing or not known")
        if archive["format"].shape or archive["format"] != _FORMAT:
            raise ValueError(f"its format is {archive['format']}; this version reads {_FORMAT}")
        values = {name: archive[name] for name in archive.files if name != "format"}
    for name in _HALVES:
        values[name] = _halves(name, values[name])
    for name in ("model", "family", "prompt", "decoding", "tokens"):
        if values[name].shape or values[name].dtype.kind not in ("i" if name == "tokens" else "U"):
            raise ValueError(f"{name} is no {'whole number' if name == 'tokens' else 'text'}")
        values[name] = values[name].item()
    return Trace(**values)


def _no_archive():
    raise zipfile.BadZipFile


def _planes(half):
    """fp16 [...] -> uint8 [2, ...]: the low bytes, then the high ones."""
    bits = half.view(np.uint16)
    return np.stack([bits & 0xFF, bits >> 8]).astype(np.uint8)


def _halves(name, planes):
    if planes.dtype != np.uint8 or planes.ndim < 1 or planes.shape[0] != 2:
        raise ValueError(f"{name} is {planes.dtype} {list(planes.shape)}; fp16 is kept as uint8 [2, ...]")
    return (planes[0] | planes[1].astype(np.uint16) << 8).view(np.float16)


def _shaped(name, value, dtype, axes):
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != axes:
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"{name} is {found}; it must be {np.dtype(dtype)} with {axes} axes")


def _replace(path, content):
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
