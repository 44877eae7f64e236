"""The attention operators as torch knows them: registered, so that compiled code and fake tensors can hold them.

Each checks what it is given, then runs the implementation asked for. `artifact.ops` is how they are called.
"""

import torch

from artifact import checks
from artifact.kernels.paged import PagedKV, Partial

IMPLS = ("reference", "cpu", "triton")


_LIBRARY = torch.library.Library("artifact", "DEF")


def _operator(fake):
    """Registers a function with torch, `fake` giving the shapes of its results. -> what calls it."""

    def decorate(function):
        name = function.__name__
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # one on every device; nothing to differentiate
        torch.library.register_fake(f"artifact::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.artifact, name).default

    return decorate


def _attend(q, k, v, page_table, length, blocks, impl, parts=None):
    _shapes(impl, q, PagedKV(k, v, page_table, length), blocks=blocks)
    return _empty(q)


@_operator(_attend)
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, length: torch.Tensor,
           blocks: torch.Tensor, impl: str, parts: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    kv = PagedKV(k, v, page_table, length)
    _shapes(impl, q, kv, blocks=blocks)
    return _run("attend", impl, kv, {"blocks": blocks}, q, kv, blocks, *([parts] if impl == "triton" else []))


def _attend_groups(q, k, v, page_table, length, blocks, group, impl):
    _shapes(impl, q, PagedKV(k, v, page_table, length), blocks=blocks)
    return _empty(q, -(-blocks.shape[2] // group))


@_operator(_attend_groups)
def attend_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, length: torch.Tensor,
                  blocks: torch.Tensor, group: int, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    kv = PagedKV(k, v, page_table, length)
    _shapes(impl, q, kv, blocks=blocks)
    return _run("attend_groups", impl, kv, {"blocks": blocks}, q, kv, blocks, group)


def _repair(out, lse, q, k, v, page_table, length, missed, impl):
    _shapes(impl, q, PagedKV(k, v, page_table, length), missed=missed)
    checks.partial(Partial(out, lse), q, impl=impl)
    return _empty(q)


@_operator(_repair)
def repair(out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
           page_table: torch.Tensor, length: torch.Tensor, missed: torch.Tensor, impl: str,
           ) -> tuple[torch.Tensor, torch.Tensor]:
    state, kv = Partial(out, lse), PagedKV(k, v, page_table, length)
    _shapes(impl, q, kv, missed=missed)
    checks.partial(state, q, impl=impl)
    new_out, new_lse = _run("repair", impl, kv, {"missed": missed}, state, q, kv, missed)
    return (new_out.clone(), new_lse.clone()) if new_out is out else (new_out, new_lse)  # never the arguments again


def _merge(out, lse, keep, impl):
    checks.partial(Partial(out, lse), impl=impl)
    if keep is not None:
        checks.mask(keep, Partial(out, lse))
    return torch.empty_like(out[0]), torch.empty_like(lse[0])


@_operator(_merge)
def merge(out: torch.Tensor, lse: torch.Tensor, keep: torch.Tensor | None, impl: str,
          ) -> tuple[torch.Tensor, torch.Tensor]:
    parts = Partial(out, lse)
    checks.partial(parts, impl=impl)
    if keep is not None:
        checks.mask(keep, parts)
    return tuple(_implementation(impl, "merge", out).merge(parts, keep))


def _dense(q, k, v, page_table, length, impl):
    _shapes(impl, q, PagedKV(k, v, page_table, length))
    return _empty(q)


@_operator(_dense)
def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, length: torch.Tensor,
          impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    kv = PagedKV(k, v, page_table, length)
    _shapes(impl, q, kv)
    return _run("dense", impl, kv, {}, q, kv)


def _implementation(impl, operator, tensor):
    """The module that computes `operator` for `impl`; ValueError when there is none or it cannot run here."""
    if impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}; allowed: {', '.join(IMPLS)}")
    if impl == "reference":
        from artifact.kernels import reference

        return reference
    if impl == "triton":
        return triton(operator, tensor)
    if tensor.device.type != "cpu":
        raise ValueError(f"impl is 'cpu'; {operator} was given a tensor on {tensor.device}, allowed: on the CPU")
    from artifact.kernels import attention_cpu

    return attention_cpu


def triton(operator, tensor):
    """The module that computes `operator` with Triton; ValueError when it cannot run where `tensor` lies."""
    try:
        from artifact.kernels import decode, merge, predict, repair, scores, topk
    except ImportError as error:
        raise ValueError(f"impl is 'triton'; {error.name or error} is missing, allowed: reference, cpu") from None
    if tensor.device.type != "cuda" and not decode.INTERPRETED:
        raise ValueError(f"impl is 'triton'; {operator} was given a tensor on {tensor.device}, allowed: on a GPU with "
                         "a driver, or anywhere where TRITON_INTERPRET=1 was set at the start")
    return {"repair": repair, "merge": merge, "quest_scores": scores, "infllm_scores": scores,
            "ema_step": predict, "topk": topk}.get(operator, decode)


def _shapes(impl, q, kv, **blocks):
    checks.cache(q, kv, impl)
    if blocks:
        checks.lists(q, kv, **blocks)
    checks.same_device(q=q, **kv._asdict(), **blocks)


def _run(operator, impl, kv, blocks, *arguments):
    """What `operator` makes of the arguments, `blocks` among them by its name; first their contents are checked."""
    module = _implementation(impl, operator, kv.k)
    given = next(iter(blocks.items()), ())
    if impl != "cpu" and kv.k.device.type == "cpu":
        checks.contents(kv, *given)
    try:
        return tuple(getattr(module, operator)(*arguments))
    except IndexError:  # "cpu" looks for itself, which is quicker, and does not say what it found
        checks.contents(kv, *given)
        raise


def _empty(q, *parts):
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*parts, *q.shape, dtype=wide), q.new_empty(*parts, *q.shape[:2], dtype=wide)
