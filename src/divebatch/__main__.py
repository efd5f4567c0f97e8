"""The entry point of `divebatch` and `python -m divebatch`."""

import os
import sys

from divebatch.errors import MissingExtraError

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in shells."""


def main() -> None:
    """Start the command line, or name the extra that it needs."""
    is_one_of_several = os.environ.get("WORLD_SIZE", "1") != "1"
    if is_one_of_several:  # our own errors say which rank is lost; torch would add a page of addresses to each
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read once, when torch is imported
    try:
        try:
            from divebatch.cli import app
        except ModuleNotFoundError as error:
            if error.name not in ("typer", "rich"):
                raise
            raise SystemExit(str(MissingExtraError(error.name, "cli"))) from None
        for stream in (sys.stdout, sys.stderr):
            if reconfigure := getattr(stream, "reconfigure", None):
                reconfigure(errors="replace")  # a table must not end in a traceback if an encoding lacks a sign
        app()
    except SystemExit as end:
        if is_one_of_several:
            # Threads that talk to ranks which may be gone now and then abort a process in its very last moment (those
            # of gloo), and a launcher would take that for a failure: do not wait for them.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except KeyboardInterrupt:  # while modules were imported, or a command without an end of its own
        print("divebatch: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
