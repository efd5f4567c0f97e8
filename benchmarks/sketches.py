"""How far sketched products of gradients are off against whole ones, and what either costs.

A byte-level GPT is trained with AdamW on this repository's own sources. Over the last steps each gradient is compared
with the two before it, whole and sketched: the table shows, for each size of a sketch, the error of the mean ||G||^2,
the standard deviation that signs which stay the same give it, and the scatter that sketches add, against that of the
whole gradients. Costs are processor time of a step over that of a plain one.

    python benchmarks/sketches.py --layers 4 --width 256 --length 128 --batch 8
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from divebatch import Diversity
from divebatch.estimators import Moments, TrainingContext
from divebatch.estimators.average import PairAverage, StepEstimate, read
from divebatch.estimators.moments import KEPT, SuccessiveGradients, extrapolation
from divebatch.estimators.second_moment import Preconditioner, StepGradients
from divebatch.estimators.step_hooks import tell_steps
from divebatch.lab.models import GptNetwork
from divebatch.ranks import Ranks, RankShard

SIZES = tuple(2**power for power in (10, 12, 14, 16))
ROOT = Path(__file__).parents[1]


def sequences(length: int) -> Tensor:
    """The sources as rows of bytes, shuffled."""
    files = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "tests").rglob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    rows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


class Training:
    """The loop, and who delivers its samples."""

    ranks = Ranks.alone()

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        shape = {"layers": arguments.layers, "width": arguments.width, "heads": arguments.width // 64}
        self.model = GptNetwork(256, arguments.length, **shape, tied=False)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.rows, self.batch = sequences(arguments.length), arguments.batch
        self.samples_delivered = self.batches_delivered = 0
        self.rank_shard = RankShard(self.batch, self.batch)

    @property
    def local_samples_delivered(self) -> int:
        return self.samples_delivered

    def full_pass(self) -> list[Tensor]:
        return []

    def backward(self) -> None:
        places = (torch.arange(self.batch) + self.samples_delivered) % len(self.rows)
        self.samples_delivered += self.batch
        self.batches_delivered += 1
        self.optimizer.zero_grad()
        rows = self.rows[places]
        cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


def sq_norms(rows: list[StepEstimate]) -> Tensor:
    return torch.tensor([row.numbers(read(row.parts))[2] for row in rows])


def errors(training: Training, steps: int, *, preconditioned: bool) -> None:
    parameters = dict(training.model.named_parameters())
    kinds = {
        size: SuccessiveGradients(
            parameters, training.optimizer, PairAverage(), sketch=bool(size), sketch_size=size or None, seed=size
        )
        for size in (0, *SIZES)
    }
    rows: dict[int, list[StepEstimate]] = {size: [] for size in kinds}
    divides = Preconditioner(training.optimizer, parameters) if preconditioned else None
    for number in range(steps):
        training.backward()
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for size, each in kinds.items():
            each.add_gradients(StepGradients(gradients, preconditioner=divides), training.batch)
            if number >= KEPT - 1:
                rows[size].append(each.products(extrapolation(training.optimizer)))
        training.optimizer.step()
    whole = sq_norms(rows[0])
    mean, scatter = float(whole.mean()), float(whole.std())
    trace = statistics.mean(row.numbers(read(row.parts))[1] for row in rows[0])
    noise_scale = Diversity.from_noise(trace, mean, 1).noise_scale
    own = scatter / math.sqrt(len(whole)) / abs(mean)
    print(f"{'preconditioned' if preconditioned else 'plain'}: noise scale {noise_scale:.0f}, ")
    print(f"  uncertainty of ||G||^2 over {len(whole)} steps {own:.1%}")
    for size in SIZES:
        difference = sq_norms(rows[size]) - whole
        off, added = float(difference.mean()) / mean, float(difference.std()) / scatter
        print(
            f"  {size:6d} numbers: off by {off:+.2%}, of {math.sqrt(2 / size):.2%}; scatter {added:.3f} of the noise's"
        )


def cost(training: Training, steps: int) -> None:
    def seconds() -> float:
        begin = time.process_time()
        training.step()
        return time.process_time() - begin

    plain = min(seconds() for _ in range(steps))
    print(f"a plain step: {plain:.2f} s of processor time")
    for name, settings in (("copies", {"sketch": False}), ("sketches", {"sketch": True})):
        for preconditioned in (False, True):
            estimator = Moments(preconditioned=preconditioned, **settings)
            context = TrainingContext(training.model, training, training.optimizer)
            estimator.bind(context)
            estimator.start()
            stop = tell_steps(estimator, context)
            measured = min([seconds() for _ in range(KEPT + steps)][KEPT:])
            stop()
            estimator.close()
            print(f"  {name}{', preconditioned' if preconditioned else ''}: {measured / plain:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 2, "width": 64, "length": 64, "batch": 16, "warmup": 100, "steps": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cost", action="store_true", help="also measure the cost")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(arguments)
    print(f"{sum(p.numel() for p in training.model.parameters()):,} parameters, batch {training.batch}")
    for _ in range(arguments.warmup):
        training.step()
    for preconditioned in (False, True):
        errors(training, arguments.steps, preconditioned=preconditioned)
    if arguments.cost:
        cost(training, 3)


if __name__ == "__main__":
    main()
