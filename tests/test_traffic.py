"""What a step's attention moves: against the lists that the operators were called with, and in round numbers."""

import pytest
import torch
from test_decode import INFLLM, LAYER, PROMPT, QUEST, STEPS, THETA, lists_of, named, started, world

from artifact.ops import PagedKV
from artifact.prr import decode, traffic
from artifact.prr.decode import Plan
from artifact.prr.traffic import Layout


@pytest.mark.parametrize("method", [QUEST, INFLLM], ids=named)
@pytest.mark.parametrize("kind", ["dsa", "union", "exact"])
def test_what_is_counted_is_what_the_operators_were_asked_for(monkeypatch, method, kind):
    some, q = world([PROMPT + STEPS], method.block)
    plan = Plan("dsa" if kind == "dsa" else "prr", kind if kind != "dsa" else "union", method, 1.5, THETA)
    kv = some.cache()
    length = torch.arange(PROMPT, PROMPT + STEPS, dtype=torch.int32) + 1
    state, _ = started(plan, some, q, 0)
    asked = lists_of(monkeypatch)
    _, _, happened = decode.steps(plan, q[PROMPT:, 0], PagedKV(kv.k, kv.v, kv.page_table.expand(STEPS, -1), length),
                                  state, LAYER)
    layout = Layout(method.block, 3, 2, 32, 4)
    frame = traffic.counted(happened, layout).set_index("kind")
    if kind == "dsa":  # nothing is predicted; what the others would move is not known from it
        assert frame.loc["dsa", "moved_bytes"] == frame.loc["dsa", "fewest_bytes"]
    blocks = sum(int((listed >= 0).sum()) for _, listed in asked)
    singles = sum(int((listed >= 0).sum()) for name, listed in asked if name == "attend_groups")
    ours = frame.loc[kind]
    assert ours["blocks_count"] == pytest.approx(blocks / STEPS)
    assert ours["cache_read_bytes"] == pytest.approx(blocks / STEPS * 2 * method.block * 32 * 4)
    part = 3 * (32 + 1) * 4
    handed_over = 0 if kind == "dsa" else 2 * part
    assert ours["parts_written_bytes"] == pytest.approx(singles / STEPS * part + handed_over)
    wasted = 0 if kind != "exact" else int(happened.wasted.sum()) / STEPS
    assert ours["parts_read_bytes"] == pytest.approx(ours["parts_written_bytes"] - wasted * 3 * 32 * 4)
    assert ours["fewest_bytes"] == pytest.approx(
        int(happened.selected.sum()) / STEPS * 2 * method.block * 32 * 4 + 2 * part)
    assert (frame["origin"] == "counted").all() and (singles > 0) == (kind == "exact")


@pytest.mark.parametrize(("block", "shares"), [(16, (50, 101, 202)), (64, (13, 25, 50)), (128, (6, 13, 25))])
def test_the_shares_of_single_blocks_parts(block, shares):
    """Of half-precision caches with 128 channels, in percent of the keys and values."""
    for group, share in zip((4, 8, 16), shares, strict=True):
        layout = Layout(block, group, 8, 128, 2)
        exact = traffic.modelled(96, 1, 1, layout, certain=0).set_index("kind").loc["exact"]
        of_singles = exact["parts_written_bytes"] + exact["parts_read_bytes"] - 2 * 8 * layout.part_bytes
        assert round(100 * of_singles / exact["cache_read_bytes"]) == share


def test_waste_is_read_in_both_and_only_exact_leaves_it_out():
    tight, wide = (traffic.modelled(64, 0.9, ratio, Layout()).set_index("kind") for ratio in (0.9, 1.9))
    assert tight["cache_read_bytes"].nunique() == 1  # no waste: all read A
    extra = 63 * 8 * Layout().block_bytes
    for kind in ("union", "exact"):
        assert wide.loc[kind, "cache_read_bytes"] == pytest.approx(tight.loc[kind, "cache_read_bytes"] + extra)
    assert wide.loc["dsa"].equals(tight.loc["dsa"]) and (wide["over_frac"].diff()[1:] > 0).all()


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="coverage is 0.9; allowed: 0 to 0.5, at most what was predicted"):
        traffic.modelled(64, 0.9, 0.5, Layout())
    with pytest.raises(ValueError, match="certain is 65; allowed: 0 to the budget, 64"):
        traffic.modelled(64, 0.9, 1, Layout(), certain=65)
    with pytest.raises(ValueError, match="group is 0; allowed: at least 1"):
        Layout(group=0)
    sizes = torch.ones(3, 2, dtype=torch.int32)
    happened = decode.Happened(*[sizes] * 5, torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="happened has no row that selected"):
        traffic.counted(happened, Layout(kv_heads=2))
    with pytest.raises(ValueError, match="kv_heads is 8; allowed: 2"):
        traffic.counted(happened, Layout())
