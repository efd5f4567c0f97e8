"""Seconds of a training step against its batch size."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from divebatch.advice.tradeoff import StepTimes
from divebatch.errors import BatchTooLargeError

WARM, LEAST, MOST = 2, 5, 30
"""Steps before any is timed (the first ones choose kernels, allocate or compile), and how many are timed."""
ENOUGH = 0.3
"""Seconds after which no more than the least are timed."""

Step = Callable[[], None]
OnTime = Callable[[int, float], None]
"""Gets each batch size and the seconds of its step, as soon as they are known."""


def time_steps(
    prepare: Callable[[int], Step],
    sizes: Sequence[int],
    *,
    budget: float,
    on_time: OnTime | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """Time sizes in turn until one does not fit into memory or the next would go over `budget` seconds.

    `prepare(size)` gives a step, which must have ended when it returns: on a GPU it waits. Steps that warm a size up
    are not counted: compiling takes long at every size, and the small ones would leave nothing for the large.
    """
    spent, measured, stopped = 0.0, list[tuple[int, float]](), "the largest asked for"
    for size in sizes:
        if measured and spent + _cost(size, *measured[-1]) > budget:
            stopped = f"batch {size} would have taken the timing beyond {budget:g} s"
            break
        try:
            seconds = _time(prepare(size), clock)
        except (BatchTooLargeError, RuntimeError) as error:
            if not measured or not _is_memory(error):
                raise
            stopped = f"batch {size} does not fit into memory"
            break
        spent += sum(seconds)
        measured.append((size, float(np.median(seconds))))
        if on_time is not None:
            on_time(*measured[-1])
    return StepTimes(tuple(measured), stopped)


def _time(step: Step, clock: Callable[[], float]) -> list[float]:
    for _ in range(WARM):
        step()
    seconds: list[float] = []
    while len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < ENOUGH):
        before = clock()
        step()
        seconds.append(clock() - before)
    return seconds


def _cost(size: int, last_size: int, last_seconds: float) -> float:
    return LEAST * last_seconds * size / last_size


def _is_memory(error: Exception) -> bool:
    """torch's CPU allocator has no error class of its own."""
    return isinstance(error, BatchTooLargeError) or "allocate memory" in str(error) or "out of memory" in str(error)
