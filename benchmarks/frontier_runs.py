"""Train what the frontier of docs/when-it-pays.md is scored on: fixed batches with tuned rates, and policies beside.

    python benchmarks/frontier_runs.py --data-dir DATA --out results/frontier --jobs 2
    python benchmarks/frontier_runs.py --data-dir DATA --out results/frontier --plan     # what is left, and nothing run

Each run adds one line to OUT/WORKLOAD.jsonl as it ends. The same command continues where another stopped, on any
machine: what is recorded is not run again. Of each workload, first the rate of every fixed size is tuned on seed 0,
until the best rate has a worse neighbour on both sides. The knee is the largest size whose loss is within the
workload's tolerance of the best. Then come the fixed sizes and all methods from the knee, seed by seed.
"""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch

from divebatch.errors import DivergedError
from divebatch.lab import Run, execute, get_experiment
from divebatch.lab.schema import Method, Part
from divebatch.policies import POLICIES
from divebatch.records import read_run

sys.path.append(str(Path(__file__).parent))
from frontier_candidates import CANDIDATES

RATE_STEP = 2**0.5
"""Between two rates of a grid."""
MOST_RATES = 9
"""For one size, after which the grid is left as it is."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """A way of training from a first batch size: a policy with its settings, sizes as multiples of the first."""

    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    cap: int | None = 16
    every_steps: int | None = 8
    coupling: str | float | None = None
    under: int = 1
    """The first batch size is the knee over this."""

    def method(self, knee: int, rate: float) -> Method:
        """Return the method of an experiment."""
        size = max(1, knee // self.under)
        settings = {key: value.format(b=size, b4=4 * size) if isinstance(value, str) else value
                    for key, value in self.settings.items()}  # fmt: skip
        if settings.get("limited"):
            settings["peak"] = rate
        if self.cap is not None:
            settings["max_batch_size"] = self.cap * knee
        policy = Part(kind=self.policy, settings=settings)
        return Method(
            label=self.policy,
            batch_size=size,
            lr=rate,
            policy=policy,
            lr_coupling=self.coupling,
            every_steps=self.every_steps,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """An experiment with the sizes of its frontier, a first guess of a rate, and the methods that are scored.

    Args:
        experiment: Its name.
        sizes: The fixed batch sizes.
        guess: A size and a rate near its best one: the grid's centre.
        power: The power of the batch size that the best rate is expected to follow.
        methods: Names of `METHODS`.
        tolerance: The relative loss above the best that the knee may have.
        samples: Of a run, where that is not the experiment's.
        seeds: Paired seeds of everything.
        most_rate: The largest rate that is tried.
    """

    experiment: str
    sizes: Sequence[int]
    guess: tuple[int, float]
    power: float
    methods: Sequence[str]
    tolerance: float = 0.01
    samples: int | None = None
    seeds: int = 3
    most_rate: float = math.inf

    def rate(self, place: int) -> float:
        """Return a rate of the grid, to four digits, as it is recorded."""
        return float(f"{self.guess[1] * RATE_STEP**place:.4g}")

    def place(self, rate: float) -> int:
        """Return the rate's place in the grid."""
        return round(math.log(rate / self.guess[1], RATE_STEP))


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a workload."""

    workload: str
    method: str
    batch_size: int
    lr: float
    seed: int


def annealing(power: float, offset: float, **more: Any) -> Start:
    """Return growth with the schedule's decay: B0 * 2^(power * log2(1 / rho) + offset)."""
    settings = {"power": power, "offset": offset, **more.pop("settings", {})}
    return Start("anneal", settings, **more)


