"""The command `divebatch watch DIR`."""

from pathlib import Path
from time import sleep
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from divebatch.cli.common import WRONG_USE, leave, make_console
from divebatch.cli.progress import duration, rate
from divebatch.report.live import STATES, Standing, Watch, printable

COLUMNS = ("run", "state", "epoch", "batch", "lr", "left", "val loss", "metric", "best", "samples/s", "noise scale")
NARROW, WIDE = 8, 100
"""Number of columns on a narrow terminal, and the width in characters of a wide one."""
COLOURS = dict(zip(STATES, ("green", "yellow", ""), strict=True))


def watch(
    folder: Annotated[Path, typer.Argument(help="Folder that `divebatch run --out` writes.")],
    once: Annotated[bool, typer.Option("--once", help="Show the runs once and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show running and finished runs, live, until Ctrl-C.

    The command only reads records. Into a pipe or a file the runs are shown once.
    """
    if not folder.is_dir():
        raise leave(f"'{folder}' is not a folder", WRONG_USE)
    watched, console = Watch(folder), make_console()
    if once or not console.is_terminal:
        console.print(_view(watched, console.width))
        return
    try:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(_view(watched, console.width, room=max(1, console.height - 6)), refresh=True)
                sleep(every)
    except KeyboardInterrupt:
        return


def _view(watched: Watch, width: int, *, room: int | None = None) -> Group:
    """Show running runs first, below their experiment's name; count the runs that do not fit."""
    standings = watched.look()
    counts = {state: sum(each.state == state for each in standings) for state in COLOURS}
    title = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no runs yet"
    shown = len(COLUMNS) if width >= WIDE else NARROW
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in COLUMNS[:shown]:
        table.add_column(column, justify="left" if column in ("run", "state") else "right", no_wrap=True)
    experiment, num_shown = None, 0
    for standing in standings:
        is_new = standing.run.header.experiment != experiment
        if room is not None and table.row_count + 1 + is_new > room and num_shown:
            break
        if is_new:
            experiment = standing.run.header.experiment
            table.add_row(Text(printable(experiment), style="bold"))
        table.add_row(*_cells(standing)[:shown], style=COLOURS[standing.state])
        num_shown += 1
    parts: list[Text | Table] = [Text(f"{watched.folder}: {title}"), *([table] if standings else [])]
    if num_shown < len(standings):
        parts.append(Text(f"and {len(standings) - num_shown} more"))
    parts += [Text(f"not read: {problem}") for problem in watched.problems[:3]]
    return Group(*parts)


def _cells(standing: Standing) -> list[Text]:
    record, metric = standing.run.last, standing.run.header.metric
    progress = f"{record.epoch if record else 0}/{standing.run.planned_epochs or '?'}"
    name = f"  {standing.name}"
    if record is None:
        cells = [name, standing.state, progress, *[""] * (len(COLUMNS) - 3)]
    else:
        value = metric.of(record)
        cells = [
            name,
            standing.state + (f" {duration(standing.silent_seconds)} ago" if standing.state == "stopped" else ""),
            progress,
            str(record.batch_size),
            f"{record.lr:.4g}",
            duration(standing.seconds_left),
            "diverged" if record.val_loss is None else f"{record.val_loss:.4f}",
            "" if value is None else metric.text(value),
            standing.best,
            rate(standing.samples_per_second),
            "" if record.noise_scale is None else f"{record.noise_scale:.0f}",
        ]
    return list(map(Text, cells))  # plain text: names in records may look like markup
