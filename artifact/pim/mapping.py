"""Where a burst lives: address maps from a linear burst index to channel, bank group, bank, row and column.

A map is a list of bit fields, least significant first, and then hashes, which XOR bits of one field into another.
Both are linear over bits, so `decode(a ^ b) == decode(a) ^ decode(b)`: a block's bursts are its base XOR a table of
offsets, which is how `artifact.pim.bandwidth` walks a sequence. The three named maps are the study's (section "address
maps"); any other is text: `co1 ch5 ba2 bg2 co4 ro14 ba^=ro[0:2]`.
"""

import re
from dataclasses import dataclass

import numpy as np

FIELDS = ("co", "ch", "ba", "bg", "ro")  # column, channel, bank, bank group, row
NAMES = ("host-centric", "host-cacheline", "pim-friendly")
ALLOWED = f"{', '.join(NAMES)}, or fields from the least significant bit on, as 'co1 ch5 ba2 bg2 co4 ro14 ba^=ro[0:2]'"
_FIELD = re.compile(r"([a-z]{2})(\d{1,2})")
_HASH = re.compile(r"([a-z]{2})\^=([a-z]{2})\[(\d{1,2}):(\d{1,2})\]")


def _log2(value):
    return value.bit_length() - 1


@dataclass(frozen=True)
class AddressMap:
    """A bijection between burst indices and DRAM coordinates.

    `order` is a tuple of (field, bits), least significant first; a field may come in several pieces, the first
    holding its low bits. `hashes` is a tuple of (field, source, low, high), done in order: the field's low bits are
    XORed with the source's bits from low up to but not with high. `dram` fixes how many bits each field has. Raises
    ValueError, naming the bits that collide, when two addresses would meet in one place or a place has no address.
    """

    name: str
    dram: object
    order: tuple
    hashes: tuple = ()

    def __post_init__(self):
        sizes, where = field_bits(self.dram), f"address map {self.name}"
        for field in (*(f for f, _ in self.order), *(f for h in self.hashes for f in h[:2])):
            if field not in sizes:
                raise ValueError(f"{where}: unknown field {field!r}; allowed: {', '.join(FIELDS)}")
        names = self._names()
        for field, bits in sizes.items():
            given = [at for at, name in enumerate(names) if name.startswith(field)]
            if len(given) != bits:
                why = _listed(given[bits:], names) if given[bits:] else f"no address reaches {field}[{len(given)}]"
                found = f"field {field!r} has {len(given)} bits; {self.dram.name} needs {bits}"
                raise ValueError(f"{where}: {found}: {why}")
        for field, source, low, high in self.hashes:
            if not low < high <= sizes[source] or high - low > sizes[field]:
                raise ValueError(f"{where}: {_hash(field, source, low, high)} takes bits {low} to {high - 1} of "
                                 f"{source!r}; allowed: at most {sizes[field]} of its {sizes[source]} bits")
        lost = _collisions([self._bits(1 << i) for i in range(self.bits)])
        if lost:
            raise ValueError(f"{where}: {_listed(lost, names)}; allowed: a bijection of addresses and places")

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

    def _names(self):
        """Which field's bit each address bit is, before hashes."""
        return [f"{field}[{to + i}]" for field, bits, _, to in self._pieces() for i in range(bits)]

    def _bits(self, address):
        """The coordinates of one address as one number."""
        return sum(int(coordinate) << 32 * i for i, coordinate in enumerate(self.decode(address)))

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
        for field, source, low, high in self.hashes:
            out[field] ^= (out[source] >> low) & ((1 << high - low) - 1)
        return out["ch"], out["bg"], out["ba"], out["ro"], out["co"]

    def encode(self, channel, bank_group, bank, row, column):
        """The inverse of `decode`."""
        given = {"ch": channel, "bg": bank_group, "ba": bank, "ro": row, "co": column}
        given = {f: np.asarray(v, dtype=np.int64).copy() for f, v in given.items()}
        for field, source, low, high in reversed(self.hashes):
            given[field] = _undone(given, field, source, low, high)
        address = np.zeros(np.broadcast_shapes(*(v.shape for v in given.values())), dtype=np.int64)
        for field, bits, at, to in self._pieces():
            address = address | (((given[field] >> to) & ((1 << bits) - 1)) << at)
        return address


