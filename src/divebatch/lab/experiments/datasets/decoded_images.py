"""Decoded images kept beside their files: decoding a large set takes minutes, reading it back takes seconds."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from divebatch.checks import warn_user

FOLDER = ".decoded"
"""Beside the images; it can be deleted at any time."""
DIGEST_BYTES = 32

Images = NDArray[np.uint8]


def decoded_once(cache: Path, files: Sequence[str], shape: tuple[int, ...], decode: Callable[[], Images]) -> Images:
    """What `decode()` makes of `files`, from `cache` if that was made of the very same files and is whole.

    Processes that start together wait for the first one. Where the cache cannot be written, the images are decoded at
    every start, and a warning says so.

    Args:
        cache: The file to keep the images in.
        files: Paths of the image files, in order; their names, sizes and times of change tell whether any has changed.
        shape: Of all decoded images together.
        decode: Decodes all of them.
    """
    try:
        cache.parent.mkdir(exist_ok=True)
        with _locked(cache.with_suffix(".lock")):
            source = _digest_of_files(files)
            images = _read(cache, source, shape)
            if images is None:
                images = decode()
                _write(cache, source, images)
            return images
    except OSError as error:
        # Data folders are often read-only, or full: that costs time at each start and nothing else.
        warn_user(f"decoded images cannot be kept in '{cache.parent}' ({error.strerror}): each start decodes them anew")
        return decode()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest_of_files(files: Sequence[str]) -> bytes:
    digest = hashlib.sha256()
    for file in files:
        status = os.stat(file)
        digest.update(f"{os.path.basename(file)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.digest()


def _read(cache: Path, source: bytes, shape: tuple[int, ...]) -> Images | None:
    """The images, if the file holds those of `source`, all of them and undamaged."""
    images = np.empty(shape, np.uint8)
    try:
        with cache.open("rb") as file:
            if os.fstat(file.fileno()).st_size != 2 * DIGEST_BYTES + images.nbytes or file.read(DIGEST_BYTES) != source:
                return None
            digest = file.read(DIGEST_BYTES)
            file.readinto(images.data)
    except FileNotFoundError:
        return None
    return images if hashlib.sha256(images.data).digest() == digest else None


def _write(cache: Path, source: bytes, images: Images) -> None:
    """Whole or not at all: under another name first, which nobody else uses while the lock is held."""
    scratch = cache.with_suffix(".partial")
    try:
        with scratch.open("wb") as file:
            file.write(source + hashlib.sha256(images.data).digest())
            file.write(images.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, cache)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
        raise
