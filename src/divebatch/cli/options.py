"""Options that several commands have in common."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from divebatch.checks import require_choice
from divebatch.errors import ArgumentError

ExperimentName = Annotated[str, typer.Argument(help="Name, as `divebatch list` shows it, or a TOML file.")]
DataDir = Annotated[
    Path, typer.Option(envvar="DIVEBATCH_DATA", help="Folder that holds cifar-10-batches-py and its like.")
]
Device = Annotated[str, typer.Option(help="Device to run on: cpu or cuda.")]
Compile = Annotated[bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile.")]
MicroBatch = Annotated[int | None, typer.Option(min=1, help="Samples of one backward pass at most.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]


def require_device(device: str) -> None:
    """Raise for a device that is unknown or not there."""
    require_choice("device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device cuda: torch finds no GPU here; use --device cpu")


def comma_separated(text: str | None) -> list[str]:
    """The words of a list such as `a,b`, each once; none where the option was left out."""
    return list(dict.fromkeys(word.strip() for word in text.split(","))) if text is not None else []
