"""The numbers that the page draws: means over trials, four axes, bars with intervals, one sentence."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import write_accuracies, write_paper_like, write_real, write_run

from divebatch.report import Experiment, load_runs
from divebatch.report.answer import answer as answer_to
from divebatch.report.bars import Bar, make_bars
from divebatch.report.chart_drawings import draw_chart
from divebatch.report.charts import Chart, make_charts, make_tracks
from divebatch.report.figure_web import bar_text
from divebatch.report.payload import payload
from divebatch.report.sections import make_section
from divebatch.report.style import LOOKS, ON_DARK, REAL_LOOKS, SPARE_LOOKS


def only(folder: Path) -> Experiment:
    (experiment,) = load_runs(folder).experiments
    return experiment


def answer(experiment: Experiment) -> str:
    return answer_to(experiment, make_bars(experiment))


def chart(experiment: Experiment, name: str) -> Chart:
    return next(chart for chart in make_charts(experiment) if chart.name == name)


def timed(*accuracies: float, pace: float = 1.0) -> list[dict[str, Any]]:
    return [{"val_accuracy": a, "train_seconds": pace * e, "val_loss": 1 - a} for e, a in enumerate(accuracies, 1)]


@pytest.mark.usefixtures("quick_figures")
def test_the_numbers_on_the_page_are_those_of_the_records(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "m", 0, timed(0.5, 0.7))
    write_run(tmp_path, "e", "m", 1, timed(0.6, 0.9, pace=3.0))
    data = json.loads(payload([make_section(only(tmp_path), "e")]))
    (section,) = data["sections"]
    (method,) = section["methods"]
    assert method["x"] == {"epochs": [1, 2], "steps": [10, 20], "samples": [1000, 2000], "seconds": [2, 4]}
    accuracy = section["charts"][0]
    assert accuracy["title"] == "Validation accuracy (%)"
    assert accuracy["lines"][0]["mean"] == [55, 80]
    assert accuracy["lines"][0]["error"] == [5, 10]
    assert accuracy["lines"][0]["at"] == [0, 1]


def test_an_axis_that_was_not_recorded_is_left_out(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "m", [[0.5, 0.7]])
    (track,) = make_tracks(only(tmp_path))
    assert set(track.axes) == {"epochs", "steps", "samples"}


def test_a_line_never_runs_backwards_where_a_slow_trial_ends_early(tmp_path: Path) -> None:
    config = {"epochs": 9}
    write_run(tmp_path, "e", "m", 0, timed(0.5, 0.6, 0.7), config=config)
    write_run(tmp_path, "e", "m", 1, timed(0.5, 0.6, pace=100.0), config=config)
    (track,) = make_tracks(only(tmp_path))
    assert track.axes["seconds"].tolist() == [50.5, 101.0, 101.0]


def test_the_estimate_stands_against_the_exact_value(tmp_path: Path) -> None:
    rows = [{"diversity": d, "exact_diversity": e} for d, e in ((None, 1.0), (4.0, 2.0), (6.0, 3.0), (3.0, 1.0))]
    write_run(tmp_path, "e", "divebatch", 0, rows)
    write_run(tmp_path, "e", "oracle", 0, [{"diversity": d, "exact_diversity": d} for d in (1.0, 2.0)])
    diversity = chart(only(tmp_path), "diversity")
    assert [line.label for line in diversity.panel.lines] == ["divebatch", "divebatch, exact", "oracle"]
    assert diversity.panel.lines[0].curve.epochs.tolist() == [2, 3, 4]
    steps = diversity.positions(0, "steps")
    assert steps is not None
    assert steps.tolist() == [20, 30, 40]
    assert "divebatch: the estimate is 2.00 times the exact value in the median epoch" in diversity.caption
    assert "oracle:" not in diversity.caption


def test_memory_is_drawn_for_gpus_alone(tmp_path: Path) -> None:
    rows = [{"peak_memory_bytes": 3 * 2**20}]
    write_run(tmp_path, "e", "cpu", 0, rows)
    write_run(tmp_path, "e", "gpu", 0, rows, hardware={"device": "cuda"})
    memory = chart(only(tmp_path), "memory")
    assert [line.label for line in memory.panel.lines] == ["gpu"]
    assert memory.panel.lines[0].curve.mean.tolist() == [3.0]


def test_bars_say_when_the_mean_got_there_and_between_what(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [timed(0.1, 0.5, 0.9), timed(0.1, 0.89, 0.91)]})
    write_real(tmp_path, {"divebatch": [timed(0.9, 0.9, 0.9, pace=2.0)] * 2, "sgd-large": [timed(0.1, 0.1, 0.2)] * 2})
    bars = make_bars(only(tmp_path))
    assert list(bars) == ["seconds", "epochs", "steps", "samples"]
    assert bars["seconds"].target == pytest.approx(0.895)
    small, large, dive = bars["seconds"].bars
    assert (small.value, small.low, small.high, small.trials) == (3.0, 3.0, 3.0, (3.0, 3.0))
    assert (large.value, large.num_reached) == (None, 0)
    assert (dive.value, dive.trials) == (2.0, (2.0, 2.0))
    assert [bar.value for bar in bars["steps"].bars] == [30.0, None, 10.0]
    assert [bar_text(bar, "seconds") for bar in (small, large)] == ["3.00 s (3.00 s to 3.00 s)", "not reached"]


def test_the_interval_is_the_bootstraps(tmp_path: Path) -> None:
    """The same by drawing trials one by one and averaging them, as slow as can be."""
    rng = np.random.default_rng(1)
    accuracy = 0.9 - np.array([[0.1], [0.2], [0.4], [0.6], [0.8]]) * np.exp(-np.arange(400) / 60)
    write_accuracies(tmp_path, "e", "sgd-small", accuracy.tolist())
    bar = make_bars(only(tmp_path))["epochs"].bars[0]
    target = accuracy[:, -1].mean() - 0.01
    draws = [accuracy[rng.integers(0, 5, 5)].mean(axis=0) for _ in range(4000)]
    arrivals = [1 + int(np.argmax(mean >= target)) for mean in draws]
    low, high = np.quantile(arrivals, [0.025, 0.975])
    assert high - low > 50
    assert bar.low == pytest.approx(low, abs=4)
    assert bar.high == pytest.approx(high, abs=4)
    assert bar.low < (bar.value or 0) < bar.high


def test_a_single_trial_has_no_interval(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.5, 0.9]])
    bar = make_bars(only(tmp_path))["epochs"].bars[0]
    assert not bar.has_interval
    assert bar_text(bar, "epochs") == "2"


def test_whiskers_that_run_on_to_never_say_so() -> None:
    bar = Bar("m", LOOKS["oracle"], 5.0, 4.0, math.inf, (4.0, math.inf))
    assert bar_text(bar, "epochs") == "5 (4 to never)"


def test_the_answer_compares_with_the_baselines(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [timed(0.1, 0.5, 0.9)] * 2, "sgd-tuned": [timed(0.1, 0.9, 0.9)] * 2})
    write_real(tmp_path, {"divebatch": [timed(0.9, 0.9, 0.9)] * 2, "adabatch": [timed(0.1, 0.1, 0.1)] * 2})
    assert answer(only(tmp_path)) == (
        "divebatch got to 89.00 % validation accuracy first, in 1.00 s of training: "
        "sgd-small took 3.00 times as long (no seeds overlap); sgd-tuned took 2.00 times as long (no seeds overlap)."
    )


def test_the_answer_says_what_may_be_chance(tmp_path: Path) -> None:
    early, late = timed(0.9, 0.9, 0.9), timed(0.1, 0.1, 0.9)
    write_real(tmp_path, {"sgd-small": [early, late], "divebatch": [timed(0.9, 0.9, 0.9, pace=1.5)] * 2})
    assert "(seeds overlap, so it may be chance)" in answer(only(tmp_path))


def test_the_answer_goes_by_epochs_where_times_do_not_compare(tmp_path: Path) -> None:
    for method, rows in {"sgd-small": timed(0.1, 0.9), "divebatch": timed(0.9, 0.9, pace=9.0)}.items():
        config = {"epochs": 3, "data": {"kind": "cifar"}}
        write_run(tmp_path, "e", method, 0, [*rows, rows[-1]], config=config, hardware={"name": f"{method}'s"})
    text = answer(only(tmp_path))
    assert "divebatch got to 89.00 % validation accuracy first, in 1 epoch: sgd-small took 2.00 times as many" in text
    assert "(a single seed, so it may be chance)" in text


def test_unfinished_runs_make_the_answer_a_provisional_one(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.1, 0.9]])
    write_run(tmp_path, "e", "divebatch", 0, timed(0.9), config={"epochs": 2})
    assert answer(only(tmp_path)).startswith("So far, divebatch got to 89.00 %")


def test_a_leading_baseline_is_compared_with_the_next(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.9, 0.9]])
    write_accuracies(tmp_path, "e", "mine", [[0.1, 0.9]])
    assert "sgd-small got to" in answer(only(tmp_path))
    assert "mine took 2.00 times as many" in answer(only(tmp_path))


def test_of_many_that_came_first_three_are_named(tmp_path: Path) -> None:
    for method in "abcde":
        write_accuracies(tmp_path, "e", method, [[0.1, 0.5]])
    expected = "a and b and c and 2 more got to 49.00 % validation accuracy first, in 2 epochs"
    assert answer(only(tmp_path)) == f"{expected}: no other method has reached it."


def test_losses_of_any_size_are_drawn(tmp_path: Path) -> None:
    for seed, losses in enumerate([(1e200, 1e-200, 1e290), (1e250, 1e-250, 1e299), (1e10, 1e-9, 0.0)]):
        write_run(tmp_path, "e", "m", seed, [{"val_loss": loss} for loss in losses])
    assert draw_chart(chart(only(tmp_path), "loss"), "e").png.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({"a": 0.5, "b": 0.25}, "b has the lowest last validation loss, 0.25; a comes next with 0.5."),
        ({"a": 0.5}, "Only a was run, so there is nothing to compare."),
        ({"a": None, "b": None}, "No answer yet: fewer than two methods have a validation loss."),
    ],
)
def test_there_is_an_answer_without_accuracies(tmp_path: Path, losses: dict[str, float | None], expected: str) -> None:
    for method, loss in losses.items():
        write_run(tmp_path, "e", method, 0, [{"val_loss": loss}])
    assert answer(only(tmp_path)) == expected


def test_no_line_is_lost_on_either_page() -> None:
    """Contrast of at least 2 to 1 with the card that the figures lie on."""
    colors = {look.color for look in (*LOOKS.values(), *REAL_LOOKS.values())} | {color for color, _ in SPARE_LOOKS}
    for color in colors:
        assert contrast(color, "#ffffff") > 2, color
        assert contrast(ON_DARK.get(color, color), "#1e2125") > 4, color


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.usefixtures("quick_figures")
def test_the_payload_cannot_end_its_element(tmp_path: Path) -> None:
    write_paper_like(tmp_path, convex=True, epochs=2, trials=1)
    write_run(tmp_path, "</script><!--<script>&", "</script>", 0, [{"val_loss": 1.0}], place="x/y")
    sections = [make_section(experiment, "s") for experiment in load_runs(tmp_path).experiments[:1]]
    text = payload(sections)
    assert not set("<>&") & set(text)
    assert json.loads(text)["sections"][0]["methods"][0]["name"] == "</script>"
