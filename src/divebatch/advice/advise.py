"""The one call: measure noise and time on copies, and say what follows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.advice.copies import copied, endless, make_loader, tiled
from divebatch.advice.noise import NoiseCourse, measure_noise
from divebatch.advice.result import Advice
from divebatch.advice.step import PRECISIONS, LossFn, MakeStep, PlainStep, Step
from divebatch.advice.timing import OnTime, time_steps
from divebatch.advice.tradeoff import StepTimes
from divebatch.checks import require_choice, require_count, require_positive
from divebatch.data import AdaptiveLoader
from divebatch.errors import ArgumentError
from divebatch.estimators import ESTIMATORS, Estimator, Scene, make_estimator
from divebatch.estimators.lagged_products import extrapolation
from divebatch.lr import coupling_for

LEAST_STEPS = 24
"""Steps of the short run; fewer show nothing."""
LEAST_SIZE = 8
MOST_SIZE = 2**16
"""The batch sizes that are timed where none are named lie between these two."""
MOST_VARIANTS = 256
"""How often the compiler may make code anew for another batch size."""


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
    estimator: Literal["split", "moments", "per-sample"] = "split",
    lr_coupling: Literal["linear", "sqrt"] | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    compile: bool = False,
    make_step: MakeStep | None = None,
    timing_seconds: float = 60.0,
    step_seconds: Callable[[int], float] | None = None,
    on_time: OnTime | None = None,
    seed: int = 0,
) -> Advice:
    """Measure the noise scale over a short run and the time of a step against its batch size; advise from both.

    Everything runs on copies: model, optimizer, loader and torch's random numbers stay as they are.

    Args:
        model: The model to train.
        loss_fn: `loss_fn(model(inputs), targets)`, a mean over samples.
        dataset: A Dataset, a DataLoader or an AdaptiveLoader whose batches are pairs (inputs, targets).
        optimizer: The model's, with the learning rate that suits `batch_size`. Without one the weights stay as they
            are, and the advice on the learning rate is a factor.
        batch_size: The batch size that learning rate belongs to; by default the loader's. The short run uses both.
        batch_sizes: The sizes to time; by default powers of two, until memory or the data ends.
        device: Where to run; by default where the model is.
        steps: Optimizer steps of the short run.
        estimator: What measures the noise: "split", "moments" or "per-sample" (not for models with BatchNorm).
        lr_coupling: How the learning rate follows the batch size: "linear" as for SGD, "sqrt" as for Adam-like
            optimizers; by default the one that suits the optimizer, which must then be one of torch's.
        precision: "fp32", or "bf16" for a forward pass under autocast. TF32 is as your torch settings have it.
        compile: Whether the step goes through torch.compile.
        make_step: Builds another training step than a plain one, which then sees to precision and compiling itself;
            `compile` must say whether it compiles.
        timing_seconds: Most seconds for timing; warming up and compiling are not counted.
        step_seconds: Gives the seconds of a step of so many samples and replaces the timing, which leaves out the
            loading of data: for instance for other hardware.
        on_time: Called with each batch size and the seconds of its step as soon as they are known.
        seed: Of the data's order and of what is random in the model.
    """
    _require_settings(steps, estimator, precision, timing_seconds)
    if make_step is None:
        make_step = partial(_plain_step, loss_fn=loss_fn, precision=precision, compile=compile)
    if lr_coupling is None:
        lr_coupling = "linear" if optimizer is None else coupling_for(optimizer)
    measuring = _Measuring(model, loss_fn, optimizer, _device_of(model, device), compile, make_step)
    with _restored(dataset), measuring.surroundings(seed):
        loader = make_loader(dataset, batch_size, seed)
        loader.set_epoch(loader.epoch)  # one that was left within an epoch would count its samples back
        reference = loader.batch_size
        noise = measuring.noise(loader, estimator, steps)
        sizes = _sizes(batch_sizes, reference, loader.dataset_size)
        if step_seconds is not None:
            times = StepTimes(tuple((size, step_seconds(size)) for size in sizes))
        else:
            times = measuring.times(loader, sizes, timing_seconds, on_time)
    return Advice(
        noise=noise,
        times=times,
        reference_batch_size=reference,
        reference_lr=None if optimizer is None else float(optimizer.param_groups[0]["lr"]),
        adaptive=lr_coupling == "sqrt",
        estimator="moments" if optimizer is None or extrapolation(optimizer) else "split",
        dataset_size=loader.dataset_size,
        device=str(measuring.device) if step_seconds is None else "",
    )


def _plain_step(
    model: nn.Module, optimizer: Optimizer, batch_size: int, estimator: Estimator | None, **settings: Any
) -> Step:
    cuts = 1 if estimator is None else estimator.min_micro_batches
    return PlainStep(model, optimizer, min_micro_batches=cuts, **settings)


@dataclass(frozen=True, slots=True)
class _Measuring:
    """Steps on copies of a model, in the way it will be trained."""

    model: nn.Module
    loss_fn: LossFn
    optimizer: Optimizer | None
    device: torch.device
    compile: bool
    make_step: MakeStep

    @contextmanager
    def surroundings(self, seed: int) -> Iterator[None]:
        """Inside, random numbers follow from the seed, and the compiler may make code for every size."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), _many_variants() if self.compile else nullcontext():
            torch.manual_seed(seed)
            yield

    def noise(self, loader: AdaptiveLoader, kind: str, steps: int) -> NoiseCourse:
        """Measure over `steps` steps at the loader's batch size."""
        model, optimizer = copied(self.model, self.optimizer, self.device)
        settings = {"compiled": self.compile} if ESTIMATORS[kind].measures_norms else {}
        estimator = make_estimator(kind, **settings)
        estimator.bind(Scene(model, loader, optimizer))
        step = self.make_step(model, optimizer, loader.batch_size, estimator)
        return measure_noise(step, endless(loader, self.device), estimator, steps=steps)

    def times(self, loader: AdaptiveLoader, sizes: Sequence[int], budget: float, on_time: OnTime | None) -> StepTimes:
        """Time whole steps. The learning rate is zero, which takes as long."""
        model, optimizer = copied(self.model, self.optimizer, self.device)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0
        batch = next(endless(loader, self.device))

        def prepare(size: int) -> Callable[[], None]:
            step, filled = self.make_step(model, optimizer, size, None), tiled(batch, size)
            return lambda: self._wait(step(filled))

        return time_steps(prepare, sizes, budget=budget, on_time=on_time)

    def _wait(self, _: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def _many_variants() -> Iterator[None]:
    import torch._dynamo  # takes a second to import, and only compiled steps need it

    with torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS):
        yield


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


def _require_settings(steps: int, estimator: str, precision: str, timing_seconds: float) -> None:
    require_count("steps", steps)
    if steps < LEAST_STEPS:
        raise ArgumentError(f"steps must be at least {LEAST_STEPS} for a noise scale to show, got steps={steps}")
    known = tuple(name for name, kind in ESTIMATORS.items() if kind.at_fixed_weights and not kind.needs_loss_fn)
    require_choice("estimator", estimator, known)
    require_choice("precision", precision, PRECISIONS)
    require_positive("timing_seconds", timing_seconds)
