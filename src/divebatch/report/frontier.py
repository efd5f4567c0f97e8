"""Score batch-size policies against the frontier: the best losses of fixed batches with tuned rates.

A method's ratio is its steps over the frontier's steps for the same loss. The frontier is the lower envelope of the
fixed sizes in (log2 of steps, loss), with straight lines between them. Only the part from the knee on is used. In the
flat part, an octave of steps changes the loss less than chance does, so a ratio would mean nothing.
"""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from divebatch.errors import RecordError
from divebatch.report.drawing import looks_for, require_matplotlib
from divebatch.report.load import RecordedRun, load_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIXED = "fixed"
"""The method of all trials with a fixed batch size."""
TOLERANCE = 0.005
"""Relative loss above the best that the knee may have."""
BEST, NEAR = 3, 0.05
"""Sizes that show how much sizes differ by chance: the best few, and all within this relative loss of the best."""
RESAMPLES = 2000
LEAST_RATES = 3
"""Fewest rates of a size: the best rate and a worse rate on each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A finished run, as in a line of JSON.

    Args:
        workload: The name of the workload, for instance that of an experiment.
        method: The method's name, which is "fixed" for every fixed batch size.
        batch_size: The first batch size, in samples.
        lr: The highest learning rate of the first batch size.
        seed: The seed, which determines data order and first weights.
        steps: Optimizer steps of the run.
        loss: The final loss on held-out data; infinite if training diverged.
    """

    workload: str
    method: str
    batch_size: int
    lr: float
    seed: int
    steps: int
    loss: float


@dataclass(frozen=True, slots=True)
class FixedSize:
    """A fixed batch size at its tuned rate, on the frontier or above."""

    batch_size: int
    lr: float
    """The best rate on the first seed."""
    steps: int
    losses: Mapping[int, float]
    """The loss of each seed."""
    problem: str = ""
    """The reason why the rate does not count as tuned. Empty: the rate is tuned."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a method on one workload; numbers are None if `problem` names a reason."""

    method: str
    batch_size: int
    """The first batch size."""
    steps: float
    """Mean steps over seeds."""
    loss: float
    """Mean loss over seeds."""
    num_seeds: int
    """Number of seeds common to the method and all fixed sizes."""
    ratio: float | None = None
    """The method's steps over the frontier's at equal loss."""
    interval: tuple[float, float] | None = None
    """The ratio's 95 % interval, from a bootstrap over paired seeds. None: a single seed."""
    is_bound: bool = False
    """Whether the ratio is an upper bound, because the loss is better than the knee's."""
    at_equal_steps: float | None = None
    """The method's loss over the frontier's at equal steps, minus 1."""
    against_first: float | None = None
    """The method's loss over that of the fixed batch of its first size, minus 1."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Frontier:
    """The frontier of one workload: its fixed sizes, the smallest first, and the score of each method."""

    workload: str
    sizes: Sequence[FixedSize]
    knee: int | None
    """The size with the fewest steps whose loss cannot be distinguished from the best."""
    noise: float | None
    """Standard error of the difference between two sizes' mean losses. None: a single seed."""
    scores: Sequence[Score]
    problems: Sequence[str]
    """The reasons why nothing is scored."""


# From records to trials


def read_trials(path: Path) -> list[Trial]:
    """Read the trials of a file or folder: lines of trials in `.jsonl` files, or records of `divebatch run`."""
    files = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
    trials = [trial for file in files for trial in _read_lines(file)]
    if not trials and path.is_dir():
        found = [_from_run(each.name, run) for each in load_runs(path).experiments for run in each.runs]
        trials = [trial for trial in found if trial is not None]
    if not trials:
        raise RecordError(f"'{path}' holds no finished runs: give a folder that `divebatch run --out` wrote, or trials")
    return trials


def _read_lines(file: Path) -> Iterable[Trial]:
    names = [each.name for each in fields(Trial)]
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            values = json.loads(line)
            loss = math.inf if values["loss"] is None else float(values["loss"])
            yield Trial(**{**{name: values[name] for name in names}, "loss": loss})
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"'{file}' line {number} is not a trial: {error!r}") from error


