"""What the figures show, that they do not depend on the day, and that odd runs do not break them."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from made_up_runs import write_accuracies, write_paper_like, write_run

from divebatch.errors import MissingExtraError
from divebatch.report import Experiment, load_runs
from divebatch.report.curves import Curve
from divebatch.report.figures import Drawing, draw_figures
from divebatch.report.plot import Line, Panel, band, log_limits
from divebatch.report.style import LOOKS


def only_experiment(folder: Path) -> Experiment:
    (experiment,) = load_runs(folder).experiments
    return experiment


def texts(drawing: Drawing) -> list[str]:
    root = ElementTree.fromstring(drawing.svg)
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def straight(values: list[float], std: float = 0.0) -> Curve:
    mean = np.array(values)
    return Curve(np.arange(1, len(values) + 1), mean, np.full(len(values), std), np.full(len(values), 3))


def panel_of(*curves: Curve) -> Panel:
    return Panel("Loss", [Line("", LOOKS["oracle"], curve) for curve in curves])


@pytest.fixture(scope="module")
def nonconvex(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    folder = tmp_path_factory.mktemp("runs")
    write_paper_like(folder, convex=False, epochs=12, trials=2)
    return only_experiment(folder)


def test_figures_name_methods_with_their_batch_sizes(tmp_path: Path) -> None:
    write_paper_like(tmp_path, convex=True, epochs=3, trials=2)
    first, second = draw_figures(only_experiment(tmp_path))
    assert {"SGD (128)", "SGD (4096)", "DiveBatch (128 - 4096)"} <= set(texts(first))
    assert "Oracle (128 - 4096)" not in texts(first)
    assert {"DiveBatch (128 - 4096)", "Oracle (128 - 4096)", "exact diversity on DiveBatch's path"} <= set(
        texts(second)
    )
    assert "Validation accuracy (%)" in texts(first)
    assert {"Batch size (samples), log scale"} <= set(texts(second))
    assert "means over 2 trials" in first.caption


def test_equal_records_give_equal_bytes_whatever_the_users_settings(nonconvex: Experiment) -> None:
    once = draw_figures(nonconvex)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "svg.fonttype": "path"}):
        again = draw_figures(nonconvex)
        assert matplotlib.rcParams["font.size"] == 30
    assert [(d.svg, d.png) for d in once] == [(d.svg, d.png) for d in again]
    assert b"<dc:date>" not in once[0].svg
    assert once[0].png.startswith(b"\x89PNG")


def test_drawing_leaves_pyplot_alone(nonconvex: Experiment) -> None:
    before = "matplotlib.pyplot" in sys.modules
    draw_figures(nonconvex)
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_unknown_methods_alone_give_no_figure(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "mine", [[0.5, 0.6]])
    assert draw_figures(only_experiment(tmp_path)) == []


def test_without_oracle_figure_two_shows_what_there_is(tmp_path: Path) -> None:
    rows = [{"val_loss": 1.0, "diversity": 0.5 if epoch == 1 else None} for epoch in range(4)]
    write_run(tmp_path, "e", "divebatch", 0, rows)
    first, second = draw_figures(only_experiment(tmp_path))
    assert "Validation accuracy (%)" not in texts(first)
    assert "Gradient diversity" in texts(second)
    assert "1 trial." in first.caption


def test_diverged_and_unfinished_runs_are_drawn_and_named(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "sgd-small", 0, [{"val_loss": 1e30}, {"val_loss": None}], config={"epochs": 2})
    write_run(tmp_path, "e", "sgd-small", 1, [{"val_loss": 0.5}], config={"epochs": 2})
    write_run(tmp_path, "e", "sgd-large", 0, [{"val_loss": None, "val_accuracy": 0.1}], config={"epochs": 2})
    write_run(tmp_path, "e", "divebatch", 0, [], config={"epochs": 2})
    (drawing,) = draw_figures(only_experiment(tmp_path))
    assert "sgd-small: 1 of 2 trials finished." in drawing.caption
    assert "sgd-small: 1 of 2 trials diverged" in drawing.caption
    assert "sgd-large: 1 of 1 trials diverged" in drawing.caption


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "$\\frac{", "模型 €", "long " * 50, ""])
def test_any_experiment_name_can_be_drawn(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, name, "sgd-small", 0, [{"val_loss": 1.0}], place="e/m")
    (drawing,) = draw_figures(only_experiment(tmp_path))
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
    low, high = band(straight([1.0, 50.0, 99.0], std=3.0), (0.0, 100.0))
    assert low.tolist() == [0.0, 47.0, 96.0]
    assert high.tolist() == [4.0, 53.0, 100.0]
    assert np.isnan(band(straight([1.0], std=float("nan")), (0.0, 1.0))).all()


def test_colours_and_dashes_are_all_different() -> None:
    assert len({look.color for look in LOOKS.values()}) == len(LOOKS)
    assert len({look.dashes for look in LOOKS.values()}) == len(LOOKS)


def test_without_matplotlib_the_error_names_the_extra(nonconvex: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib .*divebatch\[report\]"):
        draw_figures(nonconvex)
