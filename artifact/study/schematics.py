"""Drawn explanations: what a reader must have seen before the numbers mean anything.

Coordinates are pixels of the drawing area, y downwards. The numbers written into a drawing come from its frame.
"""

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from artifact.study import style
from artifact.study.style import INK, LOOKS, NOTE, POLICIES, QUIET, SIZE, SMALL

_OPEN, _CELL, _EDGE = "#3A3A3A", "#F4F4F4", "#BDBDBD"  # an open row, a closed one, outlines
_OTHERS = "#DCDCDC"  # blocks of other sequences, and all that nothing is said of
_AGAIN, _SELECT = LOOKS["last step"].colour, LOOKS["static frequency"].colour
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
    figure = _canvas("What in-memory attention needs, and what an allocator gives it", 630)
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
    _text(figure, left, 300, f"<b>{policy}:</b> {rule}", size=SIZE, colour=style.legible(look.colour))
    places = {(row, slot): _Box(left + 100 + slot * (wide + 2), top + row * shelf, wide, tall)
              for row in range(8) for slot in range(slots)}
    mine = {(row, slot): number for row, slot, number in own}
    empty = {place for place in places if (3 * place[0] + 5 * place[1]) % 11 == 0} - set(mine)
    _boxes(figure, [box for place, box in places.items() if place not in mine and place not in empty], _OTHERS, _OTHERS)
    _boxes(figure, [places[place] for place in sorted(empty)], "white", _EDGE)
    _boxes(figure, [places[place] for place in mine], look.colour, look.colour)
    for place, number in mine.items():
        box = places[place]
        _text(figure, box.x + wide / 2, box.y + tall / 2, f"<b>{number}</b>", size=SIZE, anchor="center",
              colour="white")
    touched = sorted({row for row, _, _ in own})
    _text(figure, left + 62, top + tall / 2, "region", size=NOTE, anchor="right", colour=QUIET)
    _text(figure, left + 62, top + 7 * shelf + tall / 2, "⋮", size=NOTE, anchor="right", colour=QUIET)
    for row in touched:
        _arrow(figure, left + 100, top + row * shelf + tall / 2)
    blocks = "block" if len(own) == 1 else "blocks"
    rows = "row" if len(touched) == 1 else "rows"
    _text(figure, left + 100, top + 8 * shelf + 20, size=SIZE,
          text=f"{len(own)} {blocks} to read: <b>{len(touched)} {rows} to open</b>")


def selecting(frame: pd.DataFrame) -> go.Figure:
    """Dynamic sparse attention: select, then attend; and what PRR does instead of waiting.

    `frame`: one row a method: method, page_tokens, blocks_count, budget_count, attended_frac. Quest's is drawn.
    """
    row = frame[frame["method"] == "quest"].sort_values("page_tokens").iloc[0]
    figure = _canvas("What is selected, and why it need not be waited for", 560)
    count, kept = 36, 9
    bars = [0.25 + 0.75 * ((17 * i * i + 5 * i) % 31) / 31 for i in range(count)]
    best = sorted(range(count), key=bars.__getitem__)[-kept:]
    _text(figure, 0, 14, "<b>1 select.</b> Each block's keys have a summary; the query scores every summary", size=SIZE)
    left, wide, floor = 30, 23.6, 150
    _boxes(figure, [_Box(left + i * wide, floor - 96 * bars[i], wide - 5, 96 * bars[i]) for i in range(count)
                    if i not in best], _OTHERS, _OTHERS)
    _boxes(figure, [_Box(left + i * wide, floor - 96 * bars[i], wide - 5, 96 * bars[i]) for i in best], _AGAIN, _AGAIN)
    _text(figure, 0, 190, "<b>2 attend.</b> Keys and values are read only of the best", size=SIZE)
    _boxes(figure, [_Box(left + i * wide, 212, wide - 5, 24) for i in range(count) if i not in best], "white", _EDGE)
    _boxes(figure, [_Box(left + i * wide, 212, wide - 5, 24) for i in best], _AGAIN, _AGAIN)
    _text(figure, left, 258, f"here {row['blocks_count']:g} blocks of {row['page_tokens']:g} tokens, "
                             f"<b>{row['budget_count']:g}</b> attended to: {row['attended_frac']:.2f} of the sequence")
    _text(figure, 0, 318, "<b>One layer after another:</b> attention waits for the selection", size=SIZE)
    serial = [("select", 130), ("attend", 120), ("rest", 130)]
    _bars(figure, 30, 340, [*serial, *serial])
    _text(figure, 0, 414, "<b>PRR:</b> attend to the <i>predicted</i> blocks meanwhile, then repair what they missed",
          size=SIZE)
    step = 130 + 66 + 130
    for x in (30, 30 + step):
        _bars(figure, x, 436, [("select", 130)])
        _bars(figure, x, 472, [("attend to P", 124)], colour=style.legible(LOOKS["calibrated"].colour))
        _bars(figure, x + 130, 454, [("repair", 66), ("rest", 130)])
    end, saved = 30 + 2 * step, 30 + 2 * 380
    for x, top in ((end, 490), (saved, 436)):
        figure.add_shape(type="line", x0=x, x1=x, y0=top, y1=516, line={"color": QUIET, "width": 2, "dash": "3px,3px"})
    figure.add_shape(type="line", x0=saved, x1=saved, y0=374, y1=400,
                     line={"color": QUIET, "width": 2, "dash": "3px,3px"})
    _line_to(figure, saved - 2, 503, end + 2, 503)
    _text(figure, (end + saved) / 2, 482, "saved", anchor="center")
    _text(figure, 30, 540, "<b>P</b>: the blocks predicted. <b>A</b>: the blocks selected. Missed: A without P")
    return style.note(figure, frame, "scores and times are not to scale", of="drawing; block counts: ")


