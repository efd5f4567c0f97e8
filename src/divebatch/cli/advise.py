"""`divebatch advise EXPERIMENT` or `divebatch advise module:function`."""

import importlib
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.optim import Optimizer

from divebatch.advice import Advice
from divebatch.advice import advise as advise_on
from divebatch.advice.plot import CAPTION
from divebatch.advice.step import LossFn, MakeStep
from divebatch.advice.text import step_in_words
from divebatch.cli.exits import FAILED, WRONG_USE, errors_exit_with
from divebatch.cli.options import DataDir, Device, require_device
from divebatch.cli.results_files import make_folder, to_json, write_results
from divebatch.data.batch_plan import BatchPlan
from divebatch.errors import ArgumentError
from divebatch.estimators import Estimator
from divebatch.lab.experiments import Experiment, Run, check_parts, get_experiment, make_trainer
from divebatch.lab.training import Clock, DeviceOptions, TrainStep
from divebatch.lab.training.device_options import device_settings
from divebatch.lab.training.distributed import Parallel
from divebatch.report.drawing import Drawing, finish, require_matplotlib
from divebatch.report.drawing import settings as figure_settings

WANTED = "(model, loss_fn, dataset) or (model, loss_fn, dataset, optimizer)"


def advise(
    target: Annotated[
        str,
        typer.Argument(help="An experiment, a TOML file, or module:function that returns model, loss_fn, dataset, ..."),
    ],
    method: Annotated[str, typer.Option(help="Method whose batch size and rate an experiment uses.")] = "sgd-small",
    model: Annotated[str | None, typer.Option(help="Another network for an experiment, such as resnet20.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=2, help="Batch size that the learning rate belongs to.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of an experiment, instead of the method's.")] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Sizes to time: 32,64,128; powers of two by default.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of the short run that shows the noise.")] = 300,
    timing_seconds: Annotated[float, typer.Option(help="Most seconds for timing; warming up is not counted.")] = 60.0,
    estimator: Annotated[
        str, typer.Option(help="Noise by split, moments or per-sample (not for BatchNorm).")
    ] = "split",
    data_dir: DataDir = Path("data"),
    device: Device = "cpu",
    precision: Annotated[str, typer.Option(help="Number format: fp32, tf32 or bf16.")] = "fp32",
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile: seconds for each size.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of data, model and order.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the picture.")] = Path("runs/advice"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")] = False,
) -> None:
    """Say which batch size and learning rate to start with here, where growth stops paying, and why."""
    settings: dict[str, Any] = {"device": device, "seed": seed, "steps": steps, "estimator": estimator}
    settings |= {"timing_seconds": timing_seconds, "on_time": _say}
    with errors_exit_with(WRONG_USE):
        require_device(device)
        require_matplotlib()
        if lr is not None and not 0 < lr < math.inf:
            raise ArgumentError(f"--lr must be positive and finite, got {lr}")
        settings["batch_sizes"] = _sizes(batch_sizes)
        make_folder(out)
        if _is_import_path(target):
            if lr is not None:
                raise ArgumentError("--lr is for experiments; of your own the optimizer's learning rate counts")
            parts = {**_own_parts(target), "batch_size": batch_size}
        else:
            run = _run(target, method, model, batch_size, lr, seed, device, data_dir, out)
            parts = _parts_of(run)
        advice = _as_trained(parts, DeviceOptions(precision=precision, compile=compile), settings)
    name = re.sub(r"[^\w.-]+", "-", Path(target).stem if target.endswith(".toml") else target)
    values = {"target": target, **advice.to_dict()}
    with errors_exit_with(FAILED):
        paths = write_results(out, name, values, _drawing(name, advice))
    typer.echo(to_json(values) if json else "\n".join([str(advice), *map(str, paths)]))


def _say(batch_size: int, seconds: float) -> None:
    typer.echo(step_in_words(batch_size, seconds), err=True)  # what is waited for, not the answer


def _own_parts(target: str) -> dict[str, Any]:
    return dict(zip(("model", "loss_fn", "dataset", "optimizer"), _call_own(target), strict=True))


def _parts_of(run: Run) -> dict[str, Any]:
    trainer = make_trainer(run)
    trainer.control.close()
    for group in trainer.optimizer.param_groups:
        group["lr"] = run.method.lr  # a warm-up would start below it
    return {
        "model": trainer.model,
        "loss_fn": trainer.loss_fn,
        "dataset": trainer.control.loader,
        "optimizer": trainer.optimizer,
    }


def _as_trained(parts: dict[str, Any], options: DeviceOptions, settings: dict[str, Any]) -> Advice:
    """Advise on the step that `divebatch run` makes."""
    make_step = _trainer_step(parts["loss_fn"], options)
    with device_settings(options.precision, torch.device(settings["device"])):
        return advise_on(**parts, **settings, compile=options.compile, make_step=make_step)


def _trainer_step(loss_fn: LossFn, options: DeviceOptions) -> MakeStep:
    def make_step(model: nn.Module, optimizer: Optimizer, batch_size: int, estimator: Estimator | None) -> TrainStep:
        plan = BatchPlan(batch_size=batch_size)
        if estimator is not None:
            plan = BatchPlan(
                batch_size=batch_size,
                measuring=True,
                min_micro_batches=estimator.min_micro_batches,
                replay_token=estimator.replay_token,
                see_replay=estimator.see_replay,
            )
        clock = Clock(next(model.parameters()).device)
        return TrainStep(Parallel.alone(model), loss_fn, optimizer, options, clock, plan=lambda: plan)

    return make_step


def _drawing(name: str, advice: Advice) -> Drawing:
    with figure_settings():
        return finish(name, f"Advice for {name}", advice.draw(), (CAPTION,))


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


def _is_import_path(text: str) -> bool:
    """Whether it can be no experiment's name."""
    return ":" in text and not text.endswith(".toml")


def _call_own(path: str) -> tuple[Any, Any, Any, Any]:
    """Import the module, also from the present folder, and call the function: this runs the user's code."""
    module_name, _, function_name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"cannot import '{path}': {error}") from error
    if not callable(function):
        raise ArgumentError(f"'{path}' must be a function that returns {WANTED}, got {type(function).__name__}")
    made = function()
    if not isinstance(made, tuple | list) or len(made) not in (3, 4):
        got = f"{len(made)} objects" if isinstance(made, tuple | list) else type(made).__name__
        raise ArgumentError(f"'{path}' must return {WANTED}, got {got}")
    model, loss_fn, dataset = made[:3]
    return model, loss_fn, dataset, made[3] if len(made) == 4 else None
