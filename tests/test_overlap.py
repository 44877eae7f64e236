"""Selection and speculation beside each other: the bits of running them in turn, and that they do run at once."""

import math
import os
import threading

import pytest
import torch
from artifact.kernels import attention_cpu, cpu
from test_decode import (
    KINDS,
    LAYER,
    METHODS,
    PROMPT,
    QUEST,
    ROUNDING,
    ROWS,
    STEPS,
    THETA,
    at,
    named,
    off,
    walked,
    world,
)

from artifact.ops import PagedKV
from artifact.prr import decode, overlap
from artifact.prr.decode import Plan

PROMPTS, SHARES = [PROMPT, 70, 210, 333], (0.5, 1.0, 0.0, 2.0)  # the second is too short to select
DEADLINE_S = 60  # of a test that would otherwise wait for ever


def started_batch(plan, some, q):
    """The state of four sequences after their prompts, each warmed up by its own last rows."""
    state = decode.begin(plan, some.k[:, :, :max(PROMPTS)], PROMPTS)
    if plan.mode == "dense":
        return state
    seen = torch.full((ROWS, 4, some.k.shape[1], -(-max(PROMPTS) // plan.method.block)), -math.inf)
    for b, prompt in enumerate(PROMPTS):
        alone = Plan(plan.mode, plan.fidelity, plan.method, SHARES[b], THETA)
        own = decode.begin(alone, some.k[b:b + 1, :, :prompt])
        own = decode.begin(alone, some.k[b:b + 1, :, :prompt])
        rows = decode.prefill_scores(alone, q[prompt - ROWS:prompt, b], own, LAYER)
        seen[:, b, :, :rows.shape[2]] = rows
    return decode.warm(plan, state, seen, LAYER)


def walked_batch(plan, some, q, kv, both):
    """`decode.step` after step of the four -> outputs [T, B, H, D], what happened, the last state."""
    state, outs, seen = started_batch(plan, some, q), [], []
    for t in range(STEPS):
        queries = torch.stack([q[prompt + t, b] for b, prompt in enumerate(PROMPTS)])
        now = at(some, kv, [prompt + t + 1 for prompt in PROMPTS])
        now = at(some, kv, [prompt + t + 1 for prompt in PROMPTS])
        out, state, happened = decode.step(plan, queries, now, state, LAYER, both)
        outs.append(out)
        seen.append(happened)
    return torch.stack(outs), seen, state


@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize(("mode", "fidelity"), KINDS)
def test_overlapped_is_in_turn_and_a_ragged_batch_is_four_single_runs(method, mode, fidelity):
    """Four sequences, each with its own delta: the same bits overlapped as in turn, and those of each alone to
    rounding, with the same sets."""
    some, q = world([prompt + STEPS for prompt in PROMPTS], method.block)
    kv = some.cache()
    plan = Plan(mode, fidelity, method, torch.tensor(SHARES), THETA)
    serial, counts, last = walked_batch(plan, some, q, kv, overlap.in_turn)
    with overlap.Threads() as threads:
        out, seen, state = walked_batch(plan, some, q, kv, threads)
    assert torch.equal(out, serial)
    for ours, theirs in zip(seen, counts, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    if mode == "prr":
        assert all(torch.equal(one, other) for one, other in zip(state.ema, last.ema, strict=True))
    for b, (prompt, share) in enumerate(zip(PROMPTS, SHARES, strict=True)):
        alone, happened, _ = walked(Plan(mode, fidelity, method, share, THETA), some, q, kv, b, prompt)
        assert off(out[:, b], alone.double()) <= ROUNDING
        for part, single in zip(zip(*seen, strict=True), happened, strict=True):
            assert torch.equal(torch.stack([step[b] for step in part]), single)


@pytest.mark.parametrize("fidelity", decode.FIDELITIES)
def test_a_stack_of_layers_overlapped_decodes_the_same_tokens(fidelity):
    transformers = pytest.importorskip("transformers")
    assert transformers
    from test_capture import some_ids, tiny

    from artifact.dsa.quest import Quest
    from artifact.models import attention

    model, ids = tiny(head_dim=16), some_ids(170)
    plan = Plan("prr", fidelity, Quest(page=16, budget_blocks=5, dense_layers=1), 1.5)
    serial = attention.generate(model, ids, plan, 12)
    with overlap.Threads() as threads:
        ours = attention.generate(model, ids, plan, 12, both=threads)
    assert ours.tokens == serial.tokens and torch.equal(ours.happened.missed, serial.happened.missed)
    assert serial.happened.sparse.any()


# --- that they run at once

def test_both_run_at_the_same_time_each_with_one_thread():
    """Either waits until the other has come; alone it would wait for ever."""
    met = threading.Barrier(2, timeout=DEADLINE_S)
    before = torch.get_num_threads()
    with overlap.Threads() as threads:
        main, side = threads(lambda: (met.wait(), torch.get_num_threads(), threading.get_ident()),
                             lambda: (met.wait(), torch.get_num_threads(), threading.get_ident()))
    assert {main[0], side[0]} == {0, 1} and main[1] == side[1] == 1 and main[2] != side[2]
    assert torch.get_num_threads() == before


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
                    reason="one core, or a system that does not pin threads")
def test_each_thread_keeps_to_a_core_of_its_own_and_only_within():
    before = os.sched_getaffinity(0)
    with overlap.Threads() as threads:
        main, side = threads(lambda: os.sched_getaffinity(0), lambda: os.sched_getaffinity(0))
    assert len(main) == len(side) == 1 and main != side and main | side <= before
    assert os.sched_getaffinity(0) == before


def test_the_kernels_of_a_step_let_go_of_the_interpreter():
    for module in (cpu, attention_cpu):
        compiled = [value for value in vars(module).values() if hasattr(value, "targetoptions")]
        assert compiled and all(kernel.targetoptions["nogil"] for kernel in compiled)


def test_modes_of_torch_are_the_callers():
    with overlap.Threads() as threads:
        assert threads(lambda: None, torch.is_inference_mode_enabled)[1] is False
        with torch.inference_mode():
            assert threads(lambda: None, torch.is_inference_mode_enabled)[1] is True
        with torch.no_grad():
            assert threads(lambda: None, torch.is_grad_enabled)[1] is False


# --- bad input

def test_what_either_side_raises_is_raised_when_both_have_ended():
    ended = []

    def fails(name, after=None):
        if after is not None:
            after.wait(DEADLINE_S)
        ended.append(name)
        raise ValueError(f"{name} is wrong; allowed: right")

    with overlap.Threads() as threads:
        failed = threading.Event()
        with pytest.raises(ValueError, match="main is wrong"):
            threads(lambda: (failed.set(), fails("main")), lambda: fails("side", failed))
        assert sorted(ended) == ["main", "side"]
        with pytest.raises(ValueError, match="side is wrong"):
            threads(lambda: 1, lambda: fails("side"))
        assert threads(lambda: 1, lambda: 2) == (1, 2)


def test_a_bad_cache_is_the_same_error_overlapped():
    some, q = world([PROMPT + 1], QUEST.block)
    plan = Plan("prr", "union", QUEST, theta=THETA)
    with overlap.Threads() as threads:
        state = decode.begin(plan, some.k[:, :, :PROMPT])
        with pytest.raises(ValueError, match=r"length is \[302\]; allowed: \[301\]"):
            decode.step(plan, q[PROMPT], at(some, some.cache(), [PROMPT + 2]), state, LAYER, threads)
        broken = PagedKV(*some.cache()[:2], some.cache().page_table[:, :3], None)
        with pytest.raises(ValueError, match="page_table has 3 columns; allowed: at least 19, one for each block"):
            state = decode.begin(plan, some.k[:, :, :PROMPT])
            decode.step(plan, q[PROMPT], at(some, broken, [PROMPT + 1]), state, LAYER, threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_streams_need_a_gpu():
    with pytest.raises(ValueError, match="two streams need a CUDA device; on a CPU: Threads"):
        overlap.Streams()
