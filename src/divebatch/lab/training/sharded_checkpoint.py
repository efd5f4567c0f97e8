"""Checkpoints of several ranks: a folder to which every rank writes its share of the tensors.

torch.distributed.checkpoint cuts tensors into pieces and puts them together again for any number of ranks. What it
notes about them it would write as a pickle, and execute on reading; `manifest` is JSON in its place and also holds
the SHA-256 of every file. `rest` is all that is no tensor of model, optimizer or controller, as rank 0 had it.
"""

import hashlib
import io
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import distribute_tensor, zeros

from divebatch.errors import CheckpointError
from divebatch.lab.training.checkpoint import forget, read_plain, replace_checkpoint, sync_folder
from divebatch.lab.training.checkpoint_store import Layout, Place
from divebatch.lab.training.launch import first_does
from divebatch.lab.training.manifest import DTYPES, Manifest, Stored, read_manifest, write_manifest
from divebatch.ranks import Ranks

SPREAD = ("model", "optimizer", "control")
"""Whose tensors are spread over the ranks' files: those of the model's size, equal on all ranks or sharded."""
REST = "rest"


def save_sharded(path: Path, state: dict[str, Any], ranks: Ranks) -> None:
    """All ranks write beside, sync and hash; then rank 0 renames. A failure anywhere is an error everywhere."""
    scratch = path.with_name(path.name + ".tmp")
    tensors: dict[str, Tensor] = {}
    rest = _taken_out(state, (), tensors)
    try:
        first_does(ranks, lambda: _fresh_folder(scratch))
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _quiet():
            metadata = save(tensors, storage_writer=_Writer(scratch), planner=planner)
        files = {name: stored for each in ranks.gather(_own_files(scratch, ranks)) for name, stored in each.items()}
        first_does(ranks, lambda: _complete(path, scratch, Manifest.of(metadata, files), rest))
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot write checkpoint '{path}': {_reason(error)}") from error
    finally:
        if ranks.is_first:
            shutil.rmtree(scratch, ignore_errors=True)


def load_whole(folder: Path, *, device: torch.device) -> dict[str, Any]:
    """In one process: every file checked, every tensor whole."""
    require_intact(folder, Ranks.alone())
    return load_sharded(folder, device=device)


def require_intact(folder: Path, ranks: Ranks) -> None:
    """Compare this rank's share of the files with their checksums."""
    files = read_manifest(folder).files
    # Each rank hashes its part of the files: all of them on each would read the checkpoint once for every rank.
    for name in sorted(files)[ranks.rank :: ranks.size]:
        _require_whole(folder / name, files[name])


def load_sharded(folder: Path, *, device: torch.device, layout: Layout | None = None) -> dict[str, Any]:
    """The state of a checkpoint whose files are intact. A tensor with a layout is read by each rank in part."""
    manifest, rest = read_manifest(folder), read_rest(folder, device)
    places: dict[str, Place] = {}
    _find_gaps(rest, (), places)
    if places.keys() != manifest.tensors.keys():
        raise CheckpointError(f"cannot read checkpoint '{folder}': its tensors are not those its state names")
    tensors = {name: _room(manifest, name, place, device, layout) for name, place in places.items()}
    try:
        with _quiet():
            load(tensors, storage_reader=_Reader(folder, manifest), planner=DefaultLoadPlanner(False, False))
    except (Exception, CheckpointException) as error:  # a file made on purpose may fail in any way
        raise CheckpointError(f"cannot read checkpoint '{folder}': {_reason(error)}") from error
    state: dict[str, Any] = _put_back(rest, (), tensors)
    return state


def cut_whole(state: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """A state of whole tensors with those sharded that `layout` wants so."""
    cut: dict[str, Any] = _sharded(state, (), layout)
    return cut


def read_rest(folder: Path, device: torch.device) -> dict[str, Any]:
    """The state with a gap in the place of each spread tensor."""
    try:
        content = (folder / REST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint '{folder}': {error.strerror or error}") from error
    return read_plain(folder / REST, io.BytesIO(content), device)


class _Writer(FileSystemWriter):
    """Leaves the metadata to the manifest."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Where which piece was put."""
        # Torch would write this as a pickle, which reading executes.
        metadata.storage_data = {result.index: result.storage_data for each in results for result in each}


class _Reader(FileSystemReader):
    """Takes the metadata from the manifest; every piece is read as a tensor or not at all."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._manifest = manifest

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read the metadata, which is no pickle here."""
        return self._manifest.metadata()


# The tree of a state and its tensors

GAP = "divebatch.gap"
"""Stands in the place of a tensor that is in other files."""


def _name(place: Place) -> str:
    return "/".join(map(str, place))


def _taken_out(tree: Any, place: Place, tensors: dict[str, Tensor]) -> Any:
    """The tree with gaps for its spread tensors, which go into `tensors`."""
    if isinstance(tree, Tensor) and place[0] in SPREAD:
        tensors[_name(place)] = tree.detach()
        return GAP
    return _mapped(tree, place, lambda branch, where: _taken_out(branch, where, tensors))


def _put_back(tree: Any, place: Place, tensors: dict[str, Tensor]) -> Any:
    if tree == GAP and isinstance(tree, str):
        return tensors[_name(place)]
    return _mapped(tree, place, lambda branch, where: _put_back(branch, where, tensors))


def _sharded(tree: Any, place: Place, layout: Layout) -> Any:
    """The tree with its whole tensors cut to this rank's parts."""
    like = layout(place) if isinstance(tree, Tensor) and place[0] in SPREAD else None
    if like is not None and like.shape == tree.shape:
        return distribute_tensor(tree, like.device_mesh, like.placements, src_data_rank=None)
    return _mapped(tree, place, lambda branch, where: _sharded(branch, where, layout))


def _find_gaps(tree: Any, place: Place, places: dict[str, Place]) -> None:
    if isinstance(tree, str) and tree == GAP:
        places[_name(place)] = place
    _mapped(tree, place, lambda branch, where: _find_gaps(branch, where, places))


def _mapped(tree: Any, place: Place, change: Callable[[Any, Place], Any]) -> Any:
    """The same container with each branch changed; what is no container stays."""
    if isinstance(tree, dict):
        return {key: change(branch, (*place, key)) for key, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(change(branch, (*place, number)) for number, branch in enumerate(tree))
    return tree


def _room(manifest: Manifest, name: str, place: Place, device: torch.device, layout: Layout | None) -> Tensor:
    """An empty tensor for what is to be read."""
    shape = manifest.tensors[name]
    like = layout(place) if layout is not None else None
    if like is None or list(like.shape) != shape.size:
        return torch.zeros(shape.size, dtype=DTYPES[shape.dtype], device=device)
    return zeros(shape.size, dtype=DTYPES[shape.dtype], device_mesh=like.device_mesh, placements=like.placements)


# Files


def _fresh_folder(scratch: Path) -> None:
    forget(scratch)  # what a run was killed over: a folder, or a file of one process
    scratch.mkdir()


def _own_files(scratch: Path, ranks: Ranks) -> dict[str, Stored]:
    return {path.name: _stored(path) for path in scratch.glob(f"__{ranks.rank}_*")}


def _complete(path: Path, scratch: Path, manifest: Manifest, rest: dict[str, Any]) -> None:
    """The last files, then the new name."""
    with (scratch / REST).open("wb") as file:
        torch.save(rest, file)
        file.flush()
        os.fsync(file.fileno())
    write_manifest(scratch, Manifest({**manifest.files, REST: _stored(scratch / REST)}, manifest.tensors))
    # All files are on disk before the name changes, so the new name never stands for half a checkpoint.
    sync_folder(scratch)
    replace_checkpoint(scratch, path)
    sync_folder(path.parent)


def _stored(path: Path) -> Stored:
    with path.open("rb") as file:
        return Stored(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _require_whole(path: Path, stored: Stored) -> None:
    try:
        is_whole = path.is_file() and path.stat().st_size == stored.bytes and _stored(path) == stored
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint file '{path}': {error.strerror or error}") from error
    if not is_whole:
        raise CheckpointError(f"checkpoint file '{path}' is damaged, cut short or gone: its checksum does not fit")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks on a missing process group, and its tracebacks in the log: errors are raised anyway."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    """One line; of torch's collection from all ranks the first."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {_reason(first)}"
    what = (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return what.partition("\n")[0]
