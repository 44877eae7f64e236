"""KV-PIMple's figures of placement and bandwidth, and of what faster attention is worth: notebooks 10 to 12."""

import math
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from artifact.pim import geometry
from artifact.study import style
from artifact.study.style import INK, POLICIES, QUIET, SMALL, WASH

BLOCK_TOKENS = 16  # vLLM v0.2.7's default block, at which workloads and policies are compared
WORKLOADS = ("steady", "spec", "prefix", "longctx")
SWEPT = {"steady": "solid", "spec": "8px,5px"}  # the workloads swept over block sizes, and their dash
MAPS = {"host-cacheline": "cachelines interleaved", "host-centric": "rows interleaved",
        "pim-friendly": "a slab per channel"}
STUDY_MAP = "host-cacheline"
SHAPES = {"mqa-1kv": "1 head", "llama-gqa-8kv": "8 heads", "mha-32kv": "32 heads"}


def headline(frame: pd.DataFrame) -> go.Figure:
    """M1 and M3 against block size, a line for each policy and workload."""
    frame = _rows(frame, workload=list(SWEPT), address_map=[STUDY_MAP])
    figure = style.sheet("Row hits and bandwidth by block size", 900, rows=2, legend=True, shared_xaxes=True,
                         vertical_spacing=0.07)
    _log2_axis(figure, frame["block_tokens"].unique(), "block size (tokens)", before=1.45, after=0.35)
    figure.update_xaxes(title_text=None, row=1)
    low = min(0.4, _below(frame["m1_row_hit_frac"]))
    panels = (("m1_row_hit_frac", "M1, row hits (fraction)", [low, 1]),
              ("m3_bandwidth_gbps", "M3, bandwidth (GB/s)", [0, _above(frame["m3_bandwidth_gbps"])]))
    for row, (metric, title, limits) in enumerate(panels, 1):
        figure.update_yaxes(title_text=title, range=limits, row=row)
        ends = []
        for policy in style.policies(frame):
            for workload, dash in SWEPT.items():
                cells = frame[(frame["allocator"] == policy) & (frame["workload"] == workload)]
                ends += _line(figure, cells, "block_tokens", metric, policy, dash, row=row)[:1]
        style.name_ends(figure, _once(ends), "left", row=row)
    guides = (("vLLM's block ", BLOCK_TOKENS), ("a block is a region ", _region_tokens(frame)))
    for text, size in guides:
        if size in set(frame["block_tokens"]):
            figure.add_vline(x=size, line={"color": QUIET, "width": 1.5, "dash": "2px,3px"}, layer="below")
            figure.add_annotation(text=text, x=math.log10(size), y=low, row=1, col=1, showarrow=False, xanchor="right",
                                  yanchor="bottom", font={"size": style.NOTE, "color": QUIET})
    style.key(figure, [(workload, {"mode": "lines", "line": {"color": QUIET, "dash": dash, "width": 3}})
                       for workload, dash in SWEPT.items() if workload in set(frame["workload"])])
    return style.note(figure, frame, "the axis of M1 does not start at zero" if low > 0 else "")


def bandwidth(frame: pd.DataFrame) -> go.Figure:
    """M3 of each policy in each workload, at vLLM's block size."""
    frame = _rows(frame, block_tokens=[BLOCK_TOKENS], address_map=[STUDY_MAP])
    figure = style.sheet(f"Bandwidth by workload, blocks of {BLOCK_TOKENS} tokens", 640, legend=True)
    found = [name for name in WORKLOADS if name in set(frame["workload"])]
    ideal = _ideal_gbps(frame)
    _bars(figure, frame, "workload", found, "m3_bandwidth_gbps", "{:,.0f}", top=ideal)
    figure.update_xaxes(title_text="workload")
    figure.update_yaxes(title_text="M3, bandwidth (GB/s)")
    if ideal:
        figure.add_hline(y=ideal, line={"color": INK, "width": 2, "dash": "8px,5px"})
        figure.add_annotation(text=f"ideal: every command hits, in every bank ({ideal:,.0f})", xref="paper", x=0,
                              y=ideal, xanchor="left", xshift=8, yanchor="bottom", showarrow=False,
                              font={"size": SMALL})
    return style.note(figure, frame)


