"""Record files with chosen numbers, written the way real runs write them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from divebatch.records import EpochRecord, Metric, ReportSettings, RunHeader

LABELS = {
    "sgd-small": "SGD",
    "sgd-large": "SGD",
    "sgd-large-rescaled": "SGD, rescaled",
    "sgd-large-warmup": "SGD, warm-up",
    "sgd-tuned": "SGD, tuned",
    "adabatch": "AdaBatch",
    "adabatch-rescaled": "AdaBatch, rescaled",
    "divebatch": "DiveBatch",
    "divebatch-rescaled": "DiveBatch, rescaled",
    "divebatch-every-epoch": "DiveBatch, every epoch",
    "oracle": "Oracle",
}
PLAIN = ReportSettings(baselines=["sgd-small", "sgd-tuned"], order=list(LABELS))
SYNTHETIC = replace(
    PLAIN,
    baselines=["sgd-small"],
    chance=0.5,
    figures={"figure1": ["sgd-small", "sgd-large", "divebatch"], "figure2": ["divebatch", "oracle"]},
)
REAL = replace(PLAIN, chance=0.1, figures={"figure3": [], "figure4": [], "course": []})
LOSS = Metric("val_loss", "lower")


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
    hardware: Mapping[str, Any] | None = None,
    report: ReportSettings = PLAIN,
    metric: Metric | None = None,
    label: str | None = None,
    num_parameters: int | None = None,
) -> Path:
    """`epochs` holds the fields of epoch 1, 2, ...; `place` is the folder below `folder`, EXPERIMENT/METHOD if None.

    Unless `epochs` says otherwise, the learning rates of two methods differ a little, so that they train differently.
    """
    header = RunHeader(
        experiment=experiment,
        method=method,
        seed=seed,
        label=LABELS.get(method, method) if label is None else label,
        metric=metric or Metric(),
        report=report,
        config={"epochs": len(epochs)} if config is None else config,
        versions={"python": "3.12.1", "torch": "2.13.0"},
        hardware={"device": "cpu", "cpus": 2} if hardware is None else hardware,
        num_parameters=num_parameters,
        git_commit="0123abcd",
    )
    path = folder / (place or f"{experiment}/{method}") / f"seed-{seed}.jsonl"
    lr = 0.1 + 1e-14 * crc32(method.encode())
    records = [header, *(epoch_record(epoch, **{"lr": lr, **values}) for epoch, values in enumerate(epochs, 1))]
    # The lines that a RecordWriter writes; it would wait for the disk after each.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{record.to_json()}\n" for record in records), encoding="utf-8")
    return path


def write_accuracies(folder: Path, experiment: str, method: str, trials: Sequence[Sequence[float | None]]) -> None:
    """One run for each list of accuracies, with a loss of 1 - accuracy."""
    for seed, accuracies in enumerate(trials):
        epochs = [{"val_accuracy": a, "val_loss": None if a is None else 1 - a} for a in accuracies]
        write_run(folder, experiment, method, seed, epochs)


GPU = {"device": "cuda", "name": "A made-up GPU"}
SYNTHETIC_METHODS = {
    # method: first and last batch size, policy, final accuracy
    "sgd-small": (128, 128, "fixed", 0.981),
    "sgd-large": (4096, 4096, "fixed", 0.984),
    "divebatch": (128, 4096, "divebatch", 0.982),
    "oracle": (128, 4096, "oracle", 0.983),
}
REAL_METHODS = {
    "sgd-small": (128, 128, "fixed", 0.938),
    "sgd-large": (2048, 2048, "fixed", 0.885),
    "sgd-large-rescaled": (2048, 2048, "fixed", 0.905),
    "sgd-large-warmup": (2048, 2048, "fixed", 0.921),
    "sgd-tuned": (512, 512, "fixed", 0.94),
    "adabatch": (128, 1024, "adabatch", 0.915),
    "adabatch-rescaled": (128, 1024, "adabatch", 0.929),
    "divebatch": (128, 2048, "divebatch", 0.893),
    "divebatch-rescaled": (128, 2048, "divebatch", 0.9345),
    "divebatch-every-epoch": (128, 2048, "divebatch", 0.887),
}


def real_config(epochs: int, policy: str, *, seed: int = 0) -> dict[str, Any]:
    """As much of a real run's configuration as the report looks at."""
    return {"epochs": epochs, "data": {"kind": "cifar"}, "method": {"policy": {"kind": policy}}, "seed": seed}


def write_real(
    folder: Path,
    trials: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    *,
    policy: str = "fixed",
    epochs: int | None = None,
) -> None:
    """Runs of cifar10 on a GPU with chosen numbers: method -> trials -> fields of each epoch."""
    for method, runs in trials.items():
        for seed, rows in enumerate(runs):
            config = real_config(epochs or len(rows), policy, seed=seed)
            write_run(folder, "cifar10", method, seed, rows, config=config, hardware=GPU, report=REAL)


def write_synthetic(folder: Path, *, epochs: int = 3, trials: int = 2) -> None:
    """Four methods on a CPU, with diversity and the paper's first two figures."""
    for method, (first, last, policy, final) in SYNTHETIC_METHODS.items():
        for seed in range(trials):
            rows = _curve(method, first, last, final, epochs, seed)
            for row in rows if first < last else ():
                exact = row["val_accuracy"] / row["batch_size"]
                row |= {"diversity": exact * (4 if policy == "divebatch" else 1), "exact_diversity": exact}
            config = {**real_config(epochs, policy, seed=seed), "summary": "A made-up experiment"}
            write_run(folder, "synthetic", method, seed, rows, config=config, report=SYNTHETIC)


def write_cifar_like(folder: Path, *, epochs: int, trials: int) -> None:
    """The ten methods of real data, with a GPU's times and memory."""
    for method, (first, last, policy, final) in REAL_METHODS.items():
        for seed in range(trials):
            rows = _curve(method, first, last, final, epochs, seed)
            for row in rows:
                peak = int((200 + 4.6 * row["batch_size"]) * 2**20)
                row |= {"eval_seconds": 0.2, "peak_memory_bytes": peak, "train_loss": 1.1 * row["val_loss"]}
            config = real_config(epochs, policy, seed=seed)
            write_run(folder, "cifar10", method, seed, rows, config=config, hardware=GPU, report=REAL)


def _curve(method: str, first: int, last: int, final: float, epochs: int, seed: int) -> list[dict[str, Any]]:
    """Accuracies that rise to about `final`; the batch size changes after a third of the epochs."""
    rng = np.random.default_rng([seed, *method.encode()])
    rows, steps, seconds = [], 0, 0.0
    for epoch in range(1, epochs + 1):
        size = first if epoch <= max(1, epochs // 3) else last
        steps += -(-50000 // size)
        seconds += 0.4 + 120 / size + 0.02 * rng.random()
        accuracy = float(final - 0.55 * np.exp(-5 * epoch / epochs) - 0.01 * rng.random())
        lr = float(0.05 * (1 + np.cos(np.pi * (epoch - 1) / epochs)) * size / 128)
        counts = {"batch_size": size, "lr": lr, "steps": steps, "samples": 50000 * epoch, "train_seconds": seconds}
        rows.append({**counts, "val_accuracy": accuracy, "val_loss": 2.3 * (1 - accuracy)})
    return rows
