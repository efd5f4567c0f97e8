"""The critical batch size from branched training (Merrill et al. 2025), with the noise scales for comparison.

Branches train on the same samples from the same weights at k times the batch size. The critical batch size is the
largest that keeps up with the smallest.
"""

import copy
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import Sampler

from divebatch.checks import require_choice, require_count, require_coupling_power, require_positive
from divebatch.controller import Controller
from divebatch.data import AdaptiveLoader
from divebatch.data.micro_batches import BatchPlan
from divebatch.data.order import mixed_seed
from divebatch.errors import ArgumentError, BatchTooLargeError, CheckpointError, CoverageError, DivergedError
from divebatch.lab import Experiment, Run, Tally, Trainer, evaluate, load_checkpoint, make_trainer, train_epoch
from divebatch.lab.data.dataset import drawing
from divebatch.lab.length import order_of_pass
from divebatch.lab.runs import require_data
from divebatch.lab.schema import Part, build_estimator, parse_options
from divebatch.lab.step import device_settings
from divebatch.lr import BY_NOISE, COUPLINGS, Coupling, LrCoupling, factor_of, require_adam, scale_settings
from divebatch.measurement import t_quantile
from divebatch.policies import Fixed
from divebatch.records import EpochRecord, RunHeader, read_run

LEVEL = 0.95
"""The confidence level of all intervals."""
LEAST_STEPS = 4
"""The fewest steps of the largest branch, if no factors are named."""
SMOOTHING = 0.2
"""Fraction of the window over which a branch's loss is averaged."""
JUDGES = ("train", "validation")
MOST_NAMES = 10
"""Most checkpoints that an error lists."""
PART_OF_A_RUN = 0.1
"""Fraction of a run over one pass that each branch sees by default."""
REPEAT, DROPOUT = (0, 7), (0, 6)
"""Purposes of random numbers: the order of a repeat's samples, and everything else in a branch."""
EPOCHS_A_REPEAT = 1_000_000
"""Distance between the epochs whose order and augmentation two repeats see; no run has as many epochs."""
PROBLEM = ("task", "data", "model", "optimizer", "schedule", "one_pass", "clip_norm")
"""The parts of the configuration in which a run and the experiment must agree."""
QUESTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Euclidean", "split", {}),
    ("preconditioned", "moments", {"preconditioned": True}),
)
"""The measured noise scales: norm, estimator, and the estimator's settings."""


# Branches and the verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A branch of `steps` batches of `batch_size` samples at `lr_factor` times the learning rate, with its losses."""

    factor: int
    batch_size: int
    lr_factor: float
    steps: int
    repeat: int
    """Number of the repeat, from 0. All branches of a repeat see the same data in the same order."""
    coupling: Coupling = "sqrt"
    """The learning rate's coupling to the batch size: a name, or a power of the batch size."""
    loss: float = math.nan
    """The loss that judges the branch."""
    course: tuple[float, ...] = ()
    """The smoothed training loss after each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The relative excess of a factor's loss over that of factor 1 on the same data, with its 95 % interval."""

    factor: int
    batch_size: int
    steps: int
    loss: float
    """The mean loss over repeats."""
    mean: float
    low: float
    high: float
    tolerance: float

    @property
    def keeps_up(self) -> bool:
        """Whether the mean is within the tolerance."""
        return self.mean <= self.tolerance

    @property
    def verdict(self) -> str:
        """`keeps up` or `falls behind`, with `perhaps` if the interval contains the tolerance."""
        word = "keeps up" if self.keeps_up else "falls behind"
        return word if self.high <= self.tolerance or self.low > self.tolerance else f"perhaps {word}"


@dataclass(frozen=True, slots=True)
class Critical:
    """A critical batch size in samples, with the tried sizes that confidently bound it."""

    size: int
    low: int
    high: int | None
    """The upper bound. None: no size surely falls behind."""
    is_open: bool
    """Whether even the largest size keeps up."""

    def __str__(self) -> str:
        """Return text like `512 (surely 256, perhaps up to 1024)`."""
        least = "at least " if self.is_open else ""
        most = "surely no more" if self.high == self.size else f"perhaps up to {self.high}"
        most = "no upper end found" if self.high is None else most
        return f"{least}{self.size} (surely {self.low}, {most})"


