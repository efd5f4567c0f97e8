"""One workload of docs/when-it-pays.md, in pieces: runs for a while, goes on where it stopped, packs the records.

    python benchmarks/when_it_pays.py policies-cifar10 --data-dir DATA --device cuda --budget-seconds 540 --out pays

The same command again continues; it exits with 0 once all runs are complete, and with 1 before. Seeds come one after
the other, each with all methods, so that what is there after any piece can be compared. A run that the budget ends in
the middle of is saved and continued; a killed one begins again. OUT/EXPERIMENT.tar.xz has the records so far.
"""

import argparse
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from divebatch.errors import DivergedError, StoppedError
from divebatch.lab import Experiment, Run, StopRequest, check_parts, execute, get_experiment
from divebatch.lab.checkpoint import previous
from divebatch.records import EpochRecord

METHODS = {
    "policies-cifar10": "sgd-small sgd-256 sgd-tuned sgd-1024 sgd-large-warmup auto noise-doubling-256 adabatch "
    "divebatch-split smith goodput"
}
"""Of the experiments that have more methods than the question needs; all of the others."""


class Deadline(StopRequest):
    """Asks a run to stop after a step, as a signal does, once the time is up."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._end = clock, clock() + seconds

    def after_step(self) -> bool:
        return self.is_set or self._clock() >= self._end

    def now(self) -> bool:
        return self.after_step()


def planned(options: argparse.Namespace) -> list[Run]:
    """Every run of the workload, seed by seed."""
    experiment = _experiment(options)
    check_parts(experiment)
    names = (options.methods or METHODS.get(experiment.name, " ".join(experiment.methods))).replace(",", " ").split()
    for name in names:
        experiment.method(name)  # raises for one that is unknown
    first = Run(
        experiment,
        names[0],
        0,
        options.out,
        device=options.device,
        data_dir=options.data_dir,
        checkpoint_every=experiment.epochs,  # at the end, and where the budget ends it: writing takes time
    )
    trials = options.trials or experiment.trials
    return [replace(first, method_name=name, seed=seed) for seed in range(trials) for name in names]


def _experiment(options: argparse.Namespace) -> Experiment:
    experiment = get_experiment(options.experiment, [f"model.kind={options.model}"] if options.model else ())
    experiment = experiment.scaled(options.epochs) if options.epochs else experiment
    experiment = replace(experiment, samples=options.samples) if options.samples else experiment
    is_gpu = options.device.startswith("cuda")
    return experiment.with_training(precision="bf16" if is_gpu else "fp32", compile=is_gpu)


def diverged_path(run: Run) -> Path:
    """Where a run that diverged says so: to try it again would only take time."""
    return run.records_path.with_suffix(".diverged")


def work(runs: Sequence[Run], stop: StopRequest) -> int:
    """Execute what is left until the time is up; return how many runs are done."""
    for done, run in enumerate(runs):
        if diverged_path(run).exists():
            continue
        try:
            execute(run, resume=True, stop=stop, on_epoch=lambda record, run=run: _say(run, record))
        except StoppedError:
            return done
        except DivergedError as error:
            diverged_path(run).write_text(f"{error}\n")
            print(f"{run.method_name}, seed {run.seed}: {error}", flush=True)
        _clear_away(run)
    return len(runs)


def _say(run: Run, record: EpochRecord) -> None:
    """A line for each run that reaches its end."""
    if record.epoch >= run.experiment.epochs:
        value = run.experiment.metric.of(record)
        shown = "no value" if value is None else run.experiment.metric.text(value)
        print(f"{run.method_name}, seed {run.seed}: {shown}, {record.train_seconds or 0:.1f} s", flush=True)


def _clear_away(run: Run) -> None:
    """Remove the checkpoints of a run that needs them no longer: hundreds of runs would fill the disk."""
    for path in (run.checkpoint_path, previous(run.checkpoint_path)):
        path.unlink(missing_ok=True)


def pack(runs: Sequence[Run]) -> Path:
    """Write all records of the workload into one archive; equal records give equal archives."""
    folder, name = runs[0].folder, runs[0].experiment.name
    paths = [path for run in runs for path in (run.records_path, diverged_path(run)) if path.is_file()]
    archive = folder / f"{name}.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(paths):
            tar.add(path, arcname=path.relative_to(folder), filter=_without_owner)
    return archive


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname, entry.mode = 0, 0, 0, "", "", 0o644
    return entry


def main(words: Sequence[str] | None = None, *, clock: Callable[[], float] = time.monotonic) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="a name that `divebatch list` shows, or a TOML file")
    parser.add_argument("--out", type=Path, default=Path("runs/pays"), help="folder of records and archive")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--budget-seconds", type=float, default=540.0, help="of this piece; a compilation may go beyond"
    )
    parser.add_argument("--trials", type=int, help="seeds; as many as the experiment has by default")
    parser.add_argument("--methods", help="some of the methods, comma-separated")
    parser.add_argument("--epochs", type=int, help="another length, schedules scaled with it")
    parser.add_argument("--samples", type=int, help="another end of a run over one pass")
    parser.add_argument("--model", help="another network")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    runs = planned(options)
    with Deadline(options.budget_seconds, clock=clock) as stop:
        done = work(runs, stop)
    archive = pack(runs)
    left = "" if done == len(runs) else "; the same command again continues"
    print(f"{done} of {len(runs)} runs are done, records in {archive}{left}")
    print(f"next: divebatch report {options.out}")
    return 0 if done == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
