"""Results into a folder: JSON and a picture."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from divebatch.errors import ArgumentError
from divebatch.records import finite
from divebatch.report.drawing import Drawing


def to_json(value: Any) -> str:
    """Indented, without NaN and infinities: they become null."""
    return json.dumps(finite(value), indent=2, allow_nan=False)


def make_folder(out: Path) -> None:
    """Make it, or say that it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"cannot write to '{out}': {error.strerror}. Choose another --out folder.") from error


def write_results(out: Path, name: str, values: Mapping[str, Any], drawing: Drawing) -> list[Path]:
    """NAME.json, NAME.svg and NAME.png."""
    contents = {".json": (to_json(values) + "\n").encode(), ".svg": drawing.svg, ".png": drawing.png}
    paths = []
    for suffix, content in contents.items():
        paths.append(out / f"{name}{suffix}")
        try:
            paths[-1].write_bytes(content)
        except OSError as error:
            raise ArgumentError(
                f"cannot write '{paths[-1]}': {error.strerror}. Choose another --out folder."
            ) from error
    return paths
