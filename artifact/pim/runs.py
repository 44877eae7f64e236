"""All-bank MACs by run lengths: what a reordering queue makes of a row sequence, and the cycles of its runs.

The queue always holds the commands not yet served whose stream index is below served + 33, in whatever order they are
served. So with `later[j]`, the next command of j's row, a run goes on while later[j] < served + 33: no queue is kept.
From one activation to the next a run of k MACs takes

T(k) = max(nRC, max(nRAS, nRCD + (k - 1) nCCDAB + nRTPL) + nRP)

because with the activation at 0 the last MAC is at nRCD + (k - 1) nCCDAB, the precharge nRTPL later but not before
nRAS, and the next activation nRP after that but not before nRC. A refresh that falls due during a run waits for its
precharge, two REFab a refresh follow in consecutive cycles, and the next activation nRFC after pseudo-channel 0's last.

Exact for streams of one bank address, and without refresh for any; presets where hits come first (`hits_first`).
Barriers after every b commands are served segment by segment; in order (b = 1), runs are those of the stream itself.
"""

import numpy as np

from artifact.compiled import compiled
from artifact.pim import timing
from artifact.pim.timing import QUEUE

_PIECE = 1024  # commands whose runs are found at once


@compiled
def _advance(k, at, refresh_at, nrcd, nrp, nras, nrc, nrtp, nccd, nrefi, nrfc):
    """A run of k MACs whose activation is at `at` -> next activation, when the next refresh is due, REFabs."""
    opened = max(nras, nrcd + (k - 1) * nccd + nrtp)
    following = at + max(opened + nrp, nrc)
    if refresh_at > following:
        return following, refresh_at, 0
    closed = at + opened
    if refresh_at > closed:
        return max(following, refresh_at + nrfc), refresh_at + nrefi, 2
    due = (closed - refresh_at) // nrefi + 1
    return closed + 2 * due - 1 + nrfc, refresh_at + due * nrefi, 2 * due


@compiled
def _finish(k, at, refresh_at, nrcd, nras, nrtp, nccd, nrefi):
    """The last run -> the last cycle, and REFabs: a refresh due by its last MAC still closes it."""
    last = at + nrcd + (k - 1) * nccd
    if refresh_at > last:
        return last, 0
    due = (last - refresh_at) // nrefi + 1
    return max(at + nras, last + nrtp) + 2 * due, 2 * due


@compiled
def _later(row, later, seen):
    """For each command the next one of its row; `row.size` where there is none. `seen` is scratch for every row."""
    n = row.size
    seen[:] = n
    for i in range(n - 1, -1, -1):
        later[i] = seen[row[i]]
        seen[row[i]] = i


@compiled
def _served(row, later, done, barrier, lengths, nrcd, nrp, nras, nrc, nrtp, nccd, nrefi, nrfc, refresh_at):
    """Cycles, activations and REFabs of rows regrouped by the queue; run lengths too where `lengths` has room."""
    n = row.size
    served, head, at, runs, refs = 0, 0, 1, 0, 0
    j, k, end, furthest = 0, 0, min(barrier, n), -1
    done[:] = False
    while True:
        while True:  # the open row's hits, oldest first, up to the barrier
            before = j
            while j < min(end, served + QUEUE):
                done[j] = True
                before = j
                served += 1
                k += 1
                j = later[j]
            furthest = max(furthest, before if k else -1)
            if served < end:
                break
            if served == n:
                last, more = _finish(k, at, refresh_at, nrcd, nras, nrtp, nccd, nrefi)
                if runs < lengths.size:
                    lengths[runs] = k
                return last, runs + 1, refs + more
            end = min(end + barrier, n)
        if runs < lengths.size:
            lengths[runs] = k
        at, refresh_at, more = _advance(k, at, refresh_at, nrcd, nrp, nras, nrc, nrtp, nccd, nrefi, nrfc)
        refs += more
        runs += 1
        if furthest == served - 1:  # nothing was passed over
            head = served
        else:
            while done[head]:
                head += 1
        j, k = head, 0


