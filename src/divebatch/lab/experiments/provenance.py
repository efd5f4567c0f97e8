"""Where a number comes from: versions, hardware, commit."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def versions() -> dict[str, str]:
    """Of everything that can change a result."""
    found = {"python": platform.python_version()}
    for package in ("divebatch", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from source
            found[package] = "source"
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    """What the run was timed on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {"device": device.type, "name": name, "cpus": os.cpu_count(), "threads": torch.get_num_threads()}


def git_commit() -> str | None:
    """The commit of this source tree, with "-dirty" where it was changed; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