def heatmap(frame: pd.DataFrame) -> go.Figure:
    """M1 of paged by prompt length and block size, a number in each cell."""
    frame = _rows(frame, allocator=["paged"])
    at = ["prompt_tokens", "block_tokens"]
    cells = style.ours(frame).pivot(index=at[0], columns=at[1], values="m1_row_hit_frac")
    printed = style.published(frame).set_index(at)["m1_row_hit_frac"].to_dict()
    text = cells.map("{:.3f}".format, na_action="ignore").astype(object).fillna("")
    for (prompt, size), value in printed.items():
        text.loc[prompt, size] += f"<br>({value:.3f})"
    figure = style.sheet("Paged: row hits by prompt length and block size", 690, left=130)
    figure.add_heatmap(
        z=cells.to_numpy().tolist(), x=[f"{size:.0f}" for size in cells.columns],
        y=[f"{prompt:,.0f}" for prompt in cells.index], text=text.to_numpy().tolist(), **style.heat("M1 (fraction)"),
        zmin=_below(frame["m1_row_hit_frac"]), zmax=1, hovertemplate="M1 %{z:.4f}<extra></extra>")
    figure.update_xaxes(title_text="block size (tokens)", type="category", showgrid=False, ticks="", showline=False)
    figure.update_yaxes(title_text="prompt (tokens)", type="category", showgrid=False, ticks="", showline=False)
    return style.note(figure, frame, published_as="in brackets")


def run_length(frame: pd.DataFrame) -> go.Figure:
    """M1 against the number of requests a run serves."""
    frame = _rows(frame, workload=["steady"], block_tokens=[BLOCK_TOKENS], address_map=[STUDY_MAP])
    figure = style.sheet("Row hits by length of the run", 620, legend=True)
    counts = style.ours(frame)["requests_count"].unique()
    _log2_axis(figure, counts, "run length (requests)", before=0.4, after=1.9)
    low = math.floor((frame["m1_row_hit_frac"].min() - 0.02) * 20) / 20
    figure.update_yaxes(title_text="M1, row hits (fraction)", range=[low, 1])
    ends = []
    for policy in style.policies(frame):
        dash = "3px,4px" if policy == "random" else "solid"
        cells = frame[frame["allocator"] == policy]
        ends += _line(figure, cells, "requests_count", "m1_row_hit_frac", policy, dash)[-1:]
    style.name_ends(figure, ends, "right")
    return style.note(figure, frame, "the axis does not start at zero" if low > 0 else "")


def busiest_channel(frame: pd.DataFrame) -> go.Figure:
    """M3 for each address map, averaged over the channels and by the busiest one."""
    frame = _rows(frame, address_map=list(MAPS))
    names, maps = style.policies(frame), [name for name in MAPS if name in set(frame["address_map"])]
    figure = style.sheet("Bandwidth by address map", 700, cols=2, legend=True,
                         headings=True, left=235, shared_yaxes=True, horizontal_spacing=0.05)
    top = frame[["m3_bandwidth_gbps", "m3_busiest_gbps"]].max(axis=None) * 1.28
    thick = 0.8 / len(names)
    for col, metric in enumerate(("m3_bandwidth_gbps", "m3_busiest_gbps"), 1):
        for i, policy in enumerate(names):
            cells = style.ours(frame[frame["allocator"] == policy]).set_index("address_map")[metric].reindex(maps)
            figure.add_bar(orientation="h", x=cells.tolist(), y=_places(len(maps), i, len(names), thick),
                           width=thick * 0.86, marker=style.fill(policy), name=policy, showlegend=col == 1,
                           text=[f" {value:,.0f}" for value in cells], textposition="outside", textfont={"size": SMALL},
                           cliponaxis=False, row=1, col=col, hovertemplate=f"{policy}: %{{x:,.1f}} GB/s<extra></extra>")
        figure.update_xaxes(title_text="M3 (GB/s)", range=[0, top], nticks=4, row=1, col=col)
    figure.update_yaxes(tickvals=list(range(len(maps))), ticktext=[f"<b>{name}</b><br>{MAPS[name]}" for name in maps],
                        range=[len(maps) - 0.5, -0.5], showgrid=False, ticks="")
    figure.update_layout(barmode="overlay")
    style.heading(figure, "mean over channels, idle ones too")
    style.heading(figure, "busiest channel: it ends the step", col=2)
    return style.note(figure, frame)


