"""Text as sequences of bytes, read from `.xz` files of UTF-8 documents that each end with a zero byte.

Documents are shuffled, joined, cut into sequences, and kept on the device as bytes.
"""

import hashlib
import lzma
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from divebatch.data import AdaptiveLoader
from divebatch.data.order import mixed_seed
from divebatch.data.source import Numbers
from divebatch.errors import ArgumentError, DataError
from divebatch.lab.data.dataset import DataPlace, DatasetSettings, DataSplit, FixedOrder, Parts, find_folder
from divebatch.lab.tables import Count

NUM_BYTES = 256
"""Number of tokens: the values of a byte."""
EVALUATED_AT_ONCE, ON_A_CPU = 2**15, 2**12
"""Bytes in a batch of validation data. On a CPU, memory for the scores of larger batches takes a third of the time."""
ORDER = 1
"""The purpose of the random order of documents, different from all other purposes."""
END = 0
"""The byte that ends a document."""
Bytes = NDArray[np.uint8]


# Files


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Some documents of one text.

    Args:
        text: All bytes of the text.
        bounds: The start of each document and the end, after its zero byte, of shape (documents, 2).
    """

    text: Bytes
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds)

    def select(self, numbers: Tensor) -> "Documents":
        return Documents(self.text, self.bounds[numbers.numpy()])

    def joined(self) -> Bytes:
        return np.concatenate([self.text[start:end] for start, end in self.bounds])

    def content(self) -> list[bytes]:
        """Return a hash of each document."""
        return [hashlib.blake2b(self.text[start:end].data, digest_size=16).digest() for start, end in self.bounds]


def read_documents(folder: Path, names: list[str], split: str) -> Documents:
    """Read the documents of all files NAME.SPLIT.xz, in the order of the names."""
    paths = [folder / f"{name}.{split}.xz" for name in names]
    if missing := [path for path in paths if not path.is_file()]:
        others = ", ".join(sorted(each.name for each in folder.glob("*.xz"))) or "none"
        raise DataError(f"'{missing[0]}' is missing; of such files '{folder}' holds: {others}")
    parts = [_read(path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    shifts = np.cumsum([0, *(len(part.text) for part in parts)])[:-1]
    bounds = [part.bounds + shift for part, shift in zip(parts, shifts, strict=True)]
    return Documents(np.concatenate([part.text for part in parts]), np.concatenate(bounds))


def require_apart(train: Documents, valid: Documents) -> None:
    """Raise if a validation document is also a training document."""
    known = set(train.content())
    shared = [number for number, digest in enumerate(valid.content()) if digest in known]
    if shared:
        start, end = valid.bounds[shared[0]]
        opening = bytes(valid.text[start : min(end - 1, start + 60)]).decode(errors="ignore")
        raise DataError(
            f"{len(shared)} of the {len(valid)} validation documents are training documents too, the first one "
            f"beginning {opening!r}: take them out of one of the files"
        )


# Cached: several runs of a process read the same files, and unpacking takes seconds.
@lru_cache(maxsize=8)
def _read(path: Path, _size: int, _changed: int) -> Documents:
    try:
        with lzma.open(path) as file:
            text = file.read()
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"'{path}' cannot be read as .xz, or is cut short ({error}). Get the file again") from error
    if not text.endswith(b"\0"):
        raise DataError(f"'{path}' is cut short, or not made of documents: its last one does not end with a zero byte")
    content = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(content == END) + 1
    starts = np.concatenate([[0], ends[:-1]])
    if empty := np.flatnonzero(ends - starts == 1).tolist():
        raise DataError(f"'{path}': document {empty[0] + 1} is empty (two zero bytes in a row, or one at the start)")
    return Documents(content, np.stack([starts, ends], axis=1))


# From documents to sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(DatasetSettings):
    """The corpora in `data_dir/text`, with whole documents held out for validation.

    Args:
        corpora: Names of corpora, such as "novels" for `novels.train.xz` and `novels.valid.xz`. Empty: all.
        sequence_length: Number of bytes of a sequence. None: the longest that the model takes.
        validation_bytes: Most bytes of held-out text to validate on, in sequences spread evenly over the text. None:
            all of the text.
    """

    corpora: list[str] = field(default_factory=list)
    sequence_length: Count | None = None
    validation_bytes: Count | None = None

    def parts(self, seed: int, place: DataPlace) -> Parts:
        """Read the files; `seed` determines the order of the training documents, and so their sequences."""
        folder = find_folder(place.folder, "text", "files NAME.train.xz and NAME.valid.xz")
        found = sorted(path.name.removesuffix(".train.xz") for path in folder.glob("*.train.xz"))
        names = self.corpora or found or ["NAME"]
        train = read_documents(folder, names, "train")

        def read_test() -> Documents:
            held_out = read_documents(folder, names, "valid")
            require_apart(train, held_out)
            return held_out

        return train, read_test, partial(self._split, seed=seed, place=place)

    def _split(self, train: Documents, validation: Documents, *, seed: int, place: DataPlace) -> DataSplit:
        length = self._length(place)
        generator = torch.Generator().manual_seed(mixed_seed(seed, ORDER))
        shuffled = train.select(torch.randperm(len(train), generator=generator))
        training = _cut(shuffled.joined(), length, "training").to(place.device)
        held_out = _cut(validation.joined(), length, "validation")
        if self.validation_bytes is not None and (count := self.validation_bytes // length) < len(held_out):
            # Evenly spread over the text, at least one sequence.
            numbers = torch.linspace(0, len(held_out) - 1, max(1, count), dtype=torch.float64).round().long()
            held_out = held_out[numbers]
        at_once = ON_A_CPU if place.device.type == "cpu" else EVALUATED_AT_ONCE
        return DataSplit(
            loader=partial(_loader, training),
            has_parts=True,
            validation=FixedOrder(_loader(held_out.to(place.device), max(1, at_once // length), seed=0)),
            num_classes=NUM_BYTES,
        )

    def _length(self, place: DataPlace) -> int:
        most = place.sequence_length
        if most is None:
            raise ArgumentError("text needs a model that takes sequences, such as gpt or gpt-tiny")
        if (self.sequence_length or 0) > most:
            raise ArgumentError(
                f"sequences of sequence_length={self.sequence_length} bytes are longer than the {most} that the model "
                f"takes: shorten them, or give the model that sequence_length too"
            )
        return self.sequence_length or most


def _cut(text: Bytes, length: int, what: str) -> Tensor:
    """Cut text into sequences of `length` + 1 bytes, each beginning with the last byte of its predecessor.

    So each byte is predicted once, the first from a zero byte, as if after a document. A rest shorter than a sequence
    is left out.
    """
    if len(text) < length:
        raise DataError(
            f"sequences of {length} bytes are longer than all {what} text, which has {len(text)} bytes: give more "
            f"text, or a model or sequence_length for shorter ones"
        )
    return torch.from_numpy(np.concatenate([[np.uint8(END)], text])).unfold(0, length + 1, length)


def _loader(rows: Tensor, batch_size: int, *, seed: int) -> AdaptiveLoader:
    """Return a loader of (inputs, targets) in int64, where each target is the byte after the input."""

    def fetched(batch: Any) -> tuple[Tensor, Tensor]:
        (index,) = batch
        chosen = rows[index].long()
        return chosen[:, :-1].contiguous(), chosen[:, 1:].contiguous()

    return AdaptiveLoader(Numbers(len(rows), rows.device), batch_size, seed=seed, transform=fetched)
