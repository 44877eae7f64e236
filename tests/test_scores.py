"""The selection's operators: each against its definition in float64, Numba against torch, top-k against a sort."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from artifact import ops
from artifact.prr import predictor

IMPLS = ["reference", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (2, 80), (3, 128), (4, 64), (5, 80), (6, 128), (8, 64), (11, 80), (16, 128),
          (4, 128), (1, 80), (3, 24), (4, 7)]  # query heads per KV head, head size
LENGTHS = [1, 63, 1000]
INF = math.inf


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bounds_of(keys, page=16):
    """Smallest and largest key of each page of keys [B, G, T, D], the last page over the tokens it has."""
    pages = keys.split(page, dim=2)
    return torch.stack([p.amin(2) for p in pages], 2), torch.stack([p.amax(2) for p in pages], 2)


def quest_by_definition(q, low, high, group):
    """float64 NumPy: the scores, and the size of what was summed, which rounding is measured by."""
    q, low, high = (x.double().numpy() for x in (q, low, high))
    kv_heads = low.shape[1]
    heads = q.reshape(q.shape[0], kv_heads, -1, q.shape[-1])
    heads = heads.mean(2, keepdims=True) if group == "mean" else heads
    with np.errstate(invalid="ignore"):
        terms = np.maximum(heads[:, :, :, None] * low[:, :, None], heads[:, :, :, None] * high[:, :, None])
        scores = terms.sum(-1)
        scores = scores.sum(2) if group == "sum" else scores.max(2)
    return np.where(np.isnan(scores), -INF, scores), np.abs(terms).sum((2, -1))


# --- Quest

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", ops.GROUPS)
@pytest.mark.parametrize(("size", "dim"), SHAPES)
def test_quest_scores_are_the_definitions(size, dim, group, dtype):
    for length in LENGTHS:
        low, high = bounds_of(drawn(2, 2, length, dim, dtype=dtype, seed=length))
        q = drawn(2, 2 * size, dim, dtype=dtype, seed=1)
        expected, summed = quest_by_definition(q, low, high, group)
        for impl in IMPLS:
            scores = ops.quest_scores(q, low, high, group=group, impl=impl)
            assert scores.dtype == torch.float32
            assert scores.shape == (2, 2, -(-length // 16))
            assert (np.abs(scores.numpy() - expected) <= 1e-6 * summed).all()


def test_quest_scores_of_doubles_are_the_definitions_to_their_last_bits():
    low, high = bounds_of(drawn(1, 2, 1000, 80).double())
    q = drawn(1, 10, 80, seed=1).double()
    scores = ops.quest_scores(q, low, high, group="max", impl="reference")
    np.testing.assert_allclose(scores.numpy(), quest_by_definition(q, low, high, "max")[0], rtol=1e-13)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_pages_score_bounds_every_dot_product_of_its_keys(impl):
    keys, q = drawn(2, 2, 100, 64), drawn(2, 6, 64, seed=1)
    low, high = bounds_of(keys)
    scores = ops.quest_scores(q, low, high, group="max", impl=impl)
    dots = torch.einsum("bghd,bgtd->bght", q.reshape(2, 2, 3, 64), keys).amax(2)
    assert (scores.repeat_interleave(16, 2)[..., :100] >= dots - 1e-4).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_may_be_negative(impl):
    low = torch.full((1, 1, 3, 8), -2.0)
    assert (ops.quest_scores(torch.ones(1, 1, 8), low, low / 2, impl=impl) == -8).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", ops.GROUPS)
@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_infinite_keys_follow_the_definition_and_nan_cannot_be_selected(size, group, dtype):
    low, high = bounds_of(drawn(1, 2, 16 * 9, 64, dtype=dtype))
    high[:, :, 1, 5] = INF
    low[:, :, 2, 5] = -INF
    low[:, :, 3, 5], high[:, :, 3, 5] = -INF, INF
    low[:, :, 4, 5] = high[:, :, 4, 5] = -INF
    low[:, :, 5, 5] = high[:, :, 5, 5] = math.nan
    q = drawn(1, 2 * size, 64, dtype=dtype, seed=1)
    expected, _ = quest_by_definition(q, low, high, group)
    assert {-INF, INF} < set(expected.ravel()) and (expected[:, :, 5] == -INF).all()
    for impl in IMPLS:
        scores = ops.quest_scores(q, low, high, group=group, impl=impl).numpy()
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", range(1, 10))
def test_one_head_that_is_nan_keeps_the_page_from_being_selected(impl, size):
    low, high = bounds_of(drawn(1, 1, 48, 16))
    for head in range(size):
        q = drawn(1, size, 16, seed=1)
        q[0, head, 3] = math.nan
        for group in ops.GROUPS:
            assert (ops.quest_scores(q, low, high, group=group, impl=impl) == -INF).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_pages_that_do_not_count_are_missing_and_never_read(impl):
    low, high = bounds_of(drawn(3, 2, 160, 64))
    q = drawn(3, 8, 64, seed=1)
    whole = ops.quest_scores(q, low, high, impl=impl)
    pages = torch.tensor([0, 7, 10])
    for b, count in enumerate(pages):
        low[b, :, count:] = high[b, :, count:] = math.nan
    scores = ops.quest_scores(q, low, high, pages, impl=impl)
    for b, count in enumerate(pages):
        assert torch.equal(scores[b, :, :count], whole[b, :, :count])
        assert (scores[b, :, count:] == -INF).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_shared_and_strided_metadata_score_alike(impl):
    low, high = bounds_of(drawn(1, 2, 100, 64))
    q = drawn(3, 8, 64, seed=1)
    shared = ops.quest_scores(q, low, high, impl=impl)
    assert torch.equal(shared, ops.quest_scores(q, low.expand(3, -1, -1, -1), high.repeat(3, 1, 1, 1), impl=impl))
    other = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (low, high)]
    assert torch.equal(shared, ops.quest_scores(q, *other, impl=impl))


# --- InfLLM-v2

def infllm_by_definition(q, keys, length, *, size=32, stride=16, block=64):
    """float64, one number at a time: means of complete windows, softmax per head, sum, the largest in each block."""
    q, keys = q.double(), keys.double()
    batch, kv_heads, _, dim = keys.shape
    scores = torch.full((batch, kv_heads, -(-int(length.max()) // block)), -INF, dtype=torch.float64)
    for b, g in itertools.product(range(batch), range(kv_heads)):
        starts = range(0, int(length[b]) - size + 1, stride)
        if not len(starts):
            continue
        windows = torch.stack([keys[b, g, s:s + size].mean(0) for s in starts])
        heads = q[b].reshape(kv_heads, -1, dim)[g]
        mass = sum((windows @ head / math.sqrt(dim)).softmax(0) for head in heads)
        for n in range(scores.shape[2]):
            over = [c for c, s in enumerate(starts) if s < (n + 1) * block and s + size > n * block]
            if over:
                scores[b, g, n] = mass[over].max()
    return scores


def compressed(keys, size=32, stride=16):
    if keys.shape[2] < size:
        return keys[:, :, :0]
    return keys.unfold(2, size, stride).mean(-1)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_infllm_scores_are_the_definitions(size, dim):
    for length in (1, 31, 32, 63, 64, 65, 1000):
        keys, q = drawn(2, 2, length, dim, seed=length), 2 * drawn(2, 2 * size, dim, seed=1)
        lengths = torch.tensor([length, max(1, length - 40)])
        expected = infllm_by_definition(q, keys, lengths)
        for impl in IMPLS:
            scores = ops.infllm_scores(q, compressed(keys), lengths, impl=impl)
            assert scores.dtype == torch.float32
            torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_infllm_scores_of_half_precision_keys_are_those_of_the_same_numbers(impl, dtype):
    keys, q = compressed(drawn(1, 2, 700, 64)).to(dtype), drawn(1, 6, 64, seed=1).to(dtype)
    expected = ops.infllm_scores(q.double(), keys.double(), torch.tensor([700]), impl="reference")
    scores = ops.infllm_scores(q, keys, torch.tensor([700]), impl=impl)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("size", "stride", "block"), [(16, 16, 64), (64, 16, 64), (8, 4, 4), (32, 16, 128)])
def test_infllm_scores_with_other_windows(impl, size, stride, block):
    keys, q, length = drawn(1, 1, 301, 32), drawn(1, 3, 32, seed=1), torch.tensor([301])
    shape = {"size": size, "stride": stride, "block": block}
    scores = ops.infllm_scores(q, compressed(keys, size, stride), length, **shape, impl=impl)
    torch.testing.assert_close(scores.double(), infllm_by_definition(q, keys, length, **shape), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
def test_infllm_scores_of_one_head_sum_over_its_windows_to_at_most_all(impl):
    keys, q = drawn(1, 1, 1000, 64), 300 * drawn(1, 1, 64, seed=1)
    scores = ops.infllm_scores(q, compressed(keys), torch.tensor([1000]), impl=impl)
    assert scores.min() >= 0 and scores.max() <= 1
    assert scores.max() > 0.99  # one window has nearly all, the exponentials of the others underflow


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("poison", [math.nan, INF])
def test_a_kv_head_whose_softmax_is_undefined_selects_nothing(impl, poison):
    keys, q = compressed(drawn(2, 2, 640, 64)), drawn(2, 8, 64, seed=1)
    length = torch.tensor([640, 320])
    clean = ops.infllm_scores(q, keys, length, impl=impl)
    keys[0, 1, 7] = q[0, 4:].sign().sum(0) * poison if poison == INF else poison
    keys[1, :, 19:] = math.nan  # behind the sequence's end
    scores = ops.infllm_scores(q, keys, length, impl=impl)
    assert (scores[0, 1] == -INF).all()
    assert torch.equal(scores[0, 0], clean[0, 0])
    assert torch.equal(scores[1], clean[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_key_at_minus_infinity_has_no_mass(impl):
    q, keys = torch.ones(1, 2, 8), drawn(1, 1, 9, 8)
    keys[0, 0, 0, 0] = -INF
    scores = ops.infllm_scores(q, keys, torch.tensor([160]), impl=impl)
    keys[0, 0, 0] = -1e4
    torch.testing.assert_close(scores, ops.infllm_scores(q, keys, torch.tensor([160]), impl=impl))


# --- the EMA step

THETAS = [(0.2, 0.5, 0.25), (0.8, 0.1, 0.75), (1.0, 1.0, 1.0), (0.3, 0.7, 0.0)]


@pytest.mark.parametrize("theta", THETAS, ids=str)
def test_the_ema_step_is_the_predictors_to_the_last_bit_on_every_path(theta):
    rng = np.random.default_rng(0)
    state = predictor.begin((3, 500))
    state = predictor.EmaState(state.level.copy(), state.trend.copy())
    for _ in range(6):
        scores = rng.standard_normal((3, 500), dtype=np.float32)
        scores[rng.random(scores.shape) < 0.1] = -INF
        scores[rng.random(scores.shape) < 0.02] = math.nan
        expected = predictor.update(state, scores, theta)
        for impl, kind in itertools.product(IMPLS, (np.asarray, torch.from_numpy)):
            level, trend, ahead = ops.ema_step(*(kind(x) for x in (*state, scores)), theta, impl=impl)
            assert type(level) is type(kind(scores))
            np.testing.assert_array_equal(np.asarray(level), expected.level)
            np.testing.assert_array_equal(np.asarray(trend), expected.trend)
            np.testing.assert_array_equal(np.asarray(ahead), predictor.predict(expected, theta))
        state = expected


@pytest.mark.parametrize("theta", THETAS, ids=str)
def test_several_steps_are_one_after_another(theta):
    """Also of no rows; and the state that was given is as it was."""
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((7, 2, 60), dtype=np.float32)
    scores[rng.random(scores.shape) < 0.2] = -INF
    scores[rng.random(scores.shape) < 0.05] = math.nan
    begun, expected = predictor.begin((2, 60)), []
    for row in scores:
        expected.append(ops.ema_step(*(expected[-1][:2] if expected else begun), row, theta))
    for impl, kind in itertools.product(IMPLS, (np.asarray, torch.from_numpy)):
        made = ops.ema_steps(*(kind(x) for x in (*begun, scores)), theta, impl=impl)
        for ours, one in zip(made, zip(*expected, strict=True), strict=True):
            assert type(ours) is type(kind(scores))
            np.testing.assert_array_equal(np.asarray(ours), np.stack(one))
        assert all(array.shape == (0, 2, 60) for array in ops.ema_steps(
            *(kind(x) for x in (*begun, scores[:0])), theta, impl=impl))
    assert np.isneginf(begun.level).all() and not begun.trend.any()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_ema_steps_recurrence_by_hand(impl):
    level, trend = np.float32([2.0, -INF, 2.0]), np.float32([1.0, 0.0, 1.0])
    level, trend, ahead = ops.ema_step(level, trend, np.float32([4.0, 3.0, -INF]), (0.5, 0.25, 0.5), impl=impl)
    assert level.tolist() == [3.0, 3.0, -INF]  # smoothed; newborn; gone
    assert trend.tolist() == [0.25 * (4 - 2) + 0.75 * 1, 0.0, 0.0]  # against the old level
    assert ahead.tolist() == [3.0 + 0.5 * 1.25, 3.0, -INF]


# --- top-k

def topk_by_sorting(scores, count, forced):
    """One row: the forced blocks, then the best of the others by (score, then lowest index)."""
    others = [i for i, s in enumerate(scores) if not forced[i] and s > -INF]
    others.sort(key=lambda i: (-scores[i], i))
    return sorted([*np.flatnonzero(forced), *others[:max(0, count - int(forced.sum()))]])


SCORES = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, math.nan, 3.4e38, -3.4e38, 1e-45, -1e-45]),
    st.integers(-2, 2).map(float),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_topk_is_a_sort(data):
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=40))
    scores = data.draw(hnp.arrays(np.float32, shape, elements=SCORES))
    forced = data.draw(st.one_of(st.just(np.zeros(shape, bool)), hnp.arrays(bool, shape)))
    count = data.draw(st.integers(0, shape[1] + 3))
    expected = [topk_by_sorting(row, count, must) for row, must in zip(scores, forced, strict=True)]
    for impl in IMPLS:
        chosen = ops.topk(scores, count, forced, impl=impl)
        assert chosen.dtype == np.int32
        assert chosen.shape == (shape[0], max(count, *(int(must.sum()) for must in forced), 0))
        for row, want in zip(chosen, expected, strict=True):
            assert row.tolist() == [*want, *[-1] * (row.size - len(want))]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["smooth", "levels", "constant", "jumps"])
@pytest.mark.parametrize("count", [1, 96, 2047])
def test_topk_of_long_rows(impl, kind, count):
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((3, 2048), dtype=np.float32)
    scores = {"smooth": scores, "levels": np.round(scores), "constant": np.full_like(scores, -7),
              "jumps": scores * np.float32(10) ** rng.integers(-30, 30, scores.shape).astype(np.float32)}[kind]
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ops.topk(scores, count, impl=impl), np.sort(expected, 1))


@pytest.mark.parametrize("impl", IMPLS)
def test_topk_of_any_number_of_axes_and_kind(impl):
    scores = drawn(2, 3, 4, 50)
    chosen = ops.topk(scores, 7, impl=impl)
    assert chosen.shape == (2, 3, 4, 7) and isinstance(chosen, torch.Tensor)
    np.testing.assert_array_equal(ops.topk(scores.numpy(), 7, impl=impl), chosen.numpy())
    np.testing.assert_array_equal(ops.topk(scores[1, 2, 3], 7, impl=impl), chosen[1, 2, 3])
    assert ops.topk(scores[:0], 7, impl=impl).shape == (0, 3, 4, 7)
    assert (ops.topk(scores[..., :0], 7, impl=impl) == -1).all()
    forced = torch.zeros(2, 1, 1, 50, dtype=torch.bool)
    forced[0, 0, 0, 11] = forced[1, 0, 0, 12] = True
    spread = ops.topk(scores, 7, forced, impl=impl)
    assert (spread[0] == 11).any(-1).all() and (spread[1] == 12).any(-1).all()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_lists_of_a_width_of_their_own_with_a_count_for_each(data):
    """What a GPU's step takes: as many as each row's count, and no more than there are slots, the first ones."""
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=30))
    scores = data.draw(hnp.arrays(np.float32, shape, elements=SCORES))
    forced = data.draw(hnp.arrays(bool, shape))
    slots = data.draw(st.integers(0, shape[1] + 3))
    counts = data.draw(st.lists(st.integers(0, shape[1] + 3), min_size=shape[0], max_size=shape[0]))
    chosen = ops.topk(torch.from_numpy(scores), torch.tensor(counts), torch.from_numpy(forced), impl="reference",
                      slots=slots)
    assert chosen.shape == (shape[0], slots) and chosen.dtype == torch.int32
    for row, one, count, must in zip(chosen, scores, counts, forced, strict=True):
        want = topk_by_sorting(one, min(count, slots), must)[:slots]  # a list cannot hold more than its slots
        assert row.tolist() == [*want, *[-1] * (slots - len(want))]


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_for_so_many_blocks(impl):
    """More than the longest sequence has: the rest is -inf; fewer: the first ones."""
    q, keys, length = drawn(2, 8, 64), drawn(2, 2, 20, 64), torch.tensor([200, 100])
    whole = ops.infllm_scores(q, keys, length, impl=impl)
    wide = ops.infllm_scores(q, keys, length, blocks=7, impl=impl)
    assert whole.shape[2] == 4 and wide.shape[2] == 7
    torch.testing.assert_close(wide[..., :4], whole)
    assert torch.isneginf(wide[..., 4:]).all()
    torch.testing.assert_close(ops.infllm_scores(q, keys, length, blocks=2, impl=impl), whole[..., :2])


# --- the doorway

Q, LOW = torch.zeros(2, 8, 64), torch.zeros(2, 2, 5, 64)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: ops.quest_scores(Q[0], LOW, LOW), "q is float32 [8, 64]; allowed: [B, H, D]"),
    (lambda: ops.quest_scores(Q, LOW[0], LOW[0]), "low is float32 [2, 5, 64]"),
    (lambda: ops.quest_scores(Q, LOW[..., :32], LOW), "[2 or 1, G, N, 64]"),
    (lambda: ops.quest_scores(Q, LOW, LOW.half()), "high is float16 [2, 2, 5, 64]"),
    (lambda: ops.quest_scores(Q[:, :7], LOW, LOW), "7 query heads over 2 KV heads"),
    (lambda: ops.quest_scores(Q, LOW, LOW, group="min"), "group is 'min'; allowed: mean, max, sum"),
    (lambda: ops.quest_scores(Q, LOW, LOW, torch.tensor([1, -1])), "pages holds -1"),
    (lambda: ops.quest_scores(Q, LOW, LOW, torch.tensor([1.0, 1.0])), "pages is float32 [2]; allowed: int32"),
    (lambda: ops.quest_scores(Q.long(), LOW, LOW), "allowed: floating-point numbers"),
    (lambda: ops.quest_scores(Q.double(), LOW, LOW), "impl is 'cpu'; quest_scores was given torch.float64"),
    (lambda: ops.topk(LOW, 1, slots=3), "slots is 3 with impl 'cpu'; allowed with 'reference' and 'triton'"),
    (lambda: ops.topk(LOW, 1, slots=-1, impl="reference"), "slots is -1 with impl 'reference'; allowed"),
    (lambda: ops.topk(LOW, torch.tensor([1, 1])[:, None], impl="reference"), "slots is None with impl 'reference'"),
    (lambda: ops.quest_scores(Q, LOW, LOW, impl="cuda"), "impl is 'cuda'; allowed: reference, cpu"),
    (lambda: ops.infllm_scores(Q, LOW, torch.tensor([1])), "length is int64 [1]; allowed: int32 or int64 [2]"),
    (lambda: ops.infllm_scores(Q, LOW, torch.tensor([1, 1]), size=24), "24, 16 and 64; allowed: multiples of stride"),
    (lambda: ops.infllm_scores(Q.to("meta"), LOW.to("meta"), torch.tensor([1, 1])), "a tensor on meta"),
    (lambda: ops.ema_step(LOW, LOW, LOW[0], (0.5, 0.5, 0.5)), "level is float32 [2, 2, 5, 64]"),
    (lambda: ops.ema_steps(LOW, LOW, LOW, (0.5, 0.5, 0.5)), "level is float32 [2, 2, 5, 64]; allowed: float32 of"),
    (lambda: ops.ema_step(LOW, LOW, LOW, (0.0, 0.5, 0.5)), "theta is (0, 0.5, 0.5); allowed: 0 < alpha"),
    (lambda: ops.ema_step(LOW, LOW, LOW, (0.5, 0.5, 1.5)), "theta is (0.5, 0.5, 1.5)"),
    (lambda: ops.ema_step(LOW, LOW, LOW, (0.5, math.nan, 0.5)), "theta is (0.5, nan, 0.5)"),
    (lambda: ops.topk(LOW, -1), "count is -1; allowed: a whole number of at least 0"),
    (lambda: ops.topk(LOW, 1.5), "count is 1.5"),
    (lambda: ops.topk(LOW.double(), 1), "scores are float64"),
    (lambda: ops.topk(LOW, 1, LOW), "forced is float32 [2, 2, 5, 64]; allowed: bool"),
    (lambda: ops.topk(LOW, 1, torch.zeros(3, 1, 1, 64, dtype=torch.bool)), "forced is bool [3, 1, 1, 64]"),
])
def test_what_does_not_fit_is_said_in_one_line(call, says):
    with pytest.raises(ValueError) as caught:
        call()
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("absent", "module"), [
    ("numba", "artifact.kernels.reference"),
    ("torch", "artifact.kernels.cpu"),
    ("torch", "artifact.dsa"),
    ("numba", "artifact.dsa"),
])
def test_a_module_loads_without_what_it_does_not_need(absent, module):
    code = f"import sys; sys.modules[{absent!r}] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True)
