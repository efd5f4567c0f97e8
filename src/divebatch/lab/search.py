"""Search for a method's settings on held-out training data, with any number of processes.

Each point has a folder with the records of its runs, a lock file and, after training, its result. A process works on a
point only while it holds the lock, which the system releases when the process ends. So each point is trained once, and
the point of a killed process continues in another from the last checkpoint. A grid lists its points; Optuna chooses all
others and keeps them in a journal file.
"""

import itertools
import json
import logging
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from divebatch.checks import require_choice
from divebatch.errors import ArgumentError, DivebatchError, DivergedError, MissingExtraError, RecordError, StoppedError
from divebatch.lab import Experiment, Method, Run, StopRequest, check_parts, execute
from divebatch.lab.files import locked, write_whole
from divebatch.lab.schema import ANY_LENGTH, Part, build_policy, require_name
from divebatch.lab.tables import build_table
from divebatch.records import EpochRecord, Metric

Point = Mapping[str, int | float]
"""One value for each setting, by name."""
Space = Mapping[str, tuple[int | float, ...]]
"""The values of each setting, or a `Range`."""

PAPER_RATES: Space = {
    "lr": (0.001, 0.01, 0.1, 1.0, 2.0, 4.0, 8.0, 16.0),
    "batch_size": (32, 64, 128, 256, 512),
}
PAPER_SIZES: Space = {
    "delta": (0.001, 0.01, 0.1, 1.0),
    "max_batch_size": (2048, 4096, 8192),
}
AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors of a method's learning rate in the default grid of optimizers other than the paper's."""
OF_METHOD = ("lr", "batch_size", "warmup_epochs")
"""Settings of the method itself; all others belong to its policy."""
OF_NO_POINT = ("name", "summary", "paper", "trials", "methods", "report")
"""Entries of an experiment on which its points do not depend."""
SAMPLERS = ("grid", "random", "tpe")
POLL_SECONDS = 0.5


# Settings and their values


class Range(NamedTuple):
    """The ends of a logarithmic range, of whole numbers if both ends are whole."""

    low: int | float
    high: int | float


def points_of(space: Space) -> list[Point]:
    """Return every combination of values, the last setting changing fastest; a range contributes its ends."""
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def in_words(space: Space) -> list[str]:
    """Return a space as texts that `parse_space` reads."""
    return [
        f"{name}={('..' if isinstance(values, Range) else ',').join(map(repr, values))}"
        for name, values in space.items()
    ]


def default_space(experiment: Experiment, method: Method) -> Space:
    """Return the paper's grid: delta and cap for DiveBatch, else learning rate and batch size.

    For optimizers other than SGD, the grid surrounds the method's own learning rate and batch size.
    """
    if experiment.optimizer.kind != "sgd":
        sizes = {max(1, method.batch_size // 2), method.batch_size, 2 * method.batch_size}
        return {"lr": tuple(factor * method.lr for factor in AROUND), "batch_size": tuple(sorted(sizes))}
    return PAPER_SIZES if method.policy.kind == "divebatch" else PAPER_RATES


def parse_space(texts: Sequence[str]) -> Space:
    """Read texts like `lr=0.1,1,2` (these values) or `lr=0.001..16` (anything between).

    >>> parse_space(["batch_size=32,64", "lr=0.001..16"])
    {'batch_size': (32, 64), 'lr': Range(low=0.001, high=16)}
    """
    space: dict[str, tuple[int | float, ...]] = {}
    for text in texts:
        name, separator, words = text.partition("=")
        if not separator or not re.fullmatch(r"[a-z_]+", name):
            raise ArgumentError(f"a setting to search must be NAME=VALUE,VALUE or NAME=LOW..HIGH, got {text!r}")
        if name in space:
            raise ArgumentError(f"{name} is searched over twice")
        if ".." in words:
            low, high = (_number(word, text) for word in words.split("..", 1))
            if not 0 < low < high:
                raise ArgumentError(f"{text}: a range must go upwards from above 0")
            space[name] = Range(low, high)
        else:
            space[name] = tuple(dict.fromkeys(_number(word, text) for word in words.split(",")))
    return space


def _number(text: str, where: str) -> int | float:
    for kind in (int, float):
        try:
            value: int | float = kind(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    raise ArgumentError(f"{where}: {text!r} is not a number")


def with_point(method: Method, point: Point) -> Method:
    """Return the method with a point's settings; raise if a run could not start with them."""
    values = {entry.name: getattr(method, entry.name) for entry in fields(method)}
    values |= {name: value for name, value in point.items() if name in OF_METHOD}
    of_policy = {name: value for name, value in point.items() if name not in OF_METHOD}
    policy: Any = build_policy(method.policy, ANY_LENGTH)
    known = (*OF_METHOD, *sorted(entry.name for entry in fields(policy)))
    for name in of_policy:
        if name not in known:
            raise ArgumentError(f"nothing to search over called {name!r}; known: {', '.join(known)}")
    values["policy"] = replace(method.policy, settings={**method.policy.settings, **of_policy})
    return build_table(Method, values)


