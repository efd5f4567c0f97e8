"""The figure of policies that only watched: the size in force, and what each of them would have put there."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import write_paper_like, write_run

from divebatch.report import load_runs, write_report
from divebatch.report.charts import Chart, make_tracks
from divebatch.report.payload import payload
from divebatch.report.sections import make_section
from divebatch.report.shadows import make_shadow_charts
from divebatch.report.style import DASHED


def watched(*wishes: dict[str, int] | None, batch_size: int = 128) -> list[dict[str, Any]]:
    return [{"batch_size": batch_size, "val_accuracy": 0.5, "val_loss": 0.5, "shadows": each} for each in wishes]


def charts(folder: Path) -> list[Chart]:
    (experiment,) = load_runs(folder).experiments
    return make_shadow_charts(make_tracks(experiment))


def test_a_wish_stands_at_the_epoch_it_was_for(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "m", 0, watched({"noise": 256, "norm": 64}, {"noise": 512, "norm": 64}, {"noise": 9}))
    write_run(tmp_path, "e", "m", 1, watched({"noise": 512, "norm": 64}, {"noise": 1024}, None))
    (chart,) = charts(tmp_path)
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
    drawn = charts(tmp_path)
    assert [(chart.name, chart.tracks[0].method) for chart in drawn] == [("shadows1", "one"), ("shadows2", "two")]
    assert [chart.panel.title.split(", ")[1] for chart in drawn] == ["one driving", "two driving"]


def test_a_gap_between_epochs_is_no_wish_for_the_later_one(tmp_path: Path) -> None:
    rows = watched({"noise": 4}, {"noise": 8}, {"noise": 16})
    path = write_run(tmp_path, "e", "m", 0, rows)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1], lines[2], lines[3].replace('"epoch": 3', '"epoch": 4')]) + "\n")
    (chart,) = charts(tmp_path)
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
    (experiment,) = load_runs(tmp_path).experiments
    data = json.loads(payload([make_section(experiment, "e")]))
    coloured = [line["label"] for chart in data["sections"][0]["charts"] for line in chart["lines"] if "color" in line]
    assert coloured == ["noise"]


def test_runs_without_shadows_have_no_such_figure(tmp_path: Path) -> None:
    write_paper_like(tmp_path, convex=True, epochs=2, trials=1)
    assert charts(tmp_path) == []


@pytest.mark.parametrize("shadows", [{"a": "many"}, {"a": None}, {"a": True}, {"a\x1b": 3}])
def test_shadows_that_are_no_sizes_are_named_and_left_out(tmp_path: Path, shadows: object) -> None:
    write_run(tmp_path, "e", "good", 0, watched(None))
    write_run(tmp_path, "e", "bad", 0, [{"shadows": shadows}])
    (problem,) = load_runs(tmp_path).problems
    assert "shadows must be names with batch sizes" in problem