METHODS = {
    "auto": Start("auto"),
    "auto-sqrt": Start("auto", coupling="sqrt"),
    "auto-from-quarter": Start("auto", under=4),
    "seesaw-doublings": annealing(1.0, 0.5),
    "late-switch": Start("sample-schedule", {"schedule": "0:{b} 75%:{b4}"}, cap=None),
    "adabatch": Start("adabatch", {"every_epochs": 1}, cap=8, every_steps=None),
    "divebatch": Start("divebatch", {"delta": 0.1}, every_steps=None),
    "noise-doubling": Start("noise-doubling", every_steps=32),
    # Candidates that `auto` was chosen from: see results/frontier/README.md.
    "c1": annealing(0.75, 0.25),
    "seesaw-floor": annealing(1.0, 0.0),
    "limited-1-0.5": annealing(1.0, 0.5, settings={"limited": True}),
    "limited-1.25-0.5": annealing(1.25, 0.5, settings={"limited": True}),
    "halves-1-0.25": annealing(1.0, 0.25, settings={"limited": True, "sizes": "halves"}),
    "halves-1.25-0.25": annealing(1.25, 0.25, settings={"limited": True, "sizes": "halves"}),
    "halves-1.5-0.25": annealing(1.5, 0.25, settings={"limited": True, "sizes": "halves"}),
    "eighths-1.25": annealing(1.25, 0.0, settings={"limited": True, "sizes": "eighths"}),
    "lead-doublings": annealing(1.5, 0.25, settings={"limited": True, "lead": 2.0}),
    "horizon-0.5": Start("horizon", {"power": 0.5}),
    "horizon-1": Start("horizon", {"power": 1.0}),
    "horizon-1.5": Start("horizon", {"power": 1.5}),
    "larger-of-both": Start("larger-of-both", {"power": 1.0, "offset": 0.5}, every_steps=32),
    "noise-doubling-from-quarter": Start("noise-doubling", every_steps=32, under=4),
}
RIVALS = ("seesaw-doublings", "late-switch", "adabatch", "divebatch", "noise-doubling")
SGD = ("auto", *RIVALS)
ADAM = ("auto", "auto-sqrt", *RIVALS)
CONSTANT = ("auto", *RIVALS[1:])
QUARTER = "auto-from-quarter"

WORKLOADS = {
    "linear": Workload(
        "frontier-linear", (8, 16, 32, 48, 64, 96, 128), (32, 0.25), 1.0, (*SGD, QUARTER), tolerance=0.03
    ),
    "gpt": Workload("frontier-gpt", (32, 64, 96, 128, 192), (64, 0.016), 0.25, (*ADAM, QUARTER), seeds=5),
    "cnn10": Workload("frontier-cnn10", (64, 128, 192, 256, 384), (64, 0.01768), 1.0, (*SGD, QUARTER), seeds=5),
    "lstm": Workload("frontier-lstm", (32, 64, 96, 128, 192), (64, 0.064), 0.25, ("auto", *RIVALS)),
    "mlp": Workload(
        "frontier-mlp", (16, 32, 64, 96, 128, 192, 256), (64, 0.02), 1.0, CONSTANT, tolerance=0.03, seeds=5
    ),
    "linear-long": Workload("frontier-linear-long", (16, 32, 64, 96, 128, 192), (64, 0.5), 1.0, SGD, tolerance=0.03),
    "cnn100": Workload("frontier-cnn100", (64, 128, 192, 256, 384), (64, 0.01768), 1.0, SGD),
    "gpt-long": Workload("frontier-gpt", (128, 192, 256, 384, 512), (256, 0.023), 0.5, ADAM, samples=393_216),
    "linear-adam": Workload(
        "frontier-linear-adam",
        (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536),
        (32, 0.032),
        0.5,
        ADAM,
        tolerance=0.01,
    ),
}


# What to run next


def is_fixed(line: Line) -> bool:
    """Whether a line is a fixed size's."""
    return bool(line["method"] == "fixed")


def loss_of(line: Line) -> float:
    """Return the final loss; infinite where training diverged."""
    return math.inf if line["loss"] is None else float(line["loss"])


