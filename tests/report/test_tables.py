"""The tables: numbers against slow computations, and what partial sets of runs come to."""

import csv
import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import GPU, LOSS, REAL, real_config, write_real, write_run

from divebatch.records import ReportSettings
from divebatch.report import Analysis, Table, analyse, load_runs
from divebatch.report.analysis import Average
from divebatch.report.compare import find_gains
from divebatch.report.tables import (
    about,
    cost_table,
    csv_text,
    gains_table,
    memory_table,
    result_table,
    settings_json,
    size_in_words,
    summary_table,
    with_error,
)

Rows = list[dict[str, Any]]


def analysis_of(folder: Path) -> Analysis:
    (experiment,) = load_runs(folder).experiments
    return analyse(experiment)


def results(folder: Path) -> Table:
    return result_table(analysis_of(folder))


def costs(folder: Path) -> Table:
    return cost_table(analysis_of(folder))


def cells_of(table: Table) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def rows_of(accuracies: list[float], *, seconds: float = 10.0) -> Rows:
    """One epoch takes `seconds`; losses are 1 - accuracy."""
    epochs = enumerate(accuracies, 1)
    return [{"val_accuracy": a, "val_loss": 1 - a, "train_seconds": seconds * epoch} for epoch, a in epochs]


def slow_time_to(trials: list[Rows], target: float) -> tuple[int, float] | None:
    """Epoch and mean seconds, one epoch after the other."""
    for index in range(len(trials[0])):
        if round(statistics.fmean(rows[index]["val_accuracy"] for rows in trials), 9) >= round(target, 9):
            return index + 1, statistics.fmean(rows[index]["train_seconds"] for rows in trials)
    return None


def test_table_1_matches_the_slow_computation_on_random_runs(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    trials = {
        method: [
            [
                {"val_accuracy": float(a), "val_loss": 1.0, "train_seconds": float(s)}
                for a, s in zip(np.sort(rng.random(11)) * best, np.cumsum(rng.random(11)), strict=True)
            ]
            for _ in range(4)
        ]
        for method, best in (("sgd-small", 0.9), ("sgd-tuned", 0.93), ("divebatch", 0.7), ("adabatch", 0.91))
    }
    write_real(tmp_path, trials)
    cells = cells_of(results(tmp_path))
    finals = {method: statistics.fmean(rows[-1]["val_accuracy"] for rows in runs) for method, runs in trials.items()}
    for method, runs in trials.items():
        for column, epoch in (("25 % (2)", 2), ("50 % (5)", 5), ("75 % (8)", 8), ("100 % (11)", 11)):
            values = [100 * rows[epoch - 1]["val_accuracy"] for rows in runs]
            error = statistics.stdev(values) / math.sqrt(4)
            assert cells[method][column] == f"{statistics.fmean(values):.2f} ± {error:.2f}"
        for column, target in (("to own target", finals[method]), ("to common target", finals["sgd-small"])):
            slow = slow_time_to(runs, target - 0.01)
            assert cells[method][column] == (f"{slow[1]:.2f} s ({slow[0]})" if slow else "not reached")


def test_the_common_target_is_that_of_sgd_small_or_else_of_the_first_of_the_best(tmp_path: Path) -> None:
    tuned = rows_of([0.85, 0.89, 0.95], seconds=2.0)
    write_real(tmp_path / "small", {"sgd-small": [rows_of([0.5, 0.88, 0.90])], "sgd-tuned": [tuned]})
    table = results(tmp_path / "small")
    assert cells_of(table)["sgd-tuned"]["to common target"] == "4.00 s (2)"
    assert cells_of(table)["sgd-tuned"]["to own target"] == "6.00 s (3)"
    assert "Common target: 89.00 %, the final accuracy of sgd-small less one point." in table.notes
    finals = {"adabatch": 0.8, "divebatch": 0.9, "mine": 0.9}
    write_real(tmp_path / "none", {method: [rows_of([0.5, final])] for method, final in finals.items()})
    table = results(tmp_path / "none")
    assert cells_of(table)["adabatch"]["to common target"] == "not reached"
    assert any("divebatch less one point: the best one here, as sgd-small has none" in note for note in table.notes)


def test_only_finished_trials_count_where_there_are_some(tmp_path: Path) -> None:
    trials = [rows_of([0.2, 0.4, 0.6, 0.8]), rows_of([0.4, 0.5, 0.6, 0.9]), rows_of([0.9, 0.9])]
    write_real(tmp_path, {"sgd-small": trials}, epochs=4)
    table = results(tmp_path)
    cells = cells_of(table)["sgd-small"]
    assert (cells["trials"], cells["25 % (1)"], cells["50 % (2)"]) == ("2 of 3", "30.00 ± 10.00", "45.00 ± 5.00")
    assert cells["to own target"] == "40.0 s (4)"
    assert any("2 of 3 trials finished; all numbers are over those" in note for note in table.notes)


def test_a_method_that_has_not_finished_shows_what_it_has_but_nothing_final(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [rows_of([0.2, 0.4, 0.6, 0.8])] * 2})
    unfinished = {"adabatch": [rows_of([0.5, 0.7]), rows_of([0.7])], "divebatch": [rows_of([0.5, 0.9])]}
    write_real(tmp_path, unfinished, epochs=4)
    table = results(tmp_path)
    cells = cells_of(table)
    shown = [cells["adabatch"][column] for column in ("25 % (1)", "50 % (2)", "75 % (3)", "100 % (4)")]
    assert shown == ["60.00 ± 10.00", "70.00", "-", "-"]
    assert (cells["adabatch"]["to own target"], cells["adabatch"]["final val loss"]) == ("-", "-")
    assert cells["adabatch"]["to common target"] == "not yet"
    assert cells["divebatch"]["to common target"] == "20.0 s (2)"
    assert any(note.startswith("adabatch: 0 of 2 trials finished, epoch 2 reached") for note in table.notes)


