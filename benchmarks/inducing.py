"""What noise on gradients, noise on weights and stratified orders cost, beside the plain step and the plain order.

    python benchmarks/inducing.py

Rounds alternate between the loops, and medians of their ratios to the plain one are printed.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from divebatch.data.order import Order, Shuffled
from divebatch.research import LangevinNoise, QuantizedGradients, StratifiedBatches

ROUNDS, STEPS = 21, 20
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "logistic regression, 512 features": (lambda: nn.Linear(512, 10), (512,)),
    "MLP 512-512-10": (lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)), (512,)),
    "small convolutional network": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
        ),
        (3, 16, 16),
    ),
}


def training(network: str, attach: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Callable[[], None]:
    """A loop of some steps at batch 128."""
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(128, *shape), torch.randint(10, (128,))
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    attach(model, optimizer)

    def run() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    return run


def ratios(loops: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The median over rounds of each loop's time over the first one's in the same round."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS + 1):
        for name, loop in loops.items():
            begin = time.perf_counter()
            loop()
            seconds[name].append(time.perf_counter() - begin)
    plain = next(iter(seconds.values()))
    return {
        name: median(mine / base for mine, base in list(zip(each, plain, strict=True))[1:])  # the first warms up
        for name, each in seconds.items()
    }


def drawing(order: Order) -> Callable[[], None]:
    return lambda: [order.draw(epoch) for epoch in range(3)] and None


def main() -> None:
    print("| | plain | QuantizedGradients(4) | LangevinNoise | bits sent, of the gradients in full |")
    print("|---|---|---|---|---|")
    for network in NETWORKS:
        quantize = QuantizedGradients(4)
        loops = {
            "plain": training(network, lambda *_: None),
            "quantized": training(network, lambda model, _, quantize=quantize: quantize.attach(model)),
            "langevin": training(network, lambda _, optimizer: LangevinNoise(optimizer, temperature=1e-6)),
        }
        times = " | ".join(f"{ratio:.2f}" for ratio in ratios(loops).values())
        print(f"| {network} | {times} | {quantize.bits_sent / quantize.bits_unrounded:.1%} |", flush=True)
    size = 10**5
    labels = torch.randint(10, (size,))
    orders = ratios({"plain": drawing(Shuffled(size)), "stratified": drawing(StratifiedBatches(labels))})
    begin = time.perf_counter()
    StratifiedBatches(labels).draw(0)
    milliseconds = (time.perf_counter() - begin) * 1e3
    told = f"{orders['stratified']:.0f} times plain shuffling, {milliseconds:.0f} ms an epoch"
    print(f"\nthe order of {size} samples: {told}")


if __name__ == "__main__":
    main()
