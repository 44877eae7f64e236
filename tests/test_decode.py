"""A decode step in every mode: against a step written out plainly, and what no mode may depend on."""

import copy
import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import scene

from artifact import ops
from artifact.dsa.infllm import InfLLM
from artifact.dsa.quest import Quest
from artifact.ops import PagedKV
from artifact.prr import calibration, decode, predictor
from artifact.prr.decode import Plan
from artifact.prr.predictor import EmaState, Theta

QUEST = Quest(page=16, budget_blocks=8, dense_layers=1)
INFLLM = InfLLM(block=32, init=1, local=1, topk=5, dense_len=-1)
METHODS = [QUEST, INFLLM]
THETA = Theta(0.6, 0.3, 0.5)
LAYER, PROMPT, STEPS, ROWS = 3, 300, 24, 16
KINDS = [(mode, fidelity) for mode in decode.MODES for fidelity in decode.FIDELITIES
         if fidelity == "union" or mode not in ("dense", "dsa")]
ROUNDING = 2e-6


def named(value):
    return type(value).__name__ if dataclasses.is_dataclass(value) else str(value)


def world(length, block, *, group=3, seed=0):
    """Sequences whose queries drift: neighbours select alike, as a model's do. q [tokens, B, H, D]."""
    some = scene(length, group, 32, block, seed=seed)
    draw = torch.Generator().manual_seed(seed + 1)
    noise = torch.randn(max(length), *some.q.shape, generator=draw)
    q = noise.clone()
    for t in range(1, len(q)):
        q[t] = 0.9 * q[t - 1] + 0.45 * noise[t]
    return some, 3 * q


def at(some, kv, tokens):
    """The cache when each sequence has so many tokens."""
    return kv._replace(length=torch.tensor(tokens, dtype=torch.int32))


def started(plan, some, q, b, prompt=PROMPT, layer=LAYER):
    """The state of sequence b after its prompt, and the scores of the prompt's last rows [R, G, N]."""
    state = decode.begin(plan, some.k[b:b + 1, :, :prompt])
    if plan.mode == "dense":
        return state, None
    seen = decode.prefill_scores(plan, q[prompt - ROWS:prompt, b], state, layer)
    return decode.warm(plan, state, seen[:, None], layer), seen


def walked(plan, some, q, kv, b=0, prompt=PROMPT, layer=LAYER, count=STEPS):
    """`step` after `step` of one sequence -> outputs [T, H, D], what happened [T, G], the last state."""
    state, _ = started(plan, some, q, b, prompt, layer)
    alone = PagedKV(kv.k, kv.v, kv.page_table[b:b + 1], None)
    outs, seen = [], []
    for t in range(prompt, prompt + count):
        out, state, happened = decode.step(plan, q[t, b:b + 1], at(some, alone, [t + 1]), state, layer)
        outs.append(out)
        seen.append(happened)
    return torch.cat(outs), decode.Happened(*(torch.cat(parts) for parts in zip(*seen, strict=True))), state


def best(scores, count, barred):
    """The indices of the `count` highest scores that are none of `barred`, ties to the lowest index."""
    order = sorted((n for n in range(len(scores)) if n not in barred and scores[n] > -math.inf),
                   key=lambda n: (-scores[n], n))
    return set(order[:max(0, count)])


