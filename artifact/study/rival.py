"""The study's allocators in plain Python, heaps and all: what ours are timed against. Never used for a result.

Ported from the description of KV-PIMple `allocator.py` (commit eb56d6d): a reference count for each block and a table
for each sequence; `Stack` is its paged allocator, `Heaps` its pim-aware one with the best-fit plan. `Heaps` keeps what
the study's keeps: regions taken through a plan or by affinity stay in the heap of empty regions, and every region that
empties is pushed again, so that the heap grows with use.
"""

import heapq
import sys


class Stack:
    """A list of free blocks, used as a stack."""

    def __init__(self, num_blocks, blocks_per_region):
        self._free = list(range(num_blocks))
        self._owners, self.tables = {}, {}

    def admit(self, seq, blocks):
        """Blocks for a new sequence."""
        self.tables[seq] = []
        self.grow(seq, blocks)

    def grow(self, seq, blocks):
        """More blocks at the end of its table."""
        table = self.tables.setdefault(seq, [])
        for _ in range(blocks):
            block = self._take(seq)
            self._owners[block] = 1
            table.append(block)

    def release(self, seq):
        """All blocks back, in table order."""
        for block in self.tables.pop(seq):
            self._drop(block)
        self._forget(seq)

    def last(self, seq, blocks):
        """The last blocks back."""
        table = self.tables[seq]
        for block in table[len(table) - blocks :]:
            self._drop(block)
        del table[len(table) - blocks :]

    def _drop(self, block):
        self._owners[block] -= 1
        if not self._owners[block]:
            del self._owners[block]
            self._give(block)

    def _take(self, seq):
        return self._free.pop()

    def _give(self, block):
        self._free.append(block)

    def _forget(self, seq):
        pass

    def entries(self):
        """Entries of the heap of empty regions; a stack has none."""
        return 0

    def bytes(self):
        """Size of its containers, each once, and of the whole numbers in them, each value once."""
        seen, todo = {}, list(self.__dict__.values())
        while todo:
            thing = todo.pop()
            name = thing if isinstance(thing, int) else ("object", id(thing))
            if name not in seen:
                seen[name] = sys.getsizeof(thing)
                if isinstance(thing, dict):
                    todo += [*thing, *thing.values()]
                elif isinstance(thing, list):
                    todo += thing
        return sum(seen.values())


class Heaps(Stack):
    """Regions as heaps of free offsets, and a heap of empty regions."""

    def __init__(self, num_blocks, blocks_per_region):
        super().__init__(0, blocks_per_region)
        self._size = blocks_per_region
        self._rooms = [list(range(blocks_per_region)) for _ in range(num_blocks // blocks_per_region)]
        self._empty = list(range(len(self._rooms)))
        self._plans, self._affinity = {}, {}

    def admit(self, seq, blocks):
        rooms, size = self._rooms, self._size
        empty = [r for r in range(len(rooms)) if len(rooms[r]) == size]
        partial = sorted((r for r in range(len(rooms)) if 0 < len(rooms[r]) < size), key=lambda r: (-len(rooms[r]), r))
        plan, covered = [], 0
        for region in [*empty, *partial]:
            if covered >= blocks:
                break
            plan.append(region)
            covered += len(rooms[region])
        self._plans[seq] = plan
        super().admit(seq, blocks)

    def _take(self, seq):
        region = self._pick(seq)
        return region * self._size + heapq.heappop(self._rooms[region])

    def _pick(self, seq):
        plan = self._plans.get(seq, ())
        while plan:
            if self._rooms[plan[0]]:
                return plan[0]
            plan.pop(0)
        region = self._affinity.get(seq)
        if region is not None and self._rooms[region]:
            return region
        while self._empty:
            region = heapq.heappop(self._empty)
            if len(self._rooms[region]) == self._size:
                break
        else:
            region = max(range(len(self._rooms)), key=lambda r: (len(self._rooms[r]), -r))
        self._affinity[seq] = region
        return region

    def _give(self, block):
        region, offset = divmod(block, self._size)
        heapq.heappush(self._rooms[region], offset)
        if len(self._rooms[region]) == self._size:
            heapq.heappush(self._empty, region)

    def _forget(self, seq):
        self._affinity.pop(seq, None)
        self._plans.pop(seq, None)

    def entries(self):
        return len(self._empty)


def serve(allocator, operations):
    """Put `operations`, as `kv.replay.OPERATIONS` numbers them, to a plain Python allocator."""
    calls = (allocator.admit, allocator.grow, lambda seq, _: allocator.release(seq), allocator.last)
    for kind, seq, blocks in operations:
        calls[kind](seq, blocks)
