"""The one doorway to the kernels: checks what it is given, picks the implementation asked for, calls it.

`impl` is "reference" (torch, any device), "cpu" (Numba) or "triton" (a GPU, or Triton's interpreter); what is asked for
is what runs, and an implementation that cannot run is a ValueError that says why.
Importing this module imports neither torch nor Numba.

Shapes: B sequences, H query heads, G KV heads, D channels, N blocks, S slots of a list; query head h uses KV head
h // (H/G). A list of blocks is int32 [B, G, S], a sequence's blocks in any order, each once, -1 for a slot without one.
A score of -inf means that the block cannot be selected, NaN is given as -inf, +inf comes first.

Attention works on float32, bfloat16 or float16 caches and queries, gives float32 (from a float64 q of "reference"
float64), and is registered with torch as `artifact::attend` and so on. For tensors on the CPU the contents are checked
too: lengths, lists and pages in range, no block twice. For others `validate` does so on request, since it waits for the
device; the kernels take what is out of range for a slot without a block, and never read there.
"""

import math

import numpy as np

from artifact import checks
from artifact.checks import shown
from artifact.kernels.paged import PagedKV, Partial

IMPLS = ("reference", "cpu", "triton")
GROUPS = ("mean", "max", "sum")


def attend(q, kv: PagedKV, blocks, *, impl="cpu", parts=None) -> Partial:
    """Attention of one query per head over exactly the listed blocks, logits scaled by 1 / sqrt(D).

    q [B, H, D]; blocks int32 [B, G, S]. The last block counts up to the sequence's length. parts: into how many each
    list is split on a GPU at most, so that it leaves room for what runs beside it (None: as many as fill the GPU).
    """
    from artifact import attention

    if parts is not None and (int(parts) != parts or parts < 1):
        raise ValueError(f"parts is {parts}; allowed: a whole number of at least 1")
    return Partial(*attention.attend(q, *kv, blocks, impl, parts))


def attend_groups(q, kv: PagedKV, blocks, group, *, impl="cpu") -> Partial:
    """`attend` over every `group` slots of the lists: a Partial with a leading axis of ceil(S / group)."""
    from artifact import attention

    if int(group) != group or group < 1:
        raise ValueError(f"group is {group}; allowed: a whole number of at least 1")
    return Partial(*attention.attend_groups(q, *kv, blocks, int(group), impl))


def repair(state: Partial, q, kv: PagedKV, missed, *, impl="cpu") -> Partial:
    """`state`, attention over some blocks, continued over the `missed` ones, int32 [B, G, S]: attention over both.

    None of the missed blocks may be among those of the state, which nothing here can check.
    """
    from artifact import attention

    return Partial(*attention.repair(*state, q, *kv, missed, impl))


def merge(parts: Partial, keep=None, *, impl="cpu") -> Partial:
    """Parts of attention, [P, B, H, D] and [P, B, H], as one; no token may be in two of them.

    keep bool [P, B, G]: which parts count, by KV head (None = all). Others may hold anything, NaN too.
    """
    from artifact import attention

    return Partial(*attention.merge(*parts, keep, impl))


def dense(q, kv: PagedKV, *, impl="cpu") -> Partial:
    """Attention over every token of each sequence."""
    from artifact import attention

    return Partial(*attention.dense(q, *kv, impl))


def validate(kv: PagedKV, blocks=None):
    """ValueError unless lengths fit the page table, lists name blocks of their sequence once, and these have a page.

    blocks int32 [B, G, S]; None = every block of each sequence. Waits for the device that the tensors are on.
    """
    checks.contents(kv, blocks=blocks)


def quest_scores(q, low, high, pages=None, *, group="max", impl="cpu"):
    """Quest's page scores: the sum over channels of max(q * low, q * high), an upper bound of every q.k in the page.

    q [B, H, D]; low, high [B, G, N, D], the smallest and largest key of a page per channel, low <= high, of one dtype;
    or [1, G, N, D] for all sequences alike. Float32, bfloat16 or float16 torch tensors ("reference" also float64).
    pages: int [B], the first pages that count in each sequence; None = all.
    group: "mean" (the score of the group's mean query), "max" or "sum" (of its heads' scores).
    -> float32 [B, G, N] (float64 from a float64 q); -inf where a page does not count or the score is NaN.
    """
    _queries(q, low, "low")
    if high.shape != low.shape or high.dtype != low.dtype:
        raise ValueError(f"high is {shown(high)}; allowed: shape and dtype of low, {shown(low)}")
    if group not in GROUPS:
        raise ValueError(f"group is {group!r}; allowed: {', '.join(GROUPS)}")
    pages = _counts("pages", pages, q, low.shape[2])
    if impl == "triton":
        return _triton("quest_scores", q, low, high).quest_scores(q, low, high, pages, group=group)
    if _reference("quest_scores", impl, q, low, high):
        from artifact.kernels import reference

        return reference.quest_scores(q, low, high, pages, group=group)
    from artifact.kernels import cpu

    q, low, high = (_filled(x) for x in (q, low, high))
    heads, count = _heads(q, low.shape[1], mean=group == "mean")
    out = np.empty((q.shape[0], low.shape[1], low.shape[2]), np.float32)
    cpu.quest_scores(heads, count, stored(low), stored(high), pages.numpy(), group == "sum", out)
    return _tensor(out)


