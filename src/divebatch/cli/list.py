"""The command `divebatch list`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from divebatch.cli.common import WRONG_USE, errors_exit_with, make_console, print_table

if TYPE_CHECKING:
    from divebatch.lab import Experiment
    from divebatch.lab.schema import Part


def list_experiments(
    experiment: Annotated[str | None, typer.Argument(help="Show the methods of this experiment.")] = None,
) -> None:
    """List the experiments, or the methods of one of them."""
    from divebatch.lab import experiment_names, get_experiment  # imports torch: seconds, which help must not take

    if experiment is not None:
        with errors_exit_with(WRONG_USE):
            shown = get_experiment(experiment)
        typer.echo(f"{shown.name}: {shown.summary}")
        typer.echo(f"{shown.epochs} epochs, {shown.trials} trials; {shown.paper}")
        print_table(("method", "policy", "batch", "lr"), _methods(shown), left=("method", "policy"))
        return
    console, names = make_console(), experiment_names()
    for name in names:
        line = Text(f"{name.ljust(max(map(len, names)))}  {get_experiment(name).summary}")
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    typer.echo("divebatch list NAME shows the methods of one.")


def _methods(experiment: "Experiment") -> Iterator[tuple[str, ...]]:
    for name, method in experiment.methods.items():
        policy = _call(method.policy)
        if method.estimator is not None:
            policy += f" with {method.estimator if isinstance(method.estimator, str) else _call(method.estimator)}"
        if method.lr_coupling is not None:
            policy += f", {method.lr_coupling} rate"
        yield name, policy, str(method.batch_size), f"{method.lr:g}"


def _call(part: "Part") -> str:
    """Return text like `auto(max_batch_size=2048)`."""
    settings = ", ".join(f"{key}={value}" for key, value in part.settings.items())
    return f"{part.kind}({settings})"
