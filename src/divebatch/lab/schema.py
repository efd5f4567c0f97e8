"""What an experiment file says, typed. An unknown key is an error that names it and the known ones."""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from divebatch.checks import require_choice, require_count, require_positive
from divebatch.errors import ArgumentError
from divebatch.estimators import ESTIMATORS, Estimator, make_estimator
from divebatch.lab.schedules import SCHEDULES
from divebatch.lab.step import DeviceOptions
from divebatch.lab.tasks import TASKS
from divebatch.lr import Coupling
from divebatch.policies import POLICIES, Policy, make_policy
from divebatch.records import Metric, ReportSettings
from divebatch.resolve import require_coupling

T = TypeVar("T")

FOLDER = Path(__file__).parent / "experiments"
"""Holds the experiments, one TOML file each."""

ANY_LENGTH = 10**12
"""Samples of a run whose length is not known yet, where settings are only checked."""
MOST_BYTES = 100_000
"""Of an experiment file; the largest that comes with the package has 6000."""
LONGEST_LINE = 2000
"""Of an experiment file, in bytes: the reader's time and memory grow with the square of the dots in a key."""

COMPILED_MULTIPLE = 64
"""Samples by which compiled batch sizes differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A thing chosen by name (data, model, optimizer, schedule, policy) with its own settings."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def scaled(self, ratio: float, registry: Mapping[str, Any]) -> "Part":
        """Settings that count epochs, as the kind's class says, times `ratio`, rounded, at least 1."""
        counted = registry[self.kind].epoch_settings if self.kind in registry else ()
        scaled = {key: _scaled(value, ratio) for key, value in self.settings.items() if key in counted}
        return replace(self, settings={**self.settings, **scaled})


