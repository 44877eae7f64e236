"""One layer's decode step: which blocks are predicted, which are selected, and what is attended to (paper section 3).

A: the blocks that the method selects at this step. P: those predicted before. The modes are the paper's ablation
(section 5.3, Table 8) and what it is held against:

    dense    every token
    dsa      select, then attend to A
    reuse    P is the last step's A. With "exact" all of A is attended to anew where the two differ (the paper's S1);
             with "union" P stands as it is, right or wrong
    repair   the same P; what it misses is repaired (S2)
    prr      P is what the predictor expects, "speculation" times the budget; what it misses is repaired (S3)

Fidelity "union" is the paper's: attention to P and A together, wasted blocks included, so that the result depends on
the prediction. "exact" attends to A alone, whatever was predicted: each predicted block is a part of its own, and those
that were wasted do not count. In both each block is read once.

What the paper leaves open: forced blocks (the current one among them) are in P and in A by rule and outside the
predictor and its budget; so are newborn blocks, selectable for the first time, in P. A row that selects nothing (a
dense layer, a short sequence) attends to everything at once, P = A, and shows the predictor no scores.

`select` and `speculate` need nothing of each other, nor does attention over what was speculated on need the selection:
`step` runs both beside each other where its `both` can (`artifact.prr.overlap`), and in turn otherwise, to the same
bits. State in, state out; the one given is used up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from artifact import ops
from artifact.dsa.infllm import InfLLM
from artifact.dsa.quest import Quest
from artifact.ops import PagedKV, Partial
from artifact.prr import overlap, predictor
from artifact.prr.predictor import EmaState, Theta

MODES = ("dense", "dsa", "reuse", "repair", "prr")
FIDELITIES = ("union", "exact")
_PARTS = 2**24  # numbers of single blocks' attention held at once


@dataclass(frozen=True)
class Plan:
    """How a layer decodes. fidelity: of the modes that predict. impl: of the operators; "triton" picks by "reference".

    speculation, theta: of mode "prr": |P| / |A| without forced blocks, one number or one for each sequence; and alpha,
    beta and gamma of its predictor, which `calibrated` finds.
    ValueError for an unknown mode or fidelity and for a speculation that is negative or not finite.
    """

    mode: str = "prr"
    fidelity: str = "union"
    method: Quest | InfLLM = Quest()
    speculation: float | tuple[float, ...] = 1.0
    theta: Theta | None = None
    impl: str = "cpu"

    def __post_init__(self):
        for name, allowed in (("mode", MODES), ("fidelity", FIDELITIES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        given = self.speculation
        several = isinstance(given, Sequence) or getattr(given, "ndim", 0)
        kept = tuple(float(each) for each in given) if several else float(given)
        for each in kept if several else (kept,):
            if not 0 <= each < float("inf"):
                raise ValueError(f"speculation is {each:g}; allowed: at least 0, and finite")
        object.__setattr__(self, "speculation", kept)
        if self.theta is not None:
            object.__setattr__(self, "theta", Theta(*self.theta))


class State(NamedTuple):
    """What a step leaves to the next; a field that the mode does not need is None."""

    metadata: object  # of the selection method
    ema: EmaState | None  # fp32 [B, G, N] tensors
    last: torch.Tensor | None  # bool [B, G, N]: what the step before selected


class Happened(NamedTuple):
    """What a step did, in blocks of each sequence and KV head; of `steps` B is T."""

    selected: torch.Tensor  # int32 [B, G]: |A|
    predicted: torch.Tensor  # int32 [B, G]: |P|
    missed: torch.Tensor  # int32 [B, G]: in A, not in P
    wasted: torch.Tensor  # int32 [B, G]: in P, not in A
    certain: torch.Tensor  # int32 [B, G]: in P and in A by rule, known before both: forced, or all of a dense row
    sparse: torch.Tensor  # bool [B]: whether anything was selected; else P = A = all


def begin(plan: Plan, k, length=None) -> State:
    """The state after a prefill with the keys k [B, G, T, D]; length int [B]: how many of the T count (None = all).

    Without `warm` every block is newborn at the first step.
    """
    if plan.mode == "dense":
        return State(None, None, None)
    metadata = plan.method.summarize(k, length)
    shape = (*k.shape[:2], -(-int(metadata.length.max()) // plan.method.block))
    ema = EmaState(k.new_full(shape, -torch.inf, dtype=torch.float32), k.new_zeros(shape, dtype=torch.float32))
    last = torch.ones(shape, dtype=torch.bool, device=k.device)
    return State(metadata, ema if plan.mode == "prr" else None, last if plan.mode in ("reuse", "repair") else None)


def prefill_scores(plan: Plan, q, state: State, layer: int) -> torch.Tensor:
    """fp32 [R, G, N]: the scores that the last rows of a prefill, q [R, H, D], give the blocks that they can select.

    `state`: of one sequence, as `begin` made it. What `warm` and the calibration take.
    """
    end = int(state.metadata.length[0])
    if not 1 <= q.shape[0] <= end:
        raise ValueError(f"q has {q.shape[0]} rows; allowed: 1 to {end}, the tokens of the prefill")
    rows = state.metadata._replace(length=torch.arange(end - q.shape[0], end) + 1)
    return select(plan, q, rows, layer)[0]


def calibrated(plan: Plan, scores, length, layer: int) -> Plan:
    """`plan` with the theta that `scores` [R, G, N], of a prefill of `length` tokens, call for."""
    from artifact.prr import calibration  # it needs Numba, which a step on a GPU does without

    if bool(plan.method.dense(layer, length)):
        return replace(plan, theta=Theta(*(axis[0] for axis in calibration.AXES)))
    picks = plan.method.budget_blocks - int(plan.method.forced([length]).sum())
    weights = calibration.weights_of(plan.method)
    return replace(plan, theta=calibration.calibrate(scores.cpu().numpy(), picks, weights=weights).theta)


def warm(plan: Plan, state: State, scores, layer: int) -> State:
    """`state` brought up by a prefill's last rows: their scores [R, B, G, N], -inf where nothing can be selected."""
    ema, last = state.ema, state.last
    if ema is not None and len(scores):
        ema = EmaState(*(states[-1] for states in _walked(plan, ema, scores)))
    if last is not None:
        _, certain, _ = _rules(plan, state.metadata.length, layer, scores.device)
        last = _picked(plan, scores[-1], certain)
    return State(state.metadata, ema, last)


