"""Where tables are printed."""

from rich.console import Console

FILE_WIDTH = 10_000
"""Columns where no terminal shows the output: programs read it, and nothing may be cut or wrapped."""


def make_console() -> Console:
    """As wide as the terminal; into a pipe or a file as wide as anything may be."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)
