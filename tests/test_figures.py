"""Figures: every key from the recorded run, honest about units, policies and origins; then the verb and the widget."""

import itertools
import json
import re
import struct
import time

import pandas as pd
import pytest

from artifact.prr import baselines, coverage
from artifact.prr.predictor import Theta
from artifact.study import experiments, figures, foresight, plate, prediction, provenance, scale, style, widgets

LARGEST_BYTES = 60_000
KEYS = list(figures.FIGURES)
REQUIRED = [(key, column) for key, plot in figures.FIGURES.items() for column in (*plot.columns, "origin")]


def recorded(key):
    plot = figures.FIGURES[key]
    frame = experiments.recorded(plot.notebook, plot.result)
    return experiments.beside(frame) if plot.published else frame


@pytest.fixture(scope="module")
def frames():
    return {key: recorded(key) for key in KEYS}


@pytest.fixture(scope="module")
def drawn(frames):
    return {key: json.loads(figures.draw(key, frames[key]).to_json()) for key in KEYS}


def axes(figure):
    """The visible axes of a drawn figure, by name."""
    return {name: axis for name, axis in figure["layout"].items()
            if re.fullmatch(r"[xy]axis\d*", name) and axis.get("visible", True) and axis.get("showticklabels", True)}


def texts(figure):
    """All that is written into a figure beside its axes."""
    return [figure["layout"]["title"]["text"], *(note["text"] for note in figure["layout"].get("annotations", []))]


def symbols(trace):
    """The marks of a trace, as a set; a bar is a square in a legend."""
    if "markers" not in trace.get("mode", ""):
        return {"square"} if trace["type"] == "bar" else set()
    found = trace.get("marker", {}).get("symbol", "circle")
    return {found} if isinstance(found, str) else set(found)


# --- what every figure must be

@pytest.mark.parametrize("key", KEYS)
def test_what_the_legend_shows_is_in_the_picture(drawn, key):
    listed = [trace for trace in drawn[key]["data"] if trace.get("x") == [None]]
    marks = set().union(*(symbols(trace) for trace in drawn[key]["data"] if trace not in listed))
    for trace in listed:
        assert symbols(trace) <= marks, trace["name"]


@pytest.mark.parametrize("key", ["heatmap", "overlap_heads"])
def test_numbers_on_a_heat_map_are_legible_on_every_shade(drawn, key):
    maps = [trace for trace in drawn[key]["data"] if trace["type"] == "heatmap"]
    assert maps
    for trace in maps:
        assert min(style.contrast(trace["textfont"]["color"], shade) for _, shade in trace["colorscale"]) >= 4.5


@pytest.mark.parametrize(("one", "other", "ratio"), [("#000000", "#FFFFFF", 21), ("#FFFFFF", "#777777", 4.478),
                                                     ("#D55E00", "#D55E00", 1)])
def test_contrast_is_that_of_wcag(one, other, ratio):
    assert style.contrast(one, other) == pytest.approx(ratio, rel=1e-3) == style.contrast(other, one)


@pytest.mark.parametrize("key", KEYS)
def test_every_axis_has_a_unit_or_names(drawn, key):
    for name, axis in axes(drawn[key]).items():
        names = [text for text in axis.get("ticktext", []) if not re.fullmatch(r"[\d.,]+", text)]
        title = axis.get("title", {}).get("text") or ""
        assert names or re.search(r"\(.+\)", title), f"{name}: {title!r}"


@pytest.mark.parametrize("key", KEYS)
def test_every_figure_says_where_its_numbers_come_from(drawn, frames, key):
    words = {origin: origin for origin in ("simulated", "modelled", "published", "recorded", "measured")}
    foot = max(texts(drawn[key])[1:], key=lambda text: sum(word in text.lower() for word in words.values())).lower()
    assert all(words[origin] in foot for origin in set(frames[key]["origin"]))


@pytest.mark.parametrize("key", KEYS)
def test_every_figure_has_caption_alternative_text_and_title(drawn, key):
    plot = figures.FIGURES[key]
    assert plot.caption.endswith(".") and plot.alt.endswith(".") and len(plot.alt) < 400
    assert texts(drawn[key])[0].startswith("<b>")


