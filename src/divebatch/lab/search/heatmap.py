"""Accuracy over two settings as a picture."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from divebatch.errors import MissingExtraError
from divebatch.lab.search.space import Point, Space

Results = Sequence[tuple[Point, float | None]]


def draw(space: Space, results: Results, stem: Path) -> Iterator[Path]:
    """Write STEM.png and STEM.svg; nothing where the space has fewer than two dimensions.

    A grid becomes a heat map, ranges become points. Of more than two dimensions the first two are shown, each place
    with the best that the others reached there.
    """
    if len(space.dimensions) < 2:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report") from error
    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axes = figure.subplots()
    mappable = _heat_map(axes, space, results) if space.is_grid else _points(axes, space, results)
    figure.colorbar(mappable, ax=axes, label="accuracy on held-out data (%)")
    axes.set(xlabel=_label(space.names[1]), ylabel=_label(space.names[0]))
    for suffix in (".png", ".svg"):
        path = Path(f"{stem}{suffix}")
        figure.savefig(path, dpi=150)
        yield path


def cells(space: Space, results: Results) -> list[list[float]]:
    """Percent, a row for each value of the first dimension; NaN where nothing was tried, 0 where all failed."""
    rows, columns = (dimension.values for dimension in space.dimensions[:2])
    best = {(row, column): math.nan for row in rows for column in columns}
    for point, accuracy in results:
        place = (point[space.names[0]], point[space.names[1]])
        best[place] = max(100 * (accuracy or 0.0), -1.0 if math.isnan(best[place]) else best[place])
    return [[best[row, column] for column in columns] for row in rows]


def _heat_map(axes: Any, space: Space, results: Results) -> Any:
    table = cells(space, results)
    known = [value for row in table for value in row if not math.isnan(value)]
    low, high = min((value for value in known if value > 0), default=0.0), max(known)  # what diverged has no shade
    mappable = axes.imshow(table, aspect="auto", cmap="viridis", vmin=low, vmax=high)
    for which, dimension in zip((axes.set_yticks, axes.set_xticks), space.dimensions, strict=False):
        which(range(len(dimension.values)), [f"{value:g}" for value in dimension.values])
    for row, values in enumerate(table):
        for column, value in enumerate(values):
            if not math.isnan(value):
                style = {"color": "white" if value <= (low + high) / 2 else "black", "ha": "center", "va": "center"}
                weight = "bold" if value == high else "normal"
                axes.text(column, row, f"{value:.1f}", fontsize=8, weight=weight, **style)
    return mappable


def _points(axes: Any, space: Space, results: Results) -> Any:
    rows, columns = ([point[name] for point, _ in results] for name in space.names[:2])
    axes.set(xscale="log", yscale="log")
    return axes.scatter(columns, rows, c=[100 * (accuracy or 0.0) for _, accuracy in results], cmap="viridis", s=60)


def _label(name: str) -> str:
    return {"lr": "learning rate", "max_batch_size": "largest batch size"}.get(name, name.replace("_", " "))
