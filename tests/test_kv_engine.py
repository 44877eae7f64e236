"""The engine: conservation in every mode, preemption, prefixes, speculation, and the crash that must not be here."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact.kv import allocators, draws, engine
from artifact.kv.requests import Requests
from artifact.study.serving import Cell, run


def test_the_studys_crash():
    """A sequence finished in this step was picked as victim there, and its release failed with KeyError: 111."""
    for allocator in ("paged", "pim-aware"):
        summary, _ = run(
            Cell(allocator=allocator, block_tokens=64, requests=150, seed=2, admission="vllm", pool_blocks=384)
        )
        assert summary["completed"] == 150 and summary["preemptions"] > 0


SCAN = list(itertools.product(("steady", "prefix", "spec"), ("paged", "pim-aware", "random"), (4, 16, 64), (0.3, 0.6)))


@pytest.mark.parametrize(("workload", "allocator", "block_tokens", "headroom"), SCAN)
def test_every_request_is_served_under_pressure(workload, allocator, block_tokens, headroom):
    given = {"workload": workload, "allocator": allocator, "block_tokens": block_tokens, "headroom": headroom}
    summary, samples = run(Cell(**given, requests=60, seed=1, admission="vllm", max_batch=24))
    assert summary["completed"] + summary["dropped"] == 60
    assert summary["peak_live_blocks"] <= summary["pool_blocks"]
    assert np.all(samples["live_blocks"] + samples["free_blocks"] == summary["pool_blocks"])


@settings(max_examples=60, deadline=None)
@given(
    allocator=st.sampled_from(allocators.NAMES),
    workload=st.sampled_from(("steady", "spec", "prefix")),
    admission=st.sampled_from(engine.ADMISSIONS),
    scratch=st.sampled_from(engine.SCRATCHES),
    adopt=st.sampled_from(engine.ADOPTS),
    compact=st.sampled_from((0.0, 0.5)),
    pool=st.integers(16, 400),
    seed=st.integers(0, 5),
)
def test_no_block_leaks_in_any_mode(allocator, workload, admission, scratch, adopt, compact, pool, seed):
    """The engine itself asserts at the end that every block came back."""
    if allocator == "contiguous" and admission == "vllm":
        admission = "oracle"
    given = {"allocator": allocator, "workload": workload, "admission": admission, "pim_scratch": scratch}
    given |= {"spec_adopt": adopt, "pim_compact": compact, "pool_blocks": pool, "seed": seed}
    owners = []

    def look(samples):
        for step in np.unique(samples.step):
            rows = np.flatnonzero(samples.step == step)
            tables = [samples.flat[samples.starts[i] : samples.starts[i] + samples.blocks[i]] for i in rows]
            owners.append((workload, [set(t.tolist()) for t in tables], [t.size for t in tables]))
            for i, table in zip(rows, tables, strict=True):
                assert table.size >= -(-samples.tokens[i] // 16)

    summary, _ = run(Cell(**given, requests=25, max_batch=8), on_tables=look)
    assert summary["completed"] + summary["dropped"] == 25
    for kind, sets, sizes in owners:
        assert [len(s) for s in sets] == sizes
        if kind != "prefix":  # nobody else shares
            assert len(set().union(*sets)) == sum(sizes)


def _requests(*rows):
    arrival, prompt, output = (np.array(c, dtype=np.int64) for c in zip(*rows, strict=True))
    return Requests(arrival, prompt, output, np.full(arrival.size, -1), np.zeros(arrival.size, dtype=np.int64))


def _run(work, policy, blocks, **rules):
    given = {"block_tokens": 16, "max_batch": 4, "vllm": False, "watermark_blocks": 0, "spec_width": 0, "spec_depth": 3}
    given |= {"spec_accept": 0.8, "splice": True, "shared_scratch": False, "compact": 0.0}
    given |= {"sample_every": 1, "sample_sequences": 8} | rules
    rule = engine.Rules(**given)
    pool = allocators.pool(policy, blocks, 1, engine.Engine.slots(work, rule.max_batch))
    machine = engine.Engine(work, pool, rule)
    seen = []
    for samples in machine.samples():
        seen += list(zip(samples.step.tolist(), samples.request.tolist(), samples.tokens.tolist(), strict=True))
    return machine.outcome(), seen


def test_a_request_decodes_in_the_step_it_arrives_in():
    outcome, seen = _run(_requests((0, 16, 2), (5, 10, 1)), "paged", 8)
    assert seen == [(0, 0, 17), (1, 0, 18), (5, 1, 11)]
    assert (outcome.decode_steps, outcome.completed, outcome.peak_live_blocks) == (3, 2, 2)


def test_oracle_admission_waits_for_the_final_footprint():
    outcome, seen = _run(_requests((0, 16, 32), (0, 16, 32)), "paged", 5)  # 3 blocks each at the end, 5 there
    first = [step for step, rid, _ in seen if rid == 1][0]
    assert first == 32 and outcome.preemptions == 0 and outcome.peak_live_blocks == 3


def test_vllm_admission_preempts_the_youngest_and_recomputes():
    outcome, seen = _run(_requests((0, 16, 32), (0, 16, 32)), "paged", 5, vllm=True)
    assert outcome.preemptions >= 1 and outcome.completed == 2 and outcome.self_preemptions == 0
    lengths = [tokens for _, rid, tokens in seen if rid == 1]
    assert lengths == sorted(lengths) and lengths[-1] == 48  # no token is generated twice


def test_a_request_that_can_never_fit_is_dropped_and_counted():
    for vllm in (False, True):
        outcome, _ = _run(_requests((0, 200, 10), (0, 16, 4)), "paged", 4, vllm=vllm)
        assert (outcome.completed, outcome.dropped) == (1, 1)


def test_a_request_that_outgrows_the_pool_preempts_itself_and_is_dropped():
    outcome, _ = _run(
        _requests(
            (0, 16, 200),
        ),
        "paged",
        4,
        vllm=True,
    )
    assert (outcome.completed, outcome.dropped, outcome.self_preemptions) == (0, 1, 1)


def test_unsorted_arrivals_keep_their_names():
    _, seen = _run(_requests((9, 16, 1), (0, 16, 1)), "paged", 8)
    assert [(step, rid) for step, rid, _ in seen] == [(0, 1), (9, 0)]


def test_the_streams_are_numpys():
    """Doubles, bounded integers and choices in any mixture: the draws of `default_rng` with the same seed."""
    mixture = np.random.default_rng(11)
    for seed in range(4):
        numpys, ours = np.random.default_rng(seed), draws.stream(seed)
        for _ in range(500):
            end = int(mixture.integers(1, 1 << int(mixture.integers(1, 32))))
            assert draws.below(ours, end) == numpys.integers(end)
            assert draws.random(ours) == numpys.random()
            n = int(mixture.integers(1, 300))
            out = np.zeros(min(8, n), dtype=np.int64)
            draws.choice(ours, n, out)
            assert out.tolist() == numpys.choice(n, out.size, replace=False).tolist()


def test_small_batches_of_samples_are_the_same_samples():
    """A run interrupted every few steps, with a buffer of a few rows, gives what one sweep through gives."""
    work = Cell(requests=40).load_requests()
    given = {
        "block_tokens": 16,
        "max_batch": 16,
        "vllm": False,
        "watermark_blocks": 0,
        "spec_width": 4,
        "spec_depth": 3,
    }
    given |= {"spec_accept": 0.8, "splice": True, "shared_scratch": False, "compact": 0.0}
    rules = engine.Rules(**given, sample_every=4, sample_sequences=8)

    def collect(rows, steps):
        pool = allocators.pool("paged", 900, 8, engine.Engine.slots(work, 16))
        machine = engine.Engine(work, pool, rules, rows=rows)
        batches = [(s.step.tolist(), s.tokens.tolist(), s.flat.tolist()) for s in machine.samples(steps)]
        return [sum(parts, []) for parts in zip(*batches, strict=True)], machine.outcome()

    assert collect(4096, 100_000) == collect(8, 3)


@pytest.mark.parametrize("allocator", allocators.NAMES)
def test_contents_are_shared_only_where_they_are_kept(allocator):
    """The shared prefix of `prefix`: found again by those that cache, pinned for the others."""
    summary, _ = run(Cell(workload="prefix", allocator=allocator, requests=80, seed=1))
    length = int(Cell(workload="prefix", requests=80, seed=1).load_requests().prefix_tokens.max()) // 16 * 16
    if allocator in allocators.CACHING:
        assert summary["prefix_hit_tokens"] >= 30 * length and summary["prefix_hit_tokens"] % 16 == 0
    else:
        assert summary["prefix_hit_tokens"] == 0
    assert summary["completed"] == 80


def test_hash_ids_are_found_again_by_those_that_cache(tmp_path):
    """Three prompts of a trace: the second begins like the first, the third is the first's again."""
    rows = [(0, 1100, [0, 1, 2]), (25, 1600, [0, 1, 5, 6]), (50, 1024, [0, 1])]
    lines = [f'{{"timestamp": {t}, "input_length": {n}, "output_length": 3, "hash_ids": {h}}}' for t, n, h in rows]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    found = {}
    for allocator in allocators.NAMES:
        summary, _ = run(Cell(workload="trace", trace_file=str(path), requests=3, allocator=allocator, pool_blocks=512))
        found[allocator] = summary["prefix_hit_tokens"]
    for allocator in allocators.NAMES:  # 1024 tokens each; a prompt's last token is always computed: 1008 of the third
        assert found[allocator] == (1024 + 1008 if allocator in allocators.CACHING else 0)