def test_figures_stand_in_the_notebook_that_draws_them(root):
    for key, plot in figures.FIGURES.items():
        declared = json.loads((root / "notebooks" / f"{plot.notebook}.ipynb").read_text())["metadata"]["artifact"]
        assert key in declared["figures"] and plot.result in declared["results"]


@pytest.mark.parametrize("key", KEYS)
def test_the_same_rows_in_any_order_are_the_same_figure(drawn, frames, key):
    again = figures.draw(key, frames[key].sample(frac=1, random_state=7)).to_json()
    assert json.loads(again) == drawn[key]
    assert len(again) <= LARGEST_BYTES


def test_a_figure_does_not_change_its_frame(frames):
    for key in KEYS:
        before = frames[key].copy(deep=True)
        figures.draw(key, frames[key])
        pd.testing.assert_frame_equal(frames[key], before)


# --- policies

@pytest.mark.parametrize("kind", [style.POLICIES, style.PREDICTORS, style.METHODS, style.MODES])
def test_what_is_compared_differs_in_colour_marker_and_pattern(kind):
    for looks in zip(*kind.values(), strict=True):
        assert len(set(looks)) == len(kind)


@pytest.mark.parametrize("key", ["coverage", "predictors", "shifts"])
def test_predictors_keep_their_colours_and_markers(drawn, key):
    names, seen = {style.said(name): look for name, look in style.PREDICTORS.items()}, set()
    for trace in drawn[key]["data"]:
        look = names.get(trace.get("name"))
        if look and trace["type"] == "scatter":
            assert (trace["marker"]["color"], trace["marker"]["symbol"]) == (look.colour, look.symbol)
            assert trace["line"]["color"] == look.colour
        elif look:
            assert trace["marker"]["color"] == look.colour
        seen |= {trace["name"]} if look else set()
    assert len(seen) >= 6


@pytest.mark.parametrize("key", [key for key, plot in figures.FIGURES.items()
                                 if "allocator" in plot.columns and key != "heatmap"])
def test_policies_keep_their_colours(drawn, key):
    seen = set()
    for trace in drawn[key]["data"]:
        policy = trace.get("name") or re.split(r"[,:]", trace.get("hovertemplate", ""))[0]
        if policy in style.POLICIES and "color" in trace.get("marker", {}):
            assert trace["marker"]["color"] in (style.POLICIES[policy].colour, style.INK)
            seen.add(policy)
    assert len(seen) >= 2 or key == "placement_map"


def test_names_of_lines_that_meet_stand_apart_and_in_order():
    placed = style.apart([0, 1, 2, 60, 200, 201], 25)
    assert all(b - a >= 25 - 1e-9 for a, b in itertools.pairwise(placed))
    assert style.apart([10, 100], 25) == [10, 100]
    assert style.apart([1, 2], 25, lowest=12) == [12, 37]


# --- origins

@pytest.mark.parametrize("key", ["headline", "run_length", "bandwidth"])
def test_published_numbers_are_hollow_and_ours_are_not(drawn, frames, key):
    hollow = [trace for trace in drawn[key]["data"] if str(trace.get("marker", {}).get("symbol")).endswith("-open")]
    assert {value for trace in hollow for value in trace["y"] or () if value is not None} <= \
        set(frames[key][frames[key]["origin"] == "published"][["m1_row_hit_frac", "m3_bandwidth_gbps"]].stack())
    assert any(value for trace in hollow for value in trace["y"] or ())
    own = frames[key][frames[key]["origin"] != "published"]
    assert "-open" not in figures.draw(key, own).to_json()


def test_the_papers_overlaps_are_hollow_and_never_merged_with_ours(drawn, frames):
    frame = frames["locality"]
    theirs, ours = style.published(frame), style.ours(frame)
    assert len(theirs) == 60 and theirs["prompts_count"].isna().all() and ours["benchmark"].isna().all()
    hollow = [trace for trace in drawn["locality"]["data"]
              if str(trace.get("marker", {}).get("symbol")).endswith("-open") and trace["x"] != [None]]
    printed = [value for trace in hollow for value in trace["y"]]
    assert sorted(printed) == sorted(theirs["overlap_frac"])
    filled = [value for trace in drawn["locality"]["data"] if trace not in hollow for value in trace["y"]]
    assert not set(filled) & set(theirs["overlap_frac"])
    assert "-open" not in figures.draw("locality", ours).to_json()
    assert max(x for trace in drawn["locality"]["data"] if trace not in hollow and trace["x"] != [None]
               for x in trace["x"]) < min(x for trace in hollow for x in trace["x"])


