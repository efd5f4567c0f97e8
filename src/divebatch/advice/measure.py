"""Measure noise and step times on copies of model, optimizer and loader."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from divebatch.advice.advice import Advice, NoiseCourse, NoiseEstimate, StepTimes
from divebatch.checks import require_choice, require_count, require_positive
from divebatch.data import AdaptiveLoader
from divebatch.data.micro_batches import batch_length, micro_batches
from divebatch.errors import ArgumentError, BatchTooLargeError, DivergedError
from divebatch.estimators import ESTIMATORS, Estimator, TrainingContext, make_estimator
from divebatch.estimators.step_hooks import tell_steps
from divebatch.lr import coupling_for
from divebatch.measurement import Diversity, Spread
from divebatch.norms.meter import batch_pair

LossFn = Callable[[Any, Any], Tensor]
"""A function of the model's outputs and the targets that returns the mean loss over samples."""
Step = Callable[[Any], Tensor]
"""A training step on one batch (inputs, targets), which returns the mean loss at the weights before the step."""
MakeStep = Callable[[nn.Module, Optimizer, int, Estimator | None], Step]
"""A builder of the step for a copy of the model, its optimizer, a batch size and an estimator.

The estimator watches the backward passes; a step makes at least `estimator.min_micro_batches` of them. None: steps are
timed.
"""
OnTime = Callable[[int, float], None]
"""A callback with each batch size and the seconds of its step."""

PRECISIONS = ("fp32", "bf16")
STRETCHES = 6
"""Number of equal stretches of the short run, of which the second half counts."""
LEAST_STEPS = 24
"""Fewest steps of the short run."""
LEAST_SIZE, MOST_SIZE = 8, 2**16
"""Smallest and largest batch size that is timed by default."""
WARM, LEAST, MOST = 2, 5, 30
"""Untimed first steps, which choose kernels, allocate or compile, and the bounds of the number of timed steps."""
ENOUGH = 0.3
"""Seconds of timing after which `LEAST` steps are enough."""
MOST_VARIANTS = 256
"""Most batch sizes that the compiler may compile for."""


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
    """Advise from the noise scale over a short run and the time of a step at each batch size.

    Everything runs on copies: model, optimizer, loader and torch's random state remain unchanged.

    Args:
        model: The model to train.
        loss_fn: `loss_fn(model(inputs), targets)`, a mean over samples.
        dataset: A Dataset, a DataLoader or an AdaptiveLoader whose batches are pairs (inputs, targets).
        optimizer: The model's optimizer, with the learning rate that suits `batch_size`. None: the weights remain
            unchanged, and the advice on the learning rate is a factor.
        batch_size: The batch size that suits the learning rate; the short run uses both. None: the loader's.
        batch_sizes: The sizes to time. None: powers of two, until memory or the data ends.
        device: The device to run on. None: the model's.
        steps: Optimizer steps of the short run.
        estimator: The estimator of the noise: "split", "moments" or "per-sample" (not for models with BatchNorm).
        lr_coupling: The learning rate's dependence on the batch size: "linear" as for SGD, "sqrt" as for Adam-like
            optimizers. None: the coupling that suits the optimizer, which must be one of torch's.
        precision: "fp32", or "bf16" for a forward pass under autocast. TF32 follows your torch settings.
        compile: Whether to compile the step with torch.compile.
        make_step: Builds your own training step, which handles precision and compilation itself; `compile` must still
            say whether the step compiles. None: a plain step.
        timing_seconds: Most seconds for timing, without warm-up and compilation.
        step_seconds: Gives the seconds of a step at a batch size, for instance on other hardware. None: time steps.
        on_time: Called with each batch size and the seconds of its step as soon as they are known.
        seed: The seed of the data's order and of the model's random numbers.
    """
    require_count("steps", steps, at_least=LEAST_STEPS)
    known = tuple(name for name, kind in ESTIMATORS.items() if kind.at_fixed_weights and not kind.takes("loss_fn"))
    require_choice("estimator", estimator, known)
    require_choice("precision", precision, PRECISIONS)
    require_positive("timing_seconds", timing_seconds)
    place = _device_of(model, device)
    make_step = make_step or _plain_steps(loss_fn, is_bf16=precision == "bf16", compile=compile)
    if lr_coupling is None:
        lr_coupling = "linear" if optimizer is None else coupling_for(optimizer)
    with _surroundings(dataset, seed, place, compile=compile):
        loader = _loader_of(dataset, batch_size, seed)
        reference = loader.batch_size
        twin, driver = _copied(model, optimizer, place)
        settings = {"compiled": compile} if ESTIMATORS[estimator].takes("compiled") else {}
        watcher = make_estimator(estimator, **settings)
        context = TrainingContext(twin, loader, driver)
        watcher.bind(context)
        tell_steps(watcher, context)
        step = make_step(twin, driver, reference, watcher)
        noise = measure_noise(step, _endless(loader, place), watcher, steps=steps)
        sizes = _sizes(batch_sizes, reference, loader.dataset_size)
        if step_seconds is not None:
            times = StepTimes(tuple((size, step_seconds(size)) for size in sizes))
        else:
            twin, driver = _copied(model, optimizer, place)
            prepare = _steps_to_time(make_step, twin, driver, next(_endless(loader, place)), place)
            times = time_steps(prepare, sizes, budget=timing_seconds, on_time=on_time)
    return Advice(
        noise=noise,
        times=times,
        reference_batch_size=reference,
        reference_lr=None if optimizer is None else float(optimizer.param_groups[0]["lr"]),
        adaptive=lr_coupling == "sqrt",
        dataset_size=loader.dataset_size,
        device=str(place) if step_seconds is None else "",
    )


