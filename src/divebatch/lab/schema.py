"""The typed contents of an experiment file. Errors name the file, the key's path and the allowed values."""

import re
import reprlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator
from torch import Tensor

from divebatch.checks import require_choice, unknown
from divebatch.errors import ArgumentError
from divebatch.estimators import ESTIMATORS, Estimator, make_estimator
from divebatch.lab.schedules import SCHEDULES
from divebatch.lab.step import DeviceOptions
from divebatch.lab.tables import Count, Fraction, Positive, build_table
from divebatch.lab.tasks import TASKS, Classification
from divebatch.lr import Coupling, require_coupling
from divebatch.policies import POLICIES, Policy, make_policy
from divebatch.records import Metric, ReportSettings

FOLDER = Path(__file__).parent / "experiments"
"""The folder of the experiments, one TOML file each."""
ANY_LENGTH = 10**12
"""Number of samples that stands for an unknown length while settings are only checked."""
COMPILED_MULTIPLE = 64
"""Divisor of all compiled batch sizes, so that there are few."""


# The parts of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part chosen by name (data, model, optimizer, schedule, policy) with its own settings."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def scaled(self, ratio: float, registry: Mapping[str, Any]) -> "Part":
        """Multiply the settings that count epochs, which the kind's class names, by `ratio`; round to at least 1."""
        counted = registry[self.kind].epoch_settings if self.kind in registry else ()
        scaled = {key: _scaled(value, ratio) for key, value in self.settings.items() if key in counted}
        return replace(self, settings={**self.settings, **scaled})


def _scaled(epochs: Any, ratio: float) -> Any:
    if isinstance(epochs, list):
        return [_scaled(each, ratio) for each in epochs]
    return max(1, round(epochs * ratio))


def _part(value: Any, known: Mapping[str, Any] | None = None) -> Part:
    """Read a part from its table, or from its name if it has no settings."""
    table = {"kind": value} if isinstance(value, str) else value
    if isinstance(table, Part):
        return table
    kind = table.get("kind") if isinstance(table, Mapping) else None
    if not isinstance(kind, str) or (known is not None and kind not in known):
        expected = f"one of {', '.join(known)}" if known is not None else "a name"
        raise ArgumentError(
            f"kind must be {expected}, got {reprlib.repr(kind if isinstance(table, Mapping) else value)}"
        )
    return Part(kind=kind, settings={key: each for key, each in table.items() if key != "kind"})


def _policy(value: Any) -> Part:
    part = _part(value, POLICIES)
    build_policy(part, ANY_LENGTH)  # finds wrong values before any run
    return part


def _estimator(value: Any) -> str | Part | None:
    if value is None:
        return None
    part = _part(value, ESTIMATORS)
    build_estimator(part, DeviceOptions(), Classification.loss_fn)  # any loss will do: nothing is measured
    return part if part.settings else part.kind


