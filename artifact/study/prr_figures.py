"""The figures of notebooks 02 and 03: which blocks steps share, and how well the next ones are predicted.

A frame in, a figure out, as in `figures`, whose table lists them. Ours are filled, the paper's hollow; a prediction
that was right is blue, a miss vermilion.
"""

import itertools
import math
import re
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from artifact.study import style
from artifact.study.style import INK, LOOKS, METHODS, QUIET, SMALL

PAPER = "the PRR paper"
BENCHMARKS = ("LongBench", "InfiniteBench", "RULER", "AIME", "MATH500")
_PANELS = (("quest", 16), ("infllm", 64))
_KINDS = (("again", "#9CC9E6", "square", 5, "selected again"), ("new", "#D55E00", "diamond", 9, "new"),
          ("forced", INK, "square", 7, "always: the newest token's"))
_LONG = 152  # px below a plot, for a note of three lines


def selections(frame: pd.DataFrame) -> go.Figure:
    """What one head selects from step to step: selected again, newly selected, forced."""
    frame = frame.sort_values(["step", "block"])
    figure = style.sheet("Which blocks one head attends to, step by step", 740, legend=True, bottom=_LONG)
    steps = sorted(frame["step"].unique())
    for kind, colour, symbol, size, name in _KINDS:
        cells = frame[frame["kind"] == kind]
        figure.add_scatter(x=cells["block"].tolist(), y=cells["step"].tolist(), mode="markers", name=name,
                           marker={"symbol": symbol, "size": size, "color": colour},
                           hovertemplate="step %{y}, block %{x}<extra></extra>")
    most = frame["block"].max()
    figure.update_xaxes(title_text="block of the sequence (index, oldest first)", range=[-3, most + 3], showgrid=False)
    figure.update_yaxes(title_text="decode step (index)", range=[steps[-1] + 0.8, -0.8], showgrid=False)
    picked = frame[frame["kind"] != "forced"]
    where = f"layer {frame['layer'].iloc[0]}, KV head {frame['head'].iloc[0]}"
    return style.note(figure, frame, f"{_whose(frame)}, {where}",
                      f"{len(picked) / len(steps):.0f} of about {most + 1} blocks are selected at each step, "
                      f"{(picked['kind'] == 'again').mean():.3f} of them again")


