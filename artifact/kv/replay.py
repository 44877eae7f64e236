"""The block ids an allocator hands out for a recorded sequence of operations, as the real engines were asked."""

import json
from pathlib import Path

import numpy as np

from artifact.compiled import compiled
from artifact.kv import allocators
from artifact.kv.pool import QUEUE
from artifact.pim import geometry

OPERATIONS = ("admit", "grow", "release", "last")
ADMIT, GROW, RELEASE, LAST = range(len(OPERATIONS))


@compiled
def operate(p, operations, tables, held):
    """Put `operations`, int64 [n, 3] of `OPERATIONS`, slot and blocks, to the pool `p`; nothing is checked.

    `tables` int32 [slots, blocks] and `held` int64 [slots] are what each slot has. Where content is kept, every block
    but a sequence's last has some of its own.
    """
    keys = np.zeros(tables.shape[1], dtype=np.int64)
    for i in range(operations.shape[0]):
        kind, slot, blocks = operations[i]
        row = tables[slot]
        if kind == ADMIT and p.policy < QUEUE:
            allocators.open_slot(p, slot, blocks, blocks)
            allocators.take_into(p, slot, row, 0, blocks)
            held[slot] = blocks
        elif kind == ADMIT:
            for j in range(blocks):
                keys[j] = i << 20 | j
            allocators.enter(p, slot, row, blocks, keys, max(0, blocks - 1), 0)
            held[slot] = blocks
        elif kind == GROW:
            if p.policy >= QUEUE and held[slot]:
                allocators.know(p, row[held[slot] - 1], i << 20)
            allocators.take_into(p, slot, row, held[slot], blocks)
            held[slot] += blocks
        elif kind == LAST:
            held[slot] -= blocks
            allocators.give_last(p, slot, row[held[slot] : held[slot] + blocks])
        else:
            allocators.release(p, slot, row, held[slot])
            held[slot] = 0


_DRAM, _MODEL = "hbm3-pim", "llama-gqa-8kv"  # the study's: they size the regions of pim-aware


def replay(path, policy):
    """Block ids `policy` hands out for the operations in the JSON file `path`: a list per operation, None for a free.

    Raises ValueError naming file and operation for anything but
    `{"pool_blocks": N, "block_tokens": T, "ops": [["alloc" | "append", seq, tokens], ["free", seq], ...]}`.
    """
    name = Path(path).name
    try:
        entry = json.loads(Path(path).read_text(encoding="utf-8"))
        size, tokens_per_block, ops = entry["pool_blocks"], entry["block_tokens"], list(entry["ops"])
    except (ValueError, KeyError, TypeError) as error:
        why = (
            f"missing {error}"
            if isinstance(error, KeyError)
            else "not a JSON object with pool_blocks, block_tokens and ops"
        )
        raise ValueError(f"{name}: {why}") from None
    region = geometry.blocks_per_region(
        geometry.dram(_DRAM), geometry.shape(_MODEL).kv_bytes_per_token, tokens_per_block
    )
    slots = max(1, sum(op[:1] == ["alloc"] for op in ops if isinstance(op, list)))
    pool = allocators.Allocator(policy, allocators.padded(policy, size, region), blocks_per_region=region, slots=slots)
    lengths, answers = {}, []
    for number, op in enumerate(ops):
        try:
            answers.append(_replay_one(pool, lengths, tokens_per_block, op))
        except (ValueError, allocators.OutOfBlocks) as error:
            raise ValueError(f"{name} operation {number}: {error}") from None
    return answers


def _replay_one(pool, lengths, tokens_per_block, op):
    kinds = {"alloc": 3, "append": 3, "free": 2}
    if not isinstance(op, list) or not op or op[0] not in kinds or len(op) != kinds[op[0]]:
        raise ValueError(f"{op!r}; allowed: ['alloc' | 'append', seq, tokens] or ['free', seq]")
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in op[1:]):
        raise ValueError(f"{op!r}; allowed: whole numbers of at least 0")
    if op[0] == "free":
        pool.release(op[1])
        del lengths[op[1]]
        return None
    if op[0] == "alloc":
        new = pool.admit(op[1], -(-op[2] // tokens_per_block))
        lengths[op[1]] = op[2]
        return new
    held = len(pool.table(op[1]))
    new = pool.grow(op[1], max(0, -(-(lengths[op[1]] + op[2]) // tokens_per_block) - held))
    lengths[op[1]] += op[2]
    return new