def gain(frame: pd.DataFrame) -> go.Figure:
    """M3 over that of paged, as the mean of rates and as all bytes over all time, and the mean in cycles."""
    frame = _rows(frame, block_tokens=[BLOCK_TOKENS], address_map=[STUDY_MAP])
    found = [name for name in WORKLOADS if name in set(frame["workload"])]
    names = style.policies(frame)
    figure = style.sheet(f"Gain over paged, counted in three ways, blocks of {BLOCK_TOKENS} tokens", 660, legend=True,
                         left=130)
    ways = {"gain_mean_ratio": "mean of rates (the study's)", "gain_total_ratio": "all bytes over all time",
            "gain_cycles_mean_ratio": "mean of rates, in cycles"}
    symbols = ["circle", "diamond-tall", "star"]
    for i, policy in enumerate(names):
        look = POLICIES[policy]
        cells = frame[frame["allocator"] == policy].set_index("workload")[list(ways)].reindex(found)
        for y, values in zip(_places(len(found), i, len(names), 0.36), cells.to_numpy(), strict=True):
            figure.add_scatter(x=[min(values), max(values)], y=[y, y], mode="lines", showlegend=False,
                               line={"color": look.colour, "width": 4}, hoverinfo="skip")
            figure.add_scatter(x=list(values), y=[y] * 3, mode="markers", showlegend=False, text=list(ways.values()),
                               marker=style.marker(policy, 17, symbols),
                               hovertemplate=f"{policy}, %{{text}}: %{{x:.3f}}<extra></extra>")
            if not math.isnan(values[0]):
                text = f"<b>{policy}</b>  {values[0]:.2f} → {values[1]:.2f}, cycles {values[2]:.2f}"
                figure.add_annotation(x=max(values), y=y, xanchor="left", xshift=16, showarrow=False, text=text,
                                      font={"size": SMALL, "color": style.legible(look.colour)})
    figure.add_vline(x=1, line={"color": INK, "width": 2})
    least, most = frame[list(ways)].min(axis=None), frame[list(ways)].max(axis=None)
    width = max(most, 1.2) - min(least, 1)
    figure.update_xaxes(title_text="bandwidth relative to paged (ratio, 1 = no gain)", nticks=7,
                        range=[min(least, 1) - 0.04 * width, max(most, 1.2) + 0.85 * width])
    figure.update_yaxes(tickvals=list(range(len(found))), ticktext=[f"<b>{name}</b>" for name in found],
                        range=[len(found) - 0.5, -0.5], showgrid=False, ticks="")
    style.key(figure, [(way, {"mode": "markers", "marker": {"symbol": symbol, "size": 16, "color": QUIET}})
                       for way, symbol in zip(ways.values(), symbols, strict=True)])
    return style.note(figure, frame)


def throughput(frame: pd.DataFrame) -> go.Figure:
    """Tokens per second and step time against attention's share of a paged step."""
    figure = style.sheet("What faster attention is worth to the whole step", 600, cols=2, horizontal_spacing=0.14)
    shares = frame["attention_share_frac"]
    figure.update_xaxes(title_text="attention's share (fraction)", tickvals=[0, 0.25, 0.5, 0.75, 1],
                        range=[0, shares.max() * 1.52])
    frame = frame.assign(step_time_ms=frame["step_time_us"] / 1e3)
    slow = frame["step_time_ms"]
    figure.update_yaxes(title_text="throughput (tokens/s)", range=[0, _above(frame["throughput_tokens_per_s"])], col=1)
    figure.update_yaxes(title_text="step time (ms)", type="log", col=2,
                        tickvals=[digit * 10**power for power in range(-3, 7) for digit in (1, 2, 5)],
                        range=[math.log10(slow.min()) - 0.12, math.log10(slow.max()) + 0.05])
    for col, metric in enumerate(("throughput_tokens_per_s", "step_time_ms"), 1):
        ends = []
        for policy in style.policies(frame):
            cells = frame[frame["allocator"] == policy]
            ends += _line(figure, cells, "attention_share_frac", metric, policy, "solid", col=col)[-1:]
        style.name_ends(figure, ends, "right", col=col)
    return style.note(figure, frame, "attention's share is that of the paged step; its rest is the same for all; step "
                                     "time on a logarithmic axis")


