"""Charts, bars and the paper's figures: the numbers they show, that they do not depend on the day, odd runs."""

import csv
import math
import sys
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from made_up_runs import SYNTHETIC, write_accuracies, write_cifar_like, write_real, write_run, write_synthetic

from divebatch.report import Analysis, analyse, load_runs, write_report
from divebatch.report.analysis import Curve, MethodResult
from divebatch.report.drawing import (
    DASHED,
    Drawing,
    Line,
    Look,
    Panel,
    Track,
    band,
    looks_for,
)
from divebatch.report.figures import draw_paper_figures, make_bars, make_charts, make_tracks
from divebatch.report.page import make_sections, page_data


def only(folder: Path) -> Analysis:
    (experiment,) = load_runs(folder).experiments
    return analyse(experiment)


def tracks_of(analysis: Analysis) -> list[Track]:
    return make_tracks(analysis, looks_for(list(analysis.experiment.methods)))


def charts_of(folder: Path) -> dict[str, Panel]:
    analysis = only(folder)
    return {chart.name: chart for chart in make_charts(analysis, tracks_of(analysis))}


def section_data(folder: Path) -> dict[str, Any]:
    (section,) = page_data(make_sections(load_runs(folder).experiments))["sections"]
    return dict(section)


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
    line = accuracy["lines"][0]
    assert accuracy["title"] == "Validation accuracy (%)"
    assert (line["at"], line["mean"], line["error"]) == ([0, 1], [55, 80], [5, 10])


def test_an_axis_that_was_not_recorded_is_left_out_and_none_runs_backwards(tmp_path: Path) -> None:
    write_accuracies(tmp_path / "untimed", "e", "m", [[0.5, 0.7]])
    (track,) = tracks_of(only(tmp_path / "untimed"))
    assert set(track.axes) == {"epochs", "steps", "samples"}
    config = {"epochs": 9}
    write_run(tmp_path, "e", "m", 0, timed(0.5, 0.6, 0.7), config=config)
    write_run(tmp_path, "e", "m", 1, timed(0.5, 0.6, pace=100.0), config=config)  # slow, and ended early
    (track,) = tracks_of(only(tmp_path))
    assert track.axes["seconds"].tolist() == [50.5, 101.0, 101.0]


def test_the_estimate_stands_against_the_exact_value(tmp_path: Path) -> None:
    rows = [{"diversity": d, "exact_diversity": e} for d, e in ((None, 1.0), (4.0, 2.0), (6.0, 3.0), (3.0, 1.0))]
    write_run(tmp_path, "e", "divebatch", 0, rows)
    write_run(tmp_path, "e", "oracle", 0, [{"diversity": d, "exact_diversity": d} for d in (1.0, 2.0)])
    diversity = charts_of(tmp_path)["diversity"]
    assert [line.label for line in diversity.lines] == ["divebatch", "divebatch, exact", "oracle"]
    assert diversity.lines[0].curve.epochs.tolist() == [2, 3, 4]
    steps = diversity.lines[0].positions("steps")
    assert steps is not None
    assert steps.tolist() == [20, 30, 40]
    assert "divebatch: the estimate is 2.00 times the exact value in the median epoch" in diversity.caption
    assert "oracle:" not in diversity.caption


def test_memory_is_drawn_for_gpus_alone(tmp_path: Path) -> None:
    rows = [{"peak_memory_bytes": 3 * 2**20}]
    write_run(tmp_path, "e", "cpu", 0, rows)
    write_run(tmp_path, "e", "gpu", 0, rows, hardware={"device": "cuda"})
    memory = charts_of(tmp_path)["memory"]
    assert [line.label for line in memory.lines] == ["gpu"]
    assert memory.lines[0].curve.mean.tolist() == [3.0]


