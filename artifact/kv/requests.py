"""Workloads: which requests arrive when, how long their prompts and outputs are, and what prefix they share.

The five synthetic workloads draw exactly what the study draws (KV-PIMple `workload.py`, commit eb56d6d): one
NumPy PCG64 generator per call, vectorised draws in the order written here. `trace` reads recorded serving traces:
Azure LLM-inference CSV (TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake JSON lines (timestamp in ms,
input_length, output_length, hash_ids: an id for each 512 tokens of the prompt, equal where prefixes are).
"""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

COLUMNS = ("rid", "arrival_step", "prompt_len", "output_len", "prefix_id", "prefix_len")
_DEFAULT_RATE = {"steady": 0.25, "spec": 0.25, "longctx": 0.2, "prefix": 0.25, "fixedlen": 0.3}
NAMES = (*_DEFAULT_RATE, "trace")
_PREFIX_ID_TOKENS = 1 << 20  # the shared prefix has one id, as it is shared as a whole
_HASH_IDS = 1 << 40
_HASH_TOKENS = 512  # Mooncake's traces have an id for every 512 tokens


class Content(NamedTuple):
    """What is known of prompts' tokens: ids that stand for them and all before them, equal where prefixes are equal."""

    ids: np.ndarray  # int64, of all requests one after another, each for the next `id_tokens` tokens
    starts: np.ndarray  # int64 [n], where each request's ids begin
    known_tokens: np.ndarray  # int64 [n], how far each request's ids reach
    id_tokens: int


@dataclass(frozen=True, eq=False)
class Requests:
    """int64 arrays [n]; `prefix_id` is -1 where nothing is shared; lengths in tokens, arrivals in engine steps.

    `content`, None when nothing is known, is what allocators with a cache share; the pinned prefix of the others is
    `prefix_id`.
    """

    arrival_step: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    prefix_id: np.ndarray
    prefix_tokens: np.ndarray
    content: Content | None = None

    def taken(self, order):
        """The requests `order`, an array of their numbers."""
        arrays = (self.arrival_step, self.prompt_tokens, self.output_tokens, self.prefix_id, self.prefix_tokens)
        content = self.content
        if content is not None:
            content = content._replace(starts=content.starts[order], known_tokens=content.known_tokens[order])
        return Requests(*(array[order] for array in arrays), content)

    def __len__(self):
        return self.arrival_step.size

    @property
    def total_tokens(self):
        """Final length of each sequence: prompt plus output."""
        return self.prompt_tokens + self.output_tokens

    def to_csv(self):
        """The requests as CSV text with the columns `COLUMNS`; prefix_id is empty where nothing is shared."""
        rows = zip(
            self.arrival_step, self.prompt_tokens, self.output_tokens, self.prefix_id, self.prefix_tokens, strict=True
        )
        lines = [",".join(COLUMNS)]
        lines += [f"{i},{a},{p},{o},{'' if x < 0 else x},{n}" for i, (a, p, o, x, n) in enumerate(rows)]
        return "\n".join(lines) + "\n"


def _requests(arrivals, prompts, outputs, content=None):
    none, shared = np.full(arrivals.size, -1, dtype=np.int64), np.zeros(arrivals.size, dtype=np.int64)
    return Requests(arrivals, prompts, outputs, none, shared, content)


def _arrivals(rng, n, rate):
    return np.floor(np.cumsum(rng.exponential(1.0 / rate, n))).astype(np.int64)


def _lognormal(rng, n, median, sigma, low, high):
    return np.clip(np.rint(rng.lognormal(np.log(median), sigma, n)), low, high).astype(np.int64)


def _steady(rng, n, rate):
    arrivals = _arrivals(rng, n, rate)
    prompts = _lognormal(rng, n, 200, 1.0, 8, 8192)
    return _requests(arrivals, prompts, _lognormal(rng, n, 200, 0.8, 4, 2048))


def _longctx(rng, n, rate):
    arrivals = _arrivals(rng, n, rate)
    prompts = rng.integers(8192, 32768, n, endpoint=True)
    return _requests(arrivals, prompts, rng.integers(32, 256, n, endpoint=True))


def _prefix(rng, n, rate):
    length = int(rng.integers(500, 1500, endpoint=True))
    arrivals = _arrivals(rng, n, rate)
    shared = rng.random(n) < 0.7
    tails = _lognormal(rng, n, 150, 0.8, 8, 4096)
    plain = _lognormal(rng, n, 200, 1.0, 8, 8192)
    outputs = _lognormal(rng, n, 200, 0.8, 4, 2048)
    prompts, known = np.where(shared, length + tails, plain), np.where(shared, length, 0)
    content = Content(np.zeros(1, dtype=np.int64), np.zeros(n, dtype=np.int64), known, _PREFIX_ID_TOKENS)
    return Requests(arrivals, prompts, outputs, np.where(shared, 0, -1), known, content)


def _positive(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} is {value!r}; allowed: a whole number of at least 1")


