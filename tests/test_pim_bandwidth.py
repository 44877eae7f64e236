"""Commands and M1 to M4: counted by hand, against the oracle, and against the closed forms of the study."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact.pim import bandwidth, geometry, mapping, oracle

HBM3 = geometry.dram("hbm3-pim")


def _layout(name="host-cacheline", token_bytes=4096, block_tokens=16, blocks=512, memory=HBM3):
    order = mapping.address_map(name, memory)
    return order, bandwidth.layout(order, token_bytes, block_tokens, blocks)


def _keys(*bursts):
    """(row, bank) pairs of a 16-bank channel as the loops see them."""
    return np.array([row * 16 + bank for row, bank in bursts], dtype=np.int64)


def _window(keys, window):
    scratch = np.zeros(64, dtype=np.int64), np.zeros(64 * 16, dtype=np.int64), np.zeros(64, dtype=np.int64)
    return bandwidth._count_window(keys, keys.size, 16, window, *scratch)


@pytest.mark.parametrize(
    ("bursts", "window", "expected"),  # commands, misses
    [
        ([(0, b) for b in range(16)], 64, (1, 1)),  # one command opens one row
        ([(0, b) for b in range(16)] * 2, 64, (2, 1)),  # the second hits
        ([(0, 3)] * 4, 64, (4, 1)),  # one bank repeated: a command each
        ([(0, 0), (1, 0), (0, 1), (1, 1)], 64, (2, 2)),  # rows interleaved: gathered in the window
        ([(0, 0), (1, 0), (0, 1), (1, 1)], 2, (4, 3)),  # two windows of two; row 1 is carried into the second
        ([(0, 0), (1, 0), (1, 1), (0, 1)], 2, (4, 3)),
    ],
)
def test_windows_counted_by_hand(bursts, window, expected):
    assert _window(_keys(*bursts), window) == expected


@pytest.mark.parametrize(
    ("bursts", "expected"),
    [
        ([(0, b) for b in range(16)], (1, 1)),
        ([(0, 0), (0, 0)], (2, 1)),  # a bank repeats
        ([(0, 0), (1, 0), (0, 1)], (3, 3)),  # the row changes
        ([(0, b % 16) for b in range(17)], (2, 1)),  # every bank used
        ([(5, 1), (5, 2), (5, 1), (5, 3)], (2, 1)),
    ],
)
def test_in_order_counted_by_hand(bursts, expected):
    assert bandwidth._count_in_order(_keys(*bursts), len(bursts), 16) == expected


SMALL = geometry.Dram("small", 4, 2, 2, 128, 32, 256, 64, 4.3, 45.0)


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(mapping.NAMES),
    memory=st.sampled_from([HBM3, SMALL]),
    token_bytes=st.sampled_from([128, 512, 4096]),
    block_tokens=st.sampled_from([4, 16]),
    coalesce=st.sampled_from(bandwidth.MODES),
    window=st.sampled_from([1, 7, 64, 1000]),
    data=st.data(),
)
def test_equal_to_the_oracle(name, memory, token_bytes, block_tokens, coalesce, window, data):
    blocks = min(64, memory.capacity_bytes // (token_bytes * block_tokens))
    table = data.draw(st.lists(st.integers(0, blocks - 1), min_size=1, max_size=6, unique=True))
    tokens = data.draw(st.integers(1, len(table) * block_tokens))
    order, lay = _layout(name, token_bytes, block_tokens, blocks, memory)
    how = {"coalesce": coalesce, "window": window}
    expected = oracle.count(table, tokens, order, token_bytes, block_tokens, **how)
    assert np.array_equal(bandwidth.count(table, tokens, lay, **how), expected)


@pytest.mark.parametrize("tokens", [1, 63, 1000])
@pytest.mark.parametrize("name", mapping.NAMES)
def test_many_tables_equal_one_by_one(name, tokens):
    """No sequence's counts depend on its neighbours in a batch."""
    _, lay = _layout(name)
    rng = np.random.default_rng(tokens)
    tables = [rng.permutation(512)[: -(-n // 16)] for n in (tokens, 17, tokens + 5)]
    lengths = np.array([tokens, 17, tokens + 5])
    starts = np.cumsum([0, *(t.size for t in tables[:-1])])
    got = bandwidth.count_tables(np.concatenate(tables), starts, lengths, lay, HBM3)
    for i, table in enumerate(tables):
        one = bandwidth.count(table, lengths[i], lay)
        assert (got.bursts[i], got.commands[i], got.misses[i]) == tuple(one.sum(axis=0))
        times = 4.3 * (one[:, 1] - one[:, 2]) + 45.0 * one[:, 2]
        assert got.busiest_ns[i] == pytest.approx(times.max(), rel=1e-12)


def _m1(table, tokens, block_tokens):
    _, lay = _layout(block_tokens=block_tokens, blocks=8192)
    total = bandwidth.count(table, tokens, lay).sum(axis=0)
    return 1 - total[2] / total[1]


@pytest.mark.parametrize(
    ("block_tokens", "floor"), [(4, 0.5), (8, 0.5), (16, 0.75), (32, 0.875), (64, 0.9375), (128, 0.96875)]
)
def test_isolated_blocks_sit_on_the_floor(block_tokens, floor):
    """Blocks no two of which share a region: M1 = 1 - 1 / max(2, block_tokens / 4)."""
    per_region = max(1, 128 // block_tokens)
    table = np.arange(48) * per_region
    assert _m1(table, 48 * block_tokens, block_tokens) == floor


@pytest.mark.parametrize("block_tokens", [4, 16, 128])
def test_whole_regions_reach_the_ceiling(block_tokens):
    assert _m1(np.arange(8 * 128 // block_tokens), 1024, block_tokens) == 1 - 1 / 32


def test_m3_and_m4_at_their_ends():
    def at(commands, misses, bursts):
        counts = bandwidth.Counts(*(np.array([v]) for v in (bursts, commands, misses)), np.array([1.0]))
        return bandwidth.metrics(counts, np.array([bursts * 32]), HBM3)

    every_hit = at(1000, 0, 16000)
    assert every_hit.m3_bandwidth_gbps[0] == pytest.approx(HBM3.ideal_gbps)
    every_miss = at(1000, 1000, 16000)
    assert every_miss.m3_bandwidth_gbps[0] == pytest.approx(HBM3.ideal_gbps * 4.3 / 45)
    half = at(1000, 250, 8000)
    assert half.m2_bank_parallelism_frac[0] == 0.5
    assert half.m4_latency_ns[0] == pytest.approx((4.3 * 750 + 45 * 250) / 32)


def test_a_slab_map_keeps_one_channel_busy():
    """pim-friendly: the mean over channels counts 31 idle ones; the busiest channel does all the work."""
    _, lay = _layout("pim-friendly")
    counts = bandwidth.count_tables(np.arange(64), np.array([0]), np.array([1024]), lay, HBM3)
    values = bandwidth.metrics(counts, np.array([1024 * 4096]), HBM3)
    assert values.m3_bandwidth_gbps[0] / values.m3_busiest_gbps[0] == pytest.approx(32)
    assert values.m4_busiest_ns[0] / values.m4_latency_ns[0] == pytest.approx(32)


@pytest.mark.parametrize(
    ("table", "tokens", "how", "complaint"),
    [
        ([0, 1], 33, {}, "tokens is 33; allowed: 1 to 32"),
        ([0, 1], 0, {}, "tokens is 0"),
        ([0, 512], 32, {}, "names block 512; allowed: 0 to 511"),
        ([-1, 5], 32, {}, "names block -1"),
        ([0], 16, {"coalesce": "sliding"}, "unknown coalesce mode 'sliding'; allowed: window, inorder"),
        ([0], 16, {"window": 0}, "window is 0"),
        ([0], 16, {"window": 1.5}, "window is 1.5"),
    ],
)
def test_what_is_refused(table, tokens, how, complaint):
    with pytest.raises(ValueError, match=complaint):
        bandwidth.count(table, tokens, _layout()[1], **how)


def test_a_pool_larger_than_the_memory_is_refused():
    with pytest.raises(ValueError, match=r"a pool of 131073 blocks .* at most the 8589934592 bytes of hbm3-pim"):
        _layout(blocks=131073)
