"""The budget: what is fitted, which delta fits, how far it may be asked, and whose profile is refused."""

from dataclasses import replace

import numpy as np
import pytest

from artifact.prr import budget
from artifact.prr.budget import Profile

CONTEXTS = (4096, 8192, 16384, 32768, 65536)
RATIOS = (0.25, 0.5, 1.0, 1.5, 2.0)


def profile(select, speculate, noise=0.0, **changes):
    """A profile of two functions of context and ratio, µs."""
    draw = np.random.default_rng(0)
    whole = {
        "device": "H200", "model": "GLM-4-9B-1M", "method": "quest", "page_tokens": 16, "budget_count": 128,
        "contexts": CONTEXTS, "ratios": RATIOS,
        "selection": tuple(select(c) * (1 + noise * draw.normal()) for c in CONTEXTS),
        "speculation": tuple(tuple(speculate(c, r) * (1 + noise * draw.normal()) for r in RATIOS) for c in CONTEXTS)}
    return Profile(**whole | changes)


def line(c):
    return 40 + c / 1024


def even(c, r):
    return 10 + 50 * r


def test_delta_is_the_largest_that_fits_in_whole_blocks():
    fitted = budget.fit(profile(line, even))
    assert fitted.selection.degrees == (1, 0) and fitted.speculation.degrees == (0, 1)
    for context in (4096, 5000, 16384, 40000, 65536):
        window = line(context)
        answer = fitted.answer(context)
        blocks = answer.ratio * 128
        assert blocks == pytest.approx(round(blocks)) and answer.limit == "window" and not answer.beyond
        assert even(context, answer.ratio) <= window + 1e-6 < even(context, answer.ratio + 1 / 128) + 2e-6
        assert (answer.selection, answer.speculation) == pytest.approx((window, even(context, answer.ratio)))
    longer = fitted.answer(131072)
    assert (longer.ratio, longer.limit, longer.beyond) == (2.0, "profile", True)
    unknown = budget.fit(profile(line, even, budget_count=None)).answer(4096)
    assert unknown.ratio == pytest.approx(0.68)


def test_where_it_was_timed_the_times_themselves_count():
    one = profile(line, even, noise=0.1)
    fitted = budget.fit(one)
    for context, window, times in zip(CONTEXTS, one.selection, one.speculation, strict=True):
        answer = fitted.answer(context)
        assert answer.selection == window and answer.speculation <= window
        assert answer.speculation == pytest.approx(np.interp(answer.ratio, RATIOS, times))


def test_nothing_is_speculated_on_where_nothing_fits():
    answer = budget.fit(profile(lambda c: 15, even)).answer(8192)
    assert (answer.ratio, answer.speculation, answer.limit) == (0.0, 0.0, "window")


def test_a_gap_in_the_fit_is_not_jumped():
    bent = budget.fit(profile(lambda c: 60, lambda c, r: 20 + 45 * r * (r - 2) ** 2))
    fits = bent.speculation.at(9000, np.arange(32, 257) / 128) <= 60
    first = int(np.argmin(fits))
    assert bent.speculation.degrees == (0, 3) and first > 0 and fits[first:].any()
    assert bent.answer(9000).ratio == (31 + first) / 128


@pytest.mark.parametrize(("select", "degree"), [
    (lambda c: 50, 0), (lambda c: 50 + c / 999, 1), (lambda c: 50 + c / 999 + (c / 4e3) ** 2, 2),
    (lambda c: 50 + (c / 9e3) ** 3, 3)])
def test_the_degree_is_found_and_reported(select, degree):
    found = budget.fit(profile(select, even)).selection
    assert found.degrees == (degree, 0) and set(found.errors) == {(d, 0) for d in range(4)}
    assert found.errors[degree, 0] < 1e-6 * select(65536)
    assert [float(found.at(c)[0]) for c in (6000, 50000)] == pytest.approx([select(6000), select(50000)], rel=1e-6)