def plainly(plan, some, q, b=0, prompt=PROMPT, layer=LAYER, count=STEPS):
    """What the definitions say: sets per step and KV head as (A, P, attended), outputs in float64."""
    method, heads, kv_heads = plan.method, q.shape[2], some.k.shape[1]
    ema = predictor.begin((kv_heads, 1))
    last, steps, outs = None, [], []
    for t in range(prompt - ROWS, prompt + count):
        keys, length = some.k[b:b + 1, :, :t + 1], torch.tensor([t + 1])
        scores = method.score(q[t, b:b + 1], method.summarize(keys), impl="reference")[0].numpy()
        blocks = scores.shape[1]
        forced = set(method.forced(length)[0].nonzero()[:, 0].tolist())
        everything = bool(method.dense(layer, length))
        free = method.budget_blocks - len(forced)
        scores[:, sorted(range(blocks) if everything else forced)] = -math.inf
        level, trend = (np.pad(part, ((0, 0), (0, blocks - part.shape[1])), constant_values=value)
                        for part, value in zip(ema, (-np.inf, 0), strict=True))
        expected = predictor.predict(EmaState(level, trend), THETA)
        here, row = [], []
        for g in range(kv_heads):
            chosen = set(range(blocks)) if everything else forced | best(scores[g], free, forced)
            if everything:
                guess = set(range(blocks))
            elif plan.mode in ("reuse", "repair"):
                guess = (last[g] if last else set()) | forced
            elif plan.mode == "prr":
                newborn = {n for n in range(blocks) if n not in forced and level[g, n] == -math.inf}
                guess = forced | newborn | best(expected[g], int(plan.speculation * free), forced | newborn)
            else:
                guess = set()
            attended = {"dense": set(range(blocks)), "dsa": chosen, "reuse": guess}.get(plan.mode, guess | chosen)
            attended = chosen if plan.fidelity == "exact" else attended
            here.append((chosen, guess, attended))
            token = torch.tensor([n for n in range(t + 1) if n // method.block in attended])
            group = slice(g * heads // kv_heads, (g + 1) * heads // kv_heads)
            logits = q[t, b, group].double() @ some.k[b, g, token].double().T / math.sqrt(q.shape[3])
            row.append(logits.softmax(-1) @ some.v[b, g, token].double())
        ema, last = predictor.update(ema, scores, THETA), [chosen for chosen, _, _ in here]
        if t >= prompt:
            steps.append(here)
            outs.append(torch.cat(row))
    return steps, torch.stack(outs)


def same_counts(happened, steps):
    for t, heads in enumerate(steps):
        for g, (chosen, guess, _) in enumerate(heads):
            assert happened.selected[t, g] == len(chosen) and happened.predicted[t, g] == len(guess)
            assert happened.missed[t, g] == len(chosen - guess) and happened.wasted[t, g] == len(guess - chosen)


def off(ours, truth):
    """The largest error, of each head's largest number."""
    return ((ours.double() - truth).abs().amax(-1) / truth.abs().amax(-1)).max().item()


@pytest.fixture(scope="module")
def worlds():
    return {method: world([PROMPT + STEPS], method.block) for method in METHODS}


# --- against the definitions

@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize(("mode", "fidelity"), KINDS)
def test_a_step_is_what_the_definitions_say(worlds, method, mode, fidelity):
    some, q = worlds[method]
    plan = Plan(mode, fidelity, method, 1.5, THETA)
    steps, truth = plainly(plan, some, q)
    out, happened, _ = walked(plan, some, q, some.cache())
    assert out.dtype == torch.float32 and off(out, truth) <= ROUNDING
    if mode not in ("dense", "dsa"):
        same_counts(happened, steps)
        assert (happened.missed > 0).any() and (happened.wasted > 0).any() and happened.sparse.all()


@pytest.mark.parametrize(("method", "prompt", "layer"), [(QUEST, 115, LAYER), (QUEST, PROMPT, 0),
                                                         (dataclasses.replace(INFLLM, dense_len=320), PROMPT, LAYER)])
def test_what_selects_nothing_attends_to_everything(method, prompt, layer):
    """A short sequence until it is long enough, and a layer that stays dense."""
    some, q = world([prompt + STEPS], method.block)
    for mode, fidelity in KINDS[1:]:
        plan = Plan(mode, fidelity, method, theta=THETA)
        steps, truth = plainly(plan, some, q, prompt=prompt, layer=layer)
        out, happened, _ = walked(plan, some, q, some.cache(), prompt=prompt, layer=layer)
        assert off(out, truth) <= ROUNDING
        dense = ~happened.sparse
        assert dense.any() and (layer == 0) == dense.all().item()
        assert torch.equal(happened.predicted[dense], happened.selected[dense]) and not happened.missed[dense].any()
        if mode != "dsa":
            same_counts(happened, steps)


@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize(("mode", "fidelity"), KINDS)
def test_many_steps_at_once_are_as_many_steps(worlds, method, mode, fidelity):
    some, q = worlds[method]
    plan = Plan(mode, fidelity, method, 0.7, THETA)
    kv = some.cache()
    one, happened, after = walked(plan, some, q, kv)
    state, _ = started(plan, some, q, 0)
    outs, seen = [], []
    for start, stop in pairwise((0, 1, 18, STEPS)):
        rows = range(PROMPT + start, PROMPT + stop)
        wide = PagedKV(kv.k, kv.v, kv.page_table.expand(len(rows), -1), None)
        out, state, some_happened = decode.steps(plan, q[PROMPT + start:PROMPT + stop, 0],
                                                 at(some, wide, [t + 1 for t in rows]), state, LAYER)
        outs.append(out)
        seen.append(some_happened)
    assert off(torch.cat(outs), one.double()) <= ROUNDING
    for part, other in zip(happened, zip(*seen, strict=True), strict=True):
        assert torch.equal(part, torch.cat(other))
    if mode == "prr":
        assert all(torch.equal(x, y) for x, y in zip(after.ema, state.ema, strict=True))
    if mode in ("reuse", "repair"):
        assert torch.equal(after.last, state.last)


@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize(("mode", "fidelity"), KINDS)
def test_a_ragged_batch_is_its_sequences_alone(method, mode, fidelity):
    """Four sequences, one of them too short to select, each with its own share of speculation."""
    prompts, shares = [PROMPT, 70, 210, 333], (0.5, 1.0, 0.0, 2.0)
    some, q = world([prompt + STEPS for prompt in prompts], method.block)
    kv = some.cache()
    alone = [walked(Plan(mode, fidelity, method, share, THETA), some, q, kv, b, prompt)
             for b, (prompt, share) in enumerate(zip(prompts, shares, strict=True))]
    plan = Plan(mode, fidelity, method, torch.tensor(shares), THETA)
    state = decode.begin(plan, some.k[:, :, :max(prompts)], prompts)
    if mode != "dense":
        blocks = -(-max(prompts) // method.block)
        seen = torch.full((ROWS, 4, some.k.shape[1], blocks), -math.inf)
        for b, prompt in enumerate(prompts):
            own = started(Plan(mode, fidelity, method, shares[b], THETA), some, q, b, prompt)[1]
            seen[:, b, :, :own.shape[2]] = own
        state = decode.warm(plan, state, seen, LAYER)
    for t in range(STEPS):
        queries = torch.stack([q[prompt + t, b] for b, prompt in enumerate(prompts)])
        out, state, happened = decode.step(plan, queries, at(some, kv, [prompt + t + 1 for prompt in prompts]), state,
                                           LAYER)
        for b, (ours, seen, _) in enumerate(alone):
            assert off(out[b], ours[t].double()) <= ROUNDING
            for part, other in zip(happened, seen, strict=True):
                assert torch.equal(part[b], other[t])


# --- what is attended to, and how

def lists_of(monkeypatch):
    """The lists that attention is called with from now on, in order, as (operator, list)."""
    asked = []

    def watch(name, place, call):
        def watched(*arguments, **options):
            asked.append((name, arguments[place]))
            return call(*arguments, **options)

        monkeypatch.setattr(ops, name, watched)

    for name, place in (("attend", 2), ("attend_groups", 2), ("repair", 3)):
        watch(name, place, getattr(ops, name))
    return asked


@pytest.mark.parametrize("fidelity", decode.FIDELITIES)
@pytest.mark.parametrize("method", METHODS, ids=named)
def test_no_block_is_read_twice_and_none_but_those_of_p_and_a(worlds, monkeypatch, method, fidelity):
    """Every other page holds NaN, and so does all past the newest token."""
    some, q = worlds[method]
    plan = Plan("prr", fidelity, method, 1.5, THETA)
    steps, truth = plainly(plan, some, q)
    state, _ = started(plan, some, q, 0)
    asked = lists_of(monkeypatch)
    for t, heads in enumerate(steps):
        del asked[:]
        either = torch.full((1, len(heads), max(len(a | p) for a, p, _ in heads)), -1, dtype=torch.int32)
        for g, (chosen, guess, _) in enumerate(heads):
            either[0, g, :len(chosen | guess)] = torch.tensor(sorted(chosen | guess), dtype=torch.int32)
        short = some._replace(length=[PROMPT + t + 1])
        out, state, _ = decode.step(plan, q[PROMPT + t], short.cache(either), state, LAYER)
        assert off(out[0], truth[t]) <= ROUNDING
        for g, (chosen, guess, _) in enumerate(heads):
            read = [n for _, listed in asked for n in listed[0, g].tolist() if n >= 0]
            assert sorted(read) == sorted(chosen | guess)


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_any_predicted_set_gives_the_same_exact_output(worlds, monkeypatch, method):
    """Empty, disjoint, nested or equal: "exact" is DSA to rounding, "union" is attention to both."""
    some, q = worlds[method]
    kv = at(some, some.cache(), [PROMPT + 1])
    direct, _, _ = decode.step(Plan("dsa", method=method), q[PROMPT], kv,
                               started(Plan("dsa", method=method), some, q, 0)[0], LAYER)
    metadata = method.summarize(some.k[:, :, :PROMPT + 1])
    chosen = decode.select(Plan("dsa", method=method), q[PROMPT], metadata, LAYER)[1]
    blocks, selected = chosen.shape[2], [set(row.nonzero()[:, 0].tolist()) for row in chosen[0]]
    states = {kind: decode.begin(Plan(*kind, method), some.k[:, :, :PROMPT]) for kind in (
        ("reuse", "exact"), ("repair", "exact"), ("prr", "exact"), ("prr", "union"))}
    bits = st.integers(0, 2**blocks - 1)
    kinds = st.sampled_from(["any", "none", "disjoint", "subset", "superset", "equal"])

    @settings(max_examples=200, deadline=None)
    @given(st.lists(bits, min_size=2, max_size=2), kinds)
    def same(drawn, kind):
        guess = torch.zeros_like(chosen)
        for g, number in enumerate(drawn):
            one = {n for n in range(blocks) if number >> n & 1}
            one = {"any": one, "none": set(), "disjoint": one - selected[g], "subset": one & selected[g],
                   "superset": one | selected[g], "equal": selected[g]}[kind]
            guess[0, g, sorted(one)] = True
        monkeypatch.setattr(decode, "speculate", lambda plan, state, length, layer: guess)
        outs = {}
        for (mode, fidelity), state in states.items():
            plan = Plan(mode, fidelity, method, theta=THETA)
            outs[mode, fidelity], _, happened = decode.step(plan, q[PROMPT], kv, copy.deepcopy(state), LAYER)
            assert happened.wasted[0].tolist() == (guess & ~chosen).sum(-1)[0].tolist()
        out = outs.pop(("prr", "union"))
        assert all(off(exact, direct.double()) <= ROUNDING for exact in outs.values())
        both = [torch.tensor(row).nonzero()[:, 0] for row in (guess | chosen)[0].tolist()]
        listed = torch.nn.utils.rnn.pad_sequence(both, True, -1)[None].int()
        shorter = some._replace(q=q[PROMPT], length=[PROMPT + 1])
        assert off(out, shorter.truth(listed).out) <= ROUNDING

    same()


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_with_alpha_1_gamma_0_and_no_more_than_the_budget_the_prediction_is_the_last_set(worlds, method):
    some, q = worlds[method]
    sets = {}
    for mode in ("prr", "repair"):
        plan = Plan(mode, "union", method, 1.0, Theta(1, 0.5, 0))
        state, _ = started(plan, some, q, 0)
        kv = some.cache()
        for t in range(PROMPT, PROMPT + STEPS):
            length = torch.tensor([t + 1])
            sets.setdefault(t, []).append(decode.speculate(plan, state, length, LAYER))
            _, state, _ = decode.step(plan, q[t], at(some, kv, [t + 1]), state, LAYER)
    assert all(torch.equal(one, other) for one, other in sets.values())


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_without_a_prompts_rows_everything_is_newborn_once(worlds, method):
    some, q = worlds[method]
    for mode in ("reuse", "repair", "prr"):
        plan = Plan(mode, "union", method, theta=THETA)
        state = decode.begin(plan, some.k[:, :, :PROMPT])
        blocks = []
        for t in range(PROMPT, PROMPT + 2):
            _, state, happened = decode.step(plan, q[t], at(some, some.cache(), [t + 1]), state, LAYER)
            blocks.append(happened.predicted[0].tolist())
        assert blocks[0] == [-(-(PROMPT + 1) // method.block)] * 2 and max(blocks[1]) <= method.budget_blocks + 1


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_a_sequence_from_its_first_token(method):
    some, q = world([40], method.block)
    for mode, fidelity in KINDS:
        plan = Plan(mode, fidelity, method, theta=THETA)
        state, kv = decode.begin(plan, some.k[:, :, :0]), some.cache()
        for t in range(40):
            out, state, _ = decode.step(plan, q[t], at(some, kv, [t + 1]), state, LAYER)
            shorter = some._replace(q=q[t], length=[t + 1])
            assert off(out, shorter.truth().out) <= ROUNDING


def test_half_precision_caches():
    some = scene([PROMPT + 1], 3, 32, 16, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(5)
    q = torch.randn(PROMPT + 1, *some.q.shape, generator=draw).bfloat16()
    outs = []
    for fidelity in decode.FIDELITIES:
        plan = Plan("prr", fidelity, QUEST, 0.5, THETA)
        state, _ = started(plan, some, q, 0)
        out, _, happened = decode.step(plan, q[PROMPT], some.cache(), state, LAYER)
        outs.append(out)
        assert out.dtype == torch.float32 and happened.missed.any()
    direct, _, _ = decode.step(Plan("dsa", method=QUEST), q[PROMPT], some.cache(),
                               decode.begin(Plan("dsa", method=QUEST), some.k[:, :, :PROMPT]), LAYER)
    assert off(outs[1], direct.double()) <= 5e-6


def test_theta_is_the_calibrations(worlds):
    for method in METHODS:
        some, q = worlds[method]
        plan = Plan("prr", "union", method)
        state = decode.begin(plan, some.k[:, :, :PROMPT])
        seen = decode.prefill_scores(plan, q[PROMPT - ROWS:PROMPT, 0], state, LAYER)
        picks = method.budget_blocks - int(method.forced([PROMPT]).sum())
        weights = "raw" if method is INFLLM else "shift"
        assert decode.calibrated(plan, seen, PROMPT, LAYER).theta == calibration.plain(
            seen.numpy(), picks, weights=weights).theta
    assert decode.calibrated(Plan(method=QUEST), seen, PROMPT, 0).theta == Theta(0.2, 0.1, 0.0)  # a dense layer


# --- bad input

@pytest.mark.parametrize(("options", "said"), [
    ({"mode": "guess"}, "mode is 'guess'; allowed: dense, dsa, reuse, repair, prr"),
    ({"fidelity": "nearly"}, "fidelity is 'nearly'; allowed: union, exact"),
    ({"speculation": -1}, "speculation is -1; allowed: at least 0, and finite"),
    ({"speculation": [1, math.inf]}, "speculation is inf"), ({"speculation": math.nan}, "speculation is nan"),
    ({"theta": (2, 0.1, 0)}, "alpha is 2; allowed"),
])
def test_a_plan_that_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Plan(**options)


def test_what_a_step_cannot_take_is_refused(worlds):
    some, q = worlds[QUEST]
    plan, kv = Plan("prr", "union", QUEST, theta=THETA), some.cache()

    def run(plan=plan, kv=kv, tokens=PROMPT + 1, walk=decode.step, rows=1, layer=LAYER, prompt=PROMPT):
        state = decode.begin(plan, some.k[:, :, :prompt])
        queries = q[PROMPT:PROMPT + rows, 0]
        return walk(plan, queries, at(some, kv, tokens if isinstance(tokens, list) else [tokens]), state, layer)

    for options, said in [
        ({"tokens": PROMPT + 2}, r"length is \[302\]; allowed: \[301\], one token after the state's"),
        ({"tokens": [301, 301]}, r"length is \[2\]; allowed: \[1\], as the state"),
        ({"kv": world([PROMPT + 1], 32)[0].cache()}, "the cache has blocks of 32 tokens; allowed: the method's, 16"),
        ({"plan": Plan(method=QUEST)}, "theta is None; allowed with mode 'prr'"),
        ({"plan": Plan(method=QUEST, theta=THETA, speculation=(1, 2))}, "speculation has 2 numbers; allowed: one, or"),
        ({"plan": Plan(method=QUEST, theta=THETA, impl="gpu")}, "impl is 'gpu'"),
        ({"walk": decode.steps, "rows": 0, "tokens": []}, "q has 0 rows, the state 1 sequences"),
        ({"walk": decode.steps, "rows": 2, "tokens": [301, 303]}, "length is"),
    ]:
        with pytest.raises(ValueError, match=said):
            run(**options)
    wide = kv._replace(page_table=torch.stack([kv.page_table[0], kv.page_table[0].flip(0)]))
    with pytest.raises(ValueError, match="page_table has rows with different pages"):
        run(walk=decode.steps, rows=2, tokens=[301, 302], kv=wide)
    with pytest.raises(ValueError, match="q has 0 rows; allowed: 1 to 300, the tokens of the prefill"):
        decode.prefill_scores(plan, q[:0, 0], decode.begin(plan, some.k[:, :, :PROMPT]), LAYER)


def test_parts_go_in_slices_and_that_changes_nothing(worlds, monkeypatch):
    some, q = worlds[QUEST]
    plan, kv = Plan("prr", "exact", QUEST, 1.5, THETA), some.cache()
    wide = PagedKV(kv.k, kv.v, kv.page_table.expand(STEPS, -1), torch.arange(STEPS, dtype=torch.int32) + PROMPT + 1)
    outs = []
    for numbers in (decode._PARTS, 1, 8000):
        monkeypatch.setattr(decode, "_PARTS", numbers)
        outs.append(decode.steps(plan, q[PROMPT:, 0], wide, started(plan, some, q, 0)[0], LAYER)[0])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
