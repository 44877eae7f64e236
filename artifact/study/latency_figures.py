"""The figures of notebooks 01, 05 and 06: where a step's time goes, and what overlapping it can save.

A frame in, a figure out, as in `figures`, whose table lists them. What the paper's authors published is hollow; what
follows from it by the timeline is filled.
"""

import math
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from artifact.models import registry
from artifact.study import style
from artifact.study.prr_figures import BENCHMARKS
from artifact.study.style import INK, LOOKS, METHODS, QUIET, SMALL

PAPER = "the PRR paper's authors"
_COLOURS = {"before": "#999999", "qkv": "#999999", "selection": LOOKS["static frequency"].colour,
            "attention": LOOKS["last step"].colour, "speculation": LOOKS["calibrated"].colour,
            "repair": LOOKS["no trend"].colour, "after": "#DCDCDC", "ffn": "#DCDCDC"}
_EDGES = {"ffn": "#8A8A8A", "after": "#8A8A8A"}
_SAID = {"qkv": "projections", "ffn": "FFN", "before": "projections", "after": "FFN"}
PROFILES = {"figure2b": "Figure 2b", "nsight": "kernel profile"}
_BOUNDS = (("hidden", "attention takes no time", "solid", "circle"),
           ("overlap", "perfect overlap, same kernel", "8px,4px", "square"),
           ("fast", "no overlap, kernel twice as fast", "2px,4px", "triangle-up"))
_PARTS = (("sm", "SM", "circle", "#0072B2"), ("l2", "L2", "square", "#009E73"), ("dram", "DRAM", "diamond", "#D55E00"))
_RUNNING = {"dsa": "DSA, both cores", "union": "PRR, union", "exact": "PRR, exact"}
_LONG = 152  # px below a plot, for a note of three lines


def stages(frame: pd.DataFrame) -> go.Figure:
    """Figure 2b: stacked stages by context, a row of panels for each file of stage times."""
    profiles, methods = _profiles(frame), _methods(frame)
    figure = style.sheet("Where a decode step's time goes", min(900, 210 + 310 * len(profiles)), rows=len(profiles),
                         cols=len(methods), legend=True, headings=True, shared_xaxes=True, horizontal_spacing=0.11,
                         vertical_spacing=0.13, bottom=_LONG)
    shown = [stage for stage in ("qkv", "selection", "attention", "ffn") if stage in set(frame["stage"])]
    for row, name in enumerate(profiles, 1):
        for col, method in enumerate(methods, 1):
            cells = frame[(frame["profile"] == name) & (frame["method"] == method)].sort_values("context_tokens")
            per, unit = cells["per"].iloc[0], 1000 if cells["per"].iloc[0] == "step" else 1
            for stage in shown:
                part = cells[cells["stage"] == stage]
                if part.empty:
                    continue
                hollow = (part["origin"] == "published").all()
                figure.add_bar(x=_named(part["context_tokens"]), y=(part["time_us"] / unit).tolist(), showlegend=False,
                               marker=_bar(stage, hollow), row=row, col=col, width=0.74,
                               hovertemplate=f"{_SAID.get(stage, stage)}: %{{y:.2f}}<extra></extra>")
            style.heading(figure, f"<b>{style.said(method)}</b>, {PROFILES.get(name, name)}", row=row, col=col)
            figure.update_yaxes(title_text=f"time of a {per} ({'ms' if unit == 1000 else 'µs'})", row=row, col=col)
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_xaxes(title_text="context (tokens)", row=len(profiles))
    figure.update_layout(barmode="stack")
    style.key(figure, [(_SAID.get(stage, stage), {"mode": "markers", "marker": {
        "symbol": "square", "size": 16, "color": _COLOURS[stage], "line": {"width": 1.5, "color": _edge(stage)}}})
        for stage in shown])
    return style.note(figure, frame, "Figure 2b: one step of all layers, its bars read off; the profile: kernels of "
                                     "one layer, nothing between them", by=PAPER)


