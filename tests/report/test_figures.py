"""What the figures show, that they do not depend on the day, and that odd runs do not break them."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from made_up_runs import REAL, SYNTHETIC, write_accuracies, write_cifar_like, write_paper_like, write_real, write_run

from divebatch.errors import MissingExtraError
from divebatch.report import Analysis, analyse, load_runs
from divebatch.report.charts import Line, Panel, make_tracks
from divebatch.report.curves import Curve
from divebatch.report.drawing import Drawing, band, log_limits, require_matplotlib
from divebatch.report.paper_figures import draw_paper_figures
from divebatch.report.style import Look


def only(folder: Path) -> Analysis:
    (experiment,) = load_runs(folder).experiments
    return analyse(experiment)


def draw(analysis: Analysis) -> list[Drawing]:
    return draw_paper_figures(analysis, make_tracks(analysis))


def texts(drawing: Drawing) -> list[str]:
    root = ElementTree.fromstring(drawing.svg)
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def straight(values: list[float], std: float = 0.0) -> Curve:
    mean = np.array(values)
    return Curve(np.arange(1, len(values) + 1), mean, np.full(len(values), std), np.full(len(values), 3))


def panel_of(*curves: Curve) -> Panel:
    return Panel("Loss", [Line("", Look("#222222", "solid"), curve) for curve in curves])


@pytest.fixture(scope="module")
def nonconvex(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    folder = tmp_path_factory.mktemp("runs")
    write_paper_like(folder, convex=False, epochs=12, trials=2)
    return only(folder)


def test_figures_name_methods_with_their_batch_sizes(tmp_path: Path) -> None:
    write_paper_like(tmp_path, convex=True, epochs=3, trials=2)
    first, second = draw(only(tmp_path))
    assert {"SGD (128)", "SGD (4096)", "DiveBatch (128 - 4096)"} <= set(texts(first))
    assert "Oracle (128 - 4096)" not in texts(first)
    assert {"DiveBatch (128 - 4096)", "Oracle (128 - 4096)", "DiveBatch (128 - 4096), exact"} <= set(texts(second))
    assert "Validation accuracy (%)" in texts(first)
    assert {"Batch size (samples), log scale"} <= set(texts(second))
    assert "means over 2 trials" in first.caption


def test_equal_records_give_equal_bytes_whatever_the_users_settings(nonconvex: Analysis) -> None:
    once = draw(nonconvex)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "svg.fonttype": "path"}):
        again = draw(nonconvex)
        assert matplotlib.rcParams["font.size"] == 30
    assert [(d.svg, d.png) for d in once] == [(d.svg, d.png) for d in again]
    assert b"<dc:date>" not in once[0].svg
    assert once[0].png.startswith(b"\x89PNG")


def test_drawing_leaves_pyplot_alone(nonconvex: Analysis) -> None:
    before = "matplotlib.pyplot" in sys.modules
    draw(nonconvex)
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_unknown_methods_alone_give_no_figure(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "mine", [[0.5, 0.6]])
    assert draw(only(tmp_path)) == []


def test_without_oracle_figure_two_shows_what_there_is(tmp_path: Path) -> None:
    rows = [{"val_loss": 1.0, "diversity": 0.5 if epoch == 1 else None} for epoch in range(4)]
    write_run(tmp_path, "e", "divebatch", 0, rows, report=SYNTHETIC)
    first, second = draw(only(tmp_path))
    assert "Validation accuracy (%)" not in texts(first)
    assert "Gradient diversity" in texts(second)
    assert "1 trial." in first.caption


def test_diverged_and_unfinished_runs_are_drawn_and_named(tmp_path: Path) -> None:
    trials = {
        "sgd-small": [[{"val_loss": 1e30}, {"val_loss": None}], [{"val_loss": 0.5}]],
        "sgd-large": [[{"val_loss": None, "val_accuracy": 0.1}]],
        "divebatch": [[]],
    }
    for method, runs in trials.items():
        for seed, rows in enumerate(runs):
            write_run(tmp_path, "e", method, seed, rows, config={"epochs": 2}, report=SYNTHETIC)
    (drawing,) = draw(only(tmp_path))
    assert "sgd-small: 1 of 2 trials finished." in drawing.caption
    assert "sgd-small: 1 of 2 trials diverged" in drawing.caption
    assert "sgd-large: 1 of 1 trials diverged" in drawing.caption


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "$\\frac{", "模型 €", "long " * 50, ""])
def test_any_experiment_name_can_be_drawn(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, name, "sgd-small", 0, [{"val_loss": 1.0}], place="e/m", report=SYNTHETIC)
    (drawing,) = draw(only(tmp_path))
    assert b"<script" not in drawing.svg
    ElementTree.fromstring(drawing.svg)


def test_a_log_axis_is_for_positive_means_over_more_than_a_decade() -> None:
    assert panel_of(straight([0.1, 1.1])).is_log
    assert panel_of(straight([0.1]), straight([1.1])).is_log
    assert not panel_of(straight([0.2, 1.0])).is_log
    assert not panel_of(straight([0.0, 5.0])).is_log
    assert not panel_of(straight([-1.0, 5.0])).is_log


def test_log_limits_hold_every_mean_but_do_not_follow_a_band_to_zero() -> None:
    low, high = log_limits(panel_of(straight([0.1, 10.0], std=0.0999999)))
    assert 0.03 < low < 0.1
    assert 10.0999 < high < 20.0


def test_bands_are_cut_at_the_bounds_and_absent_without_a_spread() -> None:
    low, high = band(straight([1.0, 50.0, 99.0], std=3.0), (0.0, 100.0), "std")
    assert low.tolist() == [0.0, 47.0, 96.0]
    assert high.tolist() == [4.0, 53.0, 100.0]
    assert np.isnan(band(straight([1.0], std=float("nan")), (0.0, 1.0), "std")).all()


# Real data


def test_figures_3_and_4_show_all_methods_over_epochs_over_time_and_at_the_end(tmp_path: Path) -> None:
    write_cifar_like(tmp_path, epochs=8, trials=2)
    drawings = draw(only(tmp_path))
    assert [drawing.name for drawing in drawings] == ["figure3", "figure4", "course"]
    labels = {"SGD (128)", "SGD, tuned (512)", "AdaBatch (128 - 256)", "DiveBatch, rescaled (128 - 2048)"}
    for drawing in drawings:
        assert labels <= set(texts(drawing))
        assert "means over 2 trials" in drawing.caption
        assert "standard error of the mean" in drawing.caption
    accuracy, loss, course = drawings
    assert {"Validation accuracy (%)", "Validation accuracy (%), last quarter"} <= set(texts(accuracy))
    assert {"Epoch", "Training time (s)"} <= set(texts(loss))
    assert {"Batch size (samples), log scale", "Learning rate"} <= set(texts(course))


def test_without_times_there_is_no_panel_over_time_and_without_epochs_no_figure(tmp_path: Path) -> None:
    write_real(tmp_path / "untimed", {"sgd-small": [[{"val_accuracy": 0.5}] * 3]})
    names = {drawing.name: texts(drawing) for drawing in draw(only(tmp_path / "untimed"))}
    assert list(names) == ["figure3", "course"]
    assert "Training time (s)" not in names["figure3"]
    write_real(tmp_path / "begun", {"sgd-small": [[]]}, epochs=3)
    assert draw(only(tmp_path / "begun")) == []


def test_unfinished_trials_are_left_out_where_others_have_finished(tmp_path: Path) -> None:
    rows = [{"val_accuracy": 0.5, "train_seconds": 1.0 * epoch} for epoch in (1, 2, 3, 4)]
    write_real(tmp_path, {"sgd-small": [rows, rows, rows[:2]], "divebatch": [rows[:1]]}, epochs=4)
    caption = draw(only(tmp_path))[0].caption
    assert "trials (sgd-small: 2, divebatch: 1)" in caption
    assert "divebatch: 0 of 1 trials finished." in caption


def test_a_users_own_methods_are_drawn_too(tmp_path: Path) -> None:
    for number in range(8):
        write_run(tmp_path, "e", f"mine-{number}", 0, [{"val_accuracy": 0.5}], report=REAL)
    drawing = draw(only(tmp_path))[0]
    assert {f"mine-{number} (128)" for number in range(8)} <= set(texts(drawing))


def test_bands_show_the_spread_that_was_asked_for() -> None:
    low, high = band(straight([5.0], std=3.0), (0.0, 100.0), "standard_error")
    assert (low[0], high[0]) == pytest.approx((5 - 3**0.5, 5 + 3**0.5))


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib .*divebatch\[report\]"):
        require_matplotlib()
