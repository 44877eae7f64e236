"""The walkthrough's controls: over shipped results, where nothing is computed anew, and over one head of a trace.

Each figure is drawn before it becomes a widget: what a browser shows first depends on no message that it could miss
while plotly still loads.
"""

import ipywidgets
import numpy as np
import pandas as pd
import plotly.graph_objects as go

from artifact.prr import baselines, calibration, coverage, predictor
from artifact.study import bandwidth_figures, style, walk_figures
from artifact.study.style import INK, LOOKS, POLICIES, SMALL

COLUMNS = ("allocator", "block_tokens", "order_index", "block", "region", "slot", "blocks_per_region",
           "m1_row_hit_frac", "m3_bandwidth_gbps")
LIFE = ("allocator", "first_step", "last_step", "region", "slot", "step", "until_step", "holder", "order_index",
        "blocks_per_region")
HEAD = ("step", "block", "score", "budget_count", "model", "family", "prompt", "layer", "head")


def placement_explorer(frame: pd.DataFrame) -> ipywidgets.VBox:
    """A slider over block sizes and a choice of allocator -> M1, M3 and where one sequence's blocks lie.

    `frame`: the result placement_map.csv, a row for each block of one sequence, for every allocator and block size,
    with the run's M1 and M3. Raises ValueError for a missing column or a combination that is not in the frame.
    """
    for column in (*COLUMNS, "origin"):
        if column not in frame:
            raise ValueError(f"placement explorer: no column {column!r}; it needs: {', '.join((*COLUMNS, 'origin'))}")
    sizes = sorted(frame["block_tokens"].unique().tolist())
    names = style.policies(frame)
    tables = {key: cells.sort_values("order_index") for key, cells in frame.groupby(["allocator", "block_tokens"])}
    for name in names:
        for size in sizes:
            if (name, size) not in tables:
                raise ValueError(f"placement explorer: no rows of {name} with blocks of {size} tokens")
    size = ipywidgets.SelectionSlider(
        options=sizes, value=bandwidth_figures.BLOCK_TOKENS if bandwidth_figures.BLOCK_TOKENS in sizes else sizes[0],
        description="block size (tokens)", style={"description_width": "initial"}, layout={"width": "440px"})
    allocator = ipywidgets.ToggleButtons(options=names, value=names[0], description="allocator",
                                         style={"description_width": "initial", "button_width": "110px"})
    bars = [(metric, name) for metric in ("m1_row_hit_frac", "m3_bandwidth_gbps") for name in names]
    figure = _empty(frame, names)

    def redraw(_change: object = None) -> None:
        chosen, cells = allocator.value, tables[allocator.value, size.value]
        values = [float(tables[name, size.value][metric].iloc[0]) for metric, name in bars]
        # one message for traces that change alike: a batch over unlike ones reaches the browser with holes
        figure.plotly_restyle({
            "x": [[value] for value in values], "text": [[_number(value)] for value in values],
            "marker.opacity": [1 if name == chosen else 0.35 for _, name in bars]}, list(range(len(bars))))
        figure.plotly_update({
            "x": [(cells["order_index"] + 1).tolist()], "y": [cells["region"].tolist()],
            "customdata": [cells[["block", "slot"]].to_numpy().tolist()], "marker": [style.marker(chosen, 11)],
            "line.color": POLICIES[chosen].colour}, {
            "xaxis2.range": [0, len(cells) + 1],
            "annotations[2].text": f"<b>{chosen}</b>: {bandwidth_figures.touched(cells)}"}, [len(bars)])

    redraw()
    figure = go.FigureWidget(figure)
    size.observe(redraw, "value")
    allocator.observe(redraw, "value")
    return ipywidgets.VBox([ipywidgets.HBox([size, allocator]), figure])


def _empty(frame: pd.DataFrame, names: list[str]) -> go.Figure:
    figure = style.sheet("Block size and allocator: what they do to one sequence", 560, rows=2, cols=2, headings=True,
                         left=130, column_widths=[0.36, 0.64], specs=[[{}, {"rowspan": 2}], [{}, None]],
                         horizontal_spacing=0.14, vertical_spacing=0.24)
    for row, (title, top) in enumerate((("M1, row hits (fraction)", 1.3),
                                        ("M3, bandwidth (GB/s)", 1.3 * frame["m3_bandwidth_gbps"].max())), 1):
        for name in names:
            figure.add_bar(orientation="h", y=[name], x=[0.0], showlegend=False, textposition="outside",
                           marker=style.fill(name), textfont={"size": SMALL}, cliponaxis=False, row=row, col=1,
                           hoverinfo="skip")
        figure.update_xaxes(range=[0, top], nticks=4, row=row, col=1)
        figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", row=row, col=1)
        style.heading(figure, title, row=row, col=1)
    figure.add_scatter(mode="lines+markers", showlegend=False, line={"width": 1.2}, row=1, col=2,
                       hovertemplate="block %{customdata[0]}: region %{y}, slot %{customdata[1]}<extra></extra>")
    top = frame["region"].max() * 1.05
    figure.update_xaxes(title_text="position in the sequence (blocks)", row=1, col=2)
    figure.update_yaxes(title_text="region (row index)", range=[-0.03 * top, top], row=1, col=2)
    style.heading(figure, "", row=1, col=2)
    return style.note(figure, frame, "each change of height opens another row in every bank")


