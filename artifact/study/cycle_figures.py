"""The figures of notebook 14, the cycle-level controller: a data frame in, a plotly figure out."""

import math

import pandas as pd
import plotly.graph_objects as go

from artifact.study import style
from artifact.study.style import INK, QUIET, SMALL

_FORMS = {  # column stem -> name, look: what is held against AttAcc
    "event": ("this controller", style.Look("#0072B2", "circle", "")),
    "runs": ("its run-length form", style.Look("#009E73", "triangle-up", ".")),
    "formula": ("M1 in a formula", style.Look("#D55E00", "square", "/")),
}
_LIMITS = {"HBM3_5.2Gbps": ("power-limited", "#0072B2", "solid"),
           "HBM3_5.2Gbps_NPC": ("unlimited power", "#D55E00", "8px,5px")}
_GAINS = {"M3": "analytic (M3)", "unlimited power": "cycles, unlimited power", "in order": "cycles, in order",
          "cycles": "cycles", "with refresh": "cycles, with refresh", "charged twice": "cycles, hits charged twice"}
_DASH = {"cycles": "solid", "M3": "3px,4px"}


def agreement(frame: pd.DataFrame) -> go.Figure:
    """Our cycles over AttAcc's against AttAcc's, for the controller, its run-length form and the formula."""
    figure = style.sheet("Cycles beside AttAcc's own", 640, rows=2, legend=True, shared_xaxes=True,
                         vertical_spacing=0.08, row_heights=[0.5, 0.5])
    frame = frame.sort_values(["attacc_cycles", "event_cycles", "formula_cycles", "runs_cycles"])
    for stem, (name, look) in reversed(_FORMS.items()):  # the controller's marks on top
        cells = frame.dropna(subset=[f"{stem}_cycles"]).drop_duplicates(["attacc_cycles", f"{stem}_cycles"])
        marker = {"symbol": look.symbol, "color": look.colour, "size": 9, "opacity": 0.75,
                  "line": {"color": "white", "width": 0.5}}
        for row, column in ((1, f"{stem}_cycles"), (2, f"{stem}_ratio")):
            figure.add_scatter(x=cells["attacc_cycles"].tolist(), y=cells[column].round(4).tolist(), mode="markers",
                               name=name, showlegend=row == 1, marker=marker, row=row, col=1,
                               hovertemplate=f"{name}: %{{y:,.5g}} at %{{x:,}}<extra></extra>")
    low, high = frame["attacc_cycles"].min(), frame["attacc_cycles"].max()
    figure.add_scatter(x=[low, high], y=[low, high], mode="lines", line={"color": INK, "width": 1}, showlegend=False,
                       hoverinfo="skip", row=1, col=1)
    figure.add_hline(y=1, line={"color": INK, "width": 1}, row=2)
    figure.update_xaxes(type="log", dtick=1, range=[math.log10(low) - 0.08, math.log10(high) + 0.08])
    figure.update_xaxes(title_text="AttAcc (cycles)", row=2)
    figure.update_yaxes(title_text="ours (cycles)", type="log", dtick=1, row=1)
    figure.update_yaxes(title_text="ours / AttAcc (ratio)", type="log", tickvals=[1, 2, 5, 10], row=2,
                        range=[math.log10(frame["formula_ratio"].min()) - 0.08,
                               math.log10(frame["formula_ratio"].max()) + 0.08])
    return style.note(figure, frame, "AttAcc's own cycles were recorded earlier, one run a mark; all axes logarithmic")


def per_row(frame: pd.DataFrame) -> go.Figure:
    """How far the formula is above the exact cycles, by commands per row."""
    figure = style.sheet("Where the formula errs: commands per row", 560, legend=True)
    frame = frame[frame["commands_per_row_count"] <= 64].sort_values(["preset", "commands_per_row_count"])
    counts = sorted(frame["commands_per_row_count"].unique())
    for preset, (name, colour, dash) in _LIMITS.items():
        cells = frame[frame["preset"] == preset]
        if cells.empty:
            continue
        figure.add_scatter(x=cells["commands_per_row_count"].tolist(), y=cells["formula_ratio"].round(5).tolist(),
                           mode="lines+markers", name=name, line={"color": colour, "dash": dash, "width": 3},
                           marker={"color": colour, "size": 7},
                           hovertemplate=f"{name}, %{{x}} commands: %{{y:.3f}}<extra></extra>")
        worst = cells.loc[cells["formula_ratio"].idxmax()]
        x, y = worst["commands_per_row_count"], worst["formula_ratio"]
        figure.add_annotation(x=math.log10(x), y=y, text=f"<b>{x:.0f} commands: {y:.2f}</b>", showarrow=False,
                              yshift=18, xshift=-60 if preset == "HBM3_5.2Gbps" else 62,
                              font={"size": SMALL, "color": style.legible(colour)})
    figure.add_hline(y=1, line={"color": INK, "width": 2})
    figure.update_xaxes(title_text="commands per row (count)", type="log", tickvals=[1, 2, 4, 8, 16, 32, 64],
                        range=[-0.05, math.log10(counts[-1]) + 0.05])
    figure.update_yaxes(title_text="formula / exact (ratio)", range=[0.95, frame["formula_ratio"].max() + 0.06])
    return style.note(figure, frame, "in order, without refresh; the axis does not start at zero")