def test_with_no_final_accuracy_at_all_there_is_no_target(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [rows_of([0.5])], "divebatch": [[]]}, epochs=4)
    table = results(tmp_path)
    assert cells_of(table)["sgd-small"]["to common target"] == "-"
    assert list(cells_of(table)["divebatch"].values()) == ["divebatch", "0 of 1", *["-"] * 7]
    assert "No common target: no method that has learned something has a final accuracy yet." in table.notes
    assert "divebatch: 0 of 1 trials finished, no epoch recorded yet." in table.notes


def test_runs_that_do_not_compare_are_named(tmp_path: Path) -> None:
    small = rows_of([0.5, 0.9, 0.9, 0.9])
    for seed in (0, 1):
        write_run(tmp_path, "e", "sgd-small", seed, small, config=real_config(4, "fixed"), hardware=GPU)
    other = {"device": "cuda", "name": "Another GPU"}
    write_run(tmp_path, "e", "divebatch", 0, rows_of([0.5, 0.8]), config=real_config(2, "auto"), hardware=other)
    table = results(tmp_path)
    cells = cells_of(table)
    assert (cells["divebatch"]["50 % (2)"], cells["divebatch"]["100 % (4)"]) == ("80.00", "-")
    assert cells["sgd-small"]["100 % (4)"] == "90.00 ± 0.00"
    assert any("different numbers of epochs (2, 4)" in note for note in table.notes)
    assert "A single trial, hence no standard error: divebatch." in table.notes
    assert "Not all methods have the same seeds: sgd-small 0, 1; divebatch 0." in table.notes
    assert len(summary_table(analysis_of(tmp_path), []).notes) == 2


# Cost


def test_costs_are_means_over_trials_at_their_end(tmp_path: Path) -> None:
    trials = []
    for seed in range(2):
        last = {"batch_size": 512 * (seed + 1), "steps": 30 + 11 * seed, "samples": 2_000_000, "eval_seconds": 3.0}
        last |= {"train_seconds": 50.0 * (seed + 1), "compile_seconds": 4.0 + 2 * seed, "recompiles": 2}
        first = {**dict.fromkeys(last, 0), "batch_size": 128, "peak_memory_bytes": (seed + 3) * 2**20}
        trials.append([first, {**last, "peak_memory_bytes": 2**20}])
    write_real(tmp_path, {"divebatch": trials}, policy="divebatch")
    table = costs(tmp_path)
    assert cells_of(table)["divebatch"] == {
        "method": "divebatch",
        "batch size, first -> largest": "128 -> 768",
        "steps": "36",  # 35.5, to even
        "10^6 samples": "2",
        "samples per s": f"{(2e6 / 50 + 2e6 / 100) / 2:.0f}",
        "train s": "75.0",
        "eval s": "3.00",
        "compile s": "5.00",
        "peak MiB": "4",
    }
    assert "Different batch shapes that were compiled: divebatch 2." in table.notes
    assert not any("CPU" in note for note in table.notes)