def test_published_numbers_lie_beside_the_same_cells_only():
    ours = experiments.recorded("11_bandwidth", "headline.csv")
    both = experiments.beside(ours)
    theirs = both[both["origin"] == "published"]
    assert len(theirs) == len(ours) == 48
    pairs = theirs.merge(ours, on=["workload", "allocator", "block_tokens", "requests_count"], suffixes=("", "_ours"))
    assert len(pairs) == 48 and (pairs["m1_row_hit_frac"] - pairs["m1_row_hit_frac_ours"]).abs().max() < 1e-8
    assert experiments.beside(both) is both
    longer = ours.assign(requests_count=ours["requests_count"] + 1)
    assert experiments.beside(longer) is longer
    gains = experiments.recorded("11_bandwidth", "gains.csv")
    assert "published" not in set(experiments.beside(gains)["origin"])


def test_figures_that_show_no_published_numbers_leave_them_out(drawn, frames):
    for key in ("placement", "busiest_channel"):
        both = experiments.beside(frames[key])
        assert "published" in set(both["origin"])
        assert json.loads(figures.draw(key, both).to_json()) == drawn[key]


# --- bad frames

@pytest.mark.parametrize(("key", "column"), REQUIRED)
def test_a_missing_column_is_named(frames, key, column):
    with pytest.raises(ValueError, match=rf"figure {key}: no column '{column}'; it needs: .*{column}"):
        figures.draw(key, frames[key].drop(columns=column))


@pytest.mark.parametrize(("key", "change", "says"), [
    ("nope", {}, r"figure 'nope' is not one of: banks, placement_map, "),
    ("headline", {"m1_row_hit_frac": "high"}, r"column 'm1_row_hit_frac' holds 'high'; it must hold numbers"),
    ("headline", {"allocator": "best"}, r"allocator 'best' has no colour; allowed: paged, pim-aware"),
    ("headline", {"workload": "idle"}, r"no rows of this artifact with workload in: steady, spec"),
    ("headline", {"origin": "published"}, r"every row is published"),
    ("bandwidth", {"block_tokens": 32}, r"no rows of this artifact with block_tokens in: 16"),
    ("coverage", {"predictor": "best"}, r"predictor 'best' has no colour; allowed: last step, calibrated"),
    ("coverage", {"coverage_frac": "high"}, r"column 'coverage_frac' holds 'high'; it must hold numbers"),
    ("predictors", {"method": "mine"}, r"no rows with method and page_tokens in: quest 16, infllm 64"),
    ("locality", {"origin": "published"}, r"every row is published"),
])
def test_what_cannot_be_drawn_is_said(frames, key, change, says):
    with pytest.raises(ValueError, match=says):
        figures.draw(key, frames.get(key, frames["headline"]).assign(**change))


def test_a_frame_without_rows_is_refused(frames):
    with pytest.raises(ValueError, match="figure headline: no rows"):
        figures.draw("headline", frames["headline"].iloc[:0])


# --- the verb