def dataflow(frame: pd.DataFrame) -> go.Figure:
    """Figure 2a of the paper, drawn: the stages of two steps of one layer, and the blocks that both select.

    `frame`: one row: model, method, context_tokens, selection_frac, attention_frac, after_frac, overlap_frac.
    """
    row = frame.iloc[0]
    figure = _canvas("What one layer waits for, in two steps that follow each other", 550)
    count, wide, left = 24, 32, 122
    first, second = {1, 4, 5, 9, 13, 14, 18, 20, 23}, {1, 4, 5, 10, 13, 14, 19, 20, 23}
    for top, y, name, chosen in ((0, 152, "Step t", first), (286, 236, "Step t + 1", second)):
        _text(figure, 1, top + 14, f"<b>{name}</b>", size=SIZE)
        boxes = (("new token:<br>q, k, v", 1, 104, _CELL), ("score the blocks'<br>summaries", 138, 146, _SELECT),
                 ("top K", 318, 74, _SELECT), ("attend to<br>these blocks", 552, 122, _AGAIN),
                 ("FFN", 708, 84, _OTHERS))
        for text, x, width, fill in boxes:
            _boxes(figure, [_Box(x, top + 34, width, 62)], fill, _EDGE)
            _text(figure, x + width / 2, top + 65, text, size=NOTE, anchor="center",
                  colour="white" if fill == _AGAIN else INK)
        for x, to_x in ((107, 136), (286, 316), (394, 550), (676, 706)):
            _line_to(figure, x, top + 65, to_x, top + 65)
        _text(figure, 472, top + 51, "waits", size=NOTE, anchor="center")
        for x, text in ((265, f"selection: <b>{row['selection_frac']:.2f}</b> of the step"),
                        (613, f"attention: <b>{row['attention_frac']:.2f}</b>"),
                        (750, f"<b>{row['after_frac']:.2f}</b>")):
            _text(figure, x, top + 114, text, size=NOTE, anchor="center")
        _text(figure, left - 10, y + 12, "blocks", size=NOTE, anchor="right")
        cells = {i: _Box(left + i * wide, y, wide - 4, 24) for i in range(count)}
        _boxes(figure, [cells[i] for i in range(count) if i not in chosen], "white", _EDGE)
        _boxes(figure, [cells[i] for i in sorted(first & second)], _AGAIN, _AGAIN)
        red = LOOKS["calibrated"].colour
        _boxes(figure, [cells[i] for i in sorted(chosen - (first & second))], red, red)
    for i in sorted(first & second):
        x = left + i * wide + (wide - 4) / 2
        figure.add_shape(type="line", x0=x, x1=x, y0=178, y1=234, line={"color": _AGAIN, "width": 2, "dash": "2px,4px"})
    _text(figure, 1, 446, f"Blue: selected in both steps. In the paper's Table 5, <b>{row['overlap_frac']:.3f}</b> "
                            "of a step's blocks (drawn: 7 of 9).")
    _text(figure, 1, 474, "Orange: selected in one of the two. Which ones is known only once top K is done:")
    _text(figure, 1, 502, "attention waits for that in every layer, and everything after it waits for attention.")
    return style.note(figure, frame, f"{row['model']} with {style.said(row['method'])}, "
                      f"{row['context_tokens'] / 1024:.0f}K tokens", of="drawing; shares: ", by="the PRR paper")


