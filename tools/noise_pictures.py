"""Draw the three pictures of docs/noise-scale.md, and print the numbers that the page states.

`python tools/noise_pictures.py` computes two linear regressions (seconds on a CPU), reads the noise scales of
results/benchmarks/estimator-traces-h200.jsonl, and writes docs/figures/noise-*.svg. Text is grey and the background is
left out, so the pictures can be read on light and on dark pages.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
TRACES = ROOT / "results" / "benchmarks" / "estimator-traces-h200.jsonl"
GREY, BLUE, ORANGE, GREEN = "#808080", "#3A8DD0", "#E07B00", "#14A37A"
STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "savefig.transparent": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "noise pictures",
    **{f"{part}.color": GREY for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}": GREY for part in ("edgecolor", "labelcolor", "titlecolor")},
    "legend.labelcolor": GREY,
}
Floats = NDArray[np.float64]

# Two clouds: the gradients of single samples, early and late in a regression of two weights

SAMPLES, BATCH = 600, 8


class Cloud(NamedTuple):
    name: str
    gradients: Floats
    """One row a sample."""

    @property
    def mean(self) -> Floats:
        return np.asarray(self.gradients.mean(0))

    @property
    def noise_scale(self) -> float:
        """tr(Sigma) / ||G||^2."""
        return float(self.gradients.var(0, ddof=1).sum() / (self.mean**2).sum())


def clouds() -> list[Cloud]:
    """Return the gradients at the first weights and after 60 steps of SGD with batches of 8."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(SAMPLES, 2))
    y = x @ np.array([2.0, 1.0]) + draw.normal(size=SAMPLES)
    weights, found = np.zeros(2), []
    for step in range(61):
        if step in (0, 60):
            found.append(Cloud("at the start" if step == 0 else "after 60 steps", ((x @ weights - y)[:, None]) * x))
        rows = draw.integers(SAMPLES, size=BATCH)
        weights = weights - 0.05 * (x[rows] * (x[rows] @ weights - y[rows])[:, None]).mean(0)
    return found


def draw_clouds(found: Sequence[Cloud], figure: Path) -> None:
    plt = pyplot()
    drawing, panels = plt.subplots(1, 2, figsize=(9.4, 4.6), layout="constrained", sharex=True, sharey=True)
    for axes, cloud in zip(panels, found, strict=True):
        means = cloud.gradients[: SAMPLES // BATCH * BATCH].reshape(-1, BATCH, 2).mean(1)
        axes.plot(*cloud.gradients.T, ".", color=GREY, alpha=0.45, markersize=4, label="one sample")
        axes.plot(*means.T, "o", color=BLUE, alpha=0.8, markersize=4, label=f"mean of {BATCH} samples")
        axes.plot(*zip((0, 0), cloud.mean, strict=True), color=ORANGE, lw=2.5)
        axes.plot(*cloud.mean, "o", color=ORANGE, markersize=8, label=f"mean of all {SAMPLES}")
        axes.set(title=f"{cloud.name}: noise scale {cloud.noise_scale:.0f} samples", xlim=(-8, 5), ylim=(-7, 5))
        axes.set(xlabel="gradient of the first weight")
    panels[0].set(ylabel="gradient of the second weight")
    drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, markerscale=1.4)
    save(drawing, figure)


# Steps against batch size: the same regression with 20 weights, each batch size with its best learning rate

SIZES = tuple(2**power for power in range(11))
RATES = tuple(2.0 ** (-power / 2) for power in range(14))
REPEATS, MOST_STEPS, TARGET = 16, 6000, 0.02
VARIANCES = np.geomspace(0.03, 1, 20)
"""Of the features, one for each weight."""


class Cost(NamedTuple):
    batch_size: int
    steps: float
    rate: float


def steps_to_target(batch_size: int, rate: float, most: int) -> float:
    """Return the mean number of steps until the excess loss is at most 2 % of the first; infinite beyond `most`."""
    draw = np.random.default_rng(batch_size)
    distance = np.ones((REPEATS, len(VARIANCES)))  # of the weights from the best ones
    first, arrived = VARIANCES.sum(), np.full(REPEATS, np.inf)
    for step in range(1, most + 1):
        x = draw.normal(size=(REPEATS, batch_size, len(VARIANCES))) * np.sqrt(VARIANCES)
        residual = (x @ distance[..., None])[..., 0] - 2 * draw.normal(size=(REPEATS, batch_size))
        distance = distance - rate * (residual[:, None] @ x)[:, 0] / batch_size
        excess = distance**2 @ VARIANCES
        if not (excess < 1e3 * first).all():
            return np.inf
        arrived = np.minimum(arrived, np.where(excess <= TARGET * first, step, np.inf))
        if np.isfinite(arrived).all():
            return float(arrived.mean())
    return np.inf


