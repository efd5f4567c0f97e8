"""Options of the commands that say what training would take on more devices."""

from pathlib import Path
from typing import Annotated

import typer

from divebatch.report.devices import DeviceInputs, read_step_times

StepTimes = Annotated[
    Path | None,
    typer.Option(
        help="For times on more devices: measured step times, as `divebatch advise` writes them to JSON; the records' "
        "own by default."
    ),
]
Parameters = Annotated[
    int | None,
    typer.Option(min=1, help="For times on more devices: parameters of the model, where the records do not say it."),
]


def device_inputs(step_times: Path | None, parameters: int | None) -> DeviceInputs:
    """What the options say; raises `RecordError` for a file without step times."""
    times = read_step_times(step_times) if step_times is not None else ()
    return DeviceInputs(step_times=times, num_parameters=parameters)
