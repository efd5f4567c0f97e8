"""The command `divebatch ramp`."""

import json
import math
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from divebatch.cli.common import WRONG_USE, errors_exit_with
from divebatch.ramp import SCHEDULES, Ramp


class Form(StrEnum):
    """An output format of the timetable."""

    text = "text"
    json = "json"
    entries = "entries"


def ramp(
    batch_size: Annotated[int, typer.Option(help="The first batch size, in samples.")],
    max_batch_size: Annotated[int, typer.Option(help="The largest batch size, in samples.")],
    samples: Annotated[int, typer.Option(help="Number of samples in the whole training.")],
    schedule: Annotated[str, typer.Option(help="The rate after the warm-up: cosine, linear or constant.")] = "cosine",
    warmup: Annotated[float, typer.Option(help="Fraction of training in which the rate rises.", min=0, max=0.99)] = 0.0,
    floor: Annotated[float, typer.Option(help="Final rate as a fraction of the highest.", min=0, max=1)] = 0.0,
    coupling: Annotated[str, typer.Option(help="How the rate scales: sqrt (Adam, Muon) or linear (SGD).")] = "sqrt",
    sequence_length: Annotated[int, typer.Option(help="Tokens per sample, to count in tokens.", min=1)] = 1,
    form: Annotated[Form, typer.Option(help="text, json, or entries: FROM:SIZE as in schedules by tokens.")] = (
        Form.text
    ),
) -> None:
    """Print a batch-size timetable for your own training loop."""

    def course(part: float) -> float:
        if part < warmup:
            return part / warmup
        return floor + (1 - floor) * SCHEDULES[schedule]((part - warmup) / (1 - warmup))

    with errors_exit_with(WRONG_USE):
        plan = Ramp(
            batch_size,
            max_batch_size,
            schedule if schedule not in SCHEDULES else course,
            samples,
            lr_coupling=coupling,
        )
    stretches = plan.timetable()
    if form is Form.json:
        typer.echo(json.dumps([asdict(each) for each in stretches]))
    elif form is Form.entries:
        typer.echo(" ".join(f"{each.first_sample * sequence_length}:{each.batch_size}" for each in stretches))
    else:
        typer.echo(f"{'tokens' if sequence_length > 1 else 'samples':>16} {'batch size':>11} {'rate times':>11} steps")
        for each in stretches:
            place = each.first_sample * sequence_length
            typer.echo(f"{place:>16} {each.batch_size:>11} {each.lr_factor:>11.3f} {each.steps}")
        fixed = math.ceil(samples / batch_size)
        typer.echo(f"{plan.steps} steps, and {fixed} with the first batch throughout: {plan.steps / fixed:.2f}")
