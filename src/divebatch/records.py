"""Run records: one JSON object a line, first the run, then its epochs. This module does not import torch."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Self, get_args, get_origin, get_type_hints

from divebatch.errors import ArgumentError, RecordError

LAST_BYTES = 4096
"""The length of the file's end that is searched for the line of a stop."""
LARGEST_COUNT = 2**63
"""An upper bound for all counts of samples, steps and bytes."""
TOO_LARGE = 10**300
"""The size from which whole numbers no longer fit into a float."""


MetricName = Literal["val_accuracy", "val_loss", "bits_per_byte"]
WORDS = {"val_accuracy": "accuracy", "val_loss": "loss", "bits_per_byte": "bits per byte"}


@dataclass(frozen=True, slots=True)
class Metric:
    """The number by which a run is judged.

    Args:
        name: A field of `EpochRecord`: "val_accuracy" (from 0 to 1), "val_loss" or "bits_per_byte".
        better: Whether a "higher" or a "lower" value is better.
    """

    name: MetricName = "val_accuracy"
    better: Literal["higher", "lower"] = "higher"

    def __post_init__(self) -> None:
        for key, known in (("name", get_args(MetricName)), ("better", ("higher", "lower"))):
            if getattr(self, key) not in known:
                raise ArgumentError(f"a metric's {key} must be one of {', '.join(known)}, got {getattr(self, key)!r}")

    @property
    def is_accuracy(self) -> bool:
        """Whether the metric is a fraction from 0 to 1, which is shown in percent."""
        return self.name == "val_accuracy"

    @property
    def word(self) -> str:
        """The metric's name as used in a sentence."""
        return WORDS[self.name]

    @property
    def loss_word(self) -> str:
        """The name of a loss in the unit of this metric, if there is such a loss."""
        return self.word if self.name == "bits_per_byte" else WORDS["val_loss"]

    @property
    def loss_factor(self) -> float:
        """The factor that converts a loss in nats to the unit of this metric."""
        return 1 / math.log(2) if self.name == "bits_per_byte" else 1.0

    @property
    def higher_is_better(self) -> bool:
        return self.better == "higher"

    def of(self, record: Any) -> float | None:
        """Return the metric's value in an `EpochRecord`; None if there is no finite one."""
        value: float | None = getattr(record, self.name)
        return value if value is not None and math.isfinite(value) else None

    def text(self, value: float) -> str:
        """Return a value with its unit, for instance `92.83 %` for an accuracy, or `1.0826` for a loss."""
        return f"{100 * value:.2f} %" if self.is_accuracy else f"{value:.5g}"

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of the values; None if there are none."""
        return (max if self.higher_is_better else min)(values, default=None)

    @property
    def worst(self) -> float:
        """The value of a run that diverged: an accuracy of 0, or an infinite loss."""
        return 0.0 if self.higher_is_better else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """Settings of an experiment's report. They do not change the training.

    Args:
        baselines: Methods to compare the others with. The first one that has finished sets the common target.
        order: Methods in the order of tables and figures; methods that are not listed follow by name.
        chance: The metric's value for a model that has learned nothing. None: not known.
        figures: The paper's figures in this experiment, each with its methods; an empty list means all.
        customary: The method with the batch size that is the usual choice. None: there is none.
    """

    baselines: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    chance: float | None = None
    figures: dict[str, list[str]] = field(default_factory=dict)
    customary: str | None = None

    def __post_init__(self) -> None:
        for names in (self.baselines, self.order, *self.figures.values()):
            if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
                raise ArgumentError(
                    f"baselines, order and figures must be lists of method names, got {repr(names)[:60]}"
                )


class Change(NamedTuple):
    """A change within an epoch: the size and rate from optimizer step `step` on, counted from the start of training."""

    step: int
    batch_size: int
    lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """Settings, versions and hardware of a run, enough to repeat the run.

    Args:
        experiment: The experiment's name.
        method: The method's name, one of the experiment's.
        seed: The seed of the run's random numbers.
        label: The method in words, for legends; the method's name if empty.
        metric: The number by which the run is judged.
        report: Settings of the experiment's report.
        config: All settings of the run.
        versions: Versions of the installed packages.
        hardware: The hardware used: `device`, `name` and so on.
        num_parameters: The number of trained parameters. None: not known.
        git_commit: The commit of the source. None: not known.
        started: The start time, as ISO 8601.
    """

    experiment: str
    method: str
    seed: int
    label: str = ""
    metric: Metric = field(default_factory=Metric)
    report: ReportSettings = field(default_factory=ReportSettings)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    num_parameters: int | None = None
    git_commit: str | None = None
    started: str | None = None

    def to_json(self) -> str:
        """Return the object as one line of JSON, without the line end."""
        return _line("run", self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the object from a parsed line; keys of later versions are ignored."""
        known = _known(cls, values)
        for key, kind in (("metric", Metric), ("report", ReportSettings)):
            if key in known:
                known[key] = kind(**_known(kind, known[key]))
        return cls(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """A finished epoch. None: not measured, or a number that JSON cannot hold (NaN, infinity).

    Args:
        epoch: The epoch's number, from 1.
        batch_size: The batch size in samples; the last one if `changes` has several.
        lr: The rate of the first parameter group in the epoch's first step, such as 0 at the beginning of a warm-up by
            steps. If there are `changes`, the first rate after the last of them.
        steps: Optimizer steps since the start of training.
        samples: Samples seen since the start of training.
        train_loss: The epoch's mean training loss.
        val_loss: The mean loss over held-out data after the epoch.
        val_accuracy: The fraction of held-out samples classified correctly, 0 to 1. None: there are no classes.
        bits_per_byte: The bits that the model needs for a byte of held-out text.
        diversity: The estimator's measurement of the epoch, or since the last of `changes` if there are any.
        diversity_low: The lower end of its 95 % interval, if the estimator has one.
        diversity_high: The upper end. None beside a lower end: there is none.
        noise_scale: The measurement as a noise scale in samples, if it is an estimate at fixed weights. If its interval
            begins at 0 and has no end, the value may be anything, and is not printed.
        noise_scale_low: The lower end of its 95 % interval.
        noise_scale_high: The upper end. None beside a lower end: there is none.
        exact_diversity: The diversity of all data at the weights at the end of the epoch.
        train_seconds: Time since the start of training, without evaluation and compilation.
        total_seconds: Time since the start of training, all included.
        peak_memory_bytes: The device's peak in this epoch on a GPU, the process's peak so far on a CPU.
        eval_seconds: Time spent evaluating since the start of training.
        compile_seconds: Time spent compiling since the start of training.
        measure_seconds: The part of `train_seconds` between each epoch's last step and the decision.
        recompiles: Distinct shapes compiled since the start of training.
        micro_batch_size: Samples of one backward pass.
        measured: Whether gradients were measured in this epoch. None: no epoch needs a measurement.
        skipped_samples: Samples left out of the measurement: their gradients were not finite, or no step was made on
            them.
        next_batch_size: The batch size decided for the next epoch.
        next_lr: The learning rate that belongs to that size.
        lr_owed: The factor by which the next decision raises the rate if the size stays. None: no raise is due.
        reason: The reason for the decision, in words.
        shadows: The next batch sizes that watching policies would have chosen, by name.
        changes: The changes within the epoch, in JSON [step, batch size, learning rate] each. None: there were none.
    """

    epoch: int
    batch_size: int
    lr: float
    steps: int
    samples: int
    train_loss: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    bits_per_byte: float | None = None
    diversity: float | None = None
    diversity_low: float | None = None
    diversity_high: float | None = None
    noise_scale: float | None = None
    noise_scale_low: float | None = None
    noise_scale_high: float | None = None
    exact_diversity: float | None = None
    train_seconds: float | None = None
    total_seconds: float | None = None
    peak_memory_bytes: int | None = None
    eval_seconds: float | None = None
    compile_seconds: float | None = None
    measure_seconds: float | None = None
    recompiles: int | None = None
    micro_batch_size: int | None = None
    measured: bool | None = None
    skipped_samples: int | None = None
    next_batch_size: int | None = None
    next_lr: float | None = None
    lr_owed: float | None = None
    reason: str = ""
    shadows: Mapping[str, int] | None = None
    changes: list[Change] | None = None

    def to_json(self) -> str:
        """Return the object as one line of JSON, without the line end."""
        return _line("epoch", self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the object from a parsed line; keys of later versions are ignored."""
        known = _known(cls, values)
        if known.get("changes") is not None:
            known["changes"] = _changes(known["changes"])
        if not all(type(size) is int and size < TOO_LARGE for size in (known.get("shadows") or {}).values()):
            raise RecordError(f"shadows must be names with batch sizes, got {repr(known['shadows'])[:60]}")
        return cls(**known)

    def __str__(self) -> str:
        """Return a line such as `epoch 3  noise scale 812 (640-990)  batch 128 -> 256  lr 0.1 -> 0.2`.

        If the size became 64 and then 128 within the epoch, the line has `batch to 64 then 128 -> 256`. The reason is
        shown only if it explains why nothing changes.
        """
        seen = seen_in_words(self)
        left_out = f"{self.skipped_samples} samples left out" if self.skipped_samples else ""
        return "  ".join(filter(None, [f"epoch {self.epoch}", seen, left_out, self._batch(seen), self._rate()]))

    def _batch(self, seen: str) -> str:
        sizes = [change.batch_size for change in self.changes or ()]
        sizes = [size for before, size in zip([None, *sizes], sizes, strict=False) if size != before]
        earlier = sizes[:-1] if len(sizes) < 5 else [sizes[0], "..."]
        text = " ".join(["batch to" if sizes else "batch", *(f"{size} then" for size in earlier), str(self.batch_size)])
        if self.next_batch_size not in (None, self.batch_size):
            return f"{text} -> {self.next_batch_size}"
        why = "" if seen == UNCLEAR else f" ({self.reason.removesuffix(': no change')})"
        return f"{text}, no change{why}" if self.reason else text

    def _rate(self) -> str:
        now, after = f"{self.lr:g}", f"{self.lr if self.next_lr is None else self.next_lr:g}"
        text = f"lr {now}" if after == now else f"lr {now} -> {after}"
        return text if self.lr_owed is None else f"{text} (times {self.lr_owed:.4g} a decision later)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStop:
    """The last line of a run that was asked to stop and has saved its state; a resume removes the line.

    Args:
        reason: The cause and the place, in words.
    """

    reason: str = ""

    def to_json(self) -> str:
        """Return the object as one line of JSON, without the line end."""
        return _line("stop", self)


class RecordWriter:
    """A writer of one run's file; each line is flushed and synced to disk before `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise RecordError(f"cannot write records to '{path}': {error.strerror}. Choose another folder.") from error

    def write(self, record: RunHeader | EpochRecord | RunStop) -> None:
        """Append one record."""
        self._require_own_file()
        try:
            self._file.write(record.to_json() + "\n")
            self._file.flush()
            # A checkpoint must never contain an epoch that a crash removed from the records.
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RecordError(f"cannot write records to '{self.path}': {error.strerror}") from error

    def _require_own_file(self) -> None:
        """Raise if an editor or `sed -i` has replaced the file: later lines would be lost."""
        try:
            is_there = os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except OSError:
            is_there = False
        if not is_there:
            raise RecordError(
                f"'{self.path}' was removed or replaced while its run was writing: its later epochs are in no records"
            )

    def close(self) -> None:
        """Close the file; `write` has already raised the error of a full disk."""
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_run(path: Path) -> tuple[RunHeader, list[EpochRecord]]:
    """Read one run's file. An incomplete last line of a killed run is dropped; any other flaw raises an error."""
    try:
        if path.exists() and not path.is_file():
            raise RecordError(f"cannot read '{path}': it is not a file")  # a pipe would never end
        # Line by line: parsing all lines of a long run at once needs several times the memory of its records.
        with path.open(encoding="utf-8", newline="\n") as file:
            return _read_lines(path, file)
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"cannot read '{path}': {error}") from error


def _read_lines(path: Path, lines: Iterable[str]) -> tuple[RunHeader, list[EpochRecord]]:
    whole = ((number, line) for number, line in enumerate(lines, 1) if line.endswith("\n") and line != "\n")
    values = (_parse(path, number, line) for number, line in whole)
    first = next(values, {})
    if first.get("kind") != "run":
        raise RecordError(f"'{path}' is not a run record: its first line is not of kind 'run'")
    try:
        header = RunHeader.from_dict(first)
        epochs = [EpochRecord.from_dict(value) for value in values if value.get("kind") == "epoch"]
        for before, epoch in pairwise([0, *(record.epoch for record in epochs)]):
            if epoch <= before:
                raise RecordError(f"epoch {epoch} follows epoch {before}")
        return header, epochs
    except TypeError as error:
        raise RecordError(f"'{path}' lacks a key: {error}") from error
    except (RecordError, ArgumentError) as error:
        raise RecordError(f"'{path}': {error}") from error


def was_stopped(path: Path) -> bool:
    """Return whether the last line says that the run was asked to stop, and the run was not resumed since."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        last = file.read().splitlines()[-1:]
    return bool(last) and last[0].startswith(b'{"kind": "stop"')


def _cut_torn_line(path: Path) -> None:
    """Remove the incomplete last line of a killed run: appending would join the next line to it."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets too deep
        what = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise RecordError(f"'{path}', line {number}: not JSON ({what})") from error
    if not isinstance(value, dict):
        raise RecordError(f"'{path}', line {number}: not a JSON object")
    return value


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no number in JSON")


def _line(kind: str, record: RunHeader | EpochRecord | RunStop) -> str:
    values = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    plain = {name: asdict(value) if is_dataclass(value) else value for name, value in values.items()}  # type: ignore[arg-type]
    # Python would write NaN, which is not JSON: other readers refuse the line.
    return json.dumps({"kind": kind, **finite(plain)}, allow_nan=False)


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None, at any depth, so that any reader accepts the JSON."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _known(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = _KINDS[cls]
    known = {key: value for key, value in values.items() if key in kinds}
    for key, value in known.items():
        if not isinstance(value, kinds[key]) or (isinstance(value, bool) and bool not in kinds[key]):
            names = " or ".join(kind.__name__ for kind in kinds[key])
            raise RecordError(f"{key} must be {names}, got {repr(value)[:60]}")
        if isinstance(value, int) and abs(value) >= LARGEST_COUNT:
            raise RecordError(f"{key} is too large a number, of {len(str(value))} digits")
        if isinstance(value, float) and not abs(value) < TOO_LARGE:
            if type(None) not in kinds[key]:
                raise RecordError(f"{key} is too large a number: {value:g}")
            known[key] = None  # like a number that JSON cannot hold
    return known


def _changes(values: list[Any]) -> list[Change]:
    """Build changes from JSON's lists of three numbers."""
    for value in values:
        is_three = isinstance(value, list) and len(value) == 3
        if not (is_three and all(type(number) in (int, float) and abs(number) < TOO_LARGE for number in value)):
            raise RecordError(f"changes must be [step, batch size, lr] each, got {repr(values)[:60]}")
    return [Change(*value) for value in values]


def _kinds(hint: Any) -> tuple[type, ...]:
    """Return the types that JSON may hold for a field; an int is accepted as a float."""
    if get_origin(hint) is Literal:
        return (str,)
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    plain = tuple(dict if is_dataclass(option) else get_origin(option) or option for option in options)
    return (*plain, int) if float in plain else plain


_KINDS: dict[type, dict[str, tuple[type, ...]]] = {
    cls: {name: _kinds(hint) for name, hint in get_type_hints(cls).items()}
    for cls in (RunHeader, EpochRecord, Metric, ReportSettings)
}


# An epoch's record in words

UNCLEAR = "noise scale unclear"


def seen_in_words(record: EpochRecord) -> str:
    """Return the policy's input in words: the noise scale or the diversity; the loss if gradients are not measured."""
    value, low, high = record.noise_scale, record.noise_scale_low, record.noise_scale_high
    if value is not None and low is not None and high is not None:
        return f"noise scale {value:.0f} ({low:.0f}-{high:.0f})"
    if low is not None:
        # Without an upper end, ||G||^2 cannot be distinguished from zero, and the value may be anything.
        return f"noise scale > {low:.0f}" if low > 0 else UNCLEAR
    if value is not None:
        return f"noise scale {value:.0f}"
    if record.diversity is not None:
        return f"diversity {record.diversity:.4g}"
    if record.measured is not None:
        return UNCLEAR if record.measured else "not measured"
    return "" if record.train_loss is None else f"loss {record.train_loss:.4g}"
