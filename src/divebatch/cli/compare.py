"""The command `divebatch compare DIR METHOD_A METHOD_B`."""

from pathlib import Path
from typing import Annotated

import typer

from divebatch.cli.common import FAILED, WRONG_USE, errors_exit_with, leave
from divebatch.report import RecordedExperiment, analyse, load_runs
from divebatch.report.compare import compare_methods


def compare(
    folder: Annotated[Path, typer.Argument(help="Folder that `divebatch run --out` wrote.")],
    first: Annotated[str, typer.Argument(help="A method, as the records name it.")],
    second: Annotated[str, typer.Argument(help="Another method.")],
    experiment: Annotated[str | None, typer.Option(help="One experiment; by default all with both methods.")] = None,
    against: Annotated[Path | None, typer.Option(help="Look for the second method in this folder.")] = None,
) -> None:
    """Test whether two methods differ, paired over seeds.

    Print the difference with an interval and an effect size.
    """
    for each in (folder, against):
        if each is not None and not each.is_dir():
            raise leave(f"'{each}' is not a folder", WRONG_USE)
    with errors_exit_with(FAILED):
        here = {each.name: each for each in load_runs(folder).experiments}
        there = {each.name: each for each in load_runs(against).experiments} if against is not None else here
    label = f"{second} in {against}" if against is not None else second
    for name in _common(here, there, first, second, experiment):
        other = analyse(there[name]) if against is not None else None
        found = compare_methods(analyse(here[name]), first, second, against=other, names=(first, label))
        count, width = len(found.seeds), max(map(len, found.answers), default=0)
        typer.echo(f"{name}: {first} against {label}, {count} seed{'s' * (count != 1)}")
        for measure, answer in found.answers.items():
            typer.echo(f"  {measure.ljust(width)}  {answer}")
        for line in found.cautions:
            typer.echo(f"  {line}")


def _common(
    here: dict[str, RecordedExperiment],
    there: dict[str, RecordedExperiment],
    first: str,
    second: str,
    wanted: str | None,
) -> list[str]:
    """Return the experiments that have both methods, or exit with the known names."""
    for experiments, method in ((here, first), (there, second)):
        known = sorted({name for experiment in experiments.values() for name in experiment.methods})
        if method not in known:
            raise leave(f"no run of method {method!r}; known: {', '.join(known)}", WRONG_USE)
    names = [name for name in here if first in here[name].methods and name in there and second in there[name].methods]
    if wanted is not None and wanted not in names:
        raise leave(f"experiment {wanted!r} lacks one of the methods; known: {', '.join(names) or 'none'}", WRONG_USE)
    if not names:
        raise leave(f"no experiment has both {first} and {second}", FAILED)
    return names if wanted is None else [wanted]
