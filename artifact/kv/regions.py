"""Free blocks by region: the lowest of a region, the lowest empty region, the roomiest one, each in O(log regions).

A region's free blocks are bits. Regions with the same number of free blocks are one bitmap, with summaries above it:
a bit of the next level says that a word of 64 below it has any. The lowest member is one step per level, 64 regions
for each.
"""

from artifact.compiled import compiled, inlined
from artifact.kv.pool import AFFINITY, HOME, PLANNED
from artifact.words import bit, leading_zeros, trailing_zeros


@inlined
def _move(p, region, before, after):
    """`region` had `before` free blocks and has `after`."""
    top, last = p.levels[-1], p.ranks.shape[0] - 1
    at = region
    for level in range(p.levels.size):
        word = p.levels[level] + (at >> 6)
        p.ranks[before, word] &= ~bit(at)
        if p.ranks[before, word]:
            break
        at >>= 6
    if not p.ranks[before, top]:
        p.ranks[last, before >> 6] &= ~bit(before)
    if not p.ranks[after, top]:
        p.ranks[last, after >> 6] |= bit(after)
    at = region
    for level in range(p.levels.size):
        word = p.levels[level] + (at >> 6)
        held = p.ranks[after, word]
        p.ranks[after, word] = held | bit(at)
        if held:
            break
        at >>= 6
    p.rooms[region] = after


@inlined
def _lowest(p, room):
    """Lowest region with exactly `room` free blocks, -1 if there is none."""
    at = 0
    for level in range(p.levels.size - 1, -1, -1):
        word = p.ranks[room, p.levels[level] + at]
        if not word:
            return -1
        at = at * 64 + trailing_zeros(word)
    return at


@compiled
def roomiest(p):
    """The region with most free blocks, an empty one first, the lowest on ties; some block is free."""
    last, word = p.ranks.shape[0] - 1, p.blocks_per_region >> 6
    while not p.ranks[last, word]:
        word -= 1
    return _lowest(p, word * 64 + 63 - leading_zeros(p.ranks[last, word]))


@compiled
def fullest(p, but):
    """The region with least room that has some, other than `but`; the lowest on ties, -1 if there is none."""
    for room in range(1, p.blocks_per_region + 1):
        first = _lowest(p, room)
        if first < 0:
            continue
        if first != but:
            return first
        for other in range(but + 1, p.rooms.size):
            if p.rooms[other] == room:
                return other
    return -1


@inlined
def empty(p, region):
    """Whether no block of `region` is in use."""
    return p.rooms[region] == p.blocks_per_region


@compiled
def take(p, region):
    """The lowest free block of `region`, which has one; its owners are the caller's to set."""
    word = 0
    while not p.bits[region, word]:
        word += 1
    place = trailing_zeros(p.bits[region, word])
    p.bits[region, word] &= ~bit(place)
    room = p.rooms[region]
    _move(p, region, room, room - 1)
    return region * p.blocks_per_region + word * 64 + place


@compiled
def give(p, block):
    """`block` is free again."""
    region = block // p.blocks_per_region
    place = block - region * p.blocks_per_region
    p.bits[region, place >> 6] |= bit(place)
    room = p.rooms[region]
    _move(p, region, room, room + 1)


@inlined
def begin(p, slot, blocks):
    """`slot` is about to take `blocks`: with a plan, from the roomiest regions, empty ones first."""
    p.slots[slot, HOME] = -1
    p.slots[slot, AFFINITY] = -1
    p.slots[slot, PLANNED] = blocks if p.bestfit else 0


@compiled
def _another(p, slot):
    """The region `slot` fills next, all that it had before being full."""
    planned = p.slots[slot, PLANNED] > 0
    region = p.slots[slot, AFFINITY]
    if planned or region < 0 or p.rooms[region] == 0:
        region = roomiest(p)
        if not planned:
            p.slots[slot, AFFINITY] = region
    p.slots[slot, HOME] = region if planned else -1
    return region


@inlined
def pick(p, slot):
    """The region in which `slot` takes its next block: its plan's, then the one it is filling, then the roomiest."""
    region = p.slots[slot, HOME]
    if region < 0 or p.rooms[region] == 0:
        region = _another(p, slot)
    if p.slots[slot, PLANNED] > 0:
        p.slots[slot, PLANNED] -= 1
    return region
