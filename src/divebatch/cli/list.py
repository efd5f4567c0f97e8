"""`divebatch list`."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from divebatch.cli.console import make_console
from divebatch.cli.exits import WRONG_USE, errors_exit_with

if TYPE_CHECKING:
    from divebatch.lab import Experiment
    from divebatch.lab.schema import Part


def list_experiments(
    experiment: Annotated[str | None, typer.Argument(help="Show the methods of this experiment.")] = None,
) -> None:
    """Show every experiment on a line, or the methods of one."""
    from divebatch.lab import experiment_names, get_experiment  # torch takes seconds, and help must not

    console = make_console()
    if experiment is not None:
        with errors_exit_with(WRONG_USE):
            shown = get_experiment(experiment)
        console.print(Text(f"{shown.name}: {shown.summary}"))
        console.print(Text(f"{shown.epochs} epochs, {shown.trials} trials; {shown.paper}"))
        console.print(_methods(shown))
        return
    names = experiment_names()
    for name in names:
        line = Text(f"{name.ljust(max(map(len, names)))}  {get_experiment(name).summary}")
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    console.print("divebatch list NAME shows the methods of one.", highlight=False)


def _methods(experiment: "Experiment") -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    table.add_column("policy", overflow="fold")
    for column in ("batch", "lr"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, method in experiment.methods.items():
        policy = _call(method.policy)
        if method.estimator is not None:
            policy += f" with {method.estimator if isinstance(method.estimator, str) else _call(method.estimator)}"
        if method.lr_coupling is not None:
            policy += f", {method.lr_coupling} rate"
        table.add_row(*map(Text, (name, policy, str(method.batch_size), f"{method.lr:g}")))
    return table


def _call(part: "Part") -> str:
    """Return for instance `auto(max_batch_size=2048)`."""
    settings = ", ".join(f"{key}={value}" for key, value in part.settings.items())
    return f"{part.kind}({settings})"
