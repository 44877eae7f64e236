"""The figures of notebook 07: what a predicted attention does to likelihood, to each layer's output and to answers.

A frame in, a figure out, as in `figures`, whose table lists them. A colour is a mode of attention.
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from artifact.study import style
from artifact.study.style import INK, LOOKS, MODES, QUIET, SMALL

_SETTING = ["method", "page_tokens", "budget_frac"]
_LONG = 152  # px below a plot, for a note of three lines
_LINE = 27  # px of a mode's line
_SHADES = ("#F2B48A", "#D55E00", "#A64500", "#702E00")  # of the union, little predicted to much


def likelihood(frame: pd.DataFrame) -> go.Figure:
    """What each mode costs in nats per token, against dense attention and against DSA of the same budget."""
    frame = frame[(frame["text"] == "all") & (frame["mode"] != "dense")]
    panels = [(key, _ordered(part)) for key, part in _panels(frame)]
    sizes = [len(part) + 1.3 for _, part in panels]
    figure = style.sheet("What each mode costs in likelihood", int(260 + _LINE * sum(sizes)), rows=len(panels), cols=2,
                         left=190, headings=True, bottom=_LONG + 20, row_heights=sizes, shared_yaxes=True,
                         vertical_spacing=0.07, horizontal_spacing=0.06)
    for row, (key, part) in enumerate(panels, 1):
        for col, (column, words) in enumerate((("over_dense_nats", "against dense"), ("over_dsa_nats", "against DSA")),
                                              1):
            if column not in part:
                continue
            _dots(figure, part, column, row, col)
            style.heading(figure, f"<b>{_said(*key)}</b>" if col == 1 else words, row=row, col=col)
        figure.update_yaxes(tickvals=list(range(len(part))), ticktext=[_label(one) for one in part.itertuples()],
                            range=[len(part) - 0.5, -0.5], showgrid=False, ticks="", row=row, col=1)
        figure.update_yaxes(range=[len(part) - 0.5, -0.5], showgrid=False, ticks="", row=row, col=2)
        figure.update_xaxes(showticklabels=row == len(panels), row=row)
    for col, words in enumerate(("over dense attention (nats per token)", "over DSA (nats per token)"), 1):
        figure.update_xaxes(title_text=words, row=len(panels), col=col)
        columns = ("over_dense_nats", "over_dsa_nats")[col - 1]
        low, high = min(0.0, frame[f"{columns}_min"].min()), max(0.0, frame[f"{columns}_max"].max())
        figure.update_xaxes(range=[low - 0.08 * (high - low), high + 0.08 * (high - low)], col=col)
    one = frame.iloc[0]
    return style.note(figure, frame, f"SmolLM2-135M, {int(one['scored_tokens']):,} tokens after prompts of "
                                     f"{int(one['prompt_tokens']):,}; right of the line is worse",
                      "95 % intervals, bootstrap over runs of tokens; the same tokens in every mode")


def errors(frame: pd.DataFrame) -> go.Figure:
    """Each layer's attention output against dense attention of the same inputs: median and 95th percentile. Of the
    unions those at |P| = |A| and at twice as much."""
    frame = frame[frame["mode"].isin(["dsa", "exact"]) | (frame["mode"].eq("union")
                                                          & frame["predicted_ratio"].isin([1, 2]))]
    panels = [panel for panel in _panels(frame) if panel[1]["mode"].nunique() > 2][:2]
    figure = style.sheet("How far each layer's attention is from dense", 840, rows=2, cols=len(panels), legend=True,
                         headings=True, shared_xaxes=True, shared_yaxes=True, vertical_spacing=0.05,
                         horizontal_spacing=0.05, bottom=_LONG)
    shown: set[str] = set()
    for col, (key, part) in enumerate(panels, 1):
        style.heading(figure, f"<b>{_said(*key)}</b>", col=col)
        for run in _ordered(part.drop_duplicates(["mode", "predicted_ratio"])).itertuples():
            cells = part[(part["mode"] == run.mode) & _same(part["predicted_ratio"], run.predicted_ratio)]
            cells, name = cells.sort_values("layer"), _label(run)
            thin = run.mode == "exact"  # it lies on DSA's
            for row, metric in enumerate(("error_frac_p50", "error_frac_p95"), 1):
                figure.add_scatter(x=cells["layer"].tolist(), y=cells[metric].tolist(), name=name,
                                   mode="markers" if thin else "lines+markers", row=row, col=col,
                                   showlegend=row == 1 and name not in shown, legendgroup=name,
                                   marker=style.marker(run.mode, 12 if thin else 7) | {
                                       "color": _colour(run), **({"symbol": "x-thin", "line": {
                                           "color": _colour(run), "width": 2}} if thin else {})},
                                   line={"color": _colour(run), "width": 2.2, "simplify": False},
                                   hovertemplate=f"{name}, layer %{{x}}: %{{y:.4f}}<extra></extra>")
            shown.add(name)
        figure.update_xaxes(title_text="layer (index)", row=2, col=col)
    values = frame[["error_frac_p50", "error_frac_p95"]].to_numpy()
    values = values[values > 0]
    figure.update_yaxes(type="log", range=[np.log10(values.min()) - 0.1, np.log10(values.max()) + 0.1],
                        tickvals=[digit * 10.0**power for power in range(-4, 2) for digit in (1, 2, 5)])
    figure.update_yaxes(title_text="median error (fraction)", row=1, col=1)
    figure.update_yaxes(title_text="95th percentile (fraction)", row=2, col=1)
    return style.note(figure, frame, "relative L2 distance of a layer's output over all heads, of the same inputs",
                      "SmolLM2-135M; layers that a method leaves dense are not drawn")


def needles(frame: pd.DataFrame) -> go.Figure:
    """The share of hidden facts found, by mode, with Wilson's interval; dense attention as a line."""
    dense = frame[frame["mode"] == "dense"].iloc[0]
    panels = [(key, _ordered(part)) for key, part in _panels(frame[frame["mode"] != "dense"])]
    sizes = [len(part) + 1.3 for _, part in panels]
    figure = style.sheet("Hidden facts found", int(280 + 32 * sum(sizes)), rows=len(panels), left=190, legend=True,
                         headings=True, bottom=_LONG, row_heights=sizes, shared_xaxes=True, vertical_spacing=0.09)
    for row, (key, part) in enumerate(panels, 1):
        _dots(figure, part, "found_frac", row, 1, form="{count} of {of}")
        figure.add_vline(x=dense["found_frac"], line={"color": INK, "width": 2, "dash": "7px,4px"}, row=row, col=1)
        style.heading(figure, f"<b>{_said(*key)}</b>", row=row)
        figure.update_yaxes(tickvals=list(range(len(part))), ticktext=[_label(one) for one in part.itertuples()],
                            range=[len(part) - 0.5, -0.5], showgrid=False, ticks="", row=row, col=1)
    figure.update_xaxes(range=[-0.03, 1.2], tickvals=[0, 0.25, 0.5, 0.75, 1])
    figure.update_xaxes(title_text="found (fraction)", row=len(panels))
    style.key(figure, [("95 % interval (Wilson)", {"mode": "markers", "marker": {"size": 13, "color": QUIET}}),
                       (f"dense: {int(dense['found_count'])} of {int(dense['prompts_count'])}", {
                           "mode": "lines", "line": {"color": INK, "width": 2, "dash": "7px,4px"}})])
    return style.note(figure, frame, f"SmolLM2-135M, one fact in {int(dense['prompt_tokens']):,} tokens, asked for at "
                                     "the end", "The same prompts in every mode, decoded greedily")


