"""Counting by whole blocks: equal to counting bursts wherever it is offered, and offered only where it can be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact.pim import bandwidth, blocks, geometry, mapping, reads

HBM3 = geometry.dram("hbm3-pim")
SMALL = geometry.Dram("small", 4, 2, 2, 128, 32, 256, 64, 4.3, 45.0)
ROWS_LOW = "co1 ch2 ro1 ba1 bg1 co1 ro7"  # of SMALL: two rows inside a block


@st.composite
def _sequences(draw, blocks_count, block_tokens):
    """flat, starts, tokens and groups of up to four block tables."""
    tables = draw(st.lists(st.lists(st.integers(0, blocks_count - 1), min_size=1, max_size=6), min_size=1, max_size=4))
    tokens = np.array([draw(st.integers(1, len(table) * block_tokens)) for table in tables])
    inner = sorted(draw(st.sets(st.integers(1, len(tables)))) | {len(tables)})
    starts = np.cumsum([0, *(len(table) for table in tables[:-1])])
    return np.concatenate(tables).astype(np.int64), starts, tokens, np.array([0, *inner])


@settings(deadline=None, max_examples=300)
@given(
    name=st.sampled_from((*mapping.NAMES, ROWS_LOW)),
    memory=st.sampled_from([HBM3, SMALL]),
    token_bytes=st.sampled_from([256, 512, 4096]),
    block_tokens=st.sampled_from([8, 16, 128]),
    window=st.sampled_from([2, 8, 32, 64]),
    heads=st.sampled_from([1, 4]),
    layout=st.sampled_from(reads.LAYOUTS),
    turn_blocks=st.sampled_from([None, 1, 2]),
    base_blocks=st.integers(0, 3),
    writes=st.booleans(),
    data=st.data(),
)
def test_equal_to_counting_bursts(name, memory, token_bytes, block_tokens, window, heads, layout, turn_blocks,
                                  base_blocks, writes, data):  # fmt: skip
    size = token_bytes * block_tokens
    count = min(48, memory.capacity_bytes // size - base_blocks)
    if count < 1 or (name == ROWS_LOW and memory is HBM3):
        return
    how = reads.reading(
        mapping.address_map(name, memory), token_bytes, block_tokens, count, heads=heads, layout=layout, writes=writes,
        turn=turn_blocks and turn_blocks * block_tokens, base_bytes=base_blocks * size,
    )  # fmt: skip
    whole = blocks.whole(how, count, window=window)
    if whole is None:
        return
    flat, starts, tokens, groups = data.draw(_sequences(count, block_tokens))
    ours = blocks.count_tables(flat, starts, tokens, memory, whole, groups=groups)
    theirs = reads.count(flat, starts, tokens, how, memory, groups=groups, window=window)
    for field, a, b in zip(ours._fields, ours, theirs, strict=True):
        assert np.array_equal(a, b), field


@pytest.mark.parametrize("name", mapping.NAMES)
@pytest.mark.parametrize("token_bytes", [512, 4096])
def test_the_studys_way_equals_counting_its_bursts(name, token_bytes):
    rng = np.random.default_rng(1)
    order = mapping.address_map(name, HBM3)
    lay = bandwidth.layout(order, token_bytes, 128, 512)
    whole = blocks.whole(reads.reading(order, token_bytes, 128, 512), 512)
    tokens = np.array([1, 127, 128, 5000, 30_001])
    sizes = -(-tokens // 128)
    flat, starts = rng.integers(0, 512, sizes.sum()), np.cumsum([0, *sizes[:-1]])
    ours = blocks.count_tables(flat, starts, tokens, HBM3, whole)
    for a, b in zip(ours, bandwidth.count_tables(flat, starts, tokens, lay, HBM3), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(("block_tokens", "window", "how", "offered"), [
    (16, 64, {}, True),
    (256, 64, {}, True),
    (16, 128, {}, False),  # a window reaches into the next block
    (4, 64, {}, False),
    (16, 64, {"base_bytes": 3 * 65536}, True),
    (16, 64, {"base_bytes": 512}, False),  # blocks lie across rows, each otherwise
    (16, 64, {"turn": 32}, True),
    (16, 64, {"turn": 24}, False),  # a turn ends inside a block
    (16, 64, {"layout": "head-channels", "heads": 8, "writes": True}, True),
])  # fmt: skip
@pytest.mark.parametrize("name", mapping.NAMES[:2])
def test_where_it_is_offered(name, block_tokens, window, how, offered):
    how = reads.reading(mapping.address_map(name, HBM3), 4096, block_tokens, 64, **how)
    assert (blocks.whole(how, 64, window=window) is not None) == offered


def test_in_order_counts_bursts_and_another_mode_is_refused():
    how = reads.reading(mapping.address_map("host-cacheline", HBM3), 4096, 16, 64)
    assert blocks.whole(how, 64, coalesce="inorder") is None
    with pytest.raises(ValueError, match="unknown coalesce mode 'some'; allowed: window, inorder"):
        blocks.whole(how, 64, coalesce="some")


def test_every_option_of_the_study_of_options_is_offered_it():
    """What the property test passes over because it is not offered must not be the rule."""
    order = mapping.address_map("host-cacheline", HBM3)
    for layout in reads.LAYOUTS:
        for turn in (None, 16, 1024):
            for writes in (False, True):
                how = reads.reading(order, 4096, 16, 64, heads=8, layout=layout, turn=turn, writes=writes)
                assert blocks.whole(how, 64) is not None
