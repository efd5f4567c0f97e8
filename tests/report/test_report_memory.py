"""The memory table against a slow computation, and where it is left out."""

import statistics
from pathlib import Path
from typing import Any

from made_up_runs import real_config, write_real, write_run

from divebatch.report import Table, load_runs
from divebatch.report.memory import memory_table

MIB = 2**20


def epochs_of(*entries: tuple[int, float], measured: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Epochs with (batch size, peak in MiB); `measured` holds epoch numbers."""
    return [
        {"batch_size": size, "peak_memory_bytes": int(peak * MIB), "measured": number in measured}
        for number, (size, peak) in enumerate(entries, 1)
    ]


def table_of(folder: Path) -> Table | None:
    (experiment,) = load_runs(folder).experiments
    return memory_table(experiment)


def cells_of(folder: Path) -> dict[str, dict[str, str]]:
    table = table_of(folder)
    assert table is not None
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_ratios_are_to_fixed_runs_at_the_same_batch_sizes(tmp_path: Path) -> None:
    small, large = [(128, 700), (128, 720)], [(2048, 9000), (2048, 9600)]
    write_real(tmp_path, {"sgd-small": [epochs_of(*small)], "sgd-large": [epochs_of(*large)]})
    write_real(tmp_path, {"sgd-large-warmup": [epochs_of((2048, 9900), (2048, 9900))]})
    growing = [(128, 900), (1000, 5000), (2048, 9700), (2048, 9800)]
    write_real(tmp_path, {"divebatch": [epochs_of(*growing, measured=(1, 2))]}, policy="divebatch")
    cells = cells_of(tmp_path)
    fixed = {128: statistics.fmean([700, 720]), 2048: statistics.fmean([9000, 9600, 9900, 9900])}
    compared = [(size, peak) for size, peak in growing if size in fixed]
    ratio = sum(peak for _, peak in compared) / sum(fixed[size] for size, _ in compared)
    assert list(cells["divebatch"].values()) == [
        *("divebatch", "128, 1000, 2048", f"{statistics.fmean(peak for _, peak in growing):.0f}", "9800"),
        *(f"{ratio:.2f}", "3 of 4", f"{900 / 710:.2f}"),
    ]
    assert cells["sgd-small"]["ratio to fixed batch"] == "1.00"
    assert cells["sgd-small"]["ratio while measuring"] == "-"
    assert cells["sgd-large"]["ratio to fixed batch"] == f"{9300 / fixed[2048]:.2f}"


def test_without_a_fixed_run_at_any_of_its_sizes_there_is_no_ratio(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [epochs_of((128, 700))]})
    sizes = [(size, 1000.0) for size in range(200, 207)]
    write_real(tmp_path, {"divebatch": [epochs_of(*sizes)]}, policy="divebatch")
    cells = cells_of(tmp_path)["divebatch"]
    assert (cells["ratio to fixed batch"], cells["epochs compared"]) == ("-", "0 of 7")
    assert cells["batch sizes"] == "7 sizes, 200 to 206"


def test_averages_are_over_all_epochs_of_all_trials(tmp_path: Path) -> None:
    write_real(tmp_path, {"sgd-small": [epochs_of((128, 600), (128, 700)), epochs_of((128, 800))]})
    cells = cells_of(tmp_path)["sgd-small"]
    assert (cells["average of epochs (MiB)"], cells["maximum (MiB)"]) == ("700", "800")


def test_runs_on_a_cpu_do_not_count(tmp_path: Path) -> None:
    rows = epochs_of((128, 5000))
    write_run(tmp_path, "cifar10", "adabatch", 0, rows, config=real_config(1, "fixed"), hardware={"device": "cpu"})
    assert table_of(tmp_path) is None
    write_real(tmp_path, {"sgd-small": [epochs_of((128, 700))], "divebatch": [[{}]]})
    table = table_of(tmp_path)
    assert table is not None
    assert [row[0] for row in table.rows] == ["sgd-small"]
    assert cells_of(tmp_path)["sgd-small"]["ratio to fixed batch"] == "1.00"
    assert "No GPU memory recorded: adabatch, divebatch." in table.notes