@dataclass(frozen=True, slots=True)
class Probe:
    """The branches of a probe, `window` samples each; `problem` is the reason why large factors are missing."""

    batch_size: int
    window: int
    coupling: Coupling
    tolerance: float
    branches: tuple[Branch, ...]
    problem: str = ""

    @property
    def gaps(self) -> list[Gap]:
        """The gap of each factor, smallest first."""
        return [self._gap(factor) for factor in sorted({branch.factor for branch in self.branches})]

    @property
    def critical(self) -> Critical:
        """The largest size up to which all sizes keep up."""
        gaps = self.gaps

        def last_while(holds: Callable[[Gap], bool]) -> int:
            return [gaps[0], *takewhile(holds, gaps[1:])][-1].batch_size  # factor 1 always keeps up

        size = last_while(lambda gap: gap.keeps_up)
        sure = last_while(lambda gap: gap.high <= self.tolerance)
        possible = last_while(lambda gap: gap.low <= self.tolerance)
        largest = gaps[-1].batch_size
        return Critical(size, sure, None if possible == largest else possible, is_open=size == largest)

    def to_dict(self) -> dict[str, Any]:
        """Return settings, gaps, the critical batch and every branch, ready for JSON."""
        return {
            "batch_size": self.batch_size,
            "window_samples": self.window,
            "coupling": self.coupling,
            "tolerance": self.tolerance,
            "critical": asdict(self.critical),
            "gaps": [{**asdict(gap), "verdict": gap.verdict} for gap in self.gaps],
            "branches": [asdict(branch) for branch in self.branches],
            "problem": self.problem,
        }

    def _gap(self, factor: int) -> Gap:
        first = {each.repeat: each.loss for each in self.branches if each.factor == 1}
        mine = [each for each in self.branches if each.factor == factor]
        # Compare in pairs: branches of a repeat saw the same data, whose luck cancels.
        parts = [_part_above(each.loss, first[each.repeat]) for each in mine]
        mean, low, high = interval(parts) if factor > 1 else (0.0, 0.0, 0.0)
        return Gap(
            factor=factor,
            batch_size=mine[0].batch_size,
            steps=mine[0].steps,
            loss=fmean(each.loss for each in mine),
            mean=mean,
            low=low,
            high=high,
            tolerance=self.tolerance,
        )


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return (mean, low, high) with Student's 95 % interval; a single value has infinite ends.

    >>> interval([0.1])
    (0.1, -inf, inf)
    """
    mean = fmean(values)
    if not math.isfinite(mean):
        return (math.inf, math.inf, math.inf)  # a diverged branch exceeds every tolerance
    if len(values) < 2:
        return (mean, -math.inf, math.inf)
    reach = t_quantile((1 + LEVEL) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return (mean, mean - reach, mean + reach)


def _part_above(loss: float, reference: float) -> float:
    if not math.isfinite(loss) or reference == 0:
        return 0.0 if loss == reference else math.inf
    return (loss - reference) / abs(reference)


def probe_critical_batch(
    trainer: "BranchTrainer",
    *,
    window: int,
    factors: Sequence[int],
    coupling: Coupling = "sqrt",
    repeats: int = 3,
    tolerance: float = 0.02,
    on_branch: Callable[[Branch], None] | None = None,
) -> Probe:
    """Train a branch from the checkpoint for each factor and repeat; compare each factor with factor 1.

    Each branch sees `window` samples, rounded down to whole steps of the largest branch. A branch's loss is the
    exponential mean of its last losses, or the held-out loss at its end. The branch keeps up if this loss exceeds that
    of factor 1 on the same data by at most the fraction `tolerance`. If a branch does not fit into memory, its factor
    and larger ones are left out. At the end the trainer is back at the checkpoint.
    """
    # All branches must see the same samples so that their losses can be compared.
    window -= window % (factors[-1] * trainer.batch_size)
    state, done, problem = trainer.save(), [], ""
    try:
        for factor in factors:
            size = factor * trainer.batch_size
            for repeat in range(repeats):
                trainer.restore(state)
                branch = Branch(
                    factor=factor,
                    batch_size=size,
                    lr_factor=factor_of(coupling, factor),
                    steps=window // size,
                    repeat=repeat,
                    coupling=coupling,
                )
                course = smoothed(trainer.train(branch), size, SMOOTHING * window)
                loss = course[-1] if trainer.judge == "train" else trainer.evaluate()
                if factor == 1 and not math.isfinite(loss):
                    raise DivergedError(f"the loss of the branch at the current batch size {size} is {loss}")
                done.append(replace(branch, loss=loss, course=tuple(course)))
                if on_branch is not None:
                    on_branch(done[-1])
    except BatchTooLargeError as error:
        if factor == 1:
            raise
        # Without some repeats a factor cannot be compared in pairs.
        done = [each for each in done if each.factor < factor]
        problem = f"factor {factor} and above: {error}"
    finally:
        trainer.restore(state)
    return Probe(trainer.batch_size, window, coupling, tolerance, tuple(done), problem)


def smoothed(losses: Iterable[float], batch_size: int, horizon: float) -> list[float]:
    """Return the debiased exponential mean of step losses over `horizon` samples, after each step.

    The horizon counts samples, so branches of all batch sizes are smoothed over the same data.

    >>> smoothed([1.0, 1.0, 1.0], 10, 20.0)
    [1.0, 1.0, 1.0]
    """
    keep, mean, weight, course = math.exp(-batch_size / horizon), 0.0, 0.0, []
    for loss in losses:
        mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
        course.append(mean / weight)
    return course


def require_settings(coupling: Coupling, tolerance: float, optimizer: Optimizer) -> None:
    """Raise if the tolerance is invalid, or if the coupling is unknown or does not suit the optimizer."""
    if isinstance(coupling, str):
        require_choice("coupling", coupling, tuple(name for name in COUPLINGS if name not in BY_NOISE))  # not measured
    else:
        require_coupling_power("coupling", coupling)
    require_positive("tolerance", tolerance)
    if coupling == "adam":
        require_adam(optimizer)


def chosen_factors(factors: Sequence[int] | None, batch_size: int, window: int, dataset_size: int) -> list[int]:
    """Return the factors from 1 in rising order; None: powers of two that leave the largest branch 4 steps.

    >>> chosen_factors(None, 128, 4400, 60_000)
    [1, 2, 4, 8]
    """
    if factors is None:
        most = min(window // LEAST_STEPS, dataset_size) // batch_size
        factors = [2**power for power in range(max(1, most.bit_length()))]
    for factor in factors:
        require_count("factors", factor)
    ordered = sorted({1, *factors})
    largest = ordered[-1] * batch_size
    if len(ordered) < 2:
        raise ArgumentError(
            f"nothing to compare: a window of {window} samples leaves no factor above 1 at batch size {batch_size}. "
            f"Make the window longer, or name factors"
        )
    if largest > dataset_size:
        raise ArgumentError(
            f"factor {ordered[-1]} makes batches of {largest} samples, above the {dataset_size} samples there are"
        )
    if window < largest:
        raise ArgumentError(
            f"the window of {window} samples is shorter than one step of factor {ordered[-1]} ({largest} samples): "
            f"make the window longer or leave that factor out"
        )
    return ordered


# A run and its checkpoint


@dataclass(frozen=True, slots=True)
class Start:
    """A checkpoint to start from, with the header of its run's records."""

    path: Path
    header: RunHeader
    state: dict[str, Any]
    epoch: int
    """Number of epochs before the checkpoint, or of parts of a run over one pass."""
    samples: int
    """Number of samples before the checkpoint, of all epochs."""
    batch_size: int
    """The batch size after the checkpoint, which may differ from that of the last record."""

    @property
    def place(self) -> str:
        """The checkpoint's place in the run, in words."""
        config = self.header.config
        return f"part {self.epoch} of {config['epochs']}" if config["one_pass"] else f"epoch {self.epoch}"


