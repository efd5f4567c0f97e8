"""How a command ends: one message in the command line's own words, the right exit code, no traceback."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import typer

from divebatch.errors import DivebatchError, RankError

FAILED = 1
WRONG_USE = 2

OPTIONS = (
    (r"\bresume=True", "--resume"),
    (r"\bcompile=False", "--set training.compile=false"),
    (r"\bcompile=False", "--no-compile"),
    (r"\bmicro_batch_size=(\d+)", r"--set training.micro_batch_size=\1"),
    (r"\bmicro_batch_size=(\d+)", r"--micro-batch \1"),
    (r"\bsamples=(\d+)", r"--set samples=\1"),
    (r"\bkeep_epochs=(-?\d+)", r"--keep-checkpoints \1"),
    (r"\banother study_name\b", "another --study name"),
    (r"\bsampler='(\w+)'", r"--sampler \1"),
    (r"\bchoose by method and seed\b", "choose with --method and --seed"),
    (r"\bdata_dir=", "--data-dir "),
    (r"\banother folder\b", "another --out folder"),
)
"""Arguments as errors of library and laboratory name them, and the options that set them, if a command has these."""


def in_options(message: str) -> str:
    """Name options where an error names arguments, as far as the current command has such options."""
    # Of typer's own copy of click, or of the package that older ones take.
    clicks = import_module(typer.Context.__mro__[1].__module__.replace(".core", ".globals"))
    context = clicks.get_current_context(silent=True)
    known = {word for each in context.command.params for word in each.opts} if context is not None else set()
    for argument, option in OPTIONS:
        if known.issuperset(re.findall(r"--[\w-]+", option)):
            message = re.sub(argument, option, message)
    return message


def leave(message: str, code: int, *, is_own: bool = False) -> typer.Exit:
    """Print `message` to stderr, of several ranks on the first one only unless it `is_own`; raise what comes back."""
    if is_own or os.environ.get("RANK", "0") == "0":
        typer.echo(f"divebatch: {in_options(message)}", err=True)
    return typer.Exit(code)


@contextmanager
def errors_exit_with(code: int) -> Iterator[None]:
    """Inside, an error raised on purpose ends the program with this code; the loss of a rank is nobody's wrong use."""
    try:
        yield
    except RankError as error:
        raise leave(str(error), FAILED, is_own=True) from error
    except DivebatchError as error:
        raise leave(str(error), code) from error


def command_again(*more: str) -> str:
    """The command that was typed, with `more` where it is not there yet; ready to paste into a shell."""
    words = sys.argv[1:]
    return shlex.join([*_program(), *words, *(word for word in more if word not in words)])


def _is_alone() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1"


def _program() -> list[str]:
    """How this was started: by itself, or by torchrun on each of its processes."""
    if _is_alone():
        return ["divebatch"]
    return ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1"), "-m", "divebatch"]
