"""The figures of the walk: the places of one sequence at chosen moments, and how a pool frays. Frame in, figure out."""

from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from artifact.study import style
from artifact.study.style import INK

HELD, FREED, REUSED, OTHERS = "this sequence", "given back, free", "given back, another's", "another"
_GREY = "#C4C4C4"
_LINES = (("region_spread", "spread (ratio)"), ("shared_frac", "shared regions<br>(fraction)"),
          ("m1_row_hit_frac", "M1, row hits<br>(fraction)"))


class Moment(NamedTuple):
    """Where things stand at a step: places (slot, row of the picture) by state, and what that comes to in words."""

    places: dict[str, tuple[list[int], list[int]]]
    words: str


def regions(frame: pd.DataFrame, allocator: str) -> list[int]:
    """The regions that the sequence ever touches, in the order in which it first does."""
    own = frame[(frame["allocator"] == allocator) & (frame["holder"] == HELD)].sort_values(["step", "order_index"])
    return own["region"].drop_duplicates().tolist()


def moment(frame: pd.DataFrame, allocator: str, step: int) -> Moment:
    """The state of every slot of those regions at `step`; slots that are free and never were the sequence's are left
    out."""
    rows = frame[frame["allocator"] == allocator]
    row_of = {region: row for row, region in enumerate(regions(frame, allocator))}
    here = rows["slot"].to_numpy(), rows["region"].map(row_of).to_numpy()
    now = ((rows["step"] <= step) & (step < rows["until_step"])).to_numpy()
    mine = (rows["holder"] == HELD).to_numpy()
    before = mine & (rows["until_step"] <= step).to_numpy()
    places = [list(zip(here[0][which].tolist(), here[1][which].tolist(), strict=True))
              for which in (now & mine, now & ~mine, before)]
    own, others, past = (sorted(set(some)) for some in places)
    states = {HELD: own, OTHERS: [place for place in others if place not in past],
              REUSED: [place for place in past if place in others],
              FREED: [place for place in past if place not in others and place not in own]}
    touched = len({row for _, row in own})
    words = f"{len(own)} in {touched} region{'s' * (touched > 1)}" if own else \
        f"{len(states[FREED])} free, {len(states[REUSED])} reused" if past else "not here yet"
    return Moment({state: ([x for x, _ in some], [y for _, y in some]) for state, some in states.items()}, words)


def looks(allocator: str, size: float) -> dict[str, dict]:
    """The marker of each state: what is the sequence's own in the policy's colour, what it gave back hollow."""
    colour = style.POLICIES[allocator].colour
    return {OTHERS: {"symbol": "square", "color": _GREY, "size": size},
            HELD: {"symbol": "square", "color": colour, "size": size},
            FREED: {"symbol": "square-open", "color": colour, "size": size - 2, "line": {"width": 2}},
            REUSED: {"symbol": "square", "color": _GREY, "size": size - 2, "line": {"color": colour, "width": 2}}}


def hover(allocator: str, state: str) -> str:
    """What a place says of itself; what another holds has no policy's colour and does not name one."""
    return (f"{state}" if state in (OTHERS, REUSED) else f"{allocator}: {state}") + "<extra></extra>"