@compiled
def _in_order(row, nrcd, nrp, nras, nrc, nrtp, nccd, nrefi, nrfc, refresh_at):
    """Cycles, activations and REFabs of rows served as they come.

    Piece by piece: where a run ends is looked for with a branch where that can be predicted, and without one elsewhere.
    """
    n = row.size
    at, runs, refs, begun = 1, 0, 0, 0
    ends = np.empty(_PIECE, dtype=np.int64)
    for start in range(1, n, _PIECE):
        size, changes, found = min(_PIECE, n - start), 0, 0
        before, piece = row[start - 1 : start - 1 + size], row[start : start + size]
        for i in range(size):
            changes += piece[i] != before[i]
        runs += changes
        predictable = min(changes, size - changes) * 8 < size
        for i in range(size):
            if predictable:
                if piece[i] != before[i]:
                    at, refresh_at, more = _advance(start + i - begun, at, refresh_at, nrcd, nrp, nras, nrc, nrtp, nccd,
                                                    nrefi, nrfc)
                    refs += more
                    begun = start + i
            else:
                ends[found] = start + i
                found += piece[i] != before[i]
        for e in range(found):
            at, refresh_at, more = _advance(ends[e] - begun, at, refresh_at, nrcd, nrp, nras, nrc, nrtp, nccd, nrefi,
                                            nrfc)
            refs += more
            begun = ends[e]
    last, more = _finish(n - begun, at, refresh_at, nrcd, nras, nrtp, nccd, nrefi)
    return last, runs + 1, refs + more


def cycles(preset, refresh):
    """A preset as the loops take it."""
    t = preset
    refresh_at = t.nREFI if refresh else 1 << 60
    return t.nRCD, t.nRP, t.nRAS, t.nRC, t.nRTPL, t.nCCDAB, t.nREFI, t.nRFC, refresh_at


def served(row, preset, *, refresh=True, barrier=None):
    """Last cycle, activations and REFabs of all-bank MACs to `row` (int32 [n]); a barrier after every `barrier`.

    barrier 1: in order. Raises ValueError for a preset whose hits do not come first, and for no rows.
    """
    return _checked(row, preset, refresh, barrier)[:3]


def lengths(row, *, barrier=None):
    """int64 [activations]: MACs of each run, in the order in which the queue serves them, of rows int32 [n]."""
    return _checked(row, timing.preset("HBM3_5.2Gbps"), False, barrier, keep=True)[3]


def period(k, preset):
    """T(k): cycles from the activation of a run of k MACs (int or array) to the next; see the head of this file."""
    t = preset
    opened = np.maximum(t.nRAS, t.nRCD + (np.asarray(k) - 1) * t.nCCDAB + t.nRTPL)
    return np.maximum(t.nRC, opened + t.nRP)


def _checked(row, preset, refresh, barrier, keep=False):
    row = np.ascontiguousarray(row, dtype=np.int32)
    if not row.size:
        raise ValueError("the stream is empty; allowed: at least one command")
    if not preset.hits_first:
        raise ValueError(f"nCCDAB is {preset.nCCDAB}; allowed in run-length form: below nRTPL ({preset.nRTPL})")
    if barrier is not None and (isinstance(barrier, bool) or not isinstance(barrier, int) or barrier < 1):
        raise ValueError(f"barrier is {barrier!r}; allowed: None or a whole number of at least 1")
    times = cycles(preset, refresh)
    if barrier == 1 and not keep:
        return _in_order(row, *times)
    later, done = np.empty(row.size, dtype=np.int32), np.empty(row.size, dtype=np.bool_)
    _later(row, later, np.empty(int(row.max()) + 1, dtype=np.int32))
    kept = np.zeros(row.size if keep else 0, dtype=np.int64)
    found = _served(row, later, done, barrier or row.size, kept, *times)
    return (*found, kept[: found[1]])
