"""The README's code runs, and keeps its promises of length."""

import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_every_python_block_runs(capsys) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in python_blocks():
        exec(compile(block, str(README), "exec"), names)
    promised = re.search(r"for instance: (epoch .+)", README.read_text())
    assert promised is not None
    assert promised.group(1) in capsys.readouterr().out


def test_code_comes_before_line_40_and_the_end_before_line_100() -> None:
    lines = README.read_text().splitlines()
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("```python")) < 40
    assert len(lines) < 100
