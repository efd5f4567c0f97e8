"""What a search has found: a table, the best point, a picture, a file to run."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from divebatch.errors import MissingExtraError
from divebatch.lab.experiments import Experiment
from divebatch.lab.experiments.schema import Part
from divebatch.lab.search.plan import Plan
from divebatch.lab.search.space import Point, Space
from divebatch.lab.search.study import ERROR, POINT, Study
from divebatch.records import Metric

Values = Sequence[tuple[Point, float | None]]
"""The metric at each point; None where it could not be run."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A point with its result; `value` is that of the metric, None where it could not be run."""

    point: Point
    value: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Results:
    """All points that were tried, the best first; of equal ones the earlier."""

    tried: tuple[Tried, ...]
    total: int
    metric: Metric = field(default_factory=Metric)

    @property
    def best(self) -> Tried | None:
        """The best on the held-out data; None before the first result, or if all diverged."""
        first = self.tried[0] if self.tried else None
        return first if first is not None and first.value not in (None, self.metric.worst) else None


def collect(study: Study) -> Results:
    """From the storage, whoever ran the trials."""
    tried = [
        Tried(trial.user_attrs[POINT], trial.value, trial.user_attrs.get("note", "")) for trial in study.completed()
    ]
    tried += [Tried(trial.user_attrs[POINT], None, trial.user_attrs[ERROR]) for trial in study.failed()]
    sign = -1 if study.metric.higher_is_better else 1
    tried.sort(key=lambda each: math.inf if each.value is None else sign * each.value)
    return Results(tuple(tried), study.total, study.metric)


def write_results(plan: Plan, results: Results, *, apply_to: Sequence[str] = ()) -> Iterator[Path]:
    """FOLDER/STUDY.toml, .png and .svg; yields what was written. Without matplotlib there is no picture."""
    best = results.best
    if best is None:
        return
    path = plan.folder / f"{plan.name}.toml"
    comment = f"{_words(best, results.metric)}, {len(results.tried)} of {results.total} trials of search '{plan.name}'"
    path.write_text(to_toml(plan.tuned(best.point, apply_to=tuple(apply_to)), comment=comment), encoding="utf-8")
    yield path
    try:
        values = [(each.point, each.value) for each in results.tried]
        yield from draw(plan.space, values, path.with_suffix(""), metric=results.metric)
    except MissingExtraError:
        return


def _words(best: Tried, metric: Metric) -> str:
    settings = ", ".join(f"{name} = {value:g}" for name, value in best.point.items())
    return f"{settings}: {metric.text(best.value or 0.0)} on held-out training data"


def draw(space: Space, results: Values, stem: Path, *, metric: Metric) -> Iterator[Path]:
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
    mappable = _heat_map(axes, space, results, metric) if space.is_grid else _points(axes, space, results, metric)
    what = "accuracy on held-out data (%)" if metric.is_accuracy else f"{metric.name} on held-out data"
    figure.colorbar(mappable, ax=axes, label=what)
    axes.set(xlabel=_label(space.names[1]), ylabel=_label(space.names[0]))
    for suffix in (".png", ".svg"):
        path = Path(f"{stem}{suffix}")
        figure.savefig(path, dpi=150)
        yield path


def cells(space: Space, results: Values, metric: Metric) -> list[list[float]]:
    """A row for each value of the first dimension; NaN where nothing was tried, the worst value where all failed.

    Accuracies are in percent.
    """
    rows, columns = (dimension.values for dimension in space.dimensions[:2])
    found: dict[Any, list[float]] = {(row, column): [] for row in rows for column in columns}
    for point, value in results:
        found[point[space.names[0]], point[space.names[1]]].append(_scaled(value, metric))
    best = {place: metric.best(values) for place, values in found.items()}
    return [[math.nan if (value := best[row, column]) is None else value for column in columns] for row in rows]


def _scaled(value: float | None, metric: Metric) -> float:
    value = metric.worst if value is None else value
    return 100 * value if metric.is_accuracy else value


def _heat_map(axes: Any, space: Space, results: Values, metric: Metric) -> Any:
    table = cells(space, results, metric)
    good = [value for row in table for value in row if math.isfinite(value) and value != metric.worst]
    low, high = min(good, default=0.0), max(good, default=0.0)  # what diverged has no shade
    best = metric.best(good)
    mappable = axes.imshow(table, aspect="auto", cmap=_colours(metric), vmin=low, vmax=high)
    for which, dimension in zip((axes.set_yticks, axes.set_xticks), space.dimensions, strict=False):
        which(range(len(dimension.values)), [f"{value:g}" for value in dimension.values])
    for row, values in enumerate(table):
        for column, value in enumerate(values):
            if not math.isnan(value):
                is_dark = (value <= (low + high) / 2) == metric.higher_is_better
                style = {"color": "white" if is_dark else "black", "ha": "center", "va": "center"}
                weight = "bold" if value == best else "normal"
                axes.text(column, row, f"{value:.3g}", fontsize=8, weight=weight, **style)
    return mappable


def _colours(metric: Metric) -> str:
    """Bright is good."""
    return "viridis" if metric.higher_is_better else "viridis_r"


def _points(axes: Any, space: Space, results: Values, metric: Metric) -> Any:
    finite = [(point, value) for point, raw in results if math.isfinite(value := _scaled(raw, metric))]
    rows, columns = ([point[name] for point, _ in finite] for name in space.names[:2])
    axes.set(xscale="log", yscale="log")
    return axes.scatter(columns, rows, c=[value for _, value in finite], cmap=_colours(metric), s=60)


def _label(name: str) -> str:
    return {"lr": "learning rate", "max_batch_size": "largest batch size"}.get(name, name.replace("_", " "))


def to_toml(experiment: Experiment, *, comment: str = "") -> str:
    """Read back, it is equal to `experiment`."""
    lines = [f"# {line}" for line in comment.splitlines()]
    values = {entry.name: getattr(experiment, entry.name) for entry in fields(experiment) if entry.name != "methods"}
    values = {name: value for name, value in values.items() if value is not None}  # a missing key means the same
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