def reordering(frame: pd.DataFrame) -> go.Figure:
    """Cycles a command in order and through the queue, and what refresh adds, by pattern."""
    frame = frame[frame["preset"] == "HBM3_5.2Gbps"].sort_values(["inorder_cycles", "pattern"])
    figure = style.sheet("What the queue recovers, and what refresh costs", 720, cols=2, legend=True, headings=True,
                         left=190, shared_yaxes=True, horizontal_spacing=0.06, column_widths=[0.66, 0.34])
    names = frame["pattern"].tolist()
    for pattern, a, b in zip(names, frame["inorder_cycles"], frame["queue_cycles"], strict=True):
        figure.add_scatter(x=[b, a], y=[pattern, pattern], mode="lines", line={"color": QUIET, "width": 3},
                           showlegend=False, hoverinfo="skip", row=1, col=1)
    for name, column, colour, symbol, size in (("in order", "inorder_cycles", "#D55E00", "square", 15),
                                               ("through the queue", "queue_cycles", "#0072B2", "circle", 11)):
        figure.add_scatter(x=frame[column].round(4).tolist(), y=names, mode="markers", name=name, row=1, col=1,
                           marker={"color": colour, "symbol": symbol, "size": size},
                           hovertemplate=f"%{{y}}, {name}: %{{x:.4g}} cycles<extra></extra>")
    extra = ((frame["refresh_ratio"] - 1) * 100).round(4)
    figure.add_bar(orientation="h", x=extra.tolist(), y=names, marker={"color": "#009E73"}, showlegend=False, row=1,
                   col=2, hovertemplate="%{y}: %{x:.2f} %<extra></extra>", width=0.6)
    figure.update_xaxes(title_text="time of a command (cycles)", type="log", tickvals=[6, 10, 20, 40, 64], row=1, col=1)
    figure.update_xaxes(title_text="more time (%)", range=[0, max(10, extra.max() * 1.1)], row=1, col=2)
    figure.update_yaxes(showgrid=False, ticks="", tickfont={"size": SMALL}, tickvals=names, ticktext=names)
    style.heading(figure, "without refresh")
    style.heading(figure, "refresh adds", col=2)
    return style.note(figure, frame, "power-limited preset; cycles on a logarithmic axis")


def gains(frame: pd.DataFrame) -> go.Figure:
    """The gain over paged by way of counting, a mark an allocator, and the study's two numbers."""
    names = [name for name in style.policies(frame) if name != "random"]
    ways = [way for way in _GAINS if way in set(frame["way"])]
    figure = style.sheet("The same gain, analytic and in cycles", 640, legend=True, left=320)
    for policy in names:
        cells = frame[frame["allocator"] == policy].set_index("way")["gain_mean_ratio"].reindex(ways)
        figure.add_scatter(x=cells.round(5).tolist(), y=ways, mode="markers", name=policy,
                           marker=style.marker(policy, 17),
                           hovertemplate=f"{policy}: %{{x:.3f}}<extra></extra>")
        if policy == "pim-aware":
            for way, value in cells.items():
                figure.add_annotation(x=value, y=way, text=f"<b>{value:.2f}</b>", showarrow=False, yshift=20,
                                      font={"size": SMALL, "color": style.legible(style.POLICIES[policy].colour)})
    figure.add_vline(x=1, line={"color": INK, "width": 2})
    most = frame.loc[frame["way"].isin(ways), "gain_mean_ratio"].max()
    figure.update_xaxes(title_text="paged / allocator, mean over sequences (ratio)", range=[0.95, most * 1.06])
    figure.update_yaxes(tickvals=ways, ticktext=[_GAINS[way] for way in ways], showgrid=False, ticks="",
                        range=[len(ways) - 0.5, -0.6], type="category")
    return style.note(figure, frame[frame["way"].isin(ways)])