def locality(frame: pd.DataFrame) -> go.Figure:
    """Overlap of adjacent steps: ours by prompt family, the paper's by benchmark; side by side, never merged."""
    ours, theirs = style.ours(frame), style.published(frame)
    families = sorted(ours["family"].unique())
    sets = [name for name in BENCHMARKS if name in set(theirs["benchmark"])] if len(theirs) else []
    shown = _shown(ours)
    figure = style.sheet("Blocks that a step shares with the one before", 190 + 330 * len(shown), rows=len(shown),
                         legend=True, headings=True, left=92, shared_xaxes=True, vertical_spacing=0.11, bottom=190)
    places = list(range(len(families))) + [len(families) + 0.3 + i for i in range(len(sets))]
    for row, (name, page) in enumerate(shown, 1):
        mine = ours[(ours["method"] == name) & (ours["page_tokens"] == page)].set_index("family").loc[families]
        look = METHODS[name]
        for column, label, symbol in (("overlap_forced_frac", "with forced blocks", "line-ew"),
                                      ("overlap_frac", "without forced blocks", "circle")):
            spread = mine[f"{column}_max"] - mine[column]
            marker = {"symbol": symbol, "size": 15, "color": look.colour, "line": {"width": 1, "color": "white"}}
            if symbol == "line-ew":
                marker |= {"size": 24, "line": {"width": 3.5, "color": look.colour}}
            figure.add_scatter(x=places[: len(families)], y=mine[column].tolist(), mode="markers", name=label,
                               showlegend=False, marker=marker, row=row, col=1, cliponaxis=False,
                               error_y=None if symbol == "line-ew" or spread.isna().any() else
                               {"array": spread.tolist(), "color": look.colour, "thickness": 2, "width": 6},
                               hovertemplate=f"%{{y:.4f}} {label}<extra></extra>")
        random = mine["random_frac"].mean()
        figure.add_scatter(x=[-0.45, len(families) - 0.55], y=[random, random], mode="lines", showlegend=False,
                           line={"color": LOOKS["random"].colour, "dash": "3px,4px", "width": 2.5}, row=row, col=1,
                           hovertemplate="random sets: %{y:.4f}<extra></extra>")
        _printed(figure, theirs[theirs["method"] == name], "overlap_frac", sets, places[len(families):], row)
        budget = f"<b>{style.said(name)}</b>, blocks of {page} tokens"
        style.heading(figure, budget, row=row)
        figure.update_yaxes(title_text="overlap (fraction)", range=[0, 1.02], tickvals=[0, 0.2, 0.4, 0.6, 0.8, 1],
                            row=row, col=1)
    if sets:
        figure.add_vline(x=len(families) - 0.35, line={"color": QUIET, "width": 1.5}, row="all", col=1)
    figure.update_xaxes(range=[-0.5, places[-1] + 0.5], showgrid=False, ticks="", tickvals=places,
                        tickangle=0, tickfont={"size": 15}, ticktext=[
                            *(name.replace("-", "<br>") for name in families),
                            *(re.sub(r"(\w)(Bench|\d+)$", r"\1<br>\2", name) for name in sets)])
    for x, text in (((places[0] + places[len(families) - 1]) / 2, f"<b>ours: {_models(ours)}</b>, 4K tokens"),
                    ((places[len(families)] + places[-1]) / 2 if sets else None, "<b>the paper's six models</b>")):
        if x is not None:
            figure.add_annotation(x=x, y=0, yref="paper", text=text, showarrow=False, yanchor="top", yshift=-62,
                                  font={"size": SMALL})
    style.key(figure, [("by score, 95 % interval", {"mode": "markers", "marker": {"size": 14, "color": QUIET}}),
                       ("with forced blocks", {"mode": "markers", "marker": {
                           "symbol": "line-ew", "size": 22, "line": {"width": 3.5, "color": QUIET}}}),
                       ("random sets", {"mode": "lines", "line": {
                           "color": LOOKS["random"].colour, "dash": "3px,4px", "width": 2.5}})])
    return style.note(figure, frame, "families are stand-ins for the benchmarks, other text; the paper does not say "
                                     "whether it counts forced blocks", by=PAPER)


def overlap_heads(frame: pd.DataFrame) -> go.Figure:
    """Overlap by layer and KV head, a panel for each method."""
    shown = _shown(frame, (_PANELS[0], ("quest", 64), _PANELS[1]))
    figure = style.sheet("Overlap of adjacent steps by layer and KV head", 480, cols=len(shown), headings=True,
                         shared_yaxes=True, horizontal_spacing=0.04)
    low = math.floor(frame["overlap_frac"].min() * 20) / 20
    for col, (name, page) in enumerate(shown, 1):
        cells = frame[(frame["method"] == name) & (frame["page_tokens"] == page)]
        cells = cells.pivot(index="layer", columns="head", values="overlap_frac")
        figure.add_heatmap(z=cells.to_numpy().tolist(), x=[f"{head}" for head in cells.columns],
                           y=[f"{layer}" for layer in cells.index], zmin=low, zmax=1,
                           text=cells.map("{:.3f}".format).to_numpy().tolist(), **style.heat("overlap (fraction)"),
                           hovertemplate="layer %{y}, head %{x}: %{z:.4f}<extra></extra>",
                           showscale=col == len(shown), row=1, col=col)
        style.heading(figure, f"<b>{style.said(name)}</b>, {page} tokens", col=col)
        figure.update_xaxes(title_text="KV head (index)", type="category", showgrid=False, ticks="", showline=False,
                            row=1, col=col)
    figure.update_yaxes(type="category", showgrid=False, ticks="", showline=False, autorange="reversed")
    figure.update_yaxes(title_text="layer (index)", col=1)
    return style.note(figure, frame, "forced blocks left out; means over prompts")


