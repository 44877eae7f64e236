"""The figures of notebook 12, what the gain depends on: a data frame in, a plotly figure out."""

import math

import pandas as pd
import plotly.graph_objects as go

from artifact.study import style
from artifact.study.style import INK, POLICIES, QUIET

PRESSED = {"steady": "solid", "spec": "8px,5px"}
_LINE = 30  # px of a row of an interval


def m1_histogram(frame: pd.DataFrame) -> go.Figure:
    """How M1 of single samples is distributed, a panel an allocator, with its mean."""
    names = style.policies(frame)
    figure = style.sheet("Row hits of single sequences", 250 + 150 * len(names), rows=len(names), headings=True,
                         shared_xaxes=True, vertical_spacing=0.09)
    low, high = frame["m1_frac_min"].min(), frame["m1_frac_max"].max()
    for row, policy in enumerate(names, 1):
        cells = frame[frame["allocator"] == policy].sort_values("m1_frac_min")
        width = cells["m1_frac_max"] - cells["m1_frac_min"]
        share = cells["samples_count"] / cells["samples_count"].sum()
        figure.add_bar(x=((cells["m1_frac_min"] + cells["m1_frac_max"]) / 2).round(6).tolist(),
                       y=share.round(6).tolist(), width=width.round(6).tolist(), name=policy, showlegend=False,
                       row=row, col=1, marker={"color": POLICIES[policy].colour, "line": {"width": 0}},
                       hovertemplate=f"{policy}, M1 about %{{x:.3f}}: %{{y:.1%}} of the samples<extra></extra>")
        mean = cells["m1_row_hit_frac_mean"].iloc[0]
        figure.add_vline(x=mean, line={"color": INK, "width": 2, "dash": "7px,4px"}, row=row, col=1)
        style.heading(figure, f"<b>{policy}</b>: {cells['samples_count'].sum():,} samples, mean {mean:.3f}", row=row)
        figure.update_yaxes(title_text="share (fraction)", rangemode="tozero", nticks=4, row=row)
    figure.update_xaxes(range=[low, high])
    figure.update_xaxes(title_text="M1 of one sequence, row hits (fraction)", row=len(names))
    requests = int(frame["requests_count"].iloc[0])
    return style.note(figure, frame, f"steady, {requests:,} requests, blocks of 16 tokens; dashed: the mean")


def pressure(frame: pd.DataFrame) -> go.Figure:
    """M1 and preemptions against the size of the pool, under the engine's own admission."""
    frame = frame[(frame["sweep"] == "pressure") & (frame["admission"] == "vllm") & (frame["spec_adopt"] == "auto")]
    figure = style.sheet("Row hits when the pool is too small", 840, rows=2, legend=True, shared_xaxes=True,
                         vertical_spacing=0.08, row_heights=[0.6, 0.4])
    rooms = sorted(frame["headroom"].unique())
    for policy in style.policies(frame):
        for workload, dash in PRESSED.items():
            cells = frame[(frame["allocator"] == policy) & (frame["workload"] == workload)].sort_values("headroom")
            for row, metric in enumerate(("m1_row_hit_frac", "preemptions_count"), 1):
                figure.add_scatter(x=cells["headroom"].tolist(), y=cells[metric].tolist(), mode="lines+markers",
                                   name=policy, showlegend=row == 1 and workload == "steady", row=row, col=1,
                                   marker=style.marker(policy, 13),
                                   line={"color": POLICIES[policy].colour, "dash": dash, "width": 3},
                                   hovertemplate=f"{policy}: %{{y:.5g}}, {workload}<extra></extra>")
    figure.update_xaxes(tickvals=rooms, range=[rooms[0] - 0.05, rooms[-1] + 0.05])
    figure.update_xaxes(title_text="pool / what a full batch of mean requests needs (ratio)", row=2)
    low = math.floor(frame["m1_row_hit_frac"].min() * 10) / 10
    figure.update_yaxes(title_text="M1, row hits (fraction)", range=[low, 1], row=1)
    figure.update_yaxes(title_text="preemptions (count)", rangemode="tozero", row=2)
    style.key(figure, [(workload, {"mode": "lines", "line": {"color": QUIET, "dash": dash, "width": 3}})
                       for workload, dash in PRESSED.items()])
    return style.note(figure, frame, "admission as in vLLM v0.2.7, preempted by recomputing"
                                     + ("; the axis of M1 does not start at zero" if low else ""))