# The user's own objects: copied, or restored


@contextmanager
def _surroundings(data: Any, seed: int, device: torch.device, *, compile: bool) -> Iterator[None]:
    """Seed torch and let it compile for many sizes; restore its settings and the loader on exit."""
    variants: Any = nullcontext()
    if compile:
        from torch._dynamo import config  # takes a second to import, and only compiled steps need it

        variants = config.patch(recompile_limit=MOST_VARIANTS)
    state = data.state_dict() if isinstance(data, AdaptiveLoader) else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), variants:
        torch.manual_seed(seed)
        try:
            yield
        finally:
            if state is not None:
                data.load_state_dict(state)


def _device_of(model: nn.Module, device: str | torch.device | None) -> torch.device:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
    if first is None:
        raise ArgumentError(f"{type(model).__name__} has no trainable parameter")
    return first.device if device is None else torch.device(device)


def _copied(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> tuple[nn.Module, Optimizer]:
    """Copy model and optimizer to the device, in training mode; None: an optimizer that changes no weights."""
    try:
        twin, driver = copy.deepcopy((model, optimizer))  # together: the copied optimizer needs the copied parameters
    except Exception as error:  # a user's model may raise anything
        raise ArgumentError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and measuring must not change "
            f"your own: pass a model that copy.deepcopy takes"
        ) from error
    twin.to(device).train()
    if driver is None:
        return twin, torch.optim.SGD(twin.parameters(), lr=0.0)
    driver.load_state_dict(driver.state_dict())  # moves its state to the device
    return twin, driver


def _loader_of(data: Any, batch_size: int | None, seed: int) -> AdaptiveLoader:
    if isinstance(data, AdaptiveLoader):
        loader = data
    elif isinstance(data, DataLoader):
        # A sampler may have its own generator, which must not advance.
        twin, shared = copy.copy(data), {id(data.dataset): data.dataset}
        parts = {name: vars(data)[name] for name in ("sampler", "batch_sampler", "generator")}
        vars(twin).update(copy.deepcopy(parts, shared))
        loader = AdaptiveLoader.wrap(twin, seed=seed)
    elif batch_size is None:
        raise ArgumentError("pass batch_size (--batch-size), the size that your learning rate was chosen for")
    else:
        loader = AdaptiveLoader(data, batch_size, seed=seed)
    if batch_size is not None:
        loader.batch_size = batch_size
    if loader.batch_size < 2:
        raise ArgumentError("batch_size must be at least 2: noise shows only between parts of a batch")
    if loader.dataset_size is not None and loader.batch_size > loader.dataset_size:
        raise ArgumentError(f"batch_size={loader.batch_size} is more than the {loader.dataset_size} samples there are")
    loader.set_epoch(loader.epoch)  # a loader left within an epoch would count its samples back
    return loader


def _endless(loader: AdaptiveLoader, device: torch.device) -> Iterator[Any]:
    """Yield pairs (inputs, targets) on the device, epoch after epoch."""
    while True:
        for batch in loader:
            yield _mapped(batch_pair(batch), lambda tensor: tensor.to(device, non_blocking=True))


