"""Averages over trials against a slow, obvious twin; and one value of each number, whoever says it."""

import csv
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_runs import GPU, LOSS, REAL, epoch_record, write_run
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.records import Metric, RunHeader
from divebatch.report import analyse, load_runs, write_report
from divebatch.report.analysis import MOST_POINTS, Curve, average_curve, reaches, target_below, trained_alike
from divebatch.report.load import RecordedRun

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


def make_runs(trials: list[list[float | None]]) -> list[RecordedRun]:
    header = RunHeader(experiment="e", method="m", seed=0)
    return [
        RecordedRun(header, tuple(epoch_record(epoch, val_loss=value) for epoch, value in enumerate(trial, 1)))
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
    for trials in ([[1.0, None]], []):
        assert average_curve(make_runs(trials), "val_loss").final() is None


def test_huge_losses_give_an_infinite_spread_without_a_warning() -> None:
    curve = average_curve(make_runs([[1e200], [-1e200]]), "val_loss")
    assert (curve.mean[0], curve.std[0]) == (0, math.inf)


def test_parts_of_a_curve() -> None:
    curve = average_curve(make_runs([[1.0, None, 3.0, 4.0], [3.0]]), "val_loss")
    first = curve.at(1)
    assert first is not None
    assert (first.mean, first.num_trials) == (2.0, 2)
    assert [curve.at(epoch) for epoch in (0, 2, 5)] == [None, None, None]
    assert curve.since(3).epochs.tolist() == [3, 4]
    assert curve.measured().epochs.tolist() == [1, 3, 4]
    assert curve.measured().scaled(100.0).mean.tolist() == [200.0, 300.0, 400.0]


# Targets


def test_a_target_one_point_below_is_not_missed_by_rounding() -> None:
    for point in range(1, 100):
        target = target_below(Metric(), point / 100)
        assert reaches(Metric(), np.array((point - 1) / 100), target)
        assert not reaches(Metric(), np.array((point - 1.001) / 100), target)


def test_the_target_of_a_loss_is_one_percent_above_it() -> None:
    assert target_below(LOSS, 2.0) == pytest.approx(2.02)
    assert target_below(LOSS, -2.0) == pytest.approx(-1.98)
    reached = reaches(LOSS, np.array([2.03, 2.02, 1.0, NAN]), target_below(LOSS, 2.0))
    assert reached.tolist() == [False, True, True, False]


@pytest.mark.parametrize("metric", [Metric(), LOSS])
def test_arrivals_match_a_search_from_the_start(tmp_path: Path, metric: Metric) -> None:
    rng = np.random.default_rng(0)
    values = {method: rng.random((3, 9)) for method in ("sgd-small", "divebatch", "adabatch")}
    for method, trials in values.items():
        for seed, trial in enumerate(trials):
            rows = [{metric.name: float(v), "train_seconds": (seed + 1.0) * n} for n, v in enumerate(trial, 1)]
            write_run(tmp_path, "e", method, seed, rows, metric=metric)
    analysis = analyse(load_runs(tmp_path).experiments[0])
    target = target_below(metric, values["sgd-small"][:, -1].mean())
    for method, trials in values.items():
        slow = next((n for n, mean in enumerate(trials.mean(axis=0), 1) if reaches(metric, mean, target)), None)
        assert analysis.common[method]["epochs"].value == slow
        assert analysis.common[method]["seconds"].value == (None if slow is None else pytest.approx(2.0 * slow))
        alone = [next((n for n, v in enumerate(t, 1) if reaches(metric, v, target)), math.inf) for t in trials]
        assert list(analysis.common[method]["epochs"].trials) == alone


def test_methods_train_alike_if_every_epoch_is_the_same(tmp_path: Path) -> None:
    rows = [{"val_accuracy": 0.5, "lr": 0.1, "train_seconds": 1.0}, {"val_accuracy": 0.6, "lr": 0.1}]
    write_run(tmp_path, "e", "one", 0, rows)
    write_run(tmp_path, "e", "same", 0, [{**row, "train_seconds": 9.0} for row in rows])
    write_run(tmp_path, "e", "shorter", 0, rows[:1])
    write_run(tmp_path, "e", "other", 0, [rows[0], {**rows[1], "lr": 0.2}])
    write_run(tmp_path, "e", "seed", 1, rows)
    analysis = analyse(load_runs(tmp_path).experiments[0])
    one = analysis.method("one")
    assert [m.method for m in analysis.methods if trained_alike(one, m)] == ["one", "same"]


# Outlines of long curves


def curve_of(mean):
    mean = np.asarray(mean, dtype=np.float64)
    return Curve(np.arange(1, len(mean) + 1), mean, np.full(len(mean), np.nan), np.ones(len(mean), dtype=int))


def test_a_short_curve_is_drawn_whole():
    curve = curve_of(np.sin(np.arange(MOST_POINTS)))
    assert curve.outline() is curve


@settings(max_examples=20, deadline=None)
@given(st.integers(MOST_POINTS + 1, 20_000), st.integers(0, 10**6), st.floats(1, 1e6))
def test_no_peak_of_a_long_curve_disappears(length, where, height):
    mean = np.zeros(length)
    mean[where % length] = height
    mean[(7 * where + 3) % length] -= 2 * height
    drawn = curve_of(mean).outline()
    assert len(drawn.epochs) <= MOST_POINTS
    assert (drawn.mean.min(), drawn.mean.max()) == (mean.min(), mean.max())
    assert (drawn.epochs[0], drawn.epochs[-1]) == (1, length)


# One value of each number, whoever says it


def ways(*accuracies: float, pace: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    return [
        {"val_accuracy": a, "val_loss": 1 - a, "train_seconds": pace * n, "steps": 7 * n, "samples": 900 * n, **more}
        for n, a in enumerate(accuracies, 1)
    ]


@pytest.mark.usefixtures("quick_figures")
def test_every_output_gives_one_target_and_one_time_to_it(tmp_path: Path) -> None:
    """The baseline has not finished: its 70 % must not become anyone's target."""
    for seed in range(2):
        write_run(tmp_path, "e", "sgd-small", seed, ways(0.6, 0.7), config={"epochs": 4}, report=REAL)
        write_run(tmp_path, "e", "divebatch", seed, ways(0.5, 0.8, 0.895, 0.9, pace=2.0 + seed), report=REAL)
        write_run(tmp_path, "e", "adabatch", seed, ways(0.5, 0.6, 0.88, 0.89), report=REAL)
    report = write_report(tmp_path)
    page = report.html.read_text(encoding="utf-8")
    texts = {
        "page": page,
        "markdown": (tmp_path / "report.md").read_text(encoding="utf-8"),
        "bars": (tmp_path / "figures" / "e-target.csv").read_text(encoding="utf-8"),
        "compare": CliRunner().invoke(app, ["compare", str(tmp_path), "divebatch", "adabatch"]).output,
    }
    for name, text in texts.items():
        assert "89.00 %" in text, name
        assert "69.00 %" not in text, name
    (results,) = [table for table in report.sections[0].tables if table.name == "results"]
    table = {row[0]: row[-1] for row in results.rows}
    assert table == {"divebatch": "7.50 s (3)", "adabatch": "4.00 s (4)", "sgd-small": "not yet"}
    with (tmp_path / "figures" / "e-target.csv").open() as file:
        bars = {(row["method"], row["unit"]): row["on_mean_metric"] for row in csv.DictReader(file)}
    assert (bars["divebatch", "seconds"], bars["divebatch", "epochs"]) == ("7.5", "3")
    assert bars["sgd-small", "seconds"] == ""
    found = re.findall(r"<td>([\d.]+ s|not reached)</td></tr>", page)
    assert found[:3] == ["not reached", "4.00 s", "7.50 s"]


@pytest.mark.usefixtures("quick_figures")
def test_a_report_has_one_peak_of_memory(tmp_path: Path) -> None:
    """An unfinished run beside a finished one counts in no table."""
    finished, unfinished = ways(0.5, 0.6, peak_memory_bytes=100 * 2**20), ways(0.5, peak_memory_bytes=900 * 2**20)
    write_run(tmp_path, "e", "m", 0, finished, hardware=GPU)
    write_run(tmp_path, "e", "m", 1, unfinished, config={"epochs": 2}, hardware=GPU)
    for table in write_report(tmp_path).sections[0].tables:
        cells = {name: cell for name, cell in zip(table.columns, table.rows[0], strict=True) if "MiB" in name}
        assert set(cells.values()) <= {"100"}, table.name