def traces(frame: pd.DataFrame) -> go.Figure:
    """M1 and M3 of each policy on real traces."""
    figure = style.sheet("Row hits and bandwidth on real traces", 820, rows=2, legend=True, shared_xaxes=True,
                         vertical_spacing=0.09)
    found = sorted(frame["trace"].unique())
    _bars(figure, frame, "trace", found, "m1_row_hit_frac", "{:.3f}", row=1)
    _bars(figure, frame, "trace", found, "m3_bandwidth_gbps", "{:,.0f}", row=2)
    figure.update_xaxes(title_text="trace", row=2)
    figure.update_yaxes(title_text="M1, row hits (fraction)", row=1)
    figure.update_yaxes(title_text="M3, bandwidth (GB/s)", row=2)
    return style.note(figure, frame)


def kvheads(frame: pd.DataFrame) -> go.Figure:
    """M1 of each policy by model shape, fewest KV heads first; the gain in M3 under each name."""
    frame = frame[(frame["sweep"] == "kvheads") & (frame["workload"] == "steady")]
    found = [name for name in SHAPES if name in set(frame["model"])]
    figure = style.sheet("Row hits by number of KV heads", 640, legend=True)
    _bars(figure, frame, "model", found, "m1_row_hit_frac", "{:.3f}")
    rates = frame.set_index(["model", "allocator"])["m3_bandwidth_gbps"]
    gains = [rates[name, "pim-aware"] / rates[name, "paged"] for name in found]
    figure.update_xaxes(ticktext=[f"<b>{name}</b>, {SHAPES[name]}<br>pim-aware over paged: {gain:.2f}"
                                  for name, gain in zip(found, gains, strict=True)], title_text=None)
    figure.update_yaxes(title_text="M1, row hits (fraction)")
    return style.note(figure, frame, "below each name the ratio of M3")


def placement(frame: pd.DataFrame) -> go.Figure:
    """Adjacent blocks, blocks in one region, and regions touched: no DRAM model needed."""
    frame = _rows(frame, block_tokens=[BLOCK_TOKENS])
    runs = sorted({(WORKLOADS.index(w), n) for w, n in zip(frame["workload"], frame["requests_count"], strict=True)})
    names = style.policies(frame)
    figure = style.sheet("Where a sequence's blocks lie", 330 + 130 * len(runs), cols=3, legend=True, headings=True,
                         left=190, shared_yaxes=True, horizontal_spacing=0.07)
    panels = (("block_adjacency_frac", "adjacent", "consecutive blocks<br>(fraction)"),
              ("same_region_frac", "in the same region", "consecutive blocks<br>(fraction)"),
              ("region_spread", "regions touched / needed", "spread<br>(ratio, 1 = fewest)"))
    for col, (metric, title, unit) in enumerate(panels, 1):
        style.heading(figure, title, col=col)
        if metric == "region_spread":
            figure.update_xaxes(title_text=unit, range=[0.6, _above(frame[metric])], tick0=1, dtick=1, row=1, col=col)
        else:
            figure.update_xaxes(title_text=unit, range=[-0.05, 1.05], tickvals=[0, 0.25, 0.5, 0.75, 1], row=1, col=col)
        for i, policy in enumerate(names):
            cells = frame[frame["allocator"] == policy].set_index(["workload", "requests_count"])[metric]
            figure.add_scatter(x=[cells.get((WORKLOADS[w], n), math.nan) for w, n in runs], mode="markers", name=policy,
                               y=_places(len(runs), i, len(names), 0.2), showlegend=col == 1, row=1, col=col,
                               marker=style.marker(policy, 16), hovertemplate=f"{policy}: %{{x:.4f}}<extra></extra>")
    for j in range(0, len(runs), 2):
        figure.add_hrect(y0=j - 0.5, y1=j + 0.5, fillcolor=WASH, line_width=0, layer="below", row=1, col="all")
    figure.update_yaxes(tickvals=list(range(len(runs))), range=[len(runs) - 0.5, -0.5], showgrid=False, ticks="",
                        ticktext=[f"<b>{WORKLOADS[w]}</b><br>{n:,} requests" for w, n in runs], showline=False)
    return style.note(figure, frame)


