"""Attention over a paged cache: against float64 where shapes hurt, with NaN wherever nothing may be read."""

import hashlib
import importlib.util
import itertools
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import pytest
import torch
from artifact.kernels import attention_cpu, cpu, lanes_cpu, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.registry import cpu_target

from artifact import kernels, ops
from artifact.ops import PagedKV, Partial

IMPLS = ["reference", "cpu"]
INF = math.inf
SINGLE, MERGED = 2e-6, 1e-6  # largest errors: of attention, and what merging or repairing may add
HALF = 5e-6  # of attention over half precision, against the numbers as they are stored
SHAPES = [(1, 64, 16), (3, 80, 32), (4, 128, 64), (5, 96, 48), (8, 192, 128), (16, 256, 256)]  # H/G, D, block size
SETS = ["disjoint", "predicted in selected", "selected in predicted", "equal", "overlapping", "none predicted",
        "none missed", "neither"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh buffers hold NaN."""
    empty = torch.empty

    def filled(*shape, **options):
        fresh = empty(*shape, **options)
        return fresh.fill_(math.nan) if fresh.dtype.is_floating_point else fresh

    monkeypatch.setattr(torch, "empty", filled)


class Scene(NamedTuple):
    """B sequences of different lengths; k and v [B, G, tokens, D] hold the numbers of every token there is."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    length: list
    size: int

    @property
    def blocks(self):
        return [-(-length // self.size) for length in self.length]

    def cache(self, blocks=None, view="pages"):
        """A PagedKV with NaN wherever `blocks` (None = all) name no token, and nonsense in the table past the end."""
        batch, kv_heads, tokens, dim = self.k.shape
        table = -(-tokens // self.size) + 1
        pages = batch * table + 2
        draw = torch.Generator().manual_seed(1)
        page_table = torch.randperm(pages, generator=draw)[:batch * table].reshape(batch, table).int()
        shape = {"pages": (2, pages, kv_heads, self.size, dim), "tokens first": (2, pages, self.size, kv_heads, dim),
                 "side by side": (pages, kv_heads, self.size, 2, dim), "wide": (2, pages, kv_heads, self.size, dim + 8),
                 }[view]
        both = torch.full(shape, math.nan, dtype=self.k.dtype)
        k, v = {"pages": lambda: both, "tokens first": lambda: both.transpose(2, 3),
                "side by side": lambda: both.permute(3, 0, 1, 2, 4), "wide": lambda: both[..., :dim]}[view]()
        for b, g in itertools.product(range(batch), range(kv_heads)):
            for n in range(self.blocks[b]) if blocks is None else [n for n in blocks[b, g].tolist() if n >= 0]:
                here = slice(n * self.size, min((n + 1) * self.size, self.length[b]))
                k[page_table[b, n], g, :here.stop - here.start] = self.k[b, g, here]
                v[page_table[b, n], g, :here.stop - here.start] = self.v[b, g, here]
        for b in range(batch):
            page_table[b, self.blocks[b]:] = torch.tensor([2**31 - 1, -9])[b % 2]
        return PagedKV(k, v, page_table, torch.tensor(self.length, dtype=torch.int32))

    def truth(self, blocks=None):
        """Attention over the listed blocks' tokens (None = all) in float64."""
        (batch, heads, dim), kv_heads = self.q.shape, self.k.shape[1]
        out, lse = torch.zeros(batch, heads, dim).double(), torch.full((batch, heads), -INF).double()
        for b, g in itertools.product(range(batch), range(kv_heads)):
            token = torch.arange(self.length[b])
            if blocks is not None:
                token = token[torch.isin(token // self.size, blocks[b, g])]
            if token.numel():
                group = slice(g * heads // kv_heads, (g + 1) * heads // kv_heads)
                logits = self.q[b, group].double() @ self.k[b, g, token].double().T / math.sqrt(dim)
                lse[b, group] = logits.logsumexp(-1)
                out[b, group] = logits.softmax(-1) @ self.v[b, g, token].double()
        return Partial(out, lse)


def scene(length, group=4, dim=64, size=16, *, kv_heads=2, dtype=torch.float32, logit=16.0, seed=0):
    """Random keys and values; queries scaled so that no logit exceeds `logit`."""
    draw, shape = torch.Generator().manual_seed(seed), (len(length), kv_heads, max(length), dim)
    k, v = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
    q = torch.randn(len(length), kv_heads * group, dim, generator=draw)
    logits = torch.einsum("bgrd,bgtd->bgrt", q.unflatten(1, (kv_heads, group)), k.float()) / math.sqrt(dim)
    return Scene((q * min(1e6, logit / logits.abs().max().item())).to(dtype), k, v, length, size)


def lists(scene, choose):
    """int32 [B, G, S] of choose(blocks of the sequence, index of the list), shuffled, -1 in slots anywhere."""
    draw = np.random.default_rng(2)
    rows = [[draw.permutation(choose(blocks, 7 * b + g)) for g in range(scene.k.shape[1])]
            for b, blocks in enumerate(scene.blocks)]
    out = np.full((len(rows), len(rows[0]), 2 + max(len(row) for some in rows for row in some)), -1, np.int32)
    for b, g in np.ndindex(out.shape[:2]):
        out[b, g, np.sort(draw.permutation(out.shape[2])[:len(rows[b][g])])] = rows[b][g]
    return torch.from_numpy(out)


def chosen(kind, blocks, i):
    """Predicted and selected blocks of list i, as sets."""
    draw = np.random.default_rng([SETS.index(kind), blocks, i])
    order = draw.permutation(blocks).tolist()
    a, b = sorted(draw.integers(0, blocks + 1, 2).tolist())
    first, second = set(order[:a]), set(order[a:b])
    return {"disjoint": (first, second), "predicted in selected": (first, first | second),
            "selected in predicted": (first | second, first), "equal": (second, second),
            "overlapping": (set(order[:b]), set(order[a // 2:])), "none predicted": (set(), second),
            "none missed": (set(order), second), "neither": (set(), set())}[kind]


def close(ours, truth, bound):
    """Every head's out within `bound` of its largest number, its lse within `bound` of itself or of 1."""
    out, lse = ours.out.double(), ours.lse.double()
    assert ours.out.shape == truth.out.shape and ours.lse.shape == truth.lse.shape
    error = (out - truth.out).abs().amax(-1) / truth.out.abs().amax(-1).clamp(min=1e-30)
    assert (error <= bound).all(), error.max()
    nothing = truth.lse == -INF
    assert torch.equal(lse == -INF, nothing) and (out[nothing] == 0).all()
    error = (lse - truth.lse)[~nothing].abs() / truth.lse[~nothing].abs().clamp(min=1)
    assert (error <= bound).all(), error.max()


def exact(scene, predicted, selected, impl, group=1):
    """Attention over the selected blocks by way of the predicted ones: what PRR does in its exact mode."""
    kept = (predicted.unsqueeze(-1) == selected.unsqueeze(-2)).any(-1) & (predicted >= 0)
    missed = torch.where((selected.unsqueeze(-1) == predicted.unsqueeze(-2)).any(-1), -1, selected)
    both = torch.cat([predicted, missed], 2)
    kv = scene.cache(both)
    parts = ops.attend_groups(scene.q, kv, predicted, group, impl=impl)
    return ops.repair(ops.merge(parts, kept.permute(2, 0, 1), impl=impl), scene.q, kv, missed, impl=impl)


# --- against float64

@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "dim", "size"), SHAPES)
def test_attention_over_listed_blocks(group, dim, size, dtype, impl):
    bound = SINGLE if dtype == torch.float32 else HALF
    for length in ([1, 63, 1000], [16, 64, 0]):
        some = scene(length, group, dim, size, dtype=dtype)
        listed = lists(some, lambda blocks, i: np.arange(blocks)[i % 2::2])
        ours = ops.attend(some.q, some.cache(listed), listed, impl=impl)
        assert ours.out.dtype == ours.lse.dtype == torch.float32
        close(ours, some.truth(listed), bound)
        close(ops.dense(some.q, some.cache(), impl=impl), some.truth(), bound)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 16])
def test_attention_over_listed_blocks_in_every_shape(group, dim, size, dtype):
    test_attention_over_listed_blocks(group, dim, size, dtype, "cpu")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("length", "size", "bound"), [(4097, 64, SINGLE), (65536, 16, 3e-6), (65535, 256, 3e-6)])
def test_attention_over_long_sequences(length, size, bound, impl):
    some = scene([length], 4, 64, size, kv_heads=1)
    close(ops.dense(some.q, some.cache(), impl=impl), some.truth(), bound)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", SETS)
def test_repair_and_exact_whatever_was_predicted(kind, impl):
    for length, group, dim, size in (([1, 63, 1000], 3, 64, 16), ([4097], 4, 128, 64)):
        some = scene(length, group, dim, size)
        predicted, selected, missed, either = (
            lists(some, lambda blocks, i, of=of: sorted(of(*chosen(kind, blocks, i)))) for of in (
                lambda p, a: p, lambda p, a: a, lambda p, a: a - p, lambda p, a: a | p))
        kv = some.cache(either)
        state = ops.attend(some.q, kv, predicted, impl=impl)
        before = Partial(*(x.clone() for x in state))
        union = ops.repair(state, some.q, kv, missed, impl=impl)
        close(union, some.truth(either), SINGLE)
        assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
        close(exact(some, predicted, selected, impl), some.truth(selected), SINGLE)


@pytest.mark.parametrize("impl", IMPLS)
def test_merge_and_repair_add_less_than_the_last_digits(impl):
    """From states right to float64, against merging in float64: for repair with what attending to its blocks alone
    gives, whose own error is `SINGLE`'s affair."""
    some = scene([1000, 600], 4, 128, 64)
    first, second = (lists(some, lambda blocks, i, r=r: np.arange(blocks)[r::2]) for r in (0, 1))
    state = Partial(*(x.float() for x in some.truth(first)))
    alone = ops.attend(some.q, some.cache(second), second, impl=impl)
    expected = reference.merge(Partial(*(torch.stack(x).double() for x in zip(state, alone, strict=True))))
    close(ops.repair(state, some.q, some.cache(second), second, impl=impl), expected, MERGED)
    close(expected, some.truth(), SINGLE)
    parts = Partial(*(torch.stack(x).float() for x in zip(some.truth(first), some.truth(second), strict=True)))
    merged = ops.merge(parts, impl=impl)
    close(merged, reference.merge(Partial(*(x.double() for x in parts))), MERGED)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_largest_logit_only_among_the_missed(impl):
    some = scene([1000], 4, 64, 16)
    some.k[0, :, 500:516] = 0
    some.k[0, 0, 505], some.k[0, 1, 505] = some.q[0, 0] * 3, some.q[0, 4] * 3
    predicted = lists(some, lambda blocks, i: [n for n in range(blocks) if n not in (31, 32)])
    missed = lists(some, lambda blocks, i: [31, 32])
    state = ops.attend(some.q, some.cache(predicted), predicted, impl=impl)
    close(ops.repair(state, some.q, some.cache(missed), missed, impl=impl), some.truth(), SINGLE)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_ten_thousand(sign, impl):
    some = scene([1000], 4, 64, 16, logit=1e4)
    for h in range(8):  # all of the largest size, with the same sign or nearly so
        some.k[0, h // 4, h::7] = sign * some.q[0, h] / some.q[0, h].norm() ** 2 * 8e4 * (1 - 1e-5 * h)
    first, second = (lists(some, lambda blocks, i, r=r: np.arange(blocks)[r::2]) for r in (0, 1))
    state = ops.attend(some.q, some.cache(first), first, impl=impl)
    for ours in (ops.repair(state, some.q, some.cache(second), second, impl=impl),
                 ops.dense(some.q, some.cache(), impl=impl)):
        truth = some.truth()
        assert truth.lse.abs().max() > 5e3
        assert ours.out.isfinite().all() and ours.lse.isfinite().all()
        assert ((ours.lse - truth.lse).abs() <= 1e-6 * truth.lse.abs()).all()
        assert ((ours.out - truth.out).abs().amax(-1) <= 2e-3 * truth.out.abs().amax(-1)).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_equal_logits_average_the_values(impl):
    some = scene([100], 4, 64, 16)
    some.q[:] = 0
    ours = ops.dense(some.q, some.cache(), impl=impl)
    close(ours, Partial(some.v.double().mean(2).repeat_interleave(4, 1), torch.full((1, 8), math.log(100)).double()),
          SINGLE)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("view", ["tokens first", "side by side", "wide"])
def test_strided_views_of_the_cache(view, impl):
    some = scene([63, 130], 3, 64, 16)
    listed = lists(some, lambda blocks, i: np.arange(blocks)[i % 2::2])
    kv = some.cache(listed, view)
    assert not kv.k.is_contiguous()
    close(ops.attend(some.q, kv, listed, impl=impl), some.truth(listed), SINGLE)
    turned = some._replace(q=some.q.transpose(0, 1).contiguous().transpose(0, 1))
    close(ops.attend(turned.q, kv, listed.transpose(1, 2).contiguous().transpose(1, 2), impl=impl),
          some.truth(listed), SINGLE)


# --- groups and merge

@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("group", [1, 3, 8, 100])
def test_groups_are_attention_over_their_slots(group, impl):
    some = scene([1, 63, 1000], 5, 64, 64)
    listed = lists(some, lambda blocks, i: np.arange(blocks))
    parts = ops.attend_groups(some.q, some.cache(), listed, group, impl=impl)
    split = listed.split(group, 2)
    assert parts.out.shape == (len(split), *some.q.shape)
    for part, slots in enumerate(split):
        close(Partial(parts.out[part], parts.lse[part]), some.truth(slots), SINGLE)
    close(ops.merge(parts, impl=impl), some.truth(), SINGLE)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_does_not_count_may_hold_anything(impl):
    some = scene([300, 300], 4, 64, 16)
    listed = torch.arange(19, dtype=torch.int32).expand(2, 2, 19).contiguous()
    parts = ops.attend_groups(some.q, some.cache(), listed, 1, impl=impl)
    keep = torch.rand(19, 2, 2, generator=torch.Generator().manual_seed(3)) < 0.5
    keep[:, 1, 1] = False
    dropped = ~keep.repeat_interleave(4, 2)
    parts.out[dropped], parts.lse[dropped] = math.nan, math.nan
    ours = ops.merge(parts, keep, impl=impl)
    close(ours, some.truth(torch.where(keep.permute(1, 2, 0), listed, -1)), SINGLE)
    assert (ours.out[1, 4:] == 0).all() and (ours.lse[1, 4:] == -INF).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_at_all(impl):
    some = scene([40], 4, 64, 16)
    kv, none = some.cache(torch.full((1, 2, 1), -1)), torch.empty(1, 2, 0, dtype=torch.int32)
    parts = ops.attend_groups(some.q, kv, none, 4, impl=impl)
    assert parts.out.shape == (0, 1, 8, 64) and parts.lse.shape == (0, 1, 8)
    state = ops.merge(parts, impl=impl)
    for ours in (state, ops.attend(some.q, kv, none, impl=impl), ops.repair(state, some.q, kv, none, impl=impl),
                 ops.attend(some.q, kv, none.new_full((1, 2, 3), -1), impl=impl),
                 ops.dense(some.q, kv._replace(length=kv.length * 0), impl=impl)):
        assert (ours.out == 0).all() and (ours.lse == -INF).all() and ours.out.shape == some.q.shape


# --- properties

@pytest.mark.parametrize("impl", IMPLS)
def test_any_predicted_set_gives_the_same_exact_output(impl):
    some = scene([180, 77], 3, 16, 16)
    subset = st.lists(st.integers(0, 2**12 - 1), min_size=4, max_size=4)  # a bit per block, for each list

    @settings(max_examples=200, deadline=None)
    @given(subset, subset, st.integers(1, 4))
    def same(predicted, selected, slots):
        def of(bits):
            return lists(some, lambda blocks, i: [n for n in range(blocks) if bits[i % 4] >> n & 1])

        predicted, selected = of(predicted), of(selected)
        direct = ops.attend(some.q, some.cache(selected), selected, impl=impl)
        close(exact(some, predicted, selected, impl), Partial(*(x.double() for x in direct)), SINGLE)
        kv = some.cache(torch.cat([predicted, selected], 2))
        parts = ops.attend_groups(some.q, kv, predicted, slots, impl=impl)
        whole = ops.attend(some.q, kv, predicted, impl=impl)
        close(ops.merge(parts, impl=impl), Partial(*(x.double() for x in whole)), SINGLE)

    same()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_order_of_blocks_changes_only_rounding(impl):
    some = scene([1000], 4, 64, 16)
    listed = lists(some, lambda blocks, i: np.arange(blocks)[::2])
    one = ops.attend(some.q, some.cache(listed), listed, impl=impl)
    for seed in range(5):
        order = torch.randperm(listed.shape[2], generator=torch.Generator().manual_seed(seed))
        two = ops.attend(some.q, some.cache(listed), listed[:, :, order], impl=impl)
        close(two, Partial(*(x.double() for x in one)), MERGED)


@pytest.mark.parametrize("impl", IMPLS)
def test_neighbours_in_a_batch_do_not_matter(impl):
    some = scene([1000, 63, 1, 300], 4, 64, 16)
    listed = lists(some, lambda blocks, i: np.arange(blocks)[i % 2::2])
    kv = some.cache(listed)
    together = ops.attend(some.q, kv, listed, impl=impl)
    for b in range(4):
        alone = ops.attend(some.q[b:b + 1], kv._replace(page_table=kv.page_table[b:b + 1], length=kv.length[b:b + 1]),
                           listed[b:b + 1], impl=impl)
        close(alone, Partial(*(x[b:b + 1].double() for x in together)), 0 if impl == "cpu" else MERGED)
    spoiled = some.q.clone()
    spoiled[1:] = math.nan
    again = ops.attend(spoiled, kv, listed, impl=impl)
    assert torch.equal(again.out[0], together.out[0]) and torch.equal(again.lse[0], together.lse[0])
    assert again.out[1:].isnan()[together.lse[1:] > -INF].all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_in_a_token_that_counts_is_seen(where, impl):
    some = scene([100], 4, 64, 16)
    getattr(some, where)[0, 1, 50, 3] = math.nan
    ours = ops.dense(some.q, some.cache(), impl=impl)
    assert ours.out[0, :4].isfinite().all()
    assert ours.out[0, 4:, 3].isnan().all()


def test_float64_queries_give_float64():
    some = scene([1000], 4, 64, 16)
    ours = ops.dense(some.q.double(), some.cache(), impl="reference")
    assert ours.out.dtype == torch.float64
    close(ours, some.truth(), 1e-13)


# --- how wide registers are

def edited(module, folder, right="", wrong=""):
    """`module` anew from a copy of its source, in which `wrong` stands for `right`."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert not right or source.count(right) == 1
    path = folder / f"{module.__name__.rpartition('.')[2]}_edited.py"
    path.write_text(source.replace(right, wrong) if right else source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_vectors_of_the_other_width_give_the_same(tmp_path, monkeypatch):
    """Sixteen lanes, for AVX-512, where these are eight, and the other way round: LLVM takes any on any machine."""
    q, keys = torch.randn(2, 10, 80), torch.randn(2, 2, 63, 80)
    scores = ops.quest_scores(q, keys - 1, keys), ops.quest_scores(q, keys - 1, keys, group="mean")
    lanes = edited(lanes_cpu, tmp_path, "LANES = 16 if", f"LANES = {24 - lanes_cpu.LANES} if True or")
    assert lanes.LANES + lanes_cpu.LANES == 24
    monkeypatch.setitem(sys.modules, lanes_cpu.__name__, lanes)
    for module in (attention_cpu, cpu):
        monkeypatch.setattr(kernels, module.__name__.rpartition(".")[2], edited(module, tmp_path))
    test_attention_over_listed_blocks(5, 80, 32, torch.float32, "cpu")
    for group, before in zip(("max", "mean"), scores, strict=True):
        torch.testing.assert_close(ops.quest_scores(q, keys - 1, keys, group=group), before, rtol=1e-5, atol=1e-4)


def test_machine_code_of_another_cpu_or_of_other_lanes_is_not_taken(monkeypatch):
    cache, codegen = attention_cpu._attend._cache, cpu_target.target_context.codegen()
    own = cache._index_key((), codegen)
    assert cache._index_key((), codegen) == own
    for change in ((numba.config, "CPU_NAME", "generic"), (codegen, "_tm_features", "+avx")):
        with monkeypatch.context() as patched:
            patched.setattr(*change)
            assert cache._index_key((), codegen) != own
    digest = hashlib.sha256(Path(lanes_cpu.__file__).read_bytes()).hexdigest()
    assert digest in cache._cache_file._source_stamp


# --- what the tests would see

@pytest.mark.parametrize(("right", "wrong"), [
    ("for d in range(dim):\n                    out[part", "for d in range(dim - 1):\n                    out[part"),
    ("min(size, length[batch] - block * size)", "size"),
    ("(0, 0) if block < 0 else (table[batch, block]", "(0, 0) if block < -1 else (table[batch, max(0, block)]"),
], ids=["a missing store", "a tail read", "an extra page read"])
def test_a_planted_fault_is_seen(right, wrong, tmp_path, monkeypatch):
    spoiled = edited(attention_cpu, tmp_path, right, wrong)
    monkeypatch.setattr(kernels, "attention_cpu", spoiled)
    monkeypatch.setitem(sys.modules, attention_cpu.__name__, spoiled)
    with pytest.raises(AssertionError):
        test_attention_over_listed_blocks(4, 128, 64, torch.float32, "cpu")
