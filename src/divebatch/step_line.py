"""The seconds of a training step as a straight line in its batch size. No torch in here."""

from collections.abc import Sequence

Line = tuple[float, float]
"""(seconds of a step whatever its size, seconds for each of its samples)."""


def step_line(times: Sequence[tuple[float, float]]) -> Line:
    """Fit seconds = fixed + batch_size * per_sample, neither below zero, with the least relative errors.

    >>> step_line([(10, 3.0), (20, 5.0), (40, 9.0)])
    (1.0, 0.2)

    Args:
        times: (batch size, seconds of a step) at one size or more; a single one counts as having no fixed cost.
    """
    x, y = [1 / seconds for _, seconds in times], [size / seconds for size, seconds in times]
    xx, yy, xy = _dot(x, x), _dot(y, y), _dot(x, y)
    determinant = xx * yy - xy**2
    if determinant <= 1e-12 * xx * yy:  # a single size: nothing tells the two apart
        return (0.0, sum(y) / yy)
    fixed, per_sample = (yy * sum(x) - xy * sum(y)) / determinant, (xx * sum(y) - xy * sum(x)) / determinant
    if fixed < 0:
        return (0.0, sum(y) / yy)
    if per_sample < 0:
        return (sum(x) / xx, 0.0)
    return (round(fixed, 12), round(per_sample, 15))


def line_misfit(times: Sequence[tuple[float, float]]) -> float:
    """The largest part by which a time is off its line.

    Args:
        times: As `step_line` takes them.
    """
    fixed, per_sample = step_line(times)
    return max(abs(fixed + size * per_sample - seconds) / seconds for size, seconds in times)


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))