def options(frame: pd.DataFrame) -> go.Figure:
    """The gain of pim-aware under each option that the study leaves out, with its interval over seeds."""
    rows = [(w, o) for w, o in dict.fromkeys(zip(frame["workload"], frame["option"], strict=True))]
    rows = sorted(rows, key=lambda key: (key[0] != "steady", key[1] != "as studied", _by_number(key[1])))
    cells = frame.set_index(["workload", "option"]).loc[rows].reset_index()
    figure = style.sheet("The gain, when what the study leaves out is put in", 300 + _LINE * len(rows), legend=2,
                         left=395)
    places = list(range(len(rows)))
    ways = (("gain_total_ratio", "square", -0.13, "all bytes over all time"),
            ("gain_busiest_ratio", "diamond-tall", 0.17, "by the busiest channel, mean of rates"))
    for way, symbol, shift, name in ways:
        spans = [cells[f"{way}_max"] - cells[way], cells[way] - cells[f"{way}_min"]]
        figure.add_scatter(x=cells[way].round(5).tolist(), y=[place + shift for place in places], mode="markers",
                           name=name, marker=style.marker("pim-aware", 13, symbol),
                           error_x={"array": spans[0].round(5).tolist(), "arrayminus": spans[1].round(5).tolist(),
                                    "color": POLICIES["pim-aware"].colour, "thickness": 2, "width": 5},
                           hovertemplate=f"pim-aware, {name}: %{{x:.3f}}<extra></extra>")
    figure.add_vline(x=1, line={"color": INK, "width": 2})
    for workload in dict.fromkeys(cells["workload"]):
        own = cells[cells["workload"] == workload]
        studied = own.loc[own["option"] == "as studied", "gain_total_ratio"]
        if len(studied):
            figure.add_scatter(x=[studied.iloc[0]] * 2, y=[own.index[0] - 0.5, own.index[-1] + 0.5], mode="lines",
                               line={"color": QUIET, "width": 1.5, "dash": "3px,4px"}, showlegend=False,
                               hoverinfo="skip")
    most = cells[["gain_total_ratio_max", "gain_busiest_ratio_max", "gain_total_ratio"]].max(axis=None)
    figure.update_xaxes(title_text="bandwidth of pim-aware over paged (ratio, 1 = no gain)",
                        range=[0.6, min(most, 4.6) * 1.03])
    words = [o if w == "steady" else f"{w}: {o}" for w, o in rows]
    figure.update_yaxes(tickvals=places, ticktext=words, range=[len(rows) - 0.4, -0.6], showgrid=False, ticks="")
    seeds = int(cells["seeds_count"].iloc[0])
    return style.note(figure, frame, f"means and 95 % intervals over {seeds} seeds; dotted: as studied")


def _by_number(text: str) -> tuple:
    """A text's words, numbers in it as numbers: turns of 64 tokens come before those of 128."""
    return tuple((0, int(w.replace(",", "")), "") if w[0].isdigit() else (1, 0, w) for w in text.split())


