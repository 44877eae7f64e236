"""What is read otherwise than in the study: equal to plain counting where it must be, to a plain loop everywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact.pim import bandwidth, geometry, mapping, oracle, reads

HBM3 = geometry.dram("hbm3-pim")
SMALL = geometry.Dram("small", 4, 2, 2, 128, 32, 256, 64, 4.3, 45.0)
TOKEN, BLOCK = 4096, 16


def bursts(table, first, last, base, token_bursts, block_tokens, heads):
    """Addresses of tokens `first` up to `last`, as the head of `reads` puts it: block by block, by address."""
    out, part = [], token_bursts // heads
    for i, block in enumerate(table):
        inside = [t - i * block_tokens for t in range(first, last) if t // block_tokens == i]
        begin = base + block * block_tokens * token_bursts
        out += sorted(begin + (h * block_tokens + t) * part + j for t in inside for h in range(heads)
                      for j in range(part))  # fmt: skip
    return np.array(out, dtype=np.int64)


def plainly(order, turns, window, in_order):
    """int64 [channels, 3] of turns, one after another: each its own windows, the open row carried from turn to turn."""
    dram = order.dram
    out, opened = np.zeros((dram.channels, 3), dtype=np.int64), [-1] * dram.channels
    for address in turns:
        channel, group, bank, row, _ = order.decode(address)
        bank = group * dram.banks_per_group + bank
        for c in set(channel.tolist()):
            r, b = row[channel == c], bank[channel == c]
            found = oracle._in_order(r, b, dram.banks) if in_order else oracle._windows(r, b, dram.banks, window)
            carried = opened[c] in (r[:1] if in_order else r[:window]).tolist()
            out[c] += r.size, found[0], found[1] - carried
            opened[c] = int(r[-1])
    return out


@settings(deadline=None, max_examples=80)
@given(data=st.data(), layout=st.sampled_from(reads.LAYOUTS), turn=st.sampled_from([None, 1, 5, 16]),
       writes=st.booleans(), coalesce=st.sampled_from(bandwidth.MODES), window=st.sampled_from([3, 64]),
       name=st.sampled_from(mapping.NAMES + ("co1 ch2 ba1 bg1 co1 ro8 ba^=ro[0:1]",)),
       base=st.integers(0, 700))  # fmt: skip
def test_equal_to_the_plain_loop(data, layout, turn, writes, coalesce, window, name, base):
    order = mapping.address_map(name, SMALL)
    heads, token_bytes, block_tokens = 4, 256, 4
    tables = data.draw(st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=4), min_size=1, max_size=3))
    tokens = [data.draw(st.integers(1, len(table) * block_tokens)) for table in tables]
    how = reads.reading(order, token_bytes, block_tokens, 32, heads=heads, base_bytes=base * 32, layout=layout,
                        turn=turn, writes=writes)  # fmt: skip
    starts = np.cumsum([0, *(len(t) for t in tables[:-1])])
    groups = np.array([0, len(tables)])
    got = reads.count(np.concatenate(tables), starts, np.array(tokens), how, SMALL, groups=groups, coalesce=coalesce,
                      window=window)  # fmt: skip
    parts = 1 if layout == "token-major" else heads
    if layout == "head-channels":
        order = mapping.with_heads(order, heads, block_tokens * 8 // heads)
    spans = [(i, n - 1, n) for i, n in enumerate(tokens)] if writes else []
    step = turn or max(tokens)
    for at in range(0, max(tokens), step):
        spans += [(i, at, min(at + step, n)) for i, n in enumerate(tokens) if at < n]
    turns = [bursts(tables[i], a, b, base, 8, block_tokens, parts) for i, a, b in spans]
    expected = plainly(order, turns, window, coalesce == "inorder")
    assert (got.bursts[0], got.commands[0], got.misses[0]) == tuple(expected.sum(axis=0))
    times = SMALL.tccd_ab_ns * (expected[:, 1] - expected[:, 2]) + SMALL.trc_ns * expected[:, 2]
    assert got.busiest_ns[0] == pytest.approx(times.max(), rel=1e-12)


def _tables(seed=0, blocks=512):
    rng = np.random.default_rng(seed)
    tokens = np.array([1, 63, 1000, 333])
    sizes = -(-tokens // BLOCK)
    return np.concatenate([rng.permutation(blocks)[:n] for n in sizes]), np.cumsum([0, *sizes[:-1]]), tokens


def _counts(name="host-cacheline", seed=0, **how):
    order = mapping.address_map(name, HBM3)
    groups = how.pop("groups", None)
    return reads.count(*_tables(seed), reads.reading(order, TOKEN, BLOCK, 512, **how), HBM3, groups=groups)


@pytest.mark.parametrize("name", mapping.NAMES)
def test_the_studys_choice_is_plain_counting(name):
    lay = bandwidth.layout(mapping.address_map(name, HBM3), TOKEN, BLOCK, 512)
    expected = bandwidth.count_tables(*_tables(), lay, HBM3)
    for a, b in zip(_counts(name), expected, strict=True):
        assert np.array_equal(a, b)


def test_a_base_of_whole_regions_changes_nothing_and_half_a_region_does():
    whole = _counts(base_bytes=3 * HBM3.region_bytes)
    assert all(np.array_equal(a, b) for a, b in zip(whole, _counts(), strict=True))
    flat, starts, tokens = np.arange(64), np.array([0]), np.array([1024])  # eight whole regions
    order = mapping.address_map("host-cacheline", HBM3)
    aligned, shifted = (
        reads.count(flat, starts, tokens, reads.reading(order, TOKEN, BLOCK, 512, base_bytes=base), HBM3)
        for base in (0, HBM3.region_bytes // 2)
    )
    assert (aligned.misses[0], shifted.misses[0]) == (8 * 32, 9 * 32)  # a ninth row in each channel


def test_heads_in_channels_of_their_own_are_shards():
    """Each head reads its share of the bytes in its share of the channels: what a shard does, heads times."""
    shard = HBM3.shard(8)
    lay = bandwidth.layout(mapping.address_map("host-cacheline", shard), TOKEN // 8, BLOCK, 512)
    flat, starts, tokens = _tables()
    expected = bandwidth.count_tables(flat, starts, tokens, lay, shard)
    got = _counts(layout="head-channels", heads=8)
    for k in ("bursts", "commands", "misses"):
        assert np.array_equal(getattr(got, k), 8 * getattr(expected, k))
    assert np.array_equal(got.busiest_ns, expected.busiest_ns)


def test_a_layout_moves_nothing_but_the_last_block():
    flat, starts, tokens = _tables()
    whole = tokens // BLOCK * BLOCK
    order = mapping.address_map("host-cacheline", HBM3)
    a, b = (reads.count(flat, starts, np.maximum(whole, BLOCK), reads.reading(order, TOKEN, BLOCK, 512, heads=8,
                                                                             layout=layout), HBM3)
            for layout in reads.LAYOUTS[:2])  # fmt: skip
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not np.array_equal(_counts(layout="head-major", heads=8).commands, _counts().commands)


def test_turns_of_a_block_open_a_row_each_and_a_group_of_one_is_that_sequence():
    alone = _counts(turn=16, groups=np.arange(5))
    assert np.array_equal(alone.misses, _counts().misses)
    flat, starts, tokens = np.arange(64), np.array([0, 32]), np.array([512, 512])
    order = mapping.address_map("host-cacheline", HBM3)
    how = reads.reading(order, TOKEN, BLOCK, 512, turn=BLOCK)
    both = reads.count(flat, starts, tokens, how, HBM3, groups=np.array([0, 2]))
    assert both.misses[0] == 64 * 32  # the two sequences close each other's row at every turn
    assert both.bursts[0] == 1024 * 128


def test_a_write_is_the_newest_token_once_more():
    read, both = _counts(), _counts(writes=True)
    assert np.array_equal(both.bursts - read.bursts, np.full(4, 128))
    assert (both.commands > read.commands).all() and (both.misses >= read.misses).all()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"layout": "row-major"}, "block_layout is 'row-major'; allowed: token-major, head-major, head-channels"),
        ({"layout": "head-major", "heads": 3}, "block_layout head-major with 3 KV heads"),
        ({"layout": "head-major", "heads": 256}, "block_layout head-major with 256 KV heads of 16 bytes"),
        ({"layout": "head-channels", "heads": 64}, "64 KV heads in channels of their own; allowed: at most the 32"),
        ({"base_bytes": 48}, "base_bytes is 48; allowed: a multiple of 32"),
        ({"base_bytes": -32}, "base_bytes is -32"),
        ({"base_bytes": 8 << 30}, "needs 8623489024 bytes; allowed: at most the 8589934592 bytes of hbm3-pim"),
    ],
)
def test_what_is_refused(how, says):
    with pytest.raises(ValueError, match=says) as raised:
        _counts(**how)
    assert "\n" not in str(raised.value)