def _scaled(epochs: Any, ratio: float) -> Any:
    """A number of epochs, or a list of them."""
    if isinstance(epochs, list):
        return [_scaled(each, ratio) for each in epochs]
    return max(1, round(epochs * ratio))


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way of training: its first batch size and rate, and what becomes of them.

    The rate grows linearly, step by step, over the first `warmup_epochs`, on top of the experiment's schedule.
    `every_steps`, `base_batch_size` and `shadows` (policies by name that only watch) are the controller's.
    """

    label: str
    batch_size: int
    lr: float
    policy: Part
    lr_coupling: Coupling | None = None
    """A name, or a power of the batch size; None for the policy's own."""
    estimator: str | Part | None = None
    """A name, or one with settings; None for the policy's own."""
    warmup_epochs: int = 0
    every_steps: int | None = None
    base_batch_size: int | None = None
    multiple_of: int = 1
    """What the policy's sizes are rounded down to."""
    measure_always: bool = False
    """Whether epochs are measured for the record that the policy does not ask for."""
    quantize: int | None = None
    """Levels that gradients are rounded to at random (`research/quantized.py`); None: they are left alone."""
    shadows: Mapping[str, Part] | None = None

    def scaled(self, ratio: float) -> "Method":
        """Epoch-counted settings times `ratio`."""
        warmup = _scaled(self.warmup_epochs, ratio) if self.warmup_epochs else 0
        shadows = {name: part.scaled(ratio, POLICIES) for name, part in (self.shadows or {}).items()}
        return replace(self, policy=self.policy.scaled(ratio, POLICIES), warmup_epochs=warmup, shadows=shadows or None)

    def for_compiler(self) -> "Method":
        """Sizes that follow a measurement are rounded down: each new one costs the compiler half a minute."""
        if self.multiple_of > 1 or "multiple_of" in self.policy.settings:
            return self
        return replace(self, multiple_of=COMPILED_MULTIPLE) if POLICIES[self.policy.kind].has_many_sizes else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One file of `paper/`: data, model, schedule, and all methods that are compared."""

    name: str
    summary: str
    paper: str
    trials: int
    epochs: int
    data: Part
    model: Part
    schedule: Part
    optimizer: Part
    methods: Mapping[str, Method]
    task: Part = field(default_factory=lambda: Part(kind="classification"))
    """What the model is trained for."""
    training: DeviceOptions = field(default_factory=DeviceOptions)
    metric: Metric = field(default_factory=Metric)
    """What its runs are judged by; the task's own where the file names none."""
    report: ReportSettings = field(default_factory=ReportSettings)
    one_pass: bool = False
    """Whether a run is one pass over the data, or the `samples` or `seconds` of it; `epochs` are its equal parts."""
    samples: int | None = None
    """Samples of a run where that is not the whole pass."""
    seconds: float | None = None
    """Seconds of training after which a run ends."""
    repeat: bool = False
    """Whether the data may be gone through again where `samples` or `seconds` ask for more than there is."""
    clip_norm: float | None = None
    """The largest norm of the gradient that a step is made with; None for any."""
    held_out: float = 0.0
    """Fraction of the training samples to validate on, which the seed chooses; 0 for the test samples."""

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ArgumentError(f"held_out must be at least 0 and below 1, got held_out={self.held_out}")
        if self.clip_norm is not None:
            require_positive("clip_norm", self.clip_norm)
        self._require_end()

    def _require_end(self) -> None:
        if self.samples is not None:
            require_count("samples", self.samples)
        if self.seconds is not None:
            require_positive("seconds", self.seconds)
        ends = {"samples": self.samples, "seconds": self.seconds, "repeat": self.repeat or None}
        asked = [f"{name}={value}" for name, value in ends.items() if value is not None]
        if asked and not self.one_pass:
            raise ArgumentError(
                f"{self.name} goes over its data {self.epochs} times and ends by epochs, not by {', '.join(asked)}: "
                f"set its number of epochs, or one_pass = true in its file"
            )
        if self.repeat and self.samples is None and self.seconds is None:
            raise ArgumentError("repeat=True needs an end: give samples or seconds")
        counting = [name for name, method in self.methods.items() if method.warmup_epochs]
        if self.one_pass and counting:
            raise ArgumentError(
                f"method {counting[0]} has warmup_epochs, and {self.name} is one pass: set the schedule's warmup"
            )

    def ending(self, *, samples: int | None = None, seconds: float | None = None, repeat: bool = False) -> "Experiment":
        """The same experiment with another end; its schedule is fitted to it. What is left out stays as it is."""
        if samples is None and seconds is None and not repeat:
            return self
        return replace(
            self,
            samples=self.samples if samples is None else samples,
            seconds=self.seconds if seconds is None else seconds,
            repeat=self.repeat or repeat,
        )

    def scaled(self, epochs: int) -> "Experiment":
        """The same experiment over another number of epochs, every epoch-counted setting with it."""
        if epochs < 1:
            raise ArgumentError(f"epochs must be at least 1, got epochs={epochs}")
        ratio = epochs / self.epochs
        methods = {name: method.scaled(ratio) for name, method in self.methods.items()}
        return replace(self, epochs=epochs, schedule=self.schedule.scaled(ratio, SCHEDULES), methods=methods)

    def with_model(self, kind: str) -> "Experiment":
        """The same experiment with another network, at its own settings."""
        return replace(self, model=Part(kind=kind))

    def with_training(self, **changes: Any) -> "Experiment":
        """Another use of the device; None leaves a setting as it is. Batch sizes are rounded for the compiler."""
        training = replace(self.training, **{key: value for key, value in changes.items() if value is not None})
        methods = {name: method.for_compiler() if training.compile else method for name, method in self.methods.items()}
        return replace(self, training=training, methods=methods)

    def method(self, name: str) -> Method:
        """The method called `name`, or an error that lists those there are."""
        if name not in self.methods:
            raise ArgumentError(f"{self.name} has no method {name!r}; known: {', '.join(self.methods)}")
        return self.methods[name]


