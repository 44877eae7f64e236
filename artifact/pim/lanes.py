"""Same-bank and per-bank MACs, each set of banks addressed one way: the event loop without a queue.

A lane is a set of banks with a row of its own. As in `runs`, the queue is every command not yet served below served +
33, so a lane needs only its oldest command and its next hit, both by chains made beforehand: each cycle looks at one
candidate a lane instead of 33 entries. Exact with all quirks on; refresh on or off; no barriers, no data movement.
"""

import numpy as np

from artifact.compiled import compiled
from artifact.pim import timing
from artifact.pim.timing import QUEUE

_ROWS = 1 << 14  # of a bank in the default organization


@compiled
def _chains(lane, row, later, beside, seen, last):
    """For each command the next of its lane and row, and the next of its lane; size where there is none."""
    n = lane.size
    seen[:] = n
    last[:] = n
    for i in range(n - 1, -1, -1):
        key = row[i] * last.size + lane[i]
        later[i], beside[i] = seen[key], last[lane[i]]
        seen[key], last[lane[i]] = i, i


@compiled
def _look(few, oldest, hit, opened, act, close, mac, limit, head, cycle, row_bus, column_bus, n):
    """The oldest command that is ready (n: none), and the next cycle in which another will be.

    Few lanes are looked at one by one; many without a branch, so that the processor takes several at a time.
    """
    best, following = n, 1 << 60
    if few:
        for u in range(oldest.size):
            h, o = hit[u], oldest[u]
            if h < limit:
                free = max(mac[u], column_bus)
                if free > cycle:
                    following = min(following, free)
                elif h < best:
                    best = h
            if o != h and o < limit and (o == head or h >= limit):
                free = max(close[u] if opened[u] else act[u], row_bus)
                if free > cycle:
                    following = min(following, free)
                elif o < best:
                    best = o
        return best, following
    for u in range(oldest.size):
        h, o = hit[u], oldest[u]
        queued_hit = h < limit
        free = max(mac[u], column_bus)
        now = queued_hit & (free <= cycle)
        best = min(best, h if now else n)
        following = min(following, free if queued_hit & (free > cycle) else 1 << 60)
        waits = (o < limit) & (o != h) & ((o == head) | (not queued_hit))
        free = max(close[u] if opened[u] else act[u], row_bus)
        now = waits & (free <= cycle)
        best = min(best, o if now else n)
        following = min(following, free if waits & (free > cycle) else 1 << 60)
    return best, following


@compiled
def _serve(same, lane, row, later, beside, oldest, half, nrcd, nrp, nras, nrc, nrtp, nbl, nccds, nccdl, nccd, nrefi,
           nrfc):
    """Last cycle, activations and REFabs.

    `same`: mode SB, else PB; `oldest`: each lane's first command, used up; `half`: its pseudo-channel's number.
    """
    n, lanes = lane.size, oldest.size
    hit, opened, done = np.full(lanes, n), np.zeros(lanes, np.bool_), np.zeros(n, np.bool_)
    act, close, mac = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
    row_bus, column_bus, served, head = 0, 0, 0, 0
    activations, refs, due, open_lanes, seen_open = 0, 0, 0, 0, False
    cycle, last, refresh_at = 1, 0, nrefi
    while served < n or due:
        if cycle == refresh_at:
            due += 2
            refresh_at += nrefi
        limit = min(served + QUEUE, n)  # the queue is filled between cycles
        first, following, again = -2, refresh_at, False  # 0 row, 1 column, -1 a precharge, which pairs with none
        for slot in range(2):
            if slot == 0 and due:
                first = 0
                if cycle < row_bus:
                    following = row_bus
                    continue
                last, again = cycle, True
                if open_lanes or seen_open:
                    opened[:] = False
                    hit[:] = n
                    open_lanes, seen_open = 0, False
                    continue
                for u in range(lanes):
                    if half[u] == due % 2:
                        act[u] = max(act[u], cycle + nrfc)
                due -= 1
                refs += 1
                continue
            best, soon = _look(same, oldest, hit, opened, act, close, mac, limit, head, cycle, row_bus, column_bus, n)
            following = min(following, soon)
            if best == n:
                break
            u = lane[best]
            command = 1 if hit[u] == best else -1 if opened[u] else 0
            if slot == 1 and (first == -1 or command == -1 or command == first):
                again = True
                break
            first, last, following = command, cycle, refresh_at
            if command == 1:
                done[best] = True
                served += 1
                column_bus = cycle + (nccd if same else nbl)
                close[u] = max(close[u], cycle + nrtp)
                if not same:
                    rank, group = u & 16, u & 28
                    for v in range(rank, rank + 16):
                        mac[v] = max(mac[v], cycle + nccds)
                    for v in range(group, group + 4):
                        mac[v] = max(mac[v], cycle + nccdl)
                    wrong = (u >> 4) << 2 | u & 3
                    close[wrong] = max(close[wrong], cycle + nrtp)
                hit[u] = later[best]
                while oldest[u] < n and done[oldest[u]]:
                    oldest[u] = beside[oldest[u]]
                while head < n and done[head]:
                    head += 1
                arrives = served + QUEUE - 1  # may be ready at once
                if arrives < n and (oldest[lane[arrives]] == arrives or hit[lane[arrives]] == arrives):
                    again = True
            elif command == 0:
                activations += 1
                opened[u], hit[u] = True, best
                open_lanes += 1
                seen_open |= same
                row_bus = cycle + 2
                act[u] = max(act[u], cycle + nrc)
                mac[u] = max(mac[u], cycle + nrcd)
                close[u] = max(close[u], cycle + nras)
            else:
                opened[u], hit[u] = False, n
                open_lanes -= 1
                act[u] = max(act[u], cycle + nrp)
            again |= slot == 1
        cycle = cycle + 1 if again or due else max(cycle + 1, following)
    return last, activations, refs


def served(trace, preset, *, refresh=True):
    """Last cycle, activations and REFabs of a `controller.Trace` of MACs in mode SB or PB.

    Every set of banks must have one bank address, in mode PB of pseudo-channel 0: `controller.simulate` sees to that.
    """
    same = trace.mode == "SB"
    lane = (trace.bank & (3 if same else 31)).astype(np.int8)
    lanes, n = timing.UNITS[trace.mode], trace.op.size
    later, beside = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.int32)
    oldest, half = np.empty(lanes, dtype=np.int64), np.zeros(lanes, dtype=np.int64)
    _chains(lane, trace.row, later, beside, np.empty(_ROWS * lanes, dtype=np.int32), oldest)
    used = oldest < n
    half[used] = trace.bank[oldest[used]] >> 5
    t, refresh_at = preset, preset.nREFI if refresh else 1 << 60
    return _serve(
        same, lane, trace.row, later, beside, oldest, half, t.nRCD, t.nRP, t.nRAS, t.nRC, t.nRTPL, t.nBL, t.nCCDS,
        t.nCCDL, t.nCCDSB, refresh_at, t.nRFC,
    )  # fmt: skip
