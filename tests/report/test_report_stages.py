"""Table 1 and the cost table: numbers against slow computations, and what partial sets of runs come to."""

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import GPU, real_config, write_cifar_like, write_real, write_run

from divebatch.report import Experiment, Table, load_runs
from divebatch.report.cost import cost_table
from divebatch.report.sections import result_tables
from divebatch.report.stages import stage_table
from divebatch.report.targets import common_target, progress_of, stage_epochs

Rows = list[dict[str, Any]]


def only_experiment(folder: Path) -> Experiment:
    (experiment,) = load_runs(folder).experiments
    return experiment


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


@pytest.mark.parametrize("length", [200, 90, 40, 7, 2, 1])
def test_stages_are_rounded_down_as_the_papers(length: int) -> None:
    assert stage_epochs(length) == [max(1, math.floor(length * part)) for part in (0.25, 0.5, 0.75, 1.0)]


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
    cells = cells_of(stage_table(only_experiment(tmp_path)))
    finals = {method: statistics.fmean(rows[-1]["val_accuracy"] for rows in runs) for method, runs in trials.items()}
    for method, runs in trials.items():
        for column, epoch in (("25 % (2)", 2), ("50 % (5)", 5), ("75 % (8)", 8), ("100 % (11)", 11)):
            values = [100 * rows[epoch - 1]["val_accuracy"] for rows in runs]
            error = statistics.stdev(values) / math.sqrt(4)
            assert cells[method][column] == f"{statistics.fmean(values):.2f} ± {error:.2f}"
        for column, target in (("to own target", finals[method]), ("to common target", finals["sgd-small"])):
            slow = slow_time_to(runs, target - 0.01)
            assert cells[method][column] == (f"{slow[1]:.2f} s ({slow[0]})" if slow else "not reached")


def test_the_common_target_is_that_of_sgd_small_though_others_are_better(tmp_path: Path) -> None:
    small, tuned = [[0.5, 0.88, 0.90]], [[0.85, 0.89, 0.95]]
    write_real(tmp_path, {"sgd-small": [rows_of(*small)], "sgd-tuned": [rows_of(*tuned, seconds=2.0)]})
    table = stage_table(only_experiment(tmp_path))
    assert cells_of(table)["sgd-tuned"]["to common target"] == "4.00 s (2)"
    assert cells_of(table)["sgd-tuned"]["to own target"] == "6.00 s (3)"
    assert "Common target: 89.00 %, the final accuracy of sgd-small less one point." in table.notes


def test_without_sgd_small_the_best_method_gives_the_target_and_the_first_of_equals(tmp_path: Path) -> None:
    write_real(tmp_path, {m: [rows_of([0.5, a])] for m, a in (("adabatch", 0.8), ("divebatch", 0.9), ("mine", 0.9))})
    target = common_target(progress_of(only_experiment(tmp_path)))
    assert target is not None
    assert (target.method, target.accuracy) == ("divebatch", pytest.approx(0.89))
    table = stage_table(only_experiment(tmp_path))
    assert cells_of(table)["adabatch"]["to common target"] == "not reached"
    assert any("divebatch less one point: the best one here, as sgd-small has none" in note for note in table.notes)


def test_only_finished_trials_count_where_there_are_some(tmp_path: Path) -> None:
    trials = [rows_of([0.2, 0.4, 0.6, 0.8]), rows_of([0.4, 0.5, 0.6, 0.9]), rows_of([0.9, 0.9])]
    write_real(tmp_path, {"sgd-small": trials}, epochs=4)
    table = stage_table(only_experiment(tmp_path))
    cells = cells_of(table)["sgd-small"]
    assert (cells["trials"], cells["25 % (1)"], cells["50 % (2)"]) == ("2 of 3", "30.00 ± 10.00", "45.00 ± 5.00")
    assert cells["to own target"] == "40.0 s (4)"
    assert any("2 of 3 trials finished; accuracies and times to target are over those" in note for note in table.notes)


def test_a_method_that_has_not_finished_shows_what_it_has_but_nothing_final(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [rows_of([0.2, 0.4, 0.6, 0.8])] * 2})
    unfinished = {"adabatch": [rows_of([0.5, 0.7]), rows_of([0.7])], "divebatch": [rows_of([0.5, 0.9])]}
    write_real(tmp_path, unfinished, epochs=4)
    table = stage_table(only_experiment(tmp_path))
    cells = cells_of(table)
    shown = [cells["adabatch"][column] for column in ("25 % (1)", "50 % (2)", "75 % (3)", "100 % (4)")]
    assert shown == ["60.00 ± 10.00", "70.00", "-", "-"]
    assert (cells["adabatch"]["to own target"], cells["adabatch"]["final val loss"]) == ("-", "-")
    assert cells["adabatch"]["to common target"] == "not yet"
    assert cells["divebatch"]["to common target"] == "20.0 s (2)"
    assert any(note.startswith("adabatch: 0 of 2 trials finished, epoch 2 reached") for note in table.notes)


