"""Triton: one query per head against listed blocks of a paged cache -> partial states.

What it means stands in `reference.attend`. A program takes up to 16 query heads of one KV head, padded to 16 for the
tensor cores, over a part of that head's list: block -> page table -> K and V where they lie. A batch of one fills a
GPU because the list is split; the parts are then merged. How many parts depends on shapes only, so that the same input
gives the same bits on every GPU.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from artifact.kernels.merge import LOG2E, merge, nothing
from artifact.kernels.paged import Partial

HEADS = 16  # query heads of one program, the M of its products
PROGRAMS = 264  # to split for: two for each of an H100's 132 multiprocessors
PARTS = 64  # at most, that merging stays small beside attending
REGISTERS = 2**16  # of a multiprocessor, from sm80 to sm100


@triton.jit(do_not_specialize=["table_width", "slots", "part_slots", "part_start", "part_step"])
def attend_blocks(q, k, v, page_table, length, blocks, state_out, state_lse, out, lse,
                  q_b, q_h, k_page, k_head, k_token, v_page, v_head, v_token, table_b, blocks_b, blocks_g,
                  kv_heads, group, pages, table_width, slots, part_slots, part_start, part_step, scale_log2,
                  D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
                  SLOTS: tl.constexpr, LISTED: tl.constexpr, CONTINUES: tl.constexpr, WIDEN: tl.constexpr,
                  LOG2E: tl.constexpr):
    """Part p attends to slots p * part_start + j * part_step, j < part_slots; part 0 may continue a state.

    q [B, H, D] and k, v [pages, G, BLOCK, D] with strides, channels next to each other; page_table int32 [B, N];
    blocks int32 [B, G, slots], not LISTED: slot s is block s. -> out [P, B, H, D], lse [P, B, H], contiguous.
    WIDEN: products in float32 whatever the types. Grid: P, B * G, ceil(group / HEADS).
    """
    part = tl.program_id(0)
    b = tl.program_id(1) // kv_heads
    g = tl.program_id(1) % kv_heads
    member = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    head = g * group + member
    channel = tl.arange(0, WIDTH)
    wanted = (member < group)[:, None] & (channel < D)[None, :]
    query = tl.load(q + b * q_b + head[:, None] * q_h + channel[None, :], mask=wanted, other=0.0)

    tokens = tl.load(length + b)
    limit = tl.minimum(table_width, tl.cdiv(tokens, BLOCK))
    table = page_table + b * table_b
    row = blocks + b * blocks_b + g * blocks_g
    start = part * part_start
    # All look-ups at once, before the loop repeats them one by one from the nearest cache: they say how far this part
    # has blocks at all, so that padding, usually at the end, costs nothing.
    index = tl.arange(0, SLOTS)
    named = start + index * part_step
    present = (index < part_slots) & (named < slots)
    if LISTED:
        named = tl.load(row + named, mask=present, other=-1)
    page = tl.load(table + named, mask=present & (named >= 0) & (named < limit), other=-1)
    count = tl.max(tl.where((page >= 0) & (page < pages), index + 1, 0), 0)

    state = tl.program_id(1) // kv_heads * kv_heads * group + head  # b * H + head
    if CONTINUES:
        # (out, lse) is the accumulator with maximum lse and sum 1
        before = tl.load(state_lse + state, mask=(member < group) & (part == 0), other=-float("inf"))
        known = before != -float("inf")
        top = before * LOG2E
        mass = tl.where(known, 1.0, 0.0)
        acc = tl.load(state_out + state[:, None] * D + channel[None, :], mask=wanted & known[:, None], other=0.0)
    else:
        top = tl.full([HEADS], -float("inf"), tl.float32)
        mass = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, WIDTH], tl.float32)

    TILES: tl.constexpr = (BLOCK + TILE - 1) // TILE
    for step in range(0, count * TILES):
        block = start + step // TILES * part_step
        if LISTED:
            block = tl.load(row + block)
        inside = (block >= 0) & (block < limit)
        there = tl.load(table + block, mask=inside, other=-1)
        inside = (there >= 0) & (there < pages)
        at, of = there.to(tl.int64), g.to(tl.int64)
        token = step % TILES * TILE + tl.arange(0, TILE)
        inside = inside & (token < BLOCK) & (token < tokens - block * BLOCK)
        mask = inside[:, None] & (channel < D)[None, :]
        key = tl.load(k + at * k_page + of * k_head + token[:, None] * k_token + channel[None, :], mask=mask,
                      other=0.0)
        value = tl.load(v + at * v_page + of * v_head + token[:, None] * v_token + channel[None, :], mask=mask,
                        other=0.0)
        if WIDEN:
            logits = tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee") * scale_log2
        else:
            logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        logits = tl.where(inside[None, :], logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        fade = tl.exp2(top - shift)
        weight = tl.exp2(logits - shift[:, None])
        mass = mass * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None]
        if WIDEN:
            acc = tl.dot(weight, value.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
        top = new_top

    some = mass > 0.0
    mass = tl.where(some, mass, 1.0)
    place = (part.to(tl.int64) * (tl.num_programs(1) * group) + state)
    tl.store(out + place[:, None] * D + channel[None, :], acc / mass[:, None], mask=wanted)
    tl.store(lse + place, tl.where(some, (top + tl.log2(mass)) / LOG2E, -float("inf")), mask=member < group)


INTERPRETED = not isinstance(attend_blocks, triton.JITFunction)  # TRITON_INTERPRET was set at import


class Configuration(NamedTuple):
    """How `attend_blocks` is compiled for a head size, a block size and a type; `aot` says what each comes to."""

    width: int  # D padded to a power of two
    tile: int  # tokens of one step
    warps: int
    stages: int
    registers: int | None  # a thread's at most; None: the assembler's own choice


def configuration(dim, block, dtype):
    """Tiles of 16 KiB and two of them under way each for K and V, or up to four of smaller ones."""
    width = max(16, triton.next_power_of_2(dim))
    size = 4 if dtype == torch.float32 else 2
    tile = max(16, min(2**14 // (width * size), 128, triton.next_power_of_2(block)))
    buffers = min(4, 2**15 // (tile * width * size))
    if size == 2:
        return Configuration(width, tile, 4, buffers + 1, None)
    # float32 products are multiply-adds of registers, and of fewer warps each holds more than it has: whatever bound it
    # is given it reaches, and spills a few bytes of some shapes. The bound is an even share of a multiprocessor's; the
    # assembler's own choice is a share of several programs' there, and spills too.
    warps = 16 if width > 64 else 8
    return Configuration(width, tile, warps, buffers + 1, min(255, REGISTERS // (warps * 32)))


def attend(q, kv, blocks, parts=None):
    """`reference.attend`; `blocks` None: every block. parts: how often to split the lists (None: from the shapes)."""
    return _split(q, kv, blocks, None, parts)


def attend_groups(q, kv, blocks, group):
    """`reference.attend_groups`: a partial state for every `group` slots."""
    slots = blocks.shape[2]
    return _launch(q, kv, blocks, None, parts=-(-slots // group), part_slots=min(group, slots), part_start=group,
                   part_step=1)


def dense(q, kv):
    """`reference.dense`."""
    return attend(q, kv, None)


def continued(state, q, kv, blocks, parts=None):
    """`state` and, in part 0's accumulator, attention over `blocks`; no launch over a list without slots."""
    return _split(q, kv, blocks, state, parts) if blocks.shape[2] else state