def experiment_names() -> list[str]:
    """The experiments that come with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def get_experiment(name: str) -> Experiment:
    """The experiment called `name`, or that of the file `name` if it ends in .toml; an error lists those there are."""
    if name.endswith(".toml"):
        return read_experiment(Path(name))
    if name not in experiment_names():
        known = ", ".join(experiment_names())
        raise ArgumentError(f"unknown experiment {name!r}; known: {known}, or a path to a .toml file")
    return read_experiment(FOLDER / f"{name}.toml")


def read_experiment(path: Path) -> Experiment:
    """Read and check one file."""
    try:
        table = tomllib.loads(_bounded_text(path))
    except (OSError, ValueError, RecursionError) as error:  # not TOML, not UTF-8, too many digits, too deep
        raise ArgumentError(f"cannot read experiment '{path}': {error}") from error
    return parse_experiment(table, str(path))


def _bounded_text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than the {MOST_BYTES} bytes that are read")
    if (longest := max(map(len, content.split(b"\n")))) > LONGEST_LINE:
        raise ValueError(f"a line of {longest} bytes, where {LONGEST_LINE} are allowed")
    return content.decode()


def parse_experiment(table: Mapping[str, Any], where: str) -> Experiment:
    """Check every key and type; policies are built once, so that wrong values are found before any run."""
    values = dict(table)
    for key in ("data", "model", "schedule"):
        values[key] = _part(values.get(key), f"{where}: [{key}]")
    values["optimizer"] = _part({"kind": "sgd", **_table(values.get("optimizer", {}), f"{where}: [optimizer]")}, where)
    task = {"kind": "classification", **_table(values.get("task", {}), f"{where}: [task]")}
    values["task"] = _part(task, f"{where}: [task]", known=tuple(TASKS))
    values.setdefault("metric", asdict(TASKS[values["task"].kind].metrics[0]))
    values["training"] = build_table(DeviceOptions, values.get("training", {}), f"{where}: [training]")
    for key, cls in (("metric", Metric), ("report", ReportSettings)):
        values[key] = build_table(cls, _table(values.get(key, {}), f"{where}: [{key}]"), f"{where}: [{key}]")
    methods = values.get("methods")
    if not isinstance(methods, Mapping) or not methods:
        raise ArgumentError(f"{where}: needs at least one [methods.NAME]")
    values["methods"] = {name: _method(entry, f"{where}: [methods.{name}]") for name, entry in methods.items()}
    experiment = build_table(Experiment, values, where)
    _require_metric(experiment, where)
    if experiment.report.customary is not None:
        require_choice(f"{where}: [report] customary", experiment.report.customary, tuple(experiment.methods))
    for key in ("trials", "epochs"):
        require_count(f"{where}: {key}", getattr(experiment, key))
    for name in (experiment.name, *experiment.methods):  # they become folders
        require_name(where, name)
    return experiment


def require_name(where: str, name: str) -> None:
    """Raise unless a name can be that of a file or folder, and of one in the folder where it is put."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise ArgumentError(
            f"{where}: a name must be up to 100 letters, digits, '_', '-' and '.', got {name[:60]!r}"
            + (f" and {len(name) - 60} characters more" if len(name) > 60 else "")
        )


def _require_metric(experiment: Experiment, where: str) -> None:
    """Raise for a metric that the task's evaluation does not give: every value of it would be missing."""
    known = [metric.name for metric in TASKS[experiment.task.kind].metrics]
    if experiment.metric.name not in known:
        raise ArgumentError(
            f"{where}: [metric] name must be one of {', '.join(known)} for the task {experiment.task.kind!r}, "
            f"got {experiment.metric.name!r}"
        )


