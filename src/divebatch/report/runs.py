"""Find and read the runs under a folder, grouped by experiment and method. One bad file never spoils the rest."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from divebatch.errors import RecordError
from divebatch.records import EpochRecord, RunHeader, read_run

METHOD_ORDER = (
    *("sgd-small", "sgd-large", "sgd-large-rescaled", "sgd-large-warmup", "sgd-tuned"),
    *("adabatch", "adabatch-rescaled", "divebatch", "divebatch-rescaled", "divebatch-every-epoch", "oracle"),
)
"""These come first, in this order; other methods follow by name."""

REQUIRED_NUMBERS = ("epoch", "batch_size", "lr", "steps", "samples")
OPTIONAL_NUMBERS = (
    *("train_loss", "val_loss", "val_accuracy", "diversity", "exact_diversity", "train_seconds", "eval_seconds"),
    *("compile_seconds", "recompiles", "peak_memory_bytes"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One trial: its header and its epochs in order, perhaps none yet."""

    header: RunHeader
    epochs: tuple[EpochRecord, ...]

    @property
    def last(self) -> EpochRecord | None:
        """The last finished epoch."""
        return self.epochs[-1] if self.epochs else None

    @property
    def planned_epochs(self) -> int | None:
        """How many epochs its configuration asks for, where it says so."""
        planned = self.header.config.get("epochs")
        return planned if isinstance(planned, int) else None

    @property
    def is_on_gpu(self) -> bool:
        """Whether it ran on an NVIDIA or AMD GPU, both of which torch calls cuda."""
        return str(self.header.hardware.get("device", "")).startswith("cuda")

    @property
    def batch_sizes(self) -> list[float]:
        """All that were in force, in order, those within epochs too; an epoch's record only has its last."""
        sizes: list[float] = []
        method = self.header.config.get("method")
        began = method.get("batch_size") if isinstance(method, Mapping) else None
        for record in self.epochs:
            sizes += [began] if record.changes and isinstance(began, int) else []
            sizes += [size for _, size, _ in record.changes or []] or [record.batch_size]
            began = record.next_batch_size
        return sizes

    def kind_of(self, *place: str) -> str | None:
        """The `kind` of a configured part, for instance of ("method", "policy"); None where none is named."""
        part: object = self.header.config
        for key in (*place, "kind"):
            part = part.get(key) if isinstance(part, Mapping) else None
        return part if isinstance(part, str) else None


@dataclass(frozen=True, slots=True)
class Experiment:
    """All trials of one experiment: method name -> runs in the order of their seeds."""

    name: str
    methods: Mapping[str, tuple[Run, ...]]

    @property
    def runs(self) -> list[Run]:
        """Every run of every method."""
        return [run for runs in self.methods.values() for run in runs]

    @property
    def longest(self) -> int:
        """The highest epoch number that any run reached; 0 where none did."""
        return max((run.last.epoch for run in self.runs if run.last), default=0)

    @property
    def length(self) -> int:
        """The number of epochs that the runs ask for: the highest if they differ, the longest run's where none says."""
        return max((run.planned_epochs or 0 for run in self.runs), default=0) or self.longest

    @property
    def is_on_real_data(self) -> bool:
        """Whether its runs name their data, and it is not drawn at random as the paper's synthetic sets are."""
        kinds = {run.kind_of("data") for run in self.runs}
        return not kinds & {None, "synthetic"}

    def is_finished(self, run: Run) -> bool:
        """Whether `run` reached the end its configuration names, or the longest run's where it names none."""
        planned = run.planned_epochs or self.longest
        return run.last is not None and run.last.epoch >= planned


@dataclass(frozen=True, slots=True)
class Runs:
    """What a folder holds: experiments by name, and for each file that was left out why."""

    experiments: tuple[Experiment, ...]
    problems: tuple[str, ...]


def load_runs(folder: Path, *more: Path) -> Runs:
    """Read `folder`/EXPERIMENT/METHOD/seed-K.jsonl; an experiment's or a method's own folder will do as well.

    Names come from the records, not from the folders. Files that cannot be read, that a killed run left half-written
    or that hold a run that was there before are named in `problems`; no readable run at all is a `RecordError`.
    """
    folders = (folder, *more)
    found: dict[tuple[str, str, int], Run] = {}
    problems: list[str] = []
    for path in _record_files(folders):
        try:
            _add(found, path, _read(path))
            problems += _torn_line(path)
        except RecordError as error:
            problems.append(str(error))
    if not found:
        raise RecordError(_nothing_found(folders, problems))
    return Runs(_grouped(found.values()), tuple(problems))


