"""Options, exits, tables and result files that several commands share."""

import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from divebatch.errors import ArgumentError, DivebatchError, RankError, StoppedError
from divebatch.records import finite

if TYPE_CHECKING:
    from divebatch.report.drawing import Drawing

# Options

ExperimentName = Annotated[str, typer.Argument(help="Name, as `divebatch list` shows it, or a TOML file.")]
DataDir = Annotated[
    Path, typer.Option(envvar="DIVEBATCH_DATA", help="Folder with datasets such as cifar-10-batches-py.")
]
Device = Annotated[str, typer.Option(help="Device to run on: cpu, cuda, cuda:1, mps, or auto: a GPU if there is one.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting: training.precision=bf16, model.kind=resnet20; may be repeated."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]


def chosen_device(device: str) -> str:
    """Return the device that an option names; raise if the device is unknown or missing.

    `auto` means an NVIDIA or AMD GPU, or else the CPU. Apple's GPUs (mps) lack float64, in which norms are summed, so
    `auto` never chooses them.
    """
    import torch  # takes seconds, and help must not

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    found = re.fullmatch(r"cpu|mps|cuda(?::(\d+))?", device)
    if found is None:
        raise ArgumentError(f"unknown device {device!r}; known: cpu, cuda, cuda:N, mps, auto")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ArgumentError(f"device {device}: torch finds no GPU here; use --device cpu or --device auto")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ArgumentError("device mps: torch finds no Apple GPU here; use --device cpu or --device auto")
    if found[1] is not None and int(found[1]) >= torch.cuda.device_count():
        raise ArgumentError(f"device {device}: torch finds {torch.cuda.device_count()} GPUs here, counted from 0")
    return device


def comma_separated(text: str | None) -> list[str]:
    """Split a list such as `a,b` into its distinct words; None: no words."""
    return list(dict.fromkeys(word.strip() for word in text.split(","))) if text is not None else []


def whole_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Parse a list such as `1,2,4`; None: no numbers."""
    try:
        return tuple(int(word) for word in comma_separated(text))
    except ValueError as error:
        raise ArgumentError(f"{option} must be whole numbers such as 1,2,4, got {text!r}") from error


# Exits without a traceback

FAILED, WRONG_USE = 1, 2


def leave(message: str, code: int, *, is_own: bool = False) -> typer.Exit:
    """Print a message on the first rank, or on this rank if the message `is_own`; return the exit to raise."""
    if is_own or os.environ.get("RANK", "0") == "0":
        typer.echo(f"divebatch: {message}", err=True)
    return typer.Exit(code)


@contextmanager
def errors_exit_with(code: int) -> Iterator[None]:
    """Exit with this code if the package raises an error, or with `FAILED` if a rank is lost."""
    try:
        yield
    except RankError as error:
        raise leave(str(error), FAILED, is_own=True) from error
    except DivebatchError as error:
        raise leave(str(error), code) from error


@contextmanager
def interrupts_say(way_on: str) -> Iterator[None]:
    """Exit with the message `way_on` if the program is asked to stop."""
    try:
        yield
    except (StoppedError, KeyboardInterrupt) as error:
        raise leave(f"{str(error) or 'interrupted'}; {way_on}", FAILED) from None


def command_again(*more: str) -> str:
    """Return the typed command plus the words of `more` that are missing, ready to paste into a shell."""
    words, program = sys.argv[1:], ["divebatch"]
    if os.environ.get("WORLD_SIZE", "1") != "1":  # torchrun started this process
        program = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1"), "-m", "divebatch"]
    return shlex.join([*program, *words, *(word for word in more if word not in words)])


# Tables and files

FILE_WIDTH = 10_000
"""Columns of output into a pipe or a file: wide enough that nothing is cut or wrapped."""
LONGEST_NUMBER = 12
"""Length up to which a narrow terminal must not break a word."""


def make_console() -> Console:
    """Return a console as wide as the terminal, or `FILE_WIDTH` columns into a pipe or a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=FILE_WIDTH, highlight=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str]) -> None:
    """Print a plain table. The columns in `left` are left-aligned, and no number is broken."""
    table, cells = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False), list(rows)
    for place, column in enumerate(columns):
        longest = max(len(word) for row in (columns, *cells) for word in row[place].split() or [""])
        least = longest if longest <= LONGEST_NUMBER else None
        table.add_column(column, justify="left" if column in left else "right", overflow="fold", min_width=least)
    for row in cells:
        table.add_row(*map(Text, row))  # plain text: names may look like markup
    make_console().print(table)


def to_json(value: Any) -> str:
    """Return indented JSON with null for NaN and infinities."""
    return json.dumps(finite(value), indent=2, allow_nan=False)


def make_folder(out: Path) -> None:
    """Make a folder for results; raise `ArgumentError` if that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"cannot write to '{out}': {error.strerror}. Choose another --out folder.") from error


def write_results(out: Path, name: str, drawing: "Drawing", values: Mapping[str, Any] | None = None) -> list[Path]:
    """Write NAME.svg and NAME.png, and NAME.json if there are values."""
    contents = {} if values is None else {".json": (to_json(values) + "\n").encode()}
    contents |= {".svg": drawing.svg, ".png": drawing.png}
    paths = [out / f"{name}{suffix}" for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        try:
            path.write_bytes(content)
        except OSError as error:
            raise ArgumentError(f"cannot write '{path}': {error.strerror}. Choose another --out folder.") from error
    return paths
