"""The figures of notebook 04: what the kernels compile to, the bytes they move, and how fast they are on GPUs.

A frame in, a figure out, as in `figures`, whose table lists them. Ours are filled, the paper's hollow.
"""

import math

import pandas as pd
import plotly.graph_objects as go

from artifact.study import style
from artifact.study.prr_figures import PAPER
from artifact.study.style import INK, QUIET, SMALL

_TARGETS = {"sm80": 99, "sm90": 99, "sm100": 99, "gfx942": 64}  # and the KiB of shared memory a program may have
_REGISTERS = 255  # a thread's at most, but for gfx942, where it is 512
_TYPES = {"fp32": style.Look("#0072B2", "circle", ""), "fp16": style.Look("#009E73", "triangle-up", "."),
          "bf16": style.Look("#D55E00", "square", "/")}
_KINDS = {"tensor core": "#0072B2", "multiply-add": "#56B4E9", "exp2 and the like": "#CC79A7",
          "global memory": "#D55E00", "shared memory": "#E69F00", "other": "#CCCCCC"}
_SIZES = {16: style.Look("#0072B2", "circle", ""), 32: style.Look("#56B4E9", "triangle-down", ""),
          64: style.Look("#009E73", "square", ""), 128: style.Look("#D55E00", "diamond", ""),
          256: style.Look("#666666", "cross", "")}  # tokens of a block


def compiled(frame: pd.DataFrame) -> go.Figure:
    """Registers and shared memory of the attention kernel by head size, a column of panels for each target."""
    frame = frame[(frame["kernel"] == "attend_blocks") & (frame["triton"] == frame["triton"].max())]
    targets = [name for name in _TARGETS if name in set(frame["target"])]
    if not targets:
        raise ValueError(f"no rows of attend_blocks with target in: {', '.join(_TARGETS)}")
    figure = style.sheet("What the attention kernel compiles to", 760, rows=2, cols=len(targets), legend=True,
                         headings=True, shared_xaxes=True, shared_yaxes=True, vertical_spacing=0.06,
                         horizontal_spacing=0.03, bottom=184)
    dims = sorted(frame["dim_count"].unique())
    for col, target in enumerate(targets, 1):
        style.heading(figure, f"<b>{target}</b>", col=col)
        for shift, (name, look) in enumerate(_TYPES.items()):
            cells = frame[(frame["target"] == target) & (frame["dtype"] == name)].sort_values("dim_count")
            if cells.empty:
                continue
            x = [dims.index(dim) + (shift - 1) * 0.24 for dim in cells["dim_count"]]
            figure.add_scatter(
                x=x, y=cells["registers_count_max"].tolist(), mode="markers", showlegend=False, row=1, col=col,
                marker={"symbol": look.symbol, "size": 10, "color": look.colour},
                error_y={"array": [0] * len(x), "color": look.colour, "thickness": 2, "width": 0, "symmetric": False,
                         "arrayminus": (cells["registers_count_max"] - cells["registers_count_min"]).tolist()},
                hovertemplate=f"{name}: at most %{{y}} registers<extra></extra>")
            figure.add_scatter(
                x=x, y=(cells["shared_bytes_max"] / 1024).tolist(), mode="markers", showlegend=False, row=2, col=col,
                marker={"symbol": look.symbol, "size": 10, "color": look.colour},
                hovertemplate=f"{name}: at most %{{y:.1f}} KiB<extra></extra>")
        for row, most in ((1, None if target == "gfx942" else _REGISTERS), (2, _TARGETS[target])):
            if most:
                figure.add_hline(y=most, line={"color": INK, "width": 1.5, "dash": "7px,4px"}, row=row, col=col)
        figure.update_xaxes(tickvals=list(range(len(dims))), ticktext=[str(dim) for dim in dims], tickangle=0,
                            range=[-0.6, len(dims) - 0.4], tickfont={"size": 15}, row=2, col=col)
        figure.update_xaxes(title_text="head (channels)", row=2, col=col)
    figure.update_yaxes(row=1, range=[0, 275])
    figure.update_yaxes(row=2, range=[0, 106])
    figure.update_yaxes(title_text="registers (count)", row=1, col=1)
    figure.update_yaxes(title_text="shared memory (KiB)", row=2, col=1)
    style.key(figure, [(name, {"mode": "markers", "marker": {"symbol": look.symbol, "size": 13, "color": look.colour}})
                       for name, look in _TYPES.items() if name in set(frame["dtype"])])
    style.key(figure, [("the most there is", {"mode": "lines", "line": {"color": INK, "width": 1.5,
                                                                        "dash": "7px,4px"}})])
    spilt = sorted(frame[frame["spills_bytes_max"] > 0]["target"].unique())
    return style.note(figure, frame, "marks are the most over block sizes and groups, lines reach down to the least",
                      (f"some shapes spill on {', '.join(spilt)}" if spilt else "no shape spills a register")
                      + ("; a thread of gfx942 has up to 512 registers" if "gfx942" in targets else ""),
                      of=f"Triton {frame['triton'].iloc[0]}, no GPU; ")