def step(plan: Plan, q, kv: PagedKV, state: State, layer: int,
         both: overlap.Both = overlap.in_turn) -> tuple[torch.Tensor, State, Happened]:
    """One token of each sequence: q [B, H, D], its key and value already in the cache.

    both: how selection and what is predicted run, and then repair and the predictor's update; any gives the same bits.
    -> attention fp32 [B, H, D], the next step's state, what happened.
    ValueError when the cache is not one token longer than the state, or its blocks are not the method's.
    """
    if plan.mode == "dense":
        return _dense(plan, q, kv, state)
    length = state.metadata.length + 1
    _check(plan, kv, length)
    _, certain, dense = _rules(plan, length, layer, q.device)

    def selecting():
        metadata = plan.method.append(state.metadata, newest(kv).unsqueeze(2))
        return metadata, *select(plan, q, metadata, layer)

    def speculating():
        predicted = speculate(plan, state, length, layer)
        return predicted, _begun(plan, q, kv, predicted, certain)

    (metadata, scores, selected), (predicted, begun) = both(selecting, speculating)
    out, ema = both(lambda: _ended(plan, q, kv, begun, predicted, selected),
                    lambda: None if state.ema is None else _updated(plan, state.ema, scores))
    return (out, State(metadata, ema, None if state.last is None else selected),
            _happened(predicted, selected, certain, dense))


