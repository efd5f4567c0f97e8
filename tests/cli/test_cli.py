import io
import json
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from cli.commands import call
from divebatch.cli.common import print_table
from divebatch.lab import experiment_names, get_experiment

RUN = ["run", "synthetic-convex", "--epochs", "2", "--trials", "1", "--jobs", "1"]


def test_list_shows_an_experiment_a_line_and_the_methods_of_one():
    shown = call("list")
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.output.splitlines()[:-1]] == experiment_names()
    one = call("list", "cifar100")
    assert all(method in one.output for method in get_experiment("cifar100").methods)
    assert "delta=0.01," in one.output
    assert "…" not in one.output  # at 80 columns settings are wrapped, not cut
    assert call("list", "cifar-11").exit_code == 2


def test_a_narrow_terminal_breaks_names_before_numbers(monkeypatch):
    console = Console(file=io.StringIO(), width=40)
    monkeypatch.setattr("divebatch.cli.common.make_console", lambda: console)
    print_table(
        ("method", "95 %", "note"), [("a-long-name-of-a-method", "0.48-0.99", "some words on it")], left=("note",)
    )
    shown = console.file.getvalue()
    assert "0.48-0.99" in shown
    assert max(map(len, shown.splitlines())) <= 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "cifar-11"], "unknown experiment 'cifar-11': did you mean 'cifar10'"),
        ([*RUN, "--methods", "sgd-tiny"], "unknown method 'sgd-tiny'"),
        ([*RUN, "--device", "tpu"], "unknown device 'tpu'; known: cpu, cuda, cuda:N, mps, auto"),
        ([*RUN, "--trials", "0"], "--trials"),
        ([*RUN, "--colour", "red"], "--colour"),
        (["report", "/no/such/folder"], "'/no/such/folder' is not a folder"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_known(tmp_path, words, message):
    answer = call(*words, *(["--out", str(tmp_path)] if words[0] == "run" else []))
    assert answer.exit_code == 2
    assert message in re.sub(r"\x1b\[[0-9;]*m", "", answer.output)
    assert not list(tmp_path.iterdir())


def test_run_report_and_run_again(tmp_path):
    words = [*RUN, "--seed", "4", "--log-exact", "--out", str(tmp_path)]
    first = call(*words, "--methods", "sgd-small,divebatch")
    assert first.exit_code == 0, first.output
    assert "divebatch seed 4: epoch 2/2  accuracy" in first.output
    assert "\x1b" not in first.output
    again = call(*words, "--methods", "sgd-small,divebatch")
    assert again.exit_code == 2
    assert "--resume" in again.output
    resumed = call(*words, "--methods", "sgd-small,divebatch,oracle", "--resume")
    assert resumed.exit_code == 0, resumed.output
    other = call(*words[:2], "--epochs", "1", "--seed", "4", "--trials", "1", "--resume", "--out", str(tmp_path))
    assert other.exit_code == 2
    assert "another configuration" in other.output
    report = call("report", str(tmp_path))
    assert report.exit_code == 0, report.output
    assert {"report.html", "report.md"} <= {path.name for path in tmp_path.iterdir()}
    assert "synthetic-convex" in report.output


@pytest.mark.slow
def test_a_run_on_a_terminal_shows_bars(tmp_path):
    program = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    command = [sys.executable, "-m", "divebatch", *RUN, "--methods", "divebatch", "--out", str(tmp_path)]
    environment = {**os.environ, "COLUMNS": "160", "TERM": "xterm"}
    shown = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, env=environment, check=False
    )
    assert shown.returncode == 0, shown.stdout
    assert "divebatch seed 0" in shown.stdout
    assert "\x1b[" in shown.stdout


def test_ctrl_c_leaves_runs_that_resume(tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("divebatch.lab.execute_all", interrupt)
    answer = call(*RUN, "--out", str(tmp_path))
    assert answer.exit_code == 1
    assert "with --resume continues" in answer.output


def test_every_setting_arrives_in_the_run(tmp_path):
    changes = ["training.precision=tf32", "training.compile=false", "training.micro_batch_size=50"]
    options = [word for each in changes for word in ("--set", each)]
    answer = call(*RUN, *options, "--methods", "sgd-small", "--out", str(tmp_path))
    assert answer.exit_code == 0, answer.output
    (path,) = tmp_path.rglob("*.jsonl")
    training = json.loads(path.read_text().splitlines()[0])["config"]["training"]
    assert (training["precision"], training["compile"], training["micro_batch_size"]) == ("tf32", False, 50)