def method_rank(method: str) -> tuple[int, str]:
    """Sorting key: the paper's methods first, then by name."""
    known = METHOD_ORDER.index(method) if method in METHOD_ORDER else len(METHOD_ORDER)
    return known, method


def _record_files(folders: Sequence[Path]) -> list[Path]:
    """Each file once, also where one folder lies in another."""
    files: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RecordError(f"'{folder}' is not a folder")
        patterns = ("seed-*.jsonl", "*/seed-*.jsonl", "*/*/seed-*.jsonl")
        for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
            files.setdefault(path.resolve(), path)
    return list(files.values())


def _read(path: Path) -> Run:
    try:
        header, epochs = read_run(path)
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:  # numbers without end, nesting without end
        raise RecordError(f"'{path}' is not a run record: {error}") from error
    problem = _header_problem(header) or _epochs_problem(epochs)
    if problem:
        raise RecordError(f"'{path}': {problem}")
    return Run(header, tuple(epochs))


def _torn_line(path: Path) -> list[str]:
    """Whether the last line has no end: `read_run` leaves it out."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        is_whole = file.read(1) == b"\n"
    return [] if is_whole else [f"'{path}': the last line is half-written; that line is left out, the rest counts"]


def _add(found: dict[tuple[str, str, int], Run], path: Path, run: Run) -> None:
    key = (run.header.experiment, run.header.method, run.header.seed)
    if key in found:
        raise RecordError(f"'{path}': a second run of {key[0]}, {key[1]}, seed {key[2]}; the first one counts")
    found[key] = run


def _header_problem(header: RunHeader) -> str:
    for name in ("experiment", "method"):
        text = getattr(header, name)
        if not isinstance(text, str) or not text.isprintable():  # a terminal would obey control characters
            return f"{name} must be printable text, got {text!r}"
    if not _is_number(header.seed) or header.seed != int(header.seed):
        return f"seed must be a whole number, got {header.seed!r}"
    for name in ("config", "versions", "hardware"):
        if not isinstance(getattr(header, name), Mapping):
            return f"{name} must be a JSON object"
    return ""


def _epochs_problem(epochs: Iterable[EpochRecord]) -> str:
    """Values that no average can take, and epochs that do not count upwards."""
    before = 0
    for record in epochs:
        wrong = [name for name in REQUIRED_NUMBERS if not _is_number(getattr(record, name))]
        wrong += [name for name in OPTIONAL_NUMBERS if not _is_number_or_none(getattr(record, name))]
        if wrong:
            return f"{wrong[0]} must be a number, got {getattr(record, wrong[0])!r} after epoch {before}"
        if not all(_is_change(change) for change in record.changes or ()):
            return f"changes must be [step, batch size, lr] each, got {record.changes!r} after epoch {before}"
        if not all(name.isprintable() and _is_number(size) for name, size in (record.shadows or {}).items()):
            return f"shadows must be names with batch sizes, got {record.shadows!r} after epoch {before}"
        if record.epoch <= before or record.epoch != int(record.epoch):
            return f"epoch {record.epoch} follows epoch {before}"
        before = record.epoch
    return ""


def _is_change(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # NaN fails too


def _is_number_or_none(value: object) -> bool:
    """NaN and infinity pass: averages leave them out as they do None."""
    return value is None or isinstance(value, float) or _is_number(value)


def _grouped(runs: Iterable[Run]) -> tuple[Experiment, ...]:
    tree: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        tree[run.header.experiment][run.header.method].append(run)
    return tuple(Experiment(name, _ordered(tree[name])) for name in sorted(tree))


def _ordered(methods: Mapping[str, list[Run]]) -> dict[str, tuple[Run, ...]]:
    names = sorted(methods, key=method_rank)
    return {name: tuple(sorted(methods[name], key=lambda run: run.header.seed)) for name in names}


def _nothing_found(folders: Sequence[Path], problems: list[str]) -> str:
    places = ", ".join(f"'{folder}'" for folder in folders)
    if problems:
        return f"no readable run in {places}: " + "; ".join(problems)
    return f"no run in {places}: expected files like {folders[0]}/EXPERIMENT/METHOD/seed-0.jsonl"