def bounds(frame: pd.DataFrame) -> go.Figure:
    """The most that overlapping, hiding, or a faster kernel could give, by context."""
    profiles, methods = _profiles(frame), _methods(frame)
    figure = style.sheet("What could be saved at most", min(900, 250 + 290 * len(profiles)), rows=len(profiles),
                         cols=len(methods), legend=True, headings=True, shared_xaxes=True, shared_yaxes=True,
                         horizontal_spacing=0.05, vertical_spacing=0.12, bottom=_LONG)
    high = math.ceil(frame["hidden_ratio"].max() * 10) / 10 + 0.05
    for row, name in enumerate(profiles, 1):
        for col, method in enumerate(methods, 1):
            cells = frame[(frame["profile"] == name) & (frame["method"] == method)].sort_values("context_tokens")
            for bound, said, dash, symbol in _BOUNDS:
                values = cells[f"{bound}_ratio"]
                figure.add_scatter(
                    x=_named(cells["context_tokens"]), y=values.tolist(), mode="lines+markers", name=said,
                    showlegend=row == col == 1, row=row, col=col, hovertemplate=f"{said}: %{{y:.3f}}<extra></extra>",
                    marker={"symbol": symbol, "size": 12, "color": METHODS[method].colour},
                    line={"color": METHODS[method].colour, "width": 2.5, "dash": dash})
            style.heading(figure, f"<b>{style.said(method)}</b>, {PROFILES.get(name, name)}", row=row, col=col)
        figure.update_yaxes(title_text="speed-up (ratio)", row=row, col=1)
    figure.update_yaxes(range=[1, high])
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_xaxes(title_text="context (tokens)", row=len(profiles))
    return style.note(figure, frame, "over serial DSA with the same stage times; Amdahl's law, nothing missed, no "
                                     "contention", "the axis starts at one: no gain")


def utilization(frame: pd.DataFrame) -> go.Figure:
    """Figure 4 and Table 6: how far SMs, L2 and DRAM are used, by context at batch 1 and by batch at 128K."""
    methods = _methods(frame)
    figure = style.sheet("How far the GPU's parts are used", 770, rows=len(methods), cols=2, legend=True, headings=True,
                         shared_xaxes=True, shared_yaxes=True, horizontal_spacing=0.05, vertical_spacing=0.12)
    panels = (("profile", "context_tokens", "whole layer, batch 1"), ("6", "batch_count", "128K tokens in all"))
    for row, method in enumerate(methods, 1):
        for col, (table, across, said) in enumerate(panels, 1):
            cells = frame[(frame["table"].astype(str) == table) & (frame["method"] == method)].sort_values(across)
            names = _named(cells[across]) if col == 1 else [f"{count:g}" for count in cells[across]]
            for part, label, symbol, colour in _PARTS:
                figure.add_scatter(x=names, y=cells[f"{part}_frac"].tolist(), mode="lines+markers", name=label,
                                   showlegend=row == col == 1, row=row, col=col, line={"color": colour, "width": 1.5},
                                   marker={"symbol": f"{symbol}-open", "size": 13, "color": colour,
                                           "line": {"width": 2.2}},
                                   hovertemplate=f"{label}: %{{y:.4f}}<extra></extra>")
            figure.add_hline(y=0.4, line={"color": INK, "width": 1.5, "dash": "7px,4px"}, row=row, col=col)
            style.heading(figure, f"<b>{style.said(method)}</b>, {said}", row=row, col=col)
            figure.update_xaxes(title_text=(None, "context (tokens)", "batch (sequences)")[col * (row == len(methods))],
                                type="category", showgrid=False, row=row, col=col)
        figure.update_yaxes(title_text="of the peak (fraction)", row=row, col=1)
    figure.update_yaxes(range=[0, 0.52], tickvals=[0, 0.1, 0.2, 0.3, 0.4, 0.5])
    style.key(figure, [("0.4", {"mode": "lines", "line": {"color": INK, "width": 1.5, "dash": "7px,4px"}})])
    return style.note(figure, frame, "left: Figure 4 and the two contexts before it; right: Table 6", by=PAPER)


