"""How every figure looks: one colour, marker and pattern per policy, type that survives half size, origin on each.

Colours are Okabe and Ito's, told apart by the colour-blind; markers and patterns tell policies apart in grey print.
What this artifact computed is filled, what others published is hollow.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots


class Look(NamedTuple):
    """The colour, marker symbol and bar pattern of one policy, predictor or method."""

    colour: str
    symbol: str
    pattern: str


POLICIES = {
    "paged": Look("#0072B2", "circle", ""),
    "pim-aware": Look("#D55E00", "square", "/"),
    "contiguous": Look("#009E73", "triangle-up", "."),
    "random": Look("#666666", "x", "x"),
    "vllm-v1": Look("#56B4E9", "triangle-down", "|"),
    "sglang": Look("#CC79A7", "pentagon", "-"),
    "vllm-v1-region": Look("#E69F00", "diamond", "\\"),
    "sglang-region": Look("#7A3E00", "hexagon", "+"),
}
PREDICTORS = {  # how a page writes "calibrated" is in SAID
    "last step": Look("#0072B2", "circle", ""),
    "calibrated": Look("#D55E00", "square", "/"),
    "no trend": Look("#E69F00", "diamond", "\\"),
    "fixed theta": Look("#CC79A7", "pentagon", "-"),
    "learned": Look("#009E73", "triangle-up", "."),
    "static frequency": Look("#56B4E9", "triangle-down", "|"),
    "random": Look("#666666", "x", "x"),
    "oracle": Look("#222222", "cross", "+"),
}
METHODS = {"quest": Look("#0072B2", "circle", ""), "infllm": Look("#009E73", "square", "/")}
MODES = {  # of attention
    "dense": Look("#222222", "cross", "+"),
    "dsa": Look("#0072B2", "circle", ""),
    "reuse": Look("#009E73", "triangle-up", "."),
    "union": Look("#D55E00", "square", "/"),
    "exact": Look("#CC79A7", "diamond", "\\"),
}
LOOKS = POLICIES | PREDICTORS | METHODS | MODES
SAID = {"calibrated": "EMA, calibrated", "no trend": "EMA, no trend", "fixed theta": "EMA, fixed θ",
        "quest": "Quest", "infllm": "InfLLM-v2", "dsa": "DSA", "reuse": "reuse, no repair", "union": "PRR, union",
        "exact": "PRR, exact"}
INK, QUIET, FAINT, WASH = "#222222", "#5A5A5A", "#DDDDDD", "#F1F1F1"
WIDTH, LEFT, RIGHT, BOTTOM = 940, 110, 30, 128  # px; as wide as a notebook is beside its file browser
TITLE, STRIP = 66, 34  # px; the title's height, and that of a legend or of panel headings below it
SIZE, SMALL, NOTE, NAME = 20, 18, 16, 25  # px; half of it is still read. NAME: from line to line of names
_SAID = {
    "measured": "measured on this machine", "recorded": "recorded earlier", "simulated": "simulated by this artifact",
    "modelled": "modelled by this artifact (closed form)", "published": "published by",
}

_AXIS = {
    "showgrid": True, "gridcolor": FAINT, "gridwidth": 1, "zeroline": False, "showline": True, "linecolor": QUIET,
    "ticks": "outside", "tickcolor": QUIET, "ticklen": 6, "tickfont": {"size": SMALL},
    "title": {"font": {"size": SIZE}, "standoff": 10}, "exponentformat": "none", "separatethousands": True,
}
HOUSE = go.layout.Template(layout={
    "font": {"family": "Arial, Helvetica, Liberation Sans, DejaVu Sans, sans-serif", "size": SMALL, "color": INK},
    "title": {"x": 0, "xref": "container", "pad": {"l": 24}, "y": 1, "yref": "container", "yanchor": "top",
              "font": {"size": 24}},
    "paper_bgcolor": "white", "plot_bgcolor": "white", "margin": {"l": LEFT, "r": RIGHT, "t": TITLE, "b": BOTTOM},
    "xaxis": _AXIS, "yaxis": _AXIS, "hoverlabel": {"font": {"size": 15}}, "hovermode": "closest",
    "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "font": {"size": SMALL},
               "itemsizing": "constant"},
    "bargap": 0.1,
})


def sheet(title: str, height: int, rows: int = 1, cols: int = 1, *, legend: int = False, headings: bool = False,
          left: int = LEFT, bottom: int = BOTTOM, **subplots: object) -> go.Figure:
    """An empty figure of `height` px with rows × cols panels, and room above for a legend (of so many lines) and for
    panels' headings."""
    figure = make_subplots(rows=rows, cols=cols, **subplots)
    top = TITLE + STRIP * (legend + headings)
    figure.update_layout(template=HOUSE, width=WIDTH, height=height,
                         margin={"l": left, "r": RIGHT, "t": top, "b": bottom},
                         title={"text": f"<b>{title}</b>", "pad": {"t": 22, "l": 24}},
                         legend={"y": 1 + headings * STRIP / (height - top - bottom)})
    return figure


