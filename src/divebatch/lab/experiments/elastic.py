"""What a launcher that starts a failed job anew may continue without being asked: what this launch itself began."""

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from divebatch.errors import RecordError
from divebatch.lab.training.launch import first_does, is_restarted, may_be_restarted
from divebatch.ranks import Ranks


def was_begun_here(out: Path, ranks: Ranks) -> bool:
    """Whether an earlier life of this launch has begun its runs. The first life forgets what was before it."""
    if is_restarted():
        return first_does(ranks, _mark(out).exists)
    if may_be_restarted() and ranks.is_first:
        with suppress(OSError):
            _mark(out).unlink()
    return False


@contextmanager
def begun_here(out: Path, ranks: Ranks) -> Iterator[None]:
    """Inside, runs are begun; the mark that says so goes away with a good end."""
    if not may_be_restarted():
        yield
        return
    first_does(ranks, lambda: _put(_mark(out)))
    yield
    if ranks.is_first:
        with suppress(OSError):
            _mark(out).unlink()


def _mark(out: Path) -> Path:
    """One for each command line and each job of the launcher."""
    words = "\0".join([os.environ.get("TORCHELASTIC_RUN_ID", ""), *sys.argv[1:]])
    return out / f".launch-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def _put(mark: Path) -> None:
    try:
        mark.touch()
    except OSError as error:
        raise RecordError(f"cannot write '{mark}': {error.strerror}. Choose another --out folder.") from error