def test_bars_say_when_the_mean_got_there_and_dots_each_trial(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [timed(0.1, 0.5, 0.9), timed(0.1, 0.89, 0.91)]})
    write_real(tmp_path, {"divebatch": [timed(0.9, 0.9, 0.9, pace=2.0)] * 2, "sgd-large": [timed(0.1, 0.1, 0.2)] * 2})
    analysis = only(tmp_path)
    bars = make_bars(analysis, looks_for(list(analysis.experiment.methods)))
    assert list(bars) == ["seconds", "epochs", "steps", "samples"]
    assert bars["seconds"].title == "Training time (s) to the common target of 89.50 %"
    small, large, dive = bars["seconds"].arrivals.values()
    assert (small.value, small.trials) == (3.0, (3.0, 3.0))
    assert (large.value, large.trials) == (None, (math.inf, math.inf))
    assert (dive.value, dive.trials) == (2.0, (2.0, 2.0))
    assert [bar.value for bar in bars["steps"].arrivals.values()] == [30.0, None, 10.0]
    assert [bars["seconds"].text(method) for method in ("sgd-small", "sgd-large")] == ["3.00 s", "not reached"]
    assert (bars["seconds"].end, bars["steps"].text("divebatch")) == (3.0, "10")


# Looks


def test_no_two_methods_look_alike_and_variants_share_a_colour() -> None:
    methods = ["sgd", "sgd-large", "adabatch", "adabatch-rescaled", *(f"mine-{number}" for number in range(30))]
    looks = looks_for(methods)
    assert len(set(looks.values())) == len(methods)
    assert looks["adabatch"].color == looks["adabatch-rescaled"].color != looks["sgd"].color
    assert looks["sgd-large"].dashes == DASHED
    assert len(looks_for([f"m{number}" for number in range(50)])) == 50


def test_a_method_has_one_colour_in_all_experiments_and_whatever_is_beside_it() -> None:
    common = ["auto", "divebatch", "adabatch", "oracle", "sgd-small", "sgd-large", "sgd-tuned"]
    together = looks_for(["sgd-small", "mine"], common, ["oracle", "mine"])
    assert all(together[method] == looks_for([method])[method] for method in common)
    assert len({together[method].color for method in common}) == len(common)


# Shadows


def watched(*wishes: dict[str, int] | None, batch_size: int = 128) -> list[dict[str, Any]]:
    return [{"batch_size": batch_size, "val_accuracy": 0.5, "val_loss": 0.5, "shadows": each} for each in wishes]


def shadow_charts(folder: Path) -> list[Panel]:
    return [chart for name, chart in charts_of(folder).items() if name.startswith("shadows")]


def test_a_wish_stands_at_the_epoch_it_was_for(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "m", 0, watched({"noise": 256, "norm": 64}, {"noise": 512, "norm": 64}, {"noise": 9}))
    write_run(tmp_path, "e", "m", 1, watched({"noise": 512, "norm": 64}, {"noise": 1024}, None))
    (chart,) = shadow_charts(tmp_path)
    driver, noise, norm = chart.lines
    assert (driver.label, noise.label, norm.label) == ("m, in force", "noise", "norm")
    assert driver.curve.mean.tolist() == [128, 128, 128]
    assert (noise.curve.epochs.tolist(), noise.curve.mean.tolist()) == ([2, 3], [384, 768])
    assert norm.curve.num_trials.tolist() == [2, 1]
    assert noise.positions("steps") is not None
    assert [line.look.dashes for line in chart.lines] == ["solid", DASHED, DASHED]
    assert len({line.look.color for line in chart.lines}) == 3
    assert (driver.width or 0) > (noise.width or 0)
    assert chart.log_base == 2


def test_the_report_draws_them_and_the_page_has_their_colours(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "sgd-small", 0, watched({"noise": 256}, {"noise": 4096}, {"noise": 4096}))
    report = write_report(tmp_path)
    svg = (tmp_path / "figures" / "e-shadows1.svg").read_text()
    assert all(text in svg for text in ("sgd-small, in force", ">noise<", "sgd-small driving, log scale"))
    with (tmp_path / "figures" / "e-shadows1.csv").open() as file:
        rows = [(row["line"], row["epochs"], row["mean"]) for row in csv.DictReader(file)]
    assert rows[3:] == [("noise", "2", "256"), ("noise", "3", "4096")]
    assert "<h4>Batch size wanted (samples), sgd-small driving</h4>" in report.html.read_text()
    assert all("figures/e-shadows1.svg" in (tmp_path / name).read_text() for name in ("report.html", "report.md"))
    charts = section_data(tmp_path)["charts"]
    coloured = [line["label"] for chart in charts for line in chart["lines"] if "color" in line]
    assert coloured == ["noise"]  # the others have their method's