def test_costs_that_no_run_recorded_have_no_column(tmp_path: Path) -> None:
    write_run(tmp_path, "cifar10", "sgd-small", 0, [{"val_accuracy": 0.5}], config=real_config(2, "fixed"))
    write_run(tmp_path, "cifar10", "divebatch", 0, [], config=real_config(2, "divebatch"))
    table = costs(tmp_path)
    assert table.columns == ["method", "batch size, first -> largest", "steps", "10^6 samples"]
    assert table.rows[1] == ["divebatch", "-", "-", "-"]
    assert "Not finished, numbers so far: sgd-small, divebatch." in table.notes
    assert any("On a CPU it is the resident peak" in note for note in table.notes)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        ([{"batch_size": 512, "changes": [[3, 4096, 0.2], [7, 512, 0.1]]}, {"batch_size": 1024}], "128 -> 4096"),
        # the size that an epoch with changes began with
        (
            [{"batch_size": 128, "next_batch_size": 2048}, {"batch_size": 256, "changes": [[900, 256, 0.1]]}],
            "128 -> 2048",
        ),
    ],
)
def test_sizes_within_epochs_count_too(tmp_path: Path, rows: Rows, sizes: str) -> None:
    write_run(tmp_path, "e", "auto", 0, rows, config={"epochs": 2, "method": {"batch_size": 128}})
    assert cells_of(costs(tmp_path))["auto"]["batch size, first -> largest"] == sizes


# What results leave out


def test_diverged_trials_are_counted_and_said(tmp_path: Path) -> None:
    for seed in range(3):
        last: dict[str, Any] = {"val_loss": float("nan") if seed else 0.25, "val_accuracy": 0.5}
        write_run(tmp_path, "e", "some", seed, [{"val_loss": 0.5, "val_accuracy": 0.8}, last])
    write_run(tmp_path, "e", "all", 0, [{}, {"val_loss": None, "val_accuracy": 0.5}])
    table = results(tmp_path)
    assert [cells["final val loss"] for cells in cells_of(table).values()] == ["-", "0.25"]
    lost, some = [note for note in table.notes if "diverged" in note]
    assert all(words in lost for words in ("all: 1 of 1 trials diverged", "no final loss"))
    assert all(words in some for words in ("some: 2 of 3 trials diverged", "a mean over 1 that did not"))


def test_runs_that_were_never_validated_do_not_count_as_diverged(tmp_path: Path) -> None:
    write_run(tmp_path, "e", "m", 0, [{"train_loss": 1.0}])
    table = results(tmp_path)
    assert table.notes == ["No run has a validation loss or accuracy.", "A single trial, hence no standard error: m."]
    assert cells_of(table)["m"]["to own target"] == "-"


def test_a_method_at_chance_has_no_target_of_its_own(tmp_path: Path) -> None:
    for method, accuracy in (("sgd-small", 0.1), ("divebatch", 0.109), ("adabatch", 0.5)):
        write_run(tmp_path, "e", method, 0, rows_of([accuracy] * 2), report=REAL)
    table = results(tmp_path)
    assert {method: cells["to own target"] for method, cells in cells_of(table).items()} == {
        "sgd-small": "-",
        "adabatch": "10.0 s (1)",
        "divebatch": "-",
    }
    assert any("49.00 %, the final accuracy of adabatch less one point: the best one here" in n for n in table.notes)


