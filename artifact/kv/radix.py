"""SGLang's radix cache over its pool of pages: prefixes as a tree, leaves evicted, the longest unused one first.

Port of `python/sglang/srt/mem_cache/radix_cache.py` (commit 006b0e3d) and of `PagedTokenToKVPoolAllocator` of
`allocator.py` (commit 02e29cb1); a page is a block. A node is a run of blocks that were inserted together, split where
a later prefix ends or leaves it; it is evicted whole. Requests lock the nodes of their prefix. A prompt is inserted
when its request is admitted, the rest when it is released; blocks that hold what the tree has already go back at once.
Freed pages are sorted and taken before all others that are free.

Deviations: requests are served one at a time, so that what is evicted at once is what one of them asks for; a lock is
the number of owners of a node's blocks, which is the same as long as prefixes are shared from their beginning;
forked sequences, which SGLang does not have, split a node where the number of owners changes.
"""

from artifact.compiled import compiled
from artifact.kv import prefixes
from artifact.kv.pool import CHILDREN, FIRST, FOLLOW, INSIDE, LAST, PAGES, PARENT, PLACE, TIME


@compiled
def _lift(p, at):
    """Move the leaf at `at` of the heap to where it belongs."""
    t = p.tally[0]
    node = p.heap[at]
    time = p.tree[node, TIME]
    while at > 0 and p.tree[p.heap[(at - 1) >> 1], TIME] > time:
        p.heap[at] = p.heap[(at - 1) >> 1]
        p.tree[p.heap[at], PLACE] = at
        at = (at - 1) >> 1
    while 2 * at + 1 < t.leaves:
        below = 2 * at + 1
        if below + 1 < t.leaves and p.tree[p.heap[below + 1], TIME] < p.tree[p.heap[below], TIME]:
            below += 1
        if p.tree[p.heap[below], TIME] >= time:
            break
        p.heap[at] = p.heap[below]
        p.tree[p.heap[at], PLACE] = at
        at = below
    p.heap[at] = node
    p.tree[node, PLACE] = at


@compiled
def settle(p, node):
    """Put `node` into the heap, or take it out: unlocked leaves are there, in order of last use."""
    t = p.tally[0]
    place = p.tree[node, PLACE]
    if p.refs[node] == 0 and p.tree[node, CHILDREN] == 0:
        if place < 0:
            place = t.leaves
            t.leaves += 1
            p.heap[place] = node
        _lift(p, place)
    elif place >= 0:
        t.leaves -= 1
        p.tree[node, PLACE] = -1
        if place < t.leaves:
            p.heap[place] = p.heap[t.leaves]
            _lift(p, place)


@compiled
def _split(p, node, pages):
    """Make the first `pages` blocks of `node` a node of their own -> that one, whose only child `node` is now."""
    upper = first = p.tree[node, FIRST]
    for _ in range(pages - 1):
        upper = p.tree[upper, FOLLOW]
    rest = p.tree[upper, FOLLOW]
    p.tree[upper, FOLLOW] = -1
    p.tree[upper, FIRST], p.tree[first, LAST] = first, upper
    p.tree[upper, PARENT], p.tree[upper, PAGES] = p.tree[node, PARENT], pages
    p.tree[upper, CHILDREN], p.tree[upper, TIME], p.tree[upper, PLACE] = 1, p.tree[node, TIME], -1
    p.tree[node, FIRST], p.tree[rest, LAST] = rest, node
    p.tree[node, PARENT] = upper
    p.tree[node, PAGES] -= pages
    return upper


@compiled
def after(p, above, key):
    """The block that holds `key` right below the block `above` of the tree, -1 = the root; -1 if there is none."""
    block = prefixes.find(p, key)
    if block < 0:
        return -1
    if above >= 0 and p.tree[above, FOLLOW] == block:
        return block
    last = p.tree[block, LAST]
    return block if last >= 0 and p.tree[last, PARENT] == above else -1


