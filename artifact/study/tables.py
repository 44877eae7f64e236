"""Tables for papers and pages: a frame in, Markdown or LaTeX out, units in the headers, digits chosen by column."""

import re
from collections.abc import Sequence

import pandas as pd

from artifact.study import results

DIGITS = 4  # significant, of a column's largest number; one less of its smallest; one by one over four decades or more
LATEX = {
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "µ": r"\textmu{}",
}  # fmt: skip


def header(column: str) -> str:
    """A column's name as people read it: `m3_bandwidth_gbps` -> `M3 bandwidth (GB/s)`."""
    words = results.stem(column).replace("_", " ")
    words = re.sub(r"^m([1-4])\b", r"M\1", words)
    unit = results.unit(column)
    return f"{words} ({unit})" if unit and words else unit or words


def cells(values: pd.Series) -> list[str]:
    """A column as text. Whole numbers stay whole; others share the decimals that `DIGITS` asks for."""
    if pd.api.types.is_bool_dtype(values):
        return ["yes" if value else "no" for value in values]
    if not pd.api.types.is_numeric_dtype(values):
        return ["–" if pd.isna(value) else str(value) for value in values]
    known = values.dropna().astype(float)
    sizes = known[known != 0].abs()
    if (known % 1 == 0).all():
        form = "{:.0f}"
    elif sizes.max() > 1e4 * sizes.min():
        form = f"{{:.{DIGITS}g}}"
    else:
        decimals = max(0, DIGITS - 1 - _magnitude(sizes.max()), DIGITS - 2 - _magnitude(sizes.min()))
        form = f"{{:.{decimals}f}}"
    return ["–" if pd.isna(value) else form.format(value) for value in values]


def markdown(frame: pd.DataFrame, columns: Sequence[str] | None = None) -> str:
    """A Markdown table of `columns` (None: all), numbers to the right, padded to read well as text too."""
    rows, right = _laid_out(frame, columns)
    rows = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(right))]
    lines = ["| " + " | ".join(cell.rjust(width) if number else cell.ljust(width)
                               for cell, width, number in zip(row, widths, right, strict=True)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 1) + (":" if number else "-")
                          for width, number in zip(widths, right, strict=True)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def latex(frame: pd.DataFrame, columns: Sequence[str] | None = None) -> str:
    """A LaTeX tabular of `columns` (None: all) with the rules of the package booktabs."""
    rows, right = _laid_out(frame, columns)
    lines = [" & ".join("".join(LATEX.get(letter, letter) for letter in cell.replace("–", "--")) for cell in row)
             + r" \\" for row in rows]
    return "\n".join([rf"\begin{{tabular}}{{{''.join('r' if number else 'l' for number in right)}}}", r"\toprule",
                      lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}"]) + "\n"


def _magnitude(value: float) -> int:
    """The power of ten of the leading digit once rounded: 9.9999 counts as 10."""
    return int(f"{value:.{DIGITS - 1}e}".split("e")[1])


def text(rows: Sequence[dict], columns: Sequence[str]) -> str:
    """Rows as aligned columns for a terminal, `columns` in that order, the last one as wide as it is."""
    lines = [[header(name) for name in columns], *([_shown(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns) - 1)]
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]])
                     .rstrip() for line in lines)


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _laid_out(frame: pd.DataFrame, columns: Sequence[str] | None) -> tuple[list[list[str]], list[bool]]:
    frame = frame if columns is None else frame[list(columns)]
    if frame.shape[1] == 0:
        raise ValueError("a table without columns; give at least one")
    right = [pd.api.types.is_numeric_dtype(frame[name]) and not pd.api.types.is_bool_dtype(frame[name])
             for name in frame.columns]
    texts = [cells(frame[name]) for name in frame.columns]
    return [[header(name) for name in frame.columns], *(list(row) for row in zip(*texts, strict=True))], right