def tried(lines: Sequence[Line], size: int, workload: Workload) -> dict[int, float]:
    """Return the losses of a fixed size on seed 0 by their rate's place in the grid."""
    own = (each for each in lines if is_fixed(each) and each["seed"] == 0 and each["batch_size"] == size)
    return {workload.place(each["lr"]): loss_of(each) for each in own}


def tuned(lines: Sequence[Line], size: int, workload: Workload) -> int | None:
    """Return the place of the best rate of a size; None while a neighbour of it is missing."""
    losses = tried(lines, size, workload)
    if not losses or min(losses.values()) == math.inf:
        return None
    best = min(losses, key=lambda place: losses[place])
    if len(losses) >= MOST_RATES or {best - 1, best + 1} <= losses.keys():
        return best
    is_at_limit = workload.rate(best + 1) > workload.most_rate and best - 1 in losses
    return best if is_at_limit else None


def tuning(lines: Sequence[Line], workload: Workload) -> Iterator[tuple[int, int]]:
    """Yield the sizes and places that are still to be tried, the sizes nearest to the guess first.

    A size also tries the best rates of the sizes beside it: a best rate between two worse ones may be scatter.
    """
    middle, rate = workload.guess
    best = {size: tuned(lines, size, workload) for size in workload.sizes}
    found = {middle: workload.place(rate)}
    for size in sorted(workload.sizes, key=lambda each: abs(math.log(each / middle))):
        losses = tried(lines, size, workload)
        own = best[size]
        if own is not None:
            found[size] = own
            at = workload.sizes.index(size)
            beside = (best[each] for each in workload.sizes[max(0, at - 1) : at + 2])
            wanted = [each for each in beside if each is not None] if len(losses) < MOST_RATES else []
        else:
            near = min(found, key=lambda each: abs(math.log(each / size)))
            finite = [place for place, loss in losses.items() if loss < math.inf]
            if finite:
                place = min(finite, key=lambda each: losses[each])
            elif losses:
                place = min(losses) - 1  # all diverged
            else:
                place = found[near] + round(workload.power * math.log(size / near, RATE_STEP))
            wanted = [place, place + 1, place - 1]
        for each in dict.fromkeys(wanted):
            if each not in losses and workload.rate(each) <= workload.most_rate:
                yield size, each


def knee_of(lines: Sequence[Line], workload: Workload) -> tuple[int, dict[int, float]] | None:
    """Return the knee and all tuned rates; None while rates are being tuned."""
    if next(tuning(lines, workload), None):
        return None
    places = {size: tuned(lines, size, workload) for size in workload.sizes}
    if None in places.values():
        return None
    losses = {size: min(tried(lines, size, workload).values()) for size in places}
    bound = min(losses.values()) * (1 + workload.tolerance)
    return max(size for size in losses if losses[size] <= bound), {
        size: workload.rate(place) for size, place in places.items() if place is not None
    }