def generate(workload, n, seed, *, rate=None, prompt_tokens=2048, output_tokens=128):
    """`n` requests of a synthetic workload; `rate` in requests per engine step (default: the study's).

    steady    lognormal prompts and outputs, medians 200 tokens
    spec      the same stream; the engine speculates
    longctx   prompts of 8,192 to 32,768 tokens, short outputs
    prefix    70 % of the requests share one prefix of 500 to 1,500 tokens
    fixedlen  every prompt `prompt_tokens`, every output `output_tokens`
    """
    if workload not in _DEFAULT_RATE:
        raise ValueError(f"unknown workload {workload!r}; allowed: {', '.join(NAMES)}")
    _positive("requests", n)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"seed is {seed!r}; allowed: a whole number of at least 0")
    rate = _DEFAULT_RATE[workload] if rate is None else rate
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate is {rate!r}; allowed: a positive, finite number of requests per step")
    rng = np.random.default_rng(seed)
    if workload == "fixedlen":
        _positive("prompt_tokens", prompt_tokens)
        _positive("output_tokens", output_tokens)
        arrivals = _arrivals(rng, n, rate)
        return _requests(arrivals, np.full(n, prompt_tokens, dtype=np.int64), np.full(n, output_tokens, dtype=np.int64))
    return {"steady": _steady, "spec": _steady, "longctx": _longctx, "prefix": _prefix}[workload](rng, n, rate)


def read_trace(path, *, step_ms=25.0, limit=None):
    """Requests of an Azure CSV or a Mooncake JSONL file, told apart by their first character.

    Arrival step = floor((t - t0) / step_ms), t0 the earliest timestamp. `limit` keeps the first rows. A row that
    is cut off, mistyped or not positive raises ValueError with file and line number.
    """
    if isinstance(step_ms, bool) or not 0 < step_ms < float("inf"):
        raise ValueError(f"step_ms is {step_ms!r}; allowed: a positive, finite number of milliseconds")
    if limit is not None:
        _positive("requests", limit)
    name = Path(path).name
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text ({error.reason}); allowed: Azure CSV or Mooncake JSONL") from None
    lines = text.splitlines()
    if not lines or not lines[0].strip():
        raise ValueError(f"{name}: empty; allowed: Azure CSV or Mooncake JSONL")
    parse, first = (_mooncake_row, 0) if lines[0].lstrip().startswith("{") else (_azure_row, 1)
    if first and [c.strip() for c in lines[0].split(",")] != ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
        raise ValueError(
            f"{name} line 1: header is {lines[0][:80]!r}; allowed: TIMESTAMP,ContextTokens,GeneratedTokens "
            "or Mooncake JSONL"
        )
    rows = []
    for number, line in enumerate(lines[first:], start=first + 1):
        if limit is not None and len(rows) == limit:
            break
        try:
            rows.append(parse(line))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            why = f"missing {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{name} line {number}: {why}") from None
    if not rows:
        raise ValueError(f"{name}: no requests after the header")
    *columns, hashes = zip(*rows, strict=True)
    time_ms, prompts, outputs = map(np.array, columns)
    prompts, outputs = prompts.astype(np.int64), outputs.astype(np.int64)
    arrivals = np.floor((time_ms - time_ms.min()) / step_ms).astype(np.int64)
    read = _requests(arrivals, prompts, outputs, _hashed(prompts, hashes) if any(hashes) else None)
    return read.taken(np.argsort(time_ms, kind="stable"))


def _hashed(prompts, hashes):
    """`Content` of rows with these lists of ids; an id beyond the prompt says nothing."""
    counts = np.array([len(ids) for ids in hashes])
    starts = np.cumsum(counts) - counts
    ids = np.array([i for some in hashes for i in some], dtype=np.int64)
    return Content(ids, starts, np.minimum(prompts, counts * _HASH_TOKENS), _HASH_TOKENS)


def _tokens(name, value):
    value = int(value) if isinstance(value, str) else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 40:
        raise ValueError(f"{name} is {value!r}; allowed: a whole number of at least 1")
    return value


_EPOCH = datetime(1970, 1, 1)


def _azure_row(line):
    cells = line.split(",")
    if len(cells) != 3:
        raise ValueError(f"{len(cells)} columns; allowed: TIMESTAMP,ContextTokens,GeneratedTokens")
    # seven fractional digits: 100 ns ticks, one more than datetime holds
    whole, _, fraction = cells[0].strip().removesuffix("+00:00").partition(".")
    if not (fraction or "0").isdigit():
        raise ValueError(f"TIMESTAMP is {cells[0]!r}; allowed: YYYY-MM-DD HH:MM:SS.fffffff")
    try:
        seconds = (datetime.strptime(whole, "%Y-%m-%d %H:%M:%S") - _EPOCH) / timedelta(seconds=1)
    except ValueError:
        raise ValueError(f"TIMESTAMP is {cells[0]!r}; allowed: YYYY-MM-DD HH:MM:SS.fffffff") from None
    time_ms = seconds * 1e3 + (int(fraction) / 10 ** (len(fraction) - 3) if fraction else 0.0)
    try:
        return time_ms, _tokens("ContextTokens", cells[1]), _tokens("GeneratedTokens", cells[2]), ()
    except ValueError as error:
        raise ValueError(str(error).replace("invalid literal for int() with base 10:", "not a whole number:")) from None


def _mooncake_row(line):
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a JSON object ({error.msg})") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    time_ms = row["timestamp"]
    if isinstance(time_ms, bool) or not isinstance(time_ms, (int, float)) or not 0 <= time_ms < float("inf"):
        raise ValueError(f"timestamp is {time_ms!r}; allowed: milliseconds, 0 or more")
    lengths = (row["input_length"], row["output_length"])
    if any(isinstance(v, str) for v in lengths):
        raise ValueError(f"input_length, output_length are {lengths!r}; allowed: whole numbers")
    hashes = row.get("hash_ids", [])
    whole = isinstance(hashes, list) and all(type(i) is int and 0 <= i < _HASH_IDS for i in hashes)
    if not whole:
        raise ValueError(f"hash_ids is {str(hashes)[:80]}; allowed: a list of whole numbers from 0 below {_HASH_IDS}")
    return float(time_ms), _tokens("input_length", lengths[0]), _tokens("output_length", lengths[1]), hashes
