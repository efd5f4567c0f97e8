"""Text as sequences of bytes: documents shuffled, joined, cut, and kept on the device as bytes."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from divebatch.checks import require_count
from divebatch.data import AdaptiveLoader
from divebatch.data.order import mixed_seed
from divebatch.data.source import Numbers
from divebatch.errors import ArgumentError, DataError
from divebatch.lab.data.dataset import (
    DataParts,
    DataPlace,
    DatasetSettings,
    DataSplit,
    FixedOrder,
    InParts,
)
from divebatch.lab.data.text_files import (
    END,
    Bytes,
    Documents,
    corpus_names,
    find_folder,
    read_documents,
    require_apart,
)

NUM_BYTES = 256
"""Values of a byte: the tokens."""
EVALUATED_AT_ONCE, ON_A_CPU = 2**15, 2**12
"""Bytes of a batch of validation data: a third of a CPU's time went to memory for the scores of the larger one."""
ORDER = 1
"""The purpose of the order of documents, apart from what else follows from a trial's data seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(DatasetSettings):
    """The corpora of `data_dir/text`, whole documents held out for validation.

    Args:
        corpora: Names of corpora, such as "novels" for `novels.train.xz` and `novels.valid.xz`; all by default.
        sequence_length: Bytes of a sequence; None for as many as the model takes.
        validation_bytes: How much of the held-out text is judged at most, in sequences taken evenly from all of it;
            None for all of it.
    """

    corpora: list[str] = field(default_factory=list)
    sequence_length: int | None = None
    validation_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("sequence_length", "validation_bytes"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))

    def parts(self, seed: int, place: DataPlace) -> DataParts[Documents]:
        """Read the files; `seed` decides on the order of the training documents, and so on where they are cut."""
        folder = find_folder(place.folder)
        names = self.corpora or corpus_names(folder)
        train = read_documents(folder, names, "train")

        def read_test() -> Documents:
            held_out = read_documents(folder, names, "valid")
            require_apart(train, held_out)
            return held_out

        return DataParts(train, read_test, partial(self._split, seed=seed, place=place))

    def _split(self, train: Documents, validation: Documents, *, seed: int, place: DataPlace) -> DataSplit:
        length = self._length(place)
        generator = torch.Generator().manual_seed(mixed_seed(seed, ORDER))
        shuffled = train.select(torch.randperm(len(train), generator=generator))
        training = Sequences(_cut(shuffled.joined(), length, "training"), place)
        held_out = Sequences(_cut(validation.joined(), length, "validation"), place)
        if self.validation_bytes is not None:
            held_out = held_out.evenly(self.validation_bytes // length)
        at_once = ON_A_CPU if place.device.type == "cpu" else EVALUATED_AT_ONCE
        evaluated = held_out.loader(max(1, at_once // length), seed=0)
        return DataSplit(
            loader=training.loader,
            in_parts=training.in_parts,
            validation=FixedOrder(evaluated),
            num_classes=NUM_BYTES,
        )

    def _length(self, place: DataPlace) -> int:
        most = place.sequence_length
        if most is None:
            raise ArgumentError("text needs a model that takes sequences, such as gpt or gpt-tiny")
        if self.sequence_length is not None and self.sequence_length > most:
            raise ArgumentError(
                f"sequences of sequence_length={self.sequence_length} bytes are longer than the {most} that the model "
                f"takes: shorten them, or give the model that sequence_length too"
            )
        return self.sequence_length or most


def _cut(text: Bytes, length: int, what: str) -> Tensor:
    """Return sequences of one byte more than `length`, each beginning with the last byte of the one before.

    So each byte is predicted once, the first one from a zero byte as if a document had ended. What is left over at the
    end, less than a sequence, is left out.
    """
    if len(text) < length:
        raise DataError(
            f"sequences of {length} bytes are longer than all {what} text, which has {len(text)} bytes: give more "
            f"text, or a model or sequence_length for shorter ones"
        )
    return torch.from_numpy(np.concatenate([[np.uint8(END)], text])).unfold(0, length + 1, length)


class Sequences:
    """Sequences of bytes on the device."""

    def __init__(self, rows: Tensor, place: DataPlace) -> None:
        self._place = place
        self._rows = rows.to(place.device)
        self._numbers = Numbers(len(rows), place.device)

    def __len__(self) -> int:
        return len(self._rows)

    def evenly(self, count: int) -> "Sequences":
        """Return `count` of them at equal distances, at least one; all where there are no more."""
        if count >= len(self):
            return self
        places = torch.linspace(0, len(self) - 1, max(1, count), dtype=torch.float64).round().long()
        return Sequences(self._rows[places.to(self._place.device)], self._place)

    def loader(self, batch_size: int, *, seed: int) -> AdaptiveLoader:
        """Return a loader of (inputs, targets): at each position a byte and the one after it, as int64."""
        return AdaptiveLoader(self._numbers, batch_size, seed=seed, transform=self._fetched)

    @property
    def in_parts(self) -> InParts:
        """The same batches from a loader whose epochs are what a sampler draws."""
        return InParts(self._numbers, self._fetched)

    def _fetched(self, batch: Any) -> tuple[Tensor, Tensor]:
        (index,) = batch
        rows = self._rows[index].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