def known(frame: pd.DataFrame, column: str, looks: Mapping[str, object]) -> list[str]:
    """The values of a frame's `column` in the order of `looks`; ValueError for one that is not among these."""
    found = set(frame[column])
    unknown = sorted(map(str, found - set(looks)))
    if unknown:
        raise ValueError(f"{column} {unknown[0]!r} has no colour; allowed: {', '.join(looks)}")
    return [name for name in looks if name in found]


def policies(frame: pd.DataFrame) -> list[str]:
    """The frame's allocators in the house's order; ValueError for one that has no colour."""
    return known(frame, "allocator", POLICIES)


def ours(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that this artifact computed; ValueError when there are none."""
    rows = frame[frame["origin"] != "published"]
    if rows.empty:
        raise ValueError("every row is published; a figure needs rows of this artifact too")
    return rows


def published(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that others published."""
    return frame[frame["origin"] == "published"]


def predictors(frame: pd.DataFrame) -> list[str]:
    """The frame's predictors in the house's order; ValueError for one that has no colour."""
    return known(frame, "predictor", PREDICTORS)


def said(name: str) -> str:
    """A predictor's or method's name as a page writes it."""
    return SAID.get(name, name)


def short(value: float) -> str:
    """A value to two digits, never with an exponent: 0.077, 3.9, 130."""
    return f"{value:.2g}" if abs(value) < 99.5 else f"{float(f'{value:.2g}'):,.0f}"


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    light = []
    for colour in (one, other):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                  for c in (int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5))]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    return max(light) / min(light)


def legible(colour: str, ratio: float = 4.5) -> str:
    """`colour`, darkened as little as text on white needs for a contrast of `ratio` (WCAG AA for small text: 4.5)."""
    parts = [int(colour[i:i + 2], 16) for i in (1, 3, 5)]
    darker = ("#{:02X}{:02X}{:02X}".format(*(round(part * share / 100) for part in parts))
              for share in range(100, -1, -1))
    return next(dark for dark in darker if contrast(dark, "#FFFFFF") >= ratio)


def marker(policy: str, size: int = 11, symbol: str | Sequence[str] | None = None) -> dict:
    """The filled marker of a policy or predictor: what this artifact computed. `symbol`: None = its own."""
    look = LOOKS[policy]
    symbol = look.symbol if symbol is None else symbol
    size += 3 if symbol == "triangle-up" else 0  # which covers less than the others of its size
    return {"symbol": symbol, "color": look.colour, "size": size, "line": {"color": "white", "width": 1}}


def ring(policy: str | None, size: int = 20) -> dict:
    """A hollow marker around the filled one: what others published."""
    colour, symbol = LOOKS[policy][:2] if policy else (INK, "circle")
    return {"symbol": f"{symbol}-open", "color": colour, "size": size, "line": {"color": colour, "width": 1.8}}


def fill(policy: str) -> dict:
    """The bar of a policy or predictor: colour, and a pattern for grey print."""
    look = LOOKS[policy]
    return {"color": look.colour, "line": {"color": look.colour, "width": 1.5},
            "pattern": {"shape": look.pattern, "fgcolor": "white", "bgcolor": look.colour, "size": 10,
                        "solidity": 0.25}}


def heat(title: str) -> dict:
    """The look of a heat map with a number in each cell, readable on every shade. `title`: what it shows, with unit."""
    return {"colorscale": [[0, "#FAFCFE"], [1, "#62A4CF"]], "texttemplate": "%{text}", "xgap": 3, "ygap": 3,
            "textfont": {"size": SIZE, "color": INK},
            "colorbar": {"title": {"text": title, "side": "right", "font": {"size": SMALL}}, "thickness": 16,
                         "outlinewidth": 0, "tickfont": {"size": SMALL}}}


