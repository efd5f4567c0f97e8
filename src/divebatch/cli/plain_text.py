"""Output for every terminal: characters that its encoding lacks are written in ASCII."""

import codecs
import sys

IN_ASCII = {"±": "+-", "→": "->", "…": "..."}
"""How characters of our own tables are written where the encoding lacks them; any other becomes a question mark."""


def write_any_text() -> None:
    """Make stdout and stderr take every character, whatever their encoding; a table must not end in a traceback."""
    codecs.register_error("divebatch-ascii", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="divebatch-ascii")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(IN_ASCII.get(character, "?") for character in lacking), error.end
