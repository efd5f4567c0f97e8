"""Averages over trials: one number for each epoch, with its spread."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from divebatch.report.runs import RecordedRun

Floats = NDArray[np.float64]


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
        return self._where(np.isfinite(self.mean))

    def since(self, epoch: int) -> "Curve":
        """The part of the curve from `epoch` on."""
        return self._where(self.epochs >= epoch)

    def _where(self, kept: NDArray[np.bool_]) -> "Curve":
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