def steps(plan: Plan, q, kv: PagedKV, state: State, layer: int) -> tuple[torch.Tensor, State, Happened]:
    """T steps of one sequence at once, its tokens known: q [T, H, D], all keys and values already in the cache.

    kv: page_table [T, N] with the sequence's pages in every row, length [T] growing by one. Row t sees the tokens
    before it and its own. -> attention fp32 [T, H, D], the state after the last, what happened.
    The same as T calls of `step`, ValueError included.
    """
    if plan.mode == "dense":
        return _dense(plan, q, kv, state)
    count = q.shape[0]
    if not count or len(state.metadata.length) != 1:
        raise ValueError(f"q has {count} rows, the state {len(state.metadata.length)} sequences; allowed: at least 1 "
                         "row of 1 sequence")
    length = state.metadata.length + 1 + torch.arange(count)
    _check(plan, kv, length)
    if kv.page_table.device.type == "cpu":
        past = torch.arange(kv.page_table.shape[1]) * kv.k.shape[2] >= length[:, None]
        if not (past | (kv.page_table == kv.page_table[-1:])).all():
            raise ValueError("page_table has rows with different pages; allowed: the pages of one sequence")
    metadata = plan.method.append(state.metadata, newest(kv).transpose(0, 1).unsqueeze(0))
    rows = metadata._replace(length=length)
    scores, selected = select(plan, q, rows, layer)
    ema, last, before, earlier = state.ema, state.last, None, None
    if ema is not None:
        ema = _grown(ema, scores.shape[2])
        after = _walked(plan, ema, scores[:, None])
        before = EmaState(*(torch.cat([old, new[:-1, 0]]) for old, new in zip(ema, after, strict=True)))
        ema = EmaState(*(new[-1].clone() for new in after))
    if last is not None:
        earlier = torch.cat([_wider(last, scores.shape[2], False), selected[:-1]])
        last = selected[-1:].clone()
    predicted = speculate(plan, State(rows, before, earlier), length, layer)
    _, certain, dense = _rules(plan, length, layer, q.device)
    out = _attended(plan, q, kv, predicted, selected, certain)
    return out, State(metadata, ema, last), _happened(predicted, selected, certain, dense)


