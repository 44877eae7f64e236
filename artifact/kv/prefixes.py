"""What blocks hold: a table from content to block, and vLLM's queue of free blocks that may still be found.

A key stands for a block's tokens and all before them, so equal keys are equal prefixes. Several blocks may hold the
same; the one that came first is found.

The queue is vLLM v1's `FreeKVCacheBlockQueue` and `BlockPool` (v0.20.0, `vllm/v1/core/kv_cache_utils.py` and
`block_pool.py`): a block nobody owns keeps its content and goes to the end of the queue, whoever asks takes from the
front, and what is taken is forgotten. A block that is found again leaves the queue from the middle.
"""

from artifact.compiled import compiled, inlined


@inlined
def _home(p, key):
    """Where `key` would lie in the index if nothing was in its way."""
    return (key * 0x9E3779B97F4A7C15 >> 20) & (p.index.shape[0] - 1)


@inlined
def _place(p, key):
    """Where `key` lies in the index, or the free place where it would."""
    at = _home(p, key)
    while p.index[at, 0] >= 0 and p.index[at, 0] != key:
        at = (at + 1) & (p.index.shape[0] - 1)
    return at


@inlined
def find(p, key):
    """The block that holds `key`, -1 if there is none."""
    return p.index[_place(p, key), 1]


@compiled
def learn(p, block, key):
    """`block` holds `key` now; it held nothing before."""
    p.keys[block] = key
    p.twins[block] = -1
    at = _place(p, key)
    if p.index[at, 0] < 0:
        p.index[at, 0], p.index[at, 1] = key, block
        return
    other = p.index[at, 1]
    while p.twins[other] >= 0:
        other = p.twins[other]
    p.twins[other] = block


@compiled
def forget(p, block):
    """`block`, which holds something, holds nothing now."""
    at = _place(p, p.keys[block])
    p.keys[block] = -1
    if p.index[at, 1] != block:
        other = p.index[at, 1]
        while p.twins[other] != block:
            other = p.twins[other]
        p.twins[other] = p.twins[block]
        return
    if p.twins[block] >= 0:
        p.index[at, 1] = p.twins[block]
        return
    mask = p.index.shape[0] - 1
    gap = at
    p.index[gap, 0], p.index[gap, 1] = -1, -1
    at = (at + 1) & mask
    while p.index[at, 0] >= 0:  # close the gap: whoever could lie in it moves there
        if (at - _home(p, p.index[at, 0])) & mask >= (at - gap) & mask:
            p.index[gap, 0], p.index[gap, 1] = p.index[at, 0], p.index[at, 1]
            p.index[at, 0], p.index[at, 1] = -1, -1
            gap = at
        at = (at + 1) & mask


@inlined
def first(p):
    """The block at the front of the queue."""
    return p.links[p.links.shape[0] - 1, 1]


@inlined
def append(p, block):
    """`block` goes to the end of the queue."""
    end = p.links.shape[0] - 1
    last = p.links[end, 0]
    p.links[block, 0], p.links[block, 1] = last, end
    p.links[last, 1] = p.links[end, 0] = block


@inlined
def remove(p, block):
    """`block` leaves the queue, wherever it stands."""
    before, after = p.links[block, 0], p.links[block, 1]
    p.links[before, 1], p.links[after, 0] = after, before
