"""`divebatch probe EXPERIMENT --checkpoint PLACE`."""

from pathlib import Path
from typing import Annotated

import typer

from divebatch.cli.exits import FAILED, WRONG_USE, errors_exit_with
from divebatch.cli.options import Compile, DataDir, Device, ExperimentName, MicroBatch, chosen_device
from divebatch.cli.results_files import make_folder, to_json, write_results
from divebatch.report.drawing import require_matplotlib

Checkpoint = Annotated[Path, typer.Option(help="A seed-K.ckpt, or a folder that `divebatch run` wrote.")]


def probe(
    experiment: ExperimentName,
    checkpoint: Checkpoint = Path("runs"),
    method: Annotated[str | None, typer.Option(help="Method of the run, where the folder holds several.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the run, where the folder holds several.")] = None,
    epoch: Annotated[
        int | None,
        typer.Option(min=0, help="Epochs, or parts of a pass, before the checkpoint; the last by default."),
    ] = None,
    factors: Annotated[
        str | None, typer.Option(help="Factors of the batch size: 1,2,4,8; by default up to --cap.")
    ] = None,
    cap: Annotated[
        int | None, typer.Option(min=1, help="Largest batch size; a quarter of the window by default.")
    ] = None,
    window_samples: Annotated[int | None, typer.Option(min=1, help="Number of samples that each branch sees.")] = None,
    window_epochs: Annotated[
        float | None,
        typer.Option(help="The same in epochs, or parts of one pass; by default 1, or a tenth of the parts."),
    ] = None,
    coupling: Annotated[
        str,
        typer.Option(help="Learning rate of k times the batch: sqrt, linear, adam, none, or a power like 0.6."),
    ] = "sqrt",
    repeats: Annotated[int, typer.Option(min=1, help="Number of data orders that each branch is trained on.")] = 3,
    tolerance: Annotated[float, typer.Option(help="Fraction by which the loss may exceed factor 1's.")] = 0.02,
    judge: Annotated[
        str,
        typer.Option(help="What to compare: the loss in train (smoothed) or validation, or the run's metric there."),
    ] = "train",
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
    # Here and not above: torch takes seconds, and help must not.
    from divebatch.cli.work import probe as work

    with errors_exit_with(WRONG_USE):
        device = chosen_device(device)
        require_matplotlib()
        window_wanted = work.Window(samples=window_samples, epochs=window_epochs)
        follows = work.coupling_of(coupling)
        work.require_settings(follows, repeats, tolerance, work.SMOOTHING)
        planned = work.get_experiment(experiment)
        start = work.find_start(checkpoint, planned.name, method=method, seed=seed, epoch=epoch)
        judged = work.Judge(judge, start.header.metric)
        training = {"precision": precision, "compile": compile, "micro_batch_size": micro_batch}
        run = work.run_of(start, planned, device=device, data_dir=data_dir, training=training)
        make_folder(out)
        branches = work.BranchTrainer(run, start, judged)
        branches.require_coupling(follows)
        window = window_wanted.of(branches)
        chosen = work.checked_factors(work.factors_of(factors, cap, window, branches), start.batch_size, window)
    with errors_exit_with(FAILED):
        found = work.probe_critical_batch(
            start.batch_size,
            branches.train,
            save=branches.save,
            restore=branches.restore,
            window=window,
            factors=chosen,
            coupling=follows,
            repeats=repeats,
            tolerance=tolerance,
            evaluate=branches.evaluate if judged.is_held_out else None,
            on_outcome=lambda outcome: work.say_outcome(outcome, judged.word),
        )
        asked = work.ask_policies(branches, samples=window) if policies else []
        name = f"{planned.name}-{start.header.method}-seed-{start.header.seed}-epoch-{start.epoch}"
        heading = f"{planned.name}, {start.header.method}, after {work.place_of(start)}"
        values = work.values_of(branches, found, asked)
        paths = write_results(out, name, values, work.draw_probe(name, heading, found, asked, word=judged.word))
    if json:
        typer.echo(to_json(values))
    else:
        work.show_probe(heading, found, asked, word=judged.word)
        typer.echo("\n".join(map(str, paths)))
