"""Files that are written whole or not at all, and locks that the system releases at a process's end."""

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
    """Write a file so that a crash at any moment leaves a complete one, and a full disk the old one.

    The content goes to a neighbouring file, which is synced and renamed. If `previous` is given, the old file gets this
    name, and its own name back if the new file cannot replace it.
    """
    scratch = path.with_name(path.name + ".tmp")
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            # Sync before the rename: a file system may make the name durable before the content.
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            # Rename the old file first, so that at every moment a complete file is on disk.
            path.replace(previous)
            try:
                scratch.replace(path)
            except BaseException:  # a full disk, or a second Ctrl-C
                previous.replace(path)
                raise
        else:
            scratch.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)  # makes the rename durable
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Yield whether this process holds the lock, a file that exists as long as some process holds the lock.

    If another process holds the lock and `wait` is true, wait for its release.
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
    """Return the locked file, whose lock ends when the file is closed; None: another process removed the file."""
    file = path.open("a")
    try:
        # POSIX locks, not flock: forked children inherit a flock and hold it after the parent was killed.
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):  # depends on the system
        file.close()
        raise BlockingIOError from None
    except OSError as error:
        words = "the system cannot lock '%s' (%s): make sure that no other command works on the same"
        logger.warning(words, path, error.strerror)
        return file
    with suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
    file.close()
    return None
