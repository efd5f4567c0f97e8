"""Checkpoints that are folders: put together again, complete or not there, and harmless whatever they hold."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem

from divebatch.errors import CheckpointError
from divebatch.lab.training import load_checkpoint, save_checkpoint, sharded_checkpoint
from divebatch.lab.training.checkpoint import previous
from divebatch.lab.training.checkpoint_store import open_newest
from divebatch.lab.training.manifest import MAGIC, MANIFEST
from divebatch.lab.training.sharded_checkpoint import GAP, save_sharded
from divebatch.ranks import Ranks
from reference.newest_checkpoint import load_newest

CPU = torch.device("cpu")
SENTINEL = "harm-was-done"


def state(number: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"a.weight": torch.arange(6.0).view(2, 3) + number, "a.steps": torch.tensor(3)},
        "optimizer": {
            "state": {0: {"momentum_buffer": torch.full((2, 3), float(number))}},
            "param_groups": [{"lr": 0.1}],
        },
        "control": {"epoch": int(number), "history": {"losses": (1.0, None)}, "none": torch.empty(0)},
        "random": torch.arange(4, dtype=torch.uint8),
    }


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    found = tmp_path / "seed-0.ckpt"
    save_sharded(found, state(), Ranks.alone())
    return found


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and all(map(same, one, two))
    return bool(one == two)


def test_what_was_saved_is_loaded(path):
    assert same(load_checkpoint(path, device=CPU), state())
    assert not list(path.parent.glob("*.tmp"))


def test_the_one_before_is_kept_also_between_files_and_folders(path):
    save_sharded(path, state(2), Ranks.alone())
    assert same(load_checkpoint(previous(path), device=CPU), state(1))
    save_checkpoint(path, state(3))
    assert same(load_checkpoint(path, device=CPU), state(3))
    assert same(load_checkpoint(previous(path), device=CPU), state(2))
    save_sharded(path, state(4), Ranks.alone())
    assert path.is_dir()
    assert same(load_checkpoint(previous(path), device=CPU), state(3))
    save_sharded(path, state(5), Ranks.alone())
    save_sharded(path, state(6), Ranks.alone())
    assert same(load_newest(path), state(6))


def files_of(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut_short, Path.unlink], ids=["flipped bit", "cut short", "gone"])
@pytest.mark.parametrize("which", range(3))
def test_any_damage_to_any_file_is_noticed_and_the_one_before_taken(path, caplog, damage, which):
    save_sharded(path, state(2), Ranks.alone())
    damage(path / files_of(path)[which])
    with pytest.raises(CheckpointError, match=str(path)):
        load_checkpoint(path, device=CPU)
    found = open_newest(path, device=CPU, ranks=Ranks.alone())
    assert found is not None
    assert found.path == previous(path)
    assert found.rest["control"]["epoch"] == 1
    assert "going on from the one before it" in caplog.text


def test_a_crash_at_any_moment_leaves_a_complete_one(path, monkeypatch):
    """Every step that changes the disk fails once, as a full disk or a power cut would have it."""
    steps = [
        (filesystem.FileSystemWriter, "write_data"),
        (sharded_checkpoint, "write_manifest"),
        (sharded_checkpoint, "sync_folder"),
        (torch, "save"),
    ]
    for place, name in steps:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            with pytest.raises(CheckpointError, match="No space left"):
                save_sharded(path, state(2), Ranks.alone())
        assert same(load_checkpoint(path, device=CPU), state(1))
        assert not list(path.parent.glob("*.tmp"))


def fail(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_killed_between_the_two_renames_the_one_before_is_found(path, caplog):
    path.rename(previous(path))
    shutil.copytree(previous(path), path.with_name(path.name + ".tmp"))
    assert same(load_newest(path), state())
    assert "is gone" in caplog.text
    save_sharded(path, state(2), Ranks.alone())
    assert same(load_newest(path), state(2))


def put(path: Path, kind: str) -> None:
    """What a killed run, or somebody else, may have left at a place."""
    {
        "file": lambda: path.write_bytes(b"half"),
        "folder": lambda: (path.mkdir(), (path / "__0_0.distcp").write_bytes(b"half")),
        "link to a file": lambda: path.symlink_to(path.parent / "others"),
        "link to a folder": lambda: path.symlink_to(path.parent),
        "pipe": lambda: os.mkfifo(path),
    }[kind]()


def save_alone(path: Path, values: dict[str, Any], _: Ranks) -> None:
    save_checkpoint(path, values)


@pytest.mark.parametrize("save", [save_alone, save_sharded])
@pytest.mark.parametrize("kind", ["file", "folder", "link to a file", "link to a folder", "pipe"])
def test_whatever_lies_under_the_temporary_name_gives_way(tmp_path, save, kind):
    path, others = tmp_path / "seed-0.ckpt", tmp_path / "others"
    others.write_text("not ours")
    for number in (1, 2, 3):
        put(path.with_name("seed-0.ckpt.tmp"), kind)
        save(path, state(number), Ranks.alone())
        assert same(load_newest(path), state(number))
    assert others.read_text() == "not ours"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["others", "seed-0.ckpt", "seed-0.ckpt.previous"]


# Made on purpose, with checksums that fit


class Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


HARM = Call(os.system, f"touch {SENTINEL}")


def read_json(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes()[len(MAGIC) :].partition(b"\n")[2])
    return found


def write_json(folder: Path, values: Any) -> None:
    """With all checksums made to fit."""
    for name in values.get("files", {}) if isinstance(values, dict) else ():
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            values["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(values).encode()
    (folder / MANIFEST).write_bytes(MAGIC + hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def pickled_rest(folder: Path) -> None:
    torch.save({"model": HARM}, folder / "rest")


def pickled_pieces(folder: Path) -> None:
    """Every piece a pickle, as long as the one it replaces."""
    piece = folder / "__0_0.distcp"
    harm = pickle.dumps(HARM)
    values = read_json(folder)
    content = bytearray(piece.read_bytes())
    for tensor in values["tensors"].values():
        for each in tensor["pieces"]:
            content[each["start"] : each["start"] + len(harm)] = harm
    piece.write_bytes(content)


def metadata_of_torch(folder: Path) -> None:
    """Beside the manifest, what torch would load by itself."""
    (folder / ".metadata").write_bytes(pickle.dumps(HARM))
    torch.save(HARM, folder / "__0_0.distcp")


def change(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        values = read_json(folder)
        write_json(folder, edit(values) or values)

    return changed


def weight(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = values["tensors"]["model/a.weight"]
    return found


def piece(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = weight(values)["pieces"][0]
    return found


CRIMES: dict[str, Callable[[Path], None]] = {
    "a pickle in the rest": pickled_rest,
    "pickles for pieces": pickled_pieces,
    "torch's own metadata": metadata_of_torch,
    "a list": change(lambda values: [1]),
    "no files": change(lambda values: {"tensors": values["tensors"]}),
    "a file elsewhere": change(lambda values: values["files"].update({"../elsewhere": {"bytes": 1, "sha256": ""}})),
    "a piece elsewhere": change(lambda values: piece(values).update(file="/etc/passwd")),
    "a piece beyond the end": change(lambda values: piece(values).update(start=10**9)),
    "a negative start": change(lambda values: piece(values).update(start=-1)),
    "a tensor of an exabyte": change(lambda values: weight(values).update(size=[2**30, 2**30])),
    "a piece of an exabyte": change(lambda values: piece(values).update(sizes=[2**30, 2**30])),
    "a fractional size": change(lambda values: weight(values).update(size=[2.0, 3.0])),
    "an unknown type": change(lambda values: weight(values).update(dtype="load")),
    "a piece twice": change(lambda values: weight(values)["pieces"].append(piece(values))),
    "a piece less": change(lambda values: weight(values).update(pieces=[])),
    "a piece out of place": change(lambda values: piece(values).update(offsets=[1, 0])),
    "a tensor less": change(lambda values: values["tensors"].pop("model/a.weight") and None),
    "a tensor more": change(lambda values: values["tensors"].update({"model/b": weight(values)})),
}


@pytest.mark.parametrize("crime", CRIMES, ids=str)
def test_a_folder_made_to_do_harm_is_refused_and_nothing_in_it_runs(path, crime):
    CRIMES[crime](path)
    write_json(path, read_json(path)) if isinstance(read_json(path), dict) else None
    with pytest.raises(CheckpointError, match=str(path)):
        load_checkpoint(path, device=CPU)
    assert not Path(SENTINEL).exists()


def test_the_harm_is_real(path):
    pickle.loads(pickle.dumps(HARM))
    assert Path(SENTINEL).exists()


def test_a_gap_that_nothing_fills_is_refused(path):
    torch.save({"model": {"x": GAP}}, path / "rest")
    write_json(path, read_json(path))
    with pytest.raises(CheckpointError, match="its tensors are not those its state names"):
        load_checkpoint(path, device=CPU)
