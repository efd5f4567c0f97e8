"""Branched training (Merrill et al. 2025): the same samples from the same weights at k times the batch size."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from divebatch.checks import require_choice, require_count, require_coupling_power, require_positive
from divebatch.errors import ArgumentError, BatchTooLargeError, DivergedError
from divebatch.lab.probe.verdict import Branch, Outcome, Probe
from divebatch.lr import BY_NOISE, COUPLINGS, Coupling, factor_of

LEAST_STEPS = 4
"""The fewest steps of the largest branch, where the caller names no factors."""
SMOOTHING = 0.2
"""The part of the window that a branch's loss is averaged over."""


def probe_critical_batch(
    batch_size: int,
    train: Callable[[Branch], Iterable[float]],
    *,
    save: Callable[[], Any],
    restore: Callable[[Any], None],
    window: int,
    factors: Sequence[int] | None = None,
    coupling: Coupling = "sqrt",
    repeats: int = 3,
    tolerance: float = 0.02,
    smoothing: float = SMOOTHING,
    evaluate: Callable[[], float] | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Probe:
    """Train a branch for each factor and repeat from the present state, and say which ones keep up with factor 1.

    `train(branch)` makes the branch's steps and gives the mean loss of each, taken before its update. `save()` gives a
    state that later steps do not change, and `restore(state)` goes back to it; the last thing that happens here is a
    restore. Each branch sees `window` samples, rounded down to whole steps of the largest. Its loss is the exponential
    mean over the last `smoothing * window` samples or so, or what `evaluate()` says at its end. A branch keeps up if
    its loss is at most `tolerance`, as a part, above that of factor 1 on the same data. Factors default to powers of
    two that leave the largest branch four steps. A branch that does not fit into memory ends the factors there.
    """
    require_settings(coupling, repeats, tolerance, smoothing)
    factors = checked_factors(factors, batch_size, window)
    # All branches must see the same samples, or their losses could not be compared.
    window -= window % (factors[-1] * batch_size)
    state, outcomes, problem = save(), [], ""
    try:
        for factor in factors:
            for repeat in range(repeats):
                restore(state)
                branch = _branch(factor, repeat, batch_size, window, coupling)
                outcomes.append(_outcome(branch, train, evaluate, smoothing * window))
                if on_outcome is not None:
                    on_outcome(outcomes[-1])
    except BatchTooLargeError as error:
        if factor == 1:
            raise
        # A factor with some repeats missing could not be compared in pairs with the others.
        outcomes = [outcome for outcome in outcomes if outcome.branch.factor < factor]
        problem = f"factor {factor} and above: {error}"
    finally:
        restore(state)
    return Probe(batch_size, window, coupling, tolerance, tuple(outcomes), problem)


def smoothed(losses: Sequence[float], batch_size: int, horizon: float) -> list[float]:
    """The exponential mean of step losses over `horizon` samples, debiased, after each step.

    The horizon counts samples, so branches of all batch sizes are smoothed over the same data.

    >>> smoothed([1.0, 1.0, 1.0], 10, 20.0)
    [1.0, 1.0, 1.0]
    """
    keep, mean, weight, course = math.exp(-batch_size / horizon), 0.0, 0.0, []
    for loss in losses:
        mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
        course.append(mean / weight)
    return course


def _branch(factor: int, repeat: int, batch_size: int, window: int, coupling: Coupling) -> Branch:
    size = factor * batch_size
    return Branch(
        factor=factor,
        batch_size=size,
        lr_factor=factor_of(coupling, factor),
        steps=window // size,
        repeat=repeat,
        coupling=coupling,
    )


def _outcome(
    branch: Branch,
    train: Callable[[Branch], Iterable[float]],
    evaluate: Callable[[], float] | None,
    horizon: float,
) -> Outcome:
    losses = list(train(branch))
    if len(losses) != branch.steps:
        raise ArgumentError(f"train() gave {len(losses)} losses for a branch of {branch.steps} steps")
    course = smoothed(losses, branch.batch_size, horizon)
    loss = course[-1] if evaluate is None else evaluate()
    if branch.factor == 1 and not math.isfinite(loss):
        raise DivergedError(f"the loss of the branch at the present batch size {branch.batch_size} is {loss}")
    return Outcome(branch, loss, tuple(course))


def require_settings(coupling: Coupling, repeats: int, tolerance: float, smoothing: float) -> None:
    """Raise for what no probe can be made with."""
    if isinstance(coupling, str):
        require_choice("coupling", coupling, tuple(name for name in COUPLINGS if name not in BY_NOISE))  # not measured
    else:
        require_coupling_power("coupling", coupling)
    require_count("repeats", repeats)
    require_positive("tolerance", tolerance)
    require_positive("smoothing", smoothing)


def checked_factors(factors: Sequence[int] | None, batch_size: int, window: int) -> list[int]:
    """In rising order, with 1 among them; raise for those that the window is too short for."""
    require_count("batch_size", batch_size)
    require_count("window", window)
    if factors is None:
        factors = default_factors(batch_size, window // LEAST_STEPS)
    for factor in factors:
        require_count("factors", factor)
    ordered = sorted({1, *factors})
    if len(ordered) < 2:
        raise ArgumentError(
            f"nothing to compare: a window of {window} samples leaves no factor above 1 at batch size {batch_size}. "
            f"Make the window longer, or name factors"
        )
    if window < ordered[-1] * batch_size:
        raise ArgumentError(
            f"the window of {window} samples is shorter than one step of factor {ordered[-1]} "
            f"({ordered[-1] * batch_size} samples): make the window longer or leave that factor out"
        )
    return ordered


def default_factors(batch_size: int, cap: int) -> list[int]:
    """Powers of two whose batches are at most `cap` samples.

    >>> default_factors(128, 1100)
    [1, 2, 4, 8]
    """
    return [2**power for power in range(max(1, (cap // batch_size).bit_length()))]