@compiled
def descend(p, row, pages):
    """Follow the blocks `row[:pages]`, or those with the same content, through the tree, which is a use of them.

    -> the node that ends there, split off if need be; -1, the root, for no pages.
    """
    t = p.tally[0]
    t.clock += 1
    node, done = -1, 0
    while done < pages:
        node = p.tree[prefixes.find(p, p.keys[row[done]]), LAST]
        p.tree[node, TIME] = t.clock
        if p.tree[node, PLACE] >= 0:
            _lift(p, p.tree[node, PLACE])
        if p.tree[node, PAGES] > pages - done:
            node = _split(p, node, pages - done)
        done += p.tree[node, PAGES]
    return node


@compiled
def lock(p, row, start, pages):
    """One more owner for the blocks `row[start:pages]`; all of `row[:pages]` are in the tree -> the node they end."""
    t = p.tally[0]
    node = descend(p, row, pages)
    for i in range(start, pages):
        if p.refs[row[i]] == 0:
            t.free -= 1
            t.revived += 1
        p.refs[row[i]] += 1
    if node >= 0:
        settle(p, node)
    return node


@compiled
def insert(p, node, row, start, end):
    """The blocks `row[start:end]`, whose keys are new to the tree, go below `node`, a node for each run of owners."""
    t = p.tally[0]
    t.clock += 1  # later than what was split on the way: no two leaves have the same time
    above = node
    for i in range(start, end):
        block = row[i]
        prefixes.learn(p, block, p.keys[block])
        p.tree[block, INSIDE] = 1
        p.tree[block, FOLLOW] = p.tree[block, PLACE] = p.tree[block, LAST] = -1
        if i > start and p.refs[block] == p.refs[row[i - 1]]:
            p.tree[row[i - 1], FOLLOW] = block
            p.tree[block, FIRST], p.tree[block, PAGES] = p.tree[row[i - 1], FIRST], p.tree[row[i - 1], PAGES] + 1
        else:
            above = node
            p.tree[block, FIRST], p.tree[block, PAGES] = block, 1
        p.tree[p.tree[block, FIRST], LAST] = block
        p.tree[block, PARENT], p.tree[block, CHILDREN], p.tree[block, TIME] = above, 0, t.clock
        node = block
        if p.tree[block, PAGES] == 1 and above >= 0:
            p.tree[above, CHILDREN] += 1
            settle(p, above)
    if start < end:
        settle(p, node)


@compiled
def evict(p, blocks):
    """Free whole leaves, the one last used longest ago first, until `blocks` have been freed -> how many were.

    They are in `p.some[:count]`, the one to be taken first last.
    """
    t = p.tally[0]
    count = 0
    while count < blocks and t.leaves:
        node = p.heap[0]
        parent = p.tree[node, PARENT]
        block, begun = p.tree[node, FIRST], count
        for _ in range(p.tree[node, PAGES]):
            p.some[count] = block
            count += 1
            prefixes.forget(p, block)
            p.tree[block, INSIDE] = 0
            block = p.tree[block, FOLLOW]
        p.tree[node, CHILDREN] = 1  # no leaf any more
        settle(p, node)
        if parent >= 0:
            p.tree[parent, CHILDREN] -= 1
            settle(p, parent)
        newest_last(p.some, begun, count)
    t.evicted += count
    return count


@compiled
def newest_last(some, start, end):
    """Sort the blocks `some[start:end]` so that the lowest is last, where free pages are taken from."""
    some[start:end].sort()
    low, high = start, end - 1
    while low < high:
        some[low], some[high] = some[high], some[low]
        low += 1
        high -= 1


def order(p):
    """The blocks of the tree that nobody owns, a list, in the order in which they would be evicted."""
    leaves = {int(node): int(p.tree[node, TIME]) for node in p.heap[: p.tally[0]["leaves"]]}
    gone, out = {}, []
    while leaves:
        node = min(leaves, key=leaves.get)
        del leaves[node]
        block = int(p.tree[node, FIRST])
        while block >= 0:
            out.append(block)
            block = int(p.tree[block, FOLLOW])
        above = int(p.tree[node, PARENT])
        gone[above] = gone.get(above, 0) + 1
        if above >= 0 and p.refs[above] == 0 and gone[above] == p.tree[above, CHILDREN]:
            leaves[above] = int(p.tree[above, TIME])
    return out