def teaser(frame: pd.DataFrame) -> go.Figure:
    """Figure 1: one step in serial, and by PRR."""
    return _timelines(frame, "One step, in turn and overlapped", 330, "Table 7, GLM-4-9B")


def budget(frame: pd.DataFrame) -> go.Figure:
    """Figure 5: one step with delta too small, too large, and as large as fits."""
    return _timelines(frame, "How much to speculate on", 590, "our recorded traces of a small model")


def tradeoff(frame: pd.DataFrame) -> go.Figure:
    """Speed-up against delta, a line per context; the budget's choice is marked."""
    methods = _methods(frame)
    figure = style.sheet("Speed-up by how much is speculated on", 640, cols=len(methods), headings=True, legend=True,
                         shared_yaxes=True, horizontal_spacing=0.05, bottom=_LONG)
    high = math.ceil(frame["speedup_ratio"].max() * 10) / 10
    contexts = sorted(frame["context_tokens"].unique())
    dashes = [("solid", "8px,4px", "2px,4px")[i % 3] for i in range(len(contexts))]
    for col, method in enumerate(methods, 1):
        colour = METHODS[method].colour
        for context, dash in zip(contexts, dashes, strict=True):
            cells = frame[(frame["method"] == method) & (frame["context_tokens"] == context)]
            cells = cells.sort_values("predicted_ratio")
            figure.add_scatter(x=cells["predicted_ratio"].tolist(), y=cells["speedup_ratio"].tolist(), mode="lines",
                               showlegend=False, row=1, col=col, line={"color": colour, "width": 2.5, "dash": dash},
                               hovertemplate=f"{context // 1024}K: %{{y:.3f}}<extra></extra>")
            right = cells[cells["chosen"]].iloc[0]
            figure.add_scatter(x=[right["predicted_ratio"]], y=[right["speedup_ratio"]], mode="markers", row=1, col=col,
                               showlegend=False, marker={"symbol": METHODS[method].symbol, "size": 15, "color": colour,
                                                         "line": {"color": "white", "width": 1.5}},
                               hovertemplate="the budget's choice: %{x:.2f}<extra></extra>")
        style.heading(figure, f"<b>{style.said(method)}</b>", col=col)
        figure.update_xaxes(title_text="|P| / |A| (ratio)", range=[0.45, 2.05], tickvals=[0.5, 1, 1.5, 2], row=1,
                            col=col)
    figure.update_yaxes(range=[1, high])
    figure.update_yaxes(title_text="speed-up over serial DSA (ratio)", col=1)
    style.key(figure, [*((f"{context // 1024}K tokens", {"mode": "lines", "line": {"color": QUIET, "width": 2.5,
                                                                                 "dash": dash}})
                         for context, dash in zip(contexts, dashes, strict=True)),
                       ("the budget's choice", {"mode": "markers", "marker": {"size": 13, "color": QUIET}})])
    return style.note(figure, frame, "stage times: Figure 2b; attention: as fast as Table 3's mean, all of it by |P|",
                      "coverage: our recorded traces of a small model; no contention")


