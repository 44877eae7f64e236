"""Streams of PIM commands: patterns, trace files, and what a sequence's block table makes the memory do.

A trace file has AttAcc's format, a command and an address a line: `PIM_MAC_AB 0x00040000`. An address is, from the most
significant bit, channel 4 | pseudo-channel 1 | rank 1 | bank group 2 | bank 2 | row 14 | column 5 | byte 5.

From a block table, all under one MAC a legacy channel: both its pseudo-channels see the same rows and obey together.
window   rows as the study's coalescer gathers them in a window of bursts: the row carried in first, then as they come
plain    block by block in logical order
inorder  plain, with a barrier after each command
double   window, but each command once for each pseudo-channel, as the study charged AttAcc (KV-PIMple section "AttAcc")
"""

from pathlib import Path

import numpy as np

from artifact.compiled import compiled
from artifact.pim import bandwidth, runs, timing
from artifact.pim.controller import Trace

ORDERS = ("window", "plain", "inorder", "double")
PATTERNS = (
    "same_row", "new_row", "every2", "every4", "every8", "every32", "rand0.25", "rand0.5", "rand0.75", "rand0.95",
    "rand0.5_pool8", "rand0.75_pool8", "kv1", "kv4", "kv16", "kv32", "paged6",
)  # fmt: skip
SHAPES = ("AB", "SB", "PB", "SBr", "PBr", "AB1SB")
READS = ("1bank", "16bank", "16bank_pc2")
ROWS, COLUMNS, CHANNELS = 1 << 14, 32, 16
COMMAND_BYTES = 2 * 16 * timing.BURST_BYTES  # of a block table's MAC: both pseudo-channels, one rank (HBM3_8Gb_1R)
_CHANNEL, _BANK, _ROW, _COLUMN = 30, 24, 10, 5  # lowest bit of each field of an address
_COMMANDS = {f"PIM_MAC_{mode}": (timing.MAC, mode) for mode in timing.MODES}
_COMMANDS |= {f"PIM_{name}": (timing.MOVE, None) for name in ("WR_GB", "MV_SB", "MV_GB")}
_COMMANDS |= {"PIM_SFM": (timing.SFM, None), "PIM_BARRIER": (timing.BARRIER, None)}
_OUTSIDE = ("LD", "ST", "PIM_SET_MODEL", "PIM_SET_HEAD")  # AttAcc's, not modelled
_SAID = {timing.MOVE: "PIM_WR_GB", timing.SFM: "PIM_SFM", timing.BARRIER: "PIM_BARRIER"}