def traffic(frame: pd.DataFrame) -> go.Figure:
    """What fills regions over each of today's allocators, on drawn and on real traffic, with intervals, in two ways of
    counting; the table has the others, too."""
    frame = frame[frame["allocator"].eq("pim-aware") | frame["allocator"].str.endswith("-region")]
    frame = frame.assign(place=[_place(*key) for key in zip(frame["workload"], frame["trace"], frame["over"],
                                                            strict=True)])  # fmt: skip
    order = {"steady": 0, "prefix": 1}
    keys = frame[["workload", "trace", "over", "place"]].drop_duplicates()
    keys = keys.assign(rank=keys["workload"].map(order).fillna(2)).sort_values(["over", "rank", "place"])
    places, names = keys["place"].tolist(), style.policies(frame)
    tall = 17 * len(names)
    figure = style.sheet("Gain on drawn and on real traffic", 270 + tall * len(places), cols=2, legend=True,
                         headings=True, left=230, shared_yaxes=True, horizontal_spacing=0.05)
    for col, way in enumerate(("gain_total_ratio", "gain_busiest_ratio"), 1):
        for i, policy in enumerate(names):
            cells = frame[frame["allocator"] == policy].set_index("place").reindex(places)
            y = [place + (i - (len(names) - 1) / 2) * 0.8 / len(names) for place in range(len(places))]
            figure.add_scatter(x=cells[way].round(5).tolist(), y=y, mode="markers", name=policy, row=1, col=col,
                               showlegend=col == 1, marker=style.marker(policy, 11),
                               error_x={"array": (cells[f"{way}_max"] - cells[way]).round(5).tolist(),
                                        "arrayminus": (cells[way] - cells[f"{way}_min"]).round(5).tolist(),
                                        "color": POLICIES[policy].colour, "thickness": 2, "width": 4},
                               hovertemplate=f"{policy}: %{{x:.3f}}<extra></extra>")
        figure.add_vline(x=1, line={"color": INK, "width": 2}, row=1, col=col)
        figure.update_xaxes(title_text="bandwidth over the baseline (ratio)", row=1, col=col)
    most = frame[["gain_total_ratio_max", "gain_busiest_ratio_max"]].max(axis=None)
    figure.update_xaxes(range=[0, most * 1.06], nticks=6)
    for j in range(0, len(places), 2):
        figure.add_hrect(y0=j - 0.5, y1=j + 0.5, fillcolor=style.WASH, line_width=0, layer="below", row=1, col="all")
    figure.update_yaxes(tickvals=list(range(len(places))), ticktext=places, range=[len(places) - 0.5, -0.5],
                        showgrid=False, ticks="", showline=False)
    style.heading(figure, "all bytes over all time")
    style.heading(figure, "by the busiest channel", col=2)
    return style.note(figure, frame, "95 % intervals: over seeds; on traces over parts of the run")


def _place(workload: str, trace: str | float, over: str) -> str:
    name = workload if not isinstance(trace, str) else trace.split("_")[0].capitalize()
    return f"<b>{name}</b><br>over {over}"


def settled(frame: pd.DataFrame) -> go.Figure:
    """M1 of a run's later half by the run's length, until its drift is within its noise; paged's whole run, too."""
    figure = style.sheet("How long a run must be", 660, legend=True, bottom=152)
    ends = []
    for policy in style.policies(frame):
        cells = frame[frame["allocator"] == policy].sort_values("requests_count")
        look = POLICIES[policy].colour
        if policy == "paged":
            figure.add_scatter(x=cells["requests_count"].tolist(), y=cells["m1_whole_frac"].round(6).tolist(),
                               mode="lines", line={"color": look, "width": 2, "dash": "8px,5px"}, showlegend=False,
                               hovertemplate="paged, whole run: %{y:.4f}<extra></extra>")
        figure.add_scatter(x=cells["requests_count"].tolist(), y=cells["m1_row_hit_frac"].round(6).tolist(),
                           mode="lines+markers", name=policy, showlegend=False, marker=style.marker(policy, 12),
                           line={"color": look, "width": 3, "dash": "3px,4px" if policy == "random" else "solid"},
                           hovertemplate=f"{policy}, later half: %{{y:.4f}}<extra></extra>")
        ends.append((policy, cells["requests_count"].iloc[-1], cells["m1_row_hit_frac"].iloc[-1]))
        done = cells[cells["settled"] == "yes"].head(1)
        figure.add_scatter(x=done["requests_count"].tolist(), y=done["m1_row_hit_frac"].round(6).tolist(),
                           mode="markers", showlegend=False, marker={"symbol": "circle-open", "size": 26, "color": look,
                                                                     "line": {"width": 2.5}},
                           hovertemplate=f"{policy} has settled<extra></extra>")
    counts = sorted(frame["requests_count"].unique())
    octave = math.log10(2)
    figure.update_xaxes(title_text="length of the run (requests)", type="log", tickvals=counts,
                        ticktext=[f"{n:,}" for n in counts],
                        range=[math.log10(counts[0]) - 0.25 * octave,
                               math.log10(counts[-1]) + (0.45 + 0.18 * len(counts)) * octave])
    low = math.floor(frame["m1_row_hit_frac"].min() * 20 - 0.5) / 20
    figure.update_yaxes(title_text="M1, row hits (fraction)", range=[low, 1])
    style.name_ends(figure, ends, "right")
    style.key(figure, [("later half", {"mode": "lines", "line": {"color": QUIET, "width": 3}}),
                       ("whole run, paged", {"mode": "lines", "line": {"color": POLICIES["paged"].colour, "width": 2,
                                                                       "dash": "8px,5px"}}),
                       ("settled", {"mode": "markers", "marker": {"symbol": "circle-open", "size": 20, "color": INK,
                                                                  "line": {"width": 2}}})])
    return style.note(figure, frame, "settled: the 95 % interval of the later half's slope holds zero",
                      "the axis does not start at zero")


