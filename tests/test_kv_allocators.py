"""Allocators: the real vLLM's ids, each policy's rule, and the contract all keep under any sequence of calls."""

import json

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from artifact.kv import allocators
from artifact.kv.allocators import Allocator, OutOfBlocks
from artifact.kv.pool import FOLLOW
from artifact.kv.replay import replay
from artifact.study import paths

RECORDED = json.loads((paths.data_dir() / "recorded/reference/vllm_block_tables.json").read_text())["traces"]


@pytest.mark.parametrize(("policy", "version"), [("paged", "v0_2_7"), ("vllm-v1", "v0_20_0")])
@pytest.mark.parametrize("entry", RECORDED, ids=lambda e: f"seed{e['seed']}")
def test_the_real_vllms_ids_in_their_order(entry, policy, version, tmp_path):
    operations = tmp_path / "ops.json"
    operations.write_text(json.dumps({k: v for k, v in entry.items() if not k.startswith("vllm")}))
    assert replay(operations, policy) == entry[f"vllm_{version}_new_blocks"]


def test_paged_is_a_stack():
    pool = Allocator("paged", 8)
    assert pool.admit("a", 3) == [7, 6, 5]
    assert pool.admit("b", 2) == [4, 3]
    pool.release("a")  # 7, 6, 5 go back in table order: 5 comes out first
    assert pool.admit("c", 4) == [5, 6, 7, 2]


def test_pim_aware_fills_its_region_first():
    pool = Allocator("pim-aware", 32, blocks_per_region=8)
    assert pool.admit("a", 3) == [0, 1, 2]
    assert pool.admit("b", 10) == [8, 9, 10, 11, 12, 13, 14, 15, 16, 17]  # a's region is not empty: it is left to a
    assert pool.grow("a", 6) == [3, 4, 5, 6, 7, 24]  # region 2 is b's plan; 3 is the lowest empty one
    assert pool.grow("b", 2) == [18, 19]


def test_pim_aware_reuses_an_emptied_region_and_degrades_to_the_roomiest():
    pool = Allocator("pim-aware", 16, blocks_per_region=4)
    for name in "abcd":
        pool.admit(name, 2)
    assert pool.table("d") == [12, 13]
    assert pool.admit("e", 3) == [2, 3, 6]  # no empty region: partial ones, equally roomy, lowest first
    pool.release("d")
    assert pool.admit("f", 1) == [12]


def test_greedy_plans_nothing():
    planned, greedy = (Allocator("pim-aware", 16, blocks_per_region=4, plan=plan) for plan in allocators.PLANS)
    assert planned.admit("a", 5) == greedy.admit("a", 5) == [0, 1, 2, 3, 4]


def test_contiguous_takes_the_lowest_span_and_merges():
    pool = Allocator("contiguous", 20)
    assert pool.admit("a", 2, footprint=5) == [0, 1]
    assert pool.admit("b", 5) == [5, 6, 7, 8, 9]
    assert pool.admit("c", 5) == [10, 11, 12, 13, 14]
    assert pool.grow("a", 3) == [2, 3, 4]
    with pytest.raises(OutOfBlocks, match="0 can be had"):
        pool.grow("a", 1)
    pool.release("a")
    pool.release("c")
    with pytest.raises(OutOfBlocks, match="no free span"):
        pool.admit("d", 1, footprint=11)  # 15 are free, in spans of 5 and 10
    pool.release("b")
    assert pool.admit("d", 20) == list(range(20))


