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
            write_run(folder, name, method, seed, rows, config=config, report=SYNTHETIC)


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


GPU = {"device": "cuda", "name": "A made-up GPU"}
REAL_METHODS = {
    # method: first batch size, policy, final accuracy
    "sgd-small": (128, "fixed", 0.938),
    "sgd-large": (2048, "fixed", 0.885),
    "sgd-large-rescaled": (2048, "fixed", 0.905),
    "sgd-large-warmup": (2048, "fixed", 0.921),
    "sgd-tuned": (512, "fixed", 0.94),
    "adabatch": (128, "adabatch", 0.915),
    "adabatch-rescaled": (128, "adabatch", 0.929),
    "divebatch": (128, "divebatch", 0.893),
    "divebatch-rescaled": (128, "divebatch", 0.9345),
    "divebatch-every-epoch": (128, "divebatch", 0.887),
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


def write_cifar_like(folder: Path, *, epochs: int = 40, trials: int = 3, experiment: str = "cifar10") -> None:
    """Curves shaped like those of the ten methods on real data, with a GPU's times and memory."""
    for method, (batch_size, policy, final) in REAL_METHODS.items():
        for seed in range(trials):
            rows = _cifar_like_rows(method, batch_size, final, epochs, seed)
            config = real_config(epochs, policy, seed=seed)
            write_run(folder, experiment, method, seed, rows, config=config, hardware=GPU, report=REAL)


def _cifar_like_rows(method: str, batch_size: int, final: float, epochs: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng([seed, *method.encode()])
    first, final, rows, steps, seconds = batch_size, final + 0.002 * rng.normal(), [], 0, 0.0
    for epoch in range(1, epochs + 1):
        measured = method.startswith("divebatch") and batch_size < 2048 and (epoch % 4 == 0 or "every" in method)
        steps += -(-50000 // batch_size)
        seconds += 0.4 + 120 / batch_size + 0.3 * measured + 0.02 * rng.random()
        lr = 0.05 * (1 + np.cos(np.pi * (epoch - 1) / epochs))
        progress = epoch / epochs * (1.6 if batch_size > first else 1.0)
        accuracy = final - 0.55 * np.exp(-5 * progress) - 0.03 * (1 - epoch / epochs) * rng.random()
        rows.append(
            {
                "batch_size": batch_size,
                "lr": float(lr * (batch_size / 128 if "rescaled" in method or "warmup" in method else 1)),
                "steps": steps,
                "samples": 50000 * epoch,
                "val_loss": float(2.3 * (1 - accuracy)),
                "val_accuracy": float(accuracy),
                "train_seconds": seconds,
                "eval_seconds": 0.2 * epoch,
                "compile_seconds": 20.0 * len({row["batch_size"] for row in rows} | {batch_size}),
                "recompiles": len({row["batch_size"] for row in rows} | {batch_size}),
                "peak_memory_bytes": int((200 + 4.6 * batch_size * (1.3 if measured else 1)) * 2**20),
                "measured": measured,
            }
        )
        if method.startswith("adabatch") and epoch % 4 == 0:
            batch_size = min(2048, 2 * batch_size)
        elif measured:
            batch_size = 2048
    return rows