def test_with_no_final_accuracy_at_all_there_is_no_target(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [rows_of([0.5])], "divebatch": [[]]}, epochs=4)
    table = stage_table(only_experiment(tmp_path))
    assert cells_of(table)["sgd-small"]["to common target"] == "-"
    assert list(cells_of(table)["divebatch"].values()) == ["divebatch", "0 of 1", *["-"] * 7]
    assert "No common target: no method has a final accuracy yet." in table.notes
    assert "divebatch: 0 of 1 trials finished, no epoch recorded yet." in table.notes


def test_one_seed_has_no_standard_error_and_other_seeds_are_named(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [rows_of([0.5, 0.9])] * 2, "divebatch": [rows_of([0.5, 0.8])]})
    table = stage_table(only_experiment(tmp_path))
    assert cells_of(table)["divebatch"]["100 % (2)"] == "80.00"
    assert cells_of(table)["sgd-small"]["100 % (2)"] == "90.00 ± 0.00"
    assert "A single trial, hence no standard error: divebatch." in table.notes
    assert "Not all methods have the same seeds: sgd-small 0, 1; divebatch 0." in table.notes


def test_runs_that_do_not_compare_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, "cifar10", "sgd-small", 0, rows_of([0.5] * 4), config=real_config(4, "fixed"), hardware=GPU)
    other = {"device": "cuda", "name": "Another GPU"}
    write_run(
        tmp_path, "cifar10", "divebatch", 0, rows_of([0.5] * 2), config=real_config(2, "divebatch"), hardware=other
    )
    table = stage_table(only_experiment(tmp_path))
    assert any("different numbers of epochs (2, 4)" in note for note in table.notes)
    assert any("different hardware (A made-up GPU; Another GPU)" in note for note in table.notes)
    assert cells_of(table)["divebatch"]["100 % (4)"] == "-"


def test_runs_that_compare_have_no_such_notes(tmp_path: Path) -> None:
    write_cifar_like(tmp_path, epochs=4, trials=2)
    notes = stage_table(only_experiment(tmp_path)).notes
    assert len(notes) == 4
    assert not any("different" in note or "single" in note for note in notes)


def test_times_that_were_not_recorded_leave_the_epoch(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [[{"val_accuracy": 0.5}, {"val_accuracy": 0.9}]]})
    assert cells_of(stage_table(only_experiment(tmp_path)))["sgd-small"]["to own target"] == "(2)"


# Cost


def test_costs_are_means_over_trials_at_their_end(tmp_path: Path) -> None:
    trials = []
    for seed in range(2):
        last = {"batch_size": 512, "steps": 30 + 10 * seed, "samples": 2_000_000, "train_seconds": 50.0 * (seed + 1)}
        last |= {"eval_seconds": 3.0, "compile_seconds": 4.0 + 2 * seed, "recompiles": 2}
        first = {**dict.fromkeys(last, 0), "batch_size": 128, "peak_memory_bytes": (seed + 3) * 2**20}
        trials.append([first, {**last, "peak_memory_bytes": 2**20}])
    write_real(tmp_path, {"divebatch": trials}, policy="divebatch")
    table = cost_table(only_experiment(tmp_path))
    assert cells_of(table)["divebatch"] == {
        "method": "divebatch",
        "batch size, first → largest": "128 → 512",
        "steps": "35",
        "10^6 samples": "2",
        "samples per s": f"{(2e6 / 50 + 2e6 / 100) / 2:.0f}",
        "train s": "75.0",
        "eval s": "3.00",
        "compile s": "5.00",
        "peak MiB": "4",  # 3.5, to even
    }
    assert "Different batch shapes that were compiled: divebatch 2." in table.notes
    assert not any("CPU" in note for note in table.notes)


def test_costs_that_no_run_recorded_have_no_column(tmp_path: Path) -> None:
    write_run(tmp_path, "cifar10", "sgd-small", 0, [{"val_accuracy": 0.5}], config=real_config(2, "fixed"))
    write_run(tmp_path, "cifar10", "divebatch", 0, [], config=real_config(2, "divebatch"))
    table = cost_table(only_experiment(tmp_path))
    assert table.columns == ["method", "batch size, first → largest", "steps", "10^6 samples"]
    assert table.rows[1] == ["divebatch", "-", "-", "-"]
    assert "Not finished, numbers so far: sgd-small, divebatch." in table.notes
    assert any("On a CPU it is the resident peak" in note for note in table.notes)


# Which tables


def test_real_data_has_its_own_tables_and_other_experiments_the_plain_one(tmp_path: Path) -> None:
    write_cifar_like(tmp_path / "real", epochs=4, trials=1)
    titles = [table.title for table in result_tables(only_experiment(tmp_path / "real"))]
    ends = ("validation accuracy (%) and time to target", "cost", "peak memory")
    assert titles == [f"cifar10: {end}" for end in ends]
    for kind in ({"data": {"kind": "synthetic"}}, {"data": "cifar"}, {}):
        folder = tmp_path / str(kind)
        write_run(folder, "e", "sgd-small", 0, [{}], config={"epochs": 1, **kind})
        assert [table.title for table in result_tables(only_experiment(folder))] == ["e"]
