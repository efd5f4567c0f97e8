"""Tables as CSV, LaTeX and Markdown, and the numbers behind figures as CSV. Text from records stays text."""

import csv
import html
import io
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat

from divebatch.report.charts import AXES, Chart, TargetBars
from divebatch.report.curves import Floats
from divebatch.report.tables import Table

LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "→": r"$\to$",
}


def table_to_csv(table: Table) -> str:
    """Columns and rows; the notes are left to the other formats."""
    return _csv([table.columns, *table.rows])


def table_to_latex(table: Table) -> str:
    """A `tabular` that needs the package booktabs, with title and notes as comments."""
    comments = [f"% {line}" for line in ("Needs \\usepackage{booktabs}.", table.title, *table.notes)]
    rows = [_latex_row(row) for row in table.rows]
    columns = "l" + "r" * (len(table.columns) - 1)
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _latex_row(table.columns), r"\midrule", *rows]
    return "\n".join([*map(_one_line, comments), *body, r"\bottomrule", r"\end{tabular}", ""])


def escape_latex(text: str) -> str:
    r"""Text with nothing in force that LaTeX would obey.

    >>> print(escape_latex("50 % of a_b"))
    50 \% of a\_b
    """
    return "".join(LATEX.get(character, character) for character in _one_line(text))


def escape_markdown(text: str) -> str:
    """On one line, with neither tags nor markup in force.

    >>> print(escape_markdown("<b> a|b"))
    &lt;b&gt; a\\|b
    """
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", html.escape(one_line, quote=False))


def table_to_markdown(table: Table) -> str:
    """The table and its notes, without the title."""
    lines = [_markdown_row(table.columns), "|" + " --- |" * len(table.columns), *map(_markdown_row, table.rows)]
    notes = [f"- {escape_markdown(note)}" for note in table.notes]
    return "\n".join([*lines, "", *notes]).strip()


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escape_markdown, cells)) + " |"


def chart_to_csv(chart: Chart) -> str:
    """One row for each point of each line, with its place on every axis."""
    columns = ["line", *AXES, "mean", "standard_error", "trials"]
    return _csv_text(chain([columns], _points(chart)))


def bars_to_csv(charts: Mapping[str, TargetBars]) -> str:
    """One row for each method and unit; empty cells where the target was not reached, or only in part of the draws."""
    columns = ["method", "unit", "target", "on_mean_metric", "low_95", "high_95"]
    columns += ["fastest_trial", "slowest_trial", "reached", "trials"]
    rows = [
        [
            *(method, unit, bars.goal, each.value, each.low, each.high),
            *(each.fastest, each.slowest, each.num_reached, len(each.trials)),
        ]
        for unit, bars in charts.items()
        for method, each in bars.arrivals.items()
    ]
    return _csv([columns, *rows])


def _points(chart: Chart) -> Iterator[tuple[str, ...]]:
    """The cells of each row. Column by column, as a long run has a million of them."""
    for number, line in enumerate(chart.panel.lines):
        curve, label = line.curve, _csv_cell(line.label)
        places = [chart.positions(number, axis) for axis in AXES]
        columns = [*map(_number_cells, places), _number_cells(curve.mean), _number_cells(curve.standard_error)]
        yield from zip(repeat(label, len(curve.epochs)), *columns, map(str, curve.num_trials.tolist()), strict=False)


def _number_cells(values: Floats | None) -> Iterable[str]:
    return repeat("") if values is None else map(_number_cell, values.tolist())


def _csv(rows: Iterable[Sequence[object]]) -> str:
    return _csv_text(map(_csv_cell, row) for row in rows)


def _csv_text(rows: Iterable[Iterable[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _csv_cell(cell: object) -> str:
    if isinstance(cell, float):
        return _number_cell(cell)
    # A spreadsheet would run text that begins like a formula, also after spaces or with the wide forms of the signs.
    text = "" if cell is None else str(cell)
    plain = unicodedata.normalize("NFKC", text)
    return f"'{text}" if re.match(r"\s*[=+@]|[\t\r\n]|\s*-.*[^\d.]", plain) else text


def _number_cell(value: float) -> str:
    return f"{value:.9g}" if math.isfinite(value) else ""


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(escape_latex, cells)) + r" \\"


def _one_line(text: str) -> str:
    return " ".join(text.split())
