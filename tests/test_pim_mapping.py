"""Address maps: bijections, spot checks by hand, and the XOR property the counting loops stand on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifact.pim import geometry, mapping

HBM3 = geometry.dram("hbm3-pim")
TINY = geometry.Dram("tiny", 2, 2, 2, 128, 32, 4, 64, 4.3, 45.0)


@pytest.mark.parametrize("name", mapping.NAMES)
@pytest.mark.parametrize("memory", [TINY, geometry.Dram("flat", 1, 1, 1, 64, 32, 2, 32, 1.0, 2.0)])
def test_bijective_over_a_whole_device(name, memory):
    order = mapping.address_map(name, memory)
    address = np.arange(memory.bursts)
    coordinates = order.decode(address)
    assert len(set(zip(*(c.tolist() for c in coordinates), strict=True))) == memory.bursts
    limits = (memory.channels, memory.bank_groups, memory.banks_per_group, memory.rows, memory.columns)
    assert all(c.max() < limit for c, limit in zip(coordinates, limits, strict=True))
    assert np.array_equal(order.encode(*coordinates), address)


@given(st.sampled_from(mapping.NAMES), st.integers(0, 2**28 - 1), st.integers(0, 2**28 - 1))
def test_round_trip_and_xor_on_hbm3(name, a, b):
    order = mapping.address_map(name, HBM3)
    assert order.encode(*order.decode(a)) == a
    both = [int(x) ^ int(y) for x, y in zip(order.decode(a), order.decode(b), strict=True)]
    assert [int(x) for x in order.decode(a ^ b)] == both


@pytest.mark.parametrize(
    ("name", "address", "expected"),  # channel, bank group, bank, row, column
    [
        ("host-centric", 1, (0, 0, 0, 0, 1)),
        ("host-centric", 32, (1, 0, 0, 0, 0)),
        ("host-centric", 1 << 10, (0, 0, 1, 0, 0)),
        ("host-centric", 1 << 14, (0, 0, 0, 1, 0)),
        ("host-cacheline", 1, (0, 0, 0, 0, 1)),
        ("host-cacheline", 2, (1, 0, 0, 0, 0)),
        ("host-cacheline", 64, (0, 0, 1, 0, 0)),
        ("host-cacheline", 1 << 10, (0, 0, 0, 0, 2)),
        ("host-cacheline", 1 << 14, (0, 0, 0, 1, 0)),
        ("pim-friendly", 1, (0, 0, 1, 0, 0)),
        ("pim-friendly", 4, (0, 1, 0, 0, 0)),
        ("pim-friendly", 16, (0, 0, 0, 0, 1)),
        ("pim-friendly", 1 << 9, (0, 0, 0, 1, 0)),
        ("pim-friendly", 1 << 23, (1, 0, 0, 0, 0)),
    ],
)
def test_where_single_bits_go(name, address, expected):
    assert tuple(int(c) for c in mapping.address_map(name, HBM3).decode(address)) == expected


def test_one_token_under_host_cacheline():
    """A GQA token: every channel, two banks, two columns, one row."""
    channel, group, bank, row, column = mapping.address_map("host-cacheline", HBM3).decode(np.arange(128))
    assert len(set(channel)) == 32 and len(set(bank)) == 2 and len(set(column)) == 2
    assert set(group) == {0} and set(row) == {0}


def test_what_is_refused():
    order = mapping.address_map("host-centric", HBM3)
    for outside in (-1, HBM3.bursts):
        with pytest.raises(ValueError, match="outside the device"):
            order.decode(outside)
    with pytest.raises(ValueError, match="unknown address map 'xor'; allowed: host-centric"):
        mapping.address_map("xor", HBM3)
    with pytest.raises(ValueError, match="field 'co' has 4 bits"):
        mapping.AddressMap("short", HBM3, (("co", 4), ("ch", 5), ("ba", 2), ("bg", 2), ("ro", 14)))
    with pytest.raises(ValueError, match="unknown field 'xx'"):
        mapping.AddressMap("odd", HBM3, (("xx", 4),))
