"""Record files with chosen numbers, written the way real runs write them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from divebatch.records import EpochRecord, RecordWriter, RunHeader


def epoch_record(epoch: int, **values: Any) -> EpochRecord:
    defaults = {"batch_size": 128, "lr": 0.1, "steps": 10 * epoch, "samples": 1000 * epoch}
    return EpochRecord(epoch=epoch, **{**defaults, **values})


def write_run(
    folder: Path,
    experiment: str,
    method: str,
    seed: int,
    epochs: Sequence[Mapping[str, Any]],
    *,
    config: Mapping[str, Any] | None = None,
    place: str | None = None,
) -> Path:
    """`epochs` holds the fields of epoch 1, 2, ...; `place` is the folder below `folder`, EXPERIMENT/METHOD if None."""
    header = RunHeader(
        experiment=experiment,
        method=method,
        seed=seed,
        config={"epochs": len(epochs)} if config is None else config,
        versions={"python": "3.12.1", "torch": "2.13.0"},
        hardware={"device": "cpu", "cpus": 2},
        git_commit="0123abcd",
    )
    path = folder / (place or f"{experiment}/{method}") / f"seed-{seed}.jsonl"
    with RecordWriter(path) as writer:
        writer.write(header)
        for epoch, values in enumerate(epochs, 1):
            writer.write(epoch_record(epoch, **values))
    return path


def write_accuracies(folder: Path, experiment: str, method: str, trials: Sequence[Sequence[float | None]]) -> None:
    """One run for each list of accuracies, with a loss of 1 - accuracy."""
    for seed, accuracies in enumerate(trials):
        epochs = [{"val_accuracy": a, "val_loss": None if a is None else 1 - a} for a in accuracies]
        write_run(folder, experiment, method, seed, epochs)


def write_paper_like(folder: Path, *, convex: bool, epochs: int = 100, trials: int = 10) -> None:
    """Curves shaped like the paper's synthetic experiments, four methods, cheap to make."""
    small, large = (128, 4096) if convex else (512, 5028)
    for method in ("sgd-small", "sgd-large", "divebatch", "oracle"):
        for seed in range(trials):
            rows = _paper_like_rows(method, convex, epochs, small, large, seed)
            name = "synthetic-convex" if convex else "synthetic-nonconvex"
            config = {
                "epochs": epochs,
                "summary": "A made-up experiment",
                "method": {"batch_size": rows[0]["batch_size"], "policy": {"kind": method}},
                "seed": seed,
            }
            write_run(folder, name, method, seed, rows, config=config)


def _paper_like_rows(method: str, convex: bool, epochs: int, small: int, large: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng([seed, len(method)])
    adaptive = method in ("divebatch", "oracle")
    cap = 4096 if convex else int(rng.integers(3000, 8192))
    diverges = not convex and method == "sgd-large" and seed % 4 == 3
    level = 0.01 * rng.random()
    rows, steps, batch_size = [], 0, large if method == "sgd-large" else small
    for epoch in range(1, epochs + 1):
        steps += -(-16000 // batch_size)
        exact = 1e-3 * epoch**1.2 * (0.3 + rng.random())
        estimate = exact * (10 if convex else 4) * np.exp(0.3 * rng.normal())
        progress = (1.3 if method == "divebatch" else 0.25 if method == "sgd-large" else 1.0) * epoch
        spike = 6.0 * np.exp(-(epoch - 2) / 2) if convex and adaptive and epoch > 1 else 0.0
        loss = 0.08 + 0.6 * np.exp(-progress / 12) + spike + 0.008 * rng.random()
        rows.append(
            {
                "batch_size": batch_size,
                "steps": steps,
                "samples": 16000 * epoch,
                "val_loss": 0.7 + rng.random() if diverges else float(loss),
                "val_accuracy": 0.5 if diverges else float(0.985 - 0.4 * np.exp(-progress / 8) - 0.02 * spike - level),
                "diversity": (estimate if method == "divebatch" else exact) if adaptive else None,
                "exact_diversity": exact if adaptive else None,
                "train_seconds": 0.002 * steps,
            }
        )
        if adaptive:
            grown = 4096 if convex else int(16000 * 0.1 * rows[-1]["diversity"] * 10)
            batch_size = min(cap, max(batch_size, grown))
    return rows
