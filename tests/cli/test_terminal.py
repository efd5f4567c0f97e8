import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.cli.exits import command_again
from divebatch.cli.progress import describe
from divebatch.lab.experiments import get_experiment
from divebatch.lab.search import to_toml
from divebatch.lab.training import load_checkpoint
from divebatch.records import EpochRecord, read_run
from lab.experiments.compare_runs import CPU

RUN = ["--epochs", "4", "--trials", "1", "--jobs", "1", "--methods", "divebatch"]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """A file of an experiment that takes no time."""
    small = get_experiment("synthetic-convex")
    text = to_toml(small).replace("num_samples = 20000", "num_samples = 400").replace("= 512\n", "= 8\n")
    path = tmp_path_factory.mktemp("files") / "small.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def call(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def test_lines_say_batch_rate_diversity_speed_and_time_left(experiment, tmp_path):
    answer = call("run", experiment, *RUN, "--out", tmp_path)
    assert answer.exit_code == 0, answer.output
    lines = [line for line in answer.output.splitlines() if line.startswith("divebatch seed 0")]
    assert len(lines) == 4
    number = r"[\d.e+-]+"
    assert re.fullmatch(
        rf"divebatch seed 0: epoch 2/4  batch \d+  lr {number}  diversity {number}  val loss {number}  "
        rf"accuracy {number} %  {number}[kM]? samples/s  \d+s left",
        lines[1],
    ), lines[1]
    assert "left" not in lines[-1]
    assert "\x1b" not in answer.output


def test_quiet_says_nothing(experiment, tmp_path):
    answer = call("run", experiment, *RUN, "--out", tmp_path, "--quiet")
    assert (answer.exit_code, answer.output) == (0, "")
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1


def test_quiet_still_says_what_went_wrong(tmp_path):
    answer = call("run", "poems", "--quiet", "--out", tmp_path)
    assert answer.exit_code == 2
    assert "unknown experiment 'poems'" in answer.output


def test_json_is_one_object_a_line_and_nothing_else(experiment, tmp_path):
    answer = call("run", experiment, *RUN, "--out", tmp_path, "--json")
    assert answer.exit_code == 0
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert all((line["method"], line["seed"], line["kind"]) == ("divebatch", 0, "epoch") for line in lines)
    (path,) = tmp_path.rglob("*.jsonl")
    assert [line["val_accuracy"] for line in lines] == [record.val_accuracy for record in read_run(path)[1]]


def test_quiet_and_json_exclude_each_other(experiment, tmp_path):
    answer = call("run", experiment, "--quiet", "--json", "--out", tmp_path)
    assert answer.exit_code == 2
    assert "exclude each other" in answer.output


def test_an_unknown_logger_is_found_before_any_work(experiment, tmp_path):
    answer = call("run", experiment, "--logger", "paper", "--out", tmp_path)
    assert answer.exit_code == 2
    assert "unknown logger 'paper'; known: tensorboard, wandb" in answer.output
    assert not list(tmp_path.iterdir())


def test_log_writes_beside_the_records(experiment, tmp_path):
    answer = call("run", experiment, *RUN, "--logger", "tensorboard", "--out", tmp_path)
    assert answer.exit_code == 0, answer.output
    assert list((tmp_path / "synthetic-convex" / "divebatch" / "seed-0").glob("events.out.*"))


def test_what_was_not_measured_is_not_shown():
    record = EpochRecord(epoch=1, batch_size=16, lr=0.1, steps=5, samples=80, val_loss=0.5, val_accuracy=0.25)
    assert describe(record) == "batch 16  lr 0.1  val loss 0.5000  accuracy 25.00 %"


def test_the_command_again_can_be_pasted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/divebatch", "run", "a b.toml", "--out", "my runs"])
    assert shlex.split(command_again("--resume")) == ["divebatch", "run", "a b.toml", "--out", "my runs", "--resume"]
    monkeypatch.setattr(sys, "argv", ["/bin/divebatch", "run", "e", "--resume"])
    assert command_again("--resume") == "divebatch run e --resume"


def test_ctrl_c_saves_the_run_and_shows_the_command_that_resumes_it(experiment, tmp_path):
    words = ["run", experiment, "--epochs", "100000", "--trials", "1", "--jobs", "1", "--methods", "sgd-small"]
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


def test_a_terminal_of_ascii_shows_tables(experiment, tmp_path):
    call("run", experiment, *RUN, "--out", tmp_path)
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "divebatch", "report", str(tmp_path)]
    answer = subprocess.run(command, env=ascii_only, capture_output=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, b"")
    assert "128 -> " in answer.stdout.decode("ascii")
