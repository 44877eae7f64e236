"""The state of an allocator: arrays of integers, and nothing that grows with use.

Every policy has the same arrays; those it does not use are empty. Compiled rules work on them in place, the engine's
loop and `allocators.Allocator` alike. A sequence is a *slot* here, a small integer. No array is longer than the pool
has blocks, but for a few words per slot: bookkeeping is bounded by blocks, however many operations pass.
"""

from typing import NamedTuple

import numpy as np

from artifact.arena import Arena
from artifact.kv import draws

NAMES = (
    "paged", "pim-aware", "contiguous", "random", "vllm-v1", "sglang", "vllm-v1-region", "sglang-region",
)  # fmt: skip
PAGED, REGION, CONTIGUOUS, RANDOM, QUEUE, RADIX, QUEUE_REGION, RADIX_REGION = range(len(NAMES))
STUDIED, CACHING = NAMES[:QUEUE], NAMES[QUEUE:]  # KV-PIMple's own; those that find contents again
REGIONAL = tuple(NAMES[kind] for kind in (REGION, QUEUE_REGION, RADIX_REGION))
PLANS = ("bestfit", "greedy")
FREES = ("ordered", "unordered")

TALLY = np.dtype([(name, np.int64) for name in (
    "free", "allocated", "freed", "extents", "loose", "revived", "evicted", "hits", "leaves", "clock")])  # fmt: skip
# columns of `slots`: of a contiguous span, and of a sequence that fills regions
START, NEXT, END = range(3)
HOME, AFFINITY, PLANNED = range(3)
# columns of `tree`: of every block, of a node's first block, and of its last one, which names it
INSIDE, FOLLOW, LAST, FIRST, PARENT, PAGES, CHILDREN, TIME, PLACE = range(9)


class Pool(NamedTuple):
    """State of one allocator: N blocks, R regions of G, S slots, G' words of 64 blocks in a region."""

    policy: int
    blocks_per_region: int
    bestfit: bool
    unordered: bool  # a sequence's blocks are freed in random order (paged)
    ahead: int  # free blocks kept without content, beyond what is asked for (the caching ones that fill regions)
    tally: np.ndarray  # TALLY [1]
    refs: np.ndarray  # int32 [N], owners of each block; 0 = free
    links: np.ndarray  # int32 [N + 1, 2]: free ids, the next one last, in column 0; or a ring, previous and next
    slots: np.ndarray  # int64 [S, 3], see the columns above
    extents: np.ndarray  # int64 [S + 2, 2], start and length of free spans, ascending (contiguous)
    rooms: np.ndarray  # int32 [R], free blocks of each region
    bits: np.ndarray  # uint64 [R, G'], bit = block is free
    ranks: np.ndarray  # uint64 [G + 2, words], row g: bitmap of the regions with g free blocks; last: rows with any
    levels: np.ndarray  # int64 [L], where each level of such a bitmap begins, the finest first
    keys: np.ndarray  # int64 [N], what a block holds, -1 = nothing that could be found
    index: np.ndarray  # int64 [power of two, 2], key -> block, open addressing; key -1 = nothing
    twins: np.ndarray  # int32 [N], next block with the same key, -1 = none
    tree: np.ndarray  # int64 [N, 9], radix tree; see the columns above
    heap: np.ndarray  # int32 [N], unlocked leaves, the one last used longest ago first
    some: np.ndarray  # int32 [N], scratch
    draws: np.ndarray  # uint64 [6], the pool's random stream; see `draws`