def _from_run(workload: str, run: RecordedRun) -> Trial | None:
    """Return a recorded run as a trial; None: the run has not ended."""
    if not run.is_finished() or run.last is None:
        return None
    metric, method = run.header.metric, run.header.config["method"]
    loss = getattr(run.last, metric.name) if metric.better == "lower" else run.last.val_loss
    return Trial(
        workload=workload,
        method=FIXED if run.kind_of("method", "policy") == FIXED else run.header.method,
        batch_size=method["batch_size"],
        lr=method["lr"],
        seed=run.header.seed,
        steps=run.last.steps,
        loss=math.inf if loss is None else loss,
    )


# From trials to scores


def score(trials: Iterable[Trial]) -> list[Frontier]:
    """Return the frontier and scores of each workload, in the order of the trials."""
    by_workload: dict[str, list[Trial]] = {}
    for trial in trials:
        by_workload.setdefault(trial.workload, []).append(trial)
    return [_score_workload(name, own) for name, own in by_workload.items()]


def _score_workload(name: str, trials: Sequence[Trial]) -> Frontier:
    sizes = tuned_sizes(trials)
    problems = [each.problem for each in sizes if each.problem]
    if len(sizes) < 2:
        problems.append("a frontier needs at least two fixed sizes (method 'fixed')")
    seeds = _common_seeds(sizes)
    if not seeds:
        problems.append("no seed was run with all fixed sizes at their tuned rates")
    methods = dict.fromkeys((each.method, each.batch_size, each.lr) for each in trials if each.method != FIXED)
    if problems:
        return Frontier(name, sizes, None, None, [], problems)
    noise = _noise(sizes, seeds)
    curve = Envelope.through(sizes, seeds)
    knee = curve.knee(noise or 0.0)
    scores = [_score_method(trials, method, sizes, knee) for method in methods]
    knee_size = next(each.batch_size for each in sizes if each.steps == round(2**knee))
    return Frontier(name, sizes, knee_size, noise, scores, [])


def tuned_sizes(trials: Iterable[Trial]) -> list[FixedSize]:
    """Return each fixed size at its best rate on the first seed."""
    found: dict[int, list[Trial]] = {}
    for trial in trials:
        if trial.method == FIXED:
            found.setdefault(trial.batch_size, []).append(trial)
    return [_tuned(size, found[size]) for size in sorted(found)]


def _tuned(size: int, trials: Sequence[Trial]) -> FixedSize:
    first = min(each.seed for each in trials)
    losses = {each.lr: each.loss for each in trials if each.seed == first}
    rates = sorted(losses)
    best = min(rates, key=lambda rate: losses[rate])
    problem = ""
    if len(rates) < LEAST_RATES:
        problem = f"fixed {size}: {len(rates)} rates were tried, and {LEAST_RATES} are needed"
    elif best in (rates[0], rates[-1]):
        side, hint = ("lowest", "lower") if best == rates[0] else ("highest", "higher")
        problem = f"fixed {size}: its best rate {best:g} is the {side} that was tried: try a {hint} one"
    own = [each for each in trials if each.lr == best]
    return FixedSize(size, best, own[0].steps, {each.seed: each.loss for each in own}, problem)


def _common_seeds(sizes: Sequence[FixedSize]) -> list[int]:
    return sorted(set.intersection(*(set(each.losses) for each in sizes))) if sizes else []


