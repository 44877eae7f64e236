"""The walkthrough's controls: block size and allocator chosen by hand, on shipped results; nothing is computed anew."""

import ipywidgets
import pandas as pd
import plotly.graph_objects as go

from artifact.study import figures, style
from artifact.study.style import POLICIES, SMALL

COLUMNS = ("allocator", "block_tokens", "order_index", "block", "region", "slot", "blocks_per_region",
           "m1_row_hit_frac", "m3_bandwidth_gbps")


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
        options=sizes, value=figures.BLOCK_TOKENS if figures.BLOCK_TOKENS in sizes else sizes[0],
        description="block size (tokens)", style={"description_width": "initial"}, layout={"width": "440px"})
    allocator = ipywidgets.ToggleButtons(options=names, value=names[0], description="allocator",
                                         style={"description_width": "initial", "button_width": "110px"})
    bars = [(metric, name) for metric in ("m1_row_hit_frac", "m3_bandwidth_gbps") for name in names]
    figure = go.FigureWidget(_empty(frame, names))

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
            "annotations[2].text": f"<b>{chosen}</b>: {figures.touched(cells)}"}, [len(bars)])

    size.observe(redraw, "value")
    allocator.observe(redraw, "value")
    redraw()
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
