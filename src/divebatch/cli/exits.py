"""End a command with one message and the right exit code, without a traceback."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from divebatch.errors import DivebatchError, RankError, StoppedError

FAILED = 1
WRONG_USE = 2


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
