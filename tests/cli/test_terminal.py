import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from cli.commands import call
from divebatch.cli.common import command_again
from divebatch.cli.progress import Lines, ProgressBars, describe
from divebatch.lab import Run, get_experiment, load_checkpoint
from divebatch.records import EpochRecord, read_run
from lab.helpers import CPU

RUN = ["--epochs", "4", "--trials", "1", "--jobs", "1", "--methods", "divebatch"]


def test_a_finished_run_is_a_line_of_result_batch_rate_diversity_and_speed(experiment, tmp_path):
    answer = call("run", experiment, *RUN, "--out", tmp_path)
    assert answer.exit_code == 0, answer.output
    (line,) = [line for line in answer.output.splitlines() if line.startswith("divebatch seed 0")]
    number = r"[\d.e+-]+"
    assert re.fullmatch(
        rf"divebatch seed 0: epoch 4/4  accuracy {number} %  val loss {number}  batch \d+  lr {number}  "
        rf"diversity {number}  {number}[kM]? samples/s",
        line,
    ), line
    assert "\x1b" not in answer.output
    unmeasured = EpochRecord(epoch=1, batch_size=16, lr=0.1, steps=5, samples=80, val_loss=0.5, val_accuracy=0.25)
    assert describe(unmeasured) == "accuracy 25.00 %  val loss 0.5000  batch 16  lr 0.1"


def runs_of(name: str, *, epochs: int) -> list[Run]:
    planned = get_experiment(name).scaled(epochs)
    return [Run(planned, method, 0, Path()) for method in planned.methods]


def test_a_run_that_goes_on_has_a_line_a_minute(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("divebatch.cli.progress.time.monotonic", lambda: now[0])
    lines = Lines(runs_of("synthetic-convex", epochs=100))
    for epoch in range(1, 101):
        now[0] += 25.0
        values = {"val_loss": 0.5, "total_seconds": 25.0 * epoch}
        lines.on_epoch(0, EpochRecord(epoch=epoch, batch_size=16, lr=0.1, steps=5, samples=80 * epoch, **values))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in shown] == [f"{epoch}/100" for epoch in range(3, 100, 3)] + ["100/100"]
    assert shown[0].endswith("40m 25s left")


def test_bars_at_80_columns_keep_name_bar_count_and_time_left():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    with ProgressBars(runs_of("synthetic-nonconvex", epochs=20), console) as bars:
        for epoch in (1, 2):
            values = {"val_loss": 0.5, "val_accuracy": 0.9, "diversity": 0.001234}
            record = EpochRecord(epoch=epoch, batch_size=512, lr=0.5625, steps=5, samples=80 * epoch, **values)
            for index in range(2):
                bars.on_epoch(index, record)
    lines = [line for line in screen.getvalue().splitlines() if "sgd-large seed 0" in line]
    assert "━" in lines[-1]
    assert "2/20" in lines[-1]
    assert "accuracy 90.00 %" in lines[-1]


def test_a_stream_that_closes_ends_no_training(monkeypatch, capsys):
    display = Lines(runs_of("synthetic-convex", epochs=1))
    monkeypatch.setattr("divebatch.cli.progress.os.dup2", lambda *_: None)

    def closed(*_: object, **more: object) -> None:
        if "file" not in more:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("builtins.print", closed)
    for index in (0, 1):
        display.on_epoch(index, EpochRecord(epoch=1, batch_size=16, lr=0.1, steps=5, samples=80))


def test_quiet_says_nothing_but_what_went_wrong(experiment, tmp_path):
    answer = call("run", experiment, *RUN, "--out", tmp_path, "--quiet")
    assert (answer.exit_code, answer.output) == (0, "")
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1
    wrong = call("run", "poems", "--quiet", "--out", tmp_path)
    assert wrong.exit_code == 2
    assert "unknown experiment 'poems'" in wrong.output


def test_json_is_one_object_a_line_and_nothing_else(experiment, tmp_path):
    answer = call("run", experiment, *RUN, "--out", tmp_path, "--json")
    assert answer.exit_code == 0
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert all((line["method"], line["seed"], line["kind"]) == ("divebatch", 0, "epoch") for line in lines)
    (path,) = tmp_path.rglob("*.jsonl")
    assert [line["val_accuracy"] for line in lines] == [record.val_accuracy for record in read_run(path)[1]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quiet", "--json"], "exclude each other"),
        (["--logger", "paper"], "unknown logger 'paper'; known: tensorboard, wandb"),
    ],
)
def test_wrong_ways_to_show_are_found_before_any_work(experiment, tmp_path, words, message):
    answer = call("run", experiment, *words, "--out", tmp_path)
    assert answer.exit_code == 2
    assert message in answer.output
    assert not list(tmp_path.iterdir())


def test_log_writes_beside_the_records(experiment, tmp_path):
    answer = call("run", experiment, *RUN, "--logger", "tensorboard", "--out", tmp_path)
    assert answer.exit_code == 0, answer.output
    assert list((tmp_path / "synthetic-convex" / "divebatch" / "seed-0").glob("events.out.*"))


def test_the_command_again_can_be_pasted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/divebatch", "run", "a b.toml", "--out", "my runs"])
    assert shlex.split(command_again("--resume")) == ["divebatch", "run", "a b.toml", "--out", "my runs", "--resume"]
    monkeypatch.setattr(sys, "argv", ["/bin/divebatch", "run", "e", "--resume"])
    assert command_again("--resume") == "divebatch run e --resume"


@pytest.mark.slow
def test_ctrl_c_saves_the_run_and_shows_the_command_that_resumes_it(experiment, tmp_path):
    words = ["run", str(experiment), "--epochs", "100000", "--trials", "1", "--jobs", "1", "--methods", "sgd-small"]
    words += ["--out", str(tmp_path)]
    command = [sys.executable, "-m", "divebatch", *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    records = tmp_path / "synthetic-convex" / "sgd-small" / "seed-0.jsonl"
    while not records.exists() or len(records.read_bytes().splitlines()) < 3:
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "Traceback" not in said
    shown = shlex.split(said.strip().splitlines()[-1])
    assert shown == ["divebatch", *words, "--resume"]
    state = load_checkpoint(records.with_suffix(".ckpt"), device=CPU)
    assert state["control"]["epoch"] in (len(read_run(records)[1]), len(read_run(records)[1]) - 1)


@pytest.mark.slow
def test_a_terminal_of_ascii_shows_tables(experiment, tmp_path):
    call("run", experiment, *RUN, "--out", tmp_path)
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "divebatch", "report", str(tmp_path)]
    answer = subprocess.run(command, env=ascii_only, capture_output=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, b"")
    assert "128 -> " in answer.stdout.decode("ascii")
