"""Selection methods: what they keep of the keys, what is always attended, what a step picks."""

import math

import numpy as np
import pytest
import torch

from artifact import ops
from artifact.dsa import topk
from artifact.dsa.infllm import InfLLM
from artifact.dsa.quest import Bounds, Quest
from artifact.study import bench

METHODS = [
    Quest(page=16, budget_blocks=5, group="mean"),
    Quest(page=64, budget_blocks=3, group="max"),
    Quest(page=16, budget_blocks=1, group="sum", dense_layers=0),
    InfLLM(local=2, topk=3, dense_len=-1),
    InfLLM(size=16, stride=8, block=8, init=2, local=0, topk=4),
]
INF = math.inf


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 63, 1000])
def test_keys_appended_are_keys_summarised(method, dtype, length):
    keys, q = drawn(2, 2, length + 150, 32, dtype=dtype), drawn(2, 6, 32, dtype=dtype, seed=1)
    metadata = method.summarize(keys[:, :, :length])
    for begin, end in ((0, 1), (1, 40), (40, 150)):
        metadata = method.append(metadata, keys[:, :, length + begin:length + end])
        whole = method.summarize(keys[:, :, :length + end])
        assert metadata.length.tolist() == [length + end] * 2
        torch.testing.assert_close(method.score(q, metadata), method.score(q, whole), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_sequences_of_unequal_length_are_as_if_alone(method):
    lengths = torch.tensor([300, 1, 157])
    keys, q, new = drawn(3, 2, 300, 32), drawn(3, 6, 32, seed=1), drawn(3, 2, 40, 32, seed=2)
    for b, length in enumerate(lengths):
        keys[b, :, length:] = math.nan
    together = method.append(method.summarize(keys, lengths), new)
    scores, forced = method.score(q, together), method.forced(together.length)
    chosen = method.select(scores, forced)
    for b, length in enumerate(lengths):
        alone = method.append(method.summarize(keys[b:b + 1, :, :length]), new[b:b + 1])
        own, must = method.score(q[b:b + 1], alone), method.forced(alone.length)
        assert torch.equal(scores[b, :, :own.shape[2]], own[0])
        assert (scores[b, :, own.shape[2]:] == -INF).all()
        assert forced[b].nonzero().tolist() == must[0].nonzero().tolist()
        for row, expected in zip(chosen[b], method.select(own, must)[0], strict=True):
            assert row[row >= 0].tolist() == expected[expected >= 0].tolist()


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("length", [1, 8, 63, 64, 65, 1000])
def test_a_step_picks_the_forced_blocks_and_the_best_of_the_others(method, length):
    keys, q = drawn(1, 2, length, 32), drawn(1, 6, 32, seed=1)
    metadata = method.summarize(keys)
    for impl in ("reference", "cpu"):
        scores, forced = method.score(q, metadata, impl=impl), method.forced(metadata.length)
        chosen = method.select(scores, forced, impl=impl)
        assert chosen.dtype == torch.int32
        assert chosen.shape == (1, 2, max(method.budget_blocks, int(forced.sum())))
        must = forced[0].nonzero().flatten().tolist()
        for g in range(2):
            order = np.argsort(-scores[0, g].numpy(), kind="stable")
            others = [i for i in order if i not in must and scores[0, g, i] > -INF]
            expected = sorted(must + others[:max(0, method.budget_blocks - len(must))])
            assert chosen[0, g].tolist() == expected + [-1] * (chosen.shape[2] - len(expected))


def test_quests_bounds_are_the_smallest_and_largest_key_also_of_a_partial_page():
    keys = drawn(2, 3, 37, 8)
    low, high, length = Quest(page=16).summarize(keys)
    assert low.shape == (2, 3, 3, 8) and length.tolist() == [37, 37]
    for n, page in enumerate(keys.split(16, 2)):
        assert torch.equal(low[:, :, n], page.amin(2)) and torch.equal(high[:, :, n], page.amax(2))


def test_bounds_of_64_tokens_are_those_of_four_times_16():
    keys = drawn(1, 2, 500, 8)
    low, high, _ = Quest(page=64).summarize(keys)
    fine_low, fine_high, _ = Quest(page=16).summarize(keys)
    for n in range(8):
        assert torch.equal(low[:, :, n], fine_low[:, :, 4 * n:4 * n + 4].amin(2))
        assert torch.equal(high[:, :, n], fine_high[:, :, 4 * n:4 * n + 4].amax(2))


def test_stored_bounds_score_like_those_of_keys():
    keys, q = drawn(1, 2, 160, 32), drawn(1, 6, 32, seed=1)
    kept = Quest().summarize(keys)
    stored = Bounds(kept.low.clone(), kept.high.clone(), torch.tensor([160]))
    assert torch.equal(Quest().score(q, stored), Quest().score(q, kept))


def test_keys_that_are_nan_or_infinite_reach_their_own_page_only():
    keys, q = drawn(1, 1, 160, 32), drawn(1, 2, 32, seed=1)
    method = Quest(budget_blocks=10, group="max")
    clean = method.score(q, method.summarize(keys))
    keys[0, 0, 20, 3], keys[0, 0, 40, 3] = math.nan, INF * q[0, 0, 3].sign()
    metadata = method.summarize(keys)
    scores = method.score(q, metadata)
    assert scores[0, 0, [1, 2]].tolist() == [-INF, INF]
    assert torch.equal(scores[0, 0, 3:], clean[0, 0, 3:])
    assert method.select(scores, method.forced(metadata.length))[0, 0].tolist() == [0, 2, 3, 4, 5, 6, 7, 8, 9, -1]


def test_quest_forces_the_page_of_the_newest_token():
    assert Quest(page=16).forced(torch.tensor([1, 16, 17, 0])).tolist() == [
        [True, False], [True, False], [False, True], [False, False]]


def test_infllm_forces_the_first_block_and_the_last_ones():
    forced = InfLLM().forced(torch.tensor([8192, 8193, 64 * 34, 64]))
    assert forced.shape == (4, 129)
    assert [row.nonzero().flatten().tolist() for row in forced] == [
        [0, *range(95, 128)], [0, *range(96, 129)], list(range(34)), [0]]


def test_infllms_defaults_are_96_blocks_of_which_62_are_chosen():
    method = InfLLM()
    keys, q = drawn(1, 1, 8200, 8), drawn(1, 2, 8, seed=1)
    metadata = method.summarize(keys)
    forced = method.forced(metadata.length)
    assert method.budget_blocks == 96 and int(forced.sum()) == 34
    chosen = method.select(method.score(q, metadata), forced)
    assert chosen.shape == (1, 1, 96) and (chosen >= 0).all()


def test_more_forced_blocks_than_the_budget_are_all_in_and_nothing_else():
    method = Quest(budget_blocks=2)
    forced = torch.tensor([[True, False, True, True], [False, True, False, False]])
    chosen = method.select(torch.tensor([[[0.0, 9.0, 0.0, 0.0]], [[1.0, 0.0, 2.0, 2.0]]]), forced)
    assert chosen.tolist() == [[[0, 2, 3]], [[1, 2, -1]]]


@pytest.mark.parametrize("value", [-INF, math.nan])
def test_blocks_without_a_score_are_in_only_when_forced(value):
    chosen = Quest(budget_blocks=3).select(torch.full((1, 2, 5), value), torch.tensor([[False] * 4 + [True]]))
    assert chosen.tolist() == [[[4, -1, -1]] * 2]


def test_equal_scores_go_to_the_lowest_index():
    assert topk(torch.zeros(1, 6), 3).tolist() == [[0, 1, 2]]
    assert topk(np.float32([1, 2, -0.0, 2, 0.0, 2]), 5).tolist() == [0, 1, 2, 3, 5]


def test_dense_layers_and_lengths():
    lengths = torch.tensor([16 * 128, 16 * 128 + 1])
    assert Quest().dense(1, lengths).tolist() == [True, True]
    assert Quest().dense(2, lengths).tolist() == [True, False]  # the budget is all there is
    assert InfLLM().dense(0, torch.tensor([8191, 8192])).tolist() == [True, False]
    assert InfLLM(dense_len=-1).dense(0, torch.tensor([1])).tolist() == [False]


@pytest.mark.parametrize(("make", "says"), [
    (lambda: Quest(page=0), "page is 0; allowed: at least 1"),
    (lambda: Quest(budget_blocks=0), "budget_blocks is 0; allowed: at least 1"),
    (lambda: Quest(dense_layers=-1), "dense_layers is -1; allowed: at least 0"),
    (lambda: Quest(group="median"), "group is 'median'; allowed: mean, max, sum"),
    (lambda: InfLLM(stride=0), "stride is 0; allowed: at least 1"),
    (lambda: InfLLM(size=40), "size is 40; allowed: multiples of stride 16"),
    (lambda: InfLLM(block=8), "block is 8; allowed: multiples of stride 16"),
    (lambda: InfLLM(topk=0), "topk is 0; allowed: at least 1"),
    (lambda: InfLLM(dense_len=-2), "dense_len is -2; allowed: at least -1"),
])
def test_a_wrong_method_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_the_bench_times_both_sides_and_only_right_answers(monkeypatch):
    frame = bench.selection(tokens=4096, sets=2, rounds=2).set_index("measure")
    assert set(frame["origin"]) == {"measured"} and (frame["value"] > 0).all()
    for dtype in ("float32", "bfloat16", "float16"):
        ours, read = (frame["value"][f"{dtype}: {what}"] for what in ("Quest's scores", "sum of the same metadata"))
        assert frame["value"][f"{dtype}: Quest's scores / sum"] == pytest.approx(ours / read)
    right = ops.quest_scores
    monkeypatch.setattr(ops, "quest_scores",
                        lambda *a, impl="cpu", **k: right(*a, impl=impl, **k) + (0.01 if impl == "cpu" else 0))
    with pytest.raises(ValueError, match="Quest, float32: .* off the reference; no time is given"):
        bench.selection(tokens=4096, sets=2, rounds=2)
