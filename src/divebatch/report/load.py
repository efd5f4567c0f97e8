"""Find and read the runs under a folder by experiment and method, leaving out bad files."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from divebatch.errors import RecordError
from divebatch.records import EpochRecord, Metric, ReportSettings, RunHeader, read_run


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recorded trial: its header and its epochs so far, in order."""

    header: RunHeader
    epochs: tuple[EpochRecord, ...]

    @property
    def last(self) -> EpochRecord | None:
        return self.epochs[-1] if self.epochs else None

    @property
    def planned_epochs(self) -> int | None:
        """Return the number of configured epochs; None: the configuration names none."""
        planned = self.header.config.get("epochs")
        return planned if isinstance(planned, int) else None

    def is_finished(self, *, length: int | None = None) -> bool:
        """Return whether the run reached its configured number of epochs, or else `length` epochs."""
        end = self.planned_epochs or length
        return self.last is not None and end is not None and self.last.epoch >= end

    @property
    def is_on_gpu(self) -> bool:
        """Return whether the run used an NVIDIA or AMD GPU, both of which torch calls cuda."""
        return str(self.header.hardware.get("device", "")).startswith("cuda")

    @property
    def machine(self) -> str:
        return str(self.header.hardware.get("name", self.header.hardware.get("device", "?")))

    @property
    def batch_sizes(self) -> list[int]:
        """Return all batch sizes in order, including changes within epochs."""
        sizes: list[int] = []
        began = self._configured("method", "batch_size")
        for record in self.epochs:
            sizes += [began] if record.changes and isinstance(began, int) else []
            sizes += [change.batch_size for change in record.changes or []] or [record.batch_size]
            began = record.next_batch_size
        return sizes

    def kind_of(self, *place: str) -> str | None:
        """Return the `kind` of a configured part, such as ("method", "policy"); None: the part is missing."""
        kind = self._configured(*place, "kind")
        return kind if isinstance(kind, str) else None

    def _configured(self, *place: str) -> object:
        part: object = self.header.config
        for key in place:
            part = part.get(key) if isinstance(part, Mapping) else None
        return part


@dataclass(frozen=True, slots=True)
class RecordedExperiment:
    """The trials of an experiment.

    Args:
        name: The experiment's name.
        methods: The runs of each method by seed, with methods in the order of the report.
        metric: The metric by which runs are judged.
        settings: The report's settings from the headers.
    """

    name: str
    methods: Mapping[str, tuple[RecordedRun, ...]]
    metric: Metric
    settings: ReportSettings

    @property
    def runs(self) -> list[RecordedRun]:
        return [run for runs in self.methods.values() for run in runs]

    @property
    def longest(self) -> int:
        """Return the highest epoch that any run reached, or 0."""
        return max((run.last.epoch for run in self.runs if run.last), default=0)

    @property
    def length(self) -> int:
        """Return the largest configured number of epochs, or else the epochs of the longest run."""
        return max((run.planned_epochs or 0 for run in self.runs), default=0) or self.longest

    @property
    def machines(self) -> list[str]:
        return sorted({run.machine for run in self.runs})


@dataclass(frozen=True, slots=True)
class Runs:
    """The experiments under some folders, and the reasons why files were left out."""

    experiments: tuple[RecordedExperiment, ...]
    problems: tuple[str, ...]


def load_runs(folder: Path, *more: Path) -> Runs:
    """Read the runs below some folders; raise `RecordError` if there is none.

    Names come from the records, not from the folders. `problems` names files that cannot be read, that a killed run
    left half-written, or that repeat a run.

    Args:
        folder: A folder of EXPERIMENT/METHOD/seed-K.jsonl, or the folder of an experiment or a method in it.
        more: Further folders of the same kind. A run in several folders counts once.
    """
    folders = (folder, *more)
    found: dict[tuple[str, str, int], RecordedRun] = {}
    problems: list[str] = []
    for path in _record_files(folders):
        try:
            run = _read(path)
        except RecordError as error:
            problems.append(str(error))
            continue
        header = run.header
        key = (header.experiment, header.method, header.seed)
        if key in found:
            problems.append(f"'{path}': a second run of {key[0]}, {key[1]}, seed {key[2]}; the first one counts")
        else:
            found[key] = run
            problems += _torn_line(path)
    if not found:
        places = ", ".join(f"'{each}'" for each in folders)
        if problems:
            raise RecordError(f"no readable run in {places}: " + "; ".join(problems))
        raise RecordError(f"no run in {places}: expected files like {folder}/EXPERIMENT/METHOD/seed-0.jsonl")
    by_experiment: dict[str, list[RecordedRun]] = defaultdict(list)
    for run in found.values():
        by_experiment[run.header.experiment].append(run)
    experiments = tuple(_experiment(name, by_experiment[name], problems) for name in sorted(by_experiment))
    return Runs(experiments, tuple(problems))


def _record_files(folders: Sequence[Path]) -> list[Path]:
    """Return each file once, even if one folder lies in another."""
    files: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RecordError(f"'{folder}' is not a folder")
        patterns = ("seed-*.jsonl", "*/seed-*.jsonl", "*/*/seed-*.jsonl")
        for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
            files.setdefault(path.resolve(), path)
    return list(files.values())


def _read(path: Path) -> RecordedRun:
    header, epochs = read_run(path)
    shadows = {name for record in epochs for name in record.shadows or {}}
    for name in (header.experiment, header.method, header.label, *shadows):
        if not name.isprintable():  # a terminal would execute control characters
            raise RecordError(f"'{path}': names must be printable text, got {name!r}")
    return RecordedRun(header, tuple(epochs))


def _torn_line(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        is_whole = file.read(1) == b"\n"
    return [] if is_whole else [f"'{path}': the last line is half-written; that line is left out, the rest counts"]


def _experiment(name: str, runs: list[RecordedRun], problems: list[str]) -> RecordedExperiment:
    """Group an experiment's runs with the metric and settings of the last started run; leave out other metrics."""
    newest = max(runs, key=lambda run: run.header.started or "").header
    methods: dict[str, list[RecordedRun]] = defaultdict(list)
    for run in runs:
        header = run.header
        if header.metric == newest.metric:
            methods[header.method].append(run)
        else:
            judged = f"judged by {header.metric.name}, newer runs by {newest.metric.name}; left out"
            problems.append(f"{name}, {header.method}, seed {header.seed}: {judged}")
    order = newest.report.order
    names = sorted(methods, key=lambda method: (order.index(method) if method in order else len(order), method))
    by_seed = {each: tuple(sorted(methods[each], key=lambda run: run.header.seed)) for each in names}
    return RecordedExperiment(name, by_seed, newest.metric, newest.report)
