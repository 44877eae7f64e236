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


HASHED = (
    "co1 ch5 ba2 bg2 co4 ro14 ba^=ro[0:2] bg^=ro[2:4]",
    "co1 ch5 ba2 bg2 co4 ro14 ba^=ba[1:2] ro^=ba[0:2] ba^=ro[0:2] ro^=ro[3:14]",
    "ro3 ch2 co5 ba1 bg2 ch3 ba1 ro11 ch^=ro[2:7]",
)


@given(st.sampled_from(mapping.NAMES + HASHED), st.integers(0, 2**28 - 1), st.integers(0, 2**28 - 1))
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


@pytest.mark.parametrize("name", mapping.NAMES)
@pytest.mark.parametrize("memory", [HBM3, geometry.dram("gddr6-pim"), TINY])
def test_a_named_map_written_out_is_the_same_map(name, memory):
    order = mapping.address_map(name, memory)
    again = mapping.address_map(mapping.written(order), memory)
    assert (again.order, again.hashes) == (order.order, order.hashes)


def test_commas_separate_words_as_blanks_do():
    plain, listed = (mapping.parse(text) for text in ("co5 ch5 ba^=ro[0:2]", "co5, ch5,ba^=ro[0:2]"))
    assert plain == listed == ((("co", 5), ("ch", 5)), (("ba", "ro", 0, 2),))


def test_a_hash_moves_banks_by_row_and_leaves_the_rest():
    plain = mapping.address_map("host-cacheline", HBM3)
    hashed = mapping.address_map("co1 ch5 ba2 bg2 co4 ro14 ba^=ro[0:2]", HBM3)
    address = np.random.default_rng(3).integers(0, HBM3.bursts, 1000)
    channel, group, bank, row, column = plain.decode(address)
    expected = channel, group, bank ^ row & 3, row, column
    assert all(np.array_equal(a, b) for a, b in zip(hashed.decode(address), expected, strict=True))


@pytest.mark.parametrize("text", HASHED)
def test_hashed_maps_are_bijective_over_a_slab(text):
    order = mapping.address_map(text, HBM3)
    address = np.arange(1 << 16) * 4099 % HBM3.bursts  # an odd stride: no two alike
    assert len(set(zip(*(c.tolist() for c in order.decode(address)), strict=True))) == address.size


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("co1 ch5 ba2 bg2 co5 ro14", r"'co' has 6 bits; hbm3-pim needs 5: .* differ in bits 14 \(co\[5\]\) collide"),
        ("co1 ch5 ba2 ba2 co4 ro14", r"differ in bits 8 \(ba\[2\]\), 9 \(ba\[3\]\) collide"),
        ("co1 ch5 ba2 bg2 co4 ro13", r"'ro' has 13 bits; hbm3-pim needs 14: no address reaches ro\[13\]"),
        ("co5 ch5 ba2 bg2 ro14 ba^=ba[0:2]", r"differ in bits 10 \(ba\[0\]\), 11 \(ba\[1\]\) collide"),
        ("co5 ch5 ba2 bg2 ro14 ba^=ro[0:3]", r"ba\^=ro\[0:3\] takes bits 0 to 2 of 'ro'; allowed: at most 2"),
        ("co5 ch5 ba2 bg2 ro14 ba^=ro[13:15]", r"takes bits 13 to 14 of 'ro'"),
        ("co5 ch5 ba2 bg2 ro14 ba^=xy[0:2]", "unknown field 'xy'; allowed: co, ch, ba, bg, ro"),
        ("co5 ch5 ba2 bg2 ro14 ba^=ro", "unknown address map .* at 'ba\\^=ro'; allowed: host-centric"),
        ("co5 ba^=ro[0:2] ch5 ba2 bg2 ro14", "at 'ch5'"),
        ("co5 ch-5", "at 'ch-5'"),
        ("co5 ch5 ba2 bg2 ro999999999", "at 'ro999999999'"),
        ("", "unknown address map ''"),
    ],
)
def test_text_that_is_no_bijection_is_refused_with_its_bits_in_one_line(text, says):
    with pytest.raises(ValueError, match=says) as raised:
        mapping.address_map(text, HBM3)
    assert "\n" not in str(raised.value)
