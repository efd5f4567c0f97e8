"""Averages over trials: one number for each epoch, with its spread."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from divebatch.report.runs import RecordedRun

Floats = NDArray[np.float64]
STRETCHES = 400
"""Into which a long curve is divided to be drawn."""
MOST_POINTS = 6 * STRETCHES
"""Curves with more are drawn by their outline, of up to so many points."""


@dataclass(frozen=True, slots=True)
class Average:
    """A mean over trials, in the field's own unit."""

    mean: float
    std: float
    """Sample standard deviation (divisor n - 1); NaN for a single trial."""
    num_trials: int

    @property
    def standard_error(self) -> float:
        """The standard error of the mean: std / sqrt(n); NaN for a single trial."""
        return self.std / math.sqrt(self.num_trials)


@dataclass(frozen=True, slots=True)
class Curve:
    """A field's mean over trials at each epoch that any trial reached.

    `num_trials` counts the trials that have a finite value there: runs that ended earlier and values that are missing
    or not finite are left out. Where nothing is left the mean is NaN; the spread is NaN for fewer than two trials.
    """

    epochs: NDArray[np.int64]
    mean: Floats
    std: Floats
    num_trials: NDArray[np.int64]

    @property
    def standard_error(self) -> Floats:
        """The standard error of the mean: std / sqrt(n)."""
        return self.std / np.sqrt(np.maximum(self.num_trials, 1))

    @property
    def is_empty(self) -> bool:
        """Whether no epoch has a finite value."""
        return not np.isfinite(self.mean).any()

    def final(self) -> Average | None:
        """At the last epoch that any trial reached; None where no trial has a finite value there."""
        return self.at(int(self.epochs[-1])) if len(self.epochs) else None

    def at(self, epoch: int) -> Average | None:
        """At one epoch; None where no trial has a finite value there."""
        index = int(np.searchsorted(self.epochs, epoch))
        if index == len(self.epochs) or self.epochs[index] != epoch or self.num_trials[index] == 0:
            return None
        return Average(float(self.mean[index]), float(self.std[index]), int(self.num_trials[index]))

    def measured(self) -> "Curve":
        """Only the epochs with a finite value: for fields that are measured now and then."""
        return self.only(np.isfinite(self.mean))

    def since(self, epoch: int) -> "Curve":
        """The part of the curve from `epoch` on."""
        return self.only(self.epochs >= epoch)

    def outline(self) -> NDArray[np.intp]:
        """Indices of the points that a drawing needs: all of them, or of a long curve those that make its outline.

        These are the first and the last point of each stretch, and there the extremes of the mean and of its band: no
        peak disappears.
        """
        if len(self.epochs) <= MOST_POINTS:
            return np.arange(len(self.epochs))
        width = np.where(np.isfinite(self.std), self.std, 0.0)
        # Of what is drawn, values where there are none are neither the lowest nor the highest.
        lows = [np.where(np.isnan(each), np.inf, each) for each in (self.mean, self.mean - width)]
        highs = [np.where(np.isnan(each), -np.inf, each) for each in (self.mean, self.mean + width)]
        kept: set[int] = set()
        for first, end in pairwise(np.linspace(0, len(self.epochs), STRETCHES + 1).astype(int).tolist()):
            extremes = [*(each[first:end].argmin() for each in lows), *(each[first:end].argmax() for each in highs)]
            kept |= {first, end - 1, *(first + int(index) for index in extremes)}
        return np.array(sorted(kept))

    def only(self, kept: NDArray[np.bool_] | NDArray[np.intp]) -> "Curve":
        """Some of the points."""
        return Curve(self.epochs[kept], self.mean[kept], self.std[kept], self.num_trials[kept])

    def scaled(self, factor: float) -> "Curve":
        """In another unit: mean and spread times `factor`."""
        return Curve(self.epochs, self.mean * factor, self.std * factor, self.num_trials)


def average_curve(runs: Sequence[RecordedRun], field: str) -> Curve:
    """Average an `EpochRecord` field over trials, epoch by epoch."""
    epochs = sorted({record.epoch for run in runs for record in run.epochs})
    values = by_trial(runs, field, epochs)
    counts = np.isfinite(values).sum(axis=0)
    # Masked sums instead of nanmean and nanstd, which warn where nothing is left.
    mean = _ratio(np.nansum(values, axis=0), counts)
    with np.errstate(over="ignore"):  # a spread beyond what a float holds is infinite
        variance = _ratio(np.nansum((values - mean) ** 2, axis=0), counts - 1)
    return Curve(np.array(epochs, dtype=np.int64), mean, np.sqrt(variance), counts)


def by_trial(runs: Sequence[RecordedRun], field: str, epochs: list[int]) -> Floats:
    """One row a trial, one column an epoch, NaN where there is no finite value."""
    column = {epoch: index for index, epoch in enumerate(epochs)}
    values = np.full((len(runs), len(epochs)), np.nan)
    for row, run in enumerate(runs):
        for record in run.epochs:
            value = getattr(record, field)
            if value is not None and math.isfinite(value):
                values[row, column[record.epoch]] = value
    return values


def _ratio(sums: Floats, counts: NDArray[np.int64]) -> Floats:
    ratio = np.full(len(sums), np.nan)
    np.divide(sums, counts, out=ratio, where=counts > 0)
    return ratio
