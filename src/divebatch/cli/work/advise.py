"""What `divebatch advise` does."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import typer
from torch import nn
from torch.optim import Optimizer

from divebatch.advice import Advice
from divebatch.advice import advise as advise_on
from divebatch.advice.measure import LossFn, MakeStep
from divebatch.advice.plot import CAPTION
from divebatch.advice.text import step_in_words
from divebatch.data import AdaptiveLoader
from divebatch.data.micro_batches import BatchPlan
from divebatch.errors import ArgumentError, BatchTooLargeError
from divebatch.estimators import Estimator
from divebatch.lab import Clock, DeviceOptions, Experiment, Run, TrainStep, check_parts, get_experiment, make_trainer
from divebatch.lab.ranks import Parallel
from divebatch.lab.step import device_settings
from divebatch.lr import coupling_for
from divebatch.report.drawing import Drawing, finish
from divebatch.report.drawing import settings as figure_settings

WANTED = "(model, loss_fn, dataset) or (model, loss_fn, dataset, optimizer)"


def say_time(batch_size: int, seconds: float) -> None:
    """Say how long a step takes: progress on stderr, not the answer."""
    typer.echo(step_in_words(batch_size, seconds), err=True)


def own_parts(target: str) -> dict[str, Any]:
    """What the user's function returns, by name."""
    return dict(zip(("model", "loss_fn", "dataset", "optimizer"), _call_own(target), strict=True))


def parts_of(run: Run) -> dict[str, Any]:
    """What an experiment's run consists of, by the same names."""
    trainer = make_trainer(run)
    trainer.control.close()
    for group in trainer.optimizer.param_groups:
        group["lr"] = run.method.lr  # a warm-up would start below it
    loader = trainer.control.loader
    if run.experiment.one_pass:  # the short run may be longer than the pass, whose parts come to an end
        loader = AdaptiveLoader(loader.dataset, loader.batch_size, seed=run.seed, transform=loader.transform)
    return {
        "model": trainer.model,
        "loss_fn": trainer.loss_fn,
        "dataset": loader,
        "optimizer": trainer.optimizer,
        "lr_coupling": _coupling_of(trainer.optimizer),
    }


def _coupling_of(optimizer: Optimizer) -> Literal["linear", "sqrt"]:
    """The one that suits it."""
    return "linear" if coupling_for(optimizer) == "linear" else "sqrt"


def as_trained(
    parts: dict[str, Any], settings: dict[str, Any], *, precision: str, compile: bool, clip_norm: float | None = None
) -> Advice:
    """Advise on the step that `divebatch run` makes."""
    options = DeviceOptions(precision=precision, compile=compile)
    make_step = _trainer_step(parts["loss_fn"], options, clip_norm)
    try:
        with device_settings(options.precision, torch.device(settings["device"])):
            return advise_on(**parts, **settings, compile=options.compile, make_step=make_step)
    except BatchTooLargeError as error:  # which names options of `run`
        raise BatchTooLargeError("out of memory: name smaller sizes with --batch-size and --batch-sizes") from error


def _trainer_step(loss_fn: LossFn, options: DeviceOptions, clip_norm: float | None) -> MakeStep:
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
        return TrainStep(
            Parallel.alone(model), loss_fn, optimizer, options, clock, plan=lambda: plan, clip_norm=clip_norm
        )

    return make_step


def drawing_of(name: str, advice: Advice) -> Drawing:
    """The advice as a picture."""
    with figure_settings():
        return finish(name, f"Advice for {name}", advice.draw(), (CAPTION,))


def run_of(
    name: str,
    method: str | None,
    model: str | None,
    batch_size: int | None,
    lr: float | None,
    seed: int,
    device: str,
    data_dir: Path,
    out: Path,
) -> Run:
    """The experiment's run with the method, batch size and rate that options name."""
    experiment = get_experiment(name)
    experiment = experiment.with_model(model) if model is not None else experiment
    experiment = replace(experiment, samples=None, seconds=None, repeat=False)  # the short run has an end of its own
    check_parts(experiment)
    method = method or next(iter([*experiment.report.baselines, *experiment.methods]))
    experiment = _with_start(experiment, method, batch_size, lr)
    return Run(experiment, method, seed, out, device=device, data_dir=data_dir)


def _with_start(experiment: Experiment, name: str, batch_size: int | None, lr: float | None) -> Experiment:
    method = experiment.method(name)
    changed = replace(method, batch_size=batch_size or method.batch_size, lr=lr or method.lr)
    return replace(experiment, methods={**experiment.methods, name: changed})


def is_import_path(text: str) -> bool:
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
