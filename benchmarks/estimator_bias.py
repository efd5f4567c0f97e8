"""What `moments` says beside `split` in the same training steps: how far moving weights put it off.

    python benchmarks/estimator_bias.py --data-dir DIR [--model resnet20] [--batch-size 128] [--lr 0.1] [--epochs 8]

One line an epoch: the noise scale by both, each with its 95 % interval.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from divebatch import Diversity, micro_batches
from divebatch.estimators import Estimator, Moments, Scene, Split
from divebatch.experiments import Method, Run, get_experiment, make_trainer
from divebatch.experiments.schema import Part
from divebatch.training import Trainer


def trainer_for(options: argparse.Namespace, folder: Path) -> Trainer:
    """Data, model and optimizer of the CIFAR-10 experiment, at a fixed learning rate."""
    experiment = get_experiment("cifar10").with_model(options.model)
    method = Method(label="watched", batch_size=options.batch_size, lr=options.lr, policy=Part(kind="fixed"))
    experiment = replace(experiment, methods={"watched": method})
    return make_trainer(Run(experiment, "watched", 0, folder, options.device, data_dir=options.data_dir))


def watched_epoch(trainer: Trainer, estimators: list[Estimator]) -> list[Diversity]:
    """Batches go through in two halves, which `split` compares; `moments` looks at the whole."""
    for estimator in estimators:
        estimator.start()
    for batch in trainer.control.loader:
        trainer.optimizer.zero_grad()
        for (inputs, targets), share in micro_batches(batch, (len(batch[1]) + 1) // 2):
            (cross_entropy(trainer.model(inputs), targets) * share).backward()
        trainer.optimizer.step()
    trainer.control.step()
    return [estimator.finish() for estimator in estimators]


def told(diversity: Diversity) -> str:
    low, high = diversity.noise_scale_interval()
    return f"{diversity.noise_to_signal():.0f} ({low:.0f} - {high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.model}, batch {options.batch_size}, lr {options.lr}")
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(options, Path(folder))
        loader, estimators = trainer.control.loader, [Split(), Moments()]
        for estimator in estimators:
            estimator.bind(
                Scene(
                    trainer.model, loader.full_pass, "mean", None, trainer.optimizer, lambda: loader.samples_delivered
                )
            )
        for epoch in range(options.epochs):
            split, moments = watched_epoch(trainer, estimators)
            print(f"epoch {epoch + 1}: split {told(split)}, moments {told(moments)}", flush=True)


if __name__ == "__main__":
    main()