def _method(table: Any, where: str) -> Method:
    values = dict(_table(table, where))
    values["policy"] = _part(values.get("policy"), f"{where} policy", known=tuple(POLICIES))
    values["estimator"] = _estimator(values.get("estimator"), f"{where} estimator")
    values["shadows"] = _shadows(values.get("shadows", {}), f"{where} shadows")
    method = build_table(Method, values, where)
    try:
        require_count("batch_size", method.batch_size)
        require_positive("lr", method.lr)
        if method.warmup_epochs < 0:
            raise ArgumentError(f"warmup_epochs must not be negative, got {method.warmup_epochs}")
        for name in ("every_steps", "base_batch_size", "multiple_of", "quantize"):
            if getattr(method, name) is not None:
                require_count(name, getattr(method, name))
        policy = build_policy(method.policy, ANY_LENGTH)
        policy.check_start(method.batch_size)
        if method.lr_coupling is not None:
            require_coupling(policy, method.lr_coupling)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error
    return method


def _estimator(entry: Any, where: str) -> str | Part | None:
    """Built once, as the policy is."""
    if entry is None:
        return None
    if not isinstance(entry, str | Mapping):
        raise ArgumentError(f"{where}: must be a name or a table, got {entry!r}")
    part = _part({"kind": entry} if isinstance(entry, str) else entry, where, known=tuple(ESTIMATORS))
    try:
        build_estimator(part, DeviceOptions(), _no_loss)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error
    return part if part.settings else part.kind


def build_estimator(part: Part, training: DeviceOptions, loss_fn: Callable[[Any, Any], Tensor]) -> Estimator:
    """Return the estimator of this name; one that measures norms does so in the way the run trains."""
    settings = dict(part.settings)
    if ESTIMATORS[part.kind].takes("compiled"):
        settings = {"mode": training.norms, "compiled": training.compile, **settings}
    if ESTIMATORS[part.kind].takes("loss_fn"):
        settings["loss_fn"] = loss_fn
    return make_estimator(part.kind, **settings)


def build_policy(part: Part, total_samples: int) -> Policy:
    """Return the policy of this name; settings that follow from how long the run is are filled in."""
    known = {"total_samples": total_samples}
    own = POLICIES[part.kind].run_settings if part.kind in POLICIES else ()
    return make_policy(part.kind, **{name: known[name] for name in own}, **part.settings)


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise AssertionError("an estimator that is built to check its settings measures nothing")


def _shadows(table: Any, where: str) -> Mapping[str, Part] | None:
    """Each is built once, as the policy is. They drive nothing, so no start, cap or coupling is wrong for them."""
    shadows: dict[str, Part] = {}
    for name, entry in _table(table, where).items():
        part = _part(entry, f"{where}.{name}", known=tuple(POLICIES))
        try:
            build_policy(part, ANY_LENGTH)
        except ArgumentError as error:
            raise ArgumentError(f"{where}.{name}: {error}") from error
        shadows[name] = part
    return shadows or None


def _part(table: Any, where: str, *, known: tuple[str, ...] = ()) -> Part:
    values = dict(_table(table, where))
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or (known and kind not in known):
        expected = f"one of {', '.join(known)}" if known else "a name"
        raise ArgumentError(f"{where}: kind must be {expected}, got {kind!r}")
    return Part(kind=kind, settings=values)


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{where}: must be a table, got {value!r}")
    return value


def build_settings(cls: type[T], part: Part, where: str) -> T:
    """A part's settings as the dataclass its kind wants."""
    return build_table(cls, part.settings, f"{where} {part.kind!r}")


# Tables as dataclasses


def build_table(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Return the dataclass `cls` with these values, each of the type that its field has; errors begin with `where`."""
    known: dict[str, Field[Any]] = {entry.name: entry for entry in fields(cls)}  # type: ignore[arg-type]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ArgumentError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(known) or 'none'}")
    missing = [key for key, entry in known.items() if key not in values and _is_required(entry)]
    if missing:
        raise ArgumentError(f"{where}: missing key {missing[0]!r}")
    hints = get_type_hints(cls)
    for key, value in values.items():
        if not _fits(value, hints[key]):
            raise ArgumentError(f"{where}: {key} must be {_name(hints[key])}, got {value!r}")
    try:
        return cls(**values)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error


def _is_required(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    kind = get_origin(hint) or hint
    # To Python True is an integer.
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _name(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_name(option) for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    return getattr(hint, "__name__", str(hint))
