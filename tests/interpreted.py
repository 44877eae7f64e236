"""Parity of the Triton kernels with the references, in Triton's interpreter: `test_triton.py` runs this file.

What no kernel may read (unlisted pages, tails past a length, fresh results, dropped parts) holds NaN. The interpreter
takes some milliseconds for a block, so shapes are few and hurt. It multiplies bfloat16 wrongly in `tl.dot`; for it the
kernels widen first, which the compiled ones need not.
"""

import importlib.machinery
import importlib.util
import math
import sys
import types
from contextlib import contextmanager

import pandas as pd
import pytest
import torch
from artifact.kernels import decode, merge, moved, predict, reference, repair, scores, timing, topk
from artifact.kernels.paged import PagedKV, Partial
from triton.runtime import interpreter

from artifact import ops
from artifact.dsa.quest import Quest
from artifact.prr import budget, graph
from artifact.prr import decode as step
from artifact.study import compiling, gpu_profile, latency, stage_times

NAN = float("nan")
HALF, FULL = torch.float16, torch.float32


@contextmanager
def launched():
    """A list of the kernels that were launched meanwhile."""
    names, run = [], interpreter.GridExecutor.__call__

    def counting(self, *arguments, **options):
        names.append(self.fn.__name__)
        return run(self, *arguments, **options)

    interpreter.GridExecutor.__call__ = counting
    try:
        yield names
    finally:
        interpreter.GridExecutor.__call__ = run