def placement_map(frame: pd.DataFrame) -> go.Figure:
    """One sequence's blocks in reading order, each at the region it lies in: paged beside pim-aware."""
    frame = _rows(frame, allocator=["paged", "pim-aware"], block_tokens=[BLOCK_TOKENS])
    names = style.policies(frame)
    figure = style.sheet("One sequence's blocks, in the order attention reads them", 640, cols=len(names),
                         headings=True, shared_yaxes=True, horizontal_spacing=0.06)
    for col, policy in enumerate(names, 1):
        cells = frame[frame["allocator"] == policy].sort_values("order_index")
        blocks_on_regions(figure, cells, policy, row=1, col=col)
        figure.update_xaxes(title_text="position in the sequence (blocks)", range=[0, len(cells) + 1], row=1,
                            col=col)
        style.heading(figure, f"<b>{policy}</b>: {touched(cells)}", col=col)
    top = _above(frame["region"])
    figure.update_yaxes(range=[-0.03 * top, top])
    figure.update_yaxes(title_text="region (row index in every bank)", col=1)
    return style.note(figure, frame, "each change of height opens another row in every bank")


def blocks_on_regions(figure: go.Figure, cells: pd.DataFrame, policy: str, **place: int) -> None:
    """Draws a block table, in reading order: a marker a block, at the height of its region."""
    figure.add_scatter(x=(cells["order_index"] + 1).tolist(), y=cells["region"].tolist(), mode="lines+markers",
                       showlegend=False, marker=style.marker(policy, 12),
                       line={"color": POLICIES[policy].colour, "width": 1.2}, **place,
                       customdata=cells[["block", "slot"]].to_numpy().tolist(),
                       hovertemplate="block %{customdata[0]}: region %{y}, slot %{customdata[1]}<extra></extra>")


def touched(cells: pd.DataFrame) -> str:
    """How many regions the blocks of one sequence touch, and how many they would need."""
    needed = math.ceil(len(cells) / cells["blocks_per_region"].iloc[0])
    return f"{cells['region'].nunique()} regions, {needed} needed"


def _rows(frame: pd.DataFrame, **allowed: Sequence) -> pd.DataFrame:
    """The rows whose columns hold one of the values allowed; a column that is not there allows all."""
    style.ours(frame)
    for column, values in allowed.items():
        if column in frame:
            frame = frame[frame[column].isin(values)]
            if (frame["origin"] == "published").all():
                raise ValueError(f"no rows of this artifact with {column} in: {', '.join(map(str, values))}")
    return frame


def _line(figure: go.Figure, cells: pd.DataFrame, x: str, y: str, policy: str, dash: str, row: int = 1,
          col: int = 1) -> list[tuple[str, float, float]]:
    """A policy's line with its markers, and rings where numbers are published; returns (policy, x, y) of its points."""
    cells = cells.sort_values(x)
    mine, theirs = cells[cells["origin"] != "published"], style.published(cells)
    figure.add_scatter(x=mine[x].tolist(), y=mine[y].tolist(), mode="lines+markers", name=policy, showlegend=False,
                       line={"color": POLICIES[policy].colour, "dash": dash, "width": 3}, marker=style.marker(policy),
                       row=row, col=col, hovertemplate=f"{policy}: %{{y:.5g}}<extra></extra>")
    if not theirs.empty:
        figure.add_scatter(x=theirs[x].tolist(), y=theirs[y].tolist(), mode="markers", showlegend=False,
                           marker=style.ring(policy), row=row, col=col,
                           hovertemplate=f"{policy}, published: %{{y:.8g}}<extra></extra>")
    return [(policy, *point) for point in zip(mine[x], mine[y], strict=True)]