def test_a_chart_as_csv_holds_every_point(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.5, 0.7], [0.6, 0.9]])
    write_report(tmp_path)
    with (tmp_path / "figures" / "e-accuracy.csv").open() as file:
        _, last = csv.DictReader(file)
    assert last == {
        **{"line": "sgd-small", "epochs": "2", "steps": "20", "samples": "2000", "seconds": ""},
        **{"mean": "80", "standard_error": "10", "trials": "2"},
    }
    with (tmp_path / "figures" / "e-target.csv").open() as file:
        target = list(csv.DictReader(file))
    assert [row["unit"] for row in target] == ["epochs", "steps", "samples"]
    assert target[0]["on_mean_metric"] == "2"
    assert (target[0]["reached"], target[0]["trials"], target[0]["slowest_trial"]) == ("1", "2", "")


# The paper's figures


def draw(analysis: Analysis) -> list[Drawing]:
    return draw_paper_figures(analysis, tracks_of(analysis))


def texts(drawing: Drawing) -> list[str]:
    root = ElementTree.fromstring(drawing.svg)
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def straight(values: list[float], std: float = 0.0) -> Curve:
    mean = np.array(values)
    return Curve(np.arange(1, len(values) + 1), mean, np.full(len(values), std), np.full(len(values), 3))


def panel_of(*curves: Curve) -> Panel:
    look = Look("#222222", "solid")
    track = Track(cast(MethodResult, None), look, {})
    return Panel("Loss", [Line("", look, curve, track) for curve in curves])


def test_figures_name_methods_with_sizes_and_do_not_depend_on_the_users_settings(tmp_path: Path) -> None:
    write_synthetic(tmp_path)
    had_pyplot = "matplotlib.pyplot" in sys.modules
    first, second = draw(only(tmp_path))
    assert {"SGD (128)", "SGD (4096)", "DiveBatch (128 -> 4096)", "Validation accuracy (%)"} <= set(texts(first))
    assert "Oracle (128 -> 4096)" not in texts(first)
    assert {"DiveBatch (128 -> 4096)", "Oracle (128 -> 4096)", "DiveBatch (128 -> 4096), exact"} <= set(texts(second))
    assert "Batch size (samples), log scale" in texts(second)
    assert "means over 2 trials" in first.caption
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "svg.fonttype": "path"}):
        again = draw(only(tmp_path))
        assert matplotlib.rcParams["font.size"] == 30
    assert [(each.svg, each.png) for each in again] == [(each.svg, each.png) for each in (first, second)]
    assert b"<dc:date>" not in first.svg
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_figures_show_what_there_is(tmp_path: Path) -> None:
    write_accuracies(tmp_path / "unknown", "e", "mine", [[0.5, 0.6]])
    assert draw(only(tmp_path / "unknown")) == []
    rows = [{"val_loss": 1.0, "diversity": 0.5 if epoch == 1 else None} for epoch in range(4)]
    write_run(tmp_path, "e", "divebatch", 0, rows, report=SYNTHETIC)
    first, second = draw(only(tmp_path))
    assert "Validation accuracy (%)" not in texts(first)
    assert "Gradient diversity" in texts(second)
    assert "1 trial." in first.caption