def pattern(name, n, seed=0):
    """Rows int32 [n] of a named pattern of all-bank commands.

    same_row · new_row · everyK (a new row every K) · randP (a hit with probability P, else any other row) · randP_poolR
    (of R rows) · kvK (K of one half of the rows, then K of the other) · pagedS (sequences of 32 blocks of 4 commands on
    random slots of 4 S rows). ValueError for another name, n below 1 or a seed below 0.
    """
    for what, value, least in (("commands", n, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{what} is {value!r}; allowed: a whole number of at least {least}")
    at = np.arange(n)
    kind = name.rstrip("0123456789._").removesuffix("_pool")
    kind = "rand" if name.startswith("rand") else kind
    try:
        rows = _pattern(kind, name[len(kind) :], at, np.random.default_rng([seed, n, sum(map(ord, name))]))
    except ValueError:
        rows = None
    if rows is None:
        raise ValueError(f"pattern is {name!r}; allowed: {', '.join(PATTERNS)}, or another K, P, R or S") from None
    return rows.astype(np.int32)


def _pattern(kind, argument, at, draw):
    n = at.size
    if kind in ("same_row", "new_row") and not argument:
        return at * (kind == "new_row") % ROWS
    if kind in ("every", "kv", "paged") and int(argument) < 1:
        return None
    if kind == "every":
        return at // int(argument) % ROWS
    if kind == "rand":
        chance, _, pool = argument.partition("_pool")
        pool = int(pool) if pool else ROWS
        if not 0 <= float(chance) <= 1 or pool > ROWS:
            return None
        hits = draw.random(n) < float(chance)
        rows, row = np.empty(n, dtype=np.int64), int(draw.integers(pool))
        for j in range(n):
            if j and not hits[j]:
                other = int(draw.integers(pool - 1))
                row = other + (other >= row)
            rows[j] = row
        return rows
    if kind == "kv":
        k = int(argument)
        block = at // k
        return (block // 2 * k + at % k) // COLUMNS % (ROWS // 2) + block % 2 * (ROWS // 2)
    if kind == "paged":
        rows = 4 * int(argument)
        slots = [draw.permutation(rows * 8)[:32] // 8 + s * rows for s in range(-(-n // 128))]
        return np.repeat(np.concatenate(slots) % ROWS, 4)[:n]
    return None


def expand(rows, shape="AB", *, barrier=0, split=False):
    """A `Trace` that reads what all-bank commands to `rows` read, by another kind of command.

    AB one command each · SB four, the banks of a group in turn · PB 32 · SBr, PBr bank by bank over a stretch of one
    row · AB1SB four to one bank. `barrier`: one after so many elements (0: none). `split`: the upper half of the rows
    lies in pseudo-channel 1.
    """
    if shape not in SHAPES:
        raise ValueError(f"mode is {shape!r}; allowed: {', '.join(SHAPES)}")
    if isinstance(barrier, bool) or not isinstance(barrier, int) or barrier < 0:
        raise ValueError(f"barrier is {barrier!r}; allowed: a whole number of at least 0")
    rows = np.asarray(rows, dtype=np.int32)
    mode = "SB" if shape == "AB1SB" else shape[:2]
    rank, bank, group = np.divmod(np.arange(32), 16)[0], np.arange(32) // 4 % 4, np.arange(32) % 4
    keys = {"AB": np.zeros(1, int), "SB": np.arange(4), "PB": rank << 4 | group << 2 | bank}[mode]
    keys = np.zeros(4, int) if shape == "AB1SB" else keys
    if shape.endswith("r"):
        lengths = _stretches(rows)
        row = np.concatenate([np.tile(part, keys.size) for part in np.split(rows, np.cumsum(lengths)[:-1])])
        key = np.concatenate([np.repeat(keys, k) for k in lengths])
    else:
        row, key = np.repeat(rows, keys.size), np.tile(keys, rows.size)
    if split:
        key = key | (row >= ROWS // 2) << 5
    op = np.full(row.size, timing.MAC)
    if barrier:
        at = np.arange(barrier, rows.size + 1, barrier) * keys.size
        op, row, key = np.insert(op, at, timing.BARRIER), np.insert(row, at, 0), np.insert(key, at, 0)
    return _trace(mode, op, key, row)


def _stretches(rows):
    """Lengths of the stretches of one row, none longer than a row's columns."""
    edges = np.flatnonzero(np.diff(rows)) + 1
    whole = np.diff(np.concatenate([[0], edges, [rows.size]]))
    return [min(COLUMNS, k - done) for k in whole.tolist() for done in range(0, k, COLUMNS)]


def _trace(mode, op, bank, row, channel=(0,)):
    kinds = (np.int8, np.int8, np.int32, np.int16)
    return Trace(mode, *(np.asarray(v).astype(k) for v, k in zip((op, bank, row, channel), kinds, strict=True)))


def read(path):
    """The `Trace` in a file. ValueError, one line, naming file and line, for anything AttAcc or this model refuses."""
    name = Path(path).name
    try:
        text = Path(path).read_bytes().decode("ascii")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name} line {line}: not ASCII text; allowed: a command and an address") from None
    if "\r" in text:
        line = text.count("\n", 0, text.index("\r")) + 1
        raise ValueError(f"{name} line {line}: ends in CRLF; allowed: LF")
    lines = text.removesuffix("\n").split("\n")
    if lines == [""]:
        raise ValueError(f"{name} line 1: the trace is empty; allowed: at least one command")
    op, address, mode = np.empty(len(lines), dtype=np.int8), np.empty(len(lines), dtype=np.int64), None
    for i, line in enumerate(lines):
        try:
            command, place = line.split(" ")
            op[i], kind = _COMMANDS[command]
            digits = place[2:] if place[:2] in ("0x", "0X") else place
            if not digits.isalnum():
                raise ValueError
            address[i] = int(digits, 10 if digits is place else 16)
            if not 0 <= address[i] >> _CHANNEL < CHANNELS:
                raise OverflowError
        except (ValueError, KeyError, OverflowError) as error:
            raise ValueError(f"{name} line {i + 1}: {_complaint(line, error)}") from None
        if kind and mode and kind != mode:
            why = f"{command} after PIM_MAC_{mode}; allowed: one kind of MAC in a trace"
            raise ValueError(f"{name} line {i + 1}: {why}")
        mode = kind or mode
    channel = address >> _CHANNEL
    channel = channel if channel.any() else [0]
    return _trace(mode or "AB", op, address >> _BANK & 63, address >> _ROW & ROWS - 1, channel)


def _complaint(line, error):
    command, _, place = line.partition(" ")
    if isinstance(error, KeyError):
        if command in _OUTSIDE:
            return f"{command} is not modelled; allowed: {', '.join(_COMMANDS)}"
        return f"unknown command {command!r}; allowed: {', '.join(_COMMANDS)}"
    if isinstance(error, OverflowError):
        return f"address {place} is out of range; allowed: 0 to {(CHANNELS << _CHANNEL) - 1:#x}"
    return f"{line!r} is odd; allowed: a command and an address, like PIM_MAC_AB 0x00040000"


def write(path, trace):
    """A `Trace` as a file for AttAcc; columns, which no timing depends on, run from 0 to 31."""
    place = trace.channel.astype(np.int64) << _CHANNEL | trace.bank.astype(np.int64) << _BANK
    place = place | trace.row.astype(np.int64) << _ROW | np.arange(trace.op.size) % COLUMNS << _COLUMN
    names = {**_SAID, timing.MAC: f"PIM_MAC_{trace.mode}"}
    _lines(path, (f"{names[op]} 0x{where:08x}" for op, where in zip(trace.op.tolist(), place.tolist(), strict=True)))


def write_reads(path, rows, *, reads="16bank"):
    """Reads of `rows` for Ramulator 2.1's ReadWriteTrace: `R channel,pseudo-channel,sid,group,bank,row,column`.

    1bank: one read each · 16bank: one in every bank of a pseudo-channel, what an all-bank command reads of it ·
    16bank_pc2: in those of both. Returns how many reads. ValueError for another kind.
    """
    if reads not in READS:
        raise ValueError(f"reads is {reads!r}; allowed: {', '.join(READS)}")
    banks = [(0, 0, 0)]
    if reads != "1bank":
        banks = [(p, g, b) for b in range(4) for g in range(4) for p in range(2 if reads.endswith("pc2") else 1)]
    pairs = list(enumerate(np.asarray(rows).tolist()))
    _lines(path, (f"R 0,{p},0,{g},{b},{row},{i % COLUMNS}" for i, row in pairs for p, g, b in banks))
    return len(pairs) * len(banks)


def _lines(path, lines):
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="ascii", newline="\n")


@compiled
def _gather(keys, n, banks, window, rows, used, most, out):
    """Rows of the commands that one channel's `keys[:n]` (row | bank) become in tumbling windows -> how many."""
    bank_bits = 0
    while (1 << bank_bits) < banks:
        bank_bits += 1
    commands, carried = 0, -1
    for start in range(0, n, window):
        distinct, last = bandwidth.regroup(keys, start, min(start + window, n), banks, bank_bits, rows, used, most)
        for turn in range(3):  # the row carried in, the others, the row of the last burst
            for s in range(distinct):
                when = 0 if rows[s] == carried else 2 if rows[s] == last else 1
                if when == turn:
                    for _ in range(most[s]):
                        out[commands] = rows[s]
                        commands += 1
        for s in range(distinct):
            most[s] = 0
            used[s * banks : (s + 1) * banks] = 0
        carried = last
    return commands


@compiled
def _rows(table, tokens, lay, window, keys, rows, used, most, out):
    """Rows of one sequence's commands, of a layout in which all channels see one stream -> how many."""
    full, m, filled = tokens // lay.block_tokens, lay.stream.size, 0
    tail = tokens - full * lay.block_tokens
    for i in range(full + (tail > 0)):
        start = lay.base[table[i]] >> lay.channel_bits
        for j in range(m):
            keys[filled + j] = start ^ lay.stream[j]
        filled += m
    return _gather(keys, full * m + lay.reach[tail].max(), lay.banks, window, rows, used, most, out)


def _window(lay, order, window):
    """The coalescing window of an order, bursts of one channel; ValueError for an order or layout that has none."""
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; allowed: {', '.join(ORDERS)}")
    if not lay.stream.size:
        raise ValueError("the channels see different streams under this address map; allowed: host-cacheline")
    return lay.stream.size if order in ("plain", "inorder") else window


def rows(table, tokens, lay, *, order="window", window=64):
    """int32 [commands]: the row of each all-bank command that reading a sequence takes, `double` once each.

    `table` lists its block ids, `tokens` its length, `lay` is a `bandwidth.Layout`. The bursts of the longest channel
    count. Raises ValueError for a table that `bandwidth.count` refuses and for channels that differ.
    """
    window = _window(lay, order, window)
    bandwidth.count(table, tokens, lay, window=window)
    scratch = bandwidth._scratch(lay, tokens, window)
    out = np.empty(scratch[0].size, dtype=np.int32)
    n = _rows(np.ascontiguousarray(table, dtype=np.int64), tokens, lay, window, *scratch, out)
    return out[:n]


def block_table(table, tokens, lay, *, order="window", window=64):
    """The `Trace` of one legacy channel that reads a sequence; arguments and errors as of `rows`."""
    found = rows(table, tokens, lay, order=order, window=window)
    if order == "double":
        return _trace("AB", np.full(2 * found.size, timing.MAC), np.tile([0, 32], found.size), np.repeat(found, 2))
    return expand(found, barrier=int(order == "inorder"))


@compiled
def _many(flat, starts, tokens, lay, window, in_order, times, cycles, out):
    """Fill `out` int64 [S, 3] with commands, cycles and activations of each sequence."""
    keys, scratch, used, most = bandwidth._scratch(lay, tokens.max(), window)
    row, later = np.empty(keys.size * times, dtype=np.int32), np.empty(keys.size * times, dtype=np.int32)
    done, nothing = np.empty(keys.size * times, dtype=np.bool_), np.empty(0, dtype=np.int64)
    most_rows = 1
    while most_rows * lay.banks <= max(lay.base.max() >> lay.channel_bits, lay.stream.max()):
        most_rows *= 2
    seen = np.empty(most_rows, dtype=np.int32)
    for i in range(tokens.size):
        n = _rows(flat[starts[i] :], tokens[i], lay, window, keys, scratch, used, most, row)
        for j in range(n - 1, -1, -1):
            for k in range(times):
                row[times * j + k] = row[j]
        n *= times
        if in_order:
            last, opened, _ = runs._in_order(row[:n], *cycles)
        else:
            runs._later(row[:n], later, seen)
            last, opened, _ = runs._served(row[:n], later, done, n, nothing, *cycles)
        out[i, 0], out[i, 1], out[i, 2] = n, last, opened


def many(flat, starts, tokens, lay, preset, *, order="window", window=64, refresh=False):
    """int64 [S, 3]: commands, cycles and activations of many sequences, by run lengths (`runs`).

    Block tables lie one after another in `flat`, sequence i's from `starts[i]`. Exact but for `double` under refresh,
    which is refused: its two bank addresses need `controller.simulate`.
    """
    window = _window(lay, order, window)
    if order == "double" and refresh:
        raise ValueError("order 'double' with refresh is not exact by run lengths; allowed: controller.simulate")
    out = np.zeros((tokens.size, 3), dtype=np.int64)
    if tokens.size:
        times = 2 if order == "double" else 1
        cycles = runs.cycles(preset, refresh)
        _many(flat, starts, tokens, lay, window, order == "inorder", times, cycles, out)
    return out