@pytest.fixture(autouse=True)
def fresh_results_hold_nan(monkeypatch):
    """What a kernel forgets to write is seen."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, **o: _poisoned(make(*a, **o)))


def _poisoned(tensor):
    return tensor.fill_(NAN) if tensor.is_floating_point() else tensor


def cache(lengths, kv_heads, group, dim, block, dtype, seed=0, loud=1.0):
    """-> q, PagedKV with NaN wherever nothing may be read, and page numbers out of range past the lengths."""
    rng = torch.Generator().manual_seed(seed)
    held = [-(-length // block) for length in lengths]
    width = max(held) + 1
    pages = len(lengths) * width + 2
    k = torch.full((pages, kv_heads, block, dim), NAN)
    v = k.clone()
    table = torch.full((len(lengths), width), 2**30, dtype=torch.int32)
    order = torch.randperm(pages, generator=rng).int()
    for b, length in enumerate(lengths):
        for n in range(held[b]):
            page, tokens = order[b * width + n], min(block, length - n * block)
            table[b, n] = page
            k[page, :, :tokens] = torch.randn(kv_heads, tokens, dim, generator=rng)
            v[page, :, :tokens] = torch.randn(kv_heads, tokens, dim, generator=rng)
    q = loud * torch.randn(len(lengths), kv_heads * group, dim, generator=rng)
    return q.to(dtype), PagedKV(k.to(dtype), v.to(dtype), table, torch.tensor(lengths, dtype=torch.int32))


def some(kv, slots, seed=1):
    """A list of up to `slots` blocks for each head, in any order, with padding anywhere and some indices too large."""
    rng = torch.Generator().manual_seed(seed)
    batch, kv_heads, block = kv.length.shape[0], kv.k.shape[1], kv.k.shape[2]
    blocks = torch.full((batch, kv_heads, slots), -1, dtype=torch.int32)
    for b in range(batch):
        held = -(-int(kv.length[b]) // block)
        for g in range(kv_heads):
            count = min(slots - 1, held)
            at = torch.randperm(slots, generator=rng)[:count]
            blocks[b, g, at] = torch.randperm(held, generator=rng)[:count].int()
    blocks[0, 0, (blocks[0, 0] < 0).nonzero()[0]] = 2**31 - 1
    return blocks


def unlisted(kv, blocks):
    """The cache with NaN in every page that no list of its head names."""
    k, v = torch.full_like(kv.k, NAN), torch.full_like(kv.v, NAN)
    for b, g, s in (blocks >= 0).nonzero():
        block = int(blocks[b, g, s])
        if block * kv.k.shape[2] < int(kv.length[b]):
            page = kv.page_table[b, block]
            k[page, g], v[page, g] = kv.k[page, g], kv.v[page, g]
    return kv._replace(k=k, v=v)


def same(ours, oracle, out, lse):
    """Whether two states agree: `out` relative to the largest output, `lse` relative to its size or 1."""
    assert ours.out.dtype == ours.lse.dtype == torch.float32 and ours.out.shape == oracle.out.shape
    empty = oracle.lse == -math.inf
    assert torch.equal(ours.lse == -math.inf, empty) and not ours.out[empty].any()
    assert (ours.out - oracle.out).abs().max() <= out * oracle.out.abs().max()
    assert ((ours.lse - oracle.lse)[~empty].abs() <= lse * oracle.lse[~empty].abs().clamp(min=1)).all()


def check_attend(module, lengths, kv_heads, group, dim, block, dtype, slots=5, parts=None):
    """Parity of every way to attend, and how often each launches."""
    q, kv = cache(lengths, kv_heads, group, dim, block, dtype)
    blocks = some(kv, slots)
    kv = unlisted(kv, blocks)
    out = 2e-6 if dtype == FULL else 5e-3
    with launched() as names:
        ours = module.attend(q, kv, blocks, parts)
    assert names.count("attend_blocks") == 1 and len(names) <= 2
    same(ours, reference.attend(q.double(), kv, blocks), out, 1e-6)


SHAPES = [  # lengths, KV heads, group, D, bs
    ((1,), 1, 1, 64, 16),
    ((63, 1, 100), 2, 3, 80, 32),
    ((1000,), 2, 5, 96, 256),
    ((130, 7), 1, 8, 128, 64),
    ((48, 33), 1, 16, 192, 16),
    ((70,), 1, 4, 256, 48),
    ((40,), 1, 20, 32, 8),
]


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attend(shape, dtype):
    check_attend(decode, *shape, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, (FULL, HALF)], ids=["bf16", "fp32 over fp16"])
def test_attend_with_widened_products(dtype):
    asked, held = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    q, kv = cache((70, 20), 1, 4, 64, 16, FULL)
    kv = kv._replace(k=kv.k.to(held), v=kv.v.to(held))
    same(decode.attend(q.to(asked), kv, some(kv, 4)), reference.attend(q.to(asked).double(), kv, some(kv, 4)), 2e-6,
         1e-6)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 64])
def test_however_the_list_is_split(parts):
    check_attend(decode, (100, 17), 2, 3, 64, 16, FULL, slots=7, parts=parts)


def test_lists_of_nothing():
    q, kv = cache((40, 5), 2, 2, 64, 16, FULL)
    nothing = reference.attend(q, kv, torch.full((2, 2, 3), -1, dtype=torch.int32))
    for blocks in (torch.full((2, 2, 3), -1, dtype=torch.int32), torch.full((2, 2, 3), 3, dtype=torch.int32)):
        same(decode.attend(q, kv, blocks), nothing, 0, 0)
    with launched() as names:
        same(decode.attend(q, kv, torch.zeros(2, 2, 0, dtype=torch.int32)), nothing, 0, 0)
        assert decode.attend_groups(q, kv, torch.zeros(2, 2, 0, dtype=torch.int32), 4).out.shape == (0, 2, 4, 64)
    assert names == []


def test_a_longer_length_than_the_table_reads_no_further():
    q, kv = cache((64, 64), 1, 4, 64, 16, FULL)
    kv = kv._replace(page_table=kv.page_table[:, :3], length=kv.length + 1000)
    same(decode.dense(q, kv), reference.dense(q.double(), kv), 2e-6, 1e-6)


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=["fp32", "fp16"])
def test_dense(dtype):
    q, kv = cache((1, 100, 63), 2, 4, 64, 32, dtype)
    same(decode.dense(q, kv), reference.dense(q.double(), kv), 2e-6 if dtype == FULL else 5e-3, 1e-6)


@pytest.mark.parametrize("view", ["pages apart", "tokens before heads", "lists in a wider array"])
def test_strided_views(view):
    q, kv = cache((60, 20), 2, 2, 64, 16, FULL)
    blocks = some(kv, 5)
    oracle = reference.attend(q.double(), kv, blocks)
    if view == "pages apart":
        kv = kv._replace(k=torch.stack([kv.k, kv.k * NAN], 1)[:, 0], v=torch.stack([kv.v * NAN, kv.v], 2)[:, :, 1])
    elif view == "tokens before heads":
        kv = kv._replace(k=kv.k.transpose(1, 2).contiguous().transpose(1, 2))
    else:
        blocks = torch.stack([blocks, blocks], -1)[..., 0]
        kv = kv._replace(page_table=torch.stack([kv.page_table, kv.page_table], -1)[..., 1])
        q = torch.stack([q, q], -1)[..., 0]
    same(decode.attend(q, kv, blocks), oracle, 2e-6, 1e-6)


@pytest.mark.parametrize("loud", [16.0, 1e4], ids=str)
def test_large_logits(loud):
    q, kv = cache((80,), 1, 4, 64, 16, FULL, loud=1.0)
    blocks = some(kv, 6)
    oracle = reference.attend(q.double(), kv, blocks)
    q = q * (loud / oracle.lse.abs().max())
    ours, oracle = decode.attend(q, kv, blocks), reference.attend(q.double(), kv, blocks)
    same(ours, oracle, 2e-6 if loud == 16 else 2e-3, 1e-6)


@pytest.mark.parametrize("group", [1, 2, 5, 9])
def test_attend_groups(group):
    q, kv = cache((100, 40), 2, 3, 64, 16, FULL)
    blocks = some(kv, 5)
    kv = unlisted(kv, blocks)
    with launched() as names:
        ours = decode.attend_groups(q, kv, blocks, group)
    assert names == ["attend_blocks"]
    same(ours, reference.attend_groups(q.double(), kv, blocks, group), 2e-6, 1e-6)


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("parts", [1, 3, None])
@pytest.mark.parametrize("known", [0, 2, 5])
def test_repair(known, parts, dtype):
    """Blocks known before 0 and 5 of 6: an empty state, an empty repair (some lists only), and both."""
    q, kv = cache((90, 33), 2, 3, 64, 16, dtype)
    blocks = some(kv, 6)
    kv = unlisted(kv, blocks)
    state = reference.attend(q.double(), kv, blocks[..., :known])
    missed = blocks[..., known:]
    oracle = reference.repair(state, q.double(), kv, missed)
    given = Partial(state.out.float(), state.lse.float())
    given.out[given.lse == -math.inf] = NAN
    with launched() as names:
        ours = repair.repair(given, q, kv, missed, parts)
    assert names.count("attend_blocks") == 1
    same(ours, oracle, 1e-6 if dtype == FULL else 5e-3, 1e-6)


def test_repair_over_nothing():
    q, kv = cache((90, 33), 2, 3, 64, 16, FULL)
    state = reference.attend(q, kv, some(kv, 4))
    with launched() as names:
        assert repair.repair(state, q, kv, torch.zeros(2, 2, 0, dtype=torch.int32)) is state
    assert names == []
    same(repair.repair(state, q, kv, torch.full((2, 2, 4), -1, dtype=torch.int32)), state, 1e-6, 1e-6)


@pytest.mark.parametrize(("count", "dim"), [(1, 64), (3, 80), (33, 32), (70, 192)])
@pytest.mark.parametrize("kept", [None, 0.0, 0.5], ids=str)
def test_merge(count, dim, kept):
    rng = torch.Generator().manual_seed(count)
    parts = Partial(torch.randn(count, 2, 6, dim, generator=rng), 20 * torch.randn(count, 2, 6, generator=rng))
    parts.lse[torch.rand(count, 2, 6, generator=rng) < 0.2] = -math.inf
    keep = None if kept is None else torch.rand(count, 2, 3, generator=rng) < kept
    oracle = reference.merge(Partial(parts.out.double(), parts.lse.double()), keep)
    absent = parts.lse == -math.inf if keep is None else (parts.lse == -math.inf) | ~keep.repeat_interleave(2, 2)
    parts.out[absent] = NAN
    with launched() as names:
        ours = merge.merge(parts, keep)
    assert names == ["merge_parts"]
    same(ours, oracle, 1e-6, 1e-6)


def test_merge_of_no_parts():
    same(merge.merge(Partial(torch.zeros(0, 2, 4, 64), torch.zeros(0, 2, 4))),
         Partial(torch.zeros(2, 4, 64), torch.full((2, 4), -math.inf)), 0, 0)


def test_exact_from_predicted_blocks_one_by_one():
    """Predicted and selected blocks kept, wasted ones dropped, missed ones added: attention over the selection."""
    q, kv = cache((110,), 2, 4, 64, 16, FULL)
    predicted = torch.tensor([[[0, 1, 2, 6], [5, 3, 1, 0]]], dtype=torch.int32)
    selected = torch.tensor([[[1, 2, 4, 5], [0, 2, 3, 4]]], dtype=torch.int32)
    keep = (predicted.unsqueeze(-1) == selected.unsqueeze(-2)).any(-1).permute(2, 0, 1).contiguous()
    missed = torch.where((selected.unsqueeze(-1) == predicted.unsqueeze(-2)).any(-1), -1, selected)
    kept = merge.merge(decode.attend_groups(q, kv, predicted, 1), keep)
    same(repair.repair(kept, q, kv, missed), reference.attend(q.double(), kv, selected), 2e-6, 1e-6)


@pytest.mark.parametrize("group", ["mean", "max", "sum"])
@pytest.mark.parametrize(("dtype", "heads", "dim", "shared"), [
    (FULL, 3, 64, False), (HALF, 16, 80, True), (torch.bfloat16, 1, 128, False), (FULL, 8, 256, False)])
def test_quest_scores(dtype, heads, dim, shared, group):
    rng = torch.Generator().manual_seed(dim)
    low = torch.randn(1 if shared else 2, 2, 37, dim, generator=rng)
    high = low + torch.rand(low.shape, generator=rng)
    low[:, :, -4:] = high[:, :, -4:] = NAN
    low[:, 0, 5, 7], high[:, 0, 6, 7] = -math.inf, math.inf
    q = torch.randn(2, 2 * heads, dim, generator=rng).to(dtype)
    low, high, pages = low.to(dtype), high.to(dtype), torch.tensor([33, 0])
    with launched() as names:
        ours = scores.quest_scores(q, low, high, pages, group=group)
    assert names == ["quest_bounds"] and ours.dtype == torch.float32
    oracle = reference.quest_scores(q.double(), low, high, pages, group=group)
    finite = oracle.isfinite()
    assert torch.equal(ours.double()[~finite], oracle[~finite])
    assert (ours - oracle)[finite].abs().max() <= 2e-6 * oracle[finite].abs().max()


@pytest.mark.parametrize(("dtype", "heads", "dim", "grid"), [
    (FULL, 3, 64, (32, 16, 64)), (HALF, 16, 128, (32, 16, 64)), (torch.bfloat16, 20, 80, (16, 16, 16)),
    (FULL, 5, 192, (64, 16, 32))])
def test_infllm_scores(dtype, heads, dim, grid):
    size, stride, block = grid
    rng = torch.Generator().manual_seed(dim)
    length = torch.tensor([1100, size - 1])
    keys = torch.randn(2, 2, 80, dim, generator=rng)
    for b in range(2):
        keys[b, :, reference.compressed_count(int(length[b]), size, stride):] = NAN
    q, keys = torch.randn(2, 2 * heads, dim, generator=rng).to(dtype), keys.to(dtype)
    blocks = -(-1100 // block)
    with launched() as names:
        ours = scores.infllm_scores(q, keys, length, blocks, size=size, stride=stride, block=block)
    assert names == ["compressed_lse", "pooled_scores"]
    oracle = reference.infllm_scores(q.double(), keys, length, size=size, stride=stride, block=block)
    finite = oracle.isfinite()
    assert ours.shape == oracle.shape and torch.equal(ours.double()[~finite], oracle[~finite])
    assert (ours - oracle)[finite].abs().max() <= 2e-6 * oracle[finite].abs().max()


def test_ema_step_to_the_last_bit():
    rng = torch.Generator().manual_seed(0)
    level, trend, now = torch.randn(3, 3, 700, generator=rng).unbind()
    level[0, :5], now[0, 3:8], now[1, :5], now[1, 5:9] = -math.inf, -math.inf, NAN, math.inf
    theta = (0.3, 0.1, 0.7)
    with launched() as names:
        ours = predict.ema_step(level, trend, now, theta)
    assert names == ["ema"]
    for x, y in zip(ours, reference.ema_step(level, trend, now, theta), strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))


def _rankings(kind, rows, blocks, rng):
    scores = torch.randn(rows, blocks, generator=rng)
    if kind == "ties":
        return scores.round() * torch.tensor([0.0, -0.0, 1.0])[:, None]
    if kind == "jumps":
        return scores * 10.0 ** torch.randint(-44, 38, scores.shape, generator=rng)
    if kind == "gaps":
        odd = torch.tensor([-math.inf, math.inf, NAN, -NAN, 0.0, -0.0, 1e-45, -3.4e38])
        return torch.where(scores > 0, odd[torch.randint(8, scores.shape, generator=rng)], scores)
    return scores


@pytest.mark.parametrize("kind", ["smooth", "ties", "jumps", "gaps"])
@pytest.mark.parametrize("blocks", [1, 300, topk.MOST, topk.MOST + 5])
def test_topk_is_the_references(kind, blocks):
    """With one count and with one for each list, forced blocks and none, slots too few and too many."""
    rng = torch.Generator().manual_seed(blocks)
    scores = _rankings(kind, 3, blocks, rng)
    forced = torch.rand(3, blocks, generator=rng) < torch.tensor([0.0, 0.01, 0.3])[:, None]
    several = torch.tensor([0, blocks // 3 + 1, blocks + 3])
    for count, must, slots in ((min(blocks, 96), None, None), (blocks + 2, None, None), (0, forced, None),
                               (blocks // 2 + 1, forced, None), (several, forced, blocks + 3), (several, None, 5),
                               (7, forced, 5), (several.int(), forced, 0)):
        with launched() as names:
            ours = topk.topk(scores, count, must, slots)
        oracle = reference.topk(scores, count, must, slots)
        assert ours.dtype == torch.int32 and torch.equal(ours, oracle)
        assert names == ["top_blocks"] * bool(oracle.numel())


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_topk_of_nothing(shape):
    for slots in (None, 4):
        found = topk.topk(torch.zeros(shape), 3, torch.zeros(shape, dtype=torch.bool), slots)
        assert found.shape == (shape[0], slots or 3) and (found == -1).all()


def test_the_doorway_runs_the_kernels_it_was_asked_for():
    q, kv = cache((100, 40), 2, 3, 64, 16, FULL)
    blocks = torch.tensor([[[0, 2, 5, -1]] * 2, [[1, 2, 0, -1]] * 2], dtype=torch.int32)
    low, keys = torch.randn(2, 2, 5, 64), torch.randn(2, 2, 7, 64)
    state = Partial(*(x.float() for x in reference.attend(q, kv, blocks[:, :, :1])))
    parts, keep = reference.attend_groups(q, kv, blocks, 1), torch.rand(4, 2, 2) < 0.5
    length = torch.tensor([100, 40])
    calls = [
        (lambda impl: ops.attend(q, kv, blocks, impl=impl), ["attend_blocks", "merge_parts"]),
        (lambda impl: ops.attend_groups(q, kv, blocks, 3, impl=impl), ["attend_blocks"]),
        (lambda impl: ops.repair(state, q, kv, blocks[:, :, 1:], impl=impl), ["attend_blocks", "merge_parts"]),
        (lambda impl: ops.merge(parts, keep, impl=impl), ["merge_parts"]),
        (lambda impl: ops.dense(q, kv, impl=impl), ["attend_blocks", "merge_parts"]),
        (lambda impl: (ops.quest_scores(q, low, low + 1, impl=impl),), ["quest_bounds"]),
        (lambda impl: (ops.infllm_scores(q, keys, length, impl=impl),), ["compressed_lse", "pooled_scores"]),
        (lambda impl: ops.ema_step(low, low, low, (0.5, 0.5, 0.5), impl=impl), ["ema"]),
        (lambda impl: (ops.topk(low, 20, low[:1, :1] > 1, impl=impl),), ["top_blocks"]),
        (lambda impl: (torch.from_numpy(ops.topk(low.numpy(), 3, impl=impl)),), ["top_blocks"]),
    ]
    for call, kernels in calls:
        with launched() as names:
            ours = call("triton")
        assert names == kernels
        for x, y in zip(ours, call("reference"), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fidelity", step.FIDELITIES)
def test_a_decode_step_runs_the_kernels(fidelity):
    rng = torch.Generator().manual_seed(4)
    keys, q = torch.randn(1, 2, 112, 16, generator=rng), torch.randn(112, 1, 4, 16, generator=rng)
    pages = keys[0].unflatten(1, (7, 16)).transpose(0, 1)
    kv = PagedKV(pages, pages, torch.arange(7, dtype=torch.int32)[None], torch.tensor([101], dtype=torch.int32))
    made = {}
    for impl in ("reference", "triton"):
        plan = step.Plan("prr", fidelity, Quest(budget_blocks=3), 1.5, (0.4, 0.3, 0.5), impl)
        state = step.begin(plan, keys[:, :, :100])
        with launched() as names:
            state = step.warm(plan, state, step.prefill_scores(plan, q[98:100, 0], state, 3)[:, None], 3)
            made[impl] = step.step(plan, q[100], kv, state, 3)
        assert bool(names) == (impl == "triton")
    assert {"quest_bounds", "top_blocks", "ema", "attend_blocks", "merge_parts"} <= set(names)
    (out, _, happened), (other, _, same) = made.values()
    torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(x, y) for x, y in zip(happened, same, strict=True)) and happened.missed.any()


@pytest.mark.parametrize("fidelity", step.FIDELITIES)
def test_the_step_of_a_graph_runs_the_kernels_whatever_the_split(fidelity):
    rng = torch.Generator().manual_seed(4)
    keys, q = torch.randn(1, 2, 112, 16, generator=rng), torch.randn(112, 1, 4, 16, generator=rng)
    pages = keys[0].unflatten(1, (7, 16)).transpose(0, 1)
    kv = PagedKV(pages, pages, torch.arange(7, dtype=torch.int32)[None], torch.tensor([101], dtype=torch.int32))
    made = []
    for impl, parts in (("reference", None), ("triton", None), ("triton", 1)):
        plan = step.Plan("prr", fidelity, Quest(budget_blocks=3), 1.5, (0.4, 0.3, 0.5), impl)
        state = step.begin(plan, keys[:, :, :100])
        state = step.warm(plan, state, step.prefill_scores(plan, q[98:100, 0], state, 3)[:, None], 3)
        held, count = graph.begin(plan, state, 8, 3, "cpu"), graph.guesses(plan, torch.tensor([101]))
        with launched() as names:
            made.append(graph.step(plan, q[100], kv, held, count, 3, parts=parts))
        assert bool(names) == (impl == "triton")
    assert {"quest_bounds", "top_blocks", "ema", "attend_blocks", "merge_parts"} <= set(names)
    for out, counts in made[1:]:
        torch.testing.assert_close(out, made[0][0], rtol=1e-5, atol=1e-5)
        assert all(torch.equal(x, y) for x, y in zip(counts, made[0][1], strict=True)) and counts.missed.any()


class _Given(timing.Dry):
    """A machine whose every call takes as long as it has been called, so that the files have numbers in them."""

    calls = 0

    def spent(self, side, method, call, least=None):
        super().spent(side, method, call, least)
        self.calls += 1
        return timing.Spent(side, method, float(self.calls), self.calls - 0.5, self.calls + 0.5, 3)


def test_a_gpus_profile_is_one_that_a_budget_can_be_fitted_to(tmp_path):
    quest = gpu_profile.cells(True, ("Llama3-8B-1M",))[0]
    cells, place, told = [quest._replace(context=context) for context in (256, 272, 288)], _Given(), []
    facts = timing.machine(place) | {"driver": "1"}
    ((model, found, whole),) = gpu_profile.measured(place, cells, 600, told.append)
    assert len(told) == 3 and model == "Llama3-8B-1M"
    same = {"device": "A", "origin": "measured"}
    for name, columns, rows in (("a.csv", gpu_profile.STAGE_COLUMNS, found),
                                ("steps_a.csv", gpu_profile.STEP_COLUMNS, whole)):
        gpu_profile.write(tmp_path / name, columns, [row | same for row in rows], facts, "A", model, "measured")
    profile = stage_times.profile(stage_times.read(tmp_path / "a.csv"), "quest")
    profile.require(device="A", model=model, page_tokens=16, budget_count=4)
    assert budget.fit(profile).answer(272).selection == [
        row["time_us"] for row in found if row["stage"] == "selection"][1]
    ours = latency.gpu_steps(tmp_path).query("origin == 'measured'")
    assert set(ours["way"]) == {"dense", "serial DSA, faster kernel", "S1", "S2", "PRR, union", "PRR, exact"}
    assert (ours["against"] == "serial DSA, faster kernel").all() and ours["chosen"].all()
    assert (ours[ours["way"] == "serial DSA, faster kernel"]["speedup_ratio"] == 1).all()


def test_past_its_limit_a_profile_begins_no_context():
    told = []
    ((_, found, whole),) = gpu_profile.measured(_Given(), gpu_profile.cells(True, ("GLM-4-9B-1M",)), -1, told.append)
    assert not found and not whole and len(told) == 2 and "left out" in told[0]


@pytest.mark.parametrize("operator", ["attend", "repair", "merge"])
def test_a_wrong_operator_ends_a_profile_before_its_time(operator, monkeypatch):
    call = getattr(ops, operator)

    def wrong(*arguments, **options):
        made = call(*arguments, **options)
        return made if options["impl"] == "reference" else Partial(made.out * 1.02, made.lse)

    monkeypatch.setattr(ops, operator, wrong)
    with pytest.raises(ValueError, match="no time is given"):
        list(gpu_profile.measured(_Given(), gpu_profile.cells(True, ("Llama3-8B-1M",))[:1], 600, print))


def _attention(q, k, v):
    """q [H, D], k and v [tokens, G, D] -> out, and lse in base 2, as FlashInfer gives them."""
    k, v = (x.double().repeat_interleave(q.shape[0] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("hd,thd->ht", q.double(), k) / math.sqrt(q.shape[1])
    return torch.einsum("ht,thd->hd", logits.softmax(1), v).to(q.dtype), logits.logsumexp(1).float() / math.log(2)


class _Decode:
    """FlashInfer 0.6.8's `BatchDecodeWithPagedKVCacheWrapper` in torch, for a cache [pages, G, page, D]."""

    def __init__(self, workspace, kv_layout, *, use_tensor_cores):
        assert kv_layout == "HND" and not workspace.any()

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, q_data_type,
             kv_data_type):
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert indices.numel() == indptr[-1] and (last_page_len == page_size).all()
        self.pages = [indices[a:b].long() for a, b in zip(indptr[:-1], indptr[1:], strict=True)]
        self.shape = num_kv_heads, page_size, head_dim

    def run(self, q, cache, *, return_lse):
        assert all(x.shape[1:] == self.shape and x.is_contiguous() for x in cache)
        found = [_attention(one, *(x[pages].transpose(1, 2).flatten(0, 1) for x in cache))
                 for one, pages in zip(q, self.pages, strict=True)]
        return tuple(torch.stack(part) for part in zip(*found, strict=True))