def test_noise_does_not_raise_the_degree():
    found = budget.fit(profile(line, even, noise=0.005))
    assert found.selection.degrees == (1, 0) and sum(found.speculation.degrees) <= 2
    assert 0 < found.selection.errors[1, 0] < 3
    assert float(found.selection.at(20000)[0]) == pytest.approx(line(20000), rel=0.02)


def test_left_out_errors_are_those_of_left_out_fits():
    one = profile(line, even, noise=0.02)
    found = budget.fit(one).selection
    x, y = np.array(CONTEXTS) / 65536, np.array(one.selection)
    for degree in range(4):
        wrong = [np.polyval(np.polyfit(np.delete(x, i), np.delete(y, i), degree), x[i]) - y[i] for i in range(5)]
        assert found.errors[degree, 0] == pytest.approx(np.sqrt(np.mean(np.square(wrong))), rel=1e-6)


@pytest.mark.parametrize(("context", "far", "says"), [
    (4095, False, "context is 4095 tokens; allowed: 4096 to 131072, 2 times the longest that was timed$"),
    (4095, True, "allowed: 4096 to 131072"), (131073, False, "or further when asked for")])
def test_no_delta_far_from_the_profile(context, far, says):
    with pytest.raises(ValueError, match=says):
        budget.fit(profile(line, even)).answer(context, far=far)


def test_further_is_marked_and_stops_where_times_end():
    assert budget.fit(profile(line, even)).answer(524288, far=True).beyond
    falling = budget.fit(profile(lambda c: 100 - c / 1024, even))
    with pytest.raises(ValueError, match="131072 tokens; the fitted times are no longer above 0 there: time it"):
        falling.answer(131072)


@pytest.mark.parametrize(("wanted", "says"), [
    ({"device": "H100"}, "device is H100; the profile is of H200"), ({"method": "infllm"}, "method is infllm; the"),
    ({"page_tokens": 64}, "page_tokens is 64; the profile is of 16"),
    ({"budget_count": 96}, "budget_count is 96; the profile is of 128"),
    ({"model": "Qwen3-14B"}, "model is Qwen3-14B; the profile is of GLM-4-9B-1M")])
def test_another_profile_is_refused(wanted, says):
    one = profile(line, even)
    one.require(device="H200", method="quest", page_tokens=16, budget_count=None)
    with pytest.raises(ValueError, match=says):
        one.require(**wanted)
    with pytest.raises(ValueError, match="page_tokens is 16; the profile does not say which it is of"):
        replace(one, page_tokens=None).require(page_tokens=16)


@pytest.mark.parametrize(("changes", "says"), [
    ({"contexts": CONTEXTS[:2]}, "contexts are 4096, 8192; allowed: at least 3"),
    ({"ratios": (1.0, 0.5, 0.25, 1.5, 2.0)}, "ratios are 1.0, 0.5, .*ascending"), ({"ratios": ()}, "ratios are none"),
    ({"selection": (1.0,) * 4}, "times are 29; allowed: selection at each of 5"),
    ({"selection": (-1.0,) * 5}, "a time is negative or no number"),
    ({"selection": (float("nan"),) * 5}, "a time is negative or no number")])
def test_a_profile_that_is_not_whole(changes, says):
    with pytest.raises(ValueError, match=says):
        profile(line, even, **changes)


def test_extrapolation_is_a_fit_to_the_short_contexts():
    found = budget.extrapolation(profile(lambda c: 40 + (c / 4096) ** 2, even), 16384)
    assert [row[0] for row in found] == [32768, 65536]
    x = np.array(CONTEXTS[:3])
    slope, offset = np.polyfit(x, 40 + (x / 4096) ** 2, 1)
    for context, predicted, timed, near, speculation in found:
        assert timed == 40 + (context / 4096) ** 2 and near == pytest.approx(speculation) == 60
        assert predicted == pytest.approx(offset + slope * context)
    with pytest.raises(ValueError, match="contexts are 4096, 8192; allowed: at least 3"):
        budget.extrapolation(profile(line, even), 8192)
