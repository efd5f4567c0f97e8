"""Whether two runs ended in the same bits, costs left out."""

import json
from typing import Any

import torch

from divebatch.lab import Run, load_checkpoint

CPU = torch.device("cpu")
COSTS = {
    *("train_seconds", "total_seconds", "eval_seconds", "measure_seconds", "compile_seconds"),
    "peak_memory_bytes",
}


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
