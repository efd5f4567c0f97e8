"""Small experiments, runs and searches, and whether two runs ended in the same bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from divebatch.lab import Experiment, Run, StopRequest, execute, get_experiment, load_checkpoint
from divebatch.lab.schema import Part
from divebatch.lab.search import Search, parse_space, to_toml
from divebatch.ranks import Ranks
from divebatch.records import EpochRecord


def shrunk(name: str, epochs: int, samples: int, features: int) -> Experiment:
    """An experiment on drawn data, at another size."""
    experiment = get_experiment(name).scaled(epochs)
    settings = {**experiment.data.settings, "num_samples": samples, "num_features": features}
    return replace(experiment, data=replace(experiment.data, settings=settings))


def small() -> Experiment:
    """Four epochs on a hundred samples."""
    return shrunk("synthetic-nonconvex", 4, 100, 4)


OVER = ("lr=0.5,2.0", "batch_size=16,32,64")


def tiny_experiment() -> Experiment:
    return shrunk("synthetic-convex", 4, 250, 4)


def tiny_search(folder: Path, *, over: tuple[str, ...] = OVER, method: str = "sgd-small", **settings: Any) -> Search:
    settings = {"experiment": tiny_experiment(), "epochs": 3, **settings}
    return Search(method_name=method, folder=folder, space=parse_space(over), **settings)


CPU = torch.device("cpu")
COSTS = {*("train_seconds", "total_seconds", "eval_seconds", "measure_seconds", "compile_seconds"), "peak_memory_bytes"}


class StopAfter(StopRequest):
    """Asked to stop when so many steps were made; None: never."""

    def __init__(self, steps: int | None, ranks: Ranks | None = None) -> None:
        super().__init__(ranks)
        self._left = steps or 0

    def after_step(self) -> bool:
        self._left -= 1
        self.is_set = self.is_set or self._left == 0
        return super().after_step()


def kill_after(run: Run, epochs: int) -> None:
    """Train so many epochs, and be killed."""

    def kill(record: EpochRecord) -> None:
        if record.epoch == epochs:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(run, on_epoch=kill)


def records(run: Run) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.records_path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in COSTS} for line in lines[1:]]


def weights(run: Run) -> list[torch.Tensor]:
    state = load_checkpoint(run.checkpoint_path, device=CPU)
    assert state["control"]["epoch"] == len(records(run))
    assert records(run)[-1]["epoch"] == run.experiment.epochs
    momenta = [each.get("momentum_buffer") for each in state["optimizer"]["state"].values()]
    return [*state["model"].values(), *(each for each in momenta if each is not None)]


def assert_same_end(run: Run, whole: Run) -> None:
    assert records(run) == records(whole)
    assert all(map(torch.equal, weights(run), weights(whole)))
    # Only this run's files: another run of the folder may have died while saving and not been resumed yet.
    left = {path.suffix for path in run.records_path.parent.glob(f"{run.records_path.stem}*")}
    assert left <= {".jsonl", ".ckpt", ".previous"}


NAME = "tiny"


def probed_experiment(folder: Path, *, optimizer: Part | None = None, num_samples: int = 1250) -> Path:
    """The path of its file; methods `sgd-small` and `divebatch` at batch 16."""
    experiment = shrunk("synthetic-convex", 4, num_samples, 6)
    methods = {
        name: replace(experiment.methods[name], batch_size=16, lr=0.1) for name in ("sgd-small", "divebatch", "oracle")
    }
    optimizer = optimizer or experiment.optimizer
    experiment = replace(experiment, name=NAME, methods=methods, optimizer=optimizer)
    path = folder / f"{NAME}.toml"
    path.write_text(to_toml(experiment), encoding="utf-8")
    return path


def run_it(path: Path, runs: Path, *methods: str) -> None:
    for method in methods:
        execute(Run(get_experiment(str(path)), method, 0, runs))
