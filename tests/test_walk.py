"""The walk: stays are what the allocator did, the pool's fraying is counted right, and the slider shows it."""

import numpy as np
import pandas as pd
import pytest

from artifact.study import scale, walk, walk_figures, widgets
from artifact.study.serving import Cell, run

SIZE = scale.load("tiny")


@pytest.fixture(scope="module")
def life():
    return walk.life(SIZE)


def test_stays_are_the_block_tables_of_the_run(life):
    for name, rows in life.groupby("allocator"):
        tables = {}

        def take(batch, tables=tables, rid=rows["rid"].iloc[0]):
            for i in np.flatnonzero(batch.request == rid):
                tables[int(batch.step[i])] = batch.flat[batch.starts[i]:batch.starts[i] + batch.blocks[i]].tolist()

        run(Cell(allocator=name, requests=20, seed=SIZE.seed, sample_every=1, sample_sequences=64), on_tables=take)
        assert (rows["first_step"].iloc[0], rows["last_step"].iloc[0]) == (min(tables), max(tables))
        own = rows[rows["holder"] == walk_figures.HELD]
        for step, table in tables.items():
            now = own[(own["step"] <= step) & (step < own["until_step"])].sort_values("order_index")
            assert now["block"].tolist() == table
            assert (now["region"] * now["blocks_per_region"] + now["slot"]).tolist() == table


def test_no_slot_is_held_twice_at_once(life):
    for _, stays in life.sort_values("step").groupby(["allocator", "block"]):
        assert (stays["step"].to_numpy()[1:] >= stays["until_step"].to_numpy()[:-1]).all()
        assert (stays["step"] < stays["until_step"]).all()


def test_both_follow_the_same_request_and_only_one_scatters_it(life):
    assert life["rid"].nunique() == 1
    touched = {name: len(walk_figures.regions(life, name)) for name in walk.FOLLOWED}
    blocks = life[life["holder"] == walk_figures.HELD].groupby("allocator")["block"].nunique()
    assert touched["pim-aware"] == -(-blocks["pim-aware"] // life["blocks_per_region"].iloc[0]) < touched["paged"]


def test_a_moment_sorts_every_place_into_one_state(life):
    for name in walk.FOLLOWED:
        one = life[life["allocator"] == name].iloc[0]
        for step in (one["first_step"] - 1, one["first_step"], one["last_step"], one["last_step"] + 1):
            places = [place for xs, ys in walk_figures.moment(life, name, step).places.values()
                      for place in zip(xs, ys, strict=True)]
            assert len(places) == len(set(places))
        before, after = (walk_figures.moment(life, name, one[key] + by) for key, by in (("first_step", -1),
                                                                                      ("last_step", 1)))
        assert before.words == "not here yet" and before.places[walk_figures.HELD] == ([], [])
        assert after.places[walk_figures.HELD] == ([], []) and "free" in after.words


def test_fraying_is_counted_over_the_whole_batch():
    frame = walk.fragmentation(SIZE)
    assert set(frame["allocator"]) == set(walk.COMPARED) and frame.groupby("allocator").size().max() <= walk.POINTS
    assert frame[["shared_frac", "m1_row_hit_frac"]].stack().between(0, 1).all() and (frame["region_spread"] >= 1).all()
    paged, aware = (frame[frame["allocator"] == name] for name in walk.FOLLOWED)
    assert aware["region_spread"].max() < paged["region_spread"].max()
    pd.testing.assert_frame_equal(frame, walk.fragmentation(SIZE))


def test_shared_regions_are_those_of_several_sequences():
    class Batch:
        """Step 0: sequences in regions {0, 1} and {1}; step 1: one sequence in region 2."""

        step = np.array([0, 0, 1])
        blocks = np.array([3, 1, 2])
        starts = np.array([0, 3, 4])
        flat = np.array([0, 1, 4, 5, 8, 9])

    found = walk._shared(Batch, 4)
    assert found.loc[0].tolist() == [2, 1] and found.loc[1].tolist() == [1, 0]


def test_the_slider_shows_the_moment(life):
    box = widgets.life_explorer(life)
    (step, play), figure = box.children[0].children, box.children[1]
    assert (play.min, play.max) == (step.min, step.max)
    for value in (step.min, int(life["last_step"].max()), step.max):
        step.value = value
        shown = iter(figure.data)
        for i, name in enumerate(walk.FOLLOWED):
            moment = walk_figures.moment(life, name, value)
            for state in walk_figures.looks(name, 13):
                trace = next(shown)
                assert (list(trace.x), list(trace.y)) == moment.places[state]
            assert figure.layout.annotations[i].text == f"<b>{name}</b>, step {value}: {moment.words}"


@pytest.mark.parametrize("column", [*widgets.LIFE, "origin"])
def test_the_slider_names_a_missing_column(life, column):
    with pytest.raises(ValueError, match=f"life explorer: no column '{column}'"):
        widgets.life_explorer(life.drop(columns=column))
