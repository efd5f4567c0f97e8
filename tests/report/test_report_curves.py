"""Averages over trials against a slow, obvious twin."""

import math
import statistics

import numpy as np
import pytest
from made_up_runs import epoch_record

from divebatch.records import RunHeader
from divebatch.report.curves import Curve, average_curve
from divebatch.report.runs import Run

NAN = float("nan")
CASES = {
    "equal lengths": [[1.0, 2.0, 4.0], [3.0, 5.0, 4.5], [2.0, 2.5, 1.0]],
    "unequal lengths": [[1.0, 2.0, 4.0, 8.0], [3.0], [2.0, 2.5]],
    "missing values": [[1.0, None, 4.0], [3.0, 5.0, None], [2.0, None, None]],
    "values that are not finite": [[1.0, NAN, math.inf], [3.0, 5.0, -math.inf]],
    "nothing left in an epoch": [[None, 1.0], [None, 2.0]],
    "one trial": [[1.0, 2.0]],
    "a trial without epochs": [[], [1.0, 2.0]],
    "no trial": [],
}


def make_runs(trials: list[list[float | None]]) -> list[Run]:
    header = RunHeader(experiment="e", method="m", seed=0)
    return [
        Run(header, tuple(epoch_record(epoch, val_loss=value) for epoch, value in enumerate(trial, 1)))
        for trial in trials
    ]


def values_at(trials: list[list[float | None]], epoch: int) -> list[float]:
    there = [trial[epoch - 1] for trial in trials if len(trial) >= epoch]
    return [value for value in there if value is not None and math.isfinite(value)]


@pytest.mark.parametrize("case", CASES)
def test_mean_spread_and_standard_error_match_the_slow_twin(case: str) -> None:
    trials = CASES[case]
    curve = average_curve(make_runs(trials), "val_loss")
    assert curve.epochs.tolist() == list(range(1, max(map(len, trials), default=0) + 1))
    for index, epoch in enumerate(curve.epochs):
        values = values_at(trials, int(epoch))
        std = statistics.stdev(values) if len(values) > 1 else NAN
        expected = (statistics.fmean(values) if values else NAN, std, std / math.sqrt(max(1, len(values))))
        found = (curve.mean[index], curve.std[index], curve.standard_error[index])
        assert found == pytest.approx(expected, nan_ok=True)
        assert curve.num_trials[index] == len(values)


def test_the_final_value_is_that_of_the_last_epoch_any_trial_reached() -> None:
    final = average_curve(make_runs([[1.0, 2.0, 6.0], [1.0, 2.0, 8.0], [1.0]]), "val_loss").final()
    assert final is not None
    assert (final.mean, final.num_trials) == (7.0, 2)
    assert final.standard_error == pytest.approx(1.0)
    assert average_curve(make_runs([[1.0, None]]), "val_loss").final() is None
    assert average_curve([], "val_loss").final() is None


def test_first_reaching_matches_a_search_from_the_start() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        mean = rng.integers(0, 6, size=8).astype(float)
        mean[rng.random(8) < 0.2] = NAN
        curve = Curve(np.arange(1, 9), mean, np.zeros(8), np.ones(8, dtype=np.int64))
        for target in range(7):
            slow = next((epoch for epoch, value in enumerate(mean, 1) if value >= target), None)
            assert curve.first_reaching(target) == slow


def test_a_target_one_point_below_is_not_missed_by_rounding() -> None:
    for point in range(1, 100):
        curve = average_curve(make_runs([[(point - 1) / 100, point / 100]]), "val_loss")
        assert curve.first_reaching(point / 100 - 0.01) == 1


def test_huge_losses_give_an_infinite_spread_without_a_warning() -> None:
    curve = average_curve(make_runs([[1e200], [-1e200]]), "val_loss")
    assert curve.mean[0] == 0
    assert curve.std[0] == math.inf


def test_measured_keeps_the_epochs_with_a_value() -> None:
    curve = average_curve(make_runs([[None, 2.0, None, 4.0]]), "val_loss").measured()
    assert curve.epochs.tolist() == [2, 4]
    assert curve.scaled(100.0).mean.tolist() == [200.0, 400.0]


def test_a_single_epoch_and_the_rest_from_one_on() -> None:
    curve = average_curve(make_runs([[1.0, None, 3.0, 4.0], [3.0]]), "val_loss")
    first = curve.at(1)
    assert first is not None
    assert (first.mean, first.num_trials) == (2.0, 2)
    assert [curve.at(epoch) for epoch in (0, 2, 5)] == [None, None, None]
    assert average_curve([], "val_loss").at(1) is None
    assert curve.since(3).epochs.tolist() == [3, 4]
    assert curve.since(3).mean.tolist() == [3.0, 4.0]
