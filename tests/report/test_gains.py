"""Does it pay? What adaptive methods gained over fixed batches, by hand, in the table and in words."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import GPU, LOSS, write_run

from divebatch.records import Metric, ReportSettings
from divebatch.report import Analysis, Table, analyse, load_runs, write_report
from divebatch.report.gain_words import gains_in_words, gains_table
from divebatch.report.gains import BEST, CUSTOMARY, HERE, STEPS, Gain, adaptive_methods, best_fixed, find_gains

A = [0.90, 0.91, 0.92, 0.93, 0.94]
B = [0.88, 0.90, 0.89, 0.92, 0.91]
SETTINGS = ReportSettings(customary="small")


def write(
    folder: Path,
    method: str,
    finals: Sequence[float | None],
    *,
    policy: str | None = "fixed",
    sizes: Sequence[int] = (100, 100),
    speed: float = 1.0,
    settings: ReportSettings = SETTINGS,
    metric: Metric | None = None,
    **more: Any,
) -> None:
    """A run a seed over two epochs of 1000 samples; a step takes 1 ms and 10 us a sample, over `speed`."""
    for seed, final in enumerate(finals):
        steps = [math.ceil(1000 / size) for size in sizes]
        epochs = [
            {
                **{"batch_size": size, "steps": sum(steps[: epoch + 1]), "samples": 1000 * (epoch + 1)},
                **{"train_seconds": (1e-3 * sum(steps[: epoch + 1]) + 1e-2 * (epoch + 1)) / speed},
                **{"val_accuracy": value, "val_loss": value, "lr": 0.1 + seed},
            }
            for epoch, (size, value) in enumerate(zip(sizes, (0.5, final), strict=True))
        ]
        named = {"policy": {"kind": policy}} if policy is not None else {}
        config = {"epochs": 2, "method": {"batch_size": sizes[0], **named}}
        more = {"hardware": GPU, "num_parameters": 1000, **more}
        write_run(folder, "e", method, seed, epochs, config=config, report=settings, metric=metric, **more)


def analysis_of(folder: Path) -> Analysis:
    (experiment,) = load_runs(folder).experiments
    return analyse(experiment)


def gains_of(folder: Path) -> dict[tuple[str, str], Gain]:
    analysis = analysis_of(folder)
    gains = find_gains(analysis)
    return {(gain.method, gain.baseline.result.method): gain for gain in gains}


def table_of(folder: Path) -> Table:
    analysis = analysis_of(folder)
    table = gains_table(analysis, find_gains(analysis))
    assert table is not None
    return table


def words_of(folder: Path) -> str:
    analysis = analysis_of(folder)
    return gains_in_words(analysis, find_gains(analysis))


def test_gains_by_hand(tmp_path: Path) -> None:
    write(tmp_path, "small", B, speed=0.5)
    write(tmp_path, "tuned", [0.9] * 5, sizes=(200, 200))
    write(tmp_path, "auto", A, policy="auto", sizes=(100, 500))
    gain = gains_of(tmp_path)["auto", "small"]
    assert (gain.num_seeds, gain.baseline.roles) == (5, (CUSTOMARY,))
    # Differences of 2, 1, 3, 1, 3 points: mean 2, standard deviation 1, t = 2.7764.
    assert gain.metric is not None
    assert (gain.metric.value, gain.metric.is_shown) == (pytest.approx(2.0), True)
    assert (gain.metric.low, gain.metric.high) == pytest.approx(
        (2 - 2.7764 / math.sqrt(5), 2 + 2.7764 / math.sqrt(5)), 1e-4
    )
    # 10 and 2 steps against 10 and 10; 12 ms and 20 ms against twice 20 ms and 20 ms.
    assert gain.ratios[STEPS].value == pytest.approx(12 / 20)
    assert gain.ratios[HERE].value == pytest.approx(32 / 80)
    best = gains_of(tmp_path)["auto", "tuned"]
    assert best.baseline.roles == (BEST,)
    assert best.ratios[STEPS].value == pytest.approx(12 / 10)


def test_the_best_fixed_batch_is_the_quickest_of_those_within_noise(tmp_path: Path) -> None:
    write(tmp_path, "small", [0.90, 0.92, 0.94])
    write(tmp_path, "quick", [0.93, 0.89, 0.93], sizes=(200, 200))  # 0.33 points less, +- 2.0
    write(tmp_path, "quicker", [0.80, 0.82, 0.84], sizes=(500, 500))
    write(tmp_path, "single", [0.91], sizes=(500, 500))
    analysis = analysis_of(tmp_path)
    best = best_fixed(analysis)
    assert best is not None
    assert best.method == "quick"
    write(tmp_path, "quick", [0.89, 0.91, 0.94], sizes=(200, 200))  # 0.67 points less, +- 0.33
    best = best_fixed(analysis_of(tmp_path))
    assert best is not None
    assert best.method == "small"


def test_of_equals_on_different_machines_the_one_with_fewer_steps_is_best(tmp_path: Path) -> None:
    write(tmp_path, "small", B)
    write(tmp_path, "large", B, sizes=(500, 500), speed=0.001, hardware={**GPU, "name": "A slow one"})
    best = best_fixed(analysis_of(tmp_path))
    assert best is not None
    assert best.method == "large"


def test_a_fixed_batch_that_diverged_once_is_not_the_best(tmp_path: Path) -> None:
    write(tmp_path, "small", [0.5, 0.5])
    write(tmp_path, "large", [0.95, None])
    write(tmp_path, "auto", [0.6, 0.6], policy="auto")
    best = best_fixed(analysis_of(tmp_path))
    assert best is not None
    assert best.method == "small"


def test_methods_that_have_nothing_to_choose_come_first(tmp_path: Path) -> None:
    for method, policy in (("a", "divebatch"), ("b", "fixed"), ("c", "auto"), ("d", "adabatch")):
        write(tmp_path, method, B, policy=policy)
    assert [result.method for result in adaptive_methods(analysis_of(tmp_path))] == ["c", "a", "d"]


def test_where_no_policy_is_named_the_sizes_tell(tmp_path: Path) -> None:
    write(tmp_path, "kept", B, policy=None)
    write(tmp_path, "grown", A, policy=None, sizes=(100, 500))
    assert set(gains_of(tmp_path)) == {("grown", "kept")}


def test_one_method_may_be_the_best_and_the_customary(tmp_path: Path) -> None:
    write(tmp_path, "small", A)
    write(tmp_path, "other", B)
    write(tmp_path, "auto", B, policy="auto")
    assert [gain.baseline.roles for gain in gains_of(tmp_path).values()] == [(BEST, CUSTOMARY)]
    assert "small (100), the best fixed batch and the customary batch" in words_of(tmp_path)


def test_a_customary_batch_that_was_not_run_is_said(tmp_path: Path) -> None:
    write(tmp_path, "tuned", A)
    write(tmp_path, "auto", B, policy="auto")
    assert "The customary batch, small, has no finished run." in table_of(tmp_path).notes
    write(tmp_path, "small", A)
    assert not any("has no finished run" in note for note in table_of(tmp_path).notes)


def test_without_a_fixed_or_an_adaptive_method_there_is_nothing_to_say(tmp_path: Path) -> None:
    write(tmp_path, "small", A)
    assert (gains_of(tmp_path), words_of(tmp_path)) == ({}, "")
    analysis = analysis_of(tmp_path)
    assert gains_table(analysis, []) is None
    write(tmp_path / "other", "auto", A, policy="auto")
    assert gains_of(tmp_path / "other") == {}


# In words


def test_the_table_and_the_sentence_tell_gains(tmp_path: Path) -> None:
    write(tmp_path, "small", B, speed=0.5)
    write(tmp_path, "auto", A, policy="auto", sizes=(100, 500))
    table = table_of(tmp_path)
    assert table.title == "e: does it pay?"
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["against"] == "small (100), best fixed and customary"
    assert (cells["seeds"], cells["accuracy (points)"]) == ("5", "2.00 better (0.76 to 3.24)")
    assert (cells["steps"], cells["seconds here"]) == ("0.60", "0.40")
    assert words_of(tmp_path) == (
        "Does it pay? auto against small (100), the best fixed batch and the customary batch, over 5 seeds: "
        "2.00 points better in accuracy (0.76 to 3.24), 0.60 times the steps, 0.40 times the seconds here."
    )
    write(tmp_path, "other", A, policy="divebatch")
    assert words_of(tmp_path).endswith(" The table has 1 more method that changes its batch size.")


def test_no_difference_is_not_called_one(tmp_path: Path) -> None:
    write(tmp_path, "small", A)
    write(tmp_path, "auto", [0.94, 0.90, 0.93, 0.91, 0.92], policy="auto")
    table = table_of(tmp_path)
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["accuracy (points)"].startswith("none shown: +0.00 (-")
    assert (cells["steps"], cells["seconds here"]) == ("1.00", "none shown: 1.00 (1.00 to 1.00)")
    text = words_of(tmp_path)
    assert "no difference in accuracy shown (+0.00 points, -3.1" in text
    assert "no difference in steps shown (1.00 times, 1.00 to 1.00)" in text


def test_a_lower_loss_is_a_gain(tmp_path: Path) -> None:
    write(tmp_path, "small", [2.0, 2.1, 2.2], metric=LOSS)
    write(tmp_path, "auto", [1.5, 1.61, 1.69], policy="auto", metric=LOSS)
    table = table_of(tmp_path)
    assert table.rows[0][3] == "0.5000 better (0.4752 to 0.5248)"
    assert "0.5000 better in loss (0.4752 to 0.5248)" in words_of(tmp_path)


def test_a_single_seed_may_be_chance(tmp_path: Path) -> None:
    write(tmp_path, "small", [0.9])
    write(tmp_path, "auto", [0.8], policy="auto", sizes=(100, 500))
    assert table_of(tmp_path).rows[0][2:6] == ["1", "10.00 worse", "0.60", "0.80"]
    assert "over a single seed, so it may be chance: 10.00 points worse in accuracy, 0.60 times" in words_of(tmp_path)


def test_seconds_of_different_machines_are_not_compared(tmp_path: Path) -> None:
    write(tmp_path, "small", B)
    write(tmp_path, "tuned", B, sizes=(200, 200))
    write(tmp_path, "auto", A, policy="auto", hardware={**GPU, "name": "Another GPU"})
    table = table_of(tmp_path)
    assert [row[5] for row in table.rows] == ["-"] * len(table.rows)
    assert "Seconds here are left out where two methods ran on different hardware." in table.notes


def test_runs_that_end_by_the_clock_are_said_to(tmp_path: Path) -> None:
    write(tmp_path, "small", B)
    write(tmp_path, "auto", A, policy="auto")
    assert not any("end after some seconds" in note for note in table_of(tmp_path).notes)
    write_run(tmp_path, "e", "timed", 0, [{"val_accuracy": 0.5}], config={"epochs": 1, "seconds": 3.0}, hardware=GPU)
    assert any("end after some seconds" in note for note in table_of(tmp_path).notes)


def test_a_run_that_diverged_has_no_difference_in_loss(tmp_path: Path) -> None:
    write(tmp_path, "small", [2.0, 2.0], metric=LOSS)
    write(tmp_path, "auto", [1.0, None], policy="auto", metric=LOSS)
    assert table_of(tmp_path).rows[0][3] == "-"
    assert "over 2 seeds: no difference in steps" in words_of(tmp_path)


# In a report


@pytest.mark.usefixtures("quick_figures")
def test_the_report_has_both_tables_and_the_sentence(tmp_path: Path) -> None:
    write(tmp_path, "small", B)
    write(tmp_path, "tuned", A, sizes=(200, 200))
    write(tmp_path, "auto", A, policy="auto", sizes=(100, 500))
    report = write_report(tmp_path)
    (sentence,) = report.gains
    assert [table.title.partition(": ")[2] for table in report.tables] == [
        "validation accuracy (%) and time to target",
        "does it pay?",
        "cost",
    ]
    page = report.html.read_text(encoding="utf-8")
    assert page.index(sentence) < page.index("does it pay?</h3>") < page.index("<figure")
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert sentence in markdown
    assert "### e: does it pay?" in markdown
    assert "tuned (200), best fixed" in (tmp_path / "tables" / "e-table2.csv").read_text()


def test_the_customary_method_is_a_setting_of_the_records() -> None:
    assert replace(ReportSettings(), customary="x").customary == "x"
    assert ReportSettings().customary is None
