"""The command `divebatch advise EXPERIMENT` or `divebatch advise module:function`."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from divebatch.cli import common
from divebatch.report.drawing import finish, require_matplotlib, styled


def advise(
    target: Annotated[
        str,
        typer.Argument(help="An experiment, a TOML file, or module:function that returns model, loss_fn, dataset, ..."),
    ],
    method: Annotated[
        str | None, typer.Option(help="Method whose batch size and rate to use; the baseline by default.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=2, help="Batch size that the learning rate belongs to.")] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Sizes to time: 32,64,128; powers of two by default.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of the short run that shows the noise.")] = 300,
    timing_seconds: Annotated[float, typer.Option(help="Most seconds for timing, without the warm-up.")] = 60.0,
    estimator: Annotated[
        str, typer.Option(help="Estimator of the noise: split, moments or per-sample (not for BatchNorm).")
    ] = "split",
    data_dir: common.DataDir = Path("data"),
    device: common.Device = "cpu",
    settings: common.Settings = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of data, model and order.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the picture.")] = Path("runs/advice"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")] = False,
) -> None:
    """Recommend a batch size and learning rate to start with.

    Also say at which size growth stops paying on this device, and why.
    """
    # Imported here: torch takes seconds, and help must not.
    from divebatch.advice.plot import CAPTION
    from divebatch.advice.text import step_in_words
    from divebatch.lab import get_experiment
    from divebatch.lab.advise import advise_as_trained, parts_of_experiment, parts_of_own
    from divebatch.lab.schema import parse_options

    with common.errors_exit_with(common.WRONG_USE):
        device, clip_norm = common.chosen_device(device), None
        require_matplotlib()
        sizes = None if batch_sizes is None else common.whole_numbers("--batch-sizes", batch_sizes)
        common.make_folder(out)
        if ":" in target and not target.endswith(".toml"):
            options = parse_options(settings or ())
            parts = {**parts_of_own(target), "batch_size": batch_size}
        else:
            experiment = get_experiment(target, settings or ())
            chosen: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "device": device, "data_dir": data_dir}
            parts = parts_of_experiment(experiment, method, **chosen)
            options, clip_norm = experiment.training, experiment.clip_norm
        advice = advise_as_trained(
            parts,
            options,
            device=device,
            clip_norm=clip_norm,
            batch_sizes=sizes,
            seed=seed,
            steps=steps,
            estimator=estimator,
            timing_seconds=timing_seconds,
            on_time=lambda size, seconds: typer.echo(step_in_words(size, seconds), err=True),  # progress, no answer
        )
    name = re.sub(r"[^\w.-]+", "-", Path(target).stem if target.endswith(".toml") else target)
    values = {"target": target, **advice.to_dict()}
    # Before the files: minutes of measuring must not be lost to a full disk.
    typer.echo(common.to_json(values) if json else str(advice))
    with common.errors_exit_with(common.FAILED), styled():
        paths = common.write_results(out, name, finish(name, f"Advice for {name}", advice.draw(), CAPTION), values)
    if not json:
        typer.echo("\n".join(map(str, paths)))
