"""The one call: measure noise and time on copies, and say what follows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.advice.copies import copied, endless, is_adaptive, make_loader, tiled
from divebatch.advice.noise import NoiseCourse, measure_noise
from divebatch.advice.result import Advice
from divebatch.advice.timing import OnTime, time_steps
from divebatch.advice.tradeoff import StepTimes
from divebatch.checks import require_count, require_positive
from divebatch.data import AdaptiveLoader
from divebatch.errors import ArgumentError
from divebatch.estimators import Scene, make_estimator
from divebatch.estimators.lagged_products import extrapolation
from divebatch.lab.training import Clock, LossFn, Passes, Setup, Step
from divebatch.lab.training.distributed import Parallel
from divebatch.lab.training.precision import device_settings

LEAST_STEPS = 24
"""Of the short run; fewer tell nothing."""
LEAST_SIZE, MOST_SIZE = 8, 2**16
"""Batch sizes that are timed where none are named."""
ESTIMATORS = ("split", "moments", "per-sample")


def advise(
    model: nn.Module,
    loss_fn: LossFn,
    dataset: Any,
    *,
    optimizer: Optimizer | None = None,
    batch_size: int | None = None,
    batch_sizes: Sequence[int] | None = None,
    device: str | torch.device | None = None,
    steps: int = 300,
    estimator: str = "split",
    precision: str = "fp32",
    compile: bool = False,
    timing_seconds: float = 60.0,
    step_seconds: Callable[[int], float] | None = None,
    on_time: OnTime | None = None,
    seed: int = 0,
) -> Advice:
    """Measure the noise scale over a short run and the time of a step against its batch size; advise from both.

    `dataset` is a Dataset, a DataLoader or an AdaptiveLoader whose batches are pairs (inputs, targets), and
    `loss_fn(model(inputs), targets)` a mean over samples. `batch_size` is the one your optimizer's learning rate
    belongs to; a loader has its own. The short run makes `steps` steps with both. Without an optimizer the weights
    stay, and the advice on the learning rate is a factor. `batch_sizes` are timed for at most `timing_seconds`, warming
    up and compiling not counted; powers of two by default, until memory or the data ends. A step is timed without
    loading its data. `step_seconds(b)` replaces the timing where you know better, for instance on other hardware.
    `on_time(b, seconds)` is called after each size that was timed: compiling them takes minutes.

    Everything runs on copies: model and optimizer stay as they are, and so do torch's random numbers.
    """
    _require_settings(steps, estimator, timing_seconds)
    loss_of = _Measuring(model, loss_fn, optimizer, _device_of(model, device), precision, compile)
    with _restored(dataset), loss_of.scene(seed):
        loader = make_loader(dataset, batch_size, seed)
        loader.set_epoch(loader.epoch)  # one that was left within an epoch would count its samples back
        reference = loader.batch_size
        noise = loss_of.noise(loader, estimator, steps)
        sizes = _sizes(batch_sizes, reference, loader.dataset_size)
        if step_seconds is not None:
            times = StepTimes(tuple((size, step_seconds(size)) for size in sizes))
        else:
            times = loss_of.times(loader, sizes, timing_seconds, on_time)
    return Advice(
        noise=noise,
        times=times,
        reference_batch_size=reference,
        reference_lr=None if optimizer is None else float(optimizer.param_groups[0]["lr"]),
        adaptive=is_adaptive(optimizer),
        estimator="moments" if optimizer is None or extrapolation(optimizer) else "split",
        dataset_size=loader.dataset_size,
        device=str(loss_of.device) if step_seconds is None else "",
    )


@dataclass(frozen=True, slots=True)
class _Measuring:
    """Steps on copies of a model, in the way it will be trained."""

    model: nn.Module
    loss_fn: LossFn
    optimizer: Optimizer | None
    device: torch.device
    precision: str
    compile: bool
    setup: Setup = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "setup", Setup(precision=self.precision, compile=self.compile, cuda_graphs=True))

    @contextmanager
    def scene(self, seed: int) -> Iterator[None]:
        """Inside, random numbers and the device's settings are ours."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), device_settings(self.precision, self.device):
            torch.manual_seed(seed)
            yield

    def noise(self, loader: AdaptiveLoader, kind: str, steps: int) -> NoiseCourse:
        """Over `steps` steps at the loader's batch size."""
        model, optimizer = copied(self.model, self.optimizer, self.device)
        settings = {"compiled": self.compile} if kind == "per-sample" else {}
        estimator = make_estimator(kind, **settings)
        estimator.bind(
            Scene(model, loader.full_pass, "mean", self.loss_fn, optimizer, lambda: loader.samples_delivered)
        )
        parts, token = int(getattr(estimator, "min_parts", 1)), getattr(estimator, "replay_token", None)
        passes = Passes(Parallel.alone(model), self.loss_fn, self.setup, Clock(self.device))
        step = Step(passes, optimizer, lambda: True, replay_token=lambda: token, min_parts=lambda: parts)
        step.on_replay = getattr(estimator, "see_replay", step.on_replay)
        passes.begin_epoch(step.part_size(loader.batch_size))
        return measure_noise(step, endless(loader, self.device), estimator, steps=steps)

    def times(self, loader: AdaptiveLoader, sizes: Sequence[int], budget: float, on_time: OnTime | None) -> StepTimes:
        """Of whole steps: forward, backward, update; the learning rate is zero, which takes as long."""
        model, optimizer = copied(self.model, self.optimizer, self.device)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0
        batch = next(endless(loader, self.device))
        passes = Passes(Parallel.alone(model), self.loss_fn, self.setup, Clock(self.device))
        step = Step(passes, optimizer)

        def prepare(size: int) -> Callable[[], None]:
            filled = tiled(batch, size)
            passes.begin_epoch(size)
            return lambda: self._wait(step(filled))

        return time_steps(prepare, sizes, budget=budget, on_time=on_time)

    def _wait(self, _: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def _restored(data: Any) -> Iterator[None]:
    """Afterwards a loader of the user's own stands where it stood."""
    if not isinstance(data, AdaptiveLoader):
        yield
        return
    state = data.state_dict()
    try:
        yield
    finally:
        data.load_state_dict(state)


def _sizes(wanted: Sequence[int] | None, reference: int, dataset_size: int | None) -> list[int]:
    """The reference is always among them, so that the gain over it can be said."""
    most = min(dataset_size or MOST_SIZE, MOST_SIZE)
    if wanted is None:
        wanted = list(takewhile(lambda size: size <= most, (LEAST_SIZE * 2**power for power in count())))
    for size in wanted:
        require_count("batch_sizes", size)
        if dataset_size is not None and size > dataset_size:
            raise ArgumentError(f"batch_sizes: {size} is more than the {dataset_size} samples there are")
    sizes = sorted({*wanted, reference})
    if len(sizes) < 2:
        raise ArgumentError(f"batch_sizes: nothing to choose from beside batch {reference}; name more")
    return sizes


def _device_of(model: nn.Module, device: str | torch.device | None) -> torch.device:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
    if first is None:
        raise ArgumentError(f"{type(model).__name__} has no trainable parameter")
    return first.device if device is None else torch.device(device)


def _require_settings(steps: int, estimator: str, timing_seconds: float) -> None:
    require_count("steps", steps)
    if steps < LEAST_STEPS:
        raise ArgumentError(f"steps must be at least {LEAST_STEPS} for a noise scale to show, got steps={steps}")
    if estimator not in ESTIMATORS:
        raise ArgumentError(f"unknown estimator {estimator!r} for an advice; known: {', '.join(ESTIMATORS)}")
    require_positive("timing_seconds", timing_seconds)