def test_random_repeats_with_its_seed():
    first, again, other = (Allocator("random", 64, seed=seed).admit(0, 20) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(set(first)) == sorted(first)


def test_a_fork_shares_until_both_are_gone():
    pool = Allocator("paged", 8)
    pool.admit("parent", 3)
    assert pool.fork("parent", "child") == pool.table("parent")
    assert pool.free_blocks == 5
    pool.release("parent")
    assert pool.free_blocks == 5
    with pytest.raises(ValueError, match="unknown sequence 'parent'"):
        pool.fork("parent", "late")
    pool.release("child")
    assert pool.free_blocks == 8


@pytest.mark.parametrize("policy", allocators.NAMES)
def test_misuse_is_refused_and_changes_nothing(policy):
    pool = Allocator(policy, 16, blocks_per_region=4)
    usable = 16 - allocators.reserved(policy)
    pool.admit("a", 3)
    for misuse, complaint in (
        (lambda: pool.admit("a", 1), "'a' is already admitted"),
        (lambda: pool.grow("b", 1), "unknown sequence 'b'"),
        (lambda: pool.release("b"), "unknown sequence 'b'"),
        (lambda: pool.fork("b", "c"), "unknown sequence 'b'"),
        (lambda: pool.fork("a", "a"), "already admitted"),
        (lambda: pool.admit("b", -1), "blocks is -1"),
        (lambda: pool.grow("a", 1.5), "blocks is 1.5"),
        (lambda: pool.admit("b", 4, footprint=2), "footprint is 2"),
    ):
        with pytest.raises(ValueError, match=complaint):
            misuse()
    for growth in (lambda: pool.grow("a", 14), lambda: pool.admit("b", 14)):
        with pytest.raises(OutOfBlocks):
            growth()
    assert pool.free_blocks == usable - 3 and len(pool.table("a")) == 3
    pool.release("a")
    with pytest.raises(ValueError, match="unknown sequence 'a'"):
        pool.release("a")
    assert pool.free_blocks == usable and pool.num_blocks == 16


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ({"policy": "buddy"}, "unknown allocator 'buddy'; allowed: paged, pim-aware, contiguous, random, vllm-v1"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"blocks_per_region": 0}, "blocks_per_region is 0"),
        ({"policy": "pim-aware", "num_blocks": 17, "blocks_per_region": 8}, "a multiple of 8, whole regions"),
        ({"plan": "worstfit"}, "unknown plan 'worstfit'"),
    ],
)
def test_wrong_pools_are_refused(how, complaint):
    with pytest.raises(ValueError, match=complaint):
        Allocator(**({"policy": "paged", "num_blocks": 16} | how))


def test_pools_are_padded_for_regions_only():
    assert allocators.padded("paged", 3161, 8) == 3161
    assert allocators.padded("pim-aware", 3161, 8) == 3168


