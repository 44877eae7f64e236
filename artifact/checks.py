"""What the attention operators are given: checks of shapes, which cost nothing, and of contents, which read data.

Each is a ValueError of one line with the name, what it is and what is allowed. Loads neither torch nor Numba.
"""

import functools

import numpy as np

CACHED = ("torch.float32", "torch.bfloat16", "torch.float16")
LANES = 16  # channels that "cpu" takes at a time
LARGEST_DIM = 256  # that a tile of "triton" has room for


_named = functools.cache(str)  # a dtype's name, which torch builds anew each time


def shown(array):
    """`float32 [2, 3]`"""
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"


def cache(q, kv, impl):
    """ValueError unless q [B, H, D] and the cache fit each other and `impl`."""
    if q.ndim != 3:
        raise ValueError(f"q is {shown(q)}; allowed: [B, H, D]")
    (batch, heads, dim), shape = q.shape, kv.k.shape
    if len(shape) != 4 or shape[3] != dim or not shape[2] or not dim:
        raise ValueError(f"k is {shown(kv.k)}; allowed beside q {shown(q)}: [pages, G, block, {dim}]")
    if kv.v.shape != shape or kv.v.dtype != kv.k.dtype:
        raise ValueError(f"v is {shown(kv.v)}; allowed: shape and dtype of k, {shown(kv.k)}")
    kv_heads = shape[1]
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} KV heads; allowed: a multiple of them")
    doubles = ("torch.float64",) if impl == "reference" else ()
    for name, tensor in (("q", q), ("k", kv.k)):
        if _named(tensor.dtype) not in CACHED and _named(tensor.dtype) not in doubles:
            raise ValueError(f"{name} is {shown(tensor)}; impl {impl!r} allows float32, bfloat16, float16"
                             + ", float64" * bool(doubles))
    for name, tensor in (("k", kv.k), ("v", kv.v)):
        if tensor.stride(3) != 1 and dim > 1:
            raise ValueError(f"{name} has strides {list(tensor.stride())}; allowed: 1 over the channels, the last axis")
    if impl == "cpu" and dim % LANES:
        raise ValueError(f"q is {shown(q)}: {dim} channels; impl 'cpu' allows a multiple of {LANES}")
    if impl == "triton" and dim > LARGEST_DIM:
        raise ValueError(f"q is {shown(q)}: {dim} channels; impl 'triton' allows at most {LARGEST_DIM}")
    _whole("page_table", kv.page_table, batch, "N")
    _whole("length", kv.length, batch)


def lists(q, kv, **blocks):
    """ValueError unless the named lists of blocks are int32 [B, G, S] beside the queries."""
    ((name, given),) = blocks.items()
    _whole(name, given, q.shape[0], kv.k.shape[1], "S")


def partial(parts, q=None, *, impl):
    """ValueError unless `parts` is attention over some blocks, of `q` or, without it, of several parts."""
    lead = 1 if q is None else 0
    shape = parts.out.shape
    fits = len(shape) == 3 + lead and shape[:-1] == parts.lse.shape and (q is None or shape == q.shape)
    kinds = ("torch.float32", "torch.float64") if impl == "reference" else ("torch.float32",)
    if not fits or _named(parts.out.dtype) not in kinds or parts.lse.dtype != parts.out.dtype:
        allowed = "[P, B, H, D] and [P, B, H]" if q is None else f"{list(q.shape)} and {list(q.shape[:2])}"
        raise ValueError(f"out is {shown(parts.out)} and lse {shown(parts.lse)}; allowed: float32 {allowed}")
    same_device(out=parts.out, lse=parts.lse, **({} if q is None else {"q": q}))


def mask(keep, parts):
    """ValueError unless keep is bool [P, B, G] beside the parts."""
    count, batch, heads, _ = parts.out.shape
    if (keep.ndim != 3 or tuple(keep.shape[:2]) != (count, batch) or "bool" not in str(keep.dtype)
            or not keep.shape[2] or heads % keep.shape[2]):
        raise ValueError(f"keep is {shown(keep)}; allowed: bool [{count}, {batch}, G], G a divisor of {heads}")
    same_device(out=parts.out, keep=keep)


def same_device(**tensors):
    """ValueError unless all tensors lie on the first one's device."""
    first, home = None, None
    for name, tensor in tensors.items():
        if home is None:
            first, home = name, tensor.device
        elif tensor.device != home:
            raise ValueError(f"{name} is on {tensor.device}; allowed: the device of {first}, {home}")


def contents(kv, name="blocks", blocks=None):
    """ValueError unless lengths fit the table and each list names blocks of its sequence, with a page, each once.

    Without lists all blocks of every sequence count. What lies on another device is copied, which waits for it.
    """
    pages, kv_heads, size, _ = kv.k.shape
    table, length = kv.page_table.cpu().numpy(), kv.length.cpu().numpy()
    if length.size and (length.min() < 0 or length.max() > table.shape[1] * size):
        wrong = length.min() if length.min() < 0 else length.max()
        raise ValueError(f"length holds {wrong}; allowed: 0 to {table.shape[1] * size}, what page_table has room for")
    ends = -(-length // size)
    if blocks is None:
        listed = np.where(np.arange(table.shape[1]) < ends[:, None], np.arange(table.shape[1]), -1)[:, None]
    else:
        listed = np.sort(blocks.cpu().numpy(), axis=2)
    if not listed.size:
        return
    outside = (listed < -1) | (listed >= ends[:, None, None])
    if outside.any():
        b, g, s = np.argwhere(outside)[0]
        raise ValueError(f"{name} holds {listed[b, g, s]} for sequence {b}, KV head {g}; allowed: -1 and "
                         f"0 to {ends[b] - 1}, the blocks of its {length[b]} tokens")
    twice = (listed[:, :, 1:] == listed[:, :, :-1]) & (listed[:, :, 1:] >= 0)
    if twice.any():
        b, g, s = np.argwhere(twice)[0]
        raise ValueError(f"{name} holds {listed[b, g, s]} twice for sequence {b}, KV head {g}; allowed: "
                         "each block once")
    if not table.shape[1]:
        return
    page = table[np.arange(table.shape[0])[:, None, None], listed]  # -1 takes the last one, which does not count
    astray = ((page < 0) | (page >= pages)) & (listed >= 0)
    if astray.any():
        b, g, s = np.argwhere(astray)[0]
        raise ValueError(f"page_table holds {page[b, g, s]} for block {listed[b, g, s]} of sequence {b}; allowed: "
                         f"0 to {pages - 1}")


def _whole(name, given, *shape):
    """ValueError unless `given` is int32 of a shape, in which a letter stands for any number."""
    found = given.shape
    fits = len(found) == len(shape) and all(n == m or isinstance(n, str) for n, m in zip(shape, found, strict=True))
    if not fits or _named(given.dtype) != "torch.int32":
        raise ValueError(f"{name} is {shown(given)}; allowed: int32 [{', '.join(map(str, shape))}]")
