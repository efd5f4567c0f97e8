"""Commands: how they begin and end, what is printed where, and `divebatch doctor`."""

import getpass
import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from rich.console import Console

import divebatch
from cli.commands import call
from divebatch.cli.common import chosen_device, print_table
from divebatch.errors import ArgumentError
from divebatch.lab import experiment_names, get_experiment
from divebatch.lab.search import SAMPLERS

INTERRUPTED = """
import sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from divebatch.__main__ import main
main()
"""


def test_the_version_is_the_package_s():
    answer = call("--version")
    assert (answer.exit_code, answer.output) == (0, f"divebatch {divebatch.__version__}\n")


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_a_command_interrupted_while_it_imports_ends_in_one_line(module):
    program = INTERRUPTED.format(module=module)
    answer = subprocess.run([sys.executable, "-c", program, "list"], capture_output=True, text=True, check=False)
    assert answer.returncode in (1, 130)
    assert len(answer.stderr.splitlines()) <= 2, answer.stderr
    assert "Traceback" not in answer.stderr


def test_help_names_every_sampler():
    assert ", ".join(SAMPLERS) in " ".join(call("search", "--help").output.replace("│", "").split())


def test_devices(monkeypatch):
    assert chosen_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert chosen_device("auto") == "cpu"
    for device, message in {
        "cuda": "no GPU here",
        "cuda:1": "no GPU here",
        "mps": "no Apple GPU",
        "cuda:": "unknown device",
        "cuda:-1": "unknown device",
        "xpu": "known: cpu, cuda, cuda:N, mps, auto",
    }.items():
        with pytest.raises(ArgumentError, match=message):
            chosen_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert [chosen_device(name) for name in ("auto", "cuda", "cuda:1", "mps")] == ["cuda", "cuda", "cuda:1", "mps"]
    with pytest.raises(ArgumentError, match="torch finds 2 GPUs here, counted from 0"):
        chosen_device("cuda:2")


def test_auto_runs_on_what_there_is(experiment, tmp_path):
    words = ["--epochs", "1", "--trials", "1", "--methods", "sgd-large", "--device", "auto", "--quiet"]
    answer = call("run", experiment, *words, "--out", tmp_path)
    assert (answer.exit_code, answer.output) == (0, "")
    (path,) = tmp_path.rglob("*.jsonl")
    hardware = json.loads(path.read_text().splitlines()[0])["hardware"]
    assert hardware["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_advice_is_printed_before_a_file_is_written(experiment, tmp_path, monkeypatch):
    """Minutes of measuring must not be lost to a full disk."""

    def full(*_: object) -> None:
        raise ArgumentError("cannot write 'it': No space left on device")

    monkeypatch.setattr("divebatch.cli.common.write_results", full)
    words = ["--batch-sizes", "8,16", "--timing-seconds", "0.1", "--steps", "40", "--out", tmp_path]
    answer = call("advise", experiment, *words)
    assert answer.exit_code == 1
    assert "start with" in answer.stdout.lower()
    assert "No space left on device" in answer.stderr


def test_a_resume_does_not_print_what_was_printed(experiment, tmp_path):
    words = ["run", experiment, "--epochs", "4", "--trials", "1", "--jobs", "1", "--methods", "divebatch"]
    assert call(*words, "--out", tmp_path, "--quiet").exit_code == 0
    again = call(*words, "--out", tmp_path, "--resume")
    assert again.exit_code == 0
    assert "epoch 4/4" not in again.output
    assert "divebatch seed 0: was complete" in again.output
    as_json = call(*words, "--out", tmp_path, "--resume", "--json")
    assert (as_json.exit_code, as_json.output) == (0, "")


def test_tables_in_a_pipe_are_neither_cut_nor_wrapped(experiment, tmp_path):
    words = ["--epochs", "2", "--trials", "1", "--jobs", "1", "--quiet"]
    assert call("run", experiment, *words, "--out", tmp_path).exit_code == 0
    for command in (["watch", tmp_path], ["list", experiment]):
        shown = call(*command).stdout
        assert "…" not in shown
    assert any("divebatch(delta=" in line and line.split()[-2:] == ["128", "16"] for line in shown.splitlines())


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


# `divebatch doctor`: what is there, what is missing, what is broken, and nothing about the user

BROKEN = """
import sys

class Broken:
    def find_spec(self, name, *_):
        if name == "torch":
            raise OSError("/home/mary jane/lib/libtorch.so: undefined symbol")

sys.meta_path.insert(0, Broken())
from divebatch.__main__ import main
main()
"""


def answer_of(*words):
    answer = call("doctor", *words)
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_versions_devices_and_extras_fit_on_one_screen():
    lines = answer_of().splitlines()
    assert lines[0].split() == ["divebatch", divebatch.__version__]
    assert any(line.split() == ["torch", torch.__version__] for line in lines)
    assert any(line.startswith("[report]") and "matplotlib" in line for line in lines)
    assert len(lines) <= 24
    assert getpass.getuser() not in "".join(lines).replace("root", "")
    found = json.loads(answer_of("--json"))
    assert (found["divebatch"], found["torch"]) == (divebatch.__version__, torch.__version__)
    assert "threads" in found["devices"]["cpu"]


def test_what_is_missing_is_said_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr("divebatch.cli.doctor._version", lambda name: None if name == "pillow" else "1.0")
    assert "pillow missing; get it with: pip install 'divebatch[images]'" in answer_of()


def test_a_broken_torch_is_a_problem_and_no_traceback():
    words = [sys.executable, "-c", BROKEN, "doctor"]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "problem OSError" in answer.stdout
    assert "mary" not in answer.stdout + answer.stderr


def test_the_laboratory_says_that_it_needs_posix():
    program = "import sys; sys.modules['fcntl'] = None; import divebatch, divebatch.lab"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "divebatch.lab needs a POSIX system" in answer.stderr
