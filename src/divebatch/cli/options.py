"""Options that several commands have in common."""

import re
from pathlib import Path
from typing import Annotated

import typer

from divebatch.errors import ArgumentError

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
