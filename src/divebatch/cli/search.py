"""The command `divebatch search EXPERIMENT`."""

import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from divebatch.cli import common
from divebatch.errors import MissingExtraError
from divebatch.records import Metric
from divebatch.report.drawing import Drawing, finish, require_matplotlib, styled

if TYPE_CHECKING:
    from divebatch.lab.search import Results, Search, Space, Tried

ROWS = 10
"""Rows of the printed table."""


def search(
    experiment: common.ExperimentName,
    method: Annotated[
        str | None, typer.Option(help="Method whose settings are searched; the first baseline by default.")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE,VALUE,... or NAME=LOW..HIGH; once for each setting. Default: the paper's grid."),
    ] = None,
    sampler: Annotated[str, typer.Option(help="How points are chosen: grid, random, tpe.")] = "grid",
    trials: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Points to try; a grid tries all of its own.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs; schedules are scaled to it.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, max=100_000, help="Number of seeds at each point; their mean counts.")
    ] = 1,
    held_out: Annotated[float, typer.Option(help="Fraction of the training data on which points are judged.")] = 0.2,
    apply_to: Annotated[str | None, typer.Option(help="Other methods that get the best settings too: a,b.")] = None,
    study: Annotated[str | None, typer.Option(help="Name of the study; EXPERIMENT-METHOD by default.")] = None,
    settings: common.Settings = None,
    data_dir: common.DataDir = Path("data"),
    device: common.Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for records and results.")] = Path("runs/search"),
    results: Annotated[bool, typer.Option("--results", help="Run nothing; show the results so far.")] = False,
    quiet: common.Quiet = False,
) -> None:
    """Find a method's best settings on held-out training data.

    Start the same command several times to share the work among processes. After an interruption, the same command
    continues.
    """
    # Imported here: torch takes seconds, and help must not.
    from divebatch.lab import get_experiment
    from divebatch.lab.search import Search, default_space, parse_space, work, write_best

    def say(text: str) -> None:
        if not quiet:
            typer.echo(text)

    with common.errors_exit_with(common.WRONG_USE):
        tuned = get_experiment(experiment, settings or ())
        name = method or tuned.baseline
        space = parse_space(over) if over else default_space(tuned, tuned.method(name))
        plan = Search(
            experiment=tuned,
            method_name=name,
            folder=out,
            space=space,
            epochs=epochs,
            sampler=sampler,
            num_trials=trials,
            seed=seed,
            num_seeds=seeds,
            held_out=held_out,
            study_name=study or "",
            run_settings={"device": common.chosen_device(device), "data_dir": data_dir},
        )
        others = common.comma_separated(apply_to)
        for other in others:
            tuned.method(other)  # raises if the name is unknown
        common.make_folder(out)
        plan.begin()
    if not results:
        waited: list[int] = []

        def on_wait(running: int) -> None:
            if not waited:
                say(f"waiting for {running} points of other processes")
            waited.append(running)

        way_on = f"the same command continues the search:\n  {common.command_again()}"
        with common.errors_exit_with(common.FAILED), common.interrupts_say(way_on):
            work(plan, on_result=lambda tried: say(_line(plan, tried)), on_wait=on_wait)
    found = plan.results()
    with common.errors_exit_with(common.FAILED):
        best = write_best(plan, found, apply_to=others)
        paths = [] if best is None else [best]
        with suppress(MissingExtraError):  # without matplotlib there is no picture
            if best is not None and len(plan.space) > 1:
                paths += common.write_results(out, plan.name, draw(plan.space, found, plan.name))
    if not quiet:
        _show(plan, paths)


def _line(plan: "Search", tried: "Tried") -> str:
    metric = plan.experiment.metric
    settings = ", ".join(f"{name} {value:g}" for name, value in tried.point.items())
    value = "failed" if tried.value is None else f"{metric.word} {metric.text(tried.value)}"
    note = f" ({tried.note})" if tried.note else ""
    return f"[{len(plan.results().tried)}/{plan.total}] {settings}: {value}{note}"


