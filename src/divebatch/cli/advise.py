"""`divebatch advise EXPERIMENT` or `divebatch advise module:function`."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from divebatch.advice import Advice
from divebatch.advice import advise as advise_on
from divebatch.advice.text import step_in_words
from divebatch.cli.device import require_device
from divebatch.cli.exits import FAILED, WRONG_USE, errors_exit_with
from divebatch.cli.import_path import call_own, is_import_path
from divebatch.cli.options import DataDir, Device
from divebatch.cli.results_files import make_folder, to_json, write_results
from divebatch.errors import ArgumentError
from divebatch.lab.experiments import Experiment, Run, check_parts, get_experiment, make_trainer
from divebatch.report.drawing import require_matplotlib


def advise(
    target: Annotated[
        str,
        typer.Argument(help="An experiment, a TOML file, or module:function that returns model, loss_fn, dataset, ..."),
    ],
    method: Annotated[str, typer.Option(help="Whose batch size and learning rate, of an experiment.")] = "sgd-small",
    model: Annotated[str | None, typer.Option(help="Another network for an experiment, such as resnet20.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=2, help="The one the learning rate belongs to.")] = None,
    lr: Annotated[float | None, typer.Option(help="Of an experiment, instead of the method's.")] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="To be timed: 32,64,128; powers of two by default.")] = None,
    steps: Annotated[int, typer.Option(help="Of the short run that shows the noise.")] = 300,
    timing_seconds: Annotated[float, typer.Option(help="Most seconds for timing; warming up is not counted.")] = 60.0,
    estimator: Annotated[str, typer.Option(help="split, moments or per-sample (not for BatchNorm).")] = "split",
    data_dir: DataDir = Path("data"),
    device: Device = "cpu",
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16.")] = "fp32",
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile: seconds for each size.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of data, model and order.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the picture.")] = Path("runs/advice"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")] = False,
) -> None:
    """Say which batch size and learning rate to start with here, where growth stops paying, and why."""
    settings: dict[str, Any] = {"device": device, "precision": precision, "compile": compile, "seed": seed}
    settings |= {"steps": steps, "timing_seconds": timing_seconds, "estimator": estimator}
    settings["on_time"] = _say
    with errors_exit_with(WRONG_USE):
        require_device(device)
        require_matplotlib()
        if lr is not None and not 0 < lr < math.inf:
            raise ArgumentError(f"--lr must be positive and finite, got {lr}")
        settings["batch_sizes"] = _sizes(batch_sizes)
        make_folder(out)
        if is_import_path(target):
            if lr is not None:
                raise ArgumentError("--lr is for experiments; of your own the optimizer's learning rate counts")
            advice = _of_own(target, batch_size, settings)
        else:
            run = _run(target, method, model, batch_size, lr, seed, device, data_dir, out)
            advice = _of_experiment(run, settings)
    name = re.sub(r"[^\w.-]+", "-", Path(target).stem if target.endswith(".toml") else target)
    values = {"target": target, **advice.to_dict()}
    with errors_exit_with(FAILED):
        paths = write_results(out, name, values, advice.draw(name))
    typer.echo(to_json(values) if json else "\n".join([str(advice), *map(str, paths)]))


def _say(batch_size: int, seconds: float) -> None:
    typer.echo(step_in_words(batch_size, seconds), err=True)  # what is waited for, not the answer


def _of_own(target: str, batch_size: int | None, settings: dict[str, Any]) -> Advice:
    model, loss_fn, dataset, optimizer = call_own(target)
    return advise_on(model, loss_fn, dataset, optimizer=optimizer, batch_size=batch_size, **settings)


def _of_experiment(run: Run, settings: dict[str, Any]) -> Advice:
    trainer = make_trainer(run)
    trainer.control.close()
    for group in trainer.optimizer.param_groups:
        group["lr"] = run.method.lr  # a warm-up would start below it
    return advise_on(trainer.model, trainer.loss_fn, trainer.control.loader, optimizer=trainer.optimizer, **settings)


def _run(
    name: str,
    method: str,
    model: str | None,
    batch_size: int | None,
    lr: float | None,
    seed: int,
    device: str,
    data_dir: Path,
    out: Path,
) -> Run:
    experiment = get_experiment(name)
    experiment = experiment.with_model(model) if model is not None else experiment
    check_parts(experiment)
    experiment = _with_start(experiment, method, batch_size, lr)
    return Run(experiment, method, seed, out, device=device, data_dir=data_dir)


def _with_start(experiment: Experiment, name: str, batch_size: int | None, lr: float | None) -> Experiment:
    method = experiment.method(name)
    changed = replace(method, batch_size=batch_size or method.batch_size, lr=lr or method.lr)
    return replace(experiment, methods={**experiment.methods, name: changed})


def _sizes(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ArgumentError(f"--batch-sizes must be whole numbers such as 32,64,128, got {text!r}") from error
