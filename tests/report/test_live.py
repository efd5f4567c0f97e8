import io
import os
import re
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.cli.watch import _view, watch
from divebatch.records import RecordWriter, RunStop, read_run
from divebatch.report.live import Watch, rate_between, time_left
from report.made_up_runs import epoch_record, write_run

ROWS = [
    {"val_accuracy": 0.5 + 0.1 * n, "val_loss": 0.5, "train_seconds": 2.0 * n, "total_seconds": 2.5 * n} for n in (1, 2)
]


def write_three(folder) -> None:
    write_run(folder, "e", "running", 0, [{**row, "noise_scale": 812.3} for row in ROWS], config={"epochs": 10})
    write_run(folder, "e", "finished", 0, ROWS)
    stopped = write_run(folder, "e", "stopped", 0, ROWS, config={"epochs": 10})
    long_ago = time.time() - 3600
    os.utime(stopped, (long_ago, long_ago))


def call(*words):
    return CliRunner().invoke(app, ["watch", *map(str, words)])


def test_states_come_from_records_and_their_age(tmp_path):
    write_three(tmp_path)
    found = Watch(tmp_path).look()
    assert [(each.run.header.method, each.state) for each in found] == [
        ("running", "running"),
        ("stopped", "stopped"),
        ("finished", "finished"),
    ]
    assert found[0].samples_per_second == 500.0  # 1000 samples in 2 s
    assert found[0].seconds_left == 8 * 2.5
    assert found[1].seconds_left is None


def test_a_run_of_long_epochs_is_not_called_stopped(tmp_path):
    slow = write_run(tmp_path, "e", "m", 0, [{"total_seconds": 1000.0}], config={"epochs": 3})
    for age, state in ((4000, "running"), (6000, "stopped")):
        os.utime(slow, (time.time() - age, time.time() - age))
        assert Watch(tmp_path).look()[0].state == state


def test_speed_and_time_left_need_their_numbers():
    record = epoch_record(1, train_seconds=2.0)
    assert rate_between(None, record) == 500.0
    assert rate_between(epoch_record(1), epoch_record(2, train_seconds=2.0)) is None
    assert time_left(record, 10) is None
    assert time_left(epoch_record(2, total_seconds=6.0), 10) == 24.0


def test_a_file_is_read_again_when_it_grows(tmp_path, monkeypatch):
    path = write_run(tmp_path, "e", "m", 0, ROWS, config={"epochs": 10})
    watch = Watch(tmp_path)
    assert watch.look()[0].run.last.epoch == 2
    monkeypatch.setattr("divebatch.report.live.read_run", lambda path: pytest.fail("read twice"))
    watch.look()
    monkeypatch.undo()
    with path.open("a") as file:
        file.write(epoch_record(3).to_json() + "\n")
    assert watch.look()[0].run.last.epoch == 3


def test_once_prints_a_table_without_escape_codes(tmp_path):
    write_three(tmp_path)
    answer = call(tmp_path, "--once")
    assert answer.exit_code == 0, answer.output
    assert "\x1b" not in answer.output
    assert "1 running, 1 stopped, 1 finished" in answer.output
    line = next(line for line in answer.output.splitlines() if line.startswith("  running seed 0"))
    words = ["running", "seed", "0", "running", "2/10", "128", "0.1", "20s", "0.5000", "70.00", "%", "70.00", "%"]
    assert line.split() == [*words, "500", "812"]
    assert "stopped 1h 00m ago" in answer.output


def test_names_in_records_are_text_and_broken_files_are_named(tmp_path):
    write_run(tmp_path, "[red]e[/red]", "m\x1b[2J", 0, ROWS, place="x/y")
    (tmp_path / "x" / "y" / "seed-1.jsonl").write_text("not json\n")
    answer = call(tmp_path, "--once")
    assert answer.exit_code == 0
    assert "[red]e[/red]\n  m?[2J seed 0" in re.sub(" +\n", "\n", answer.output)
    assert "\x1b" not in answer.output
    assert re.search("not read: .*seed-1.jsonl", answer.output)


def test_a_folder_without_runs_and_no_folder(tmp_path):
    assert "no runs yet" in call(tmp_path, "--once").output
    assert call(tmp_path / "nothing", "--once").exit_code == 2


def watch_until(monkeypatch, wait, folder, *, height):
    """What a terminal shows until Ctrl-C, which `wait` raises."""
    console = Console(file=io.StringIO(), force_terminal=True, width=150, height=height)
    monkeypatch.setattr("divebatch.cli.watch.make_console", lambda: console)
    monkeypatch.setattr("divebatch.cli.watch.sleep", lambda seconds: wait(console.file.getvalue(), seconds))
    watch(folder, every=0.5)
    return console.file.getvalue()


def test_a_terminal_shows_runs_live_until_ctrl_c(tmp_path, monkeypatch):
    write_three(tmp_path)
    looks: list[float] = []

    def wait(shown: str, seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt
        assert "newcomer" not in shown
        write_run(tmp_path, "e", "newcomer", 5, ROWS, config={"epochs": 10})

    shown = watch_until(monkeypatch, wait, tmp_path, height=40)
    assert looks == [0.5, 0.5]
    assert "newcomer seed 5" in shown
    assert "\x1b[" in shown


def test_a_run_that_was_asked_to_stop_is_stopped_at_once(tmp_path):
    path = write_run(tmp_path, "e", "m", 0, ROWS, config={"epochs": 10})
    assert [each.state for each in Watch(tmp_path).look()] == ["running"]
    with RecordWriter(path) as writer:
        writer.write(RunStop(reason="asked to"))
    assert [each.state for each in Watch(tmp_path).look()] == ["stopped"]
    assert len(read_run(path)[1]) == len(ROWS)


def test_80_columns_show_whole_names_and_no_wrapped_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a short path: a long one takes lines of its own
    for seed in range(3):
        write_run(tmp_path, "synthetic-nonconvex", "sgd-large-warmup", seed, ROWS, config={"epochs": 10})
    console = Console(file=io.StringIO(), width=80)
    console.print(_view(Watch(Path()), 80))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 6
    assert max(map(len, lines[1:])) <= 80
    assert all("sgd-large-warmup seed" in line and "70.00 %" in line for line in lines[3:])
