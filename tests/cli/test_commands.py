"""How commands begin and end: versions, devices, interrupts, what is printed where."""

import json
import subprocess
import sys

import pytest
import torch

import divebatch
from cli.commands import call
from divebatch.cli.common import chosen_device
from divebatch.errors import ArgumentError
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
        program = [sys.executable, "-m", "divebatch", *map(str, command)]
        shown = subprocess.run(program, capture_output=True, text=True, check=True).stdout
        assert "…" not in shown
    assert any("divebatch(delta=" in line and line.split()[-2:] == ["128", "16"] for line in shown.splitlines())
