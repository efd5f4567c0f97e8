"""Every example and every Python block in the docs runs."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]


OF_FRAMEWORKS = {"transformers_trainer", "lightning_fit", "accelerate_loop", "ddp_loop"}
"""Those that take long to import, or start processes."""
EXAMPLES = [
    pytest.param(path, marks=[pytest.mark.slow] if path.stem in OF_FRAMEWORKS else [], id=path.stem)
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path.stem != "first_look"  # whose cells tests/docs/test_made_files.py runs
]


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(path)]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if "is not installed; get it with" in answer.stderr or "ModuleNotFoundError" in answer.stderr:
        pytest.skip(answer.stderr.splitlines()[-1])
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"epoch 1\b", answer.stdout)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_python_blocks_in_the_docs_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL):
        exec(compile(block, str(path), "exec"), names)


def run_recipe(sizes: str) -> tuple[int, int, list[torch.Tensor]]:
    """Run the recipe of docs/own-loops.md; return the compilations before and in training, and the weights."""
    page = (ROOT / "docs" / "own-loops.md").read_text()
    (recipe,) = (block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "fork_rng" in block)
    recipe = recipe.replace('backend="aot_eager"', "backend=backend").replace("(16, 32, 64, 128)", sizes)
    recipe = recipe.replace("optimizer = ", "before_training = len(compiled)\noptimizer = ")
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    names: dict[str, Any] = {"backend": backend, "compiled": compiled}
    exec(compile(recipe, "recipe", "exec"), names)
    before = names["before_training"]
    return before, len(compiled) - before, [each.detach() for each in names["plain"].parameters()]


def test_sizes_that_were_compiled_before_training_are_not_compiled_again() -> None:
    (_, late, plain), (early, none, warmed) = run_recipe("()"), run_recipe("(16, 32, 64, 128)")
    assert 1 < late <= early == 4
    assert none == 0
    assert all(map(torch.equal, plain, warmed))