def _dots(figure: go.Figure, part: pd.DataFrame, column: str, row: int, col: int, form: str = "") -> None:
    """A mark with its interval for each run of `part`, in its order, and a line at 0 or the count beside it."""
    for place, run in enumerate(part.itertuples()):
        value, low, high = (getattr(run, f"{column}{end}") for end in ("", "_min", "_max"))
        figure.add_scatter(
            x=[value], y=[place], mode="markers", showlegend=False, row=row, col=col, cliponaxis=False,
            marker=style.marker(run.mode, 12) | {"color": _colour(run)},
            error_x={"array": [high - value], "arrayminus": [value - low], "color": _colour(run), "thickness": 2.2,
                     "width": 5}, hovertemplate=f"{_label(run)}: %{{x:.5f}}<extra></extra>")
        if form:
            figure.add_annotation(text=form.format(count=int(run.found_count), of=int(run.prompts_count)), x=1.05,
                                  y=place, xanchor="left", showarrow=False, font={"size": SMALL}, row=row, col=col)
    if not form:
        figure.add_vline(x=0, line={"color": QUIET, "width": 1.5}, layer="below", row=row, col=col)


def _panels(frame: pd.DataFrame) -> list[tuple[tuple, pd.DataFrame]]:
    """(method, tokens per block, budget) and its rows: Quest before InfLLM-v2, small blocks first, large budgets."""
    style.known(frame, "mode", MODES)
    rows = frame[frame["mode"] != "dense"]
    if rows.empty:
        raise ValueError("no rows but of dense attention; a figure needs a mode that selects")
    names = list(style.METHODS)
    groups = [(key, part) for key, part in rows.groupby(_SETTING, sort=False)]
    return sorted(groups, key=lambda group: (names.index(group[0][0]), group[0][1], -group[0][2]))


def _ordered(part: pd.DataFrame) -> pd.DataFrame:
    """DSA, reuse, the unions by size, exact."""
    order = part["mode"].map(list(MODES).index)
    return part.assign(order=order).sort_values(["order", "predicted_ratio"]).drop(columns="order")


def _same(values: pd.Series, wanted: float) -> pd.Series:
    return values.isna() if pd.isna(wanted) else values == wanted


def _colour(run) -> str:
    if run.mode != "union":
        return LOOKS[run.mode].colour
    return _SHADES[min(len(_SHADES) - 1, max(0, round(run.predicted_ratio / 0.5) - 1))]


def _label(run) -> str:
    return f"PRR, union, δ = {run.predicted_ratio:g}" if run.mode == "union" else style.said(run.mode)


def _said(method: str, page_tokens: int, budget_frac: float) -> str:
    return f"{style.said(method)}, blocks of {int(page_tokens)}, {budget_frac:.3g} of the prompt"
