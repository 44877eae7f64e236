"""AttAcc's HBM3-PIM controller, equal to it to the cycle: a stream of PIM commands in, cycles and counts out.

`simulate` answers for any trace. What answers is the cheapest form that is exact for it: run lengths for one stream of
all-bank MACs (`runs`), lanes for same-bank and per-bank ones (`lanes`), else the event loop of this file, which knows
every command, barriers, several channels and every quirk, and reads `timing`'s table of constraints and nothing else.

The scheduler (AttAcc's pim_scheduler.cpp): of the queue's 33 entries the oldest that is ready; a command that would
open or close a row, or move data, waits while its bank still has a row hit queued, unless it is the queue's head; what
reads or moves waits for the first barrier. One row and one column command a cycle. A refresh, due every nREFI,
precharges all and goes first, but row hits keep issuing beside it. The frontend fills the queues from the trace until
the next command's channel is full. Row hits are MACs that needed no activation of their own: MACs less activations.

Not modelled: LD and ST, several kinds of MAC in one trace, PIM_SET_MODEL and PIM_SET_HEAD.
"""

from typing import NamedTuple

import numpy as np

from artifact.compiled import compiled
from artifact.pim import lanes, runs, timing
from artifact.pim.timing import ACT, BARRIER, MAC, MOVE, PRE, PREA, QUEUE, REF, SFM

NEVER = 1 << 60
ENDLESS = 1 << 17  # cycles in which nothing is served: many refreshes, so that nothing will be
LAST = BARRIER + 1  # of `Device.counts`: the last cycle in which anything issued


class Trace(NamedTuple):
    """Commands in order of arrival, all MACs of one `mode`; `streams` makes, reads and writes them."""

    mode: str
    op: np.ndarray  # int8 [n]: timing.MAC, MOVE, SFM or BARRIER
    bank: np.ndarray  # int8 [n]: pseudo-channel | rank | bank group (2 bits) | bank (2 bits) of the address
    row: np.ndarray  # int32 [n]
    channel: np.ndarray  # int16 [n]; [0]: all of them are of channel 0


class Outcome(NamedTuple):
    """What a run took, over all its channels; `bytes` are those the MACs read."""

    cycles: int
    macs: int
    activations: int
    refreshes: int
    bytes: int

    @property
    def row_hits(self):
        return self.macs - self.activations

    @property
    def bytes_per_cycle(self):
        return self.bytes / self.cycles if self.cycles else float("nan")


class Device(NamedTuple):
    """What the event loop keeps of each channel c; fresh from `device`."""

    ready: np.ndarray  # int64 [C, levels, 64, commands]: no earlier on this node
    open_row: np.ndarray  # int64 [C, units]; -1 closed
    seen_open: np.ndarray  # bool [C]: what an unnoticed precharge left open
    due: np.ndarray  # int64 [C]: REFab commands that wait, for pseudo-channel 0 and 1 in turn
    queue: np.ndarray  # int64 [C, QUEUE]: trace positions
    queued: np.ndarray  # int64 [C]
    counts: np.ndarray  # int64 [C, commands and LAST]
    apart: bool  # only the banks in a command's own address keep its times: see the quirks


def device(mode, channels=1, apart=False):
    """An idle `Device` of so many channels in one mode."""
    shape = (channels, len(timing.LEVELS), 64, SFM)
    return Device(
        np.full(shape, -NEVER), np.full((channels, timing.UNITS[mode]), -1), np.zeros(channels, dtype=np.bool_),
        np.zeros(channels, dtype=np.int64), np.zeros((channels, QUEUE), dtype=np.int64),
        np.zeros(channels, dtype=np.int64), np.zeros((channels, LAST + 1), dtype=np.int64), apart,
    )  # fmt: skip


@compiled
def _node(level, bank, unit, apart):
    if level == 0:
        return 0
    if level == 1:
        return bank >> 5
    if level == 2:
        return bank >> 4
    if level == 3:
        return bank >> 2
    return bank if level == 4 and apart else unit


@compiled
def ready_at(dev, c, command, bank, unit, both):
    """The earliest cycle at which `command` may issue to a bank address of channel c; `both`: see the quirks."""
    ready = dev.ready[c]
    earliest = ready[0, 0, command]
    for level in range(1, ready.shape[0]):
        earliest = max(earliest, ready[level, _node(level, bank, unit, dev.apart), command])
    if both and command == ACT:
        earliest = max(earliest, ready[1, 1 - (bank >> 5), command])
    return earliest


@compiled
def issue(dev, c, command, bank, unit, cycle, rules):
    """Note in channel c what `command`, issued at `cycle`, makes others wait for."""
    ready = dev.ready[c]
    alone = command == REF or command == MOVE or command == SFM
    for i in range(rules.shape[0]):
        if rules[i, 0] != command:
            continue
        level, after, free = rules[i, 1], rules[i, 2], cycle + rules[i, 3]
        if level == 6:
            node = (bank >> 5) << 4 | (unit >> 4) << 2 | unit & 3
        else:
            node = _node(level, bank, unit, dev.apart)
        ready[level, node, after] = max(ready[level, node, after], free)
        if not (alone or dev.apart) and 1 <= level <= 3:  # banks of both pseudo-channels obey
            node ^= 1 if level == 1 else 2 if level == 2 else 8
            ready[level, node, after] = max(ready[level, node, after], free)


