"""`divebatch` and `python -m divebatch`."""

import os
import sys

from divebatch.errors import MissingExtraError

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells know it."""


def main() -> None:
    """Start the command line, or say which extra it needs."""
    _say_once_who_is_lost()
    try:
        try:
            from divebatch.cli import app
        except ModuleNotFoundError as error:
            if error.name not in ("typer", "rich"):
                raise
            raise SystemExit(str(MissingExtraError(error.name, "cli"))) from None
        for stream in (sys.stdout, sys.stderr):
            if reconfigure := getattr(stream, "reconfigure", None):
                reconfigure(errors="replace")  # a table must not end in a traceback where an encoding lacks a sign
        app()
    except SystemExit as end:
        _leave_at_once(end)
        raise
    except KeyboardInterrupt:  # while modules were imported, or a command without an end of its own
        print("divebatch: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def _say_once_who_is_lost() -> None:
    """Leave it to our own errors: torch warns with a page of addresses where it loses the process that keeps its store.

    It looks at this once, when it is imported.
    """
    if _is_one_of_several():
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _is_one_of_several() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _leave_at_once(end: SystemExit) -> None:
    """End a process that is one of several ranks without waiting for threads that talk to ranks which may be gone.

    Those of gloo now and then abort a process in its very last moment, and a launcher would take that for a failure.
    """
    if _is_one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


if __name__ == "__main__":
    main()