def speedups(frame: pd.DataFrame) -> go.Figure:
    """Table 1's cells by model beside what the timeline gives from the two published sets of stage times."""
    methods = _methods(frame)
    found = set(frame["model"])
    models = [*(name for name in registry.PAPER if name in found), *sorted(found - set(registry.PAPER))]
    figure = style.sheet("PRR's speed-up: as printed, and what stage times allow", 250 + 290 * len(methods),
                         rows=len(methods), legend=True, headings=True, shared_xaxes=True, vertical_spacing=0.1,
                         bottom=_LONG)
    places = {model: i for i, model in enumerate(models)}
    contexts = sorted(frame["context_tokens"].dropna().unique())
    cells = frame[frame["benchmark"] != "average"].sort_values(["model", "profile", "context_tokens", "benchmark"])
    for row, method in enumerate(methods, 1):
        mine = cells[cells["method"] == method]
        printed = mine[mine["origin"] == "published"]
        benches = [name for name in BENCHMARKS if name in set(printed["benchmark"])]
        for model in models:
            part = printed[printed["model"] == model].set_index("benchmark")["speedup_ratio"].reindex(benches)
            figure.add_scatter(x=[places[model] - 0.28 + 0.07 * i for i in range(len(part))], y=part.tolist(),
                               mode="markers", showlegend=False, marker=style.ring(method, 12), text=benches, row=row,
                               col=1, hovertemplate="%{text}, printed: %{y:.2f}<extra></extra>")
        modelled = mine[mine["origin"] != "published"]
        for (model, profile), part in modelled.groupby(["model", "profile"], sort=False):
            ends = part.groupby("context_tokens")["speedup_ratio"].mean()
            looks = {"figure2b": (0.16, "square", INK), "nsight": (0.36, "diamond", LOOKS["calibrated"].colour)}
            shift, symbol, colour = looks.get(profile, (0.26, METHODS[method].symbol, METHODS[method].colour))
            figure.add_scatter(x=[places[model] + shift] * len(ends), y=ends.tolist(), mode="lines+markers",
                               showlegend=False, row=row, col=1, line={"color": colour, "width": 2},
                               marker={"symbol": symbol, "size": 11, "color": colour}, text=_named(ends.index),
                               hovertemplate=f"{PROFILES.get(profile, profile)}, %{{text}}: %{{y:.3f}}<extra></extra>")
        style.heading(figure, f"<b>{style.said(method)}</b>", row=row)
        figure.update_yaxes(title_text="speed-up (ratio)", range=[1, 1.75], row=row, col=1)
    figure.update_xaxes(tickvals=list(places.values()), ticktext=[_broken(model) for model in places],
                        range=[-0.5, len(models) - 0.5], showgrid=False, ticks="", tickangle=0)
    ends = f"{contexts[0] / 1024:.0f}K to {contexts[-1] / 1024:.0f}K" if contexts else ""
    style.key(figure, [(f"PRR, modelled from Figure 2b, {ends}", {"mode": "lines+markers", "marker": {
        "symbol": "square", "size": 11, "color": INK}, "line": {"color": INK, "width": 2}}),
        ("... kernel profile", {"mode": "lines+markers", "marker": {
            "symbol": "diamond", "size": 11, "color": LOOKS["calibrated"].colour},
            "line": {"color": LOOKS["calibrated"].colour, "width": 2}})])
    if set(frame["profile"]) - {*PROFILES, "Table 1"}:
        style.key(figure, [("... a GPU of our own", {"mode": "markers", "marker": {"size": 12, "color": QUIET}})])
    return style.note(figure, frame, "stage times are published of GLM-4-9B alone; hollow marks of a model: its five "
                                     "benchmarks in the paper's order", by=PAPER)


def baselines(frame: pd.DataFrame) -> go.Figure:
    """What PRR is to be compared with, at 128K tokens, from both published sets of stage times."""
    frame = frame[frame["context_tokens"] == 131072]
    if frame.empty:
        raise ValueError("no rows with context_tokens in: 131072")
    profiles, methods = _profiles(frame), _methods(frame)
    names = list(dict.fromkeys(frame.sort_values("order_index")["baseline"]))
    figure = style.sheet("What PRR has to be compared with", 900, rows=len(methods), cols=len(profiles), headings=True,
                         left=262, bottom=_LONG, shared_yaxes=True, shared_xaxes=True, horizontal_spacing=0.06,
                         vertical_spacing=0.08)
    most = frame["speedup_ratio"].max()
    for row, method in enumerate(methods, 1):
        for col, name in enumerate(profiles, 1):
            cells = frame[(frame["method"] == method) & (frame["profile"] == name)].set_index("baseline").reindex(names)
            colours = [LOOKS["calibrated"].colour if "PRR" in one and "size" not in one else METHODS[method].colour
                       for one in names]
            figure.add_bar(orientation="h", y=list(range(len(names))), x=cells["speedup_ratio"].tolist(), width=0.7,
                           marker={"color": colours}, showlegend=False, row=row, col=col,
                           hovertemplate="%{x:.3f}<extra></extra>")
            for i, value in enumerate(cells["speedup_ratio"]):
                figure.add_annotation(text=f"{value:.2f}", x=max(value, 1), y=i, xanchor="left", xshift=4,
                                      showarrow=False, font={"size": 15}, row=row, col=col)
            figure.add_vline(x=1, line={"color": INK, "width": 1.5}, row=row, col=col)
            style.heading(figure, f"<b>{style.said(method)}</b>, {PROFILES.get(name, name)}", row=row, col=col)
            figure.update_xaxes(range=[0, most * 1.14], tickvals=[0, 0.5, 1, 1.5], row=row, col=col)
        figure.update_yaxes(tickvals=list(range(len(names))), ticktext=names, range=[len(names) - 0.4, -0.6],
                            showgrid=False, ticks="", tickfont={"size": 15}, row=row)
    figure.update_xaxes(title_text="speed-up over serial DSA (ratio)", row=len(methods))
    return style.note(figure, frame, "S1 to S3: coverage of the paper's Tables 5 and 7; EMA, random and last step's: "
                                     "of our recorded traces", "no contention; the faster kernel: Table 3's mean")