class _BlockSparse:
    """FlashInfer 0.6.8's `BlockSparseAttentionWrapper` in torch, for one row of blocks."""

    def __init__(self, workspace):
        pass

    def plan(self, indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, *, q_data_type, kv_data_type,
             o_data_type):
        assert (M, R) == (1, 1) and indptr.tolist() == [0, indices.numel()] and (indices < N // C).all()
        self.tokens = (indices[:, None].long() * C + torch.arange(C)).flatten()

    def run(self, q, k, v, *, return_lse):
        return tuple(x[None] for x in _attention(q[0], k[self.tokens], v[self.tokens]))


@pytest.fixture
def flashinfer(monkeypatch):
    """Its two wrappers, as torch, in its place."""
    module = types.ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper, module.BlockSparseAttentionWrapper = _Decode, _BlockSparse
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(timing, "WORKSPACE_BYTES", 16)


def test_what_is_timed_on_a_gpu_is_right_and_a_dry_run_gives_no_times(flashinfer):
    asked = list(timing.cases(tiny=True))
    with launched() as names:
        rows = list(timing.rows(timing.Dry(), asked))
    assert {row["study"] for row in rows} == {"copy", "decode", "batch", "repair", "table3"}
    assert {row["skipped"] for row in rows} == {"a dry run takes no times"} and not any(row["time_us"] for row in rows)
    assert {row["side"] for row in rows if row["study"] == "table3"} == {
        "triton", "flashinfer decode", "flashinfer decode, tensor cores", "flashinfer bsr",
        "flashinfer bsr and its plan"}
    assert len({tuple(row[name] for name in (*timing.Case._fields, "side", "method")) for row in rows}) == len(rows)
    assert names.count("attend_blocks") == 3 * len(asked)
    assert all(set(row) == set(timing.COLUMNS) for row in rows)


@pytest.mark.parametrize("whose", ["ours", "decode", "block sparse", "repair"])
def test_a_wrong_side_ends_the_run_before_its_time(whose, flashinfer, monkeypatch):
    owner, name = {"ours": (decode, "attend"), "decode": (_Decode, "run"), "block sparse": (_BlockSparse, "run"),
                   "repair": (repair, "repair")}[whose]
    right = getattr(owner, name)

    def wrong(*given, **options):
        out, lse = right(*given, **options)
        return type(out)(out * 1.02) if isinstance(out, tuple) else Partial(out * 1.02, lse)

    monkeypatch.setattr(owner, name, wrong)
    studies = ("repair",) if whose == "repair" else ("decode",)
    asked = [case for case in timing.cases(tiny=True) if case.study in studies]
    with pytest.raises(ValueError, match="out is 0.0[12].* of its largest off the reference; no time is given"):
        list(timing.rows(timing.Dry(), asked))


def test_a_side_of_flashinfer_that_fails_has_its_reason_and_the_others_go_on(flashinfer, monkeypatch):
    def failing(*_, **__):
        raise OSError("no nvcc\nand more")

    monkeypatch.setattr(_BlockSparse, "plan", failing)
    rows = list(timing.rows(timing.Dry(), [next(timing.cases(tiny=True))]))
    told = {row["side"]: row["skipped"] for row in rows}
    assert told["flashinfer bsr"] == "OSError: no nvcc" and told["flashinfer decode"] == "a dry run takes no times"


def test_without_flashinfer_its_sides_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    case = next(timing.cases(tiny=True))
    rows = list(timing.rows(timing.Dry(), [case]))
    told = {row["side"]: row["skipped"] for row in rows if row["side"].startswith("flashinfer")}
    assert len(told) == 3 and all(text.startswith("flashinfer is not installed: pip install") for text in told.values())


def test_bytes_are_counted_to_the_last_one():
    state, blocks = Partial(torch.zeros(1, 8, 64), torch.zeros(1, 8)), torch.tensor([[[2, 0, -1, -1], [1, 3, -1, -1]]])
    _, kv = cache((64,), 2, 4, 64, 16, HALF)
    with moved.counted() as found:
        predict.ema_step(*(torch.zeros(3, 700) for _ in range(3)), (0.2, 0.5, 0.25))
    assert found == {"read": 3 * 4 * 2100, "written": 3 * 4 * 2100}
    q, listed = torch.zeros(1, 8, 64, dtype=HALF), blocks.int()
    with moved.counted() as found:
        decode.attend(q, kv, listed, parts=1)
    least = moved.fewest(q, kv, listed)
    state = 4 * (8 * 64 + 8)
    assert least == 2 * 2 * 16 * 64 * 2 * 2 + q.nbytes + listed.nbytes + 4 * 4 + 4 + state
    assert found["written"] == state
    # beyond that: the lists and pages once more as they come, and a length for each of the two programs
    assert found["read"] == least - state - listed.nbytes - 4 * 4 - 4 + 2 * (4 + 4 * 4 + 2 * 4 + 2 * (4 + 4))


def test_the_recorded_bytes_are_those_of_these_kernels():
    found, case = compiling.recorded(compiling.MOVED), moved.SHORT[0]
    (row,) = found[(found[list(case._fields)] == pd.Series(case._asdict())).all(axis=1)].to_dict("records")
    assert {**moved.measure(case), "origin": "recorded", "triton": row["triton"]} == row


MUTANTS = {
    "a missing store": ("tl.store(out + place", "tl.load(out + place", ", acc / mass[:, None], mask=wanted)",
                        ", mask=wanted)"),
    "an extra page": ("there = tl.load(table + block, mask=inside, other=-1)",
                      "there = tl.load(table + block, mask=inside, other=0)",
                      "inside = (block >= 0) & (block < limit)", "inside = (block >= -1) & (block < limit)"),
    "no tail mask": ("(token < tokens - block * BLOCK)", "(token < BLOCK)"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_faults_are_seen(mutant, tmp_path):
    source = open(decode.__file__).read()
    edits = MUTANTS[mutant]
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert source.count(old) == 1
        source = source.replace(old, new)
    path = tmp_path / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = sys.modules["mutant"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(AssertionError):
        check_attend(module, (63, 1, 100), 2, 3, 80, 32, FULL, parts=1)
