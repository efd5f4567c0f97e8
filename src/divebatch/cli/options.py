"""Options that several commands have in common."""

from pathlib import Path
from typing import Annotated

import typer

ExperimentName = Annotated[str, typer.Argument(help="Name, as `divebatch list` shows it, or a TOML file.")]
DataDir = Annotated[Path, typer.Option(envvar="DIVEBATCH_DATA", help="Holds cifar-10-batches-py and its like.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Compile = Annotated[bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile.")]
MicroBatch = Annotated[int | None, typer.Option(min=1, help="Most samples of one backward pass.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing but errors.")]