def find_start(path: Path, experiment: str) -> Start:
    """Read a checkpoint and the header of the records beside it; raise if the run is not of `experiment`."""
    if not path.is_file():
        found = sorted(str(each) for each in path.rglob("seed-*.ckpt")) if path.is_dir() else []
        there = f"; name one of: {', '.join(found[:MOST_NAMES])}" if found else ""
        raise ArgumentError(f"'{path}' is no checkpoint, a file like seed-0.ckpt that a run leaves{there}")
    # Checkpoints that a run keeps also have the epoch in their names.
    records = path.with_name(re.sub(r"(\.epoch-\d+)?\.ckpt(\.previous)?$", "", path.name) + ".jsonl")
    if not records.exists():
        raise ArgumentError(f"'{path}' lacks the records of its run: '{records.name}' must lie beside it")
    header = read_run(records)[0]
    if header.experiment != experiment:
        raise ArgumentError(f"'{path}' is a checkpoint of experiment {header.experiment!r}, not of {experiment!r}")
    state = load_checkpoint(path, device=torch.device("cpu"))
    loader, parts = state["control"]["loader"], state["parts_done"]
    under_way = loader["pass"]["samples"] if loader["pass"] is not None else 0
    # Not the loader's epochs, each of which may cover several parts.
    epoch = state["control"]["epoch"] if parts is None else parts
    return Start(path, header, state, epoch, loader["samples_before"] + under_way, loader["batch_size"])