def test_the_verb_draws_the_recorded_run(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = cli("figure", "run_length")
    assert ran.code == 0 and ran.err == "" and "recorded" in ran.out
    page = (tmp_path / "run_length.html").read_text(encoding="utf-8")
    assert "Row hits by length of the run" in page and "Plotly" in page and 'src="http' not in page
    ran = cli("figure", "banks", "-o", "b.json", "--json")
    told = json.loads(ran.out)
    assert told["key"] == "banks" and told["origins"] == ["published"] and told["file"] == "b.json"
    assert json.loads((tmp_path / "b.json").read_text())["layout"]["title"]["text"] == f"<b>{told['title']}</b>"


@pytest.mark.parametrize(("content", "says"), [
    ("workload,allocator,origin\nsteady,paged,simulated\n", "no column 'block_tokens'; it needs: workload, allocator"),
    ("workload,allocator\nsteady,paged\n", "no column `origin`"),
    ("a\x00b", "no rows"),
    ("", "not a result CSV"),
    (None, "no such file"),
])
def test_a_bad_csv_is_one_line_and_exit_2(cli, tmp_path, content, says):
    path = tmp_path / "mine.csv"
    if content is not None:
        path.write_text(content)
    ran = cli("figure", "headline", "--from", path, "-o", tmp_path / "f.html")
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1
    assert str(path) in ran.err and says in ran.err
    assert not (tmp_path / "f.html").exists()


@pytest.mark.parametrize(("arguments", "says"), [
    (["figure", "nope"], "figure 'nope' is not one of: banks, placement_map"),
    (["figure", "banks", "-o", "f.svg"], "f.svg: a figure is written as one of: .html, .json, .png"),
    (["figure"], "KEY"),
])
def test_what_the_verb_cannot_do_is_one_line_and_exit_2(cli, arguments, says):
    ran = cli(*arguments)
    assert ran.code == 2 and ran.err.count("\n") == 1 and says in ran.err


def test_a_png_without_a_browser_says_how_to_get_one(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "chromium", lambda: (None, None))
    ran = cli("figure", "banks", "-o", tmp_path / "f.png")
    assert ran.code == 2 and "a PNG needs a browser: install" in ran.err and not (tmp_path / "f.png").exists()


def test_a_png_has_the_size_of_its_figure(tmp_path):
    if provenance.chromium()[0] is None:
        pytest.skip("no Chromium: still images cannot be drawn")
    plate.write("banks", out=tmp_path / "f.png")
    size = struct.unpack(">II", (tmp_path / "f.png").read_bytes()[16:24])
    layout = figures.draw("banks", recorded("banks")).layout
    assert size == (2 * layout.width, 2 * layout.height)


# --- as a browser lays it out

_TEXTS = """() => [...document.querySelectorAll('.plot')].map(plot => {
  const edge = plot.getBoundingClientRect();
  const seen = [...plot.querySelectorAll('svg text')].filter(t => t.textContent.trim() && !t.closest('defs')).map(t => {
    const r = t.getBoundingClientRect();
    return [t.textContent.trim(), r.left - edge.left, r.top - edge.top, r.right - edge.left, r.bottom - edge.top];
  }).filter(t => t[3] > t[1]);
  return [plot.id, edge.width, edge.height, seen];
})"""


def test_no_text_is_cut_off_none_lies_on_another_and_numbers_are_plain(drawn, browser, tmp_path):
    from plotly.offline import get_plotlyjs

    (tmp_path / "plotly.js").write_text(get_plotlyjs(), encoding="utf-8")
    calls = "".join(f"Plotly.newPlot('{key}', {json.dumps(drawn[key])});" for key in KEYS)
    boxes = "".join(f'<div class="plot" id="{key}" style="width: {style.WIDTH}px"></div>' for key in KEYS)
    page_file = tmp_path / "all.html"
    page_file.write_text(f'<meta charset="utf-8"><script src="plotly.js"></script>{boxes}<script>{calls}</script>',
                         encoding="utf-8")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(page_file.as_uri(), timeout=120_000)
    page.wait_for_function(f"document.querySelectorAll('.main-svg').length >= {2 * len(KEYS)}")
    found = page.evaluate(_TEXTS)
    faults = []
    for key, width, height, seen in found:
        faults += [f"{key}: {text!r} is a number with an exponent or a letter" for text, *_ in seen
                   if re.fullmatch(r"[−-]?[\d.,]+(e[+-]?\d+|[kMGTmµn])", text)]
        faults += [f"{key}: {text!r} is cut off" for text, left, top, right, bottom in seen
                   if left < -1 or top < -1 or right > width + 1 or bottom > height + 1]
        for (one, *a), (two, *b) in itertools.combinations(seen, 2):
            across, down = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
            if across > 2 and down > 5:  # boxes are taller than their letters
                faults.append(f"{key}: {one!r} lies on {two!r}")
    assert faults == [], "\n".join(faults)


# --- the walkthrough's widget

@pytest.fixture(scope="module")
def map_frame():
    return experiments.recorded("10_placement", "placement_map.csv")


def test_the_explorer_shows_what_was_chosen(map_frame):
    box = widgets.placement_explorer(map_frame)
    (size, allocator), figure = box.children[0].children, box.children[1]
    assert list(size.options) == sorted(map_frame["block_tokens"].unique())
    for name, tokens in itertools.product(allocator.options, size.options):
        size.value, allocator.value = tokens, name
        cells = map_frame[(map_frame["allocator"] == name) & (map_frame["block_tokens"] == tokens)]
        assert list(figure.data[-1].y) == cells.sort_values("order_index")["region"].tolist()
        assert figure.data[-1].marker.symbol == style.POLICIES[name].symbol
        chosen = [bar for bar in figure.data[:-1] if bar.marker.opacity == 1]
        assert [bar.x[0] for bar in chosen] == cells[["m1_row_hit_frac", "m3_bandwidth_gbps"]].iloc[0].tolist()
        assert f"<b>{name}</b>: {cells['region'].nunique()} regions" in figure.layout.annotations[2].text


def test_the_explorer_redraws_within_300_ms(map_frame):
    box = widgets.placement_explorer(map_frame)
    size, _ = box.children[0].children
    taken = []
    for tokens in size.options[::-1]:
        before = time.process_time()
        size.value = tokens
        taken.append(time.process_time() - before)
    assert max(taken) < 0.3


@pytest.mark.parametrize("column", [*widgets.COLUMNS, "origin"])
def test_the_explorer_names_a_missing_column(map_frame, column):
    with pytest.raises(ValueError, match=f"no column '{column}'"):
        widgets.placement_explorer(map_frame.drop(columns=column))


def test_the_explorer_names_a_missing_combination(map_frame):
    lacking = map_frame[(map_frame["allocator"] != "paged") | (map_frame["block_tokens"] != 8)]
    with pytest.raises(ValueError, match="no rows of paged with blocks of 8 tokens"):
        widgets.placement_explorer(lacking)


# --- the predictor's widget

@pytest.fixture(scope="module")
def head_frame():
    return foresight.scores(foresight.recordings(scale.load("tiny"))[0], layer=10, head=0)


def test_the_predictor_explorer_counts_as_coverage_does(head_frame):
    box = widgets.predictor_explorer(head_frame)
    (alpha, beta, gamma), (size, step) = (part.children for part in box.children[0].children)
    figure = box.children[1]
    alpha.value, gamma.value = 1.0, 0.0
    assert list(figure.data[5].y) == list(figure.data[6].y)  # the last step's set
    recorded = foresight.recordings(scale.load("tiny"))[0]
    part = prediction.steps(recorded, 10, foresight.method())
    for theta, ratio, at in (((0.4, 0.3, 0.25), 1.0, 5), ((0.8, 0.5, 0.75), 1.5, 16), ((0.2, 0.1, 0.0), 0.5, 63)):
        alpha.value, beta.value, gamma.value = theta
        size.value, step.value = ratio, at
        found = coverage.measure(part, baselines.ema(part, Theta(*theta)), (ratio,)).dynamic[0, :, 0]
        assert list(figure.data[5].y) == pytest.approx(found.tolist())
        foreseen, missed, waste = (len(trace.x) for trace in figure.data[2:5])
        assert foreseen / (foreseen + missed) == pytest.approx(found[at])
        assert foreseen + waste <= int(63 * ratio) and list(figure.data[7].x) == [at]
        assert f"<b>step {at}</b>: {foreseen} foreseen, {missed} missed" in figure.layout.annotations[0].text
        assert f"coverage {found.mean():.3f}" in figure.layout.annotations[1].text


@pytest.mark.parametrize("column", [*widgets.HEAD, "origin"])
def test_the_predictor_explorer_names_a_missing_column(head_frame, column):
    with pytest.raises(ValueError, match=f"no column '{column}'"):
        widgets.predictor_explorer(head_frame.drop(columns=column))