def select(plan: Plan, q, metadata, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What q [B, H, D] selects of the tokens in `metadata`, of B sequences, or of B lengths of the same one.

    -> scores fp32 [B, G, N], -inf where a block is forced or the row is dense; selected bool [B, G, N].
    """
    there, certain, dense = _rules(plan, metadata.length, layer, q.device)
    if dense.all():
        shape = (len(dense), metadata[0].shape[1], there.shape[-1])
        return torch.full(shape, -torch.inf, device=q.device), there.expand(shape)
    scores = plan.method.score(q, metadata, impl=plan.impl)
    scores = scores.masked_fill(certain, -torch.inf)
    return scores, _picked(plan, scores, certain)


def speculate(plan: Plan, state: State, length, layer: int) -> torch.Tensor:
    """bool [B, G, N]: the blocks to attend to before those of this step are known; length int [B] with its token."""
    keys = state.metadata[0]
    there, certain, dense = _rules(plan, length, layer, keys.device)
    shape = (len(there), keys.shape[1], there.shape[2])
    if plan.mode == "dsa":
        return (certain & dense[:, None, None]).expand(shape)
    if state.last is not None:
        return (_wider(state.last, shape[2], False) & there) | certain
    ema = _grown(state.ema, shape[2])
    expected = predictor.predict(ema, _theta(plan)).masked_fill(certain | ~there, -torch.inf)
    predicted = certain | (there & torch.isneginf(expected))  # with the newborn ones
    for count, rows in _predicted_counts(plan, length).items():
        predicted[rows] |= _marked(ops.topk(expected[rows], count, impl=plan.impl), shape[2])
    return predicted


def _rules(plan, length, layer, device):
    """Blocks that exist, and of them those in P and A by rule, bool [B, 1, N] each; rows that select nothing, [B]."""
    method, length = plan.method, torch.as_tensor(length).cpu()
    forced = method.forced(length)
    there = torch.arange(forced.shape[1]) * method.block < length[:, None]
    dense = method.dense(layer, length)
    certain = (forced | dense[:, None]) & there
    return there[:, None].to(device), certain[:, None].to(device), dense.to(device)


def _predicted_counts(plan, length):
    """How many blocks are predicted beside the certain and the newborn ones -> the rows that predict so many."""
    picks = (plan.method.budget_blocks - plan.method.forced(length).sum(-1)).clamp(min=0).tolist()
    given = torch.as_tensor(plan.speculation, dtype=torch.float64)
    if given.ndim and len(given) != len(picks):
        raise ValueError(f"speculation has {len(given)} numbers; allowed: one, or one for each of the {len(picks)} "
                         "sequences")
    rows = {}
    for row, (budget, share) in enumerate(zip(picks, given.expand(len(picks)).tolist(), strict=True)):
        rows.setdefault(predictor.predicted_count(budget, share), []).append(row)
    return rows


def _picked(plan, scores, certain):
    """bool like `scores` [B, G, N]: the certain blocks, and the best others for which the budget has room."""
    return _marked(ops.topk(scores, plan.method.budget_blocks, certain, impl=plan.impl), scores.shape[-1])


class _Begun(NamedTuple):
    """Attention to P, before A is known: one state, or of "exact" that of what is certain and of each other block."""

    whole: Partial
    parts: Partial | None = None  # [S, ...]: over the blocks of `singles`, int32 [B, G, S]
    singles: torch.Tensor | None = None


def _attended(plan, q, kv, predicted, selected, certain):
    """Attention fp32 [B, H, D] to what mode and fidelity make of P and A; a few rows at a time where each block of P
    has a state of its own."""
    at_once = len(q)
    if plan.fidelity == "exact" and plan.mode != "reuse":
        most = int((predicted & ~certain).sum(-1).max())
        at_once = max(1, _PARTS // max(1, most * q.shape[1] * q.shape[2]))
    outs = []
    for rows in torch.arange(len(q), device=q.device).split(at_once):
        some, cache, guess = (q, kv, predicted) if at_once >= len(q) else (q[rows], _rows(kv, rows), predicted[rows])
        begun = _begun(plan, some, cache, guess, certain[rows])
        outs.append(_ended(plan, some, cache, begun, guess, selected[rows]))
    return torch.cat(outs)


def _begun(plan, q, kv, predicted, certain):
    """The `_Begun` of P; None where nothing is predicted."""
    if plan.mode == "dsa":
        return None
    if plan.fidelity == "union" or plan.mode == "reuse":
        return _Begun(ops.attend(q, kv, _listed(plan, predicted), impl=plan.impl))
    singles = _listed(plan, predicted & ~certain)
    return _Begun(ops.attend(q, kv, _listed(plan, predicted & certain), impl=plan.impl),
                  ops.attend_groups(q, kv, singles, 1, impl=plan.impl), singles)


def _ended(plan, q, kv, begun, predicted, selected):
    """Attention fp32 [B, H, D], what was begun with P being brought to its end with A."""
    if begun is None:
        return ops.attend(q, kv, _listed(plan, selected), impl=plan.impl).out
    if plan.mode == "reuse":
        if plan.fidelity == "exact":
            rows = (predicted != selected).flatten(1).any(-1).nonzero()[:, 0]
            anew = ops.attend(q[rows], _rows(kv, rows), _listed(plan, selected[rows]), impl=plan.impl)
            begun.whole.out[rows] = anew.out
        return begun.whole.out
    state = begun.whole
    if begun.parts is not None:  # of the blocks on their own only those that were selected count
        keep = selected.gather(2, begun.singles.clamp(min=0).long()) & (begun.singles >= 0)
        merged = ops.merge(begun.parts, keep.permute(2, 0, 1).contiguous(), impl=plan.impl)
        state = ops.merge(Partial(*(torch.stack(pair) for pair in zip(state, merged, strict=True))), impl=plan.impl)
    return ops.repair(state, q, kv, _listed(plan, selected & ~predicted), impl=plan.impl).out


def _dense(plan, q, kv, state):
    """`step` and `steps` of mode "dense"."""
    blocks = (-(-kv.length // kv.k.shape[2])).int()[:, None].expand(-1, kv.k.shape[1])
    none = torch.zeros_like(blocks)
    return ops.dense(q, kv, impl=plan.impl).out, state, Happened(blocks, blocks, none, none, blocks, none[:, 0] > 0)


def _happened(predicted, selected, certain, dense):
    """The counts of what `speculate` and `select` said."""
    sets = (selected, predicted, selected & ~predicted, predicted & ~selected, certain.expand(selected.shape))
    return Happened(*(each.sum(-1, dtype=torch.int32) for each in sets), ~dense)


def _updated(plan, ema, scores):
    """The predictor's state after a step's scores [B, G, N], which may be more blocks than before."""
    level, trend, _ = ops.ema_step(*_grown(ema, scores.shape[-1]), scores, _theta(plan), impl=plan.impl)
    return EmaState(level, trend)


def _walked(plan, ema, scores):
    """`_updated` for steps one after another, scores [T, B, G, N]: the states after each, [T, B, G, N]."""
    level, trend, _ = ops.ema_steps(*_grown(ema, scores.shape[-1]), scores, _theta(plan), impl=plan.impl)
    return EmaState(level, trend)


def _grown(ema, blocks):
    return EmaState(_wider(ema.level, blocks, -torch.inf), _wider(ema.trend, blocks, 0.0))


def _wider(old, blocks, value):
    """`old` [B, G, N] with its new blocks filled with `value`."""
    return old if blocks == old.shape[-1] else torch.nn.functional.pad(old, (0, blocks - old.shape[-1]), value=value)


def _theta(plan):
    if plan.theta is None:
        raise ValueError("theta is None; allowed with mode 'prr': alpha, beta and gamma, as calibration gives them")
    return plan.theta


def _marked(listed, blocks):
    """A list of blocks [..., S], -1 for none, as bool [..., N]."""
    marked = torch.zeros(*listed.shape[:-1], blocks + 1, dtype=torch.bool, device=listed.device)
    return marked.scatter_(-1, torch.where(listed < 0, blocks, listed).long(), True)[..., :blocks]


def _listed(plan, marked):
    """bool [B, G, N] as the lists that attention takes, int32 [B, G, S]."""
    return ops.topk(torch.zeros(marked.shape, device=marked.device), 0, marked, impl=plan.impl)


def _rows(kv, rows):
    return kv._replace(page_table=kv.page_table[rows], length=kv.length[rows])


def newest(kv: PagedKV) -> torch.Tensor:
    """The keys [B, G, D] of the newest tokens."""
    at, size = (kv.length - 1).long(), kv.k.shape[2]
    page = kv.page_table.gather(1, (at // size)[:, None])[:, 0].long()
    return kv.k[page, :, at % size]


def _check(plan, kv, length):
    """ValueError unless the cache has the method's blocks and, on the CPU, sequences of `length` int [B]."""
    if kv.k.shape[2] != plan.method.block:
        raise ValueError(f"the cache has blocks of {kv.k.shape[2]} tokens; allowed: the method's, {plan.method.block}")
    if kv.length.shape != length.shape:
        raise ValueError(f"length is {list(kv.length.shape)}; allowed: {list(length.shape)}, as the state")
    if kv.length.device.type == "cpu" and not torch.equal(kv.length.long(), length):
        raise ValueError(f"length is {kv.length.tolist()}; allowed: {length.tolist()}, one token after the state's")
    if kv.page_table.shape[1] * plan.method.block < int(length.max()):
        raise ValueError(f"page_table has {kv.page_table.shape[1]} columns; allowed: at least "
                         f"{-(-int(length.max()) // plan.method.block)}, one for each block")
