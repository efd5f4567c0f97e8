"""Checkpoints that are either the old one or the new one, never half of one, and that notice their own damage.

A file is a line that names the format, the SHA-256 of the rest, and what `torch.save` wrote. The checkpoint before
stays beside it as NAME.previous.
"""

import hashlib
import io
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from divebatch.errors import CheckpointError
from divebatch.ranks import Ranks

T = TypeVar("T")

MAGIC = b"divebatch checkpoint 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size

logger = logging.getLogger(__name__)


def previous(path: Path) -> Path:
    """Where the checkpoint before the last one is."""
    return path.with_name(path.name + ".previous")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write beside, sync, then rename: a crash at any moment leaves a complete file, a full disk no new one."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    scratch = path.with_name(path.name + ".tmp")
    try:
        forget(scratch)  # what a run was killed over: a file, or a folder of several ranks
        _write_synced(scratch, buffer.getbuffer())
        replace_checkpoint(scratch, path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoint '{path}': {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            forget(scratch)


def load_checkpoint(path: Path, *, device: torch.device) -> dict[str, Any]:
    """Read back tensors and plain containers; nothing in the file is executed, and a damaged one is refused.

    A checkpoint of several ranks, which is a folder, is put together.
    """
    if path.is_dir():
        from divebatch.lab.training.sharded_checkpoint import (
            load_whole,  # brings torch.distributed.checkpoint, which few runs need
        )

        return load_whole(path, device=device)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint '{path}': {error.strerror or error}") from error
    start = len(MAGIC) + DIGEST_BYTES
    if not content.startswith(MAGIC):
        raise CheckpointError(f"'{path}' is not a divebatch checkpoint, or its beginning is damaged")
    if hashlib.sha256(memoryview(content)[start:]).digest() != content[len(MAGIC) : start]:
        raise CheckpointError(f"checkpoint '{path}' is damaged or cut short: its checksum does not fit")
    return read_plain(path, io.BytesIO(memoryview(content)[start:]), device)


def newest(path: Path, load: Callable[[Path], T], ranks: Ranks) -> T | None:
    """What `load` makes of the checkpoint, or of the one before it where that is damaged or gone, with a warning.

    All ranks take the same. None where there was no checkpoint yet.
    """
    # Rank 0's view of the folder, so that all ranks open the same checkpoint.
    candidates = ranks.from_first([candidate for candidate in (path, previous(path)) if candidate.exists()])
    problems = [f"checkpoint '{path}' is gone"] if candidates == [previous(path)] else []
    for candidate in candidates:
        try:
            state = load(candidate)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems and ranks.is_first:
            logger.warning("%s; going on from the one before it, '%s'", problems[0], candidate)
        return state
    if not problems:
        return None
    raise CheckpointError(f"{'; '.join(problems)}. Remove the run's files to start it again.")


def read_plain(path: Path, file: io.BytesIO, device: torch.device) -> dict[str, Any]:
    """What `torch.save` wrote, if it is tensors and plain data only."""
    _require_stored(path, file)
    try:
        # A checkpoint may come from elsewhere, and a pickle can run anything.
        state = torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:  # whose own message tells how to run it all the same
        raise CheckpointError(f"'{path}' holds more than tensors and plain data; nothing in it was executed") from error
    except Exception as error:  # a file made on purpose may fail in any way
        what = str(error).partition(". ")[0].partition("\n")[0]
        raise CheckpointError(f"cannot read checkpoint '{path}': {type(error).__name__}: {what}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"'{path}' is not a checkpoint: it holds a {type(state).__name__}")
    return state


def _require_stored(path: Path, file: io.BytesIO) -> None:
    """Refuse compressed entries, which torch never writes: a file of a megabyte may unfold to many gigabytes."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile:
        return  # an old format or none: torch says what is wrong
    finally:
        file.seek(0)
    size = len(file.getbuffer())
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size for entry in entries):
        raise CheckpointError(f"'{path}' is compressed, which no checkpoint of divebatch is; it was not read")


def _write_synced(path: Path, content: memoryview) -> None:
    with path.open("wb") as file:
        file.write(MAGIC + hashlib.sha256(content).digest())
        file.write(content)
        file.flush()
        # Before the rename: a file system may otherwise make the name durable before the content.
        os.fsync(file.fileno())


def replace_checkpoint(scratch: Path, path: Path) -> None:
    """The old checkpoint becomes the previous one, or stays what it is where the new one cannot follow."""
    if not path.exists():
        scratch.replace(path)
        return
    if path.is_dir() or previous(path).is_dir():  # a folder neither replaces anything nor is replaced
        forget(previous(path))
    # The old one steps aside first, so that at every moment one complete checkpoint is on the disk.
    path.replace(previous(path))
    try:
        scratch.replace(path)
    except OSError:
        previous(path).replace(path)
        raise


def forget(path: Path) -> None:
    """Remove a checkpoint, file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring renames to disk, which live in the folder."""
    if os.name == "posix":  # os.open on a folder is not allowed everywhere
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