def life(frame: pd.DataFrame) -> go.Figure:
    """One sequence's places when its prompt has landed, half-way, at its last step, and a while after it has left."""
    frame = _sorted(frame)
    names = style.policies(frame)
    counts = {name: len(regions(frame, name)) for name in names}
    one = frame.iloc[0]
    first, last, end = int(one["first_step"]), int(one["last_step"]), int(frame["until_step"].max()) - 1
    steps = ((first, "landed"), ((first + last) // 2, "half-way"), (last, "last step"), (end, "gone"))
    tall = [max(count, 6) for count in counts.values()]
    cell = min(15, 520 // sum(tall))  # px a region
    inner = cell * sum(tall) + 60
    height = inner + style.TITLE + 3 * style.STRIP + style.BOTTOM
    figure = style.sheet("One sequence's life: where its blocks lie", height, rows=len(names), cols=4, legend=2,
                         headings=True, row_heights=tall, horizontal_spacing=0.035, vertical_spacing=60 / inner,
                         shared_yaxes=True)
    figure.update_layout(legend_y=1 + 64 / inner)  # above two lines of headings
    slots = int(one["blocks_per_region"])
    long, short = ": region (index, in order of use)", "<br>region (index)"
    titles = {name: f"<b>{name}</b>{long if counts[name] > 9 else short}" for name in names}
    for row, name in enumerate(names, 1):
        for col, (step, when) in enumerate(steps, 1):
            now = moment(frame, name, step)
            for state, marker in looks(name, cell - 3).items():
                x, y = now.places[state]
                figure.add_scatter(x=x, y=y, mode="markers", marker=marker, showlegend=False, row=row, col=col,
                                   hovertemplate=hover(name, state))
            figure.update_xaxes(range=[-0.7, slots - 0.3], tickvals=[0, slots - 1], showgrid=False, row=row, col=col,
                                title_text="slot (index)" if row == len(names) else None,
                                showticklabels=row == len(names))
            figure.update_yaxes(range=[max(counts[name], 6) - 0.3, -0.7], dtick=5, showgrid=False, row=row, col=col)
            above = f"<b>{when}</b>, step {step}<br>" if row == 1 else ""
            style.heading(figure, above + now.words, row=row, col=col)
        figure.update_yaxes(title_text=titles[name], title_font_color=style.legible(style.POLICIES[name].colour),
                            row=row, col=1)
    style.key(figure, [("its own", {"mode": "markers", "marker": {"symbol": "square", "size": 14, "color": INK}}),
                       ("another's", {"mode": "markers", "marker": {"symbol": "square", "size": 14, "color": _GREY}}),
                       ("given back", {"mode": "markers", "marker": {"symbol": "square-open", "size": 13,
                                                                     "color": INK, "line": {"width": 2}}})])
    return style.note(figure, frame, "white: free; a rim: was this sequence's, and is free or another's now")


def fragmentation(frame: pd.DataFrame) -> go.Figure:
    """Spread, shared regions and M1 over the steps of a run, a line a policy."""
    frame = frame.sort_values(["allocator", "step"])
    names = style.policies(frame)
    figure = style.sheet("How the pool frays as the engine runs", 900, rows=3, shared_xaxes=True, left=130,
                         vertical_spacing=0.05)
    for row, (metric, title) in enumerate(_LINES, 1):
        top = 1.04 if metric.endswith("_frac") else frame[metric].max() * 1.08
        figure.update_yaxes(title_text=title, range=[0, top], row=row)
        ends = []
        for name in names:
            cells = frame[frame["allocator"] == name]
            figure.add_scatter(x=cells["step"].tolist(), y=cells[metric].round(5).tolist(), mode="lines", name=name,
                               showlegend=False, marker={"color": style.POLICIES[name].colour},
                               line={"color": style.POLICIES[name].colour, "width": 3,
                                     "dash": "3px,4px" if name == "random" else "solid"},
                               row=row, col=1, hovertemplate=f"{name}, step %{{x}}: %{{y:.3f}}<extra></extra>")
            ends.append((name, float(cells["step"].iloc[-1]), float(cells[metric].iloc[-1])))
        style.name_ends(figure, ends, "right", row=row)
    figure.update_xaxes(range=[0, frame["step"].max() * 1.22], row=3)
    figure.update_xaxes(title_text="decode step (index)", row=3)
    return style.note(figure, frame, f"a steady run of {int(frame['requests_count'].max()):,} requests; means over "
                                     "stretches of steps and over the batch")


def _sorted(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values(["allocator", "region", "slot", "step"]).reset_index(drop=True)
