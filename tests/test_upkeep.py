"""What allocators cost: the operations are the engine's, the rival is the study's, and ours does not grow."""

import numpy as np
import pytest

from artifact.kv import allocators, replay
from artifact.study import bench, rival, scale, serving, upkeep
from artifact.study.serving import Cell


@pytest.mark.parametrize("workload", ["steady", "spec"])
def test_the_rivals_place_as_ours_do(workload):
    """Same blocks for every sequence, all along: the port is the study's policy, and so is ours."""
    cell = Cell(workload=workload, allocator="pim-aware", requests=60)
    stream, steps = upkeep.operations(cell)
    assert steps == serving.summarise(cell)["decode_steps"]
    pool, region, slots = cell.num_blocks(cell.load_requests()), cell.blocks_per_region, cell.max_batch + 1
    for name, kind in (("paged", rival.Stack), ("pim-aware", rival.Heaps)):
        ours, theirs = allocators.pool(name, pool, region, slots), kind(pool, region)
        tables, held = np.zeros((slots, 800), dtype=np.int32), np.zeros(slots, dtype=np.int64)
        for start in range(0, len(stream), 50):
            part = stream[start : start + 50]
            replay.operate(ours, part, tables, held)
            rival.serve(theirs, part.tolist())
            for slot, table in theirs.tables.items():
                assert tables[slot, : held[slot]].tolist() == table


def test_the_studys_heap_grows_and_ours_does_not():
    cell = Cell(workload="spec", allocator="pim-aware", requests=60)
    stream, _ = upkeep.operations(cell)
    theirs = rival.Heaps(cell.num_blocks(cell.load_requests()), cell.blocks_per_region)
    rival.serve(theirs, stream.tolist())
    assert theirs.entries() > 2 * cell.num_blocks(cell.load_requests()) / cell.blocks_per_region
    held = upkeep.bounded(20_000)
    assert held["before"] == held["after"]


def test_frames_and_lines(monkeypatch):
    tiny = scale.load("tiny")
    facts, times = upkeep.cost(tiny, rounds=1)
    assert set(times["implementation"]) == {upkeep.OURS, upkeep.PLAIN} and (times["step_time_us"] > 0).all()
    assert len(facts) == len(times) and (facts["bookkeeping_bytes"] > 0).all()
    grown = upkeep.growth(upkeep.worst(tiny, rounds=1, repeats=20))
    assert len(grown) == 8 and (grown["regions_ratio"] == 2).all()
    assert len(upkeep.worth(tiny, times)) == 4
    frame = bench.million(200, (("paged", False), ("paged", True)))
    assert len(frame) == 8 and frame["value"].gt(0).all()
