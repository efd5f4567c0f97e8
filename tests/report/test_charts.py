"""The numbers that the page draws: means over trials, four axes, bars with intervals, one sentence."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import write_accuracies, write_paper_like, write_real, write_run

from divebatch.report import Analysis, analyse, load_runs, write_report
from divebatch.report.analysis import Arrival
from divebatch.report.charts import Chart, bar_text, make_bars, make_charts, make_shadow_charts, make_tracks
from divebatch.report.drawing import draw_chart
from divebatch.report.html import payload
from divebatch.report.sections import make_section
from divebatch.report.style import DASHED, ON_DARK, looks_for


def only(folder: Path) -> Analysis:
    (experiment,) = load_runs(folder).experiments
    return analyse(experiment)


def section_data(folder: Path) -> dict[str, Any]:
    (experiment,) = load_runs(folder).experiments
    (section,) = json.loads(payload([make_section(experiment, "e")]))["sections"]
    return dict(section)


def chart(analysis: Analysis, name: str) -> Chart:
    return next(chart for chart in make_charts(make_tracks(analysis)) if chart.name == name)


def timed(*accuracies: float, pace: float = 1.0) -> list[dict[str, Any]]:
    return [{"val_accuracy": a, "train_seconds": pace * e, "val_loss": 1 - a} for e, a in enumerate(accuracies, 1)]


@pytest.mark.usefixtures("quick_figures")
def test_the_numbers_on_the_page_are_those_of_the_records(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "m", 0, timed(0.5, 0.7))
    write_run(tmp_path, "e", "m", 1, timed(0.6, 0.9, pace=3.0))
    section = section_data(tmp_path)
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
    assert bars["seconds"].title == "Training time (s) to the common target of 89.50 %"
    small, large, dive = bars["seconds"].arrivals.values()
    assert (small.value, small.low, small.high, small.trials) == (3.0, 3.0, 3.0, (3.0, 3.0))
    assert (large.value, large.num_reached) == (None, 0)
    assert (dive.value, dive.trials) == (2.0, (2.0, 2.0))
    assert [bar.value for bar in bars["steps"].arrivals.values()] == [30.0, None, 10.0]
    assert [bar_text(bar, "seconds") for bar in (small, large)] == ["3.00 s (3.00 s to 3.00 s)", "not reached"]


def test_the_interval_is_the_bootstraps(tmp_path: Path) -> None:
    """The same by drawing trials one by one and averaging them, as slow as can be."""
    rng = np.random.default_rng(1)
    accuracy = 0.9 - np.array([[0.1], [0.2], [0.4], [0.6], [0.8]]) * np.exp(-np.arange(400) / 60)
    write_accuracies(tmp_path, "e", "sgd-small", accuracy.tolist())
    bar = make_bars(only(tmp_path))["epochs"].arrivals["sgd-small"]
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
    bar = make_bars(only(tmp_path))["epochs"].arrivals["sgd-small"]
    assert not bar.has_interval
    assert bar_text(bar, "epochs") == "2"


def test_whiskers_that_run_on_to_never_say_so() -> None:
    bar = Arrival(5.0, 4.0, math.inf, (4.0, math.inf))
    assert bar_text(bar, "epochs") == "5 (4 to never)"


def test_losses_of_any_size_are_drawn(tmp_path: Path) -> None:
    for seed, losses in enumerate([(1e200, 1e-200, 1e290), (1e250, 1e-250, 1e299), (1e10, 1e-9, 0.0)]):
        write_run(tmp_path, "e", "m", seed, [{"val_loss": loss} for loss in losses])
    assert draw_chart(chart(only(tmp_path), "loss"), "e").png.startswith(b"\x89PNG")


def test_no_line_is_lost_on_either_page() -> None:
    """Contrast of at least 2 to 1 with the card that the figures lie on."""
    for color, dark in ON_DARK.items():
        assert contrast(color, "#ffffff") > 2, color
        assert contrast(dark, "#1e2125") > 4, color


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


# Looks


def test_no_two_methods_look_alike_and_variants_share_a_colour() -> None:
    methods = ["sgd", "sgd-large", "adabatch", "adabatch-rescaled", *(f"mine-{number}" for number in range(30))]
    looks = looks_for(methods)
    assert len(set(looks.values())) == len(methods)
    assert looks["adabatch"].color == looks["adabatch-rescaled"].color != looks["sgd"].color
    assert looks["sgd-large"].dashes == DASHED


def test_more_methods_than_looks_still_have_one() -> None:
    assert len(looks_for([f"m{number}" for number in range(50)])) == 50


# Shadows


def watched(*wishes: dict[str, int] | None, batch_size: int = 128) -> list[dict[str, Any]]:
    return [{"batch_size": batch_size, "val_accuracy": 0.5, "val_loss": 0.5, "shadows": each} for each in wishes]


def shadow_charts(folder: Path) -> list[Chart]:
    return make_shadow_charts(make_tracks(only(folder)))


def test_a_wish_stands_at_the_epoch_it_was_for(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "m", 0, watched({"noise": 256, "norm": 64}, {"noise": 512, "norm": 64}, {"noise": 9}))
    write_run(tmp_path, "e", "m", 1, watched({"noise": 512, "norm": 64}, {"noise": 1024}, None))
    (chart,) = shadow_charts(tmp_path)
    driver, noise, norm = chart.panel.lines
    assert (driver.label, noise.label, norm.label) == ("m, in force", "noise", "norm")
    assert driver.curve.mean.tolist() == [128, 128, 128]
    assert (noise.curve.epochs.tolist(), noise.curve.mean.tolist()) == ([2, 3], [384, 768])
    assert norm.curve.num_trials.tolist() == [2, 1]
    assert chart.positions(1, "steps") is not None
    assert [line.look.dashes for line in chart.panel.lines] == ["solid", DASHED, DASHED]
    assert len({line.look.color for line in chart.panel.lines}) == 3
    assert (driver.width or 0) > (noise.width or 0)
    assert chart.panel.log_base == 2


def test_one_figure_for_each_method_that_has_shadows(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "alone", 0, watched(None, None))
    write_run(tmp_path, "e", "brief", 0, watched({"noise": 4}), config={"epochs": 1})
    for method in ("one", "two"):
        write_run(tmp_path, "e", method, 0, watched({"noise": 4}, {"noise": 4}))
    drawn = shadow_charts(tmp_path)
    assert [(chart.name, chart.tracks[0].method) for chart in drawn] == [("shadows1", "one"), ("shadows2", "two")]
    assert [chart.panel.title.split(", ")[1] for chart in drawn] == ["one driving", "two driving"]


def test_a_gap_between_epochs_is_no_wish_for_the_later_one(tmp_path: Path) -> None:
    rows = watched({"noise": 4}, {"noise": 8}, {"noise": 16})
    path = write_run(tmp_path, "e", "m", 0, rows)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1], lines[2], lines[3].replace('"epoch": 3', '"epoch": 4')]) + "\n")
    (chart,) = shadow_charts(tmp_path)
    assert chart.panel.lines[1].curve.epochs.tolist() == [2]


def test_the_report_draws_them_and_the_page_has_their_colours(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "sgd-small", 0, watched({"noise": 256}, {"noise": 4096}, {"noise": 4096}))
    report = write_report(tmp_path)
    svg = (tmp_path / "figures" / "e-shadows1.svg").read_text()
    assert all(text in svg for text in ("sgd-small, in force", ">noise<", "sgd-small driving, log scale"))
    assert (tmp_path / "figures" / "e-shadows1.png").stat().st_size > 0
    with (tmp_path / "figures" / "e-shadows1.csv").open() as file:
        rows = [(row["line"], row["epochs"], row["mean"]) for row in csv.DictReader(file)]
    assert rows[3:] == [("noise", "2", "256"), ("noise", "3", "4096")]
    page = report.html.read_text()
    assert "<h4>Batch size wanted (samples), sgd-small driving</h4>" in page
    assert "figures/e-shadows1.svg" in page
    assert "figures/e-shadows1.svg" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("quick_figures")
def test_only_a_shadow_has_a_colour_of_its_own_on_the_page(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "sgd-small", 0, watched({"noise": 256}, {"noise": 4096}))
    charts = section_data(tmp_path)["charts"]
    coloured = [line["label"] for chart in charts for line in chart["lines"] if "color" in line]
    assert coloured == ["noise"]


def test_runs_without_shadows_have_no_such_figure(tmp_path: Path) -> None:
    write_paper_like(tmp_path, convex=True, epochs=2, trials=1)
    assert shadow_charts(tmp_path) == []


@pytest.mark.parametrize("shadows", [{"a": "many"}, {"a": None}, {"a": True}])
def test_shadows_that_are_no_sizes_are_named_and_left_out(tmp_path: Path, shadows: object) -> None:
    write_run(tmp_path, "e", "good", 0, watched(None))
    write_run(tmp_path, "e", "bad", 0, [{"shadows": shadows}])
    (problem,) = load_runs(tmp_path).problems
    assert "shadows must be names with batch sizes" in problem
