"""One text, three dresses: headings, paragraphs, lists and tables as Markdown, LaTeX and HTML, escaped for each.

A text is plain but for `code` between backticks; nothing else in it is markup.
"""

import html as web
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from artifact.study import tables

_CODE = re.compile(r"`([^`]+)`")
_MARKDOWN = re.compile(r"([\\*_\[\]<>#])")
_LATEX = tables.LATEX | {
    "–": "--", "—": "---", "…": r"\ldots{}", "‘": "`", "’": "'", "“": "``", "”": "''", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "×": r"\ensuremath{\times}",
    "±": r"\ensuremath{\pm}", "≤": r"\ensuremath{\leq}", "≥": r"\ensuremath{\geq}", "→": r"\ensuremath{\rightarrow}",
    "↔": r"\ensuremath{\leftrightarrow}", "−": r"\ensuremath{-}", "∪": r"\ensuremath{\cup}", "∩": r"\ensuremath{\cap}",
    "α": r"\ensuremath{\alpha}", "β": r"\ensuremath{\beta}", "γ": r"\ensuremath{\gamma}", "δ": r"\ensuremath{\delta}",
    "Δ": r"\ensuremath{\Delta}", "θ": r"\ensuremath{\theta}", "·": r"\textperiodcentered{}", "√": r"\ensuremath{\surd}",
    "°": r"\textdegree{}", "§": r"\S{}",
}  # fmt: skip
_BREAK = re.compile(r"/|-|=|,|\.|\\_")  # what a path or a command may be broken after
_PREAMBLE = r"""\documentclass[9pt]{extarticle}
\usepackage[a4paper,margin=18mm]{geometry}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage{textcomp}
\usepackage{array,booktabs,longtable}
\setlength{\parindent}{0pt}
\setlength{\parskip}{0.5em}
\emergencystretch=3em
\setlength{\tabcolsep}{4pt}
"""


@dataclass(frozen=True)
class Heading:
    """A heading; `level` 1 is the document's title."""

    level: int
    text: str


@dataclass(frozen=True)
class Table:
    """A table of text; `shares` are its columns' parts of the page's width."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        for row in (self.shares, *self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells in a table of {len(self.columns)} columns: {row}")


Block = Heading | Table | str | list  # a str is a paragraph, a list of str its points


def markdown(blocks: Sequence[Block]) -> str:
    """The blocks as GitHub's Markdown."""
    return "\n\n".join(_as_markdown(block) for block in blocks) + "\n"


def latex(blocks: Sequence[Block]) -> str:
    """The blocks as LaTeX to be put into a document that loads array, booktabs, longtable and textcomp; pure ASCII.

    Raises ValueError for a character that has no LaTeX here.
    """
    return "\n\n".join(_as_latex(block) for block in blocks) + "\n"


def frame(title: str, names: Sequence[str]) -> str:
    """A LaTeX document of the files `names`, without their ending, each from a new page."""
    body = "\n\\clearpage\n".join(rf"\input{{{name}}}" for name in names)
    return f"{_PREAMBLE}\\title{{{_latex(title)}}}\n\\date{{}}\n\\begin{{document}}\n{body}\n\\end{{document}}\n"


def page(blocks: Sequence[Block]) -> str:
    """The blocks as HTML, without a page around them."""
    return "\n".join(_as_html(block) for block in blocks) + "\n"


def _pieces(text: str) -> Iterator[tuple[bool, str]]:
    """(is it code, text) of what stands between backticks and what does not."""
    for number, piece in enumerate(_CODE.split(text)):
        if piece:
            yield bool(number % 2), piece


def _dressed(text: str, plain: Callable[[str], str], code: Callable[[str], str]) -> str:
    return "".join(code(piece) if is_code else plain(piece) for is_code, piece in _pieces(text))


def _markdown(text: str) -> str:
    return _dressed(text, lambda piece: _MARKDOWN.sub(r"\\\1", piece), lambda piece: f"`{piece}`")


def _latex(text: str) -> str:
    def plain(piece: str) -> str:
        return "".join(_LATEX.get(letter, letter) for letter in piece)

    def code(piece: str) -> str:
        return rf"\texttt{{{_BREAK.sub(_may_break, plain(piece))}}}"

    dressed = _dressed(text, plain, code)
    strange = sorted(set(re.findall(r"[^\x00-\x7f]", dressed)))
    if strange:
        raise ValueError(f"{strange[0]!r} in {text[:60]!r} has no LaTeX; document.py lists what has")
    return dressed


def _may_break(part: re.Match) -> str:
    return part[0] + r"\allowbreak{}"


def _html(text: str) -> str:
    return _dressed(text, web.escape, lambda piece: f"<code>{web.escape(piece)}</code>")


def _as_markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_markdown(text)}"
        case Table(columns, rows):
            lines = [[_markdown(cell).replace("|", r"\|") for cell in row] for row in (columns, *rows)]
            lines.insert(1, ["---"] * len(columns))
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case list():
            return "\n".join(f"- {_markdown(point)}" for point in block)
    return _markdown(block)


def _as_latex(block: Block) -> str:
    match block:
        case Heading(level, text):
            command = ("section", "subsection", "subsubsection", "paragraph")[level - 1]
            return rf"\{command}*{{{_latex(text)}}}"
        case Table(columns, rows, shares):
            whole = sum(shares)
            widths = "".join(rf">{{\raggedright\arraybackslash}}p{{\dimexpr {share / whole:.4f}\linewidth-2\tabcolsep}}"
                             for share in shares)
            lines = [" & ".join(map(_latex, row)) + r" \\" for row in rows]
            head = " & ".join(map(_latex, columns)) + r" \\"
            return "\n".join([r"{\footnotesize", rf"\begin{{longtable}}{{@{{}}{widths}@{{}}}}", r"\toprule", head,
                              r"\midrule", r"\endhead", *lines, r"\bottomrule", r"\end{longtable}}"])
        case list():
            points = (rf"\item {_latex(point)}" for point in block)
            return "\n".join([r"\begin{itemize}\setlength{\itemsep}{0pt}", *points, r"\end{itemize}"])
    return _latex(block)


def _as_html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{_html(text)}</h{level}>"
        case Table(columns, rows):
            head = "".join(f'<th scope="col">{_html(name)}</th>' for name in columns)
            lines = "".join(f"<tr>{''.join(f'<td>{_html(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
            label = web.escape(f"Table: {', '.join(columns)}", quote=True)
            return (f'<div class="wide" role="region" aria-label="{label}" tabindex="0">\n<table>\n'
                    f"<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}</tbody>\n</table>\n</div>")
        case list():
            return f"<ul>{''.join(f'<li>{_html(point)}</li>' for point in block)}</ul>"
    return f"<p>{_html(block)}</p>"
