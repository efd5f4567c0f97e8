"""Makes examples/first_look.ipynb from examples/first_look.py: `python tools/notebook.py`.

The script is the source: `# %%` begins a code cell, `# %% [markdown]` one of text. The cells are run in order, and what
they print and draw is stored in the notebook. No Jupyter is needed for that.
"""

import base64
import io
import json
import re
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "examples" / "first_look.py"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def cells(script: str) -> list[tuple[str, str]]:
    """("code" or "markdown", source) of each cell."""
    _, *parts = re.split(r"^# %%(.*)\n", script, flags=re.MULTILINE)
    kinds = ["markdown" if "[markdown]" in mark else "code" for mark in parts[::2]]
    return [(kind, _source(kind, text.strip("\n"))) for kind, text in zip(kinds, parts[1::2], strict=True)]


def _source(kind: str, text: str) -> str:
    return re.sub(r"^# ?", "", text, flags=re.MULTILINE) if kind == "markdown" else text


def figures() -> list[str]:
    """All open figures as PNG in base64, closed."""
    import matplotlib.pyplot as plt

    found = []
    for number in plt.get_fignums():
        png = io.BytesIO()
        plt.figure(number).savefig(png, format="png", dpi=110)
        found.append(base64.b64encode(png.getvalue()).decode())
    plt.close("all")
    return found


def run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The cell's outputs, as a notebook stores them."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(source, "<cell>", "exec"), names)
    drawn = [
        {"output_type": "display_data", "data": {"image/png": png, "text/plain": "a figure"}, "metadata": {}}
        for png in figures()
    ]
    lines = printed.getvalue()
    return [*drawn, *([{"output_type": "stream", "name": "stdout", "text": lines}] if lines else [])]


def cell(number: int, kind: str, source: str, names: dict[str, Any]) -> dict[str, Any]:
    made = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source}
    return {**made, "execution_count": None, "outputs": run(source, names)} if kind == "code" else made


def notebook(script: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    made = [cell(number, kind, source, names) for number, (kind, source) in enumerate(cells(script), 1)]
    return {"cells": made, "metadata": {"kernelspec": KERNEL}, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    import matplotlib as mpl

    mpl.use("agg")  # figures are stored, not shown
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # where the cells save their figures
        made = notebook(SCRIPT.read_text())
    SCRIPT.with_suffix(".ipynb").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
