"""A small run in this process, for families that do something to its files."""

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from divebatch.errors import DivebatchError
from divebatch.lab import Experiment, Run, execute, get_experiment
from divebatch.records import EpochRecord
from faults.courses import same_bits
from faults.outcome import Verdict


class KilledError(Exception):
    """Stands for a kill."""


def small() -> Experiment:
    """Four epochs on a hundred samples."""
    experiment = get_experiment("synthetic-nonconvex").scaled(4)
    settings = {**experiment.data.settings, "num_samples": 100, "num_features": 4}
    return replace(experiment, data=replace(experiment.data, settings=settings))


def begin(run: Run, epochs: int = 2) -> Run:
    """Train so many epochs, and be killed."""

    def kill(record: EpochRecord) -> None:
        if record.epoch == epochs:
            raise KilledError

    with suppress(KilledError):
        execute(run, on_epoch=kill)
    return run


def copied(run: Run, folder: Path) -> Run:
    """The same run with its files so far in another folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run.folder, folder)
    return replace(run, folder=folder)


def resumed(run: Run, whole: Run) -> tuple[Verdict, str]:
    """What a resume makes of a run whose files were changed, beside one that nobody touched."""
    before = contents(run.folder)
    try:
        execute(run, resume=True)
    except DivebatchError as error:
        return ("refused" if contents(run.folder) == before else "lost"), str(error)
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"
    return ("whole" if same_bits(run.records_path, whole.records_path) else "mixed up"), ""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
