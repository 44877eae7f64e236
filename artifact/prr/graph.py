"""`decode.step` in shapes that never change and without a question to the host: what a CUDA graph can hold.

Lists instead of masks, each with as many slots as there can ever be blocks in it; lengths, sets, counts and the share
of speculation lie on the device and are written where they lie. So one recording serves every step of a layer, until
the room ends that `begin` was given. What it computes is `decode.step`'s, which the tests hold it to: the same sets,
the same result to rounding.

Modes as in `decode` but for "dense"; the last step's set of "reuse" and "repair" is that of a predictor without memory
(alpha 1, gamma 0, |P| = |A|), which is the same set. Every sequence must be one that selects: which layers and lengths
are dense the host knows, and takes `ops.dense` for them. `impl`: "reference" or "triton".

`Captured` and the streams it runs on have not met a GPU: the step has been run on a CPU, in turn, with the reference
and with interpreted Triton kernels, and over tensors without numbers, of which none can be asked.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch

from artifact import ops
from artifact.ops import PagedKV, Partial
from artifact.prr import overlap, predictor
from artifact.prr.decode import Plan, State, newest
from artifact.prr.predictor import EmaState, Theta

R = TypeVar("R")
LAST = Theta(1.0, 0.5, 0.0)  # the predictor whose prediction is the last step's scores
_NEWBORN = 1  # blocks that become selectable in a step, at most: a token ends no more than one block


class Held(NamedTuple):
    """What a layer keeps between steps, on the device, written over by each."""

    metadata: object  # of the selection method, its length int64 [B] too
    ema: EmaState  # fp32 [B, G, N] tensors


class Counts(NamedTuple):
    """int32 [B, G] on the device: |A|, |P|, and how many of A were missed."""

    selected: torch.Tensor
    predicted: torch.Tensor
    missed: torch.Tensor


class Begun(NamedTuple):
    """P int32 [B, G, S], the certain ones first, and what of it was guessed; attention to P, or of "exact" to what is
    certain, and to each guessed block alone, [S, ...]."""

    predicted: torch.Tensor
    guessed: torch.Tensor
    state: Partial
    singles: Partial | None


def begin(plan: Plan, state: State, blocks: int, layer: int, device: str | torch.device) -> Held:
    """`state`, as `decode` leaves it on the CPU after a prefill, moved to `device` with room for `blocks` blocks.

    ValueError for a sequence that selects nothing here, for too little room and for a plan that cannot be held.
    """
    if plan.mode == "dense" or plan.impl == "cpu":
        raise ValueError(f"mode and impl are {plan.mode!r}, {plan.impl!r}; allowed: a mode that selects, with impl "
                         "'reference' or 'triton'")
    if plan.method.most_forced > plan.method.budget_blocks:
        raise ValueError(f"budget_blocks is {plan.method.budget_blocks}; allowed: at least {plan.method.most_forced}, "
                         "what is always attended")
    length = state.metadata.length.cpu()
    if plan.method.dense(layer, length + 1).any():
        raise ValueError(f"lengths are {length.tolist()}; allowed in layer {layer}: only sequences that are long "
                         "enough to select")
    needed = -(-int(length.max() + 1) // plan.method.block)
    if blocks < max(needed, plan.method.budget_blocks):
        raise ValueError(f"blocks is {blocks}; allowed: at least {max(needed, plan.method.budget_blocks)}, those of "
                         "the longest sequence and of the budget")
    metadata = plan.method.room(state.metadata, blocks)
    metadata = type(metadata)(*(part.to(device, copy=True) for part in metadata))
    shape = (len(length), metadata[0].shape[1], blocks)
    level = torch.full(shape, -torch.inf, device=device)
    trend = torch.zeros(shape, device=device)
    if state.ema is not None:
        level[..., :state.ema.level.shape[2]] = state.ema.level.to(device)
        trend[..., :state.ema.trend.shape[2]] = state.ema.trend.to(device)
    return Held(metadata, EmaState(level, trend))


def guesses(plan: Plan, length: torch.Tensor) -> torch.Tensor:
    """int64 [B] on the CPU: how many blocks are predicted beside the certain and the newborn ones, by the share that
    the plan gives each sequence. Copied to the device it is what `step` takes, and may change from step to step."""
    picks = (plan.method.budget_blocks - plan.method.forced(length).sum(-1)).clamp(min=0)
    shares = torch.as_tensor(plan.speculation if plan.mode == "prr" else 1.0).expand(len(picks))
    return torch.tensor([predictor.predicted_count(*each)
                         for each in zip(picks.tolist(), shares.tolist(), strict=True)])


def step(plan: Plan, q, kv: PagedKV, held: Held, count: torch.Tensor, most: int,
         both: overlap.Both = overlap.in_turn, parts: int | None = None) -> tuple[torch.Tensor, Counts]:
    """One token of each sequence: q [B, H, D], its key and value in the cache; `held` is written over.

    count: int64 [B], as `guesses` gives it, on q's device; most: its largest value ever. parts: into how many each list
    of the speculation is split at most. -> attention fp32 [B, H, D], what happened.
    """
    (metadata, scores, selected), begun = both(lambda: select(plan, q, kv, held),
                                               lambda: speculate(plan, q, kv, held, count, most, parts))
    theta = plan.theta if plan.mode == "prr" else LAST
    (out, counts), (level, trend, _) = both(lambda: end(plan, q, kv, held, begun, selected),
                                            lambda: ops.ema_step(*held.ema, scores, theta, impl=plan.impl))
    for old, new in ((held.metadata.length, metadata.length), (held.ema.level, level), (held.ema.trend, trend)):
        old.copy_(new)
    return out, counts


def select(plan: Plan, q, kv: PagedKV, held: Held) -> tuple[object, torch.Tensor, torch.Tensor]:
    """The metadata with the newest key; scores fp32 [B, G, N], -inf where a block is forced; A, int32 [B, G, S]."""
    blocks, forced, _ = _rules(plan, held)
    metadata = plan.method.append(held.metadata, newest(kv).unsqueeze(2))
    scores = plan.method.score(q, metadata, impl=plan.impl, blocks=blocks).masked_fill(forced, -torch.inf)
    return metadata, scores, ops.topk(scores, plan.method.budget_blocks, forced, impl=plan.impl,
                                      slots=plan.method.budget_blocks)


def speculate(plan: Plan, q, kv: PagedKV, held: Held, count: torch.Tensor, most: int,
              parts: int | None = None) -> Begun | None:
    """P and attention to it; None in mode "dsa"."""
    if plan.mode == "dsa":
        return None
    _, forced, there = _rules(plan, held)
    theta = plan.theta if plan.mode == "prr" else LAST
    certain = ops.topk(torch.zeros(there.shape, device=q.device), 0, forced & there, impl=plan.impl,
                       slots=plan.method.most_forced)
    expected = predictor.predict(held.ema, theta).masked_fill(forced | ~there, -torch.inf)
    newborn = there & ~forced & torch.isneginf(expected)
    guessed = ops.topk(expected, newborn.sum(-1) + count[:, None], newborn, impl=plan.impl, slots=most + _NEWBORN)
    predicted = torch.cat([certain, guessed], dim=2)
    if plan.fidelity == "union" or plan.mode == "reuse":
        return Begun(predicted, guessed, ops.attend(q, kv, predicted, impl=plan.impl, parts=parts), None)
    return Begun(predicted, guessed, ops.attend(q, kv, certain, impl=plan.impl, parts=parts),
                 ops.attend_groups(q, kv, guessed, 1, impl=plan.impl))


def end(plan: Plan, q, kv: PagedKV, held: Held, begun: Begun | None, selected: torch.Tensor,
        ) -> tuple[torch.Tensor, Counts]:
    """Attention fp32 [B, H, D], what was begun with P being brought to its end with A; what happened."""
    blocks = held.ema.level.shape[2]
    if begun is None:
        number = _number(selected)
        return ops.attend(q, kv, selected, impl=plan.impl).out, Counts(number, torch.zeros_like(number), number)
    predicted, guessed, state, singles = begun
    missed = torch.where(_among(selected, predicted, blocks), -1, selected).sort(-1, descending=True).values
    counts = Counts(_number(selected), _number(predicted), _number(missed))
    if plan.mode == "reuse":
        if plan.fidelity == "union":
            return state.out, counts
        wasted = (predicted >= 0) & ~_among(predicted, selected, blocks)
        differs = ((missed >= 0).flatten(1).any(1) | wasted.flatten(1).any(1))[:, None, None]
        anew = ops.attend(q, kv, torch.where(differs, selected, -1), impl=plan.impl)
        return torch.where(differs, anew.out, state.out), counts
    if singles is not None:  # of the blocks on their own only those that were selected count
        keep = (guessed >= 0) & _among(guessed, selected, blocks)
        merged = ops.merge(singles, keep.permute(2, 0, 1).contiguous(), impl=plan.impl)
        pair = Partial(*(torch.stack(one) for one in zip(state, merged, strict=True)))
        state = ops.merge(pair, impl=plan.impl)
    return ops.repair(state, q, kv, missed, impl=plan.impl).out, counts


class Captured:
    """What `call` does, a function of a `both`, as a CUDA graph over two streams: selection's is first in priority, and
    torch makes its graphs such that kernels keep the priority of the stream that they were captured on.

    A call replays it and gives the same tensors, with new numbers in them. It is run a few times before the capture, to
    compile and to allocate; `kept` are tensors that have their numbers back afterwards. ValueError without CUDA.
    """

    def __init__(self, call: Callable[[overlap.Both], R], kept: Iterable[torch.Tensor] = ()) -> None:
        streams = overlap.Streams()
        before = [(part, part.clone()) for part in kept]
        streams.first.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams.first):
            for _ in range(3):
                call(streams)
            for part, numbers in before:
                part.copy_(numbers)
        torch.cuda.current_stream().wait_stream(streams.first)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=streams.first):
            self._made = call(streams)

    def __call__(self) -> R:
        self._graph.replay()
        return self._made


def _rules(plan, held):
    """N; the blocks that are always attended and those that are there, bool [B, G, N] both."""
    shape, length = held.ema.level.shape, held.metadata.length + 1
    forced = plan.method.forced(length, shape[2])[:, None].expand(shape)
    there = torch.arange(shape[2], device=length.device) * plan.method.block < length[:, None]
    return shape[2], forced, there[:, None].expand(shape)


def _among(listed, others, blocks):
    """bool like `listed`: whether each of its blocks is in `others`, int32 [B, G, S] both; -1 is in none."""
    marked = torch.zeros(*others.shape[:2], blocks + 1, dtype=torch.bool, device=others.device)
    marked = marked.scatter(2, torch.where(others < 0, blocks, others).long(), True)
    return marked.gather(2, listed.clamp(min=0).long()) & (listed >= 0)


def _number(listed):
    return (listed >= 0).sum(-1, dtype=torch.int32)