def infllm_scores(q, keys, length, *, size=32, stride=16, block=64, blocks=None, impl="cpu"):
    """InfLLM-v2's block scores: softmax over compressed keys, summed over the group, the largest in each block.

    q [B, H, D]; keys [B, G, C, D], or [1, G, C, D] for all sequences alike: key c is the mean of the keys of tokens
    c * stride to c * stride + size - 1. Float32, bfloat16 or float16 torch tensors ("reference" also float64).
    length: int [B], tokens of each sequence; windows that reach past it do not count. size, stride, block: tokens.
    blocks: N, for lengths on a GPU, which are waited for otherwise (None: ceil(max(length) / block)).
    -> float32 [B, G, N] (float64 from a float64 q); -inf where no key that counts overlaps.
    """
    _queries(q, keys, "keys")
    if stride < 1 or size < stride or size % stride or block < stride or block % stride:
        raise ValueError(f"size, stride and block are {size}, {stride} and {block}; allowed: multiples of stride >= 1")
    given, length = length, _counts("length", length, q, None)
    if impl == "triton":
        import torch

        if blocks is None:
            blocks = -(-int(torch.as_tensor(given).max() if len(given) else 0) // block)
        return _triton("infllm_scores", q, keys).infllm_scores(q, keys, length, blocks, size=size, stride=stride,
                                                               block=block)
    if _reference("infllm_scores", impl, q, keys):
        from artifact.kernels import reference

        return reference.infllm_scores(q, keys, length, size=size, stride=stride, block=block, blocks=blocks)
    from artifact.kernels import cpu

    heads, count = _heads(q, keys.shape[1])
    heads *= np.float32(q.shape[2] ** -0.5)
    length = length.numpy()
    blocks = -(-int(length.max(initial=0)) // block) if blocks is None else blocks
    out = np.empty((q.shape[0], keys.shape[1], blocks), np.float32)
    counts = np.maximum((length - size) // stride + 1, 0)
    cpu.infllm_scores(heads, count, stored(keys), counts, block // stride, size // stride - 1, out)
    return _tensor(out)


def ema_step(level, trend, scores, theta, *, impl="cpu"):
    """One step of PRR's predictor: the new level and trend of every block, and the score to expect next.

    level, trend, scores: float32 of one shape [..., N], torch tensors or NumPy arrays; the same comes back, new.
    theta = (alpha, beta, gamma). A block not scored so far has level -inf and trend 0; its first finite score becomes
    its level. One that now has no score, -inf or NaN, goes back to that.
    -> level, trend, prediction. All implementations agree to the last bit.
    """
    theta = _smoothing(level, trend, scores, scores.shape, theta)
    plain, given = isinstance(scores, np.ndarray), (level, trend, scores)
    if impl == "triton":
        tensors = [_tensor(array) if plain else array for array in given]
        new = _triton("ema_step", *tensors).ema_step(*tensors, theta)
        return tuple(array.numpy() for array in new) if plain else new
    if _reference("ema_step", impl, *(() if plain else given)):
        from artifact.kernels import reference

        new = reference.ema_step(*(_tensor(array) if plain else array for array in given), theta)
        return tuple(array.numpy() for array in new) if plain else new
    return tuple(array[0] for array in _ema_rows(level, trend, scores[None], theta))


def ema_steps(level, trend, scores, theta, *, impl="cpu"):
    """`ema_step` with the scores of several steps, float32 [T, ..., N], one after another.

    -> level, trend, prediction after each of them, [T, ..., N] as well.
    """
    theta = _smoothing(level, trend, scores, scores.shape[1:], theta)
    plain = isinstance(scores, np.ndarray)
    if impl != "cpu":
        made = []
        for row in scores:
            made.append(ema_step(level, trend, row, theta, impl=impl))
            level, trend, _ = made[-1]
        join = np.stack if plain else _stacked
        return tuple(join(arrays) for arrays in zip(*made, strict=True)) if made else (scores, scores, scores)
    _reference("ema_steps", impl, *(() if plain else (level, trend, scores)))
    return _ema_rows(level, trend, scores, theta)


def topk(scores, count, forced=None, *, impl="cpu", slots=None):
    """The `count` blocks with the highest scores, exactly; of equal scores those with the lowest index.

    scores: float32 [..., N], a torch tensor or a NumPy array; NaN and -inf cannot be chosen, +inf comes first.
    forced: bool [..., N], with fewer leading axes or ones of 1: blocks that are in whatever their score. They take
    their places of the `count` first, and all of them are in even when they are more.
    slots: S, past which blocks are left out; with it nothing is asked of a GPU, and `count` may be an int tensor with
    one number for each list. Not of "cpu".
    -> int32 [..., S], ascending, -1 after the last; S is `count`, or the most forced blocks of a row.
    """
    several = getattr(count, "ndim", 0)
    if not several and (int(count) != count or count < 0):
        raise ValueError(f"count is {count}; allowed: a whole number of at least 0")
    if (several or slots is not None) and (impl == "cpu" or slots is None or int(slots) != slots or slots < 0):
        raise ValueError(f"slots is {slots} with impl {impl!r}; allowed with 'reference' and 'triton': a whole number "
                         "of at least 0, and needed where each list has its own count")
    plain = isinstance(scores, np.ndarray)
    if "float32" not in str(scores.dtype) or not scores.ndim:
        raise ValueError(f"scores are {shown(scores)}; allowed: float32 [..., N]")
    lead, blocks = tuple(scores.shape[:-1]), scores.shape[-1]
    flat = (math.prod(lead), blocks)
    if forced is not None and not ("bool" in str(forced.dtype) and type(forced) is type(scores)
                                   and _spreads(tuple(forced.shape), tuple(scores.shape))):
        raise ValueError(f"forced is {shown(forced)}; allowed: bool of the kind of scores, {shown(scores)}, with "
                         "leading axes that spread over its own")
    fast = impl == "triton" and _triton("topk", _tensor(scores) if plain else scores)
    if fast or _reference("topk", impl, *(() if plain else (scores,))):
        from artifact.kernels import reference

        rows = (_tensor(scores) if plain else scores).reshape(flat)
        if forced is not None:
            forced = (_tensor(forced) if plain else forced).broadcast_to(scores.shape).reshape(flat)
        count = count.broadcast_to(lead).reshape(-1) if several else int(count)
        chosen = (fast or reference).topk(rows, count, forced, slots)
        chosen = chosen.reshape(*lead, chosen.shape[-1])
        return chosen.numpy() if plain else chosen
    from artifact.kernels import cpu

    rows = np.ascontiguousarray(scores if plain else scores.numpy()).reshape(flat)
    if forced is None:
        must = np.zeros((1, blocks), bool)
    else:
        must = forced if plain else forced.numpy()
        must = np.ascontiguousarray(np.broadcast_to(must, (*lead, blocks))).reshape(flat)
    slots = max(int(count), int(must.sum(-1).max(initial=0)))
    out = np.empty((rows.shape[0], slots), np.int32)
    cpu.topk(rows, int(count), must, out)
    out = out.reshape(*lead, slots)
    return out if plain else _tensor(out)


def _smoothing(level, trend, scores, shape, theta):
    """theta as plain numbers; ValueError for one out of range, and unless level and trend are of a step's `shape`."""
    alpha, beta, gamma = (float(number) for number in theta)
    if not (0 < alpha <= 1 and 0 < beta <= 1 and 0 <= gamma <= 1):
        raise ValueError(f"theta is ({alpha:g}, {beta:g}, {gamma:g}); allowed: 0 < alpha, beta <= 1, 0 <= gamma <= 1")
    for name, array, own in (("level", level, shape), ("trend", trend, shape), ("scores", scores, scores.shape)):
        if array.shape != own or "float32" not in str(array.dtype) or type(array) is not type(scores):
            raise ValueError(f"{name} is {shown(array)}; allowed: float32 of the same shape and kind as a step's "
                             f"scores, {list(shape)} of {shown(scores)}")
    return alpha, beta, gamma


def _ema_rows(level, trend, scores, theta):
    """`ema_steps` of "cpu"."""
    from artifact.kernels import cpu

    plain, rows = isinstance(scores, np.ndarray), len(scores)
    flat = [np.ascontiguousarray(array if plain else array.numpy()) for array in (level, trend, scores)]
    new = [np.empty((rows, flat[0].size), np.float32) for _ in range(3)]
    cpu.ema_steps(flat[0].reshape(-1), flat[1].reshape(-1), flat[2].reshape(rows, flat[0].size), *theta, *new)
    new = [array.reshape(tuple(scores.shape)) for array in new]
    return tuple(new) if plain else tuple(_tensor(array) for array in new)


def _stacked(tensors):
    import torch

    return torch.stack(tensors)


def _triton(operator, *tensors):
    """The module with the operator's Triton kernel; ValueError when it cannot run or take the tensors."""
    from artifact import attention

    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise ValueError(f"{operator} was given tensors on {tensors[0].device} and {tensor.device}; allowed: one "
                             "device")
        if str(tensor.dtype) not in checks.CACHED:
            raise ValueError(f"impl is 'triton'; {operator} was given {tensor.dtype}, allowed: float32, bfloat16, "
                             "float16")
    return attention.triton(operator, tensors[0])


def _reference(operator, impl, *tensors):
    """Whether the torch reference is asked for; ValueError when `impl` is unknown or cannot take the tensors."""
    if impl == "reference":
        return True
    if impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}; allowed: {', '.join(IMPLS)}")
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(f"impl is 'cpu'; {operator} was given a tensor on {tensor.device}, allowed: on the CPU")
        if str(tensor.dtype) not in ("torch.float32", "torch.bfloat16", "torch.float16"):
            raise ValueError(f"impl is 'cpu'; {operator} was given {tensor.dtype}, allowed: float32, bfloat16, float16")
    return False


def _queries(q, blocks, name):
    """ValueError unless q [B, H, D] fits `blocks` [B or 1, G, N, D]."""
    if q.ndim != 3:
        raise ValueError(f"q is {shown(q)}; allowed: [B, H, D]")
    batch, heads, dim = q.shape
    if blocks.ndim != 4 or blocks.shape[0] not in (1, batch) or blocks.shape[3] != dim:
        raise ValueError(f"{name} is {shown(blocks)}; allowed beside q {shown(q)}: [{batch} or 1, G, N, {dim}]")
    if not blocks.shape[1] or heads % blocks.shape[1]:
        raise ValueError(f"{heads} query heads over {blocks.shape[1]} KV heads; allowed: a multiple of them")
    if not (q.dtype.is_floating_point and blocks.dtype.is_floating_point):
        raise ValueError(f"q is {shown(q)} and {name} {shown(blocks)}; allowed: floating-point numbers")


def _counts(name, given, q, default):
    """One whole number >= 0 per sequence as int64 [B], on q's device; on the CPU its values are checked."""
    import torch

    if given is None:
        return torch.full((q.shape[0],), default, dtype=torch.int64, device=q.device)
    given = torch.as_tensor(given, device=q.device)
    if given.shape != (q.shape[0],) or given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {shown(given)}; allowed: int32 or int64 [{q.shape[0]}]")
    if given.device.type == "cpu" and (given < 0).any():
        raise ValueError(f"{name} holds {int(given.min())}; allowed: at least 0")
    return given.to(torch.int64)


def _heads(q, kv_heads, mean=False):
    """q as float32 [B, G, ., D] with zero heads up to a multiple of 4, and how many heads of a group count."""
    grouped = q.float().reshape(q.shape[0], kv_heads, -1, q.shape[2])
    grouped = (grouped.mean(2, keepdim=True) if mean else grouped).numpy()
    count = grouped.shape[2]
    padded = np.zeros((*grouped.shape[:2], -(-count // 4) * 4, grouped.shape[3]), np.float32)
    padded[:, :, :count] = grouped
    return padded, count


def _filled(x):
    """The channels filled up with zeros to a multiple of `checks.LANES`."""
    import torch

    return torch.nn.functional.pad(x, (0, -x.shape[-1] % checks.LANES)) if x.shape[-1] % checks.LANES else x


def stored(tensor):
    """A contiguous tensor's NumPy view as "cpu" reads it: float32, bfloat16's bits as uint16, float16's as int16."""
    import torch

    kind = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(tensor.dtype)
    tensor = tensor.contiguous()
    return tensor.numpy() if kind is None else tensor.view(kind).numpy()


def _spreads(shape, whole):
    """Whether NumPy's rules spread `shape` over `whole`, the last axis as it is."""
    try:
        return shape[-1:] == whole[-1:] and np.broadcast_shapes(shape, whole) == whole
    except ValueError:
        return False


def _tensor(array):
    import torch

    return torch.from_numpy(array)