def _mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(value, function) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        items = [_mapped(value, function) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


# Steps


def _plain_steps(loss_fn: LossFn, *, is_bf16: bool, compile: bool) -> MakeStep:
    mean_loss = _compiled(_mean_loss) if compile else _mean_loss

    def make_step(model: nn.Module, optimizer: Optimizer, batch_size: int, estimator: Estimator | None) -> Step:
        parts = 1 if estimator is None else estimator.min_micro_batches

        def step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), device=next(model.parameters()).device)
            for (inputs, targets), weight in micro_batches(batch, -(-batch_length(batch) // parts)):
                loss = mean_loss(model, loss_fn, is_bf16, inputs, targets) * weight
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            return total

        return step

    return make_step


def _mean_loss(model: nn.Module, loss_fn: LossFn, is_bf16: bool, inputs: Any, targets: Any) -> Tensor:
    if not is_bf16:
        return loss_fn(model(inputs), targets)
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
        outputs = model(inputs)
    return loss_fn(outputs.float(), targets)


_compiled = cache(partial(torch.compile, dynamic=False))
"""The compiled loss, shared by all steps of a process so that each size is compiled once."""


# Noise


def measure_noise(step: Step, batches: Iterator[Any], estimator: Estimator, *, steps: int) -> NoiseCourse:
    """Train for `steps` steps, watched by a bound estimator, and return the noise scale's course."""
    found, points, done = list[Diversity](), list[NoiseEstimate](), 0
    for index in range(STRETCHES):
        end = steps * (index + 1) // STRETCHES
        estimator.start()
        try:
            for number in range(done, end):
                loss = step(next(batches))
                # Checked only at the ends of a stretch: reading a loss waits for the device.
                if number in (done, end - 1) and not math.isfinite(float(loss)):
                    raise DivergedError(
                        f"the loss is {float(loss)} after {number} steps: this learning rate is too large for this "
                        f"batch size. Pass a smaller one"
                    )
            found.append(estimator.finish())
        finally:
            estimator.close()
        points.append(NoiseEstimate.of(found[-1], done + 1, end))
        done = end
    half = STRETCHES // 2
    return NoiseCourse(tuple(points), NoiseEstimate.of(pooled(found[half:]), points[half].first, steps))


def pooled(diversities: Sequence[Diversity]) -> Diversity:
    """Return the mean of independent estimates, weighted by samples.

    Numerator and denominator are averaged separately, which avoids bias.
    """
    total = sum(each.num_samples for each in diversities)
    parts = [each.num_samples / total for each in diversities]

    def mean(values: Sequence[float], power: int = 1) -> float:
        return sum(part**power * value for part, value in zip(parts, values, strict=True))

    spreads = [each.spread for each in diversities if each.spread is not None]
    spread = None
    if len(spreads) == len(diversities):
        spread = Spread(
            trace_variance=mean([each.trace_variance for each in spreads], 2),
            sq_norm_variance=mean([each.sq_norm_variance for each in spreads], 2),
            covariance=mean([each.covariance for each in spreads], 2),
            degrees=sum(each.degrees for each in spreads),
        )
    trace, sq_norm = mean([each.trace for each in diversities]), mean([each.sq_norm for each in diversities])
    return Diversity.from_noise(trace, sq_norm, total, spread=spread)


# Time


def _sizes(wanted: Sequence[int] | None, reference: int, dataset_size: int | None) -> list[int]:
    """Return the sizes to time, which include the reference so that the gain over it is known."""
    if wanted is None:
        most = min(dataset_size or MOST_SIZE, MOST_SIZE)
        wanted = [2**power for power in range(most.bit_length()) if 2**power >= LEAST_SIZE]
    for size in wanted:
        require_count("batch_sizes", size)
        if dataset_size is not None and size > dataset_size:
            raise ArgumentError(f"batch_sizes: {size} is more than the {dataset_size} samples there are")
    sizes = sorted({*wanted, reference})
    if len(sizes) < 2:
        raise ArgumentError(f"batch_sizes: nothing to choose from beside batch {reference}; name more")
    return sizes


def _steps_to_time(
    make_step: MakeStep, model: nn.Module, optimizer: Optimizer, batch: Any, device: torch.device
) -> Callable[[int], Callable[[], None]]:
    """Return a function that prepares a step of a given size; the learning rate is zero, which takes as long."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0

    def prepare(size: int) -> Callable[[], None]:
        step, rows = make_step(model, optimizer, size, None), torch.arange(size, device=device) % batch_length(batch)
        filled = _mapped(batch, lambda tensor: tensor[rows])

        def run() -> None:
            step(filled)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return run

    return prepare


def time_steps(
    prepare: Callable[[int], Callable[[], None]],
    sizes: Sequence[int],
    *,
    budget: float,
    on_time: OnTime | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """Time sizes in turn until memory is full or the next size would exceed `budget` seconds.

    `prepare(size)` returns a step, which on a GPU waits until its kernels have ended. Warm-up steps do not count:
    compiling takes long at each size, so small sizes would use up the budget.
    """
    spent, measured, stopped = 0.0, list[tuple[int, float]](), "the largest asked for"
    for size in sizes:
        if measured and spent + LEAST * measured[-1][1] * size / measured[-1][0] > budget:
            stopped = f"batch {size} would have taken the timing beyond {budget:g} s"
            break
        try:
            seconds = _seconds_of(prepare(size), clock)
        except (BatchTooLargeError, RuntimeError) as error:
            # torch's CPU allocator has no error class of its own.
            is_memory = isinstance(error, BatchTooLargeError) or "allocate memory" in str(error)
            if not measured or not (is_memory or "out of memory" in str(error)):
                raise
            stopped = f"batch {size} does not fit into memory"
            break
        spent += sum(seconds)
        measured.append((size, median(seconds)))
        if on_time is not None:
            on_time(*measured[-1])
    return StepTimes(tuple(measured), stopped)


def _seconds_of(step: Callable[[], None], clock: Callable[[], float]) -> list[float]:
    for _ in range(WARM):
        step()
    seconds: list[float] = []
    while len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < ENOUGH):
        before = clock()
        step()
        seconds.append(clock() - before)
    return seconds
