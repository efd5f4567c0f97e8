"""What `divebatch list` does."""

from typing import Literal

from rich.table import Table

from divebatch.cli.console import make_console
from divebatch.lab.experiments import Experiment, experiment_names, get_experiment
from divebatch.lab.experiments.schema import Part


def show_experiments() -> None:
    """Show every experiment with its methods."""
    console = make_console()
    for name in experiment_names():
        experiment = get_experiment(name)
        console.print(f"[bold]{name}[/bold]: {experiment.summary}", highlight=False)
        console.print(f"{experiment.epochs} epochs, {experiment.trials} trials; {experiment.paper}", style="dim")
        console.print(_methods(experiment))


def _methods(experiment: Experiment) -> Table:
    table = Table(box=None, padding=(0, 1))
    for column in ("method", "policy", "batch", "lr", "coupling"):
        justify: Literal["left", "right"] = "right" if column in ("batch", "lr") else "left"
        table.add_column(column, justify=justify, no_wrap=column == "method", overflow="fold")
    for name, method in experiment.methods.items():
        policy = f"{method.policy.kind}({_settings(method.policy)})"
        if method.estimator is not None:
            policy += f" with {_estimator(method.estimator)}"
        table.add_row(name, policy, str(method.batch_size), f"{method.lr:g}", str(method.lr_coupling or "policy's"))
    return table


def _estimator(chosen: str | Part) -> str:
    return chosen if isinstance(chosen, str) else f"{chosen.kind}({_settings(chosen)})"


def _settings(part: Part) -> str:
    return ", ".join(f"{key}={value}" for key, value in part.settings.items())
