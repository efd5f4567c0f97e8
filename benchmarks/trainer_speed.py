"""The trainer against a bare hand-written loop: samples per second, and memory while measuring.

    python benchmarks/trainer_speed.py --data-dir DIR --device cuda --compile [--model resnet20] [--batch-sizes 128]

Prints one JSON line a row. The bare loop has the training images on the device, normalised, and draws batches by one
`index_select`: no augmentation, no controller, no records. Epochs of both alternate; ratios are of medians. `measuring`
is the trainer with gradient norms measured in every epoch, `bare-graphs` the bare loop compiled with
mode="reduce-overhead", which records CUDA graphs as the trainer does. `--profile` then profiles one more epoch of each
row and prints its wall time, how long the GPU was busy, what ran outside CUDA graphs, the largest kernels and the
longest times the GPU had nothing to do.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from divebatch.lab import Experiment, Method, Run, get_experiment, make_trainer
from divebatch.lab.models import MODELS
from divebatch.lab.schema import Part
from epoch_profile import Marked, profiled

METHODS = {
    "trainer": Part(kind="fixed"),
    "measuring": Part(kind="divebatch", settings={"delta": 1e-9, "max_batch_size": 1 << 20}),
}


def experiment_for(options: argparse.Namespace, batch_size: int) -> Experiment:
    experiment = get_experiment("cifar10", [f"model.kind={options.model}"])
    experiment = experiment.with_training(precision=options.precision, compile=options.compile, norms=options.norms)
    methods = {
        name: Method(label=name, batch_size=batch_size, lr=0.1, policy=policy) for name, policy in METHODS.items()
    }
    return replace(experiment, methods=methods)


def trainer_epochs(options: argparse.Namespace, name: str, batch_size: int) -> Iterator[tuple[float, int]]:
    """Seconds of training and peak bytes of one epoch after the other."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(experiment_for(options, batch_size), name, 0, Path(folder), options.device, data_dir=options.data_dir)
        trainer = make_trainer(run)
        trainer.validation = Marked(trainer.validation)
        before = 0.0
        while True:
            record = trainer.run_epoch()
            yield record.train_seconds - before, record.peak_memory_bytes
            before = record.train_seconds


def bare_epochs(
    options: argparse.Namespace, batch_size: int, *, mode: str | None = None
) -> Iterator[tuple[float, int]]:
    device = torch.device(options.device)
    images, labels = images_on_device(options)
    torch.manual_seed(0)
    model = MODELS[options.model]().build(0, 10).to(device, memory_format=torch.channels_last)
    forward = torch.compile(model, dynamic=False, mode=mode) if options.compile else model
    fused = True if device.type == "cuda" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=fused)
    while True:
        yield timed(lambda: bare_epoch(model, forward, optimizer, images, labels, batch_size, options), device)


def bare_epoch(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    batch_size: int,
    options: argparse.Namespace,
) -> None:
    low = options.precision == "bf16"
    for index in torch.randperm(len(labels), device=labels.device).split(batch_size):
        run = forward if len(index) == batch_size else model
        optimizer.zero_grad()
        with torch.autocast(labels.device.type, torch.bfloat16) if low else nullcontext():
            loss = cross_entropy(run(images[index]), labels[index])
        loss.backward()
        optimizer.step()


def images_on_device(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    experiment = get_experiment("cifar10").with_training()
    experiment = replace(experiment, data=Part(kind="cifar10", settings={"augment": False}))
    run = Run(experiment, "sgd-small", 0, Path(), options.device, data_dir=options.data_dir)
    batches = list(make_trainer(run).control.loader.full_pass())
    images = torch.cat([inputs for inputs, _ in batches])
    return images.contiguous(memory_format=torch.channels_last), torch.cat([targets for _, targets in batches])


def timed(work: Callable[[], None], device: torch.device) -> tuple[float, int]:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return time.perf_counter() - started, peak


def course_of(options: argparse.Namespace, name: str, batch_size: int) -> Iterator[tuple[float, int]]:
    if name in METHODS:
        return trainer_epochs(options, name, batch_size)
    return bare_epochs(options, batch_size, mode="reduce-overhead" if name == "bare-graphs" else None)


def measure(options: argparse.Namespace, batch_size: int) -> Iterator[dict[str, Any]]:
    courses = {name: course_of(options, name, batch_size) for name in ("bare", *options.rows)}
    seen: dict[str, list[tuple[float, int]]] = {name: [] for name in courses}
    for _ in range(options.warmup + options.epochs):
        for name, course in courses.items():
            seen[name].append(next(course))
    bare = statistics.median(seconds for seconds, _ in seen["bare"][options.warmup :])
    for name, epochs in seen.items():
        seconds = [seconds for seconds, _ in epochs[options.warmup :]]
        middle = statistics.median(seconds)
        yield {
            "model": options.model,
            "batch_size": batch_size,
            "row": name,
            "precision": options.precision,
            "compile": options.compile,
            "seconds_per_epoch": round(middle, 4),
            "speed_of_bare": round(bare / middle, 4),
            "n": len(seconds),
            "spread": [round(min(seconds), 4), round(max(seconds), 4)],
            "torch": torch.__version__,
        }
    for name, course in courses.items() if options.profile else ():
        yield {
            "batch_size": batch_size,
            "profile": name,
            **profiled(partial(next, course), torch.device(options.device)),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--norms", default="sketch")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--rows", nargs="+", default=["trainer", "measuring"], choices=[*METHODS, "bare-graphs"])
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True  # as the trainer has it
    for batch_size in options.batch_sizes:
        for row in measure(options, batch_size):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
