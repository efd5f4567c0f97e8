"""The command that was typed, to be typed again."""

import os
import shlex
import sys


def command_again(*more: str) -> str:
    """The same command line, with `more` where it is not there yet; ready to paste into a shell."""
    words = sys.argv[1:]
    return shlex.join([*_program(), *words, *(word for word in more if word not in words)])


def _program() -> list[str]:
    """How this was started: by itself, or by torchrun on each of its processes."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return ["divebatch"]
    return ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1"), "-m", "divebatch"]
