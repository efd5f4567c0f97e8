"""The seconds of each recorded course on more devices: a model, not a measurement.

A step on one device takes a fixed time and a time for each sample: a straight line through the step times of the
records, or of a file. On N devices each has ceil(b / N) samples of a batch of b, and the gradients are added up as
`network` says. What measuring added to a step here is added there, too.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, median

from divebatch.errors import RecordError
from divebatch.report.analysis import Analysis, MethodResult
from divebatch.report.courses import EpochCourse, course_of
from divebatch.report.network import (
    BACKWARD_SHARE,
    BYTES_OF_A_GRADIENT,
    DEVICES_OF_A_MACHINE,
    EFFICIENCY,
    INFINIBAND,
    NVLINK,
    all_reduce,
    overlapped,
)
from divebatch.report.runs import RecordedRun
from divebatch.report.tables import MISSING, Table, seconds
from divebatch.step_line import Line, line_misfit, step_line

DEVICES = (8, 64, 512)
StepTime = tuple[float, float]
"""(samples of a step, its seconds on one device)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInputs:
    """What the model takes that records may not hold.

    Args:
        step_times: (samples of a step, its seconds on one device) at several sizes; empty: as the records have them.
        num_parameters: Of the runs whose records do not say how many were trained.
    """

    step_times: Sequence[StepTime] = ()
    num_parameters: int | None = None


FROM_RECORDS = DeviceInputs()


@dataclass(frozen=True, slots=True)
class Untold:
    """There is no model, and this is why."""

    reason: str

    @property
    def note(self) -> str:
        """The reason as a sentence."""
        return f"On more devices: cannot be told, because {self.reason}."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """Says what a recorded course would take on so many devices."""

    times: tuple[StepTime, ...]
    source: str
    """Where the step times come from, in words."""
    measuring: Mapping[str, float] = field(default_factory=dict)
    """Method -> seconds that measuring adds to a step."""
    num_parameters: int | None = None
    """Of the runs that do not say it themselves."""

    @property
    def line(self) -> Line:
        """(seconds of a step whatever its size, seconds for each of its samples)."""
        return _line(self.times)

    def step_seconds(self, samples: float, devices: int, num_parameters: int) -> float:
        """Of one step that measures nothing; with fewer samples than devices only so many of them work."""
        fixed, per_sample = self.line
        share, working = math.ceil(samples / devices), min(devices, max(1, math.ceil(samples)))
        network = all_reduce(working, float(BYTES_OF_A_GRADIENT * num_parameters))
        return overlapped(fixed + per_sample * share, network)

    def seconds(self, run: RecordedRun, devices: int) -> float:
        """Of a run's whole course, without evaluation and compilation."""
        return sum(self._epoch_seconds(run, epoch, devices) for epoch in course_of(run))

    def _epoch_seconds(self, run: RecordedRun, epoch: EpochCourse, devices: int) -> float:
        count = parameters_of(run, self.num_parameters) or 0
        steps = sum(number * self.step_seconds(size, devices, count) for number, size in epoch.steps)
        return steps + (epoch.num_steps * self.measuring.get(run.header.method, 0.0) if epoch.measured else 0.0)


@cache  # asked for at every step of every course
def _line(times: tuple[StepTime, ...]) -> Line:
    return step_line(times)


def parameters_of(run: RecordedRun, otherwise: int | None) -> int | None:
    """How many a run trains: what its records say, else `otherwise`."""
    return otherwise if run.header.num_parameters is None else run.header.num_parameters


def device_model(runs: Sequence[RecordedRun], *, inputs: DeviceInputs = FROM_RECORDS) -> DeviceModel | Untold:
    """The model for some runs, or why there is none.

    Args:
        runs: Those of an experiment.
        inputs: What the records do not hold.
    """
    if any(parameters_of(run, inputs.num_parameters) is None for run in runs):
        return Untold("the records do not say how many parameters were trained")
    machine, alone = _machine_with_most_sizes(runs)
    recorded = _plain_times(alone)
    if inputs.step_times:
        times, source = tuple(inputs.step_times), "a file"
    elif len(recorded) > 1:
        times, source = tuple(recorded[size] for size in sorted(recorded)), f"runs on {machine}"
    else:
        return Untold(
            "it takes the step times of two batch sizes, and the epochs that measured nothing on one device have "
            f"those of {len(recorded) or 'none'}"
        )
    measuring = _measuring(alone, recorded, _line(times))
    return DeviceModel(times=times, source=source, measuring=measuring, num_parameters=inputs.num_parameters)


# Step times in the records

Recorded = Mapping[int, StepTime]
"""Batch size -> the median of what its steps held and took, over all epochs of all runs."""


def _machine_with_most_sizes(runs: Sequence[RecordedRun]) -> tuple[str, list[RecordedRun]]:
    """The times of several devices do not make one line; nor do those of several ranks, which hold their network."""
    machines: dict[str, list[RecordedRun]] = defaultdict(list)
    for run in runs:
        if run.header.hardware.get("ranks", 1) == 1:
            machines[run.machine].append(run)
    name = max(sorted(machines), key=lambda machine: len(_plain_times(machines[machine])), default="")
    return name, machines.get(name, [])


