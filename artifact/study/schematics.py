"""Drawn explanations: what a reader must have seen before the numbers mean anything.

Coordinates are pixels of the drawing area, y downwards. The numbers written into a drawing come from its frame.
"""

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from artifact.study import style
from artifact.study.style import INK, NOTE, POLICIES, QUIET, SIZE, SMALL

_OPEN, _CELL, _EDGE = "#3A3A3A", "#F4F4F4", "#BDBDBD"  # an open row, a closed one, outlines
_OTHERS = "#DCDCDC"  # blocks of other sequences
_ROWS, _LIT = 8, 3  # rows drawn of each bank, and which of them is open


class _Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float


def banks(frame: pd.DataFrame) -> go.Figure:
    """One all-bank command, one region, and a sequence's blocks as paged and as pim-aware place them.

    `frame`: one row of a memory's numbers: channels_count, banks_count (of a channel), row_bytes, token_bytes (KV of
    one token), block_tokens, tccd_ab_ns, trc_ns.
    """
    memory = frame.iloc[0]
    height = 630
    figure = style.sheet("What in-memory attention needs, and what an allocator gives it", height + 146, left=24,
                         bottom=80)
    figure.update_layout(margin={"r": 24})
    figure.update_xaxes(range=[0, style.WIDTH - 48], visible=False)
    figure.update_yaxes(range=[height, 0], visible=False)
    banks_at = _channel(figure, memory)
    _all_channels(figure, memory, banks_at)
    in_region = max(1, int(memory["row_bytes"] * memory["banks_count"] * memory["channels_count"]
                           // (memory["token_bytes"] * memory["block_tokens"])))
    slots = min(in_region, 8)
    scattered = [(row, (5 * row + 2) % slots, (3 * row) % slots + 1) for row in range(slots)]
    together = [(_LIT, slot, slot + 1) for slot in range(slots)]
    _shelves(figure, 0, "paged", "the block that was freed last", slots, scattered)
    _shelves(figure, 462, "pim-aware", "fill one region, then the next", slots, together)
    return style.note(figure, frame, "numbers: the order in which attention reads one sequence's blocks; grey: blocks "
                                     "of others; white: free", of="drawing; sizes and times: ")


def _channel(figure: go.Figure, memory: pd.Series) -> _Box:
    """A channel's banks side by side, one row index open in all of them."""
    count = int(memory["banks_count"])
    _text(figure, 0, 14, f"<b>One channel:</b> {count} banks work in step on one row", size=SIZE)
    left, top, tall = 74, 40, 15
    step = (524 - left) / count
    cells = [_Box(left + i * step, top + row * (tall + 2), step - 5, tall)
             for i in range(count) for row in range(_ROWS)]
    lit = top + _LIT * (tall + 2)
    bottom = top + _ROWS * (tall + 2)
    _boxes(figure, [cell for cell in cells if cell.y != lit], _CELL, _EDGE)
    _boxes(figure, [cell for cell in cells if cell.y == lit], _OPEN, _OPEN)
    _boxes(figure, [_Box(left + i * step + 2, bottom + 14, step - 9, 18) for i in range(count)], "white", INK)
    for i in range(count):
        x = left + i * step + (step - 5) / 2
        _text(figure, x, bottom + 23, "×+", size=13, anchor="center")
    _text(figure, left - 10, lit + tall / 2, "row r", anchor="right")
    _text(figure, left - 10, bottom + 23, "compute", size=NOTE, anchor="right")
    hit, miss = memory["tccd_ab_ns"], memory["trc_ns"]
    _text(figure, 0, bottom + 54, "Each command reads from the open row of all banks at once:")
    _text(figure, 0, bottom + 78,
          f"<b>{hit:g} ns</b> if row r is open, <b>{miss:g} ns</b> if it must be opened first.")
    return _Box(left, top, 524 - left - 5, bottom - top - 2)


def _all_channels(figure: go.Figure, memory: pd.Series, at: _Box) -> None:
    """Every channel as a slab, the same row lit in all: a region."""
    count, left, right = int(memory["channels_count"]), 572, style.WIDTH - 48
    step = (right - left) / count
    _text(figure, left, 14, f"<b>All {count} channels:</b> a region", size=SIZE)
    tall = at.height / _ROWS
    lit = at.y + _LIT * tall
    for y in (at.y, at.y + at.height):
        figure.add_shape(type="line", x0=at.x + at.width + 3, x1=left - 2, y0=y, y1=y,
                         line={"color": _EDGE, "width": 1, "dash": "3px,3px"})
    slabs = [_Box(left + i * step, at.y, step - 2.5, at.height) for i in range(count)]
    _boxes(figure, slabs, _CELL, _EDGE)
    _boxes(figure, [_Box(slab.x, lit, slab.width, tall - 2) for slab in slabs], _OPEN, _OPEN)
    _boxes(figure, slabs[:1], "rgba(0,0,0,0)", INK)
    region = memory["row_bytes"] * memory["banks_count"] * count
    tokens = region / memory["token_bytes"]
    blocks = tokens / memory["block_tokens"]
    under = at.y + at.height + 2
    _text(figure, left, under + 23, "Row r in all banks of all channels:")
    _text(figure, left, under + 54, f"<b>{region / 1024:g} KiB</b>, the keys and values")
    _text(figure, left, under + 78, f"of {tokens:g} tokens: <b>{blocks:g} blocks</b> of {memory['block_tokens']:g}")


def _shelves(figure: go.Figure, left: float, policy: str, rule: str, slots: int,
             own: list[tuple[int, int, int]]) -> None:
    """Regions as shelves of slots; `own`: (shelf, slot, number) of a sequence's blocks."""
    look = POLICIES[policy]
    top, wide, tall, shelf = 332, 39, 25, 29
    _text(figure, left, 300, f"<b>{policy}:</b> {rule}", size=SIZE, colour=look.colour)
    places = {(row, slot): _Box(left + 100 + slot * (wide + 2), top + row * shelf, wide, tall)
              for row in range(8) for slot in range(slots)}
    mine = {(row, slot): number for row, slot, number in own}
    empty = {place for place in places if (3 * place[0] + 5 * place[1]) % 11 == 0} - set(mine)
    _boxes(figure, [box for place, box in places.items() if place not in mine and place not in empty], _OTHERS, _OTHERS)
    _boxes(figure, [places[place] for place in sorted(empty)], "white", _EDGE)
    _boxes(figure, [places[place] for place in mine], look.colour, look.colour)
    for place, number in mine.items():
        box = places[place]
        _text(figure, box.x + wide / 2, box.y + tall / 2, f"<b>{number}</b>", anchor="center", colour="white")
    touched = sorted({row for row, _, _ in own})
    _text(figure, left + 62, top + tall / 2, "region", size=NOTE, anchor="right", colour=QUIET)
    _text(figure, left + 62, top + 7 * shelf + tall / 2, "⋮", size=NOTE, anchor="right", colour=QUIET)
    for row in touched:
        _arrow(figure, left + 100, top + row * shelf + tall / 2)
    blocks = "block" if len(own) == 1 else "blocks"
    rows = "row" if len(touched) == 1 else "rows"
    _text(figure, left + 100, top + 8 * shelf + 20, size=SIZE,
          text=f"{len(own)} {blocks} to read: <b>{len(touched)} {rows} to open</b>")


def _arrow(figure: go.Figure, x: float, y: float) -> None:
    figure.add_annotation(x=x - 3, y=y, ax=-26, ay=0, text="", showarrow=True, arrowhead=2, arrowsize=1.1, arrowwidth=2,
                          arrowcolor=INK)


def _boxes(figure: go.Figure, boxes: Iterable[_Box], fill: str, edge: str) -> None:
    """All boxes as one path."""
    path = "".join(f"M{b.x:.1f},{b.y:.1f}H{b.x + b.width:.1f}V{b.y + b.height:.1f}H{b.x:.1f}Z" for b in boxes)
    if path:
        figure.add_shape(type="path", path=path, fillcolor=fill, line={"color": edge, "width": 1})


def _text(figure: go.Figure, x: float, y: float, text: str, *, size: int = SMALL, anchor: str = "left",
          colour: str = INK) -> None:
    figure.add_annotation(x=x, y=y, text=text, showarrow=False, xanchor=anchor, yanchor="middle",
                          font={"size": size, "color": colour})