def _show(plan: "Search", paths: list[Path]) -> None:
    found, metric, names = plan.results(), plan.experiment.metric, tuple(plan.space)
    typer.echo(f"{plan.name}: {len(found.tried)} of {found.total} trials, the best {ROWS}")
    rows = []
    for each in found.tried[:ROWS]:
        value = "failed" if each.value is None else metric.text(each.value)
        rows.append((*(f"{each.point[name]:g}" for name in names), value, each.note[:60]))
    common.print_table((*names, metric.word, ""), rows, left=("",))
    for path in paths:
        typer.echo(str(path))
    if found.best is not None:
        typer.echo(f"next: divebatch run {paths[0]} --methods {plan.method_name}")


def draw(space: "Space", results: "Results", name: str) -> Drawing:
    """Draw the results over two settings: a heat map for a grid, points for ranges.

    If there are more settings, the first two are shown, each place with the best result over the others.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    metric = results.metric
    with styled():
        figure = Figure(figsize=(7.0, 4.6), layout="constrained")
        axes = figure.subplots()
        colours = "viridis" if metric.higher_is_better else "viridis_r"  # bright is good
        has_range = any(hasattr(values, "low") for values in space.values())
        mappable = (_points if has_range else _heat_map)(axes, space, results, colours)
        what = "accuracy on held-out data (%)" if metric.is_accuracy else f"{metric.name} on held-out data"
        figure.colorbar(mappable, ax=axes, label=what)
        words = {"lr": "learning rate", "max_batch_size": "largest batch size"}
        y, x = (words.get(setting, setting.replace("_", " ")) for setting in list(space)[:2])
        axes.set(xlabel=x, ylabel=y)
        return finish(name, name, figure, what)


def cells(space: "Space", results: "Results") -> list[list[float]]:
    """Return the heat map's values, with a row for each value of the first setting.

    NaN marks a cell without trials; if all trials failed, the cell has the worst value. Accuracies are in percent.
    """
    (row_name, rows), (column_name, columns), *_ = space.items()
    table = []
    for row in rows:
        here = [each for each in results.tried if each.point[row_name] == row]
        values = [[_shown(each, results.metric) for each in here if each.point[column_name] == c] for c in columns]
        table.append([math.nan if (best := results.metric.best(found)) is None else best for found in values])
    return table


def _shown(tried: "Tried", metric: Metric) -> float:
    value = metric.worst if tried.value is None else tried.value
    return 100 * value if metric.is_accuracy else value


def _heat_map(axes: Any, space: "Space", results: "Results", colours: str) -> Any:
    table, metric = cells(space, results), results.metric
    good = [value for row in table for value in row if math.isfinite(value) and value != metric.worst]
    low, high = min(good, default=0.0), max(good, default=0.0)  # diverged trials have no shade
    mappable = axes.imshow(table, aspect="auto", cmap=colours, vmin=low, vmax=high)
    axes.grid(visible=False)
    for which, values in zip((axes.set_yticks, axes.set_xticks), space.values(), strict=False):
        which(range(len(values)), [f"{value:g}" for value in values])
    for row, shown in enumerate(table):
        for column, value in enumerate(shown):
            if not math.isnan(value):
                is_dark = (value <= (low + high) / 2) == metric.higher_is_better
                weight = "bold" if value == metric.best(good) else None
                style = {"color": "white" if is_dark else "black", "ha": "center", "va": "center", "weight": weight}
                axes.text(column, row, f"{value:.3g}", **style)
    return mappable


def _points(axes: Any, space: "Space", results: "Results", colours: str) -> Any:
    finite = [(each.point, value) for each in results.tried if math.isfinite(value := _shown(each, results.metric))]
    rows, columns = ([point[name] for point, _ in finite] for name in list(space)[:2])
    axes.set(xscale="log", yscale="log")
    return axes.scatter(columns, rows, c=[value for _, value in finite], cmap=colours, s=60)
