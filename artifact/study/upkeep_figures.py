"""The figures of notebook 13, what allocators cost: a data frame in, a plotly figure out."""

import math

import pandas as pd
import plotly.graph_objects as go

from artifact.study import style

_KINDS = {"compiled": "this artifact's", "plain Python": "the study's, ported"}
_PANELS = {"steady": "steady", "spec": "speculating"}


def cost(frame: pd.DataFrame) -> go.Figure:
    """Microseconds of a decode step in each allocator, ours and the study's, a panel for each workload."""
    panels = [name for name in _PANELS if name in set(frame["workload"])]
    policies = style.policies(frame)
    names = [(kind, policy) for kind in _KINDS for policy in policies
             if len(frame[(frame["implementation"] == kind) & (frame["allocator"] == policy)])]
    labels = [f"{policy}, ported" if kind == "plain Python" else policy for kind, policy in names]
    figure = style.sheet("What the allocator costs in each decode step", 620, cols=len(panels), headings=True, left=200,
                         shared_yaxes=True, horizontal_spacing=0.05)
    low = math.floor(math.log10(frame["step_time_us"].min()))
    high = math.ceil(math.log10(frame["step_time_us"].max())) + 0.5
    for col, workload in enumerate(panels, 1):
        cells = frame[frame["workload"] == workload].set_index(["implementation", "allocator"])["step_time_us"]
        for (kind, policy), label in zip(names, labels, strict=True):
            value = cells[kind, policy]
            figure.add_bar(orientation="h", base=10.0**low, x=[round(value - 10.0**low, 5)], y=[label], width=0.7,
                           marker=style.fill(policy), row=1, col=col, showlegend=False,
                           hovertemplate=f"{label}: {value:.3g} µs<extra></extra>")
            figure.add_annotation(text=style.short(value), x=math.log10(value), y=label, xanchor="left", xshift=5,
                                  showarrow=False, row=1, col=col, font={"size": style.NOTE})
        figure.update_xaxes(title_text="time of a decode step (µs)", type="log", dtick=1, range=[low, high], row=1,
                            col=col)
        style.heading(figure, _PANELS[workload], col=col)
    figure.update_yaxes(showgrid=False, ticks="", tickvals=labels, ticktext=labels, autorange="reversed")
    return style.note(figure, frame, "logarithmic; \"ported\" is the study's allocator in plain Python")


def worst(frame: pd.DataFrame) -> go.Figure:
    """Nanoseconds of an append and of an admission when no region is empty, by the number of regions."""
    figure = style.sheet("The worst case, by the number of regions", 560, cols=2, legend=True, headings=True,
                         shared_yaxes=True, horizontal_spacing=0.06)
    frame = frame.sort_values("regions_count")
    for col, what in enumerate(("append", "admit"), 1):
        for policy in style.policies(frame):
            for kind, said in _KINDS.items():
                cells = frame[(frame["operation"] == what) & (frame["allocator"] == policy)
                              & (frame["implementation"] == kind)]
                dash = "solid" if kind == "compiled" else "8px,5px"
                figure.add_scatter(x=cells["regions_count"].tolist(), y=cells["time_ns"].round(2).tolist(),
                                   mode="lines+markers", name=policy, row=1, col=col,
                                   showlegend=col == 1 and kind == "compiled",
                                   marker=style.marker(policy), line={"color": style.LOOKS[policy].colour, "dash": dash,
                                                                      "width": 3},
                                   hovertemplate=f"{policy}, {said}: %{{y:,.3g}} ns<extra></extra>")
        ticks = sorted(frame["regions_count"].unique().tolist())
        figure.update_xaxes(title_text="regions (count)", type="log", row=1, col=col, tickvals=ticks,
                            ticktext=[f"{n:,}" for n in ticks])
        style.heading(figure, {"append": "one block", "admit": "a region's blocks"}[what], col=col)
    figure.update_yaxes(type="log", dtick=1)
    figure.update_yaxes(title_text="time (ns)", col=1)
    style.key(figure, [(said, {"mode": "lines", "line": {"color": style.QUIET, "width": 3, "dash": dash}})
                       for said, dash in zip(_KINDS.values(), ("solid", "8px,5px"), strict=True)])
    return style.note(figure, frame, "both axes logarithmic; no region is empty")