AnyPart = Annotated[Part, PlainValidator(_part)]
PolicyPart = Annotated[Part, PlainValidator(_policy)]
OptionsTable = Annotated[DeviceOptions, PlainValidator(partial(build_table, DeviceOptions))]
MetricTable = Annotated[Metric, PlainValidator(partial(build_table, Metric))]
ReportTable = Annotated[ReportSettings, PlainValidator(partial(build_table, ReportSettings))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way of training: the first batch size and learning rate, and how they change.

    Over the first `warmup_epochs` the rate rises linearly at every step, on top of the experiment's schedule.
    `every_steps`, `base_batch_size` and `shadows` (policies by name that only watch) go to the controller.
    """

    label: str
    batch_size: Count
    lr: Positive
    policy: PolicyPart
    lr_coupling: Coupling | None = None
    """A name, or a power of the batch size. None: the policy's own coupling."""
    estimator: Annotated[str | Part | None, PlainValidator(_estimator)] = None
    """A name, or a part with settings. None: the policy's own estimator."""
    warmup_epochs: Annotated[int, Field(ge=0)] = 0
    every_steps: Count | None = None
    base_batch_size: Count | None = None
    multiple_of: Count = 1
    """Divisor of all batch sizes: the policy's sizes are rounded down to its multiples."""
    measure_always: bool = False
    """Whether to measure also epochs for which the policy does not ask, for the record."""
    quantize: Count | None = None
    """Number of levels of randomly rounded gradients (`research/quantized.py`). None: no rounding."""
    shadows: Annotated[Mapping[str, PolicyPart] | None, AfterValidator(lambda found: found or None)] = None

    def __post_init__(self) -> None:
        policy = build_policy(self.policy, ANY_LENGTH)
        policy.check_start(self.batch_size)
        if self.lr_coupling is not None:
            require_coupling(policy, self.lr_coupling)

    def scaled(self, ratio: float) -> "Method":
        warmup = _scaled(self.warmup_epochs, ratio) if self.warmup_epochs else 0
        shadows = {name: part.scaled(ratio, POLICIES) for name, part in (self.shadows or {}).items()}
        return replace(self, policy=self.policy.scaled(ratio, POLICIES), warmup_epochs=warmup, shadows=shadows or None)

    def for_compiler(self) -> "Method":
        """Round sizes that follow a measurement, because each new size takes the compiler half a minute."""
        if self.multiple_of > 1 or "multiple_of" in self.policy.settings:
            return self
        return replace(self, multiple_of=COMPILED_MULTIPLE) if POLICIES[self.policy.kind].has_many_sizes else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The contents of an experiment file: data, model, schedule, and the methods to compare."""

    name: str
    summary: str
    paper: str
    trials: Count
    epochs: Count
    data: AnyPart
    model: AnyPart
    schedule: AnyPart
    optimizer: AnyPart
    methods: Mapping[str, Annotated[Method, PlainValidator(partial(build_table, Method))]]
    task: AnyPart = field(default_factory=lambda: Part(kind="classification"))
    training: OptionsTable = field(default_factory=DeviceOptions)
    metric: MetricTable = field(default_factory=Metric)
    """The metric that judges the runs; the task's own if the file names none."""
    report: ReportTable = field(default_factory=ReportSettings)
    one_pass: bool = False
    """Whether a run is one pass over the data, or `samples` or `seconds` of one, with `epochs` equal parts."""
    samples: Count | None = None
    """Samples of a run. None: a whole pass."""
    seconds: Positive | None = None
    """Seconds of training after which a run ends."""
    repeat: bool = False
    """Whether data may be repeated if `samples` or `seconds` ask for more than one pass."""
    clip_norm: Positive | None = None
    """The norm to which larger gradients are scaled down. None: no clipping."""
    held_out: Fraction = 0.0
    """Fraction of the training samples to validate on, chosen by the seed. 0: validate on the test samples."""

    def __post_init__(self) -> None:
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

    def scaled(self, epochs: int) -> "Experiment":
        """Return the experiment with another number of epochs and all settings that count epochs scaled."""
        ratio = epochs / self.epochs
        methods = {name: method.scaled(ratio) for name, method in self.methods.items()}
        return replace(self, epochs=epochs, schedule=self.schedule.scaled(ratio, SCHEDULES), methods=methods)

    def with_training(self, **changes: Any) -> "Experiment":
        """Return the experiment with changed device options and batch sizes for the compiler. None: no change."""
        training = replace(self.training, **{key: value for key, value in changes.items() if value is not None})
        methods = {name: method.for_compiler() if training.compile else method for name, method in self.methods.items()}
        return replace(self, training=training, methods=methods)

    @property
    def baseline(self) -> str:
        """The first of the report's baselines, or the first method if there are none."""
        return next(iter([*self.report.baselines, *self.methods]))

    def method(self, name: str) -> Method:
        """Return the method called `name`, or raise an error that lists all names."""
        if name not in self.methods:
            raise ArgumentError(f"{self.name}: {unknown('method', name, self.methods)}")
        return self.methods[name]


def experiment_names() -> list[str]:
    """Return the sorted names of the experiments in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def get_experiment(name: str, settings: Sequence[str] = ()) -> Experiment:
    """Read the experiment called `name`, or the file `name` if the name ends in .toml.

    Args:
        name: One of `experiment_names`, or the path of a file.
        settings: Changes like `training.precision=bf16`: dotted keys with TOML values.
    """
    if not name.endswith(".toml") and name not in experiment_names():
        raise ArgumentError(unknown("experiment", name, [*experiment_names(), "a path to a .toml file"]))
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not TOML, not UTF-8, too many digits, too deep
        raise ArgumentError(f"cannot read experiment '{path}': {error}") from error
    return parse_experiment(changed(table, settings), str(path))


def changed(table: Mapping[str, Any], settings: Sequence[str]) -> Mapping[str, Any]:
    """Return a file's tables with some keys set; a part that changes its kind loses its settings."""
    found = deepcopy(dict(table))
    for setting in settings:
        key, sign, text = setting.partition("=")
        *path, last = key.strip().split(".")
        if not sign or not last:
            raise ArgumentError(f"a setting must be KEY=VALUE such as training.precision=bf16, got {setting!r}")
        here: Any = found
        for number, word in enumerate(path):
            if path[0] == "methods" and number == 1:
                require_choice("method", word, tuple(here))
            here = here.setdefault(word, {})
            if not isinstance(here, dict):
                raise ArgumentError(f"{'.'.join(path[: number + 1])} is no table, so {setting!r} cannot be set")
        value = _toml_value(text.strip())
        if last == "kind" and here.get("kind") != value:
            here.clear()
        here[last] = value
    return found


def parse_options(settings: Sequence[str], options: Mapping[str, Any] | None = None) -> DeviceOptions:
    """Build device options from the table `training` and settings like `training.precision=bf16`."""
    table = changed({"training": options or {}}, settings)
    if others := [key for key in table if key != "training"]:
        raise ArgumentError(f"--set {others[0]}: no experiment file is used here, so only training.KEY can be set")
    return build_table(DeviceOptions, table["training"], "training")


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if re.fullmatch(r"[\w./+-]+", text):  # a shell removes quotes
            return text
        raise ArgumentError(f"{text!r} is no value of TOML: {error}") from error


def parse_experiment(table: Mapping[str, Any], where: str) -> Experiment:
    """Build an experiment from a file's tables; raise if a key, type or value is wrong, before any run."""
    values = dict(table)
    for key, kind in (("optimizer", "sgd"), ("task", "classification")):
        entry = values.get(key, {})
        values[key] = {"kind": kind, **entry} if isinstance(entry, Mapping) else entry
    try:
        task = _part(values["task"], TASKS).kind
    except ArgumentError as error:
        raise ArgumentError(f"{where}: task: {error}") from error
    values.setdefault("metric", asdict(TASKS[task].metrics[0]))
    experiment = build_table(Experiment, values, where)
    known, metric = [each.name for each in TASKS[task].metrics], experiment.metric.name
    if metric not in known:  # all values of this metric would be missing
        raise ArgumentError(
            f"{where}: metric.name must be one of {', '.join(known)} for the task {task!r}, got {metric!r}"
        )
    if not experiment.methods:
        raise ArgumentError(f"{where}: needs at least one [methods.NAME]")
    if experiment.report.customary is not None:
        experiment.method(experiment.report.customary)  # raises if the method is unknown
    for name in (experiment.name, *experiment.methods):  # these become folders
        require_name(where, name)
    return experiment.with_training()


def require_name(where: str, name: str) -> None:
    """Raise unless `name` is safe as the name of a file or folder."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise ArgumentError(
            f"{where}: a name must be up to 100 letters, digits, '_', '-' and '.', got {name[:60]!r}"
            + (f" and {len(name) - 60} characters more" if len(name) > 60 else "")
        )


def build_estimator(part: Part, training: DeviceOptions, loss_fn: Callable[[Any, Any], Tensor]) -> Estimator:
    """Build an estimator; if it measures per-sample norms, it does so in the run's mode."""
    settings = dict(part.settings)
    if ESTIMATORS[part.kind].takes("compiled"):
        settings = {"mode": training.norms, "compiled": training.compile, **settings}
    if ESTIMATORS[part.kind].takes("loss_fn"):
        settings["loss_fn"] = loss_fn
    return make_estimator(part.kind, **settings)


def build_policy(part: Part, total_samples: int) -> Policy:
    """Build a policy; fill in the settings that follow from the run's length."""
    known = {"total_samples": total_samples}
    own = POLICIES[part.kind].run_settings if part.kind in POLICIES else ()
    return make_policy(part.kind, **{name: known[name] for name in own}, **part.settings)