def _plain_times(runs: Sequence[RecordedRun]) -> Recorded:
    """Of epochs at one size in which nothing was measured."""
    found: dict[int, list[StepTime]] = defaultdict(list)
    for run in runs:
        for epoch in course_of(run):
            if epoch.batch_size is not None and epoch.step_seconds is not None and not epoch.measured:
                found[epoch.batch_size].append((epoch.samples_of_a_step, epoch.step_seconds))
    # A median: the first epoch at a size is slow, and so is one that something else disturbed.
    return {size: (median(x for x, _ in pairs), median(y for _, y in pairs)) for size, pairs in found.items()}


def _measuring(runs: Sequence[RecordedRun], recorded: Recorded, line: Line) -> dict[str, float]:
    """Method -> the median of what its measured steps took longer than others of their size, at least 0."""
    longer: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for epoch in course_of(run):
            if epoch.measured and epoch.batch_size is not None and epoch.step_seconds is not None:
                _, plain = recorded.get(epoch.batch_size, (0.0, line[0] + line[1] * epoch.samples_of_a_step))
                longer[run.header.method].append(epoch.step_seconds - plain)
    return {method: max(0.0, median(values)) for method, values in longer.items()}


# Step times in a file


def read_step_times(path: Path) -> list[StepTime]:
    """The step times in what `divebatch advise` writes; raises `RecordError` where there are not at least two.

    Args:
        path: A JSON object with `step_seconds`, a list of objects with `batch_size` and `seconds`.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["step_seconds"]
        times = sorted((float(row["batch_size"]), float(row["seconds"])) for row in rows)
    except OSError as error:
        raise RecordError(f"cannot read '{path}': {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"'{path}' holds no step times as advice has them: {type(error).__name__} {error}") from error
    is_good = all(0 < size < math.inf and 0 < each < math.inf for size, each in times)
    if len(dict(times)) < 2 or not is_good:
        raise RecordError(f"'{path}' must have positive step times of two or more batch sizes, got {times[:5]}")
    return times


# As a table


def devices_table(analysis: Analysis, model: DeviceModel) -> Table:
    """Seconds of each method's course here and on more devices, means over the trials that count.

    Args:
        analysis: The experiment's, from `analyse`.
        model: That of its runs.
    """
    columns = ["method", "measured here", "model: 1 device", *(f"model: {count} devices" for count in DEVICES)]
    columns += ["measuring adds, ms a step"]
    rows = [
        [
            result.method,
            _text(result.final_mean("train_seconds")),
            *(_text(_mean_seconds(result, model, count)) for count in (1, *DEVICES)),
            f"{1e3 * model.measuring[result.method]:.2f}" if result.method in model.measuring else MISSING,
        ]
        for result in analysis.methods
    ]
    title = f"{analysis.experiment.name}: training s on more devices (a model, not a measurement)"
    return Table(title, columns, rows, list(assumptions(model)))


def _mean_seconds(result: MethodResult, model: DeviceModel, devices: int) -> float | None:
    begun = [run for run in result.runs if run.epochs]
    return fmean(model.seconds(run, devices) for run in begun) if begun else None


def _short(value: float) -> str:
    """Seconds with three digits in a unit that suits them."""
    unit, scale = next(((unit, scale) for unit, scale in (("s", 1), ("ms", 1e3)) if value * scale >= 1), ("us", 1e6))
    return f"{value * scale:.3g} {unit}"


def _text(value: float | None) -> str:
    return MISSING if value is None else seconds(value)


def assumptions(model: DeviceModel) -> Iterator[str]:
    """What the model takes for granted, in sentences."""
    (fixed, per_sample), sizes = model.line, [size for size, _ in model.times]
    yield "A model, not a measurement: no time on more devices was measured."
    yield (
        f"A step on one device takes {_short(fixed)} and {_short(per_sample)} a sample: a straight line "
        f"through the step times of {model.source} at {len(sizes)} sizes, {min(sizes):.0f} to {max(sizes):.0f} "
        f"samples, which are off it by up to {line_misfit(model.times):.0%}. Below {min(sizes):.0f} samples the line "
        "goes on unmeasured, so that a step of few takes little more than the fixed time."
    )
    yield (
        "On N devices, each like the one here, a batch of b samples is ceil(b / N) on each; of a batch below N each "
        "of b devices has one sample, and the others wait."
    )
    yield (
        f"Gradients of {BYTES_OF_A_GRADIENT} bytes a parameter are added up in every step, by ring or tree, whichever "
        f"is quicker, in machines of {DEVICES_OF_A_MACHINE}: {NVLINK.bandwidth / 1e9:.0f} GB/s and "
        f"{1e6 * NVLINK.hop:.0f} us a hop within (NVLink), {INFINIBAND.bandwidth / 1e9:.0f} GB/s and "
        f"{1e6 * INFINIBAND.hop:.0f} us between (InfiniBand), {EFFICIENCY:.0%} of the data sheets' bandwidth. That is "
        f"hidden behind the backward pass, {BACKWARD_SHARE:.0%} of the compute; what takes longer adds to the step."
    )
    yield (
        "Measuring adds to each measured step what it added here (median of the method's measured epochs), on any "
        "number of devices."
    )
    yield (
        "Sizes, steps and results are those recorded here, and loading data keeps up. BatchNorm over the fewer samples "
        "of each device may change results; that is not in the model. Intervals over seeds do not hold its errors."
    )