def validation(frame: pd.DataFrame) -> go.Figure:
    """Left M1 beside Ramulator's hit fraction; right the gain as M3 claims it, as AttAcc measured it, and in cycles."""
    figure = style.sheet("Two outside checks of the model", 690, cols=2, legend=2, headings=True,
                         horizontal_spacing=0.14, column_widths=[0.52, 0.48])
    hits = frame[(frame["against"] == "ramulator") & (frame["origin"] == "published")]
    hits = hits.sort_values(["allocator", "seq_id"])
    low = math.floor(hits[["m1_row_hit_frac", "hit_frac"]].min(axis=None) * 20) / 20
    figure.add_scatter(x=[low, 1], y=[low, 1], mode="lines", line={"color": INK, "width": 1}, showlegend=False,
                       hoverinfo="skip", row=1, col=1)
    for policy in style.policies(hits):
        cells = hits[hits["allocator"] == policy]
        figure.add_scatter(x=cells["m1_row_hit_frac"].round(6).tolist(), y=cells["hit_frac"].round(6).tolist(),
                           name=policy, mode="markers", marker=style.ring(policy, 15), row=1, col=1,
                           hovertemplate=f"{policy}: %{{y:.4f}} of Ramulator's requests hit<extra></extra>")
    ways = frame[frame["against"] == "attacc"].sort_values(["seq_id", "way"])
    looks = {"M3": ("M3", "square", "#D55E00"), "cycles": ("cycles, charged once", "star", "#0072B2"),
             "AttAcc": ("AttAcc, charged twice", "circle-open", INK)}
    places = list(dict.fromkeys(ways["seq_id"].astype(str)))
    for way, (name, symbol, colour) in looks.items():
        cells = ways[ways["way"] == way]
        figure.add_scatter(x=cells["seq_id"].astype(str).tolist(), y=cells["gain_ratio"].round(5).tolist(), name=name,
                           mode="markers", row=1, col=2,
                           marker={"symbol": symbol, "size": 18, "color": colour},
                           hovertemplate=f"{name}: %{{y:.3f}}<extra></extra>")
    figure.update_xaxes(title_text="M1 (fraction)", range=[low, 1], row=1, col=1)
    figure.update_yaxes(title_text="hits at Ramulator (fraction)", range=[low, 1], row=1, col=1)
    figure.update_xaxes(title_text="sequence (number)", type="category", categoryarray=places, categoryorder="array",
                        range=[-0.5, len(places) - 0.5], row=1, col=2)
    figure.update_yaxes(title_text="paged / pim-aware (ratio)", row=1, col=2,
                        range=[1, ways["gain_ratio"].max() * 1.1])
    style.heading(figure, "row hits")
    style.heading(figure, "gain", col=2)
    figure.update_layout(legend={"font": {"size": style.NOTE}})
    return style.note(figure, frame, "the nine block tables of the study's checks; axes do not start at zero")
