"""Documents of text in `.xz` files: UTF-8, each ended by a zero byte. They are read into memory and checked."""

import hashlib
import lzma
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from divebatch.errors import DataError

FOLDER = "text"
SPLITS = ("train", "valid")
END = 0
"""The byte that ends a document."""
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Some documents of one text.

    Args:
        text: All bytes of the text.
        bounds: The first byte of each document and the one after its zero byte, of shape (documents, 2).
    """

    text: Bytes
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def num_bytes(self) -> int:
        """The bytes of all documents, each one's zero byte among them."""
        return int((self.bounds[:, 1] - self.bounds[:, 0]).sum())

    def select(self, numbers: Tensor) -> "Documents":
        """Return those with these numbers, in this order."""
        return Documents(self.text, self.bounds[numbers.numpy()])

    def content(self) -> list[bytes]:
        return self.digests()

    def joined(self) -> Bytes:
        """Return their bytes, one document after the other."""
        return np.concatenate([self.text[start:end] for start, end in self.bounds])

    def digests(self) -> list[bytes]:
        """Return a hash of each document: equal for equal ones."""
        return [hashlib.blake2b(self.text[start:end].data, digest_size=16).digest() for start, end in self.bounds]

    def opening(self, number: int) -> str:
        """Return the first words of a document."""
        start, end = self.bounds[number]
        return bytes(self.text[start : min(end - 1, start + 60)]).decode(errors="ignore")


def find_folder(data_dir: Path | None) -> Path:
    """Return the folder `text` inside `data_dir`."""
    wanted = f"give the folder that holds '{FOLDER}', with files NAME.train.xz and NAME.valid.xz in it"
    if data_dir is None:
        raise DataError(f"no data folder was given: {wanted}")
    found = data_dir / FOLDER
    if found.is_dir():
        return found
    if not data_dir.is_dir():
        raise DataError(f"'{data_dir}' does not exist: {wanted}")
    if any(data_dir.glob("*.train.xz")):
        raise DataError(f"'{data_dir}' holds the text itself: name that folder '{FOLDER}' and give the one it is in")
    raise DataError(f"there is no folder '{found}': {wanted}")


def corpus_names(folder: Path) -> list[str]:
    """Return every NAME of a NAME.train.xz, sorted."""
    names = sorted(path.name.removesuffix(".train.xz") for path in folder.glob("*.train.xz"))
    if not names:
        raise DataError(f"'{folder}' holds no text: there must be files NAME.train.xz and NAME.valid.xz in it")
    return names


def read_documents(folder: Path, names: list[str], split: str) -> Documents:
    """Return the documents of all NAME.SPLIT.xz, in the order of the names."""
    parts = []
    for name in names:
        path = folder / f"{name}.{split}.xz"
        if not path.is_file():
            others = ", ".join(sorted(each.name for each in folder.glob("*.xz"))) or "none"
            raise DataError(f"'{path}' is missing; of such files '{folder}' holds: {others}")
        status = path.stat()
        parts.append(_read(path, status.st_size, status.st_mtime_ns))
    shifts = np.cumsum([0, *(len(part.text) for part in parts)])[:-1]
    bounds = [part.bounds + shift for part, shift in zip(parts, shifts, strict=True)]
    return Documents(np.concatenate([part.text for part in parts]), np.concatenate(bounds))


def require_apart(train: Documents, valid: Documents) -> None:
    """Raise if a held-out document is trained on: the loss on it would say nothing."""
    known = set(train.digests())
    shared = [number for number, digest in enumerate(valid.digests()) if digest in known]
    if shared:
        raise DataError(
            f"{len(shared)} of the {len(valid)} validation documents are training documents too, the first one "
            f"beginning {valid.opening(shared[0])!r}: take them out of one of the files"
        )


# Several runs of a process read the same files, and unpacking them takes seconds.
@lru_cache(maxsize=8)
def _read(path: Path, _size: int, _changed: int) -> Documents:
    text = _unpacked(path)
    if not text:
        raise DataError(f"'{path}' holds no document: it is empty")
    if text[-1] != END:
        raise DataError(f"'{path}' is cut short, or not made of documents: its last one does not end with a zero byte")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 text: byte {error.start} cannot be read") from error
    content = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(content == END) + 1
    starts = np.concatenate([[0], ends[:-1]])
    if empty := np.flatnonzero(ends - starts == 1).tolist():
        raise DataError(f"'{path}': document {empty[0] + 1} is empty (two zero bytes in a row, or one at the start)")
    return Documents(content, np.stack([starts, ends], axis=1))


def _unpacked(path: Path) -> bytes:
    try:
        with lzma.open(path) as file:
            return file.read()
    except EOFError as error:
        raise DataError(f"'{path}' is cut short: its compressed data ends too early. Get the file again") from error
    except lzma.LZMAError as error:
        raise DataError(f"'{path}' is not an .xz file, or is damaged ({error}). Get the file again") from error
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror or error}") from error