@compiled
def _unit(mode, bank):
    return 0 if mode == 0 else bank & 3 if mode == 1 else bank & 31


@compiled
def _drop(dev, c, k):
    for i in range(k, dev.queued[c] - 1):
        dev.queue[c, i] = dev.queue[c, i + 1]
    dev.queued[c] -= 1


@compiled
def _pick(dev, c, cycle, mode, op, bank, row, both):
    """The scheduler's choice: queue position (-1: none is ready), its command, and when the next one may be ready.

    Takes one leading barrier out of the queue; the last value says whether it did.
    """
    queue, dropped, later = dev.queue[c], False, NEVER
    hit = np.zeros(64, dtype=np.bool_)
    for k in range(dev.queued[c]):
        j = queue[k]
        if op[j] == MAC and dev.open_row[c, _unit(mode, bank[j])] == row[j]:
            hit[bank[j]] = True
    if dev.queued[c] and op[queue[0]] == BARRIER:
        _drop(dev, c, 0)
        dropped = True
    blocked = False
    for k in range(dev.queued[c]):
        j = queue[k]
        if op[j] == BARRIER:
            if k == 0:
                return 0, BARRIER, later, dropped
            blocked = True
            continue
        unit = _unit(mode, bank[j])
        is_row = dev.open_row[c, unit]
        if op[j] != MAC:
            command = op[j]
        elif is_row == row[j]:
            command = MAC
        else:
            command = ACT if is_row < 0 else PRE
        moves = command == MAC or op[j] != MAC
        if moves and blocked:
            continue
        earliest = -NEVER if command == SFM else ready_at(dev, c, command, bank[j], unit, both)
        if earliest > cycle:
            later = min(later, earliest)
        elif command == MAC or k == 0 or not hit[bank[j]]:
            return k, command, later, dropped
    return -1, -1, later, dropped


@compiled
def _refresh(dev, c, cycle, mode, rules, both, lingering, log):
    """Precharge all or refresh when that is ready; -> whether it issued, and when it is ready else."""
    close = PRE if mode == 0 else PREA
    opened = lingering and dev.seen_open[c]
    for u in range(dev.open_row.shape[1]):
        opened |= dev.open_row[c, u] >= 0
    command = close if opened else REF
    bank = 0 if opened or dev.due[c] % 2 == 0 else 32
    earliest = ready_at(dev, c, command, bank, 0, both)
    if earliest > cycle:
        return False, earliest
    issue(dev, c, command, bank, 0, cycle, rules)
    _note(dev, c, PREA if opened else REF, cycle, -1, log)
    if opened:
        dev.seen_open[c] = False
        dev.open_row[c, :] = -1
    else:
        dev.due[c] -= 1
    return True, NEVER


@compiled
def _half(command, unpaired):
    """Which half of a cycle a command takes: 1 column, 0 row, -1 it shares its cycle with none."""
    if command == BARRIER or command == PRE and unpaired:
        return -1
    return 1 if command == MAC or command == MOVE or command == SFM else 0


@compiled
def _note(dev, c, command, cycle, j, log):
    """Count a command that issued, and log it where there is room: cycle, command, trace position or -1, channel."""
    dev.counts[c, command] += 1
    dev.counts[c, LAST] = cycle
    n = dev.counts[c, :LAST].sum() - 1 if log.shape[0] else 0
    if n < log.shape[0]:
        log[n, 0], log[n, 1], log[n, 2] = cycle, command, j


@compiled
def _serve(dev, c, k, command, cycle, mode, op, bank, row, rules, log):
    """Issue the command that `_pick` chose for queue position k; what is served leaves the queue."""
    j = dev.queue[c, k]
    unit = _unit(mode, bank[j])
    issue(dev, c, command, bank[j], unit, cycle, rules)
    _note(dev, c, command, cycle, j, log)
    if command == ACT:
        dev.open_row[c, unit] = row[j]
        dev.seen_open[c] = True
    elif command == PRE:
        dev.open_row[c, unit] = -1
    else:
        _drop(dev, c, k)


@compiled
def _tick(dev, c, cycle, mode, op, bank, row, rules, both, lingering, unpaired, log):
    """One cycle of channel c -> whether anything changed, and the next cycle at which something may."""
    following = NEVER
    if dev.due[c] > 0:
        changed, following = _refresh(dev, c, cycle, mode, rules, both, lingering, log)
        first = 0
    else:
        k, command, following, changed = _pick(dev, c, cycle, mode, op, bank, row, both)
        if k < 0:
            return changed, following
        _serve(dev, c, k, command, cycle, mode, op, bank, row, rules, log)
        changed, first = True, _half(command, unpaired)
    k, command, later, dropped = _pick(dev, c, cycle, mode, op, bank, row, both)
    second = _half(command, unpaired)
    if k >= 0 and first >= 0 and second >= 0 and first != second:
        _serve(dev, c, k, command, cycle, mode, op, bank, row, rules, log)
        changed = True
    return changed or dropped, min(following, later)


