"""The command `divebatch frontier RECORDS`."""

from pathlib import Path
from typing import Annotated

import typer

from divebatch.cli.common import FAILED, WRONG_USE, errors_exit_with, leave, print_table
from divebatch.report.frontier import COLUMNS, Frontier, draw, read_trials, rows, score, write_csv


def frontier(
    records: Annotated[Path, typer.Argument(help="Folder that `divebatch run --out` wrote, or a file of trials.")],
    workload: Annotated[str | None, typer.Option(help="One workload; all by default.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write frontier.csv and a picture of each workload here.")
    ] = None,
) -> None:
    """Score methods against tuned fixed batch sizes.

    A score is the method's steps over the frontier's at equal loss. Each fixed size needs at least three rates, and
    the best rate needs a worse one on either side.
    """
    if not records.exists():
        raise leave(f"'{records}' does not exist", WRONG_USE)
    with errors_exit_with(FAILED):
        trials = read_trials(records)
    known = list(dict.fromkeys(each.workload for each in trials))
    if workload is not None and workload not in known:
        raise leave(f"no runs of {workload!r}; known: {', '.join(known)}", WRONG_USE)
    found = score(each for each in trials if workload in (None, each.workload))
    for each in found:
        _show(each)
    if out is not None:
        with errors_exit_with(FAILED):
            out.mkdir(parents=True, exist_ok=True)
            write_csv(found, out / "frontier.csv")
            for each in found:
                draw(each).savefig(out / f"frontier-{each.workload}.svg")


def _show(found: Frontier) -> None:
    sizes = ", ".join(f"{each.batch_size} ({each.lr:g})" for each in found.sizes)
    typer.echo(f"{found.workload}: fixed sizes (tuned rates) {sizes}")
    for problem in found.problems:
        typer.echo(f"  not scored: {problem}")
    if not found.problems:
        noise = "" if found.noise is None else f"; two fixed sizes differ by chance by {found.noise:.2g}"
        typer.echo(f"knee {found.knee}{noise}")
        print_table(COLUMNS, rows(found), left=("method",))
        for each in found.scores:
            if each.ratio is None:
                relative = {"at equal steps": each.at_equal_steps, "against fixed": each.against_first}
                known = [f"{part:+.2%} {name}" for name, part in relative.items() if part is not None]
                numbers = ", ".join([f"{each.steps:.0f} steps", f"loss {each.loss:.4f}", *known])
                typer.echo(f"no ratio for {each.method} from {each.batch_size} ({numbers}): {each.problem}")
