"""The command `divebatch probe EXPERIMENT CHECKPOINT`."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from divebatch.cli import common
from divebatch.report.drawing import (
    LIMIT,
    MAIN,
    SECOND,
    THIRD,
    Drawing,
    add_heading,
    finish,
    require_matplotlib,
    size_axis,
    styled,
)

if TYPE_CHECKING:
    from divebatch.lab.probe import Branch, Noise, Probe

MOST_BEHIND = 100.0
"""Percent at which the axis ends, so that a diverged branch does not flatten the others."""


def probe(
    experiment: common.ExperimentName,
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of a run: OUT/EXPERIMENT/METHOD/seed-K.ckpt.")],
    factors: Annotated[
        str | None, typer.Option(help="Factors of the batch size: 1,2,4,8; by default up to a quarter of the window.")
    ] = None,
    window_samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples that each branch sees; by default one epoch, or a tenth of a pass."),
    ] = None,
    coupling: Annotated[
        str,
        typer.Option(help="Learning rate of k times the batch: sqrt, linear, adam, none, or a power like 0.6."),
    ] = "sqrt",
    repeats: Annotated[int, typer.Option(min=1, help="Number of data orders that each branch is trained on.")] = 3,
    tolerance: Annotated[float, typer.Option(help="Fraction by which the loss may exceed factor 1's.")] = 0.02,
    judge: Annotated[str, typer.Option(help="Loss to compare: train (smoothed) or validation.")] = "train",
    noise: Annotated[bool, typer.Option("--noise/--no-noise", help="Also measure noise scales.")] = True,
    data_dir: common.DataDir = Path("data"),
    device: common.Device = "cpu",
    settings: common.Settings = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the picture.")] = Path("runs/probe"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the critical batch size from a checkpoint.

    Train branches from the checkpoint at k times the batch size, and measure the noise scales there.
    """
    # Imported here: torch takes seconds, and help must not.
    from divebatch.lab import get_experiment
    from divebatch.lab import probe as lab

    with common.errors_exit_with(common.WRONG_USE):
        device = common.chosen_device(device)
        require_matplotlib()
        follows: Any = coupling
        with suppress(ValueError):
            follows = float(coupling)
        planned = get_experiment(experiment, settings or ())
        start = lab.find_start(checkpoint, planned.name)
        run = lab.run_of(start, planned, settings=settings or (), device=device, data_dir=data_dir)
        common.make_folder(out)
        branches = lab.BranchTrainer(run, start, judge)
        lab.require_settings(follows, tolerance, branches.trainer.optimizer)
        window, word = branches.window(window_samples), branches.metric.loss_word
        named = None if factors is None else common.whole_numbers("--factors", factors)
        chosen = lab.chosen_factors(named, start.batch_size, window, branches.dataset_size)

    def say(branch: "Branch") -> None:
        done = f"{branch.steps} steps, {word} {branch.loss:.4f}"
        typer.echo(f"batch {branch.batch_size}, repeat {branch.repeat + 1}: {done}", err=True)  # progress, no answer

    with common.errors_exit_with(common.FAILED):
        found = lab.probe_critical_batch(
            branches,
            window=window,
            factors=chosen,
            coupling=follows,
            repeats=repeats,
            tolerance=tolerance,
            on_branch=say,
        )
        noises = lab.measure_noise_scales(branches, samples=window) if noise else []
        name = f"{planned.name}-{start.header.method}-seed-{start.header.seed}-epoch-{start.epoch}"
        heading = f"{planned.name}, {start.header.method}, after {start.place}"
        values = {
            "experiment": start.header.experiment,
            "method": start.header.method,
            "seed": start.header.seed,
            "epoch": start.epoch,
            "samples_before": start.samples,
            "lr": branches.lr,
            "judge": judge,
            "unit": word,
            **found.to_dict(),
            "noise_scales": [asdict(each) for each in noises],
        }
        paths = common.write_results(out, name, _draw(name, heading, found, noises, word), values)
    if json:
        typer.echo(common.to_json(values))
    else:
        _show(heading, found, noises, word)
        typer.echo("\n".join(map(str, paths)))


def _show(heading: str, found: "Probe", noises: Sequence["Noise"], word: str) -> None:
    coupling = found.coupling if isinstance(found.coupling, str) else f"the power {found.coupling:g}"
    typer.echo(f"{heading}: branches of {found.window} samples, learning rate by {coupling}")
    rows = []
    for gap in found.gaps:
        compared = (f"{100 * gap.mean:+.1f} %", f"{100 * gap.low:+.1f} .. {100 * gap.high:+.1f} %", gap.verdict)
        shown = compared if gap.factor > 1 else ("", "", "")
        rows.append((str(gap.batch_size), str(gap.steps), f"{gap.loss:.4f}", *shown))
    common.print_table(
        ("batch", "steps", word, f"above batch {found.batch_size}", "95 % interval", ""), rows, left=("",)
    )
    if found.problem:
        typer.echo(found.problem)
    typer.secho(f"critical batch size: {found.critical}", bold=True)
    measured = []
    for each in noises:
        if not each.problem:
            middle = "?" if each.noise_scale is None else f"{each.noise_scale:.0f}"
            high = "no end" if each.high is None else f"{each.high:.0f}"
            measured.append((each.norm, each.estimator, middle, f"{each.low or 0:.0f} .. {high}"))
    if measured:
        common.print_table(("noise scale", "by", "samples", "95 % interval"), measured, left=("noise scale", "by"))
    for each in noises:
        if each.problem:
            typer.echo(f"not measured: {each.norm}, by {each.estimator}: {each.problem}")


def _draw(name: str, heading: str, probe: "Probe", noises: Sequence["Noise"], word: str) -> Drawing:
    with styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.8, 4.2), layout="constrained")
        axes, gaps, critical = figure.subplots(), probe.gaps, probe.critical
        sizes, middle = [gap.batch_size for gap in gaps], [_percent(gap.mean) for gap in gaps]
        below = [max(0.0, value - _percent(gap.low)) for value, gap in zip(middle, gaps, strict=True)]
        above = [max(0.0, _percent(gap.high) - value) for value, gap in zip(middle, gaps, strict=True)]
        axes.errorbar(sizes, middle, yerr=[below, above], color=MAIN, marker="o", capsize=3)
        axes.axvspan(critical.low, critical.high or 2 * sizes[-1], color=LIMIT, alpha=0.12, linewidth=0)
        axes.axvline(critical.size, color=LIMIT, linewidth=1.2)
        axes.axhline(100 * probe.tolerance, color=LIMIT, linewidth=1.2, linestyle=(0, (3, 2)))
        for noise, color in zip(noises, (SECOND, THIRD), strict=True) if noises else ():
            if noise.noise_scale is not None and math.isfinite(noise.noise_scale):
                label = f"noise scale, {noise.norm}"
                place = min(max(noise.noise_scale, sizes[0]), 2 * sizes[-1])
                axes.axvline(place, color=color, linestyle=(0, (1, 1)), label=label)
        size_axis(axes, sizes)
        axes.set_title(f"{word.capitalize()} above the present batch size's (%)", loc="left")
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        add_heading(figure, heading)
        caption = (
            f"{word.capitalize()} at the end of the window, relative to the present batch size on the same data; bars "
            "are 95 % intervals over repeats, the dashed line is the tolerance. The vertical line is the critical "
            "batch size, in the band of sizes where it may lie; dotted lines are noise scales, at most at the edge."
        )
        return finish(name, heading, figure, caption)


def _percent(part: float) -> float:
    return min(max(100 * part, -MOST_BEHIND), MOST_BEHIND)