@pytest.mark.parametrize("allocator", ["paged", "vllm-v1", "sglang-region"])
def test_swap_moves_what_recompute_computes(allocator):
    given = {"allocator": allocator, "requests": 60, "admission": "vllm", "max_batch": 24, "headroom": 0.5}
    swap, _ = run(Cell(**given, preempt="swap"))
    again, _ = run(Cell(**given))
    assert swap["preemptions"] == again["preemptions"] > 0
    assert swap["recomputed_tokens"] == again["swapped_bytes"] == 0
    assert again["recomputed_tokens"] > 0 and swap["swapped_bytes"] > 0
    assert swap["swapped_bytes"] % (16 * 4096) == 0
    assert swap["m1_row_hit_frac"] == again["m1_row_hit_frac"]


def test_frees_in_a_seeded_order_scatter_more():
    ordered, _ = run(Cell(requests=200))
    first, _ = run(Cell(requests=200, frees="unordered"))
    again, _ = run(Cell(requests=200, frees="unordered"))
    assert first == again and first["m1_row_hit_frac"] < ordered["m1_row_hit_frac"]
    with pytest.raises(ValueError, match="frees is 'unordered' with allocator random"):
        Cell(allocator="random", frees="unordered")


@pytest.mark.parametrize("engine_", ["vllm-v1", "sglang"])
def test_regions_and_prefixes_go_together(engine_):
    """The region-aware form finds as much again as the engine's own, and touches fewer regions."""
    plain, _ = run(Cell(workload="prefix", allocator=engine_, requests=150))
    region, _ = run(Cell(workload="prefix", allocator=f"{engine_}-region", requests=150))
    assert region["prefix_hit_tokens"] == plain["prefix_hit_tokens"] > 0
    assert region["region_spread"] < plain["region_spread"] and region["m1_row_hit_frac"] > plain["m1_row_hit_frac"]
