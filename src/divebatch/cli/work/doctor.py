"""What `divebatch doctor` finds out. Nothing that is broken may end it: it is there to say so."""

import os
import platform
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from divebatch import __version__
from divebatch.cli.work.extras import state_of, wanted_by_extra

GIB = 2**30
PATH = re.compile(r"""(?:[A-Za-z]:)?[\\/](?:[^\\/:'"()\n]+[\\/])+""")


def examine() -> dict[str, Any]:
    """Everything, as plain data; `problems` has what keeps the library from working."""
    found: dict[str, Any] = {
        "divebatch": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in ("torch", "numpy", "triton")},
        "devices": [],
        "extras": _extras(),
        "problems": [],
    }
    for name in ("numpy", "torch"):
        if (problem := _problem_of(name)) is not None:
            found["problems"].append(problem)
    if not found["problems"]:
        found["devices"] = _devices()
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _problem_of(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # a broken installation raises whatever it likes
        return f"{module} cannot be imported: {_told(error)}"
    return None


def _told(error: Exception) -> str:
    """The error's first line without the folders that it names, which may hold a user's name."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {without_folders(first)}"


def without_folders(text: str) -> str:
    """Leave the last part of each path.

    >>> without_folders("cannot open '/home/me/.venv/lib/libtorch.so': no such file")
    "cannot open 'libtorch.so': no such file"
    """
    return PATH.sub("", text)


def _devices() -> list[dict[str, Any]]:
    import torch

    processor = {"device": "cpu", "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    try:
        return [processor, *_accelerators()]
    except Exception as error:  # of a driver
        return [processor, {"device": "accelerator", "problem": _told(error)}]


def _accelerators() -> list[dict[str, Any]]:
    import torch

    if torch.backends.mps.is_available():
        return [{"device": "mps"}]
    if not torch.cuda.is_available():
        return []
    cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    runtime = torch.version.cuda or torch.version.hip
    sizes = [round(card.total_memory / GIB, 1) for card in cards]
    return [
        {"device": f"cuda:{number}", "name": card.name, "memory_gib": size, "runtime": runtime}
        for number, (card, size) in enumerate(zip(cards, sizes, strict=True))
    ]


def _extras() -> dict[str, dict[str, Any]]:
    """By name: what it needs, how that stands, and the command that gets it where something is wrong."""
    found: dict[str, dict[str, Any]] = {}
    for extra, packages in wanted_by_extra().items():
        states = {wanted.package: state_of(wanted) for wanted in packages}
        is_complete = all(state.is_good for state in states.values())
        found[extra] = {
            "packages": {package: state.text for package, state in states.items()},
            "get": None if is_complete else f"pip install 'divebatch[{extra}]'",
        }
    return found


def as_text(found: dict[str, Any]) -> str:
    """On one screen: versions, devices, extras, problems."""
    versions = {"divebatch": found["divebatch"], "python": found["python"], **found["packages"]}
    lines = [_line(name, there or "missing") for name, there in versions.items()]
    lines += [_line("platform", found["platform"]), *map(_device_line, found["devices"]), ""]
    if not found["extras"]:
        lines.append("extras are not known: divebatch was not installed by pip")
    lines += [_extra_line(extra, **told) for extra, told in found["extras"].items()]
    lines += [f"problem: {problem}" for problem in found["problems"]]
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    return f"{name:14} {text}"


def _device_line(device: dict[str, Any]) -> str:
    details = [f"{key.replace('_', ' ')} {value}" for key, value in device.items() if key not in ("device", "name")]
    return _line(device["device"], ", ".join([device["name"], *details] if "name" in device else details))


def _extra_line(extra: str, packages: dict[str, str], get: str | None) -> str:
    text = ", ".join(f"{package} {state}" for package, state in packages.items())
    return _line(f"[{extra}]", f"{text}; get it with: {get}" if get else text)
