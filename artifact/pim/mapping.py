"""Where a burst lives: address maps from a linear burst index to channel, bank group, bank, row and column.

A map is a list of bit fields, least significant first. Every map here is a permutation of address bits, so
`decode(a ^ b) == decode(a) ^ decode(b)`: a block's bursts are its base XOR a table of offsets, which is how
`artifact.pim.bandwidth` walks a sequence. The three named maps are the study's (section "address maps").
"""

from dataclasses import dataclass

import numpy as np

FIELDS = ("co", "ch", "ba", "bg", "ro")  # column, channel, bank, bank group, row
NAMES = ("host-centric", "host-cacheline", "pim-friendly")


def _log2(value):
    return value.bit_length() - 1


@dataclass(frozen=True)
class AddressMap:
    """A bijection between burst indices and DRAM coordinates.

    `order` is a tuple of (field, bits), least significant first; a field may come in several pieces, the first
    holding its low bits. `dram` fixes how many bits each field has. Raises ValueError when a field's bits do not
    add up to the device's.
    """

    name: str
    dram: object
    order: tuple

    def __post_init__(self):
        sizes = field_bits(self.dram)
        for field, _ in self.order:
            if field not in sizes:
                raise ValueError(f"address map {self.name}: unknown field {field!r}; allowed: {', '.join(FIELDS)}")
        for field, bits in sizes.items():
            given = sum(b for f, b in self.order if f == field)
            if given != bits:
                raise ValueError(
                    f"address map {self.name}: field {field!r} has {given} bits; {self.dram.name} needs {bits}"
                )

    @property
    def bits(self):
        """Address bits: log2 of the bursts of the device."""
        return sum(b for _, b in self.order)

    def _pieces(self):
        """(field, bits, position in the address, position in the field) of each piece."""
        at, taken = 0, dict.fromkeys(FIELDS, 0)
        for field, bits in self.order:
            yield field, bits, at, taken[field]
            at += bits
            taken[field] += bits

    def decode(self, address):
        """Burst index (int or int array) -> (channel, bank_group, bank, row, column), each like `address`.

        Raises ValueError for an index outside the device.
        """
        address = np.asarray(address, dtype=np.int64)
        if address.size and (address.min() < 0 or address.max() >= 1 << self.bits):
            raise ValueError(f"burst index outside the device; allowed: 0 to {(1 << self.bits) - 1}")
        out = {f: np.zeros_like(address) for f in FIELDS}
        for field, bits, at, to in self._pieces():
            out[field] |= ((address >> at) & ((1 << bits) - 1)) << to
        return out["ch"], out["bg"], out["ba"], out["ro"], out["co"]

    def encode(self, channel, bank_group, bank, row, column):
        """The inverse of `decode`."""
        given = {"ch": channel, "bg": bank_group, "ba": bank, "ro": row, "co": column}
        given = {f: np.asarray(v, dtype=np.int64) for f, v in given.items()}
        address = np.zeros(np.broadcast_shapes(*(v.shape for v in given.values())), dtype=np.int64)
        for field, bits, at, to in self._pieces():
            address = address | (((given[field] >> to) & ((1 << bits) - 1)) << at)
        return address


def field_bits(dram):
    """Bits of each address field on `dram`."""
    sizes = (dram.columns, dram.channels, dram.banks_per_group, dram.bank_groups, dram.rows)
    return dict(zip(FIELDS, map(_log2, sizes), strict=True))


def address_map(name, dram):
    """The study's map `name` on `dram`.

    host-centric    a row's columns lie together, then the channels: one bank at a time
    host-cacheline  a cacheline per channel, then the banks: what hosts do, and every headline result
    pim-friendly    banks lowest, channel highest: a channel is one slab of addresses
    """
    bits = field_bits(dram)
    low = _log2(dram.cacheline_bytes // dram.burst_bytes)
    orders = {
        "host-centric": ("co", "ch", "ba", "bg", "ro"),
        "host-cacheline": (("co", low), "ch", "ba", "bg", ("co", bits["co"] - low), "ro"),
        "pim-friendly": ("ba", "bg", "co", "ro", "ch"),
    }
    if name not in orders:
        raise ValueError(f"unknown address map {name!r}; allowed: {', '.join(NAMES)}")
    return AddressMap(name, dram, tuple((f, bits[f]) if isinstance(f, str) else f for f in orders[name]))
