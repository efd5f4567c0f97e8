"""The command `divebatch doctor`."""

import json as json_text
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated, Any

import typer

from divebatch import __version__
from divebatch.cli.common import FAILED

EXTRAS = ("cli", "report", "images", "search", "tensorboard", "wandb", "lightning", "transformers", "accelerate")


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for bug reports and programs.")] = False,
) -> None:
    """Show versions, devices and missing extras.

    Your paths and names are left out.
    """
    found: dict[str, Any] = {"divebatch": __version__, "python": platform.python_version()}
    found |= {name: _version(name) for name in ("torch", "numpy", "triton")}
    found |= {"platform": f"{platform.system()} {platform.release()} {platform.machine()}", "devices": _devices()}
    found |= {f"[{extra}]": {name: _version(name) for name in _packages(extra)} for extra in EXTRAS}
    if json:
        typer.echo(json_text.dumps(found, indent=2))
    else:
        for name, value in found.items():
            each = value.items() if isinstance(value, dict) else ()
            text = ", ".join(f"{key} {there or 'missing'}" for key, there in each) or str(value or "missing")
            way = f"; get it with: pip install 'divebatch{name}'" if each and not all(value.values()) else ""
            typer.echo(f"{name:15}{text}{way if name != 'devices' else ''}")
    if "problem" in found["devices"]:
        raise typer.Exit(FAILED)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _packages(extra: str) -> list[str]:
    try:
        lines = [line for line in requires("divebatch") or [] if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    except PackageNotFoundError:  # not installed by pip
        return []
    return [name for line in lines if (name := re.split(r"[^\w.-]", line)[0]) != "divebatch"]


def _devices() -> dict[str, str]:
    try:
        import torch

        cards = {f"cuda:{n}": torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())}
        return {"cpu": f"{torch.get_num_threads()} threads", **cards}
    except Exception as error:  # a broken installation may raise anything
        return {"problem": type(error).__name__}