def history(frame: pd.DataFrame) -> go.Figure:
    """One block's score, the level and trend that follow it, and the line above which blocks are selected."""
    frame = frame.sort_values("step")
    theta = frame.iloc[0]
    figure = style.sheet("One block's score, and what the predictor expects of it", 640, legend=True, bottom=_LONG)
    steps = frame["step"].tolist()
    figure.add_scatter(x=steps, y=frame["least_selected"].tolist(), mode="lines", name="cut",
                       line={"color": INK, "width": 1.8, "dash": "7px,4px"})
    figure.add_scatter(x=steps, y=frame["level"].tolist(), mode="lines", name="level",
                       line={"color": LOOKS["no trend"].colour, "width": 3})
    figure.add_scatter(x=steps, y=frame["prediction"].tolist(), mode="lines", name="level + γ · trend",
                       line={"color": LOOKS["calibrated"].colour, "width": 3, "dash": "2px,2px"})
    taken = frame["score"] >= frame["least_selected"]
    for name, cells, symbol in (("score: selected", frame[taken], "circle"), ("not", frame[~taken], "x")):
        figure.add_scatter(x=cells["step"].tolist(), y=cells["score"].tolist(), mode="markers", name=name,
                           marker={"symbol": symbol, "size": 11, "color": LOOKS["last step"].colour})
    figure.update_xaxes(title_text="decode step (index)", range=[-1, steps[-1] + 1])
    figure.update_yaxes(title_text="score (Quest's bound)")
    where = f"layer {theta['layer']}, KV head {theta['head']}, block {theta['block']}"
    return style.note(figure, frame, f"{_whose(frame)}, {where}; α {theta['alpha']:g}, β {theta['beta']:g}, "
                                     f"γ {theta['gamma']:g}",
                      "cut: the lowest score selected; a prediction is right on the score's side of the cut")


def coverage(frame: pd.DataFrame) -> go.Figure:
    """Coverage against |P| / |A|: whole, and below what is still missed, on a logarithmic axis."""
    shown = _shown(frame)
    names = [name for name in style.predictors(frame) if name != "oracle"]
    figure = style.sheet("How much of the next selection is predicted", 900, rows=2, cols=len(shown), legend=2,
                         bottom=_LONG, headings=True, shared_xaxes=True, shared_yaxes=True, vertical_spacing=0.06,
                         horizontal_spacing=0.05)
    sizes = sorted(frame["predicted_ratio"].unique())
    least = 1.0
    for col, (method, page) in enumerate(shown, 1):
        style.heading(figure, f"<b>{style.said(method)}</b>, blocks of {page} tokens", col=col)
        for name in names:
            cells = frame[(frame["method"] == method) & (frame["page_tokens"] == page) & (frame["predictor"] == name)]
            cells = cells.sort_values("predicted_ratio")
            x, mean = cells["predicted_ratio"].tolist(), cells["coverage_frac"]
            low, high = (cells[f"coverage_frac_{end}"].fillna(mean).clip(0, 1) for end in ("min", "max"))
            missed = 1 - mean
            for row, (middle, ends) in enumerate(((mean, (low, high)), (missed, (1 - high, 1 - low))), 1):
                ends = [end.clip(lower=middle.min() / 3) for end in ends]
                figure.add_scatter(x=x + x[::-1], y=[*ends[0].tolist(), *ends[1].tolist()[::-1]], fill="toself",
                                   mode="lines", fillcolor=_pale(LOOKS[name].colour), line={"width": 0},
                                   hoverinfo="skip", showlegend=False, row=row, col=col)
                figure.add_scatter(x=x, y=middle.tolist(), mode="lines+markers", name=style.said(name),
                                   showlegend=row == col == 1, marker=style.marker(name, 10), row=row, col=col,
                                   line={"color": LOOKS[name].colour, "width": 2.5,
                                         "dash": "3px,4px" if name == "random" else "solid"},
                                   hovertemplate=f"{style.said(name)}: %{{y:.4f}}<extra></extra>")
            least = min(least, missed[missed > 0].min())
        figure.update_xaxes(title_text="predicted / selected, |P| / |A| (ratio)", tickvals=sizes, row=2, col=col)
    figure.update_xaxes(range=[sizes[0] - 0.08, sizes[-1] + 0.08])
    figure.update_yaxes(range=[0, 1.03], row=1)
    bottom = math.floor(math.log10(least) * 4) / 4 - 0.05
    figure.update_yaxes(type="log", range=[bottom, 0.02], row=2,
                        tickvals=[digit * 10.0**power for power in range(-5, 1) for digit in (1, 2, 5)])
    figure.update_yaxes(title_text="coverage (fraction)", row=1, col=1)
    figure.update_yaxes(title_text="missed, 1 − coverage (fraction)", row=2, col=1)
    return style.note(figure, frame, _over(frame) + "; bands: 95 % over prompts; forced blocks left out",
                      "Oracle, not drawn: all of A from |P| = |A| on")


def predictors(frame: pd.DataFrame) -> go.Figure:
    """Coverage of every predictor at |P| = |A| and at half as much more; with forced blocks as a tick."""
    shown = _shown(frame)
    sizes = [size for size in (1.0, 1.5) if size in set(frame["predicted_ratio"])]
    names = style.predictors(frame)
    figure = style.sheet("Coverage of each predictor", 220 + 340 * len(shown), rows=len(shown), cols=len(sizes),
                         legend=True, headings=True, left=175, shared_xaxes=True, shared_yaxes=True,
                         horizontal_spacing=0.06, vertical_spacing=0.11)
    for (row, (method, page)), (col, size) in itertools.product(enumerate(shown, 1), enumerate(sizes, 1)):
        cells = frame[(frame["method"] == method) & (frame["page_tokens"] == page) & (frame["predicted_ratio"] == size)]
        cells = cells.set_index("predictor").reindex(names)
        for i, name in enumerate(names):
            one = cells.loc[name]
            half = one["coverage_frac_max"] - one["coverage_frac"]
            figure.add_bar(orientation="h", y=[i], x=[one["coverage_frac"]], width=0.72, marker=style.fill(name),
                           name=style.said(name), showlegend=False, row=row, col=col,
                           error_x=None if math.isnan(half) else {"array": [half], "color": INK, "thickness": 2},
                           hovertemplate=f"{style.said(name)}: %{{x:.4f}}<extra></extra>")
            figure.add_annotation(text=f"{one['coverage_frac']:.3f}", x=1.02, y=i, xanchor="left", showarrow=False,
                                  font={"size": SMALL}, row=row, col=col)
        figure.add_scatter(x=cells["coverage_forced_frac"].tolist(), y=list(range(len(names))), mode="markers",
                           showlegend=False, row=row, col=col, marker={
                               "symbol": "line-ns", "size": 22, "line": {"width": 2.5, "color": INK}},
                           hovertemplate="with forced blocks: %{x:.4f}<extra></extra>")
        figure.add_vline(x=cells.loc["random", "coverage_frac"], row=row, col=col,
                         line={"color": INK, "width": 1.5, "dash": "3px,4px"})
        times = "" if size == 1 else f"{size:g} "
        style.heading(figure, f"<b>{style.said(method)}</b>, {page} tokens, |P| = {times}|A|", row=row, col=col)
        figure.update_xaxes(range=[0, 1.2], tickvals=[0, 0.25, 0.5, 0.75, 1], row=row, col=col)
        figure.update_yaxes(tickvals=list(range(len(names))), ticktext=[style.said(name) for name in names],
                            range=[len(names) - 0.5, -0.5], showgrid=False, ticks="", row=row, col=col)
    figure.update_xaxes(title_text="coverage (fraction)", row=len(shown))
    figure.update_layout(barmode="overlay")
    style.key(figure, [("95 % over prompts", {"mode": "lines", "line": {"color": INK, "width": 2}}),
                       ("with forced blocks", {"mode": "markers", "marker": {
                           "symbol": "line-ns", "size": 18, "line": {"width": 2.5, "color": INK}}}),
                       ("the floor: random", {"mode": "lines", "line": {
                           "color": INK, "width": 1.5, "dash": "3px,4px"}})])
    return style.note(figure, frame, _over(frame))


def calibration_rows(frame: pd.DataFrame) -> go.Figure:
    """Coverage that the chosen theta reaches, by how many of the prefill's rows it was chosen from."""
    shown = _shown(frame)
    figure = style.sheet("How many rows does calibration need?", 560, cols=len(shown), legend=True, headings=True,
                         shared_yaxes=True, horizontal_spacing=0.05)
    ends = frame[["coverage_frac", "best_coverage_frac", "coverage_frac_min", "coverage_frac_max"]]
    low, high = math.floor(ends.min(axis=None) * 50) / 50, math.ceil(ends.max(axis=None) * 50) / 50
    counts = sorted(frame["rows_count"].unique())
    for col, (method, page) in enumerate(shown, 1):
        cells = frame[(frame["method"] == method) & (frame["page_tokens"] == page)].sort_values("rows_count")
        x = cells["rows_count"].tolist()
        half = cells["coverage_frac_max"] - cells["coverage_frac"]
        figure.add_scatter(x=x, y=cells["best_coverage_frac"].tolist(), mode="lines", showlegend=False, row=1, col=col,
                           line={"color": INK, "width": 2, "dash": "7px,4px"},
                           hovertemplate="best in hindsight: %{y:.4f}<extra></extra>")
        figure.add_scatter(x=x, y=cells["coverage_frac"].tolist(), mode="lines+markers", showlegend=False, row=1,
                           col=col, marker=style.marker("calibrated", 14),
                           line={"color": LOOKS["calibrated"].colour, "width": 3},
                           error_y=None if half.isna().any() else {
                               "array": half.tolist(), "color": LOOKS["calibrated"].colour, "thickness": 2},
                           hovertemplate="chosen from %{x} rows: %{y:.4f}<extra></extra>")
        for count, value in zip(x, cells["coverage_frac"], strict=True):
            figure.add_annotation(x=math.log10(count), y=low, text=f"{value:.3f}", showarrow=False, yanchor="bottom",
                                  font={"size": SMALL}, row=1, col=col)
        style.heading(figure, f"<b>{style.said(method)}</b>, blocks of {page} tokens", col=col)
    figure.update_xaxes(title_text="rows of the prefill (count)", type="log", tickvals=counts,
                        range=[math.log10(counts[0]) - 0.15, math.log10(counts[-1]) + 0.15])
    figure.update_yaxes(range=[low - 0.01, high])
    figure.update_yaxes(title_text="coverage (fraction)", col=1)
    style.key(figure, [("θ chosen from so many rows, 95 %", {
        "mode": "lines+markers", "marker": style.marker("calibrated", 13),
        "line": {"color": LOOKS["calibrated"].colour, "width": 3}}),
        ("best of the 80 in hindsight", {"mode": "lines", "line": {"color": INK, "width": 2, "dash": "7px,4px"}})])
    return style.note(figure, frame, f"{_over(frame)}; |P| = |A|; the axis does not start at zero")


