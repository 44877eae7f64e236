"""Counting by whole blocks: equal to counting bursts wherever it is offered, and offered only where it can be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact.pim import bandwidth, blocks, geometry, mapping

HBM3 = geometry.dram("hbm3-pim")
SMALL = geometry.Dram("small", 4, 2, 2, 128, 32, 256, 64, 4.3, 45.0)


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(mapping.NAMES),
    memory=st.sampled_from([HBM3, SMALL]),
    token_bytes=st.sampled_from([512, 4096]),
    block_tokens=st.sampled_from([8, 16, 128]),
    window=st.sampled_from([8, 32, 64]),
    data=st.data(),
)
def test_equal_to_counting_bursts(name, memory, token_bytes, block_tokens, window, data):
    count = min(48, memory.capacity_bytes // (token_bytes * block_tokens))
    lay = bandwidth.layout(mapping.address_map(name, memory), token_bytes, block_tokens, count)
    whole = blocks.whole(lay, window=window)
    if whole is None:
        return
    tables = data.draw(st.lists(st.lists(st.integers(0, count - 1), min_size=1, max_size=6), min_size=1, max_size=3))
    tokens = np.array([data.draw(st.integers(1, len(table) * block_tokens)) for table in tables])
    starts = np.cumsum([0, *(len(table) for table in tables[:-1])])
    flat = np.concatenate(tables).astype(np.int64)
    ours = blocks.count_tables(flat, starts, tokens, lay, memory, whole)
    theirs = bandwidth.count_tables(flat, starts, tokens, lay, memory, window=window)
    for name_, a, b in zip(ours._fields, ours, theirs, strict=True):
        assert np.array_equal(a, b), name_


@pytest.mark.parametrize(("name", "block_tokens", "window", "offered"), [
    ("host-cacheline", 16, 64, True), ("host-centric", 16, 64, True), ("pim-friendly", 16, 64, True),
    ("host-cacheline", 16, 128, False),  # a window reaches into the next block
    ("host-cacheline", 4, 64, False),
    ("host-cacheline", 256, 64, True),
])
def test_where_it_is_offered(name, block_tokens, window, offered):
    lay = bandwidth.layout(mapping.address_map(name, HBM3), 4096, block_tokens, 64)
    assert (blocks.whole(lay, window=window) is not None) == offered


def test_in_order_counts_bursts():
    lay = bandwidth.layout(mapping.address_map("host-cacheline", HBM3), 4096, 16, 64)
    assert blocks.whole(lay, coalesce="inorder") is None
