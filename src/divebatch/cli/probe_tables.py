"""What a probe prints: how the branches ended, and what policies ask for."""

from rich.console import Console
from rich.table import Table

from divebatch.estimators import ESTIMATORS
from divebatch.lab.probe import Probe
from divebatch.lab.probe.policy_sizes import Asked

FILE_WIDTH = 120


def show(heading: str, found: Probe, asked: list[Asked]) -> None:
    """Two tables, and between them the critical batch size."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(f"{heading}: branches of {found.window} samples, learning rate by {found.coupling}", highlight=False)
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
