"""Which command may write a run's files: one at a time, and again after its launcher has started it anew."""

import errno
import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from divebatch.errors import RecordError
from divebatch.lab.experiments.run import Run
from divebatch.lab.training.launch import first_does, is_restarted, may_be_restarted
from divebatch.ranks import Ranks

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

IN_USE = 0
"""The byte of the lock file that every command shares; each run has one of its own after it."""
HELD = (errno.EACCES, errno.EAGAIN)
TRIES = 100


@contextmanager
def locked_runs(runs: Sequence[Run], ranks: Ranks) -> Iterator[None]:
    """Inside, no other command gets any of these runs, all of one folder; `RecordError` if another has one already.

    Commands with other runs may work in the folder at the same time. The system keeps the lock for rank 0's process
    and takes it back at its end, whatever that is.
    """
    names = [str(run.records_path.relative_to(run.folder)) for run in runs]
    with ExitStack() as held:
        first_does(ranks, lambda: held.enter_context(_locked(runs[0].folder / ".lock", names)))
        yield


@contextmanager
def _locked(path: Path, names: Sequence[str]) -> Iterator[None]:
    with _open(path) as file:
        try:
            _lock(file, path, names)
        except OSError as error:
            what = f"the system cannot lock '{path}' ({error.strerror or error})"
            logger.warning("%s: see to it yourself that no other command writes the same runs", what)
        try:
            _note_holder(file, path, names)
            yield
        finally:
            _clear_away(file, path)


def _open(path: Path) -> TextIO:
    """The file in use; the one that a command opens may just be cleared away by another that ends."""
    for _ in range(TRIES):
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise RecordError(f"cannot write '{path}': {error.strerror}. Choose another folder.") from error
        with suppress(OSError):  # locking is not supported: `_lock` says so
            _system_lock(file, IN_USE, is_shared=True)
        if _is_at(path, file):
            return file
        file.close()
    raise RecordError(f"'{path}' goes away as soon as it is written. Choose another folder.")


def _lock(file: TextIO, path: Path, names: Sequence[str]) -> None:
    for name in names:
        try:
            _system_lock(file, _byte_of(name))
        except OSError as error:
            if error.errno not in HELD:
                raise
            raise RecordError(
                f"'{path.parent}': {_holder(file, name)} is working on {name}, and two commands would spoil its files. "
                f"Wait for its end, stop it, or choose another folder."
            ) from None


def _system_lock(file: TextIO, byte: int, *, is_shared: bool = False) -> None:
    """A lock of the process on one byte: children have no part in it, and no kill leaves it behind."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "no locks on this system")
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX | fcntl.LOCK_NB
    # POSIX and not flock: a DataLoader's workers would inherit that one and hold it after a killed parent.
    fcntl.lockf(file, kind, 1, byte)


def _byte_of(name: str) -> int:
    """Far beyond the file's end, where locks may be all the same."""
    # A byte for each run, not the whole folder: two commands may rightly work in it with other seeds.
    return 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


def _note_holder(file: TextIO, path: Path, names: Sequence[str]) -> None:
    note = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "runs": names}) + "\n"
    try:
        # Past the file's buffer, which a full disk would make fail a second time when it is closed.
        os.write(file.fileno(), note.encode())
    except OSError as error:
        raise RecordError(f"cannot write '{path}': {error.strerror}. Choose another folder.") from error


def _holder(file: TextIO, name: str) -> str:
    """The last that took the run, as it has written itself."""
    file.seek(0)
    with suppress(ValueError, KeyError, TypeError):  # just about to write
        for line in reversed(file.read().splitlines()):
            command = json.loads(line)
            if name in command["runs"]:
                return f"process {command['pid']} on {command['host']}"
    return "another process"


def _is_at(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False


def _clear_away(file: TextIO, path: Path) -> None:
    """Remove the file unless another command uses it: the shared byte becomes ours alone only if none does."""
    try:
        _system_lock(file, IN_USE)
    except OSError as error:
        if error.errno in HELD:
            return
    if _is_at(path, file):
        with suppress(OSError):
            path.unlink()


def was_begun_by_this_launch(out: Path, ranks: Ranks) -> bool:
    """Whether this job, which its launcher has started anew, began its runs before: it may continue them unasked.

    A launcher's first start removes the mark of earlier jobs.
    """
    if is_restarted():
        return first_does(ranks, _mark(out).exists)
    if may_be_restarted() and ranks.is_first:
        with suppress(OSError):
            _mark(out).unlink()
    return False


@contextmanager
def marked_as_begun(out: Path, ranks: Ranks) -> Iterator[None]:
    """Inside, a mark says that this launch has begun its runs; it goes away with a good end."""
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
        raise RecordError(f"cannot write '{mark}': {error.strerror}. Choose another folder.") from error
