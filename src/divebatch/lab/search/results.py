"""What a search has found: a table, the best point, a picture, a file to run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from divebatch.errors import MissingExtraError
from divebatch.lab.search.heatmap import draw
from divebatch.lab.search.plan import Plan
from divebatch.lab.search.space import Point
from divebatch.lab.search.study import ERROR, POINT, Study
from divebatch.lab.search.toml import to_toml


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

    @property
    def is_complete(self) -> bool:
        """Whether no trial is missing."""
        return len(self.tried) >= self.total


def collect(study: Study) -> Results:
    """From the storage, whoever ran the trials."""
    tried = [
        Tried(trial.user_attrs[POINT], trial.value, trial.user_attrs.get("note", "")) for trial in study.completed()
    ]
    tried += [Tried(trial.user_attrs[POINT], None, trial.user_attrs[ERROR]) for trial in study.failed()]
    tried.sort(key=lambda each: -1.0 if each.accuracy is None else each.accuracy, reverse=True)
    return Results(tuple(tried), study.total)


def write_results(plan: Plan, results: Results, *, also: Sequence[str] = ()) -> Iterator[Path]:
    """FOLDER/STUDY.toml, .png and .svg; yields what was written. Without matplotlib there is no picture."""
    best = results.best
    if best is None:
        return
    path = plan.folder / f"{plan.name}.toml"
    comment = f"{_words(best)}, {len(results.tried)} of {results.total} trials of search '{plan.name}'"
    path.write_text(to_toml(plan.tuned(best.point, also=tuple(also)), comment=comment), encoding="utf-8")
    yield path
    try:
        yield from draw(plan.space, [(each.point, each.accuracy) for each in results.tried], path.with_suffix(""))
    except MissingExtraError:
        return


def _words(best: Tried) -> str:
    settings = ", ".join(f"{name} = {value:g}" for name, value in best.point.items())
    return f"{settings}: {100 * (best.accuracy or 0):.2f} % on held-out training data"
