"""How often 95 % intervals hold the noise scale that they should, and on which side they miss.

The problem is a linear regression with normal inputs and targets of pure noise, whose noise scale is known at all
weights. Each draw is a course of SGD on new data; the truth is the mean tr(Sigma) over the mean ||G||^2 along it. The
last rows are sketched norms: how often the exact sum of squared norms is within 1.96 standard errors.

    python benchmarks/coverage.py --draws 200
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import SGD

from divebatch import NormMeter, micro_batches
from divebatch.estimators import Estimator, Moments, PerSample, Split, TrainingContext
from divebatch.estimators.step_hooks import tell_steps
from divebatch.ranks import Ranks, RankShard

DIMENSION = 10


@dataclass
class Course:
    """Some steps on new data, and who delivers them."""

    batch_size: int
    steps: int
    lr: float
    momentum: float
    start: float
    """The norm of the gradient that it starts with."""
    parts: int = 1
    ranks = Ranks.alone()
    samples_delivered = batches_delivered = 0

    @property
    def local_samples_delivered(self) -> int:
        return self.samples_delivered

    @property
    def rank_shard(self) -> RankShard:
        return RankShard(self.batch_size, self.batch_size)

    def full_pass(self) -> list[object]:
        return []

    def run(self, estimator: Estimator, generator: torch.Generator) -> tuple[tuple[float, float], float]:
        """The interval that was found, and the truth."""
        model = nn.Linear(DIMENSION, 1, bias=False).double()
        nn.init.constant_(model.weight, self.start / math.sqrt(DIMENSION))
        optimizer = SGD(model.parameters(), self.lr, momentum=self.momentum)
        context = TrainingContext(model, self, optimizer)
        estimator.bind(context)
        tell_steps(estimator, context)
        estimator.start()
        trace, sq_norm = 0.0, 0.0
        for _ in range(self.steps):
            now = float(model.weight.detach().square().sum())
            sq_norm, trace = sq_norm + now, trace + (DIMENSION + 1) * now + DIMENSION
            self.step(model, optimizer, generator)
        return estimator.finish().noise_scale_interval(), trace / sq_norm

    def step(self, model: nn.Module, optimizer: SGD, generator: torch.Generator) -> None:
        x = torch.randn(self.batch_size, DIMENSION, generator=generator, dtype=torch.float64)
        y = torch.randn(self.batch_size, 1, generator=generator, dtype=torch.float64)
        self.samples_delivered += self.batch_size
        self.batches_delivered += 1
        optimizer.zero_grad()
        for (a, b), weight in micro_batches((x, y), self.batch_size // self.parts):
            ((model(a) - b).square().mean() / 2 * weight).backward()
        optimizer.step()


ROWS: dict[str, tuple[Callable[[], Estimator], dict[str, float]]] = {
    "per-sample": (PerSample, {"momentum": 0.0}),
    "split": (Split, {"momentum": 0.0, "parts": 2}),
    "moments, momentum 0.9": (Moments, {"momentum": 0.9}),
    "moments, no momentum": (Moments, {"momentum": 0.0}),
}
COURSES = [(8, 16, 0.0, 0.5), (8, 16, 0.1, 0.5), (8, 64, 0.1, 2.0), (32, 32, 0.1, 2.0)]


def coverage(make: Callable[[], Estimator], draws: int, **settings: float) -> tuple[float, float, float]:
    """Shares of intervals that hold the truth, lie above it and lie below it."""
    generator, above, below = torch.Generator().manual_seed(0), 0, 0
    for _ in range(draws):
        (low, high), truth = Course(**settings).run(make(), generator)  # type: ignore[arg-type]
        above, below = above + (low > truth), below + (high < truth)
    return 1 - (above + below) / draws, above / draws, below / draws


def sketch_coverage(samples: int, passes: int, draws: int) -> float:
    """How often the exact sum is within 1.96 standard errors of the sketched one."""
    torch.manual_seed(0)
    model, held = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)), 0
    exact, sketched = NormMeter(model), NormMeter(model, mode="sketch")
    for _ in range(draws):
        x = torch.randn(passes, samples, 6, 16)
        totals = []
        for meter in (exact, sketched):
            meter.reset()
            with meter:
                for part in x:
                    model(part).square().sum(dim=(1, 2)).mean().backward()
            totals.append(meter.sum_of_sq_norms())
        held += abs(totals[0] - totals[1]) <= 1.96 * sketched.standard_error()
    return held / draws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| estimator | batch | steps | first gradient | learning rate | holds | above | below |\n|---|---|" + "---|" * 6
    )
    for name, (make, own) in ROWS.items():
        for batch_size, steps, lr, start in COURSES:
            rate = lr / 10 if own["momentum"] else lr
            settings = {"batch_size": batch_size, "steps": steps, "lr": rate, "start": start, **own}
            held, above, below = coverage(make, arguments.draws, **settings)
            print(
                f"| {name} | {batch_size} | {steps} | {rate:g} | {held:.1%} | {above:.1%} | {below:.1%} |", flush=True
            )
    print("\n| sketched samples | holds |\n|---|---|")
    for samples, passes in ((2, 1), (8, 1), (32, 1), (32, 4)):
        held = sketch_coverage(samples, passes, arguments.draws)
        print(f"| {samples * passes} in {passes} pass(es) | {held:.1%} |", flush=True)


if __name__ == "__main__":
    main()