def _noise(sizes: Sequence[FixedSize], seeds: Sequence[int]) -> float | None:
    """Return the standard error of a difference between two sizes' means, without effects of a seed on all sizes.

    Only the best sizes count, because barely stable training at large sizes scatters more than at the knee.
    """
    table = np.array([[each.losses[seed] for seed in seeds] for each in sizes])
    table = table[np.isfinite(table.mean(1))]
    table = table[np.argsort(table.mean(1))]
    best = table[0].mean()
    near = max(BEST, int((table.mean(1) <= best + NEAR * abs(best)).sum()))
    table = table[:near]
    near, repeats = table.shape
    if repeats < 2 or near < 2:
        return None
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    variance = (rest**2).sum() / ((near - 1) * (repeats - 1))
    return math.sqrt(2 * variance / repeats)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The lower envelope of fixed sizes, whose losses fall as log2 of the steps rises."""

    steps: Sequence[float]
    losses: Sequence[float]

    @classmethod
    def through(cls, sizes: Sequence[FixedSize], seeds: Sequence[int]) -> "Envelope":
        """Build the envelope of the mean losses over `seeds`, which may repeat."""
        means = sorted((math.log2(each.steps), float(np.mean([each.losses[s] for s in seeds]))) for each in sizes)
        kept: list[tuple[float, float]] = []
        for steps, loss in means:
            if math.isfinite(loss) and (not kept or loss < kept[-1][1]):
                kept.append((steps, loss))
        return cls([steps for steps, _ in kept], [loss for _, loss in kept])

    def knee(self, noise: float) -> float:
        """Return log2 of the fewest steps whose loss is within the tolerance or the noise of the best."""
        best = self.losses[-1]
        bound = best + max(TOLERANCE * abs(best), noise)
        return next(steps for steps, loss in zip(self.steps, self.losses, strict=True) if loss <= bound)

    def loss_at(self, steps: float) -> float | None:
        """Return the loss at log2 of the steps; None: outside of the envelope."""
        if not self.steps[0] <= steps <= self.steps[-1]:
            return None
        return float(np.interp(steps, self.steps, self.losses))

    def steps_for(self, loss: float) -> float | None:
        """Return log2 of the steps to a loss; None: the loss is outside of the envelope."""
        if not self.losses[-1] <= loss <= self.losses[0]:
            return None
        return float(np.interp(-loss, [-each for each in self.losses], self.steps))

    def octaves(self, steps: float, loss: float, knee: float) -> tuple[float | None, bool]:
        """Return log2 of a ratio, and whether this is a bound; None: the frontier does not reach this loss."""
        knee_loss = float(np.interp(knee, self.steps, self.losses))
        is_bound = loss < knee_loss
        needed = knee if is_bound else self.steps_for(loss)
        return (None if needed is None else steps - needed), is_bound


def _score_method(
    trials: Sequence[Trial], method: tuple[str, int, float], sizes: Sequence[FixedSize], knee: float
) -> Score:
    name, size, _ = method
    own = {each.seed: each for each in trials if (each.method, each.batch_size, each.lr) == method}
    seeds = [seed for seed in _common_seeds(sizes) if seed in own]
    if not seeds:
        return Score(name, size, math.nan, math.nan, 0, problem="no seed in common with all fixed sizes")
    steps, loss = (float(np.mean([getattr(own[s], key) for s in seeds])) for key in ("steps", "loss"))
    if not math.isfinite(loss):
        lost = sum(not math.isfinite(own[seed].loss) for seed in seeds)
        return Score(name, size, steps, loss, len(seeds), problem=f"diverged with {lost} of {len(seeds)} seeds")

    def octaves(chosen: Sequence[int]) -> tuple[float | None, bool]:
        log_steps = math.log2(np.mean([own[s].steps for s in chosen]))
        mean = float(np.mean([own[s].loss for s in chosen]))
        return Envelope.through(sizes, chosen).octaves(log_steps, mean, knee)

    curve = Envelope.through(sizes, seeds)
    beside = curve.loss_at(math.log2(steps))
    first = next((each for each in sizes if each.batch_size == size), None)
    against = float(np.mean([first.losses[s] for s in seeds])) if first is not None else None
    numbers: dict[str, Any] = {
        "at_equal_steps": None if beside is None else loss / beside - 1,
        "against_first": None if against is None else loss / against - 1,
    }
    value, is_bound = octaves(seeds)
    if value is None:
        numbers["problem"] = "its loss is worse than that of the largest fixed size"
    elif is_bound and value > 0:
        numbers["problem"] = "on the flat part: more steps than the knee, whose loss is as good"
    else:
        # The same resampled seeds every time.
        drawn = np.random.default_rng(0).choice(seeds, (RESAMPLES, len(seeds))).tolist() if len(seeds) > 1 else []
        found = [each for each, _ in map(octaves, drawn) if each is not None]
        ends = np.exp2(np.quantile(found, [0.025, 0.975])).tolist() if found else None
        numbers |= {"ratio": 2**value, "interval": tuple(ends) if ends else None, "is_bound": is_bound}
    return Score(name, size, steps, loss, len(seeds), **numbers)


# Tables and a picture

COLUMNS = ("method", "from", "steps", "loss", "ratio", "95 %", "at equal\nsteps", "against\nfixed", "seeds")


def rows(frontier: Frontier) -> list[tuple[str, ...]]:
    """Return a workload's rows of `COLUMNS` for each method with a ratio, the lowest first."""
    found = []
    for each in sorted(frontier.scores, key=lambda each: each.ratio or math.inf):
        if each.ratio is not None:
            ratio = f"{'<= ' if each.is_bound else ''}{each.ratio:.3f}"
            interval = "" if each.interval is None else f"{each.interval[0]:.2f}-{each.interval[1]:.2f}"
            relative = ("" if part is None else f"{part:+.2%}" for part in (each.at_equal_steps, each.against_first))
            numbers = (str(each.batch_size), f"{each.steps:.0f}", f"{each.loss:.4f}", ratio, interval)
            found.append((each.method, *numbers, *relative, str(each.num_seeds)))
    return found


