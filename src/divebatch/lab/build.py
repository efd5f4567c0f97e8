"""From a run's configuration to a trainer."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from divebatch.checks import require_choice
from divebatch.controller import Controller, estimator_of, training_context
from divebatch.data.order import mixed_seed
from divebatch.errors import ArgumentError
from divebatch.estimators import Estimator, TrainingContext
from divebatch.lab.clock import Clock
from divebatch.lab.data import DATASETS, DataPlace, DataSplit
from divebatch.lab.data.dataset import drawing
from divebatch.lab.length import PartSampler, RunLength
from divebatch.lab.models import MODELS, ModelSettings
from divebatch.lab.optimizers import OPTIMIZERS
from divebatch.lab.ranks import spread
from divebatch.lab.schedules import SCHEDULES, ScheduleSettings, warm_up
from divebatch.lab.schema import (
    ANY_LENGTH,
    Experiment,
    Method,
    Part,
    build_estimator,
    build_policy,
    build_settings,
)
from divebatch.lab.step import LossFn, device_settings
from divebatch.lab.tasks import TASKS, Task
from divebatch.lab.trainer import Trainer
from divebatch.lr import ADAM_RULES
from divebatch.norms.sketch import seed_signs
from divebatch.policies import Policy, Rounded
from divebatch.ranks import Ranks
from divebatch.research import QuantizedGradients

if TYPE_CHECKING:
    from divebatch.lab.runs import Run

# Apart from each other and from the epochs' orders, whose purpose is one number.
DATA, MODEL, SIGNS, QUANTIZER = (0, 2), (0, 3), (0, 5), (0, 7)
NO_END = 2**62
"""Samples of a run that ends by the clock alone."""


def make_trainer(run: "Run") -> Trainer:
    """Data, model, optimizer, schedule and controller as configured; everything random follows from the seed."""
    experiment, method, device = run.experiment, run.method, torch.device(run.device)
    seed_signs(device, mixed_seed(run.seed, *SIGNS))
    with device_settings(experiment.training.precision, device):  # code is compiled for the settings it will meet
        split = _load_data(run)
        clock = Clock(device)
        length = _make_loader(run, split, clock)
    task: Task = _settings(TASKS, experiment.task, "task")
    ranks = Ranks.here()
    parallel = spread(_build_model(run, split), ranks, sharding=run.sharding)
    model = parallel.model
    is_fused = device.type == "cuda" and not parallel.is_sharded
    optimizer: Optimizer = _settings(OPTIMIZERS, experiment.optimizer, "optimizer").build(
        model, method.lr, fused=True if is_fused else None
    )
    schedulers, step_schedulers = _make_schedulers(run, optimizer, length)
    quantize: QuantizedGradients | None = None
    if method.quantize is not None:
        quantize = QuantizedGradients(method.quantize, seed=mixed_seed(run.seed, *QUANTIZER)).attach(parallel.module)
    control = _make_controller(run, parallel.module, optimizer, length, task.loss_fn, [*schedulers, *step_schedulers])
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        schedulers=schedulers,
        step_schedulers=step_schedulers,
        length=length if experiment.one_pass else None,
        clip_norm=experiment.clip_norm,
        control=control,
        task=task,
        validation=split.validation,
        clock=clock,
        options=experiment.training,
        log_exact=run.log_exact,
        data_fingerprint=split.fingerprint,
        parallel=parallel,
        quantize=quantize,
    )
    if not ranks.is_first:
        trainer.draw_apart()
    return trainer


def _make_loader(run: "Run", split: DataSplit, clock: Clock) -> RunLength:
    """Make the loader, whose epochs are passes over the data or parts of one; return how long the run is, with it."""
    experiment, size = run.experiment, run.method.batch_size
    if not experiment.one_pass:
        loader = split.loader(size, seed=run.seed)
        total = experiment.epochs * len(loader.dataset)
        return RunLength(loader=loader, clock=clock, samples=total, parts=experiment.epochs)
    if not split.has_parts:
        raise ArgumentError(f"the data {experiment.data.kind!r} cannot be gone through in parts: set one_pass = false")
    if experiment.seconds is not None and not Ranks.here().is_alone:
        raise ArgumentError(
            f"seconds={experiment.seconds}: the clocks of several ranks differ, and so would their rates: end the run "
            f"by samples, or train on one rank"
        )
    whole = split.loader(size, seed=run.seed)
    sampler = PartSampler(len(whole.dataset), run.seed)
    loader = drawing(whole, sampler)
    sampler.length = RunLength(
        loader=loader,
        clock=clock,
        samples=_num_samples(experiment, len(sampler)),
        parts=experiment.epochs,
        seconds=experiment.seconds,
    )
    return sampler.length


def _num_samples(experiment: Experiment, available: int) -> int:
    """Return the most samples that the run may take."""
    wanted = experiment.samples
    if wanted is None:
        return NO_END if experiment.repeat else available
    if wanted > available and not experiment.repeat:
        raise ArgumentError(
            f"samples={wanted} are more than the {available} training samples there are: give fewer, or let the data "
            f"be gone through again with repeat=True"
        )
    return wanted


def _make_schedulers(
    run: "Run", optimizer: Optimizer, length: RunLength
) -> tuple[list[LRScheduler], list[LRScheduler]]:
    """Return those that are stepped after each epoch, and those that are stepped after each batch."""
    course: ScheduleSettings = _settings(SCHEDULES, run.experiment.schedule, "schedule")
    schedule = course.build(optimizer, length.fraction)
    warming = warm_up(optimizer, run.method.warmup_epochs * len(length.loader))
    an_epoch, a_step = ([], [schedule, warming]) if course.is_by_samples else ([schedule], [warming])
    return [each for each in an_epoch if each is not None], [each for each in a_step if each is not None]


def _make_controller(
    run: "Run",
    module: nn.Module,
    optimizer: Optimizer,
    length: RunLength,
    loss_fn: LossFn,
    schedulers: list[Any],
) -> Controller:
    method = run.method
    shadows = {name: build_policy(part, length.samples) for name, part in (method.shadows or {}).items()}
    return Controller(
        module,
        optimizer,
        length.loader,
        _policy(method, length.samples),
        estimator=_estimator(run, loss_fn, training_context(module, [optimizer], length.loader), shadows),
        lr_coupling=method.lr_coupling,
        base_batch_size=method.base_batch_size,
        every_steps=method.every_steps,
        shadows=shadows,
        scheduler=schedulers,
        scheduler_unit="call",  # warm-ups last a number of steps, whatever their size
        measure_always=method.measure_always,
    )


REGISTRIES = (
    (TASKS, "task"),
    (DATASETS, "data"),
    (MODELS, "model"),
    (OPTIMIZERS, "optimizer"),
    (SCHEDULES, "schedule"),
)


def check_parts(experiment: Experiment) -> None:
    """Raise before any work for what is unknown, has a wrong setting, or does not go together."""
    for registry, where in REGISTRIES:
        try:
            _settings(registry, getattr(experiment, where), where)
        except ArgumentError as error:
            raise ArgumentError(f"{experiment.name}: {error}") from error
    for name, method in experiment.methods.items():
        coupling = method.lr_coupling or build_policy(method.policy, ANY_LENGTH).lr_coupling
        if coupling in ADAM_RULES and not OPTIMIZERS[experiment.optimizer.kind].takes_adam_coupling:
            raise ArgumentError(
                f"{experiment.name}: [methods.{name}] has lr_coupling={coupling!r}, which is for the optimizer "
                f"'adamw', and this one is {experiment.optimizer.kind!r}: use 'linear' for sgd, 'sqrt' for others"
            )


def place_for(run: "Run") -> DataPlace:
    """Where a run's data is read from, and how its batches must be."""
    device, model = torch.device(run.device), _settings(MODELS, run.experiment.model, "model")
    return DataPlace(
        device,
        folder=run.data_dir,
        channels_last=run.experiment.training.channels_last,
        compile=run.experiment.training.compile and device.type == "cuda",
        sequence_length=model.sequence_length,
    )