def slug(point: Point) -> str:
    """Return a point as a folder's name.

    >>> slug({"lr": 0.001, "batch_size": 32})
    'lr-0.001_batch_size-32'
    """
    return "_".join(f"{name}-{value!r}" for name, value in point.items()).replace("+", "")


# A search, its points and its results


@dataclass(frozen=True, slots=True)
class Tried:
    """A point with the metric's `value`. None: the point could not be run."""

    point: Point
    value: float | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search for settings of `method_name`; a point's value is the mean final metric on the held-out part."""

    experiment: Experiment
    """The experiment at full length; trials may be shorter."""
    method_name: str
    folder: Path
    space: Space
    epochs: int | None = None
    """Number of epochs of a trial. None: the experiment's number."""
    sampler: str = "grid"
    num_trials: int | None = None
    """Number of points to try, for samplers other than the grid."""
    seed: int = 0
    """The first of the `num_seeds` seeds of each point."""
    num_seeds: int = 1
    held_out: float = 0.2
    """Fraction of the training data on which points are judged."""
    study_name: str = ""
    run_settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Run` that change no result: device, data folder and the like."""

    def __post_init__(self) -> None:
        method = self.experiment.method(self.method_name)
        require_choice("sampler", self.sampler, SAMPLERS)
        if self.is_grid and (ranges := [text for text in in_words(self.space) if ".." in text]):
            raise ArgumentError(f"a grid needs values, not a range: {ranges[0]}. List them, or use the sampler tpe.")
        if self.is_grid == (self.num_trials is not None):
            raise ArgumentError("a grid has as many trials as points; other samplers need a number of trials")
        if not 0 < self.held_out < 1:
            raise ArgumentError(f"held_out must lie between 0 and 1, got held_out={self.held_out}")
        require_name("study_name", self.name)
        check_parts(self.searched())
        for point in points_of(self.space):
            try:
                with_point(method, point)
            except ArgumentError as error:
                raise ArgumentError(f"{self.method_name} with {json.dumps(point)}: {error}") from error

    @property
    def name(self) -> str:
        return self.study_name or f"{self.experiment.name}-{self.method_name}"

    @property
    def is_grid(self) -> bool:
        return self.sampler == "grid"

    @property
    def total(self) -> int:
        return len(points_of(self.space)) if self.num_trials is None else self.num_trials

    def searched(self) -> Experiment:
        """Return the experiment of the trials, which is shorter and trains without the held-out part."""
        return replace(self.experiment.scaled(self.epochs or self.experiment.epochs), held_out=self.held_out)

    def runs(self, point: Point) -> list[Run]:
        """Return a run for each seed, with records in FOLDER/STUDY/METHOD_SETTINGS/seed-K.jsonl."""
        experiment = self.searched()
        method = with_point(experiment.method(self.method_name), point)
        name = f"{self.method_name}_{slug(point)}"
        tried = replace(experiment, name=self.name, methods={name: method})
        seeds = range(self.seed, self.seed + self.num_seeds)
        return [Run(tried, name, seed, self.folder, **self.run_settings) for seed in seeds]

    def tuned(self, point: Point, *, apply_to: Sequence[str] = ()) -> Experiment:
        """Return the full-length experiment with a point's settings in the searched method and in `apply_to`."""
        changed = {name: with_point(self.experiment.method(name), point) for name in (self.method_name, *apply_to)}
        methods = {**self.experiment.methods, **changed}
        return replace(self.experiment, name=f"{self.experiment.name}-tuned", methods=methods)

    def begin(self) -> None:
        """Write the search's settings; raise if the folder holds another search of this name."""
        experiment = self.searched()
        wanted = {key: value for key, value in asdict(experiment).items() if key not in OF_NO_POINT} | {
            "space": in_words(self.space),
            "sampler": self.sampler,
            "seeds": [self.seed, self.num_seeds],
            "method": asdict(experiment.method(self.method_name)),
        }
        wanted = json.loads(json.dumps(wanted))  # in the form in which it is read back
        path = self.folder / f"{self.name}.json"
        with locked(self._lock, wait=True):
            if not path.exists():
                _write(path, wanted)
            found = _read(path)
        for key in sorted({*wanted, *found}):
            if wanted.get(key) != found.get(key):
                raise ArgumentError(
                    f"study '{self.name}' in '{self.folder}' has begun with another {key}: {found.get(key)!r}, not "
                    f"{wanted.get(key)!r}. Choose another name for the study, or repeat its first settings."
                )

    def points(self) -> list[Point]:
        """Return the points that all processes have chosen so far."""
        if self.is_grid:
            return points_of(self.space)
        return [point for trial in self._study.get_trials(deepcopy=False) if (point := self._point_of(trial))]

    def choose(self) -> bool:
        """Let the sampler choose one more point, unless all are chosen; return whether it chose one."""
        if self.is_grid:
            return False
        with locked(self._lock, wait=True):
            for trial in self._study.get_trials(deepcopy=False):
                if not trial.state.is_finished() and not self._point_of(trial):  # its process was killed while choosing
                    self._study.tell(trial.number, state=_optuna().trial.TrialState.FAIL, skip_if_finished=True)
            if len(self.points()) >= self.total:
                return False
            trial = self._study.ask()
            for name, values in self.space.items():
                if not isinstance(values, Range):
                    trial.suggest_categorical(name, values)
                elif all(isinstance(end, int) for end in values):
                    trial.suggest_int(name, *values, log=True)
                else:
                    trial.suggest_float(name, *values, log=True)
        return True

    def result(self, point: Point) -> Tried | None:
        path = self._folder_of(point) / "result.json"
        if not path.exists():
            return None
        found = _read(path)
        return Tried(point, None if found["value"] is None else float(found["value"]), found["note"])

    def keep(self, tried: Tried) -> None:
        """Write a result and report it to the sampler."""
        # As text: JSON has no infinite numbers.
        value = None if tried.value is None else repr(tried.value)
        _write(self._folder_of(tried.point) / "result.json", {"value": value, "note": tried.note})
        self.tell()

    def tell(self) -> None:
        """Report all new results to the sampler, including those of processes that died before reporting."""
        if self.is_grid:
            return
        state = _optuna().trial.TrialState
        with locked(self._lock, wait=True):  # Optuna raises if two processes report a result
            for trial in self._study.get_trials(deepcopy=False):
                point = self._point_of(trial)
                tried = self.result(point) if point and not trial.state.is_finished() else None
                if tried is not None:
                    outcome = {"state": state.FAIL} if tried.value is None else {"values": tried.value}
                    self._study.tell(trial.number, **outcome, skip_if_finished=True)

    def held(self, point: Point) -> Any:
        """Return a context that yields whether this process holds the point's lock."""
        return locked(self._folder_of(point) / ".lock")

    def results(self) -> "Results":
        """Return the results of all processes, the best first and equal ones in the order of their points."""
        metric = self.experiment.metric
        sign = -1 if metric.higher_is_better else 1
        tried = [found for point in self.points() if (found := self.result(point)) is not None]
        tried.sort(key=lambda each: math.inf if each.value is None else sign * each.value)
        return Results(tuple(tried), self.total, metric)

    @property
    def _lock(self) -> Path:
        return self.folder / f".{self.name}.lock"

    def _folder_of(self, point: Point) -> Path:
        return self.folder / self.name / f"{self.method_name}_{slug(point)}"

    def _point_of(self, trial: Any) -> Point:
        """Return the point of a trial, empty until it is chosen."""
        return {name: trial.params[name] for name in self.space} if trial.params.keys() == set(self.space) else {}

    @cached_property
    def _study(self) -> Any:
        optuna = _optuna()
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = JournalStorage(JournalFileBackend(str(self.folder / f"{self.name}.journal")))
            # Seeded by the system: with one seed all processes would try the same points. Points under way in other
            # processes count as bad.
            tpe = self.sampler == "tpe"
            sampler = optuna.samplers.TPESampler(constant_liar=True) if tpe else optuna.samplers.RandomSampler()
        direction = "maximize" if self.experiment.metric.higher_is_better else "minimize"
        settings = {"storage": storage, "sampler": sampler, "direction": direction}
        return optuna.create_study(study_name=self.name, load_if_exists=True, **settings)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError("optuna", "search") from error
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna


def _write(path: Path, values: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(values) + "\n").encode())
    except OSError as error:
        raise RecordError(f"cannot write '{path}': {error.strerror}. The same command continues later.") from error


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"'{path}' cannot be read ({error}): remove the file to have it made again") from error


# Work


def work(
    search: Search, *, on_result: Callable[[Tried], None], on_wait: Callable[[int], None] = lambda running: None
) -> None:
    """Train points until each has a result, including points that other processes abandon.

    If only points of other processes are left, `on_wait` gets their number. If asked to stop, save the current point
    for others and raise `StoppedError`.
    """
    with StopRequest() as stop:
        while True:
            num_held = 0
            search.tell()
            for point in search.points():
                if search.result(point) is not None:
                    continue
                with search.held(point) as is_ours:
                    num_held += not is_ours
                    if not is_ours or search.result(point) is not None:
                        continue
                    tried = _train(search, point, stop)
                    search.keep(tried)
                on_result(tried)
            if stop.is_set:
                raise StoppedError("stopped between two points")
            if search.choose():
                continue
            if not num_held:
                return
            on_wait(num_held)
            time.sleep(POLL_SECONDS)


def _train(search: Search, point: Point, stop: StopRequest) -> Tried:
    """Train a point and return its mean final value over the seeds; a diverged run has the worst value."""
    metric, values, num_diverged = search.experiment.metric, [], 0
    try:
        for run in search.runs(point):
            try:
                values.append(_final_value(run, metric, stop))
            except DivergedError:
                values.append(metric.worst)
                num_diverged += 1
    except StoppedError as error:
        raise StoppedError(f"{json.dumps(point)}: {error}") from error
    except DivebatchError as error:
        return Tried(point, None, str(error))
    return Tried(point, fmean(values), f"{num_diverged} of {len(values)} diverged" if num_diverged else "")


def _final_value(run: Run, metric: Metric, stop: StopRequest) -> float:
    seen: list[EpochRecord] = []
    execute(run, resume=True, on_epoch=seen.append, on_resume=seen.append, stop=stop)  # perhaps a dead process began it
    value = metric.of(seen[-1])
    if value is None or seen[-1].val_loss is None:
        raise DivergedError("its last validation loss is not finite")
    return value


# Results


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a search so far, the best first."""

    tried: tuple[Tried, ...]
    total: int
    metric: Metric = field(default_factory=Metric)

    @property
    def best(self) -> Tried | None:
        """The best point on the held-out data. None: no result yet, or all diverged."""
        first = self.tried[0] if self.tried else None
        return first if first is not None and first.value not in (None, self.metric.worst) else None


def write_best(search: Search, results: Results, *, apply_to: Sequence[str] = ()) -> Path | None:
    """Write the experiment with the best point to FOLDER/STUDY.toml and return its path; None: no best point."""
    best = results.best
    if best is None or best.value is None:
        return None
    settings = ", ".join(f"{name} = {value:g}" for name, value in best.point.items())
    value = f"{results.metric.text(best.value)} on held-out training data"
    comment = f"{settings}: {value}, {len(results.tried)} of {results.total} trials of search '{search.name}'"
    path = search.folder / f"{search.name}.toml"
    path.write_text(to_toml(search.tuned(best.point, apply_to=apply_to), comment=comment), encoding="utf-8")
    return path


def to_toml(experiment: Experiment, *, comment: str = "") -> str:
    """Return an experiment as the text of a file, which reads back as an equal experiment."""
    try:
        import tomli_w
    except ImportError as error:
        raise MissingExtraError("tomli-w", "search") from error
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + tomli_w.dumps(_plain(experiment))


def _plain(value: Any) -> Any:
    """Convert dataclasses to tables, leaving out None, for which a missing key stands."""
    if isinstance(value, Part):
        return {"kind": value.kind, **_plain(value.settings)}
    if hasattr(value, "__dataclass_fields__"):
        return _plain({entry.name: getattr(value, entry.name) for entry in fields(value)})
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return value
