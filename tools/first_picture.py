"""Draws docs/figures/first-picture.svg from the records in results/: what was measured, what followed, what it came to.

`python tools/first_picture.py` draws it anew and prints the numbers that README.md and docs/index.md tell.
"""

import argparse
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from divebatch.records import EpochRecord, read_run

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "figures" / "first-picture.svg"


class Method(NamedTuple):
    archive: str
    folder: str
    label: str
    color: str
    size_text: str


METHODS = {
    "auto-256": Method("policies-cifar10", "policies-cifar10", "Auto from 256", "#0072B2", "Auto from 256"),
    "sgd-tuned": Method(
        "policies-cifar10", "policies-cifar10", "the best fixed batch, 512", "#E69F00", "best fixed: 512"
    ),
    "auto-warmup": Method("policies-cifar10", "policies-cifar10", "Auto from 128", "#999999", "Auto from 128"),
}
BELOW: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.16)}
Runs = list[list[EpochRecord]]


class Outcome(NamedTuple):
    accuracy: float
    error: float
    """The standard error over seeds, like the accuracy in percent."""
    seconds: float
    steps: float


def read(name: str) -> Runs:
    """The epochs of every seed of a method."""
    method = METHODS[name]
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(ROOT / "results" / method.archive / "records.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        files = sorted((Path(folder) / method.folder / name).glob("seed-*.jsonl"))
        return [read_run(file)[1] for file in files]


def outcome(runs: Runs) -> Outcome:
    accuracies = [100 * (epochs[-1].val_accuracy or 0.0) for epochs in runs]
    return Outcome(
        accuracy=mean(accuracies),
        error=stdev(accuracies) / len(accuracies) ** 0.5,
        seconds=mean(epochs[-1].train_seconds or 0.0 for epochs in runs),
        steps=mean(epochs[-1].steps for epochs in runs),
    )


def noise_scales(runs: Runs) -> dict[int, list[float]]:
    """By epoch, those of all seeds; n * diversity = 1 + noise scale."""
    found: dict[int, list[float]] = {}
    for epochs in runs:
        dataset_size = epochs[0].samples
        for each in epochs:
            if each.diversity is not None:
                found.setdefault(each.epoch, []).append(dataset_size * each.diversity - 1)
    return {epoch: values for epoch, values in sorted(found.items()) if len(values) == len(runs)}


def medians(runs: Runs, name: str) -> list[float]:
    return [median(getattr(each, name) for each in same_epoch) for same_epoch in zip(*runs, strict=True)]


def draw_course(axes: Any, runs: dict[str, Runs]) -> None:
    """The noise scale, and the batch size that followed it."""
    scales = noise_scales(runs["auto-256"])
    lowest, highest = ([end(values) for values in scales.values()] for end in (min, max))
    axes.fill_between(scales.keys(), lowest, highest, color="#009E73", alpha=0.2, linewidth=0)
    axes.plot(scales.keys(), [median(values) for values in scales.values()], color="#009E73", label="noise scale")
    for name, method in METHODS.items():
        sizes = medians(runs[name], "batch_size")
        axes.step(range(1, len(sizes) + 1), sizes, where="mid", color=method.color, label=method.size_text)
    axes.set(xlabel="epoch", ylabel="samples", title="What the gradients ask for, and the batch size")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(**BELOW, ncols=2)


def draw_gain(axes: Any, runs: dict[str, Runs]) -> None:
    """Accuracy against the seconds of training."""
    for name, method in METHODS.items():
        seconds = medians(runs[name], "train_seconds")
        accuracy = [100 * value for value in medians(runs[name], "val_accuracy")]
        ends = outcome(runs[name])
        label = f"{method.label}: {ends.accuracy:.2f} % in {ends.seconds:.1f} s, {ends.steps:.0f} steps"
        axes.plot(seconds, accuracy, color=method.color, label=label)
        axes.plot(seconds[-1], accuracy[-1], marker="o", color=method.color)
    axes.set(
        ylim=(60, 96),
        xlabel="seconds of training",
        ylabel="validation accuracy (%)",
        title="Same accuracy, similar time",
    )
    axes.legend(**BELOW)


def draw(runs: dict[str, Runs], figure: Path) -> None:
    import matplotlib.pyplot as plt

    from divebatch.report.drawing import SETTINGS

    with plt.rc_context({**SETTINGS, "svg.hashsalt": "first picture"}):
        drawing, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.8), layout="constrained")
        draw_course(left, runs)
        draw_gain(right, runs)
        drawing.savefig(figure, metadata={"Date": None})
        plt.close(drawing)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args(words)
    runs = {name: read(name) for name in METHODS}
    for name in METHODS:
        print("{}: {:.2f} ± {:.2f} %, {:.1f} s, {:.0f} steps".format(name, *outcome(runs[name])))
    draw(runs, options.figure)


if __name__ == "__main__":
    main()