def _load_data(run: "Run") -> DataSplit:
    data = _settings(DATASETS, run.experiment.data, "data")
    split: DataSplit = data.load(mixed_seed(run.seed, *DATA), place_for(run), held_out=run.experiment.held_out)
    return split


def _build_model(run: "Run", split: DataSplit) -> nn.Module:
    settings: ModelSettings = _settings(MODELS, run.experiment.model, "model")
    torch.manual_seed(mixed_seed(run.seed, *MODEL))
    model = settings.build(split.num_features, split.num_classes).to(torch.device(run.device))
    memory_format = torch.channels_last if run.experiment.training.channels_last else torch.contiguous_format
    return model.to(memory_format=memory_format)  # type: ignore[call-overload, no-any-return]


def _policy(method: Method, total_samples: int) -> Policy:
    policy = build_policy(method.policy, total_samples)
    return policy if method.multiple_of == 1 else Rounded(policy, method.multiple_of)


def _estimator(run: "Run", loss_fn: LossFn, context: TrainingContext, shadows: dict[str, Policy]) -> Estimator:
    chosen = run.method.estimator or estimator_of(_policy(run.method, ANY_LENGTH), context, shadows=shadows)
    part = Part(kind=chosen) if isinstance(chosen, str) else chosen
    return build_estimator(part, run.experiment.training, loss_fn)


def _settings(registry: dict[str, type[Any]], part: Part, where: str) -> Any:
    require_choice(f"{where} kind", part.kind, tuple(registry))
    return build_settings(registry[part.kind], part, where)