def _number(value: float) -> str:
    return f" {value:.3f}" if value <= 1 else f" {value:,.0f}"


def life_explorer(frame: pd.DataFrame) -> ipywidgets.VBox:
    """A slider over decode steps, and a button that moves it -> where one sequence's blocks lie, a panel an allocator.

    `frame`: the result life.csv. Raises ValueError for a missing column.
    """
    for column in (*LIFE, "origin"):
        if column not in frame:
            raise ValueError(f"life explorer: no column {column!r}; it needs: {', '.join((*LIFE, 'origin'))}")
    names = style.policies(frame)
    first, last = int(frame["first_step"].min()), int(frame["last_step"].max())
    begin, end = int(frame["step"].min()), int(frame["until_step"].max()) - 1
    step = ipywidgets.IntSlider(value=(first + last) // 2, min=begin, max=end, description="decode step",
                                layout={"width": "560px"}, continuous_update=True)
    play = ipywidgets.Play(value=step.value, min=begin, max=end, step=max(1, (end - begin) // 120), interval=250)
    ipywidgets.jslink((play, "value"), (step, "value"))
    figure = _places(frame, names)

    def redraw(_change: object = None) -> None:
        now = [walk_figures.moment(frame, name, step.value) for name in names]
        places = [moment.places[state] for name, moment in zip(names, now, strict=True)
                  for state in walk_figures.looks(name, 13)]
        figure.plotly_update({"x": [x for x, _ in places], "y": [y for _, y in places]}, {
            f"annotations[{i}].text": f"<b>{name}</b>, step {step.value}: {moment.words}"
            for i, (name, moment) in enumerate(zip(names, now, strict=True))}, list(range(len(places))))

    redraw()
    figure = go.FigureWidget(figure)
    step.observe(redraw, "value")
    return ipywidgets.VBox([ipywidgets.HBox([step, play]), figure])


def _places(frame: pd.DataFrame, names: list[str]) -> go.Figure:
    rows = {name: len(walk_figures.regions(frame, name)) for name in names}
    slots = int(frame["blocks_per_region"].iloc[0])
    figure = style.sheet("One sequence's life", 300 + 17 * max(rows.values()), cols=len(names), headings=True,
                         horizontal_spacing=0.1)
    for col, name in enumerate(names, 1):
        for state, marker in walk_figures.looks(name, 13).items():
            figure.add_scatter(x=[], y=[], mode="markers", marker=marker, showlegend=False, row=1, col=col,
                               hovertemplate=walk_figures.hover(name, state))
        figure.update_xaxes(title_text="slot (index)", range=[-0.7, slots - 0.3], dtick=1, showgrid=False, col=col)
        figure.update_yaxes(title_text="region (index, in order of use)", range=[max(rows.values()) - 0.3, -0.7],
                            dtick=5, showgrid=False, col=col)
        style.heading(figure, name, col=col)
    return style.note(figure, frame, "colour: its own; grey: another's; a rim: it was this sequence's; white: free")


def predictor_explorer(frame: pd.DataFrame) -> ipywidgets.VBox:
    """alpha, beta, gamma, the size of P and a step -> one head's scores, what was predicted of them, and the misses.

    `frame`: one head of a recorded trace, a row per step and block that could be selected (steps of the prefill below
    0), with the budget. Each move of a slider runs the predictor over all steps. Raises ValueError for a missing
    column.
    """
    for column in (*HEAD, "origin"):
        if column not in frame:
            raise ValueError(f"predictor explorer: no column {column!r}; it needs: {', '.join((*HEAD, 'origin'))}")
    head = _head(frame)
    wide = {"description_width": "150px"}
    sliders = {
        name: ipywidgets.FloatSlider(value=value, min=low, max=1.0, step=0.05, description=text, style=wide,
                                     layout={"width": "440px"}, continuous_update=False)
        for name, value, low, text in (("alpha", 0.4, 0.05, "α, of the level"), ("beta", 0.3, 0.05, "β, of the trend"),
                                       ("gamma", 0.25, 0.0, "γ, trend's weight"))
    }
    size = ipywidgets.FloatSlider(value=1.0, min=0.25, max=2.0, step=0.25, description="|P| / |A|", style=wide,
                                  layout={"width": "440px"}, continuous_update=False)
    step = ipywidgets.IntSlider(value=len(head.scores) // 2, min=0, max=len(head.scores) - 1, description="decode step",
                                style=wide, layout={"width": "440px"}, continuous_update=False)
    figure = _blank(frame, head)

    def redraw(_change: object = None) -> None:
        theta = predictor.Theta(*(slider.value for slider in sliders.values()))
        expected = baselines.ema(head, theta)
        covered, reused = (coverage.measure(head, guess, (size.value,)).dynamic[0, :, 0]
                           for guess in (expected, baselines.last_step(head)))
        t, count = step.value, calibration.predicted_count(int(head.picks[0]), size.value)
        scores, awaited = head.scores[t, 0], expected[t, 0]
        known = np.flatnonzero(np.isfinite(scores) & np.isfinite(awaited))  # a newborn block is in P by rule
        chosen, guess = coverage.selected(head)[t, 0, known], coverage.ranks(awaited)[known] < count
        dots = [known[group] for group in (chosen & guess, chosen & ~guess, guess & ~chosen)]
        lines = [(known, scores[known]), (known, awaited[known])]
        figure.plotly_restyle({
            "x": [*(at.tolist() for at, _ in lines), *(at.tolist() for at in dots), list(range(len(covered))),
                  list(range(len(reused))), [t]],
            "y": [*(values.tolist() for _, values in lines), *(scores[at].tolist() for at in dots),
                  covered.tolist(), reused.tolist(), [covered[t]]]}, list(range(8)))
        hit, miss, waste = (len(at) for at in dots)
        figure.plotly_relayout({
            "annotations[0].text": f"<b>step {t}</b>: {hit} foreseen, {miss} missed, {waste} read in vain",
            "annotations[1].text": f"<b>all steps</b>: coverage {covered.mean():.3f}; last step's, as many: "
                                   f"{reused.mean():.3f}"})

    redraw()
    figure = go.FigureWidget(figure)
    for control in (*sliders.values(), size, step):
        control.observe(redraw, "value")
    left, right = ipywidgets.VBox(list(sliders.values())), ipywidgets.VBox([size, step])
    return ipywidgets.VBox([ipywidgets.HBox([left, right]), figure])


def _head(frame: pd.DataFrame) -> coverage.Steps:
    """The frame's head as the predictor sees it, G = 1; what is forced or has no score is left out."""
    wide = frame.pivot(index="step", columns="block", values="score").sort_index()
    wide = wide.reindex(columns=range(int(frame["block"].max()) + 1))
    values = wide.fillna(-np.inf).to_numpy(np.float32)[:, None]
    before, scores = values[wide.index < 0], values[wide.index >= 0]
    nothing = np.zeros(scores.shape, np.float32)
    picks = np.full(len(scores), int(frame["budget_count"].iloc[0]))
    return coverage.Steps(before, scores, picks, nothing[:, 0] > 0, nothing)


def _blank(frame: pd.DataFrame, head: coverage.Steps) -> go.Figure:
    figure = style.sheet("Move the predictor: one head of one prompt", 700, rows=2, legend=True, headings=True,
                         row_heights=[0.66, 0.34], vertical_spacing=0.24)
    hit, miss, waste = LOOKS["last step"].colour, LOOKS["calibrated"].colour, LOOKS["random"].colour
    for name, mode, look in (
        ("score", "lines", {"line": {"color": "#BBBBBB", "width": 1.5}}),
        ("expected", "lines", {"line": {"color": LOOKS["no trend"].colour, "width": 1.5}}),
        ("foreseen", "markers", {"marker": {"color": hit, "size": 8, "symbol": "circle"}}),
        ("missed", "markers", {"marker": {"color": miss, "size": 11, "symbol": "triangle-up"}}),
        ("read in vain", "markers", {"marker": {"color": waste, "size": 8, "symbol": "x"}}),
    ):
        figure.add_scatter(x=[], y=[], mode=mode, name=name, row=1, col=1, **look)
    figure.add_scatter(x=[], y=[], mode="lines", showlegend=False, row=2, col=1, line={"color": INK, "width": 2.5},
                       hovertemplate="step %{x}: %{y:.3f}<extra></extra>")
    figure.add_scatter(x=[], y=[], mode="lines", showlegend=False, row=2, col=1,
                       line={"color": hit, "width": 1.5, "dash": "3px,3px"},
                       hovertemplate="last step's, step %{x}: %{y:.3f}<extra></extra>")
    figure.add_scatter(x=[], y=[], mode="markers", showlegend=False, row=2, col=1, marker={"color": INK, "size": 12},
                       hoverinfo="skip")
    finite = head.scores[np.isfinite(head.scores)]
    figure.update_xaxes(title_text="block (index)", range=[-2, head.scores.shape[2] + 1], row=1, col=1)
    figure.update_yaxes(title_text="score", range=[float(finite.min()), float(finite.max())], row=1, col=1)
    figure.update_xaxes(title_text="decode step (index)", range=[-1, len(head.scores)], row=2, col=1)
    figure.update_yaxes(title_text="coverage", range=[0, 1.03], row=2, col=1)
    style.heading(figure, "", row=1)
    style.heading(figure, "", row=2)
    one = frame.iloc[0]
    return style.note(figure, frame, f"{one['model']}, {one['family']} prompt {one['prompt']}, layer {one['layer']}, "
                                     f"KV head {one['head']}; {head.picks[0]} blocks selected; dotted: last step's")
