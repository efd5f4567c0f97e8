"""`divebatch watch DIR`."""

from pathlib import Path
from time import sleep
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from divebatch.cli.console import make_console
from divebatch.cli.exits import WRONG_USE, leave
from divebatch.cli.progress import duration, rate
from divebatch.report.watch import Standing, Watch

COLUMNS = ("run", "state", "epoch", "batch", "lr", "diversity", "samples/s", "left", "val loss", "acc %", "best")
COLOURS = {"running": "green", "stopped": "yellow", "finished": ""}


def watch(
    folder: Annotated[Path, typer.Argument(help="Folder that `divebatch run --out` writes.")],
    once: Annotated[bool, typer.Option("--once", help="Show how things stand and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds from look to look.")] = 2.0,
) -> None:
    """Show running and finished runs, live, until Ctrl-C. Reads records only; into a file it shows them once."""
    if not folder.is_dir():
        raise leave(f"'{folder}' is not a folder", WRONG_USE)
    watched, console = Watch(folder), make_console()
    if once or not console.is_terminal:
        console.print(_view(watched, limit=None))
        return
    try:
        _follow(watched, console, every)
    except KeyboardInterrupt:
        return


def _follow(watched: Watch, console: Console, every: float) -> None:
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(_view(watched, limit=max(1, console.height - 6)), refresh=True)
            sleep(every)


def _view(watched: Watch, *, limit: int | None) -> Group:
    """Running runs first; of more than fit, the rest is counted."""
    standings = watched.look()
    counts = {state: sum(each.state == state for each in standings) for state in COLOURS}
    title = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no runs yet"
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("run", "state") else "right", no_wrap=column != "run")
    for standing in standings[:limit]:
        table.add_row(*_row(standing), style=COLOURS[standing.state])
    parts: list[Text | Table] = [Text(f"{watched.folder}: {title}"), *([table] if standings else [])]
    if limit is not None and len(standings) > limit:
        parts.append(Text(f"and {len(standings) - limit} more"))
    parts += [Text(f"not read: {problem}") for problem in watched.problems[:3]]
    return Group(*parts)


def _row(standing: Standing) -> list[Text]:
    record, planned = standing.last, standing.run.planned_epochs or "?"
    if record is None:
        cells = [standing.name, standing.state, f"0/{planned}", *[""] * 8]
    else:
        silent = f" {duration(standing.silent_seconds)} ago" if standing.state == "stopped" else ""
        cells = [standing.name, f"{standing.state}{silent}", f"{record.epoch}/{planned}", str(record.batch_size)]
        cells += [f"{record.lr:.4g}", "" if record.diversity is None else f"{record.diversity:.3g}"]
        cells += [rate(standing.samples_per_second), duration(standing.seconds_left)]
        cells += ["diverged" if record.val_loss is None else f"{record.val_loss:.4f}"]
        cells += ["" if record.val_accuracy is None else f"{100 * record.val_accuracy:.2f}", standing.best]
    return list(map(Text, cells))  # as text: names in records may look like markup
