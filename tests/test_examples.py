"""Every example and every Python block in the docs runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "first_look")
"""But for the one whose cells tests/docs/test_made_files.py runs."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(path)]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if "is not installed; get it with" in answer.stderr or "ModuleNotFoundError" in answer.stderr:
        pytest.skip(answer.stderr.splitlines()[-1])
    assert answer.returncode == 0, answer.stderr
    assert "epoch 1:" in answer.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_python_blocks_in_the_docs_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL):
        exec(compile(block, str(path), "exec"), names)
