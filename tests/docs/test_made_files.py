"""What scripts made and is kept in the repository: the table and picture of scores, and the notebook."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.scripts import ROOT, tool

pytest.importorskip("matplotlib")

QUICK = {**os.environ, "SAMPLES": "3000", "MPLBACKEND": "agg"}


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    return dict(json.loads((ROOT / "examples" / "first_look.ipynb").read_text()))


def test_the_table_of_the_page_and_the_picture_follow_from_the_records(tmp_path: Path) -> None:
    script = tool("frontier_page")
    found = script.scores()
    script.draw(found, tmp_path / "frontier.svg")
    assert "linear regression, SGD" in (tmp_path / "frontier.svg").read_text()
    for page, methods in script.PAGES.items():
        table = script.table(found, methods)
        assert len(table.splitlines()) == 2 + len(found)
        assert table in (ROOT / page).read_text(), "run tools/frontier_page.py"


def test_the_notebook_has_the_cells_of_the_script(notebook: dict[str, Any]) -> None:
    cells = tool("notebook").cells((ROOT / "examples" / "first_look.py").read_text())
    assert [(cell["cell_type"], cell["source"]) for cell in notebook["cells"]] == cells


def test_the_notebook_is_one_of_format_4(notebook: dict[str, Any]) -> None:
    """By the schema's required keys; a notebook program refuses others."""
    assert {"cells", "metadata", "nbformat", "nbformat_minor"} == set(notebook)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    identities = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identities)) == len(identities)
    for cell in notebook["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert {"cell_type", "id", "metadata", "source"} | code == set(cell)


def test_the_notebook_stores_its_plots_and_no_error(notebook: dict[str, Any]) -> None:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    kinds = [output["output_type"] for output in outputs]
    assert kinds.count("display_data") == 2
    assert set(kinds) == {"display_data", "stream"}
    assert all(output["data"]["image/png"] for output in outputs if "data" in output)


def test_the_cells_run_in_order(notebook: dict[str, Any], tmp_path: Path) -> None:
    program = "\n".join(cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    command = [sys.executable, "-W", "error", "-c", program]
    answer = subprocess.run(command, cwd=tmp_path, env=QUICK, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "Auto from 128" in answer.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "noise_scale.png"]
