"""What `divebatch probe` does."""

import math
from typing import Any

import typer
from rich.table import Table

from divebatch.checks import require_choice
from divebatch.cli.console import make_console
from divebatch.cli.work.probe_plot import draw_probe
from divebatch.errors import ArgumentError
from divebatch.estimators import ESTIMATORS
from divebatch.lab.experiments import get_experiment
from divebatch.lab.probe import Outcome, Probe, probe_critical_batch
from divebatch.lab.probe.branching import LEAST_STEPS, SMOOTHING, checked_factors, default_factors, require_settings
from divebatch.lab.probe.checkpoints import Start, find_start, run_of
from divebatch.lab.probe.policy_sizes import Asked, ask_policies
from divebatch.lab.probe.trainer import BranchTrainer

__all__ = [
    "LEAST_STEPS",
    "SMOOTHING",
    "BranchTrainer",
    "ask_policies",
    "checked_factors",
    "draw_probe",
    "find_start",
    "get_experiment",
    "probe_critical_batch",
    "require_settings",
    "run_of",
]

JUDGES = ("train", "validation")


def coupling_of(text: str) -> Any:
    """What `--coupling` says: a name, or a number."""
    try:
        return float(text)
    except ValueError:
        return text


def require_valid(judge: str, window_epochs: float) -> None:
    """Raise for an option that cannot work."""
    require_choice("judge", judge, JUDGES)
    if not 0 < window_epochs < math.inf:
        raise ArgumentError(f"--window-epochs must be positive and finite, got {window_epochs}")


def window_of(branches: BranchTrainer, epochs: float) -> int:
    """The samples that each branch trains on."""
    if branches.lr == 0:
        raise ArgumentError(
            f"'{branches.start.path}' stands at learning rate 0, the end of its schedule: no branch would learn. "
            f"Choose an earlier checkpoint with --epoch"
        )
    dataset_size = branches.loader.dataset_size or 0
    window = int(epochs * dataset_size)
    if window < branches.start.batch_size:
        raise ArgumentError(
            f"--window-epochs {epochs:g} is {window} samples, shorter than one step of {branches.start.batch_size}"
        )
    return window


def factors_of(text: str | None, cap: int | None, window: int, branches: BranchTrainer) -> list[int]:
    """The factors that `--factors` names, or powers of two up to the cap."""
    batch_size, dataset_size = branches.start.batch_size, branches.loader.dataset_size or 0
    if cap is not None and cap < 2 * batch_size:
        raise ArgumentError(f"--cap {cap} leaves nothing to compare: twice the batch size {batch_size} is above it")
    if text is None:
        return default_factors(batch_size, min(cap or window // LEAST_STEPS, window, dataset_size))
    try:
        factors = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ArgumentError(f"--factors must be whole numbers such as 1,2,4, got {text!r}") from error
    largest = max(factors) * batch_size
    if largest > min(cap or dataset_size, dataset_size):
        limit = f"--cap {cap}" if cap is not None and cap < dataset_size else f"the {dataset_size} samples there are"
        raise ArgumentError(f"factor {max(factors)} makes batches of {largest} samples, above {limit}")
    return factors


def values_of(start: Start, branches: BranchTrainer, found: Probe, asked: list[Asked], judge: str) -> dict[str, Any]:
    """What the JSON file holds."""
    return {
        "experiment": start.header.experiment,
        "method": start.header.method,
        "seed": start.header.seed,
        "epoch": start.epoch,
        "lr": branches.lr,
        "judge": judge,
        **found.to_dict(),
        "asked": [each.to_dict() for each in asked],
    }


def say_outcome(outcome: Outcome) -> None:
    """A branch has ended: a line on stderr, progress and not the answer."""
    branch = outcome.branch
    typer.echo(
        f"batch {branch.batch_size}, repeat {branch.repeat + 1}: {branch.steps} steps, loss {outcome.loss:.4f}",
        err=True,
    )


def show_probe(heading: str, found: Probe, asked: list[Asked]) -> None:
    """Two tables, and between them the critical batch size."""
    console = make_console()
    coupling = found.coupling if isinstance(found.coupling, str) else f"the power {found.coupling:g}"
    console.print(f"{heading}: branches of {found.window} samples, learning rate by {coupling}", highlight=False)
    console.print(_gap_table(found))
    if found.problem:
        console.print(found.problem, highlight=False, markup=False)
    console.print(f"critical batch size: {found.critical}", highlight=False, style="bold")
    if asked:
        console.print(_asked_table(asked))


def _gap_table(found: Probe) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("batch", "steps", "loss", "above batch " + str(found.batch_size), "95 % interval"):
        table.add_column(column, justify="right")
    table.add_column("")
    for gap in found.gaps:
        ends = f"{100 * gap.low:+.1f} .. {100 * gap.high:+.1f} %" if gap.factor > 1 else ""
        above = f"{100 * gap.mean:+.1f} %" if gap.factor > 1 else ""
        words = gap.verdict if gap.factor > 1 else ""
        table.add_row(str(gap.batch_size), str(gap.steps), f"{gap.loss:.4f}", above, ends, words)
    return table


def _asked_table(asked: list[Asked]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("estimator")
    table.add_column("asks for")
    table.add_column("batch", justify="right")
    for each in asked:
        if ESTIMATORS[each.estimator].at_fixed_weights:
            table.add_row(each.estimator, "(noise scale, 95 % interval)", _noise(each))
        for policy, size in each.sizes.items():
            table.add_row(each.estimator, policy, str(size))
    return table


def _noise(each: Asked) -> str:
    middle = "?" if each.noise_scale is None else f"{each.noise_scale:.0f}"
    low, high = (f"{end:.0f}" if end is not None else "" for end in (each.low, each.high))
    return f"{middle} ({low or '0'} .. {high or 'no end'})"
