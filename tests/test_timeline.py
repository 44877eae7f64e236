"""The timeline against a simulation of two streams, its bounds, and what it refuses."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact.prr import timeline
from artifact.prr.timeline import Contention, Stages, Step

TIMES = st.floats(0, 1e4)
SLOW = st.builds(Contention, st.floats(0, 3), st.floats(0, 3))
STEPS = st.builds(Step, TIMES, TIMES, TIMES, TIMES, TIMES, st.sampled_from(["attention", "repair"]))
LAWS = st.tuples(st.floats(1, 8), st.floats(0, 1))  # how much faster the kernel is, and its fixed share


def simulated(steps, contention):
    """The same by events: every stage has work left, starts when all it waits for is done, and progresses at a rate
    that depends on who else runs."""
    work, needs, last = {}, {}, []
    for layer, one in enumerate(steps):
        stages = [("before", one.before, last), ("selection", one.selection, ["before"]),
                  ("speculation", one.speculation, ["before"]),
                  (one.waited, one.attention, ["selection", "speculation"]), ("after", one.after, [one.waited])]
        for stage, left, waits in stages:
            work[layer, stage] = left
            needs[layer, stage] = waits if waits is last else [(layer, name) for name in waits]
        last = [(layer, "after")]
    slowed = {"selection": 1 / (1 + contention.selection), "speculation": 1 / (1 + contention.speculation)}
    now, starts, ends = 0.0, {}, {}
    while len(ends) < len(work):
        running = [task for task in work if task not in ends and all(need in ends for need in needs[task])]
        for task in running:
            starts.setdefault(task, now)
        finished = [task for task in running if work[task] <= 1e-12 * max(1.0, now)]
        if finished:
            ends |= dict.fromkeys(finished, now)
            continue
        both = {stage for _, stage in running} >= {"selection", "speculation"}
        rates = {task: slowed[task[1]] if both else 1.0 for task in running}
        step = min(work[task] / rates[task] for task in running)
        for task in running:
            work[task] -= step * rates[task]
        now += step
    return {task: (starts[task], ends[task]) for task in ends}


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=3), SLOW)
def test_the_closed_form_is_the_simulation(steps, contention):
    found = simulated(steps, contention)
    events = timeline.schedule(steps, contention)
    near = {"rel": 1e-9, "abs": 1e-6}
    for event in events:
        assert (event.start_us, event.end_us) == pytest.approx(found[event.layer, event.stage], **near)
        assert event.stream == ("side" if event.stage == "speculation" else "main")
    drawn = {(event.layer, event.stage) for event in events}
    assert all(end - start == pytest.approx(0, abs=1e-5) for task, (start, end) in found.items() if task not in drawn)
    whole = sum(timeline.latency(one, contention) for one in steps)
    assert whole == pytest.approx(max(end for _, end in found.values()), **near)


@settings(max_examples=200, deadline=None)
@given(TIMES, TIMES, TIMES, TIMES, LAWS, st.floats(0, 4), st.floats(0, 1), SLOW)
def test_never_below_the_bound_and_never_above_serial_within_the_budget(
        before, selection, attention, after, law, ratio, missed, contention):
    stages = Stages(before, selection, attention, after, *[timeline.affine(attention, *law)] * 2)
    bounds, serial = timeline.bounds(stages), timeline.latency(timeline.step(stages, "serial"))
    step, slack = timeline.step(stages, "repair", ratio, missed), 1e-9 * serial + 1e-9
    alone, hampered = timeline.latency(step), timeline.latency(step, contention)
    assert bounds.hidden - slack <= alone <= hampered + slack
    assert bounds.hidden <= bounds.overlap <= serial + slack
    assert hampered <= (before + after + step.attention + step.selection + step.speculation) \
        * (1 + max(contention)) + slack
    if step.speculation <= selection:
        assert alone <= serial + slack
    same = Stages(before, selection, attention, after, *[timeline.affine(attention, 1.0, law[1])] * 2)
    least = max(missed, 1 - ratio, 0.0)  # P cannot cover more than it holds
    assert timeline.latency(timeline.step(same, "repair", ratio, least)) >= bounds.overlap - slack


def test_a_layer_by_hand():
    stages = Stages(10, 40, 60, 100, ((0, 4), (1, 20), (2, 36)), ((0, 2), (1, 22)))
    step = timeline.step(stages, "repair", 1.5, 0.25)
    assert step == Step(10, 40, 28, 7, 100, "repair")
    assert timeline.schedule([step]) == [
        (0, "before", "main", 0, 10), (0, "selection", "main", 10, 50), (0, "speculation", "side", 10, 38),
        (0, "repair", "main", 50, 57), (0, "after", "main", 57, 157)]
    slow = Contention(0.5, 0.25)  # speculation runs beside all of its 35, selection does 35 / 1.5 in them
    assert timeline.overlap(40, 28, slow) == pytest.approx((35 + 40 - 35 / 1.5, 35))
    assert timeline.latency(step, slow) == pytest.approx(10 + 75 - 35 / 1.5 + 7 + 100)
    assert timeline.bounds(stages) == (170, 150)


def test_nothing_speculated_is_serial_with_the_other_kernel():
    stages = Stages(10, 40, 60, 100, ((0.5, 12), (1, 20)), ((0, 2), (1, 22)))
    assert timeline.step(stages, "repair", 0.0, 1.0) == Step(10, 40, 0, 22, 100, "repair")
    with pytest.raises(ValueError, match="speculation ratio is 0.25; the stage times know: 0.5 to 1"):
        timeline.step(stages, "repair", 0.25, 1.0)


@pytest.mark.parametrize(("way", "missed", "wanted"), [
    ("serial", 0.3, Step(10, 40, 0, 60, 100)), ("fast", 0.3, Step(10, 40, 0, 20, 100)),
    ("reuse", 0.3, Step(10, 40, 20, 0, 100, "repair")), ("recompute", 0.3, Step(10, 40, 60, 60, 100)),
    ("recompute", 0.0, Step(10, 40, 60, 0, 100))])
def test_every_way(way, missed, wanted):
    stages = Stages(10, 40, 60, 100, ((0, 4), (1, 20), (2, 36)), ((0, 2), (1, 22)))
    assert timeline.step(stages, way, 1.0, missed) == wanted


def test_contention_only_costs_and_costs_what_it_says():
    for s, a in itertools.product((0, 30, 50), repeat=2):
        ends = [max(timeline.overlap(s, a, Contention(k, k))) for k in (0, 0.2, 1, 5)]
        assert ends == sorted(ends) and ends[0] == max(s, a)
    assert timeline.overlap(50, 50, Contention(1, 1)) == (100, 100)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: Step(0, -1, 0, 0, 0), "selection is -1; allowed: at least 0, and finite"),
    (lambda: Stages(0, 1, math.nan, 0), "attention is nan; allowed"),
    (lambda: Stages(0, 1, 1, 0, ((1, 2), (1, 3))), r"speculation's ratios are \[1, 1\]; allowed: at least 0"),
    (lambda: Stages(0, 1, 1, 0, (), ((0, -2),)), r"repair at 0 \|A\| is -2; allowed"),
    (lambda: timeline.step(Stages(0, 1, 1, 0), "best"), "way is 'best'; allowed: serial, fast, reuse"),
    (lambda: timeline.step(Stages(0, 1, 1, 0), "fast"), "the stage times know: none, for it has no such stage"),
    (lambda: timeline.step(Stages(0, 1, 1, 0, ((0, 1), (1, 2))), "reuse", 1.5), "ratio is 1.5; .* know: 0 to 1"),
    (lambda: timeline.step(Stages(0, 1, 1, 0), "serial", 1, 1.2), "missed is 1.2; allowed: 0 to 1"),
    (lambda: timeline.overlap(1, 1, Contention(-0.1, 0)), "contention of selection is -0.1; allowed"),
    (lambda: timeline.affine(1, 0), "kernel_ratio is 0; allowed: above 0"),
    (lambda: timeline.affine(1, 1, 1.5), "fixed_frac is 1.5; allowed: 0 to 1")])
def test_what_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
