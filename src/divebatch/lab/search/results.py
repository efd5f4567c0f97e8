"""What a search has found: a table, the best point, a picture, a file to run."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from divebatch.errors import MissingExtraError
from divebatch.lab.experiments import Experiment
from divebatch.lab.experiments.schema import Part
from divebatch.lab.search.plan import Plan
from divebatch.lab.search.space import Point, Space
from divebatch.lab.search.study import ERROR, POINT, Study

Accuracies = Sequence[tuple[Point, float | None]]


@dataclass(frozen=True, slots=True)
class Tried:
    """A point with its result; `accuracy` (0..1) is None where it could not be run."""

    point: Point
    accuracy: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Results:
    """All points that were tried, the best first; of equal ones the earlier."""

    tried: tuple[Tried, ...]
    total: int

    @property
    def best(self) -> Tried | None:
        """The highest accuracy on the held-out data; None before the first result, or if all diverged."""
        first = self.tried[0] if self.tried else None
        return first if first is not None and first.accuracy else None


def collect(study: Study) -> Results:
    """From the storage, whoever ran the trials."""
    tried = [
        Tried(trial.user_attrs[POINT], trial.value, trial.user_attrs.get("note", "")) for trial in study.completed()
    ]
    tried += [Tried(trial.user_attrs[POINT], None, trial.user_attrs[ERROR]) for trial in study.failed()]
    tried.sort(key=lambda each: -1.0 if each.accuracy is None else each.accuracy, reverse=True)
    return Results(tuple(tried), study.total)


def write_results(plan: Plan, results: Results, *, apply_to: Sequence[str] = ()) -> Iterator[Path]:
    """FOLDER/STUDY.toml, .png and .svg; yields what was written. Without matplotlib there is no picture."""
    best = results.best
    if best is None:
        return
    path = plan.folder / f"{plan.name}.toml"
    comment = f"{_words(best)}, {len(results.tried)} of {results.total} trials of search '{plan.name}'"
    path.write_text(to_toml(plan.tuned(best.point, apply_to=tuple(apply_to)), comment=comment), encoding="utf-8")
    yield path
    try:
        yield from draw(plan.space, [(each.point, each.accuracy) for each in results.tried], path.with_suffix(""))
    except MissingExtraError:
        return


def _words(best: Tried) -> str:
    settings = ", ".join(f"{name} = {value:g}" for name, value in best.point.items())
    return f"{settings}: {100 * (best.accuracy or 0):.2f} % on held-out training data"


def draw(space: Space, results: Accuracies, stem: Path) -> Iterator[Path]:
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


def cells(space: Space, results: Accuracies) -> list[list[float]]:
    """Percent, a row for each value of the first dimension; NaN where nothing was tried, 0 where all failed."""
    rows, columns = (dimension.values for dimension in space.dimensions[:2])
    best = {(row, column): math.nan for row in rows for column in columns}
    for point, accuracy in results:
        place = (point[space.names[0]], point[space.names[1]])
        best[place] = max(100 * (accuracy or 0.0), -1.0 if math.isnan(best[place]) else best[place])
    return [[best[row, column] for column in columns] for row in rows]


def _heat_map(axes: Any, space: Space, results: Accuracies) -> Any:
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


def _points(axes: Any, space: Space, results: Accuracies) -> Any:
    rows, columns = ([point[name] for point, _ in results] for name in space.names[:2])
    axes.set(xscale="log", yscale="log")
    return axes.scatter(columns, rows, c=[100 * (accuracy or 0.0) for _, accuracy in results], cmap="viridis", s=60)


def _label(name: str) -> str:
    return {"lr": "learning rate", "max_batch_size": "largest batch size"}.get(name, name.replace("_", " "))


def to_toml(experiment: Experiment, *, comment: str = "") -> str:
    """Read back, it is equal to `experiment`."""
    lines = [f"# {line}" for line in comment.splitlines()]
    values = {entry.name: getattr(experiment, entry.name) for entry in fields(experiment) if entry.name != "methods"}
    plain = {name: value for name, value in values.items() if isinstance(value, str | int | float)}
    lines += _pairs(plain)
    for name in [name for name in values if name not in plain]:
        lines += ["", f"[{name}]", *_pairs(_plain(values[name]))]
    for name, method in experiment.methods.items():
        lines += ["", f"[methods.{_key(name)}]", *_pairs(_plain(method))]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    """Dataclasses as tables, without what is None: a missing key means the same."""
    if isinstance(value, Part):
        return {"kind": value.kind, **{key: _plain(item) for key, item in value.settings.items()}}
    if hasattr(value, "__dataclass_fields__"):
        values = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return {key: _plain(item) for key, item in values.items() if item is not None}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _pairs(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_key(key)} = {_value(value)}" for key, value in table.items())


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_pairs(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