def test_a_loss_is_better_lower_and_its_target_one_percent_above(tmp_path: Path) -> None:
    for method, losses in (("sgd-small", [3.0, 2.0]), ("divebatch", [2.02, 1.5]), ("adabatch", [9.0, 2.5])):
        rows = [{"val_loss": loss, "train_seconds": 10.0 * n} for n, loss in enumerate(losses, 1)]
        write_run(tmp_path, "lm", method, 0, rows, metric=LOSS)
    table = results(tmp_path)
    assert table.title == "Validation loss and time to target"
    cells = cells_of(table)
    assert (cells["sgd-small"]["50 % (1)"], cells["sgd-small"]["final val accuracy (%)"]) == ("3", "-")
    assert cells["divebatch"]["to common target"] == "10.0 s (1)"
    assert cells["divebatch"]["to own target"] == "20.0 s (2)"
    assert cells["adabatch"]["to common target"] == "not reached"
    assert "Common target: 2.02, the final loss of sgd-small and 1 %." in table.notes
    assert any("averaged over trials is at most the target" in note for note in table.notes)


# Numbers as text


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
    table = Table("t", "t", ["a|b"], [["<script>x</script>"], ["two\nlines"], ["`code` [link](x)"]], ["*bold*"])
    lines = table.to_markdown().splitlines()
    assert lines[0] == r"| a\|b |"
    assert lines[2:5] == ["| &lt;script&gt;x&lt;/script&gt; |", "| two lines |", r"| \`code\` \[link\](x) |"]
    assert lines[-1] == r"- \*bold\*"


FORMULAS = ("=1+1", "+1", "@x", "-a", "\tx", "\n=1", "-1+cmd|x", " =1", "\uff1d1")


@pytest.mark.parametrize("text", [*FORMULAS, "-", "-1.5", "a=b", "12", "1 ± 2", "a_b & c"])
def test_no_cell_begins_like_a_formula_and_other_text_stays(text: str) -> None:
    (row,) = csv.DictReader(io.StringIO(csv_text([["method"], [text]])))
    assert row["method"] == (f"'{text}" if text in FORMULAS else text)


# The small table, gains, settings


def test_the_small_table_has_one_row_a_method(tmp_path: Path) -> None:
    settings = ReportSettings(customary="sgd")
    for method, policy, size in (("sgd", "fixed", 128), ("dive", "divebatch", 512)):
        for seed in range(2):
            rows = [{"val_accuracy": 0.9, "batch_size": b, "train_seconds": 1.0, "val_loss": 0.1} for b in (128, size)]
            config = {"epochs": 2, "summary": "A made-up experiment.", "method": {"policy": {"kind": policy}}}
            write_run(tmp_path, "e", method, seed, rows, config=config, report=settings)
    analysis = analysis_of(tmp_path)
    gains, experiment = find_gains(analysis), analysis.experiment
    assert summary_table(analysis, gains).rows == [
        ["dive", "128 -> 512", "20", "90.00 ± 0.00 %", "1.00", "no gain"],
        ["sgd", "128", "20", "90.00 ± 0.00 %", "1.00", "best fixed batch"],
    ]
    assert (size_in_words(experiment), about(experiment)) == ("2 epochs, 2 seeds", "A made-up experiment")
    table = gains_table(analysis, gains)
    assert table is not None
    words = "no difference shown: "
    expected = ["dive", "sgd (128), best fixed batch and customary batch", "2", f"{words}+0.00 points", "1.00"]
    assert table.rows == [[*expected, f"{words}1.00 times"]]
    assert gains_table(analysis, []) is None


@pytest.mark.parametrize(
    ("model", "text"), [("resnet18", "ResNet-18 on CIFAR-10"), ("resnet20", "ResNet-18 on CIFAR-10 (resnet20)")]
)
def test_a_model_that_the_summary_does_not_name_is_said(tmp_path: Path, model: str, text: str) -> None:
    config = {"epochs": 1, "summary": "ResNet-18 on CIFAR-10.", "model": {"kind": model}}
    write_run(tmp_path, "e", "m", 0, [{}], config=config)
    assert about(load_runs(tmp_path).experiments[0]) == text


def test_gains_say_what_they_lack(tmp_path: Path) -> None:
    config = {"epochs": 1, "seconds": 3.0}
    for method, size, name in (("small", [128], "A GPU"), ("grown", [64, 128], "Another GPU")):
        rows = [{"val_accuracy": 0.5, "batch_size": b} for b in size]
        hardware, settings = {**GPU, "name": name}, ReportSettings(customary="other")
        write_run(tmp_path, "e", method, 0, rows, config=config, hardware=hardware, report=settings)
    analysis = analysis_of(tmp_path)
    table = gains_table(analysis, find_gains(analysis))
    assert table is not None
    notes = " ".join(table.notes)
    assert all(words in notes for words in ("other, has no finished run", "after some seconds", "different hardware"))
    assert table.rows[0][-1] == "-"


