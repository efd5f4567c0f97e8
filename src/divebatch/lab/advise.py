"""Advice for an experiment or for the user's own code, based on the step of a run."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from divebatch.advice import Advice, advise
from divebatch.data import AdaptiveLoader
from divebatch.data.micro_batches import BatchPlan
from divebatch.errors import ArgumentError, BatchTooLargeError
from divebatch.estimators import Estimator
from divebatch.lab.build import check_parts, make_trainer
from divebatch.lab.clock import Clock
from divebatch.lab.ranks import Parallel
from divebatch.lab.runs import Run
from divebatch.lab.schema import Experiment
from divebatch.lab.step import DeviceOptions, TrainStep, device_settings
from divebatch.lr import coupling_for

WANTED = "(model, loss_fn, dataset) or (model, loss_fn, dataset, optimizer)"


def parts_of_experiment(
    experiment: Experiment, method: str | None, *, batch_size: int | None = None, seed: int = 0, **settings: Any
) -> dict[str, Any]:
    """Return the arguments of `advise` for a method of an experiment; None: the first baseline.

    `batch_size` replaces the method's. `settings` are fields of `Run` that change no result.
    """
    experiment = replace(experiment, samples=None, seconds=None, repeat=False)  # the short run ends by its own count
    check_parts(experiment)
    name = method or experiment.baseline
    chosen = experiment.method(name)
    chosen = replace(chosen, batch_size=batch_size or chosen.batch_size)
    experiment = replace(experiment, methods={**experiment.methods, name: chosen})
    trainer = make_trainer(Run(experiment, name, seed, Path(), **settings))
    trainer.control.close()
    for group in trainer.optimizer.param_groups:
        group["lr"] = chosen.lr  # a warm-up would start below this rate
    loader = trainer.control.loader
    if experiment.one_pass:  # the short run may be longer than one pass
        loader = AdaptiveLoader(loader.dataset, loader.batch_size, seed=seed, transform=loader.transform)
    return {
        "model": trainer.model,
        "loss_fn": trainer.loss_fn,
        "dataset": loader,
        "optimizer": trainer.optimizer,
        "lr_coupling": coupling_for(trainer.optimizer),
    }


def parts_of_own(path: str) -> dict[str, Any]:
    """Import `module:function`, also from the working directory, and call this function of the user's."""
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
    return dict(zip(("model", "loss_fn", "dataset", "optimizer"), made, strict=False))


def advise_as_trained(
    parts: dict[str, Any], options: DeviceOptions, *, device: str, clip_norm: float | None = None, **settings: Any
) -> Advice:
    """Advise on the reference trainer's step; `settings` go to `advise`."""

    def make_step(model: nn.Module, optimizer: Optimizer, batch_size: int, estimator: Estimator | None) -> TrainStep:
        plan = BatchPlan(batch_size=batch_size)
        if estimator is not None:
            plan = replace(
                plan,
                measuring=True,
                min_micro_batches=estimator.min_micro_batches,
                replay_token=estimator.replay_token,
                see_replay=estimator.see_replay,
            )
        clock, parallel = Clock(next(model.parameters()).device), Parallel.alone(model)
        return TrainStep(parallel, parts["loss_fn"], optimizer, options, clock, plan=lambda: plan, clip_norm=clip_norm)

    try:
        with device_settings(options.precision, torch.device(device)):
            return advise(**parts, **settings, device=device, compile=options.compile, make_step=make_step)
    except BatchTooLargeError as error:  # its message names options of `run`
        raise BatchTooLargeError("out of memory: name smaller sizes with --batch-size and --batch-sizes") from error
