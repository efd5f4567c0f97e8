"""What `divebatch probe` does."""

import math
import sys
from dataclasses import dataclass
from typing import Any

import typer
from rich.table import Table

from divebatch.cli.console import make_console
from divebatch.cli.options import whole_numbers
from divebatch.cli.work.probe_plot import draw_probe
from divebatch.errors import ArgumentError
from divebatch.lab.experiments import get_experiment
from divebatch.lab.probe import Outcome, Probe, probe_critical_batch
from divebatch.lab.probe.branching import LEAST_STEPS, SMOOTHING, checked_factors, default_factors, require_settings
from divebatch.lab.probe.checkpoints import Start, find_start, run_of
from divebatch.lab.probe.judge import Judge
from divebatch.lab.probe.policy_sizes import Asked, ask_policies
from divebatch.lab.probe.trainer import BranchTrainer

__all__ = [
    "LEAST_STEPS",
    "SMOOTHING",
    "BranchTrainer",
    "Judge",
    "ask_policies",
    "checked_factors",
    "draw_probe",
    "find_start",
    "get_experiment",
    "probe_critical_batch",
    "require_settings",
    "run_of",
]

PART_OF_A_RUN = 0.1
"""How much of a run over one pass each branch sees, where the command does not say."""


def coupling_of(text: str) -> Any:
    """What `--coupling` says: a name, or a number."""
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How long each branch trains, as the command says it: in samples, in epochs, or neither."""

    samples: int | None
    epochs: float | None

    def __post_init__(self) -> None:
        if self.samples is not None and self.epochs is not None:
            raise ArgumentError("--window-samples and --window-epochs say the same thing: give one of them")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ArgumentError(f"--window-epochs must be positive and finite, got {self.epochs}")

    def of(self, branches: BranchTrainer) -> int:
        """The samples that each branch trains on; no more than are left of a pass."""
        start, left = branches.start, _samples_left(branches)
        if branches.lr == 0:
            raise ArgumentError(
                f"'{start.path}' stands at learning rate 0, the end of its schedule: no branch would learn. "
                f"Choose an earlier checkpoint with --epoch"
            )
        window = self._wanted(branches)
        if self.samples is None and self.epochs is None:
            window = min(window, left)
        if window > left:
            raise ArgumentError(
                f"{self._in_words(window)}, and only {left} of its pass are left at '{start.path}': make it shorter, "
                f"or choose an earlier checkpoint with --epoch"
            )
        if window < start.batch_size:
            raise ArgumentError(f"{self._in_words(window)}, shorter than one step of {start.batch_size}")
        return window

    def _wanted(self, branches: BranchTrainer) -> int:
        if self.samples is not None:
            return self.samples
        start = branches.start
        if branches.rest is None:
            return int((1.0 if self.epochs is None else self.epochs) * branches.dataset_size)
        if start.epoch == 0:
            raise ArgumentError(f"'{start.path}' stands within the first part of its pass: give --window-samples")
        parts = PART_OF_A_RUN * start.header.config["epochs"] if self.epochs is None else self.epochs
        return int(parts * start.samples / start.epoch)  # which holds for runs that ended by the clock too

    def _in_words(self, window: int) -> str:
        if self.epochs is not None:
            return f"--window-epochs {self.epochs:g} is {window} samples"
        return f"--window-samples {window}" if self.samples is not None else f"the window is {window} samples"


def _samples_left(branches: BranchTrainer) -> int:
    """How many samples a branch may see: an epoch can be repeated, and the one pass of a run cannot."""
    start, rest = branches.start, branches.rest
    if rest is None:
        return sys.maxsize
    if start.samples >= len(rest) and not start.header.config["repeat"]:
        raise ArgumentError(
            f"'{start.path}' stands at the end of its pass: no sample is left that the run has not seen. Choose an "
            f"earlier checkpoint with --epoch; `divebatch run --keep-checkpoints` keeps them"
        )
    return rest.num_left


def place_of(start: Start) -> str:
    """Where in its run a checkpoint stands."""
    if start.header.config["one_pass"]:
        return f"part {start.epoch} of {start.header.config['epochs']}"
    return f"epoch {start.epoch}"


def factors_of(text: str | None, cap: int | None, window: int, branches: BranchTrainer) -> list[int]:
    """The factors that `--factors` names, or powers of two up to the cap."""
    batch_size, dataset_size = branches.start.batch_size, branches.dataset_size
    if cap is not None and cap < 2 * batch_size:
        raise ArgumentError(f"--cap {cap} leaves nothing to compare: twice the batch size {batch_size} is above it")
    if text is None:
        return default_factors(batch_size, min(cap or window // LEAST_STEPS, window, dataset_size))
    factors = list(whole_numbers("--factors", text))
    largest = max(factors) * batch_size
    if largest > min(cap or dataset_size, dataset_size):
        limit = f"--cap {cap}" if cap is not None and cap < dataset_size else f"the {dataset_size} samples there are"
        raise ArgumentError(f"factor {max(factors)} makes batches of {largest} samples, above {limit}")
    return factors


def values_of(branches: BranchTrainer, found: Probe, asked: list[Asked]) -> dict[str, Any]:
    """What the JSON file holds."""
    start = branches.start
    return {
        "experiment": start.header.experiment,
        "method": start.header.method,
        "seed": start.header.seed,
        "epoch": start.epoch,
        "samples_before": start.samples,
        "lr": branches.lr,
        "judge": branches.judge.kind,
        "unit": branches.judge.word,
        **found.to_dict(),
        "asked": [each.to_dict() for each in asked],
    }


def say_outcome(outcome: Outcome, word: str) -> None:
    """A branch has ended: a line on stderr, progress and not the answer."""
    branch = outcome.branch
    typer.echo(
        f"batch {branch.batch_size}, repeat {branch.repeat + 1}: {branch.steps} steps, {word} {outcome.loss:.4f}",
        err=True,
    )


def show_probe(heading: str, found: Probe, asked: list[Asked], *, word: str) -> None:
    """Tables of branches, noise scales and policies, and the critical batch size. `word` is what was compared."""
    console = make_console()
    coupling = found.coupling if isinstance(found.coupling, str) else f"the power {found.coupling:g}"
    console.print(f"{heading}: branches of {found.window} samples, learning rate by {coupling}", highlight=False)
    console.print(_gap_table(found, word))
    if found.problem:
        console.print(found.problem, highlight=False, markup=False)
    console.print(f"critical batch size: {found.critical}", highlight=False, style="bold")
    answered = [each for each in asked if not each.problem]
    if answered:
        console.print(_noise_table(answered))
        console.print(_policy_table(answered))
    for each in asked:
        if each.problem:
            console.print(f"not asked: {each.question}: {each.problem}", highlight=False, markup=False)


def _gap_table(found: Probe, word: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("batch", "steps", word, "above batch " + str(found.batch_size), "95 % interval"):
        table.add_column(column, justify="right")
    table.add_column("")
    for gap in found.gaps:
        ends = f"{100 * gap.low:+.1f} .. {100 * gap.high:+.1f} %" if gap.factor > 1 else ""
        above = f"{100 * gap.mean:+.1f} %" if gap.factor > 1 else ""
        words = gap.verdict if gap.factor > 1 else ""
        table.add_row(str(gap.batch_size), str(gap.steps), f"{gap.loss:.4f}", above, ends, words)
    return table


def _noise_table(asked: list[Asked]) -> Table:
    """One row for each noise scale."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("noise scale")
    table.add_column("by")
    for column in ("samples", "95 % interval"):
        table.add_column(column, justify="right")
    for each in asked:
        if each.question.is_noise_scale:
            middle = "?" if each.noise_scale is None else f"{each.noise_scale:.0f}"
            low, high = (f"{end:.0f}" if end is not None else "" for end in (each.low, each.high))
            table.add_row(each.question.norm, each.question.estimator, middle, f"{low or '0'} .. {high or 'no end'}")
    return table


def _policy_table(asked: list[Asked]) -> Table:
    """Each policy's batch size on each estimate."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("batch asked for by")
    for each in asked:
        table.add_column(f"{each.question}", justify="right")
    for policy in dict.fromkeys(name for each in asked for name in each.sizes):
        table.add_row(policy, *(str(each.sizes.get(policy, "")) for each in asked))
    return table