def comparison(lines: Sequence[Line], workload: Workload, name: str) -> Iterator[Point]:
    """Yield the paired runs at tuned rates, seed by seed; nothing before the rates are tuned."""
    known = knee_of(lines, workload)
    if known is None:
        return
    knee, rates = known
    for seed in range(workload.seeds):
        for size, rate in rates.items():
            yield Point(name, "fixed", size, rate, seed)
        for method in workload.methods:
            size = max(1, knee // METHODS[method].under)
            near = min(rates, key=lambda each: abs(math.log(each / size)))
            yield Point(name, method, size, rates[near], seed)


def wanted(records: Mapping[str, Sequence[Line]], names: Sequence[str]) -> Iterator[Point]:
    """Yield all that is known to be missing: tuning and the first three seeds of each workload, then other seeds."""
    for is_more in (False, True):
        for name in names:
            workload, lines = WORKLOADS[name], records[name]
            done = {(each["method"], each["batch_size"], each["lr"], each["seed"]) for each in lines}
            points = comparison(lines, workload, name)
            rates = (Point(name, "fixed", size, workload.rate(each), 0) for size, each in tuning(lines, workload))
            for point in points if is_more else [*rates, *points]:
                if (point.seed >= 3) == is_more and (point.method, point.batch_size, point.lr, point.seed) not in done:
                    yield point


# One run


def prepare() -> None:
    """Get a process ready for runs."""
    torch.set_num_threads(1)
    POLICIES.update(CANDIDATES)


def train(point: Point, data_dir: Path, device: str) -> Line:
    """Train one run and return its line."""
    workload = WORKLOADS[point.workload]
    start = METHODS.get(point.method, Start("fixed", cap=None, every_steps=None))
    method = start.method(point.batch_size * start.under, point.lr)
    experiment = replace(get_experiment(workload.experiment), methods={point.method: method})
    if workload.samples is not None:
        experiment = replace(experiment, samples=workload.samples)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            experiment,
            point.method,
            point.seed,
            Path(folder),
            data_dir=data_dir,
            device=device,
            checkpoint_every=experiment.epochs,
        )
        try:
            execute(run)
            has_diverged = False
        except DivergedError:
            has_diverged = True
        epochs = read_run(run.records_path)[1] if run.records_path.exists() else []
    losses = [getattr(each, experiment.metric.name) for each in epochs]
    line = {**asdict(point), "steps": epochs[-1].steps if epochs else 0, "samples": epochs[-1].samples if epochs else 0}
    line["loss"] = None if has_diverged else losses[-1]
    line["course"] = [
        [each.steps, each.samples, round(loss, 6) if loss is not None else None]
        for each, loss in zip(epochs, losses, strict=True)
    ]
    if device != "cpu":
        line["device"] = device
    if epochs and epochs[-1].val_accuracy is not None:
        line["accuracy"] = epochs[-1].val_accuracy
    if point.method != "fixed":
        line["sizes"] = _sizes(epochs, point.batch_size)
        line["reasons"] = sorted({each.reason for each in epochs if each.reason})[:6]
    return line


def _sizes(epochs: Sequence[Any], first: int) -> list[list[int]]:
    """Return the first step of each batch size."""
    sizes = [[0, first]]
    for each in epochs:
        changes = [[change.step, change.batch_size] for change in each.changes or []]
        for step, size in [*changes, [each.steps, each.next_batch_size]]:
            if size != sizes[-1][1]:
                sizes.append([step, size])
    return sizes


# All of them


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a records' file; a torn last one is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def run_all(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Run what is missing until nothing is, `--jobs` at a time."""
    options.out.mkdir(parents=True, exist_ok=True)
    records = {name: read_lines(options.out / f"{name}.jsonl") for name in names}
    under_way: dict[Future[Line], Point] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), initializer=prepare) as pool:
        while True:
            for point in wanted(records, names):
                if len(under_way) >= options.jobs:
                    break
                if point not in under_way.values():
                    under_way[pool.submit(train, point, options.data_dir, options.device)] = point
            if not under_way:
                return
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                point, line = under_way.pop(done), done.result()
                records[point.workload].append(line)
                with (options.out / f"{point.workload}.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{point} steps={line['steps']} loss={line['loss']}", flush=True)


def _end_with_children(*_: Any) -> None:
    """End at once: what a child trains is lost, and run again the next time."""
    for child in active_children():
        child.kill()
    os._exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/frontier"))
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="in the order of their priority")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="one and the same for all runs of a workload")
    parser.add_argument("--plan", action="store_true", help="say what is left")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, _end_with_children)
    names = options.workloads.split(",")
    if options.plan:
        records = {name: read_lines(options.out / f"{name}.jsonl") for name in names}
        left = list(wanted(records, names))
        for name in names:
            known = knee_of(records[name], WORKLOADS[name])
            state = f"knee {known[0]}" if known else "rates are being tuned"
            count = sum(point.workload == name for point in left)
            print(f"{name}: {len(records[name])} runs recorded, {count} known to be left, {state}")
        return
    run_all(options, names)


if __name__ == "__main__":
    main()
