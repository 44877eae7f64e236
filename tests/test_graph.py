"""The step that a CUDA graph can hold: `decode.step`'s sets and results, and not one question to the host."""

import pytest
import torch
from test_decode import KINDS, LAYER, METHODS, PROMPT, QUEST, ROUNDING, STEPS, THETA, at, named, off, started, world

from artifact.dsa.infllm import InfLLM
from artifact.prr import decode, graph, overlap
from artifact.prr.decode import Plan

SELECTING = [(mode, fidelity) for mode, fidelity in KINDS if mode != "dense"]


def moved(plan, state, method, tokens):
    """The state of `decode` as that of the graph's step, with room for so many tokens."""
    return graph.begin(plan, state, -(-tokens // method.block) + 2, LAYER, "cpu")


@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize(("mode", "fidelity"), SELECTING)
def test_it_is_decodes_step(method, mode, fidelity):
    """Three ragged sequences, each with its own share of speculation; the counts are changed while it runs."""
    prompts, shares = [PROMPT, 210, 333], (0.5, 1.0, 2.0)
    some, q = world([prompt + STEPS for prompt in prompts], method.block)
    kv = some.cache()
    plan = Plan(mode, fidelity, method, shares, THETA, impl="reference")
    state = decode.begin(plan, some.k[:, :, :max(prompts)], prompts)
    seen = [started(Plan(mode, fidelity, method, 1.0, THETA), some, q, b, prompt)[1]
            for b, prompt in enumerate(prompts)]
    widest = max(rows.shape[2] for rows in seen)
    seen = torch.stack([torch.nn.functional.pad(rows, (0, widest - rows.shape[2]), value=-torch.inf)
                        for rows in seen], 1)
    state = decode.warm(plan, state, seen, LAYER)
    warm = state
    if mode in ("reuse", "repair"):  # which the graph's step predicts from the scores themselves
        memory = Plan("prr", fidelity, method, 1.0, graph.LAST, impl="reference")
        warm = decode.warm(memory, decode.begin(memory, some.k[:, :, :max(prompts)], prompts), seen, LAYER)
    held = moved(plan, warm._replace(metadata=state.metadata), method, max(prompts) + STEPS)
    for t in range(STEPS):
        lengths = [prompt + t + 1 for prompt in prompts]
        count = graph.guesses(plan, torch.tensor(lengths))
        queries = torch.stack([q[prompt + t, b] for b, prompt in enumerate(prompts)])
        out, state, happened = decode.step(plan, queries, at(some, kv, lengths), state, LAYER)
        ours, counts = graph.step(plan, queries, at(some, kv, lengths), held, count, 20)
        assert off(ours, out.double()) <= ROUNDING
        assert torch.equal(counts.selected, happened.selected) and torch.equal(counts.missed, happened.missed)
        if mode != "dsa":
            assert torch.equal(counts.predicted, happened.predicted)
    if mode == "prr":
        for own, right in zip(held.ema, state.ema, strict=True):
            torch.testing.assert_close(own[..., :right.shape[2]], right, rtol=1e-5, atol=1e-6)
    assert held.metadata.length.tolist() == state.metadata.length.tolist()


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_overlapped_is_in_turn(method):
    some, q = world([PROMPT + STEPS], method.block)
    plan = Plan("prr", "exact", method, 1.5, THETA, impl="reference")
    state, _ = started(plan, some, q, 0)
    helds = [moved(plan, state, method, PROMPT + STEPS) for _ in range(2)]
    with overlap.Threads() as threads:
        for t in range(PROMPT, PROMPT + STEPS):
            kv = at(some, some.cache(), [t + 1])
            count = graph.guesses(plan, torch.tensor([t + 1]))
            (one, _), (other, _) = (graph.step(plan, q[t], kv, held, count, 20, both)
                                    for held, both in zip(helds, (overlap.in_turn, threads), strict=True))
            assert torch.equal(one, other)


@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize(("mode", "fidelity"), SELECTING)
def test_it_asks_the_host_nothing_and_writes_where_things_lie(method, mode, fidelity):
    """Over tensors that have shapes and lie where no number can be had of them: one question would end it."""
    some, q = world([PROMPT + STEPS] * 2, method.block)
    plan = Plan(mode, fidelity, method, 1.0, THETA, impl="reference")
    state = decode.begin(plan, some.k[:, :, :PROMPT])
    held = moved(plan, state, method, PROMPT + STEPS)
    count, kv = graph.guesses(plan, torch.tensor([PROMPT + 1] * 2)), at(some, some.cache(), [PROMPT + 1] * 2)
    held = graph.Held(*(type(part)(*(one.to("meta") for one in part)) for part in held))
    before = [*held.metadata, *held.ema]
    out, counts = graph.step(plan, q[PROMPT].to("meta"), type(kv)(*(part.to("meta") for part in kv)), held,
                             count.to("meta"), 20)
    assert out.shape == q[PROMPT].shape and counts.missed.shape == (2, some.k.shape[1])
    assert all(one is other for one, other in zip(before, (*held.metadata, *held.ema), strict=True))
    for question in (lambda: int(held.metadata.length.max()), lambda: bool(counts.missed.any()),
                     lambda: held.metadata.length.cpu(), lambda: q.to("meta")[q.to("meta") > 0]):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            question()  # which is what one does here


def test_what_does_not_fit_a_list_is_repaired_and_the_result_stays(monkeypatch):
    """Without a prompt's rows everything is newborn, far more than there are slots: still union of P and A, and A."""
    some, q = world([PROMPT + STEPS], QUEST.block)
    kv = at(some, some.cache(), [PROMPT + 1])
    direct = decode.step(Plan("dsa", method=QUEST), q[PROMPT], kv, decode.begin(Plan("dsa", method=QUEST),
                         some.k[:1, :, :PROMPT]), LAYER)[0]
    plan = Plan("prr", "exact", QUEST, 1.0, THETA, impl="reference")
    held = moved(plan, decode.begin(plan, some.k[:1, :, :PROMPT]), QUEST, PROMPT + STEPS)
    out, counts = graph.step(plan, q[PROMPT], kv, held, graph.guesses(plan, torch.tensor([PROMPT + 1])), 7)
    assert off(out, direct.double()) <= ROUNDING and (counts.predicted <= 7 + 1 + 1).all()


# --- streams and graphs, as far as a machine without them goes

class Cuda:
    """What of torch.cuda `Streams` and `Captured` use, on the CPU: work is done at once, who waits for whom is kept."""

    def __init__(self, monkeypatch):
        self.told, self.now, self.graphs, cuda = [], "default", [], self

        class Stream:
            def __init__(self, name="default", priority=None):
                self.name = name if priority is None else f"priority {priority}"

            def wait_stream(self, other):
                cuda.told.append(f"{self.name} waits for {other.name}")

            @staticmethod
            def priority_range():
                return 0, -5

        class On:
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                self.before, cuda.now = cuda.now, self.stream.name

            def __exit__(self, *_):
                cuda.now = self.before

        class Graph:
            def replay(self):
                cuda.told.append("replay")

        fakes = {"is_available": lambda: True, "Stream": lambda priority: Stream(priority=priority), "stream": On,
                 "current_stream": lambda: Stream(self.now), "CUDAGraph": Graph,
                 "graph": lambda graph, stream: On(stream)}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        torch.cuda.Stream.priority_range = Stream.priority_range


def test_selection_runs_first_in_priority_and_the_streams_fork_and_join(monkeypatch):
    cuda = Cuda(monkeypatch)
    streams = overlap.Streams()
    with torch.cuda.stream(streams.first):
        main, side = streams(lambda: cuda.now, lambda: cuda.now)
    assert (main, side) == ("priority -5", "priority 0")
    assert cuda.told == ["priority 0 waits for priority -5", "priority -5 waits for priority 0"]


@pytest.mark.parametrize("fidelity", decode.FIDELITIES)
def test_a_capture_leaves_the_state_as_it_was_and_its_step_is_the_step(monkeypatch, fidelity):
    some, q = world([PROMPT + STEPS], QUEST.block)
    kv = at(some, some.cache(), [PROMPT + 1])
    plan = Plan("prr", fidelity, QUEST, 1.5, THETA, impl="reference")
    state, _ = started(plan, some, q, 0)
    count = graph.guesses(plan, torch.tensor([PROMPT + 1]))
    alone = moved(plan, state, QUEST, PROMPT + STEPS)
    right, _ = graph.step(plan, q[PROMPT], kv, alone, count, 20)
    cuda, held, on = Cuda(monkeypatch), moved(plan, state, QUEST, PROMPT + STEPS), []
    kept = [*held.metadata, *held.ema]

    def step(both):
        on.append((cuda.now, [part.clone() for part in kept]))
        return graph.step(plan, q[PROMPT], kv, held, count, 20, both)

    run = graph.Captured(step, kept)
    assert [stream for stream, _ in on] == ["priority -5"] * 4, "three times to warm up, then the capture"
    for before, at_capture in zip(on[0][1], on[3][1], strict=True):
        assert torch.equal(before, at_capture)
    out, _ = run()  # here the capture has run already; a replay is only told
    assert cuda.told[-1] == "replay" and torch.equal(out, right)
    assert all(torch.equal(one, other) for one, other in zip(kept, (*alone.metadata, *alone.ema), strict=True))


# --- bad input

def test_what_cannot_be_held_is_refused():
    some, q = world([PROMPT + STEPS, 70 + STEPS], QUEST.block)
    plan = Plan("prr", "union", QUEST, 1.0, THETA, impl="reference")
    state = decode.begin(plan, some.k[:1, :, :PROMPT])
    for options, said in [
        ({"blocks": 3}, "blocks is 3; allowed: at least 19"),
        ({"layer": 0}, r"lengths are \[300\]; allowed in layer 0: only sequences that are long enough to select"),
        ({"plan": Plan("prr", method=InfLLM(local=9, topk=1, init=2), theta=THETA, impl="reference")},
         "budget_blocks is 10; allowed: at least 12, what is always attended"),
        ({"plan": Plan("dense", impl="reference")}, "mode and impl are 'dense', 'reference'; allowed"),
        ({"plan": Plan("prr", theta=THETA)}, "mode and impl are 'prr', 'cpu'; allowed"),
    ]:
        given = {"plan": plan, "state": state, "blocks": 40, "layer": LAYER, "device": "cpu"} | options
        with pytest.raises(ValueError, match=said):
            graph.begin(**given)
    short = decode.begin(plan, some.k[:, :, :PROMPT], [PROMPT, 70])
    with pytest.raises(ValueError, match=r"lengths are \[300, 70\]"):
        graph.begin(plan, short, 40, LAYER, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_capture_needs_a_gpu():
    with pytest.raises(ValueError, match="two streams need a CUDA device"):
        graph.Captured(lambda both: both(lambda: 1, lambda: 2))


