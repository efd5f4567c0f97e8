"""The command that was typed, to be typed again."""

import shlex
import sys


def command_again(*more: str) -> str:
    """The same command line, with `more` where it is not there yet; ready to paste into a shell."""
    words = sys.argv[1:]
    return shlex.join(["divebatch", *words, *(word for word in more if word not in words)])