def test_settings_are_said_once_and_what_differs_by_method(tmp_path: Path) -> None:
    for seed in range(6):
        write_run(tmp_path, "e", "a", seed, [{}], config={"epochs": 1, "method": {"lr": seed / 10}, "seed": seed})
    write_run(tmp_path, "e", "b", 0, [{}], config={"epochs": 1, "deep": {"er": ["<&>"]}})
    found = json.loads(settings_json(load_runs(tmp_path).experiments[0]))
    assert found["all runs"]["epochs"] == 1
    assert found["all runs"]["versions.torch"] == "2.13.0"
    assert found["a"]["method.lr"] == [0.0, 0.1, 0.2, 0.3, "and 2 more"]
    assert found["b"] == {"deep.er": ["<&>"], "seeds": 0}
    assert "seed" not in found["all runs"] | found["a"]


# Memory

MIB = 2**20


def epochs_of(*entries: tuple[int, float], measured: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Epochs with (batch size, peak in MiB); `measured` holds epoch numbers."""
    return [
        {"batch_size": size, "peak_memory_bytes": int(peak * MIB), "measured": number in measured}
        for number, (size, peak) in enumerate(entries, 1)
    ]


def memory_of(folder: Path) -> Table:
    table = memory_table(analysis_of(folder))
    assert table is not None
    return table


def memory_cells(folder: Path) -> dict[str, dict[str, str]]:
    return cells_of(memory_of(folder))


def test_ratios_are_to_fixed_runs_at_the_same_batch_sizes(tmp_path: Path) -> None:
    small, large = [(128, 700), (128, 720)], [(2048, 9000), (2048, 9600)]
    write_real(tmp_path, {"sgd-small": [epochs_of(*small)], "sgd-large": [epochs_of(*large)]})
    write_real(tmp_path, {"sgd-large-warmup": [epochs_of((2048, 9900), (2048, 9900))]})
    growing = [(128, 900), (1000, 5000), (2048, 9700), (2048, 9800)]
    write_real(tmp_path, {"divebatch": [epochs_of(*growing, measured=(1, 2))]}, policy="divebatch")
    cells = memory_cells(tmp_path)
    fixed = {128: statistics.fmean([700, 720]), 2048: statistics.fmean([9000, 9600, 9900, 9900])}
    compared = [(size, peak) for size, peak in growing if size in fixed]
    ratio = sum(peak for _, peak in compared) / sum(fixed[size] for size, _ in compared)
    assert list(cells["divebatch"].values()) == [
        *("divebatch", "128, 1000, 2048", f"{statistics.fmean(peak for _, peak in growing):.0f}"),
        *(f"{ratio:.2f}", "3 of 4", f"{900 / 710:.2f}"),
    ]
    assert cells["sgd-small"]["ratio to fixed batch"] == "1.00"
    assert cells["sgd-small"]["ratio while measuring"] == "-"
    assert cells["sgd-large"]["ratio to fixed batch"] == f"{9300 / fixed[2048]:.2f}"


def test_runs_on_a_cpu_do_not_count(tmp_path: Path) -> None:
    rows = epochs_of((128, 5000))
    write_run(tmp_path, "cifar10", "adabatch", 0, rows, config=real_config(1, "fixed"), hardware={"device": "cpu"})
    assert memory_table(analysis_of(tmp_path)) is None
    write_real(tmp_path, {"sgd-small": [epochs_of((128, 600), (128, 700)), epochs_of((128, 800))], "divebatch": [[{}]]})
    cells = memory_cells(tmp_path)
    assert cells.keys() == {"sgd-small"}
    assert (cells["sgd-small"]["ratio to fixed batch"], cells["sgd-small"]["average of epochs (MiB)"]) == (
        "1.00",
        "700",
    )
    assert "No GPU memory recorded: adabatch, divebatch." in memory_of(tmp_path).notes