def test_diverged_and_unfinished_runs_are_drawn_and_named(tmp_path: Path) -> None:
    trials = {
        "sgd-small": [[{"val_loss": 1e30}, {"val_loss": None}], [{"val_loss": 0.5}]],
        "sgd-large": [[{"val_loss": 0.5}, {"val_loss": None, "val_accuracy": 0.1}]] * 2,
        "divebatch": [[]],
    }
    for method, runs in trials.items():
        for seed, rows in enumerate(runs):
            write_run(tmp_path, "e", method, seed, rows, config={"epochs": 2}, report=SYNTHETIC)
    (drawing,) = draw(only(tmp_path))
    for words in (
        "trials (sgd-small: 1, sgd-large: 2)",
        "sgd-small: 1 of 2 trials finished.",
        "sgd-small: 1 of 2 trials diverged",
        "sgd-large: 2 of 2 trials diverged",
    ):
        assert words in drawing.caption


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "$\\frac{", "模型 €", "long " * 50, ""])
def test_any_experiment_name_can_be_drawn(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, name, "sgd-small", 0, [{"val_loss": 1.0}], place="e/m", report=SYNTHETIC)
    (drawing,) = draw(only(tmp_path))
    assert b"<script" not in drawing.svg
    ElementTree.fromstring(drawing.svg)


@pytest.mark.parametrize(
    ("curves", "is_log"),
    [
        ([[0.1, 1.1]], True),
        ([[0.1], [1.1]], True),
        ([[0.2, 1.0]], False),
        ([[0.0, 5.0]], False),
        ([[-1.0, 5.0]], False),
    ],
)
def test_a_log_axis_is_for_positive_means_over_more_than_a_decade(curves: list[list[float]], is_log: bool) -> None:
    assert panel_of(*map(straight, curves)).is_log == is_log


def test_bands_are_cut_at_the_bounds_and_absent_without_a_spread() -> None:
    low, high = band(straight([1.0, 50.0, 99.0], std=3.0 * 3**0.5), (0.0, 100.0))
    assert low.tolist() == pytest.approx([0.0, 47.0, 96.0])
    assert high.tolist() == pytest.approx([4.0, 53.0, 100.0])
    assert np.isnan(band(straight([1.0], std=float("nan")), (0.0, 1.0))).all()


def test_early_epochs_do_not_stretch_an_axis() -> None:
    low, high = panel_of(straight([50.0, 60.0, *[90.0, 94.0] * 10])).focus or (0.0, 0.0)
    assert 89 < low < 90
    assert 94 < high < 95
    assert panel_of(straight([90.0, 94.0] * 10)).focus is None
    assert panel_of(straight([50.0, 90.0, 94.0])).focus is None  # too few to call some early


# Real data


def test_figures_3_and_4_show_all_methods_over_epochs_over_time_and_at_the_end(tmp_path: Path) -> None:
    write_cifar_like(tmp_path, epochs=8, trials=2)
    drawings = draw(only(tmp_path))
    assert [drawing.name for drawing in drawings] == ["figure3", "figure4", "course"]
    labels = {"SGD (128)", "SGD, tuned (512)", "AdaBatch (128 -> 1024)", "DiveBatch, rescaled (128 -> 2048)"}
    for drawing in drawings:
        assert labels <= set(texts(drawing))
        assert "means over 2 trials" in drawing.caption
        assert "standard error of the mean" in drawing.caption
    accuracy, loss, course = drawings
    assert {"Validation accuracy (%)", "Validation accuracy (%), last quarter"} <= set(texts(accuracy))
    assert {"Epoch", "Training time (s)"} <= set(texts(loss))
    assert {"Batch size (samples), log scale", "Learning rate, log scale"} <= set(texts(course))


def test_without_times_there_is_no_panel_over_time_and_without_epochs_no_figure(tmp_path: Path) -> None:
    write_real(tmp_path / "untimed", {"sgd-small": [[{"val_accuracy": 0.5}] * 3]})
    names = {drawing.name: texts(drawing) for drawing in draw(only(tmp_path / "untimed"))}
    assert list(names) == ["figure3", "course"]
    assert "Training time (s)" not in names["figure3"]
    write_real(tmp_path / "begun", {"sgd-small": [[]]}, epochs=3)
    assert draw(only(tmp_path / "begun")) == []