def shifts(frame: pd.DataFrame) -> go.Figure:
    """Coverage around a change of topic, and which share of heads expects a sink where it has moved to."""
    figure = style.sheet("When what is attended to changes at once", 650, cols=2, legend=2, headings=True,
                         bottom=_LONG, horizontal_spacing=0.12)
    names = [name for name in style.predictors(frame) if name not in ("oracle", "fixed theta")]
    panels = (("topic", "coverage_frac", "<b>another text's steps</b> from 0 on", "coverage (fraction)", -8, 16),
              ("sink", "moved_frac", "<b>a sink moves</b> at 0", "heads that expect it (fraction)", -2, 6))
    for col, (kind, metric, heading, unit, first, last) in enumerate(panels, 1):
        style.heading(figure, heading, col=col)
        for name in names:
            if kind == "sink" and name == "random":
                continue
            cells = frame[(frame["kind"] == kind) & (frame["predictor"] == name)]
            cells = cells[cells["step"].between(first, last)].sort_values("step")
            figure.add_scatter(x=cells["step"].tolist(), y=cells[metric].round(5).tolist(), mode="lines+markers",
                               name=style.said(name), showlegend=col == 1, marker=style.marker(name, 9), row=1, col=col,
                               line={"color": LOOKS[name].colour, "width": 2.5,
                                     "dash": "3px,4px" if name == "random" else "solid"},
                               hovertemplate=f"{style.said(name)}, step %{{x}}: %{{y:.4f}}<extra></extra>")
        figure.add_vline(x=-0.5, line={"color": INK, "width": 1.5, "dash": "7px,4px"}, row=1, col=col)
        figure.update_xaxes(title_text="step after the shift (index)", range=[first - 0.5, last + 0.5], row=1, col=col)
        figure.update_yaxes(title_text=unit, range=[-0.02, 1.05], tickvals=[0, 0.2, 0.4, 0.6, 0.8, 1], row=1, col=col)
    return style.note(figure, frame, "halfway through recorded traces: another prompt's scores, or highest and lowest "
                                     "block exchanged", f"{_over(frame)}; Quest, |P| = |A|")


def _printed(figure: go.Figure, theirs: pd.DataFrame, column: str, sets: Sequence[str], places: Sequence[float],
             row: int) -> None:
    """The paper's cells as hollow marks, a model each, side by side above their benchmark; their mean as a line."""
    models = sorted(theirs["model"].unique()) if len(theirs) else []
    for name, place in zip(sets, places, strict=True):
        cells = theirs[theirs["benchmark"] == name].set_index("model")[column].reindex(models)
        x = [place + (i - (len(models) - 1) / 2) * 0.13 for i in range(len(models))]
        figure.add_scatter(x=x, y=cells.tolist(), mode="markers", showlegend=False, marker=style.ring(None, 11),
                           text=models, row=row, col=1, hovertemplate="%{text}, published: %{y:.4f}<extra></extra>")


def _shown(frame: pd.DataFrame, panels: Sequence[tuple[str, int]] = _PANELS) -> list[tuple[str, int]]:
    """The panels that the frame has rows for, (method, tokens per block); ValueError when there are none."""
    there = set(zip(frame["method"], frame["page_tokens"], strict=True))
    found = [panel for panel in panels if panel in there]
    if not found:
        wanted = ", ".join(f"{method} {page}" for method, page in panels)
        raise ValueError(f"no rows with method and page_tokens in: {wanted}")
    return found


def _whose(frame: pd.DataFrame) -> str:
    one = frame.iloc[0]
    return f"{one['model']}, {one['family']} prompt {one['prompt']}"


def _models(frame: pd.DataFrame) -> str:
    return ", ".join(sorted(frame["model"].unique()))


def _over(frame: pd.DataFrame) -> str:
    count = int(frame["prompts_count"].max())
    return "one prompt of a small model" if count == 1 else f"means over {count} prompts of a small model"


def _pale(colour: str) -> str:
    return f"rgba({int(colour[1:3], 16)},{int(colour[3:5], 16)},{int(colour[5:7], 16)},0.18)"
