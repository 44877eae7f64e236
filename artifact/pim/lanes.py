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
def _serve(same, lane, row, later, beside, n_lanes, first, nrcd, nrp, nras, nrc, nrtp, nbl, nccds, nccdl, nccd, nrefi,
           nrfc, half):
    """Last cycle, activations and REFabs. `same`: mode SB, else PB; `first`: each lane's oldest command; `half`: the
    pseudo-channel of each lane's address."""
    n = lane.size
    oldest, hit = first.copy(), np.full(n_lanes, n)
    act, close, mac = np.zeros(n_lanes, np.int64), np.zeros(n_lanes, np.int64), np.zeros(n_lanes, np.int64)
    opened, done = np.zeros(n_lanes, np.bool_), np.zeros(n, np.bool_)
    refreshed, ranks, groups = np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(8, np.int64)
    row_bus, column_bus = 0, 0
    served, head, activations, refs, due, open_lanes, seen_open = 0, 0, 0, 0, 0, 0, False
    cycle, last, refresh_at = 1, 0, nrefi
    while served < n or due:
        if cycle == refresh_at:
            due += 2
            refresh_at += nrefi
        changed, following, first_half = False, refresh_at, -2
        limit = min(served + QUEUE, n)  # the queue is filled between cycles
        if due:
            first_half = 0
            if cycle < row_bus:
                following = min(following, row_bus)
            else:
                changed, last = True, cycle
                if open_lanes or seen_open:
                    opened[:] = False
                    hit[:] = n
                    open_lanes, seen_open = 0, False
                else:
                    refreshed[due % 2] = cycle + nrfc
                    due -= 1
                    refs += 1
        for slot in range(1 if due or first_half == 0 else 0, 2):
            best, best_lane, best_command = n, -1, 0
            for u in range(n_lanes):
                h, o = hit[u], oldest[u]
                if h < limit:
                    free = max(mac[u], column_bus)
                    if not same:
                        free = max(free, max(ranks[u >> 4], groups[u >> 2]))
                    if free > cycle:
                        following = min(following, free)
                    elif h < best:
                        best, best_lane, best_command = h, u, 1
                if o < limit and o != h and (o == head or h >= limit):
                    free = max(close[u], row_bus) if opened[u] else max(max(act[u], row_bus), refreshed[half[u]])
                    if free > cycle:
                        following = min(following, free)
                    elif o < best:
                        best, best_lane, best_command = o, u, 2 if opened[u] else 0
            if best_lane < 0:
                break
            if slot == 1 and (first_half < 0 or best_command == 2 or best_command == first_half):
                break
            first_half = -1 if best_command == 2 else best_command
            changed, last, u = True, cycle, best_lane
            if best_command == 1:
                done[best] = True
                served += 1
                column_bus = cycle + (nccd if same else nbl)
                close[u] = max(close[u], cycle + nrtp)
                if not same:
                    ranks[u >> 4], groups[u >> 2] = cycle + nccds, cycle + nccdl
                    wrong = (u >> 4) << 2 | u & 3
                    close[wrong] = max(close[wrong], cycle + nrtp)
                hit[u] = later[best]
                while oldest[u] < n and done[oldest[u]]:
                    oldest[u] = beside[oldest[u]]
                while head < n and done[head]:
                    head += 1
            elif best_command == 0:
                activations += 1
                opened[u], hit[u] = True, best
                open_lanes += 1
                seen_open |= same
                row_bus = cycle + 2
                act[u] = max(act[u], cycle + nrc)
                mac[u] = cycle + nrcd
                close[u] = max(close[u], cycle + nras)
            else:
                opened[u], hit[u] = False, n
                open_lanes -= 1
                act[u] = max(act[u], cycle + nrp)
        cycle = cycle + 1 if changed else max(cycle + 1, following)
    return last, activations, refs


def served(trace, preset, *, refresh=True):
    """Last cycle, activations and REFabs of a `controller.Trace` of MACs in mode SB or PB.

    Every set of banks must have one bank address: `controller.simulate` sees to that.
    """
    same = trace.mode == "SB"
    lane = (trace.bank & (3 if same else 31)).astype(np.int8)
    lanes, n = timing.UNITS[trace.mode], trace.op.size
    later, beside = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.int32)
    oldest, half = np.empty(lanes, dtype=np.int64), np.zeros(lanes, dtype=np.int64)
    _chains(lane, trace.row, later, beside, np.empty(_ROWS * lanes, dtype=np.int32), oldest)
    used = oldest < n
    half[used] = trace.bank[oldest[used]] >> 5
    t = preset
    return _serve(
        same, lane, trace.row, later, beside, lanes, oldest, t.nRCD, t.nRP, t.nRAS, t.nRC, t.nRTPL, t.nBL, t.nCCDS,
        t.nCCDL, t.nCCDSB, t.nREFI if refresh else 1 << 60, t.nRFC, half,
    )  # fmt: skip
