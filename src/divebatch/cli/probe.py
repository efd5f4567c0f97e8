"""`divebatch probe EXPERIMENT --checkpoint PLACE`."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from divebatch.checks import require_choice
from divebatch.cli.exits import FAILED, WRONG_USE, errors_exit_with
from divebatch.cli.options import Compile, DataDir, Device, ExperimentName, MicroBatch, require_device
from divebatch.cli.probe_plot import draw_probe
from divebatch.cli.results_files import make_folder, to_json, write_results
from divebatch.errors import ArgumentError
from divebatch.estimators import ESTIMATORS
from divebatch.lab.experiments import get_experiment
from divebatch.lab.probe import Outcome, Probe, probe_critical_batch
from divebatch.lab.probe.branching import LEAST_STEPS, SMOOTHING, checked_factors, default_factors, require_settings
from divebatch.lab.probe.checkpoints import Start, find_start, run_of
from divebatch.lab.probe.policy_sizes import Asked, ask_policies
from divebatch.lab.probe.trainer import BranchTrainer
from divebatch.report.drawing import require_matplotlib

JUDGES = ("train", "validation")
FILE_WIDTH = 120
Checkpoint = Annotated[Path, typer.Option(help="A seed-K.ckpt, or a folder that `divebatch run` wrote.")]


def probe(
    experiment: ExperimentName,
    checkpoint: Checkpoint = Path("runs"),
    method: Annotated[str | None, typer.Option(help="Method of the run, where the folder holds several.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the run, where the folder holds several.")] = None,
    epoch: Annotated[int | None, typer.Option(min=0, help="Epochs before the checkpoint; the last by default.")] = None,
    factors: Annotated[
        str | None, typer.Option(help="Factors of the batch size: 1,2,4,8; by default up to --cap.")
    ] = None,
    cap: Annotated[
        int | None, typer.Option(min=1, help="Largest batch size; a quarter of the window by default.")
    ] = None,
    window_epochs: Annotated[float, typer.Option(help="Number of epochs that each branch trains.")] = 1.0,
    coupling: Annotated[str, typer.Option(help="Learning rate of k times the batch: sqrt, linear, none.")] = "sqrt",
    repeats: Annotated[int, typer.Option(min=1, help="Number of data orders that each branch is trained on.")] = 3,
    tolerance: Annotated[float, typer.Option(help="Fraction by which the loss may exceed factor 1's.")] = 0.02,
    judge: Annotated[str, typer.Option(help="Loss to compare: train (smoothed) or validation (at the end).")] = "train",
    policies: Annotated[bool, typer.Option("--policies/--no-policies", help="Also say what policies ask for.")] = True,
    data_dir: DataDir = Path("data"),
    device: Device = "cpu",
    precision: Annotated[
        str | None, typer.Option(help="Number format: fp32, tf32 or bf16; the run's by default.")
    ] = None,
    compile: Compile = None,
    micro_batch: MicroBatch = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the picture.")] = Path("runs/probe"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the critical batch size: branches from a checkpoint at k times the batch, and what policies ask for."""
    with errors_exit_with(WRONG_USE):
        require_device(device)
        require_matplotlib()
        _require_valid(judge, window_epochs)
        require_settings(coupling, repeats, tolerance, SMOOTHING)
        planned = get_experiment(experiment)
        start = find_start(checkpoint, planned.name, method=method, seed=seed, epoch=epoch)
        training = {"precision": precision, "compile": compile, "micro_batch_size": micro_batch}
        run = run_of(start, planned, device=device, data_dir=data_dir, training=training)
        make_folder(out)
        branches = BranchTrainer(run, start)
        window = _window(branches, window_epochs)
        chosen = checked_factors(_factors(factors, cap, window, branches), start.batch_size, window)
    with errors_exit_with(FAILED):
        found = probe_critical_batch(
            start.batch_size,
            branches.train,
            save=branches.save,
            restore=branches.restore,
            window=window,
            factors=chosen,
            coupling=coupling,
            repeats=repeats,
            tolerance=tolerance,
            evaluate=branches.evaluate if judge == "validation" else None,
            on_outcome=_say,
        )
        asked = ask_policies(branches) if policies else []
        name = f"{planned.name}-{start.header.method}-seed-{start.header.seed}-epoch-{start.epoch}"
        heading = f"{planned.name}, {start.header.method}, after epoch {start.epoch}"
        values = _values(start, branches, found, asked, judge)
        paths = write_results(out, name, values, draw_probe(name, heading, found, asked))
    if json:
        typer.echo(to_json(values))
    else:
        _show(heading, found, asked)
        typer.echo("\n".join(map(str, paths)))


def _require_valid(judge: str, window_epochs: float) -> None:
    require_choice("judge", judge, JUDGES)
    if not 0 < window_epochs < math.inf:
        raise ArgumentError(f"--window-epochs must be positive and finite, got {window_epochs}")


def _window(branches: BranchTrainer, epochs: float) -> int:
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


def _factors(text: str | None, cap: int | None, window: int, branches: BranchTrainer) -> list[int]:
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


def _values(start: Start, branches: BranchTrainer, found: Probe, asked: list[Asked], judge: str) -> dict[str, Any]:
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


def _say(outcome: Outcome) -> None:
    branch = outcome.branch
    typer.echo(
        f"batch {branch.batch_size}, repeat {branch.repeat + 1}: {branch.steps} steps, loss {outcome.loss:.4f}",
        err=True,
    )  # progress, not the answer


def _show(heading: str, found: Probe, asked: list[Asked]) -> None:
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