def _split(q, kv, blocks, state, parts):
    slots = kv.page_table.shape[1] if blocks is None else blocks.shape[2]
    if not slots:
        return nothing(*q.shape, q.device)
    if parts is None:
        rows = q.shape[0] * kv.k.shape[1] * -(-q.shape[1] // kv.k.shape[1] // HEADS)
        # smaller blocks leave room for more programs on a multiprocessor, and need them to keep as much in flight
        whole, tile = (configuration(q.shape[2], block, kv.k.dtype).tile for block in (256, kv.k.shape[2]))
        parts = min(PARTS, max(1, PROGRAMS * whole // tile // max(1, rows)))
    part_slots = -(-slots // min(parts, slots))
    parts = -(-slots // part_slots)
    # slots in turn: a list whose second half is padding still keeps every part busy
    split = _launch(q, kv, blocks, state, parts=parts, part_slots=part_slots, part_start=1, part_step=parts)
    return Partial(split.out[0], split.lse[0]) if parts == 1 else merge(split)


def _launch(q, kv, blocks, state, *, parts, part_slots, part_start, part_step):
    batch, heads, dim = q.shape
    pages, kv_heads, size, _ = kv.k.shape
    out = torch.empty(parts, batch, heads, dim, device=q.device)
    lse = torch.empty(parts, batch, heads, device=q.device)
    if not parts:
        return Partial(out, lse)
    listed, slots = blocks is not None, (kv.page_table if blocks is None else blocks).shape[-1]
    q = q if q.stride(2) == 1 else q.contiguous()
    blocks = kv.page_table if not listed else blocks if blocks.stride(2) == 1 else blocks.contiguous()
    table = kv.page_table if kv.page_table.stride(1) == 1 else kv.page_table.contiguous()
    widen = q.dtype != kv.k.dtype or (INTERPRETED and q.dtype == torch.bfloat16)  # the interpreter's bf16 dot is wrong
    config = configuration(dim, size, torch.float32 if widen else q.dtype)
    before = Partial(out, lse) if state is None else Partial(*(x.contiguous() for x in state))
    group = heads // kv_heads
    with torch.cuda.device_of(q):
        attend_blocks[(parts, batch * kv_heads, -(-group // HEADS))](
            q, kv.k, kv.v, table, kv.length.contiguous(), blocks, *before, out, lse,
            q.stride(0), q.stride(1), *kv.k.stride()[:3], *kv.v.stride()[:3], table.stride(0), *blocks.stride()[:2],
            kv_heads, group, pages, table.shape[1], slots, part_slots, part_start, part_step, dim ** -0.5 * LOG2E,
            D=dim, WIDTH=config.width, BLOCK=size, TILE=config.tile, HEADS=HEADS,
            SLOTS=max(16, triton.next_power_of_2(part_slots)), LISTED=listed, CONTINUES=state is not None,
            WIDEN=widen, LOG2E=LOG2E, num_warps=config.warps, num_stages=config.stages,
            maxnreg=config.registers)
    return Partial(out, lse)
