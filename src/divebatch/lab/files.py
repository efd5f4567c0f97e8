"""Files that are written whole or not at all, and locks that the system takes back at the end of a process."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from divebatch.errors import RecordError

logger = logging.getLogger(__name__)


def write_whole(path: Path, content: bytes | memoryview, *, previous: Path | None = None) -> None:
    """Write beside, sync, then rename: a crash at any moment leaves a complete file, a full disk no new one.

    The old file becomes `previous`, if that is given, and stays what it is if the new one cannot follow.
    """
    scratch = path.with_name(path.name + ".tmp")
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            # Before the rename: a file system may otherwise make the name durable before the content.
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            # The old one steps aside first, so that at every moment one complete file is on the disk.
            path.replace(previous)
            try:
                scratch.replace(path)
            except BaseException:  # a full disk, or a second Ctrl-C
                previous.replace(path)
                raise
        else:
            scratch.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)  # which renames live in
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Yield whether this process has the lock, a file that exists as long as somebody has it.

    If another process has it, this one waits for its end where `wait` says so.
    """
    file = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while file is None:
            file = _open_locked(path, wait=wait)
    except BlockingIOError:
        yield False
        return
    except OSError as error:
        raise RecordError(f"cannot write '{path}': {error.strerror}. Choose another folder.") from error
    try:
        yield True
    finally:
        with suppress(OSError):
            path.unlink()
        file.close()


def _open_locked(path: Path, *, wait: bool) -> TextIO | None:
    """Return the open file, which is locked as long as it is; None if another process has removed it meanwhile."""
    file = path.open("a")
    try:
        # POSIX and not flock: forked children would inherit that one and hold it after a killed parent.
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):  # systems differ in which
        file.close()
        raise BlockingIOError from None
    except OSError as error:
        words = "the system cannot lock '%s' (%s): see to it that no other command works on the same"
        logger.warning(words, path, error.strerror)
        return file
    with suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
    file.close()
    return None