def instructions(frame: pd.DataFrame) -> go.Figure:
    """What the instructions of each kernel are, as shares of all."""
    frame = frame.assign(name=frame["kernel"] + ", " + frame["dtype"])
    frame = frame[frame["dtype"].isin(["bf16", "fp32"])]
    names = sorted(frame["name"].unique())
    figure = style.sheet("What the kernels' instructions are", 300 + 36 * len(names), legend=2, left=250)
    for kind, colour in _KINDS.items():
        cells = frame[frame["kind"] == kind].set_index("name").reindex(names)
        figure.add_bar(y=list(range(len(names))), x=cells["instructions_frac"].fillna(0).round(5).tolist(),
                       orientation="h", name=kind, marker={"color": colour, "line": {"color": "white", "width": 1}},
                       customdata=cells["instructions_count"].fillna(0).astype(int).tolist(),
                       hovertemplate=f"{kind}: %{{customdata}}, %{{x:.3f}} of all<extra></extra>")
    figure.update_layout(barmode="stack", legend={"traceorder": "normal"})
    figure.update_xaxes(title_text="share of the instructions in the code (fraction)", range=[0, 1])
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=names, range=[len(names) - 0.5, -0.5],
                        showgrid=False, ticks="")
    return style.note(figure, frame, "counted in the code once, however often a loop runs",
                      of=f"for {frame['target'].iloc[0]}, 128 channels, blocks of 64 tokens, 8 query heads a KV head; ")


def moved(frame: pd.DataFrame) -> go.Figure:
    """Bytes that each operator moves, relative to the fewest that any could."""
    shape = ["operator", "dtype", "group_count", "block_tokens", "missed_count", "listed_count"]
    whole = frame.sort_values(shape, kind="stable").drop_duplicates(shape)
    frame = whole[(whole["operator"] != "repair") | (whole["missed_count"] > 0)]
    nothing = whole.drop(frame.index)
    names = [_case(row) for _, row in frame.iterrows()]
    figure = style.sheet("Bytes moved against the fewest possible", 210 + 27 * len(names), left=370)
    y = list(range(len(names)))
    longest = max(frame["moved_ratio"])
    figure.add_bar(y=y, x=frame["moved_ratio"].round(5).tolist(), orientation="h", marker={"color": "#0072B2"},
                   customdata=(frame["fewest_bytes"] / 1024).round(1).tolist(), showlegend=False,
                   text=[f"{value:.2f}" for value in frame["moved_ratio"]], textposition="outside",
                   textfont={"size": 15}, cliponaxis=False,
                   hovertemplate="%{x:.3f} times %{customdata} KiB<extra></extra>")
    figure.add_vline(x=1, line={"color": INK, "width": 2, "dash": "7px,4px"})
    figure.update_xaxes(title_text="bytes asked for / fewest possible (ratio)", range=[0, 1.1 * longest])
    figure.update_yaxes(tickvals=y, ticktext=names, range=[len(names) - 0.5, -0.5], showgrid=False, ticks="",
                        tickfont={"size": 15})
    idle = "".join(f"; a repair of none of {row['listed_count']} blocks moves "
                   f"{row['moved_ratio'] * row['fewest_bytes'] / 1024:.0f} KiB" for _, row in nothing.iterrows())
    return style.note(figure, whole, f"each lane's loads and stores counted while the kernels are interpreted{idle}")


