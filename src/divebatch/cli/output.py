"""Print tables, and write results into a folder."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divebatch.errors import ArgumentError
from divebatch.records import finite

if TYPE_CHECKING:
    from rich.console import Console

    from divebatch.report.drawing import Drawing

FILE_WIDTH = 10_000
"""Columns where no terminal shows the output: programs read it, and nothing may be cut or wrapped."""
LONGEST_NUMBER = 12
"""Characters of a word that a narrow terminal may not break."""


def make_console() -> "Console":
    """Return a console as wide as the terminal, or into a pipe or a file as wide as anything may be."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=FILE_WIDTH, highlight=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str]) -> None:
    """Print plain text in columns; those in `left` begin at the left, and none breaks a number."""
    from rich.table import Table
    from rich.text import Text

    table, cells = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False), list(rows)
    for place, column in enumerate(columns):
        longest = max(len(word) for row in (columns, *cells) for word in row[place].split() or [""])
        least = longest if longest <= LONGEST_NUMBER else None
        table.add_column(column, justify="left" if column in left else "right", overflow="fold", min_width=least)
    for row in cells:
        table.add_row(*map(Text, row))  # as text: names may look like markup
    make_console().print(table)


def to_json(value: Any) -> str:
    """Return indented JSON, in which NaN and infinities are null."""
    return json.dumps(finite(value), indent=2, allow_nan=False)


def make_folder(out: Path) -> None:
    """Make a folder for results, or raise `ArgumentError`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"cannot write to '{out}': {error.strerror}. Choose another --out folder.") from error


def write_results(out: Path, name: str, values: Mapping[str, Any], drawing: "Drawing") -> list[Path]:
    """Write NAME.json, NAME.svg and NAME.png."""
    contents = {".json": (to_json(values) + "\n").encode(), ".svg": drawing.svg, ".png": drawing.png}
    paths = [out / f"{name}{suffix}" for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        try:
            path.write_bytes(content)
        except OSError as error:
            raise ArgumentError(f"cannot write '{path}': {error.strerror}. Choose another --out folder.") from error
    return paths
