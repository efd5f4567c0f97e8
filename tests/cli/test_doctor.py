"""`divebatch doctor`: what is there, what is missing, what is broken, and nothing about the user."""

import getpass
import json
import subprocess
import sys

import torch
from typer.testing import CliRunner

import divebatch
from divebatch.cli import app

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


def answer_of(*words: str) -> str:
    answer = CliRunner().invoke(app, ["doctor", *words])
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_versions_devices_and_extras_fit_on_one_screen() -> None:
    lines = answer_of().splitlines()
    assert lines[0].split() == ["divebatch", divebatch.__version__]
    assert any(line.split() == ["torch", torch.__version__] for line in lines)
    assert any(line.startswith("[report]") and "matplotlib" in line for line in lines)
    assert len(lines) <= 24
    assert getpass.getuser() not in "".join(lines).replace("root", "")
    found = json.loads(answer_of("--json"))
    assert (found["divebatch"], found["torch"]) == (divebatch.__version__, torch.__version__)
    assert "threads" in found["devices"]["cpu"]


def test_what_is_missing_is_said_with_the_way_to_get_it(monkeypatch) -> None:
    monkeypatch.setattr("divebatch.cli.doctor._version", lambda name: None if name == "pillow" else "1.0")
    assert "pillow missing; get it with: pip install 'divebatch[images]'" in answer_of()


def test_a_broken_torch_is_a_problem_and_no_traceback() -> None:
    words = [sys.executable, "-c", BROKEN, "doctor"]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "problem OSError" in answer.stdout
    assert "mary" not in answer.stdout + answer.stderr


def test_the_laboratory_says_that_it_needs_posix() -> None:
    program = "import sys; sys.modules['fcntl'] = None; import divebatch, divebatch.lab"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "divebatch.lab needs a POSIX system" in answer.stderr
