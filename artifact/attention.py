"""The attention operators as torch knows them: registered, so that compiled code and fake tensors can hold them.

Each checks what it is given, then runs the implementation asked for. `artifact.ops` is how they are called.
"""

import torch

from artifact import checks
from artifact.kernels.paged import PagedKV, Partial

IMPLS = ("reference", "cpu", "triton")


def _operator(function):
    return torch.library.custom_op(f"artifact::{function.__name__}", function, mutates_args=())


@_operator
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, length: torch.Tensor,
           blocks: torch.Tensor, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    kv = PagedKV(k, v, page_table, length)
    module = _implementation(impl, "attend", q)
    _fits(q, kv, impl, blocks=blocks)
    return tuple(module.attend(q, kv, blocks))


@attend.register_fake
def _(q, k, v, page_table, length, blocks, impl):
    _shapes(q, PagedKV(k, v, page_table, length), impl, blocks=blocks)
    return _empty(q)


@_operator
def attend_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, length: torch.Tensor,
                  blocks: torch.Tensor, group: int, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    kv = PagedKV(k, v, page_table, length)
    module = _implementation(impl, "attend_groups", q)
    _fits(q, kv, impl, blocks=blocks)
    return tuple(module.attend_groups(q, kv, blocks, group))


@attend_groups.register_fake
def _(q, k, v, page_table, length, blocks, group, impl):
    _shapes(q, PagedKV(k, v, page_table, length), impl, blocks=blocks)
    return _empty(q, -(-blocks.shape[2] // group))


@_operator
def repair(out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
           page_table: torch.Tensor, length: torch.Tensor, missed: torch.Tensor, impl: str,
           ) -> tuple[torch.Tensor, torch.Tensor]:
    state, kv = Partial(out, lse), PagedKV(k, v, page_table, length)
    module = _implementation(impl, "repair", q)
    checks.partial(state, q, impl=impl)
    _fits(q, kv, impl, missed=missed)
    # an operator's result is never one of its arguments
    return tuple(x.clone() if x is given else x for x, given in zip(module.repair(state, q, kv, missed), state,
                                                                    strict=True))


@repair.register_fake
def _(out, lse, q, k, v, page_table, length, missed, impl):
    checks.partial(Partial(out, lse), q, impl=impl)
    _shapes(q, PagedKV(k, v, page_table, length), impl, missed=missed)
    return _empty(q)


@_operator
def merge(out: torch.Tensor, lse: torch.Tensor, keep: torch.Tensor | None, impl: str,
          ) -> tuple[torch.Tensor, torch.Tensor]:
    module = _implementation(impl, "merge", out)
    _mergeable(out, lse, keep, impl)
    return tuple(module.merge(Partial(out, lse), keep))


@merge.register_fake
def _(out, lse, keep, impl):
    _mergeable(out, lse, keep, impl)
    return torch.empty_like(out[0]), torch.empty_like(lse[0])


@_operator
def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, length: torch.Tensor,
          impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    kv = PagedKV(k, v, page_table, length)
    module = _implementation(impl, "dense", q)
    _fits(q, kv, impl)
    return tuple(module.dense(q, kv))


@dense.register_fake
def _(q, k, v, page_table, length, impl):
    _shapes(q, PagedKV(k, v, page_table, length), impl)
    return _empty(q)


def _implementation(impl, operator, tensor):
    """The module that computes `operator` for `impl`; ValueError when there is none or it cannot run here."""
    if impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}; allowed: {', '.join(IMPLS)}")
    if impl == "reference":
        from artifact.kernels import reference

        return reference
    if impl == "triton":
        return _triton(operator, tensor)
    if tensor.device.type != "cpu":
        raise ValueError(f"impl is 'cpu'; {operator} was given a tensor on {tensor.device}, allowed: on the CPU")
    from artifact.kernels import attention_cpu

    return attention_cpu


def _triton(operator, tensor):
    try:
        from artifact.kernels import decode, merge, repair
    except ImportError as error:
        raise ValueError(f"impl is 'triton'; {error.name or error} is missing, allowed: reference, cpu") from None
    if tensor.device.type != "cuda" and not decode.INTERPRETED:
        raise ValueError(f"impl is 'triton'; {operator} was given a tensor on {tensor.device}, allowed: on a GPU with "
                         "a driver, or anywhere where TRITON_INTERPRET=1 was set at the start")
    return {"repair": repair, "merge": merge}.get(operator, decode)


def _shapes(q, kv, impl, **blocks):
    checks.cache(q, kv, impl)
    if blocks:
        checks.lists(q, kv, **blocks)


def _fits(q, kv, impl, **blocks):
    """All checks that do not make the host wait for a device."""
    _shapes(q, kv, impl, **blocks)
    if q.device.type == "cpu":
        checks.contents(kv, *(blocks.popitem() if blocks else ()))


def _mergeable(out, lse, keep, impl):
    parts = Partial(out, lse)
    checks.partial(parts, impl=impl)
    if keep is not None:
        checks.mask(keep, parts)


def _empty(q, *parts):
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*parts, *q.shape, dtype=wide), q.new_empty(*parts, *q.shape[:2], dtype=wide)
