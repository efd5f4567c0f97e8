"""What divebatch costs on the paper's logistic regression, as ratios to the same loop written by hand.

Three loops train the same model on the same batches: by hand (a permutation and `index_select`), with a Controller
that never measures (Fixed), and with one that measures every step (DiveBatch held at its cap). Whole epochs are timed,
`control.step()` included, interleaved, and the median of the per-repeat ratios is reported. Peak memory is the peak of
bytes in CPU tensors over one epoch, read from the profiler's allocation events; the dataset is outside.

    python benchmarks/synthetic_step.py [--repeats 41] [--check]
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_fn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, DiveBatch, Fixed, Policy

NUM_SAMPLES, NUM_FEATURES = 16_000, 512
LIMITS = {  # (batch size, loop): largest allowed time ratio
    (128, "not measuring"): 1.03,
    (128, "measuring"): 1.6,
    (4096, "measuring"): 1.35,
}
MEMORY_LIMIT = 1.02

Epoch = Callable[[], None]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def by_hand(data: TensorDataset, batch_size: int) -> Epoch:
    model = nn.Linear(NUM_FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    features, labels = data.tensors

    def epoch() -> None:
        order = torch.randperm(NUM_SAMPLES).split(batch_size)
        train(model, optimizer, ((features.index_select(0, i), labels.index_select(0, i)) for i in order))

    return epoch


def with_divebatch(data: TensorDataset, batch_size: int, policy: Policy) -> Epoch:
    model = nn.Linear(NUM_FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveLoader(data, batch_size, seed=0)
    # Both policies stand at their cap, where nothing would be measured.
    control = Controller(model, optimizer, loader, policy, measure_always="diversity" in policy.needs)

    def epoch() -> None:
        train(model, optimizer, loader)
        control.step()

    return epoch


def loops(data: TensorDataset, batch_size: int) -> dict[str, Epoch]:
    return {
        "by hand": by_hand(data, batch_size),
        "not measuring": with_divebatch(data, batch_size, Fixed()),
        "measuring": with_divebatch(data, batch_size, DiveBatch(1.0, batch_size)),
    }


def time_ratios(epochs: dict[str, Epoch], repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    for repeat in range(-3, repeats):  # three rounds to warm up
        for name, epoch in epochs.items():
            started = time.perf_counter()
            epoch()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - started)
    hand = seconds["by hand"]
    return {name: statistics.median(a / b for a, b in zip(times, hand, strict=True)) for name, times in seconds.items()}


def peak_bytes(epoch: Epoch) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        epoch()
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    options = parser.parse_args()
    torch.manual_seed(0)
    features = torch.rand(NUM_SAMPLES, NUM_FEATURES)
    data = TensorDataset(features, (features[:, :1] > 0.5).float())
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, n={options.repeats}")
    print(f"{'batch':>6}  {'loop':<14} {'time':>6}  {'limit':>6}  {'memory':>7}  {'limit':>6}")
    missed = 0
    for batch_size in (128, 4096):
        epochs = loops(data, batch_size)
        ratios = time_ratios(epochs, options.repeats)
        memory = {name: peak_bytes(epoch) for name, epoch in epochs.items()}
        for name, ratio in ratios.items():
            limit, bytes_ratio = LIMITS.get((batch_size, name)), memory[name] / memory["by hand"]
            missed += (limit is not None and ratio > limit) or bytes_ratio > MEMORY_LIMIT
            shown = f"{limit:.2f}" if limit else "-"
            print(f"{batch_size:>6}  {name:<14} {ratio:6.3f}  {shown:>6}  {bytes_ratio:7.3f}  {MEMORY_LIMIT:>6}")
    if options.check and missed:
        raise SystemExit(f"{missed} limits missed")


if __name__ == "__main__":
    main()