def table3(frame: pd.DataFrame) -> go.Figure:
    """Speed-up over FlashInfer's block-sparse attention by budget and block size: the paper's, and ours if recorded."""
    frame = frame[frame["study"] == "table3"]
    theirs = style.published(frame)
    ours = frame[(frame["origin"] != "published") & (frame["against"] == "BSR")]
    figure = style.sheet("Speed-up over FlashInfer's block-sparse attention", 680, legend=2, bottom=160)
    sizes = sorted(frame["block_tokens"].dropna().astype(int).unique())
    for part, hollow in ((theirs, True), (ours, False)):
        for size in sizes:
            cells = part[part["block_tokens"] == size].sort_values("budget_tokens")
            look = _SIZES[size]
            figure.add_scatter(x=cells["budget_tokens"].tolist(), y=cells["speedup_ratio"].tolist(),
                               mode="lines+markers", showlegend=False,
                               line={"color": look.colour, "width": 1.5 if hollow else 3},
                               marker={"symbol": f"{look.symbol}-open" if hollow else look.symbol, "size": 13,
                                       "color": look.colour, "line": {"color": look.colour, "width": 2}},
                               hovertemplate=f"blocks of {size}, %{{x}} tokens: %{{y:.2f}}<extra></extra>")
    budgets = sorted(frame["budget_tokens"].dropna().astype(int).unique())
    most = max(frame["speedup_ratio"].max(), 1.0)
    figure.update_xaxes(title_text="budget (tokens)", type="log", tickvals=budgets,
                        ticktext=[f"{budget:,}" for budget in budgets],
                        range=[math.log10(budgets[0]) - 0.06, math.log10(budgets[-1]) + 0.06])
    figure.update_yaxes(title_text="FlashInfer's time / the kernel's (ratio)", range=[0, 1.08 * most])
    figure.add_hline(y=1, line={"color": INK, "width": 1.5, "dash": "7px,4px"})
    if ours.empty:
        figure.add_annotation(text="<b>ours needs a GPU</b>", xref="paper",
                              yref="paper", x=0.98, y=0.06, xanchor="right", yanchor="bottom", showarrow=False,
                              font={"size": SMALL, "color": QUIET})
    style.key(figure, [(f"{size} tokens a block", {"mode": "markers", "marker": {
        "symbol": f"{_SIZES[size].symbol}-open", "size": 13, "color": _SIZES[size].colour,
        "line": {"color": _SIZES[size].colour, "width": 2}}}) for size in sizes])
    where = ", ".join(sorted(ours["device"].unique())) if len(ours) else ""
    return style.note(figure, frame[(frame["origin"] == "published") | (frame["against"] == "BSR")],
                      f"ours on {where}, without planning" if where else "ours: not measured here",
                      "theirs on an H100; whether planning is in their baseline is not printed", by=PAPER)


def _case(row):
    text = {"attend": "attend", "attend_groups": "attend, a state a block", "repair": "repair", "merge": "merge",
            "quest_scores": "Quest's scores", "infllm_scores": "InfLLM-v2's scores", "ema_step": "EMA",
            "topk": "top-k"}
    said = text[row["operator"]]
    if row["operator"] == "repair":
        said += f" of {row['missed_count']}"
    elif row["operator"] == "attend":
        said += f", {row['listed_count']} blocks"
    if row["operator"] in ("attend", "attend_groups", "repair"):
        said += f" of {row['block_tokens']}, group {row['group_count']}"
    return f"{said}, {row['dtype']}"