def padded(policy, num_blocks, blocks_per_region):
    """Pool size a policy uses: those that fill regions round up to whole ones, the others take `num_blocks`."""
    if policy in REGIONAL:
        return -(-num_blocks // blocks_per_region) * blocks_per_region
    return num_blocks


def reserved(policy):
    """Blocks of a pool that are never handed out: vLLM's null block and SGLang's padding page are block 0."""
    return int(policy in CACHING)


def pool(policy, num_blocks, blocks_per_region, slots, *, seed=0, plan="bestfit", frees="ordered", ahead=None):
    """A fresh `Pool`, as an arena, of `num_blocks` for up to `slots` sequences at once.

    `frees`: `unordered` returns a sequence's blocks in an order drawn from `seed` (paged only). `ahead`: see
    `allocators`; None is one eighth of the pool. Raises ValueError for misuse.
    """
    for name, value, allowed in (("allocator", policy, NAMES), ("plan", plan, PLANS), ("frees", frees, FREES)):
        if value not in allowed:
            raise ValueError(f"unknown {name} {value!r}; allowed: {', '.join(allowed)}")
    if frees == "unordered" and policy != "paged":
        raise ValueError(f"frees is 'unordered' with {policy}; allowed: with paged")
    for name, value in (("num_blocks", num_blocks), ("blocks_per_region", blocks_per_region)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{name} is {value!r}; allowed: a whole number of at least 1")
    kind, caching, regional = NAMES.index(policy), policy in CACHING, policy in REGIONAL
    if regional and num_blocks % blocks_per_region:
        raise ValueError(
            f"num_blocks is {num_blocks}; allowed with {policy}: a multiple of {blocks_per_region}, whole regions"
        )
    first = reserved(policy)
    if num_blocks <= first:
        raise ValueError(f"num_blocks is {num_blocks}; allowed with {policy}: 2 or more, as block 0 is not used")
    ahead = num_blocks // 8 if ahead is None else ahead
    if isinstance(ahead, bool) or not isinstance(ahead, (int, np.integer)) or ahead < 0:
        raise ValueError(f"ahead is {ahead!r}; allowed: a whole number of at least 0")
    tally = np.zeros(1, dtype=TALLY)
    tally["free"] = tally["loose"] = num_blocks - first
    refs = np.zeros(num_blocks, dtype=np.int32)
    refs[:first] = 1
    extents = np.zeros((slots + 2 if kind == CONTIGUOUS else 0, 2), dtype=np.int64)
    if kind == CONTIGUOUS:
        extents[0] = 0, num_blocks
        tally["extents"] = 1
    rooms, bits, ranks, levels = _regions(num_blocks if regional else 0, blocks_per_region, first)
    tree = np.zeros((num_blocks if kind in (RADIX, RADIX_REGION) else 0, 9), dtype=np.int64)
    tree[:, [FOLLOW, LAST, FIRST, PARENT, PLACE]] = -1
    width = 1 << (2 * num_blocks - 1).bit_length() if caching else 0
    return Arena(Pool(
        policy=kind,
        blocks_per_region=int(blocks_per_region),
        bestfit=plan == "bestfit",
        unordered=frees == "unordered",
        ahead=int(ahead) if regional else 0,
        tally=tally,
        refs=refs,
        links=_links(kind, num_blocks),
        slots=np.full((slots, 3), 0 if kind == CONTIGUOUS else -1, dtype=np.int64),
        extents=extents,
        rooms=rooms,
        bits=bits,
        ranks=ranks,
        levels=levels,
        keys=np.full(num_blocks if caching else 0, -1, dtype=np.int64),
        index=np.full((width, 2), -1, dtype=np.int64),
        twins=np.full(num_blocks if caching else 0, -1, dtype=np.int32),
        tree=tree,
        heap=np.zeros(len(tree), dtype=np.int32),
        some=np.zeros(num_blocks if len(tree) else 0, dtype=np.int32),
        draws=draws.stream(seed),
    ))


def _links(kind, num_blocks):
    """The free blocks in the order in which a fresh pool of this kind hands them out."""
    links = np.zeros((0 if kind in (REGION, CONTIGUOUS, RADIX_REGION) else num_blocks + 1, 2), dtype=np.int32)
    if kind in (PAGED, RANDOM):
        links[:-1, 0] = np.arange(num_blocks)
    elif kind == RADIX:
        links[: num_blocks - 1, 0] = np.arange(num_blocks - 1, 0, -1)
    elif kind in (QUEUE, QUEUE_REGION):  # a ring through its end, N; 0 is not in it
        ring = np.arange(1, num_blocks + 1) if kind == QUEUE else np.array([num_blocks])
        links[ring, 0], links[ring, 1] = np.roll(ring, 1), np.roll(ring, -1)
    return links


def _regions(num_blocks, size, first):
    """Rooms, bits, ranks and levels of a pool whose blocks below `first` are taken; see `regions`."""
    count = num_blocks // size
    words, levels = [-(-count // 64)], [0]
    while words[-1] > 1:
        levels.append(levels[-1] + words[-1])
        words.append(-(-words[-1] // 64))
    rooms = np.full(count, size, dtype=np.int32)
    bits = np.zeros((count, -(-size // 64)), dtype=np.uint64)
    for word in range(bits.shape[1]):
        bits[:, word] = np.uint64((1 << min(64, size - 64 * word)) - 1)
    if first and count:
        rooms[0] -= first
        bits[0, 0] &= ~np.uint64((1 << first) - 1)
    ranks = np.zeros((size + 2 if count else 0, max(levels[-1] + 1, (size + 64) // 64)), dtype=np.uint64)
    for room in set(rooms.tolist()):
        member = np.flatnonzero(rooms == room)
        for start in levels:
            np.bitwise_or.at(ranks[room], start + (member >> 6), np.uint64(1) << (member & 63).astype(np.uint64))
            member = np.unique(member >> 6)
        ranks[-1, room >> 6] |= np.uint64(1) << np.uint64(room & 63)
    return rooms, bits, ranks, np.array(levels, dtype=np.int64)
