"""What the estimators say of the same training steps, beside the oracle's exact pass at the weights they lead to.

    python benchmarks/estimator_traces.py --data-dir DIR --out traces.jsonl [--method sgd-small] [--model resnet20]
        [--epochs 8] [--measure 1,2,4,8] [--seeds 3] [--device cuda --compile --precision bf16]
    python benchmarks/estimator_traces.py --out traces.jsonl --figure traces.png

A run follows a method of the experiment `cifar10`, whose batch size must stay. In the epochs to be measured every batch
goes through in two halves, which `split` compares, uncompiled; BatchNorm's statistics are those of the halves there.
"Split at rest" is what `split` estimates, at the weights the epoch ends with, nothing moving meanwhile. With BatchNorm
it is not the oracle's number, which takes samples for what they contribute to the gradient of their batch.
One line of JSON an epoch and estimator: the noise scale and its 95 % interval; null where it is infinite or not known.
"""

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from divebatch import Controller, Decision, Diversity, Measurement, Policy
from divebatch.estimators import Estimator, Moments, Oracle, Split, TrainingContext, Trajectory
from divebatch.lab import Run, Trainer, get_experiment, make_trainer
from divebatch.measurement import StepEvent


class Together(Estimator):
    """Several estimators in the same steps; the first one's answer counts, all are kept."""

    min_micro_batches = 2

    def __init__(self, estimators: dict[str, Estimator]) -> None:
        self.estimators = estimators
        self.told: dict[str, Diversity] = {}

    def bind(self, context: TrainingContext) -> None:
        for estimator in self.estimators.values():
            estimator.bind(context)

    def start(self) -> None:
        for estimator in self.estimators.values():
            estimator.start()

    def on_step(self, event: StepEvent, optimizer: torch.optim.Optimizer) -> None:
        for estimator in self.estimators.values():
            estimator.on_step(event, optimizer)

    def finish(self) -> Diversity:
        """In their order, the oracle last: by then the others no longer watch, and its pass is none of the epoch's."""
        self.told = {name: estimator.finish() for name, estimator in self.estimators.items()}
        return next(iter(self.told.values()))

    def close(self) -> None:
        for estimator in self.estimators.values():
            estimator.close()