def _once(ends: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """The first entry of each policy."""
    return list({end[0]: end for end in reversed(ends)}.values())


def _bars(figure: go.Figure, frame: pd.DataFrame, column: str, groups: Sequence[str], metric: str, form: str,
          row: int = 1, top: float | None = None) -> None:
    """A group of bars for each of `groups`, a bar a policy with its number above; rings where numbers are published."""
    names = style.policies(frame)
    thick = 0.86 / len(names)
    for i, policy in enumerate(names):
        own = frame[frame["allocator"] == policy]
        cells = style.ours(own).set_index(column)[metric].reindex(groups)
        printed = style.published(own).set_index(column)[metric].reindex(groups)
        places = _places(len(groups), i, len(names), thick)
        figure.add_bar(x=places, y=cells.tolist(), width=thick * 0.86, marker=style.fill(policy), name=policy,
                       showlegend=row == 1, row=row, col=1, hovertemplate=f"{policy}: %{{y:.5g}}<extra></extra>")
        if printed.notna().any():
            figure.add_scatter(x=places, y=printed.tolist(), mode="markers", showlegend=False, row=row, col=1,
                               marker=style.ring(None, 13),
                               hovertemplate=f"{policy}, published: %{{y:.8g}}<extra></extra>")
        for x, value, ring in zip(places, cells, printed, strict=True):
            if not math.isnan(value):
                figure.add_annotation(x=x, y=value, text=form.format(value), showarrow=False, yanchor="bottom",
                                      yshift=2 if math.isnan(ring) else 8, font={"size": SMALL}, row=row, col=1)
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(tickvals=list(range(len(groups))), ticktext=list(groups), showgrid=False,
                        range=[-0.5, len(groups) - 0.5])
    if metric.endswith("_frac"):
        figure.update_yaxes(range=[0, 1.12], tickvals=[0, 0.2, 0.4, 0.6, 0.8, 1], row=row)
    else:
        figure.update_yaxes(range=[0, _above(max(frame[metric].max(), top or 0) * 1.1)], row=row)


def _places(groups: int, i: int, of: int, step: float) -> list[float]:
    """Where member `i` of `of` lies in each of the groups 0, 1, 2…"""
    return [j + (i - (of - 1) / 2) * step for j in range(groups)]


def _log2_axis(figure: go.Figure, values: Sequence[float], title: str, before: float, after: float) -> None:
    """A logarithmic x axis whose ticks are the values; room before and after in octaves."""
    octave = math.log10(2)
    values = sorted(map(int, values))
    figure.update_xaxes(title_text=title, type="log", tickvals=values, ticktext=[f"{value:,}" for value in values],
                        range=[math.log10(values[0]) - before * octave, math.log10(values[-1]) + after * octave])


def _above(values: pd.Series | float) -> float:
    """A round number above all values, for the upper end of an axis."""
    most = float(pd.Series(values).max())
    step = 10 ** math.floor(math.log10(most)) / 2 if most > 0 else 1
    return math.ceil(most * 1.02 / step) * step


def _below(values: pd.Series) -> float:
    """The tenth below all values, for the lower end of an axis of fractions."""
    return math.floor(float(values.min()) * 10) / 10


def _device(frame: pd.DataFrame) -> tuple[geometry.Dram, geometry.Shape] | None:
    """The memory and model that the rows name; None when they name none or one of a user's own."""
    try:
        (memory,), (shape,) = set(frame["dram"].dropna()), set(frame["model"].dropna())
        return geometry.dram(memory), geometry.shape(shape)
    except (KeyError, ValueError):
        return None


def _region_tokens(frame: pd.DataFrame) -> int | None:
    device = _device(frame)
    return device and geometry.derived_block_tokens(device[0], device[1].kv_bytes_per_token)


def _ideal_gbps(frame: pd.DataFrame) -> float | None:
    device = _device(frame)
    return device and device[0].ideal_gbps
