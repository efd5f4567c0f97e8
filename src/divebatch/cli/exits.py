"""Errors as a person at a terminal wants them: one message, the right exit code, no traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from divebatch.errors import DivebatchError
from divebatch.lab.experiments import speaks_first

FAILED, WRONG_USE = 1, 2


def leave(message: str, code: int) -> typer.Exit:
    """Print `message` to stderr, once for all ranks of a job; raise what comes back."""
    if speaks_first():
        typer.echo(f"divebatch: {message}", err=True)
    return typer.Exit(code)


@contextmanager
def errors_exit_with(code: int) -> Iterator[None]:
    """Inside, an error raised on purpose ends the program with this code."""
    try:
        yield
    except DivebatchError as error:
        raise leave(str(error), code) from error