def _undone(given, field, source, low, high):
    """`field` before a hash; one that XORs higher bits of a field into itself is undone from the highest bit down."""
    if field != source:
        return given[field] ^ (given[source] >> low) & ((1 << high - low) - 1)
    value = given[field]
    for i in reversed(range(high - low)):
        value = value ^ ((value >> low + i & 1) << i)
    return value


def _hash(field, source, low, high):
    return f"{field}^={source}[{low}:{high}]"


def _listed(bits, names):
    return "addresses that differ in bits " + ", ".join(f"{i} ({names[i]})" for i in bits) + " collide"


def _collisions(images):
    """Address bits whose images XOR to nothing: addresses that differ in just such a set share a place; [] if none."""
    reduced, lost = [], 0  # (image, address bits it is made of), each with a leading bit of its own
    for i, image in enumerate(images):
        made = 1 << i
        for other, of in reduced:
            if image ^ other < image:
                image, made = image ^ other, made ^ of
        if image:
            reduced.append((image, made))
        else:
            lost |= made
    return [i for i in range(len(images)) if lost >> i & 1]


def field_bits(dram):
    """Bits of each address field on `dram`."""
    sizes = (dram.columns, dram.channels, dram.banks_per_group, dram.bank_groups, dram.rows)
    return dict(zip(FIELDS, map(_log2, sizes), strict=True))


def parse(text):
    """The fields and hashes of a map written as text, or None for one of the study's names; device unseen.

    Raises ValueError, naming the first word that is neither `FIELDBITS` nor `FIELD^=FIELD[LOW:HIGH]`.
    """
    if text in NAMES:
        return None
    order, hashes = [], []
    for word in text.replace(",", " ").split():
        field, hashed = _FIELD.fullmatch(word), _HASH.fullmatch(word)
        if hashed:
            hashes.append((hashed[1], hashed[2], int(hashed[3]), int(hashed[4])))
        elif field and field[1] in FIELDS and not hashes:
            order.append((field[1], int(field[2])))
        else:
            at = f" at {word!r}" if word != text else ""
            raise ValueError(f"unknown address map {text!r}{at}; allowed: {ALLOWED}")
    if not order:
        raise ValueError(f"unknown address map {text!r}; allowed: {ALLOWED}")
    return tuple(order), tuple(hashes)


def address_map(name, dram):
    """The map `name` on `dram`: one of the study's, or text that `parse` reads.

    host-centric    a row's columns lie together, then the channels: one bank at a time
    host-cacheline  a cacheline per channel, then the banks: what hosts do, and every headline result
    pim-friendly    banks lowest, channel highest: a channel is one slab of addresses
    """
    own = parse(name)
    if own:
        return AddressMap(name, dram, *own)
    bits = field_bits(dram)
    low = _log2(dram.cacheline_bytes // dram.burst_bytes)
    orders = {
        "host-centric": ("co", "ch", "ba", "bg", "ro"),
        "host-cacheline": (("co", low), "ch", "ba", "bg", ("co", bits["co"] - low), "ro"),
        "pim-friendly": ("ba", "bg", "co", "ro", "ch"),
    }
    return AddressMap(name, dram, tuple((f, bits[f]) if isinstance(f, str) else f for f in orders[name]))


def with_heads(order, heads, part_bursts):
    """`order` with the highest channel bits moved so that a block's KV heads lie in channels of their own.

    A block holds `heads` parts of `part_bursts` bursts one after another, both powers of two. Raises ValueError for
    more heads than channels.
    """
    moved, at = _log2(heads), _log2(part_bursts)
    if heads > order.dram.channels:
        raise ValueError(f"{heads} KV heads in channels of their own; allowed: at most the {order.dram.channels} of "
                         f"{order.dram.name}")
    rest, left = [], moved
    for field, bits in reversed(order.order):
        taken = min(bits, left) if field == "ch" else 0
        left -= taken
        rest.insert(0, (field, bits - taken))
    pieces, below = [], 0
    for field, bits in rest:
        under = min(max(at - below, 0), bits)
        if below <= at < below + bits:
            pieces += [(field, under), ("ch", moved), (field, bits - under)]
        else:
            pieces.append((field, bits))
        below += bits
    return AddressMap(f"{order.name}, heads apart", order.dram, tuple(p for p in pieces if p[1]), order.hashes)


def written(order):
    """An `AddressMap` as the text that `parse` reads."""
    return " ".join([*(f"{f}{b}" for f, b in order.order), *(_hash(*h) for h in order.hashes)])