def run_of(start: Start, experiment: Experiment, *, settings: Sequence[str] = (), **of_run: Any) -> Run:
    """Rebuild the run with the fields `of_run` of `Run` and settings like `training.precision=bf16` changed."""
    config = start.header.config
    options = parse_options([each for each in settings if each.startswith("training.")], config["training"])
    planned = replace(experiment.scaled(int(config["epochs"])), model=Part(**config["model"]))
    planned = planned.with_training(**asdict(options))
    run = Run(planned, start.header.method, start.header.seed, start.path.parent, **of_run)
    for key in PROBLEM:
        here, there = run.config[key], config.get(key)
        if here != there:
            raise CheckpointError(
                f"'{start.path}' belongs to another experiment called {experiment.name!r}: its {key} is {there!r}, "
                f"here it is {here!r}. Name the TOML file and give the --set that the run was started with"
            )
    return run


class RestOfPass(Sampler[int]):
    """A sampler of the rest of a pass, after `seen` samples of all passes over data of `size`.

    Each epoch of the loader is a repeat: the first continues as the run would, all others shuffle the samples.
    """

    def __init__(self, size: int, seed: int, seen: int) -> None:
        number, start = divmod(seen, size)
        self._left = order_of_pass(size, seed, number)[start:]
        self._size, self._seed, self._repeat = size, seed, 0
        self.num_left = self.window = len(self._left)
        """The samples of the rest, and of an epoch (`window`)."""

    def __len__(self) -> int:
        return self._size

    def set_epoch(self, epoch: int) -> None:
        """Choose the next repeat, from 0."""
        self._repeat = epoch

    def __iter__(self) -> Iterator[int]:
        order = self._left
        if self._repeat:
            generator = torch.Generator().manual_seed(mixed_seed(self._seed, *REPEAT, self._repeat))
            order = order[torch.randperm(len(order), generator=generator)]
        return iter(order[: self.window].tolist())


class BranchTrainer:
    """A run's trainer at a checkpoint, without its controller: branches set batch size and learning rate.

    The learning rate is the checkpoint's times the branch's factor; schedules are not stepped. Shorter batches at the
    end of an epoch are left out, because the rate suits full batches only. A run over one pass continues with the rest
    of the pass. `judge` is "train" to compare smoothed training losses, or "validation" to compare held-out losses at
    the branches' ends.
    """

    def __init__(self, run: Run, start: Start, judge: str = "train") -> None:
        require_choice("judge", judge, JUDGES)
        self.run, self.start, self.judge, self.batch_size = run, start, judge, start.batch_size
        self.metric = start.header.metric
        self.trainer: Trainer = make_trainer(run)
        # Only the branch may set batch size and learning rate.
        self.trainer.control.close()
        require_data(start.path, start.state, self.trainer)
        self.restore(start.state)
        saved, optimizer = start.state["control"], self.trainer.optimizer
        coupling = LrCoupling(optimizer, kind=saved["settings"]["lr_coupling"][0], first_batch_size=start.batch_size)
        coupling.load_state_dict(saved["rates"]["couplings"][0])
        coupling.put_in_force()  # for good: branches set the rates of all further steps
        self.lr = float(optimizer.param_groups[0]["lr"])
        """The first parameter group's learning rate at the checkpoint."""
        self.loader: AdaptiveLoader = self.trainer.control.loader
        self.rest: RestOfPass | None = None
        if run.experiment.one_pass:
            self.rest = RestOfPass(len(self.loader.dataset), run.seed, start.samples)
            self.loader.batch_size = start.batch_size
            self.loader = drawing(self.loader, self.rest)

    @property
    def dataset_size(self) -> int:
        """Number of samples of a whole pass."""
        return len(self.loader.dataset)

    def window(self, wanted: int | None) -> int:
        """Return the samples of each branch; None: an epoch, or of one pass a tenth or the rest, if shorter."""
        start, config, left = self.start, self.start.header.config, sys.maxsize
        if self.lr == 0:
            raise ArgumentError(
                f"'{start.path}' stands at learning rate 0, the end of its schedule: no branch would learn. "
                f"Choose an earlier checkpoint"
            )
        default = self.dataset_size
        if self.rest is not None:
            if start.samples >= len(self.rest) and not config["repeat"]:
                raise ArgumentError(
                    f"'{start.path}' stands at the end of its pass: no sample is left that the run has not seen. "
                    f"Choose an earlier checkpoint; `divebatch run --keep-checkpoints` keeps them"
                )
            left = self.rest.num_left
            # Scaled from the samples so far, so that this also holds for runs that end by the clock.
            default = int(PART_OF_A_RUN * config["epochs"] * start.samples / max(1, start.epoch))
        window = min(default, left) if wanted is None else wanted
        if window > left:
            raise ArgumentError(
                f"--window-samples {window}, and only {left} of its pass are left at '{start.path}': make it shorter, "
                f"or choose an earlier checkpoint"
            )
        if window < start.batch_size:
            raise ArgumentError(f"--window-samples {window}, shorter than one step of {start.batch_size}")
        return window

    def save(self) -> dict[str, Any]:
        """Return a copy of weights, statistics and optimizer state."""
        trainer = self.trainer
        return copy.deepcopy({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()})

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state from `save`, which remains unchanged."""
        self.trainer.model.load_state_dict(state["model"])
        # Copied: an optimizer changes the tensors it loads, and the next branch needs them too.
        self.trainer.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))

    def train(self, branch: Branch) -> list[float]:
        """Train a branch and return the loss of each step, in the unit of the run's metric."""
        trainer, loader = self.trainer, self.loader
        # Seed by repeat, not by branch: branches of a repeat are compared in pairs.
        torch.manual_seed(mixed_seed(self.run.seed, *DROPOUT, branch.repeat))
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["lr"] * branch.lr_factor
        if branch.coupling == "adam":
            scale_settings(trainer.optimizer, branch.factor)
        loader.batch_size = branch.batch_size
        trainer.model.train()
        step = trainer.step.under(BatchPlan)
        with device_settings(trainer.options.precision, trainer.clock.device):
            batches = islice(self._full_batches(branch), branch.steps)
            losses = [step(batch).clone() for batch in batches]  # replays write the loss to one place
        return [loss * self.metric.loss_factor for loss in torch.stack(losses).tolist()]

    def evaluate(self) -> float:
        """Return the held-out loss of the current weights, in the unit of the run's metric."""
        trainer = self.trainer
        with device_settings(trainer.options.precision, trainer.clock.device):
            seen = evaluate(trainer.model, trainer.validation, trainer.task, precision=trainer.options.precision)
        return seen.loss * self.metric.loss_factor

    def first_epoch(self, repeat: int) -> int:
        """Return the loader's epoch at which a repeat begins; repeat 0 continues as the run would."""
        return repeat if self.rest is not None else self.start.epoch + repeat * EPOCHS_A_REPEAT

    def _full_batches(self, branch: Branch) -> Iterator[Any]:
        epoch = self.first_epoch(branch.repeat)
        while True:
            self.loader.set_epoch(epoch)
            yield from (batch for batch in self.loader if len(batch[1]) == branch.batch_size)
            epoch += 1


