"""What several commands share: options, ends with one message and an exit code, tables and files of results."""

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
    Path, typer.Option(envvar="DIVEBATCH_DATA", help="Folder that holds cifar-10-batches-py and its like.")
]
Device = Annotated[str, typer.Option(help="Device to run on: cpu, cuda, cuda:1, mps, or auto: a GPU if there is one.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change the file: training.precision=bf16, model.kind=resnet20; may be repeated."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]


def chosen_device(device: str) -> str:
    """Return the device that an option means; raise for one that is unknown or not there.

    `auto` is an NVIDIA or AMD GPU or the CPU. Apple's GPUs (mps) know no float64, which norms are summed in, so they
    are taken only by name.
    """
    import torch  # seconds, which the command's help must not take

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
    """Return the words of a list such as `a,b`, each once; none if the option was left out."""
    return list(dict.fromkeys(word.strip() for word in text.split(","))) if text is not None else []


def whole_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Return the numbers of a list such as `1,2,4`; none if the option was left out."""
    try:
        return tuple(int(word) for word in comma_separated(text))
    except ValueError as error:
        raise ArgumentError(f"{option} must be whole numbers such as 1,2,4, got {text!r}") from error


# Ends without a traceback

FAILED, WRONG_USE = 1, 2


def leave(message: str, code: int, *, is_own: bool = False) -> typer.Exit:
    """Print `message` to stderr, of several ranks on the first one only unless it `is_own`; raise what comes back."""
    if is_own or os.environ.get("RANK", "0") == "0":
        typer.echo(f"divebatch: {message}", err=True)
    return typer.Exit(code)


@contextmanager
def errors_exit_with(code: int) -> Iterator[None]:
    """End the program with this code at an error raised on purpose; the loss of a rank is nobody's wrong use."""
    try:
        yield
    except RankError as error:
        raise leave(str(error), FAILED, is_own=True) from error
    except DivebatchError as error:
        raise leave(str(error), code) from error


@contextmanager
def interrupts_say(way_on: str) -> Iterator[None]:
    """End the program with `way_on` if it was asked to stop."""
    try:
        yield
    except (StoppedError, KeyboardInterrupt) as error:
        raise leave(f"{str(error) or 'interrupted'}; {way_on}", FAILED) from None


def command_again(*more: str) -> str:
    """Return the command that was typed, with `more` if it lacks that, ready to paste into a shell."""
    words, program = sys.argv[1:], ["divebatch"]
    if os.environ.get("WORLD_SIZE", "1") != "1":  # torchrun has started this on each of its processes
        program = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1"), "-m", "divebatch"]
    return shlex.join([*program, *words, *(word for word in more if word not in words)])


# Tables and files

FILE_WIDTH = 10_000
"""Columns where no terminal shows the output: programs read it, and nothing may be cut or wrapped."""
LONGEST_NUMBER = 12
"""Characters of a word that a narrow terminal may not break."""


def make_console() -> Console:
    """Return a console as wide as the terminal, or into a pipe or a file as wide as anything may be."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=FILE_WIDTH, highlight=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str]) -> None:
    """Print plain text in columns; those in `left` begin at the left, and none breaks a number."""
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
