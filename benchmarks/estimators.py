"""What each estimator costs and how far it is off.

Cost: processor time of an epoch of four steps with the estimator at work over the plain loop's, the lowest of
interleaved repeats, so that a busy machine matters little. Error: on a linear problem whose noise scale is known, at
fixed weights, the relative error (root mean square) of the estimate from one epoch, and how often its 95 % interval
holds the truth.

    python benchmarks/estimators.py --rows "ResNet-20 GroupNorm" --batches 64
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD

from divebatch import Diversity, micro_batches
from divebatch.estimators import AcrossRanks, Estimator, Moments, Oracle, PerSample, Split, TrainingContext, Trajectory
from divebatch.estimators.step_hooks import tell_steps
from divebatch.ranks import Ranks, RankShard
from models import PROBLEMS, Problem

DIMENSION, OFFSET, STEPS, BATCH = 12, 0.5, 16, 64
NOISE_SCALE = ((DIMENSION + 1) * OFFSET**2 + DIMENSION) / OFFSET**2
BUILDS: dict[str, Callable[[Callable[[Tensor, Tensor], Tensor]], Estimator]] = {
    "per-sample": lambda _: PerSample(),
    "per-sample sketch": lambda _: PerSample(mode="sketch"),
    "split": lambda _: Split(),
    "ranks": lambda _: AcrossRanks(),
    "moments": lambda _: Moments(),
    "trajectory": lambda _: Trajectory(),
    "oracle": Oracle,
}


class Loop:
    """A training loop whose batches are given, and who delivers them; `split` and `ranks` get them cut in two."""

    ranks = Ranks.alone()

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], name: str | None, lr: float) -> None:
        self.model, self.loss, self.samples_delivered, self.batches_delivered = model, loss, 0, 0
        self.rank_shard = RankShard(0, 0)
        self.optimizer = SGD(model.parameters(), lr, momentum=0.9)
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.parts = 2 if name in ("split", "ranks", "cut in two") else 1
        self.estimator = BUILDS[name](loss) if name in BUILDS else None
        if self.estimator is not None:
            context = TrainingContext(model, self, self.optimizer)
            self.estimator.bind(context)
            tell_steps(self.estimator, context)

    @property
    def local_samples_delivered(self) -> int:
        return self.samples_delivered

    def full_pass(self) -> list[tuple[Tensor, Tensor]]:
        return self.batches

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.samples_delivered += len(batch[0])
        self.batches_delivered += 1
        self.rank_shard = RankShard(len(batch[0]), len(batch[0]))
        self.optimizer.zero_grad()
        for (x, y), weight in micro_batches(batch, math.ceil(len(batch[0]) / self.parts)):
            (self.loss(self.model(x), y) * weight).backward()
        self.optimizer.step()

    def epoch(self, batches: list[tuple[Tensor, Tensor]]) -> Diversity | None:
        """All of it, the oracle's own pass included."""
        self.batches = batches
        if self.estimator is not None:
            self.estimator.start()
        for batch in batches:
            self.step(batch)
        return None if self.estimator is None else self.estimator.finish()


def cost(problem: Problem, batch_size: int, repeats: int) -> dict[str, float | None]:
    """Processor time of an epoch of four steps over the plain loop's; None where the model cannot be measured."""
    batches = [problem.data(batch_size) for _ in range(4)]
    loops: dict[str, Loop] = {}
    ratios: dict[str, float | None] = {}
    for name in ("plain", "cut in two", *BUILDS):
        torch.manual_seed(0)
        loop = Loop(problem.build(), problem.loss, name, lr=0.01)
        try:
            loop.epoch(batches)
            loops[name] = loop
        except TypeError:  # no rule, or BatchNorm
            ratios[name] = None
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repeats):
        for name, loop in loops.items():
            began = time.process_time()
            loop.epoch(batches)
            seconds[name].append(time.process_time() - began)
    plain = min(seconds["plain"])
    return ratios | {name: min(times) / plain for name, times in seconds.items()}


def draw(generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    inputs = torch.randn(STEPS, BATCH, DIMENSION, generator=generator, dtype=torch.float64)
    return list(zip(inputs, torch.randn(STEPS, BATCH, 1, generator=generator, dtype=torch.float64), strict=True))


def error(name: str, draws: int) -> tuple[float, float]:
    """(relative error, coverage of the interval); each draw is an epoch of new data at the same weights."""
    model, generator = nn.Linear(DIMENSION, 1, bias=False).double(), torch.Generator().manual_seed(0)
    nn.init.constant_(model.weight, OFFSET / math.sqrt(DIMENSION))
    loop = Loop(model, lambda out, y: (out - y).square().mean() / 2, name, lr=0.0)
    found = [loop.epoch(draw(generator)) for _ in range(draws)]
    off = [each.noise_scale / NOISE_SCALE - 1 for each in found if each is not None and each.is_defined]
    intervals = [each.noise_scale_interval() for each in found if each is not None and each.spread is not None]
    held = [low <= NOISE_SCALE <= high for low, high in intervals]
    return math.sqrt(statistics.fmean(x * x for x in off)), statistics.fmean(held) if held else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="MLP,ResNet-20 GroupNorm,ResNet-20 BatchNorm")
    parser.add_argument("--batches", default="64")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    columns = [(row, int(size)) for row in arguments.rows.split(",") for size in arguments.batches.split(",")]
    costs = [cost(PROBLEMS[row], size, arguments.repeats) for row, size in columns]
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), {arguments.repeats} repeats")
    print(f"error: {arguments.draws} draws of {STEPS} batches of {BATCH}, noise scale {NOISE_SCALE:g}\n")
    print("| estimator | error | coverage |" + "".join(f" {row}, {size} |" for row, size in columns))
    print("|---|---|---|" + "---|" * len(columns))
    for name in ("plain", "cut in two", *BUILDS):
        off, coverage = error(name, arguments.draws) if name in BUILDS else (math.nan, math.nan)
        shown = [_percent(off), _percent(coverage), *("-" if c[name] is None else f"{c[name]:.2f}" for c in costs)]
        print(f"| {name} | " + " | ".join(shown) + " |")


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"


if __name__ == "__main__":
    main()
