"""Build a trainer from a run's configuration."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from divebatch.checks import require_choice
from divebatch.controller import Controller
from divebatch.data.order import mixed_seed
from divebatch.errors import ArgumentError
from divebatch.lab.clock import Clock
from divebatch.lab.data import DATASETS, DataPlace, DatasetSettings, DataSplit
from divebatch.lab.data.dataset import drawing
from divebatch.lab.length import PartSampler, RunLength
from divebatch.lab.models import MODELS, ModelSettings
from divebatch.lab.optimizers import OPTIMIZERS, OptimizerSettings
from divebatch.lab.ranks import spread
from divebatch.lab.schedules import SCHEDULES, ScheduleSettings, warm_up
from divebatch.lab.schema import ANY_LENGTH, Experiment, Part, build_estimator, build_policy
from divebatch.lab.step import LossFn, device_settings
from divebatch.lab.tables import build_table
from divebatch.lab.tasks import TASKS, Task
from divebatch.lab.trainer import Trainer
from divebatch.lr import ADAM_RULES
from divebatch.norms.sketch import seed_signs
from divebatch.parts import estimator_of, training_context
from divebatch.policies import Rounded
from divebatch.ranks import Ranks
from divebatch.research import QuantizedGradients

if TYPE_CHECKING:
    from divebatch.lab.runs import Run

REGISTRIES: dict[str, dict[str, type[Any]]] = {
    "task": TASKS,
    "data": DATASETS,
    "model": MODELS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}
# Purposes of random numbers. They differ from each other and from the purpose of the epochs' orders, a single number.
DATA, MODEL, SIGNS, QUANTIZER = (0, 2), (0, 3), (0, 5), (0, 7)
NO_END = 2**62
"""Number of samples that stands for a run which only the clock ends."""


def make_trainer(run: "Run") -> Trainer:
    """Build data, model, optimizer, schedule and controller, with all randomness from the seed."""
    experiment, method, device = run.experiment, run.method, torch.device(run.device)
    seed_signs(device, mixed_seed(run.seed, *SIGNS))
    with device_settings(experiment.training.precision, device):  # compiled code depends on these settings
        data: DatasetSettings = _settings(experiment, "data")
        split = data.load(mixed_seed(run.seed, *DATA), place_for(run), held_out=experiment.held_out)
        clock = Clock(device)
        length = _make_loader(run, split, clock)
    task: Task = _settings(experiment, "task")
    ranks = Ranks.here()
    parallel = spread(_build_model(run, split), ranks, sharding=run.sharding)
    model = parallel.model
    is_fused = device.type == "cuda" and not parallel.is_sharded
    settings: OptimizerSettings = _settings(experiment, "optimizer")
    optimizer = settings.build(model, method.lr, fused=True if is_fused else None)
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
    """Make the loader, whose epochs are passes or parts of one pass; return the run's length with the loader."""
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
    """Return the schedulers to step after each epoch, and the schedulers to step after each batch."""
    course: ScheduleSettings = _settings(run.experiment, "schedule")
    schedule = course.build(optimizer, length.fraction)
    warming = warm_up(optimizer, run.method.warmup_epochs * len(length.loader))
    an_epoch, a_step = ([], [schedule, warming]) if course.is_by_samples else ([schedule], [warming])
    return [each for each in an_epoch if each is not None], [each for each in a_step if each is not None]


def _make_controller(
    run: "Run", module: nn.Module, optimizer: Optimizer, length: RunLength, loss_fn: LossFn, schedulers: list[Any]
) -> Controller:
    method = run.method
    policy = build_policy(method.policy, length.samples)
    if method.multiple_of > 1:
        policy = Rounded(policy, method.multiple_of)
    shadows = {name: build_policy(part, length.samples) for name, part in (method.shadows or {}).items()}
    context = training_context(module, [optimizer], length.loader)
    chosen = method.estimator or estimator_of(policy, context, shadows=shadows)
    estimator = Part(kind=chosen) if isinstance(chosen, str) else chosen
    return Controller(
        module,
        optimizer,
        length.loader,
        policy,
        estimator=build_estimator(estimator, run.experiment.training, loss_fn),
        lr_coupling=method.lr_coupling,
        base_batch_size=method.base_batch_size,
        every_steps=method.every_steps,
        shadows=shadows,
        scheduler=schedulers,
        scheduler_unit="call",  # warm-ups count steps, whatever the batch size
        measure_always=method.measure_always,
    )


def check_parts(experiment: Experiment) -> None:
    """Raise before any work if a part is unknown, has a wrong setting, or does not fit another part."""
    for name in REGISTRIES:
        try:
            _settings(experiment, name)
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
    """Return the folder of a run's data with the device and layout of its batches."""
    device, model = torch.device(run.device), _settings(run.experiment, "model")
    return DataPlace(
        device,
        folder=run.data_dir,
        channels_last=run.experiment.training.channels_last,
        compile=run.experiment.training.compile and device.type == "cuda",
        sequence_length=model.sequence_length,
    )


def _build_model(run: "Run", split: DataSplit) -> nn.Module:
    settings: ModelSettings = _settings(run.experiment, "model")
    torch.manual_seed(mixed_seed(run.seed, *MODEL))
    model = settings.build(split.num_features, split.num_classes).to(torch.device(run.device))
    memory_format = torch.channels_last if run.experiment.training.channels_last else torch.contiguous_format
    return model.to(memory_format=memory_format)  # type: ignore[call-overload, no-any-return]


def _settings(experiment: Experiment, name: str) -> Any:
    registry, part = REGISTRIES[name], getattr(experiment, name)
    require_choice(f"{name} kind", part.kind, tuple(registry))
    return build_table(registry[part.kind], part.settings, f"{name} {part.kind!r}")