def running(frame: pd.DataFrame) -> go.Figure:
    """DSA on two cores and PRR overlapped on them, over DSA on one thread: a line of marks per setting."""
    methods = _methods(frame)
    frame = frame[frame["run"] != "in turn"]
    keys = ["model", "context_tokens", "layers_count", "batch_count"]
    settings = sorted(set(frame[keys].itertuples(index=False, name=None)), key=lambda one: (*one[2:], *one[:2]))
    figure = style.sheet("Does PRR pay on this CPU?", 300 + 44 * len(settings), cols=len(methods), legend=True,
                         headings=True, shared_yaxes=True, horizontal_spacing=0.05, left=235, bottom=_LONG + 30)
    low, high = frame["one_ratio"].min(), frame["one_ratio"].max()
    for col, method in enumerate(methods, 1):
        cells = frame[frame["method"] == method].set_index(keys)
        for way, mode, ratio in (("DSA", "dsa", None), ("PRR, union", "union", 1), ("PRR, exact", "exact", 1)):
            part = cells[cells["way"] == way]
            part = (part if ratio is None else part[part["predicted_ratio"] == ratio]).sort_index()
            figure.add_scatter(
                x=part["one_ratio"].tolist(), y=[settings.index(key) for key in part.index], mode="markers", row=1,
                col=col, name=_RUNNING[mode], showlegend=col == 1, marker=style.marker(mode, 14),
                hovertemplate=f"{_RUNNING[mode]}: %{{x:.3f}}<extra></extra>")
        figure.add_vline(x=1, line={"color": INK, "width": 1.5}, row=1, col=col)
        style.heading(figure, f"<b>{style.said(method)}</b>", col=col)
        figure.update_xaxes(title_text="speed-up over DSA<br>on one thread (ratio)", row=1, col=col,
                            range=[min(0.95, low) - 0.08, max(1.05, high) + 0.08])
    names = [f"{model.partition('-')[0]}, {context / 1024:.0f}K" + (f", {layers} layers" if layers > 1 else "")
             + (f", batch {batch}" if batch > 1 else "") for model, context, layers, batch in settings]
    figure.update_yaxes(tickvals=list(range(len(settings))), ticktext=names, range=[len(settings) - 0.4, -0.6],
                        ticks="")
    return style.note(figure, frame, "by the threads' own CPU time, which leaves out what they wait; selection to the "
                                     "result, no FFN", "|P| = |A|; scores: our recorded traces of a small model")