def write_csv(frontiers: Iterable[Frontier], path: Path) -> None:
    """Write all fixed sizes and scores as one table of plain numbers."""
    names = [each.name for each in fields(Score) if each.name != "interval"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["workload", *names, "low", "high", "lr"])
        for frontier in frontiers:
            for size in frontier.sizes:
                loss = float(np.mean(list(size.losses.values())))
                known = {"method": FIXED, "batch_size": size.batch_size, "steps": size.steps, "loss": loss}
                known |= {"num_seeds": len(size.losses), "problem": size.problem}
                writer.writerow([frontier.workload, *(known.get(name) for name in names), None, None, size.lr])
            for each in frontier.scores:
                ends = each.interval or (None, None)
                writer.writerow([frontier.workload, *(getattr(each, name) for name in names), *ends, None])


def draw(frontier: Frontier) -> "Figure":
    """Draw loss against steps: the frontier as a line, methods as points, all fixed sizes as small dots."""
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(8.6, 4.4), layout="constrained")
    axes = figure.subplots()
    seeds = _common_seeds(frontier.sizes)
    if seeds:
        curve = Envelope.through(frontier.sizes, seeds)
        axes.plot([2**each for each in curve.steps], curve.losses, color="#222222", linewidth=1.5, label="frontier")
    means = [float(np.mean(list(each.losses.values()))) for each in frontier.sizes]
    for each, mean in zip(frontier.sizes, means, strict=True):
        if math.isfinite(mean):
            axes.plot(each.steps, mean, ".", color="#222222")
            axes.annotate(str(each.batch_size), (each.steps, mean), xytext=(4, 4), textcoords="offset points")
    shown = [each for each in frontier.scores if math.isfinite(each.loss)]
    losses = [each.loss for each in shown] + [mean for mean in means if math.isfinite(mean)]
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    high = min(high, 3 * float(np.median(losses or [1.0])) - 2 * low)
    margin = 0.05 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    names = list(dict.fromkeys(each.method for each in shown))
    looks = looks_for(names)
    for number, name in enumerate(names):
        own = [each for each in shown if each.method == name]
        above = ", ".join(f"{each.loss:.3g}" for each in own if each.loss > high)
        axes.plot(
            [each.steps for each in own],
            [min(each.loss, high) for each in own],
            "osD^vP"[number % 6],
            color=looks[name].color,
            label=f"{name} (above: {above})" if above else name,
        )
    axes.set_xscale("log", base=2)
    ticks = sorted({each.steps for each in frontier.sizes})
    apart = [each for place, each in enumerate(ticks) if place == 0 or each >= 1.4 * ticks[place - 1]]
    axes.set_xticks(apart, [str(each) for each in apart])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="Optimizer steps (dots: fixed batches, with their size)")
    axes.set_title(f"{frontier.workload}: loss on held-out data", loc="left")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure
