"""What a sharded checkpoint consists of: files with checksums, tensors with their pieces. JSON, and read warily."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from divebatch.errors import CheckpointError

MANIFEST = "manifest"
MAGIC = b"divebatch sharded checkpoint 1\n"
DTYPES = {
    name: dtype
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    if isinstance(dtype := getattr(torch, name), torch.dtype)
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A file of the checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where in which file it is."""

    offsets: list[int]
    sizes: list[int]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor and all its pieces."""

    dtype: str
    size: list[int]
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of a checkpoint's files and tensors, by name."""

    files: Mapping[str, Stored]
    tensors: Mapping[str, Shape]

    @classmethod
    def of(cls, metadata: Metadata, files: Mapping[str, Stored]) -> "Manifest":
        """From what torch noted while it wrote."""
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            pieces = [
                _piece(chunk, metadata.storage_data[MetadataIndex(name, chunk.offsets)]) for chunk in entry.chunks
            ]
            tensors[name] = Shape(str(entry.properties.dtype).removeprefix("torch."), list(entry.size), pieces)
        return cls(files, tensors)

    def metadata(self) -> Metadata:
        """As torch wants it to read the tensors."""
        described: dict[str, Any] = {}
        places = {}
        for name, shape in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in shape.pieces]
            properties = TensorProperties(dtype=DTYPES[shape.dtype])
            described[name] = TensorStorageMetadata(properties, torch.Size(shape.size), chunks)
            for number, piece in enumerate(shape.pieces):
                index = MetadataIndex(name, piece.offsets, number)
                places[index] = _StorageInfo(piece.file, piece.start, piece.length)
        return Metadata(described, storage_data=places)


def _piece(chunk: ChunkStorageMetadata, place: _StorageInfo) -> Piece:
    return Piece(list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """With its own checksum in front, synced."""
    # JSON and not torch's own pickle: whoever forges a file can forge its checksum too.
    content = json.dumps(asdict(manifest)).encode()
    with (folder / MANIFEST).open("wb") as file:
        file.write(MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Whatever it holds, nothing else is opened, executed or given memory than what the folder's files can fill."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint '{folder}': {error.strerror or error}") from error
    if not content.startswith(MAGIC):
        raise CheckpointError(f"'{folder}' is not a sharded divebatch checkpoint, or its manifest is damaged")
    digest, _, text = content[len(MAGIC) :].partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise CheckpointError(f"checkpoint '{folder}' is damaged: the checksum of its manifest does not fit")
    try:
        return _checked(json.loads(text))
    except Exception as error:  # a file made on purpose may fail in any way
        raise CheckpointError(f"cannot read the manifest of '{folder}': {type(error).__name__}: {error}") from error


def _checked(values: Any) -> Manifest:
    files = {str(name): Stored(_count(each["bytes"]), str(each["sha256"])) for name, each in values["files"].items()}
    for name in files:
        # A forged name must not lead out of the folder.
        if Path(name).name != name or name in ("..", MANIFEST):
            raise ValueError(f"{name!r} is no file of a checkpoint")
    return Manifest(files, {str(name): _shape(each, files) for name, each in values["tensors"].items()})


def _shape(values: Any, files: Mapping[str, Stored]) -> Shape:
    pieces = [
        Piece(_counts(p["offsets"]), _counts(p["sizes"]), str(p["file"]), _count(p["start"]), _count(p["length"]))
        for p in values["pieces"]
    ]
    shape = Shape(str(values["dtype"]), _counts(values["size"]), pieces)
    item_bytes = DTYPES[shape.dtype].itemsize
    for piece in pieces:
        if piece.start + piece.length > files[piece.file].bytes or math.prod(piece.sizes) * item_bytes > piece.length:
            raise ValueError(f"a piece of {piece.sizes} does not fit into '{piece.file}'")
        bounds = zip(piece.offsets, piece.sizes, shape.size, strict=True)
        if any(offset + size > whole for offset, size, whole in bounds):
            raise ValueError(f"a piece of {piece.sizes} at {piece.offsets} does not fit into {shape.size}")
    # A forged size must not make us allocate more than the files can fill.
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape.size):
        raise ValueError(f"the pieces do not add up to {shape.size}")
    return shape


def _counts(values: Any) -> list[int]:
    return [_count(value) for value in values]


def _count(value: Any) -> int:
    # Not isinstance: True and False are integers to Python.
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