@compiled
def _run(dev, mode, op, bank, row, channel, rules, nrefi, both, lingering, unpaired, log):
    """Serve the whole trace -> the last cycle in which a command issued; -1 when nothing more is ever served."""
    position, cycle, refresh_at, channels = 0, 1, nrefi, dev.due.size
    served, since = 0, 1
    while True:
        while position < op.size:
            c = channel[position] if channel.size > 1 else 0
            if dev.queued[c] == QUEUE:
                break
            dev.queue[c, dev.queued[c]] = position
            dev.queued[c] += 1
            position += 1
        busy, done = position < op.size, position
        for c in range(channels):
            busy |= dev.queued[c] > 0 or dev.due[c] > 0
            done -= dev.queued[c]
        if done > served:
            served, since = done, cycle
        elif cycle - since > ENDLESS:
            return -1
        if not busy:
            return dev.counts[0, LAST] if channels == 1 else dev.counts[:, LAST].max()
        if cycle == refresh_at:
            dev.due[:] += 2
            refresh_at += nrefi
        following, changed = refresh_at, False
        for c in range(channels):
            if dev.queued[c] or dev.due[c]:
                did, later = _tick(dev, c, cycle, mode, op, bank, row, rules, both, lingering, unpaired, log)
                changed |= did
                following = min(following, later)
        cycle = cycle + 1 if changed else max(cycle + 1, following)


@compiled
def _keys(op, bank):
    """int64 [64]: MACs to each bank address."""
    counts = np.zeros(64, dtype=np.int64)
    for i in range(op.size):
        counts[bank[i] & 63] += op[i] == MAC
    return counts


_FAST_AB = {"refresh_skips_pseudochannels", "refresh_burst", "activate_checks_one_pseudochannel"}


def simulate(trace, preset, *, refresh=True, quirks=True, form=None):
    """The `Outcome` of a `Trace` under a `timing.Timing`.

    `quirks`: AttAcc's, all (True), none (False) or those named. `form`: None takes the cheapest form that is exact;
    "event" the event loop, whatever the trace. Raises ValueError for an empty trace, an unknown quirk or form, and for
    one of which AttAcc's scheduler makes no end.
    """
    on = timing.enabled(quirks)
    if form not in (None, "event"):
        raise ValueError(f"form is {form!r}; allowed: None, 'event'")
    if not trace.op.size:
        raise ValueError("the trace is empty; allowed: at least one command")
    counts = _keys(trace.op, trace.bank) if form is None and trace.channel.size == 1 else np.zeros(0, dtype=np.int64)
    if counts.sum() == trace.op.size:
        keys = np.flatnonzero(counts)
        if trace.mode == "AB" and preset.hits_first and (not refresh or keys.size == 1 and on >= _FAST_AB):
            return _outcome(trace, *runs.served(trace.row, preset, refresh=refresh))
        units = keys & (3 if trace.mode == "SB" else 31)
        alone = np.unique(units).size == keys.size and (trace.mode == "SB" or keys.max() < 32)
        if trace.mode != "AB" and on >= set(timing.QUIRKS) and alone:
            return _outcome(trace, *lanes.served(trace, preset, refresh=refresh))
    return events(trace, preset, refresh=refresh, quirks=on)[0]


def events(trace, preset, *, refresh=True, quirks=True, log=0):
    """The event loop's `Outcome`, and the first `log` commands of a single channel that issued.

    The log is int64 [at most log, 3]: cycle, command (of `timing`), trace position (-1: of a refresh).
    """
    on, mode = timing.enabled(quirks), timing.MODES.index(trace.mode)
    channels = int(trace.channel.max()) + 1
    dev = device(trace.mode, channels, "times_one_pseudochannel" in on)
    kept = np.zeros((log if channels == 1 else 0, 3), dtype=np.int64)
    cycles = _run(
        dev, mode, trace.op, trace.bank, trace.row, trace.channel, timing.rules(preset, trace.mode, on),
        preset.nREFI if refresh else NEVER, "activate_checks_one_pseudochannel" not in on,
        mode == 1 and "same_bank_stays_open" in on, mode != 0 and "precharge_unpaired" in on, kept,
    )  # fmt: skip
    if cycles < 0:
        raise ValueError("the trace has no end: banks with two addresses open and close in turn, as in AttAcc; "
                         "allowed: without the quirk times_one_pseudochannel")
    counts = dev.counts.sum(axis=0)
    return _outcome(trace, cycles, counts[ACT], counts[REF]), kept[: int(counts[:LAST].sum())]


def _outcome(trace, cycles, activations, refreshes):
    macs = int((trace.op == MAC).sum())
    read = macs * timing.BANKS[trace.mode] * timing.BURST_BYTES
    return Outcome(int(cycles), macs, int(activations), int(refreshes), read)
