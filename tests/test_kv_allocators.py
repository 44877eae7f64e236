"""Allocators: the real vLLM's ids, each policy's rule, and the contract all keep under any sequence of calls."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from artifact.kv import allocators
from artifact.kv.allocators import Allocator, OutOfBlocks
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
    """Any calls in any order against a plain model: who owns what, and what is free."""

    BLOCKS, REGION = 24, 4

    @initialize(
        policy=st.sampled_from(allocators.NAMES), plan=st.sampled_from(allocators.PLANS), seed=st.integers(0, 9)
    )
    def start(self, policy, plan, seed):
        self.policy = policy
        self.pool = Allocator(policy, self.BLOCKS, blocks_per_region=self.REGION, seed=seed, plan=plan, slots=64)
        self.usable = self.BLOCKS - allocators.reserved(policy)
        self.tables, self.reserve, self.next = {}, {}, 0

    def _free(self):
        return self.usable - len({b for table in self.tables.values() for b in table})

    @rule(blocks=st.integers(0, 8), more=st.integers(0, 4))
    def admit(self, blocks, more):
        if len(self.tables) == 64:
            return
        try:
            ids = self.pool.admit(self.next, blocks, footprint=blocks + more)
        except OutOfBlocks:
            assert blocks > self._free() or self.policy == "contiguous"
            return
        assert len(ids) == blocks
        self.tables[self.next], self.reserve[self.next] = ids, blocks + more
        self.next += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), blocks=st.integers(0, 8))
    def grow(self, data, blocks):
        seq = data.draw(st.sampled_from(sorted(self.tables)))
        try:
            ids = self.pool.grow(seq, blocks)
        except OutOfBlocks:
            left = self.reserve[seq] - len(self.tables[seq]) if self.policy == "contiguous" else self._free()
            assert blocks > left
            return
        assert len(ids) == blocks
        self.tables[seq] = self.tables[seq] + ids

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        seq = data.draw(st.sampled_from(sorted(self.tables)))
        self.pool.release(seq)
        del self.tables[seq], self.reserve[seq]

    @precondition(lambda self: self.tables and self.policy != "contiguous" and len(self.tables) < 64)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.tables)))
        self.tables[self.next] = self.pool.fork(parent, self.next)
        self.reserve[self.next] = 0
        assert self.tables[self.next] == self.tables[parent]
        self.next += 1

    @invariant()
    def nothing_leaks_and_nobody_shares_unasked(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.free_blocks == self._free()
        assert self.pool.num_blocks == self.BLOCKS
        for seq, table in self.tables.items():
            assert self.pool.table(seq) == table
            assert len(set(table)) == len(table)
            assert all(0 <= b < self.BLOCKS for b in table)

    @invariant()
    def the_regions_book_is_right(self):
        if not hasattr(self, "pool") or self.policy != "pim-aware":
            return
        held = {b for table in self.tables.values() for b in table}
        p = self.pool._pool
        for region in range(self.BLOCKS // self.REGION):
            free = sum(b not in held for b in range(region * self.REGION, (region + 1) * self.REGION))
            assert p.rooms[region] == free
            assert bool(int(p.ranks[self.REGION, region >> 6]) >> (region & 63) & 1) == (free == self.REGION)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for seq in self.tables:
            self.pool.release(seq)
        assert self.pool.free_blocks == self.usable


Contract.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestContract = Contract.TestCase


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
