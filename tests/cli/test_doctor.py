"""`divebatch doctor`: what is there, what is missing, what is broken, and nothing about the user."""

import getpass
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import divebatch
from divebatch.cli import app
from divebatch.cli.work import doctor, extras

BROKEN = """
import sys

class Broken:
    def find_spec(self, name, *_):
        if name == "torch":
            raise OSError("/home/mary jane/lib/libtorch.so: undefined symbol\\nand more")

sys.meta_path.insert(0, Broken())
from divebatch.__main__ import main
main()
"""
REQUIRES = [
    "torch<2.16,>=2.10",
    'typer>=0.16.1; extra == "cli"',
    'divebatch[cli,report]; extra == "search"',
    'matplotlib>=3.8; extra == "report"',
    'optuna>=4.9; extra == "search"',
    'pytest>=8; extra == "dev"',
]


def answer_of(*words: str) -> str:
    answer = CliRunner().invoke(app, ["doctor", *words])
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_it_tells_versions_and_devices_on_one_screen() -> None:
    lines = answer_of().splitlines()
    assert lines[0].split() == ["divebatch", divebatch.__version__]
    assert any(line.split()[:2] == ["torch", torch.__version__] for line in lines)
    assert any(line.startswith("cpu ") for line in lines)
    assert len(lines) <= 24


def test_json_has_the_same() -> None:
    found = json.loads(answer_of("--json"))
    assert found["divebatch"] == divebatch.__version__
    assert found["packages"]["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu"
    assert found["problems"] == []


def test_nothing_tells_who_asked() -> None:
    for told in (answer_of(), answer_of("--json")):
        assert str(Path.home()) not in told
        assert str(Path.cwd()) not in told
        assert getpass.getuser() not in told.split()


def test_a_broken_torch_is_told_without_a_traceback() -> None:
    command = [sys.executable, "-c", BROKEN, "doctor"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "problem: torch cannot be imported: OSError: libtorch.so: undefined symbol" in answer.stdout
    assert "mary" not in answer.stdout
    assert answer.stderr == ""


def test_a_driver_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("no driver at /usr/lib/libcuda.so")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    assert "accelerator    problem RuntimeError: no driver at libcuda.so" in answer_of()


def test_cards_are_told_by_name_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="A Card", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    assert "cuda:1         A Card, memory gib 80.0, runtime" in answer_of()


def test_extras_include_those_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "requires", lambda name: REQUIRES)
    wanted = {extra: [each.package for each in packages] for extra, packages in extras.wanted_by_extra().items()}
    assert wanted == {"cli": ["typer"], "report": ["matplotlib"], "search": ["typer", "matplotlib", "optuna"]}


@pytest.mark.parametrize(
    ("there", "told"),
    [(None, "typer missing; get it with"), ("0.12.0", "typer 0.12.0 (wanted: >=0.16.1); get it with"), ("0.16.1", "")],
)
def test_what_is_missing_or_old_comes_with_a_command(
    monkeypatch: pytest.MonkeyPatch, there: str | None, told: str
) -> None:
    def version(package: str) -> str:
        if there is None:
            raise PackageNotFoundError(package)
        return there

    monkeypatch.setattr(extras, "requires", lambda name: REQUIRES[:2])
    monkeypatch.setattr(extras, "version", version)
    lines = doctor.as_text(doctor.examine()).splitlines()
    line = next(line for line in lines if line.startswith("[cli]"))
    assert line == (f"[cli]          {told}: pip install 'divebatch[cli]'" if told else "[cli]          typer 0.16.1")


def test_a_checkout_that_was_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", nothing)
    assert "extras are not known" in answer_of()
