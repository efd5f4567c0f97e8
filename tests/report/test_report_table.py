"""The table's numbers against slow computations, and the notes that say what they leave out."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import write_accuracies, write_run

from divebatch.report import Table, load_runs, result_table
from divebatch.report.curves import Average
from divebatch.report.markdown import table_to_markdown
from divebatch.report.summary import MethodSummary, summarise
from divebatch.report.table import with_error

SMALL = [[0.50, 0.80, 0.900, 0.93, 0.94], [0.60, 0.84, 0.92, 0.93, 0.94]]
GROWING = [[0.40, 0.90, 0.93, 0.95, 0.95], [0.40, 0.92, 0.93, 0.90, 0.89], [0.5, 0.91, 0.93, 0.91, 0.89]]


def summaries_of(folder: Path) -> dict[str, MethodSummary]:
    (experiment,) = load_runs(folder).experiments
    return {summary.method: summary for summary in summarise(experiment)}


def cells_of(folder: Path) -> tuple[dict[str, dict[str, str]], list[str]]:
    (experiment,) = load_runs(folder).experiments
    table = result_table(experiment)
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}, table.notes


def slow_epochs_to(trials: list[list[float]], target: float) -> int | None:
    for epoch in range(len(trials[0])):
        if round(statistics.fmean(trial[epoch] for trial in trials), 9) >= round(target, 9):
            return epoch + 1
    return None


def test_epochs_to_both_targets_follow_the_seed_averaged_curve(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", SMALL)
    write_accuracies(tmp_path, "e", "divebatch", GROWING)
    common = statistics.fmean(trial[-1] for trial in SMALL) - 0.01
    for method, trials in (("sgd-small", SMALL), ("divebatch", GROWING)):
        summary = summaries_of(tmp_path)[method]
        own = statistics.fmean(trial[-1] for trial in trials) - 0.01
        assert summary.own_target == pytest.approx(own)
        assert summary.epochs_to_own_target == slow_epochs_to(trials, own)
        assert summary.common_target == pytest.approx(common)
        assert summary.epochs_to_common_target == slow_epochs_to(trials, common)


def test_final_values_are_means_with_standard_errors(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.9, 0.95], [0.9, 0.97], [0.9, 0.96]])
    final = [0.95, 0.97, 0.96]
    error = statistics.stdev(final) / math.sqrt(3)
    cells, _ = cells_of(tmp_path)
    assert cells["sgd-small"]["final val accuracy (%)"] == f"{96.0:.2f} ± {100 * error:.2f}"
    assert cells["sgd-small"]["final val loss"] == f"{0.04:.4f} ± {error:.4f}"


def test_sizes_within_epochs_count_too(tmp_path: Path) -> None:
    rows = [{"batch_size": 512, "changes": [[3, 4096, 0.2], [7, 512, 0.1]]}, {"batch_size": 1024}]
    write_run(tmp_path, "e", "auto", 0, rows, config={"epochs": 2, "method": {"batch_size": 128}})
    summary = summaries_of(tmp_path)["auto"]
    assert (summary.first_batch_size, summary.largest_batch_size, summary.final_batch_size) == (128, 4096, 1024)


def test_the_size_that_an_epoch_with_changes_began_with_counts_too(tmp_path: Path) -> None:
    rows = [{"batch_size": 128, "next_batch_size": 2048}, {"batch_size": 256, "changes": [[900, 256, 0.1]]}]
    write_run(tmp_path, "e", "auto", 0, rows, config={"epochs": 2, "method": {"batch_size": 128}})
    assert summaries_of(tmp_path)["auto"].largest_batch_size == 2048


def test_batch_sizes_steps_and_seconds_are_means_over_trials(tmp_path: Path) -> None:
    for seed, sizes in enumerate([[128, 4096, 2000], [128, 512, 1024]]):
        rows = [{"batch_size": b, "steps": 7 * (seed + 1), "train_seconds": 1.5 + seed, "val_loss": 1.0} for b in sizes]
        write_run(tmp_path, "e", "divebatch", seed, rows)
    summary = summaries_of(tmp_path)["divebatch"]
    assert (summary.first_batch_size, summary.largest_batch_size) == (128, (4096 + 1024) / 2)
    assert summary.final_batch_size == (2000 + 1024) / 2
    cells, _ = cells_of(tmp_path)
    assert cells["divebatch"]["batch size, first → largest"] == "128 → 2560"
    assert cells["divebatch"]["steps"] == "10"  # 10.5, to even
    assert cells["divebatch"]["train s"] == "2.00"


def test_unfinished_runs_are_counted_and_final_values_say_whose_they_are(tmp_path: Path) -> None:
    for seed, length in enumerate((4, 4, 2)):
        rows = [{"val_accuracy": 0.5 + seed / 10, "val_loss": 1.0 + seed}] * length
        write_run(tmp_path, "e", "sgd-small", seed, rows, config={"epochs": 4})
    cells, notes = cells_of(tmp_path)
    assert cells["sgd-small"]["trials"] == "2 of 3"
    assert cells["sgd-small"]["final val loss"].startswith("1.5000 ±")
    assert "sgd-small: 2 of 3 trials finished; final values are those of epoch 4, which 2 reached." in notes


def test_diverged_trials_are_counted_and_said(tmp_path: Path) -> None:
    for seed in range(3):
        last: dict[str, Any] = {"val_loss": float("nan") if seed else 0.25, "val_accuracy": 0.5}
        write_run(tmp_path, "e", "sgd-large", seed, [{"val_loss": 0.5, "val_accuracy": 0.8}, last])
    cells, notes = cells_of(tmp_path)
    assert summaries_of(tmp_path)["sgd-large"].num_diverged == 2
    assert cells["sgd-large"]["final val loss"] == "0.25"
    (note,) = [note for note in notes if "diverged" in note]
    assert "2 of 3 trials diverged" in note
    assert "a mean over 1 that did not" in note


def test_a_method_of_which_all_trials_diverged_shows_no_number(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "sgd-large", 0, [{"val_loss": None, "val_accuracy": 0.5}])
    cells, notes = cells_of(tmp_path)
    assert cells["sgd-large"]["final val loss"] == "-"
    assert any("1 of 1 trials diverged" in note and "no final loss" in note for note in notes)


def test_runs_that_were_never_validated_do_not_count_as_diverged(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "m", 0, [{"train_loss": 1.0}])
    cells, notes = cells_of(tmp_path)
    assert notes == ["No run has a validation loss or accuracy."]
    assert cells["m"]["epochs to own target"] == "-"


def test_a_target_that_is_never_reached_is_said_so(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "sgd-small", [[0.9, 0.95]])
    write_accuracies(tmp_path, "e", "sgd-large", [[0.5, 0.6]])
    cells, notes = cells_of(tmp_path)
    assert cells["sgd-large"]["epochs to common target"] == "not reached"
    assert "Common target: the final accuracy of sgd-small less one point, 94.00 %." in notes


def test_without_the_small_batch_baseline_there_is_no_common_target(tmp_path: Path) -> None:
    write_accuracies(tmp_path, "e", "divebatch", [[0.9, 0.95]])
    cells, notes = cells_of(tmp_path)
    assert cells["divebatch"]["epochs to common target"] == "-"
    assert any("No common target" in note for note in notes)
    assert any("single trial" in note and "divebatch" in note for note in notes)


def test_a_run_without_epochs_gives_a_row_without_numbers(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "sgd-small", 0, [], config={"epochs": 3})
    write_accuracies(tmp_path, "e", "divebatch", [[0.9]])
    cells, notes = cells_of(tmp_path)
    assert list(cells["sgd-small"].values()) == ["sgd-small", "0 of 1", *["-"] * 7]
    assert "sgd-small: 0 of 1 trials finished, no epoch recorded yet." in notes


@pytest.mark.parametrize(
    ("average", "text"),
    [
        (Average(0.5, 0.0, 4), "0.5000 ± 0.0000"),
        (Average(0.04567, 0.00008, 4), "0.045670 ± 0.000040"),
        (Average(1234.5, 20.0, 4), "1234.5000 ± 10.0000"),
        (Average(3.2e9, 2.0e8, 4), "3.2e+09 ± 1e+08"),
        (Average(2e-7, 2e-8, 4), "2e-07 ± 1e-08"),
        (Average(0.123456, float("nan"), 1), "0.1235"),
        (Average(1.0, math.inf, 4), "1 ± inf"),
        (None, "-"),
    ],
)
def test_numbers_keep_the_digits_that_matter(average: Average | None, text: str) -> None:
    assert with_error(average) == text


def test_markdown_keeps_text_as_text() -> None:
    table = Table("t", ["a|b"], [["<script>x</script>"], ["two\nlines"], ["`code` [link](x)"]], ["*bold*"])
    lines = table_to_markdown(table).splitlines()
    assert lines[0] == r"| a\|b |"
    assert lines[2:5] == ["| &lt;script&gt;x&lt;/script&gt; |", "| two lines |", r"| \`code\` \[link\](x) |"]
    assert lines[-1] == r"- \*bold\*"