def _timelines(frame: pd.DataFrame, title: str, height: int, coverage: str) -> go.Figure:
    """Ways to run one step below each other, each with its two streams. `coverage`: whose it is, for the foot."""
    ways = list(dict.fromkeys(frame.sort_values("order_index")["way"]))
    figure = style.sheet(title, height + 60, legend=True, left=150, bottom=_LONG)
    unit, name_of = (1000, "ms") if frame["end_us"].max() >= 2000 else (1, "µs")
    rows, labels = {}, []
    for way in ways:
        cells = frame[frame["way"] == way]
        for stream in [stream for stream in ("main", "side") if (cells["stream"] == stream).any()]:
            rows[way, stream] = len(labels) + 0.5 * ways.index(way)
            labels.append(rows[way, stream])
    for event in frame.sort_values(["order_index", "start_us", "stage"]).itertuples():
        figure.add_bar(orientation="h", y=[rows[event.way, event.stream]], base=[event.start_us / unit], width=0.8,
                       x=[(event.end_us - event.start_us) / unit], showlegend=False,
                       marker={"color": _COLOURS[event.stage], "line": {"width": 1.2, "color": _edge(event.stage)}},
                       hovertemplate=f"{event.stage}: {(event.end_us - event.start_us) / unit:.2f}<extra></extra>")
    last = max(rows.values())
    for way in ways:
        cells = frame[frame["way"] == way]
        end, top = cells["end_us"].max() / unit, rows[way, "main"]
        ratio = cells["predicted_ratio"].iloc[0]
        said = f"<b>{end:.1f} {name_of}</b>, {cells['speedup_ratio'].iloc[0]:.2f} ×"
        figure.add_annotation(text=said, x=end, y=top, xanchor="left", xshift=8, showarrow=False, font={"size": SMALL})
        name = f"<b>{way}</b>" + ("" if math.isnan(ratio) else f"<br>|P| = {ratio:.2f} |A|")
        middle = (top + max(place for (one, _), place in rows.items() if one == way)) / 2
        figure.add_annotation(text=name, x=0, xref="paper", y=middle, xanchor="right", xshift=-10, showarrow=False,
                              align="right", font={"size": SMALL})
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(range=[last + 0.7, -0.7], visible=False)
    most = frame["end_us"].max() / unit
    figure.update_xaxes(title_text=f"time ({name_of})", range=[0, most * 1.2], showgrid=True)
    present = [stage for stage in ("before", "selection", "attention", "speculation", "repair", "after")
               if stage in set(frame["stage"])]
    style.key(figure, [(_SAID.get(stage, stage), {"mode": "markers", "marker": {
        "symbol": "square", "size": 16, "color": _COLOURS[stage], "line": {"width": 1.2, "color": _edge(stage)}}})
        for stage in present])
    first = frame.iloc[0]
    return style.note(figure, frame, f"stage times: {PROFILES.get(first['profile'], first['profile'])}, "
                      f"{style.said(first['method'])}, {first['context_tokens'] / 1024:.0f}K tokens; PRR's kernel: "
                      "Table 3's mean", f"coverage: {coverage}; ×: speed-up over serial DSA; no contention")


def _bar(stage: str, hollow: bool) -> dict:
    fill = _COLOURS[stage]
    if not hollow:
        return {"color": fill, "line": {"width": 1.5, "color": _edge(stage)}}
    red, green, blue = (int(fill[i:i + 2], 16) for i in (1, 3, 5))
    return {"color": f"rgba({red},{green},{blue},0.25)", "line": {"width": 2, "color": _edge(stage)}}


def _edge(stage: str) -> str:
    return _EDGES.get(stage, _COLOURS[stage])


def _named(contexts: Sequence[float]) -> list[str]:
    return [f"{context / 1024:.0f}K" for context in contexts]


def _broken(model: str) -> str:
    head, _, tail = model.partition("-")
    return f"{head}<br>{tail}"


def _profiles(frame: pd.DataFrame) -> list[str]:
    """The files of stage times in the frame, those of the paper first."""
    found = sorted(set(frame["profile"]))
    return [*(name for name in PROFILES if name in found), *(name for name in found if name not in PROFILES)]


def _methods(frame: pd.DataFrame) -> list[str]:
    """The frame's selection methods in the house's order; ValueError for one that has no colour."""
    return style.known(frame, "method", METHODS)