class AtRest(Oracle):
    """Halves of all batches against each other at the weights an epoch ends with; plain loops, nothing attached."""

    def finish(self) -> Diversity:
        assert self._context is not None
        model = self._context.model
        kept = [buffer.clone() for buffer in model.buffers()]
        pairs, num_samples = [], 0
        for inputs, targets in self._context.loader.full_pass():
            pairs.append(self._pair(model, inputs, targets))
            num_samples += len(targets)
        for buffer, before in zip(model.buffers(), kept, strict=True):
            buffer.copy_(before)
        trace, sq_norm = torch.tensor(pairs, dtype=torch.float64).mean(0).tolist()
        return Diversity.from_noise(trace, sq_norm, num_samples)

    def _pair(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        """tr(Sigma) and ||G||^2 from the gradients of the mean losses over both halves."""
        half = len(targets) // 2
        first, second = (
            self._gradient(model, inputs[part], targets[part]) for part in (slice(half), slice(half, 2 * half))
        )
        return float(half * (first - second).square().sum() / 2), float(first @ second)

    def _gradient(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        assert self._loss_fn is not None
        gradients = torch.autograd.grad(self._loss_fn(model(inputs), targets), list(model.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients])


@dataclass(frozen=True)
class Watch(Policy):
    """Keeps the batch size and measures in some epochs."""

    needs: ClassVar[frozenset[str]] = frozenset({"diversity"})

    epochs: tuple[int, ...]

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=seen.batch_size)

    def measures(self, epoch: int, batch_size: int) -> bool:
        return epoch in self.epochs


def watched_trainer(options: argparse.Namespace, seed: int, folder: Path) -> tuple[Trainer, Together]:
    experiment = get_experiment("cifar10", [f"model.kind={options.model}"]).scaled(options.epochs)
    experiment = experiment.with_training(precision=options.precision, compile=options.compile)
    trainer = make_trainer(Run(experiment, options.method, seed, folder, options.device, data_dir=options.data_dir))
    trainer.control.close()
    estimators = {
        "split": Split(),
        "moments": Moments(),
        "trajectory": Trajectory(mode=experiment.training.norms),
        "split at rest": AtRest(trainer.loss_fn),
        "oracle": Oracle(trainer.loss_fn),
    }
    together = Together(estimators)
    trainer.control = Controller(
        trainer.model,
        trainer.optimizer,
        trainer.control.loader,
        Watch(options.measure),
        estimator=together,
        scheduler=trainer.all_schedulers,
    )
    return trainer, together


def watched_run(options: argparse.Namespace, seed: int, folder: Path) -> Iterable[dict[str, Any]]:
    trainer, together = watched_trainer(options, seed, folder)
    training = trainer.step.options
    for epoch in range(1, options.epochs + 1):
        is_measured = epoch in options.measure
        trainer.step.options = replace(training, compile=training.compile and not is_measured)
        record = trainer.run_epoch()
        for name, diversity in together.told.items() if is_measured else ():
            told = dict(zip(("noise_scale", "low", "high"), map(finite, numbers(diversity)), strict=True))
            yield {"seed": seed, "epoch": epoch, "estimator": name, **told, "accuracy": record.val_accuracy}


def numbers(diversity: Diversity) -> tuple[float | None, float, float]:
    """The noise scale and the ends of its interval; without a spread, and undefined, it may be any."""
    is_known = diversity.spread is not None or diversity.is_defined
    return (diversity.noise_scale, *(diversity.noise_scale_interval() if is_known else (0.0, math.inf)))


def finite(number: float | None) -> float | None:
    """JSON knows no infinity."""
    return number if number is not None and math.isfinite(number) else None


def measure(options: argparse.Namespace) -> None:
    about = {key: str(value) for key, value in vars(options).items() if key not in ("data_dir", "out", "figure")}
    with tempfile.TemporaryDirectory() as folder, options.out.open("a") as out:
        print(json.dumps({"torch": torch.__version__, **about}), file=out, flush=True)
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for told in watched_run(options, seed, Path(folder)):
                print(json.dumps(told), file=out, flush=True)
                print(
                    "seed {seed} epoch {epoch}: {estimator} {noise_scale} ({low} - {high})".format(**told), flush=True
                )


def traces(path: Path) -> dict[str, dict[int, list[float]]]:
    """The noise scales of all seeds by estimator and epoch."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for told in map(json.loads, path.read_text().splitlines()):
        if told.get("noise_scale") is not None:
            found[told["estimator"]][told["epoch"]].append(told["noise_scale"])
    return found


def draw(path: Path, figure: Path) -> None:
    """Medians over seeds, with the range."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
    for name, by_epoch in traces(path).items():
        epochs = sorted(by_epoch)
        (line,) = axes.plot(epochs, [median(by_epoch[epoch]) for epoch in epochs], marker="o", markersize=3, label=name)
        lowest, highest = ([end(by_epoch[epoch]) for epoch in epochs] for end in (min, max))
        axes.fill_between(epochs, lowest, highest, color=line.get_color(), alpha=0.2)
    axes.set(xlabel="epoch", ylabel="noise scale, samples", yscale="log")
    fig.legend(loc="outside right upper")
    fig.savefig(figure, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="without it nothing is measured")
    parser.add_argument("--out", type=Path, required=True, help="lines are appended here")
    parser.add_argument("--figure", type=Path, help="draw all that --out holds here")
    parser.add_argument("--method", default="sgd-small")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--measure", type=lambda told: tuple(map(int, told.split(","))), default=(1, 2, 3, 4, 6, 8))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    if options.data_dir is not None:
        measure(options)
    if options.figure is not None:
        draw(options.out, options.figure)


if __name__ == "__main__":
    main()