def note(figure: go.Figure, frame: pd.DataFrame, *more: str, of: str = "", published_as: str = "hollow",
         by: str = "KV-PIMple") -> go.Figure:
    """The line at the foot: where the numbers come from and what else a reader must know; rings get a legend entry.

    `by`: whose the published numbers are.
    """
    said = [_SAID[origin] for origin in _SAID if origin in set(frame["origin"])]
    said = [f"{text} {by}" if text == _SAID["published"] else text for text in said]
    if not published(frame).empty and len(said) > 1:
        said[-1] = f"{published_as}: {said[-1]}"
        if published_as == "hollow":
            key(figure, [("published", {"mode": "markers", "marker": ring(None, 15)})])
    parts = [part for part in (of + "; ".join(said), *more) if part]
    text = "<br>".join(part[0].upper() + part[1:] + "." for part in parts)
    margin = figure.layout.margin
    figure.add_annotation(text=text, xref="paper", yref="paper", x=0, y=0, xanchor="left", yanchor="bottom",
                          align="left", showarrow=False, xshift=24 - margin.l, yshift=14 - margin.b,
                          font={"size": NOTE, "color": QUIET})
    return figure


def heading(figure: go.Figure, text: str, col: int = 1, row: int = 1) -> None:
    """A panel's own title, above its left edge."""
    axes = figure.get_subplot(row, col)
    figure.add_annotation(text=text, xref="paper", yref="paper", x=axes.xaxis.domain[0], y=axes.yaxis.domain[1],
                          xanchor="left", yanchor="bottom", showarrow=False, yshift=5, align="left",
                          font={"size": SMALL})


def key(figure: go.Figure, entries: Iterable[tuple[str, dict]]) -> None:
    """Legend entries that stand for no data: (name, properties of a scatter trace)."""
    for name, properties in entries:
        figure.add_scatter(x=[None], y=[None], name=name, showlegend=True, hoverinfo="skip", **properties)


def name_ends(figure: go.Figure, ends: Sequence[tuple[str, float, float]], side: str, row: int = 1,
              col: int = 1) -> None:
    """Writes the name beside the end of each line: (policy or predictor, x, y), apart where lines meet.

    The panel's y axis must have its range set (as exponents when it is logarithmic).
    """
    axes = figure.get_subplot(row, col)
    low, high = axes.yaxis.range
    inner = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    scale = inner * (axes.yaxis.domain[1] - axes.yaxis.domain[0]) / (high - low)
    points = sorted(((_on(axes.yaxis, y), _on(axes.xaxis, x), policy) for policy, x, y in ends))
    places = apart([(y - low) * scale for y, _, _ in points], NAME, NAME / 2)
    for (y, x, policy), place in zip(points, places, strict=True):
        figure.add_annotation(
            text=f"<b>{said(policy)}</b>", x=x, y=y, row=row, col=col, showarrow=False,
            yshift=place - (y - low) * scale, xanchor="right" if side == "left" else "left",
            xshift=-13 if side == "left" else 13, font={"size": SIZE, "color": legible(LOOKS[policy].colour)})


def apart(places: Sequence[float], gap: float, lowest: float = -math.inf) -> list[float]:
    """Ascending places moved as little as keeps neighbours `gap` apart: those that would touch spread about their mean.

    None ends below `lowest`.
    """
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and (_middle(groups[-1]) - _middle(groups[-2])
                                   < gap * (len(groups[-1]) + len(groups[-2])) / 2):
            groups[-2:] = [groups[-2] + groups[-1]]
    spread = [_middle(group) + gap * (i - (len(group) - 1) / 2) for group in groups for i in range(len(group))]
    return [max(place, lowest + gap * i) for i, place in enumerate(spread)]


def _middle(group: list[float]) -> float:
    return sum(group) / len(group)


def _on(axis: go.layout.XAxis | go.layout.YAxis, value: float) -> float:
    """A value as annotations count it: its exponent on a logarithmic axis."""
    return math.log10(value) if axis.type == "log" else value