def calibration(frame: pd.DataFrame) -> go.Figure:
    """Figure 6 of the paper, drawn: prefill rows, the candidates with their objective, theta, predict and update.

    `frame`: one row a candidate of one prompt and layer: alpha, beta, gamma, objective_frac, rows_count,
    blocks_count, budget_count.
    """
    frame = frame.sort_values(["alpha", "beta", "gamma"])
    first, best = frame.iloc[0], frame.loc[frame["objective_frac"].idxmax()]
    figure = _canvas("Calibration in the prefill, prediction in the decode", 560)
    _text(figure, 0, 14, "<b>Prefill</b>", size=SIZE)
    rows, blocks, side = 11, 13, 15
    shades = ("#EDF4FA", "#9CC9E6", "#3F86B5")
    cells: dict[str, list[_Box]] = {shade: [] for shade in shades}
    for r in range(rows):
        for b in range(blocks - 4 + r * 4 // rows):
            value = (7 * b * b + 3 * b + (r // 4) * (b % 3)) % 11
            cells[shades[0 if value < 6 else 1 if value < 9 else 2]].append(_Box(b * side, 60 + r * side, side - 2,
                                                                                side - 2))
    for shade, boxes in cells.items():
        _boxes(figure, boxes, shade, shade)
    _text(figure, 0, 46, f"scores of the last {first['rows_count']:g} rows", size=NOTE)
    _text(figure, 0, 242, f"× {first['blocks_count']:g} blocks,", size=NOTE)
    _text(figure, 0, 264, f"the best {first['budget_count']:g} are A", size=NOTE)
    _line_to(figure, 208, 140, 262, 140)
    _candidates(figure, frame, best, 284, 66)
    _text(figure, 284, 46, f"{len(frame)} candidates for θ = (α, β, γ), all in one pass", size=NOTE)
    _text(figure, 284, 264, f"objective: share of A's scores that P would have had, "
                            f"{frame['objective_frac'].min():.4f} to {best['objective_frac']:.4f}", size=NOTE)
    _line_to(figure, 724, 140, 762, 140)
    colour = style.legible(LOOKS["calibrated"].colour, 5.2)  # also on the tint of the boxes below
    _text(figure, 776, 96, "<b>the best θ</b>", colour=colour)
    for i, name in enumerate(("alpha", "beta", "gamma")):
        _text(figure, 776, 126 + 26 * i, f"{'αβγ'[i]} = <b>{best[name]:g}</b>", colour=colour)
    _text(figure, 0, 316, "<b>Decode</b>, at every step", size=SIZE)
    steps = (("predict", "score expected = level + γ · trend", "P: the blocks where it is highest"),
             ("attend to P", "while the selection scores", "all blocks and finds A"),
             ("update", "trend += β · (score − level − trend)", "level += α · (score − level)"),
             ("repair", "attend to A without P,", "merge it into the result"))
    for i, (name, one, two) in enumerate(steps):
        x, y = (i % 2) * 470, 340 + (i // 2) * 120
        _boxes(figure, [_Box(x, y, 400, 84)], "#FBEFE8" if name in ("predict", "update") else _CELL, _EDGE)
        _text(figure, x + 14, y + 17, f"<b>{name}</b>", colour=colour if name in ("predict", "update") else INK)
        _text(figure, x + 14, y + 42, one, size=NOTE)
        _text(figure, x + 14, y + 65, two, size=NOTE)
    for x, y, to_x, to_y in ((404, 382, 466, 382), (670, 428, 670, 456), (466, 502, 404, 502), (200, 456, 200, 428)):
        _line_to(figure, x, y, to_x, to_y)
    return style.note(figure, frame, "both right-hand sides use the level and trend from before the step",
                      of="drawing; candidates: ")


def _candidates(figure: go.Figure, frame: pd.DataFrame, best: pd.Series, left: float, top: float) -> None:
    """The grid: a column of squares for each gamma, alpha down, beta across, darker where the objective is higher."""
    low, high = frame["objective_frac"].min(), frame["objective_frac"].max()
    side, gammas = 17, sorted(frame["gamma"].unique())
    alphas, betas = sorted(frame["alpha"].unique()), sorted(frame["beta"].unique())
    groups: dict[str, list[_Box]] = {}
    for row in frame.itertuples():
        x = left + 36 + gammas.index(row.gamma) * (len(betas) * side + 14) + betas.index(row.beta) * side
        y = top + alphas.index(row.alpha) * 34
        share = (row.objective_frac - low) / max(high - low, 1e-12)
        groups.setdefault(_shade(round(share * 8) / 8), []).append(_Box(x, y, side - 2, 31))
        if (row.alpha, row.beta, row.gamma) == (best["alpha"], best["beta"], best["gamma"]):
            chosen = _Box(x - 2.5, y - 2.5, side + 3, 36)
    for shade, boxes in groups.items():
        _boxes(figure, boxes, shade, shade)
    figure.add_shape(type="rect", x0=chosen.x, x1=chosen.x + chosen.width, y0=chosen.y, y1=chosen.y + chosen.height,
                     line={"color": LOOKS["calibrated"].colour, "width": 4})
    for i, alpha in enumerate(alphas):
        _text(figure, left + 28, top + i * 34 + 16, f"{alpha:g}" if i else f"α {alpha:g}", size=NOTE, anchor="right")
    for i, gamma in enumerate(gammas):
        x = left + 36 + i * (len(betas) * side + 14) + len(betas) * side / 2
        _text(figure, x, top + 4 * 34 + 12, f"γ {gamma:g}", size=NOTE, anchor="center")
    _text(figure, left + 36, top + 4 * 34 + 36, f"in each: β {betas[0]:g} to {betas[-1]:g}, left to right", size=NOTE)


def _shade(share: float) -> str:
    """From pale to dark blue."""
    pale, dark = (237, 244, 250), (0, 67, 107)
    return "#" + "".join(f"{round(a + (b - a) * share):02X}" for a, b in zip(pale, dark, strict=True))


def _bars(figure: go.Figure, x: float, y: float, stages: Iterable[tuple[str, float]], colour: str = "") -> None:
    """Stages of a step, one after the other, named inside."""
    fills = {"select": _SELECT, "attend": _AGAIN, "repair": LOOKS["no trend"].colour,
             "rest": _OTHERS}
    for name, width in stages:
        fill = colour or fills[name]
        _boxes(figure, [_Box(x, y, width - 3, 30)], fill, fill)
        _text(figure, x + width / 2 - 1, y + 15, f"<b>{name}</b>", size=NOTE, anchor="center",
              colour=INK if name in ("rest", "select", "repair") else "white")
        x += width


def _canvas(title: str, height: int) -> go.Figure:
    """An empty drawing area of `height` px, y downwards, and room for a note below it."""
    figure = style.sheet(title, height + 146, left=24, bottom=80)
    figure.update_layout(margin={"r": 24})
    figure.update_xaxes(range=[0, style.WIDTH - 48], visible=False)
    figure.update_yaxes(range=[height, 0], visible=False)
    return figure


def _line_to(figure: go.Figure, x: float, y: float, to_x: float, to_y: float) -> None:
    figure.add_annotation(x=to_x, y=to_y, ax=x, ay=y, axref="x", ayref="y", text="", showarrow=True, arrowhead=2,
                          arrowsize=1.1, arrowwidth=2, arrowcolor=INK)


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