def gain_by(frame: pd.DataFrame) -> go.Figure:
    """The gain over paged by sequence length and by age of the run: in cycles, and analytic."""
    figure = style.sheet("Gain by sequence length, and by age of the run", 620, cols=2, legend=True, headings=True,
                         shared_yaxes=True, horizontal_spacing=0.06)
    names = style.policies(frame)
    for col, (column, title) in enumerate((("length_tokens", "length up to (tokens)"),
                                           ("step", "step up to (count)")), 1):
        cells = frame.dropna(subset=[column]).sort_values(column)
        for policy in names:
            for way, dash in _DASH.items():
                line = cells[(cells["way"] == way) & (cells["allocator"] == policy)]
                figure.add_scatter(x=line[column].tolist(), y=line["gain_mean_ratio"].round(5).tolist(), name=policy,
                                   mode="lines+markers" if way == "cycles" else "lines", row=1, col=col,
                                   showlegend=col == 1 and way == "cycles", marker=style.marker(policy, 11),
                                   line={"color": style.POLICIES[policy].colour, "dash": dash, "width": 3},
                                   hovertemplate=f"{policy}, {_GAINS[way]}: %{{y:.3f}}<extra></extra>")
        ticks = sorted(cells[column].unique())
        figure.update_xaxes(title_text=title, type="log", tickvals=ticks, tickangle=0, row=1, col=col,
                            ticktext=[f"{t:,.0f}" if i % 2 == 0 else "" for i, t in enumerate(ticks)])
    figure.add_hline(y=1, line={"color": INK, "width": 2})
    figure.update_yaxes(range=[0, frame["gain_mean_ratio"].max() * 1.07])
    figure.update_yaxes(title_text="paged / allocator (ratio)", col=1)
    style.key(figure, [(_GAINS[way], {"mode": "lines", "line": {"color": QUIET, "dash": dash, "width": 3}})
                       for way, dash in _DASH.items()])
    style.heading(figure, "by length of the sequence")
    style.heading(figure, "by step of the run", col=2)
    return style.note(figure, frame, "means over sequences; one is no gain")


def study_points(frame: pd.DataFrame) -> go.Figure:
    """The study's AttAcc counts, ours charged twice, and ours charged once."""
    frame = frame[frame["address_map"] == "host-cacheline"].sort_values(["allocator", "seq_id"])
    names = style.policies(frame)
    frame = frame.assign(place=frame["allocator"] + ", " + frame["seq_id"].astype(str))
    figure = style.sheet("The study's AttAcc points, and what they charge", 680, legend=True, left=190)
    symbols = {"twice": ("each hit charged twice", "square"), "once": ("one command for both halves", "circle")}
    own, theirs = style.ours(frame), style.published(frame)
    for policy in names:
        for charged, (name, symbol) in symbols.items():
            cells = own[(own["charged"] == charged) & (own["allocator"] == policy)]
            figure.add_scatter(x=cells["run_cycles"].tolist(), y=cells["place"].tolist(), mode="markers", name=policy,
                               marker=style.marker(policy, 14, symbol), showlegend=False,
                               hovertemplate=f"%{{y}}, {name}: %{{x:,}}<extra></extra>")
    figure.add_scatter(x=theirs["run_cycles"].tolist(), y=theirs["place"].tolist(), mode="markers", showlegend=False,
                       marker=style.ring(None, 24), hovertemplate="%{y}, published: %{x:,}<extra></extra>")
    places = [place for policy in names for place in dict.fromkeys(frame.loc[frame["allocator"] == policy, "place"])]
    figure.update_xaxes(title_text="one sequence (cycles)", range=[0, frame["run_cycles"].max() * 1.06])
    figure.update_yaxes(showgrid=False, ticks="", tickvals=places, ticktext=places, categoryorder="array",
                        categoryarray=places[::-1])
    style.key(figure, [(name, {"mode": "markers", "marker": {"symbol": symbol, "size": 14, "color": QUIET}})
                       for name, symbol in symbols.values()])
    return style.note(figure, frame, "a row is an allocator and a sequence; halves are pseudo-channels; host-cacheline")