class Contract(RuleBasedStateMachine):
    """Any calls in any order against a plain model: who owns what, what is free, and whose content goes next.

    Contents are paths in a small tree, so that sequences begin alike and part; a key stands for a path.
    """

    BLOCKS, REGION, AHEAD = 24, 4, 3
    POLICIES = allocators.NAMES

    @initialize(data=st.data(), plan=st.sampled_from(allocators.PLANS), seed=st.integers(0, 9))
    def start(self, data, plan, seed):
        self.policy = data.draw(st.sampled_from(self.POLICIES))
        frees = data.draw(st.sampled_from(allocators.FREES)) if self.policy == "paged" else "ordered"
        self.pool = Allocator(self.policy, self.BLOCKS, blocks_per_region=self.REGION, seed=seed, plan=plan,
                              frees=frees, ahead=self.AHEAD, slots=64)
        self.usable = self.BLOCKS - allocators.reserved(self.policy)
        self.caches = self.policy in allocators.CACHING
        self.tables, self.reserve, self.paths, self.keys, self.next = {}, {}, {}, {}, 0

    def _free(self):
        return self.usable - len({b for table in self.tables.values() for b in table})

    def _room(self, seq):
        return self.reserve[seq] - len(self.tables[seq]) if self.policy == "contiguous" else self._free()

    def _content(self, path):
        return [self.keys.setdefault(tuple(path[: i + 1]), len(self.keys)) for i in range(len(path))]

    def _state(self):
        p = self.pool
        arrays = [value.tobytes() for value in p._pool._values.values() if isinstance(value, np.ndarray)]
        return arrays, {k: list(v) for k, v in p._tables.items()}, dict(p._slots), list(p._spare), dict(p._known_keys)

    def _given_up(self, before, touched, taken):
        """What left the cache since `before`, but for what was found in it, was next in order; and no more than due."""
        kept = [block for block in before if block not in touched]
        after = [block for block in self.pool.cached() if block not in touched]
        assert kept[len(kept) - len(after) :] == after
        if self.policy in ("vllm-v1", "vllm-v1-region"):
            assert len(kept) - len(after) <= taken + (self.AHEAD if self.policy == "vllm-v1-region" else 0)

    @rule(blocks=st.integers(0, 8), more=st.integers(0, 4), path=st.lists(st.integers(0, 1), max_size=8))
    def admit(self, blocks, more, path):
        if len(self.tables) == 64:
            return
        path = path[:blocks]
        before, state = self.pool.cached(), self._state()
        content = np.array(self._content(path), dtype=np.int64)
        follow = self.pool._pool.tree[:, FOLLOW].tolist()
        hits = allocators.found(self.pool._pool, content, content.size)[0] if self.caches else 0
        try:
            ids = self.pool.admit(self.next, blocks, footprint=blocks + more, content=content.tolist())
        except OutOfBlocks:
            assert blocks > self._free() or self.policy == "contiguous"
            assert self._state() == state
            return
        assert len(ids) == blocks
        owned = {b for table in self.tables.values() for b in table}
        assert not owned & set(ids[hits:])
        assert set(ids[:hits]) <= owned | set(before)
        touched = set(ids[:hits])
        block = follow[ids[hits - 1]] if hits and follow else -1
        while block >= 0:  # the rest of a node that is split counts as used, as in SGLang
            touched.add(block)
            block = follow[block]
        self._given_up(before, touched, blocks - hits)
        self.tables[self.next], self.reserve[self.next], self.paths[self.next] = ids, blocks + more, path
        self.next += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), blocks=st.integers(0, 8), path=st.lists(st.integers(0, 1), max_size=4))
    def grow(self, data, blocks, path):
        seq = data.draw(st.sampled_from(sorted(self.tables)))
        path = path[: len(self.tables[seq]) + blocks - len(self.paths[seq])]
        content = self._content(self.paths[seq] + path)[len(self.paths[seq]) :]
        before, state = self.pool.cached(), self._state()
        try:
            ids = self.pool.grow(seq, blocks, content=content)
        except OutOfBlocks:
            assert blocks > self._room(seq)
            assert self._state() == state
            return
        assert len(ids) == blocks
        assert not {b for table in self.tables.values() for b in table} & set(ids)
        self._given_up(before, set(), blocks)
        self.tables[seq], self.paths[seq] = self.tables[seq] + ids, self.paths[seq] + path

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        seq = data.draw(st.sampled_from(sorted(self.tables)))
        before = self.pool.cached()
        self.pool.release(seq)
        mine = self.tables.pop(seq)
        owned = {b for table in self.tables.values() for b in table}
        after = self.pool.cached()
        assert set(before) <= set(after) <= set(before) | (set(mine) - owned)
        if self.policy in ("vllm-v1", "vllm-v1-region"):
            fresh = [b for b in mine[::-1] if b not in owned and self.pool._pool.keys[b] >= 0]
            assert after == before + fresh
        del self.reserve[seq], self.paths[seq]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(0, 3))
    def give_the_last_back(self, data, count):
        seq = data.draw(st.sampled_from(sorted(self.tables)))
        kept = max(0, len(self.tables[seq]) - count)
        if self.caches and any(self.pool._pool.keys[b] >= 0 for b in self.tables[seq][kept:]):
            with pytest.raises(ValueError, match="is known"):
                self.pool.release(seq, self.tables[seq][kept:])
            return
        self.pool.release(seq, self.tables[seq][kept:])
        self.tables[seq] = self.tables[seq][:kept]
        self.paths[seq] = self.paths[seq][:kept]

    @precondition(lambda self: self.tables and self.policy != "contiguous" and len(self.tables) < 64)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.tables)))
        self.tables[self.next] = self.pool.fork(parent, self.next)
        self.reserve[self.next], self.paths[self.next] = 0, list(self.paths[parent])
        assert self.tables[self.next] == self.tables[parent]
        self.next += 1

    @rule(data=st.data())
    def misuse(self, data):
        """The same exception from every policy, and nothing has changed."""
        gone, living = self.next, sorted(self.tables)
        seq = data.draw(st.sampled_from(living)) if living else None
        calls = [lambda: self.pool.release(gone), lambda: self.pool.grow(gone, 1), lambda: self.pool.fork(gone, -1),
                 lambda: self.pool.admit(gone, -1), lambda: self.pool.admit(gone, 2, content=[1, 2, 3])]
        if living:
            foreign = next(b for b in range(self.BLOCKS + 1) if b not in self.tables[seq][-1:])
            calls += [lambda: self.pool.admit(seq, 1), lambda: self.pool.fork(seq, seq),
                      lambda: self.pool.release(seq, [foreign]), lambda: self.pool.grow(seq, 1, content=[-1]),
                      lambda: self.pool.release(seq, [*self.tables[seq], 0])]
        before = self._state()
        for call in calls:
            with pytest.raises(ValueError):
                call()
        for call in [lambda: self.pool.admit(gone, self.BLOCKS + 1)] + [
                lambda: self.pool.grow(seq, self.BLOCKS + 1)] * bool(living):
            with pytest.raises(OutOfBlocks):
                call()
        assert self._state() == before

    @invariant()
    def nothing_leaks_and_nobody_shares_unasked(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.free_blocks == self._free()
        assert self.pool.num_blocks == self.BLOCKS
        for seq, table in self.tables.items():
            assert self.pool.table(seq) == table
            assert len(set(table)) == len(table)
            assert all(allocators.reserved(self.policy) <= b < self.BLOCKS for b in table)

    @invariant()
    def the_books_are_right(self):
        if not hasattr(self, "pool"):
            return
        p = self.pool._pool
        owners = np.bincount([b for table in self.tables.values() for b in table], minlength=self.BLOCKS)
        reserved = allocators.reserved(self.policy)
        assert p.refs[reserved:].tolist() == owners[reserved:].tolist()
        cached = set(self.pool.cached())
        loose = (owners == 0) & ~np.isin(np.arange(self.BLOCKS), list(cached)) & (np.arange(self.BLOCKS) >= reserved)
        if self.policy != "vllm-v1":
            assert p.tally["loose"][0] == loose.sum()
        if self.policy in allocators.REGIONAL:
            rooms = loose.reshape(-1, self.REGION).sum(axis=1)
            assert p.rooms.tolist() == rooms.tolist()
            for region, room in enumerate(rooms):
                assert [int(p.ranks[r, 0]) >> region & 1 for r in range(self.REGION + 1)] == \
                    [int(r == room) for r in range(self.REGION + 1)]
            taken = [not int(p.bits[b // self.REGION, 0]) >> b % self.REGION & 1 for b in range(self.BLOCKS)]
            assert taken == (~loose).tolist()

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for seq in self.tables:
            self.pool.release(seq)
        assert self.pool.free_blocks == self.usable


class RegionContract(Contract):
    """The same for the region-aware forms of the engines' queues."""

    POLICIES = ("vllm-v1-region", "sglang-region")


Contract.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
RegionContract.TestCase.settings = settings(max_examples=200, stateful_step_count=100, deadline=None)
TestContract = Contract.TestCase
TestRegionContract = RegionContract.TestCase


def test_a_released_block_never_goes_to_two(tmp_path):
    """New ids are disjoint from every living table: the model above compares counts, this one owners."""
    for policy in allocators.NAMES:
        pool = Allocator(policy, 64, blocks_per_region=8, seed=3)
        living = {}
        for seq in range(200):
            if len(living) > 6:
                gone = min(living)
                pool.release(gone)
                del living[gone]
            ids = pool.admit(seq, 1 + seq % 7)
            assert not set(ids) & {b for table in living.values() for b in table}, policy
            living[seq] = ids
