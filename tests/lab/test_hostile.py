"""Files made to do harm: none runs code, and each is refused with an error that names it."""

import builtins
import functools
import importlib
import io
import os
import pickle
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from divebatch.errors import CheckpointError
from divebatch.lab import execute, load_checkpoint, save_checkpoint

CPU = torch.device("cpu")
SENTINEL = "harm-was-done"


# Checkpoints that would run code


class Call:
    """Unpickled by an ordinary unpickler, it calls."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


TOUCH = f"touch {SENTINEL}"
WRITE = f"open({SENTINEL!r}, 'w').close()"
CALLS = {
    "os.system": Call(os.system, TOUCH),
    "eval": Call(eval, WRITE),
    "exec": Call(builtins.exec, WRITE),
    "open": Call(open, SENTINEL, "w"),
    "subprocess": Call(subprocess.check_call, ["touch", SENTINEL]),
    "partial": Call(functools.partial(os.system, TOUCH)),
    "getattr": Call(getattr, Call(importlib.import_module, "os"), "system"),
    "write_text": Call(Path.write_text, Path(SENTINEL), "x"),
    "torch.load": Call(torch.load, "other.ckpt", CPU, None),
    "torch.hub": Call(torch.hub.load_state_dict_from_url, f"file:{SENTINEL}"),
}
IN_TEXT = {
    "posix.system": f"cposix\nsystem\n(S'{TOUCH}'\ntR.".encode(),
    "builtins.eval": f'cbuiltins\neval\n(S"{WRITE}"\ntR.'.encode(),
    "nt.system": f"cnt\nsystem\n(S'{TOUCH}'\ntR.".encode(),
    "an instance": f"(S'{TOUCH}'\nios\nsystem\n.".encode(),
    "a nested name": b"\x80\x04\x8c\x05torch\x8c\x11serialization.os.\x93.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"Pevil\n.",
    "no end": b"\x80\x02]" + b"(" * 1000,
    "a string of 2 GiB": b"\x80\x02T\xff\xff\xff\x7f.",
}


def as_torch_archive(pickled: bytes, **entries: bytes) -> bytes:
    """What torch.save writes, around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def archives() -> dict[str, bytes]:
    good = pickle.dumps({"model": {}}, protocol=2)
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name in ("storages", "tensors", "pickle", f"../{SENTINEL}"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    plain = io.BytesIO()
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr(f"../{SENTINEL}", "x")
        archive.writestr(f"/tmp/{SENTINEL}", "x")
    return {
        "a zip that climbs out of its folder": plain.getvalue(),
        "a script": as_torch_archive(good, **{"archive/constants.pkl": good, "archive/code/a.py": WRITE.encode()}),
        "an archive without a pickle": as_torch_archive(good).replace(b"data.pkl", b"evil.pkl"),
        "an archive with a hostile pickle": as_torch_archive(IN_TEXT["posix.system"]),
        "an archive cut short": as_torch_archive(good)[:-10],
        "an old tar": tar.getvalue(),
        "nothing": b"",
        "noise": bytes(range(256)) * 8,
        "a picture": b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
    }


def deep() -> bytes:
    return b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."


PAYLOADS = {
    **{f"pickle {name}": pickle.dumps(call, protocol=2) for name, call in CALLS.items()},
    **{f"archive {name}": as_torch_archive(pickle.dumps({"model": call}, 2)) for name, call in CALLS.items()},
    **IN_TEXT,
    **archives(),
    "deep": deep(),
    "deep in an archive": as_torch_archive(deep()),
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_checkpoint_runs_no_code(tmp_path, monkeypatch, payload):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "seed-0.ckpt"
    path.write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"seed-0\.ckpt'") as caught:
        load_checkpoint(path, device=CPU)
    assert "add_safe_globals" not in str(caught.value)  # torch tells how to run it all the same
    assert "False" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["seed-0.ckpt"]
    assert not (tmp_path.parent / SENTINEL).exists()


@pytest.mark.parametrize("name", ["os.system", "eval", "exec", "subprocess", "partial", "write_text"])
def test_the_same_would_do_harm_elsewhere(tmp_path, monkeypatch, name):
    """Or the test above shows nothing."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(CALLS[name]))
    assert (tmp_path / SENTINEL).exists()


# States of plain data that fit nothing


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """`state` with another value, or none, at one place."""
    if not path:
        return value
    key, *rest = path
    others = {name: each for name, each in state.items() if name != key}
    return others if value is None and not rest else {**others, key: changed(state.get(key), tuple(rest), value)}


STATES = {
    "empty": ((), {}),
    "no control": (("control",), None),
    "loader of other data": (("control", "loader", "dataset_size"), 3),
    "model of another shape": (("model", "0.weight"), torch.zeros(2, 2)),
    "model with one more": (("model", "evil"), torch.zeros(2)),
    "two parameter groups": (("optimizer", "param_groups"), [{}, {}]),
    "no clock": (("clock",), None),
    "random state too short": (("random",), torch.zeros(3, dtype=torch.uint8)),
}


@pytest.mark.parametrize(("path", "value"), STATES.values(), ids=STATES)
def test_a_state_that_does_not_fit_is_refused_by_name(begun, path, value):
    state = load_checkpoint(begun.checkpoint_path, device=CPU)
    save_checkpoint(begun.checkpoint_path, changed(state, path, value))
    with pytest.raises(CheckpointError, match=r"seed-0\.ckpt'"):
        execute(begun, resume=True)
