"""The bytes that the Triton kernels ask memory for, counted while they are interpreted, beside the fewest possible.

Every lane of a load or store that is not masked counts with its size, be it served by memory or by a cache. So a number
read once counts once, and one that several programs or steps read counts as often. Needs TRITON_INTERPRET=1, set before
triton is imported; `python -m artifact.kernels.moved` sets it and prints the table as CSV.
"""

import argparse
import csv
import os
import sys
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple


class Case(NamedTuple):
    """An operator over one sequence: `listed` blocks of `block` tokens for each KV head, `group` query heads each."""

    operator: str
    dtype: str
    block_tokens: int
    listed_count: int
    group_count: int
    missed_count: int = 0  # of the list, for `repair`, where the others are known


DIM, KV_HEADS, CONTEXT, LISTED = 128, 8, 8192, 4096  # channels, and tokens of the cache and of a list
SHORT = Case("attend", "fp16", 128, 2, 4), Case("repair", "fp16", 64, 64, 4, 1)  # what is counted in seconds
CASES = (
    *(Case("attend", "fp16", block, LISTED // block, 4) for block in (16, 32, 64, 128, 256)),
    *(Case("attend", "fp16", 64, LISTED // 64, group) for group in (1, 3, 5, 8, 16, 20)),
    Case("attend", "fp32", 64, LISTED // 64, 4),
    *(Case("repair", "fp16", 64, LISTED // 64, 4, missed) for missed in (0, 4, 16, 64)),
    Case("attend_groups", "fp16", 64, LISTED // 64, 4), Case("merge", "fp32", 64, LISTED // 64, 4),
    Case("quest_scores", "fp16", 16, CONTEXT // 16, 4), Case("infllm_scores", "fp16", 64, CONTEXT // 64, 4),
    *(Case(name, "fp32", 16, CONTEXT // 16, 4) for name in ("ema_step", "topk")), *SHORT,
)
COLUMNS = *Case._fields, "read_bytes", "written_bytes", "fewest_bytes", "triton", "origin"


def fewest(q, kv, blocks):
    """Bytes of one pass of attention over full listed blocks: every listed key and value, q, lists, their pages and the
    lengths read once, the state written once."""
    listed = int((blocks >= 0).sum())
    pages = sum(len(row[row >= 0].unique()) for row in blocks)
    token = 2 * kv.k.shape[3] * kv.k.itemsize
    return (listed * kv.k.shape[2] * token + q.numel() * q.itemsize + (blocks.numel() + pages) * blocks.itemsize
            + kv.length.numel() * kv.length.itemsize + (q.numel() + q.shape[0] * q.shape[1]) * 4)


@contextmanager
def counted():
    """A dict of the bytes `read` and `written` by interpreted kernels meanwhile. ValueError where they are compiled."""
    from triton import knobs
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET is not set; bytes are counted while kernels are interpreted: set it to 1")
    builder, found = interpreter.InterpreterBuilder, {"read": 0, "written": 0}
    load, store = builder.create_masked_load, builder.create_masked_store

    def loading(self, pointers, mask, *others):
        found["read"] += int(mask.data.sum()) * _size(pointers)
        return load(self, pointers, mask, *others)

    def storing(self, pointers, value, mask, *others):
        found["written"] += int(mask.data.sum()) * _size(pointers)
        return store(self, pointers, value, mask, *others)

    builder.create_masked_load, builder.create_masked_store = loading, storing
    try:
        yield found
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


def _size(pointers):
    return pointers.get_element_ty().primitive_bitwidth // 8


def measure(case):
    """A row of `COLUMNS`: bytes read and written by one call of a case's operator, and the fewest to read and write."""
    import triton

    call, least = _call(case)
    with counted() as found:
        call()
    return {**case._asdict(), "read_bytes": found["read"], "written_bytes": found["written"], "fewest_bytes": least,
            "triton": triton.__version__, "origin": "measured"}


def _call(case):
    import torch
    from artifact.kernels import decode, merge, predict, repair, scores, topk
    from artifact.kernels.paged import PagedKV, Partial

    draw, dtype = torch.Generator().manual_seed(0), {"fp32": torch.float32, "fp16": torch.float16}[case.dtype]
    pages, heads, listed = CONTEXT // case.block_tokens, KV_HEADS * case.group_count, case.listed_count

    def some(*shape):
        return torch.randn(*shape, generator=draw).to(dtype)

    q, k, v = some(1, heads, DIM), *(some(pages, KV_HEADS, case.block_tokens, DIM) for _ in range(2))
    kv = PagedKV(k, v, torch.randperm(pages, generator=draw).int()[None], torch.tensor([CONTEXT], dtype=torch.int32))
    blocks = torch.stack([torch.randperm(pages, generator=draw)[:listed] for _ in range(KV_HEADS)]).int()[None]
    state, state_bytes = Partial(torch.zeros(1, heads, DIM), torch.zeros(1, heads)), 4 * heads * (DIM + 1)
    match case.operator:
        case "attend":
            return partial(decode.attend, q, kv, blocks), fewest(q, kv, blocks)
        case "attend_groups":
            return partial(decode.attend_groups, q, kv, blocks, 1), fewest(q, kv, blocks) + (listed - 1) * state_bytes
        case "repair":
            missed = blocks.masked_fill(torch.arange(listed) >= case.missed_count, -1)
            return partial(repair.repair, state, q, kv, missed), fewest(q, kv, missed) + state_bytes
        case "merge":
            parts = Partial(*(x.expand(listed, *x.shape) for x in state))
            return partial(merge.merge, parts), (listed + 1) * state_bytes
        case "quest_scores":
            low, count = some(1, KV_HEADS, listed, DIM), torch.tensor([listed])
            least = q.nbytes + 2 * low.nbytes + count.nbytes + 4 * KV_HEADS * listed
            return partial(scores.quest_scores, q, low, low, count), least
        case "infllm_scores":
            keys, length = some(1, KV_HEADS, CONTEXT // 16 - 1, DIM), torch.tensor([CONTEXT])
            least = q.nbytes + keys.nbytes + length.nbytes + 4 * KV_HEADS * listed
            return partial(scores.infllm_scores, q, keys, length, listed, size=32, stride=16, block=64), least
        case "ema_step":
            arrays = [torch.zeros(KV_HEADS, listed) for _ in range(3)]
            return partial(predict.ema_step, *arrays, (0.2, 0.5, 0.25)), 6 * arrays[0].nbytes
        case "topk":
            ranked, count = some(KV_HEADS, listed), LISTED // case.block_tokens
            return partial(topk.topk, ranked, count), ranked.nbytes + 4 * KV_HEADS * count
    raise ValueError(f"operator is {case.operator!r}; allowed: {', '.join(dict.fromkeys(c.operator for c in CASES))}")


def main(arguments=None):
    """The table as CSV on stdout."""
    parser = argparse.ArgumentParser(prog="python -m artifact.kernels.moved", description=main.__doc__)
    parser.add_argument("--short", action="store_true", help="two cases instead of all, in seconds")
    asked = parser.parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "1"
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for case in SHORT if asked.short else CASES:
        writer.writerow(measure(case))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