# Noise scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """A noise scale in samples with its 95 % interval, or the `problem` that prevented the measurement.

    None: this end of the interval does not exist.
    """

    norm: str
    estimator: str
    noise_scale: float | None = None
    low: float | None = None
    high: float | None = None
    problem: str = ""


def measure_noise_scales(branches: BranchTrainer, *, samples: int) -> list[Noise]:
    """Measure each noise scale at the current batch size, starting from the checkpoint.

    A measurement takes one epoch, or the next `samples` samples of a run over one pass.
    """
    state, found = branches.save(), []
    if branches.rest is not None:
        branches.rest.window = samples
    for norm, estimator, settings in QUESTIONS:
        branches.restore(state)
        noise = Noise(norm=norm, estimator=estimator)
        try:
            record = _measured_epoch(branches, Part(kind=estimator, settings=settings))
        except (ArgumentError, CoverageError) as error:  # the estimator does not support this optimizer or model
            found.append(replace(noise, problem=str(error)))
            continue
        values = (record.diversity, record.diversity_low, record.diversity_high)
        scale, low, high = (None if each is None else max(0.0, branches.dataset_size * each - 1) for each in values)
        found.append(replace(noise, noise_scale=scale, low=low, high=high))
    branches.restore(state)
    return found


def _measured_epoch(branches: BranchTrainer, estimator: Part) -> EpochRecord:
    trainer, loader = branches.trainer, branches.loader
    loader.batch_size = branches.batch_size
    loader.set_epoch(branches.first_epoch(0))
    trainer.model.train()
    measuring = build_estimator(estimator, trainer.options, trainer.loss_fn)
    with (
        device_settings(trainer.options.precision, trainer.clock.device),
        Controller(
            trainer.model, [trainer.optimizer], loader, Fixed(), estimator=measuring, measure_always=True
        ) as control,
    ):
        return control.step(loss=train_epoch(trainer.step.under(control.plan), loader, Tally()))
