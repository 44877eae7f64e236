"""What overlaps what in a decode step, and the least it can take (PRR's Figures 1, 2a and 5).

A layer runs on two streams. What comes before (projections, the new key and value) is done first; then selection, on
the main stream, and speculation, on the side, start together. What is attended to after the selection waits for both,
and all that comes after (the FFN) waits for that. While both streams run, contention makes each slower by a factor of
its own; a stream alone takes its own time. The paper argues that there is none and prints no measurement of it.

Times are µs here, but any unit will do as long as it is one. They may be of a layer or, added up over layers that
follow each other, of a step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAIN, SIDE = "main", "side"
WAYS = ("serial", "fast", "reuse", "recompute", "repair")
Points = tuple[tuple[float, float], ...]


class Contention(NamedTuple):
    """How much longer each takes while the other runs: 0.2 is a fifth longer."""

    selection: float = 0.0
    speculation: float = 0.0


NONE = Contention()


class Event(NamedTuple):
    """One stage of one layer, on its stream."""

    layer: int
    stage: str
    stream: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Step:
    """One layer as it runs, µs. attention: what is attended to once the selection is known, named `waited`.

    Raises ValueError for a time that is negative or no number.
    """

    before: float
    selection: float
    speculation: float
    attention: float
    after: float
    waited: str = "attention"

    def __post_init__(self):
        for name in ("before", "selection", "speculation", "attention", "after"):
            _check(name, getattr(self, name))


@dataclass(frozen=True)
class Stages:
    """What a profile says of one context, µs. attention: over A, by the kernel of serial DSA.

    speculation and repair: (blocks / |A|, µs) ascending, of the kernel that can be continued: from nothing over P, and
    continued over M. Raises ValueError for a time that is negative or no number, and for ratios that do not ascend.
    """

    before: float
    selection: float
    attention: float
    after: float
    speculation: Points = ()
    repair: Points = ()

    def __post_init__(self):
        for name in ("before", "selection", "attention", "after"):
            _check(name, getattr(self, name))
        for name in ("speculation", "repair"):
            points = getattr(self, name)
            for ratio, time in points:
                _check(f"{name} at {ratio:g} |A|", time)
            ratios = [ratio for ratio, _ in points]
            if any(not 0 <= ratio < math.inf for ratio in ratios) or ratios != sorted(set(ratios)):
                raise ValueError(f"{name}'s ratios are {ratios}; allowed: at least 0, ascending, each once")


class Bounds(NamedTuple):
    """The least a layer can take, µs: overlap with the same kernel and nothing missed; and attention wholly hidden."""

    overlap: float
    hidden: float


def affine(attention: float, kernel_ratio: float = 1.0, fixed_frac: float = 0.0, most: float = 4.0) -> Points:
    """Attention over any share of A up to `most`, where only its time over all of A is known.

    `kernel_ratio`: how many times faster the kernel is. `fixed_frac`: the share of its time over A that does not depend
    on how many blocks there are. Raises ValueError for either out of its range.
    """
    _check("attention", attention)
    if not 0 < kernel_ratio < math.inf:
        raise ValueError(f"kernel_ratio is {kernel_ratio}; allowed: above 0")
    if not 0 <= fixed_frac <= 1:
        raise ValueError(f"fixed_frac is {fixed_frac}; allowed: 0 to 1")
    whole = attention / kernel_ratio
    return ((0.0, whole * fixed_frac), (most, whole * (fixed_frac + most * (1 - fixed_frac))))


def at(points: Points, ratio: float, name: str = "attention") -> float:
    """The time at `ratio`, on the line between its neighbours. ValueError outside the points: nothing is guessed."""
    for (low, before), (high, after) in zip(points, points[1:], strict=False):
        if low <= ratio <= high:
            return before + (after - before) * (ratio - low) / (high - low)
    if any(ratio == known for known, _ in points):
        return points[0][1]
    known = f"{points[0][0]:g} to {points[-1][0]:g}" if points else "none, for it has no such stage"
    raise ValueError(f"{name} ratio is {ratio:g}; the stage times know: {known}")


def step(stages: Stages, way: str, ratio: float = 1.0, missed: float = 0.0) -> Step:
    """How a layer runs under one of `WAYS`; `ratio` = |P| / |A|, `missed` = |M| / |A|.

    serial: select, then attend to A. fast: the same with the kernel that can be continued. reuse: attend to P alone and
    let what is missed go. recompute: with serial's kernel over P, and over all of A again when anything is missed (S1).
    repair: PRR, over P and then over M. With ratio 0 nothing runs beside the selection. Raises ValueError for another
    way, and for a ratio the stages do not know.
    """
    if way not in WAYS:
        raise ValueError(f"way is {way!r}; allowed: {', '.join(WAYS)}")
    if not 0 <= missed <= 1:
        raise ValueError(f"missed is {missed:g}; allowed: 0 to 1, a share of A")
    speculation, attention, waited = 0.0, stages.attention, "attention"
    if way == "fast":
        attention = at(stages.speculation, 1.0, "speculation")
    elif way == "recompute":
        speculation = at(affine(stages.attention), ratio)
        attention = stages.attention if missed else 0.0
    elif way in ("reuse", "repair"):
        speculation, waited = at(stages.speculation, ratio, "speculation") if ratio else 0.0, "repair"
        attention = at(stages.repair, missed, "repair") if way == "repair" else 0.0
    return Step(stages.before, stages.selection, speculation, attention, stages.after, waited)


def overlap(selection: float, speculation: float, contention: Contention = NONE) -> tuple[float, float]:
    """When selection and speculation end if both start at 0, in closed form.

    Raises ValueError for a contention below 0.
    """
    for name, value in contention._asdict().items():
        _check(f"contention of {name}", value)
    slowed = selection * (1 + contention.selection), speculation * (1 + contention.speculation)
    both = min(slowed)  # so long both run; then the other has its rest to do, alone
    if slowed[0] <= slowed[1]:
        return slowed[0], both + speculation - both / (1 + contention.speculation)
    return both + selection - both / (1 + contention.selection), slowed[1]


def schedule(steps: Sequence[Step], contention: Contention = NONE) -> list[Event]:
    """Layers one after the other: every stage that takes any time, by its start, main stream first."""
    events, now = [], 0.0
    for layer, one in enumerate(steps):
        begun = now + one.before
        selected, speculated = (begun + end for end in overlap(one.selection, one.speculation, contention))
        known = max(selected, speculated)
        done = known + one.attention
        events += [event for event in (
            Event(layer, "before", MAIN, now, begun), Event(layer, "selection", MAIN, begun, selected),
            Event(layer, "speculation", SIDE, begun, speculated), Event(layer, one.waited, MAIN, known, done),
            Event(layer, "after", MAIN, done, done + one.after)) if event.end_us > event.start_us]
        now = done + one.after
    return events


def latency(one: Step, contention: Contention = NONE) -> float:
    """How long one layer takes, µs."""
    return one.before + max(overlap(one.selection, one.speculation, contention)) + one.attention + one.after


def bounds(stages: Stages) -> Bounds:
    """What Amdahl leaves: nothing here is faster than `hidden`, and nothing with serial's kernel than `overlap`."""
    others = stages.before + stages.after
    return Bounds(others + max(stages.selection, stages.attention), others + stages.selection)


def _check(name, value):
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}; allowed: at least 0, and finite")
