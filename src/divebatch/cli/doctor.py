"""`divebatch doctor`."""

import json as json_text
from typing import Annotated

import typer

from divebatch.cli.exits import FAILED


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for bug reports and programs.")] = False,
) -> None:
    """Show versions, devices and extras, and how to get what is missing. Paths and names of yours are left out."""
    from divebatch.cli.work.doctor import as_text, examine  # torch takes seconds, and help must not

    found = examine()
    typer.echo(json_text.dumps(found, indent=2) if json else as_text(found))
    if found["problems"]:
        raise typer.Exit(FAILED)