def costs() -> list[Cost]:
    """Return the fewest steps for each batch size over all learning rates."""
    found = []
    for size in SIZES:
        best, most = Cost(size, np.inf, 0.0), MOST_STEPS
        for rate in RATES:
            steps = steps_to_target(size, rate, most)
            if steps < best.steps:
                best, most = Cost(size, steps, rate), int(4 * steps)
        found.append(best)
    return found


def fitted(found: Sequence[Cost]) -> tuple[float, float]:
    """Return the fewest steps and B of steps = fewest * (1 + B / batch size), by least squares of logarithms."""
    sizes, steps = np.array([each.batch_size for each in found]), np.array([each.steps for each in found])
    scales = np.geomspace(1, 10_000, 2000)
    shapes = np.log1p(scales[:, None] / sizes)
    offsets = (np.log(steps) - shapes).mean(1, keepdims=True)
    best = ((np.log(steps) - shapes - offsets) ** 2).sum(1).argmin()
    return float(np.exp(offsets[best, 0])), float(scales[best])


def draw_costs(found: Sequence[Cost], figure: Path) -> None:
    plt = pyplot()
    fewest, scale = fitted(found)
    sizes = np.geomspace(SIZES[0], SIZES[-1], 200)
    drawing, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    axes.plot(sizes, fewest * (1 + scale / sizes), color=BLUE, label=f"{fewest:.1f} (1 + {scale:.0f} / batch size)")
    axes.plot([each.batch_size for each in found], [each.steps for each in found], "o", color=ORANGE, label="measured")
    axes.axvline(scale, color=GREY, linestyle=":")
    axes.set(xlabel="batch size", ylabel="optimizer steps to the same loss", xscale="log", yscale="log")
    axes.annotate("twice the batch,\nhalf the steps", (2.2, fewest * scale / 2.2), (4.5, fewest * scale / 2.2))
    axes.annotate("twice the batch,\nhardly fewer steps", (260, 1.35 * fewest), (190, 2.6 * fewest))
    axes.annotate(f"B = {scale:.0f}", (scale, axes.get_ylim()[0] * 1.1), (scale * 1.1, fewest * scale / 2))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.legend(loc="lower left")
    save(drawing, figure)


# Growth: ResNet-18 on CIFAR-10, from the records


def growth() -> dict[int, list[float]]:
    """Return the noise scales of all seeds by epoch, as `split` measured them at a fixed batch of 512."""
    found: dict[int, list[float]] = {}
    for line in map(json.loads, TRACES.read_text().splitlines()):
        if line.get("estimator") == "split" and line["epoch"] <= 35:  # later the gradient is lost in the noise
            found.setdefault(line["epoch"], []).append(line["noise_scale"])
    return dict(sorted(found.items()))


def draw_growth(found: dict[int, list[float]], figure: Path) -> None:
    plt = pyplot()
    drawing, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    lowest, highest = ([end(each) for each in found.values()] for end in (min, max))
    axes.fill_between(found.keys(), lowest, highest, color=GREEN, alpha=0.25, label="range of three seeds")
    axes.plot(found.keys(), [mean(each) for each in found.values()], "o-", color=GREEN, label="noise scale")
    axes.axhline(512, color=GREY, linestyle=":", label="batch size: 512 throughout")
    axes.set(xlabel="epoch", ylabel="samples", yscale="log", xlim=(0, 36))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper left")
    save(drawing, figure)


def pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    return plt


def save(drawing: Any, figure: Path) -> None:
    drawing.savefig(figure, metadata={"Date": None})
    pyplot().close(drawing)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FIGURES)
    folder = parser.parse_args(words).out
    two, steps, epochs = clouds(), costs(), growth()
    for cloud in two:
        print(f"{cloud.name}: noise scale {cloud.noise_scale:.1f}")
    for cost in steps:
        print(f"batch {cost.batch_size}: {cost.steps:.1f} steps at rate {cost.rate:.3g}")
    print("fit: {:.1f} steps at least, noise scale {:.0f}".format(*fitted(steps)))
    for epoch, scales in epochs.items():
        print(f"epoch {epoch}: {mean(scales):.0f} ({min(scales):.0f} to {max(scales):.0f}), {len(scales)} seeds")
    with pyplot().rc_context(STYLE):
        draw_clouds(two, folder / "noise-clouds.svg")
        draw_costs(steps, folder / "noise-steps.svg")
        draw_growth(epochs, folder / "noise-growth.svg")


if __name__ == "__main__":
    main()
